// A worker's protocol. It joins the learner and comes back to it, receives publications from its parents, and forwards
// every proven chunk to its children at once. The application gets complete publications in an order that it can
// install, and never an older version. The components (LearnerLink, Parents, Children, ...) hold the state; this class
// passes each event to them in a fixed order. No I/O and no clock.
#pragma once
#include "overlay/member/children.hpp"
#include "overlay/member/parts_feed.hpp"

namespace echoline::overlay {

class MemberCore final : public Core {
 public:
  explicit MemberCore(MemberConfig config);

  // Restores a frame from the disk's spool and verifies it again. Call it before start(), for every frame of a spool in
  // order. Returns false if the frame is not needed.
  bool recover(Frame frame, TimePoint now);
  void start(TimePoint now);

  // From the application. installed() and install_failed() answer act::DeliverPublication, in order. After
  // install_failed() the application drops what it was already given, without a report, until a full snapshot is
  // delivered.
  void installed(Version version, const Digest& policy_digest, TimePoint now);
  void install_failed(Version version, const std::string& why, TimePoint now);
  // The application has read this many bytes of act::DeliverPart, so as many may be delivered next (back-pressure).
  void on_parts_consumed(std::uint64_t bytes) { parts_feed_.on_consumed(bytes, install_state_, store_, actions_); }
  // At most kMessageBytesMax (checked); dropped while the learner is away.
  void send_message(Slice bytes, TimePoint now) { learner_.send_application(std::move(bytes), now); }
  // Opaque bytes of the application, sent with every heartbeat from now on.
  void set_heartbeat_payload(std::string payload) { heartbeat_payload_ = std::move(payload); }
  // Hands this worker's children over to other parents, then leaves; after Membership::kDrainMax at the latest.
  void drain(TimePoint now);
  // A clean exit: sends a goodbye to the learner and closes all connections.
  void leave(const std::string& reason, TimePoint now);
  WorkerStats stats() const;
  void check() const;  // aborts if an invariant is broken

  void on_accepted(ConnId conn, const PeerInfo& peer, TimePoint now) override;
  void on_connected(ConnId conn, TimePoint now) override;
  void on_closed(ConnId conn, const std::string& reason, TimePoint now) override;
  void on_frame(ConnId conn, Frame frame, TimePoint now) override;
  void on_sent(ConnId conn, std::size_t bytes, TimePoint now) override { uplink_.on_sent(conn, bytes, now); }
  void on_saved(const Status& status, TimePoint now) override;
  void on_spooled(const PublicationId& id, std::uint32_t chunk, const Status& status, TimePoint now) override;
  void on_chunk_read(const PublicationId& id, std::uint32_t chunk, Result<Slice> data, TimePoint now) override;
  void on_delivery_failed(Version version, const std::string& why, TimePoint now) override {
    install_failed(version, why, now);
  }
  void on_large_packets_dropped(WorkerId, const std::string& what, TimePoint now) override {
    learner_.report_trouble(what, now);
  }
  void on_timer(TimePoint now) override;
  TimePoint next_deadline() const override;
  double run_unix_s(TimePoint now) const override { return static_cast<double>(identity_.learner_unix_ms(now)) / 1e3; }

 private:
  struct Counters {
    std::uint64_t chunk_bytes_in = 0, chunks_duplicate = 0, chunks_corrupt = 0;
  };

  WorkerId self() const { return config_.state.worker; }
  bool is_idle() const { return learner_.membership().state() == Membership::State::kIdle; }
  bool has_ended() const { return learner_.membership().has_ended(); }
  void end(const std::string& reason, bool in_order = false);
  void postpone_after_pause(TimePoint now);
  void on_learner_frame(const Frame& frame, TimePoint now);
  void on_learner_message(const ControlMessage& message, TimePoint now);
  void on_welcome(const Welcome& welcome, TimePoint now);
  void on_beacon(const Signed& as_signed, TimePoint now, bool first_hand);
  void on_stall(TimePoint now);
  void send_heartbeat(TimePoint now);

  // Publications (member_publications.cpp). `upstream`: the edge that a frame came over; null: this worker's disk.
  void on_upstream_frame(Upstream& upstream, ConnId conn, const Frame& frame, TimePoint now);
  void on_announcement(Upstream* upstream, const SignedAnnouncement& as_signed, TimePoint now);
  void on_manifest(Upstream* upstream, const SignedManifest& as_signed, TimePoint now);
  void on_chunk(Upstream* upstream, ConnId conn, const Frame& frame, TimePoint now);
  // A proof failed or a signature is not the learner's.
  void on_forgery(Upstream* upstream, const PublicationId& id, std::uint32_t index, const std::string& what,
                  TimePoint now);
  void begin_epoch(std::uint64_t epoch, TimePoint now);
  void deliver(TimePoint now);
  void save_next_floor(const PublicationId& id);
  void activate_staged(TimePoint now);

  const MemberConfig config_;
  InstallState install_state_;
  WorkerFile file_;
  Identity identity_;
  LearnerLink learner_;
  PublicationStore store_;
  StallWatch stall_watch_;
  Parents parents_;
  Children children_;
  PartsFeed parts_feed_;
  std::optional<Signed> beacon_;  // the learner's newest signed heartbeat, forwarded to children
  std::string heartbeat_payload_;
  Counters counters_;
};

}  // namespace echoline::overlay

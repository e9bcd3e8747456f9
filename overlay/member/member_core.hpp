// A worker's protocol: joins the learner and comes back to it, receives publications from its parents, forwards every
// proven chunk to its children at once, and hands complete publications to the application in an order it can install,
// never going back. Pure.
#pragma once
#include <memory>
#include <set>

#include "chains/stripes.hpp"
#include "overlay/budget.hpp"
#include "overlay/edge_sender.hpp"
#include "overlay/member/askers.hpp"
#include "overlay/member/learner_pulse.hpp"
#include "overlay/member/membership.hpp"
#include "overlay/member/parts_feed.hpp"
#include "overlay/member/stall_watch.hpp"
#include "overlay/member/standing.hpp"
#include "overlay/member/upstream.hpp"
#include "overlay/member/worker_file.hpp"
#include "overlay/settings.hpp"
#include "overlay/strangers.hpp"
#include "overlay/wire/grant.hpp"

namespace echoline::overlay {

struct MemberConfig {
  CoreOptions core;
  Endpoint learner;
  Endpoint data;  // where other workers reach this one
  std::string name;
  trust::SigningKey key;
  WorkerState state;  // identity and floor, from EnrolCore or the state file
  std::shared_ptr<const Checker> checker;
  StoreLimits store;
  bool durable = false;  // act::SaveState is carried out; otherwise nothing survives a restart
  Duration join_timeout = kJoinTimeout;
  std::optional<Duration> away_max;  // without the learner, before the worker gives up; absent: what the learner says
  Bytes parts_unread_max{0};         // of act::DeliverPart, which come while a publication arrives; 0: none do
  std::string place{};               // where it stands, for the learner's regions; "": not said
};

class MemberCore final : public Core {
 public:
  static constexpr std::size_t kUnsentBytesMax = 4 * kMessageBytesMax;  // messages the learner has not taken yet
  static constexpr int kCorruptChunksMax = 2;                           // from one parent, before the edge is given up
  static constexpr Duration kTroublePause = std::chrono::minutes(1);    // before the learner is told the same again
  static constexpr Duration kClockTold = std::chrono::minutes(1);       // by which a clock is wrong, before it is said

  explicit MemberCore(MemberConfig config);

  // What the disk kept of publications, before start(): every frame of a spool in order, proven again here. False when
  // it is of no use.
  bool recover(Frame frame, TimePoint now);
  void start(TimePoint now);

  // From the application. installed() and install_failed() answer act::Deliver, in order. After install_failed() the
  // application drops what it was already given, without a report, until a full snapshot is delivered.
  void installed(Version version, const Digest& policy_digest, TimePoint now);
  void install_failed(Version version, const std::string& why, TimePoint now);
  void parts_read(std::uint64_t bytes);  // of act::DeliverPart: as many may follow
  // At most kMessageBytesMax (checked); dropped while the learner is away.
  void send_message(Slice bytes, TimePoint now);
  void set_heartbeat(std::string application) { application_ = std::move(application); }
  // Hands its children over and leaves when they are gone, after Membership::kDrainMax at the latest.
  void drain(TimePoint now);
  void leave(const std::string& reason, TimePoint now);  // in order
  WorkerStats stats() const;
  void check() const;  // what holds between two events

  void on_accepted(ConnId conn, const PeerInfo& peer, TimePoint now) override;
  void on_connected(ConnId conn, TimePoint now) override;
  void on_closed(ConnId conn, const std::string& reason, TimePoint now) override;
  void on_frame(ConnId conn, Frame frame, TimePoint now) override;
  void on_sent(ConnId conn, std::size_t bytes, TimePoint now) override;
  void on_saved(const Status& status, TimePoint now) override;
  void on_spooled(const PublicationId& id, std::uint32_t chunk, const Status& status, TimePoint now) override;
  void on_unspooled(const PublicationId& id, std::uint32_t chunk, Result<Slice> data, TimePoint now) override;
  void on_undelivered(Version version, const std::string& why, TimePoint now) override {
    install_failed(version, why, now);
  }
  void on_narrow_path(WorkerId, const std::string& what, TimePoint now) override { complain(what, now); }
  void on_timer(TimePoint now) override;
  TimePoint next_deadline() const override;
  double run_unix_s(TimePoint now) const override { return static_cast<double>(learner_unix_ms(now)) / 1e3; }

 private:
  // The learner (member_core.cpp).
  void dial_learner(TimePoint now);
  void on_return(const Frame& frame, TimePoint now);
  void use_certificate(std::vector<std::byte> certificate, TimePoint now);
  bool certificate_ended(TimePoint now) const;
  void on_control(const ControlMessage& message, TimePoint now);
  void on_welcome(const Welcome& welcome, TimePoint now);
  void on_assign(const Assign& assign, TimePoint now);
  void on_beacon(const Signed& as_signed, TimePoint now, bool first_hand = false);
  void on_renewed(const Renewed& renewed, TimePoint now);
  void renew_at_half_life(TimePoint now);
  void lost_learner(const std::string& reason, TimePoint now);
  void beat(TimePoint now);
  void tell_learner(const ControlMessage& message, TimePoint now);
  void gone(const std::string& reason, bool in_order = false);
  void excuse_pause(TimePoint now);
  void complain(const std::string& what, TimePoint now);
  void save();
  std::uint64_t learner_unix_ms(TimePoint now) const;

  // Edges (member_edges.cpp).
  void meet(ConnId conn, PeerInfo peer, TimePoint now);
  void on_stranger(ConnId conn, const Stranger& stranger, const Frame& frame, TimePoint now);
  void open_child(ConnId conn, WorkerId child, PeerHello hello, TimePoint now);
  void on_child(ConnId conn, const Frame& frame, TimePoint now);
  bool within_budget(WorkerId child, MessageBudget::Kind kind, std::size_t bytes, TimePoint now);
  void on_upstream(Upstream& up, ConnId conn, Frame frame, TimePoint now);
  void open_upstream(Upstream& up, TimePoint now);
  void add_streams(Upstream& up, std::uint32_t wanted, TimePoint now);
  bool has_room_for_streams() const;
  void upstream_opened(Upstream& up, Upstream::Stream& stream, TimePoint now);
  void upstream_failed(Upstream& up, EdgeTroubleKind kind, const std::string& reason, TimePoint now);
  void close_upstream(Upstream& up);
  Upstream* upstream_of(ConnId conn);
  void tell_have(Upstream& up, TimePoint now);
  std::optional<Version> position_for(const Upstream& up) const;
  Have have(const Upstream& up) const;
  bool behind(const Upstream& up) const;
  std::vector<Progress> progress() const;
  void drop_revoked();
  void drop_ungranted(TimePoint now);
  void on_stalled(TimePoint now);
  void need_help(Version target, TimePoint now, bool stalled = false);
  void end_help(TimePoint now);
  void watch_edges(TimePoint now);

  // Publications (member_publications.cpp).
  void begin_epoch(std::uint64_t epoch, TimePoint now);
  void on_announcement(Upstream* up, const SignedAnnouncement& as_signed, TimePoint now);
  void on_manifest(Upstream* up, const SignedManifest& as_signed, TimePoint now);
  void on_chunk(Upstream* up, ConnId conn, const Frame& frame, TimePoint now);
  void forged(Upstream* up, const PublicationId& id, std::uint32_t index, const std::string& what, TimePoint now);
  void store_changed(TimePoint now);
  void deliver(TimePoint now);
  void raise_floor(const PublicationId& id);
  void activate(TimePoint now);
  void hold_or_resume_reading();

  MemberConfig config_;
  WorkerId id_;
  Membership membership_;
  LearnerPulse pulse_;
  WorkerFile file_;
  StallWatch stall_;
  bool assigned_ = false;  // parents, since it last joined
  PublicationStore store_;
  EdgeSender edges_;
  MessageQueue messages_;
  MessageAssembler incoming_;
  Strangers strangers_;
  std::map<ConnId, DialChild> dialled_children_;
  std::map<WorkerId, Upstream> parents_;
  std::uint32_t stripes_ = 1;
  std::optional<Upstream> helper_;
  int helper_silences_ = 0;  // of the last helper
  WorkerSet revoked_;
  GrantBook grants_;  // that children have shown
  Askers askers_;

  TimePoint beat_at_ = kNever, renew_at_ = kNever;
  std::int64_t clock_offset_ms_ = 0;  // the learner's clock minus ours
  std::optional<Signed> beacon_;

  Standing standing_;
  PartsFeed parts_;
  bool reading_held_ = false;
  TokenBucket failures_told_{{128, 8}};        // half of what the learner takes: many parents may fail at once
  std::map<std::string, TimePoint> troubles_;  // told to the learner, and when
  std::string application_;
  std::uint64_t chunk_bytes_in_ = 0, duplicates_ = 0, corrupt_ = 0, refused_ = 0;
};

}  // namespace echoline::overlay

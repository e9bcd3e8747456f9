// A worker's protocol: joins the learner, receives publications from its parent, forwards every verified chunk to its
// child at once, and hands complete publications to the application in an order it can install. Pure.
#pragma once
#include "overlay/edge_sender.hpp"

namespace echoline::overlay {

struct MemberConfig {
  Endpoint learner;
  Endpoint data;  // where this worker listens for children
  std::string run_id, name;
  LinkLimits limits;
  Bytes store_bytes_max{256ull << 20};
  Duration join_timeout = std::chrono::seconds(10);
};

class MemberCore final : public Core {
 public:
  static constexpr Duration kHandshakeTimeout = std::chrono::seconds(5);
  static constexpr std::size_t kConnectionsMax = 64;                // children and strangers
  static constexpr std::size_t kUnsentBytesMax = 64 * 1024 * 1024;  // messages the learner has not taken yet
  static constexpr int kCorruptChunksMax = 3;                       // in a row on one edge, before it is given up
  static constexpr int kInstallFailuresMax = 3;                     // in a row, before the worker gives up
  static constexpr int kStallHeartbeats = 20;  // newest version unannounced for so long: ask the learner itself

  explicit MemberCore(MemberConfig config);

  void start(TimePoint now);
  // From the application. installed() and install_failed() answer act::Deliver, in order. After install_failed() the
  // application drops deltas it was already given, without a report, until a full snapshot is delivered.
  void installed(Version version, const Digest& policy_digest, TimePoint now);
  void install_failed(Version version, const std::string& why, TimePoint now);
  void send_message(std::span<const std::byte> bytes, TimePoint now);  // at most kApplicationBytesMax (checked)
  void set_heartbeat(std::string application) { application_ = std::move(application); }
  void leave(const std::string& reason, TimePoint now);
  WorkerStats stats() const;

  void on_accepted(ConnId conn, const std::string& peer_host, TimePoint now) override;
  void on_connected(ConnId conn, TimePoint now) override;
  void on_closed(ConnId conn, const std::string& reason, TimePoint now) override;
  void on_frame(ConnId conn, const FrameView& frame, TimePoint now) override;
  void on_sent(ConnId conn, std::size_t bytes, TimePoint now) override;
  void on_timer(TimePoint now) override;
  TimePoint next_deadline() const override;

 private:
  enum class State { kIdle, kJoining, kJoined, kGone };
  // A data connection this worker dialled to receive chunks.
  struct Upstream {
    WorkerId parent;
    Endpoint endpoint;
    std::optional<ConnId> conn;
    std::optional<Version> catch_up_to;  // absent: the assigned parent
    int failures = 0;                    // since the last verified chunk
    int corrupt_in_row = 0;
    TimePoint redial_at = kNever;
  };

  void on_control(const ControlMessage& message, TimePoint now);
  void on_upstream(Upstream& up, const FrameView& frame, TimePoint now);
  void on_child(ConnId conn, const FrameView& frame, TimePoint now);
  void on_manifest(Upstream& up, const Manifest& manifest, TimePoint now);
  void on_chunk(Upstream& up, const FrameView& frame, TimePoint now);
  void on_assign(const Assign& assign, TimePoint now);
  void catch_up(Version target, TimePoint now);
  void end_catch_up(TimePoint now);
  void dial_upstream(Upstream& up);
  void upstream_failed(Upstream& up, const std::string& reason, TimePoint now);
  Upstream* upstream_of(ConnId conn);
  Have have() const;
  void deliver(TimePoint now);
  void tell_troubles();
  void beat(TimePoint now);
  void gone(const std::string& reason);

  MemberConfig config_;
  State state_ = State::kIdle;
  PublicationStore store_;
  EdgeSender edges_;
  std::map<ConnId, TimePoint> strangers_;  // accepted, not introduced; until when
  ConnId control_{};
  std::optional<WorkerId> id_;
  std::optional<Upstream> parent_, helper_;  // helper_: the learner, while catching up
  Duration heartbeat_{}, learner_timeout_{};
  TimePoint join_deadline_ = kNever, beat_at_ = kNever, learner_heard_{}, unannounced_since_ = kNever;
  std::optional<Version> newest_;    // published, as the learner says
  std::optional<Version> position_;  // last delivered to the application
  std::optional<Version> floor_;     // after a failed installation: the least version of the snapshot that repairs it
  std::optional<Version> installed_, acked_;
  int install_failures_ = 0;
  std::size_t unsent_ = 0;
  std::string application_;
  std::uint64_t chunk_bytes_in_ = 0, duplicates_ = 0, corrupt_ = 0;
};

}  // namespace echoline::overlay

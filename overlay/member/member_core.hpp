// A worker's protocol: joins the learner and comes back to it, receives publications from its parents, forwards every
// proven chunk to its children at once, and hands complete publications to the application in an order it can install,
// never going back. Pure.
#pragma once
#include <memory>
#include <set>

#include "base/random.hpp"
#include "chains/stripes.hpp"
#include "overlay/budget.hpp"
#include "overlay/edge_sender.hpp"
#include "overlay/member/upstream.hpp"
#include "overlay/settings.hpp"
#include "overlay/state.hpp"
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
  static constexpr int kInstallFailuresMax = 3;                         // in a row, before the worker gives up
  static constexpr int kStallHeartbeats = 20;  // without progress towards the newest version: ask for help
  static constexpr int kRefusalsMax = 3;       // of its store, that the pause before it asks again grows with
  static constexpr int kCallsMax = 2;          // for help, after which nothing at all was heard: likewise
  static constexpr Duration kTroublePause = std::chrono::minutes(1);  // before the learner is told the same again
  static constexpr Duration kBarred = std::chrono::minutes(1);        // of a child that asked for too much
  static constexpr std::size_t kAskersMax = 1024;
  // Publications that may begin, until one is activated or help is asked for: parents that bring none of them to an end
  // would otherwise keep it from asking for ever.
  static constexpr std::size_t kBegunMax = 3;
  static constexpr Duration kDrainMax = std::chrono::seconds(10);
  static constexpr int kReturnsRefusedMax = 2;  // the certificate may have been good, and the connection bad
  static constexpr Duration kClockTold = std::chrono::minutes(1);  // by which a clock is wrong, before it is said

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
  // Hands its children over and leaves when they are gone, after kDrainMax at the latest.
  void drain(TimePoint now);
  void leave(const std::string& reason, TimePoint now);  // in order
  WorkerStats stats() const;

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
  enum class State { kIdle, kJoining, kJoined, kAway, kGone };
  struct Asker {  // a child, by identity: a new connection gives it nothing anew
    MessageBudget budget;
    TimePoint barred_until{};
  };
  struct Staged {
    std::vector<act::Deliver> deliveries;
    Installed last;
    std::optional<Installed> before;  // position
    TimePoint at;
  };

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
  Duration stall_time() const {
    return heartbeat_ * (kStallHeartbeats << std::max(std::min(refusals_, kRefusalsMax), std::min(calls_, kCallsMax)));
  }
  void save(TimePoint now);
  std::uint64_t learner_unix_ms(TimePoint now) const;

  // Edges (member_edges.cpp).
  void meet(ConnId conn, PeerInfo peer, TimePoint now);
  void on_stranger(ConnId conn, const Stranger& stranger, const Frame& frame, TimePoint now);
  void open_child(ConnId conn, WorkerId child, PeerHello hello, TimePoint now);
  void on_child(ConnId conn, const Frame& frame, TimePoint now);
  Asker& asker(WorkerId child, TimePoint now);
  bool is_barred(WorkerId child, TimePoint now) const;
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
  void need_help(Version target, TimePoint now, bool stalled = false);
  void end_help(TimePoint now);
  void watch_edges(TimePoint now);

  // Publications (member_publications.cpp).
  void begin_epoch(std::uint64_t epoch, TimePoint now);
  void on_announcement(Upstream* up, const SignedAnnouncement& as_signed, TimePoint now);
  void on_manifest(Upstream* up, const SignedManifest& as_signed, TimePoint now);
  std::optional<Version> leads_on_from(const PublicationKey& key) const;
  bool farther(const StoredPublication& stored);
  void on_chunk(Upstream* up, ConnId conn, const Frame& frame, TimePoint now);
  void forged(Upstream* up, const PublicationId& id, std::uint32_t index, const std::string& what, TimePoint now);
  void store_changed(TimePoint now);
  bool comes_next(const StoredPublication& stored) const;
  void deliver_parts(const PublicationId& id);
  void deliver(TimePoint now);
  void raise_floor(const PublicationId& id, TimePoint now);
  void activate(TimePoint now);
  void hold_or_resume_reading();

  MemberConfig config_;
  WorkerId id_;
  State state_ = State::kIdle;
  bool assigned_ = false;  // parents, since it last joined
  PublicationStore store_;
  EdgeSender edges_;
  MessageQueue messages_;
  MessageAssembler incoming_;
  Strangers strangers_;
  std::map<ConnId, DialChild> dialled_children_;
  ConnId control_{};
  bool control_up_ = false;
  // The learner takes no connection with a certificate that has ended: a new one is asked for without.
  bool returning_ = false, return_next_ = false, return_refused_ = false, learner_spoke_ = false;
  int returns_refused_ = 0;
  std::map<WorkerId, Upstream> parents_;
  std::uint32_t stripes_ = 1;
  std::optional<Upstream> helper_;
  int helper_silences_ = 0;  // of the last helper
  WorkerSet revoked_;
  GrantBook grants_;  // that children have shown
  std::map<WorkerId, Asker> askers_;

  Duration heartbeat_{};
  SilenceMeter learner_silence_;
  Duration patience_{};
  TimePoint learner_heard_{}, join_deadline_ = kNever, away_until_ = kNever, redial_at_ = kNever, beat_at_ = kNever,
                              answer_by_ = kNever;
  bool parents_got_time_ = false;     // since stalled_since_
  bool lost_here_ = false;            // what leads on, which parents take for sent, since something was activated
  TimePoint stalled_since_ = kNever,  // the last progress towards the newest version; kNever: it is here
      help_asked_at_ = kNever, drain_until_ = kNever;
  int redials_ = 0;
  Random redial_jitter_;
  Duration away_max_{};
  TimePoint renew_at_ = kNever;
  std::int64_t clock_offset_ms_ = 0;  // the learner's clock minus ours
  std::optional<Signed> beacon_;
  std::uint64_t beacon_sequence_ = 0;

  std::uint64_t epoch_ = 0;            // of the learner
  std::optional<Version> newest_;      // published, as the learner says
  std::optional<Installed> position_;  // last staged for the application
  std::optional<Version> repair_;      // after a failed installation: the least version of the snapshot that repairs it
  std::optional<Installed> installed_;
  struct Given {
    TimePoint at;
    Duration verify;  // before, since its last byte had come
  };
  std::map<Version, Given> given_;                         // to the application and not yet installed, of this epoch
  std::set<Version> void_;                                 // likewise, of earlier epochs
  std::optional<Staged> staged_;                           // waits for the floor to be saved
  std::optional<Installed> floor_saving_, floor_on_disk_;  // in the save under way, and in the last that succeeded
  struct Parts {                                           // delivered of what arrives
    PublicationId id{};
    std::uint32_t chunks = 0;
  } snapshot_parts_, delta_parts_;
  std::uint64_t parts_unread_ = 0;  // bytes
  bool saving_ = false, save_again_ = false, reading_held_ = false, welcomed_once_ = false;
  TimePoint save_retry_at_ = kNever;
  int install_failures_ = 0;
  int refusals_ = 0;                                     // of the store, since something was activated
  std::map<PublicationKey, std::uint32_t> most_chunks_;  // that were here, of each
  TokenBucket failures_told_{{128, 8}};  // half of what the learner takes: many parents may fail at once
  int calls_ = 0;  // for help, after which nothing was heard, since the last progress towards the newest version
  std::map<std::string, TimePoint> troubles_;  // told to the learner, and when
  std::string application_;
  std::uint64_t chunk_bytes_in_ = 0, duplicates_ = 0, corrupt_ = 0, refused_ = 0;
};

}  // namespace echoline::overlay

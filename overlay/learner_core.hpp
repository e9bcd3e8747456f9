// The learner's protocol: admits workers, plans who forwards to whom, is the source of every publication, repairs the
// topology when a worker dies, and measures the broadcast time T_b. Pure.
#pragma once
#include <functional>
#include <set>

#include "chains/planner.hpp"
#include "chains/score.hpp"
#include "overlay/edge_sender.hpp"

namespace echoline::overlay {

struct LearnerConfig {
  Endpoint self;  // where this learner listens
  std::string run_id;
  LinkLimits limits;
  BitRate chain_rate = BitRate::from_mbit_per_s(8);
  std::size_t chains_max = 8;  // when limits.up is absent
  chains::TopologyPolicy policy = chains::TopologyPolicy::kEcho2;
  Duration heartbeat = std::chrono::milliseconds(500);
  Duration heartbeat_timeout = std::chrono::seconds(3);
  double quorum = 0.9;
  Bytes store_bytes_max{1ull << 30};
  bool snapshots_on_demand = true;                        // somebody answers act::NeedSnapshot
  std::function<std::string(const MemberInfo&)> welcome;  // may be empty; pure
};

class LearnerCore final : public Core {
 public:
  static constexpr Duration kHandshakeTimeout = std::chrono::seconds(5);
  static constexpr std::size_t kStrangersMax = 1024;
  // Control and application bytes a worker has not taken yet, before it is given up.
  static constexpr std::size_t kUnsentBytesMax = 64 * 1024 * 1024;
  // Publications whose T_b is still open; older ones are given up.
  static constexpr std::size_t kBroadcastsMax = 64;

  explicit LearnerCore(LearnerConfig config);

  // kInvalid: the version is not newer than the last, or the base was never published. kExhausted: too large to store.
  Status publish(PreparedPublication publication, TimePoint now);
  Status provide_snapshot(PreparedPublication full, TimePoint now);
  // At most kApplicationBytesMax (checked); nothing happens when the worker is gone.
  void send_message(WorkerId worker, std::span<const std::byte> bytes, TimePoint now);
  void expel(WorkerId worker, const std::string& reason, TimePoint now);
  void leave(TimePoint now);  // goodbye to everybody
  LearnerStats stats() const;
  const chains::Topology& topology() const { return topology_; }

  void on_accepted(ConnId conn, const std::string& peer_host, TimePoint now) override;
  void on_connected(ConnId, TimePoint) override {}
  void on_closed(ConnId conn, const std::string& reason, TimePoint now) override;
  void on_frame(ConnId conn, const FrameView& frame, TimePoint now) override;
  void on_sent(ConnId conn, std::size_t bytes, TimePoint now) override;
  void on_timer(TimePoint now) override;
  TimePoint next_deadline() const override;

 private:
  struct Stranger {
    std::string host;
    TimePoint until;
  };
  struct Worker {
    WorkerView view;
    ConnId control;
    TimePoint heard;
    std::size_t unsent = 0;
    std::optional<Assign> assigned;
    chains::RoleLadder ladder;
    std::uint32_t attempts = 0, successes = 0;  // forwards to its child
  };
  struct Broadcast {
    Version version;
    std::optional<Version> base;
    Bytes payload;
    TimePoint published;
    std::set<WorkerId> active, waiting;
    std::uint64_t wire_bytes_before = 0;
    ChainIds topology;
  };

  void on_stranger(ConnId conn, const FrameView& frame, TimePoint now);
  void admit_worker(ConnId conn, const Stranger& stranger, Hello hello, TimePoint now);
  void admit_edge(ConnId conn, PeerHello hello, TimePoint now);
  void on_worker(Worker& worker, const ControlMessage& message, TimePoint now);
  void on_ack(Worker& worker, const Ack& ack, TimePoint now);
  void on_edge_failed(WorkerId child, const EdgeFailed& failed, TimePoint now);
  void on_edge(ConnId conn, const FrameView& frame, TimePoint now);
  void lose(WorkerId id, const std::string& reason, bool say_goodbye, TimePoint now);
  void refuse(ConnId conn, const std::string& reason, TimePoint now);
  void set_topology(chains::Topology topology, TimePoint now);
  void plan_anew(TimePoint now);
  chains::ChainWorker chain_worker(const Worker& worker, TimePoint now) const;
  void check_broadcasts(TimePoint now);
  void ask_for_snapshot();
  BitRate learner_up() const;

  LearnerConfig config_;
  PublicationStore store_;
  EdgeSender edges_;
  chains::Topology topology_;
  std::map<ConnId, Stranger> strangers_;
  std::map<WorkerId, Worker> workers_;
  std::map<ConnId, WorkerId> control_;
  std::uint64_t next_worker_ = 1, lost_ = 0;
  std::optional<Version> newest_;
  std::set<Version> versions_;  // recently published, for checking bases
  std::vector<Broadcast> broadcasts_;
  bool snapshot_requested_ = false;
  TimePoint beat_at_ = kNever;
};

}  // namespace echoline::overlay

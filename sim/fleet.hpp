// A learner and its workers in a simulated world: drivers and applications around the real protocol cores. The
// learner's application publishes policies and provides snapshots. A worker's application enrols (it gets a certificate
// from the learner), installs policies, and restarts after its process has ended.
#pragma once
#include <string>
#include <vector>

#include "overlay/learner/learner_core.hpp"
#include "overlay/member/enrol_core.hpp"
#include "overlay/member/member_core.hpp"
#include "sim/fleet_state.hpp"
#include "sim/intruder.hpp"
#include "sim/world.hpp"

namespace echoline::sim {

struct LearnerOptions : overlay::LearnerRules {
  LearnerOptions() {
    policy = chains::TopologyPolicy::kEcho2;
    // The shortest silence that counts. A simulated machine is never late by itself, so any silence may count.
    network.silence_min = {};
  }
  AccessLink link;
  overlay::LinkLimits limits;  // rates to which the core limits itself
  Duration clock_skew{};
  Bytes store{1ull << 30};  // memory for the learner's publications
  std::uint32_t chunk_bytes = 64 * 1024;
  bool durable = true;  // its state is on disk, so it survives a restart
  Duration publication_lifetime = std::chrono::hours(1);
  Duration snapshot_encode_time = std::chrono::milliseconds(50);
  std::uint64_t snapshot_bytes = 200'000;  // of a snapshot for a worker that lacks its base
  // Most stored deltas that are combined into one (a fold) for a worker that is behind.
  std::size_t folded_deltas_max = 0;
};

struct FleetOptions {
  std::uint64_t seed = 1;
  LearnerOptions learner;
  Duration certificate_lifetime = std::chrono::hours(1);  // of workers that do not enrol
  // Interval of each worker's application messages, which the learner answers. Absent: no messages.
  std::optional<Duration> message_interval;
  // The links that the learner expects of a worker that states none; empty: not known.
  std::function<overlay::LinkLimits(const overlay::MemberInfo&)> links_of;
  bool fault_points = false;  // triggers rare but legal event orders inside the cores, by the seed
};

// A publication by the learner's application.
struct PublishSpec {
  std::optional<Version> base;  // absent: a full snapshot
  std::uint64_t bytes = 0;
  Duration encode_time{};  // time to encode all `pieces` pieces
  std::size_t pieces = 1;
  std::optional<std::size_t> abandon_after_pieces;  // the trainer gives up after this many pieces
};

// Receives the events of the fleet's applications. Must not change anything.
class FleetObserver {
 public:
  virtual ~FleetObserver() = default;
  // The worker has a whole publication.
  virtual void on_delivered(std::size_t /*worker*/, const overlay::act::DeliverPublication&) {}
  virtual void on_activated(std::size_t /*worker*/, const overlay::Installed&) {}
  virtual void on_new_identity(std::size_t /*worker*/, WorkerId) {}
  virtual void on_topology(const chains::Topology&) {}
  virtual void on_joined(WorkerId) {}
  virtual void on_away(WorkerId, const std::string& /*reason*/) {}  // the learner cannot reach it and keeps its place
  virtual void on_lost(WorkerId, const std::string& /*reason*/) {}  // the learner has given it up or expelled it
};

class Fleet {
 public:
  static constexpr const char* kRunId = "simulation";
  // Whether a worker was lost because the learner expelled it for its messages.
  static bool is_expelled_for_messages(const std::string& reason);

  Fleet(World& world, const FleetOptions& options);
  ~Fleet();

  // ---- learner ----

  // Starts the learner, or restarts it from its disk. Its trainer's checkpoint lacks the newest `versions_lost`
  // versions.
  void start_learner(std::uint64_t versions_lost = 0);
  // Publishes the version after the last finished one. Nothing happens while the learner is down.
  void publish(const PublishSpec& spec);
  void expel(std::size_t worker);  // the learner revokes the worker's identity
  void end_run();                  // the learner tells its workers that the run has ended, and no process restarts
  const LearnerOptions& learner_options() const { return options_.learner; }
  std::uint32_t chunk_bytes() const { return options_.learner.chunk_bytes; }
  std::uint64_t learner_starts() const { return learner_machine_.starts; }
  HostId learner_host() const { return learner_machine_.host; }
  overlay::LearnerCore* learner();                       // null while it is down
  std::vector<WorkerId> parents_of(std::size_t worker);  // in the learner's topology, without the learner
  // The newest complete version, which all workers should reach.
  std::optional<Version> newest() const { return policies_.newest(); }
  bool is_publishing() const { return policies_.is_publishing(); }
  const std::vector<overlay::BroadcastReport>& reports() const { return learner_machine_.reports; }
  std::uint64_t snapshots_requested() const { return learner_machine_.snapshots_requested; }
  std::uint64_t deltas_requested() const { return learner_machine_.deltas_requested; }  // for catching up

  // ---- workers ----

  std::size_t add_worker(const WorkerOptions& requested);
  // Starts the worker's process, or restarts it from its disk. With an empty disk, the worker enrols first.
  void start_worker(std::size_t worker);
  void kill_worker(std::size_t worker, Death death);
  void drain_worker(std::size_t worker);   // the worker leaves for good
  void retire_worker(std::size_t worker);  // its machine is returned: the worker does not come back
  std::size_t worker_count() const { return workers_.size(); }

  using Worker = FleetWorker;
  const Worker& worker(std::size_t i) const { return workers_[i]; }
  overlay::MemberCore* member(std::size_t i);  // null while it is down or enrols
  std::optional<std::size_t> worker_on_host(HostId host) const { return workers_.on_host(host); }
  std::optional<std::size_t> worker_with_id(WorkerId id) const { return workers_.with_id(id); }

  // ---- intruder: a machine with a valid certificate, to which the learner assigns no parent ----

  void add_intruder(Duration request_interval);
  // An id that no host has if there is no intruder.
  HostId intruder_host() const { return intruder_host_.value_or(HostId{~std::uint64_t{0}}); }
  const Intruder* intruder() const;

  const PublishedContent& published_content() const { return published_content_; }
  const overlay::SignatureChecker& checker() const { return *identities_.checker(); }
  const overlay::trust::Authority& authority() const { return *identities_.authority(); }
  void set_observer(FleetObserver* observer) { observer_ = observer; }
  // Stops the applications' messages.
  void stop_messages() { messages_stopped_ = true; }
  // While blocked, no process starts.
  void block_starts(bool blocked) { starts_are_blocked_ = blocked; }
  // Ends the random faults of applications and cores.
  void stop_random_faults();
  // Describes the last invalid event in an application's exchange with its core. Empty if there was none.
  const std::string& application_error() const { return application_error_; }
  void check() const;  // aborts if an invariant is broken

 private:
  class FaultSites;
  struct PendingPublication;

  void on_learner_action(overlay::Action&& action);
  void encode(const std::shared_ptr<PendingPublication>& pending);
  void provide_catch_up(const overlay::act::RequestCatchUp& need, std::uint64_t learner_start);
  std::uint64_t catch_up_bytes(const overlay::act::RequestCatchUp& need) const;
  overlay::Announcement announcement_of(const overlay::PublicationKey& key);
  void enrol(std::size_t i);
  void on_enrolled(std::size_t i, Result<overlay::WorkerState> result);
  void join(std::size_t i, overlay::WorkerState state);
  void on_member_action(std::size_t i, overlay::Action&& action);
  void deliver(std::size_t i, overlay::act::DeliverPublication deliver);
  void install(std::size_t i, std::uint64_t process, const overlay::Publication& publication, bool is_intact);
  void on_process_ended(std::size_t i, const std::string& reason);
  void send_periodic_message(std::size_t i);
  void on_message(WorkerId from, const std::string& text);
  void on_answer(std::size_t i, const std::string& text);
  double learner_unix_s() const;
  static constexpr std::size_t kOpenFilesMax = 65536;  // of a process without WorkerOptions::open_files_max
  overlay::CoreOptions core_options(HostId host, const overlay::LinkLimits& limits,
                                    std::size_t open_files_max = kOpenFilesMax);
  overlay::Digest new_digest(Version version);
  overlay::trust::SigningKey new_key();
  std::vector<std::byte> random_bytes(std::uint64_t count);

  World& world_;
  FleetOptions options_;
  Random random_;
  PublishedContent published_content_;
  RunIdentities identities_;
  std::unique_ptr<FaultSites> faults_;
  FleetObserver* observer_ = nullptr;
  bool messages_stopped_ = false, starts_are_blocked_ = false;
  std::string application_error_;
  LearnerMachine learner_machine_;
  PublishedPolicies policies_;
  WorkerTable workers_;
  std::optional<HostId> intruder_host_;
  std::shared_ptr<AccompliceState> accomplice_state_ = std::make_shared<AccompliceState>();
};

}  // namespace echoline::sim

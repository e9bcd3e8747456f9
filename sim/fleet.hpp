// A learner and its workers in a simulated world: drivers and applications around the real protocol cores. The
// learner's application publishes policies and provides snapshots. A worker's application enrols, installs policies,
// and restarts after its process has ended.
#pragma once
#include <deque>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "overlay/learner/learner_core.hpp"
#include "overlay/member/enrol_core.hpp"
#include "overlay/member/member_core.hpp"
#include "sim/intruder.hpp"
#include "sim/truth.hpp"
#include "sim/world.hpp"

namespace echoline::sim {

struct LearnerOptions : overlay::LearnerRules {
  LearnerOptions() {
    policy = chains::TopologyPolicy::kEcho2;
    network.silence_min = {};  // a simulated machine is never late on its own
  }
  AccessLink link;
  overlay::LinkLimits limits;  // enforced by the core
  Duration clock_skew{};
  Bytes store{1ull << 30};
  std::uint32_t chunk_bytes = 64 * 1024;
  bool durable = true;  // its state is on disk
  Duration publication_lifetime = std::chrono::hours(1);
  Duration snapshot_encode_time = std::chrono::milliseconds(50);
  std::uint64_t snapshot_bytes = 200'000;  // provided on demand
  std::size_t folded_max = 0;              // stored deltas that are folded into one on demand
};

struct WorkerOptions {
  AccessLink link;
  overlay::LinkLimits limits;  // enforced by the core
  Duration clock_skew{};
  bool nat = false, disk = false, enrol = true;
  DiskOptions disk_options;
  overlay::StoreLimits store;
  MaliceOptions malice;
  Duration install_time = std::chrono::milliseconds(1);
  double install_failure_share = 0;
  Duration restart_after = std::chrono::seconds(1);  // after its process has ended by itself
  std::optional<std::size_t> files;                  // connections that its process can open
  std::uint32_t region = 0;
};

struct FleetOptions {
  std::uint64_t seed = 1;
  LearnerOptions learner;
  Duration certificate_lifetime = std::chrono::hours(1);  // of identities made with the run
  std::optional<Duration> message_every;  // interval of workers' messages to the learner, which it answers
  bool fault_points = false;              // triggers rare but legal event orders inside the cores, by the seed
};

// A publication by the learner's application.
struct PublishSpec {
  std::optional<Version> base;  // absent: a full snapshot
  std::uint64_t bytes = 0;
  Duration encode_time{};  // duration of encoding in `pieces` pieces
  std::size_t pieces = 1;
  std::optional<std::size_t> abandon_after;  // the trainer gives up after this many pieces
};

// Receives the events of the fleet's applications. Must not change anything.
class FleetObserver {
 public:
  virtual ~FleetObserver() = default;
  virtual void on_delivered(std::size_t /*worker*/, const overlay::act::Deliver&) {}
  virtual void on_activated(std::size_t /*worker*/, const overlay::Installed&) {}
  virtual void on_identity(std::size_t /*worker*/, WorkerId) {}  // a new identity
  virtual void on_topology(const chains::Topology&) {}
  virtual void on_joined(WorkerId) {}
  virtual void on_away(WorkerId, const std::string& /*reason*/) {}
  virtual void on_lost(WorkerId, const std::string& /*reason*/) {}
};

class Fleet {
 public:
  static constexpr const char* kRunId = "simulation";
  // Whether a worker was expelled for its messages.
  static bool for_what_it_says(const std::string& reason);

  Fleet(World& world, const FleetOptions& options);
  ~Fleet();

  // ---- learner ----

  // Starts it, or restarts it from its disk; its trainer's checkpoint lacks the last `versions_lost`.
  void start_learner(std::uint64_t versions_lost = 0);
  // Publishes the version after the last finished one. Nothing happens while the learner is down.
  void publish(const PublishSpec& spec);
  void expel(std::size_t worker);
  void end();  // ends the run: the learner says goodbye and no process restarts
  const LearnerOptions& learner_options() const { return options_.learner; }
  std::uint32_t chunk_bytes() const { return options_.learner.chunk_bytes; }
  std::uint64_t learner_processes() const { return learner_processes_; }
  HostId learner_host() const { return learner_host_; }
  overlay::LearnerCore* learner();                       // null while it is down
  std::vector<WorkerId> parents_of(std::size_t worker);  // by the learner's topology; only workers
  // The newest complete version, which all workers should reach.
  std::optional<Version> newest() const { return newest_; }
  bool publishing() const { return publishing_ > 0; }
  const std::vector<overlay::BroadcastReport>& reports() const { return reports_; }
  std::uint64_t snapshots_asked() const { return snapshots_asked_; }
  std::uint64_t deltas_asked() const { return deltas_asked_; }  // for catching up

  // ---- workers ----

  std::size_t add_worker(const WorkerOptions& options);
  // Starts its process, or restarts it from its disk. It enrols if the disk is empty.
  void start_worker(std::size_t worker);
  void kill_worker(std::size_t worker, Death death);
  void drain_worker(std::size_t worker);   // the worker leaves for good
  void retire_worker(std::size_t worker);  // its machine is returned: the worker does not come back
  std::size_t workers() const { return workers_.size(); }

  struct Worker {
    WorkerOptions options;
    HostId host;
    std::optional<overlay::trust::SigningKey> key;
    std::optional<overlay::WorkerState> state;  // of the current process
    bool wanted = true;                         // false: it is not restarted
    bool expelled = false;                      // its identity is revoked
    int replaced = 0;                           // number of replacements of its machine
    bool joined = false;                        // welcomed by the learner and not away
    std::uint64_t processes = 0, enrolments = 0;
    std::optional<overlay::Installed> installed, active;  // of the current process
    std::optional<Version> given;                         // last delivered version
    bool dropping = false;                                // an installation failed, so it waits for a full snapshot
    std::map<Version, TimePoint> installed_at;            // by all its processes
    std::string last_end;
    std::uint64_t messages = 0, answers = 0;  // sent by the current process, and the last answered
    WorkerId id() const { return state ? state->worker : WorkerId{}; }
  };
  const Worker& worker(std::size_t i) const { return *workers_[i]; }
  overlay::MemberCore* member(std::size_t i);  // null while it is down or enrols
  std::optional<std::size_t> worker_on(HostId host) const;
  std::optional<std::size_t> worker_of(WorkerId id) const;

  // ---- a machine with a valid certificate that no learner sends to peers ----

  void add_intruder(Duration every);
  HostId intruder_host() const { return intruder_host_.value_or(HostId{~std::uint64_t{0}}); }
  const Intruder* intruder() const;

  const Truth& truth() const { return truth_; }
  const overlay::Checker& checker() const { return *checker_; }
  const overlay::trust::Authority& authority() const { return *authority_; }
  void set_observer(FleetObserver* observer) { observer_ = observer; }
  // Stops the applications' messages.
  void hush() { hushed_ = true; }
  // While set, no process starts.
  void set_asleep(bool on) { asleep_ = on; }
  // Stops the random faults of applications and cores.
  void calm();
  // Describes a violation in an application's exchange with its core; empty: none.
  const std::string& wrong() const { return wrong_; }

 private:
  class LearnerProcess;
  class EnrolProcess;
  class MemberProcess;
  class IntruderProcess;
  class FaultSites;
  struct Making;

  void on_learner(overlay::Action&& action);
  void encode(const std::shared_ptr<Making>& making);
  void provide_catch_up(const overlay::act::NeedCatchUp& need, std::uint64_t process);
  std::uint64_t catch_up_bytes(const overlay::act::NeedCatchUp& need) const;
  void enrol(std::size_t i);
  void enrolled(std::size_t i, Result<overlay::WorkerState> result, TimePoint now);
  void join(std::size_t i, overlay::WorkerState state);
  void on_member(std::size_t i, overlay::Action&& action, TimePoint now);
  void deliver(std::size_t i, overlay::act::Deliver deliver);
  void install(std::size_t i, std::uint64_t process, const overlay::Publication& publication, bool sound);
  void ended(std::size_t i, const std::string& reason);
  void chat(std::size_t i);
  void on_message(WorkerId from, const std::string& text);
  void on_answer(std::size_t i, const std::string& text);
  double learner_unix_s() const;
  overlay::CoreOptions core_options(HostId host, const overlay::LinkLimits& limits, std::size_t files = 65536);
  overlay::Digest new_digest(Version version);
  overlay::trust::SigningKey new_key();
  std::vector<std::byte> random_bytes(std::uint64_t count);

  World& world_;
  FleetOptions options_;
  Random random_;
  std::shared_ptr<const overlay::trust::Authority> authority_;
  Truth truth_;
  std::shared_ptr<const RememberingChecker> checker_;
  std::unique_ptr<FaultSites> faults_;
  FleetObserver* observer_ = nullptr;
  bool calm_ = false, ended_ = false, hushed_ = false, asleep_ = false;
  std::string wrong_;

  HostId learner_host_;
  double learner_origin_unix_s_ = 0;  // of its current process
  std::optional<HostId> intruder_host_;
  std::shared_ptr<Loot> loot_ = std::make_shared<Loot>();
  std::uint64_t learner_processes_ = 0;
  std::optional<overlay::LearnerState> learner_state_;  // initial state of a learner without a disk
  std::map<Version, overlay::Digest> policies_;         // complete ones
  std::optional<Version> newest_;
  std::size_t publishing_ = 0;
  std::vector<overlay::BroadcastReport> reports_;
  std::uint64_t snapshots_asked_ = 0, deltas_asked_ = 0;
  std::deque<std::pair<Version, std::uint64_t>> made_;  // versions of the current process, with their bytes
  std::set<WorkerId> lost_;                             // to any process of the learner
  std::map<WorkerId, std::pair<std::uint64_t, std::uint64_t>> heard_;  // process and number of the last message

  std::vector<std::unique_ptr<Worker>> workers_;
  std::uint64_t next_id_ = 1;  // for workers that do not enrol
  std::map<std::uint64_t, std::size_t> by_host_;
  std::map<WorkerId, std::size_t> by_id_;
};

}  // namespace echoline::sim

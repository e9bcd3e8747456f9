// The state of a simulated fleet (sim/fleet.hpp): its machines, published policies and identities. Private to sim/.
#pragma once
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "overlay/learner/learner_core.hpp"
#include "overlay/member/member_core.hpp"
#include "overlay/trust/authority.hpp"
#include "sim/malice.hpp"
#include "sim/published_content.hpp"
#include "sim/world.hpp"

namespace echoline::sim {

struct WorkerOptions {
  AccessLink link;
  overlay::LinkLimits limits;  // rates to which the core limits itself
  Duration clock_skew{};
  bool behind_nat = false, disk = false;
  bool enrols = true;  // false: it starts with a certificate
  DiskOptions disk_options;
  overlay::StoreLimits store;
  MaliceOptions malice;
  Duration install_time = std::chrono::milliseconds(1);
  double install_failure_share = 0;
  Duration restart_delay = std::chrono::seconds(1);  // until a process that ended by itself is started again
  std::optional<std::size_t> open_files_max;         // limits the connections of its process
  std::uint32_t region = 0;
  bool is_node = false;  // a node of the trainer: the local network to the learner is not limited

  std::string name(std::size_t index) const;  // of the worker with this index
};

// A worker, over all processes of its machine.
struct FleetWorker {
  WorkerOptions options;
  HostId host;
  std::optional<overlay::trust::SigningKey> key;
  std::optional<overlay::WorkerState> state;                   // of the current process
  bool should_run = true;                                      // false: it is not restarted
  bool expelled = false;                                       // its identity is revoked
  int replacements = 0;                                        // new machines that it got
  bool joined = false;                                         // welcomed by the learner and not away
  std::uint64_t processes = 0, enrolments = 0;                 // started; an enrolment is a process of its own
  std::optional<overlay::Installed> installed, active;         // of the current process
  std::optional<Version> delivered;                            // last delivered version
  bool awaits_snapshot = false;                                // because an installation has failed
  std::map<Version, TimePoint> installed_at;                   // first time in any of its processes
  std::string last_end_reason;                                 // of its latest process that ended by itself
  std::uint64_t messages_sent = 0, last_answered_message = 0;  // by the current process; number of the last message
  WorkerId id() const { return state ? state->worker : WorkerId{}; }
};

// The workers, found by number, host or identity.
class WorkerTable {
 public:
  // Returns the worker's number.
  std::size_t add(const WorkerOptions& options, HostId host) {
    const std::size_t worker = workers_.size();
    by_host_[host] = worker;
    workers_.emplace_back();
    workers_.back().options = options;
    workers_.back().host = host;
    return worker;
  }
  // Gives the worker the identity in `state`. Returns whether no worker had it before.
  bool set_state(std::size_t worker, const overlay::WorkerState& state) {
    workers_[worker].state = state;
    return by_id_.insert_or_assign(state.worker, worker).second;
  }
  void mark_lost(WorkerId id) { lost_.insert(id); }
  bool is_lost(WorkerId id) const { return lost_.contains(id); }
  std::optional<std::size_t> on_host(HostId host) const { return find(by_host_, host); }
  std::optional<std::size_t> with_id(WorkerId id) const { return find(by_id_, id); }  // also by an earlier identity
  FleetWorker& operator[](std::size_t worker) { return workers_[worker]; }
  const FleetWorker& operator[](std::size_t worker) const { return workers_[worker]; }
  std::size_t size() const { return workers_.size(); }
  auto begin() { return workers_.begin(); }
  auto end() { return workers_.end(); }
  void check() const;  // aborts if an index disagrees with the workers

 private:
  template <class Key>
  static std::optional<std::size_t> find(const std::map<Key, std::size_t>& index, Key key) {
    const auto it = index.find(key);
    return it == index.end() ? std::nullopt : std::optional(it->second);
  }

  std::deque<FleetWorker> workers_;
  std::map<HostId, std::size_t> by_host_;
  std::map<WorkerId, std::size_t> by_id_;
  std::set<WorkerId> lost_;  // given up by the current or an earlier process of the learner
};

// Numbers an application message of a worker: by FleetWorker::processes, and by the messages that this process has
// sent.
struct MessageNumber {
  std::uint64_t process = 0, message = 0;
  auto operator<=>(const MessageNumber&) const = default;
};

struct LearnerMachine {
  HostId host;
  double unix_origin_s = 0;  // Unix time at virtual time zero, by the clock of the current process
  std::uint64_t starts = 0;  // processes of the learner, with the current one
  bool should_run = true;    // false: the run has ended
  std::vector<overlay::BroadcastReport> reports;
  std::uint64_t snapshots_requested = 0, deltas_requested = 0;
  std::map<WorkerId, MessageNumber> last_messages;  // the newest of each worker
};

// The policies that the learner has published completely. At most one publication is in progress.
class PublishedPolicies {
 public:
  // A process of the learner begins.
  void start_process() {
    is_publishing_ = false;
    recent_.clear();
  }
  // Replaces all policies by `published` without its newest `versions_lost` versions. One version always stays.
  void restore(std::map<Version, overlay::Digest> published, std::uint64_t versions_lost);
  void begin() { is_publishing_ = true; }
  void abandon() { is_publishing_ = false; }
  // Remembers the sizes of the last `recent_max` publications.
  void finish(Version version, const overlay::Digest& digest, std::uint64_t bytes, std::size_t recent_max);
  bool is_publishing() const { return is_publishing_; }
  std::optional<Version> newest() const {
    return digests_.empty() ? std::nullopt : std::optional(digests_.rbegin()->first);
  }
  const overlay::Digest* find(Version version) const {  // null: not published
    const auto it = digests_.find(version);
    return it == digests_.end() ? nullptr : &it->second;
  }
  // Bytes of the recent publications after version `from`, up to `to`.
  std::uint64_t bytes_between(Version from, Version to) const;
  void check() const;  // aborts if a recent publication is unknown or out of order

 private:
  std::map<Version, overlay::Digest> digests_;
  std::deque<std::pair<Version, std::uint64_t>> recent_;  // of the current process, with their bytes
  bool is_publishing_ = false;
};

// The run's certificate authority, and the identities that it gives to hosts that do not enrol.
class RunIdentities {
 public:
  // The learner gives worker ids and certificate numbers from this one on.
  static constexpr std::uint64_t kFirstEnrolled = 1'000'000;
  RunIdentities(const std::string& run_id, const overlay::trust::SigningKey& key, const PublishedContent& content);
  WorkerId next_id() { return WorkerId{next_id_++}; }
  std::vector<std::byte> certificate(WorkerId id, const overlay::trust::SigningKey& key, double now_unix_s,
                                     Duration lifetime) const;
  const std::shared_ptr<const overlay::trust::Authority>& authority() const { return authority_; }
  const std::shared_ptr<const CachingChecker>& checker() const { return checker_; }
  void check() const { ECHO_CHECK(next_id_ <= kFirstEnrolled); }

 private:
  std::shared_ptr<const overlay::trust::Authority> authority_;
  std::shared_ptr<const CachingChecker> checker_;
  std::uint64_t next_id_ = 1;
};

}  // namespace echoline::sim

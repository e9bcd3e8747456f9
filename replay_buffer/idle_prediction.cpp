// Predicts the learner's idle share by a simulation of its steps. LeaseCore and WaitingGroups choose leases and batches
// as in a real run; every group takes its worker's mean time.
#include "replay_buffer/idle_prediction.hpp"

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <queue>

#include "base/result.hpp"
#include "replay_buffer/lease_core.hpp"
#include "replay_buffer/step_pace.hpp"

namespace echoline::replay_buffer {
namespace {

constexpr std::uint64_t kGroupsMeasuredMax = 15'000;     // about so many; bounds the time of a prediction
constexpr std::uint64_t kStepsMin = 12, kStepsMax = 80;  // steps that are measured
constexpr std::uint64_t kPeriodsMin = 2;                 // publication periods that are measured
constexpr std::uint64_t kStepsSkipped = 6;               // first steps that are not measured, besides the lookahead
constexpr double kRetrySecondsMax = 1;                   // a learner that waits for slow results looks again after this
constexpr std::uint32_t kLeasesLiveMax = 1'000'000;
constexpr double kNeverS = 1e15;               // a time that is never reached
constexpr std::uint64_t kEventsMax = 500'000;  // ends the simulation of a fleet that never finishes a batch

LeaseOptions lease_options(const IdleQuestion& question) {
  LeaseOptions options{.pacing = question.pacing, .lease = question.lease};
  options.pacing.steps_total.reset();
  options.leases_live_max = kLeasesLiveMax;
  return options;
}

class Simulation {
 public:
  explicit Simulation(const IdleQuestion& question)
      : question_(question),
        pacing_(question.pacing),
        waiting_(pacing_.group_size),
        core_(lease_options(question), waiting_),
        workers_(question.workers.size()) {}

  IdlePrediction run() {
    first_measured_step_ = kStepsSkipped + pacing_.staleness.lookahead_steps();
    // Whole publication periods are measured, because the age of the policy varies within a period.
    const std::uint64_t periods = std::clamp(kGroupsMeasuredMax / pacing_.groups_per_step(), kStepsMin, kStepsMax) /
                                  pacing_.staleness.publish_every;
    const std::uint64_t steps_total =
        first_measured_step_ + std::max(kPeriodsMin, periods) * pacing_.staleness.publish_every;
    for (std::size_t worker_index = 0; worker_index < workers_.size(); ++worker_index) request_work(worker_index);
    while (step_ < steps_total && !events_.empty() && now_ < kNeverS && events_pushed_ < kEventsMax) {
      const Event event = events_.top();
      events_.pop();
      now_ = event.at_s;
      core_.renew_or_expire(now_, [](WorkerId) { return true; });  // because every worker generates
      handle(event);
    }
    // No measured step has ended: this fleet never fills a batch.
    if (step_ <= first_measured_step_) return {.idle_fraction = 1, .step_s = kNeverS, .staleness_mean = 0};
    const double measured_s = waited_s_ + trained_s_;
    const double groups_trained = static_cast<double>(std::max<std::uint64_t>(1, groups_trained_));
    return {.idle_fraction = waited_s_ / measured_s,
            .step_s = measured_s / static_cast<double>(step_ - first_measured_step_),
            .staleness_mean = static_cast<double>(staleness_sum_) / groups_trained};
  }

 private:
  enum class Kind : std::uint8_t { kGenerated, kDelivered, kInstalled, kTrained, kLinksFree, kRetry };
  struct Event {
    double at_s = 0;
    std::uint64_t sequence = 0;
    Kind kind{};
    std::size_t worker = 0;
    std::uint64_t detail = 0;  // a version, or the number of a generation
    friend bool operator>(const Event& a, const Event& b) {
      return a.at_s != b.at_s ? a.at_s > b.at_s : a.sequence > b.sequence;
    }
  };
  struct Worker {
    std::uint64_t version = 0, delivered = 0;  // version of the installed policy; of the newest received one
    bool installing = false, install_is_pending = false, generating = false;
    double generation_ends_s = 0;
    std::uint64_t generation_number = 0;  // the last kGenerated event's number; earlier events are ignored
    std::deque<LiveLease> queue;          // the first is being generated
    std::uint64_t place = 0;              // key of its entry in underloaded_; 0: none
  };

  static WorkerId id_of(std::size_t worker_index) { return WorkerId{worker_index + 1}; }
  void push(double at_s, Kind kind, std::size_t worker = 0, std::uint64_t detail = 0) {
    events_.push({.at_s = at_s, .sequence = ++events_pushed_, .kind = kind, .worker = worker, .detail = detail});
  }

  void handle(const Event& event) {
    const std::size_t worker_index = event.worker;
    switch (event.kind) {
      case Kind::kGenerated:
        if (event.detail == workers_[worker_index].generation_number) on_generated(worker_index);
        return;
      case Kind::kDelivered:
        return on_delivered(worker_index, event.detail);
      case Kind::kInstalled:
        return on_installed(worker_index, event.detail);
      case Kind::kTrained:
        return on_trained();
      case Kind::kLinksFree:
        links_are_busy_ = false;
        if (next_version_) publish(*std::exchange(next_version_, std::nullopt));
        return;
      case Kind::kRetry:
        request_work_for_underloaded();
        return try_step();
    }
  }

  // ---- workers ----

  void request_work(std::size_t worker_index) {
    Worker& worker = workers_[worker_index];
    const std::uint32_t groups_at_once = question_.workers[worker_index].groups_at_once;
    if (worker.installing || worker.install_is_pending || worker.queue.size() >= groups_at_once) return;
    const GrantRequest request{.worker = id_of(worker_index),
                               .version = Version{worker.version},
                               .policy_digest = {},
                               .groups_max = groups_at_once - static_cast<std::uint32_t>(worker.queue.size()),
                               .step_seconds = step_pace_.seconds(),
                               .newest = Version{newest_sent_}};
    for (LiveLease& lease : core_.grant(request, step_, now_)) worker.queue.push_back(std::move(lease));
    if (worker.queue.size() >= groups_at_once) {
      remove_from_underloaded(worker);
    } else if (worker.place == 0) {
      worker.place = ++last_place_;
      underloaded_[worker.place] = worker_index;
    }
    start_generation(worker_index);
  }
  void remove_from_underloaded(Worker& worker) {
    if (worker.place != 0) underloaded_.erase(std::exchange(worker.place, 0));
  }
  void request_work_for_underloaded() {
    if (underloaded_.empty() || has_no_room(newest_sent_)) return;
    std::vector<std::size_t> order;  // a copy, because request_work() changes underloaded_
    for (const auto& [place, worker_index] : underloaded_) order.push_back(worker_index);
    for (const std::size_t worker_index : order) {
      if (has_no_room(newest_sent_)) return;
      if (!has_no_room(workers_[worker_index].version)) request_work(worker_index);
    }
  }
  bool has_no_room(std::uint64_t version) { return core_.has_no_room(Version{version}, step_, now_); }

  void start_generation(std::size_t worker_index) {
    Worker& worker = workers_[worker_index];
    if (worker.generating || worker.installing || worker.queue.empty()) return;
    worker.generating = true;
    worker.generation_ends_s = now_ + question_.workers[worker_index].group_s;
    push(worker.generation_ends_s, Kind::kGenerated, worker_index, ++worker.generation_number);
  }

  void on_generated(std::size_t worker_index) {
    Worker& worker = workers_[worker_index];
    worker.generating = false;
    const LiveLease lease = std::move(worker.queue.front());
    worker.queue.pop_front();
    submit(lease);
    if (worker.install_is_pending && worker.queue.empty()) install(worker_index, question_.install_s);
    start_generation(worker_index);
    request_work(worker_index);
    try_step();
  }

  void submit(const LiveLease& lease) {
    const LeaseRecord& record = lease.record;
    const std::uint64_t tokens = question_.lease.tokens_max;
    if (core_.find(record.id) == nullptr)
      core_.record_late_result(record.worker, record.granted_unix_s, tokens, now_);
    else if (!admissible(step_, record.version, pacing_.staleness.budget))
      core_.refuse(record.id, tokens, now_);
    else
      core_.settle(record.id, {.version = record.version, .tokens_longest = tokens, .scored = true}, now_);
  }

  void on_delivered(std::size_t worker_index, std::uint64_t version) {
    Worker& worker = workers_[worker_index];
    if (version <= worker.delivered) return;
    worker.delivered = version;
    if (question_.groups_in_progress == GroupsInProgress::kFinish && !worker.queue.empty())
      worker.install_is_pending = true;
    else
      install(worker_index, question_.install_s);
  }

  // The worker pauses for `pause_s`, and then has the newest policy that was delivered.
  void install(std::size_t worker_index, double pause_s) {
    Worker& worker = workers_[worker_index];
    worker.install_is_pending = false;
    if (worker.installing) return;  // on_installed() goes on with the newest policy
    worker.installing = true;
    if (question_.groups_in_progress == GroupsInProgress::kAbort) {
      worker.generating = false;
      ++worker.generation_number;  // the event of the aborted generation is ignored
      for (const LiveLease& lease : std::exchange(worker.queue, {}))
        core_.return_leases(id_of(worker_index), std::span(&lease.record.id, 1));
    }
    if (worker.generating) {  // the group in progress ends later by the pause
      worker.generation_ends_s += pause_s;
      push(worker.generation_ends_s, Kind::kGenerated, worker_index, ++worker.generation_number);
    }
    push(now_ + pause_s, Kind::kInstalled, worker_index, worker.delivered);
  }

  void on_installed(std::size_t worker_index, std::uint64_t version) {
    Worker& worker = workers_[worker_index];
    worker.version = std::max(worker.version, version);
    worker.installing = false;
    if (worker.delivered > worker.version) return install(worker_index, question_.install_s);
    start_generation(worker_index);
    request_work(worker_index);
  }

  // ---- learner ----

  Version oldest_trainable() const { return oldest_admissible(step_, pacing_.staleness.budget); }

  // Trains on the next batch if there is one, and no leased work would become too stale.
  void try_step() {
    if (is_training_) return;
    if (core_.stranded_by_next_step(step_, now_) > 0) {
      step_pace_.begin_wait(now_);
      if (retry_at_s_ <= now_) {  // no retry is scheduled; leases may become overdue without any event
        retry_at_s_ = now_ + std::min(kRetrySecondsMax, question_.step_s);
        push(retry_at_s_, Kind::kRetry);
      }
      return;
    }
    step_pace_.end_wait(now_);
    const auto batch = waiting_.next_batch(oldest_trainable(), pacing_.groups_per_step());
    if (!batch) return;
    is_training_ = true;
    batch_ = *batch;
    if (step_ >= first_measured_step_) {
      waited_s_ += now_ - wait_began_s_;
      trained_s_ += question_.step_s;
      for (const GroupId group : batch_) {
        const std::uint64_t version = waiting_.find(group)->version.value;
        staleness_sum_ += step_ - std::min(step_, version);
      }
      groups_trained_ += batch_.size();
    }
    push(now_ + question_.step_s, Kind::kTrained);
    request_work_for_underloaded();
  }

  void on_trained() {
    is_training_ = false;
    for (const GroupId group : std::exchange(batch_, {})) waiting_.remove(group);
    ++step_;
    step_pace_.end_step(now_);
    for (const GroupId group : waiting_.older_than(oldest_trainable())) waiting_.remove(group);
    wait_began_s_ = now_;
    if (step_ % pacing_.staleness.publish_every == 0) {
      if (links_are_busy_)
        next_version_ = step_;  // replaces an older publication that still waits
      else
        publish(step_);
    }
    request_work_for_underloaded();
    try_step();
  }

  void publish(std::uint64_t version) {
    newest_sent_ = version;
    links_are_busy_ = true;
    push(now_ + question_.link_s, Kind::kLinksFree);
    for (std::size_t worker_index = 0; worker_index < workers_.size(); ++worker_index) {
      const double policy_s = question_.workers[worker_index].policy_s;
      if (question_.stops_during_broadcast) {
        workers_[worker_index].delivered = version;
        install(worker_index, policy_s + question_.install_s);
      } else {
        push(now_ + policy_s, Kind::kDelivered, worker_index, version);
      }
    }
  }

  const IdleQuestion& question_;
  const Pacing& pacing_;
  WaitingGroups waiting_;
  LeaseCore core_;
  StepPace step_pace_;
  std::vector<Worker> workers_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::uint64_t events_pushed_ = 0;
  // Workers that hold fewer groups than they can, by their place in the order in which they began to wait.
  std::map<std::uint64_t, std::size_t> underloaded_;
  std::uint64_t last_place_ = 0;
  double now_ = 0;

  std::uint64_t step_ = 0, newest_sent_ = 0;
  bool is_training_ = false, links_are_busy_ = false;
  std::optional<std::uint64_t> next_version_;  // a publication that waits for the learner's links
  std::vector<GroupId> batch_;                 // the batch in training
  double wait_began_s_ = 0, retry_at_s_ = 0;

  std::uint64_t first_measured_step_ = 0;
  // Sums over the measured steps.
  double waited_s_ = 0, trained_s_ = 0;
  std::uint64_t staleness_sum_ = 0, groups_trained_ = 0;  // staleness_sum_: over the groups trained on
};

}  // namespace

IdlePrediction predict_idle(const IdleQuestion& question) {
  ECHO_CHECK(!question.workers.empty() && question.step_s > 0 && question.pacing.groups_per_step() > 0 &&
             question.install_s >= 0 && question.link_s >= 0);
  for (const PredictedWorker& worker : question.workers) ECHO_CHECK(worker.group_s > 0 && worker.policy_s >= 0);
  return Simulation(question).run();
}

}  // namespace echoline::replay_buffer

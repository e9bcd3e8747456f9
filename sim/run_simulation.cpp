// The events of a simulated run (run_scenario.hpp): machines, workers, publications, leases and the learner's steps.
#include <algorithm>
#include <cmath>
#include <deque>

#include "provisioner/capacity.hpp"
#include "sim/event_queue.hpp"
#include "sim/run_broadcast.hpp"
#include "sim/run_desk.hpp"
#include "sim/run_fleet.hpp"
#include "sim/run_plan.hpp"
#include "sim/run_scenario.hpp"
#include "sim/run_workers.hpp"

namespace echoline::sim {
namespace {

using namespace provisioner;
using State = WorkerState;

constexpr double kNeverS = 1e18;
// Interval of core calls: one second per this many machines, so 5 s for 10,000.
constexpr std::size_t kMachinesPerTick = 2000;
constexpr std::size_t kCheckedWorkersMax = 256;  // in a larger fleet, ticks do not check the invariants
constexpr double kGroupsHeldMax = 1024;
constexpr std::size_t kAwaitingLongestMax = 64;  // per worker: groups that lack only their longest responses
constexpr double kStuckSeconds = 6 * 3600;       // seconds without a worker
constexpr double kWaitSecondsMax = 24 * 3600;    // seconds for one batch, or 100 steps if that is longer
constexpr std::size_t kWorkersMax = 2'000'000;   // in a run, lost ones included

enum Kind : std::uint32_t {
  kTick,
  kJoins,
  kArrives,
  kSynced,
  kGenerated,
  kHandIn,  // the group's longest response is complete
  kDelivered,
  kInstalled,
  kEnding,  // the provider announces the machine's end
  kDies,
  kHangs,
  kNoticed,  // the learner notices a worker's death
  kGivenUp,  // a hung worker was away for too long
  kTrained,
  kEncoded,
  kLinksFree,
  kFinalWaitEnds,
  kPreempts,
  kSlows,
  kRecovers
};
struct PendingQuorum {    // a publication that the quorum has not installed yet
  std::size_t index = 0;  // in RunResult::publications
  std::size_t targets = 0, installed = 0;
};

struct Outgoing {  // a publication waiting for the learner's links
  std::uint64_t version = 0;
  double at_s = 0;
  Bytes bytes;
  bool snapshot = false;
};

// Publications that the learner has made but not sent.
struct Outbox {
  std::deque<Outgoing> encoding;  // oldest first, encoded one at a time
  double encoder_free_s = 0;
  bool links_busy = false;
  std::optional<Outgoing> waiting;                 // for the links
  std::uint64_t newest_sent = 0, deltas_made = 0;  // a version; a number
};

enum class Learner : std::uint8_t {
  kNotBegun,  // machines are booting
  kWaiting,   // for a batch
  kTraining,
  kFinishing,  // waits until the workers have the last policy
  kOver,
};

// The learner's current step and its state.
struct Steps {
  Learner state = Learner::kNotBegun;
  double wait_from_s = 0;
  SimStep row;                   // the step in training
  std::vector<DeskGroup> batch;  // its batch
  bool is(Learner s) const { return state == s; }
  bool begun() const { return state != Learner::kNotBegun; }
  void set_state(Learner to) {
    const bool follows = to == Learner::kOver || (to == Learner::kTraining && is(Learner::kWaiting)) ||
                         (to == Learner::kFinishing && is(Learner::kWaiting)) ||
                         (to == Learner::kWaiting && (is(Learner::kTraining) || is(Learner::kNotBegun)));
    ECHO_CHECK(follows, "the learner: from {} to {}", static_cast<int>(state), static_cast<int>(to));
    state = to;
  }
};

// Measures how long the fleet is short of capacity, each time after it had enough.
class CapacityWatch {
 public:
  explicit CapacityWatch(std::vector<double>& recoveries_s) : recoveries_s_(recoveries_s) {}
  void watch(double rate, double now) {
    const bool enough = rate >= target * (1 - rules::kDeadband);
    was_enough_ = was_enough_ || enough;
    if (!was_enough_) return;
    if (!enough && !short_since_s_) short_since_s_ = now;
    if (enough && short_since_s_) recoveries_s_.push_back(now - *std::exchange(short_since_s_, std::nullopt));
  }

  double target = 0;  // rollouts/s

 private:
  std::vector<double>& recoveries_s_;
  bool was_enough_ = false;
  std::optional<double> short_since_s_;
};

class Simulation {
 public:
  Simulation(const RunScenario& scenario, const std::function<void(std::uint64_t)>& progress)
      : s_(scenario),
        progress_(progress),
        desk_({scenario.pacing, scenario.lease, scenario.lease_shares == LeaseShares::kEqual,
               scenario.lease_rule == LeaseRule::kAnyAge}),
        broadcast_(scenario),
        lengths_(scenario.seed, 31),
        fates_(scenario.seed, 32),
        capacity_(result_.recoveries_s) {}

  Result<RunResult> run() {
    ECHO_ASSIGN(RunStart start, plan_simulated_run(s_));
    result_.plan = std::move(start.plan);
    result_.plan_error = std::move(start.plan_error);
    result_.machines_planned = start.wanted.size();
    tokens_mean_ = mean_tokens(s_);
    fleet_.emplace(
        s_, start.rules, start.wanted,
        RunFleet::Hooks{[this](Ticket ticket, std::size_t offer, double at) { on_booting(ticket, offer, at); },
                        [this](Ticket ticket) { on_returned(ticket); }, [this](WorkerId id) { drain_worker(id); }},
        result_);
    wanted_ = start.wanted.size();
    capacity_.target = start.rules_target;
    push(0, kTick, 0);
    for (std::size_t i = 0; i < s_.churn.preemptions.size(); ++i)
      push(seconds(s_.churn.preemptions[i].at), kPreempts, 0, i);
    for (std::size_t i = 0; i < s_.faults.slowdowns.size(); ++i) push(seconds(s_.faults.slowdowns[i].at), kSlows, 0, i);
    const double time_max = seconds(s_.time_max);
    while (result_.ended.empty() && !queue_.empty()) {
      const Event event = queue_.pop();
      now_ = seconds(event.at.time_since_epoch());
      if (now_ > time_max)
        result_.ended = "time";
      else
        ECHO_TRY(handle(event));
      ++result_.events;
    }
    finish();
    return std::move(result_);
  }

 private:
  static TimePoint time_of(double s) { return TimePoint(from_seconds(std::min(s, 9e9))); }
  void push(double at, Kind kind, std::size_t worker, std::uint64_t a = 0) {
    if (at < kNeverS) queue_.push(time_of(std::max(at, now_)), kind, static_cast<std::uint32_t>(worker), a, 0);
  }
  static WorkerId id_of(std::size_t w) { return RunWorkers::id_of(w); }
  void notify_fleet(const FleetEvent& event) { fleet_->handle(event, now_); }
  Receiver receiver(std::size_t w) const {
    Receiver r = receiver_of(s_, s_.offers[workers_[w].offer], id_of(w));
    r.up.bits_per_s *= workers_[w].link_rate_fraction;
    r.down.bits_per_s *= workers_[w].link_rate_fraction;
    return r;
  }

  Status handle(const Event& e) {
    const std::size_t w = e.host;
    switch (static_cast<Kind>(e.kind)) {
      case kTick:
        return tick();
      case kJoins:
        return on_join(w), ok();
      case kArrives:
        return on_part_arrival(w), ok();
      case kSynced:
        return on_synced(w), ok();
      case kGenerated:
        return on_generated(w, static_cast<std::uint32_t>(e.a)), ok();
      case kHandIn:
        return submit_group(w, LeaseId{e.a}), ok();
      case kDelivered:
        return on_delivered(w, e.a), ok();
      case kInstalled:
        return on_installed(w, e.a), ok();
      case kEnding:
        return on_ending(w), ok();
      case kDies:
        return lose_worker(w), ok();
      case kHangs:
        return hang_worker(w), ok();
      case kNoticed:
        return on_loss_noticed(w), ok();
      case kGivenUp:
        return on_given_up(w), ok();
      case kTrained:
        return on_trained();
      case kEncoded:
        return on_encoded();
      case kLinksFree:
        return on_links_free();
      case kFinalWaitEnds:
        return result_.ended = "completed", ok();
      case kPreempts:
        return preempt_machines(e.a), ok();
      case kSlows:
        return slow_machines(e.a);
      case kRecovers:
        return workers_[w].slowed_by == e.a + 1 ? change_speed(w, 1, 1, 0) : ok();
    }
    return ok();
  }

  Status tick() {
    fleet_->tick(now_);
    desk_.expire(now_, [this](WorkerId id) { return !workers_.of(id).dead(); });
    update_capacity();
    if (!steps_.begun()) ECHO_TRY(begin_if_ready());
    if (steps_.begun()) {
      request_work_for_idle();
      try_step();
    }
    end_if_last_policy_is_installed();
    check_for_end();
    if (workers_.size() <= kCheckedWorkersMax) workers_.check();
    const double every =
        std::clamp(static_cast<double>(workers_.working()) / kMachinesPerTick, 1.0, seconds(rules::kTickGapMax));
    push(now_ + every, kTick, 0);
    return ok();
  }

  void on_booting(Ticket ticket, std::size_t offer, double joins_s) {
    SimWorker worker;
    worker.ticket = ticket;
    worker.offer = offer;
    worker.promised_rollouts_per_s = s_.offers[offer].offer.rollouts_per_s;
    worker.tokens_per_s = worker.promised_rollouts_per_s * s_.offers[offer].rate_share * tokens_mean_;
    push(joins_s, kJoins, workers_.add(std::move(worker)));
  }

  void on_join(std::size_t w) {
    SimWorker& worker = workers_[w];
    if (!worker.is(State::kBooting)) return;
    workers_.set_state(w, State::kSyncing);
    worker.joined_s = now_;
    broadcast_.add(receiver(w));
    fleet_->machine(worker.ticket).worker = w + 1;
    notify_fleet(fleet::Joined{id_of(w), s_.offers[worker.offer].offer.id});
    const RunChurn& churn = s_.churn;
    if (churn.per_hour > 0) {
      const double dies_s = now_ + fates_.exponential(3600 / churn.per_hour);
      if (fates_.chance(churn.announced)) push(dies_s - seconds(churn.notice), kEnding, w);
      push(dies_s, kDies, w);
    }
    if (s_.faults.hangs_per_hour > 0) push(now_ + fates_.exponential(3600 / s_.faults.hangs_per_hour), kHangs, w);
    if (steps_.begun()) sync(w);
  }

  // A newcomer gets the newest available policy from a worker that has it.
  void sync(std::size_t w) {
    SimWorker& worker = workers_[w];
    worker.delivered = outbox_.newest_sent;
    worker.sent_from_version = outbox_.newest_sent + 1;
    const double transfer_s = seconds(broadcast_.neighbour_transfer_time(snapshot_bytes(), receiver(w)));
    schedule_first_policy(w, transfer_s);
    push(now_ + transfer_s + install_s(), kSynced, w, outbox_.newest_sent);
  }
  void schedule_first_policy(std::size_t w, double transfer_s) {
    for (std::uint64_t part = 1; part <= rules::kSnapshotParts; ++part)
      push(now_ + transfer_s * static_cast<double>(part) / static_cast<double>(rules::kSnapshotParts), kArrives, w);
  }
  void on_part_arrival(std::size_t w) {
    if (!workers_[w].dead())
      record_traffic(w, static_cast<double>(snapshot_bytes().count) / static_cast<double>(rules::kSnapshotParts), 0);
  }

  void on_synced(std::size_t w) {
    SimWorker& worker = workers_[w];
    if (!worker.is(State::kSyncing)) return;
    worker.version = std::max(worker.version, worker.delivered);
    start_working(w);
  }

  void start_working(std::size_t w) {
    workers_.set_state(w, State::kWorking);
    result_.workers_peak = std::max(result_.workers_peak, workers_.working());
    request_work(w);
  }

  void remove_worker(std::size_t w) {
    SimWorker& worker = workers_[w];
    if (worker.dead()) return;
    worker.stop_generating(now_);
    if (!worker.is(State::kBooting)) {
      result_.present_s += now_ - worker.joined_s;
      result_.busy_s += worker.busy_s;
      broadcast_.remove(id_of(w));
      for (auto it = pending_quorums_.begin(); it != pending_quorums_.end();) {
        const std::uint64_t version = it->first;
        const bool waited_for = worker.was_sent(version) && (worker.version < version || worker.is(State::kSyncing));
        if (waited_for && it->second.targets > 0) --it->second.targets;
        it = waited_for && quorum_reached(it->second) ? pending_quorums_.erase(it) : std::next(it);
      }
    }
    fleet_->machine(worker.ticket).version = worker.version;
    workers_.set_state(w, State::kDead);
  }

  // The provider has ended the machine on request.
  void on_returned(Ticket ticket) {
    const auto w = workers_.find(ticket);
    if (!w) return;
    remove_worker(*w);
    desk_.release_worker(id_of(*w), now_);
    workers_.forget(ticket);
  }

  void on_ending(std::size_t w) {
    if (workers_[w].dead() || steps_.is(Learner::kOver)) return;
    notify_fleet(fleet::Ending{workers_[w].ticket, "it will be taken back", true});
  }
  void lose_worker(std::size_t w) {
    if (workers_[w].dead()) return;
    remove_worker(w);
    push(now_ + seconds(s_.heartbeat_timeout), kNoticed, w);
  }
  void on_loss_noticed(std::size_t w) {
    desk_.release_worker(id_of(w), now_);
    fleet_->lose_machine(workers_[w].ticket, true, now_);
    workers_.forget(workers_[w].ticket);
  }
  void hang_worker(std::size_t w) {
    if (workers_[w].dead()) return;
    remove_worker(w);
    push(now_ + seconds(s_.request.fleet.away_max), kGivenUp, w);
    desk_.release_worker(id_of(w), now_);
  }
  void on_given_up(std::size_t w) { notify_fleet(fleet::Left{id_of(w), "away for too long"}); }

  void preempt_machines(std::size_t i) {
    const Preemption& p = s_.churn.preemptions[i];
    for (std::size_t w = 0; w < workers_.size(); ++w) {
      if (is_present(w, p.region) && fates_.chance(p.share)) lose_worker(w);
    }
  }
  bool is_present(std::size_t w, std::optional<std::uint32_t> region) const {
    const bool present = workers_[w].is(State::kWorking) || workers_[w].is(State::kSyncing);
    return present && (!region || s_.offers[workers_[w].offer].region == *region);
  }

  Status slow_machines(std::size_t i) {
    const Slowdown& slow = s_.faults.slowdowns[i];
    for (std::size_t w = 0; w < workers_.size(); ++w) {
      if (!is_present(w, slow.region) || !fates_.chance(slow.share)) continue;
      ECHO_TRY(change_speed(w, slow.token_rate_left, slow.link_rate_left, i + 1));
      if (slow.lasts) push(now_ + seconds(*slow.lasts), kRecovers, w, i);
    }
    return ok();
  }
  // The worker's current work, and transfers through it, continue at the new speed.
  Status change_speed(std::size_t w, double tokens, double links, std::uint64_t slowed_by) {
    SimWorker& worker = workers_[w];
    if (worker.dead()) return ok();
    if (worker.generating) {
      worker.ends_s = now_ + std::max(0.0, worker.ends_s - now_) * worker.token_rate_fraction / tokens;
      push(worker.ends_s, kGenerated, w, ++worker.turn);
    }
    workers_.set_token_rate_fraction(w, tokens);
    worker.slowed_by = slowed_by;
    if (std::exchange(worker.link_rate_fraction, links) == links) return ok();
    ECHO_TRY(broadcast_.change_links(receiver(w)));
    for (std::size_t other = workers_.first_alive(); other < workers_.size(); ++other) {
      Arrival& arrival = workers_[other].arrival;
      if (arrival.complete || arrival.version != outbox_.newest_sent) continue;
      arrival.remaining_share -= (now_ - arrival.since_s) / std::max(arrival.transfer_s, 1e-9);
      arrival = {arrival.version, now_, std::max(0.0, arrival.remaining_share),
                 seconds(broadcast_.time_of(id_of(other))), false};
      push(arrival.ends_s(), kDelivered, other, arrival.version);
    }
    return ok();
  }

  void drain_worker(WorkerId id) {
    const std::size_t w = id.value - 1;
    if (workers_[w].dead()) return;
    if (workers_[w].drain == SimWorker::Drain::kNo) workers_[w].drain = SimWorker::Drain::kAsked;
    workers_.leave_idle_queue(w);
    report_if_drained(w);
  }
  void report_if_drained(std::size_t w) {
    SimWorker& worker = workers_[w];
    if (worker.drain != SimWorker::Drain::kAsked || worker.dead() || worker.holds_work()) return;
    worker.drain = SimWorker::Drain::kDone;
    drained_.push_back(id_of(w));
  }

  void update_capacity() {
    while (!drained_.empty()) {  // deferred, because the core must not be called during its own callback
      const WorkerId id = drained_.front();
      drained_.pop_front();
      notify_fleet(fleet::Drained{id});
    }
    capacity_.watch(workers_.rate(), now_);
  }

  void check_for_end() {
    if (steps_.is(Learner::kWaiting) &&
        now_ - steps_.wait_from_s > std::max(kWaitSecondsMax, 100 * seconds(s_.step_time)))
      result_.ended = "the learner waited for a day";
    if (workers_.size() > kWorkersMax) result_.ended = fmt::format("{} machines were rented", workers_.size());
    if (workers_.working() > 0 || steps_.is(Learner::kTraining)) {
      alone_since_s_.reset();
      return;
    }
    if (!alone_since_s_) alone_since_s_ = now_;
    if (fleet_->empty() && fleet_->numbers().money_spent)
      result_.ended = "the budget is spent";
    else if (now_ - *alone_since_s_ >= kStuckSeconds)
      result_.ended = "no workers";
  }

  // A run keeps its machines until all that are present have the last policy, as learner/service does.
  void end_if_last_policy_is_installed() {
    if (!steps_.is(Learner::kFinishing)) return;
    for (std::size_t w = workers_.first_alive(); w < workers_.size(); ++w)
      if ((workers_[w].is(State::kWorking) || workers_[w].is(State::kSyncing)) && workers_[w].version < desk_.step())
        return;
    result_.ended = "completed";
  }

  Status begin_if_ready() {
    const std::size_t joined = broadcast_.size();
    const bool all_joined = joined >= std::max<std::size_t>(1, wanted_);
    if (joined == 0 || (!all_joined && now_ < seconds(s_.request.fleet.join_timeout))) return ok();
    steps_.set_state(Learner::kWaiting);
    result_.first_snapshot_s = now_;
    steps_.wait_from_s = now_;
    notify_fleet(fleet::LearnerWaiting{true});
    for (std::size_t w = 0; w < workers_.size(); ++w) workers_[w].sent_from_version = 0;
    return publish({0, now_, snapshot_bytes(), true});
  }

  Status publish_step() {
    const std::uint64_t nth = outbox_.deltas_made++;
    Bytes delta = s_.delta_bytes.empty() ? snapshot_bytes()
                                         : s_.delta_bytes[std::min<std::size_t>(nth, s_.delta_bytes.size() - 1)];
    if (s_.publication_form == PublicationForm::kSnapshot) delta = snapshot_bytes();
    outbox_.encoding.push_back({desk_.step(), now_, delta, s_.publication_form == PublicationForm::kSnapshot});
    if (s_.encode_time == Duration{}) return on_encoded();
    outbox_.encoder_free_s = std::max(outbox_.encoder_free_s, now_) + seconds(s_.encode_time);
    push(outbox_.encoder_free_s, kEncoded, 0);
    return ok();
  }

  Status on_encoded() {
    Outgoing next = outbox_.encoding.front();
    outbox_.encoding.pop_front();
    if (!outbox_.links_busy) return publish(next);
    if (outbox_.waiting) {  // the links are behind, so waiting publications are merged
      ++result_.publications_merged;
      next.bytes = Bytes{std::min(next.snapshot ? next.bytes.count : outbox_.waiting->bytes.count + next.bytes.count,
                                  snapshot_bytes().count)};
      next.at_s = outbox_.waiting->at_s;
    }
    outbox_.waiting = next;
    return ok();
  }

  Status publish(const Outgoing& publication) {
    ECHO_TRY(broadcast_.prepare(publication.bytes));
    outbox_.newest_sent = publication.version;
    result_.version = publication.version;
    SimPublication row;
    row.version = publication.version;
    row.at_s = publication.at_s;
    row.snapshot = publication.snapshot;
    row.bytes = publication.bytes;
    const double bytes = static_cast<double>(publication.bytes.count);
    row.learner_bytes = Bytes{static_cast<std::uint64_t>(bytes * broadcast_.copies_sent_by_learner())};
    result_.learner_bytes_sent += bytes * broadcast_.copies_sent_by_learner();
    result_.crossing_bytes_sent += bytes * broadcast_.copies_between_regions();
    row.predicted_s = seconds(broadcast_.quorum_time());
    if (broadcast_.size() > 0) row.lower_bound_s = seconds(broadcast_.lower_bound());
    row.depth = broadcast_.depth();
    PendingQuorum quorum{result_.publications.size()};
    std::vector<std::size_t> syncing_workers;
    for (std::size_t w = workers_.first_alive(); w < workers_.size(); ++w) {
      SimWorker& worker = workers_[w];
      const bool first = publication.version == 0 && worker.is(State::kSyncing);
      if (!first && !worker.is(State::kWorking)) {
        // The worker gets this publication after the one in transfer.
        if (worker.is(State::kSyncing))
          worker.sent_from_version = publication.version + 1, syncing_workers.push_back(w);
        continue;
      }
      ++quorum.targets;
      const double delivery_s = seconds(broadcast_.time_of(id_of(w)));
      worker.was_sent_version_0 |= first;
      if (first) schedule_first_policy(w, delivery_s);
      record_traffic(w, first ? 0 : bytes, bytes * broadcast_.copies_sent_by(id_of(w)));
      worker.arrival = {publication.version, now_, 1, delivery_s, false};
      push(now_ + delivery_s, kDelivered, w, publication.version);
    }
    row.workers = quorum.targets;
    result_.publications.push_back(row);
    if (quorum.targets > 0) pending_quorums_[publication.version] = quorum;
    for (const std::size_t w : syncing_workers)
      push(now_ + seconds(broadcast_.time_of(id_of(w))), kDelivered, w, publication.version);
    outbox_.links_busy = true;
    push(now_ + seconds(broadcast_.size() > 0 ? broadcast_.first_completion() : Duration{}), kLinksFree, 0);
    return ok();
  }

  Status on_links_free() {
    outbox_.links_busy = false;
    if (!outbox_.waiting) return ok();
    const Outgoing next = *std::exchange(outbox_.waiting, std::nullopt);
    return publish(next);
  }

  void record_traffic(std::size_t w, double received, double forwarded) {
    SimWorker& worker = workers_[w];
    worker.received += received;
    worker.forwarded += forwarded;
    fleet_->record_traffic(worker.ticket, received, forwarded);
    notify_fleet(fleet::TrafficMeasured{id_of(w), Bytes{static_cast<std::uint64_t>(worker.received)},
                                        Bytes{static_cast<std::uint64_t>(worker.forwarded)}});
  }

  void on_delivered(std::size_t w, std::uint64_t version) {
    SimWorker& worker = workers_[w];
    if (worker.dead()) return;
    if (worker.arrival.version == version) {
      constexpr double kRounding = 1e-6;
      if (worker.arrival.complete || now_ + kRounding < worker.arrival.ends_s())
        return;  // the arrival time has changed since this event
      worker.arrival.complete = true;
    }
    const bool newest = version >= worker.delivered;
    worker.delivered = std::max(worker.delivered, version);
    if (worker.is(State::kSyncing)) {  // installed together with the first policy
      if (version == 0) push(now_ + install_s(), kInstalled, w, worker.delivered);
      return;
    }
    if (!newest) return;
    if (s_.on_new_policy == OnNewPolicy::kFinish && !worker.queue.empty()) {
      worker.install_waits = true;
      return;
    }
    install(w);
  }

  Bytes snapshot_bytes() const { return s_.snapshot_bytes.value_or(s_.request.full_bytes); }
  double install_s() const { return seconds(s_.install_time.value_or(s_.request.fleet.install_time_expected)); }

  void install(std::size_t w) {
    SimWorker& worker = workers_[w];
    worker.install_waits = false;
    if (worker.installing) return;  // the newest is installed afterwards
    worker.installing = true;       // a pending request for work stays pending
    if (s_.on_new_policy == OnNewPolicy::kAbort) {
      worker.stop_generating(now_);
      ++worker.turn;
      for (const Work& work : std::exchange(worker.queue, {})) desk_.give_back(id_of(w), work.lease);
      for (const auto& [lease, work] : std::exchange(worker.awaiting_submission, {})) desk_.give_back(id_of(w), lease);
    }
    const double pause_s = install_s();
    if (worker.generating) {  // it pauses meanwhile
      worker.busy_s -= pause_s;
      worker.ends_s += pause_s;
      push(worker.ends_s, kGenerated, w, ++worker.turn);
    }
    push(now_ + pause_s, kInstalled, w, worker.delivered);
  }

  void on_installed(std::size_t w, std::uint64_t version) {
    SimWorker& worker = workers_[w];
    if (worker.dead()) return;
    const std::uint64_t before = worker.version;
    worker.version = std::max(worker.version, version);
    worker.installing = false;
    for (auto it = pending_quorums_.begin(); it != pending_quorums_.end();) {
      const bool counts = it->first <= worker.version && worker.was_sent(it->first) &&
                          (it->first > before || worker.is(State::kSyncing));
      it->second.installed += counts ? 1 : 0;
      it = counts && quorum_reached(it->second) ? pending_quorums_.erase(it) : std::next(it);
    }
    end_if_last_policy_is_installed();
    if (worker.is(State::kSyncing)) return start_working(w);
    if (worker.delivered > worker.version) return install(w);
    start_generation(w);
    request_work(w);
  }

  bool quorum_reached(const PendingQuorum& quorum) {
    if (quorum.targets == 0) return true;  // all target workers have left
    if (quorum.installed < chains::quorum_count(s_.request.quorum, quorum.targets)) return false;
    SimPublication& row = result_.publications[quorum.index];
    row.t_b_s = now_ - row.at_s + seconds(s_.acknowledge_time);
    row.installed = quorum.installed;
    row.workers = quorum.targets;
    // Counts deltas only, because the run's rate is planned by them.
    if (!row.snapshot || s_.publication_form == PublicationForm::kSnapshot)
      measured_broadcasts_.push_back({from_seconds(*row.t_b_s), row.bytes});
    return true;
  }

  // ---- leases ----

  std::size_t groups_held(const SimWorker& worker) const {
    const double ahead = worker.promised_rollouts_per_s * seconds(s_.work_ahead) / s_.pacing.group_size;
    return std::max<std::size_t>(s_.groups_at_once, 1 + static_cast<std::size_t>(std::min(ahead, kGroupsHeldMax)));
  }

  // Requests as many groups as the worker may hold. Returns whether it got one.
  bool request_work(std::size_t w) {
    SimWorker& worker = workers_[w];
    const std::size_t groups_max = groups_held(worker);
    if (!worker.is(State::kWorking) || worker.drain != SimWorker::Drain::kNo) return false;
    if (worker.installing || worker.install_waits) return false;
    if (worker.queue.size() >= groups_max || worker.awaiting_longest >= kAwaitingLongestMax) return false;
    const auto leases = desk_.grant(id_of(w), Version{worker.version}, groups_max - worker.queue.size(),
                                    Version{outbox_.newest_sent}, now_);
    for (const replay_buffer::LiveLease& lease : leases) worker.queue.push_back(draw(lease));
    if (!leases.empty()) workers_.leave_idle_queue(w);  // it loses its place in the queue
    if (worker.queue.size() < groups_max) workers_.enter_idle_queue(w);
    start_generation(w);
    return !leases.empty();
  }

  Work draw(const replay_buffer::LiveLease& lease) {
    Work work{lease.record.id, lease.record.version, lease.record.granted_unix_s};
    const double tokens_max = s_.lease.tokens_max;
    for (std::uint32_t i = 0; i < s_.pacing.group_size; ++i) {
      const double drawn = s_.token_histogram ? lengths_.sample(*s_.token_histogram) : lengths_.lognormal(s_.tokens);
      const auto tokens = static_cast<std::uint32_t>(std::clamp(std::floor(drawn + 0.5), 1.0, tokens_max));
      work.tokens += tokens;
      work.longest = std::max(work.longest, tokens);
    }
    return work;
  }

  // Serves the worker that has waited longest first.
  void request_work_for_idle() {
    if (workers_.idle().empty() || desk_.closed(Version{outbox_.newest_sent}, now_)) return;
    std::vector<std::size_t> order;
    for (const auto& [since, w] : workers_.idle()) order.push_back(w);
    for (const std::size_t w : order) {
      if (desk_.closed(Version{outbox_.newest_sent}, now_)) return;
      if (!desk_.closed(Version{workers_[w].version}, now_)) request_work(w);
    }
  }

  void start_generation(std::size_t w) {
    SimWorker& worker = workers_[w];
    if (worker.generating || worker.installing || worker.queue.empty() || !worker.is(State::kWorking)) return;
    worker.generating = true;
    worker.began_s = now_;
    worker.ends_s = now_ + worker.queue.front().tokens / (worker.tokens_per_s * worker.token_rate_fraction);
    push(worker.ends_s, kGenerated, w, ++worker.turn);
  }

  void on_generated(std::size_t w, std::uint32_t turn) {
    SimWorker& worker = workers_[w];
    if (!worker.is(State::kWorking) || turn != worker.turn) return;
    const double began = worker.began_s;
    worker.stop_generating(now_);
    const Work work = worker.queue.front();
    worker.queue.pop_front();
    worker.awaiting_submission[work.lease] = work;
    ++worker.awaiting_longest;
    const double longest_s =
        s_.sequence_tokens_per_s ? work.longest / (*s_.sequence_tokens_per_s * worker.token_rate_fraction) : 0;
    const double ends = std::max(now_, began + longest_s);
    if (ends > now_)
      push(ends, kHandIn, w, work.lease.value);
    else
      submit_group(w, work.lease);
    if (worker.install_waits && worker.queue.empty()) install(w);
    start_generation(w);
    request_work(w);
  }

  void submit_group(std::size_t w, LeaseId lease) {
    SimWorker& worker = workers_[w];
    const auto it = worker.awaiting_submission.find(lease);
    if (it == worker.awaiting_submission.end()) return;
    const Work work = it->second;
    worker.awaiting_submission.erase(it);
    --worker.awaiting_longest;
    result_.tokens_generated += work.tokens;
    DeskGroup group;
    group.worker = id_of(w);
    group.granted_s = work.granted_s;
    group.tokens = work.tokens;
    group.longest = work.longest;
    group.mixed_versions = worker.version > work.version.value;
    const auto lease_seconds = desk_.submit(lease, group, now_);
    if (lease_seconds) {
      fleet_->machine(worker.ticket).rollouts += s_.pacing.group_size;
      notify_fleet(fleet::Heartbeat{id_of(w), static_cast<double>(s_.pacing.group_size), *lease_seconds});
    }
    report_if_drained(w);
    try_step();
  }

  // ---- learner ----

  void try_step() {
    if (!steps_.is(Learner::kWaiting) || desk_.step() >= *s_.pacing.steps_total) return;
    auto batch = desk_.batch(s_.pacing.groups_per_step(), now_);
    if (!batch) return;
    steps_.set_state(Learner::kTraining);
    notify_fleet(fleet::LearnerWaiting{false});
    SimStep row;
    row.step = desk_.step() + 1;
    row.wait_s = now_ - steps_.wait_from_s;
    const std::uint64_t step = desk_.step();
    for (const DeskGroup& group : *batch) {
      row.staleness[step - std::min(step, group.version.value)] += s_.pacing.group_size;
      row.tokens += group.tokens;
      row.mixed_version_rollouts += group.mixed_versions ? s_.pacing.group_size : 0;
    }
    row.tokens_mean = static_cast<double>(row.tokens) / (static_cast<double>(batch->size()) * s_.pacing.group_size);
    const double base_s =
        s_.step_seconds.empty() ? seconds(s_.step_time) : s_.step_seconds[step % s_.step_seconds.size()];
    row.train_s = base_s + s_.step_s_per_token * static_cast<double>(row.tokens);
    result_.tokens_trained += static_cast<double>(row.tokens);
    for (const auto& [age, n] : desk_.in_flight_by_age()) result_.in_flight[age] += static_cast<double>(n);
    for (const auto& [age, n] : desk_.waiting_by_age()) result_.in_queue[age] += static_cast<double>(n);
    for (const auto& [age, n] : row.staleness) result_.in_queue[age] -= static_cast<double>(n);
    row.waiting = desk_.waiting() - batch->size() * s_.pacing.group_size;
    row.in_flight = desk_.in_flight();
    steps_.row = std::move(row);
    steps_.batch = *std::move(batch);
    push(now_ + steps_.row.train_s, kTrained, 0);
    request_work_for_idle();
  }

  Status on_trained() {
    steps_.set_state(Learner::kWaiting);
    desk_.consume(std::exchange(steps_.batch, {}), now_);
    steps_.wait_from_s = now_;
    notify_fleet(fleet::StepMeasured{from_seconds(steps_.row.train_s)});
    if (desk_.closed(Version{outbox_.newest_sent}, now_))
      for (const auto& [since, w] : workers_.idle())
        if (!workers_[w].holds_work()) notify_fleet(fleet::Heartbeat{id_of(w), 0, 0, true});
    while (!measured_broadcasts_.empty()) {
      notify_fleet(fleet::BroadcastMeasured{measured_broadcasts_.front().first, measured_broadcasts_.front().second});
      measured_broadcasts_.pop_front();
    }
    const FleetNumbers numbers = fleet_->numbers();
    capacity_.target = numbers.target_rollouts_per_s;
    SimStep row = std::exchange(steps_.row, {});
    row.at_s = now_;
    row.working = workers_.working();
    row.joining = numbers.joining;
    row.rollouts_per_s = workers_.rate();
    row.target_rollouts_per_s = capacity_.target;
    row.usd = fleet_->usd(now_);
    row.usd_per_hour = fleet_->usd_per_hour() + s_.request.learner_usd_per_hour.value_or(0);
    result_.by_step.push_back(std::move(row));
    result_.steps = desk_.step();
    if (progress_) progress_(result_.steps);
    const bool last = desk_.step() >= *s_.pacing.steps_total;
    if (last || desk_.step() % static_cast<std::uint64_t>(s_.request.pace.publish_every) == 0) ECHO_TRY(publish_step());
    if (last) {
      steps_.set_state(Learner::kFinishing);
      steps_.wait_from_s = now_;
      push(now_ + seconds(rules::kFinalInstallWait), kFinalWaitEnds, 0);
      return ok();
    }
    notify_fleet(fleet::LearnerWaiting{true});
    request_work_for_idle();
    try_step();
    return ok();
  }

  // Returns all machines.
  void finish() {
    workers_.check();
    steps_.set_state(Learner::kOver);
    result_.wall_s = now_;
    const FleetNumbers numbers = fleet_->numbers();
    result_.machines_started = numbers.started;
    result_.machines_lost = numbers.lost;
    result_.machines_replaced = numbers.replaced;
    result_.rejected = desk_.rejected();
    result_.stale_by_age = desk_.stale_by_age();
    result_.unfinished = desk_.unfinished();
    result_.groups_set_aside = desk_.groups_set_aside();
    result_.work_limits = desk_.work_limits();
    result_.topology = broadcast_.size() > 0 ? broadcast_.topology().to_short_text() : "";
    result_.topologies_planned = broadcast_.topologies_planned();
    const double steps = std::max<double>(1, static_cast<double>(result_.by_step.size()));
    for (auto* ages : {&result_.in_flight, &result_.in_queue})
      for (auto& [age, n] : *ages) n /= steps;
    result_.usd_learner = s_.request.learner_usd_per_hour.value_or(0) * now_ / 3600;
    fleet_->close("the run has ended", now_);
    for (const double until = now_ + 600; now_ < until && !fleet_->empty(); now_ += 1) fleet_->tick(now_);
    for (std::size_t w = 0; w < workers_.size(); ++w) remove_worker(w);
  }

  const RunScenario& s_;
  const std::function<void(std::uint64_t)>& progress_;
  RunResult result_;
  EventQueue queue_;
  RunDesk desk_;
  RunBroadcast broadcast_;
  std::optional<RunFleet> fleet_;
  Draws lengths_, fates_;  // random response lengths; random losses, hangs and slowdowns
  double now_ = 0, tokens_mean_ = 1;
  std::size_t wanted_ = 0;  // machines planned

  RunWorkers workers_;
  Steps steps_;
  Outbox outbox_;
  CapacityWatch capacity_;
  std::deque<WorkerId> drained_;
  std::optional<double> alone_since_s_;
  std::map<std::uint64_t, PendingQuorum> pending_quorums_;      // by version
  std::deque<std::pair<Duration, Bytes>> measured_broadcasts_;  // not yet reported to the fleet
};

}  // namespace

Result<RunResult> simulate_run(const RunScenario& scenario, const std::function<void(std::uint64_t)>& progress) {
  return Simulation(scenario, progress).run();
}

}  // namespace echoline::sim

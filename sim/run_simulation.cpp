// The events of a simulated run (run_scenario.hpp): machines, workers, publications, leases (groups of rollouts lent to
// workers) and the learner's steps. Each event handler may push further events.
#include <algorithm>
#include <cmath>

#include "provisioner/capacity.hpp"
#include "sim/event_queue.hpp"
#include "sim/run_broadcast.hpp"
#include "sim/run_desk.hpp"
#include "sim/run_fleet.hpp"
#include "sim/run_parts.hpp"
#include "sim/run_plan.hpp"
#include "sim/run_scenario.hpp"
#include "sim/run_workers.hpp"

namespace echoline::sim {
namespace {

using namespace provisioner;
using State = WorkerState;

constexpr std::size_t kNoWorker = 0;  // in events that concern no worker
// Ticks call the fleet core and the desk. Their interval is one second per this many machines: 5 s for 10,000.
constexpr std::size_t kMachinesPerTickSecond = 2000;
constexpr std::size_t kCheckedWorkersMax = 256;  // with more workers, lost ones included, ticks check no invariants

constexpr double kGroupsHeldMax = 1024;          // per worker, by RunScenario::work_ahead
constexpr std::uint64_t kMachineStream = 32;     // random stream of the seed
constexpr std::size_t kAwaitingLongestMax = 64;  // per worker: groups that lack only their longest response

constexpr double kNoWorkersSecondsMax = 6 * 3600;                   // without a working worker; then the run ends
constexpr double kWaitSecondsMax = 24 * 3600, kWaitStepsMax = 100;  // for one batch; the longer time holds
constexpr std::size_t kWorkersMax = 2'000'000;                      // in a run, lost ones included

enum EventKind : std::uint32_t {
  kTick,
  kJoins,        // a machine has booted and its worker joins
  kPartArrives,  // a part of a newcomer's first policy
  kSynced,       // a newcomer has installed its first policy

  kGenerated,      // the group's tokens are generated, except perhaps for its longest response
  kGroupComplete,  // the group's longest response is complete
  kDelivered,      // a publication has arrived at the worker
  kInstalled,      // the worker has installed a policy

  kLossAnnounced,  // the provider announces the machine's end
  kDies,           // the machine is lost
  kHangs,          // the worker falls silent, but its machine still costs
  kLossNoticed,    // the learner notices a worker's death
  kHungGivenUp,    // a hung worker was away for too long

  kTrained,        // a learner step ends
  kEncoded,        // a publication can be sent
  kLinksFree,      // the learner's links have sent a publication
  kFinalWaitEnds,  // the wait for the workers to install the last policy
  kPreempts,       // many machines are lost: RunChurn::preemptions
  kSlows,          // many machines become slow: RunFaults::slowdowns
  kRecovers        // a slow machine has its own speed again
};

// A worker's speed, as shares of its own rates; see SimWorker.
struct Speed {
  double token_rate_fraction = 1, link_rate_fraction = 1;
  std::uint64_t slowed_by = 0;
};

// `worker_index` is a worker's index in workers_.
class Simulation {
 public:
  Simulation(const RunScenario& scenario, const std::function<void(std::uint64_t)>& progress)
      : scenario_(scenario),
        progress_(progress),
        desk_(DeskOptions{.pacing = scenario.pacing,
                          .lease = scenario.lease,
                          .equal_shares = scenario.lease_shares == LeaseShares::kEqual,
                          .any_age = scenario.lease_rule == LeaseRule::kAnyAge}),
        broadcast_(scenario),
        lengths_(scenario),
        machine_draws_(scenario.seed, kMachineStream),
        capacity_(result_.recoveries_s),
        quorums_(scenario, result_.publications) {}

  Result<RunResult> run() {
    ECHO_ASSIGN(RunStart start, plan_simulated_run(scenario_));
    result_.plan = std::move(start.plan);
    result_.plan_error = std::move(start.plan_error);
    result_.idle_predicted = start.idle_predicted;
    result_.machines_planned = start.wanted.size();
    fleet_.emplace(scenario_, start.rules, start.wanted,
                   RunFleet::Hooks{.on_booting = [this](Ticket ticket, std::size_t offer,
                                                        double joins_s) { on_booting(ticket, offer, joins_s); },
                                   .on_returned = [this](Ticket ticket) { on_returned(ticket); },
                                   .on_drain = [this](WorkerId id) { drain_worker(id); }},
                   result_);
    capacity_.target = start.rules_target;
    push(0, kTick, kNoWorker);
    for (std::size_t i = 0; i < scenario_.churn.preemptions.size(); ++i)
      push(seconds(scenario_.churn.preemptions[i].at), kPreempts, kNoWorker, i);
    for (std::size_t i = 0; i < scenario_.faults.slowdowns.size(); ++i)
      push(seconds(scenario_.faults.slowdowns[i].at), kSlows, kNoWorker, i);
    const double time_max = seconds(scenario_.time_max);
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
  static TimePoint time_of(double time_s) {
    constexpr double kTimeMaxS = 9e9;  // a TimePoint, in nanoseconds, holds little more
    return TimePoint(from_seconds(std::min(time_s, kTimeMaxS)));
  }
  // `detail`: by the kind, a version, a lease, a generation number or an index. Pushes nothing for kNeverS.
  void push(double at_s, EventKind kind, std::size_t worker, std::uint64_t detail = 0) {
    if (at_s < kNeverS) queue_.push(time_of(std::max(at_s, now_)), kind, static_cast<std::uint32_t>(worker), detail, 0);
  }
  static WorkerId id_of(std::size_t worker_index) { return RunWorkers::id_of(worker_index); }
  void notify_fleet(const FleetEvent& event) {
    // A fleet core that is never told that the learner waits keeps the planned size.
    if (scenario_.fleet_size == FleetSize::kPlanned && std::holds_alternative<fleet::LearnerWaiting>(event)) return;
    fleet_->handle(event, now_);
  }
  Receiver receiver(std::size_t worker_index) const {
    Receiver current = receiver_of(scenario_, scenario_.offers[workers_[worker_index].offer], id_of(worker_index));
    current.up.bits_per_s *= workers_[worker_index].link_rate_fraction;
    current.down.bits_per_s *= workers_[worker_index].link_rate_fraction;
    return current;
  }

  Status handle(const Event& event) {
    const std::size_t worker_index = event.host;
    const std::uint64_t detail = event.detail;
    switch (static_cast<EventKind>(event.kind)) {
      case kTick:
        return tick();
      case kJoins:
        return on_join(worker_index), ok();
      case kPartArrives:
        return on_part_arrival(worker_index), ok();
      case kSynced:
        return on_synced(worker_index), ok();
      case kGenerated:
        return on_generated(worker_index, static_cast<std::uint32_t>(detail)), ok();
      case kGroupComplete:
        return submit_group(worker_index, LeaseId{detail}), ok();
      case kDelivered:
        return on_delivered(worker_index, detail), ok();
      case kInstalled:
        return on_installed(worker_index, detail), ok();
      case kLossAnnounced:
        return on_loss_announced(worker_index), ok();
      case kDies:
        return kill_worker(worker_index), ok();
      case kHangs:
        return hang_worker(worker_index), ok();
      case kLossNoticed:
        return on_loss_noticed(worker_index), ok();
      case kHungGivenUp:
        return on_hung_given_up(worker_index), ok();
      case kTrained:
        return on_trained();
      case kEncoded:
        return on_encoded();
      case kLinksFree:
        return on_links_free();
      case kFinalWaitEnds:
        return result_.ended = "completed", ok();
      case kPreempts:
        return preempt_machines(detail), ok();
      case kSlows:
        return slow_machines(detail);
      case kRecovers:
        // Only if no other slowdown has begun for the machine since. SimWorker::slowed_by counts from 1.
        return workers_[worker_index].slowed_by == detail + 1 ? change_speed(worker_index, {.slowed_by = 0}) : ok();
    }
    return ok();
  }

  Status tick() {
    fleet_->tick(now_);
    desk_.renew_or_expire(now_, [this](WorkerId id) { return !workers_.by_id(id).is_dead(); });
    update_capacity();
    if (!steps_.have_begun()) ECHO_TRY(begin_if_ready());
    if (steps_.have_begun()) {
      request_work_for_idle();
      try_step();
    }
    end_if_last_policy_is_installed();
    check_for_end();
    if (workers_.size() <= kCheckedWorkersMax) {
      workers_.check();
      quorums_.check();
      fleet_->check();
    }
    const double interval_s =
        std::clamp(static_cast<double>(workers_.working()) / kMachinesPerTickSecond, 1.0, seconds(rules::kTickGapMax));
    push(now_ + interval_s, kTick, kNoWorker);
    return ok();
  }

  void on_booting(Ticket ticket, std::size_t offer, double joins_s) {
    SimWorker worker;
    worker.ticket = ticket;
    worker.offer = offer;
    worker.promised_rollouts_per_s = scenario_.offers[offer].offer.rollouts_per_s;
    worker.tokens_per_s = worker.promised_rollouts_per_s * scenario_.offers[offer].rate_share * lengths_.mean();
    push(joins_s, kJoins, workers_.add(std::move(worker)));
  }

  void on_join(std::size_t worker_index) {
    SimWorker& worker = workers_[worker_index];
    if (!worker.is(State::kBooting)) return;
    workers_.set_state(worker_index, State::kSyncing);
    worker.joined_s = now_;
    broadcast_.add(receiver(worker_index));
    fleet_->machine(worker.ticket).worker = id_of(worker_index).value;
    notify_fleet(fleet::Joined{id_of(worker_index), scenario_.offers[worker.offer].offer.id});
    const RunChurn& churn = scenario_.churn;
    if (churn.per_hour > 0) {
      const double dies_s = now_ + machine_draws_.exponential(3600 / churn.per_hour);
      if (machine_draws_.chance(churn.announced)) push(dies_s - seconds(churn.notice), kLossAnnounced, worker_index);
      push(dies_s, kDies, worker_index);
    }
    if (scenario_.faults.hangs_per_hour > 0)
      push(now_ + machine_draws_.exponential(3600 / scenario_.faults.hangs_per_hour), kHangs, worker_index);
    if (steps_.have_begun()) send_first_policy(worker_index);
  }

  // A newcomer gets the newest policy that was sent, from a worker that has it.
  void send_first_policy(std::size_t worker_index) {
    SimWorker& worker = workers_[worker_index];
    worker.delivered = outbox_.newest_sent;
    worker.sent_from_version = outbox_.newest_sent + 1;
    const double transfer_s = seconds(broadcast_.neighbour_transfer_time(snapshot_bytes(), receiver(worker_index)));
    schedule_first_policy_parts(worker_index, transfer_s);
    push(now_ + transfer_s + install_s(), kSynced, worker_index, outbox_.newest_sent);
  }
  // The fleet core counts each part as progress. Without parts, a slow transfer would look like a stalled worker.
  void schedule_first_policy_parts(std::size_t worker_index, double transfer_s) {
    for (std::uint64_t part = 1; part <= rules::kSnapshotParts; ++part)
      push(now_ + transfer_s * static_cast<double>(part) / static_cast<double>(rules::kSnapshotParts), kPartArrives,
           worker_index);
  }
  void on_part_arrival(std::size_t worker_index) {
    if (!workers_[worker_index].is_dead())
      record_traffic(worker_index,
                     static_cast<double>(snapshot_bytes().count) / static_cast<double>(rules::kSnapshotParts), 0);
  }

  void on_synced(std::size_t worker_index) {
    SimWorker& worker = workers_[worker_index];
    if (!worker.is(State::kSyncing)) return;
    worker.version = std::max(worker.version, worker.delivered);
    start_working(worker_index);
  }

  void start_working(std::size_t worker_index) {
    workers_.set_state(worker_index, State::kWorking);
    result_.workers_peak = std::max(result_.workers_peak, workers_.working());
    request_work(worker_index);
  }

  void remove_worker(std::size_t worker_index) {
    SimWorker& worker = workers_[worker_index];
    if (worker.is_dead()) return;
    worker.stop_generating(now_);
    if (!worker.is(State::kBooting)) {
      result_.present_s += now_ - worker.joined_s;
      result_.busy_s += worker.busy_s;
      broadcast_.remove(id_of(worker_index));
      quorums_.on_lost(worker, now_);
    }
    fleet_->machine(worker.ticket).version = worker.version;
    workers_.set_state(worker_index, State::kDead);
  }

  // The provider has ended the machine on request.
  void on_returned(Ticket ticket) {
    const auto worker_index = workers_.find(ticket);
    if (!worker_index) return;
    remove_worker(*worker_index);
    desk_.on_worker_lost(id_of(*worker_index), now_);
    workers_.forget(ticket);
  }

  void on_loss_announced(std::size_t worker_index) {
    if (workers_[worker_index].is_dead() || steps_.is(LearnerPhase::kOver)) return;
    notify_fleet(fleet::Ending{workers_[worker_index].ticket, "it will be taken back", /*outbid=*/true});
  }
  void kill_worker(std::size_t worker_index) {
    if (workers_[worker_index].is_dead()) return;
    remove_worker(worker_index);
    push(now_ + seconds(scenario_.heartbeat_timeout), kLossNoticed, worker_index);
  }
  void on_loss_noticed(std::size_t worker_index) {
    desk_.on_worker_lost(id_of(worker_index), now_);
    fleet_->lose_machine(workers_[worker_index].ticket, /*outbid=*/true, now_);
    workers_.forget(workers_[worker_index].ticket);
  }
  void hang_worker(std::size_t worker_index) {
    if (workers_[worker_index].is_dead()) return;
    remove_worker(worker_index);
    push(now_ + seconds(scenario_.request.fleet.away_max), kHungGivenUp, worker_index);
    desk_.on_worker_lost(id_of(worker_index), now_);
  }
  void on_hung_given_up(std::size_t worker_index) {
    notify_fleet(fleet::Left{id_of(worker_index), "away for too long"});
  }

  void preempt_machines(std::size_t preemption_index) {
    const Preemption& preemption = scenario_.churn.preemptions[preemption_index];
    for (std::size_t worker_index = 0; worker_index < workers_.size(); ++worker_index) {
      if (is_present(worker_index, preemption.region) && machine_draws_.chance(preemption.share))
        kill_worker(worker_index);
    }
  }
  bool is_present(std::size_t worker_index, std::optional<std::uint32_t> region) const {
    const bool present = workers_[worker_index].is(State::kWorking) || workers_[worker_index].is(State::kSyncing);
    return present && (!region || scenario_.offers[workers_[worker_index].offer].region == *region);
  }

  Status slow_machines(std::size_t slowdown_index) {
    const Slowdown& slowdown = scenario_.faults.slowdowns[slowdown_index];
    for (std::size_t worker_index = 0; worker_index < workers_.size(); ++worker_index) {
      if (!is_present(worker_index, slowdown.region) || !machine_draws_.chance(slowdown.share)) continue;
      ECHO_TRY(change_speed(worker_index, {.token_rate_fraction = slowdown.token_rate_left,
                                           .link_rate_fraction = slowdown.link_rate_left,
                                           .slowed_by = slowdown_index + 1}));
      if (slowdown.lasts) push(now_ + seconds(*slowdown.lasts), kRecovers, worker_index, slowdown_index);
    }
    return ok();
  }
  // The worker's current work, and transfers through it, continue at the new speed.
  Status change_speed(std::size_t worker_index, const Speed& speed) {
    SimWorker& worker = workers_[worker_index];
    if (worker.is_dead()) return ok();
    if (worker.generating) {
      worker.generation_ends_s = now_ + std::max(0.0, worker.generation_ends_s - now_) * worker.token_rate_fraction /
                                            speed.token_rate_fraction;
      push(worker.generation_ends_s, kGenerated, worker_index, ++worker.generation_number);
    }
    workers_.set_token_rate_fraction(worker_index, speed.token_rate_fraction);
    worker.slowed_by = speed.slowed_by;
    const double link_rate_before = std::exchange(worker.link_rate_fraction, speed.link_rate_fraction);
    if (link_rate_before == speed.link_rate_fraction) return ok();
    ECHO_TRY(broadcast_.change_links(receiver(worker_index)));
    for (std::size_t other = workers_.first_alive(); other < workers_.size(); ++other) {
      Arrival& arrival = workers_[other].arrival;
      if (arrival.complete || arrival.version != outbox_.newest_sent) continue;
      arrival.remaining_share -= (now_ - arrival.since_s) / std::max(arrival.transfer_s, 1e-9);
      arrival.since_s = now_;
      arrival.remaining_share = std::max(0.0, arrival.remaining_share);
      arrival.transfer_s = seconds(broadcast_.time_of(id_of(other)));
      push(arrival.ends_s(), kDelivered, other, arrival.version);
    }
    return ok();
  }

  void drain_worker(WorkerId id) {
    const std::size_t worker_index = id.value - 1;
    if (workers_[worker_index].is_dead()) return;
    if (workers_[worker_index].drain == SimWorker::Drain::kNo)
      workers_[worker_index].drain = SimWorker::Drain::kAsked;  // it takes no new work
    workers_.leave_idle_queue(worker_index);
    workers_.end_drain(worker_index);
  }
  void update_capacity() {
    // Not in drain_worker(), because the core must not be called during its own callback.
    while (const auto id = workers_.next_drained()) notify_fleet(fleet::Drained{*id});
    capacity_.measure(workers_.rollouts_per_s(), now_);
  }

  // Ends the run if the learner waits for too long, or if there are no workers and none will come.
  void check_for_end() {
    if (steps_.is(LearnerPhase::kWaiting) &&
        now_ - steps_.wait_began_s > std::max(kWaitSecondsMax, kWaitStepsMax * seconds(scenario_.step_time)))
      result_.ended = "the learner waited for a day";
    if (workers_.size() > kWorkersMax) result_.ended = fmt::format("{} machines were rented", workers_.size());
    const bool is_idle = workers_.working() == 0 && !steps_.is(LearnerPhase::kTraining);
    const double idle_s = capacity_.idle_seconds(is_idle, now_);
    if (!is_idle) return;
    if (fleet_->empty() && fleet_->numbers().money_spent)
      result_.ended = "the budget is spent";
    else if (idle_s >= kNoWorkersSecondsMax)
      result_.ended = "no workers";
  }

  // A run keeps its machines until all that are present have the last policy, as learner/service does.
  void end_if_last_policy_is_installed() {
    if (!steps_.is(LearnerPhase::kFinishing)) return;
    for (std::size_t worker_index = workers_.first_alive(); worker_index < workers_.size(); ++worker_index)
      if ((workers_[worker_index].is(State::kWorking) || workers_[worker_index].is(State::kSyncing)) &&
          workers_[worker_index].version < desk_.step())
        return;
    result_.ended = "completed";
  }

  // Begins when all planned machines have joined, or after join_timeout with those that have, and publishes version 0.
  Status begin_if_ready() {
    const std::size_t joined = broadcast_.size();
    const bool all_joined = joined >= std::max<std::size_t>(1, result_.machines_planned);
    if (joined == 0 || (!all_joined && now_ < seconds(scenario_.request.fleet.join_timeout))) return ok();
    steps_.set_phase(LearnerPhase::kWaiting);
    result_.first_snapshot_s = now_;
    steps_.wait_began_s = now_;
    notify_fleet(fleet::LearnerWaiting{true});
    for (std::size_t worker_index = 0; worker_index < workers_.size(); ++worker_index)
      workers_[worker_index].sent_from_version = 0;
    return publish({.version = 0, .at_s = now_, .bytes = snapshot_bytes(), .snapshot = true});
  }

  Status encode_publication() {
    const bool snapshot = scenario_.publication_form == PublicationForm::kSnapshot;
    const std::vector<Bytes>& delta_bytes = scenario_.delta_bytes;
    const std::uint64_t index = outbox_.deltas_made++;
    const Bytes bytes = snapshot || delta_bytes.empty()
                            ? snapshot_bytes()
                            : delta_bytes[std::min<std::size_t>(index, delta_bytes.size() - 1)];
    outbox_.encoding.push_back({.version = desk_.step(), .at_s = now_, .bytes = bytes, .snapshot = snapshot});
    if (scenario_.encode_time == Duration{}) return on_encoded();
    outbox_.encoder_free_s = std::max(outbox_.encoder_free_s, now_) + seconds(scenario_.encode_time);
    push(outbox_.encoder_free_s, kEncoded, kNoWorker);
    return ok();
  }

  // Sends the oldest encoded publication, or merges it with the one that still waits for the links.
  Status on_encoded() {
    Outgoing next = outbox_.encoding.front();
    outbox_.encoding.pop_front();
    if (!outbox_.links_busy) return publish(next);
    if (outbox_.waiting) {  // the links are behind, so waiting publications are merged
      ++result_.publications_merged;
      // Two deltas together are as large as both, but a snapshot is sent if that is smaller.
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
    std::size_t targets = 0;
    std::vector<std::size_t> syncing_workers;
    for (std::size_t worker_index = workers_.first_alive(); worker_index < workers_.size(); ++worker_index) {
      SimWorker& worker = workers_[worker_index];
      const bool is_first_policy = publication.version == 0 && worker.is(State::kSyncing);
      if (!is_first_policy && !worker.is(State::kWorking)) {
        // A syncing worker gets this publication after its first policy, and no quorum waits for it.
        if (worker.is(State::kSyncing)) {
          worker.sent_from_version = publication.version + 1;
          syncing_workers.push_back(worker_index);
        }
        continue;
      }
      ++targets;
      const double delivery_s = seconds(broadcast_.time_of(id_of(worker_index)));
      worker.was_sent_version_0 |= is_first_policy;
      if (is_first_policy) schedule_first_policy_parts(worker_index, delivery_s);
      record_traffic(worker_index, is_first_policy ? 0 : bytes, bytes * broadcast_.copies_sent_by(id_of(worker_index)));
      worker.arrival = {.version = publication.version,
                        .since_s = now_,
                        .remaining_share = 1,
                        .transfer_s = delivery_s,
                        .complete = false};
      push(now_ + delivery_s, kDelivered, worker_index, publication.version);
    }
    row.workers = targets;
    result_.publications.push_back(row);
    quorums_.add(targets);
    // After the events of all targets, so that a target comes first at an equal time.
    for (const std::size_t worker_index : syncing_workers)
      push(now_ + seconds(broadcast_.time_of(id_of(worker_index))), kDelivered, worker_index, publication.version);
    // The links are busy until the first worker has the whole payload: then the learner has sent all of it.
    outbox_.links_busy = true;
    push(now_ + seconds(broadcast_.size() > 0 ? broadcast_.first_completion() : Duration{}), kLinksFree, kNoWorker);
    return ok();
  }

  Status on_links_free() {
    outbox_.links_busy = false;
    if (!outbox_.waiting) return ok();
    const Outgoing next = *std::exchange(outbox_.waiting, std::nullopt);
    return publish(next);
  }

  void record_traffic(std::size_t worker_index, double bytes_received, double bytes_forwarded) {
    SimWorker& worker = workers_[worker_index];
    worker.received_bytes += bytes_received;
    worker.forwarded_bytes += bytes_forwarded;
    fleet_->record_traffic(worker.ticket, bytes_received, bytes_forwarded);
    notify_fleet(fleet::TrafficMeasured{id_of(worker_index), Bytes{static_cast<std::uint64_t>(worker.received_bytes)},
                                        Bytes{static_cast<std::uint64_t>(worker.forwarded_bytes)}});
  }

  void on_delivered(std::size_t worker_index, std::uint64_t version) {
    SimWorker& worker = workers_[worker_index];
    if (worker.is_dead()) return;
    if (worker.arrival.version == version) {
      constexpr double kRoundingS = 1e-6;
      // A later end means that the speed has changed and another event was pushed.
      if (worker.arrival.complete || now_ + kRoundingS < worker.arrival.ends_s()) return;
      worker.arrival.complete = true;
    }
    const bool is_newest = version >= worker.delivered;
    worker.delivered = std::max(worker.delivered, version);
    if (worker.is(State::kSyncing)) {  // installed together with the first policy
      if (version == 0) push(now_ + install_s(), kInstalled, worker_index, worker.delivered);
      return;
    }
    if (!is_newest) return;
    if (scenario_.on_new_policy == OnNewPolicy::kFinish && !worker.queue.empty()) {
      worker.install_is_pending = true;
      return;
    }
    install(worker_index);
  }

  Bytes snapshot_bytes() const { return scenario_.snapshot_bytes.value_or(scenario_.request.full_bytes); }
  double install_s() const {
    return seconds(scenario_.install_time.value_or(scenario_.request.fleet.install_time_expected));
  }

  void install(std::size_t worker_index) {
    SimWorker& worker = workers_[worker_index];
    worker.install_is_pending = false;
    if (worker.installing) return;  // on_installed() then installs the newest version
    worker.installing = true;
    if (scenario_.on_new_policy == OnNewPolicy::kAbort) {
      worker.stop_generating(now_);
      ++worker.generation_number;
      for (const Work& work : std::exchange(worker.queue, {})) desk_.on_given_back(id_of(worker_index), work.lease);
      for (const auto& [lease, work] : std::exchange(worker.awaiting_longest, {}))
        desk_.on_given_back(id_of(worker_index), lease);
    }
    const double pause_s = install_s();
    if (worker.generating) {     // generation pauses during the installation
      worker.busy_s -= pause_s;  // the generation's whole time will be added
      worker.generation_ends_s += pause_s;
      push(worker.generation_ends_s, kGenerated, worker_index, ++worker.generation_number);
    }
    push(now_ + pause_s, kInstalled, worker_index, worker.delivered);
  }

  void on_installed(std::size_t worker_index, std::uint64_t version) {
    SimWorker& worker = workers_[worker_index];
    if (worker.is_dead()) return;
    const std::uint64_t version_before = worker.version;
    worker.version = std::max(worker.version, version);
    worker.installing = false;
    quorums_.on_installed(worker, version_before, now_);
    end_if_last_policy_is_installed();
    if (worker.is(State::kSyncing)) return start_working(worker_index);
    if (worker.delivered > worker.version) return install(worker_index);
    start_generation(worker_index);
    request_work(worker_index);
  }

  // ---- leases ----

  // The group in progress and those that the worker completes in work_ahead, at least groups_at_once.
  std::size_t groups_held_max(const SimWorker& worker) const {
    const double rollouts_ahead = worker.promised_rollouts_per_s * seconds(scenario_.work_ahead);
    const double groups_ahead = std::min(rollouts_ahead / scenario_.pacing.group_size, kGroupsHeldMax);
    return std::max<std::size_t>(scenario_.groups_at_once, 1 + static_cast<std::size_t>(groups_ahead));
  }

  // Requests as many groups as the worker may hold. Returns whether it got one.
  bool request_work(std::size_t worker_index) {
    SimWorker& worker = workers_[worker_index];
    const std::size_t groups_max = groups_held_max(worker);
    if (!worker.is(State::kWorking) || worker.drain != SimWorker::Drain::kNo) return false;
    if (worker.installing || worker.install_is_pending) return false;
    if (worker.queue.size() >= groups_max || worker.awaiting_longest.size() >= kAwaitingLongestMax) return false;
    // A worker generates its groups one after another, so one group keeps it busy.
    const auto leases = desk_.grant(id_of(worker_index), Version{worker.version}, groups_max - worker.queue.size(),
                                    Version{outbox_.newest_sent}, /*free_share=*/worker.queue.empty() ? 1 : 0, now_);
    for (const replay_buffer::LiveLease& lease : leases) worker.queue.push_back(lengths_.draw_work(lease));
    if (!leases.empty()) workers_.leave_idle_queue(worker_index);  // to enter it again behind the others
    if (worker.queue.size() < groups_max) workers_.enter_idle_queue(worker_index);
    start_generation(worker_index);
    return !leases.empty();
  }

  // Serves the worker that has waited longest first.
  void request_work_for_idle() {
    if (workers_.idle().empty() || desk_.has_no_room(Version{outbox_.newest_sent}, now_)) return;
    std::vector<std::size_t> longest_wait_first;  // a copy, because request_work() changes idle()
    for (const auto& [place, worker_index] : workers_.idle()) longest_wait_first.push_back(worker_index);
    for (const std::size_t worker_index : longest_wait_first) {
      if (desk_.has_no_room(Version{outbox_.newest_sent}, now_)) return;
      if (!desk_.has_no_room(Version{workers_[worker_index].version}, now_)) request_work(worker_index);
    }
  }

  void start_generation(std::size_t worker_index) {
    SimWorker& worker = workers_[worker_index];
    if (worker.generating || worker.installing || worker.queue.empty() || !worker.is(State::kWorking)) return;
    worker.generating = true;
    worker.generation_began_s = now_;
    worker.generation_ends_s = now_ + worker.queue.front().tokens / (worker.tokens_per_s * worker.token_rate_fraction);
    push(worker.generation_ends_s, kGenerated, worker_index, ++worker.generation_number);
  }

  void on_generated(std::size_t worker_index, std::uint32_t generation_number) {
    SimWorker& worker = workers_[worker_index];
    if (!worker.is(State::kWorking) || generation_number != worker.generation_number) return;
    const double generation_began_s = worker.generation_began_s;
    worker.stop_generating(now_);
    const Work work = worker.queue.front();
    worker.queue.pop_front();
    worker.awaiting_longest[work.lease] = work;
    const double longest_s = scenario_.sequence_tokens_per_s
                                 ? work.longest / (*scenario_.sequence_tokens_per_s * worker.token_rate_fraction)
                                 : 0;
    const double complete_s = std::max(now_, generation_began_s + longest_s);
    if (complete_s > now_)
      push(complete_s, kGroupComplete, worker_index, work.lease.value);
    else
      submit_group(worker_index, work.lease);
    if (worker.install_is_pending && worker.queue.empty()) install(worker_index);
    start_generation(worker_index);
    request_work(worker_index);
  }

  void submit_group(std::size_t worker_index, LeaseId lease) {
    SimWorker& worker = workers_[worker_index];
    const auto it = worker.awaiting_longest.find(lease);
    if (it == worker.awaiting_longest.end()) return;  // given back meanwhile
    const Work work = it->second;
    worker.awaiting_longest.erase(it);
    result_.tokens_generated += work.tokens;
    DeskGroup group;
    group.worker = id_of(worker_index);
    group.granted_s = work.granted_s;
    group.tokens = work.tokens;
    group.longest = work.longest;
    group.mixed_versions = worker.version > work.version.value;
    const auto lease_seconds = desk_.submit(lease, group, now_);
    if (lease_seconds) {
      fleet_->machine(worker.ticket).rollouts += scenario_.pacing.group_size;
      // Counts as learner/worker_meter does: what the worker reports, but at least half of the time with leases.
      const double busy_s = worker.busy_seconds(now_);
      const double reported_s = busy_s - std::exchange(worker.reported_busy_s, busy_s);
      notify_fleet(fleet::Heartbeat{.worker = id_of(worker_index),
                                    .rollouts = static_cast<double>(scenario_.pacing.group_size),
                                    .busy_s = replay_buffer::counted_work_seconds(reported_s, *lease_seconds),
                                    .without_work_s = desk_.take_seconds_without_work(id_of(worker_index), now_)});
    }
    workers_.end_drain(worker_index);
    try_step();
  }

  // ---- learner ----

  // Begins a step if the learner waits and a batch is ready.
  void try_step() {
    if (!steps_.is(LearnerPhase::kWaiting) || desk_.step() >= *scenario_.pacing.steps_total) return;
    auto batch = desk_.next_batch(scenario_.pacing.groups_per_step(), now_);
    if (!batch) return;
    steps_.set_phase(LearnerPhase::kTraining);
    notify_fleet(fleet::LearnerWaiting{false});
    SimStep row;
    row.step = desk_.step() + 1;
    row.wait_s = now_ - steps_.wait_began_s;
    const std::uint64_t step = desk_.step();
    for (const DeskGroup& group : *batch) {
      row.staleness[step - std::min(step, group.version.value)] += scenario_.pacing.group_size;
      row.tokens += group.tokens;
      row.mixed_version_rollouts += group.mixed_versions ? scenario_.pacing.group_size : 0;
    }
    row.tokens_mean =
        static_cast<double>(row.tokens) / (static_cast<double>(batch->size()) * scenario_.pacing.group_size);
    const double base_s = scenario_.step_seconds.empty() ? seconds(scenario_.step_time)
                                                         : scenario_.step_seconds[step % scenario_.step_seconds.size()];
    row.train_s = base_s + scenario_.step_s_per_token * static_cast<double>(row.tokens);
    result_.tokens_trained += static_cast<double>(row.tokens);
    // Sums over the steps; finish() divides them by the number of steps. The batch itself does not count as waiting.
    for (const auto& [age, rollouts] : desk_.in_flight_by_age())
      result_.in_flight[age] += static_cast<double>(rollouts);
    for (const auto& [age, rollouts] : desk_.waiting_by_age()) result_.in_queue[age] += static_cast<double>(rollouts);
    for (const auto& [age, rollouts] : row.staleness) result_.in_queue[age] -= static_cast<double>(rollouts);
    row.waiting = desk_.rollouts_waiting() - batch->size() * scenario_.pacing.group_size;
    row.in_flight = desk_.rollouts_in_flight();
    steps_.row = std::move(row);
    steps_.batch = *std::move(batch);
    push(now_ + steps_.row.train_s, kTrained, kNoWorker);
    request_work_for_idle();
  }

  Status on_trained() {
    steps_.set_phase(LearnerPhase::kWaiting);
    desk_.on_trained_batch(std::exchange(steps_.batch, {}), now_);
    steps_.wait_began_s = now_;
    notify_fleet(fleet::StepMeasured{.step_time = from_seconds(steps_.row.train_s),
                                     .steps_left = *scenario_.pacing.steps_total - desk_.step(),
                                     .rollouts_waiting = desk_.rollouts_waiting()});
    // Workers that wait for work show the fleet core that it has more capacity than work.
    const bool has_no_room = desk_.has_no_room(Version{outbox_.newest_sent}, now_);
    for (const auto& [place, worker_index] : workers_.idle())
      notify_fleet(fleet::Heartbeat{.worker = id_of(worker_index),
                                    .turned_away = has_no_room && !workers_[worker_index].holds_work(),
                                    .without_work_s = desk_.take_seconds_without_work(id_of(worker_index), now_)});
    for (const AwaitedQuorums::Measured& measured : quorums_.take_measured())
      notify_fleet(fleet::BroadcastMeasured{.broadcast_time = measured.broadcast_time,
                                            .payload = measured.payload,
                                            .install_time = from_seconds(install_s())});
    const FleetStatus numbers = fleet_->numbers();
    capacity_.target = numbers.target_rollouts_per_s;
    SimStep row = std::exchange(steps_.row, {});
    row.at_s = now_;
    row.working = workers_.working();
    row.joining = numbers.joining;
    row.rollouts_per_s = workers_.rollouts_per_s();
    row.target_rollouts_per_s = capacity_.target;
    row.usd = fleet_->usd(now_);
    row.usd_per_hour = fleet_->usd_per_hour() + scenario_.request.learner_usd_per_hour.value_or(0);
    result_.by_step.push_back(std::move(row));
    result_.steps = desk_.step();
    if (progress_) progress_(result_.steps);
    const bool is_last_step = desk_.step() >= *scenario_.pacing.steps_total;
    if (is_last_step || desk_.step() % static_cast<std::uint64_t>(scenario_.request.pace.publish_every) == 0)
      ECHO_TRY(encode_publication());
    if (is_last_step) {
      steps_.set_phase(LearnerPhase::kFinishing);
      steps_.wait_began_s = now_;
      push(now_ + seconds(rules::kFinalInstallWait), kFinalWaitEnds, kNoWorker);
      return ok();
    }
    notify_fleet(fleet::LearnerWaiting{true});
    request_work_for_idle();
    try_step();
    return ok();
  }

  // Completes the result and returns all machines.
  void finish() {
    workers_.check();
    steps_.set_phase(LearnerPhase::kOver);
    result_.wall_s = now_;
    const FleetStatus numbers = fleet_->numbers();
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
      for (auto& [age, rollouts] : *ages) rollouts /= steps;
    result_.usd_learner = scenario_.request.learner_usd_per_hour.value_or(0) * now_ / 3600;
    fleet_->close("the run has ended", now_);
    constexpr double kReturnSecondsMax = 600;
    for (const double deadline = now_ + kReturnSecondsMax; now_ < deadline && !fleet_->empty(); now_ += 1)
      fleet_->tick(now_);
    for (std::size_t worker_index = 0; worker_index < workers_.size(); ++worker_index) remove_worker(worker_index);
  }

  const RunScenario& scenario_;
  const std::function<void(std::uint64_t)>& progress_;
  RunResult result_;
  EventQueue queue_;
  RunDesk desk_;
  RunBroadcast broadcast_;
  std::optional<RunFleet> fleet_;
  ResponseLengths lengths_;
  Draws machine_draws_;  // random losses, hangs and slowdowns
  double now_ = 0;

  RunWorkers workers_;
  Steps steps_;
  Outbox outbox_;
  CapacityWatch capacity_;
  AwaitedQuorums quorums_;
};

}  // namespace

Result<RunResult> simulate_run(const RunScenario& scenario, const std::function<void(std::uint64_t)>& progress) {
  return Simulation(scenario, progress).run();
}

}  // namespace echoline::sim

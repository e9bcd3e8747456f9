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
constexpr std::size_t kCheckedMax = 256;  // up to this many workers, every tick checks the invariants
constexpr double kGroupsHeldMax = 1024;
constexpr std::size_t kTailsMax = 64;           // per worker: groups that lack only their longest responses
constexpr double kStuckAfter = 6 * 3600;        // seconds without a worker
constexpr double kWaitMax = 24 * 3600;          // seconds for one batch, or 100 steps if that is longer
constexpr std::size_t kWorkersMax = 2'000'000;  // in a run, lost ones included

enum Kind : std::uint32_t {
  kTick,
  kJoins,
  kArrives,
  kSynced,
  kServed,
  kHandIn,
  kDelivered,
  kInstalled,
  kEnding,
  kDies,
  kHangs,
  kNoticed,
  kGivenUp,
  kTrained,
  kEncoded,
  kLinksFree,
  kFinalWaitEnds,
  kPreempts,
  kSlows,
  kRecovers
};
struct Open {             // a publication whose T_b is still unknown
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
  std::optional<Outgoing> waiting;  // for the links
  std::uint64_t newest_out = 0, deltas_made = 0;
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
  void move(Learner to) {
    const bool follows = to == Learner::kOver || (to == Learner::kTraining && is(Learner::kWaiting)) ||
                         (to == Learner::kFinishing && is(Learner::kWaiting)) ||
                         (to == Learner::kWaiting && (is(Learner::kTraining) || is(Learner::kNotBegun)));
    ECHO_CHECK(follows, "the learner: from {} to {}", static_cast<int>(state), static_cast<int>(to));
    state = to;
  }
};

// Measures the time from too little capacity until there is enough again, after there once was.
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
        desk_({scenario.pacing, scenario.lease, scenario.shares == Shares::kEqual, scenario.leases == Leases::kAnyAge}),
        broadcast_(scenario),
        lengths_(scenario.seed, 31),
        fates_(scenario.seed, 32),
        capacity_(result_.recoveries_s) {}

  Result<RunResult> run() {
    ECHO_ASSIGN(RunStart start, plan_simulated_run(s_));
    result_.plan = std::move(start.plan);
    result_.plan_trouble = std::move(start.trouble);
    result_.planned = start.wanted.size();
    tokens_mean_ = mean_tokens(s_);
    fleet_.emplace(s_, start.rules, start.wanted,
                   RunFleet::Hooks{[this](Ticket ticket, std::size_t offer, double at) { booting(ticket, offer, at); },
                                   [this](Ticket ticket) { returned(ticket); }, [this](WorkerId id) { drain(id); }},
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
  void hear(const FleetEvent& event) { fleet_->hear(event, now_); }
  Receiver receiver(std::size_t w) const {
    Receiver r = receiver_of(s_, s_.offers[workers_[w].offer], id_of(w));
    r.up.bits_per_s *= workers_[w].links_left;
    r.down.bits_per_s *= workers_[w].links_left;
    return r;
  }

  Status handle(const Event& e) {
    const std::size_t w = e.host;
    switch (static_cast<Kind>(e.kind)) {
      case kTick:
        return tick();
      case kJoins:
        return joins(w), ok();
      case kArrives:
        return arrives(w), ok();
      case kSynced:
        return synced(w), ok();
      case kServed:
        return served(w, static_cast<std::uint32_t>(e.a)), ok();
      case kHandIn:
        return hand_in(w, LeaseId{e.a}), ok();
      case kDelivered:
        return delivered(w, e.a), ok();
      case kInstalled:
        return installed(w, e.a), ok();
      case kEnding:
        return ending(w), ok();
      case kDies:
        return dies(w), ok();
      case kHangs:
        return hangs(w), ok();
      case kNoticed:
        return noticed(w), ok();
      case kGivenUp:
        return given_up(w), ok();
      case kTrained:
        return trained();
      case kEncoded:
        return encoded();
      case kLinksFree:
        return links_free();
      case kFinalWaitEnds:
        return result_.ended = "completed", ok();
      case kPreempts:
        return preempts(e.a), ok();
      case kSlows:
        return slows(e.a);
      case kRecovers:
        return workers_[w].slowed_by == e.a + 1 ? turns(w, 1, 1, 0) : ok();
    }
    return ok();
  }

  Status tick() {
    fleet_->tick(now_);
    desk_.expire(now_, [this](WorkerId id) { return !workers_.of(id).dead(); });
    mind_capacity();
    if (!steps_.begun()) ECHO_TRY(perhaps_begin());
    if (steps_.begun()) {
      serve_idle();
      try_step();
    }
    end_if_last_policy_is_installed();
    mind_end();
    if (workers_.size() <= kCheckedMax) workers_.check();
    const double every =
        std::clamp(static_cast<double>(workers_.working()) / kMachinesPerTick, 1.0, seconds(rules::kStepMax));
    push(now_ + every, kTick, 0);
    return ok();
  }

  void booting(Ticket ticket, std::size_t offer, double joins_s) {
    SimWorker worker;
    worker.ticket = ticket;
    worker.offer = offer;
    worker.promised = s_.offers[offer].offer.rollouts_per_s;
    worker.tokens_per_s = worker.promised * s_.offers[offer].rate_share * tokens_mean_;
    push(joins_s, kJoins, workers_.add(std::move(worker)));
  }

  void joins(std::size_t w) {
    SimWorker& worker = workers_[w];
    if (!worker.is(State::kBooting)) return;
    workers_.move(w, State::kSyncing);
    worker.joined_s = now_;
    broadcast_.add(receiver(w));
    fleet_->machine(worker.ticket).worker = w + 1;
    hear(fleet::Joined{id_of(w), s_.offers[worker.offer].offer.id});
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
    worker.delivered = out_.newest_out;
    worker.not_before = out_.newest_out + 1;
    const double takes = seconds(broadcast_.from_a_neighbour(snapshot_bytes(), receiver(w)));
    receives_first(w, takes);
    push(now_ + takes + install_s(), kSynced, w, out_.newest_out);
  }
  void receives_first(std::size_t w, double takes) {
    for (std::uint64_t part = 1; part <= rules::kArrivalParts; ++part)
      push(now_ + takes * static_cast<double>(part) / static_cast<double>(rules::kArrivalParts), kArrives, w);
  }
  void arrives(std::size_t w) {
    if (!workers_[w].dead())
      moved(w, static_cast<double>(snapshot_bytes().count) / static_cast<double>(rules::kArrivalParts), 0);
  }

  void synced(std::size_t w) {
    SimWorker& worker = workers_[w];
    if (!worker.is(State::kSyncing)) return;
    worker.version = std::max(worker.version, worker.delivered);
    starts_working(w);
  }

  void starts_working(std::size_t w) {
    workers_.move(w, State::kWorking);
    result_.workers_most = std::max(result_.workers_most, workers_.working());
    ask(w);
  }

  void leaves(std::size_t w) {
    SimWorker& worker = workers_[w];
    if (worker.dead()) return;
    worker.settle_busy(now_);
    if (!worker.is(State::kBooting)) {
      result_.present_s += now_ - worker.joined_s;
      result_.busy_s += worker.busy_s;
      broadcast_.remove(id_of(w));
      for (auto it = open_.begin(); it != open_.end();) {
        const std::uint64_t version = it->first;
        const bool waited_for = worker.was_there(version) && (worker.version < version || worker.is(State::kSyncing));
        if (waited_for && it->second.targets > 0) --it->second.targets;
        it = waited_for && quorum_reached(it->second) ? open_.erase(it) : std::next(it);
      }
    }
    fleet_->machine(worker.ticket).version = worker.version;
    workers_.move(w, State::kDead);
  }

  // The provider has ended the machine on request.
  void returned(Ticket ticket) {
    const auto w = workers_.of(ticket);
    if (!w) return;
    leaves(*w);
    desk_.release_worker(id_of(*w), now_);
    workers_.forget(ticket);
  }

  void ending(std::size_t w) {
    if (workers_[w].dead() || steps_.is(Learner::kOver)) return;
    hear(fleet::Ending{workers_[w].ticket, "it will be taken back", true});
  }
  void dies(std::size_t w) {
    if (workers_[w].dead()) return;
    leaves(w);
    push(now_ + seconds(s_.heartbeat_timeout), kNoticed, w);
  }
  void noticed(std::size_t w) {
    desk_.release_worker(id_of(w), now_);
    fleet_->taken(workers_[w].ticket, true, now_);
    workers_.forget(workers_[w].ticket);
  }
  void hangs(std::size_t w) {
    if (workers_[w].dead()) return;
    leaves(w);
    push(now_ + seconds(s_.request.fleet.away_max), kGivenUp, w);
    desk_.release_worker(id_of(w), now_);
  }
  void given_up(std::size_t w) { hear(fleet::Left{id_of(w), "away for too long"}); }

  void preempts(std::size_t i) {
    const Preemption& p = s_.churn.preemptions[i];
    for (std::size_t w = 0; w < workers_.size(); ++w) {
      if (is_there(w, p.region) && fates_.chance(p.share)) dies(w);
    }
  }
  bool is_there(std::size_t w, std::optional<std::uint32_t> region) const {
    const bool there = workers_[w].is(State::kWorking) || workers_[w].is(State::kSyncing);
    return there && (!region || s_.offers[workers_[w].offer].region == *region);
  }

  Status slows(std::size_t i) {
    const Slowdown& slow = s_.faults.slowdowns[i];
    for (std::size_t w = 0; w < workers_.size(); ++w) {
      if (!is_there(w, slow.region) || !fates_.chance(slow.share)) continue;
      ECHO_TRY(turns(w, slow.tokens, slow.links, i + 1));
      if (slow.lasts) push(now_ + seconds(*slow.lasts), kRecovers, w, i);
    }
    return ok();
  }
  // The worker's current work, and transfers through it, continue at the new speed.
  Status turns(std::size_t w, double tokens, double links, std::uint64_t slowed_by) {
    SimWorker& worker = workers_[w];
    if (worker.dead()) return ok();
    if (worker.serving) {
      worker.ends_s = now_ + std::max(0.0, worker.ends_s - now_) * worker.tokens_left / tokens;
      push(worker.ends_s, kServed, w, ++worker.turn);
    }
    workers_.slow(w, tokens);
    worker.slowed_by = slowed_by;
    if (std::exchange(worker.links_left, links) == links) return ok();
    ECHO_TRY(broadcast_.relink(receiver(w)));
    for (std::size_t other = workers_.first_alive(); other < workers_.size(); ++other) {
      Arrival& arrival = workers_[other].arrival;
      if (arrival.here || arrival.version != out_.newest_out) continue;
      arrival.left -= (now_ - arrival.since_s) / std::max(arrival.takes_s, 1e-9);
      arrival = {arrival.version, now_, std::max(0.0, arrival.left), seconds(broadcast_.time_of(id_of(other))), false};
      push(arrival.ends_s(), kDelivered, other, arrival.version);
    }
    return ok();
  }

  void drain(WorkerId id) {
    const std::size_t w = id.value - 1;
    if (workers_[w].dead()) return;
    if (workers_[w].drain == SimWorker::Drain::kNo) workers_[w].drain = SimWorker::Drain::kAsked;
    workers_.wait_no_longer(w);
    perhaps_drained(w);
  }
  void perhaps_drained(std::size_t w) {
    SimWorker& worker = workers_[w];
    if (worker.drain != SimWorker::Drain::kAsked || worker.dead() || worker.holds_work()) return;
    worker.drain = SimWorker::Drain::kDone;
    drained_.push_back(id_of(w));
  }

  void mind_capacity() {
    while (!drained_.empty()) {  // deferred, because the core must not be called during its own callback
      const WorkerId id = drained_.front();
      drained_.pop_front();
      hear(fleet::Drained{id});
    }
    capacity_.watch(workers_.rate(), now_);
  }

  void mind_end() {
    if (steps_.is(Learner::kWaiting) && now_ - steps_.wait_from_s > std::max(kWaitMax, 100 * seconds(s_.step_time)))
      result_.ended = "the learner waited for a day";
    if (workers_.size() > kWorkersMax) result_.ended = fmt::format("{} machines were rented", workers_.size());
    if (workers_.working() > 0 || steps_.is(Learner::kTraining)) {
      alone_since_s_.reset();
      return;
    }
    if (!alone_since_s_) alone_since_s_ = now_;
    if (fleet_->empty() && fleet_->numbers().money_spent)
      result_.ended = "the budget is spent";
    else if (now_ - *alone_since_s_ >= kStuckAfter)
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

  Status perhaps_begin() {
    const std::size_t there = broadcast_.size();
    const bool all = there >= std::max<std::size_t>(1, wanted_);
    if (there == 0 || (!all && now_ < seconds(s_.request.fleet.join_timeout))) return ok();
    steps_.move(Learner::kWaiting);
    result_.begun_s = now_;
    steps_.wait_from_s = now_;
    hear(fleet::Waiting{true});
    for (std::size_t w = 0; w < workers_.size(); ++w) workers_[w].not_before = 0;
    return publish({0, now_, snapshot_bytes(), true});
  }

  Status publish_step() {
    const std::uint64_t nth = out_.deltas_made++;
    Bytes delta = s_.delta_bytes.empty() ? snapshot_bytes()
                                         : s_.delta_bytes[std::min<std::size_t>(nth, s_.delta_bytes.size() - 1)];
    if (s_.publishes == Publishes::kSnapshot) delta = snapshot_bytes();
    out_.encoding.push_back({desk_.step(), now_, delta, s_.publishes == Publishes::kSnapshot});
    if (s_.encode_time == Duration{}) return encoded();
    out_.encoder_free_s = std::max(out_.encoder_free_s, now_) + seconds(s_.encode_time);
    push(out_.encoder_free_s, kEncoded, 0);
    return ok();
  }

  Status encoded() {
    Outgoing next = out_.encoding.front();
    out_.encoding.pop_front();
    if (!out_.links_busy) return publish(next);
    if (out_.waiting) {  // the links are behind, so waiting publications are merged
      ++result_.publications_merged;
      next.bytes = Bytes{std::min(next.snapshot ? next.bytes.count : out_.waiting->bytes.count + next.bytes.count,
                                  snapshot_bytes().count)};
      next.at_s = out_.waiting->at_s;
    }
    out_.waiting = next;
    return ok();
  }

  Status publish(const Outgoing& what) {
    ECHO_TRY(broadcast_.prepare(what.bytes));
    out_.newest_out = what.version;
    result_.version = what.version;
    SimPublication row;
    row.version = what.version;
    row.at_s = what.at_s;
    row.snapshot = what.snapshot;
    row.bytes = what.bytes;
    const double bytes = static_cast<double>(what.bytes.count);
    row.learner_bytes = Bytes{static_cast<std::uint64_t>(bytes * broadcast_.learner_copies())};
    result_.learner_bytes_sent += bytes * broadcast_.learner_copies();
    result_.crossing_bytes_sent += bytes * broadcast_.crossing_copies();
    row.predicted_s = seconds(broadcast_.quorum());
    if (broadcast_.size() > 0) row.lower_bound_s = seconds(broadcast_.lower_bound());
    row.depth = broadcast_.depth();
    Open open{result_.publications.size()};
    std::vector<std::size_t> late;
    for (std::size_t w = workers_.first_alive(); w < workers_.size(); ++w) {
      SimWorker& worker = workers_[w];
      const bool first = what.version == 0 && worker.is(State::kSyncing);
      if (!first && !worker.is(State::kWorking)) {
        // The worker gets this publication after the one in transfer.
        if (worker.is(State::kSyncing)) worker.not_before = what.version + 1, late.push_back(w);
        continue;
      }
      ++open.targets;
      const double takes = seconds(broadcast_.time_of(id_of(w)));
      worker.of_the_first |= first;
      if (first) receives_first(w, takes);
      moved(w, first ? 0 : bytes, bytes * broadcast_.copies_of(id_of(w)));
      worker.arrival = {what.version, now_, 1, takes, false};
      push(now_ + takes, kDelivered, w, what.version);
    }
    row.workers = open.targets;
    result_.publications.push_back(row);
    if (open.targets > 0) open_[what.version] = open;
    for (const std::size_t w : late) push(now_ + seconds(broadcast_.time_of(id_of(w))), kDelivered, w, what.version);
    out_.links_busy = true;
    push(now_ + seconds(broadcast_.size() > 0 ? broadcast_.first() : Duration{}), kLinksFree, 0);
    return ok();
  }

  Status links_free() {
    out_.links_busy = false;
    if (!out_.waiting) return ok();
    const Outgoing next = *std::exchange(out_.waiting, std::nullopt);
    return publish(next);
  }

  void moved(std::size_t w, double received, double forwarded) {
    SimWorker& worker = workers_[w];
    worker.received += received;
    worker.forwarded += forwarded;
    fleet_->traffic(worker.ticket, received, forwarded);
    hear(fleet::Moved{id_of(w), Bytes{static_cast<std::uint64_t>(worker.received)},
                      Bytes{static_cast<std::uint64_t>(worker.forwarded)}});
  }

  void delivered(std::size_t w, std::uint64_t version) {
    SimWorker& worker = workers_[w];
    if (worker.dead()) return;
    if (worker.arrival.version == version) {
      constexpr double kRounding = 1e-6;
      if (worker.arrival.here || now_ + kRounding < worker.arrival.ends_s())
        return;  // the arrival time has changed since this event
      worker.arrival.here = true;
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
      worker.settle_busy(now_);
      ++worker.turn;
      for (const Work& work : std::exchange(worker.queue, {})) desk_.give_back(id_of(w), work.lease);
      for (const auto& [lease, work] : std::exchange(worker.handing_in, {})) desk_.give_back(id_of(w), lease);
    }
    const double takes = install_s();
    if (worker.serving) {  // it pauses meanwhile
      worker.busy_s -= takes;
      worker.ends_s += takes;
      push(worker.ends_s, kServed, w, ++worker.turn);
    }
    push(now_ + takes, kInstalled, w, worker.delivered);
  }

  void installed(std::size_t w, std::uint64_t version) {
    SimWorker& worker = workers_[w];
    if (worker.dead()) return;
    const std::uint64_t before = worker.version;
    worker.version = std::max(worker.version, version);
    worker.installing = false;
    for (auto it = open_.begin(); it != open_.end();) {
      const bool counts = it->first <= worker.version && worker.was_there(it->first) &&
                          (it->first > before || worker.is(State::kSyncing));
      it->second.installed += counts ? 1 : 0;
      it = counts && quorum_reached(it->second) ? open_.erase(it) : std::next(it);
    }
    end_if_last_policy_is_installed();
    if (worker.is(State::kSyncing)) return starts_working(w);
    if (worker.delivered > worker.version) return install(w);
    serve(w);
    ask(w);
  }

  bool quorum_reached(const Open& open) {
    if (open.targets == 0) return true;  // all target workers have left
    if (open.installed < chains::counted(s_.request.quorum, open.targets)) return false;
    SimPublication& row = result_.publications[open.index];
    row.t_b_s = now_ - row.at_s + seconds(s_.acknowledge_time);
    row.installed = open.installed;
    row.workers = open.targets;
    // Counts deltas only, because the run's rate is planned by them.
    if (!row.snapshot || s_.publishes == Publishes::kSnapshot)
      measured_.push_back({from_seconds(*row.t_b_s), row.bytes});
    return true;
  }

  // ---- leases ----

  std::size_t groups_held(const SimWorker& worker) const {
    const double ahead = worker.promised * seconds(s_.work_ahead) / s_.pacing.group_size;
    return std::max<std::size_t>(s_.groups_at_once, 1 + static_cast<std::size_t>(std::min(ahead, kGroupsHeldMax)));
  }

  // Requests as many groups as the worker may hold. Returns whether it got one.
  bool ask(std::size_t w) {
    SimWorker& worker = workers_[w];
    const std::size_t most = groups_held(worker);
    if (!worker.is(State::kWorking) || worker.drain != SimWorker::Drain::kNo) return false;
    if (worker.installing || worker.install_waits) return false;
    if (worker.queue.size() >= most || worker.tails >= kTailsMax) return false;
    const auto leases =
        desk_.grant(id_of(w), Version{worker.version}, most - worker.queue.size(), Version{out_.newest_out}, now_);
    for (const replay_buffer::LiveLease& lease : leases) worker.queue.push_back(draw(lease));
    if (!leases.empty()) workers_.wait_no_longer(w);  // it loses its place in the queue
    if (worker.queue.size() < most) workers_.wait_for_work(w);
    serve(w);
    return !leases.empty();
  }

  Work draw(const replay_buffer::LiveLease& lease) {
    Work work{lease.record.id, lease.record.version, lease.record.granted_unix_s};
    const double most = s_.lease.tokens_max;
    for (std::uint32_t i = 0; i < s_.pacing.group_size; ++i) {
      const double drawn = s_.token_histogram ? lengths_.of(*s_.token_histogram) : lengths_.lognormal(s_.tokens);
      const auto tokens = static_cast<std::uint32_t>(std::clamp(std::floor(drawn + 0.5), 1.0, most));
      work.tokens += tokens;
      work.longest = std::max(work.longest, tokens);
    }
    return work;
  }

  // Serves the worker that has waited longest first.
  void serve_idle() {
    std::vector<std::size_t> order;
    for (const auto& [since, w] : workers_.idle()) order.push_back(w);
    for (const std::size_t w : order) {
      if (desk_.closed(Version{out_.newest_out}, now_)) return;
      if (!desk_.closed(Version{workers_[w].version}, now_)) ask(w);
    }
  }

  void serve(std::size_t w) {
    SimWorker& worker = workers_[w];
    if (worker.serving || worker.installing || worker.queue.empty() || !worker.is(State::kWorking)) return;
    worker.serving = true;
    worker.began_s = now_;
    worker.ends_s = now_ + worker.queue.front().tokens / (worker.tokens_per_s * worker.tokens_left);
    push(worker.ends_s, kServed, w, ++worker.turn);
  }

  void served(std::size_t w, std::uint32_t turn) {
    SimWorker& worker = workers_[w];
    if (!worker.is(State::kWorking) || turn != worker.turn) return;
    const double began = worker.began_s;
    worker.settle_busy(now_);
    const Work work = worker.queue.front();
    worker.queue.pop_front();
    worker.handing_in[work.lease] = work;
    ++worker.tails;
    const double longest_s =
        s_.sequence_tokens_per_s ? work.longest / (*s_.sequence_tokens_per_s * worker.tokens_left) : 0;
    const double ends = std::max(now_, began + longest_s);
    if (ends > now_)
      push(ends, kHandIn, w, work.lease.value);
    else
      hand_in(w, work.lease);
    if (worker.install_waits && worker.queue.empty()) install(w);
    serve(w);
    ask(w);
  }

  void hand_in(std::size_t w, LeaseId lease) {
    SimWorker& worker = workers_[w];
    const auto it = worker.handing_in.find(lease);
    if (it == worker.handing_in.end()) return;
    const Work work = it->second;
    worker.handing_in.erase(it);
    --worker.tails;
    result_.tokens_generated += work.tokens;
    DeskGroup group;
    group.worker = id_of(w);
    group.granted_s = work.granted_s;
    group.tokens = work.tokens;
    group.longest = work.longest;
    group.mixed = worker.version > work.version.value;
    const auto held_s = desk_.submit(lease, group, now_);
    if (held_s) {
      fleet_->machine(worker.ticket).rollouts += s_.pacing.group_size;
      hear(fleet::Beat{id_of(w), static_cast<double>(s_.pacing.group_size), *held_s});
    }
    perhaps_drained(w);
    try_step();
  }

  // ---- learner ----

  void try_step() {
    if (!steps_.is(Learner::kWaiting) || desk_.step() >= *s_.pacing.steps_total) return;
    auto batch = desk_.batch(s_.pacing.groups_per_step(), now_);
    if (!batch) return;
    steps_.move(Learner::kTraining);
    hear(fleet::Waiting{false});
    SimStep row;
    row.step = desk_.step() + 1;
    row.wait_s = now_ - steps_.wait_from_s;
    const std::uint64_t step = desk_.step();
    for (const DeskGroup& group : *batch) {
      row.staleness[step - std::min(step, group.version.value)] += s_.pacing.group_size;
      row.tokens += group.tokens;
      row.mixed += group.mixed ? s_.pacing.group_size : 0;
    }
    row.tokens_mean = static_cast<double>(row.tokens) / (static_cast<double>(batch->size()) * s_.pacing.group_size);
    const double each_s =
        s_.step_seconds.empty() ? seconds(s_.step_time) : s_.step_seconds[step % s_.step_seconds.size()];
    row.train_s = each_s + s_.step_s_per_token * static_cast<double>(row.tokens);
    result_.tokens_trained += static_cast<double>(row.tokens);
    for (const auto& [age, n] : desk_.in_flight_by_age()) result_.in_flight[age] += static_cast<double>(n);
    for (const auto& [age, n] : desk_.waiting_by_age()) result_.in_queue[age] += static_cast<double>(n);
    for (const auto& [age, n] : row.staleness) result_.in_queue[age] -= static_cast<double>(n);
    row.waiting = desk_.waiting() - batch->size() * s_.pacing.group_size;
    row.in_flight = desk_.in_flight();
    steps_.row = std::move(row);
    steps_.batch = *std::move(batch);
    push(now_ + steps_.row.train_s, kTrained, 0);
    serve_idle();
  }

  Status trained() {
    steps_.move(Learner::kWaiting);
    desk_.consume(std::exchange(steps_.batch, {}), now_);
    steps_.wait_from_s = now_;
    hear(fleet::StepMeasured{from_seconds(steps_.row.train_s)});
    if (desk_.closed(Version{out_.newest_out}, now_))
      for (const auto& [since, w] : workers_.idle())
        if (!workers_[w].holds_work()) hear(fleet::Beat{id_of(w), 0, 0, true});
    while (!measured_.empty()) {
      hear(fleet::BroadcastMeasured{measured_.front().first, measured_.front().second});
      measured_.pop_front();
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
      steps_.move(Learner::kFinishing);
      steps_.wait_from_s = now_;
      push(now_ + seconds(rules::kFinalInstallWait), kFinalWaitEnds, 0);
      return ok();
    }
    hear(fleet::Waiting{true});
    serve_idle();
    try_step();
    return ok();
  }

  // Returns all machines.
  void finish() {
    workers_.check();
    steps_.move(Learner::kOver);
    result_.wall_s = now_;
    const FleetNumbers numbers = fleet_->numbers();
    result_.started = numbers.started;
    result_.lost = numbers.lost;
    result_.replaced = numbers.replaced;
    result_.rejected = desk_.rejected();
    result_.stale_by_age = desk_.stale_by_age();
    result_.unfinished = desk_.unfinished();
    result_.groups_set_aside = desk_.set_aside();
    result_.bound = desk_.bound();
    result_.topology = broadcast_.size() > 0 ? broadcast_.topology().to_short_text() : "";
    result_.topologies_planned = broadcast_.planned();
    const double steps = std::max<double>(1, static_cast<double>(result_.by_step.size()));
    for (auto* ages : {&result_.in_flight, &result_.in_queue})
      for (auto& [age, n] : *ages) n /= steps;
    result_.usd_learner = s_.request.learner_usd_per_hour.value_or(0) * now_ / 3600;
    fleet_->close("the run has ended", now_);
    for (const double until = now_ + 600; now_ < until && !fleet_->empty(); now_ += 1) fleet_->tick(now_);
    for (std::size_t w = 0; w < workers_.size(); ++w) leaves(w);
  }

  const RunScenario& s_;
  const std::function<void(std::uint64_t)>& progress_;
  RunResult result_;
  EventQueue queue_;
  RunDesk desk_;
  RunBroadcast broadcast_;
  std::optional<RunFleet> fleet_;
  Draws lengths_, fates_;
  double now_ = 0, tokens_mean_ = 1;
  std::size_t wanted_ = 0;

  RunWorkers workers_;
  Steps steps_;
  Outbox out_;
  CapacityWatch capacity_;
  std::deque<WorkerId> drained_;
  std::optional<double> alone_since_s_;
  std::map<std::uint64_t, Open> open_;  // by version
  std::deque<std::pair<Duration, Bytes>> measured_;
};

}  // namespace

Result<RunResult> simulate_run(const RunScenario& scenario, const std::function<void(std::uint64_t)>& progress) {
  return Simulation(scenario, progress).run();
}

}  // namespace echoline::sim

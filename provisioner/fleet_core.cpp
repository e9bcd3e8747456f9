// FleetCore: the answer to each event, and the states of a machine. fleet_decisions.cpp has the periodic decisions.
#include "provisioner/fleet_core.hpp"

#include <algorithm>
#include <utility>

#include "base/result.hpp"

namespace echoline::provisioner {
namespace {

constexpr int kSamplesPerWindow = 32;                         // results close in time are merged into one sample
constexpr double kGroupsInWindow = 8;                         // a longer window is used if it holds fewer
constexpr double kPromisedGroups = 2;                         // weight of the promised rate beside few measured groups
constexpr double kGroupsBeforeJudged = 4;                     // before a worker can count as slower than promised
constexpr Duration kResultGapMax = std::chrono::seconds(10);  // longest counted time between two results
constexpr double kBytesPerGb = 1e9;
constexpr Duration kUnansweredMax = std::chrono::minutes(5);  // after this time an unanswered start counts as not done

}  // namespace

FleetCore::FleetCore(FleetRules rules, const std::vector<FleetOffer>& offers, std::vector<std::string> wanted)
    : rules_(std::move(rules)), book_(offers), wanted_(std::move(wanted)) {
  ECHO_CHECK(rules_.fleet.headroom >= 0 && rules_.fleet.join_timeout > Duration{} && rules_.group_size > 0);
  auto planned = capacity_target(rules_.pace, rules_.broadcast_time, rules_.fleet.headroom);
  ECHO_CHECK(planned.has_value(), "{}", planned.error().message());  // the plan was feasible with these values
  target_ = *planned;
}

// ---- events ----

std::vector<FleetAction> FleetCore::handle(const FleetEvent& event, TimePoint now) {
  time_.advance_to(now);
  std::visit([&](const auto& e) { on(e); }, event);
  return std::exchange(out_.actions, {});
}

std::vector<FleetAction> FleetCore::tick(TimePoint now) {
  time_.advance_to(now);
  enforce_time_limits();
  if (phase_ == Phase::kOpen) {
    enforce_budgets();
    stop_stalled();
  }
  if (phase_ == Phase::kOpen) {
    rent_wanted();
    fill_shortfall();
    release_surplus();
  }
  return std::exchange(out_.actions, {});
}

std::vector<FleetAction> FleetCore::close(const std::string& why, TimePoint now) {
  time_.advance_to(now);
  if (phase_ == Phase::kOpen) phase_ = Phase::kClosed;
  wanted_.clear();
  for (auto& [key, machine] : machines_.all()) stop(machine, why);
  return std::exchange(out_.actions, {});
}

void FleetCore::on(const fleet::Booked& e) {
  Machine* machine = machines_.find(e.offer);
  if (machine == nullptr || machine->state != MachineState::kAsked || machine->unwanted) {
    act(fleet::BookEnd{e.ticket, machine ? machine->why : "it is not wanted any more", false});
    if (machine != nullptr && machine->state == MachineState::kAsked) machines_.erase(*machine);
    return;
  }
  machines_.book(*machine, e.ticket);
  move(*machine, MachineState::kStarting);
  machine->answered = false;
  ++counts_.started;
  act(fleet::Start{e.ticket, e.offer});
}

void FleetCore::on(const fleet::BookingFailed& e) {
  Machine* machine = machines_.find(e.offer);
  if (machine == nullptr || machine->state != MachineState::kAsked) return;
  note("failed", e.offer, "not booked, so not rented: " + e.why);
  record_offer_failure(*machine, false);
  shortfall_.loss_to_replace = true;
  machines_.erase(*machine);
}

void FleetCore::on(const fleet::Recovered& e) {
  if (machines_.find(e.ticket) != nullptr) return;
  Machine& machine = machines_.add(e.offer, 1, MachineState::kDoubtful, time_.now);
  machines_.book(machine, e.ticket);
  machine.instance = e.instance;
  machine.adopt = e.adopt && phase_ == Phase::kOpen;
  machine.unwanted = !machine.adopt;
  machine.why = "left behind by an earlier process";
  machine.answered = !e.instance.text.empty();
  machines_.invalidate_totals();
  request_listing(machine);
}

void FleetCore::on(const fleet::Started& e) {
  Machine* machine = machines_.find(e.ticket);
  if (machine == nullptr) {  // the core gave it up long ago, so stop it
    machine = &machines_.add({}, 1, MachineState::kDoubtful, time_.now);
    machines_.book(*machine, e.ticket);
    machine->unwanted = true;
    machine->why = "it was started after it had been given up";
    machines_.invalidate_totals();
  }
  if (machine->state != MachineState::kStarting && machine->state != MachineState::kDoubtful) return;
  machine->answered = true;
  machine->instance = e.instance;
  if (e.usd_per_hour) machine->offer.usd_per_hour = *e.usd_per_hour, machines_.invalidate_totals();
  if (machine->unwanted) {
    move(*machine, MachineState::kStopping);
    request_stop(*machine);
    return;
  }
  move(*machine, MachineState::kBooting);
  if (machine->worker) move(*machine, MachineState::kWorking);  // the worker joined before the provider answered
}

void FleetCore::on(const fleet::StartFailed& e) {
  Machine* machine = machines_.find(e.ticket);
  if (machine == nullptr) return;
  if (machine->state != MachineState::kStarting && machine->state != MachineState::kDoubtful) return;
  const bool was_wanted = !machine->unwanted && phase_ == Phase::kOpen;
  machine->answered = true;
  if (was_wanted) {
    note("failed", machine->offer.id, e.why, e.ticket);
    record_offer_failure(*machine, !e.retryable);
    shortfall_.loss_to_replace = true;
  }
  if (e.perhaps_rented) {
    machine->why = "the provider refused it: " + e.why;
    if (machine->state == MachineState::kStarting) mark_doubtful(*machine);
    return;
  }
  forget(*machine, e.why, false);
}

void FleetCore::on(const fleet::Found& e) {
  Machine* machine = machines_.find(e.ticket);
  if (machine == nullptr || machine->state != MachineState::kDoubtful) return;
  if (e.instance) {
    machine->instance = *e.instance;
    if (machine->adopt && !machine->unwanted) {
      note("adopted", machine->offer.id, "an earlier process rented it: " + e.instance->text, e.ticket);
      move(*machine, MachineState::kBooting);
      machine->requested_at = time_.now;
      if (machine->worker) move(*machine, MachineState::kWorking);
      return;
    }
    move(*machine, MachineState::kStopping);
    request_stop(*machine);
    return;
  }
  // An earlier process may have requested it a moment ago, so it may still appear. The fleet does not wait for it.
  if (machine->adopt && !std::exchange(machine->unwanted, true)) {
    machine->why = "it ended while no process watched it";
    machines_.invalidate_totals();
    shortfall_.loss_to_replace = true;
  }
  if (machine->answered || e.certain || time_.now - machine->state_since >= kUnansweredMax)
    forget(*machine, machine->why,  // a machine that may have existed for a while is booked as paid
           !machine->answered || !machine->instance.text.empty() ||
               time_.now - machine->state_since >= rules::kAnswerTimeout);
}

void FleetCore::on(const fleet::Stopped& e) {
  Machine* machine = machines_.find(e.ticket);
  if (machine != nullptr && machine->state == MachineState::kStopping) forget(*machine, machine->why, true);
}

void FleetCore::on(const fleet::StopFailed& e) {
  Machine* machine = machines_.find(e.ticket);
  if (machine == nullptr || machine->state != MachineState::kStopping) return;
  const Duration wait = schedule_retry(*machine);
  note_once("stop_failed", machine->offer.id, fmt::format("{}; retried after {}", e.why, to_text(wait)));
}

void FleetCore::on(const fleet::Exited& e) {
  Machine* machine = machines_.find(e.ticket);
  if (machine == nullptr) return;
  const bool is_draining = machine->state == MachineState::kDraining;
  const bool expected =
      is_draining || machine->state == MachineState::kStopping || machine->unwanted || phase_ != Phase::kOpen;
  if (!expected || is_draining) {
    if (!is_draining) count_as_lost(*machine, "lost", e.why);
    if (machine->worker) act(fleet::GiveUp{*machine->worker, "its machine has ended: " + e.why});
    record_offer_failure(*machine, e.outbid);  // it is not available at that price
  }
  if (!e.still_rented) return forget(*machine, expected && !machine->why.empty() ? machine->why : e.why, true);
  if (machine->state == MachineState::kStopping) return;
  machine->why = e.why;
  if (machine->state == MachineState::kStarting) return mark_doubtful(*machine);
  if (machine->state == MachineState::kDoubtful) return;  // a FindInstance is pending
  stop(*machine, e.why);
}

void FleetCore::on(const fleet::Ending& e) {
  if (Machine* machine = machines_.find(e.ticket)) prepare_for_end(*machine, e.why, e.outbid);
}

void FleetCore::on(const fleet::Leaving& e) {
  if (Machine* machine = machines_.find(e.worker)) prepare_for_end(*machine, "its worker was told to stop", false);
}

void FleetCore::on(const fleet::Drained& e) {
  Machine* machine = machines_.find(e.worker);
  if (machine != nullptr && machine->state == MachineState::kDraining) stop(*machine, machine->why);
}

void FleetCore::on(const fleet::PriceChanged& e) {
  Machine* machine = machines_.find(e.ticket);
  if (machine == nullptr || !(e.usd_per_hour >= 0)) return;
  if (machine->offer.usd_per_hour == e.usd_per_hour) return;
  note("price", machine->offer.id,
       fmt::format("${:.4g} an hour instead of ${:.4g}", e.usd_per_hour, machine->offer.usd_per_hour), e.ticket);
  machine->offer.usd_per_hour = e.usd_per_hour;
  machines_.invalidate_totals();
}

void FleetCore::on(const fleet::Joined& e) {
  Machine* machine = machines_.find(e.offer);
  if (machine == nullptr) return;  // started by hand
  if (machine->state == MachineState::kStopping || machine->state == MachineState::kAsked || machine->unwanted) return;
  machines_.join(*machine, e.worker);
  record_progress(*machine);
  // It came back, so repeat the request.
  if (machine->state == MachineState::kDraining) act(fleet::Drain{e.worker, machine->why});
  if (machine->state != MachineState::kBooting) return;
  move(*machine, MachineState::kWorking);
  book_.record_success(e.offer);
}

void FleetCore::on(const fleet::Heartbeat& e) {
  Machine* machine = machines_.find(e.worker);
  if (machine == nullptr || !(e.rollouts >= 0) || !(e.busy_s >= 0)) return;
  machine->unfinished_s += e.busy_s;
  if (e.turned_away) record_progress(*machine);
  if (e.rollouts == 0) return;
  output_.rollouts += e.rollouts;
  // Time without any result (a long learner step) is no evidence against a silent worker, so it is capped.
  output_.worked += std::min<Duration>(time_.now - output_.last_at, kResultGapMax);
  output_.last_at = time_.now;
  record_progress(*machine);
  const double busy_s = std::exchange(machine->unfinished_s, 0);
  if (busy_s == 0) return;
  auto& samples = machine->samples;
  if (samples.empty() || time_.now - samples.back().at >= rules::kThroughputWindow / kSamplesPerWindow)
    samples.push_back({time_.now, 0, 0});
  samples.back().rollouts += e.rollouts;
  samples.back().busy_s += busy_s;
  double rollouts = 0, busy = 0;
  for (const auto& sample : samples) rollouts += sample.rollouts, busy += sample.busy_s;
  const double group = rules_.group_size;
  while (time_.now - samples.front().at > rules::kThroughputWindow &&
         rollouts - samples.front().rollouts >= kGroupsInWindow * group) {
    rollouts -= samples.front().rollouts;
    busy -= samples.front().busy_s;
    samples.pop_front();
  }
  // With few groups, the measurement depends on chance. So the promise counts as two more groups, and as fewer while
  // the window fills.
  const double promise = machine->share * machine->offer.rollouts_per_s;
  const double weight = group * kPromisedGroups * std::max(0.0, 1 - rollouts / (kGroupsInWindow * group));
  machine->measured = (rollouts + weight) / (busy + weight / std::max(promise, 1e-12));
  machines_.invalidate_totals();
  const double promised = machine->offer.rollouts_per_s;
  if (rollouts < kGroupsBeforeJudged * group || !(promised > 0)) return;
  const double share = *machine->measured / promised;
  if (share < rules::kDemotionShare || book_.is_demoted(machine->offer)) demote_host(*machine, share);
}

void FleetCore::on(const fleet::TrafficMeasured& e) {
  Machine* machine = machines_.find(e.worker);
  if (machine == nullptr) return;
  if (machine->samples.empty()) {  // counts its reported bytes once, up to a snapshot
    const Bytes progress_step{rules_.snapshot.count / rules::kSnapshotParts};
    if (progress_step == Bytes{} || e.received.count < machine->received_at_progress.count + progress_step.count ||
        machine->received_at_progress >= rules_.snapshot)
      return;
    machine->received_at_progress = e.received;
    return record_progress(*machine);
  }
  auto& traffic = machine->traffic;
  if (!traffic.empty() && (e.received < traffic.back().received || e.forwarded < traffic.back().forwarded))
    traffic.clear();
  const Duration period = rules_.pace.publish_every * step_time();
  const Duration window = std::max<Duration>(rules::kTrafficWindow, 5 * period);
  if (traffic.empty() || time_.now - traffic.back().at >= window / kSamplesPerWindow)
    traffic.push_back({time_.now, e.received, e.forwarded});
  while (traffic.size() > 2 && time_.now - traffic[1].at >= window) traffic.pop_front();
  const auto& from = traffic.front();
  const auto& to = traffic.back();
  const Duration measured_time = to.at - from.at;
  if (measured_time < std::max<Duration>(std::chrono::minutes(1), 2 * period)) return;
  const FleetOffer& offer = machine->offer;
  const double usd =
      static_cast<double>(to.received.count - from.received.count) / kBytesPerGb * offer.download_usd_per_gb +
      static_cast<double>(to.forwarded.count - from.forwarded.count) / kBytesPerGb * offer.upload_usd_per_gb;
  machine->traffic_usd_per_hour = usd * 3600 / seconds(measured_time);
  machines_.invalidate_totals();
}

void FleetCore::on(const fleet::Left& e) {
  Machine* machine = machines_.find(e.worker);
  if (machine == nullptr) return;
  machines_.leave(e.worker);
  if (machine->state == MachineState::kDraining) return stop(*machine, machine->why);
  if (machine->state == MachineState::kStopping || machine->unwanted || phase_ != Phase::kOpen) return;
  // The run cannot use it any more, so stop paying for it.
  count_as_lost(*machine, "lost", e.why);
  record_offer_failure(*machine, false);
  stop(*machine, e.why);
}

void FleetCore::on(const fleet::LearnerWaiting& e) { waiting_.set_waiting(e.now_waits, time_.now); }

void FleetCore::on(const fleet::StepMeasured& e) {
  step_times_.add(e.step_time);
  retarget();
}

void FleetCore::on(const fleet::BroadcastMeasured& e) {
  broadcast_times_.add(e.broadcast_time);
  payloads_.add(e.payload);
  retarget();
}

void FleetCore::on(const fleet::SpendingMeasured& e) {
  if (!(e.usd >= 0)) return;
  spending_ = {e.usd, time_.now};
}

void FleetCore::on(const fleet::OffersRefreshed& e) {
  const std::string difference = book_.refresh(e.offers);
  shortfall_.next_search = {};
  if (!difference.empty()) note("market", "", difference);
}

// ---- states of a machine ----

void FleetCore::move(Machine& machine, MachineState to) {
  machines_.move(machine, to, time_.now);
  if (to == MachineState::kWorking)
    stalled_from_ = std::min(stalled_from_, machine.worked_at_progress + rules_.fleet.away_max);
}

void FleetCore::stop(Machine& machine, const std::string& why) {
  if (machine.state == MachineState::kStopping) return;
  machine.why = why;
  if (machine.state == MachineState::kBooting || machine.state == MachineState::kWorking ||
      machine.state == MachineState::kDraining) {
    move(machine, MachineState::kStopping);
    request_stop(machine);
  } else {
    machine.unwanted = true;  // it is stopped once its instance is known
    machines_.invalidate_totals();
  }
}

void FleetCore::request_stop(Machine& machine) {
  machine.next_try = time_.now + rules::kAnswerTimeout;
  act(fleet::Stop{machine.ticket, machine.instance, machine.why});
}

// Lets a machine's worker submit its results before the machine is stopped.
void FleetCore::drain(Machine& machine, const std::string& why) {
  if (!machine.worker) return stop(machine, why);
  move(machine, MachineState::kDraining);
  machine.why = why;
  machine.next_try = time_.now + rules::kDrainTimeout;
  act(fleet::Drain{*machine.worker, why});
}

// The machine will end soon. Counts it as lost now, so that a replacement is rented at once.
void FleetCore::prepare_for_end(Machine& machine, const std::string& why, bool outbid) {
  if (phase_ != Phase::kOpen || machine.unwanted) return;
  if (machine.state != MachineState::kBooting && machine.state != MachineState::kWorking) return;
  count_as_lost(machine, "lost", why);
  record_offer_failure(machine, outbid);
  if (machine.state == MachineState::kWorking)
    drain(machine, why);
  else
    stop(machine, why);
}

void FleetCore::forget(Machine& machine, const std::string& why, bool ran) {
  act(fleet::BookEnd{machine.ticket, why, ran, machine.measured});
  machines_.erase(machine);
}

void FleetCore::count_as_lost(Machine& machine, const std::string& what, const std::string& why) {
  ++counts_.lost;
  shortfall_.loss_to_replace = true;
  note(what, machine.offer.id, why, machine.ticket);
}

void FleetCore::mark_doubtful(Machine& machine) {
  move(machine, MachineState::kDoubtful);
  machine.unwanted = true;
  request_listing(machine);
}

void FleetCore::record_progress(Machine& machine) {
  machine.worked_at_progress = output_.worked;
  machine.rollouts_at_progress = output_.rollouts;
}

void FleetCore::request_listing(Machine& machine) {
  schedule_retry(machine);
  machine.next_try = std::min(machine.next_try, time_.now + rules::kAnswerTimeout);
  act(fleet::FindInstance{machine.ticket});
}

Duration FleetCore::schedule_retry(Machine& machine) {
  const Duration wait = std::min<Duration>(rules::kRetryMin * (1 << std::min(machine.tries, 10)), rules::kRetryMax);
  ++machine.tries;
  machine.next_try = time_.now + wait;
  return wait;
}

void FleetCore::record_offer_failure(const Machine& machine, bool refused) {
  book_.record_failure(machine.offer.id, refused, time_.now);
}

void FleetCore::demote_host(const Machine& machine, double share) {
  share = std::clamp(share, 1e-3, 1.0);
  if (!book_.demote(machine.offer, share)) return;
  note("demoted", machine.offer.id,
       fmt::format("{:.4g} rollouts/s were promised, {:.4g} are measured: its host now counts with the measured share",
                   machine.offer.rollouts_per_s, share * machine.offer.rollouts_per_s),
       machine.ticket);
}

void FleetCore::note(std::string what, std::string offer, std::string why, Ticket ticket) {
  allow_note_again(what);
  act(fleet::Note{std::move(what), std::move(offer), std::move(why), ticket});
}

// Notes a lasting condition once, until another event of its kind.
void FleetCore::note_once(const std::string& what, const std::string& key, const std::string& why) {
  if (out_.noted.emplace(what, key).second) act(fleet::Note{what, key, why, 0});
}

}  // namespace echoline::provisioner

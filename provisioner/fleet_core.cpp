// FleetCore: reacts to each event, and changes the state of machines. fleet_decisions.cpp has the periodic decisions.
#include "provisioner/fleet_core.hpp"

#include <algorithm>
#include <utility>

#include "base/result.hpp"

namespace echoline::provisioner {
namespace {

// Measurements of a window are merged into about this many samples.
constexpr int kSamplesPerWindow = 32;
// The window for a worker's rate has kThroughputPeriods publication periods, at least rules::kThroughputWindow, and so
// much more that it holds kGroupsInWindow groups.
constexpr int kThroughputPeriods = 3;
constexpr double kGroupsInWindow = 8;
// A rate measured from few groups is averaged with the expected rate, which counts as up to this many groups.
constexpr double kPromisedGroups = 2;
constexpr double kGroupsBeforeJudged = 4;  // measured groups before a worker can count as slower than promised
constexpr Duration kResultGapMax = std::chrono::seconds(10);  // a longer gap between two results counts as this long
// The traffic window has kTrafficPeriods publication periods, and at least rules::kTrafficWindow.
constexpr int kTrafficPeriods = 5;
// Traffic counts once it was measured for kTrafficPeriodsMin publication periods, and at least kTrafficTimeMin.
constexpr int kTrafficPeriodsMin = 2;
constexpr Duration kTrafficTimeMin = std::chrono::minutes(1);
constexpr double kRateMin = 1e-12;  // rollouts/s; avoids a division by zero
constexpr double kBytesPerGb = 1e9;
// The core gives a machine up if its start has no answer, and no listing shows its instance for this time.
constexpr Duration kUnansweredMax = std::chrono::minutes(5);
// The same for a start by an earlier process. It is shorter, because the request ended with that process.
constexpr Duration kUnansweredEarlierMax = std::chrono::minutes(1);
constexpr double kShareMin = 1e-3;  // least share of a promised rate, so that no host counts as 0

}  // namespace

FleetCore::FleetCore(FleetRules rules, const std::vector<FleetOffer>& offers, std::vector<std::string> wanted)
    : rules_(std::move(rules)), offer_book_(offers), wanted_(std::move(wanted)) {
  ECHO_CHECK(rules_.fleet.headroom >= 0 && rules_.fleet.join_timeout > Duration{} && rules_.group_size > 0);
  target_ = planned_target();
  double planned = 0, dearest_machine = 0;  // [$/h]
  for (const std::string& id : wanted_) {
    const OfferBook::Entry* entry = offer_book_.find(id);
    if (!entry) continue;
    planned += price_of(entry->offer);
    dearest_machine = std::max(dearest_machine, price_of(entry->offer));
  }
  usd_per_hour_max_of_plan_ = planned + std::max(rules_.fleet.headroom * planned, dearest_machine);
}

// ---- events ----

std::vector<FleetAction> FleetCore::handle(const FleetEvent& event, TimePoint now) {
  time_.advance_to(now);
  std::visit([&](const auto& e) { on(e); }, event);
  return std::exchange(outbox_.actions, {});
}

std::vector<FleetAction> FleetCore::tick(TimePoint now) {
  time_.advance_to(now);
  // Before the learner's first batch, workers only fill the stock, so their work is no measure of the need.
  if (pace_.learner_idle.has_begun()) pace_.used_capacity.add_capacity(totals().working_rollouts_per_s, time_.now);
  enforce_time_limits();
  if (phase_ == Phase::kOpen) {
    enforce_budgets();
    stop_stalled();
  }
  if (phase_ == Phase::kOpen) {  // enforce_budgets() may have ended it
    rent_wanted();
    fill_shortfall();
    release_surplus();
  }
  start_queued();
  return std::exchange(outbox_.actions, {});
}

std::vector<FleetAction> FleetCore::close(const std::string& why, TimePoint now) {
  time_.advance_to(now);
  if (phase_ == Phase::kOpen) phase_ = Phase::kClosed;
  wanted_.clear();
  for (auto& [key, machine] : machines_.all()) stop(machine, why);
  start_queued();  // forgets the queued machines, which are not wanted any more
  return std::exchange(outbox_.actions, {});
}

void FleetCore::on(const fleet::Booked& e) {
  Machine* machine = machines_.find(e.offer);
  if (machine == nullptr || machine->state != MachineState::kUnbooked || machine->unwanted) {
    emit(fleet::BookEnd{
        .ticket = e.ticket, .why = machine ? machine->why : "it is not wanted any more", .ran = kNeverRan});
    if (machine != nullptr && machine->state == MachineState::kUnbooked) machines_.erase(*machine);
    return;
  }
  machines_.set_ticket(*machine, e.ticket);
  change_state(*machine, MachineState::kStarting);
  machine->awaits_start_answer = true;
  ++counts_.started;
  emit(fleet::Start{.ticket = e.ticket, .offer = e.offer});
}

void FleetCore::on(const fleet::BookingFailed& e) {
  Machine* machine = machines_.find(e.offer);
  if (machine == nullptr || machine->state != MachineState::kUnbooked) return;
  note("failed", e.offer, "not booked, so not rented: " + e.why);
  record_offer_failure(*machine, kAvailableAfterPause);
  shortfall_.lost_rollouts_per_s += machine->expected_rollouts_per_s();
  machines_.erase(*machine);
}

void FleetCore::on(const fleet::Recovered& e) {
  if (machines_.find(e.ticket) != nullptr) return;
  Machine& machine = machines_.add(e.offer, kFullShare, MachineState::kDoubtful, time_.now);
  machines_.set_ticket(machine, e.ticket);
  machine.instance = e.instance;
  machine.adopt = e.adopt && phase_ == Phase::kOpen;
  machine.unwanted = !machine.adopt;
  machine.why = "left behind by an earlier process";
  machine.awaits_start_answer = e.instance.text.empty();  // the earlier process's request may still be under way
  machines_.invalidate_totals();
  request_listing(machine);
}

void FleetCore::on(const fleet::Started& e) {
  Machine* machine = machines_.find(e.ticket);
  if (machine == nullptr) return;  // given up long ago; the driver reports the instance as Recovered
  if (machine->state != MachineState::kStarting && machine->state != MachineState::kDoubtful) return;
  machine->awaits_start_answer = false;
  machine->instance = e.instance;
  if (e.usd_per_hour) {
    machine->offer.usd_per_hour = *e.usd_per_hour;
    machines_.invalidate_totals();
  }
  if (machine->unwanted) {
    change_state(*machine, MachineState::kStopping);
    request_stop(*machine);
    return;
  }
  change_state(*machine, MachineState::kBooting);
  set_boot_phase(*machine, e.running_follows ? BootPhase::kPulling : BootPhase::kUnreported);
  if (machine->worker)
    change_state(*machine, MachineState::kWorking);  // the worker joined before the provider answered
}

void FleetCore::on(const fleet::Running& e) {
  Machine* machine = machines_.find(e.ticket);
  if (machine == nullptr || machine->state != MachineState::kBooting) return;
  if (machine->boot_phase == BootPhase::kPulling) set_boot_phase(*machine, BootPhase::kContainerRuns);
}

void FleetCore::on(const fleet::Cancelled& e) {
  Machine* machine = machines_.find(e.ticket);
  if (machine == nullptr || !machine->awaits_start_answer) return;
  erase_ended(*machine, machine->why, kNeverRan);
}

void FleetCore::on(const fleet::StartFailed& e) {
  Machine* machine = machines_.find(e.ticket);
  if (machine == nullptr) return;
  if (machine->state != MachineState::kStarting && machine->state != MachineState::kDoubtful) return;
  const bool was_wanted = !machine->unwanted && phase_ == Phase::kOpen;
  machine->awaits_start_answer = false;
  if (was_wanted) {
    if (e.by_account) {
      note_once("failed", machine->offer.provider, e.why);
    } else {
      note("failed", machine->offer.id, e.why, e.ticket);
      record_offer_failure(*machine, e.retryable ? kAvailableAfterPause : kUnavailableUntilRefresh);
    }
    shortfall_.lost_rollouts_per_s += machine->expected_rollouts_per_s();
  }
  if (e.perhaps_rented) {
    machine->why = "the provider refused it: " + e.why;
    if (machine->state == MachineState::kStarting) mark_doubtful(*machine);
    return;
  }
  erase_ended(*machine, e.why, kNeverRan);
}

void FleetCore::on(const fleet::Found& e) {
  Machine* machine = machines_.find(e.ticket);
  if (machine == nullptr || machine->state != MachineState::kDoubtful) return;
  if (e.instance) {
    machine->instance = *e.instance;
    if (machine->adopt && !machine->unwanted) {
      note("adopted", machine->offer.id, "an earlier process rented it: " + e.instance->text, e.ticket);
      change_state(*machine, MachineState::kBooting);
      set_boot_phase(*machine, e.running_follows ? BootPhase::kPulling : BootPhase::kUnreported);
      if (machine->worker) change_state(*machine, MachineState::kWorking);
      return;
    }
    change_state(*machine, MachineState::kStopping);
    request_stop(*machine);
    return;
  }
  // The instance of an earlier process is missing. It may still appear, if it was requested a moment ago. The fleet
  // replaces it without waiting for that, and stops it if it appears.
  if (machine->adopt && !machine->unwanted) {
    machine->unwanted = true;
    machine->why = "it ended while no process watched it";
    machines_.invalidate_totals();
    shortfall_.lost_rollouts_per_s += machine->expected_rollouts_per_s();
  }
  const Duration doubtful_time = time_.now - machine->state_since;
  const Duration unanswered_max = machine->adopt ? kUnansweredEarlierMax : kUnansweredMax;
  if (machine->awaits_start_answer && !e.certain && doubtful_time < unanswered_max) return;
  // A machine that may have existed for a while is booked as paid, so that the cost is not underestimated.
  const bool may_have_run =
      machine->awaits_start_answer || !machine->instance.text.empty() || doubtful_time >= rules::kAnswerTimeout;
  erase_ended(*machine, machine->why, may_have_run);
}

void FleetCore::on(const fleet::Stopped& e) {
  Machine* machine = machines_.find(e.ticket);
  if (machine != nullptr && machine->state == MachineState::kStopping) erase_ended(*machine, machine->why, kRan);
}

void FleetCore::on(const fleet::StopFailed& e) {
  Machine* machine = machines_.find(e.ticket);
  if (machine == nullptr || machine->state != MachineState::kStopping) return;
  const Duration pause = schedule_retry(*machine);
  note_once("stop_failed", machine->offer.id, fmt::format("{}; retried after {}", e.why, to_text(pause)));
}

void FleetCore::on(const fleet::Exited& e) {
  Machine* machine = machines_.find(e.ticket);
  if (machine == nullptr) return;
  const bool is_draining = machine->state == MachineState::kDraining;
  const bool is_being_ended = machine->state == MachineState::kStopping || machine->unwanted || phase_ != Phase::kOpen;
  const bool is_expected = is_draining || is_being_ended;
  if (!is_expected) count_as_lost(*machine, e.why);
  // A draining machine has ended before its worker could submit all results.
  if (!is_expected || is_draining) {
    if (machine->worker) emit(fleet::GiveUp{*machine->worker, "its machine has ended: " + e.why});
    // An outbid offer is not available at that price, so the core waits until the market offers it again.
    record_offer_failure(*machine, e.outbid ? kUnavailableUntilRefresh : kAvailableAfterPause);
  }
  if (!e.still_rented) return erase_ended(*machine, is_expected && !machine->why.empty() ? machine->why : e.why, kRan);
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
  if (Machine* machine = machines_.find(e.worker))
    prepare_for_end(*machine, "its worker was told to stop", /*outbid=*/false);
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
  if (machine == nullptr) return;  // its worker was started by hand
  // A worker cannot come from a machine that was not requested yet; it comes from an earlier machine of the same offer.
  if (machine->state == MachineState::kUnbooked) return;
  if (machine->state == MachineState::kStopping || machine->unwanted) return;
  machines_.join(*machine, e.worker);
  record_progress(*machine);
  // The worker came back without the earlier request to drain, so it is repeated.
  if (machine->state == MachineState::kDraining) emit(fleet::Drain{e.worker, machine->why});
  if (machine->state != MachineState::kBooting) return;
  change_state(*machine, MachineState::kWorking);
  offer_book_.record_success(e.offer);
}

void FleetCore::on(const fleet::Heartbeat& e) {
  Machine* machine = machines_.find(e.worker);
  if (machine == nullptr || !(e.rollouts >= 0) || !(e.busy_s >= 0)) return;
  machine->unsubmitted_busy_s += e.busy_s;
  if (e.turned_away) record_progress(*machine);
  if (machine->state == MachineState::kWorking && e.without_work_s > 0) {
    // A worker cannot have lacked work for longer than the time since its last heartbeat.
    const double unused_s = std::min(e.without_work_s, seconds(time_.now - machine->last_heartbeat_at));
    pace_.used_capacity.subtract_unused(unused_s * machine->rollouts_per_s(), time_.now);
  }
  machine->last_heartbeat_at = time_.now;
  if (e.rollouts == 0) return;
  output_.rollouts += e.rollouts;
  // A long time without results of any worker (a long learner step) says nothing about a silent worker, so it is
  // capped.
  output_.productive_time += std::min<Duration>(time_.now - output_.last_result_at, kResultGapMax);
  output_.last_result_at = time_.now;
  record_progress(*machine);
  const double busy_s = std::exchange(machine->unsubmitted_busy_s, 0);
  const bool is_first_result = !std::exchange(machine->has_results, true);
  if (is_first_result) pace_.start_times.add(time_.now - machine->requested_at);
  // Until the first results the worker only begins responses, so these seconds say nothing about its rate.
  if (is_first_result || busy_s == 0) return;
  auto& samples = machine->samples;
  // Work comes in bursts, with each step and publication, so the window contains several periods.
  const Duration window =
      std::max<Duration>(rules::kThroughputWindow, kThroughputPeriods * rules_.pace.publish_every * step_time());
  if (samples.empty() || time_.now - samples.back().at >= window / kSamplesPerWindow)
    samples.push_back({.at = time_.now, .rollouts = 0, .busy_s = 0});
  samples.back().rollouts += e.rollouts;
  samples.back().busy_s += busy_s;
  double window_rollouts = 0, window_busy_s = 0;
  for (const auto& sample : samples) {
    window_rollouts += sample.rollouts;
    window_busy_s += sample.busy_s;
  }
  const double rollouts_wanted = kGroupsInWindow * rules_.group_size;
  while (time_.now - samples.front().at > window && window_rollouts - samples.front().rollouts >= rollouts_wanted) {
    window_rollouts -= samples.front().rollouts;
    window_busy_s -= samples.front().busy_s;
    samples.pop_front();
  }
  // A measurement from few groups depends on chance, so the expected rate is mixed in: as kPromisedGroups groups while
  // the window is empty, and as none once it is full.
  const double expected_rate = machine->expected_rollouts_per_s();
  const double window_missing_share = std::max(0.0, 1 - window_rollouts / rollouts_wanted);
  const double added_rollouts = rules_.group_size * kPromisedGroups * window_missing_share;
  const double added_busy_s = added_rollouts / std::max(expected_rate, kRateMin);
  machine->measured_rollouts_per_s = (window_rollouts + added_rollouts) / (window_busy_s + added_busy_s);
  machines_.invalidate_totals();
  const double promised_rate = machine->offer.rollouts_per_s;
  if (window_rollouts < kGroupsBeforeJudged * rules_.group_size || !(promised_rate > 0)) return;
  const double share = *machine->measured_rollouts_per_s / promised_rate;
  if (share < rules::kDemotionShare || offer_book_.is_demoted(machine->offer)) demote_host(*machine, share);
}

void FleetCore::on(const fleet::TrafficMeasured& e) {
  Machine* machine = machines_.find(e.worker);
  if (machine == nullptr) return;
  if (machine->samples.empty()) {
    // The worker may still receive its first policy. Each part counts as progress once, up to the size of a snapshot.
    const Bytes part{rules_.snapshot.count / rules::kSnapshotParts};
    const bool is_part_received = e.received.count >= machine->received_at_progress.count + part.count;
    if (part == Bytes{} || !is_part_received || machine->received_at_progress >= rules_.snapshot) return;
    machine->received_at_progress = e.received;
    return record_progress(*machine);
  }
  auto& traffic = machine->traffic;
  // A counter that falls belongs to a new process of the worker, so earlier readings cannot be compared.
  if (!traffic.empty() && (e.received < traffic.back().received || e.forwarded < traffic.back().forwarded))
    traffic.clear();
  const Duration period = rules_.pace.publish_every * step_time();
  const Duration window = std::max<Duration>(rules::kTrafficWindow, kTrafficPeriods * period);
  if (traffic.empty() || time_.now - traffic.back().at >= window / kSamplesPerWindow)
    traffic.push_back({time_.now, e.received, e.forwarded});
  // Drops the oldest reading only while the next one is old enough to cover the window.
  while (traffic.size() > 2 && time_.now - traffic[1].at >= window) traffic.pop_front();
  const auto& oldest = traffic.front();
  const auto& newest = traffic.back();
  const Duration measured_time = newest.at - oldest.at;
  if (measured_time < std::max<Duration>(kTrafficTimeMin, kTrafficPeriodsMin * period)) return;
  const FleetOffer& offer = machine->offer;
  const double received_gb = static_cast<double>(newest.received.count - oldest.received.count) / kBytesPerGb;
  const double forwarded_gb = static_cast<double>(newest.forwarded.count - oldest.forwarded.count) / kBytesPerGb;
  const double usd = received_gb * offer.download_usd_per_gb + forwarded_gb * offer.upload_usd_per_gb;
  machine->traffic_usd_per_hour = usd * kSecondsPerHour / seconds(measured_time);
  machines_.invalidate_totals();
}

void FleetCore::on(const fleet::Left& e) {
  Machine* machine = machines_.find(e.worker);
  if (machine == nullptr) return;
  machines_.leave(e.worker);
  if (machine->state == MachineState::kDraining) return stop(*machine, machine->why);
  if (machine->state == MachineState::kStopping || machine->unwanted || phase_ != Phase::kOpen) return;
  // The run cannot use the machine any more, so it stops paying for it.
  count_as_lost(*machine, e.why);
  record_offer_failure(*machine, kAvailableAfterPause);
  stop(*machine, e.why);
}

void FleetCore::on(const fleet::ProviderTrouble& e) {
  if (e.why.empty()) {
    if (!offer_book_.unblock(e.provider)) return;
    note("unblocked", "", e.provider + " can rent again");
    shortfall_.lost_rollouts_per_s = kAnyCapacity;
    shortfall_.next_search_at = {};  // at once
    return;
  }
  if (!offer_book_.block(e.provider, e.why)) return;
  note("blocked", "", fmt::format("{}: {}", e.provider, e.why));
  // Queued machines give way to those of other providers.
  for (auto& [key, machine] : machines_.all()) {
    if (!machine.is_queued || machine.offer.provider != e.provider) continue;
    shortfall_.lost_rollouts_per_s += machine.expected_rollouts_per_s();
    stop(machine, e.why);
  }
}

void FleetCore::on(const fleet::LearnerWaiting& e) { pace_.learner_idle.set_waiting(e.now_waits, time_.now); }

void FleetCore::on(const fleet::StepMeasured& e) {
  pace_.step_times.add(e.step_time);
  pace_.steps_left = e.steps_left;
  if (e.rollouts_waiting) pace_.stock.add(static_cast<double>(*e.rollouts_waiting), time_.now);
  update_target();
}

void FleetCore::on(const fleet::BroadcastMeasured& e) {
  pace_.broadcast_times.add(e.broadcast_time);
  if (e.install_time) pace_.install_times.add(*e.install_time);
  pace_.payloads.add(e.payload);
  update_target();
}

void FleetCore::on(const fleet::SpendingMeasured& e) {
  if (!(e.usd >= 0)) return;
  spending_ = {.usd = e.usd, .measured_at = time_.now};
}

void FleetCore::on(const fleet::OffersRefreshed& e) {
  const std::string difference = offer_book_.refresh(e.offers);
  shortfall_.next_search_at = {};
  if (!difference.empty()) note("market", "", difference);
}

// ---- states of a machine ----

void FleetCore::change_state(Machine& machine, MachineState to) {
  machines_.change_state(machine, to, time_.now);
  if (to == MachineState::kWorking)
    output_.schedule_stall_check(machine.productive_time_at_progress + rules_.fleet.away_max);
}

void FleetCore::stop(Machine& machine, const std::string& why) {
  if (machine.state == MachineState::kStopping) return;
  machine.why = why;
  if (machine.state == MachineState::kBooting || machine.state == MachineState::kWorking ||
      machine.state == MachineState::kDraining) {
    change_state(machine, MachineState::kStopping);
    request_stop(machine);
  } else {
    machine.unwanted = true;  // it is stopped as soon as its instance is known
    machines_.invalidate_totals();
    if (machine.state == MachineState::kStarting) emit(fleet::CancelStart{machine.ticket});
  }
}

void FleetCore::set_boot_phase(Machine& machine, BootPhase phase) {
  machine.boot_phase = phase;
  machine.boot_phase_since = time_.now;
}

void FleetCore::request_stop(Machine& machine) {
  machine.next_request_at = time_.now + rules::kAnswerTimeout;
  emit(fleet::Stop{.ticket = machine.ticket, .instance = machine.instance, .why = machine.why});
}

// Lets a machine's worker submit its results before the machine is stopped.
void FleetCore::drain(Machine& machine, const std::string& why) {
  if (!machine.worker) return stop(machine, why);
  change_state(machine, MachineState::kDraining);
  machine.why = why;
  machine.next_request_at = time_.now + rules::kDrainTimeout;
  emit(fleet::Drain{*machine.worker, why});
}

// For a machine that will end soon. It counts as lost now, so that a replacement is rented at once.
void FleetCore::prepare_for_end(Machine& machine, const std::string& why, bool outbid) {
  if (phase_ != Phase::kOpen || machine.unwanted) return;
  if (machine.state != MachineState::kBooting && machine.state != MachineState::kWorking) return;
  count_as_lost(machine, why);
  record_offer_failure(machine, outbid ? kUnavailableUntilRefresh : kAvailableAfterPause);
  if (machine.state == MachineState::kWorking)
    drain(machine, why);
  else
    stop(machine, why);
}

// Erases the machine and has its end written to the ledger. `ran`: false if it never existed and costs nothing.
void FleetCore::erase_ended(Machine& machine, const std::string& why, bool ran) {
  emit(fleet::BookEnd{
      .ticket = machine.ticket, .why = why, .ran = ran, .rollouts_per_s = machine.measured_rollouts_per_s});
  machines_.erase(machine);
}

void FleetCore::count_as_lost(Machine& machine, const std::string& why) {
  ++counts_.lost;
  if (!machine.unwanted) shortfall_.lost_rollouts_per_s += machine.expected_rollouts_per_s();
  // As in note(), which cannot set `has_joined`.
  allow_note_again("lost");
  emit(fleet::Note{.what = "lost",
                   .offer = machine.offer.id,
                   .why = why,
                   .ticket = machine.ticket,
                   .has_joined = machine.has_joined});
}

// For a machine that may exist or not. It is stopped if the provider lists it.
void FleetCore::mark_doubtful(Machine& machine) {
  change_state(machine, MachineState::kDoubtful);
  machine.unwanted = true;
  if (!machine.awaits_start_answer) return request_listing(machine);
  emit(fleet::CancelStart{machine.ticket});
  machine.next_request_at = time_.now;  // the next tick requests a listing, if the machine still exists then
}

void FleetCore::record_progress(Machine& machine) {
  machine.productive_time_at_progress = output_.productive_time;
  machine.fleet_rollouts_at_progress = output_.rollouts;
}

void FleetCore::request_listing(Machine& machine) {
  schedule_retry(machine);
  emit(fleet::FindInstance{machine.ticket});
}

Duration FleetCore::schedule_retry(Machine& machine) {
  constexpr int kDoublingsMax = 10;  // so that the shift cannot overflow; kBackoffMax limits the pause
  const Duration pause =
      std::min<Duration>(rules::kBackoffMin * (1 << std::min(machine.retries, kDoublingsMax)), rules::kBackoffMax);
  ++machine.retries;
  machine.next_request_at = time_.now + pause;
  return pause;
}

void FleetCore::record_offer_failure(const Machine& machine, bool until_refresh) {
  offer_book_.record_failure(machine.offer.id, until_refresh, time_.now);
}

void FleetCore::demote_host(const Machine& machine, double share) {
  share = std::clamp(share, kShareMin, kFullShare);
  if (!offer_book_.demote(machine.offer, share)) return;
  note("demoted", machine.offer.id,
       fmt::format("{:.4g} rollouts/s were promised, {:.4g} are measured: its host now counts with the measured share",
                   machine.offer.rollouts_per_s, share * machine.offer.rollouts_per_s),
       machine.ticket);
}

void FleetCore::note(std::string what, std::string offer, std::string why, Ticket ticket) {
  allow_note_again(what);
  emit(fleet::Note{.what = std::move(what),
                   .offer = std::move(offer),
                   .why = std::move(why),
                   .ticket = ticket,
                   .has_joined = false});
}

// Notes a lasting condition only once, until allow_note_again() or note() is called for the same kind (`what`).
void FleetCore::note_once(const std::string& what, const std::string& offer, const std::string& why) {
  const bool is_first = outbox_.noted.emplace(what, offer).second;
  if (is_first) emit(fleet::Note{.what = what, .offer = offer, .why = why, .ticket = 0, .has_joined = false});
}

}  // namespace echoline::provisioner

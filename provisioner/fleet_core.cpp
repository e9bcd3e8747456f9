#include "provisioner/fleet_core.hpp"

#include <algorithm>
#include <utility>

#include "base/result.hpp"

namespace echoline::provisioner {
namespace {

constexpr int kSamplesPerWindow = 32;  // completions close in time are added up
constexpr double kGroupsInWindow = 8;  // at least
constexpr double kGuessGroups = 2;
constexpr double kGroupsBeforeJudged = 4;                    // before a worker counts as slower than promised
constexpr Duration kHandInPause = std::chrono::seconds(10);  // longer ones between two results count as so long
constexpr double kBytesPerGb = 1e9;
constexpr Duration kUnanswered = std::chrono::minutes(5);  // after that a start that nobody answered has not happened

template <class T>
void keep_last(std::deque<T>& samples, T sample) {
  if (sample <= T{}) return;
  samples.push_back(sample);
  if (samples.size() > rules::kPaceSamples) samples.pop_front();
}

}  // namespace

std::string_view to_string(MachineState state) {
  constexpr std::array<std::string_view, 7> kNames{"asked",    "starting", "booting", "working",
                                                   "draining", "stopping", "doubtful"};
  return kNames.at(static_cast<std::size_t>(state));
}

FleetCore::FleetCore(FleetRules rules, const std::vector<FleetOffer>& offers, std::vector<std::string> wanted)
    : rules_(std::move(rules)), wanted_(std::move(wanted)) {
  ECHO_CHECK(rules_.fleet.headroom >= 0 && rules_.fleet.join_timeout > Duration{} && rules_.group_size > 0);
  for (const FleetOffer& offer : offers) book_[offer.id] = Entry{offer};
  auto planned = capacity_target(rules_.pace, rules_.broadcast_time, rules_.fleet.headroom);
  ECHO_CHECK(planned.has_value(), "{}", planned.error().message());  // a plan was made for it
  target_ = *planned;
}

// ---- events ----

void FleetCore::pass(TimePoint now) {
  if (told_) now_ += std::clamp(now - *told_, Duration{}, rules::kStepMax);
  told_ = now;
}

std::vector<FleetAction> FleetCore::handle(const FleetEvent& event, TimePoint now) {
  pass(now);
  std::visit([&](const auto& e) { on(e); }, event);
  return std::exchange(actions_, {});
}

std::vector<FleetAction> FleetCore::tick(TimePoint now) {
  pass(now);
  mind_time_limits();
  if (!closed_) {
    mind_budgets();
    mind_stalled();
  }
  if (!closed_) {
    rent_wanted();
    mind_shortfall();
    mind_surplus();
  }
  return std::exchange(actions_, {});
}

std::vector<FleetAction> FleetCore::close(const std::string& why, TimePoint now) {
  pass(now);
  closed_ = true;
  wanted_.clear();
  for (auto& [key, machine] : machines_) stop(machine, why);
  return std::exchange(actions_, {});
}

void FleetCore::on(const fleet::Booked& e) {
  Machine* machine = rented_as(e.offer);
  if (machine == nullptr || machine->state != MachineState::kAsked || machine->unwanted) {
    actions_.push_back(fleet::BookEnd{e.ticket, machine ? machine->why : "nobody wants it any more", false});
    if (machine != nullptr && machine->state == MachineState::kAsked) erase(*machine);
    return;
  }
  machine->ticket = e.ticket;
  by_ticket_[e.ticket] = machine->key;
  move(*machine, MachineState::kStarting);
  machine->answered = false;
  ++started_;
  actions_.push_back(fleet::Start{e.ticket, e.offer});
}

void FleetCore::on(const fleet::BookingFailed& e) {
  Machine* machine = rented_as(e.offer);
  if (machine == nullptr || machine->state != MachineState::kAsked) return;
  note("failed", e.offer, "not booked, so not rented: " + e.why);
  blame(*machine, false);
  loss_to_replace_ = true;
  erase(*machine);
}

void FleetCore::on(const fleet::Recovered& e) {
  if (of(e.ticket) != nullptr) return;
  Machine& machine = add(e.offer);
  by_ticket_[e.ticket] = machine.key;
  machine.ticket = e.ticket;
  machine.instance = e.instance;
  machine.state = MachineState::kDoubtful;
  machine.adopt = e.adopt && !closed_;
  machine.unwanted = !machine.adopt;
  machine.why = "left behind by an earlier process";
  machine.answered = !e.instance.text.empty();
  machine.since = machine.asked = now_;
  look(machine);
}

void FleetCore::on(const fleet::Started& e) {
  Machine* machine = of(e.ticket);
  if (machine == nullptr) {  // given up long ago: whatever it is, it goes
    machine = &add({});
    by_ticket_[e.ticket] = machine->key;
    machine->ticket = e.ticket;
    machine->state = MachineState::kDoubtful;
    machine->since = machine->asked = now_;
    machine->unwanted = true;
    machine->why = "it was started after it had been given up";
  }
  if (machine->state != MachineState::kStarting && machine->state != MachineState::kDoubtful) return;
  machine->answered = true;
  machine->instance = e.instance;
  if (e.usd_per_hour) machine->offer.usd_per_hour = *e.usd_per_hour;
  if (machine->unwanted) {
    move(*machine, MachineState::kStopping);
    ask_to_stop(*machine);
    return;
  }
  move(*machine, MachineState::kBooting);
  if (machine->worker) move(*machine, MachineState::kWorking);  // it was faster than the provider
}

void FleetCore::on(const fleet::StartFailed& e) {
  Machine* machine = of(e.ticket);
  if (machine == nullptr) return;
  if (machine->state != MachineState::kStarting && machine->state != MachineState::kDoubtful) return;
  const bool was_wanted = !machine->unwanted && !closed_;
  machine->answered = true;
  if (was_wanted) {
    note("failed", machine->offer.id, e.why, e.ticket);
    blame(*machine, !e.retryable);
    loss_to_replace_ = true;
  }
  if (e.perhaps_rented) {
    machine->why = "the provider refused it: " + e.why;
    if (machine->state == MachineState::kStarting) doubt(*machine);
    return;
  }
  forget(*machine, e.why, false);
}

void FleetCore::on(const fleet::Found& e) {
  Machine* machine = of(e.ticket);
  if (machine == nullptr || machine->state != MachineState::kDoubtful) return;
  if (e.instance) {
    machine->instance = *e.instance;
    if (machine->adopt && !machine->unwanted) {
      note("adopted", machine->offer.id, "an earlier process rented it: " + e.instance->text, e.ticket);
      move(*machine, MachineState::kBooting);
      machine->asked = now_;
      if (machine->worker) move(*machine, MachineState::kWorking);
      return;
    }
    move(*machine, MachineState::kStopping);
    ask_to_stop(*machine);
    return;
  }
  // An earlier process may have asked for it a moment ago: it may still come to be, but nobody waits for that.
  if (machine->adopt && !std::exchange(machine->unwanted, true)) {
    machine->why = "ended while nobody looked after it";
    loss_to_replace_ = true;
  }
  if (machine->answered || e.certain || now_ - machine->since >= kUnanswered)
    forget(*machine, machine->why,  // what may have been there for a while is paid for, unless somebody looked at once
           !machine->answered || !machine->instance.text.empty() || now_ - machine->since >= rules::kAnswer);
}

void FleetCore::on(const fleet::Stopped& e) {
  Machine* machine = of(e.ticket);
  if (machine != nullptr && machine->state == MachineState::kStopping) forget(*machine, machine->why, true);
}

void FleetCore::on(const fleet::StopFailed& e) {
  Machine* machine = of(e.ticket);
  if (machine == nullptr || machine->state != MachineState::kStopping) return;
  const Duration wait = put_off(*machine);
  note_once("stop_failed", machine->offer.id, fmt::format("{}; asked again after {}", e.why, to_text(wait)));
}

void FleetCore::on(const fleet::Exited& e) {
  Machine* machine = of(e.ticket);
  if (machine == nullptr) return;
  const bool drains = machine->state == MachineState::kDraining;
  const bool expected = drains || machine->state == MachineState::kStopping || machine->unwanted || closed_;
  if (!expected || drains) {
    if (!drains) lose(*machine, "lost", e.why);
    if (machine->worker) actions_.push_back(fleet::GiveUp{*machine->worker, "its machine has ended: " + e.why});
    blame(*machine, e.outbid);  // at that price it is not to be had
  }
  if (!e.still_rented) return forget(*machine, expected && !machine->why.empty() ? machine->why : e.why, true);
  if (machine->state == MachineState::kStopping) return;
  machine->why = e.why;
  if (machine->state == MachineState::kStarting) return doubt(*machine);
  if (machine->state == MachineState::kDoubtful) return;  // it is being looked for
  stop(*machine, e.why);
}

void FleetCore::on(const fleet::Ending& e) {
  if (Machine* machine = of(e.ticket)) ends_soon(*machine, e.why, e.outbid);
}

void FleetCore::on(const fleet::Leaving& e) {
  if (Machine* machine = of(e.worker)) ends_soon(*machine, "its worker was told to end", false);
}

void FleetCore::on(const fleet::Drained& e) {
  Machine* machine = of(e.worker);
  if (machine != nullptr && machine->state == MachineState::kDraining) stop(*machine, machine->why);
}

void FleetCore::on(const fleet::PriceChanged& e) {
  Machine* machine = of(e.ticket);
  if (machine == nullptr || !(e.usd_per_hour >= 0)) return;
  if (machine->offer.usd_per_hour == e.usd_per_hour) return;
  note("price", machine->offer.id,
       fmt::format("${:.4g} an hour instead of ${:.4g}", e.usd_per_hour, machine->offer.usd_per_hour), e.ticket);
  machine->offer.usd_per_hour = e.usd_per_hour;
}

void FleetCore::on(const fleet::Joined& e) {
  Machine* machine = rented_as(e.offer);
  if (machine == nullptr) return;  // by hand
  if (machine->state == MachineState::kStopping || machine->state == MachineState::kAsked || machine->unwanted) return;
  if (machine->worker && *machine->worker != e.worker) by_worker_.erase(*machine->worker);
  machine->worker = e.worker;
  progressed(*machine);
  by_worker_[e.worker] = machine->key;
  if (machine->state == MachineState::kDraining)
    actions_.push_back(fleet::Drain{e.worker, machine->why});  // back, and told anew
  if (machine->state != MachineState::kBooting) return;
  move(*machine, MachineState::kWorking);
  if (const auto entry = book_.find(e.offer); entry != book_.end()) entry->second.failures = 0;
}

void FleetCore::on(const fleet::Beat& e) {
  Machine* machine = of(e.worker);
  if (machine == nullptr || !(e.rollouts >= 0) || !(e.busy_s >= 0)) return;
  machine->unfinished_s += e.busy_s;
  if (e.turned_away) progressed(*machine);
  if (e.rollouts == 0) return;
  rollouts_ += e.rollouts;
  // Time in which nobody hands in anything (a long learner step) says nothing of who hands in nothing.
  worked_ += std::min<Duration>(now_ - last_rollouts_at_, kHandInPause);
  last_rollouts_at_ = now_;
  progressed(*machine);
  const double busy_s = std::exchange(machine->unfinished_s, 0);
  if (busy_s == 0) return;
  auto& samples = machine->samples;
  if (samples.empty() || now_ - samples.back().at >= rules::kWindow / kSamplesPerWindow)
    samples.push_back({now_, 0, 0});
  samples.back().rollouts += e.rollouts;
  samples.back().busy_s += busy_s;
  double rollouts = 0, busy = 0;
  for (const auto& sample : samples) rollouts += sample.rollouts, busy += sample.busy_s;
  const double group = rules_.group_size;
  while (now_ - samples.front().at > rules::kWindow && rollouts - samples.front().rollouts >= kGroupsInWindow * group) {
    rollouts -= samples.front().rollouts;
    busy -= samples.front().busy_s;
    samples.pop_front();
  }
  // Where few groups begin and end is chance: what was promised weighs two, and nothing once the window is full.
  const double guess = machine->share * machine->offer.rollouts_per_s;
  const double weight = group * kGuessGroups * std::max(0.0, 1 - rollouts / (kGroupsInWindow * group));
  machine->measured = (rollouts + weight) / (busy + weight / std::max(guess, 1e-12));
  const double promised = machine->offer.rollouts_per_s;
  if (rollouts < kGroupsBeforeJudged * group || !(promised > 0)) return;
  const double share = *machine->measured / promised;
  if (share < rules::kLied || shares_.contains(host_of(machine->offer))) demote(*machine, share);
}

void FleetCore::on(const fleet::Moved& e) {
  Machine* machine = of(e.worker);
  if (machine == nullptr) return;
  if (machine->samples.empty()) {  // what it says it has received counts up to a snapshot, and once
    const Bytes part{rules_.snapshot.count / rules::kArrivalParts};
    if (part == Bytes{} || e.received.count < machine->received_then.count + part.count ||
        machine->received_then >= rules_.snapshot)
      return;
    machine->received_then = e.received;
    return progressed(*machine);
  }
  auto& traffic = machine->traffic;
  if (!traffic.empty() && (e.received < traffic.back().received || e.forwarded < traffic.back().forwarded))
    traffic.clear();
  const Duration period = rules_.pace.publish_every * step_time();
  const Duration window = std::max<Duration>(rules::kTrafficWindow, 5 * period);
  if (traffic.empty() || now_ - traffic.back().at >= window / kSamplesPerWindow)
    traffic.push_back({now_, e.received, e.forwarded});
  while (traffic.size() > 2 && now_ - traffic[1].at >= window) traffic.pop_front();
  const auto& from = traffic.front();
  const auto& to = traffic.back();
  const Duration over = to.at - from.at;
  if (over < std::max<Duration>(std::chrono::minutes(1), 2 * period)) return;
  const FleetOffer& offer = machine->offer;
  const double usd =
      static_cast<double>(to.received.count - from.received.count) / kBytesPerGb * offer.download_usd_per_gb +
      static_cast<double>(to.forwarded.count - from.forwarded.count) / kBytesPerGb * offer.upload_usd_per_gb;
  machine->traffic_usd_per_hour = usd * 3600 / seconds(over);
}

void FleetCore::on(const fleet::Left& e) {
  Machine* machine = of(e.worker);
  by_worker_.erase(e.worker);
  if (machine == nullptr) return;
  machine->worker.reset();
  if (machine->state == MachineState::kDraining) return stop(*machine, machine->why);
  if (machine->state == MachineState::kStopping || machine->unwanted || closed_) return;
  // Whatever it still does, it is no use to the run: nobody goes on paying for it.
  lose(*machine, "lost", e.why);
  blame(*machine, false);
  stop(*machine, e.why);
}

void FleetCore::on(const fleet::Waiting& e) {
  if (!stretches_.empty()) {
    if (stretches_.back().waiting == e.now_waits) return;
    stretches_.back().to = now_;
  }
  stretches_.push_back({now_, kNever, e.now_waits});
  while (stretches_.size() > 1 && now_ - stretches_.front().to > std::chrono::hours(2)) stretches_.pop_front();
  if (stretches_.size() > 4096) stretches_.pop_front();
}

void FleetCore::on(const fleet::StepMeasured& e) {
  keep_last(steps_, e.step_time);
  retarget();
}

void FleetCore::on(const fleet::BroadcastMeasured& e) {
  keep_last(broadcasts_, e.broadcast_time);
  keep_last(payloads_, e.payload);
  retarget();
}

void FleetCore::on(const fleet::Spent& e) {
  if (!(e.usd >= 0)) return;
  spent_usd_ = e.usd;
  spent_at_ = now_;
}

void FleetCore::on(const fleet::OffersRefreshed& e) {
  std::map<std::string, Entry, std::less<>> fresh;
  std::size_t added = 0, cheaper = 0, dearer = 0;
  for (const FleetOffer& offer : e.offers) {
    Entry entry{offer};
    const auto known = book_.find(offer.id);
    if (known == book_.end()) {
      ++added;
    } else {
      const double before = known->second.offer.usd_per_hour;
      cheaper += offer.usd_per_hour < before ? 1 : 0;
      dearer += offer.usd_per_hour > before ? 1 : 0;
      entry.not_before = known->second.not_before;
      entry.failures = known->second.failures;
    }
    fresh[offer.id] = std::move(entry);
  }
  const std::size_t gone = book_.size() + added - std::min(book_.size() + added, fresh.size());
  book_ = std::move(fresh);
  look_again_ = {};
  if (added + cheaper + dearer + gone > 0)
    note("market", "",
         fmt::format("{} offers: {} new, {} gone, {} cheaper, {} dearer", book_.size(), added, gone, cheaper, dearer));
}

// ---- the table ----

FleetCore::Machine* FleetCore::of(Ticket ticket) {
  const auto it = by_ticket_.find(ticket);
  return it == by_ticket_.end() ? nullptr : &machines_.at(it->second);
}

FleetCore::Machine* FleetCore::of(WorkerId worker) {
  const auto it = by_worker_.find(worker);
  return it == by_worker_.end() ? nullptr : &machines_.at(it->second);
}

FleetCore::Machine* FleetCore::rented_as(const std::string& offer) {
  return const_cast<Machine*>(std::as_const(*this).machine_of(offer));
}

FleetCore::Machine& FleetCore::add(const FleetOffer& offer) {
  Machine& machine = machines_[next_];
  machine.key = next_++;
  machine.offer = offer;
  by_offer_.emplace(offer.id, machine.key);
  return machine;
}

void FleetCore::erase(const Machine& machine) {
  by_offer_.erase({machine.offer.id, machine.key});
  machines_.erase(std::uint64_t{machine.key});  // a copy: the key goes with its machine
}

FleetCore::Machine* FleetCore::dearest(const std::function<bool(const Machine&)>& meant) {
  const double scale = traffic_scale();
  const auto unit_cost = [&](const Machine& machine) {
    return price_of(machine, scale) / std::max(rate_of(machine), 1e-12);
  };
  Machine* found = nullptr;
  for (auto& [key, machine] : machines_)
    if (meant(machine) && (found == nullptr || unit_cost(machine) > unit_cost(*found))) found = &machine;
  return found;
}

const FleetCore::Machine* FleetCore::machine_of(const std::string& offer) const {
  const auto it = by_offer_.lower_bound({offer, 0});
  return it == by_offer_.end() || it->first != offer ? nullptr : &machines_.at(it->second);
}

const FleetCore::Machine* FleetCore::machine_of(Ticket ticket) const {
  const auto it = by_ticket_.find(ticket);
  return it == by_ticket_.end() ? nullptr : &machines_.at(it->second);
}

std::optional<Ticket> FleetCore::ticket_of(WorkerId worker) const {
  const auto it = by_worker_.find(worker);
  return it == by_worker_.end() ? std::nullopt : std::optional(machines_.at(it->second).ticket);
}

void FleetCore::move(Machine& machine, MachineState to) {
  using S = MachineState;
  const auto allowed = [&] {
    switch (machine.state) {
      case S::kAsked:
        return to == S::kStarting;
      case S::kStarting:
        return to == S::kBooting || to == S::kStopping || to == S::kDoubtful;
      case S::kBooting:
        return to == S::kWorking || to == S::kStopping;
      case S::kWorking:
        return to == S::kDraining || to == S::kStopping;
      case S::kDraining:
        return to == S::kStopping;
      case S::kDoubtful:
        return to == S::kBooting || to == S::kStopping;
      case S::kStopping:
        return false;
    }
    return false;
  };
  ECHO_CHECK(allowed(), "{}: from {} to {}", machine.offer.id, to_string(machine.state), to_string(to));
  ECHO_CHECK(to == S::kStarting || machine.ticket != 0 || to == S::kDoubtful);
  ECHO_CHECK(to == S::kStarting || to == S::kDoubtful || !machine.instance.text.empty());
  machine.state = to;
  machine.since = now_;
  machine.tries = 0;
  machine.next_try = kNever;
}

void FleetCore::stop(Machine& machine, const std::string& why) {
  if (machine.state == MachineState::kStopping) return;
  machine.why = why;
  if (machine.state == MachineState::kBooting || machine.state == MachineState::kWorking ||
      machine.state == MachineState::kDraining) {
    move(machine, MachineState::kStopping);
    ask_to_stop(machine);
  } else {
    machine.unwanted = true;  // nothing can be stopped yet: it is, as soon as it is known by a name
  }
}

void FleetCore::ask_to_stop(Machine& machine) {
  machine.next_try = now_ + rules::kAnswer;
  actions_.push_back(fleet::Stop{machine.ticket, machine.instance, machine.why});
}

// It works no more for long, or is not needed: what it has begun is handed in first.
void FleetCore::drain(Machine& machine, const std::string& why) {
  if (!machine.worker) return stop(machine, why);
  move(machine, MachineState::kDraining);
  machine.why = why;
  machine.next_try = now_ + rules::kDrain;
  actions_.push_back(fleet::Drain{*machine.worker, why});
}

// Somebody takes it away, and says so before: another is rented at once.
void FleetCore::ends_soon(Machine& machine, const std::string& why, bool outbid) {
  if (closed_ || machine.unwanted) return;
  if (machine.state != MachineState::kBooting && machine.state != MachineState::kWorking) return;
  lose(machine, "lost", why);
  blame(machine, outbid);
  if (machine.state == MachineState::kWorking)
    drain(machine, why);
  else
    stop(machine, why);
}

void FleetCore::forget(Machine& machine, const std::string& why, bool ran) {
  actions_.push_back(fleet::BookEnd{machine.ticket, why, ran, machine.measured});
  if (machine.worker) by_worker_.erase(*machine.worker);
  const auto it = by_ticket_.find(machine.ticket);
  ECHO_CHECK(it != by_ticket_.end());
  by_ticket_.erase(it);
  erase(machine);
}

void FleetCore::lose(Machine& machine, const std::string& what, const std::string& why) {
  ++lost_;
  loss_to_replace_ = true;
  note(what, machine.offer.id, why, machine.ticket);
}

void FleetCore::doubt(Machine& machine) {
  move(machine, MachineState::kDoubtful);
  machine.unwanted = true;
  look(machine);
}

void FleetCore::progressed(Machine& machine) {
  machine.worked_then = worked_;
  machine.rollouts_then = rollouts_;
}

void FleetCore::look(Machine& machine) {
  put_off(machine);
  machine.next_try = std::min(machine.next_try, now_ + rules::kAnswer);
  actions_.push_back(fleet::Look{machine.ticket});
}

Duration FleetCore::put_off(Machine& machine) {
  const Duration wait = std::min<Duration>(rules::kRetryMin * (1 << std::min(machine.tries, 10)), rules::kRetryMax);
  ++machine.tries;
  machine.next_try = now_ + wait;
  return wait;
}

void FleetCore::blame(const Machine& machine, bool refused) {
  const auto it = book_.find(machine.offer.id);
  if (it == book_.end()) return;
  it->second.refused = it->second.refused || refused;
  it->second.not_before = now_ + std::chrono::minutes(1) * (1 << std::min(it->second.failures, 6));
  ++it->second.failures;
}

void FleetCore::demote(const Machine& machine, double share) {
  share = std::clamp(share, 1e-3, 1.0);
  const auto [it, is_new] = shares_.try_emplace(host_of(machine.offer), share);
  it->second = share;
  if (!is_new) return;
  note("demoted", machine.offer.id,
       fmt::format("{:.4g} rollouts/s were promised, {:.4g} are measured: so its host is counted from now on",
                   machine.offer.rollouts_per_s, share * machine.offer.rollouts_per_s),
       machine.ticket);
}

void FleetCore::note(std::string what, std::string offer, std::string why, Ticket ticket) {
  unsay(what);
  actions_.push_back(fleet::Note{std::move(what), std::move(offer), std::move(why), ticket});
}

// What lasts is said once, until something else of its kind has happened.
void FleetCore::note_once(const std::string& what, const std::string& key, const std::string& why) {
  if (noted_.emplace(what, key).second) actions_.push_back(fleet::Note{what, key, why, 0});
}

}  // namespace echoline::provisioner

#include "sim/run_fleet.hpp"

#include <algorithm>
#include <numeric>

#include "provisioner/fleet_rules.hpp"

namespace echoline::sim {
namespace {

using namespace provisioner;

constexpr double kNeverS = 1e18;
constexpr double kAnswersAfter = 2;  // seconds until a provider answers
constexpr double kBytesPerGb = 1e9;
constexpr std::size_t kPage = 512;  // offers per search; the core considers no more
constexpr std::uint64_t kPlannedKept = 200;
constexpr double kRandomSpread = 1000;  // range of the random prices for Activation::kRandom

TimePoint time_of(double s) { return TimePoint(std::chrono::hours(1) + from_seconds(s)); }

}  // namespace

RunFleet::RunFleet(const RunScenario& scenario, const FleetRules& rules, const std::vector<std::size_t>& wanted,
                   Hooks hooks, RunResult& result)
    : scenario_(scenario), hooks_(std::move(hooks)), result_(result), draws_(scenario.seed, 21) {
  const PlanRequest& request = scenario.request;
  Draws shuffled(scenario.seed, 22);
  for (std::size_t i = 0; i < scenario.offers.size(); ++i) {
    const Offer& o = scenario.offers[i].offer;
    FleetOffer lot = provisioner::fleet_offer(request, o);
    rent_.push_back(lot.usd_per_hour);
    // For a random choice, the core sees random prices but pays the real ones.
    if (scenario.activation == Activation::kRandom)
      lot.usd_per_hour = o.rollouts_per_s * (1 + (kRandomSpread - 1) * shuffled.uniform());
    index_[o.id] = i;
    lots_.push_back(std::move(lot));
  }
  back_s_.assign(lots_.size(), 0);
  for (std::size_t i = 0; i < lots_.size(); ++i)
    if (provisioner::defect_of(request, scenario.offers[i].offer)) back_s_[i] = kNeverS;  // plans exclude it too
  order_.resize(lots_.size());
  std::iota(order_.begin(), order_.end(), std::size_t{0});
  const auto unit = [&](std::size_t i) {
    return lots_[i].all_usd_per_hour() / std::max(lots_[i].rollouts_per_s, 1e-12);
  };
  std::stable_sort(order_.begin(), order_.end(), [&](auto a, auto b) { return unit(a) < unit(b); });
  std::vector<std::string> names;
  std::vector<FleetOffer> first = page();
  std::vector<bool> on_page(lots_.size());
  for (const FleetOffer& lot : first) on_page[index_.at(lot.id)] = true;
  for (const std::size_t i : wanted) {
    names.push_back(lots_[i].id);
    if (!on_page[i]) first.push_back(lots_[i]);
  }
  core_.emplace(rules, first, names);
}

std::vector<FleetOffer> RunFleet::page() const {
  std::vector<FleetOffer> offers;
  for (const std::size_t i : order_) {
    if (back_s_[i] > now_ || !(lots_[i].rollouts_per_s > 0)) continue;
    offers.push_back(lots_[i]);
    if (offers.size() == kPage) break;
  }
  return offers;
}

void RunFleet::hear(const FleetEvent& event, double now) {
  now_ = now;
  carry_out(core_->handle(event, time_of(now)));
}

void RunFleet::tick(double now) {
  now_ = now;
  while (!answers_.empty() && answers_.top().at_s <= now) {
    const FleetEvent event = answers_.top().event;
    answers_.pop();
    if (const auto* stopped = std::get_if<fleet::Stopped>(&event)) {
      const auto ticket = static_cast<std::size_t>(stopped->ticket);
      if (!gone_[ticket - 1]) {
        gone_[ticket - 1] = true;
        hooks_.ended(stopped->ticket);
      }
    }
    carry_out(core_->handle(event, time_of(now)));
  }
  if (now - refreshed_s_ >= seconds(scenario_.request.fleet.search_every)) {
    refreshed_s_ = now;
    carry_out(core_->handle(fleet::OffersRefreshed{page()}, time_of(now)));
  }
  carry_out(core_->handle(fleet::Spent{usd(now)}, time_of(now)));
  carry_out(core_->tick(time_of(now)));
}

void RunFleet::close(const std::string& why, double now) {
  now_ = now;
  carry_out(core_->close(why, time_of(now)));
}

void RunFleet::answer(double after_s, FleetEvent event) {
  answers_.push({now_ + after_s, sequence_++, std::move(event)});
}

void RunFleet::carry_out(const std::vector<FleetAction>& actions) {
  for (const FleetAction& action : actions) std::visit([&](const auto& a) { act(a); }, action);
}

void RunFleet::settle_rent(double now) {
  const double usd = rent_per_hour_ * (now - settled_s_) / 3600;
  result_.usd_rent += usd;
  result_.usd_fleet += usd;
  settled_s_ = now;
}

double RunFleet::usd(double now) const {
  const double learner = scenario_.request.learner_usd_per_hour.value_or(0) * now / 3600;
  return result_.usd_fleet + rent_per_hour_ * (now - settled_s_) / 3600 + learner;
}

void RunFleet::act(const fleet::Book& book) {
  const std::size_t index = index_.at(book.offer);
  settle_rent(now_);
  SimMachine machine;
  machine.offer = book.offer;
  machine.region = scenario_.offers[index].region;
  machine.usd_per_hour = rent_[index];
  machine.from_s = now_;
  result_.machines.push_back(std::move(machine));
  offers_.push_back(index);
  open_.push_back(true);
  gone_.push_back(false);
  rent_per_hour_ += rent_[index];
  carry_out(core_->handle(fleet::Booked{book.offer, static_cast<Ticket>(offers_.size())}, time_of(now_)));
}

void RunFleet::act(const fleet::Start& start) {
  const std::size_t index = offer_of(start.ticket);
  const bool there = back_s_[index] <= now_ && !draws_.chance(scenario_.faults.refused);
  const double boot_s = draws_.lognormal(scenario_.boot_s);
  if (!there) {
    gone_[static_cast<std::size_t>(start.ticket) - 1] = true;
    return answer(kAnswersAfter,
                  fleet::StartFailed{start.ticket, "another customer rents it", back_s_[index] <= now_, false});
  }
  back_s_[index] = kNeverS;
  answer(kAnswersAfter, fleet::Started{start.ticket, {fmt::format("sim:{}", start.ticket)}, {}});
  const bool never = draws_.chance(scenario_.faults.never_joins);
  hooks_.booting(start.ticket, index, never ? kNeverS : now_ + std::max(kAnswersAfter, boot_s));
}

void RunFleet::act(const fleet::Stop& stop) { answer(kAnswersAfter, fleet::Stopped{stop.ticket}); }

void RunFleet::act(const fleet::Look& look) {
  const bool there = !gone_[static_cast<std::size_t>(look.ticket) - 1];
  answer(kAnswersAfter,
         fleet::Found{look.ticket, there ? std::optional(InstanceId{fmt::format("sim:{}", look.ticket)}) : std::nullopt,
                      true});
}

void RunFleet::act(const fleet::BookEnd& end) {
  const auto ticket = static_cast<std::size_t>(end.ticket);
  if (!open_[ticket - 1]) return;
  open_[ticket - 1] = false;
  settle_rent(now_);
  SimMachine& machine = this->machine(end.ticket);
  machine.to_s = now_;
  rent_per_hour_ -= machine.usd_per_hour;
  if (!end.ran) {  // it never existed
    const double usd = machine.usd_per_hour * (now_ - machine.from_s) / 3600;
    result_.usd_rent -= usd;
    result_.usd_fleet -= usd;
    machine.from_s = now_;
  }
  result_.machine_hours += (machine.to_s - machine.from_s) / 3600;
  const std::size_t index = offer_of(end.ticket);
  if (back_s_[index] == kNeverS) back_s_[index] = now_;
}

void RunFleet::act(const fleet::Drain& drain) { hooks_.drain(drain.worker); }

void RunFleet::act(const fleet::Note& note) {
  const std::uint64_t nth = ++result_.decision_counts[note.what];
  // Keeps only some of the plan's rentals, so that other decisions are kept too.
  if (result_.decisions.size() < kDecisionsKept && !(note.what == "planned" && nth > kPlannedKept))
    result_.decisions.push_back({now_, note.what, note.offer, note.why});
  if (note.what == "lost" && note.ticket != 0) machine(note.ticket).lost = true;
}

void RunFleet::taken(Ticket ticket, bool outbid, double now) {
  if (gone_[static_cast<std::size_t>(ticket) - 1]) return;
  gone_[static_cast<std::size_t>(ticket) - 1] = true;
  back_s_[offer_of(ticket)] = now + seconds(scenario_.churn.returns_after);
  hear(fleet::Exited{ticket, outbid ? "outbid" : "the host is gone", outbid}, now);
}

void RunFleet::traffic(Ticket ticket, double bytes_in, double bytes_forwarded) {
  const FleetOffer& lot = lots_[offer_of(ticket)];
  SimMachine& machine = this->machine(ticket);
  machine.bytes_in += bytes_in;
  machine.bytes_forwarded += bytes_forwarded;
  const double usd = (bytes_in * lot.download_usd_per_gb + bytes_forwarded * lot.upload_usd_per_gb) / kBytesPerGb;
  machine.usd_traffic += usd;
  result_.usd_traffic += usd;
  result_.usd_fleet += usd;
}

}  // namespace echoline::sim

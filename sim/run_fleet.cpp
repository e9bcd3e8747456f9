// The simulated market, provider and ledger behind RunFleet: performs each action of the fleet core, and answers later.
#include "sim/run_fleet.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "provisioner/fleet_rules.hpp"

namespace echoline::sim {
namespace {

using namespace provisioner;

constexpr double kAnswerSeconds = 2;  // from a request to the provider's answer
constexpr double kBytesPerGb = 1e9;
constexpr std::size_t kSearchResultMax = 512;         // offers per search; the core considers no more
constexpr std::uint64_t kPlannedDecisionsKept = 200;  // in the result: rentals of the plan's choice

constexpr std::uint64_t kFaultStream = 21, kPriceStream = 22;  // random streams of the seed

// The fleet core's clock does not begin at zero, as in a real run.
TimePoint time_of(double time_s) { return TimePoint(std::chrono::hours(1) + from_seconds(time_s)); }

}  // namespace

RunFleet::RunFleet(const RunScenario& scenario, const FleetRules& rules, const std::vector<std::size_t>& wanted,
                   Hooks hooks, RunResult& result)
    : scenario_(scenario), hooks_(std::move(hooks)), result_(result), draws_(scenario.seed, kFaultStream) {
  const PlanRequest& request = scenario.request;
  Draws random_prices(scenario.seed, kPriceStream);
  for (std::size_t i = 0; i < scenario.offers.size(); ++i) {
    const Offer& offer = scenario.offers[i].offer;
    FleetOffer listed = provisioner::fleet_offer(request, offer);
    const double usd_per_hour = listed.usd_per_hour;
    // For a random choice, the core sees random prices but pays the real ones. A random price is in proportion to the
    // throughput, so that the price per rollout is random.
    if (scenario.offer_choice == OfferChoice::kRandom)
      listed.usd_per_hour = offer.rollouts_per_s * (1 + (kRandomPriceSpread - 1) * random_prices.uniform());
    index_by_id_[offer.id] = i;
    const bool is_eligible = !provisioner::ineligibility_reason(request, offer);  // plans exclude the others, too
    offers_.push_back({std::move(listed), usd_per_hour, is_eligible ? 0 : kNeverS});
  }
  cheapest_first_.resize(offers_.size());
  std::iota(cheapest_first_.begin(), cheapest_first_.end(), std::size_t{0});
  const auto usd_per_rollout = [&](std::size_t i) {
    return offers_[i].listed.all_usd_per_hour() / std::max(offers_[i].listed.rollouts_per_s, 1e-12);
  };
  std::stable_sort(cheapest_first_.begin(), cheapest_first_.end(),
                   [&](auto a, auto b) { return usd_per_rollout(a) < usd_per_rollout(b); });
  std::vector<std::string> wanted_ids;
  std::vector<FleetOffer> first_offers = search_result();
  std::vector<bool> in_search_result(offers_.size());
  for (const FleetOffer& offer : first_offers) in_search_result[index_by_id_.at(offer.id)] = true;
  for (const std::size_t i : wanted) {
    wanted_ids.push_back(offers_[i].listed.id);
    if (!in_search_result[i]) first_offers.push_back(offers_[i].listed);
  }
  core_.emplace(rules, first_offers, wanted_ids);
}

std::vector<FleetOffer> RunFleet::search_result() const {
  std::vector<FleetOffer> offers;
  for (const std::size_t i : cheapest_first_) {
    if (offers_[i].available_from_s > now_s_ || !(offers_[i].listed.rollouts_per_s > 0)) continue;
    offers.push_back(offers_[i].listed);
    if (offers.size() == kSearchResultMax) break;
  }
  return offers;
}

void RunFleet::handle(const FleetEvent& event, double now_s) {
  now_s_ = now_s;
  carry_out(core_->handle(event, time_of(now_s)));
}

void RunFleet::tick(double now_s) {
  now_s_ = now_s;
  while (!answers_.empty() && answers_.top().at_s <= now_s) {
    const FleetEvent event = answers_.top().event;
    answers_.pop();
    if (const auto* stopped = std::get_if<fleet::Stopped>(&event))
      if (!std::exchange(rental(stopped->ticket).is_gone, true)) hooks_.on_returned(stopped->ticket);
    carry_out(core_->handle(event, time_of(now_s)));
  }
  if (now_s - searched_s_ >= seconds(scenario_.request.fleet.search_every)) {
    searched_s_ = now_s;
    carry_out(core_->handle(fleet::OffersRefreshed{search_result()}, time_of(now_s)));
  }
  carry_out(core_->handle(fleet::SpendingMeasured{usd(now_s)}, time_of(now_s)));
  carry_out(core_->tick(time_of(now_s)));
}

void RunFleet::close(const std::string& why, double now_s) {
  now_s_ = now_s;
  carry_out(core_->close(why, time_of(now_s)));
}

void RunFleet::answer(double after_s, FleetEvent event) {
  answers_.push({now_s_ + after_s, next_sequence_++, std::move(event)});
}

void RunFleet::carry_out(const std::vector<FleetAction>& actions) {
  for (const FleetAction& action : actions) std::visit([&](const auto& specific) { perform(specific); }, action);
}

void RunFleet::settle_rent(double now_s) {
  const double usd = rent_usd_per_hour_sum_ * (now_s - settled_s_) / 3600;
  result_.usd_rent += usd;
  result_.usd_fleet += usd;
  settled_s_ = now_s;
}

double RunFleet::usd(double now_s) const {
  const double learner_usd = scenario_.request.learner_usd_per_hour.value_or(0) * now_s / 3600;
  return result_.usd_fleet + rent_usd_per_hour_sum_ * (now_s - settled_s_) / 3600 + learner_usd;
}

void RunFleet::perform(const fleet::Book& book) {
  const std::size_t index = index_by_id_.at(book.offer);
  settle_rent(now_s_);
  SimMachine machine;
  machine.offer = book.offer;
  machine.region = scenario_.offers[index].region;
  machine.usd_per_hour = offers_[index].usd_per_hour;
  machine.paid_from_s = now_s_;
  result_.machines.push_back(std::move(machine));
  rentals_.push_back({.offer = index});
  rent_usd_per_hour_sum_ += offers_[index].usd_per_hour;
  carry_out(core_->handle(fleet::Booked{book.offer, static_cast<Ticket>(rentals_.size())}, time_of(now_s_)));
}

void RunFleet::perform(const fleet::Start& start) {
  MarketOffer& offer = offers_[rental(start.ticket).offer];
  const bool is_free = offer.available_from_s <= now_s_;
  const bool is_refused = !is_free || draws_.chance(scenario_.faults.refused);
  const double boot_s = draws_.lognormal(scenario_.boot_s);
  if (is_refused) {
    rental(start.ticket).is_gone = true;
    // A random refusal may be tried again. An offer that is not free has gone for longer.
    return answer(
        kAnswerSeconds,
        fleet::StartFailed{
            .ticket = start.ticket, .why = "another customer rents it", .retryable = is_free, .perhaps_rented = false});
  }
  offer.available_from_s = kNeverS;
  answer(kAnswerSeconds, fleet::Started{start.ticket, {fmt::format("sim:{}", start.ticket)}, {}});
  const bool never_joins = draws_.chance(scenario_.faults.never_joins);
  hooks_.on_booting(start.ticket, rental(start.ticket).offer,
                    never_joins ? kNeverS : now_s_ + std::max(kAnswerSeconds, boot_s));
}

void RunFleet::perform(const fleet::Stop& stop) { answer(kAnswerSeconds, fleet::Stopped{stop.ticket}); }

void RunFleet::perform(const fleet::FindInstance& search) {
  const bool exists = !rental(search.ticket).is_gone;
  answer(
      kAnswerSeconds,
      fleet::Found{.ticket = search.ticket,
                   .instance = exists ? std::optional(InstanceId{fmt::format("sim:{}", search.ticket)}) : std::nullopt,
                   .certain = true});
}

void RunFleet::perform(const fleet::BookEnd& end) {
  if (!std::exchange(rental(end.ticket).is_paid, false)) return;
  settle_rent(now_s_);
  SimMachine& machine = this->machine(end.ticket);
  machine.paid_to_s = now_s_;
  rent_usd_per_hour_sum_ -= machine.usd_per_hour;
  if (!end.ran) {  // the machine never existed, so its rent is taken back
    const double usd = machine.usd_per_hour * (now_s_ - machine.paid_from_s) / 3600;
    result_.usd_rent -= usd;
    result_.usd_fleet -= usd;
    machine.paid_from_s = now_s_;
  }
  result_.machine_hours += (machine.paid_to_s - machine.paid_from_s) / 3600;
  MarketOffer& offer = offers_[rental(end.ticket).offer];
  if (offer.available_from_s == kNeverS) offer.available_from_s = now_s_;  // it was not lost: offered again at once
}

void RunFleet::perform(const fleet::Drain& drain) { hooks_.on_drain(drain.worker); }

void RunFleet::perform(const fleet::Note& note) {
  const std::uint64_t nth = ++result_.decision_counts[note.what];
  // Keeps only some of the plan's rentals, so that other decisions are kept too.
  if (result_.decisions.size() < kDecisionsKept && !(note.what == "planned" && nth > kPlannedDecisionsKept))
    result_.decisions.push_back({now_s_, note.what, note.offer, note.why});
  if (note.what == "lost" && note.ticket != 0) machine(note.ticket).lost = true;
}

void RunFleet::lose_machine(Ticket ticket, bool outbid, double now_s) {
  if (std::exchange(rental(ticket).is_gone, true)) return;
  offers_[rental(ticket).offer].available_from_s = now_s + seconds(scenario_.churn.returns_after);
  handle(fleet::Exited{ticket, outbid ? "outbid" : "the host is gone", outbid}, now_s);
}

void RunFleet::check() const {
  double sum = 0;
  for (const Rental& rental : rentals_) sum += rental.is_paid ? offers_[rental.offer].usd_per_hour : 0;
  ECHO_CHECK(std::abs(sum - rent_usd_per_hour_sum_) <= 1e-6 * (1 + sum), "${} of ${}", rent_usd_per_hour_sum_, sum);
}

void RunFleet::record_traffic(Ticket ticket, double bytes_in, double bytes_forwarded) {
  const FleetOffer& offer = offers_[rental(ticket).offer].listed;
  SimMachine& machine = this->machine(ticket);
  machine.bytes_in += bytes_in;
  machine.bytes_forwarded += bytes_forwarded;
  const double usd = (bytes_in * offer.download_usd_per_gb + bytes_forwarded * offer.upload_usd_per_gb) / kBytesPerGb;
  machine.usd_traffic += usd;
  result_.usd_traffic += usd;
  result_.usd_fleet += usd;
}

}  // namespace echoline::sim

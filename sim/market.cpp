// The simulated market for `echoline sim market` and the tests. Market drives the parts around the real fleet core,
// and checks the core's actions.
#include "sim/market.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "sim/market_parts.hpp"

namespace echoline::sim {
namespace {

using namespace provisioner;
using std::chrono::hours;
using std::chrono::minutes;
using std::chrono::seconds;  // echoline::seconds() is the number of seconds of a duration

constexpr Duration kTroubleTime = minutes(25);   // phase with faults
constexpr Duration kRecoveryTime = minutes(18);  // then without new faults
constexpr Duration kEndTime = minutes(12);       // to return all machines after the run's end
// Time without trouble in which the capacity must be restored, as docs/provisioning.md promises. A machine that never
// joins is detected and another boots, and both may wait for the limit of rentals per minute. The time begins again
// with each host found slower than promised, because each can deceive the fleet once.
constexpr Duration kRestorationTimeMax = 2 * kBootMax + minutes(6);
constexpr int kRestartsMax = 8;                               // of the learner
constexpr const char* kSurplusReason = "the others suffice";  // the fleet core's reason for a stop without hurry
constexpr double kHonestShareMin = 0.95;  // of the promised rate: a host above this share does not deceive
constexpr double kRateErrorMax = 1.02;    // measured rates differ from the truth by at most this factor

constexpr Duration kPriceReactionTime = minutes(4);  // after a price rise, until the limit per hour must hold again
constexpr double kSurplusMax = 1.05;       // rented rate, as a factor of the target, apart from one more machine
constexpr double kLedgerShareMin = 0.999;  // share of the spent money that the ledger must show; the rest is rounding
constexpr double kUsdTolerance = 1e-6;
constexpr double kRoundingFactor = 1 + 1e-6;  // limits in $ per hour may be exceeded by rounding

constexpr std::size_t kViolationsKept = 20;
constexpr std::uint64_t kRandomStream = 77, kQueueRandomStream = 78;                         // of the seed
constexpr std::uint64_t kFnvOffset = 14695981039346656037ull, kFnvPrime = 1099511628211ull;  // 64-bit FNV-1a hash

class Market {
 public:
  Market(std::uint64_t seed, const std::function<void(const std::string&)>& trace)
      : draws_(seed, kRandomStream),
        provider_(MarketDraws(seed, kQueueRandomStream)),
        scenario_(draw_scenario(draws_, provider_.queue_draws)),
        trace_(trace) {
    result_.seed = seed;
    result_.trace_hash = kFnvOffset;
    result_.scenario = scenario_.text;
    record_line(result_.scenario);
  }

  MarketResult run() {
    start_learner();
    for (; now_ < kTroubleTime + kRecoveryTime || awaits_restoration(); now_ += kTickInterval) run_tick();
    end_run();
    return std::move(result_);
  }

 private:
  // The probabilities of faults in this phase are arbitrary, but high enough for every fault to occur in many markets.
  bool is_trouble_phase() const { return !scenario_.without_trouble && now_ < kTroubleTime; }

  void record_line(const std::string& line) {
    for (const char c : line) result_.trace_hash = (result_.trace_hash ^ static_cast<unsigned char>(c)) * kFnvPrime;
    if (trace_) trace_(fmt::format("{:9.0f} s  {}", echoline::seconds(now_), line));
  }
  void report_violation(const std::string& rule, std::string text) {
    if (result_.violations.size() < kViolationsKept) result_.violations.push_back({now_, rule, text});
    record_line("VIOLATED " + rule + ": " + text);
  }

  // The learner's clock. It jumps when it is set, or when its machine wakes from sleep. The 10,000 hours keep it
  // positive after jumps backwards.
  TimePoint clock() const { return TimePoint(hours(10'000) + now_ + clock_skew_); }

  // ---- learner process ----

  void start_learner() {
    std::vector<FleetOffer> offers;
    for (const MarketHost& host : scenario_.hosts) offers.push_back(host.offer);
    set_offered_ids(offers);
    core_.emplace(scenario_.rules, offers, scenario_.wanted_offers);
    notify_core(fleet::SpendingMeasured{ledger_usd()});
    for (const auto& [ticket, row] : ledger_rows_) {
      if (row.ended_at || !core_) continue;  // notify_core() may have killed the learner
      const MarketHost& host = scenario_.host_of(row.offer);
      FleetOffer offer = host.offer;
      offer.usd_per_hour = row.usd_per_hour - offer.traffic_usd_per_hour;  // the price may have changed since
      notify_core(fleet::Recovered{ticket, offer, row.instance});
    }
    training_.waiting_reported.reset();
  }

  void set_offered_ids(const std::vector<FleetOffer>& offers) {
    offered_ids_.clear();
    for (const FleetOffer& offer : offers) offered_ids_.insert(offer.id);
  }

  void kill_learner() {
    record_line("the learner is killed");
    ++result_.restarts;
    core_.reset();
    provider_.forget_learner();
    learner_down_until_ = now_ + draws_.time_between(seconds(5), seconds(40));
  }

  void notify_core(const FleetEvent& event) {
    if (core_) carry_out(core_->handle(event, clock()));
  }

  void carry_out(const std::vector<FleetAction>& actions) {
    for (const FleetAction& action : actions) {
      if (!core_) return;
      ++result_.actions;
      // The learner may be killed just before or just after any of its actions.
      const std::size_t kind = action.index();
      const bool may_die = kind < kMarketActions.size();  // not at cancellations and notes
      const bool dies = may_die && now_ < kTroubleTime && result_.restarts < kRestartsMax &&
                        draws_.chance(scenario_.crash_probability);
      const bool dies_before = dies && draws_.chance(0.5);
      if (dies) ++result_.restarts_at[2 * kind + (dies_before ? 0 : 1)];
      if (dies_before) return kill_learner();
      // An action takes effect even if the learner is killed just after it. Then only the answer is lost.
      if (const auto* book = std::get_if<fleet::Book>(&action)) {
        on_book(*book, dies);
      } else {
        std::visit([&](const auto& specific) { perform(specific); }, action);
      }
      if (dies) return kill_learner();
    }
  }

  void perform(const fleet::Book&) {}  // on_book() performs it
  void on_book(const fleet::Book& book, bool dies) {
    record_line("book " + book.offer);
    check_capacity_is_missing(book.offer);
    if (!offered_ids_.contains(book.offer))
      report_violation("order", book.offer + " is requested but not offered any more");
    if (is_trouble_phase() && draws_.chance(0.01)) return notify_core(fleet::BookingFailed{book.offer, "disk full"});
    const Ticket ticket = static_cast<Ticket>(ledger_rows_.size()) + 1;
    ledger_rows_[ticket] = {.offer = book.offer,
                            .instance = {},
                            .usd_per_hour = scenario_.host_of(book.offer).offer.all_usd_per_hour(),
                            .booked_at = now_,
                            .ended_at = {},
                            .ran = true};
    ++result_.rentals;
    if (!dies) notify_core(fleet::Booked{book.offer, ticket});
  }

  void perform(const fleet::Start& start) {
    record_line(fmt::format("start {} as {}", start.offer, start.ticket));
    const auto row = ledger_rows_.find(start.ticket);
    if (row == ledger_rows_.end() || row->second.ended_at)
      return report_violation("known", fmt::format("{} is started without a row", start.ticket));
    if (std::exchange(row->second.start_requested, true))
      return report_violation("order", fmt::format("{} is started twice", start.ticket));
    const std::size_t index = host_index(start.offer);
    const double new_usd_per_hour = rented_usd_per_hour() + scenario_.hosts[index].offer.all_usd_per_hour();
    if (scenario_.rules.fleet.usd_per_hour_max &&
        new_usd_per_hour > *scenario_.rules.fleet.usd_per_hour_max * kRoundingFactor)
      report_violation("budget",
                       fmt::format("{} raises the fleet's cost to ${:.4f} an hour", start.offer, new_usd_per_hour));
    const Duration answered_at = now_ + draws_.time_between(seconds(0), seconds(15));
    const bool refuses = is_trouble_phase() && draws_.chance(scenario_.hosts[index].refusal_probability);
    const bool errs_but_rents = is_trouble_phase() && draws_.chance(0.08);
    if (refuses)
      return provider_.answer(
          answered_at,
          fleet::StartFailed{
              .ticket = start.ticket, .why = "409 taken", .retryable = draws_.chance(0.5), .perhaps_rented = false});
    // The instance starts between the request and its answer.
    provider_.starts.push_back({now_ + draws_.time_between(seconds(0), answered_at - now_), start.ticket, index});
    if (errs_but_rents)
      provider_.answer(
          answered_at,
          fleet::StartFailed{.ticket = start.ticket, .why = "500", .retryable = true, .perhaps_rented = true});
    else if (!(is_trouble_phase() && draws_.chance(0.03)))  // otherwise there is never an answer
      provider_.answer(answered_at, fleet::Started{start.ticket, instance_id(start.ticket), {}});
  }

  void perform(const fleet::Stop& stop) {
    record_line(fmt::format("stop {} {}: {}", stop.ticket, stop.instance.text, stop.why));
    if (stop.instance != instance_id(stop.ticket))
      return report_violation("order", fmt::format("{} is stopped as '{}'", stop.ticket, stop.instance.text));
    spending_.note_stop_request(stop.ticket, now_);
    if (MarketInstance* instance = provider_.find(stop.ticket)) {
      instance->stop_requested = true;
      const bool work_was_cut_off =
          !instance->drained && (!instance->drains_since || now_ - *instance->drains_since < rules::kDrainTimeout);
      if (stop.why == kSurplusReason && work_was_cut_off && !instance->has_left)
        report_violation("order",
                         fmt::format("{} is stopped with unfinished work although there is no hurry", stop.ticket));
    }
    const Duration answered_at = now_ + draws_.time_between(seconds(1), seconds(15));
    if (is_outage() || (is_trouble_phase() && draws_.chance(0.2)))
      return provider_.answer(answered_at, fleet::StopFailed{stop.ticket, "429 too many requests"});
    provider_.stops.push_back({.at = answered_at, .ticket = stop.ticket});
    if (!(is_trouble_phase() && draws_.chance(0.03))) provider_.answer(answered_at, fleet::Stopped{stop.ticket});
  }

  void perform(const fleet::FindInstance& search) {
    const bool is_answered = !is_outage() && !(is_trouble_phase() && draws_.chance(0.1));
    record_line(fmt::format("look for {}{}", search.ticket, is_answered ? "" : ", in vain"));
    if (is_answered) provider_.searches.push_back({now_ + draws_.time_between(seconds(1), seconds(10)), search.ticket});
  }

  void perform(const fleet::BookEnd& end) {
    record_line(fmt::format("book the end of {}: {}", end.ticket, end.why));
    const auto row = ledger_rows_.find(end.ticket);
    if (row == ledger_rows_.end())
      return report_violation("known", fmt::format("the end of {} is booked, but it has no row", end.ticket));
    if (row->second.ended_at) return report_violation("order", fmt::format("{} ends twice", end.ticket));
    row->second.ended_at = now_;
    row->second.ran = end.ran;
  }

  void perform(const fleet::GiveUp&) {}  // only informs the learner about a worker
  // A start request that still waits in the learner's queue can be cancelled. It then rents nothing and gets no answer.
  void perform(const fleet::CancelStart& cancel) {
    if (!provider_.cancel_start(cancel.ticket)) return;
    record_line(fmt::format("cancel {}", cancel.ticket));
    notify_core(fleet::Cancelled{cancel.ticket});
  }
  void perform(const fleet::Drain& drain) {
    record_line(fmt::format("drain {}: {}", drain.worker.value, drain.why));
    MarketInstance* instance = provider_.find(static_cast<Ticket>(drain.worker.value));
    if (!instance) return;
    if (!instance->drains_since) instance->drains_since = now_;
    if (!(is_trouble_phase() && draws_.chance(0.2)))
      provider_.answer(now_ + draws_.time_between(seconds(0), seconds(60)), fleet::Drained{drain.worker});
  }
  void perform(const fleet::Note& note) {
    if (note.what == "lost") ++result_.losses;
    const bool is_bad_news = note.what == "lost" || note.what == "demoted";
    if (is_bad_news && scenario_.host_of(note.offer).honesty < kHonestShareMin)
      restoration_.record_deceiver(host_index(note.offer), now_);
    record_line(fmt::format("{} {}: {}", note.what, note.offer, note.why));
  }

  // ---- provider ----

  bool is_outage() const { return now_ < provider_.outage_until; }

  void advance_provider() {
    for (const PendingCall& start : remove_due(provider_.starts, now_)) {
      MarketInstance instance;
      instance.ticket = start.ticket;
      instance.host = start.host;
      const MarketHost& host = scenario_.hosts[start.host];
      instance.usd_per_hour = host.offer.all_usd_per_hour();
      const bool never_boots = is_trouble_phase() && (host.never_joins || draws_.chance(0.05));
      // After the trouble, every machine boots early enough to join in time.
      instance.boots_at =
          never_boots ? Duration::max()
                      : now_ + draws_.time_between(seconds(10), is_trouble_phase() ? kBootMax : kBootMax - seconds(60));
      instance.worker = WorkerId{static_cast<std::uint64_t>(start.ticket)};
      provider_.instances[start.ticket] = instance;
    }
    for (const PendingCall& stop : remove_due(provider_.stops, now_))
      if (MarketInstance* instance = provider_.find(stop.ticket)) instance->dead = true;
    for (const Answer& answer : remove_due(provider_.answers, now_)) {
      if (const auto* started = std::get_if<fleet::Started>(&answer.event)) {
        if (MarketInstance* instance = provider_.find(started->ticket)) instance->watched = core_.has_value();
        ledger_rows_[started->ticket].instance = started->instance;
      }
      if (const auto* failed = std::get_if<fleet::StopFailed>(&answer.event))
        if (MarketInstance* instance = provider_.find(failed->ticket)) instance->stop_requested = false;
      if (const auto* drained = std::get_if<fleet::Drained>(&answer.event)) {
        if (MarketInstance* instance = provider_.find(static_cast<Ticket>(drained->worker.value)))
          instance->drained = true;
        ++result_.drained;
      }
      notify_core(answer.event);
    }
    for (const PendingCall& search : remove_due(provider_.searches, now_)) {
      MarketInstance* instance = provider_.find(search.ticket);
      std::optional<InstanceId> found;
      if (instance && !instance->dead) {
        found = instance_id(search.ticket);
        instance->watched = core_.has_value();
        if (core_) ledger_rows_[search.ticket].instance = *found;
      }
      notify_core(fleet::Found{.ticket = search.ticket, .instance = found});
    }
    for (auto& [ticket, instance] : provider_.instances) {
      if (!instance.dead || !instance.watched || !core_) continue;
      instance.watched = false;
      if (!instance.stop_requested)
        notify_core(fleet::Exited{ticket, instance.outbid ? "outbid" : "the host is gone", instance.outbid});
    }
    std::erase_if(provider_.instances, [](const auto& entry) { return entry.second.dead && !entry.second.watched; });
  }

  // Draws this tick's faults. The probabilities are per tick, and those in the loop also per machine.
  void inject_trouble() {
    if (!is_trouble_phase()) return;
    for (auto& [ticket, instance] : provider_.instances) {
      if (draws_.chance(0.002)) instance.dead = true, record_line(fmt::format("{} dies", ticket));
      if (draws_.chance(0.002))
        instance.dead = instance.outbid = true, record_line(fmt::format("{} is outbid", ticket));
      if (draws_.chance(0.002) && instance.ends_at == Duration::max() && instance.watched) {
        instance.ends_at = now_ + draws_.time_between(seconds(5), minutes(2));
        record_line(fmt::format("{} will be taken back", ticket));
        if (draws_.chance(0.5))
          notify_core(fleet::Ending{ticket, "outbid: it is being stopped", /*outbid=*/true});
        else
          notify_core(fleet::Leaving{instance.worker});
      }
      if (now_ >= instance.ends_at) instance.dead = true;
      if (draws_.chance(0.001) && instance.hung_since == Duration::max())
        instance.hung_since = now_, record_line(fmt::format("{} hangs", ticket));
      if (draws_.chance(0.002) && core_ && instance.watched) {
        const double price = scenario_.hosts[instance.host].offer.usd_per_hour * draws_.real_between(0.5, 2);
        instance.usd_per_hour = price + scenario_.hosts[instance.host].offer.traffic_usd_per_hour;
        ledger_rows_[ticket].usd_per_hour = std::max(ledger_rows_[ticket].usd_per_hour, instance.usd_per_hour);
        spending_.price_rose_at = now_;
        notify_core(fleet::PriceChanged{ticket, price});
      }
    }
    if (draws_.chance(0.003)) {
      clock_skew_ += draws_.time_between(-hours(5), hours(20));
      record_line("the clock is set");
    }
    if (draws_.chance(0.005)) provider_.outage_until = now_ + draws_.time_between(seconds(10), seconds(60));
    if (core_ && draws_.chance(0.01)) {
      std::vector<FleetOffer> offers;
      for (const MarketHost& host : scenario_.hosts)
        if (draws_.chance(0.8)) offers.push_back(host.offer);
      set_offered_ids(offers);
      notify_core(fleet::OffersRefreshed{std::move(offers)});
    }
  }

  // ---- workers and the learner's steps; only numbers of rollouts are simulated ----

  void advance_workers() {
    // Workers generate nothing while the stock suffices for two steps.
    const double missing_rollouts = 2.0 * scenario_.rules.pace.rollouts_per_step - training_.stock_rollouts;
    double generated_rollouts = 0;
    for (auto& [ticket, instance] : provider_.instances) {
      if (!core_ || instance.dead || instance.boots_at > now_ || instance.drained) continue;
      if (instance.hung_since != Duration::max()) {
        if (instance.joined && !instance.has_left && now_ - instance.hung_since >= kAwayMax) {
          instance.has_left = true;
          notify_core(fleet::Left{instance.worker, "away for too long"});
        }
        continue;
      }
      if (!instance.joined) {
        instance.joined = true;
        notify_core(fleet::Joined{instance.worker, scenario_.hosts[instance.host].offer.id});
        continue;
      }
      if (missing_rollouts <= 0) {
        notify_core(fleet::Heartbeat{
            .worker = instance.worker, .turned_away = true, .without_work_s = echoline::seconds(kTickInterval)});
        continue;
      }
      instance.unsent_rollouts += true_rate(instance) * echoline::seconds(kTickInterval);
      const double sent_rollouts =
          std::floor(instance.unsent_rollouts / scenario_.rules.group_size) * scenario_.rules.group_size;
      instance.unsent_rollouts -= sent_rollouts;
      generated_rollouts += sent_rollouts;
      if (sent_rollouts > 0)
        notify_core(fleet::Heartbeat{.worker = instance.worker,
                                     .rollouts = sent_rollouts,
                                     .busy_s = sent_rollouts / true_rate(instance) * draws_.real_between(0.99, 1.01)});
      else
        notify_core(fleet::Heartbeat{.worker = instance.worker});
    }
    training_.stock_rollouts += generated_rollouts;
    if (!core_) return;
    if (training_.trains_until > now_) return;
    if (training_.trains_until != Duration{}) {
      training_.trains_until = Duration{};
      ++training_.steps;
      notify_core(fleet::StepMeasured{scenario_.true_step_time});
      if (training_.steps % scenario_.rules.pace.publish_every == 0)
        notify_core(fleet::BroadcastMeasured{
            .broadcast_time =
                from_seconds(echoline::seconds(scenario_.rules.times.broadcast) * draws_.real_between(0.95, 1.05)),
            .payload = {},
            .install_time = scenario_.rules.times.install});
    }
    const bool lacks_rollouts = training_.stock_rollouts < scenario_.rules.pace.rollouts_per_step;
    if (training_.waiting_reported != lacks_rollouts) notify_core(fleet::LearnerWaiting{lacks_rollouts});
    training_.waiting_reported = lacks_rollouts;
    if (lacks_rollouts) return;
    training_.stock_rollouts -= scenario_.rules.pace.rollouts_per_step;
    training_.trains_until = now_ + scenario_.true_step_time;
  }

  double true_rate(const MarketInstance& instance) const {
    return scenario_.hosts[instance.host].offer.rollouts_per_s * scenario_.hosts[instance.host].honesty;
  }

  // ---- invariants ----

  double ledger_usd() const {
    double usd = 0;
    for (const auto& [ticket, row] : ledger_rows_) usd += row.usd(now_);
    return usd;
  }
  double rented_usd_per_hour() const {
    double usd = 0;
    for (const auto& [ticket, instance] : provider_.instances) usd += instance.dead ? 0 : instance.usd_per_hour;
    for (const PendingCall& start : provider_.starts) usd += scenario_.hosts[start.host].offer.all_usd_per_hour();
    return usd;
  }
  bool counts_as_capacity(const MarketInstance& instance) const {
    const auto* machine = core_->machines().find(instance.ticket);
    return machine != nullptr && !machine->unwanted && machine->state != MachineState::kStopping &&
           machine->state != MachineState::kDraining;
  }

  // Called when an offer is rented: reports a violation if the healthy machines already suffice.
  void check_capacity_is_missing(const std::string& offer) {
    double existing_rate = 0;
    for (const auto& [ticket, instance] : provider_.instances)
      if (!instance.dead && !instance.stop_requested && instance.hung_since == Duration::max() &&
          instance.boots_at != Duration::max() && counts_as_capacity(instance)) {
        // A host with a rate_share below 1 was found slower than promised. It counts with that share until the
        // machine's own rate is measured.
        const auto* machine = core_->machines().find(ticket);
        const double expected_rate =
            machine->measured_rollouts_per_s.value_or(machine->rate_share * machine->offer.rollouts_per_s);
        existing_rate += machine->rate_share < 1 ? std::min(true_rate(instance), expected_rate) : true_rate(instance);
      }
    const double target = core_->numbers().target_rollouts_per_s;
    if (existing_rate >= target * kRateErrorMax)
      report_violation("enough", fmt::format("{} is rented although {:.4g} rollouts/s exist and {:.4g} are wanted",
                                             offer, existing_rate, target));
  }

  // Called at each tick. Also adds the tick's true cost.
  void check_invariants() {
    for (const auto& [ticket, instance] : provider_.instances) {
      const auto row = ledger_rows_.find(ticket);
      if (row == ledger_rows_.end())
        report_violation("known", fmt::format("{} is rented but in no ledger", ticket));
      else if (row->second.ended_at && !instance.dead)
        report_violation("forgotten", fmt::format("{} is rented but its end is booked", ticket));
      if (instance.dead) continue;
      const double usd = instance.usd_per_hour * echoline::seconds(kTickInterval) / 3600;
      spending_.add(ticket, usd, now_);
    }
    if (scenario_.rules.fleet.usd_max && spending_.avoidable_usd() > *scenario_.rules.fleet.usd_max &&
        !spending_.overspending_reported) {
      spending_.overspending_reported = true;
      report_violation("budget",
                       fmt::format("${:.4f} of ${:.4f} are spent", spending_.usd(), *scenario_.rules.fleet.usd_max));
    }
    provider_.check();
    spending_.check();
    training_.check();
    if (!core_) return;
    core_->check();
    const FleetStatus numbers = core_->numbers();
    result_.closed = numbers.money_spent;
    if (scenario_.rules.fleet.usd_per_hour_max &&
        rented_usd_per_hour() > *scenario_.rules.fleet.usd_per_hour_max * kRoundingFactor &&
        now_ - spending_.price_rose_at > kPriceReactionTime)
      report_violation("budget", fmt::format("${:.4f} an hour", rented_usd_per_hour()));
    double rented_rate = 0, largest_rate = 0;
    for (const auto& [ticket, instance] : provider_.instances) {
      if (instance.dead || instance.stop_requested) continue;
      rented_rate += scenario_.hosts[instance.host].offer.rollouts_per_s;
      largest_rate = std::max(largest_rate, scenario_.hosts[instance.host].offer.rollouts_per_s);
    }
    if (scenario_.without_trouble && rented_rate > numbers.target_rollouts_per_s * kSurplusMax + largest_rate)
      report_violation("enough", fmt::format("{:.4g} rollouts/s are rented, {:.4g} are wanted", rented_rate,
                                             numbers.target_rollouts_per_s));
    if (scenario_.without_trouble && result_.rentals > scenario_.wanted_offers.size())
      report_violation("enough", "more machines are rented than planned");
    // Capacity is restored if the learner hardly waits, or if the machines' true rate reaches the target within the
    // fleet core's dead band.
    const bool restored_now =
        now_ >= kTroubleTime &&
        (numbers.idle_fraction < rules::kIdleShareMin ||
         true_working_rate() >= numbers.target_rollouts_per_s * (1 - rules::kDeadband) / kRateErrorMax);
    result_.restored = result_.restored || restored_now;
    // From kBootMax after the trouble on, exhaustion counts for good, even if offers become available again.
    result_.exhausted = numbers.exhausted || (result_.exhausted && now_ > kTroubleTime + kBootMax);
    const Duration deadline_from = std::max<Duration>(kTroubleTime, restoration_.last_deceiver_at);
    if (now_ > deadline_from + kRestorationTimeMax && awaits_restoration()) {
      restoration_.slowness_reported = true;
      report_violation("restored",
                       fmt::format("{:.4g} of {:.4g} rollouts/s work {} after the trouble and the last deception",
                                   true_working_rate(), numbers.target_rollouts_per_s, to_text(now_ - deadline_from)));
    }
  }

  // Whether the run must still show that capacity is restored in time.
  bool awaits_restoration() const {
    return !result_.restored && !result_.exhausted && !result_.closed && !restoration_.slowness_reported;
  }

  double true_working_rate() const {
    double working = 0;
    for (const auto& [ticket, instance] : provider_.instances)
      if (instance.joined && !instance.dead && counts_as_capacity(instance) && instance.hung_since == Duration::max())
        working += true_rate(instance);
    return working;
  }

  void run_tick() {
    if (!core_ && now_ >= learner_down_until_) start_learner();
    inject_trouble();
    advance_provider();
    advance_workers();
    if (core_ && now_ >= spending_reported_at_ + seconds(10)) {
      spending_reported_at_ = now_;
      notify_core(fleet::SpendingMeasured{ledger_usd()});
    }
    if (core_) carry_out(core_->tick(clock()));
    check_invariants();
  }

  // Ends the run: returns all machines and closes the ledger. The learner is up, because it is killed only before
  // kTroubleTime.
  void end_run() {
    record_line("the run ends");
    carry_out(core_->close("the run has ended", clock()));
    for (const Duration end = now_ + kEndTime;
         now_ < end && !(core_->machines().empty() && provider_.instances.empty() && provider_.starts.empty());
         now_ += kTickInterval) {
      advance_provider();
      carry_out(core_->tick(clock()));
      check_invariants();
    }
    if (!core_->machines().empty()) report_violation("returned", "machines remain in the table");
    for (const auto& [ticket, instance] : provider_.instances)
      if (!instance.dead) report_violation("returned", fmt::format("{} is still rented", ticket));
    for (const auto& [ticket, row] : ledger_rows_)
      if (!row.ended_at) report_violation("returned", fmt::format("{} is still open in the ledger", ticket));
    // A failed start may have rented an instance that ended before the provider listed it. The ledger has it as free.
    double unseen_usd = 0;
    for (const auto& [ticket, row] : ledger_rows_)
      if (!row.ran)
        unseen_usd +=
            std::min(spending_.usd_of(ticket), row.usd_per_hour * echoline::seconds(rules::kAnswerTimeout) / 3600);
    if (ledger_usd() + unseen_usd < spending_.usd() * kLedgerShareMin - kUsdTolerance)
      report_violation("known",
                       fmt::format("the ledger has ${:.5f}, but ${:.5f} were spent", ledger_usd(), spending_.usd()));
  }

  MarketDraws draws_;
  MarketProvider provider_;
  MarketScenario scenario_;
  const std::function<void(const std::string&)>& trace_;
  MarketResult result_;

  Duration now_{}, clock_skew_{}, learner_down_until_{}, spending_reported_at_{};
  std::optional<FleetCore> core_;      // absent while the learner is down
  std::set<std::string> offered_ids_;  // of the offers in the last search result
  std::map<Ticket, RentalRow> ledger_rows_;
  MarketSpending spending_;
  MarketTraining training_;
  Restoration restoration_;
};

}  // namespace

MarketResult simulate_market(std::uint64_t seed, const std::function<void(const std::string&)>& trace) {
  return Market(seed, trace).run();
}

MarketSummary simulate_markets(std::uint64_t first, std::uint64_t seeds,
                               const std::function<void(const MarketResult&)>& done) {
  MarketSummary summary;
  for (std::uint64_t seed = first; seed < first + seeds; ++seed) {
    MarketResult result = simulate_market(seed);
    ++summary.seeds;
    summary.actions += result.actions;
    summary.rentals += result.rentals;
    summary.losses += result.losses;
    summary.restarts += result.restarts;
    summary.drained += result.drained;
    summary.closed += result.closed ? 1 : 0;
    summary.exhausted += result.exhausted ? 1 : 0;
    summary.restored += result.restored ? 1 : 0;
    for (std::size_t i = 0; i < result.restarts_at.size(); ++i) summary.restarts_at[i] += result.restarts_at[i];
    summary.combined_hash = mix64(summary.combined_hash ^ result.trace_hash);
    if (done) done(result);
    summary.failed += result.violations.empty() ? 0 : 1;
    if (!result.violations.empty() && summary.failures.size() < MarketSummary::kFailuresKept)
      summary.failures.push_back(std::move(result));
  }
  return summary;
}

}  // namespace echoline::sim

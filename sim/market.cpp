// The simulated market for `echoline sim market` and the tests. One class simulates provider, hosts and learner around
// the real fleet core, and checks the core's actions.
#include "sim/market.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "base/random.hpp"
#include "provisioner/allocation.hpp"
#include "provisioner/fleet_core.hpp"

namespace echoline::sim {
namespace {

using namespace provisioner;
using std::chrono::hours;
using std::chrono::minutes;
using std::chrono::seconds;  // echoline::seconds() is the number of seconds of a duration

constexpr Duration kTickInterval = seconds(5);
constexpr Duration kTroubleTime = minutes(25);   // phase with faults
constexpr Duration kRecoveryTime = minutes(18);  // then without new faults
constexpr Duration kEndTime = minutes(12);       // to return all machines after the run's end
constexpr Duration kBootMax = minutes(4);        // after a rental, until the worker must have joined
constexpr Duration kAwayMax = minutes(2);        // silence after which the learner gives a worker up
// Time without trouble in which the capacity must be restored, as docs/provisioning.md promises. A machine that never
// joins is detected and another boots, and both may wait for the limit of rentals per minute. The time begins again
// with each host found slower than promised, because each can deceive the fleet once.
constexpr Duration kRestorationTimeMax = 2 * kBootMax + minutes(6);
constexpr int kRestartsMax = 8;                               // of the learner
constexpr const char* kSurplusReason = "the others suffice";  // the fleet core's reason for a stop without hurry
constexpr double kHonestShareMin = 0.95;  // of the promised rate: a host above this share does not deceive
constexpr double kRateErrorMax = 1.02;    // measured rates differ from the truth by at most this factor

constexpr Duration kPriceReactionTime = minutes(4);  // after a price rise, until the limit per hour must hold again
constexpr double kSurplusMax = 1.05;       // rented rate, as a factor of the target; one machine more is allowed
constexpr double kLedgerShareMin = 0.999;  // of the money spent, that the ledger must show; the rest is rounding
constexpr double kUsdTolerance = 1e-6;
constexpr double kRoundingFactor = 1 + 1e-6;  // limits in $ per hour may be exceeded by rounding

constexpr std::size_t kViolationsKept = 20;
constexpr std::uint64_t kRandomStream = 77, kQueueRandomStream = 78;                         // of the seed
constexpr std::uint64_t kFnvOffset = 14695981039346656037ull, kFnvPrime = 1099511628211ull;  // 64-bit FNV-1a hash

struct Host {  // an offer and its true properties
  FleetOffer offer;
  double honesty = 1;  // true rate, as a share of the promised one
  double refusal_probability = 0;
  bool never_joins = false;
};

struct RentalRow {  // of the ledger, which survives a restart of the learner
  std::string offer;
  InstanceId instance;
  double usd_per_hour = 0;
  Duration booked_at{};
  std::optional<Duration> ended_at;
  bool ran = true;  // false: it never existed, so it costs nothing
  double usd(Duration now) const {
    return ran ? usd_per_hour * echoline::seconds(ended_at.value_or(now) - booked_at) / 3600 : 0;
  }
};

struct Instance {  // a rented machine at the provider
  Ticket ticket = 0;
  std::size_t host = 0;
  double usd_per_hour = 0;
  // max(): never. At `ends_at` the provider takes the machine back.
  Duration boots_at{}, hung_since{Duration::max()}, ends_at{Duration::max()};
  std::optional<Duration> drains_since;
  bool joined = false, dead = false, outbid = false;
  bool watched = false;  // the learner process knows the instance, so it is notified of the instance's end
  // The learner requested its stop; the core was told that its worker left; its worker has finished its work.
  bool stop_requested = false, has_left = false, drained = false;
  WorkerId worker;             // its number is the ticket's
  double unsent_rollouts = 0;  // generated, but not yet a whole group
};

class Market {
 public:
  Market(std::uint64_t seed, const std::function<void(const std::string&)>& trace)
      : random_(seed, kRandomStream), queue_random_(seed, kQueueRandomStream), trace_(trace) {
    result_.seed = seed;
    draw_scenario();
  }

  MarketResult run() {
    start_learner();
    for (; now_ < kTroubleTime + kRecoveryTime || awaits_restoration(); now_ += kTickInterval) run_tick();
    end_run();
    return std::move(result_);
  }

 private:
  bool chance(double probability) { return random_.uniform() < probability; }
  double random_between(double low, double high) { return low + (high - low) * random_.uniform(); }
  Duration random_time(Duration low, Duration high) { return Duration(random_.between(low.count(), high.count())); }
  bool is_trouble_phase() const { return !without_trouble_ && now_ < kTroubleTime; }

  void draw_scenario() {
    without_trouble_ = random_.below(8) == 0;  // one seed in eight
    rules_.pace = {.rollouts_per_step = 100,
                   .publish_every = static_cast<int>(random_.between(1, 3)),
                   .step_time = seconds(random_.between(2, 12) * 5)};
    rules_.times.broadcast =
        from_seconds(random_between(0, 0.4) * rules_.pace.publish_every * echoline::seconds(rules_.pace.step_time));
    rules_.times.install = rules_.times.broadcast / random_.between(1, 8);
    rules_.fleet.capacity_rule = chance(0.3) ? CapacityRule::kEcho2 : CapacityRule::kOverlap;
    if (chance(0.5)) rules_.staleness_budget = rules_.pace.publish_every + static_cast<int>(random_.between(1, 4));
    rules_.fleet.headroom = chance(0.2) ? 0 : random_between(0.02, 0.3);
    rules_.group_size = 4;
    rules_.fleet.join_timeout = rules_.fleet.queue_timeout = kBootMax;
    // In half of the markets, the provider takes only a few start requests at a time.
    if (queue_random_.below(2)) rules_.starts_at_once["cloud"] = 2 + queue_random_.below(6);
    rules_.fleet.away_max = kAwayMax;
    rules_.fleet.workers_max = static_cast<std::size_t>(random_.between(8, 48));
    const double target =
        capacity_target(rules_.pace, rules_.times, rules_.capacity_terms())->provisioned_rollouts_per_s;
    const std::uint64_t planned_machines = random_.between(1, 12);
    const auto offer_count =
        static_cast<std::size_t>(random_.between(4, 40) + 2 * static_cast<std::int64_t>(planned_machines));
    for (std::size_t i = 0; i < offer_count; ++i) {
      Host host;
      host.offer = {.id = fmt::format("o{}", i),
                    .provider = "cloud",
                    .host = chance(0.2) && i > 0 ? fmt::format("h{}", i - 1) : fmt::format("h{}", i),
                    .rollouts_per_s = random_between(0.6, 1.8) * target / static_cast<double>(planned_machines),
                    .usd_per_hour = random_between(0.05, 1),
                    .traffic_usd_per_hour = random_between(0, 0.05)};
      host.honesty = !without_trouble_ && chance(0.2) ? random_between(0.05, 0.9) : random_between(0.99, 1.01);
      host.refusal_probability = without_trouble_ ? 0 : chance(0.2) ? random_between(0.3, 1) : 0.05;
      host.never_joins = !without_trouble_ && chance(0.1);
      hosts_.push_back(host);
    }
    // The plan takes at most one offer of each host.
    std::map<std::string, std::size_t> first_offers;  // by host
    std::vector<Candidate> pool;
    std::vector<std::size_t> pool_offers;  // of each candidate in `pool`, its index in hosts_
    for (std::size_t i = 0; i < offer_count; ++i)
      if (first_offers.emplace(hosts_[i].offer.host, i).second) {
        pool_offers.push_back(i);
        pool.push_back({hosts_[i].offer.rollouts_per_s, hosts_[i].offer.all_usd_per_hour()});
      }
    const auto plan = allocate(pool, target, {.workers_max = rules_.fleet.workers_max}).best;
    double cost = 0;
    for (std::size_t i = 0; i < pool_offers.size(); ++i)
      if (!plan || std::count(plan->chosen.begin(), plan->chosen.end(), i) > 0) {
        wanted_offers_.push_back(hosts_[pool_offers[i]].offer.id);
        cost += pool[i].usd_per_hour;
      }
    if (chance(0.5)) rules_.fleet.usd_per_hour_max = cost * random_between(1, 3);
    if (chance(0.3)) rules_.fleet.usd_max = cost * random_between(0.3, 2);
    true_step_time_ = rules_.pace.step_time;
    if (!without_trouble_) {
      const Duration drawn = from_seconds(echoline::seconds(rules_.pace.step_time) * random_between(0.8, 1.5));
      true_step_time_ = std::max<Duration>(kTickInterval, drawn / kTickInterval * kTickInterval);  // whole ticks
    }
    crash_probability_ = without_trouble_ ? 0 : random_between(0, 0.05);
    result_.scenario = fmt::format(
        "{} offers, {} planned for {:.4g} rollouts/s, T {}, T_b {}, headroom {:.2f}, at most {} machines, ${} an hour, "
        "${} in all{}",
        offer_count, wanted_offers_.size(), target, to_text(rules_.pace.step_time), to_text(rules_.times.broadcast),
        rules_.fleet.headroom, rules_.fleet.workers_max,
        rules_.fleet.usd_per_hour_max ? fmt::format("{:.3f}", *rules_.fleet.usd_per_hour_max) : "any",
        rules_.fleet.usd_max ? fmt::format("{:.3f}", *rules_.fleet.usd_max) : "any",
        without_trouble_ ? ", no trouble" : "");
    record_line(result_.scenario);
  }

  void record_line(const std::string& line) {
    for (const char c : line) hash_ = (hash_ ^ static_cast<unsigned char>(c)) * kFnvPrime;
    result_.trace_hash = hash_;
    if (trace_) trace_(fmt::format("{:9.0f} s  {}", echoline::seconds(now_), line));
  }
  void report_violation(const std::string& rule, std::string text) {
    if (result_.violations.size() < kViolationsKept) result_.violations.push_back({now_, rule, text});
    record_line("VIOLATED " + rule + ": " + text);
  }

  // The learner's clock. It jumps when it is set, or when its machine wakes from sleep.
  TimePoint clock() const { return TimePoint(hours(10'000) + now_ + clock_skew_); }

  // ---- learner process ----

  void start_learner() {
    learner_up_ = true;
    std::vector<FleetOffer> offers;
    for (const Host& host : hosts_) offers.push_back(host.offer);
    set_offered_ids(offers);
    core_.emplace(rules_, offers, wanted_offers_);
    notify_core(fleet::SpendingMeasured{ledger_usd()});
    for (const auto& [ticket, row] : ledger_rows_) {
      if (row.ended_at || !learner_up_) continue;  // notify_core() may have killed the learner
      const Host& host = host_of(row.offer);
      FleetOffer offer = host.offer;
      offer.usd_per_hour = row.usd_per_hour - offer.traffic_usd_per_hour;
      notify_core(fleet::Recovered{ticket, offer, row.instance});
    }
    waiting_reported_.reset();
  }

  void set_offered_ids(const std::vector<FleetOffer>& offers) {
    offered_ids_.clear();
    for (const FleetOffer& offer : offers) offered_ids_.insert(offer.id);
  }

  void kill_learner() {
    record_line("the learner is killed");
    ++result_.restarts;
    learner_up_ = false;
    core_.reset();
    answers_.clear();
    for (auto& [id, instance] : instances_) {
      instance.watched = instance.has_left = instance.joined = instance.stop_requested = instance.drained = false;
      instance.drains_since.reset();
    }
    learner_down_until_ = now_ + random_time(seconds(5), seconds(40));
  }

  void notify_core(const FleetEvent& event) {
    if (learner_up_) carry_out(core_->handle(event, clock()));
  }

  void carry_out(const std::vector<FleetAction>& actions) {
    for (const FleetAction& action : actions) {
      if (!learner_up_) return;
      ++result_.actions;
      // The learner may be killed just before or just after any of its actions.
      const std::size_t kind = action.index();
      const bool is_counted = kind < kMarketActions.size();
      const bool dies =
          is_counted && now_ < kTroubleTime && result_.restarts < kRestartsMax && chance(crash_probability_);
      const bool dies_before = dies && chance(0.5);
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
    if (is_trouble_phase() && chance(0.01)) return notify_core(fleet::BookingFailed{book.offer, "disk full"});
    const Ticket ticket = static_cast<Ticket>(ledger_rows_.size()) + 1;
    ledger_rows_[ticket] = {.offer = book.offer,
                            .instance = {},
                            .usd_per_hour = host_of(book.offer).offer.all_usd_per_hour(),
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
    if (!started_tickets_.insert(start.ticket).second)
      return report_violation("order", fmt::format("{} is started twice", start.ticket));
    const std::size_t index = index_of(start.offer);
    const double new_usd_per_hour = rented_usd_per_hour() + hosts_[index].offer.all_usd_per_hour();
    if (rules_.fleet.usd_per_hour_max && new_usd_per_hour > *rules_.fleet.usd_per_hour_max * kRoundingFactor)
      report_violation("budget",
                       fmt::format("{} raises the fleet's cost to ${:.4f} an hour", start.offer, new_usd_per_hour));
    const Duration answered_at = now_ + random_time(seconds(0), seconds(15));
    const bool refuses = is_trouble_phase() && chance(hosts_[index].refusal_probability);
    const bool errs_but_rents = is_trouble_phase() && chance(0.08);
    if (refuses)
      return answer(answered_at,
                    fleet::StartFailed{
                        .ticket = start.ticket, .why = "409 taken", .retryable = chance(0.5), .perhaps_rented = false});
    // The instance starts between the request and its answer.
    pending_starts_.push_back({now_ + random_time(seconds(0), answered_at - now_), start.ticket, index});
    if (errs_but_rents)
      answer(answered_at,
             fleet::StartFailed{.ticket = start.ticket, .why = "500", .retryable = true, .perhaps_rented = true});
    else if (!(is_trouble_phase() && chance(0.03)))  // otherwise there is never an answer
      answer(answered_at, fleet::Started{start.ticket, instance_id(start.ticket), {}});
  }

  void perform(const fleet::Stop& stop) {
    record_line(fmt::format("stop {} {}: {}", stop.ticket, stop.instance.text, stop.why));
    if (stop.instance != instance_id(stop.ticket))
      return report_violation("order", fmt::format("{} is stopped as '{}'", stop.ticket, stop.instance.text));
    stop_requested_at_.try_emplace(stop.ticket, now_);
    if (const auto it = instances_.find(stop.ticket); it != instances_.end()) {
      Instance& instance = it->second;
      instance.stop_requested = true;
      const bool work_was_cut_off =
          !instance.drained && (!instance.drains_since || now_ - *instance.drains_since < rules::kDrainTimeout);
      if (stop.why == kSurplusReason && work_was_cut_off && !instance.has_left)
        report_violation("order",
                         fmt::format("{} is stopped with unfinished work although there is no hurry", stop.ticket));
    }
    const Duration answered_at = now_ + random_time(seconds(1), seconds(15));
    if (is_outage() || (is_trouble_phase() && chance(0.2)))
      return answer(answered_at, fleet::StopFailed{stop.ticket, "429 too many requests"});
    pending_stops_.push_back({.at = answered_at, .ticket = stop.ticket});
    if (!(is_trouble_phase() && chance(0.03))) answer(answered_at, fleet::Stopped{stop.ticket});
  }

  void perform(const fleet::FindInstance& search) {
    const bool is_answered = !is_outage() && !(is_trouble_phase() && chance(0.1));
    record_line(fmt::format("look for {}{}", search.ticket, is_answered ? "" : ", in vain"));
    if (is_answered) pending_searches_.push_back({now_ + random_time(seconds(1), seconds(10)), search.ticket});
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

  void perform(const fleet::GiveUp&) {}
  // A start request that still waits in the learner's queue can be cancelled. It then rents nothing and gets no answer.
  void perform(const fleet::CancelStart& cancel) {
    if (!queue_random_.below(2)) return;  // too late: the request has left the queue
    const bool is_pending = std::any_of(pending_starts_.begin(), pending_starts_.end(),
                                        [&](const PendingCall& call) { return call.ticket == cancel.ticket; });
    if (!is_pending) return;
    record_line(fmt::format("cancel {}", cancel.ticket));
    std::erase_if(pending_starts_, [&](const PendingCall& call) { return call.ticket == cancel.ticket; });
    std::erase_if(answers_, [&](const Answer& answer) {
      const auto* started = std::get_if<fleet::Started>(&answer.event);
      const auto* failed = std::get_if<fleet::StartFailed>(&answer.event);
      return (started && started->ticket == cancel.ticket) || (failed && failed->ticket == cancel.ticket);
    });
    notify_core(fleet::Cancelled{cancel.ticket});
  }
  void perform(const fleet::Drain& drain) {
    record_line(fmt::format("drain {}: {}", drain.worker.value, drain.why));
    const auto it = instances_.find(static_cast<Ticket>(drain.worker.value));
    if (it == instances_.end()) return;
    if (!it->second.drains_since) it->second.drains_since = now_;
    if (!(is_trouble_phase() && chance(0.2)))
      answer(now_ + random_time(seconds(0), seconds(60)), fleet::Drained{drain.worker});
  }
  void perform(const fleet::Note& note) {
    if (note.what == "lost") ++result_.losses;
    const bool is_bad_news = note.what == "lost" || note.what == "demoted";
    if (is_bad_news && host_of(note.offer).honesty < kHonestShareMin &&
        detected_deceivers_.insert(index_of(note.offer)).second)
      last_deceiver_detected_at_ = now_;
    record_line(fmt::format("{} {}: {}", note.what, note.offer, note.why));
  }

  // ---- provider ----

  struct PendingCall {  // takes effect at the provider at that time
    Duration at;
    Ticket ticket = 0;
    std::size_t host = 0;
  };
  struct Answer {  // reaches the learner at that time
    Duration at;
    FleetEvent event;
  };

  InstanceId instance_id(Ticket ticket) const { return {fmt::format("cloud:{}", ticket)}; }
  std::size_t index_of(const std::string& offer) const { return static_cast<std::size_t>(std::stoul(offer.substr(1))); }
  const Host& host_of(const std::string& offer) const { return hosts_[index_of(offer)]; }
  bool is_outage() const { return now_ < outage_until_; }
  void answer(Duration at, FleetEvent event) { answers_.push_back({at, std::move(event)}); }

  // Removes and returns the items whose time has come.
  template <class T>
  std::vector<T> remove_due(std::vector<T>& all) {
    std::vector<T> due;
    for (T& item : all)
      if (item.at <= now_) due.push_back(item);
    std::erase_if(all, [&](const T& item) { return item.at <= now_; });
    return due;
  }

  void advance_provider() {
    for (const PendingCall& create : remove_due(pending_starts_)) {
      Instance instance;
      instance.ticket = create.ticket;
      instance.host = create.host;
      const Host& host = hosts_[create.host];
      instance.usd_per_hour = host.offer.all_usd_per_hour();
      const bool never_boots = is_trouble_phase() && (host.never_joins || chance(0.05));
      instance.boots_at = never_boots
                              ? Duration::max()
                              : now_ + random_time(seconds(10), is_trouble_phase() ? kBootMax : kBootMax - seconds(60));
      instance.worker = WorkerId{static_cast<std::uint64_t>(create.ticket)};
      instances_[create.ticket] = instance;
    }
    for (const PendingCall& stop : remove_due(pending_stops_))
      if (const auto it = instances_.find(stop.ticket); it != instances_.end()) it->second.dead = true;
    for (const Answer& answer : remove_due(answers_)) {
      if (const auto* started = std::get_if<fleet::Started>(&answer.event)) {
        if (const auto it = instances_.find(started->ticket); it != instances_.end()) it->second.watched = learner_up_;
        ledger_rows_[started->ticket].instance = started->instance;
      }
      if (const auto* failed = std::get_if<fleet::StopFailed>(&answer.event))
        if (const auto it = instances_.find(failed->ticket); it != instances_.end()) it->second.stop_requested = false;
      if (const auto* drained = std::get_if<fleet::Drained>(&answer.event)) {
        if (const auto it = instances_.find(static_cast<Ticket>(drained->worker.value)); it != instances_.end())
          it->second.drained = true;
        ++result_.drained;
      }
      notify_core(answer.event);
    }
    for (const PendingCall& search : remove_due(pending_searches_)) {
      const auto it = instances_.find(search.ticket);
      const bool found = it != instances_.end() && !it->second.dead;
      if (found) {
        it->second.watched = learner_up_;
        if (learner_up_) ledger_rows_[search.ticket].instance = instance_id(search.ticket);
      }
      notify_core(fleet::Found{.ticket = search.ticket,
                               .instance = found ? std::optional(instance_id(search.ticket)) : std::nullopt});
    }
    for (auto& [ticket, instance] : instances_) {
      if (!instance.dead || !instance.watched || !learner_up_) continue;
      instance.watched = false;
      if (!instance.stop_requested)
        notify_core(fleet::Exited{ticket, instance.outbid ? "outbid" : "the host is gone", instance.outbid});
    }
    std::erase_if(instances_, [](const auto& entry) { return entry.second.dead && !entry.second.watched; });
  }

  // Draws this tick's faults. The probabilities are per tick, and those in the loop also per machine.
  void inject_trouble() {
    if (!is_trouble_phase()) return;
    for (auto& [ticket, instance] : instances_) {
      if (chance(0.002)) instance.dead = true, record_line(fmt::format("{} dies", ticket));
      if (chance(0.002)) instance.dead = instance.outbid = true, record_line(fmt::format("{} is outbid", ticket));
      if (chance(0.002) && instance.ends_at == Duration::max() && instance.watched) {
        instance.ends_at = now_ + random_time(seconds(5), minutes(2));
        record_line(fmt::format("{} will be taken back", ticket));
        if (chance(0.5))
          notify_core(fleet::Ending{ticket, "outbid: it is being stopped", true});
        else
          notify_core(fleet::Leaving{instance.worker});
      }
      if (now_ >= instance.ends_at) instance.dead = true;
      if (chance(0.001) && instance.hung_since == Duration::max())
        instance.hung_since = now_, record_line(fmt::format("{} hangs", ticket));
      if (chance(0.002) && learner_up_ && instance.watched) {
        const double price = hosts_[instance.host].offer.usd_per_hour * random_between(0.5, 2);
        instance.usd_per_hour = price + hosts_[instance.host].offer.traffic_usd_per_hour;
        ledger_rows_[ticket].usd_per_hour = std::max(ledger_rows_[ticket].usd_per_hour, instance.usd_per_hour);
        price_rose_at_ = now_;
        notify_core(fleet::PriceChanged{ticket, price});
      }
    }
    if (chance(0.003)) {
      clock_skew_ += random_time(-hours(5), hours(20));
      record_line("the clock is set");
    }
    if (chance(0.005)) outage_until_ = now_ + random_time(seconds(10), seconds(60));
    if (learner_up_ && chance(0.01)) {
      std::vector<FleetOffer> offers;
      for (const Host& host : hosts_)
        if (chance(0.8)) offers.push_back(host.offer);
      set_offered_ids(offers);
      notify_core(fleet::OffersRefreshed{std::move(offers)});
    }
  }

  // ---- workers and the learner's steps; only numbers of rollouts are simulated ----

  void advance_workers() {
    // Workers generate nothing while the stock suffices for two steps.
    const double free_rollouts = 2.0 * rules_.pace.rollouts_per_step - stock_rollouts_;
    double generated_rollouts = 0;
    for (auto& [ticket, instance] : instances_) {
      if (!learner_up_ || instance.dead || instance.boots_at > now_) continue;
      if (instance.drained) continue;
      if (instance.hung_since != Duration::max()) {
        if (instance.joined && !instance.has_left && now_ - instance.hung_since >= kAwayMax) {
          instance.has_left = true;
          notify_core(fleet::Left{instance.worker, "away for too long"});
        }
        continue;
      }
      if (!instance.joined) {
        instance.joined = true;
        notify_core(fleet::Joined{instance.worker, hosts_[instance.host].offer.id});
        continue;
      }
      if (free_rollouts <= 0) {
        notify_core(fleet::Heartbeat{
            .worker = instance.worker, .turned_away = true, .without_work_s = echoline::seconds(kTickInterval)});
        continue;
      }
      instance.unsent_rollouts += true_rate(instance) * echoline::seconds(kTickInterval);
      const double sent_rollouts = std::floor(instance.unsent_rollouts / rules_.group_size) * rules_.group_size;
      instance.unsent_rollouts -= sent_rollouts;
      generated_rollouts += sent_rollouts;
      if (sent_rollouts > 0)
        notify_core(fleet::Heartbeat{instance.worker, sent_rollouts,
                                     sent_rollouts / true_rate(instance) * random_between(0.99, 1.01)});
      else
        notify_core(fleet::Heartbeat{instance.worker, 0, 0});
    }
    stock_rollouts_ += generated_rollouts;
    if (!learner_up_) return;
    if (trains_until_ > now_) return;
    if (trains_until_ != Duration{}) {
      trains_until_ = Duration{};
      ++steps_;
      notify_core(fleet::StepMeasured{true_step_time_});
      if (steps_ % rules_.pace.publish_every == 0)
        notify_core(fleet::BroadcastMeasured{
            .broadcast_time = from_seconds(echoline::seconds(rules_.times.broadcast) * random_between(0.95, 1.05)),
            .payload = {},
            .install_time = rules_.times.install});
    }
    const bool lacks_rollouts = stock_rollouts_ < rules_.pace.rollouts_per_step;
    if (waiting_reported_ != lacks_rollouts) notify_core(fleet::LearnerWaiting{lacks_rollouts});
    waiting_reported_ = lacks_rollouts;
    if (lacks_rollouts) return;
    stock_rollouts_ -= rules_.pace.rollouts_per_step;
    trains_until_ = now_ + true_step_time_;
  }

  double true_rate(const Instance& instance) const {
    return hosts_[instance.host].offer.rollouts_per_s * hosts_[instance.host].honesty;
  }

  // ---- invariants ----

  double ledger_usd() const {
    double usd = 0;
    for (const auto& [ticket, row] : ledger_rows_) usd += row.usd(now_);
    return usd;
  }
  double rented_usd_per_hour() const {
    double usd = 0;
    for (const auto& [ticket, instance] : instances_) usd += instance.dead ? 0 : instance.usd_per_hour;
    for (const PendingCall& create : pending_starts_) usd += hosts_[create.host].offer.all_usd_per_hour();
    return usd;
  }
  bool counts_as_capacity(const Instance& instance) const {
    const auto* machine = core_->machines().find(instance.ticket);
    return machine != nullptr && !machine->unwanted && machine->state != MachineState::kStopping &&
           machine->state != MachineState::kDraining;
  }

  // Checks, when an offer is rented, that the healthy machines do not suffice.
  void check_capacity_is_missing(const std::string& offer) {
    double existing_rate = 0;
    for (const auto& [ticket, instance] : instances_)
      if (!instance.dead && !instance.stop_requested && instance.hung_since == Duration::max() &&
          instance.boots_at != Duration::max() && counts_as_capacity(instance)) {
        // A host with a share below 1 was demoted and must first prove a better rate.
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

  void check_invariants() {
    for (const auto& [ticket, instance] : instances_) {
      const auto row = ledger_rows_.find(ticket);
      if (row == ledger_rows_.end())
        report_violation("known", fmt::format("{} is rented but in no ledger", ticket));
      else if (row->second.ended_at && !instance.dead)
        report_violation("forgotten", fmt::format("{} is rented but its end is booked", ticket));
      if (instance.dead) continue;
      const double usd = instance.usd_per_hour * echoline::seconds(kTickInterval) / 3600;
      spent_usd_ += usd;
      spent_usd_by_ticket_[ticket] += usd;
      // Costs of instances that the provider does not take back within the core's reserve cannot be avoided.
      const auto request = stop_requested_at_.find(ticket);
      if (request != stop_requested_at_.end() && now_ - request->second > rules::kReserveTime) unavoidable_usd_ += usd;
    }
    if (rules_.fleet.usd_max && spent_usd_ - unavoidable_usd_ > *rules_.fleet.usd_max && !overspending_reported_) {
      overspending_reported_ = true;
      report_violation("budget", fmt::format("${:.4f} of ${:.4f} are spent", spent_usd_, *rules_.fleet.usd_max));
    }
    if (!learner_up_) return;
    core_->check();
    const FleetStatus numbers = core_->numbers();
    result_.closed = numbers.money_spent;
    if (rules_.fleet.usd_per_hour_max && rented_usd_per_hour() > *rules_.fleet.usd_per_hour_max * kRoundingFactor &&
        now_ - price_rose_at_ > kPriceReactionTime)
      report_violation("budget", fmt::format("${:.4f} an hour", rented_usd_per_hour()));
    double rented_rate = 0, largest_rate = 0;
    for (const auto& [ticket, instance] : instances_) {
      if (instance.dead || instance.stop_requested) continue;
      rented_rate += hosts_[instance.host].offer.rollouts_per_s;
      largest_rate = std::max(largest_rate, hosts_[instance.host].offer.rollouts_per_s);
    }
    if (without_trouble_ && rented_rate > numbers.target_rollouts_per_s * kSurplusMax + largest_rate)
      report_violation("enough", fmt::format("{:.4g} rollouts/s are rented, {:.4g} are wanted", rented_rate,
                                             numbers.target_rollouts_per_s));
    if (without_trouble_ && result_.rentals > wanted_offers_.size())
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
    const Duration deadline_from = std::max<Duration>(kTroubleTime, last_deceiver_detected_at_);
    if (now_ > deadline_from + kRestorationTimeMax && awaits_restoration()) {
      slow_restoration_reported_ = true;
      report_violation("restored",
                       fmt::format("{:.4g} of {:.4g} rollouts/s work {} after the trouble and the last deception",
                                   true_working_rate(), numbers.target_rollouts_per_s, to_text(now_ - deadline_from)));
    }
  }

  // Whether the run must still show that capacity is restored in time.
  bool awaits_restoration() const {
    return !result_.restored && !result_.exhausted && !result_.closed && !slow_restoration_reported_;
  }

  double true_working_rate() const {
    double working = 0;
    for (const auto& [ticket, instance] : instances_)
      if (instance.joined && !instance.dead && counts_as_capacity(instance) && instance.hung_since == Duration::max())
        working += true_rate(instance);
    return working;
  }

  void run_tick() {
    if (!learner_up_ && now_ >= learner_down_until_) start_learner();
    inject_trouble();
    advance_provider();
    advance_workers();
    if (learner_up_ && now_ >= spent_reported_at_ + seconds(10)) {
      spent_reported_at_ = now_;
      notify_core(fleet::SpendingMeasured{ledger_usd()});
    }
    if (learner_up_) carry_out(core_->tick(clock()));
    check_invariants();
  }

  // Ends the run: returns all machines and closes the ledger.
  void end_run() {
    if (!learner_up_) start_learner();
    record_line("the run ends");
    if (learner_up_) carry_out(core_->close("the run has ended", clock()));
    for (const Duration end = now_ + kEndTime;
         now_ < end && !(core_->machines().empty() && instances_.empty() && pending_starts_.empty());
         now_ += kTickInterval) {
      advance_provider();
      carry_out(core_->tick(clock()));
      check_invariants();
    }
    if (!core_->machines().empty()) report_violation("returned", "machines remain in the table");
    for (const auto& [ticket, instance] : instances_)
      if (!instance.dead) report_violation("returned", fmt::format("{} is still rented", ticket));
    for (const auto& [ticket, row] : ledger_rows_)
      if (!row.ended_at) report_violation("returned", fmt::format("{} is still open in the ledger", ticket));
    // If a start failed but rented an instance, and that ended before any listing, the ledger counts it as free.
    double unseen_usd = 0;
    for (const auto& [ticket, row] : ledger_rows_)
      if (!row.ran)
        unseen_usd +=
            std::min(spent_usd_by_ticket_[ticket], row.usd_per_hour * echoline::seconds(rules::kAnswerTimeout) / 3600);
    if (ledger_usd() + unseen_usd < spent_usd_ * kLedgerShareMin - kUsdTolerance)
      report_violation("known",
                       fmt::format("the ledger has ${:.5f}, but ${:.5f} were spent", ledger_usd(), spent_usd_));
  }

  Random random_, queue_random_;
  const std::function<void(const std::string&)>& trace_;
  MarketResult result_;
  std::uint64_t hash_ = kFnvOffset;
  bool without_trouble_ = false;  // no faults at all; the fleet must then rent exactly what it planned
  FleetRules rules_;
  std::vector<Host> hosts_;
  std::vector<std::string> wanted_offers_;
  std::set<std::string> offered_ids_;  // of the offers in the last search result
  double crash_probability_ = 0;
  Duration true_step_time_{};

  Duration now_{}, clock_skew_{}, learner_down_until_{}, outage_until_{-hours(1)}, price_rose_at_{-hours(1)},
      spent_reported_at_{};
  bool learner_up_ = false, overspending_reported_ = false, slow_restoration_reported_ = false;
  std::optional<FleetCore> core_;
  std::map<Ticket, RentalRow> ledger_rows_;
  std::set<Ticket> started_tickets_;
  std::map<Ticket, Instance> instances_;
  std::vector<PendingCall> pending_starts_, pending_stops_, pending_searches_;
  std::vector<Answer> answers_;
  double stock_rollouts_ = 0;  // generated and not yet trained on
  double spent_usd_ = 0, unavoidable_usd_ = 0;
  std::map<Ticket, double> spent_usd_by_ticket_;
  std::map<Ticket, Duration> stop_requested_at_;  // first request
  std::set<std::size_t> detected_deceivers_;      // hosts found slower than promised
  Duration last_deceiver_detected_at_{};          // when the last of them was detected
  Duration trains_until_{};                       // end of the step in training; zero: none
  int steps_ = 0;
  std::optional<bool> waiting_reported_;  // last fleet::LearnerWaiting sent to the current core
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

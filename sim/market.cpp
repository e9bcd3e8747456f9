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
using std::chrono::seconds;

constexpr Duration kStep = seconds(5);
constexpr Duration kTrouble = minutes(25), kPeace = minutes(18), kEnd = minutes(12);
constexpr Duration kBootMax = minutes(4), kAwayMax = minutes(2);
// As docs/provisioning.md promises: a machine that never joins is detected and another boots, and both may wait for the
// limit of rentals per minute. The time restarts with each host found slower than promised, because each can deceive
// the fleet once.
constexpr Duration kRestoredWithin = 2 * kBootMax + minutes(6);
constexpr int kRestartsMax = 8;
constexpr const char* kEnough = "the others suffice";
constexpr double kHonest = 0.95;   // of the promised rate: a host above this share does not deceive
constexpr double kUnknown = 1.02;  // measured rates differ from the truth by at most this factor

struct Host {  // an offer and its true properties
  FleetOffer offer;
  double honesty = 1;  // true share of the promised rate
  double refuses = 0;  // probability
  bool never_joins = false;
};

struct Row {  // of the ledger
  std::string offer;
  InstanceId instance;
  double usd_per_hour = 0;
  Duration from{};
  std::optional<Duration> to;
  bool ran = true;
  double usd(Duration now) const { return ran ? usd_per_hour * echoline::seconds(to.value_or(now) - from) / 3600 : 0; }
};

struct Instance {  // at the provider
  Ticket ticket = 0;
  std::size_t host = 0;
  double usd_per_hour = 0;
  Duration boots_at{}, hung_since{Duration::max()}, ends_at{Duration::max()};
  std::optional<Duration> drains_since;
  bool joined = false, dead = false, outbid = false, watched = false, stop_asked = false, left = false, drained = false;
  WorkerId worker;
  double unsent = 0;
};

class Market {
 public:
  Market(std::uint64_t seed, const std::function<void(const std::string&)>& trace) : random_(seed, 77), trace_(trace) {
    result_.seed = seed;
    make();
  }

  MarketResult run() {
    begin();
    for (; now_ < kTrouble + kPeace || unjudged(); now_ += kStep) step();
    end_run();
    return std::move(result_);
  }

 private:
  bool chance(double p) { return random_.uniform() < p; }
  double between(double low, double high) { return low + (high - low) * random_.uniform(); }
  Duration some(Duration low, Duration high) { return Duration(random_.between(low.count(), high.count())); }
  bool trouble() const { return !calm_ && now_ < kTrouble; }

  void make() {
    calm_ = random_.below(8) == 0;
    rules_.pace = {100, static_cast<int>(random_.between(1, 3)), seconds(random_.between(2, 12) * 5)};
    rules_.broadcast_time =
        from_seconds(between(0, 0.4) * rules_.pace.publish_every * echoline::seconds(rules_.pace.step_time));
    rules_.fleet.headroom = chance(0.2) ? 0 : between(0.02, 0.3);
    rules_.group_size = 4;
    rules_.fleet.join_timeout = kBootMax;
    rules_.fleet.away_max = kAwayMax;
    rules_.fleet.workers_max = static_cast<std::size_t>(random_.between(8, 48));
    const double target =
        capacity_target(rules_.pace, rules_.broadcast_time, rules_.fleet.headroom)->provisioned_rollouts_per_s;
    const std::uint64_t machines = random_.between(1, 12);
    const auto offers = static_cast<std::size_t>(random_.between(4, 40) + 2 * static_cast<std::int64_t>(machines));
    std::vector<Candidate> pool;
    for (std::size_t i = 0; i < offers; ++i) {
      Host host;
      host.offer = {fmt::format("o{}", i),
                    "cloud",
                    chance(0.2) && i > 0 ? fmt::format("h{}", i - 1) : fmt::format("h{}", i),
                    between(0.6, 1.8) * target / static_cast<double>(machines),
                    between(0.05, 1),
                    between(0, 0.05)};
      host.honesty = !calm_ && chance(0.2) ? between(0.05, 0.9) : between(0.99, 1.01);
      host.refuses = calm_ ? 0 : chance(0.2) ? between(0.3, 1) : 0.05;
      host.never_joins = !calm_ && chance(0.1);
      hosts_.push_back(host);
    }
    std::map<std::string, std::size_t> one_each;
    std::vector<std::size_t> of_pool;
    for (std::size_t i = 0; i < offers; ++i)
      if (one_each.emplace(hosts_[i].offer.host, i).second) {
        of_pool.push_back(i);
        pool.push_back({hosts_[i].offer.rollouts_per_s, hosts_[i].offer.all_usd_per_hour()});
      }
    const auto plan = allocate_greedy(pool, target, {.workers_max = rules_.fleet.workers_max});
    double cost = 0;
    for (std::size_t i = 0; i < of_pool.size(); ++i)
      if (!plan || std::count(plan->chosen.begin(), plan->chosen.end(), i) > 0) {
        wanted_.push_back(hosts_[of_pool[i]].offer.id);
        cost += pool[i].usd_per_hour;
      }
    if (chance(0.5)) rules_.fleet.usd_per_hour_max = cost * between(1, 3);
    if (chance(0.3)) rules_.fleet.usd_max = cost * between(0.3, 2);
    true_step_ =
        calm_ ? rules_.pace.step_time : from_seconds(echoline::seconds(rules_.pace.step_time) * between(0.8, 1.5));
    true_step_ = std::max<Duration>(kStep, true_step_ / kStep * kStep);
    if (calm_) true_step_ = rules_.pace.step_time;
    crash_ = calm_ ? 0 : between(0, 0.05);
    result_.scenario = fmt::format(
        "{} offers, {} planned for {:.4g} rollouts/s, T {}, T_b {}, headroom {:.2f}, at most {} machines, ${} an hour, "
        "${} in "
        "all{}",
        offers, wanted_.size(), target, to_text(rules_.pace.step_time), to_text(rules_.broadcast_time),
        rules_.fleet.headroom, rules_.fleet.workers_max,
        rules_.fleet.usd_per_hour_max ? fmt::format("{:.3f}", *rules_.fleet.usd_per_hour_max) : "any",
        rules_.fleet.usd_max ? fmt::format("{:.3f}", *rules_.fleet.usd_max) : "any", calm_ ? ", no trouble" : "");
    hash_ = 14695981039346656037ull;
    tell(result_.scenario);
  }

  void tell(const std::string& line) {
    for (const char c : line) hash_ = (hash_ ^ static_cast<unsigned char>(c)) * 1099511628211ull;
    result_.trace_hash = hash_;
    if (trace_) trace_(fmt::format("{:9.0f} s  {}", echoline::seconds(now_), line));
  }
  void violate(const std::string& rule, std::string text) {
    if (result_.violations.size() < 20) result_.violations.push_back({now_, rule, text});
    tell("VIOLATED " + rule + ": " + text);
  }

  // The learner's clock, which may be set or may stop while its machine sleeps.
  TimePoint clock() const { return TimePoint(hours(10'000) + now_ + skew_); }

  // ---- learner process ----

  void begin() {
    up_ = true;
    std::vector<FleetOffer> offers;
    for (const Host& host : hosts_) offers.push_back(host.offer);
    offer_only(offers);
    core_.emplace(rules_, offers, wanted_);
    hear(fleet::Spent{ledger_usd()});
    for (const auto& [ticket, row] : rows_) {
      if (row.to || !up_) continue;
      const Host& host = host_of(row.offer);
      FleetOffer offer = host.offer;
      offer.usd_per_hour = row.usd_per_hour - offer.traffic_usd_per_hour;
      hear(fleet::Recovered{ticket, offer, row.instance});
    }
    waiting_told_.reset();
  }

  void offer_only(const std::vector<FleetOffer>& offers) {
    offered_.clear();
    for (const FleetOffer& offer : offers) offered_.insert(offer.id);
  }

  void crash() {
    tell("the learner is killed");
    ++result_.restarts;
    up_ = false;
    core_.reset();
    answers_.clear();
    for (auto& [id, instance] : instances_) {
      instance.watched = instance.left = instance.joined = instance.stop_asked = instance.drained = false;
      instance.drains_since.reset();
    }
    down_until_ = now_ + some(seconds(5), seconds(40));
  }

  void hear(const FleetEvent& event) {
    if (up_) carry_out(core_->handle(event, clock()));
  }

  void carry_out(const std::vector<FleetAction>& actions) {
    for (const FleetAction& action : actions) {
      if (!up_) return;
      ++result_.actions;
      const std::size_t kind = action.index();
      const bool counted = kind < kMarketActions.size();
      const bool dies = counted && now_ < kTrouble && result_.restarts < kRestartsMax && chance(crash_);
      const bool before = dies && chance(0.5);
      if (dies) ++result_.restarts_at[2 * kind + (before ? 0 : 1)];
      if (before) return crash();
      // A request on its way to the provider arrives whether or not its sender lives.
      if (const auto* book = std::get_if<fleet::Book>(&action)) {
        on_book(*book, dies);
      } else {
        std::visit([&](const auto& a) { act(a); }, action);
      }
      if (dies) return crash();
    }
  }

  void act(const fleet::Book&) {}
  void on_book(const fleet::Book& book, bool dies) {
    tell("book " + book.offer);
    check_enough(book.offer);
    if (!offered_.contains(book.offer)) violate("order", book.offer + " is requested but not offered any more");
    if (trouble() && chance(0.01)) return hear(fleet::BookingFailed{book.offer, "disk full"});
    const Ticket ticket = static_cast<Ticket>(rows_.size()) + 1;
    rows_[ticket] = {book.offer, {}, host_of(book.offer).offer.all_usd_per_hour(), now_, {}, true};
    ++result_.rentals;
    if (!dies) hear(fleet::Booked{book.offer, ticket});
  }

  void act(const fleet::Start& start) {
    tell(fmt::format("start {} as {}", start.offer, start.ticket));
    const auto row = rows_.find(start.ticket);
    if (row == rows_.end() || row->second.to)
      return violate("known", fmt::format("{} is started without a row", start.ticket));
    if (!started_.insert({start.ticket, true}).second)
      return violate("order", fmt::format("{} is started twice", start.ticket));
    const std::size_t index = index_of(start.offer);
    const double now_per_hour = rented_usd_per_hour() + hosts_[index].offer.all_usd_per_hour();
    if (rules_.fleet.usd_per_hour_max && now_per_hour > *rules_.fleet.usd_per_hour_max * (1 + 1e-6))
      violate("budget", fmt::format("{} raises the fleet's cost to ${:.4f} an hour", start.offer, now_per_hour));
    const Duration answered = now_ + some(seconds(0), seconds(15));
    const bool refuses = trouble() && chance(hosts_[index].refuses);
    const bool errs_but_rents = trouble() && chance(0.08);
    if (refuses) return answer(answered, fleet::StartFailed{start.ticket, "409 taken", chance(0.5), false});
    // The instance starts between the request and its answer.
    creates_.push_back({now_ + some(seconds(0), answered - now_), start.ticket, index});
    if (errs_but_rents)
      answer(answered, fleet::StartFailed{start.ticket, "500", true, true});
    else if (!(trouble() && chance(0.03)))  // otherwise there is never an answer
      answer(answered, fleet::Started{start.ticket, instance_id(start.ticket), {}});
  }

  void act(const fleet::Stop& stop) {
    tell(fmt::format("stop {} {}: {}", stop.ticket, stop.instance.text, stop.why));
    if (stop.instance != instance_id(stop.ticket))
      return violate("order", fmt::format("{} is stopped as '{}'", stop.ticket, stop.instance.text));
    stop_asked_at_.try_emplace(stop.ticket, now_);
    if (const auto it = instances_.find(stop.ticket); it != instances_.end()) {
      Instance& instance = it->second;
      instance.stop_asked = true;
      const bool hurried =
          !instance.drained && (!instance.drains_since || now_ - *instance.drains_since < rules::kDrain);
      if (stop.why == kEnough && hurried && !instance.left)
        violate("order", fmt::format("{} is stopped with unfinished work although there is no hurry", stop.ticket));
    }
    const Duration at = now_ + some(seconds(1), seconds(15));
    if (outage() || (trouble() && chance(0.2)))
      return answer(at, fleet::StopFailed{stop.ticket, "429 too many requests"});
    stops_.push_back({at, stop.ticket});
    if (!(trouble() && chance(0.03))) answer(at, fleet::Stopped{stop.ticket});
  }

  void act(const fleet::Look& look) {
    const bool answers = !outage() && !(trouble() && chance(0.1));
    tell(fmt::format("look for {}{}", look.ticket, answers ? "" : ", in vain"));
    if (answers) looks_.push_back({now_ + some(seconds(1), seconds(10)), look.ticket});
  }

  void act(const fleet::BookEnd& end) {
    tell(fmt::format("book the end of {}: {}", end.ticket, end.why));
    const auto row = rows_.find(end.ticket);
    if (row == rows_.end())
      return violate("known", fmt::format("the end of {} is booked, but it has no row", end.ticket));
    if (row->second.to) return violate("order", fmt::format("{} ends twice", end.ticket));
    row->second.to = now_;
    row->second.ran = end.ran;
  }

  void act(const fleet::GiveUp&) {}
  void act(const fleet::Drain& drain) {
    tell(fmt::format("drain {}: {}", drain.worker.value, drain.why));
    const auto it = instances_.find(static_cast<Ticket>(drain.worker.value));
    if (it == instances_.end()) return;
    if (!it->second.drains_since) it->second.drains_since = now_;
    if (!(trouble() && chance(0.2))) answer(now_ + some(seconds(0), seconds(60)), fleet::Drained{drain.worker});
  }
  void act(const fleet::Note& note) {
    if (note.what == "lost") ++result_.losses;
    const bool disappoints = note.what == "lost" || note.what == "demoted";
    if (disappoints && host_of(note.offer).honesty < kHonest && found_out_.insert(index_of(note.offer)).second)
      undeceived_at_ = now_;
    tell(fmt::format("{} {}: {}", note.what, note.offer, note.why));
  }

  // ---- provider ----

  struct Later {
    Duration at;
    Ticket ticket = 0;
    std::size_t host = 0;
  };
  struct Answer {
    Duration at;
    FleetEvent event;
  };

  InstanceId instance_id(Ticket ticket) const { return {fmt::format("cloud:{}", ticket)}; }
  std::size_t index_of(const std::string& offer) const { return static_cast<std::size_t>(std::stoul(offer.substr(1))); }
  const Host& host_of(const std::string& offer) const { return hosts_[index_of(offer)]; }
  bool outage() const { return now_ < outage_until_; }
  void answer(Duration at, FleetEvent event) { answers_.push_back({at, std::move(event)}); }

  template <class T>
  std::vector<T> take_due(std::vector<T>& all) {
    std::vector<T> due;
    for (T& item : all)
      if (item.at <= now_) due.push_back(item);
    std::erase_if(all, [&](const T& item) { return item.at <= now_; });
    return due;
  }

  void provide() {
    for (const Later& create : take_due(creates_)) {
      Instance instance;
      instance.ticket = create.ticket;
      instance.host = create.host;
      const Host& host = hosts_[create.host];
      instance.usd_per_hour = host.offer.all_usd_per_hour();
      const bool never = trouble() && (host.never_joins || chance(0.05));
      instance.boots_at =
          never ? Duration::max() : now_ + some(seconds(10), trouble() ? kBootMax : kBootMax - seconds(60));
      instance.worker = WorkerId{static_cast<std::uint64_t>(create.ticket)};
      instances_[create.ticket] = instance;
    }
    for (const Later& stop : take_due(stops_))
      if (const auto it = instances_.find(stop.ticket); it != instances_.end()) it->second.dead = true;
    for (const Answer& answer : take_due(answers_)) {
      if (const auto* started = std::get_if<fleet::Started>(&answer.event)) {
        if (const auto it = instances_.find(started->ticket); it != instances_.end()) it->second.watched = up_;
        rows_[started->ticket].instance = started->instance;
      }
      if (const auto* failed = std::get_if<fleet::StopFailed>(&answer.event))
        if (const auto it = instances_.find(failed->ticket); it != instances_.end()) it->second.stop_asked = false;
      if (const auto* drained = std::get_if<fleet::Drained>(&answer.event)) {
        if (const auto it = instances_.find(static_cast<Ticket>(drained->worker.value)); it != instances_.end())
          it->second.drained = true;
        ++result_.drained;
      }
      hear(answer.event);
    }
    for (const Later& look : take_due(looks_)) {
      const auto it = instances_.find(look.ticket);
      const bool there = it != instances_.end() && !it->second.dead;
      if (there) {
        it->second.watched = up_;
        if (up_) rows_[look.ticket].instance = instance_id(look.ticket);
      }
      hear(fleet::Found{look.ticket, there ? std::optional(instance_id(look.ticket)) : std::nullopt});
    }
    for (auto& [ticket, instance] : instances_) {
      if (!instance.dead || !instance.watched || !up_) continue;
      instance.watched = false;
      if (!instance.stop_asked)
        hear(fleet::Exited{ticket, instance.outbid ? "outbid" : "the host is gone", instance.outbid});
    }
    std::erase_if(instances_, [](const auto& entry) { return entry.second.dead && !entry.second.watched; });
  }

  void make_trouble() {
    if (!trouble()) return;
    for (auto& [ticket, instance] : instances_) {
      if (chance(0.002)) instance.dead = true, tell(fmt::format("{} dies", ticket));
      if (chance(0.002)) instance.dead = instance.outbid = true, tell(fmt::format("{} is outbid", ticket));
      if (chance(0.002) && instance.ends_at == Duration::max() && instance.watched) {
        instance.ends_at = now_ + some(seconds(5), minutes(2));
        tell(fmt::format("{} will be taken back", ticket));
        if (chance(0.5))
          hear(fleet::Ending{ticket, "outbid: it is being stopped", true});
        else
          hear(fleet::Leaving{instance.worker});
      }
      if (now_ >= instance.ends_at) instance.dead = true;
      if (chance(0.001) && instance.hung_since == Duration::max())
        instance.hung_since = now_, tell(fmt::format("{} hangs", ticket));
      if (chance(0.002) && up_ && instance.watched) {
        const double price = hosts_[instance.host].offer.usd_per_hour * between(0.5, 2);
        instance.usd_per_hour = price + hosts_[instance.host].offer.traffic_usd_per_hour;
        rows_[ticket].usd_per_hour = std::max(rows_[ticket].usd_per_hour, instance.usd_per_hour);
        price_rose_at_ = now_;
        hear(fleet::PriceChanged{ticket, price});
      }
    }
    if (chance(0.003)) {
      skew_ += some(-hours(5), hours(20));
      tell("the clock is set");
    }
    if (chance(0.005)) outage_until_ = now_ + some(seconds(10), seconds(60));
    if (up_ && chance(0.01)) {
      std::vector<FleetOffer> offers;
      for (const Host& host : hosts_)
        if (chance(0.8)) offers.push_back(host.offer);
      offer_only(offers);
      hear(fleet::OffersRefreshed{std::move(offers)});
    }
  }

  // ---- workers and the learner's steps, as fluids ----

  void work() {
    const double room = 2.0 * rules_.pace.rollouts_per_step - stock_;
    double made = 0;
    for (auto& [ticket, instance] : instances_) {
      if (!up_ || instance.dead || instance.boots_at > now_) continue;
      if (instance.drained) continue;
      if (instance.hung_since != Duration::max()) {
        if (instance.joined && !instance.left && now_ - instance.hung_since >= kAwayMax) {
          instance.left = true;
          hear(fleet::Left{instance.worker, "away for too long"});
        }
        continue;
      }
      if (!instance.joined) {
        instance.joined = true;
        hear(fleet::Joined{instance.worker, hosts_[instance.host].offer.id});
        continue;
      }
      if (room <= 0) continue;
      instance.unsent += rate(instance) * echoline::seconds(kStep);
      const double groups = std::floor(instance.unsent / rules_.group_size) * rules_.group_size;
      instance.unsent -= groups;
      made += groups;
      if (groups > 0)
        hear(fleet::Beat{instance.worker, groups, groups / rate(instance) * between(0.99, 1.01)});
      else
        hear(fleet::Beat{instance.worker, 0, 0});
    }
    stock_ += made;
    if (!up_) return;
    if (trains_until_ > now_) return;
    if (trains_until_ != Duration{}) {
      trains_until_ = Duration{};
      ++steps_;
      hear(fleet::StepMeasured{true_step_});
      if (steps_ % rules_.pace.publish_every == 0)
        hear(fleet::BroadcastMeasured{from_seconds(echoline::seconds(rules_.broadcast_time) * between(0.95, 1.05))});
    }
    const bool waits = stock_ < rules_.pace.rollouts_per_step;
    if (waiting_told_ != waits) hear(fleet::Waiting{waits});
    waiting_told_ = waits;
    if (waits) return;
    stock_ -= rules_.pace.rollouts_per_step;
    trains_until_ = now_ + true_step_;
  }

  double rate(const Instance& instance) const {
    return hosts_[instance.host].offer.rollouts_per_s * hosts_[instance.host].honesty;
  }

  // ---- invariants ----

  double ledger_usd() const {
    double usd = 0;
    for (const auto& [ticket, row] : rows_) usd += row.usd(now_);
    return usd;
  }
  double rented_usd_per_hour() const {
    double usd = 0;
    for (const auto& [ticket, instance] : instances_) usd += instance.dead ? 0 : instance.usd_per_hour;
    for (const Later& create : creates_) usd += hosts_[create.host].offer.all_usd_per_hour();
    return usd;
  }
  bool counted(const Instance& instance) const {
    const auto* machine = core_->machines().of(instance.ticket);
    return machine != nullptr && !machine->unwanted && machine->state != MachineState::kStopping &&
           machine->state != MachineState::kDraining;
  }

  // Checks that nothing is rented while the healthy machines suffice.
  void check_enough(const std::string& offer) {
    double there = 0;
    for (const auto& [ticket, instance] : instances_)
      if (!instance.dead && !instance.stop_asked && instance.hung_since == Duration::max() &&
          instance.boots_at != Duration::max() && counted(instance)) {
        const auto* machine = core_->machines().of(ticket);  // a demoted host must first prove a better rate
        const double believed = machine->measured.value_or(machine->share * machine->offer.rollouts_per_s);
        there += machine->share < 1 ? std::min(rate(instance), believed) : rate(instance);
      }
    const double target = core_->numbers().target_rollouts_per_s;
    if (there >= target * kUnknown)
      violate("enough",
              fmt::format("{} is rented although {:.4g} rollouts/s exist and {:.4g} are wanted", offer, there, target));
  }

  void check() {
    for (const auto& [ticket, instance] : instances_) {
      const auto row = rows_.find(ticket);
      if (row == rows_.end())
        violate("known", fmt::format("{} is rented but in no ledger", ticket));
      else if (row->second.to && !instance.dead)
        violate("forgotten", fmt::format("{} is rented but its end is booked", ticket));
      if (instance.dead) continue;
      const double usd = instance.usd_per_hour * echoline::seconds(kStep) / 3600;
      spent_ += usd;
      spent_on_[ticket] += usd;
      // Costs of instances that the provider does not take back within the core's reserve cannot be avoided.
      const auto asked = stop_asked_at_.find(ticket);
      if (asked != stop_asked_at_.end() && now_ - asked->second > rules::kReserve) not_taken_back_ += usd;
    }
    if (rules_.fleet.usd_max && spent_ - not_taken_back_ > *rules_.fleet.usd_max && !over_told_) {
      over_told_ = true;
      violate("budget", fmt::format("${:.4f} of ${:.4f} are spent", spent_, *rules_.fleet.usd_max));
    }
    if (!up_) return;
    core_->check();
    const FleetNumbers n = core_->numbers();
    result_.closed = n.money_spent;
    if (rules_.fleet.usd_per_hour_max && rented_usd_per_hour() > *rules_.fleet.usd_per_hour_max * (1 + 1e-6) &&
        now_ - price_rose_at_ > minutes(4))
      violate("budget", fmt::format("${:.4f} an hour", rented_usd_per_hour()));
    double all = 0, largest = 0;
    for (const auto& [ticket, instance] : instances_) {
      if (instance.dead || instance.stop_asked) continue;
      all += hosts_[instance.host].offer.rollouts_per_s;
      largest = std::max(largest, hosts_[instance.host].offer.rollouts_per_s);
    }
    if (calm_ && all > n.target_rollouts_per_s * 1.05 + largest)
      violate("enough", fmt::format("{:.4g} rollouts/s are rented, {:.4g} are wanted", all, n.target_rollouts_per_s));
    if (calm_ && result_.rentals > wanted_.size()) violate("enough", "more machines are rented than planned");
    const bool again =
        now_ >= kTrouble && (n.idle_fraction < rules::kFeltIdle ||
                             true_working() >= n.target_rollouts_per_s * (1 - rules::kDeadband) / kUnknown);
    result_.restored = result_.restored || again;
    result_.exhausted = n.exhausted || (result_.exhausted && now_ > kTrouble + kBootMax);
    const Duration since = std::max<Duration>(kTrouble, undeceived_at_);
    if (now_ > since + kRestoredWithin && unjudged()) {
      slow_told_ = true;
      violate("restored", fmt::format("{:.4g} of {:.4g} rollouts/s work {} after the trouble and the last deception",
                                      true_working(), n.target_rollouts_per_s, to_text(now_ - since)));
    }
  }

  bool unjudged() const { return !result_.restored && !result_.exhausted && !result_.closed && !slow_told_; }

  double true_working() const {
    double working = 0;
    for (const auto& [ticket, instance] : instances_)
      if (instance.joined && !instance.dead && counted(instance) && instance.hung_since == Duration::max())
        working += rate(instance);
    return working;
  }

  void step() {
    if (!up_ && now_ >= down_until_) begin();
    make_trouble();
    provide();
    work();
    if (up_ && now_ >= spent_told_ + seconds(10)) {
      spent_told_ = now_;
      hear(fleet::Spent{ledger_usd()});
    }
    if (up_) carry_out(core_->tick(clock()));
    check();
  }

  // Ends the run: returns all machines and closes the ledger.
  void end_run() {
    if (!up_) begin();
    tell("the run ends");
    if (up_) carry_out(core_->close("the run has ended", clock()));
    for (const Duration end = now_ + kEnd;
         now_ < end && !(core_->machines().empty() && instances_.empty() && creates_.empty()); now_ += kStep) {
      provide();
      carry_out(core_->tick(clock()));
      check();
    }
    if (!core_->machines().empty()) violate("returned", "machines remain in the table");
    for (const auto& [ticket, instance] : instances_)
      if (!instance.dead) violate("returned", fmt::format("{} is still rented", ticket));
    for (const auto& [ticket, row] : rows_)
      if (!row.to) violate("returned", fmt::format("{} is still open in the ledger", ticket));
    // A failed start that rented nevertheless, and ended before any listing, counts as free.
    double unseen = 0;
    for (const auto& [ticket, row] : rows_)
      if (!row.ran) unseen += std::min(spent_on_[ticket], row.usd_per_hour * echoline::seconds(rules::kAnswer) / 3600);
    if (ledger_usd() + unseen < spent_ * 0.999 - 1e-6)
      violate("known", fmt::format("the ledger has ${:.5f}, but ${:.5f} were spent", ledger_usd(), spent_));
  }

  Random random_;
  const std::function<void(const std::string&)>& trace_;
  MarketResult result_;
  std::uint64_t hash_ = 0;
  bool calm_ = false;
  FleetRules rules_;
  std::vector<Host> hosts_;
  std::vector<std::string> wanted_;
  std::set<std::string> offered_;  // now
  double crash_ = 0;
  Duration true_step_{};

  Duration now_{}, skew_{}, down_until_{}, outage_until_{-hours(1)}, price_rose_at_{-hours(1)}, spent_told_{};
  bool up_ = false, over_told_ = false, slow_told_ = false;
  std::optional<FleetCore> core_;
  std::map<Ticket, Row> rows_;
  std::map<Ticket, bool> started_;
  std::map<Ticket, Instance> instances_;
  std::vector<Later> creates_, stops_, looks_;
  std::vector<Answer> answers_;
  double stock_ = 0, spent_ = 0, not_taken_back_ = 0;
  std::map<Ticket, double> spent_on_;
  std::map<Ticket, Duration> stop_asked_at_;  // first request
  std::set<std::size_t> found_out_;           // deceiving hosts
  Duration undeceived_at_{};                  // when the last of them was detected
  Duration trains_until_{};
  int steps_ = 0;
  std::optional<bool> waiting_told_;
};

}  // namespace

MarketResult simulate_market(std::uint64_t seed, const std::function<void(const std::string&)>& trace) {
  return Market(seed, trace).run();
}

MarketSummary simulate_markets(std::uint64_t first, std::uint64_t seeds,
                               const std::function<void(const MarketResult&)>& done) {
  MarketSummary s;
  for (std::uint64_t seed = first; seed < first + seeds; ++seed) {
    MarketResult r = simulate_market(seed);
    ++s.seeds;
    s.actions += r.actions;
    s.rentals += r.rentals;
    s.losses += r.losses;
    s.restarts += r.restarts;
    s.drained += r.drained;
    s.closed += r.closed ? 1 : 0;
    s.exhausted += r.exhausted ? 1 : 0;
    s.restored += r.restored ? 1 : 0;
    for (std::size_t i = 0; i < r.restarts_at.size(); ++i) s.restarts_at[i] += r.restarts_at[i];
    s.combined_hash = mix64(s.combined_hash ^ r.trace_hash);
    if (done) done(r);
    s.failed += r.violations.empty() ? 0 : 1;
    if (!r.violations.empty() && s.failures.size() < 10) s.failures.push_back(std::move(r));
  }
  return s;
}

}  // namespace echoline::sim

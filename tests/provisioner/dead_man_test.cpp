// No machine stays rented: the fleet's core, a model of the hosts' supervisors, and a provider that fails a tenth of
// all calls. Learner, workers and supervisors are killed at random moments.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>

#include "base/random.hpp"
#include "provisioner/fleet_core.hpp"

namespace echoline::provisioner {
namespace {

using std::chrono::minutes;
using std::chrono::seconds;

constexpr double kFaults = 0.1;
constexpr Duration kAwayMax = minutes(2), kHorizon = minutes(40), kKilledUntil = minutes(20);
constexpr Duration kWatchEvery = seconds(10), kRunListingEvery = seconds(30), kSupervisorRetry = seconds(5);
// The promised times, from the event until the provider has no such instance any more.
constexpr Duration kWorkerGoneMax = minutes(1);              // its supervisor lives
constexpr Duration kLearnerGoneMax = kAwayMax + minutes(1);  // a supervisor lives
constexpr Duration kContainerGoneMax = minutes(5);           // the learner lives, neither worker nor supervisor does

struct Instance {
  bool worker_alive = true, supervisor_alive = true, joined = false, exit_reported = false;
  Duration joins_at{}, worker_gone_since{Duration::max()}, container_gone_since{Duration::max()}, next_try_at{};
};

class DeadMan {
 public:
  explicit DeadMan(std::uint64_t seed) : random_(seed, 4711) {
    rules_.pace = {1000, 1, seconds(10)};
    rules_.group_size = 4;
    rules_.fleet.away_max = kAwayMax;
    rules_.fleet.join_timeout = minutes(4);
    rules_.starts_at_once["cloud"] = 3;
    for (int i = 0; i < 24; ++i)
      offers_.push_back({.id = fmt::format("o{}", i),
                         .provider = "cloud",
                         .host = fmt::format("h{}", i),
                         .rollouts_per_s = 14,
                         .usd_per_hour = 0.1 + 0.01 * i});
    for (int i = 0; i < 8; ++i) wanted_.push_back(offers_[static_cast<std::size_t>(i)].id);
    learner_killed_at_ = chance(0.7) ? random_time(seconds(5), kKilledUntil) : Duration::max();
    learner_returns_at_ = chance(0.4) ? learner_killed_at_ + random_time(seconds(10), minutes(6)) : Duration::max();
    if (learner_killed_at_ == Duration::max()) learner_returns_at_ = Duration::max();
  }

  void run() {
    start_learner();
    for (; now_ < kHorizon; now_ += seconds(1)) {
      if (now_ == learner_killed_at_) kill_learner();
      if (now_ == learner_returns_at_) start_learner();
      if (now_ == kHorizon - minutes(12) && core_) carry_out(core_->close("the run has ended", clock()));
      kill_on_hosts();
      advance_hosts();
      if (core_) advance_learner();
      check_promises();
    }
    EXPECT_TRUE(!core_ || instances_.empty()) << instances_.size() << " are left by a living learner";
    // `echoline down --all-runs` lists by label and releases until a complete listing is empty.
    for (int round = 0; round < 1000 && !instances_.empty(); ++round)
      for (auto it = instances_.begin(); it != instances_.end();) it = chance(kFaults) ? std::next(it) : erase(it);
    EXPECT_TRUE(instances_.empty());
  }

  int kills = 0;

 private:
  using Instances = std::map<Ticket, Instance>;
  bool chance(double p) { return random_.uniform() < p; }
  // Whole seconds, as the time of the test.
  Duration random_time(Duration low, Duration high) {
    return seconds(random_.between(low / seconds(1), high / seconds(1)));
  }
  TimePoint clock() const { return TimePoint(std::chrono::hours(1000) + now_); }
  static InstanceId id_of(Ticket ticket) { return {fmt::format("cloud:{}", ticket)}; }
  Instances::iterator erase(Instances::iterator it) { return instances_.erase(it); }

  void start_learner() {
    learner_gone_since_ = Duration::max();
    core_.emplace(rules_, offers_, wanted_);
    for (const auto& [ticket, row] : rows_)
      if (row.is_open)
        handle(fleet::Recovered{.ticket = ticket, .offer = offer(row.offer), .instance = row.instance, .adopt = true});
    for (auto& [ticket, instance] : instances_) instance.joined = instance.exit_reported = false;
  }
  void kill_learner() {
    ++kills;
    core_.reset();
    answers_.clear();
    learner_gone_since_ = now_;
  }
  FleetOffer offer(const std::string& id) const {
    return offers_.at(static_cast<std::size_t>(std::stoi(id.substr(1))));
  }

  void handle(const FleetEvent& event) {
    if (core_) carry_out(core_->handle(event, clock()));
  }
  void carry_out(const std::vector<FleetAction>& actions) {
    for (const FleetAction& action : actions) {
      if (!core_) return;
      // The learner may be killed between any two of its actions.
      if (now_ < kKilledUntil && learner_killed_at_ == Duration::max() && chance(0.0005)) {
        learner_killed_at_ = now_;
        return kill_learner();
      }
      std::visit([&](const auto& specific) { perform(specific); }, action);
    }
  }
  void answer(Duration after, FleetEvent event) { answers_.emplace(now_ + after, std::move(event)); }

  void perform(const fleet::Book& book) {
    const Ticket ticket = ++last_ticket_;
    rows_[ticket] = {.offer = book.offer, .instance = {}, .is_open = true};
    handle(fleet::Booked{book.offer, ticket});
  }
  void perform(const fleet::Start& start) {
    const bool fails = chance(kFaults), acts = !fails || chance(0.5);
    if (acts) instances_[start.ticket].joins_at = now_ + random_time(seconds(20), minutes(3));
    if (fails)
      answer(seconds(20),
             fleet::StartFailed{.ticket = start.ticket, .why = "500", .retryable = true, .perhaps_rented = true});
    else
      answer(random_time(seconds(1), seconds(9)),
             fleet::Started{.ticket = start.ticket, .instance = id_of(start.ticket), .usd_per_hour = {}});
  }
  void perform(const fleet::CancelStart&) {}
  void perform(const fleet::Stop& stop) {
    const bool fails = chance(kFaults);
    if (!fails || chance(0.5)) instances_.erase(stop.ticket);
    if (fails)
      answer(seconds(3), fleet::StopFailed{stop.ticket, "502"});
    else
      answer(seconds(3), fleet::Stopped{stop.ticket});
  }
  void perform(const fleet::FindInstance& find) {
    if (chance(kFaults)) return;  // an incomplete listing
    const bool is_found = instances_.contains(find.ticket);
    if (is_found) rows_[find.ticket].instance = id_of(find.ticket);
    answer(seconds(2), fleet::Found{.ticket = find.ticket,
                                    .instance = is_found ? std::optional(id_of(find.ticket)) : std::nullopt});
  }
  void perform(const fleet::BookEnd& end) { rows_[end.ticket].is_open = false; }
  void perform(const fleet::GiveUp&) {}
  void perform(const fleet::Drain& drain) { answer(seconds(5), fleet::Drained{drain.worker}); }
  void perform(const fleet::Note&) {}

  void kill_on_hosts() {
    if (now_ >= kKilledUntil) return;
    for (auto& [ticket, instance] : instances_) {
      if (instance.worker_alive && chance(0.0004)) instance.worker_alive = false, ++kills;
      if (instance.supervisor_alive && chance(0.0002)) instance.supervisor_alive = false, ++kills;
    }
  }

  void advance_hosts() {
    for (auto it = instances_.begin(); it != instances_.end();) {
      Instance& instance = it->second;
      // A container ends with its first process, the supervisor.
      if (!instance.supervisor_alive) {
        instance.worker_alive = false;
        if (instance.container_gone_since == Duration::max()) instance.container_gone_since = now_;
      }
      // A worker without its learner ends.
      const bool learner_is_away =
          learner_gone_since_ != Duration::max() && now_ - std::max(learner_gone_since_, instance.joins_at) >= kAwayMax;
      if (learner_is_away) instance.worker_alive = false;
      if (!instance.worker_alive && instance.worker_gone_since == Duration::max()) instance.worker_gone_since = now_;
      const bool tries = instance.supervisor_alive && !instance.worker_alive && now_ >= instance.next_try_at;
      if (!tries) {
        ++it;
        continue;
      }
      const bool fails = chance(kFaults);
      instance.next_try_at = now_ + kSupervisorRetry;
      it = fails && chance(0.5) ? std::next(it) : erase(it);
    }
  }

  void advance_learner() {
    while (core_ && !answers_.empty() && answers_.begin()->first <= now_) {
      const FleetEvent event = answers_.begin()->second;
      answers_.erase(answers_.begin());
      if (const auto* started = std::get_if<fleet::Started>(&event))
        rows_[started->ticket].instance = started->instance;
      handle(event);
    }
    for (auto& [ticket, instance] : instances_) {
      if (!core_ || instance.joined || !instance.worker_alive || now_ < instance.joins_at) continue;
      instance.joined = true;
      handle(fleet::Joined{WorkerId{static_cast<std::uint64_t>(ticket)}, rows_[ticket].offer});
    }
    const bool complete = !chance(kFaults);
    if (core_ && complete && now_ % kWatchEvery == Duration{}) watch();
    if (core_ && complete && now_ % kRunListingEvery == Duration{}) stop_unknown();
    if (core_) carry_out(core_->tick(clock()));
    if (core_) core_->check();
  }

  // The provider's watch: an instance that is gone, and one whose container has exited.
  void watch() {
    std::vector<FleetEvent> events;
    for (const auto& [key, machine] : core_->machines().all()) {
      if (machine.instance.text.empty()) continue;
      const auto it = instances_.find(machine.ticket);
      if (it == instances_.end()) {
        events.push_back(fleet::Exited{machine.ticket, "it is gone"});
      } else if (it->second.container_gone_since != Duration::max() && !std::exchange(it->second.exit_reported, true)) {
        events.push_back(
            fleet::Exited{.ticket = machine.ticket, .why = "exited", .outbid = false, .still_rented = true});
      }
    }
    for (const FleetEvent& event : events) handle(event);
  }

  // The listing of the run: an instance that two listings show and the ledger does not know is stopped.
  void stop_unknown() {
    std::set<Ticket> unknown;
    for (const auto& [ticket, instance] : instances_)
      if (core_->machines().find(ticket) == nullptr) unknown.insert(ticket);
    for (const Ticket ticket : unknown)
      if (unknown_before_.contains(ticket) && core_) {
        rows_[ticket].is_open = true;
        rows_[ticket].instance = id_of(ticket);
        handle(fleet::Recovered{
            .ticket = ticket, .offer = offer(rows_[ticket].offer), .instance = id_of(ticket), .adopt = false});
      }
    unknown_before_ = std::move(unknown);
  }

  void check_promises() {
    for (const auto& [ticket, instance] : instances_) {
      const auto since = [&](Duration begin) { return begin == Duration::max() ? Duration{} : now_ - begin; };
      if (instance.supervisor_alive) {
        EXPECT_LE(since(instance.worker_gone_since), kWorkerGoneMax) << ticket;
        const Duration learner_gone = learner_gone_since_ == Duration::max()
                                          ? Duration{}
                                          : now_ - std::max(learner_gone_since_, instance.joins_at);
        EXPECT_LE(learner_gone, kLearnerGoneMax) << ticket;
      } else if (core_ && now_ - kContainerGoneMax > learner_returns_or_began()) {
        EXPECT_LE(since(instance.container_gone_since), kContainerGoneMax) << ticket;
      }
    }
  }
  Duration learner_returns_or_began() const {
    return learner_returns_at_ == Duration::max() ? Duration{} : learner_returns_at_;
  }

  struct Row {
    std::string offer;
    InstanceId instance;
    bool is_open = true;
  };
  Random random_;
  FleetRules rules_;
  std::vector<FleetOffer> offers_;
  std::vector<std::string> wanted_;
  std::optional<FleetCore> core_;
  std::map<Ticket, Row> rows_;
  Instances instances_;
  std::multimap<Duration, FleetEvent> answers_;
  std::set<Ticket> unknown_before_;
  Ticket last_ticket_ = 0;
  Duration now_{}, learner_killed_at_{}, learner_returns_at_{}, learner_gone_since_{Duration::max()};
};

TEST(NoMachineStaysRented, AfterKillsAndFaults) {
  int kills = 0;
  for (std::uint64_t seed = 1; seed <= 500; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    DeadMan run(seed);
    run.run();
    kills += run.kills;
    ASSERT_FALSE(HasFailure());
  }
  EXPECT_GT(kills, 1000);
}

}  // namespace
}  // namespace echoline::provisioner

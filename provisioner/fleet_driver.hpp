// FleetDriver operates the fleet of a run: its thread carries out the decisions of provisioner/fleet_core. It writes
// every instance to the ledger before it requests the instance from the offer's provider.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "base/bounded_queue.hpp"
#include "base/clock.hpp"
#include "provisioner/fleet_books.hpp"
#include "provisioner/fleet_core.hpp"
#include "provisioner/market_watch.hpp"
#include "provisioner/plan.hpp"
#include "provisioner/provider.hpp"

namespace echoline::provisioner {

struct FleetOptions {
  std::string run;
  Plan plan;            // its chosen offers are rented first, its ineligible ones never
  MarketSearch market;  // finds the present offers; empty: the plan's offers are the whole market
  Duration market_every = std::chrono::seconds(2);  // between two calls of `market`
  // The run's cost besides its fleet, for the total budget; may be empty. Called on the fleet's thread.
  std::function<double()> other_usd;
  std::filesystem::path ledger_file;
  ProviderOptions providers;
  // Returns the arguments, environment, image, ports and disk with which an instance of this offer becomes a worker of
  // the run. Called on the fleet's thread.
  std::function<Result<LaunchSpec>(const Offer&)> launch;
  const Clock* clock = nullptr;                   // null: the system's
  Duration tick = std::chrono::milliseconds(50);  // interval of polls of the providers, by the system clock
  // Receives every decision, rental and end. Called on the fleet's thread; must not block.
  std::function<void(std::string_view event, const std::string& offer, const std::string& detail)> record;
  // Asks that the worker get no more work. Call notify(fleet::Drained) once it has submitted its results. Called on the
  // fleet's thread; must not block.
  std::function<void(WorkerId worker, const std::string& why)> drain;
  // The machine of a worker has ended by itself. Called on the fleet's thread; must not block.
  std::function<void(WorkerId worker, const std::string& why)> machine_ended;
};

struct FleetSummary {
  std::uint64_t planned = 0, started = 0, lost = 0, replaced = 0;
  double usd = 0, usd_per_hour = 0;  // cost of the fleet with traffic, including earlier processes of the run
  bool prices_known = true;          // false: `usd` is a lower bound
  FleetStatus numbers;
  std::string trouble;               // the latest problem: "failed m5: no capacity"; "" if there was none
  std::string account_trouble;       // why a provider can rent nothing; "" if all can
  bool account_needs_user = false;   // only the user can end `account_trouble`
  std::optional<double> credit_usd;  // the least credit of the providers' accounts, as far as known
  // After stop(): one line for each machine that may still be rented: "run.1a2b3c4d/7 (vast:123)".
  std::vector<std::string> unreturned;
};

// All methods are thread-safe; all but start() and stop() return at once.
class FleetDriver {
 public:
  // Opens the ledger, looks for the machines of an earlier process of this run, and rents the plan's choice. kInvalid
  // if a chosen offer or an earlier machine is of a provider that cannot be used.
  static Result<std::unique_ptr<FleetDriver>> start(FleetOptions options);
  ~FleetDriver();  // stop()

  // Passes an event of a worker to the core: fleet::Joined, Leaving, Drained or Left.
  void notify(FleetEvent event) { queue_.try_push(Input(std::move(event))); }
  // `received` and `forwarded`: bytes since the worker joined, by its own count; `delivered`: the forwarded bytes that
  // its receivers confirm.
  void on_heartbeat(const fleet::Heartbeat& heartbeat, Bytes received, Bytes forwarded, Bytes delivered);
  void set_learner_waiting(bool now_waits) { notify(fleet::LearnerWaiting{now_waits}); }
  void on_step_measured(const fleet::StepMeasured& step) { notify(step); }
  // `install_time`: the workers' median pause to install a policy; absent: not known.
  void on_broadcast_measured(Duration broadcast_time, Bytes payload, std::optional<Duration> install_time) {
    notify(fleet::BroadcastMeasured{broadcast_time, payload, install_time});
  }
  FleetSummary summary() const;
  // Ends every instance and records the ends in the ledger. Idempotent.
  void stop();

 private:
  struct RefreshedOffers {
    std::vector<Offer> offers;
  };
  using Input = std::variant<FleetEvent, WorkerTraffic, RefreshedOffers>;
  // The offers that may be rented now: those of the plan until the first refresh of the market.
  class OfferTable {
   public:
    // Keeps a pointer to `offer`.
    void add(const Offer& offer) { by_id_[offer.id] = &offer; }
    void replace_all(std::vector<Offer> market) {
      by_id_.clear();
      market_ = std::move(market);
      for (const Offer& offer : market_) add(offer);
    }
    const Offer* find(const std::string& id) const {
      const auto it = by_id_.find(id);
      return it == by_id_.end() ? nullptr : it->second;
    }

   private:
    std::vector<Offer> market_;                       // empty before the first refresh
    std::map<std::string_view, const Offer*> by_id_;  // offers in market_ or in options_.plan
  };
  // The providers' listings of all instances with this run's label.
  struct RunListings {
    struct Failure {
      std::string provider, why;
    };
    std::set<std::string> rented_from;    // providers that may have a machine of this run
    std::set<std::string> final_awaited;  // providers whose final listing (close_all()) has not arrived
    std::vector<Failure> final_failures;  // providers whose final listing failed
    bool found_unknown = false;           // a listing showed an instance without a row in the ledger
    // By provider: the ids of the instances in its last listing that have no row; absent before its first listing.
    std::map<std::string, std::set<std::string>> unknown;
    TimePoint next_at{};
  };

  explicit FleetDriver(FleetOptions options);
  Status open_on_thread();
  Status recover_instances();
  void loop();
  void close_all();
  void wait_until_returned(Duration patience);
  void report_unreturned();
  bool is_any_key_refused() const;
  void handle(const FleetEvent& event) { carry_out(core_->handle(event, clock_.now())); }
  void carry_out(const std::vector<FleetAction>& actions);
  void act(const fleet::Book& a);
  void act(const fleet::Start& a);
  void act(const fleet::CancelStart& a);
  void act(const fleet::Stop& a);
  void act(const fleet::FindInstance& a);
  void act(const fleet::BookEnd& a);
  void act(const fleet::GiveUp& a);
  void act(const fleet::Drain& a);
  void act(const fleet::Note& a);
  void poll_providers();
  void on(const std::string& provider, const Started& e);
  void on(const std::string& provider, const Running& e);
  void on(const std::string& provider, const StartFailed& e);
  void on(const std::string& provider, const Stopped& e);
  void on(const std::string& provider, const StopFailed& e);
  void on(const std::string& provider, const Exited& e);
  void on(const std::string& provider, const Ending& e);
  void on(const std::string& provider, const PriceChanged& e);
  void on(const std::string& provider, const AccountChanged& e);
  void on(const std::string& provider, const Listed& e);
  void on_run_listing(const std::string& provider, const Listed& e);
  // For an instance with a label of this run but without an open row: books it and has it stopped.
  void stop_unknown(const std::string& provider, const InstanceInfo& info);
  void on_machine_listing(const std::string& provider, const Listed& e);
  void record_traffic(const WorkerTraffic& traffic);
  void replace_offers(RefreshedOffers refreshed);
  void list_run();
  void report_spending();
  void update_summary();
  Result<Provider*> provider_of(const std::string& name);             // makes the provider at its first use
  std::optional<Ticket> ticket_of(const InstanceId& instance) const;  // absent if no machine has it

  FleetOptions options_;
  BoundedQueue<Input> queue_;
  std::optional<MarketWatch> market_watch_;
  std::thread thread_;

  // Used only by the fleet's thread.
  const Clock& clock_;
  OfferTable offers_;
  std::optional<FleetBooks> books_;
  std::map<std::string, std::unique_ptr<Provider>> providers_;
  std::map<std::string, AccountChanged> provider_accounts_;  // by provider: the newest event
  std::optional<FleetCore> core_;
  RunListings listings_;
  TimePoint next_spending_report_at_{};
  bool stopping_ = false;  // close_all() has begun

  mutable std::mutex mutex_;
  FleetSummary summary_;  // guarded by mutex_
};

}  // namespace echoline::provisioner

// The fleet of one run: the thread that carries out what provisioner/fleet_core decides. Every instance is in the
// ledger before it is asked for, and every offer is rented from the provider that it names.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "base/bounded_queue.hpp"
#include "base/clock.hpp"
#include "provisioner/fleet_core.hpp"
#include "provisioner/ledger.hpp"
#include "provisioner/links.hpp"
#include "provisioner/market_watch.hpp"
#include "provisioner/plan.hpp"
#include "provisioner/provider.hpp"

namespace echoline::provisioner {

struct FleetOptions {
  std::string run;
  Plan plan;          // what it chose is rented first, and nothing that it does not consider
  MarketLook market;  // may be empty: then what the plan considers is all there is
  Duration market_every = std::chrono::seconds(2);  // it is called
  // What the run has cost beside its fleet, for the budget in total; may be empty. On the fleet's thread.
  std::function<double()> other_usd;
  std::filesystem::path ledger_file;
  ProviderOptions providers;
  // What makes an instance of this offer a worker of the run: arguments, environment, image, ports, disk. On the
  // fleet's thread.
  std::function<Result<LaunchSpec>(const Offer&)> launch;
  const Clock* clock = nullptr;                   // the system's, if there is none
  Duration tick = std::chrono::milliseconds(50);  // of that system's: how often providers are looked after
  // Hears of every decision and of what is rented and ended. On the fleet's thread, must not block.
  std::function<void(std::string_view event, const std::string& offer, const std::string& detail)> record;
  // A worker is to get no more work; drained() once it has handed in what it has. On the fleet's thread, must not
  // block.
  std::function<void(WorkerId worker, const std::string& why)> drain;
  // The machine of a worker has ended by itself. On the fleet's thread, must not block.
  std::function<void(WorkerId worker, const std::string& why)> machine_ended;
};

struct FleetSummary {
  std::uint64_t planned = 0, started = 0, lost = 0, replaced = 0;
  double usd = 0, usd_per_hour = 0;  // of all processes of the run; traffic included
  bool prices_known = true;          // otherwise `usd` is the least it can be
  FleetNumbers numbers;
  std::string trouble;  // the latest: "failed m5: no capacity"; "" where there was none
};

// Every method is thread-safe and returns at once, but for start() and stop().
class FleetDriver {
 public:
  // Opens the ledger, takes up what an earlier process of this run left, and rents what is wanted. kInvalid where an
  // offer names a provider that cannot be used: no other is asked in its place.
  static Result<std::unique_ptr<FleetDriver>> start(FleetOptions options);
  ~FleetDriver();  // stop()

  void joined(WorkerId worker, const std::string& offer) {
    tell(fleet::Joined{worker, offer});
  }                                                                                       // also when it is back
  void left(WorkerId worker, const std::string& why) { tell(fleet::Left{worker, why}); }  // for good
  // And the bytes that it has received and forwarded since it joined, by its own word, and that others say came from
  // it.
  void beat(const fleet::Beat& beat, Bytes received, Bytes forwarded, Bytes delivered);
  void leaving(WorkerId worker) { tell(fleet::Leaving{worker}); }  // told to end by whoever runs its machine
  void drained(WorkerId worker) { tell(fleet::Drained{worker}); }
  void learner_waits(bool now_waits) { tell(fleet::Waiting{now_waits}); }
  void step_measured(Duration step_time) { tell(fleet::StepMeasured{step_time}); }
  void broadcast_measured(Duration broadcast_time, Bytes payload) {
    tell(fleet::BroadcastMeasured{broadcast_time, payload});
  }
  FleetSummary summary() const;
  // Ends every instance and books the ends. Idempotent.
  void stop();

 private:
  struct Traffic {
    WorkerId worker;
    Bytes received, forwarded, delivered;
    TimePoint at;
  };
  struct Refreshed {
    std::vector<Offer> offers;
  };
  using Input = std::variant<FleetEvent, Traffic, Refreshed>;
  // Beside what the core keeps of a machine.
  struct Account {
    Bytes received, forwarded;                    // as its worker counts
    Bytes received_unbooked, forwarded_unbooked;  // of that, not in the ledger yet
    std::optional<double> measured;               // as booked
    LinkMeter up, down;
    std::optional<BitRate> up_booked, down_booked;
    std::optional<double> last_known_unix_s;  // of one that an earlier process had
    bool runs = false;
  };
  struct End {
    fleet::BookEnd end;
    double unix_s = 0;
  };

  explicit FleetDriver(FleetOptions options);
  void tell(FleetEvent event) { queue_.try_push(Input(std::move(event))); }
  Status open_on_thread();
  Status take_up();
  void loop();
  void close_all();
  void hear(const FleetEvent& event) { carry_out(core_->handle(event, clock_.now())); }
  void carry_out(const std::vector<FleetAction>& actions);
  void act(const fleet::Book& a);
  void act(const fleet::Start& a);
  void act(const fleet::Stop& a);
  void act(const fleet::Look& a);
  void act(const fleet::BookEnd& a);
  void act(const fleet::GiveUp& a);
  void act(const fleet::Drain& a);
  void act(const fleet::Note& a);
  void poll_providers();
  void on(const std::string& provider, const Started& e);
  void on(const std::string& provider, const StartFailed& e);
  void on(const std::string& provider, const Stopped& e);
  void on(const std::string& provider, const StopFailed& e);
  void on(const std::string& provider, const Exited& e);
  void on(const std::string& provider, const Ending& e);
  void on(const std::string& provider, const PriceChanged& e);
  void on(const std::string& provider, const Listed& e);
  void count(const Traffic& traffic);
  void take(Refreshed refreshed);
  void book_signs();
  void book_ends();
  void tell_spent();
  void update_summary();
  Result<Provider*> provider_of(const std::string& name);
  std::optional<Ticket> ticket_of(const InstanceId& instance) const;
  const Offer* offer_of(const std::string& id) const;

  FleetOptions options_;
  BoundedQueue<Input> queue_;
  std::optional<MarketWatch> watch_;
  std::thread thread_;

  // The fleet thread's own.
  const SystemClock system_clock_;
  const Clock& clock_;
  std::vector<Offer> refreshed_;                     // the market of now; before the first refresh, the plan's is
  std::map<std::string_view, const Offer*> offers_;  // that may be rented, by id
  std::optional<Ledger> ledger_;
  std::map<std::string, std::unique_ptr<Provider>> providers_;
  std::optional<FleetCore> core_;
  std::map<Ticket, Account> accounts_;
  std::map<Ticket, std::string> labels_;
  std::vector<End> ends_;  // not booked yet
  bool stopping_ = false;
  TimePoint signs_due_{}, spent_due_{};
  std::uint64_t started_ = 0;

  mutable std::mutex mutex_;
  FleetSummary summary_;  // guarded by mutex_
};

}  // namespace echoline::provisioner

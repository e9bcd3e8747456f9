// The rented fleet of one run: rents what the plan chose, books every instance before it is asked for, replaces what is
// lost, and returns everything at the end.
#pragma once
#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/bounded_queue.hpp"
#include "base/clock.hpp"
#include "base/files.hpp"
#include "base/ids.hpp"
#include "base/result.hpp"
#include "provisioner/controller.hpp"
#include "provisioner/ledger.hpp"
#include "provisioner/plan.hpp"
#include "provisioner/provider.hpp"
#include "provisioner/providers/make.hpp"

namespace echoline::learner {

struct FleetOptions {
  std::string run;
  provisioner::Plan plan;
  std::vector<provisioner::Offer> offers;  // all of the file: standby offers are taken from here
  std::filesystem::path ledger_file, log_folder;
  std::string provider;
  provisioner::ProviderOptions provider_options;
  std::string image;
  Bytes disk;
  // The command that makes an instance a worker of this run.
  std::function<std::vector<std::string>(const provisioner::Offer&)> worker_argv;
  // What its environment holds beside: the join token, which must not be seen in a list of processes.
  std::function<Result<std::vector<std::pair<std::string, std::string>>>(const provisioner::Offer&)> worker_env;
  // Tells that an offer was rented, ended or replaced; called on the fleet's thread, must not block.
  std::function<void(std::string_view event, const std::string& offer, const std::string& detail)> record;
  // The machine of a worker has ended by itself. On the fleet's thread, must not block.
  std::function<void(WorkerId worker, const std::string& why)> machine_ended;
  bool replace_lost = true;
};

struct FleetSummary {
  std::uint64_t planned = 0, started = 0, lost = 0, replaced = 0;
  double usd = 0, usd_per_hour = 0;  // of all processes of the run; traffic included
  bool prices_known = true;          // otherwise `usd` is the least it can be
};

// Every method is thread-safe and returns at once, but for start() and stop(). Instances of the local provider die
// with this process, however it ends.
class Fleet {
 public:
  // Opens the ledger, settles what an earlier process of this run left behind, and rents every chosen offer.
  static Result<std::unique_ptr<Fleet>> start(FleetOptions options);
  ~Fleet();  // stop()

  void worker_joined(WorkerId worker, const std::string& offer);  // also when it comes back
  // It is gone for good: away for too long, or expelled. Its instance is stopped.
  void worker_lost(WorkerId worker, const std::string& reason);
  // From its heartbeat: rollouts finished and seconds spent generating since the last call.
  void worker_progress(WorkerId worker, double rollouts, double busy_s);
  // Bytes it has received and forwarded since it joined.
  void worker_traffic(WorkerId worker, Bytes received, Bytes forwarded);
  // Workers that were rented, have not ended, and never joined.
  std::size_t still_joining() const;
  FleetSummary summary() const;
  // Ends every instance (SIGTERM, a grace, SIGKILL) and books the ends. Idempotent.
  void stop();

 private:
  struct Instance {
    provisioner::Offer offer;
    provisioner::InstanceId id;
    std::int64_t ledger_row = 0;
    std::optional<WorkerId> worker;
    bool ended = false, released = false;
    Bytes received, forwarded;                    // as its worker counts
    Bytes received_unbooked, forwarded_unbooked;  // of that, not in the ledger yet
  };
  using Task = std::function<void()>;

  explicit Fleet(FleetOptions options);
  Status open_on_thread();
  void loop();
  Status rent(const provisioner::Offer& offer);
  void tick();
  void take_events();
  void instance_ended(Instance& instance, const std::string& why, bool unexpected);
  // Tells the ledger what runs and what it has sent and received.
  void book_signs();
  void update_summary();
  void close_all();

  FleetOptions options_;
  BoundedQueue<Task> queue_;
  std::thread thread_;

  // The fleet thread's own.
  SystemClock clock_;
  std::optional<provisioner::Ledger> ledger_;
  std::unique_ptr<provisioner::Provider> provider_;
  std::optional<provisioner::FleetController> controller_;
  std::map<std::string, Instance> instances_;  // by offer id
  std::uint64_t lost_ = 0, replaced_ = 0, started_ = 0;
  bool stopping_ = false;
  std::optional<Error> start_error_;
  TimePoint signs_due_{};

  mutable std::mutex mutex_;
  FleetSummary summary_;           // guarded by mutex_
  std::size_t still_joining_ = 0;  // guarded by mutex_
};

}  // namespace echoline::learner

// The closed loop that keeps the fleet at its target: decides when to rent one more and when to let one go.
#pragma once
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "base/clock.hpp"
#include "base/ids.hpp"
#include "base/units.hpp"

namespace echoline::provisioner {

struct ControllerConfig {
  double required_rollouts_per_s = 0;                     // M*
  double headroom = 0.10;                                 // of the target above M*; half of it may be used up
  double release_margin = 0.25;                           // release above (1 + margin) * that
  Duration window = std::chrono::seconds(60);             // of the throughput estimate: the last with results
  Duration sustained = std::chrono::seconds(30);          // a condition holds this long before it is acted on
  Duration start_timeout = std::chrono::seconds(300);     // an activation that has not reported by then is given up
  bool replace_lost = true;  // a lost worker is replaced at once while capacity is below the target
};

// An offer as the loop needs it.
struct FleetOffer {
  std::string offer;
  double rollouts_per_s = 0;  // predicted
  double usd_per_hour = 0;
};

struct Activate {
  std::string offer;
  std::string reason;
  bool replaces_lost = false;  // because a worker was lost, not because the estimate fell short
};
struct Release {
  WorkerId worker;
  std::string reason;
};
using FleetAction = std::variant<Activate, Release>;

// Pure: events and times in, actions out. (ECHO-2 sec. 3.4; effective capacity = sum of a_w * mu_w.)
class FleetController {
 public:
  // `standby` best first (Plan::standby).
  FleetController(ControllerConfig config, std::vector<FleetOffer> standby);

  // The measured step or broadcast time changed the requirement.
  void set_required(double rollouts_per_s) { config_.required_rollouts_per_s = rollouts_per_s; }

  // A worker runs; answers an earlier Activate of the same offer, if there was one.
  void started(WorkerId worker, const FleetOffer& offer);
  // An Activate that could not be carried out; the offer is not tried again.
  void start_failed(const std::string& offer, TimePoint now);
  // `rollouts` finished in `busy` seconds of generating (waiting for work not counted).
  void completed(WorkerId worker, double rollouts, Duration busy, TimePoint now);
  // Exited, was evicted, away for too long, or was released and is gone. An unexpected loss may be replaced at once. Until
  // then a worker counts, heard or not: whoever hears of it judges its silence, and keeps it for a while.
  void lost(WorkerId worker, TimePoint now);

  // Due actions; call at least every second or so. At most one Release, and one Activate per missing worker.
  std::vector<FleetAction> tick(TimePoint now);

  double target() const { return config_.required_rollouts_per_s * (1 + config_.headroom); }
  // The fleet is filled up to the target when it is below this. A plan is hardly above its target: without something in
  // between, one percent less than was predicted would rent a machine, and let a dearer one go for it.
  double refill_below() const { return config_.required_rollouts_per_s * (1 + config_.headroom / 2); }
  // Of the available workers, by their measured throughput (predicted until something is measured). Who says nothing
  // for a while, or is away, counts with what it last did.
  double effective_rollouts_per_s() const;
  bool available(WorkerId worker) const;
  std::optional<double> measured_rollouts_per_s(WorkerId worker) const;
  const std::vector<FleetOffer>& standby() const { return standby_; }

 private:
  struct Sample {
    TimePoint at;
    double rollouts = 0;
    double busy_s = 0;
  };
  struct Worker {
    FleetOffer offer;
    bool releasing = false;
    std::deque<Sample> samples;
  };
  struct Pending {
    FleetOffer offer;
    TimePoint since;
  };
  double pending_rollouts_per_s() const;
  void activate_until(double missing, const std::string& reason, bool replaces_lost, TimePoint now,
                      std::vector<FleetAction>& actions);
  std::optional<WorkerId> releasable() const;

  ControllerConfig config_;
  std::vector<FleetOffer> standby_;
  std::map<WorkerId, Worker> workers_;
  std::vector<Pending> pending_;
  std::optional<TimePoint> below_since_;
  std::optional<TimePoint> above_since_;
  bool loss_to_replace_ = false;
};

}  // namespace echoline::provisioner

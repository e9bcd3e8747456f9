// Writes status.json. The service calls it on the main thread.
#include "learner/run_status.hpp"

#include <unistd.h>

#include <algorithm>

#include "base/log.hpp"
#include "base/process_memory.hpp"

namespace echoline::learner {

std::pair<Version, overlay::Digest> RunStatus::newest() const {
  const std::lock_guard lock(mutex_);
  return {version_, digest_};
}

void RunStatus::set_published(Version version, const overlay::Digest& digest, std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  version_ = version;
  digest_ = digest;
  delta_bytes_ = bytes;
}

void RunStatus::set_broadcast_time(Duration broadcast_time) {
  const std::lock_guard lock(mutex_);
  broadcast_time_ = broadcast_time;
}

void RunStatus::add_step(double reward, Duration waiting_time, Duration step_time) {
  reward_ = reward;
  waiting_time_ += waiting_time;
  step_time_ += step_time;
}

void RunStatus::set_phase(const std::string& phase) {
  if (phase != phase_) log::debug("{}", phase);
  phase_ = phase;
}

void RunStatus::write(std::uint64_t step, const PolicySource* policy, const provisioner::FleetSummary& fleet,
                      const Roster& roster) {
  using nlohmann::json;
  due_at_ = clock_.now() + kWriteInterval;
  const std::optional<double> learner_usd = run_clock_.learner_usd();
  const ProcessMemory memory = process_memory();
  json status = {{"schema_version", kReportSchemaVersion},
                 {"run", config_.run.name},
                 {"pid", ::getpid()},
                 {"phase", phase_},
                 {"step", step},
                 {"steps", config_.run.steps},
                 {"publish_every", config_.staleness.publish_every},
                 {"wall_seconds", run_clock_.wall_seconds()},
                 {"reward", reward_},
                 {"alarms", record_.alarms()},
                 {"accuracy", policy != nullptr ? json(policy->accuracy()) : json::object()},
                 {"idle_fraction", step_time_ > Duration(0) ? seconds(waiting_time_) / seconds(step_time_) : 0.0},
                 {"usd", fleet.usd + learner_usd.value_or(0)},
                 {"usd_fleet", fleet.usd},
                 {"usd_learner", learner_usd ? json(*learner_usd) : json(nullptr)},
                 {"usd_per_hour", fleet.usd_per_hour + config_.learner.usd_per_hour.value_or(0)},
                 {"prices_known", fleet.prices_known && learner_usd},
                 {"account_trouble", fleet.account_trouble},
                 {"credit_usd", fleet.credit_usd ? json(*fleet.credit_usd) : json(nullptr)},
                 {"credit_hours", fleet.credit_usd && fleet.usd_per_hour > 0
                                      ? json(std::max(0.0, *fleet.credit_usd) / fleet.usd_per_hour)
                                      : json(nullptr)},
                 {"rollouts_per_s_wanted", fleet.numbers.target_rollouts_per_s},
                 {"rollouts_per_s_expected", fleet.numbers.expected_rollouts_per_s},
                 {"memory_bytes", memory.resident.count},
                 {"heap_bytes", memory.heap ? json(memory.heap->count) : json(nullptr)},
                 {"topology", roster.topology_summary()},
                 {"floods", roster.floods()},
                 {"workers", roster.status()},
                 {"nodes", roster.nodes()}};
  {
    const std::lock_guard lock(mutex_);
    status["version"] = version_.value;
    status["delta_bytes"] = delta_bytes_;
    status["t_b_seconds"] = seconds(broadcast_time_);
  }
  record_.write_status(status);
}

}  // namespace echoline::learner

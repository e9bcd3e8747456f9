// Where workers are dialled, and whether they can be reached there. A worker names its port; the host is the one it
// comes from, unless whoever issued its token has named another: nobody has this run dial whom it likes.
#include <algorithm>

#include "base/log.hpp"
#include "overlay/learner/learner_core.hpp"

namespace echoline::overlay {
namespace {

constexpr Duration kDialPause = std::chrono::seconds(1);   // between two attempts at the same target
constexpr Duration kProbePause = std::chrono::minutes(1);  // before who could not be reached is tried again

}  // namespace

Endpoint LearnerCore::reached_at(WorkerId id, const Endpoint& named, const std::string& comes_from) const {
  const auto known = state_.known.find(id);
  if (known != state_.known.end() && !known->second.host.empty()) return {known->second.host, named.port};
  return {comes_from, named.port};
}

// Whether it may be dialled now; otherwise when.
std::optional<TimePoint> LearnerCore::not_before(const Endpoint& to, TimePoint now) {
  std::erase_if(dialled_, [&](const auto& d) { return d.second + kDialPause <= now; });
  const auto [it, added] = dialled_.try_emplace(to_text(to), now);
  return added ? std::nullopt : std::optional(it->second + kDialPause);
}

// The learner dials it back, now or as soon as may be.
void LearnerCore::probe(Worker& worker, TimePoint now) {
  const WorkerId id = worker.view.info.id;
  if (worker.dial_back) return;
  probes_.erase({worker.probe_at, id});
  worker.probe_at = not_before(worker.view.info.data, now).value_or(kNever);
  if (worker.probe_at != kNever) {
    probes_.insert({worker.probe_at, id});
    return;
  }
  worker.dialled_back_at = now;
  worker.dial_back = dial(worker.view.info.data, act::Service::kData, id);
  dial_backs_[*worker.dial_back] = id;
}

void LearnerCore::run_probes(TimePoint now) {
  while (!probes_.empty() && probes_.begin()->first <= now) {
    const WorkerId id = probes_.begin()->second;
    probes_.erase(probes_.begin());
    const auto worker = workers_.find(id);
    if (worker == workers_.end()) continue;
    worker->second.probe_at = kNever;
    probe(worker->second, now);
  }
}

// What was found out; `why` it cannot be reached, or nothing.
void LearnerCore::probed(WorkerId id, const std::optional<std::string>& why, TimePoint now) {
  const auto it = workers_.find(id);
  if (it == workers_.end()) return;
  Worker& worker = it->second;
  worker.dial_back.reset();
  const bool was = std::exchange(worker.reachable, !why);
  if (why) {
    worker.probe_at = now + kProbePause;
    probes_.insert({worker.probe_at, id});
  }
  if (was == worker.reachable) return;
  if (why) {
    const std::string text = fmt::format("worker {} cannot be reached at {}: {}; it will not forward", id,
                                         to_text(worker.view.info.data), *why);
    log::info("{}", text);
    send_control(worker.control, Notice{text + " (--bind, --advertise, or `echoline token --reach` say where it is)"},
                 now);
  }
  move_back(id, now);
}

}  // namespace echoline::overlay

// The processes of a fleet's hosts. Private to fleet*.cpp.
#pragma once
#include "sim/fleet.hpp"

namespace echoline::sim {

// Triggers rare but legal event orders. A site is a named place in a core where such an order can begin. The seed
// activates a quarter of the sites, and an active site fires a quarter of the time.
class Fleet::FaultSites final : public overlay::FaultPoints {
 public:
  explicit FaultSites(std::uint64_t seed) : seed_(seed), random_(seed, /*stream=*/4) {}
  bool fire(std::string_view site) override {
    if (stopped) return false;
    std::uint64_t site_hash = seed_;
    for (const char c : site) site_hash = mix64(site_hash ^ static_cast<unsigned char>(c));
    return site_hash % 4 == 0 && random_.below(4) == 0;
  }
  bool stopped = false;

 private:
  std::uint64_t seed_;
  Random random_;
};

// A process that runs a core of type C and passes its actions to a function.
template <class C>
class FleetProcess final : public Process {
 public:
  using OnAction = std::function<void(C&, overlay::Action&&)>;
  template <class Config>
  FleetProcess(Config config, OnAction on_action) : core_(std::move(config)), on_action_(std::move(on_action)) {}
  C& core() override { return core_; }
  void on_action(overlay::Action&& action, TimePoint) override { on_action_(core_, std::move(action)); }

 private:
  C core_;
  OnAction on_action_;
};

// The host's core; null if the host runs no process, or one with another kind of core.
template <class C>
C* core_on(const World& world, HostId host) {
  Process* process = world.process(host);
  return process ? dynamic_cast<C*>(&process->core()) : nullptr;
}

}  // namespace echoline::sim

// The adapters (LoRA) that an inference server has, one for each of the newest policies. Pure. Private to
// worker/engines/.
#pragma once
#include <algorithm>
#include <deque>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/ids.hpp"
#include "model/adapter.hpp"
#include "worker/engines/protocol.hpp"

namespace echoline::worker {

// Why the server cannot apply the adapter; empty if it can.
inline std::string why_unfit(const AdapterLimits& limits, const model::AdapterConfig& adapter) {
  if (limits.rank && *limits.rank < adapter.rank)
    return fmt::format("it takes adapters up to rank {}, and this run's has rank {}", *limits.rank, adapter.rank);
  if (limits.modules)
    for (const std::string& target : adapter.targets)
      if (std::ranges::find(*limits.modules, target) == limits.modules->end())
        return fmt::format("it applies adapters to {}, and this run's has {} as well", fmt::join(*limits.modules, ", "),
                           target);
  return {};
}

// Responses may finish under the adapter with which they began, so a server has several at a time. The number is
// bounded by the server's own limit.
class ServedAdapters {
 public:
  static constexpr std::size_t kCountMax = 8;  // adapters at a time, whatever the server allows
  struct Adapter {
    std::string name;  // at the server; also that of the adapter's subfolder (PolicyFolder::write_adapter())
    Version version;
  };

  // `server_limit`: adapters that the server computes in one batch. With more, requests would wait for each other.
  void set_limit(std::size_t server_limit) { limit_ = std::clamp<std::size_t>(server_limit, 1, kCountMax); }
  std::size_t limit() const { return limit_; }

  bool empty() const { return adapters_.empty(); }
  // The adapter of the newest policy; there must be one.
  const Adapter& newest() const { return adapters_.back(); }
  // Null if requests can no longer name this adapter.
  const Adapter* find(const std::string& name) const {
    const auto it =
        std::find_if(adapters_.begin(), adapters_.end(), [&](const Adapter& adapter) { return adapter.name == name; });
    return it == adapters_.end() ? nullptr : &*it;
  }

  // Adds the adapter of a newer policy, which the server has loaded.
  void add(Adapter adapter) {
    std::erase(abandoned_, adapter.name);
    adapters_.push_back(std::move(adapter));
  }
  // For a newer policy with the same weights: the newest adapter is the adapter of `version`, too.
  void set_newest_version(Version version) { adapters_.back().version = version; }

  // Called before the adapter `name` is loaded. Gives up the adapters that are neither the newest nor in `used`, and
  // then the oldest ones until there is room for one more. Returns the names of all adapters that the server should
  // unload.
  std::vector<std::string> make_room(const std::string& name, const std::set<std::string>& used) {
    // Until add(), the server may have the new adapter or not, so it counts as abandoned.
    std::vector<std::string> names_to_unload = std::exchange(abandoned_, {name});
    const auto give_up = [&](auto it) {
      names_to_unload.push_back(it->name);
      return adapters_.erase(it);
    };
    for (auto it = adapters_.begin(); it != adapters_.end();) {
      const bool is_newest = it + 1 == adapters_.end();
      if (is_newest || used.contains(it->name))
        ++it;
      else
        it = give_up(it);
    }
    while (adapters_.size() >= limit_) give_up(adapters_.begin());
    return names_to_unload;
  }
  // Called when the server's state is unknown: no request may name an adapter, and the server may still have all of
  // them.
  void abandon_all() {
    for (Adapter& adapter : adapters_) abandoned_.push_back(std::move(adapter.name));
    adapters_.clear();
  }

 private:
  std::size_t limit_ = 1;
  std::deque<Adapter> adapters_;        // oldest first
  std::vector<std::string> abandoned_;  // adapters that the server may still have, and that no request may name
};

}  // namespace echoline::worker

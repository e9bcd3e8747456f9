// The section `store` of a run file: where the learner keeps every policy version, and for how long.
#pragma once
#include <cstdint>
#include <string>

#include "base/units.hpp"
#include "store/object_store.hpp"

namespace echoline {
class ConfigSection;
}

namespace echoline::store {

struct RetentionRules {
  std::uint32_t deltas_kept = 100;
  std::uint32_t anchors_kept = 10;
};

struct StoreSettings {
  StoreAddress address;             // an empty url: no store
  std::uint32_t anchor_every = 50;  // deltas from one whole snapshot to the next
  RetentionRules retention;
  Duration lease = std::chrono::seconds(30);
  Bytes backlog_max{50'000'000'000};  // of policies on the learner's disk that wait for their upload
  bool is_used() const { return !address.url.empty(); }
};

void read(ConfigSection section, StoreSettings& settings);

}  // namespace echoline::store

// The way back: a delta from every policy to the one before it, so that a policy which a worker may still have can be
// restored from the newest, and what that worker missed be encoded as one delta.
#pragma once
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "delta/patch.hpp"

namespace echoline::learner {

struct Policy {
  Version version;
  delta::Digest digest{};  // of `state`
  delta::SharedState state;
};

// One thread.
class WayBack {
 public:
  explicit WayBack(delta::EncodeOptions options) : options_(std::move(options)) {}
  // `older` was published just before `newer`. Forgets what is older than fits in `bytes_max` together with this step,
  // and everything where it did not lead to `older`. kExhausted: this step alone does not fit.
  Status add(const Policy& older, const Policy& newer, std::uint64_t bytes_max);
  void clear() { steps_.clear(); }
  std::optional<Version> oldest() const;  // that can be restored
  // The policy `to` as it was, its digest verified; takes as much memory as `newest`. kNotFound: no way leads there.
  Result<Policy> restore(Version to, const Policy& newest) const;

 private:
  struct Step {
    Version from, to;
    delta::Digest digest{};  // of `to`
    std::vector<std::byte> patch;
  };
  delta::EncodeOptions options_;
  std::deque<Step> steps_;  // the newest first
};

}  // namespace echoline::learner

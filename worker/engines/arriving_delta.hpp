// A delta that is resolved while it arrives, for engines that hold a policy. Private to worker/.
#pragma once
#include <functional>
#include <optional>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "delta/patch.hpp"
#include "overlay/types.hpp"

namespace echoline::worker {

// One thread.
class ArrivingDelta {
 public:
  using Begin = std::function<delta::IncomingDelta()>;  // on the policy that is installed

  // Resolves what has come of a delta on the `installed` version; anything else is not looked at.
  void add(const overlay::PublicationPart& part, std::optional<Version> installed, const Begin& begin);
  // Resolves the rest of `publication` and applies it (delta::IncomingDelta::apply). kStale: the delta needs another
  // base; kCorrupt: its bytes are wrong, or lead to another policy than was announced. What came of others is
  // forgotten.
  Result<std::vector<delta::TensorWrite>> finish(const overlay::Publication& publication,
                                                 std::optional<Version> installed, const Begin& begin);
  void forget() { incoming_.reset(); }

 private:
  struct Incoming {
    overlay::PublicationId id;
    delta::IncomingDelta delta;
  };
  std::optional<Incoming> incoming_;
};

}  // namespace echoline::worker

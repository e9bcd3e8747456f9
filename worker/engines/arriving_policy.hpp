// A policy that is decoded while it arrives, for engines that hold one. Private to worker/.
#pragma once
#include <functional>
#include <optional>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "delta/patch.hpp"
#include "overlay/types.hpp"

namespace echoline::worker {

// A snapshot may arrive while deltas come and go beside it. One thread.
class ArrivingPolicy {
 public:
  using BeginDelta = std::function<delta::IncomingDelta()>;  // on the policy that is installed
  explicit ArrivingPolicy(BeginDelta begin_delta, const delta::DecodeOptions& options = {})
      : begin_delta_(std::move(begin_delta)), options_(options) {}

  // Decodes what has come of a snapshot, or of a delta on the `installed` version; of anything else nothing. Of each
  // kind, one.
  void add(const overlay::PublicationPart& part, std::optional<Version> installed);
  // These decode the rest of `publication`. kCorrupt: its bytes are wrong, or lead to another policy than was
  // announced. What came of others is forgotten, but for a newer snapshot where a delta is applied.
  Result<delta::OwnedState> snapshot(const overlay::Publication& publication);
  // And applies it (delta::IncomingDelta::apply). kStale: the delta needs another base.
  Result<std::vector<delta::TensorWrite>> apply_delta(const overlay::Publication& publication,
                                                      std::optional<Version> installed);

 private:
  template <class Patch>
  struct Incoming {
    overlay::PublicationId id;
    Version version;
    Patch patch;
  };

  BeginDelta begin_delta_;
  delta::DecodeOptions options_;
  std::optional<Incoming<delta::IncomingSnapshot>> snapshot_;
  std::optional<Incoming<delta::IncomingDelta>> delta_;
};

}  // namespace echoline::worker

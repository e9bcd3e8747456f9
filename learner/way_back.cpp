#include "learner/way_back.hpp"

#include <algorithm>

namespace echoline::learner {
Status WayBack::add(const Policy& older, const Policy& newer, std::uint64_t bytes_max) {
  if (!steps_.empty() && steps_.front().from != older.version) steps_.clear();
  Step step{newer.version, older.version, older.digest, {}};
  const auto keep = [&](std::span<const std::byte> bytes) {
    if (step.patch.size() + bytes.size() > bytes_max)
      return Status(fail(Code::kExhausted, "encode the way back", "version {}: one step takes more than {} bytes",
                         older.version, bytes_max));
    step.patch.insert(step.patch.end(), bytes.begin(), bytes.end());
    return ok();
  };
  delta::EncodeOptions options = options_;
  options.base = newer.digest;
  ECHO_TRY(delta::write_delta(newer.state->view(), older.state->view(), keep, options));
  step.patch.shrink_to_fit();
  steps_.push_front(std::move(step));
  std::uint64_t bytes = 0;
  const auto beyond = std::find_if(steps_.begin(), steps_.end(),
                                   [&](const Step& s) { return (bytes += s.patch.size()) > bytes_max; });
  steps_.erase(beyond, steps_.end());
  return ok();
}

std::optional<Version> WayBack::oldest() const {
  if (steps_.empty()) return std::nullopt;
  return steps_.back().to;
}

Result<Policy> WayBack::restore(Version to, const Policy& newest) const {
  constexpr std::string_view op = "restore a policy";
  const auto last = std::find_if(steps_.begin(), steps_.end(), [&](const Step& s) { return s.to == to; });
  if (last == steps_.end() || steps_.front().from != newest.version)
    return fail(Code::kNotFound, op, "no way leads back from version {} to {}", newest.version, to);
  std::vector<std::span<const std::byte>> patches;
  for (auto step = steps_.begin(); step <= last; ++step) patches.push_back(step->patch);
  std::vector<std::byte> patch;
  const auto keep = [&](std::span<const std::byte> bytes) {
    patch.insert(patch.end(), bytes.begin(), bytes.end());
    return ok();
  };
  ECHO_TRY(delta::fold_deltas(patches, keep, nullptr, options_));
  ECHO_ASSIGN(delta::OwnedState state, delta::copy_of(newest.state->view()));
  delta::DecodeOptions decoding;
  decoding.threads = options_.threads;
  ECHO_TRY(delta::apply_delta(patch, state, decoding));
  return Policy{to, last->digest, delta::share(std::move(state))};
}

}  // namespace echoline::learner

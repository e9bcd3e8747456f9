// A sequence of small policies, and their patches, for tests of the store.
#pragma once
#include <map>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "delta/digest.hpp"
#include "delta/patch.hpp"

namespace echoline::store {

// Version v is reached from version v - 1 by a few changed weights. Other seeds give other policies.
class Policies {
 public:
  explicit Policies(std::uint64_t seed = 1, std::size_t elements = 256) : seed_(seed), elements_(elements) {}

  // `branch`: versions after a return to an earlier version differ.
  const delta::OwnedState& state(std::uint64_t version, std::uint64_t branch = 0) {
    const auto found = states_.find({branch, version});
    if (found != states_.end()) return found->second;
    delta::StateView layout;
    for (const char* name : {"a.weight", "b.weight"})
      layout.push_back(
          {.name = name, .dtype = delta::DType::kBF16, .shape = {static_cast<std::int64_t>(elements_)}, .bytes = {}});
    delta::OwnedState state = *delta::OwnedState::empty_like(layout);
    std::mt19937_64 random(seed_);
    for (std::size_t tensor = 0; tensor < state.size(); ++tensor) {
      const auto bytes = state.mutable_bytes(tensor);
      for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
    }
    for (std::uint64_t step = 1; step <= version; ++step) {
      std::mt19937_64 changes(seed_ * 1'000'003 + step + (step > fork_ ? branch << 32 : 0));
      for (int change = 0; change < 3; ++change) {
        const auto bytes = state.mutable_bytes(changes() % state.size());
        bytes[changes() % bytes.size()] ^= static_cast<std::byte>(1 + changes() % 255);
      }
    }
    state.seal();
    return states_.emplace(std::pair(branch, version), std::move(state)).first->second;
  }
  delta::Digest digest(std::uint64_t version, std::uint64_t branch = 0) {
    return *delta::digest_state(state(version, branch).view());
  }
  // A branch differs from branch 0 in the versions after this one.
  void set_fork(std::uint64_t version) { fork_ = version; }

  std::vector<std::byte> delta(std::uint64_t from, std::uint64_t to, std::uint64_t branch = 0) {
    std::vector<std::byte> patch;
    const auto written = delta::write_delta(state(from, branch).view(), state(to, branch).view(), append_to(patch));
    ECHO_CHECK(written.has_value(), "{}", written.error().message());
    return patch;
  }
  std::vector<std::byte> snapshot(std::uint64_t version, std::uint64_t branch = 0) {
    std::vector<std::byte> patch;
    const auto written = delta::write_snapshot(state(version, branch).view(), append_to(patch));
    ECHO_CHECK(written.has_value(), "{}", written.error().message());
    return patch;
  }

 private:
  static delta::PatchSink append_to(std::vector<std::byte>& patch) {
    return [&patch](std::span<const std::byte> bytes) {
      patch.insert(patch.end(), bytes.begin(), bytes.end());
      return ok();
    };
  }
  const std::uint64_t seed_;
  const std::size_t elements_;
  std::uint64_t fork_ = 0;
  std::map<std::pair<std::uint64_t, std::uint64_t>, delta::OwnedState> states_;
};

}  // namespace echoline::store

// Helpers of the built-in adapters: options and seeded permutations. Private to data_plane/.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "base/config.hpp"
#include "data_plane/adapters/adapter.hpp"

namespace echoline::data_plane {

// "'x'; did you mean 'y'?; known: a, b, y". The suggestion is left out if no known name is near.
std::string unknown_name(std::string_view name, std::span<const std::string> known);

// Position `index` of a pseudo-random permutation of [0, size) chosen by `key`; size > 0, index < size.
// A four-round Feistel network over the next even power of two, repeated until the result is below `size`. It needs no
// table.
std::uint64_t permuted(std::uint64_t index, std::uint64_t size, std::uint64_t key);

// Position `index` of an endless stream that goes through [0, size) again and again, each round in a different order.
std::uint64_t shuffled_cycle(std::uint64_t index, std::uint64_t size, std::uint64_t key);

// A built-in adapter. `read_options` is the only reader of its options. Run files, make() and the documentation of the
// keys use it.
struct BuiltIn {
  const char* name;
  const char* meaning;
  void (*read_options)(ConfigSection options);
  Result<std::unique_ptr<Adapter>> (*make)(std::string_view options_json, std::uint64_t seed, AdapterUse use);
  bool many_turns = false;
};
Result<std::unique_ptr<Adapter>> make_several(std::string_view options_json, std::uint64_t seed, AdapterUse use);
extern const BuiltIn kArithmetic, kCode, kCountdown, kDapoMath, kGsm8k, kGuess, kJsonl, kLibrary, kMath, kNemoGym,
    kOpenEnv, kPoker, kProcess;

template <class Options>
Result<Options> options_from_json(std::string_view adapter, std::string_view json, AdapterUse use) {
  // The learner writes a worker's options as JSON. They may contain whole files, so they may be larger than the limit
  // for a user's configuration.
  const bool written_by_learner = use == AdapterUse::kScoring && !json.empty();
  const std::string name = fmt::format("options of {}", adapter);
  ECHO_ASSIGN(ConfigFile file, written_by_learner ? ConfigFile::parse_json(json, name) : ConfigFile::parse(json, name));
  Options options;
  options.read(file.root(), use);
  ECHO_TRY(file.finish());
  return options;
}

}  // namespace echoline::data_plane

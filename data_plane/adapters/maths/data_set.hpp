// An adapter over rows of JSON Lines: a file to train on, problems held out, a rule, and what a response is worth.
// Private to data_plane/adapters/.
#pragma once
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "data_plane/adapters/adapter_config.hpp"
#include "data_plane/adapters/maths/reward.hpp"
#include "data_plane/adapters/maths/rows.hpp"
#include "data_plane/adapters/maths/rules.hpp"

namespace echoline::data_plane::maths {

// Held-out problems are kept in memory.
inline constexpr std::size_t kHeldOutMax = 100'000, kHeldOutBytesMax = 256u << 20;

struct DataSetOptions {
  std::filesystem::path train;
  std::optional<std::filesystem::path> held_out;
  double held_out_fraction = 0.02;
  Rule rule = Rule::kMathReward;
  RewardWeights reward;

  // The keys `train`, `held_out` and `held_out_fraction`, or where a set comes in two files the keys `train` and
  // `held_out_key`; then `reward`. Files are required for problems only.
  void read_files(ConfigSection& section, AdapterUse use, const char* train_meaning);
  void read_two_files(ConfigSection& section, AdapterUse use, const char* train_meaning, const char* held_out_key,
                      const char* held_out_meaning);
  void read_reward(ConfigSection& section);
};

// Problems have ids "`name`/train/17" and "`name`/test/17", by the line of their file. `reader` is asked for every row,
// and each must be one that some response gets right by the rule. kInvalid about a row as `path:line: ...`.
Result<std::unique_ptr<Adapter>> make_data_set(std::string name, const DataSetOptions& options, const RowReader& reader,
                                               std::uint64_t seed, AdapterUse use);

// The shortest response that gives `answer` in the form the rule wants.
std::string stated(Rule rule, std::string_view answer);

}  // namespace echoline::data_plane::maths

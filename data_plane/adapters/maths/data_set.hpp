// An adapter over a JSON Lines file: training problems, held-out problems, a grading rule and a reward. Private to
// data_plane/adapters/.
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

// Limits, because held-out problems are kept in memory: their number and bytes.
inline constexpr std::size_t kHeldOutMax = 100'000, kHeldOutBytesMax = 256u << 20;

struct DataSetOptions {
  std::filesystem::path train;
  std::optional<std::filesystem::path> held_out;
  double held_out_fraction = 0.02;
  Rule rule = Rule::kMathReward;
  RewardWeights reward;

  // Reads the keys `train`, `held_out` and `held_out_fraction`, and then `reward`. For sets that come in two files, the
  // keys are `train` and `held_out_key`. Files are required for problems only.
  void read_files(ConfigSection& section, AdapterUse use, const char* train_meaning);
  void read_two_files(ConfigSection& section, AdapterUse use, const char* train_meaning, const char* held_out_key,
                      const char* held_out_meaning);
  void read_reward(ConfigSection& section);
};

// Problem ids are "`name`/train/17" and "`name`/test/17", with the line number in the file. `reader` reads every row;
// each row must have an answer that the rule accepts. kInvalid about a row as `path:line: ...`.
Result<std::unique_ptr<Adapter>> make_data_set(std::string name, const DataSetOptions& options, const RowReader& reader,
                                               std::uint64_t seed, AdapterUse use);

// The shortest response that gives `answer` in the rule's form.
std::string shortest_response(Rule rule, std::string_view answer);

}  // namespace echoline::data_plane::maths

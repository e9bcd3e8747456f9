// The seam to a task: where problems come from and what a response is worth.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.hpp"
#include "data_plane/trajectory.hpp"

namespace echoline {
class ConfigSection;
}

namespace echoline::data_plane {

struct Score {
  double reward = 0;
  std::map<std::string, double> components;  // named parts, for reports
  bool correct = false;                      // the verdict an evaluation counts
};

// Every method is const, deterministic and safe to call from several threads at once.
class Adapter {
 public:
  virtual ~Adapter() = default;
  virtual std::string_view name() const = 0;

  // Training problem `index`: a function of (seed, index) only; indices never end (the set is cycled, shuffled anew
  // each time round). kUnavailable on an adapter made for scoring only.
  virtual Result<Problem> problem(std::uint64_t index) const = 0;

  // Held-out problems, the same for the same seed, none of which problem() ever returns. Empty for scoring only.
  virtual std::vector<Problem> evaluation() const = 0;

  // Grades a response (text without the end-of-text token) from the problem alone; needs no data file.
  virtual Score score(const Problem& problem, std::string_view response) const = 0;

  // Whether score() gives the same everywhere, in microseconds and at most linear time: the learner then scores what
  // workers hand in again and believes nobody.
  virtual bool deterministic() const { return true; }

  // A response worth imitating, for a supervised warm start; absent when the task has none for this problem.
  virtual std::optional<std::string> demonstration(const Problem& problem) const = 0;
};

// kProblems: the learner's side, data files are read. kScoring: the worker's side, no data file is touched.
enum class AdapterUse { kProblems, kScoring };

// Reads the section `options` of the run file's task for a built-in adapter, noting there all that is wrong with it, and
// returns what makes the adapter. kInvalid on an unknown name, with the nearest known one and the list.
Result<std::string> read_adapter_options(std::string_view name, ConfigSection& task);

// Makes a built-in adapter from its options (a JSON object; "" means {}). kInvalid with all that is wrong with them.
Result<std::unique_ptr<Adapter>> make_adapter(std::string_view name, std::string_view config_json, std::uint64_t seed,
                                              AdapterUse use = AdapterUse::kProblems);

// Built-in adapters, in alphabetical order.
std::vector<std::string> adapter_names();

}  // namespace echoline::data_plane

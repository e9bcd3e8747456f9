// What answers to held-out problems are worth: accuracy with an interval, pass@k, lengths; and the asking of a server. Whoever answers,
// they are scored by the task. Used by `echoline evaluate`.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/text_server.hpp"
#include "data_plane/adapters/adapter.hpp"
#include "learner/run_config.hpp"
#include "model/phrasing.hpp"

namespace echoline::learner {

struct Interval {
  double low = 0, high = 0;
};

// 95 % interval for a share that was found in `trials` independent ones, which need not be whole. Source: Wilson 1927.
Interval wilson_interval(double share, double trials);

// Probability that at least one of k draws without putting back is among the `correct` of n; k <= n. Source: Chen et al. 2021,
// arXiv:2107.03374.
double pass_at(std::uint64_t n, std::uint64_t correct, std::uint64_t k);

// Collects answers, `samples` to each problem, in any order.
class HeldOut {
 public:
  // Both outlive it.
  HeldOut(const data_plane::Adapter& adapter, const std::vector<schema::Problem>& problems, std::uint32_t samples);
  void answered(std::size_t problem, std::string_view text, bool finished, std::optional<std::int64_t> tokens);
  // It could not be put to the model, or was refused: counts as answered wrongly, and is counted.
  void refused(std::size_t problem, const std::string& why);

  std::uint64_t answers() const { return answers_; }
  // Accuracy is the mean over all answers; its interval takes answers to one problem for as alike as they are. Fields as in
  // docs/engines.md.
  nlohmann::json result() const;

 private:
  const data_plane::Adapter& adapter_;
  const std::vector<schema::Problem>& problems_;
  const std::uint32_t samples_;
  std::vector<std::uint64_t> correct_;  // by problem
  std::vector<double> lengths_;         // tokens, of those that are known
  std::map<std::string, std::uint64_t> refused_;
  std::uint64_t answers_ = 0, unfinished_ = 0;
  double reward_ = 0;
};

struct HeldOutQuestions {
  std::uint32_t samples = 1;
  double temperature = 0, top_p = 1;
  std::int64_t tokens_max = 64;
  std::uint64_t seed = 0;  // with temperature
  std::function<bool()> interrupted = {};
  std::function<void(std::uint64_t answers)> progress = {};  // hears of it a few times a second
};

// The seed of an answer: another one for each.
std::uint64_t seed_of(const HeldOutQuestions& questions, std::size_t problem, std::uint32_t sample);

// Asks a server all problems: as chat messages in the style of the run's task, or, where `phrasing` is given, as the text that it
// makes. A response ends behind the first of the run's stop strings, here, since servers leave them out. Ends with the first error that is not
// a single question's: kUnavailable, kInvalid and so on, as TextServer says; kCancelled when interrupted.
Status ask_server(TextServer& server, const RunConfig& config, const model::Phrasing* phrasing, const std::vector<schema::Problem>& problems,
                  const HeldOutQuestions& questions, HeldOut& held_out);

// `text` up to the end of the first of `stops` that is complete in it; whether there is one.
std::pair<std::string_view, bool> up_to_stop(std::string_view text, const std::vector<std::string>& stops);

}  // namespace echoline::learner

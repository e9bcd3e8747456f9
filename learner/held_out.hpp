// What answers to held-out problems are worth: accuracy with an interval, pass@k, lengths; and the asking of a server.
// Whoever answers, they are scored by the task. Used by `echoline evaluate`.
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
#include "learner/by_task.hpp"
#include "learner/run_config.hpp"
#include "model/phrasing.hpp"

namespace echoline::learner {

// A problem in the text that the run has around it, as a conversation.
std::vector<ChatMessage> task_messages(const model::PromptStyle& style, const schema::Problem& problem);

struct Interval {
  double low = 0, high = 0;
};

// 95 % interval for a share that was found in `trials` independent ones, which need not be whole. Source: Wilson 1927.
Interval wilson_interval(double share, double trials);

// Probability that at least one of k draws without putting back is among the `correct` of n; k <= n. Source: Chen et
// al. 2021, arXiv:2107.03374.
double pass_at(std::uint64_t n, std::uint64_t correct, std::uint64_t k);

// Collects answers, `samples` to each problem, in any order. An answer has one turn, or as many as its task.
class HeldOut {
 public:
  // Both outlive it. Episodes begin with seeds that follow from `seed`.
  HeldOut(const data_plane::Adapter& adapter, const std::vector<schema::Problem>& problems, std::uint32_t samples,
          std::uint64_t seed);
  // The next turn of answer `id` (< problems × samples; id / samples is its problem). What the model is told next, or
  // nothing: that was the last turn. An error is the task's, not the model's.
  Result<std::optional<Told>> answered(std::uint64_t id, std::string_view text, bool finished,
                                       std::optional<std::int64_t> tokens);
  // There is no room for the turn that comes next: the answer ends here.
  void cut(std::uint64_t id);
  // It could not be put to the model, or was refused: counts as answered wrongly, and is counted.
  void refused(std::uint64_t id, const std::string& why);

  std::uint64_t answers() const { return answers_; }
  // Accuracy is the mean over all answers; its interval takes answers to one problem for as alike as they are. Fields
  // as in docs/how-to/evaluate-a-policy.md.
  nlohmann::json result() const;

 private:
  struct Answer {
    std::unique_ptr<data_plane::Episode> episode;
    data_plane::Score score;
    std::optional<std::int64_t> tokens = 0;  // absent: not known of every turn
    std::size_t turns = 0;
    bool finished = true;
  };
  void end(std::uint64_t id, const Answer& answer);

  const data_plane::Adapter& adapter_;
  const std::vector<schema::Problem>& problems_;
  const std::uint32_t samples_;
  const std::uint64_t seed_;
  std::map<std::uint64_t, Answer> begun_;
  std::vector<std::uint64_t> correct_;  // by problem
  std::vector<double> lengths_;         // tokens, of those that are known
  std::map<std::string, std::uint64_t> refused_;
  const bool several_;  // tasks
  ByTask by_task_;
  std::uint64_t answers_ = 0, unfinished_ = 0;
  double reward_ = 0;
  std::map<std::string, double> components_;  // sums
};

struct HeldOutQuestions {
  std::uint32_t samples = 1;
  double temperature = 0, top_p = 1;
  std::int64_t tokens_max = 64;      // of all turns, with what is told between them
  std::int64_t turn_tokens_max = 0;  // of one of them; 0: what the others leave
  std::uint64_t seed = 0;            // of the sampling, and of what happens in the tasks
  std::function<bool()> interrupted = {};
  std::function<void(std::uint64_t answers)> progress = {};  // hears of it a few times a second
};

// The seed of a turn of an answer: another one for each.
std::uint64_t seed_of(const HeldOutQuestions& questions, std::uint64_t id, std::size_t turn);

// Asks a server all problems: as chat messages in the style of the run's task, or, where `phrasing` is given, as the
// text that it makes (kInvalid where the task has further turns). A response ends behind the first of the run's stop
// strings, here, since servers leave them out. Ends with the first error that is not a single question's: kUnavailable,
// kInvalid and so on, as TextServer says; kCancelled when interrupted.
Status ask_server(TextServer& server, const RunConfig& config, const model::Phrasing* phrasing,
                  const std::vector<schema::Problem>& problems, const HeldOutQuestions& questions, HeldOut& held_out);

// `text` up to the end of the first of `stops` that is complete in it; whether there is one.
std::pair<std::string_view, bool> up_to_stop(std::string_view text, const std::vector<std::string>& stops);

}  // namespace echoline::learner

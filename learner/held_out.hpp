// Scores of responses to held-out problems: accuracy with an interval, pass@k, lengths. Also asks a server for
// responses. The task scores the responses of every source alike. Used by `echoline evaluate`.
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
#include "learner/task_figures.hpp"
#include "model/phrasing.hpp"

namespace echoline::learner {

// The problem as a conversation, with the run's text around it.
std::vector<ChatMessage> task_messages(const model::PromptStyle& style, const schema::Problem& problem);

struct Interval {
  double low = 0, high = 0;
};

// 95 % interval for a fraction observed in `trials` independent trials, which may be fractional. Source: Wilson 1927.
Interval wilson_interval(double share, double trials);

// pass@k: the probability that at least one of k responses, drawn from n without replacement, is one of the `correct`
// ones; k <= n. Source: Chen et al. 2021, arXiv:2107.03374.
double pass_at(std::uint64_t n, std::uint64_t correct, std::uint64_t k);

// Collects and scores `samples` responses to each problem, in any order. The task decides how many turns a response
// has.
class HeldOut {
 public:
  // The adapter and the problems must outlive it. `seed` determines the seeds of the episodes.
  HeldOut(const data_plane::Adapter& adapter, const std::vector<schema::Problem>& problems, std::uint32_t samples,
          std::uint64_t seed);
  // Takes the next turn of response `id` (< problems × samples; id / samples is the index of its problem). `finished`:
  // the turn was not cut. `tokens`: its length; absent if unknown. Returns the task's next text for the model; absent
  // after the last turn. An error means that the task failed, not the model.
  Result<std::optional<PolicyInput>> submit_turn(std::uint64_t id, std::string_view text, bool finished,
                                                 std::optional<std::int64_t> tokens);
  // Ends a response that has no room for its next turn.
  void end_early(std::uint64_t id);
  // Counts a wrong response and a refusal, because the problem could not be put to the model. `why` is reported.
  void record_refusal(std::uint64_t id, const std::string& why);

  std::uint64_t answers() const { return answers_; }
  // Accuracy is the mean over all responses. Its interval accounts for the correlation of responses to one problem.
  // Fields as in docs/how-to/evaluate-a-policy.md.
  nlohmann::json result() const;

 private:
  struct Answer {
    std::unique_ptr<data_plane::Episode> episode;
    data_plane::Score score;
    std::optional<std::int64_t> tokens = 0;  // of all turns; absent if one turn's number is unknown
    std::size_t turns = 0;
    bool finished = true;  // false: the last turn was cut
  };
  void record_answer(std::uint64_t id, const Answer& answer);

  const data_plane::Adapter& adapter_;
  const std::vector<schema::Problem>& problems_;
  const std::uint32_t samples_;
  const std::uint64_t seed_;
  std::map<std::uint64_t, Answer> open_answers_;  // responses with further turns, by id
  std::vector<std::uint64_t> correct_by_problem_;
  std::vector<double> lengths_tokens_;            // of responses whose length is known
  std::map<std::string, std::uint64_t> refused_;  // responses by reason
  const bool has_several_tasks_;
  TaskFigures by_task_;
  std::uint64_t answers_ = 0, unfinished_ = 0;
  double reward_sum_ = 0;
  std::map<std::string, double> component_sums_;
};

// How a server is asked the held-out problems.
struct HeldOutQuestions {
  std::uint32_t samples = 1;
  double temperature = 0, top_p = 1;
  std::int64_t tokens_max = 64;      // of all turns, with the task's texts between them
  std::int64_t turn_tokens_max = 0;  // of one turn; 0: the rest of tokens_max
  std::uint64_t seed = 0;            // for sampling and for tasks that are random
  bool sends_seeds = false;          // sends a seed with every question; servers may then sample more slowly
  std::function<bool()> interrupted = {};
  std::function<void(std::uint64_t answers)> progress = {};  // called a few times a second
};

// Returns the seed of one turn of a response. Every turn has another seed.
std::uint64_t seed_of(const HeldOutQuestions& questions, std::uint64_t id, std::size_t turn);

// Asks a server all problems. Without `phrasing`, it sends them as chat messages in the style of the run's task.
// With it, it sends the text that `phrasing` makes (kInvalid if the task has further turns). Stop strings are applied
// here, because servers omit them from responses. Ends with the first error that does not concern a single question:
// kUnavailable, kInvalid and others as in TextServerClient; kCancelled when interrupted.
Status ask_server(TextServerClient& server, const RunConfig& config, const model::Phrasing* phrasing,
                  const std::vector<schema::Problem>& problems, const HeldOutQuestions& questions, HeldOut& held_out);

// Returns `text` up to the end of its first complete stop string, and whether it contains one.
std::pair<std::string_view, bool> up_to_stop(std::string_view text, const std::vector<std::string>& stops);

}  // namespace echoline::learner

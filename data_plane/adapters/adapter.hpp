// The interface of a task: it supplies problems and observations, and scores responses.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/policy_input.hpp"
#include "base/result.hpp"
#include "data_plane/trajectory.hpp"

namespace echoline {
class ConfigSection;
}

namespace echoline::data_plane {

// The worth of a response or of an episode.
struct Score {
  double reward = 0;                         // finite
  std::map<std::string, double> components;  // named parts, for reports
  bool correct = false;                      // the verdict, which evaluations count
  // A time limit was reached: more time or a faster machine may raise the score, but never lower it.
  bool late = false;
};

// Adds the rewards and components of a step to its episode's score. The verdict becomes that of `step`; `late` stays
// set once any step was late.
void add(Score& episode, const Score& step);

inline constexpr std::size_t kTurnsMax = 1024;  // policy responses per episode

// The result of one response.
struct Step {
  Score score;              // the score of this response; an episode's score is the add() of all its steps
  bool done = true;         // the episode is over
  PolicyInput observation;  // if not done: the text for the policy's next turn
  // A prompt for another player of the game, which has to act before the policy does. Its answer is the input of the
  // next step. It is not trained on.
  std::optional<PolicyInput> side_prompt = {};
};

// Returns the error for a caller of step() that gets a side prompt but has no other player to answer it.
Error side_prompt_error();

// One attempt at a problem: the policy answers the problem's prompt, receives an observation, answers again, until the
// episode is done. Use from one thread at a time. The destructor cancels pending requests.
class Episode {
 public:
  // Takes a step's result. Called once for every step, on the thread that called step() or on another. Not called after
  // the destructor.
  using StepHandler = std::function<void(Result<Step>)>;

  virtual ~Episode() = default;
  // Takes the policy's response (text without its end token) and passes the result to `on_step`. An error means that
  // the task failed, not the policy; the rollout is then returned to the learner. Do not call again before `on_step`
  // was called, or after the last step.
  virtual void step(std::string response, StepHandler on_step) = 0;
  // Returns the score to add if the token limit cuts the episode off before it is done, such as the loss of a stake.
  virtual Score cut() { return {}; }
};

// An episode whose steps are computed at once, in the call.
class QuickEpisode : public Episode {
 public:
  void step(std::string response, StepHandler on_step) final { on_step(step_now(response)); }
  virtual Result<Step> step_now(std::string_view response) = 0;
};

// Runs a step and waits for it. kCancelled if `stop` became true first; the episode may then only be destroyed.
Result<Step> step_and_wait(Episode& episode, std::string response, const std::atomic<bool>* stop = nullptr);

// Whether the learner can check a worker's score by scoring the response again.
enum class Repeatable {
  kCheaply,  // deterministic and fast (microseconds, at most linear time): the learner checks every score
  kCostly,   // deterministic unless it was late, but slow: the learner checks all or a share on other threads
  kNot,      // scores may differ between two runs
};

// Every method is const, deterministic and safe to call from several threads at once.
class Adapter {
 public:
  virtual ~Adapter() = default;
  virtual std::string_view name() const = 0;

  // Training problem `index`, a function of (seed, index) only. Indices never end: each round through the set is
  // shuffled differently. kUnavailable on an adapter made for scoring only.
  virtual Result<Problem> problem(std::uint64_t index) const = 0;

  // Held-out problems: they serve evaluations, and problem() never returns one of them. They depend on the seed only.
  // Empty on an adapter made for scoring only.
  virtual std::vector<Problem> evaluation() const = 0;

  // For a task of one response: scores it (text without the end-of-text token) from the problem alone, without data
  // files. An error means that it could not be scored, which is not the policy's fault.
  virtual Result<Score> score(const Problem& problem, std::string_view response) const;

  // Begins an episode at the problem's prompt. It depends on the problem, `seed` and the responses alone, and needs no
  // data file. The default episode score()s one response. The adapter must outlive it.
  virtual Result<std::unique_ptr<Episode>> begin(const Problem& problem, std::uint64_t seed) const;

  // Whether the learner can check a worker's score of this problem.
  virtual Repeatable repeatable(const Problem&) const { return Repeatable::kCheaply; }

  // Whether every episode is one response, so that the learner can score it later.
  virtual bool has_one_response() const { return true; }

  // Returns the options for a worker's copy of the task, made from `own_options`, this adapter's. Paths of files that
  // workers need are replaced by the files' contents.
  virtual std::string options_for_workers(std::string own_options) const { return own_options; }

  // A response worth imitating, for a supervised warm start. Absent if the task has none for this problem.
  virtual std::optional<std::string> demonstration(const Problem& problem) const = 0;
};

// Returns the seed of an episode: the rollout with number `member` among the rollouts of one prompt, the `group`. The
// worker and a learner that replays the episode compute the same seed.
std::uint64_t episode_seed(std::uint64_t run_seed, std::uint64_t group, std::uint32_t member);

// kProblems: for the learner; reads data files. kScoring: for workers; reads no data file.
enum class AdapterUse { kProblems, kScoring };

// Reads the section `options` of the run file's task for a built-in adapter, records all mistakes there, and returns
// the options for make_adapter(). kInvalid for an unknown name, with the nearest known name and the list.
Result<std::string> read_adapter_options(std::string_view name, ConfigSection& task);

// Makes a built-in adapter from its options (a JSON object; "" means {}). kInvalid with all mistakes in them.
Result<std::unique_ptr<Adapter>> make_adapter(std::string_view name, std::string_view options_json, std::uint64_t seed,
                                              AdapterUse use = AdapterUse::kProblems);

// kInvalid if an observation can depend on the policy's response. The learner cannot score such a text later.
Status can_be_scored_later(const Adapter& adapter);
// Whether a built-in adapter always has many turns, whatever its options.
bool has_many_turns(std::string_view name);

// One task of a run with several. Problems are drawn by weight; their ids begin with "<name>:".
struct WeightedTask {
  std::string name, adapter, options_json = "{}";
  std::uint64_t weight = 1;
  std::string prompt = "{prompt}";  // the text around each problem's prompt
  bool scored_by_workers = true;
};
// Accepted by make_adapter() only; run files list `tasks` instead.
inline constexpr std::string_view kSeveralTasksAdapter = "several";
inline constexpr std::size_t kTasksMax = 64, kTaskNameBytesMax = 32;
inline constexpr std::uint64_t kTaskWeightMax = 1000;
std::string several_tasks_options(const std::vector<WeightedTask>& tasks);
// The name of the task that a problem id belongs to; the whole id if it names none.
std::string_view task_of(std::string_view problem_id);

// Built-in adapters, in alphabetical order.
std::vector<std::string> adapter_names();

}  // namespace echoline::data_plane

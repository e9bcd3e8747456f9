// The seam to a task: where problems come from, what the policy is told, and what a response is worth.
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

#include "base/result.hpp"
#include "base/told.hpp"
#include "data_plane/trajectory.hpp"

namespace echoline {
class ConfigSection;
}

namespace echoline::data_plane {

struct Score {
  double reward = 0;                         // finite
  std::map<std::string, double> components;  // named parts, for reports
  bool correct = false;                      // the verdict an evaluation counts
  // Time ran out over it: where there is more of it, or a faster machine, it may be worth more, but never less.
  bool late = false;
};

// Adds up rewards and components; the verdict of `step` is the one that counts; late as soon as one of them was.
void add(Score& episode, const Score& step);

inline constexpr std::size_t kTurnsMax = 1024;  // of an episode

// What comes of a response.
struct Step {
  Score score;       // for this response. An episode's rewards and components are added up; its last verdict counts
  bool done = true;  // no more is asked
  Told observation;  // else: what the policy is told next
  // Before that somebody else has to decide whom the policy plays as well, such as the other player of a game: it is
  // asked this, a prompt of its own, and what it answers is the next step. Nothing of it is trained on.
  std::optional<Told> aside = {};
};

// Of whoever has nobody to ask aside.
Error cannot_ask_aside();

// One try at a problem, begun with the problem's prompt: the policy answers, is told more, answers again, until it is
// done. One thread at a time; destroying it ends whatever it has asked of others.
class Episode {
 public:
  // Called once for every step, on the thread that called step() or another; never after the episode has been
  // destroyed.
  using Done = std::function<void(Result<Step>)>;

  virtual ~Episode() = default;
  // Takes the policy's response (text without the token that ends it), and says what comes of it when that is known. An
  // error means that the task failed, not the policy: the rollout is given back. Not called again before `done` was, or
  // after the last step.
  virtual void step(std::string response, Done done) = 0;
  // What is due besides where there is no room to go on although it is not done, such as what was staked.
  virtual Score cut() { return {}; }
};

// An episode whose steps are quick and need nobody else.
class QuickEpisode : public Episode {
 public:
  void step(std::string response, Done done) final { done(take(response)); }
  virtual Result<Step> take(std::string_view response) = 0;
};

// The step, waited for; kCancelled where `stop` turned true before it was there: then the episode is only good for
// being destroyed.
Result<Step> step_and_wait(Episode& episode, std::string response, const std::atomic<bool>* stop = nullptr);

// Whether the learner can find out for itself what a worker says that a response is worth.
enum class Repeatable {
  kCheaply,  // the same everywhere, in microseconds and at most linear time: all that is handed in is checked
  kCostly,   // the same everywhere unless it was late, but it takes longer: checked beside, all or a share of it
  kNot,      // it may differ from one time to the next
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

  // A task of one response: grades it (text without the end-of-text token) from the problem alone; needs no data file.
  // An error means that it cannot be graded, which is not the policy's fault.
  virtual Result<Score> score(const Problem& problem, std::string_view response) const;

  // Begins an episode at the problem's prompt. What happens in it depends on the problem, `seed` and the responses
  // alone, and needs no data file. By default one response is score()d. The adapter must outlive it.
  virtual Result<std::unique_ptr<Episode>> begin(const Problem& problem, std::uint64_t seed) const;

  virtual Repeatable repeatable(const Problem&) const { return Repeatable::kCheaply; }

  // Whether every try is one response, so that it can be scored by somebody else, later.
  virtual bool one_response() const { return true; }

  // The options that a worker's copy is made from, `own` being this one's: where a task needs a file there, what it
  // holds.
  virtual std::string options_for_workers(std::string own) const { return own; }

  // A response worth imitating, for a supervised warm start; absent when the task has none for this problem.
  virtual std::optional<std::string> demonstration(const Problem& problem) const = 0;
};

// The seed of a member's episode: the same for its worker and for a learner that looks at it again.
std::uint64_t episode_seed(std::uint64_t run_seed, std::uint64_t group, std::uint32_t member);

// kProblems: the learner's side, data files are read. kScoring: the worker's side, no data file is touched.
enum class AdapterUse { kProblems, kScoring };

// Reads the section `options` of the run file's task for a built-in adapter, noting there all that is wrong with it,
// and returns what makes the adapter. kInvalid on an unknown name, with the nearest known one and the list.
Result<std::string> read_adapter_options(std::string_view name, ConfigSection& task);

// Makes a built-in adapter from its options (a JSON object; "" means {}). kInvalid with all that is wrong with them.
Result<std::unique_ptr<Adapter>> make_adapter(std::string_view name, std::string_view config_json, std::uint64_t seed,
                                              AdapterUse use = AdapterUse::kProblems);

// Of a task whose responses its learner scores: kInvalid where what the policy is told depends on what it has answered.
Status can_be_scored_later(const Adapter& adapter);
// Whether that is so of a built-in adapter whatever its options.
bool has_many_turns(std::string_view name);

// Several tasks in one run, drawn by weight; ids of problems begin with "<name>:". Weights are whole numbers.
struct TaskOfSeveral {
  std::string name, adapter, options_json = "{}";
  std::uint64_t weight = 1;
  std::string prompt = "{prompt}";  // around its problems
  bool scored_by_workers = true;
};
inline constexpr std::string_view kSeveral = "several";  // make_adapter() knows it, run files do not: they list `tasks`
inline constexpr std::size_t kTasksMax = 64, kTaskNameBytesMax = 32;
inline constexpr std::uint64_t kTaskWeightMax = 1000;
std::string several_options(const std::vector<TaskOfSeveral>& tasks);
// The name of a problem's task, by its id; the whole id where it has none.
std::string_view task_of(std::string_view problem_id);

// Built-in adapters, in alphabetical order.
std::vector<std::string> adapter_names();

}  // namespace echoline::data_plane

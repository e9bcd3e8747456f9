// Computes the learner's own score of a trajectory by running its task again, turn by turn. Private to learner/.
#pragma once
#include <atomic>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.hpp"
#include "data_plane/adapters/adapter.hpp"
#include "model/phrasing.hpp"

namespace echoline::learner {

// The reason for refusing a submission. Reports count by `reason`, so its texts must not change. "malformed": the
// submission violates the form of trajectories, or the run's vocabulary, positions or length. "wrong prompt" and
// "wrong score": its prompt, text or score differs from the learner's own.
struct Refusal {
  std::string_view reason;
  std::string detail;
  bool forged = false;  // true: an intact worker of this release cannot send it by accident
};

// Values of Refusal::forged.
inline constexpr bool kForged = true, kNotForged = false;

template <class... Args>
Refusal make_refusal(std::string_view reason, bool forged, fmt::format_string<Args...> format, Args&&... args) {
  return {reason, fmt::format(format, std::forward<Args>(args)...), forged};
}

// The tokens of a response.
std::vector<model::Token> response_of(const schema::Trajectory& trajectory);
// The policy's turns in the response, which the loss mask marks. Empty unless the response begins and ends with a turn.
std::vector<std::span<const model::Token>> turns_of(const schema::Trajectory& trajectory,
                                                    std::span<const model::Token> response);

// Whether the trajectory states the score's reward, but for rounding, and its verdict.
bool has_same_verdict(const schema::Trajectory& trajectory, const data_plane::Score& score);
// Whether the trajectory states the score's named components, but for rounding.
bool has_same_components(const schema::Trajectory& trajectory, const data_plane::Score& score);

// Immutable; any thread. The adapter must outlive it.
class ScoreVerifier {
 public:
  ScoreVerifier(const data_plane::Adapter& adapter, model::Phrasing phrasing, std::uint64_t run_seed,
                std::int64_t response_tokens_max)
      : adapter_(adapter),
        phrasing_(std::move(phrasing)),
        run_seed_(run_seed),
        response_tokens_max_(response_tokens_max) {}

  struct ComputedScore {
    data_plane::Score score;
    // Set if the task gives other observations than the trajectory has, or ends elsewhere.
    std::optional<Refusal> refusal;
  };
  // Runs the task on the trajectory's turns. Requires a trajectory that passed data_plane::check and has turns. An
  // error means that the task failed, not the worker. kCancelled if `stop` turns true first.
  Result<ComputedScore> compute_score(const schema::Trajectory& trajectory, const schema::Problem& problem,
                                      const std::atomic<bool>* stop = nullptr) const;

  // The refusal of a trajectory whose reward, verdict or components are not those of `score`; absent if they are,
  // but for rounding.
  static std::optional<Refusal> difference(const schema::Trajectory& trajectory, const data_plane::Score& score);
  // Whether two scores are equal but for rounding.
  static bool is_same(const data_plane::Score& a, const data_plane::Score& b);

  const data_plane::Adapter& adapter() const { return adapter_; }
  const model::Phrasing& phrasing() const { return phrasing_; }
  // The response's text: as it is graded or, with several turns, as it is shown.
  std::string text(std::span<const model::Token> response, std::size_t turns) const {
    return turns > 1 ? phrasing_.tokenizer().decode(response) : phrasing_.answer(response);
  }

 private:
  Result<ComputedScore> run_turns(const schema::Trajectory& trajectory, const schema::Problem& problem,
                                  const std::atomic<bool>* stop) const;

  const data_plane::Adapter& adapter_;
  const model::Phrasing phrasing_;
  const std::uint64_t run_seed_;
  const std::int64_t response_tokens_max_;
};

}  // namespace echoline::learner

// What the learner itself finds a trajectory to be worth: its task is asked again, turn by turn. Private to learner/.
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

// Why a submission is not taken in. The reasons are stable, reports count by them:
// "malformed": it breaks the form of trajectories, or leaves the vocabulary, the positions or the length of the run.
// "wrong prompt", "wrong score": its prompt, text or score are not what the learner finds itself, which an intact
// worker of this release cannot produce.
struct Refusal {
  std::string_view reason;
  std::string detail;
  bool forged = false;  // not an accident
};

template <class... Args>
Refusal because(std::string_view reason, bool forged, fmt::format_string<Args...> format, Args&&... args) {
  return {reason, fmt::format(format, std::forward<Args>(args)...), forged};
}

// The tokens of a response, and the policy's turns in it by the loss mask: none where it does not begin and end with
// one.
std::vector<model::Token> response_of(const schema::Trajectory& trajectory);
std::vector<std::span<const model::Token>> turns_of(const schema::Trajectory& trajectory,
                                                    std::span<const model::Token> response);

// Whether the trajectory's score is this one: reward and verdict, and its named parts.
bool same_verdict(const schema::Trajectory& trajectory, const data_plane::Score& score);
bool same_parts(const schema::Trajectory& trajectory, const data_plane::Score& score);

// Immutable; may be used from several threads at once. The adapter must outlive it.
class SecondLook {
 public:
  SecondLook(const data_plane::Adapter& adapter, model::Phrasing phrasing, std::uint64_t run_seed,
             std::int64_t response_tokens_max)
      : adapter_(adapter),
        phrasing_(std::move(phrasing)),
        run_seed_(run_seed),
        response_tokens_max_(response_tokens_max) {}

  struct Found {
    data_plane::Score score;
    std::optional<Refusal> refusal;  // what its task would not have told it, or ended otherwise
  };
  // Of a trajectory that passed data_plane::check and whose turns are some. An error is the task's, and nobody's fault.
  // kCancelled where `stop` turns true first.
  Result<Found> find(const schema::Trajectory& trajectory, const schema::Problem& problem,
                     const std::atomic<bool>* stop = nullptr) const;

  // In what the trajectory's score is another one; nothing: in nothing that counts.
  static std::optional<Refusal> difference(const schema::Trajectory& trajectory, const data_plane::Score& score);
  // Whether two looks found the same.
  static bool same(const data_plane::Score& a, const data_plane::Score& b);

  const data_plane::Adapter& adapter() const { return adapter_; }
  const model::Phrasing& phrasing() const { return phrasing_; }
  // The response as it is graded, or shown where it has several turns.
  std::string text(std::span<const model::Token> response, std::size_t turns) const {
    return turns > 1 ? phrasing_.tokenizer().decode(response) : phrasing_.answer(response);
  }

 private:
  Result<Found> play(const schema::Trajectory& trajectory, const schema::Problem& problem,
                     const std::atomic<bool>* stop) const;

  const data_plane::Adapter& adapter_;
  const model::Phrasing phrasing_;
  const std::uint64_t run_seed_;
  const std::int64_t response_tokens_max_;
};

}  // namespace echoline::learner

#include "learner/second_look.hpp"

#include <algorithm>
#include <cmath>

namespace echoline::learner {
namespace {

constexpr double kScoreTolerance = 1e-9;  // for sums in another order

bool same(double a, double b) { return std::abs(a - b) <= kScoreTolerance * std::max({1.0, std::abs(a), std::abs(b)}); }

const char* verdict(bool correct) { return correct ? "correct" : "wrong"; }

}  // namespace

std::vector<model::Token> response_of(const schema::Trajectory& t) {
  std::vector<model::Token> response;
  response.reserve(static_cast<std::size_t>(t.response_tokens_size()));
  for (const std::uint32_t token : t.response_tokens()) response.push_back(static_cast<model::Token>(token));
  return response;
}

std::vector<std::span<const model::Token>> turns_of(const schema::Trajectory& t,
                                                    std::span<const model::Token> response) {
  if (t.loss_mask_size() == 0) return {response};
  std::vector<std::span<const model::Token>> turns;
  const auto drawn = [&](std::size_t i) { return t.loss_mask(static_cast<int>(i)) != 0; };
  if (response.empty() || !drawn(0) || !drawn(response.size() - 1)) return {};
  for (std::size_t begin = 0, end = 0; begin < response.size(); begin = end) {
    while (end < response.size() && drawn(end) == drawn(begin)) ++end;
    if (drawn(begin)) turns.push_back(response.subspan(begin, end - begin));
  }
  return turns;
}

bool same_verdict(const schema::Trajectory& t, const data_plane::Score& score) {
  return same(t.reward(), score.reward) && t.correct() == score.correct;
}

bool same_parts(const schema::Trajectory& t, const data_plane::Score& score) {
  if (static_cast<std::size_t>(t.components_size()) != score.components.size()) return false;
  return std::ranges::all_of(score.components, [&](const auto& part) {
    const auto found = t.components().find(part.first);
    return found != t.components().end() && same(found->second, part.second);
  });
}

Result<SecondLook::Found> SecondLook::find(const schema::Trajectory& t, const schema::Problem& problem,
                                           const std::atomic<bool>* stop) const {
  try {
    return play(t, problem, stop);
  } catch (const std::exception& error) {
    return fail(Code::kUnavailable, "task", "{}", error.what());
  }
}

Result<SecondLook::Found> SecondLook::play(const schema::Trajectory& t, const schema::Problem& problem,
                                           const std::atomic<bool>* stop) const {
  const std::vector<model::Token> response = response_of(t);
  const auto turns = turns_of(t, response);
  const auto refused = [](Refusal refusal) { return Found{{}, std::move(refusal)}; };
  ECHO_ASSIGN(const auto episode, adapter_.begin(problem, data_plane::episode_seed(run_seed_, t.group(), t.member())));
  Found found;
  bool finished = false;
  for (std::size_t i = 0; i < turns.size(); ++i) {
    const auto turn = turns[i];
    const bool last = i + 1 == turns.size();
    ECHO_ASSIGN(const data_plane::Step step, data_plane::step_and_wait(*episode, phrasing_.answer(turn), stop));
    if (step.aside) return data_plane::cannot_ask_aside();
    data_plane::add(found.score, step.score);
    if (step.done) {
      if (!last) return refused(because("wrong score", true, "it goes on after its task was done"));
      finished = phrasing_.end(turn).has_value();
      break;
    }
    ECHO_ASSIGN(const auto told, phrasing_.follow_up(turn, step.observation));
    const auto begin = static_cast<std::size_t>(turn.data() + turn.size() - response.data());
    const std::int64_t room = response_tokens_max_ - static_cast<std::int64_t>(begin) - std::ssize(told);
    if (last && room > 0 && turns.size() < data_plane::kTurnsMax)
      return refused(because("malformed", false, "it stops after {} turns with room for {} tokens, its task goes on",
                             turns.size(), room));
    if (last) {
      data_plane::add(found.score, episode->cut());
      break;
    }
    const std::size_t observed = static_cast<std::size_t>(turns[i + 1].data() - response.data()) - begin;
    if (!std::ranges::equal(std::span(response).subspan(begin, observed), told))
      return refused(because("wrong score", true,
                             "its {} tokens of observation after turn {} are not the {} of its task", observed, i + 1,
                             told.size()));
  }
  if (t.finished() != finished)
    return refused(because("malformed", false, "finished is {}, its last token says {}", t.finished(), finished));
  return found;
}

std::optional<Refusal> SecondLook::difference(const schema::Trajectory& t, const data_plane::Score& score) {
  if (!same_verdict(t, score))
    return because("wrong score", true, "reward {} ({}), expected {} ({})", t.reward(), verdict(t.correct()),
                   score.reward, verdict(score.correct));
  if (!same_parts(t, score)) return because("wrong score", true, "the parts of its reward are not those of this task");
  return std::nullopt;
}

bool SecondLook::same(const data_plane::Score& a, const data_plane::Score& b) {
  return learner::same(a.reward, b.reward) && a.correct == b.correct &&
         std::ranges::equal(a.components, b.components, [](const auto& x, const auto& y) {
           return x.first == y.first && learner::same(x.second, y.second);
         });
}

}  // namespace echoline::learner

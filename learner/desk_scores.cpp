// The rollout desk where scores are not settled at the door: those that are looked at again, and those that the learner
// finds.
#include "base/log.hpp"
#include "base/text.hpp"
#include "learner/rollout_desk.hpp"

namespace echoline::learner {
namespace {

constexpr std::string_view kScoringFailed = "scoring failed";

}  // namespace

// Its text is all there is: the learner scores it.
bool RolloutDesk::is_unscored(const schema::Submission& submission) {
  if (submission.trajectories().empty()) return false;
  const auto asked = door_.question(GroupId{submission.trajectories(0).group()});
  return asked && door_.unscored((*asked)->problem);
}

void RolloutDesk::note_taken_in(WorkerId worker, const schema::Submission& submission) {
  if (submission.trajectories_size() == 0) return;
  const GroupId group{submission.trajectories(0).group()};
  const auto asked = door_.question(group);
  const bool unscored = asked && door_.unscored((*asked)->problem);
  const replay_buffer::Misconduct before = conduct_.of(worker);
  conduct_.accepted(worker, !unscored);
  if (conduct_.of(worker) != before) keep_conduct(worker);
  unscored_wait_ = unscored_wait_ || unscored;
  if (asked && !unscored &&
      door_.second_look()->adapter().repeatable((*asked)->problem) == data_plane::Repeatable::kCostly)
    regrader_->taken_in(worker, (*asked)->problem, submission);
  door_.forget(group);
}

// Whose rewards are not what the learner finds, again and again. What waits of it is not trained on.
void RolloutDesk::expel_liars() {
  for (const RegradingCounts::Expelled& liar : regrader_->newly_found()) {
    log::warn("worker {}: {}", liar.worker, liar.reason);
    expel(liar.worker, liar.reason);
    database_.push_back(Write{[this, worker = liar.worker] { return discard_of(worker, "wrong score"); }});
  }
}

// Groups whose workers hand in text only: what is stored without a score goes to the scorer, as much as it takes at a
// time.
void RolloutDesk::score() {
  for (Scorer::Done& done : scorer_->done()) {
    unscored_wait_ = true;
    // Scores that could not be stored are found again: their groups still wait for them.
    if (const Status taken = database_.checked(take_scores(std::move(done))); !taken)
      log::error("scores not stored: {}", taken.error().message());
  }
  if (!unscored_wait_) return;
  if (const Status fed = database_.checked(feed_scorer()); !fed) log::error("{}", fed.error().message());
}

Status RolloutDesk::take_scores(Scorer::Done done) {
  if (done.status) {
    ECHO_ASSIGN(const bool wanted, buffer_->scored(done.group));
    if (wanted) conduct_.scored();
    return ok();
  }
  ECHO_ASSIGN(const bool wanted, buffer_->awaits_scores(done.group));
  if (!wanted) return ok();
  // Nobody's answer is worth nothing because a grader failed.
  const std::string detail = printable(done.status.error().message());
  log::warn("group {} could not be scored: {}", done.group.id, detail);
  ECHO_TRY(buffer_->discard(done.group.id, kScoringFailed));
  ECHO_TRY(
      ledger_->unscorable(done.group.id, WorkerId{done.group.trajectories.front().worker()}, kScoringFailed, detail));
  tell_set_aside();
  return ok();
}

Status RolloutDesk::feed_scorer() {
  const std::size_t room = scorer_->room();
  if (room == 0) return ok();  // it is asked again when something is done
  ECHO_ASSIGN(std::vector<replay_buffer::Group> groups, buffer_->unscored(room, scorer_->inside()));
  unscored_wait_ = groups.size() == room;
  for (replay_buffer::Group& group : groups) {
    auto problem = door_.problem(group.id);
    if (problem)
      scorer_->add(std::move(group), *std::move(problem));
    else
      ECHO_TRY(take_scores({std::move(group), std::move(problem).error()}));
  }
  return ok();
}

// What is being trained on now can no longer be taken back.
Status RolloutDesk::discard_of(WorkerId worker, std::string_view reason) {
  ECHO_ASSIGN(const std::uint64_t discarded, buffer_->discard_of(worker, reason, in_training_));
  if (discarded > 0) log::warn("worker {}: {} groups that wait are discarded", worker, discarded);
  return ok();
}

}  // namespace echoline::learner

// Connects the rollout desk with the regrader and the scorer. DeskLogic calls it.
#include "learner/desk_scores.hpp"

#include "base/log.hpp"
#include "base/random_bits.hpp"
#include "base/text.hpp"

namespace echoline::learner {
namespace {

constexpr std::string_view kScoringFailed = "scoring failed";

}  // namespace

DeskScores::DeskScores(DeskContext& desk, Discipline& discipline, SetAsideGroups& set_aside, StepBatches& batches)
    : desk_(desk),
      discipline_(discipline),
      set_aside_(set_aside),
      batches_(batches),
      regrader_(desk.checker.score_verifier(), random_bits64(), desk.wake),
      scorer_(desk.checker.score_verifier(), desk.wake) {}

bool DeskScores::is_unscored(const schema::Submission& submission) {
  if (submission.trajectories().empty()) return false;
  const auto question = desk_.checker.question(GroupId{submission.trajectories(0).group()});
  return question && desk_.checker.is_scored_by_learner((*question)->problem);
}

void DeskScores::on_submission_accepted(WorkerId worker, const schema::Submission& submission) {
  if (submission.trajectories().empty()) return;
  const GroupId group{submission.trajectories(0).group()};
  const bool unscored = is_unscored(submission);
  discipline_.count_accepted(worker);
  if (unscored)
    scorer_may_lack_groups_ = true;
  else
    set_aside_.on_group_succeeded();
  // Scores that are cheap to compute were checked before the submission was stored.
  const auto question = desk_.checker.question(group);
  if (question && !unscored &&
      desk_.checker.score_verifier()->adapter().repeatable((*question)->problem) == data_plane::Repeatable::kCostly)
    regrader_.add_submission(worker, (*question)->problem, submission);
  desk_.checker.forget(group);
}

void DeskScores::expel_misgrading_workers() {
  for (const RegradingCounts::Expelled& expelled : regrader_.take_workers_to_expel()) {
    log::warn("worker {}: {}", expelled.worker, expelled.reason);
    desk_.expel(expelled.worker, expelled.reason);
    desk_.database.push_back(
        DatabaseWrite{[this, worker = expelled.worker] { return batches_.discard_waiting_of(worker, "wrong score"); }});
  }
}

void DeskScores::run_due() {
  expel_misgrading_workers();
  for (Scorer::Done& done : scorer_.take_done()) {
    scorer_may_lack_groups_ = true;
    // Scores that could not be stored are computed again, because their groups still wait for them.
    if (const Status stored = desk_.database.stall_on_error(store_scores(std::move(done))); !stored)
      log::error("scores not stored: {}", stored.error().message());
  }
  if (!scorer_may_lack_groups_) return;
  if (const Status fed = desk_.database.stall_on_error(feed_scorer()); !fed) log::error("{}", fed.error().message());
}

Status DeskScores::store_scores(Scorer::Done done) {
  if (done.status) {
    ECHO_ASSIGN(const bool was_awaited, desk_.buffer->store_scores(done.group));
    if (was_awaited) set_aside_.on_group_succeeded();
    return ok();
  }
  ECHO_ASSIGN(const bool is_awaited, desk_.buffer->awaits_scores(done.group));
  if (!is_awaited) return ok();
  // A failed grader shows nothing about the response, so no reward is stored. The group is generated again.
  const std::string detail = printable(done.status.error().message());
  log::warn("group {} could not be scored: {}", done.group.id, detail);
  ECHO_TRY(desk_.buffer->discard(done.group.id, kScoringFailed));
  ECHO_TRY(desk_.ledger->on_result_unscorable(done.group.id, WorkerId{done.group.trajectories.front().worker()},
                                              kScoringFailed, detail));
  set_aside_.report_new();
  return ok();
}

Status DeskScores::feed_scorer() {
  const std::size_t free_group_slots = scorer_.free_group_slots();
  if (free_group_slots == 0) return ok();  // run_due() comes again when a group is done
  ECHO_ASSIGN(std::vector<replay_buffer::Group> groups,
              desk_.buffer->unscored_groups(free_group_slots, scorer_.groups_in_progress()));
  // Fewer groups than free slots: the scorer has them all now.
  scorer_may_lack_groups_ = groups.size() == free_group_slots;
  for (replay_buffer::Group& group : groups) {
    auto problem = desk_.checker.problem(group.id);
    if (problem)
      scorer_.add(std::move(group), *std::move(problem));
    else
      ECHO_TRY(store_scores({.group = std::move(group), .status = std::move(problem).error()}));
  }
  return ok();
}

}  // namespace echoline::learner

// The scores that the learner computes for the RolloutDesk: the Regrader checks workers' scores by sampling, and the
// Scorer computes scores of tasks that only the learner scores. Private to learner/.
#pragma once
#include "learner/discipline.hpp"
#include "learner/regrader.hpp"
#include "learner/scorer.hpp"
#include "learner/set_aside_groups.hpp"
#include "learner/step_batches.hpp"

namespace echoline::learner {

// One thread, the desk's.
class DeskScores {
 public:
  // The parts must outlive it. The threads of the regrader and the scorer call DeskContext::wake when run_due() has
  // something to do.
  DeskScores(DeskContext& desk, Discipline& discipline, SetAsideGroups& set_aside, StepBatches& batches);

  // Whether workers submit only text for this group, and the learner scores it.
  bool is_unscored(const schema::Submission& submission);
  // The submission is durable. Queues its responses for regrading, or notes that its group waits for scores.
  void on_submission_accepted(WorkerId worker, const schema::Submission& submission);
  void on_step_measured(double step_seconds) {
    regrader_.on_step_measured(step_seconds, desk_.options.pacing.trajectories_per_step);
  }
  // Expels workers whose rewards are not what the learner computes, stores new scores, and gives the scorer more work.
  void run_due();

  Regrader::State regrading() const { return regrader_.state(); }
  ScorerCounts scoring() const { return scorer_.counts(); }

 private:
  void expel_misgrading_workers();
  // Stores the scores of a group, or discards the group if it could not be scored.
  Status store_scores(Scorer::Done done);
  Status feed_scorer();

  DeskContext& desk_;
  Discipline& discipline_;
  SetAsideGroups& set_aside_;
  StepBatches& batches_;
  Regrader regrader_;
  Scorer scorer_;
  bool scorer_may_lack_groups_ = true;  // false: the scorer has every stored group without a score
};

}  // namespace echoline::learner

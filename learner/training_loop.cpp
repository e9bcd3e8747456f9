// The steps of a running learner, called by the service on the main thread.
#include "learner/training_loop.hpp"

#include <algorithm>
#include <map>

#include "base/log.hpp"
#include "base/text.hpp"
#include "learner/batch.hpp"
#include "learner/resume.hpp"
#include "learner/task_figures.hpp"

namespace echoline::learner {
namespace {

using nlohmann::json;

constexpr Duration kPoll = std::chrono::milliseconds(200);  // how often a wait checks whether the run must stop

}  // namespace

Result<bool> TrainingLoop::run() {
  const RunJournal& journal = parts_.journal;
  const std::uint64_t steps = run_.config.run.steps;
  ECHO_ASSIGN(bool goes_on, publish(Version{journal.step()}));
  while (goes_on && journal.step() < steps && !run_.stop) {
    ECHO_ASSIGN(goes_on, train_one_step());
  }
  ECHO_TRY(checkpoint());
  if (goes_on) {
    ECHO_ASSIGN(goes_on, wait_until_published());
  }
  return goes_on && journal.step() >= steps;
}

Error TrainingLoop::end_with_checkpoint(Error why) {
  RunJournal& journal = parts_.journal;
  // persist() repeats the write while the disk is full.
  const Status saved = journal.persist("checkpoints", [this] { return parts_.policy_source.checkpoint(); });
  why.detail +=
      saved ? fmt::format("; a checkpoint of step {} is written: go on with --resume", journal.step())
            : fmt::format("; no checkpoint of step {} could be written ({}): --resume goes on from the one before",
                          journal.step(), saved.error().message());
  return why;
}

// The step was trained, but the replay buffer could not mark its groups as consumed. Stores their ids, so that the next
// --resume marks them.
Error TrainingLoop::end_with_unmarked_batch(const replay_buffer::Batch& batch, Error why) {
  RunJournal& journal = parts_.journal;
  if (!store_unmarked_batch(journal.record().folder(), journal.step(), batch.ids())) {
    why.detail += "; --resume goes on from the newest checkpoint";
    return why;
  }
  journal.set_step(journal.step() + 1);
  return end_with_checkpoint(std::move(why));
}

Result<bool> TrainingLoop::publish(Version version) {
  ECHO_ASSIGN(const bool previous_published, wait_until_published());
  if (!previous_published) return false;
  ECHO_ASSIGN(delta::SharedState policy, parts_.policy_source.policy(version));
  if (!policy) return false;  // the run is being stopped
  parts_.publisher.publish(version, std::move(policy));
  return true;
}

Result<bool> TrainingLoop::wait_until_published() {
  for (;;) {
    ECHO_ASSIGN(const bool published, parts_.publisher.wait_until_published(kPoll));
    if (published) return true;
    if (run_.stop) return false;
    ECHO_TRY(parts_.journal.record().check_folder());
    parts_.write_status("publishing");
  }
}

Status TrainingLoop::checkpoint() {
  RunJournal& journal = parts_.journal;
  ECHO_TRY(journal.persist("checkpoints", [this] { return parts_.policy_source.checkpoint(); }));
  const std::uint64_t steps_in_buffer = steps_kept(run_.config), step = journal.step();
  if (step > steps_in_buffer)
    ECHO_TRY(journal.persist("replay buffer", [&] { return parts_.rollout_desk.prune(step - steps_in_buffer); }));
  return ok();
}

Result<std::optional<replay_buffer::Batch>> TrainingLoop::wait_for_batch() {
  // After this time, the fleet has retried failed offers (join_timeout), and workers that were away are lost
  // (away_max).
  const Duration no_worker_max = std::max(run_.config.fleet.join_timeout, run_.config.fleet.away_max);
  const std::uint64_t step = parts_.journal.step();
  TimePoint no_worker_since = kNever;
  while (!run_.stop) {
    auto batch = parts_.rollout_desk.wait_batch(step, kPoll);
    ECHO_TRY(parts_.journal.record().check_folder());
    if (!batch) return end_with_checkpoint(std::move(batch).error());
    parts_.write_status("training");
    if (*batch) return batch;
    if (Status budget = parts_.fleet.check_budget(); !budget) {
      ECHO_TRY(checkpoint());
      return std::move(budget).error();
    }
    if (parts_.workers.attendance().alive_count() > 0 || parts_.fleet.still_joining() > 0) {
      no_worker_since = kNever;
    } else if (no_worker_since == kNever) {
      no_worker_since = run_.clock.now();
      log::warn("no worker is left; waiting for one");
    } else if (run_.clock.now() - no_worker_since > no_worker_max) {
      ECHO_TRY(checkpoint());
      return fail(Code::kUnavailable, "train", "no worker for {}: the run stands at step {}, go on with --resume{}",
                  to_text(no_worker_max), step, parts_.fleet.missing_workers_hint());
    }
  }
  return std::optional<replay_buffer::Batch>();
}

Status TrainingLoop::expel_implausible_workers(const TrainedStep& trained) {
  RunJournal& journal = parts_.journal;
  for (const Credibility::Verdict& verdict : credibility_.judge(trained.scrutiny, journal.step())) {
    log::warn("worker {}: {}", verdict.worker, verdict.reason);
    parts_.node.expel(verdict.worker, verdict.reason);
    ECHO_TRY(journal.persist("replay buffer", [&] { return parts_.rollout_desk.discard_groups_of(verdict.worker); }));
  }
  return ok();
}

Result<bool> TrainingLoop::train_one_step() {
  RunJournal& journal = parts_.journal;
  const Clock& clock = run_.clock;
  provisioner::FleetDriver* const fleet = parts_.fleet.driver();
  const TimePoint began_at = clock.now();
  if (fleet) fleet->set_learner_waiting(true);
  ECHO_ASSIGN(auto batch, wait_for_batch());
  if (!batch) return false;
  if (fleet) fleet->set_learner_waiting(false);
  const TimePoint batch_ready_at = clock.now();
  std::vector<schema::Trajectory> trajectories;
  std::map<std::uint64_t, std::uint64_t> trajectories_by_staleness;
  for (replay_buffer::Group& group : batch->groups) {
    // After a resume from an earlier checkpoint, a version may be newer than the step. It counts as staleness 0.
    const std::uint64_t staleness = std::max(journal.step(), group.version.value) - group.version.value;
    trajectories_by_staleness[staleness] += group.trajectories.size();
    for (schema::Trajectory& trajectory : group.trajectories) trajectories.push_back(std::move(trajectory));
  }
  ECHO_ASSIGN(const std::optional<TrainedStep> trained, parts_.policy_source.step(trajectories));
  if (!trained) return false;
  if (Status consumed =
          journal.persist("replay buffer", [&] { return parts_.rollout_desk.consume(journal.step(), *batch); });
      !consumed)
    return end_with_unmarked_batch(*batch, std::move(consumed).error());
  ECHO_TRY(expel_implausible_workers(*trained));
  const std::uint64_t step = journal.step() + 1;
  journal.set_step(step);
  const TimePoint trained_at = clock.now();
  bool goes_on = true;
  if (step % run_.config.staleness.publish_every == 0 || step == run_.config.run.steps) {
    ECHO_ASSIGN(goes_on, publish(Version{step}));
  }
  const TimePoint handed_to_publisher_at = clock.now();
  if (goes_on && step % run_.config.learner.checkpoint_every == 0) ECHO_TRY(checkpoint());
  if (goes_on) ECHO_TRY(parts_.policy_source.on_step_end());
  const TimePoint ended_at = clock.now();
  json row = batch_figures(trajectories);
  if (!run_.config.task.listed_tasks.empty()) {
    TaskFigures by_task;
    for (const schema::Trajectory& trajectory : trajectories)
      by_task.add(trajectory.problem_id(), trajectory.correct(), trajectory.reward());
    row["by_task"] = by_task.figures("responses");
  }
  row.update(trained->figures);  // the trainer's own figures replace those of the whole batch
  journal.status().add_step(row.at("reward_mean"), batch_ready_at - began_at, ended_at - began_at);
  if (fleet) {
    const std::uint64_t steps_left = run_.config.run.steps - step;  // run() calls this only while steps are left
    ECHO_ASSIGN(const DeskCounts counts, parts_.rollout_desk.counts());
    // A wait for the disk says nothing about the learner's speed.
    fleet->on_step_measured({.step_time = ended_at - batch_ready_at - journal.take_disk_wait(),
                             .steps_left = steps_left,
                             .rollouts_waiting = counts.buffer.admissible_trajectories});
  }
  json staleness_counts = json::object();
  for (const auto& [staleness, count] : trajectories_by_staleness) staleness_counts[std::to_string(staleness)] = count;
  row.update({{"step", step},
              {"staleness", staleness_counts},
              {"wait_seconds", seconds(batch_ready_at - began_at)},
              {"train_seconds", seconds(trained_at - batch_ready_at)},
              {"publish_seconds", seconds(handed_to_publisher_at - trained_at)},
              {"step_seconds", seconds(ended_at - began_at)}});
  journal.record().append_metric("step", std::move(row));
  ECHO_TRY(journal.persist("metrics and events", [&] { return journal.record().write_pending_rows(); }));
  parts_.write_status("training");
  return goes_on;
}

}  // namespace echoline::learner

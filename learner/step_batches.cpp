// The batch of the current step. DeskLogic hands it over, RolloutDesk marks it consumed.
#include "learner/step_batches.hpp"

#include "base/log.hpp"

namespace echoline::learner {

double StepBatches::lease_time() const {
  return desk_.database.can_store() ? desk_.clock.unix_seconds() : desk_.clock.unix_seconds_at_last_tick();
}

// Discards groups that training would refuse; other groups are generated in their place.
Result<std::optional<replay_buffer::Batch>> StepBatches::trainable_batch(std::uint64_t step) {
  for (;;) {
    ECHO_ASSIGN(auto batch, desk_.buffer->sample(step, desk_.options.pacing.groups_per_step()));
    if (!batch) return batch;
    bool all_trainable = true;
    for (const replay_buffer::Group& group : batch->groups) {
      const Status status = desk_.checker.trainable(group.trajectories);
      if (status) continue;
      log::warn("group {} is discarded: {}", group.id, status.error().message());
      ECHO_TRY(desk_.buffer->discard(group.id, "not trainable"));
      all_trainable = false;
    }
    if (all_trainable) return batch;
  }
}

void StepBatches::hand_over_batch(const Status& can_generate, const std::function<Status()>& check_completable) {
  const std::optional<std::uint64_t> requested_step = desk_.batch_request.requested_step();
  if (!requested_step) return;
  const std::uint64_t step = *requested_step;
  const auto take_batch = [&]() -> Result<std::optional<replay_buffer::Batch>> {
    ECHO_TRY(desk_.database.status());
    ECHO_TRY(can_generate);
    ECHO_ASSIGN(const std::uint64_t stranded_leases, desk_.ledger->stranded_by_next_step(step, lease_time()));
    if (stranded_leases > 0) {  // training now would make leased groups too stale for every later step
      pace_.begin_wait(lease_time());
      return std::optional<replay_buffer::Batch>();
    }
    pace_.end_wait(lease_time());
    ECHO_ASSIGN(auto batch, trainable_batch(step));
    if (!batch) ECHO_TRY(check_completable());
    return batch;
  };
  auto answer = take_batch();
  if (answer && !*answer) return;
  // A database that is stalled, but not given up, is tried again; the training thread waits meanwhile.
  if (!answer && desk_.database.stall_if_database_error(answer.error()) && desk_.database.status()) return;
  std::vector<GroupId> ids = answer ? (*answer)->ids() : std::vector<GroupId>();
  if (desk_.batch_request.answer(step, std::move(answer))) in_training_ = std::move(ids);
}

Status StepBatches::consume(std::uint64_t step, const replay_buffer::Batch& batch) {
  ECHO_TRY(desk_.database.status());
  ECHO_TRY(desk_.database.stall_on_error(desk_.buffer->consume(step, batch.ids())));
  const auto dropped = desk_.buffer->drop_stale(step + 1);
  if (!dropped) return desk_.database.stall_on_error(dropped.error());
  if (*dropped > 0) log::warn("{} trajectories became too stale before step {} could use them", *dropped, step + 1);
  in_training_.clear();
  step_ = step + 1;
  pace_.end_step(desk_.clock.unix_seconds());
  return ok();
}

Status StepBatches::prune(std::uint64_t step) {
  ECHO_TRY(desk_.database.status());
  const auto pruned = desk_.buffer->prune(step);
  return pruned ? ok() : desk_.database.stall_on_error(pruned.error());
}

Status StepBatches::discard_groups_of(WorkerId worker) {
  ECHO_TRY(desk_.database.status());
  return desk_.database.stall_on_error(discard_waiting_of(worker, "not of the policy"));
}

Status StepBatches::discard_waiting_of(WorkerId worker, std::string_view reason) {
  ECHO_ASSIGN(const std::uint64_t discarded, desk_.buffer->discard_groups_of(worker, reason, in_training_));
  if (discarded > 0) log::warn("worker {}: {} groups that wait are discarded", worker, discarded);
  return ok();
}

void StepBatches::check() const {
  ECHO_CHECK(in_training_.empty() || in_training_.size() == desk_.options.pacing.groups_per_step(),
             "{} groups are in training", in_training_.size());
}

}  // namespace echoline::learner

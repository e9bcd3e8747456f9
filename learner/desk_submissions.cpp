// Stores and answers submissions. DeskLogic calls it for messages with trajectories.
#include "learner/desk_submissions.hpp"

#include "base/log.hpp"
#include "base/text.hpp"

namespace echoline::learner {

// Refuses tokens of a version that no worker can have: they would pass for the freshest ones. SubmissionChecker has
// checked everything else.
std::optional<Refusal> DeskSubmissions::refusal_if_unpublished(const schema::Submission& submission) const {
  for (const schema::Trajectory& trajectory : submission.trajectories()) {
    // The versions of a trajectory's spans ascend.
    const Version newest_version{trajectory.spans(trajectory.spans_size() - 1).version()};
    if (!policies_.newest() || newest_version > *policies_.newest())
      return Refusal{.reason = "malformed",
                     .detail = fmt::format("tokens of version {}, which is not published", newest_version),
                     .forged = false};
  }
  return std::nullopt;
}

void DeskSubmissions::refuse_unreadable(WorkerId worker, const std::string& what) {
  ++refused_["unreadable message"];
  discipline_.count_malformed(worker, what);
}

void DeskSubmissions::pass_on(const Submissions& submissions) {
  for (const auto& [worker, submission] : submissions) {
    const SampleDesk::Verdict verdict = desk_.options.samples->store(worker, submission, desk_.clock.unix_seconds());
    schema::LearnerMessage message;
    schema::SubmissionAck& ack = *message.mutable_ack();
    ack.set_lease(submission.lease());
    ack.set_accepted(verdict.accepted);
    ack.set_reason(verdict.reason);
    desk_.events.send(worker, message.SerializeAsString());
    if (verdict.accepted) {
      discipline_.count_accepted(worker);
      desk_.events.accepted(worker, static_cast<std::uint64_t>(submission.trajectories_size()), verdict.lease_seconds);
      continue;
    }
    ++refused_[verdict.reason];
    if (verdict.reason == "malformed")
      discipline_.count_malformed(
          worker, fmt::format("lease {}: {}: {}", submission.lease(), verdict.reason, printable(verdict.detail)));
  }
}

bool DeskSubmissions::store(const Submissions& submissions) {
  if (desk_.options.samples != nullptr) {
    pass_on(submissions);
    return true;
  }
  std::vector<replay_buffer::Delivery> deliveries;
  std::vector<std::optional<Refusal>> refusals = desk_.checker.refusals(submissions);
  for (std::size_t i = 0; i < submissions.size(); ++i) {
    const auto& [worker, submission] = submissions[i];
    std::optional<Refusal>& refusal = refusals[i];
    if (!refusal) refusal = refusal_if_unpublished(submission);
    deliveries.push_back({.worker = worker,
                          .submission = &submission,
                          .refusal_reason = refusal ? refusal->reason : std::string_view(),
                          .detail = refusal ? refusal->detail : std::string(),
                          .unscored = !refusal && scores_.is_unscored(submission)});
  }
  const auto verdicts = desk_.ledger->submit(deliveries, batches_.step(), desk_.clock.unix_seconds());
  if (!verdicts) {
    if (desk_.database.stall_if_database_error(verdicts.error())) return false;
    log::error("trajectories not stored: {}", verdicts.error().message());
    return true;
  }
  for (std::size_t i = 0; i < verdicts->size(); ++i) {
    const replay_buffer::Verdict& verdict = (*verdicts)[i];
    const auto& [worker, submission] = submissions[i];
    acknowledge(worker, submission, verdict);
    // The ledger may have refused the submission for a reason of its own. Then the checker's reason does not count.
    const bool forged = refusals[i] && refusals[i]->forged && verdict.reason == refusals[i]->reason;
    const bool is_foreign_lease = verdict.reason == "unknown lease" || verdict.reason == "lease of another worker";
    if (forged || is_foreign_lease || verdict.reason == "malformed")
      discipline_.count_malformed(
          worker, fmt::format("lease {}: {}: {}", verdict.lease, verdict.reason, printable(verdict.detail)), forged);
  }
  return true;
}

void DeskSubmissions::acknowledge(WorkerId worker, const schema::Submission& submission,
                                  const replay_buffer::Verdict& verdict) {
  schema::LearnerMessage message;
  schema::SubmissionAck& ack = *message.mutable_ack();
  ack.set_lease(verdict.lease.value);
  ack.set_accepted(verdict.accepted);
  ack.set_reason(verdict.reason);
  desk_.events.send(worker, message.SerializeAsString());
  if (!verdict.accepted) ++refused_[verdict.reason];
  if (verdict.accepted && !verdict.duplicate) {
    scores_.on_submission_accepted(worker, submission);
    desk_.events.accepted(worker, static_cast<std::uint64_t>(submission.trajectories_size()), verdict.lease_seconds);
  } else {
    (void)discipline_.count_idle_message(worker);  // it brought no new trajectories
  }
}

}  // namespace echoline::learner

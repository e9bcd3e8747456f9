// Grants, renews and ends leases. DeskLogic calls it for messages and due work.
#include "learner/desk_leases.hpp"

#include <algorithm>

#include "base/log.hpp"
#include "base/text.hpp"

namespace echoline::learner {
namespace {

constexpr std::uint32_t kRetryMs = 40;             // until a worker without leases asks again
constexpr std::uint32_t kSampleProgressMs = 5000;  // between a worker's signs of progress on a client's requests
constexpr std::uint32_t kRefusedRetryMs = 1000;    // the same if it is retired or its policy is not accepted

constexpr int kLeaseRoundsMax = 8;       // attempts per request to lease groups that are not all set aside
constexpr double kProgressPerLease = 3;  // progress messages that a worker sends within its shortest lease

// The text by which reports count failures; it must not change.
std::string_view reason_text(schema::WorkFailure failure) {
  switch (failure) {
    case schema::WORK_FAILURE_PROMPT:
      return "prompt cannot be used";
    case schema::WORK_FAILURE_MEMORY:
      return "out of memory";
    case schema::WORK_FAILURE_SCORING:
      return "scoring failed";
    case schema::WORK_FAILURE_SIZE:
      return "too large to send";
    default:
      return "generation failed";
  }
}

// The lease that a worker names. Clears the highest bit, because SQLite's integers are signed.
LeaseId lease_id(std::uint64_t stated) { return LeaseId{stated & static_cast<std::uint64_t>(INT64_MAX)}; }

std::vector<LeaseId> lease_ids(const google::protobuf::RepeatedField<std::uint64_t>& stated) {
  std::vector<LeaseId> ids;
  for (const std::uint64_t id : stated) ids.push_back(lease_id(id));
  return ids;
}

}  // namespace

bool DeskLeases::grant_and_renew(std::span<const Message> messages) {
  std::vector<std::pair<WorkerId, schema::LearnerMessage>> answers;
  const Status durable = desk_.ledger->run_in_transaction([&] {
    for (const auto& [worker, message] : messages) {
      if (message->has_request())
        grant(worker, message->request(),
              *answers.emplace_back(worker, schema::LearnerMessage()).second.mutable_grant());
      else
        renew(worker, message->progress());
    }
  });
  if (!durable && desk_.database.stall_if_database_error(durable.error())) return false;
  if (!durable) log::error("no lease is granted or renewed: {}", durable.error().message());
  for (auto& [worker, answer] : answers) {
    if (!durable) answer.mutable_grant()->clear_leases();  // without leases, the worker asks again
    desk_.events.send(worker, answer.SerializeAsString());
  }
  set_aside_.report_new(/*before_lease=*/true);
  return true;
}

void DeskLeases::grant(WorkerId worker, const schema::WorkRequest& request, schema::WorkGrant& answer) {
  const Version version{request.version()};
  answer.set_retry_after_ms(kRetryMs);
  policies_.record_request(worker, version);
  if (is_retired(worker)) {  // gets no lease, and has drained once it holds none
    answer.set_retry_after_ms(kRefusedRetryMs);
    if (leases_held(worker) == 0 && desk_.events.drained) desk_.events.drained(worker);
    return;
  }
  const std::string* published_digest = policies_.digest_of(version);
  if (published_digest != nullptr && *published_digest != request.policy_digest()) {
    // Faulty memory or a faulty disk looks like this as well, so the worker is expelled only if it repeats it.
    discipline_.count_malformed(worker,
                                fmt::format("its version {} has another digest than the published one", version));
    answer.set_retry_after_ms(kRefusedRetryMs);
    return;
  }
  if (policies_.check_unusable_for(worker, version)) return answer.set_retry_after_ms(kRefusedRetryMs);
  // A version that is not published yet: the worker asks again after kRetryMs.
  if (published_digest == nullptr || !set_aside_.can_generate()) return;
  if (SampleDesk* samples = desk_.options.samples) {
    samples->grant(worker, version, *published_digest,
                   std::uint64_t{request.groups_max()} * desk_.options.pacing.group_size, desk_.clock.unix_seconds(),
                   answer);
    answer.set_progress_every_ms(kSampleProgressMs);
    return;
  }
  const Status granted = add_leases(worker, request, answer);
  if (!granted) log::error("no lease granted: {}", granted.error().message());
  const auto fresh_steps = desk_.options.pacing.staleness.budget + 1;  // budget 0: a policy serves the next step only
  const auto slow_batch_seconds = desk_.ledger->too_slow_batch_seconds(worker);
  if (slow_batch_seconds && logged_slow_.insert(worker).second)
    log::warn(
        "worker {} takes {:.1f} s for a batch of groups and a policy is fresh enough for {} steps of {:.1f} s: it only "
        "helps where the learner would wait. Raise staleness.budget, or rent a faster one",
        worker, *slow_batch_seconds, fresh_steps, batches_.step_seconds().value_or(0));
}

Status DeskLeases::add_leases(WorkerId worker, const schema::WorkRequest& request, schema::WorkGrant& answer) {
  const Version version{request.version()};
  double shortest_lease_s = 0;  // 0: no lease yet
  // Another round follows if all groups of this one are set aside, because their prompts cannot be used.
  for (int round = 0; round < kLeaseRoundsMax && answer.leases().empty() && set_aside_.can_generate(); ++round) {
    ECHO_ASSIGN(const auto leases, desk_.ledger->grant({.worker = worker,
                                                        .version = version,
                                                        .policy_digest = *policies_.digest_of(version),
                                                        .groups_max = request.groups_max(),
                                                        .step_seconds = batches_.step_seconds(),
                                                        .newest = policies_.newest_published()},
                                                       batches_.step(), desk_.clock.unix_seconds()));
    if (desk_.events.turned_away && desk_.ledger->was_turned_away(worker)) desk_.events.turned_away(worker);
    const double without_work_s = desk_.ledger->take_seconds_without_work(worker, desk_.clock.unix_seconds());
    if (desk_.events.without_work && without_work_s > 0) desk_.events.without_work(worker, without_work_s);
    if (leases.empty()) break;
    for (const replay_buffer::LeaseRecord& record : leases) {
      const auto question = desk_.checker.question(record.group);
      if (!question) {
        ECHO_TRY(desk_.ledger->set_aside(record.id, reason_text(schema::WORK_FAILURE_PROMPT), question.error().detail));
        continue;
      }
      set_aside_.on_group_leased();
      schema::Lease& lease = *answer.add_leases();
      lease.set_id(record.id.value);
      lease.set_version(record.version.value);
      lease.set_policy_digest(record.policy_digest);
      lease.set_expires_unix_s(record.expires_unix_s);
      lease.set_group(record.group.value);
      *lease.mutable_problem() = desk_.checker.worker_view((*question)->problem);
      lease.set_unscored(desk_.checker.is_scored_by_learner((*question)->problem));
      lease.set_rollouts(record.rollouts);
      shortest_lease_s = shortest_lease_s == 0 ? record.lease_s : std::min(shortest_lease_s, record.lease_s);
    }
  }
  answer.set_progress_every_ms(static_cast<std::uint32_t>(1000 * shortest_lease_s / kProgressPerLease));
  return ok();
}

std::size_t DeskLeases::leases_held(WorkerId worker) const {
  return desk_.options.samples ? desk_.options.samples->leases_held(worker) : desk_.ledger->leases_held(worker);
}

void DeskLeases::renew(WorkerId worker, const schema::WorkProgress& progress) {
  if (SampleDesk* samples = desk_.options.samples)
    return samples->renew(worker, {progress.leases().begin(), progress.leases().end()}, progress.progress(),
                          desk_.clock.unix_seconds());
  const auto renewed =
      desk_.ledger->renew(worker, lease_ids(progress.leases()), progress.progress(), desk_.clock.unix_seconds());
  if (!renewed) log::error("leases not renewed: {}", renewed.error().message());
}

bool DeskLeases::return_leases(WorkerId worker, const schema::WorkReturned& returned) {
  if (SampleDesk* samples = desk_.options.samples) {
    for (const std::uint64_t lease : returned.leases()) samples->return_lease(worker, lease, /*failure=*/"");
    return true;
  }
  const auto stored = desk_.ledger->return_leases(worker, lease_ids(returned.leases()));
  if (!stored && desk_.database.stall_if_database_error(stored.error())) return false;
  if (!stored) log::error("leases not returned: {}", stored.error().message());
  return true;
}

bool DeskLeases::fail_lease(WorkerId worker, const schema::WorkFailed& failure) {
  if (SampleDesk* samples = desk_.options.samples) {
    samples->return_lease(worker, failure.lease(),
                          fmt::format("{}: {}", reason_text(failure.failure()), printable(failure.detail())));
    return true;
  }
  if (failure.failure() == schema::WORK_FAILURE_GENERATION) return report_unusable_policy(worker, failure);
  const std::string_view reason = reason_text(failure.failure());
  const LeaseId lease = lease_id(failure.lease());
  const std::string detail = printable(failure.detail());
  const auto was_leased =
      desk_.ledger->on_group_failed({.worker = worker, .lease = lease, .reason = reason, .detail = detail});
  if (!was_leased && desk_.database.stall_if_database_error(was_leased.error())) return false;
  if (!was_leased) log::error("lease {} not taken back: {}", lease, was_leased.error().message());
  if (!was_leased || !*was_leased) return true;  // *was_leased is false for a lease that the worker does not hold
  log::warn("worker {} gives lease {} back: {}: {}", worker, lease, reason, detail);
  set_aside_.report_new();
  discipline_.count_failure(worker, fmt::format("group after group fails on it alone: {}", reason));
  return true;
}

// The worker reports that the policy's log-probabilities are not finite. Its lease is returned without a failure of the
// group. One worker's report keeps only that worker from the version, because its memory may be broken, or it may lie.
bool DeskLeases::report_unusable_policy(WorkerId worker, const schema::WorkFailed& failure) {
  const LeaseId lease = lease_id(failure.lease());
  const auto returned = desk_.ledger->return_leases(worker, std::span(&lease, 1));
  if (!returned && desk_.database.stall_if_database_error(returned.error())) return false;
  if (!returned) {
    log::error("lease {} not taken back: {}", lease, returned.error().message());
    return true;
  }
  if (*returned == 0) return true;
  const auto report = policies_.report_unusable(worker, printable(failure.detail()));
  if (!report) return true;  // the worker was lost since its request
  if (report->is_workers_first)
    log::warn("worker {} cannot generate with version {}: {}", worker, report->version, printable(failure.detail()));
  if (!policies_.check_unusable(report->version))
    discipline_.count_failure(worker, "log-probabilities of one policy after another are not finite on it alone");
  return true;
}

void DeskLeases::expire() {
  if (SampleDesk* samples = desk_.options.samples) samples->expire(desk_.clock.unix_seconds());
  if (const auto expired = desk_.ledger->expire(desk_.clock.unix_seconds());
      !expired && !desk_.database.stall_if_database_error(expired.error()))
    log::error("{}", expired.error().message());
}

bool DeskLeases::extend_leases(Duration pause) {
  const auto extended = desk_.ledger->extend_all_leases(seconds(pause), desk_.clock.unix_seconds());
  if (!extended && desk_.database.stall_if_database_error(extended.error())) return false;
  if (!extended) log::error("{}", extended.error().message());
  return true;
}

Status DeskLeases::on_presence_change(const PresenceChange& change) {
  using Kind = PresenceChange::Kind;
  const Kind kind = change.kind;
  if (kind == Kind::kLeaving || kind == Kind::kRetired) retired_.insert(change.worker);
  if (kind == Kind::kLost || change.has_joined()) retired_.erase(change.worker);
  return kind == Kind::kLost || kind == Kind::kAway ? release_worker(change.worker) : ok();
}

Status DeskLeases::release_worker(WorkerId worker) {
  if (SampleDesk* samples = desk_.options.samples) samples->release_worker(worker);
  ECHO_ASSIGN(const std::uint64_t released, desk_.ledger->release_worker(worker, desk_.clock.unix_seconds()));
  if (released > 0) log::info("worker {} is lost: {} groups return to the pool", worker, released);
  logged_slow_.erase(worker);
  policies_.forget_worker(worker);
  set_aside_.report_new();
  return ok();
}

Status DeskLeases::check_completable() {
  const std::optional<Version> newest = policies_.newest();
  const bool no_worker_can_generate =
      newest && policies_.check_unusable(*newest) &&
      std::ranges::all_of(policies_.requested_versions(), [&](const auto& worker_and_version) {
        return is_retired(worker_and_version.first) ||
               policies_.check_unusable_for(worker_and_version.first, worker_and_version.second);
      });
  std::uint64_t live_leases = 0;  // leases of earlier versions, whose results may complete the batch
  if (no_worker_can_generate) {
    ECHO_ASSIGN(const replay_buffer::LedgerCounts leases, desk_.ledger->counts());
    live_leases = leases.live;
  }
  if (!no_worker_can_generate || live_leases > 0) {
    stuck_since_ = kNever;
    return ok();
  }
  if (stuck_since_ == kNever) stuck_since_ = desk_.clock.now();
  if (desk_.clock.now() - stuck_since_ < desk_.options.stuck_max) return ok();
  return fail(Code::kInvalid, "generate rollouts",
              "no worker can generate with version {}, because {}, and what earlier versions left is less than a batch "
              "for step {}. Go on from a checkpoint before that version, with --resume",
              *newest, policies_.latest_report_on(*newest), batches_.step() + 1);
}

void DeskLeases::check() const {
  ECHO_CHECK(stuck_since_ == kNever || stuck_since_ <= desk_.clock.now(), "the run is stuck from a later time on");
}

}  // namespace echoline::learner

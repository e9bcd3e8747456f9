// The rollout desk's work. RolloutDesk's thread calls it.
#include "learner/desk_logic.hpp"

#include "base/log.hpp"
#include "learner/message_threads.hpp"

namespace echoline::learner {
namespace {

constexpr std::size_t kMessagesTogetherMax = 256;        // handled with few transactions, each of which syncs the disk
constexpr Duration kPauseMin = std::chrono::seconds(1);  // shorter pauses of the thread do not extend leases

void report_unusable(const DeskEvents& events, const PolicyUnusable& policy) {
  log::error("{} workers cannot generate with version {}: {}; no leases are granted for it any more",
             policy.workers.size(), policy.version, policy.detail);
  if (events.policy_unusable) events.policy_unusable(policy);
}

}  // namespace

Result<std::unique_ptr<DeskLogic>> DeskLogic::open(DeskContext desk, std::uint64_t resume_step) {
  const replay_buffer::Pacing& pacing = desk.options.pacing;
  replay_buffer::BufferOptions buffer_options;
  buffer_options.group_size = pacing.group_size;
  buffer_options.staleness_budget = pacing.staleness.budget;
  ECHO_ASSIGN(desk.buffer, replay_buffer::ReplayBuffer::open(desk.options.file, buffer_options));
  ECHO_ASSIGN(desk.ledger,
              replay_buffer::JobLedger::open(*desk.buffer, {.pacing = pacing, .lease = desk.options.lease}));
  ECHO_TRY(desk.buffer->rewind(resume_step));
  // Workers have dropped their groups, because they lost the earlier process of the learner.
  ECHO_ASSIGN(const std::uint64_t released, desk.ledger->release_all());
  if (released > 0) log::info("{} groups of the earlier process return to the pool", released);
  return std::unique_ptr<DeskLogic>(new DeskLogic(std::move(desk), resume_step));
}

DeskLogic::DeskLogic(DeskContext desk, std::uint64_t resume_step)
    : desk_(std::move(desk)),
      policies_(desk_.options.pacing.staleness.budget,
                [this](const PolicyUnusable& policy) { report_unusable(desk_.events, policy); }),
      discipline_(desk_),
      set_aside_(desk_),
      batches_(desk_, resume_step),
      scores_(desk_, discipline_, set_aside_, batches_),
      leases_(desk_, policies_, discipline_, set_aside_, batches_),
      submissions_(desk_, policies_, discipline_, scores_, batches_) {
  limits_.message_max = desk_.checker.message_max(desk_.options.pacing.group_size);
}

void DeskLogic::extend_leases_after_pause() {
  DatabaseBacklog& database = desk_.database;
  const TimePoint now = desk_.clock.now();
  const Duration since_last_tick = now - desk_.clock.last_tick();
  if (database.can_store()) {
    // The process was stopped or the disk was busy. Messages of that time are still unread.
    if (const Duration pause = since_last_tick - kTick; pause >= kPauseMin) {
      log::info("the rollout desk was held up for {}: no lease ends for that", to_text(pause));
      if (!leases_.extend_leases(pause)) return;
    }
    desk_.clock.tick(now);
  } else if (database.is_retry_due() && leases_.extend_leases(since_last_tick)) {
    // Extending the leases was the retry. It succeeded, so the database stores again.
    batches_.exclude_pause(since_last_tick);  // the stall must not count as time of a learner step
    desk_.clock.tick(now);
    database.on_retry_succeeded();
    return_leases_of_overflowed();
  }
}

// Returns the leases of workers that sent more than the desk keeps during a stall, because their results may be among
// the dropped messages. The workers are not blamed.
void DeskLogic::return_leases_of_overflowed() {
  for (const WorkerId worker : desk_.inbox.take_overflowed())
    desk_.database.push_back(DatabaseWrite{[this, worker]() -> Status {
      ECHO_ASSIGN(const std::uint64_t leases, desk_.ledger->return_all_leases(worker));
      log::warn(
          "worker {} sent more messages than are kept while the database could not store; {} of its groups go to other "
          "workers",
          worker, leases);
      return ok();
    }});
}

void DeskLogic::defer(Deferred work) {
  desk_.database.push_back(std::move(work));
  if (desk_.database.backlog_size() >= kMessagesTogetherMax) process_deferred();
}

void DeskLogic::process_deferred() {
  desk_.database.process_backlog(kMessagesTogetherMax,
                                 [this](std::vector<Incoming> messages) { handle_messages(std::move(messages)); });
}

void DeskLogic::run_due() {
  process_deferred();
  if (desk_.database.can_store()) {
    leases_.expire();
    discipline_.expel_unproductive_workers();
    scores_.run_due();
    process_deferred();  // writes that the calls above put into the backlog
  }
  desk_.database.finish_catching_up();
  batches_.hand_over_batch(set_aside_.can_generate(), [this] { return leases_.check_completable(); });
}

// Parses messages, on several threads if they are long. Absent for workers whose messages are ignored.
std::vector<std::optional<Result<schema::WorkerMessage>>> DeskLogic::parse(std::span<const Incoming> messages) const {
  std::size_t bytes = 0;
  for (const Incoming& message : messages) bytes += message.bytes.size();
  std::vector<std::optional<Result<schema::WorkerMessage>>> parsed(messages.size());
  for_each_parallel(messages.size(), message_threads(bytes), [&](unsigned, std::size_t i) {
    if (!desk_.inbox.is_blocked(messages[i].worker))
      parsed[i] = data_plane::parse_worker_message(messages[i].bytes, limits_);
  });
  return parsed;
}

// Stores the submissions in one transaction, then handles requests for leases and their renewals in another, and other
// messages one by one. Messages that must wait for the database go back into its backlog.
void DeskLogic::handle_messages(std::vector<Incoming> messages) {
  DeskSubmissions::Submissions submissions;
  std::vector<std::size_t> submission_indices;                                // in `messages`
  std::vector<std::pair<std::size_t, schema::WorkerMessage>> other_messages;  // with their indices in `messages`
  std::vector<bool> must_wait(messages.size(), false);
  std::vector<std::optional<Result<schema::WorkerMessage>>> parsed_messages = parse(messages);
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const Incoming& message = messages[i];
    if (!parsed_messages[i] || desk_.inbox.is_blocked(message.worker)) continue;
    auto& parsed = *parsed_messages[i];
    if (!parsed) {
      submissions_.refuse_unreadable(message.worker, parsed.error().message());
    } else if (parsed->has_submission()) {
      submissions.emplace_back(message.worker, std::move(*parsed->mutable_submission()));
      submission_indices.push_back(i);
    } else {
      other_messages.emplace_back(i, std::move(*parsed));
    }
  }
  if (!submissions.empty() && !submissions_.store(submissions))
    for (const std::size_t i : submission_indices) must_wait[i] = true;
  std::vector<DeskLeases::Message> lease_messages;  // granted and renewed in one transaction
  std::vector<std::size_t> lease_indices;           // in `messages`
  for (const auto& [i, message] : other_messages) {
    Incoming& incoming = messages[i];
    if (desk_.inbox.is_blocked(incoming.worker)) continue;
    if (desk_.database.can_store()) {
      // Checked once, even if the message must wait and is handled again.
      if (!std::exchange(incoming.skips_rate_check, true) && !discipline_.count_idle_message(incoming.worker)) continue;
      if (message.has_request() || message.has_progress()) {
        lease_messages.emplace_back(incoming.worker, &message);
        lease_indices.push_back(i);
        continue;
      }
      if (handle(incoming.worker, message)) continue;
    }
    must_wait[i] = true;
  }
  if (!lease_messages.empty() && (!desk_.database.can_store() || !leases_.grant_and_renew(lease_messages)))
    for (const std::size_t i : lease_indices) must_wait[i] = true;
  // Backwards, so that the messages that are pushed to the front of the backlog keep their order.
  for (std::size_t i = messages.size(); i-- > 0;) {
    if (must_wait[i])
      desk_.database.push_front(std::move(messages[i]));
    else
      desk_.inbox.release(messages[i].worker, messages[i].bytes.size());
  }
}

// Handles a failure, a return of leases or a departure. Returns false if the message must wait for the database.
bool DeskLogic::handle(WorkerId worker, const schema::WorkerMessage& message) {
  if (message.has_failed()) return leases_.fail_lease(worker, message.failed());
  if (message.has_returned()) return leases_.return_leases(worker, message.returned());
  if (message.has_leaving()) on_worker_leaving(worker);
  return true;
}

// The worker's machine ends. The worker finishes its groups if the run still needs results.
void DeskLogic::on_worker_leaving(WorkerId worker) {
  if (desk_.run_needs_results) {
    if (desk_.events.leaving(worker))
      leases_.retire(worker);  // at once, because its next request may be in the same batch
    return;
  }
  leases_.retire(worker);
  schema::LearnerMessage message;
  message.mutable_stop()->set_reason("the run has ended");
  desk_.events.send(worker, message.SerializeAsString());
}

Status DeskLogic::consume(std::uint64_t step, const replay_buffer::Batch& batch) {
  ECHO_TRY(batches_.consume(step, batch));
  if (const auto step_s = batches_.step_seconds()) scores_.on_step_measured(*step_s);
  return ok();
}

Result<DeskCounts> DeskLogic::counts() {
  check();
  DeskCounts counts;
  ECHO_ASSIGN(counts.buffer, desk_.buffer->counts(batches_.step()));
  ECHO_ASSIGN(counts.leases, desk_.ledger->counts());
  counts.refused = submissions_.refused();
  counts.regrading = scores_.regrading();
  counts.scoring = scores_.scoring();
  return counts;
}

void DeskLogic::check() const {
  desk_.database.check();
  desk_.inbox.check();
  policies_.check();
  discipline_.check();
  set_aside_.check();
  batches_.check();
  leases_.check();
}

}  // namespace echoline::learner

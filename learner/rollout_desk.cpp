#include "learner/rollout_desk.hpp"

#include <algorithm>
#include <future>
#include <random>

#include "base/clock.hpp"
#include "base/log.hpp"
#include "base/text.hpp"
#include "data_plane/trajectory.hpp"

namespace echoline::learner {
namespace {

constexpr std::size_t kQueueMax = 65'536;
constexpr std::size_t kCommitMax = 256;                     // submissions in one transaction
constexpr std::uint32_t kRetryMs = 40;                      // when there is nothing to generate yet
constexpr std::uint32_t kRefusedRetryMs = 1000;             // when its policy is not the published one
constexpr Duration kTick = std::chrono::milliseconds(200);  // leases expire at least this often
constexpr Duration kPauseMin = std::chrono::seconds(1);
constexpr int kRefillsMax = 8;                // rounds in which groups that nobody can generate are replaced by others
constexpr std::uint64_t kSetAsideShown = 20;  // groups whose setting aside the log tells
constexpr double kProgressPerLease = 3;       // signs of life in the shortest lease granted

// The stable text that reports count by.
std::string_view text_of(schema::WorkFailure failure) {
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

std::vector<LeaseId> lease_ids(const google::protobuf::RepeatedField<std::uint64_t>& told) {
  std::vector<LeaseId> ids;
  for (const std::uint64_t id : told) ids.push_back(LeaseId{id & static_cast<std::uint64_t>(INT64_MAX)});
  return ids;
}

std::string digest_bytes(const overlay::Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

}  // namespace

RolloutDesk::RolloutDesk(const DeskOptions& options, Door door, DeskEvents events)
    : options_(options),
      events_(std::move(events)),
      inbox_(door.message_max(options.pacing.group_size)),
      clock_(options.clock),
      database_(clock_, options.retry_every, options.database_patience, events_.held_up),
      queue_(kQueueMax),
      policies_(options.pacing.staleness.budget, [this](const PolicyUnusable& policy) { tell_unusable(policy); }),
      door_(std::move(door)) {
  limits_.message_max = door_.message_max(options.pacing.group_size);
}

Result<std::unique_ptr<RolloutDesk>> RolloutDesk::open(const DeskOptions& options, Door door, std::uint64_t resume_step,
                                                       DeskEvents events) {
  std::unique_ptr<RolloutDesk> desk(new RolloutDesk(options, std::move(door), std::move(events)));
  std::promise<Status> opened;
  std::future<Status> outcome = opened.get_future();
  desk->thread_ = std::thread([&opened, resume_step, raw = desk.get()] {
    Status status = raw->open_on_thread(resume_step);
    const bool good = status.has_value();
    opened.set_value(std::move(status));
    if (good) raw->loop();
  });
  ECHO_TRY(outcome.get());
  return desk;
}

RolloutDesk::~RolloutDesk() { stop(); }

void RolloutDesk::stop() {
  hand_over_.stop();
  queue_.close();
  if (thread_.joinable()) thread_.join();
}

// The time that leases are compared with. It stands still while the database cannot store.
double RolloutDesk::lease_time() const {
  return database_.can_store() ? clock_.unix_seconds() : clock_.unix_seconds_at_last_tick();
}

// A stopped process or a busy disk: what workers handed in meanwhile is still to be read.
void RolloutDesk::excuse_pause() {
  const TimePoint now = clock_.now();
  const Duration late = now - clock_.last_tick() - kTick;
  if (late >= kPauseMin) {
    log::info("the rollout desk was held up for {}: no lease ends for that", to_text(late));
    const auto excused = ledger_->excuse(seconds(late), clock_.unix_seconds());
    if (!excused && database_.held_up_by(excused.error())) return;
    if (!excused) log::error("{}", excused.error().message());
  }
  clock_.tick(now);
}

// Ends the hold-up when the database stores again that leases last longer by the time that has passed.
void RolloutDesk::try_again() {
  if (!database_.is_retry_due()) return;
  const TimePoint now = clock_.now();
  const Duration passed = now - clock_.last_tick();
  const auto excused = ledger_->excuse(seconds(passed), clock_.unix_seconds());
  if (!excused && database_.held_up_by(excused.error())) return;
  if (!excused) log::error("{}", excused.error().message());
  step_pace_.paused(seconds(passed));
  clock_.tick(now);
  database_.retry_succeeded();
  release_overflowed();
}

// These workers sent more than the desk keeps while it is held up. Their groups go to other workers, without blame.
void RolloutDesk::release_overflowed() {
  for (const WorkerId worker : inbox_.take_overflowed())
    database_.push_back(Write{[this, worker]() -> Status {
      ECHO_ASSIGN(const std::uint64_t leases, ledger_->give_back_all(worker));
      log::warn(
          "worker {} sent more messages than are kept while the database could not store; {} of its groups go to other "
          "workers",
          worker, leases);
      return ok();
    }});
}

Status RolloutDesk::open_on_thread(std::uint64_t resume_step) {
  replay_buffer::BufferOptions buffer;
  buffer.group_size = options_.pacing.group_size;
  buffer.staleness_budget = options_.pacing.staleness.budget;
  ECHO_ASSIGN(buffer_, replay_buffer::ReplayBuffer::open(options_.file, buffer));
  replay_buffer::LedgerOptions ledger;
  ledger.pacing = options_.pacing;
  ledger.lease = options_.lease;
  ECHO_ASSIGN(ledger_, replay_buffer::JobLedger::open(*buffer_, ledger));
  for (const auto& [worker, kept] : ledger_->misconduct()) conduct_.restore(worker, kept);
  std::random_device unforeseeable;
  const std::uint64_t secret = (std::uint64_t{unforeseeable()} << 32) | unforeseeable();
  const auto wake = [this] { queue_.try_push(Item(Task([] {}))); };
  regrader_ = std::make_unique<Regrader>(door_.second_look(), secret, wake);
  scorer_ = std::make_unique<Scorer>(door_.second_look(), wake);
  step_ = resume_step;
  ECHO_TRY(buffer_->rewind(resume_step));
  ECHO_ASSIGN(const std::uint64_t released, ledger_->release_all());  // workers end with their learner
  if (released > 0) log::info("{} groups of the earlier process return to the pool", released);
  return ok();
}

void RolloutDesk::loop() {
  for (;;) {
    std::optional<Item> item = queue_.pop(kTick);
    if (!item && queue_.closed()) break;
    if (database_.can_store())
      excuse_pause();
    else
      try_again();
    for (; item; item = queue_.pop(Duration(0))) {
      if (const auto* task = std::get_if<Task>(&*item)) {
        work_off();
        (*task)();
      } else {
        database_.push_back(std::get<Deferred>(std::move(*item)));
        if (database_.backlog() >= kCommitMax) work_off();
      }
    }
    work_off();
    if (database_.can_store()) {
      if (const auto expired = ledger_->expire(clock_.unix_seconds());
          !expired && !database_.held_up_by(expired.error()))
        log::error("{}", expired.error().message());
      tell_idle();
      expel_liars();
      score();
      work_off();
    }
    database_.finish_catching_up();
    offer_batch();
  }
  regrader_.reset();
  scorer_.reset();
  ledger_.reset();  // on this thread, which owns the database
  buffer_.reset();
}

void RolloutDesk::work_off() {
  database_.work_off(kCommitMax, [this](std::vector<Incoming> messages) { handle_requests(std::move(messages)); });
}

template <class T>
Result<T> RolloutDesk::call(std::function<Result<T>()> work) {
  auto promise = std::make_shared<std::promise<Result<T>>>();
  std::future<Result<T>> outcome = promise->get_future();
  if (!queue_.try_push(Item(Task([promise, work = std::move(work)] { promise->set_value(work()); }))))
    return fail(Code::kCancelled, "rollout desk", "it has stopped or its queue of {} is full", kQueueMax);
  return outcome.get();
}

void RolloutDesk::publishing(Version version) {
  const Status done = call<void>([this, version]() -> Status {
    policies_.publishing(version);
    return ok();
  });
  if (!done) log::warn("{}", done.error().message());
}

void RolloutDesk::published(Version version, const overlay::Digest& digest) {
  const Status done = call<void>([this, version, digest]() -> Status {
    policies_.published(version, digest_bytes(digest));
    return ok();
  });
  if (!done) log::warn("{}", done.error().message());
}

void RolloutDesk::receive(WorkerId worker, std::string bytes) {
  const std::size_t size = bytes.size();
  const DeskInbox::Admission admission = inbox_.admit(worker, size, held_up());
  if (!admission.expel.empty()) return expel(worker, admission.expel);
  if (!admission.taken) return;
  // A message of a time without storage is handled within a moment when that has ended, with all the others: it is no
  // part of a flood.
  if (queue_.try_push(Item(Deferred(Incoming{worker, std::move(bytes), held_up()})))) return;
  inbox_.read(worker, size);
  log::warn("worker {}: message dropped, {} wait already; its lease will expire", worker, kQueueMax);
}

// What still waits of it is not looked at any more.
void RolloutDesk::expel(WorkerId worker, const std::string& reason) {
  inbox_.bar(worker, reason);
  events_.misbehaved(worker, reason);
}

void RolloutDesk::worker_lost(WorkerId worker) {
  queue_.try_push(Item(Deferred(Write{[this, worker]() -> Status {
    ECHO_ASSIGN(const std::uint64_t released, ledger_->release_worker(worker, clock_.unix_seconds()));
    if (released > 0) log::info("worker {} is lost: {} groups return to the pool", worker, released);
    told_slow_.erase(worker);
    policies_.left(worker);
    tell_set_aside();
    return ok();
  }})));
}

void RolloutDesk::worker_joined(WorkerId worker) {
  queue_.try_push(Item(Task([this, worker] { retired_.erase(worker); })));
}

void RolloutDesk::retire(WorkerId worker) {
  queue_.try_push(Item(Task([this, worker] { retired_.insert(worker); })));
}

void RolloutDesk::let_go(WorkerId worker) {
  retired_.insert(worker);
  if (!wants_no_more_) return events_.leaving ? events_.leaving(worker) : void();
  schema::LearnerMessage message;
  message.mutable_stop()->set_reason("the run has ended");
  events_.send(worker, message.SerializeAsString());
}

void RolloutDesk::note_malformed(WorkerId worker, const std::string& what) {
  log::warn("worker {}: {}", worker, what);
  if (conduct_.malformed(worker)) expel(worker, what);
  keep_conduct(worker);
}

void RolloutDesk::tell_off_talker(WorkerId worker) {
  expel(worker, "it sends messages without end that bring nothing");
}

void RolloutDesk::keep_conduct(WorkerId worker) {
  // After a failure the file lacks this until the next change; memory has it.
  if (const Status kept = database_.checked(ledger_->keep(worker, conduct_.of(worker))); !kept)
    log::error("{}", kept.error().message());
}

void RolloutDesk::tell_idle() {
  for (const replay_buffer::Idler& idler : ledger_->newly_idle()) expel(idler.worker, idler.reason);
}

// Messages that have to wait for the database go back into the backlog.
void RolloutDesk::handle_requests(std::vector<Incoming> messages) {
  std::vector<std::pair<WorkerId, schema::Submission>> submissions;
  std::vector<std::size_t> submitted;                                 // where they stand in `messages`
  std::vector<std::pair<std::size_t, schema::WorkerMessage>> others;  // likewise
  std::vector<bool> waits(messages.size(), false);
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const Incoming& message = messages[i];
    if (inbox_.is_barred(message.worker)) continue;
    auto parsed = data_plane::parse_worker_message(message.bytes, limits_);
    if (!parsed) {
      ++refused_["unreadable message"];
      note_malformed(message.worker, parsed.error().message());
    } else if (parsed->has_submission()) {
      submissions.emplace_back(message.worker, std::move(*parsed->mutable_submission()));
      submitted.push_back(i);
    } else {
      others.emplace_back(i, std::move(*parsed));
    }
  }
  if (!submissions.empty() && !take_in(submissions))
    for (const std::size_t i : submitted) waits[i] = true;
  std::vector<Message> together;
  std::vector<std::size_t> places;  // where they stand in `messages`
  for (const auto& [i, message] : others) {
    Incoming& from = messages[i];
    if (inbox_.is_barred(from.worker)) continue;
    if (database_.can_store()) {
      if (!std::exchange(from.counted, true) && conduct_.talked(from.worker, clock_.now())) {
        tell_off_talker(from.worker);
        continue;
      }
      if (message.has_request() || message.has_progress()) {
        together.emplace_back(from.worker, &message);
        places.push_back(i);
        continue;
      }
      if (handle(from.worker, message)) continue;
    }
    waits[i] = true;
  }
  if (!together.empty() && (!database_.can_store() || !lease_and_renew(together)))
    for (const std::size_t i : places) waits[i] = true;
  for (std::size_t i = messages.size(); i-- > 0;) {
    if (waits[i])
      database_.push_front(std::move(messages[i]));
    else
      inbox_.read(messages[i].worker, messages[i].bytes.size());
  }
}

// False when it has to wait for the database.
bool RolloutDesk::handle(WorkerId worker, const schema::WorkerMessage& message) {
  if (message.has_failed()) return take_back(worker, message.failed());
  if (message.has_returned()) return give_back(worker, message.returned());
  if (message.has_leaving()) let_go(worker);
  return true;
}

// Of trajectories that the door let in: a token of a policy that nobody has yet would pass for a fresh one.
std::optional<Refusal> RolloutDesk::unpublished(const schema::Submission& submission) const {
  for (const schema::Trajectory& t : submission.trajectories()) {
    const Version last{t.spans(t.spans_size() - 1).version()};
    if (!policies_.newest() || last > *policies_.newest())
      return Refusal{"malformed", fmt::format("tokens of version {}, which is not published", last), false};
  }
  return std::nullopt;
}

// False when nothing could be stored: the submissions wait for another try.
bool RolloutDesk::take_in(const std::vector<std::pair<WorkerId, schema::Submission>>& submissions) {
  std::vector<replay_buffer::Delivery> deliveries;
  std::vector<std::optional<Refusal>> refusals;
  for (const auto& [worker, submission] : submissions) {
    refusals.push_back(door_.refusal(submission));
    if (!refusals.back()) refusals.back() = unpublished(submission);
    const auto& refused = refusals.back();
    deliveries.push_back({worker, &submission, refused ? refused->reason : std::string_view(),
                          refused ? refused->detail : std::string(), !refused && is_unscored(submission)});
  }
  const auto verdicts = ledger_->submit(deliveries, step_, clock_.unix_seconds());
  if (!verdicts) {
    if (database_.held_up_by(verdicts.error())) return false;
    log::error("trajectories not stored: {}", verdicts.error().message());
    return true;
  }
  for (std::size_t i = 0; i < verdicts->size(); ++i) {
    const replay_buffer::Verdict& verdict = (*verdicts)[i];
    const auto& [worker, submission] = submissions[i];
    schema::LearnerMessage message;
    schema::SubmissionAck& ack = *message.mutable_ack();
    ack.set_lease(verdict.lease.value);
    ack.set_accepted(verdict.accepted);
    ack.set_reason(verdict.reason);
    events_.send(worker, message.SerializeAsString());
    if (!verdict.accepted) ++refused_[verdict.reason];
    if (verdict.accepted && !verdict.duplicate) {
      note_taken_in(worker, submission);
      events_.accepted(worker, static_cast<std::uint64_t>(submission.trajectories_size()), verdict.held_s);
    }
    const bool idle_talk = !verdict.accepted || verdict.duplicate;
    if (idle_talk && conduct_.talked(worker, clock_.now())) tell_off_talker(worker);
    const bool forged = refusals[i] && refusals[i]->forged && verdict.reason == refusals[i]->reason;
    const bool not_its = verdict.reason == "unknown lease" || verdict.reason == "lease of another worker";
    if (!forged && !not_its && verdict.reason != "malformed") continue;
    const std::string why = fmt::format("lease {}: {}: {}", verdict.lease, verdict.reason, printable(verdict.detail));
    log::warn("worker {}, {}", worker, why);
    if (forged || conduct_.malformed(worker)) expel(worker, why);
    keep_conduct(worker);
  }
  return true;
}

void RolloutDesk::renew(WorkerId worker, const schema::WorkProgress& progress) {
  const auto renewed = ledger_->renew(worker, lease_ids(progress.leases()), progress.progress(), clock_.unix_seconds());
  if (!renewed) log::error("leases not renewed: {}", renewed.error().message());
}

bool RolloutDesk::give_back(WorkerId worker, const schema::WorkReturned& returned) {
  const auto known = ledger_->give_back(worker, lease_ids(returned.leases()));
  if (!known && database_.held_up_by(known.error())) return false;
  if (!known) log::error("leases not returned: {}", known.error().message());
  return true;
}

// The lease goes back and does not count against its problem. One worker's word keeps that worker from the version and
// no other one: its memory may be broken, or it may lie.
bool RolloutDesk::blame_policy(WorkerId worker, const schema::WorkFailed& failure) {
  const LeaseId lease{failure.lease() & static_cast<std::uint64_t>(INT64_MAX)};
  const auto returned = ledger_->give_back(worker, std::span(&lease, 1));
  if (!returned && database_.held_up_by(returned.error())) return false;
  if (!returned) {
    log::error("lease {} not taken back: {}", lease, returned.error().message());
    return true;
  }
  if (*returned == 0) return true;
  const auto blamed = policies_.blame(worker, printable(failure.detail()));
  if (!blamed) return true;  // of before it was lost
  if (blamed->first)
    log::warn("worker {} cannot generate with version {}: {}", worker, blamed->version, printable(failure.detail()));
  if (policies_.is_unusable(blamed->version)) return true;
  if (conduct_.failed(worker))
    expel(worker, "log-probabilities of one policy after another are not finite on it alone");
  keep_conduct(worker);
  return true;
}

void RolloutDesk::tell_unusable(const PolicyUnusable& policy) {
  log::error("{} workers cannot generate with version {}: {}; no leases are granted for it any more",
             policy.workers.size(), policy.version, policy.detail);
  if (events_.policy_unusable) events_.policy_unusable(policy);
}

// An error if no result can come any more, because of the policies that workers have.
Status RolloutDesk::stuck() {
  const std::optional<Version> newest = policies_.newest();
  const bool kept =
      newest && policies_.is_unusable(*newest) && std::ranges::all_of(policies_.asking(), [&](const auto& asked) {
        return retired_.contains(asked.first) || policies_.is_kept_from(asked.first, asked.second);
      });
  std::uint64_t live = 0;
  if (kept) {
    ECHO_ASSIGN(const replay_buffer::LedgerCounts leases, ledger_->counts());
    live = leases.live;
  }
  if (!kept || live > 0) {
    stuck_since_ = kNever;
    return ok();
  }
  if (stuck_since_ == kNever) stuck_since_ = clock_.now();
  if (clock_.now() - stuck_since_ < options_.stuck_max) return ok();
  return fail(Code::kInvalid, "generate rollouts",
              "no worker can generate with version {}, because {}, and what earlier versions left is less than a batch "
              "for step {}. Go on from "
              "a checkpoint before that version, with --resume",
              *newest, policies_.detail_of(*newest), step_ + 1);
}

bool RolloutDesk::take_back(WorkerId worker, const schema::WorkFailed& failure) {
  if (failure.failure() == schema::WORK_FAILURE_GENERATION) return blame_policy(worker, failure);
  const std::string_view reason = text_of(failure.failure());
  const LeaseId lease{failure.lease() & static_cast<std::uint64_t>(INT64_MAX)};
  const std::string detail = printable(failure.detail());
  const auto known = ledger_->failed({worker, lease, reason, detail});
  if (!known && database_.held_up_by(known.error())) return false;
  if (!known) log::error("lease {} not taken back: {}", lease, known.error().message());
  if (!known || !*known) return true;
  log::warn("worker {} gives lease {} back: {}: {}", worker, lease, reason, detail);
  tell_set_aside();
  if (conduct_.failed(worker)) expel(worker, fmt::format("group after group fails on it alone: {}", reason));
  keep_conduct(worker);
  return true;
}

void RolloutDesk::tell_set_aside(bool unasked) {
  for (replay_buffer::SetAside& aside : ledger_->newly_set_aside()) {
    const auto problem = door_.problem(aside.group);
    GroupSetAside told{aside.group, problem ? problem->id() : "", std::move(aside.reason), std::move(aside.detail)};
    if (++told_set_aside_ <= kSetAsideShown)
      log::warn("group {} ('{}') is set aside: {}: {}{}", told.group, printable(told.problem), told.reason, told.detail,
                told_set_aside_ == kSetAsideShown ? "; further ones are in events.jsonl only" : "");
    if (conduct_.set_aside(unasked) && can_generate_)
      can_generate_ =
          fail(Code::kInvalid, "generate rollouts",
               "one group after another is set aside and none succeeds, the last one ('{}') because: {}: {}",
               printable(told.problem), told.reason, told.detail);
    door_.forget(told.group);
    if (events_.set_aside) events_.set_aside(told);
  }
}

// In one transaction: each worker is answered once its leases are on disk. False when that has to wait for the
// database.
bool RolloutDesk::lease_and_renew(std::span<const Message> messages) {
  std::vector<std::pair<WorkerId, schema::LearnerMessage>> answers;
  const Status durable = ledger_->together([&] {
    for (const auto& [worker, message] : messages) {
      if (message->has_request())
        grant(worker, message->request(),
              *answers.emplace_back(worker, schema::LearnerMessage()).second.mutable_grant());
      else
        renew(worker, message->progress());
    }
  });
  if (!durable && database_.held_up_by(durable.error())) return false;
  if (!durable) log::error("no lease is granted or renewed: {}", durable.error().message());
  for (auto& [worker, answer] : answers) {
    if (!durable) answer.mutable_grant()->clear_leases();
    events_.send(worker, answer.SerializeAsString());
  }
  tell_set_aside(true);
  return true;
}

void RolloutDesk::grant(WorkerId worker, const schema::WorkRequest& request, schema::WorkGrant& answer) {
  answer.set_retry_after_ms(kRetryMs);
  policies_.asked(worker, Version{request.version()});
  if (retired_.contains(worker)) {
    answer.set_retry_after_ms(kRefusedRetryMs);
    if (ledger_->held(worker) == 0 && events_.drained) events_.drained(worker);
    return;
  }
  const std::string* known = policies_.digest_of(Version{request.version()});
  if (known != nullptr && *known != request.policy_digest()) {
    // Memory or a disk that lies looks like this as well: it gets no work, and is told to go when it comes so again.
    note_malformed(worker, fmt::format("its version {} has another digest than the published one", request.version()));
    answer.set_retry_after_ms(kRefusedRetryMs);
    return;
  }
  if (policies_.is_kept_from(worker, Version{request.version()})) return answer.set_retry_after_ms(kRefusedRetryMs);
  if (known == nullptr || !can_generate_) return;
  const Status filled = fill(worker, request, answer);
  if (!filled) log::error("no lease granted: {}", filled.error().message());
  const auto slow = ledger_->too_slow(worker);
  if (slow && told_slow_.insert(worker).second)
    log::warn(
        "worker {} takes {:.1f} s for a batch of groups and a policy is fresh enough for {} steps of {:.1f} s: it only "
        "helps where the learner would wait. Raise staleness.budget, or rent a faster one",
        worker, *slow, options_.pacing.staleness.budget + 1, step_pace_.seconds().value_or(0));
}

Result<void> RolloutDesk::fill(WorkerId worker, const schema::WorkRequest& request, schema::WorkGrant& grant) {
  const Version version{request.version()};
  double shortest_s = 0;
  for (int round = 0; round < kRefillsMax && grant.leases().empty() && can_generate_; ++round) {
    ECHO_ASSIGN(const auto leases, ledger_->grant({worker, version, *policies_.digest_of(version), request.groups_max(),
                                                   step_pace_.seconds(), policies_.newest_published()},
                                                  step_, clock_.unix_seconds()));
    if (events_.turned_away && ledger_->turned_away(worker)) events_.turned_away(worker);
    if (leases.empty()) break;
    for (const replay_buffer::LeaseRecord& record : leases) {
      const auto question = door_.question(record.group);
      if (!question) {
        ECHO_TRY(ledger_->set_aside(record.id, text_of(schema::WORK_FAILURE_PROMPT), question.error().detail));
        continue;
      }
      conduct_.asked();
      schema::Lease& lease = *grant.add_leases();
      lease.set_id(record.id.value);
      lease.set_version(record.version.value);
      lease.set_policy_digest(record.policy_digest);
      lease.set_expires_unix_s(record.expires_unix_s);
      lease.set_group(record.group.value);
      *lease.mutable_problem() = door_.shown((*question)->problem);
      lease.set_unscored(door_.unscored((*question)->problem));
      lease.set_rollouts(record.rollouts);
      shortest_s = shortest_s == 0 ? record.lease_s : std::min(shortest_s, record.lease_s);
    }
  }
  grant.set_progress_every_ms(static_cast<std::uint32_t>(1000 * shortest_s / kProgressPerLease));
  return ok();
}

// A whole batch of groups that training will take. What it would refuse is discarded and counted, and another group
// generated in its place.
Result<std::optional<replay_buffer::Batch>> RolloutDesk::trainable_batch(std::uint64_t step) {
  for (;;) {
    ECHO_ASSIGN(auto batch, buffer_->sample(step, options_.pacing.groups_per_step()));
    if (!batch) return batch;
    bool sound = true;
    for (const replay_buffer::Group& group : batch->groups) {
      const Status status = door_.trainable(group.trajectories);
      if (status) continue;
      log::warn("group {} is discarded: {}", group.id, status.error().message());
      ECHO_TRY(buffer_->discard(group.id, "not trainable"));
      sound = false;
    }
    if (sound) return batch;
  }
}

void RolloutDesk::offer_batch() {
  const std::optional<std::uint64_t> wanted = hand_over_.wanted();
  if (!wanted) return;
  const std::uint64_t step = *wanted;
  const auto compute = [&]() -> Result<std::optional<replay_buffer::Batch>> {
    ECHO_TRY(database_.status());
    ECHO_TRY(can_generate_);
    ECHO_ASSIGN(const std::uint64_t stranded, ledger_->stranded_by_next_step(step, lease_time()));
    if (stranded > 0) {
      step_pace_.waits(lease_time());
      return std::optional<replay_buffer::Batch>();
    }
    step_pace_.goes_on(lease_time());
    ECHO_ASSIGN(auto batch, trainable_batch(step));
    if (!batch) ECHO_TRY(stuck());
    return batch;
  };
  auto answer = compute();
  if (answer && !*answer) return;
  if (!answer && database_.held_up_by(answer.error()) && database_.status()) return;
  std::vector<GroupId> ids = answer ? (*answer)->ids() : std::vector<GroupId>();
  if (hand_over_.answer(step, std::move(answer))) in_training_ = std::move(ids);
}

Result<std::optional<replay_buffer::Batch>> RolloutDesk::wait_batch(std::uint64_t step, Duration wait) {
  hand_over_.ask(step);
  queue_.try_push(Item(Task([] {})));  // wakes the desk, which then looks
  return hand_over_.wait(wait);
}

Status RolloutDesk::consume(std::uint64_t step, const replay_buffer::Batch& batch) {
  return call<void>([&]() -> Status {
    ECHO_TRY(database_.status());
    ECHO_TRY(database_.checked(buffer_->consume(step, batch.ids())));
    const auto dropped = buffer_->drop_stale(step + 1);
    if (!dropped) return database_.checked(dropped.error());
    if (*dropped > 0) log::warn("{} trajectories became too stale before step {} could use them", *dropped, step + 1);
    in_training_.clear();
    step_ = step + 1;
    step_pace_.finished(clock_.unix_seconds());
    if (const auto step_s = step_pace_.seconds())
      regrader_->step_measured(*step_s, options_.pacing.trajectories_per_step);
    return ok();
  });
}

Status RolloutDesk::prune(std::uint64_t step) {
  return call<void>([&]() -> Status {
    ECHO_TRY(database_.status());
    const auto pruned = buffer_->prune(step);
    return pruned ? ok() : database_.checked(pruned.error());
  });
}

Status RolloutDesk::disown(WorkerId worker) {
  return call<void>([&]() -> Status {
    ECHO_TRY(database_.status());
    return database_.checked(discard_of(worker, "not of the policy"));
  });
}

Result<DeskCounts> RolloutDesk::counts() {
  return call<DeskCounts>([this]() -> Result<DeskCounts> {
    DeskCounts counts;
    ECHO_ASSIGN(counts.buffer, buffer_->counts(step_));
    ECHO_ASSIGN(counts.leases, ledger_->counts());
    counts.refused = refused_;
    counts.regrading = regrader_->state();
    counts.scoring = scorer_->counts();
    return counts;
  });
}

}  // namespace echoline::learner

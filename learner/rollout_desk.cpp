#include "learner/rollout_desk.hpp"

#include <future>

#include "base/clock.hpp"
#include "base/log.hpp"
#include "data_plane/trajectory.hpp"

namespace echoline::learner {
namespace {

constexpr std::size_t kQueueMax = 65'536;
constexpr std::size_t kCommitMax = 256;                     // submissions in one transaction
constexpr std::uint32_t kRetryMs = 40;                      // when there is nothing to generate yet
constexpr Duration kTick = std::chrono::milliseconds(200);  // leases expire at least this often

std::string digest_bytes(const overlay::Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

}  // namespace

RolloutDesk::RolloutDesk(const DeskOptions& options, const data_plane::Adapter& adapter, DeskEvents events)
    : options_(options), adapter_(adapter), events_(std::move(events)), queue_(kQueueMax) {}

Result<std::unique_ptr<RolloutDesk>> RolloutDesk::open(const DeskOptions& options, const data_plane::Adapter& adapter,
                                                       std::uint64_t resume_step, DeskEvents events) {
  std::unique_ptr<RolloutDesk> desk(new RolloutDesk(options, adapter, std::move(events)));
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
  {
    const std::lock_guard lock(batch_mutex_);
    stopped_ = true;
  }
  batch_ready_.notify_all();
  queue_.close();
  if (thread_.joinable()) thread_.join();
}

double RolloutDesk::unix_seconds() const { return SystemClock().unix_seconds(); }

Status RolloutDesk::open_on_thread(std::uint64_t resume_step) {
  replay_buffer::BufferOptions buffer;
  buffer.group_size = options_.group_size;
  buffer.staleness_budget = options_.staleness_budget;
  ECHO_ASSIGN(buffer_, replay_buffer::ReplayBuffer::open(options_.file, buffer));
  replay_buffer::LedgerOptions ledger;
  ledger.pacing.staleness_budget = options_.staleness_budget;
  ledger.pacing.lookahead_steps = options_.lookahead_steps;
  ledger.pacing.steps_total = options_.steps_total;
  ledger.pacing.trajectories_per_step = options_.prompts_per_step * options_.group_size;
  ECHO_ASSIGN(ledger_, replay_buffer::JobLedger::open(*buffer_, ledger));
  step_ = resume_step;
  ECHO_TRY(buffer_->rewind(resume_step));
  ECHO_ASSIGN(const std::uint64_t released, ledger_->release_all());  // workers end with their learner
  if (released > 0) log::info("{} groups of the earlier process return to the pool", released);
  return ok();
}

void RolloutDesk::loop() {
  for (;;) {
    std::optional<Item> first = queue_.pop(kTick);
    if (!first && queue_.closed()) break;
    std::vector<Incoming> messages;
    std::optional<Item> item = std::move(first);
    while (item) {
      if (auto* task = std::get_if<Task>(&*item)) {
        handle_requests(std::exchange(messages, {}));
        (*task)();
      } else {
        messages.push_back(std::get<Incoming>(std::move(*item)));
        if (messages.size() >= kCommitMax) handle_requests(std::exchange(messages, {}));
      }
      item = queue_.pop(Duration(0));
    }
    handle_requests(std::move(messages));
    if (const auto expired = ledger_->expire(unix_seconds()); !expired) log::error("{}", expired.error().message());
    offer_batch();
  }
  ledger_.reset();  // on this thread, which owns the database
  buffer_.reset();
}

template <class T>
Result<T> RolloutDesk::call(std::function<Result<T>()> work) {
  auto promise = std::make_shared<std::promise<Result<T>>>();
  std::future<Result<T>> outcome = promise->get_future();
  if (!queue_.try_push(Item(Task([promise, work = std::move(work)] { promise->set_value(work()); }))))
    return fail(Code::kCancelled, "rollout desk", "it has stopped or its queue of {} is full", kQueueMax);
  return outcome.get();
}

void RolloutDesk::published(Version version, const overlay::Digest& digest) {
  const Status done = call<void>([this, version, digest]() -> Status {
    digests_[version] = digest_bytes(digest);
    while (!digests_.empty() && digests_.begin()->first.value + options_.staleness_budget + 1 < version.value)
      digests_.erase(digests_.begin());
    return ok();
  });
  if (!done) log::warn("{}", done.error().message());
}

void RolloutDesk::receive(WorkerId worker, std::string bytes) {
  if (!queue_.try_push(Item(Incoming{worker, std::move(bytes)})))
    log::warn("worker {}: message dropped, {} wait already; its lease will expire", worker, kQueueMax);
}

void RolloutDesk::worker_lost(WorkerId worker) {
  queue_.try_push(Item(Task([this, worker] {
    const auto released = ledger_->release_worker(worker);
    if (!released)
      log::error("{}", released.error().message());
    else if (*released > 0)
      log::info("worker {} is lost: {} groups return to the pool", worker, *released);
  })));
}

void RolloutDesk::handle_requests(std::vector<Incoming> messages) {
  if (messages.empty()) return;
  std::vector<std::pair<WorkerId, schema::Submission>> submissions;
  std::vector<std::pair<WorkerId, schema::WorkRequest>> requests;
  for (Incoming& message : messages) {
    auto parsed = data_plane::parse_worker_message(message.bytes);
    if (!parsed) {
      events_.misbehaved(message.worker, parsed.error().message());
    } else if (parsed->has_submission()) {
      submissions.emplace_back(message.worker, std::move(*parsed->mutable_submission()));
    } else if (parsed->has_request()) {
      requests.emplace_back(message.worker, std::move(*parsed->mutable_request()));
    }
  }
  if (!submissions.empty()) {
    std::vector<replay_buffer::Delivery> deliveries;
    for (const auto& [worker, submission] : submissions) deliveries.push_back({worker, &submission});
    const auto verdicts = ledger_->submit(deliveries, step_, unix_seconds());
    if (!verdicts) log::error("trajectories not stored: {}", verdicts.error().message());
    for (std::size_t i = 0; verdicts && i < verdicts->size(); ++i) {
      const replay_buffer::Verdict& verdict = (*verdicts)[i];
      const WorkerId worker = submissions[i].first;
      schema::LearnerMessage message;
      schema::SubmissionAck& ack = *message.mutable_ack();
      ack.set_lease(verdict.lease.value);
      ack.set_accepted(verdict.accepted);
      ack.set_reason(verdict.reason);
      events_.send(worker, message.SerializeAsString());
      if (!verdict.accepted) ++refused_[verdict.reason];
      if (verdict.accepted && !verdict.duplicate)
        events_.accepted(worker, static_cast<std::uint64_t>(submissions[i].second.trajectories_size()));
    }
  }
  for (const auto& [worker, request] : requests) grant(worker, request);
}

void RolloutDesk::grant(WorkerId worker, const schema::WorkRequest& request) {
  schema::LearnerMessage message;
  schema::WorkGrant& answer = *message.mutable_grant();
  answer.set_retry_after_ms(kRetryMs);
  const auto known = digests_.find(Version{request.version()});
  if (known != digests_.end() && known->second != request.policy_digest()) {
    events_.misbehaved(worker,
                       fmt::format("its version {} has another digest than the published one", request.version()));
    return;
  }
  if (known != digests_.end()) {
    const auto leases =
        ledger_->grant({worker, known->first, known->second, request.groups_max()}, step_, unix_seconds());
    if (!leases) log::error("no lease granted: {}", leases.error().message());
    for (std::size_t i = 0; leases && i < leases->size(); ++i) {
      const replay_buffer::LeaseRecord& record = (*leases)[i];
      auto problem = adapter_.problem(record.group.value);
      if (!problem) {  // the lease expires and the group goes to the pool again
        log::error("problem {}: {}", record.group, problem.error().message());
        continue;
      }
      schema::Lease& lease = *answer.add_leases();
      lease.set_id(record.id.value);
      lease.set_version(record.version.value);
      lease.set_policy_digest(record.policy_digest);
      lease.set_expires_unix_s(record.expires_unix_s);
      lease.set_group(record.group.value);
      *lease.mutable_problem() = std::move(*problem);
      lease.set_rollouts(record.rollouts);
    }
  }
  events_.send(worker, message.SerializeAsString());
}

void RolloutDesk::offer_batch() {
  std::uint64_t step = 0;
  {
    const std::lock_guard lock(batch_mutex_);
    if (!wanted_ || wanted_->answered) return;
    step = wanted_->step;
  }
  const auto compute = [&]() -> Result<std::optional<replay_buffer::Batch>> {
    ECHO_ASSIGN(const std::uint64_t stranded, ledger_->stranded_by_next_step(step, unix_seconds()));
    if (stranded > 0) return std::optional<replay_buffer::Batch>();
    return buffer_->sample(step, options_.prompts_per_step);
  };
  auto answer = compute();
  if (answer && !*answer) return;
  {
    const std::lock_guard lock(batch_mutex_);
    if (!wanted_ || wanted_->step != step) return;
    wanted_->answer = std::move(answer);
    wanted_->answered = true;
  }
  batch_ready_.notify_all();
}

Result<std::optional<replay_buffer::Batch>> RolloutDesk::wait_batch(std::uint64_t step, Duration wait) {
  {
    const std::lock_guard lock(batch_mutex_);
    wanted_.emplace();
    wanted_->step = step;
  }
  queue_.try_push(Item(Task([] {})));  // wakes the desk, which then looks
  std::unique_lock lock(batch_mutex_);
  batch_ready_.wait_for(lock, wait, [this] { return stopped_ || wanted_->answered; });
  auto answer = std::move(wanted_->answer);
  wanted_.reset();
  return answer;
}

Status RolloutDesk::consume(std::uint64_t step, const replay_buffer::Batch& batch) {
  return call<void>([&]() -> Status {
    ECHO_TRY(buffer_->consume(step, batch.ids()));
    step_ = step + 1;
    ECHO_ASSIGN(const std::uint64_t dropped, buffer_->drop_stale(step_));
    if (dropped > 0) log::warn("{} trajectories became too stale before step {} could use them", dropped, step_);
    return ok();
  });
}

Status RolloutDesk::prune(std::uint64_t step) {
  return call<void>([&]() -> Status {
    ECHO_TRY(buffer_->prune(step));
    return ok();
  });
}

Result<DeskCounts> RolloutDesk::counts() {
  return call<DeskCounts>([this]() -> Result<DeskCounts> {
    DeskCounts counts;
    ECHO_ASSIGN(counts.buffer, buffer_->counts(step_));
    ECHO_ASSIGN(counts.leases, ledger_->counts());
    counts.refused = refused_;
    return counts;
  });
}

}  // namespace echoline::learner

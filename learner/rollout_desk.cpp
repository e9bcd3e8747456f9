// Runs DeskLogic on its own thread. Calls and workers' messages reach it through one queue.
#include "learner/rollout_desk.hpp"

#include <future>

#include "base/log.hpp"

namespace echoline::learner {
namespace {

constexpr std::size_t kQueueMax = 65'536;  // messages and calls

}  // namespace

RolloutDesk::RolloutDesk(const DeskOptions& options, DeskEvents events, Bytes message_max)
    : options_(options),
      events_(std::move(events)),
      inbox_(message_max),
      clock_(options.clock),
      database_(clock_, options.retry_every, options.database_patience, events_.database_stalled),
      queue_(kQueueMax) {}

Result<std::unique_ptr<RolloutDesk>> RolloutDesk::open(const DeskOptions& options, SubmissionChecker checker,
                                                       std::uint64_t resume_step, DeskEvents events) {
  const Bytes message_max = checker.message_max(options.pacing.group_size);
  std::unique_ptr<RolloutDesk> desk(new RolloutDesk(options, std::move(events), message_max));
  std::promise<Status> opened;
  std::future<Status> outcome = opened.get_future();
  // `opened` and `checker` may be references: this function waits until the thread has opened the logic.
  desk->thread_ = std::thread([&opened, &checker, resume_step, self = desk.get()] {
    auto logic =
        DeskLogic::open({.options = self->options_,
                         .events = self->events_,
                         .clock = self->clock_,
                         .database = self->database_,
                         .inbox = self->inbox_,
                         .batch_request = self->batch_request_,
                         .run_needs_results = self->run_needs_results_,
                         .wake = [self] { self->wake(); },
                         .expel = [self](WorkerId worker, const std::string& reason) { self->expel(worker, reason); },
                         .checker = std::move(checker)},
                        resume_step);
    if (!logic) return opened.set_value(std::move(logic).error());
    self->logic_ = std::move(*logic);
    opened.set_value(ok());
    self->handle_queue_until_closed();
    self->logic_.reset();  // on this thread, which owns the database
  });
  ECHO_TRY(outcome.get());
  return desk;
}

RolloutDesk::~RolloutDesk() { stop(); }

void RolloutDesk::stop() {
  batch_request_.stop();
  queue_.close();
  if (thread_.joinable()) thread_.join();
}

void RolloutDesk::handle_queue_until_closed() {
  for (;;) {
    std::optional<Item> item = queue_.pop(DeskLogic::kTick);
    if (!item && queue_.closed()) return;
    logic_->extend_leases_after_pause();
    // Messages are collected, to be stored together. A call sees the effects of the messages before it.
    for (; item; item = queue_.pop(Duration(0))) {
      if (const auto* task = std::get_if<Task>(&*item)) {
        logic_->process_deferred();
        (*task)();
      } else {
        logic_->defer(std::get<Deferred>(std::move(*item)));
      }
    }
    logic_->run_due();
  }
}

template <class T>
Result<T> RolloutDesk::call_on_thread(std::function<Result<T>()> work) {
  auto promise = std::make_shared<std::promise<Result<T>>>();
  std::future<Result<T>> outcome = promise->get_future();
  if (!queue_.try_push(Item(Task([promise, work = std::move(work)] { promise->set_value(work()); }))))
    return fail(Code::kCancelled, "rollout desk", "it has stopped or its queue of {} is full", kQueueMax);
  return outcome.get();
}

void RolloutDesk::begin_publishing(Version version) {
  const Status outcome = call_on_thread<void>([this, version]() -> Status {
    logic_->policies().begin_publishing(version);
    return ok();
  });
  if (!outcome) log::warn("{}", outcome.error().message());
}

void RolloutDesk::finish_publishing(Version version, const overlay::Digest& digest) {
  const Status outcome = call_on_thread<void>([&]() -> Status {
    logic_->policies().finish_publishing(version, {reinterpret_cast<const char*>(digest.data()), digest.size()});
    return ok();
  });
  if (!outcome) log::warn("{}", outcome.error().message());
}

void RolloutDesk::receive(WorkerId worker, std::string bytes) {
  const std::size_t message_bytes = bytes.size();
  const DeskInbox::Admission admission = inbox_.admit(worker, message_bytes, is_database_stalled());
  if (!admission.expel_reason.empty()) return expel(worker, admission.expel_reason);
  if (!admission.is_accepted) return;  // the inbox reports the worker once the database stores again
  if (queue_.try_push(Item(
          Deferred(Incoming{.worker = worker, .bytes = std::move(bytes), .skips_rate_check = is_database_stalled()}))))
    return;
  inbox_.release(worker, message_bytes);
  log::warn("worker {}: a message is dropped, because {} are queued already; the lease that it was for will expire",
            worker, kQueueMax);
}

// Asks for the worker's expulsion, and ignores its queued messages.
void RolloutDesk::expel(WorkerId worker, const std::string& reason) {
  inbox_.block(worker, reason);
  events_.misbehaved(worker, reason);
}

void RolloutDesk::on_presence_change(const PresenceChange& change) {
  // If the queue is full, the worker's leases expire instead.
  queue_.try_push(
      Item(Deferred(DatabaseWrite{[this, change] { return logic_->leases().on_presence_change(change); }})));
}

Result<std::optional<replay_buffer::Batch>> RolloutDesk::wait_batch(std::uint64_t step, Duration wait) {
  batch_request_.request(step);
  wake();
  return batch_request_.wait(wait);
}

Status RolloutDesk::consume(std::uint64_t step, const replay_buffer::Batch& batch) {
  return call_on_thread<void>([&] { return logic_->consume(step, batch); });
}

Status RolloutDesk::prune(std::uint64_t step) {
  return call_on_thread<void>([&] { return logic_->batches().prune(step); });
}

Status RolloutDesk::discard_groups_of(WorkerId worker) {
  return call_on_thread<void>([&] { return logic_->batches().discard_groups_of(worker); });
}

Result<DeskCounts> RolloutDesk::counts() {
  return call_on_thread<DeskCounts>([this] { return logic_->counts(); });
}

}  // namespace echoline::learner

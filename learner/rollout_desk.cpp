#include "learner/rollout_desk.hpp"

#include <future>

#include "base/log.hpp"

namespace echoline::learner {
namespace {

constexpr std::size_t kQueueMax = 65'536;

}  // namespace

RolloutDesk::RolloutDesk(const DeskOptions& options, DeskEvents events, Bytes message_max)
    : options_(options),
      events_(std::move(events)),
      inbox_(message_max),
      clock_(options.clock),
      database_(clock_, options.retry_every, options.database_patience, events_.held_up),
      queue_(kQueueMax) {}

Result<std::unique_ptr<RolloutDesk>> RolloutDesk::open(const DeskOptions& options, Door door, std::uint64_t resume_step,
                                                       DeskEvents events) {
  const Bytes message_max = door.message_max(options.pacing.group_size);
  std::unique_ptr<RolloutDesk> desk(new RolloutDesk(options, std::move(events), message_max));
  std::promise<Status> opened;
  std::future<Status> outcome = opened.get_future();
  desk->thread_ = std::thread([&opened, &door, resume_step, d = desk.get()] {
    auto logic = DeskLogic::open(
        {d->options_, d->events_, d->clock_, d->database_, d->inbox_, d->hand_over_, d->results_wanted_,
         [d] { d->wake(); }, [d](WorkerId worker, const std::string& reason) { d->expel(worker, reason); },
         std::move(door)},
        resume_step);
    if (!logic) return opened.set_value(std::move(logic).error());
    d->logic_ = std::move(*logic);
    opened.set_value(ok());
    d->loop();
    d->logic_.reset();  // on this thread, which owns the database
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

void RolloutDesk::loop() {
  for (;;) {
    std::optional<Item> item = queue_.pop(DeskLogic::kTick);
    if (!item && queue_.closed()) return;
    logic_->excuse_pauses();
    for (; item; item = queue_.pop(Duration(0))) {
      if (const auto* task = std::get_if<Task>(&*item)) {
        logic_->work_off();
        (*task)();
      } else {
        logic_->defer(std::get<Deferred>(std::move(*item)));
      }
    }
    logic_->run_due();
  }
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
    logic_->policies().publishing(version);
    return ok();
  });
  if (!done) log::warn("{}", done.error().message());
}

void RolloutDesk::published(Version version, const overlay::Digest& digest) {
  const Status done = call<void>([&]() -> Status {
    logic_->policies().published(version, {reinterpret_cast<const char*>(digest.data()), digest.size()});
    return ok();
  });
  if (!done) log::warn("{}", done.error().message());
}

void RolloutDesk::receive(WorkerId worker, std::string bytes) {
  const std::size_t size = bytes.size();
  const DeskInbox::Admission admission = inbox_.admit(worker, size, held_up());
  if (!admission.expel.empty()) return expel(worker, admission.expel);
  if (!admission.taken) return;
  if (queue_.try_push(Item(Deferred(Incoming{worker, std::move(bytes), held_up()})))) return;
  inbox_.read(worker, size);
  log::warn("worker {}: message dropped, {} wait already; its lease will expire", worker, kQueueMax);
}

// Its unread messages are dropped.
void RolloutDesk::expel(WorkerId worker, const std::string& reason) {
  inbox_.bar(worker, reason);
  events_.misbehaved(worker, reason);
}

void RolloutDesk::follow(const PresenceChange& change) {
  queue_.try_push(Item(Deferred(Write{[this, change] { return logic_->leases().follow(change); }})));
}

Result<std::optional<replay_buffer::Batch>> RolloutDesk::wait_batch(std::uint64_t step, Duration wait) {
  hand_over_.ask(step);
  wake();
  return hand_over_.wait(wait);
}

Status RolloutDesk::consume(std::uint64_t step, const replay_buffer::Batch& batch) {
  return call<void>([&] { return logic_->consume(step, batch); });
}

Status RolloutDesk::prune(std::uint64_t step) {
  return call<void>([&] { return logic_->batches().prune(step); });
}

Status RolloutDesk::disown(WorkerId worker) {
  return call<void>([&] { return logic_->batches().disown(worker); });
}

Result<DeskCounts> RolloutDesk::counts() {
  return call<DeskCounts>([this] { return logic_->counts(); });
}

}  // namespace echoline::learner

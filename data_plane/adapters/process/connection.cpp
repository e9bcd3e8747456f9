// Implements Connection: the thread that starts a task's program, sends it batches of calls and handles its failures.
// The start number counts the starts of the program. An episode exists only in the start that began it.
#include "data_plane/adapters/process/connection.hpp"

#include <algorithm>
#include <future>

#include "base/log.hpp"

namespace echoline::data_plane::process {
namespace {

// From a failure to the next start of the program; doubled with each failure in a row.
constexpr Duration kRestartDelayMin = std::chrono::milliseconds(100), kRestartDelayMax = std::chrono::seconds(30);
constexpr Duration kStopCheckInterval = std::chrono::milliseconds(100);  // how often a wait checks `stopping_`
// After more failures in a row than this, calls fail at once instead of waiting for the next start.
constexpr std::uint32_t kFailuresWithWaitMax = 4;
constexpr std::size_t kLoggedErrorBytes = 1000, kReportedErrorBytes = 300;  // the end of what the program wrote
constexpr std::size_t kClosedEpisodesMax = 65'536;                          // kept for the next close notice

// The end of what the program wrote, to be added to a message; empty if it wrote nothing.
std::string what_it_wrote(const std::string& err, std::size_t bytes_max) {
  return err.empty() ? "" : "; it wrote: " + err.substr(err.size() - std::min(err.size(), bytes_max));
}

}  // namespace

Connection::Connection(sandbox::Pool& pool, ConnectionOptions options)
    : pool_(pool), options_(std::move(options)), thread_([this] { run_thread(); }) {}

Connection::~Connection() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_thread_.notify_all();
  thread_.join();
}

Result<Hello> Connection::hello() {
  auto promise = std::make_shared<std::promise<Result<Hello>>>();
  {
    const std::lock_guard lock(mutex_);
    hello_callbacks_.push_back([promise](Result<Hello> hello) { promise->set_value(std::move(hello)); });
  }
  wake_thread_.notify_all();
  return promise->get_future().get();
}

void Connection::ask(Call call) {
  {
    const std::lock_guard lock(mutex_);
    if (!stopping_ && waiting_calls_.size() < options_.waiting_max) {
      waiting_calls_.push_back(std::move(call));
      wake_thread_.notify_all();
      return;
    }
  }
  call.on_answer(fail(Code::kExhausted, "task", "{} calls are waiting already", options_.waiting_max));
}

Result<nlohmann::json> Connection::ask_and_wait(Method method, std::string item) {
  auto promise = std::make_shared<std::promise<Result<nlohmann::json>>>();
  Call call;
  call.method = method;
  call.item = std::move(item);
  call.on_answer = [promise](Result<nlohmann::json> answer) { promise->set_value(std::move(answer)); };
  ask(std::move(call));
  return promise->get_future().get();
}

void Connection::close(std::uint64_t episode, std::uint64_t start_number) {
  const std::lock_guard lock(mutex_);
  if (closed_episodes_.size() < kClosedEpisodesMax) closed_episodes_.emplace_back(episode, start_number);
}

void Connection::run_thread() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_thread_.wait(lock, [this] { return stopping_ || !waiting_calls_.empty() || !hello_callbacks_.empty(); });
    if (stopping_) break;
    if (!hello_callbacks_.empty()) {
      auto callbacks = std::exchange(hello_callbacks_, {});
      lock.unlock();
      const Status started = ensure_started();
      for (auto& callback : callbacks) callback(started ? Result<Hello>(hello_) : Result<Hello>(started.error()));
      lock.lock();
      continue;
    }
    // Takes the oldest calls that fit in one request, which has one method. Stops at the first call that does not fit,
    // so that calls stay in order.
    std::vector<Call> batch;
    const Method method = waiting_calls_.front().method;
    const bool send_alone = waiting_calls_.front().send_alone;
    const std::size_t calls_max = send_alone ? 1 : std::min(options_.batch_max, kItemsMax);
    while (batch.size() < calls_max && !waiting_calls_.empty() && waiting_calls_.front().method == method &&
           waiting_calls_.front().send_alone == send_alone) {
      batch.push_back(std::move(waiting_calls_.front()));
      waiting_calls_.pop_front();
    }
    lock.unlock();  // so that others can ask while the program works
    send_batch(std::move(batch));
    lock.lock();
  }
  auto unsent = std::exchange(waiting_calls_, {});
  auto callbacks = std::exchange(hello_callbacks_, {});
  lock.unlock();
  for (Call& call : unsent) call.on_answer(fail(Code::kCancelled, "task", "the run is ending"));
  for (auto& callback : callbacks) callback(fail(Code::kCancelled, "task", "the run is ending"));
  process_.reset();  // ends the program
}

// Starts the program unless it runs. After a failure, waits for the restart delay first, or fails if there were many.
Status Connection::ensure_started() {
  if (process_) {
    const auto ended = process_->ended();
    if (!ended) return ok();
    on_program_failure(fmt::format("it {}", ended->description()));
  }
  if (failures_in_a_row_ > kFailuresWithWaitMax && clock_.now() < next_start_at_) return last_error_;
  {
    std::unique_lock lock(mutex_);
    while (!stopping_ && clock_.now() < next_start_at_) wake_thread_.wait_for(lock, next_start_at_ - clock_.now());
    if (stopping_) return fail(Code::kCancelled, "task", "the run is ending");
  }
  const auto launch_and_greet = [&]() -> Status {
    ECHO_ASSIGN(process_, pool_.launch(options_.command));
    const std::uint64_t id = next_id_++;
    ECHO_ASSIGN(const std::string line,
                send_and_read_line(hello_request(id, options_.seed, options_.settings_json), options_.start_deadline));
    ECHO_ASSIGN(const auto answer, read_answer(line, id));
    ECHO_ASSIGN(hello_, read_hello(answer));
    return ok();
  };
  const Status started = launch_and_greet();
  if (started) {
    ++start_number_;
    return ok();
  }
  last_error_ = started.error();
  on_program_failure(last_error_.message());
  return last_error_;
}

// Stops the program if it runs, keeps the error for later calls, and sets the time of the next start.
void Connection::on_program_failure(const std::string& reason) {
  if (process_) {
    const sandbox::End end = process_->wait();  // stops the program first
    log::warn("the task's program failed: {}{}", reason, what_it_wrote(end.err, kLoggedErrorBytes));
    // The program's own words tell more than an error that ensure_started() has kept.
    if (last_error_.detail.empty() || !end.err.empty())
      last_error_ = fail(Code::kUnavailable, "task", "{}{}", reason, what_it_wrote(end.err, kReportedErrorBytes));
    process_.reset();
  }
  Duration delay = kRestartDelayMin;
  for (std::uint32_t i = 0; i < failures_in_a_row_ && delay < kRestartDelayMax; ++i) delay *= 2;
  ++failures_in_a_row_;
  next_start_at_ = clock_.now() + std::min(delay, kRestartDelayMax);
}

// Sends a line and reads the answering line. Waits for it in short steps, because a read does not notice `stopping_`.
Result<std::string> Connection::send_and_read_line(const std::string& line, Duration deadline) {
  const TimePoint answer_due = clock_.now() + deadline;
  ECHO_TRY(process_->write(line, deadline));
  for (;;) {
    const Duration time_left = answer_due - clock_.now();
    if (time_left <= Duration(0)) return fail(Code::kStale, "task", "no answer within {}", to_text(deadline));
    auto answer = process_->read_line(kLineBytesMax, std::min(time_left, kStopCheckInterval));
    if (answer || answer.error().code != Code::kStale) return answer;
    const std::lock_guard lock(mutex_);
    if (stopping_) return fail(Code::kCancelled, "task", "the run is ending");
  }
}

void Connection::send_close_notice() {
  std::vector<std::uint64_t> episodes;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [episode, start_number] : closed_episodes_)
      if (start_number == start_number_) episodes.push_back(episode);
    closed_episodes_.clear();
  }
  // If the write fails, the request that follows fails too and reports it.
  if (!episodes.empty()) (void)process_->write(close_notice(episodes), options_.deadline);
}

void Connection::send_batch(std::vector<Call> batch) {
  if (const Status started = ensure_started(); !started)
    return retry_or_fail(std::move(batch), started.error(), /*fail_all=*/true);
  std::vector<Call> sendable;  // without those whose episode is lost
  for (Call& call : batch) {
    if (call.start_number && *call.start_number != start_number_)
      call.on_answer(fail(Code::kUnavailable, "task", "the program was restarted and no longer has this episode"));
    else
      sendable.push_back(std::move(call));
  }
  if (sendable.empty()) return;
  send_close_notice();
  std::vector<std::string_view> items;
  for (const Call& call : sendable) items.push_back(call.item);
  const std::uint64_t id = next_id_++;
  const auto line =
      send_and_read_line(request(id, sendable.front().method, options_.deadline, items), options_.deadline);
  auto answer = line ? read_answer(*line, id) : Result<nlohmann::json>(line.error());
  auto results = answer ? read_items(*std::move(answer), sendable.size())
                        : Result<std::vector<Result<nlohmann::json>>>(answer.error());
  if (!results) {
    // An error that the program reports is a valid answer, for which read_answer() returns kUnavailable. After any
    // other failure the program is in an unknown state, so it is stopped. A call that failed alone is not retried.
    const bool reported_by_program = line && !answer && answer.error().code == Code::kUnavailable;
    if (!reported_by_program) on_program_failure(results.error().message());
    return retry_or_fail(std::move(sendable), results.error(), /*fail_all=*/sendable.size() == 1);
  }
  failures_in_a_row_ = 0;
  next_start_at_ = {};
  last_error_ = {};
  for (std::size_t i = 0; i < sendable.size(); ++i) {
    if (sendable[i].on_start_number) sendable[i].on_start_number(start_number_);
    sendable[i].on_answer(std::move((*results)[i]));
  }
}

// Retries each call of a failed batch alone, so that one bad call does not fail the others. `fail_all`: fails them
// instead.
void Connection::retry_or_fail(std::vector<Call> batch, const Error& error, bool fail_all) {
  for (Call& call : batch) {
    if (fail_all || call.send_alone || !call.repeatable) {
      call.on_answer(error);
      continue;
    }
    call.send_alone = true;
    const std::lock_guard lock(mutex_);
    waiting_calls_.push_back(std::move(call));
  }
}

}  // namespace echoline::data_plane::process

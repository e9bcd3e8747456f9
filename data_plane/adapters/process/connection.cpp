#include "data_plane/adapters/process/connection.hpp"

#include <algorithm>
#include <future>

#include "base/log.hpp"

namespace echoline::data_plane::process {
namespace {

constexpr Duration kFirstPause = std::chrono::milliseconds(100), kPauseMax = std::chrono::seconds(30);
constexpr Duration kSlice = std::chrono::milliseconds(100);  // how often a wait checks `stopping_`
// Consecutive failed starts after which calls fail instead of waiting for the next start.
constexpr std::uint32_t kPatience = 4;
constexpr std::size_t kClosedMax = 65'536;

}  // namespace

Connection::Connection(sandbox::Pool& pool, ConnectionOptions options)
    : pool_(pool), options_(std::move(options)), thread_([this] { work(); }) {}

Connection::~Connection() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

Result<Hello> Connection::hello() {
  auto promise = std::make_shared<std::promise<Result<Hello>>>();
  {
    const std::lock_guard lock(mutex_);
    asked_for_hello_.push_back([promise](Result<Hello> hello) { promise->set_value(std::move(hello)); });
  }
  changed_.notify_all();
  return promise->get_future().get();
}

void Connection::ask(Call call) {
  {
    const std::lock_guard lock(mutex_);
    if (!stopping_ && waiting_.size() < options_.waiting_max) {
      waiting_.push_back(std::move(call));
      changed_.notify_all();
      return;
    }
  }
  call.done(fail(Code::kExhausted, "task", "{} calls are waiting already", options_.waiting_max));
}

Result<nlohmann::json> Connection::ask_and_wait(Method method, std::string item) {
  auto promise = std::make_shared<std::promise<Result<nlohmann::json>>>();
  Call call;
  call.method = method;
  call.item = std::move(item);
  call.done = [promise](Result<nlohmann::json> answer) { promise->set_value(std::move(answer)); };
  ask(std::move(call));
  return promise->get_future().get();
}

void Connection::close(std::uint64_t episode, std::uint64_t life) {
  const std::lock_guard lock(mutex_);
  if (closed_.size() < kClosedMax) closed_.emplace_back(episode, life);
}

void Connection::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stopping_ || !waiting_.empty() || !asked_for_hello_.empty(); });
    if (stopping_) break;
    if (!asked_for_hello_.empty()) {
      auto asked = std::exchange(asked_for_hello_, {});
      lock.unlock();
      const Status started = start();
      for (auto& tell : asked) tell(started ? Result<Hello>(hello_) : Result<Hello>(started.error()));
      lock.lock();
      continue;
    }
    std::vector<Call> batch;
    const Method method = waiting_.front().method;
    const bool alone = waiting_.front().alone;
    while (!waiting_.empty() && waiting_.front().method == method && waiting_.front().alone == alone &&
           batch.size() < (alone ? 1 : std::min(options_.batch_max, kItemsMax))) {
      batch.push_back(std::move(waiting_.front()));
      waiting_.pop_front();
    }
    lock.unlock();
    serve(std::move(batch));
    lock.lock();
  }
  auto left = std::exchange(waiting_, {});
  auto asked = std::exchange(asked_for_hello_, {});
  lock.unlock();
  for (Call& call : left) call.done(fail(Code::kCancelled, "task", "the run ends"));
  for (auto& tell : asked) tell(fail(Code::kCancelled, "task", "the run ends"));
  process_.reset();
}

// Starts the program unless it runs. After repeated failures the pauses grow and calls fail.
Status Connection::start() {
  if (process_) {
    const auto ended = process_->ended();
    if (!ended) return ok();
    end(fmt::format("it {}", ended->words()));
  }
  if (failures_ > kPatience && clock_.now() < not_before_) return last_error_;
  {
    std::unique_lock lock(mutex_);
    while (!stopping_ && clock_.now() < not_before_) changed_.wait_for(lock, not_before_ - clock_.now());
    if (stopping_) return fail(Code::kCancelled, "task", "the run ends");
  }
  const auto begin = [&]() -> Status {
    ECHO_ASSIGN(process_, pool_.launch(options_.command));
    const std::uint64_t id = next_id_++;
    ECHO_ASSIGN(const std::string line,
                exchange(hello_request(id, options_.seed, options_.settings_json), options_.start_deadline));
    ECHO_ASSIGN(const auto answer, read_answer(line, id));
    ECHO_ASSIGN(hello_, read_hello(answer));
    return ok();
  };
  const Status begun = begin();
  if (begun) {
    ++life_;
    return ok();
  }
  last_error_ = begun.error();
  end(last_error_.message());
  return last_error_;
}

void Connection::end(const std::string& why) {
  if (process_) {
    const sandbox::End end = process_->wait();
    log::warn("the task's program is ended: {}{}{}", why, end.err.empty() ? "" : "; it wrote: ",
              end.err.substr(end.err.size() - std::min<std::size_t>(end.err.size(), 1000)));
    if (last_error_.detail.empty() || !end.err.empty())
      last_error_ = fail(Code::kUnavailable, "task", "{}{}{}", why, end.err.empty() ? "" : "; it wrote: ",
                         end.err.substr(end.err.size() - std::min<std::size_t>(end.err.size(), 300)));
    process_.reset();
  }
  Duration pause = kFirstPause;
  for (std::uint32_t i = 0; i < failures_ && pause < kPauseMax; ++i) pause *= 2;
  ++failures_;
  not_before_ = clock_.now() + std::min(pause, kPauseMax);
}

// Sends a line and reads the answering line.
Result<std::string> Connection::exchange(const std::string& line, Duration deadline) {
  const TimePoint due = clock_.now() + deadline;
  ECHO_TRY(process_->write(line, deadline));
  for (;;) {
    const Duration left = due - clock_.now();
    if (left <= Duration(0)) return fail(Code::kStale, "task", "no answer within {}", to_text(deadline));
    auto answer = process_->read_line(kLineBytesMax, std::min(left, kSlice));
    if (answer || answer.error().code != Code::kStale) return answer;
    const std::lock_guard lock(mutex_);
    if (stopping_) return fail(Code::kCancelled, "task", "the run ends");
  }
}

void Connection::tell_closed() {
  std::vector<std::uint64_t> episodes;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [episode, life] : closed_)
      if (life == life_) episodes.push_back(episode);
    closed_.clear();
  }
  if (!episodes.empty()) (void)process_->write(close_notice(episodes), options_.deadline);
}

void Connection::serve(std::vector<Call> batch) {
  if (const Status started = start(); !started) return give_up(std::move(batch), started.error(), true);
  std::vector<Call> known;
  for (Call& call : batch) {
    if (call.life && *call.life != life_)
      call.done(fail(Code::kUnavailable, "task", "the program was restarted and no longer has this episode"));
    else
      known.push_back(std::move(call));
  }
  if (known.empty()) return;
  tell_closed();
  std::vector<std::string_view> items;
  for (const Call& call : known) items.push_back(call.item);
  const std::uint64_t id = next_id_++;
  const auto line = exchange(request(id, known.front().method, options_.deadline, items), options_.deadline);
  auto answer = line ? read_answer(*line, id) : Result<nlohmann::json>(line.error());
  auto all = answer ? read_items(*std::move(answer), known.size())
                    : Result<std::vector<Result<nlohmann::json>>>(answer.error());
  if (!all) {
    // An error that the program reports is an answer. After any other failure the program is in an unknown state.
    const bool in_words = line && !answer && answer.error().code == Code::kUnavailable;
    if (!in_words) end(all.error().message());
    return give_up(std::move(known), all.error(), known.size() == 1);
  }
  failures_ = 0;
  not_before_ = {};
  last_error_ = {};
  for (std::size_t i = 0; i < known.size(); ++i) {
    if (known[i].told_life) known[i].told_life(life_);
    known[i].done(std::move((*all)[i]));
  }
}

// Retries each call of a failed batch alone, so that one bad call does not fail the others.
void Connection::give_up(std::vector<Call> batch, const Error& error, bool all_to_blame) {
  for (Call& call : batch) {
    if (all_to_blame || call.alone || !call.repeatable) {
      call.done(error);
      continue;
    }
    call.alone = true;
    const std::lock_guard lock(mutex_);
    waiting_.push_back(std::move(call));
  }
}

}  // namespace echoline::data_plane::process

// Keeps the rollout desk's work while the database cannot store. DeskLogic and its parts call it.
#include "learner/database_backlog.hpp"

#include "base/log.hpp"

namespace echoline::learner {
namespace {

// Whether the state of a column may follow the state of a row, in the order of DatabaseBacklog::State.
constexpr bool kMayFollow[4][4] = {
    // storing, stalled, catching up, given up
    {false, true, false, true},    // after storing
    {false, true, true, true},     // after stalled
    {true, true, false, true},     // after catching up
    {false, false, false, false},  // after given up
};

}  // namespace

DatabaseBacklog::DatabaseBacklog(const LeaseClock& clock, Duration retry_every, Duration patience,
                                 std::function<void(const Error*)> report)
    : clock_(clock), retry_every_(retry_every), report_(std::move(report)), patience_(patience) {}

bool DatabaseBacklog::can_store() const {
  const State state = state_;
  return state == State::kStoring || state == State::kCatchingUp;
}

void DatabaseBacklog::move_to(State next) {
  const auto from_index = static_cast<std::size_t>(state_.load()), to_index = static_cast<std::size_t>(next);
  ECHO_CHECK(kMayFollow[from_index][to_index], "the database moves from state {} to {}", from_index, to_index);
  state_ = next;
}

bool DatabaseBacklog::stall_if_database_error(const Error& error) {
  const TimePoint now = clock_.now();
  const DiskPatience::Verdict verdict = patience_.verdict_after(error, now);
  if (verdict == DiskPatience::Verdict::kNotADiskError) return false;
  if (state_ == State::kGivenUp) return true;
  const bool was_storing = state_ == State::kStoring;
  retry_at_ = now + retry_every_;
  if (verdict == DiskPatience::Verdict::kGiveUp) status_ = error;
  const bool is_given_up = !status_;
  move_to(is_given_up ? State::kGivenUp : State::kStalled);
  if (was_storing && report_) report_(&error);
  return true;
}

Status DatabaseBacklog::stall_on_error(Status status) {
  if (!status) (void)stall_if_database_error(status.error());
  return status;
}

bool DatabaseBacklog::is_retry_due() const { return state_ == State::kStalled && clock_.now() >= retry_at_; }

void DatabaseBacklog::on_retry_succeeded() {
  move_to(State::kCatchingUp);
  retry_at_ = kNever;
}

void DatabaseBacklog::finish_catching_up() {
  if (state_ != State::kCatchingUp || !backlog_.empty()) return;
  move_to(State::kStoring);
  patience_.on_success();
  if (report_) report_(nullptr);
}

void DatabaseBacklog::push_back(Deferred work) {
  // Messages of a stall are handled all at once afterwards, and must not look like a flood.
  if (auto* message = std::get_if<Incoming>(&work); message != nullptr && !can_store())
    message->skips_rate_check = true;
  backlog_.push_back(std::move(work));
}

void DatabaseBacklog::process_backlog(std::size_t messages_max,
                                      const std::function<void(std::vector<Incoming>)>& handle) {
  while (can_store() && !backlog_.empty()) {
    if (const auto* write = std::get_if<DatabaseWrite>(&backlog_.front())) {
      if (const Status written = write->work(); !written) {
        if (stall_if_database_error(written.error())) return;
        log::error("{}", written.error().message());
      }
      backlog_.pop_front();
      continue;
    }
    std::vector<Incoming> messages;
    while (!backlog_.empty() && messages.size() < messages_max && std::holds_alternative<Incoming>(backlog_.front())) {
      messages.push_back(std::get<Incoming>(std::move(backlog_.front())));
      backlog_.pop_front();
    }
    handle(std::move(messages));
  }
}

void DatabaseBacklog::check() const {
  const State state = state_;
  ECHO_CHECK((state == State::kGivenUp) == !status_, "a database is given up with an error and only then");
  ECHO_CHECK(can_store() == (retry_at_ == kNever), "a database that stores waits for no retry");
}

}  // namespace echoline::learner

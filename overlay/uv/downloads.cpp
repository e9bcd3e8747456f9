// The stages of bundle downloads. Called by the driver (driver_bundle.cpp).
#include "overlay/uv/downloads.hpp"

namespace echoline::overlay {

void Downloads::Download::move_to(Stage next) {
  constexpr StateRow kNext[] = {
      {"queued", states(Stage::kReady)},
      {"ready", states(Stage::kWaiting, Stage::kReading)},
      {"waiting", states(Stage::kReady)},
      {"reading", states(Stage::kReady)},
  };
  change_state(stage, next, kNext, "a download");
}

BundleGate::Answer Downloads::begin(ConnId conn, std::string_view request, double now_unix_s) {
  BundleGate::Answer answer = gate_.on_request(conn, request, now_unix_s);
  if (answer.is_admitted) all_.emplace(conn, Download{});
  return answer;
}

std::vector<ConnId> Downloads::take_turns() {
  std::vector<ConnId> next = gate_.take_admitted();
  for (const ConnId conn : next) all_.at(conn).move_to(Stage::kReady);
  return next;
}

Downloads::Step Downloads::next(ConnId conn, TimePoint now) {
  const auto it = all_.find(conn);
  if (it == all_.end() || it->second.stage != Stage::kReady) return {};
  Download& download = it->second;
  if (download.offset == size_.count) return {.kind = Step::Kind::kDone, .offset = download.offset, .bytes = 0};
  if (now < download.next_block_not_before) {
    download.move_to(Stage::kWaiting);
    next_due_at_ = std::min(next_due_at_, download.next_block_not_before);
    return {};
  }
  download.move_to(Stage::kReading);
  const std::uint64_t bytes_left = size_.count - download.offset;
  return {.kind = Step::Kind::kRead,
          .offset = download.offset,
          .bytes = static_cast<std::size_t>(std::min<std::uint64_t>(kBlockBytes, bytes_left))};
}

void Downloads::on_read(ConnId conn, std::size_t bytes, TimePoint now) {
  Download& download = all_.at(conn);
  download.move_to(Stage::kReady);
  download.offset += bytes;
  if (bytes > 0) download.next_block_not_before = gate_.pace(bytes, now);
}

bool Downloads::remove(ConnId conn) {
  if (all_.erase(conn) == 0) return false;
  gate_.on_done(conn);
  next_due_at_ = first_waiting();
  return true;
}

std::vector<ConnId> Downloads::take_due(TimePoint now) {
  if (now < next_due_at_) return {};
  std::vector<ConnId> due;
  for (auto& [conn, download] : all_)
    if (download.stage == Stage::kWaiting && download.next_block_not_before <= now) {
      download.move_to(Stage::kReady);
      due.push_back(conn);
    }
  next_due_at_ = first_waiting();
  return due;
}

TimePoint Downloads::first_waiting() const {
  TimePoint first = kNever;
  for (const auto& [conn, download] : all_)
    if (download.stage == Stage::kWaiting) first = std::min(first, download.next_block_not_before);
  return first;
}

void Downloads::check() const {
  ECHO_CHECK(next_due_at_ == first_waiting(), "the next block is not due when a download may continue");
  std::size_t served = 0;
  for (const auto& [conn, download] : all_) {
    served += download.stage != Stage::kQueued;
    ECHO_CHECK(download.offset <= size_.count, "connection {} has {} bytes of {}", conn, download.offset, size_.count);
    ECHO_CHECK(download.stage != Stage::kQueued || download.offset == 0, "connection {} has bytes before its turn",
               conn);
  }
  ECHO_CHECK(served <= BundleGate::kServedMax, "{} downloads at once", served);
}

}  // namespace echoline::overlay

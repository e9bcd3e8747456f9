#include "overlay/uv/downloads.hpp"

namespace echoline::overlay {

void Downloads::Download::move(Stage to) {
  constexpr StateRow kNext[] = {
      {"queued", states(Stage::kReady)},
      {"ready", states(Stage::kWaiting, Stage::kReading)},
      {"waiting", states(Stage::kReady)},
      {"reading", states(Stage::kReady)},
  };
  change_state(stage, to, kNext, "a download");
}

BundleGate::Answer Downloads::begin(ConnId conn, std::string_view request, double now_unix_s) {
  BundleGate::Answer answer = gate_.on_request(conn, request, now_unix_s);
  if (answer.serve) all_.emplace(conn, Download{});
  return answer;
}

std::vector<ConnId> Downloads::take_turns() {
  std::vector<ConnId> next = gate_.take_admitted();
  for (const ConnId conn : next) all_.at(conn).move(Stage::kReady);
  return next;
}

Downloads::Step Downloads::next(ConnId conn, TimePoint now) {
  const auto it = all_.find(conn);
  if (it == all_.end() || it->second.stage != Stage::kReady) return {};
  Download& d = it->second;
  if (d.at == size_.count) return {Step::Kind::kDone, d.at, 0};
  if (now < d.not_before) {
    d.move(Stage::kWaiting);
    due_ = std::min(due_, d.not_before);
    return {};
  }
  d.move(Stage::kReading);
  return {Step::Kind::kRead, d.at, static_cast<std::size_t>(std::min<std::uint64_t>(kBlockBytes, size_.count - d.at))};
}

void Downloads::on_read(ConnId conn, std::size_t bytes, TimePoint now) {
  Download& d = all_.at(conn);
  d.move(Stage::kReady);
  d.at += bytes;
  if (bytes > 0) d.not_before = gate_.pace(bytes, now);
}

bool Downloads::remove(ConnId conn) {
  if (all_.erase(conn) == 0) return false;
  gate_.on_done(conn);
  due_ = first_waiting();
  return true;
}

std::vector<ConnId> Downloads::take_due(TimePoint now) {
  if (now < due_) return {};
  std::vector<ConnId> due;
  for (auto& [conn, d] : all_)
    if (d.stage == Stage::kWaiting && d.not_before <= now) {
      d.move(Stage::kReady);
      due.push_back(conn);
    }
  due_ = first_waiting();
  return due;
}

TimePoint Downloads::first_waiting() const {
  TimePoint first = kNever;
  for (const auto& [conn, d] : all_)
    if (d.stage == Stage::kWaiting) first = std::min(first, d.not_before);
  return first;
}

void Downloads::check() const {
  ECHO_CHECK(due_ == first_waiting(), "the next block is not due when a download may continue");
  std::size_t served = 0;
  for (const auto& [conn, d] : all_) {
    served += d.stage != Stage::kQueued;
    ECHO_CHECK(d.at <= size_.count, "connection {} has {} bytes of {}", conn, d.at, size_.count);
    ECHO_CHECK(d.stage != Stage::kQueued || d.at == 0, "connection {} has bytes before its turn", conn);
  }
  ECHO_CHECK(served <= BundleGate::kServedMax, "{} downloads at once", served);
}

}  // namespace echoline::overlay

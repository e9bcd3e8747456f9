#include "overlay/uplink.hpp"

#include <algorithm>

#include "base/result.hpp"

namespace echoline::overlay {
namespace {

constexpr double kLimitReached = 0.8;  // fraction of the limit from which the limit counts as the bottleneck

}  // namespace

void Uplink::open(ConnId conn, Source& source) {
  const auto [id, added] = ids_.try_emplace(&source, next_member_);
  if (added) members_[next_member_++].source = &source;
  ECHO_CHECK(!lines_.contains(conn), "connection {} opened twice", conn);
  members_.at(id->second).lines.push_back(conn);
  lines_[conn].member = id->second;
  set_ready(id->second, true);
}

void Uplink::close(ConnId conn) {
  const auto it = lines_.find(conn);
  if (it == lines_.end()) return;
  if (!it->second.urgent.empty()) emit(conn, it->second.frame->size() - it->second.done);
  const auto member = members_.find(it->second.member);
  in_flight_ -= it->second.in_flight;
  member->second.in_flight -= it->second.in_flight;
  std::erase(member->second.lines, conn);
  if (member->second.lines.empty()) {
    ids_.erase(member->second.source);
    set_ready(member->first, false);
    members_.erase(member);
  }
  lines_.erase(it);
  if (transmission_ && transmission_->conn == conn) transmission_.reset();
}

void Uplink::send_now(ConnId conn, Slice frame) {
  const auto it = lines_.find(conn);
  if (it != lines_.end() && it->second.frame && it->second.done > 0)
    it->second.urgent.push_back(std::move(frame));
  else
    actions_.push_back(act::Send{conn, std::move(frame), {}});
}

void Uplink::wake(const Source& source) {
  if (const auto id = ids_.find(&source); id != ids_.end()) set_ready(id->second, true);
}

// Start-time fair queueing: a source that was idle gets no credit for the idle time beyond one window.
void Uplink::set_ready(std::size_t id, bool ready) {
  Member& member = members_.at(id);
  if (member.ready == ready) return;
  member.ready = ready;
  if (!ready) {
    ready_.erase({member.turn, id});
    return;
  }
  member.turn = std::max(member.turn, turn_ - static_cast<double>(kWindowBytes) / member.source->weight());
  ready_.emplace(member.turn, id);
}

// Picks the source whose turn it is, and its connection with the least in flight.
std::optional<ConnId> Uplink::pick() {
  while (!ready_.empty()) {
    const std::size_t id = ready_.begin()->second;
    Member& member = members_.at(id);
    std::optional<ConnId> best;
    Line* best_line = nullptr;
    for (const ConnId conn : member.lines) {
      Line& line = lines_.at(conn);
      if (line.in_flight >= kWindowBytes) continue;
      // A started frame is finished on its connection before the source's next frame is taken.
      if (!best_line || std::pair(!line.frame, line.in_flight) < std::pair(!best_line->frame, best_line->in_flight)) {
        best = conn;
        best_line = &line;
      }
    }
    if (best_line && !best_line->frame) {
      best_line->frame = member.source->next(*best);
      best_line->done = 0;
    }
    if (best_line && best_line->frame) {
      turn_ = member.turn;
      return best;
    }
    set_ready(id, false);  // until it is woken, or the network takes some of its bytes
  }
  return std::nullopt;
}

void Uplink::emit(ConnId conn, std::size_t bytes) {
  Line& line = lines_.at(conn);
  Member& member = members_.at(line.member);
  const OutFrame& frame = *line.frame;
  act::Send send{conn, {}, {}};
  const std::size_t from_head = line.done < frame.head.size() ? std::min(bytes, frame.head.size() - line.done) : 0;
  if (from_head) send.head = frame.head.part(line.done, from_head);
  if (bytes > from_head) send.tail = frame.tail.part(line.done + from_head - frame.head.size(), bytes - from_head);
  line.done += bytes;
  line.in_flight += bytes;
  member.in_flight += bytes;
  member.usage.bytes += bytes;
  in_flight_ += bytes;
  bytes_ += bytes;
  recent_bytes_ += static_cast<double>(bytes);
  const bool whole = line.done == frame.size();
  if (whole) line.frame.reset();
  actions_.push_back(std::move(send));
  if (!whole) return;
  for (Slice& waiting : std::exchange(line.urgent, {})) actions_.push_back(act::Send{conn, std::move(waiting), {}});
}

void Uplink::pump(TimePoint now) {
  account(now);
  for (;;) {
    if (transmission_) {
      if (now < transmission_->due) return;
      const Transmission t = *std::exchange(transmission_, std::nullopt);
      emit(t.conn, t.bytes);
    }
    const auto conn = pick();
    if (!conn) {
      busy_ = false;
      return;
    }
    const Line& line = lines_.at(*conn);
    const std::size_t bytes = pacer_.slice_bytes(line.frame->size() - line.done);
    transmission_ = {*conn, bytes, pacer_.occupy({bytes}, now, busy_)};
    Member& member = members_.at(line.member);
    set_ready(line.member, false);
    member.turn += static_cast<double>(bytes) / member.source->weight();
    set_ready(line.member, true);
    member.usage.own_limit = transmission_->due > now;
    if (!member.usage.busy) member.busy_since = now;
    member.usage.busy = busy_ = true;
  }
}

void Uplink::on_sent(ConnId conn, std::size_t bytes, TimePoint now) {
  const auto it = lines_.find(conn);
  if (it == lines_.end() || it->second.in_flight == 0) return;
  account(now);
  const std::size_t n = std::min(bytes, it->second.in_flight);
  Member& member = members_.at(it->second.member);
  it->second.in_flight -= n;
  member.in_flight -= n;
  in_flight_ -= n;
  set_ready(it->second.member, true);
  pump(now);
  if (member.in_flight == 0 && !(transmission_ && lines_.at(transmission_->conn).member == it->second.member)) {
    member.usage.busy = false;
    member.usage.busy_seconds += seconds(now - member.busy_since);
  }
}

void Uplink::account(TimePoint now) {
  if (transmission_ || in_flight_ > 0) recent_seconds_ += seconds(std::max(Duration{}, now - accounted_));
  accounted_ = now;
  if (recent_seconds_ > 4) recent_seconds_ /= 2, recent_bytes_ /= 2;
}

std::size_t Uplink::in_flight(ConnId conn) const {
  const auto it = lines_.find(conn);
  return it == lines_.end() ? 0 : it->second.in_flight;
}

Uplink::Usage Uplink::usage(const Source& source, TimePoint now) const {
  const auto id = ids_.find(&source);
  if (id == ids_.end()) return {};
  const Member& member = members_.at(id->second);
  Usage usage = member.usage;
  if (usage.busy) usage.busy_seconds += seconds(now - member.busy_since);
  // Behind a link slower than the limit, the pacer waits at times, too. That does not make the limit the bottleneck.
  const auto rate = measured_rate(), limit = pacer_.rate();
  if (rate && limit && rate->bits_per_s < kLimitReached * limit->bits_per_s) usage.own_limit = false;
  if (member.in_flight >= kWindowBytes * member.lines.size()) usage.own_limit = false;  // it waits for the path
  return usage;
}

std::optional<BitRate> Uplink::measured_rate() const {
  if (recent_seconds_ < 0.05 || recent_bytes_ <= 0) return std::nullopt;
  return BitRate::from_bytes_per_s(recent_bytes_ / recent_seconds_);
}

}  // namespace echoline::overlay

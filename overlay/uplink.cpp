// Divides the uplink between sources, one slice at a time. Called by both cores and EdgeSender.
#include "overlay/uplink.hpp"

#include <algorithm>

#include "base/result.hpp"

namespace echoline::overlay {
namespace {

constexpr double kLimitReachedShare = 0.8;    // fraction of the limit from which the limit counts as the bottleneck
constexpr double kRecentSecondsMax = 4;       // busy time over which the rate is measured
constexpr double kMeasuredSecondsMin = 0.05;  // less busy time shows no rate

}  // namespace

struct Uplink::Local {
  explicit Local(std::vector<Action>& actions) : uplink(pacer, actions) {}
  Pacer pacer;  // without a limit
  Uplink uplink;
};

Uplink::Uplink(Pacer& pacer, std::vector<Action>& actions) : pacer_(pacer), actions_(actions) {}

Uplink::~Uplink() = default;

Uplink* Uplink::local_with(ConnId conn) const {
  return local_ && local_->uplink.connections_.contains(conn) ? &local_->uplink : nullptr;
}

Uplink* Uplink::local_with(const Source& source) const {
  return local_ && local_->uplink.source_ids_.contains(&source) ? &local_->uplink : nullptr;
}

std::uint64_t Uplink::bytes_sent() const { return bytes_sent_ + (local_ ? local_->uplink.bytes_sent_ : 0); }

// The local uplink itself has no other one, so it takes its sources here.
void Uplink::open(ConnId conn, Source& source) {
  if (source.is_local() && !is_local_) {
    if (!local_) {
      local_ = std::make_unique<Local>(actions_);
      local_->uplink.is_local_ = true;
    }
    return local_->uplink.open(conn, source);
  }
  const auto [id, added] = source_ids_.try_emplace(&source, next_source_id_);
  if (added) sources_[next_source_id_++].source = &source;
  ECHO_CHECK(!connections_.contains(conn), "connection {} opened twice", conn);
  sources_.at(id->second).conns.push_back(conn);
  connections_[conn].source_id = id->second;
  set_ready(id->second, true);
}

void Uplink::close(ConnId conn) {
  if (Uplink* local = local_with(conn)) return local->close(conn);
  const auto it = connections_.find(conn);
  if (it == connections_.end()) return;
  // Urgent frames wait behind the frame in progress, so the rest of that frame leaves first.
  if (!it->second.urgent.empty()) emit_slice(conn, it->second.frame->size() - it->second.frame_bytes_sent);
  const auto state = sources_.find(it->second.source_id);
  in_flight_ -= it->second.in_flight;
  state->second.in_flight -= it->second.in_flight;
  std::erase(state->second.conns, conn);
  if (state->second.conns.empty()) {
    source_ids_.erase(state->second.source);
    set_ready(state->first, false);
    sources_.erase(state);
  }
  connections_.erase(it);
  if (transmission_ && transmission_->conn == conn) transmission_.reset();
}

void Uplink::send_now(ConnId conn, Slice frame) {
  if (Uplink* local = local_with(conn)) return local->send_now(conn, std::move(frame));
  const auto it = connections_.find(conn);
  if (it != connections_.end() && it->second.frame && it->second.frame_bytes_sent > 0)
    it->second.urgent.push_back(std::move(frame));
  else
    actions_.push_back(act::Send{conn, std::move(frame), {}});
}

void Uplink::wake(const Source& source) {
  if (Uplink* local = local_with(source)) return local->wake(source);
  if (const auto id = source_ids_.find(&source); id != source_ids_.end()) set_ready(id->second, true);
}

// Start-time fair queueing: the ready source with the least `virtual_time` sends next. A source that was idle gets
// credit for one window at most, so that it cannot block the others.
void Uplink::set_ready(std::size_t id, bool ready) {
  SourceState& state = sources_.at(id);
  if (state.is_ready == ready) return;
  state.is_ready = ready;
  if (!ready) {
    ready_.erase({state.virtual_time, id});
    return;
  }
  state.virtual_time =
      std::max(state.virtual_time, last_virtual_time_ - static_cast<double>(kWindowBytes) / state.source->weight());
  ready_.emplace(state.virtual_time, id);
}

// Picks the source that sends next, and its connection with the least in flight. Makes sure that the connection has a
// frame.
std::optional<ConnId> Uplink::pick_connection() {
  while (!ready_.empty()) {
    const std::size_t id = ready_.begin()->second;
    SourceState& state = sources_.at(id);
    std::optional<ConnId> best_conn;
    Connection* best_connection = nullptr;
    for (const ConnId conn : state.conns) {
      Connection& connection = connections_.at(conn);
      if (connection.in_flight >= kWindowBytes) continue;
      // A started frame is finished on its connection before the source's next frame is taken.
      if (!best_connection || std::pair(!connection.frame, connection.in_flight) <
                                  std::pair(!best_connection->frame, best_connection->in_flight)) {
        best_conn = conn;
        best_connection = &connection;
      }
    }
    if (best_connection && !best_connection->frame) {
      best_connection->frame = state.source->next(*best_conn);
      best_connection->frame_bytes_sent = 0;
    }
    if (best_connection && best_connection->frame) {
      last_virtual_time_ = state.virtual_time;
      return best_conn;
    }
    set_ready(id, false);  // until it is woken, or the network takes some of its bytes
  }
  return std::nullopt;
}

void Uplink::emit_slice(ConnId conn, std::size_t bytes) {
  Connection& connection = connections_.at(conn);
  SourceState& state = sources_.at(connection.source_id);
  const OutFrame& frame = *connection.frame;
  act::Send send{conn, {}, {}};
  const std::size_t unsent_head_bytes = frame.head.size() - std::min(connection.frame_bytes_sent, frame.head.size());
  const std::size_t head_bytes = std::min(bytes, unsent_head_bytes);
  if (head_bytes) send.head = frame.head.part(connection.frame_bytes_sent, head_bytes);
  if (bytes > head_bytes)
    send.tail = frame.tail.part(connection.frame_bytes_sent + head_bytes - frame.head.size(), bytes - head_bytes);
  connection.frame_bytes_sent += bytes;
  connection.in_flight += bytes;
  state.in_flight += bytes;
  state.usage.bytes += bytes;
  in_flight_ += bytes;
  bytes_sent_ += bytes;
  recent_bytes_ += static_cast<double>(bytes);
  const bool is_finished = connection.frame_bytes_sent == frame.size();
  if (is_finished) connection.frame.reset();
  actions_.push_back(std::move(send));
  if (!is_finished) return;
  for (Slice& waiting : std::exchange(connection.urgent, {}))
    actions_.push_back(act::Send{conn, std::move(waiting), {}});
}

void Uplink::pump(TimePoint now) {
  if (local_) local_->uplink.pump(now);
  account_busy_time(now);
  for (;;) {
    if (transmission_) {
      if (now < transmission_->due) return;
      const Transmission slice = *std::exchange(transmission_, std::nullopt);
      emit_slice(slice.conn, slice.bytes);
    }
    const auto conn = pick_connection();
    if (!conn) {
      is_backlogged_ = false;
      return;
    }
    const Connection& connection = connections_.at(*conn);
    const std::size_t bytes = pacer_.slice_bytes(connection.frame->size() - connection.frame_bytes_sent);
    transmission_ = {*conn, bytes, pacer_.occupy({bytes}, now, is_backlogged_)};
    SourceState& state = sources_.at(connection.source_id);
    set_ready(connection.source_id, false);  // and ready again below, because ready_ is sorted by `virtual_time`
    state.virtual_time += static_cast<double>(bytes) / state.source->weight();
    set_ready(connection.source_id, true);
    state.usage.own_limit = transmission_->due > now;  // the pacer, not the path, holds the slice back
    if (!state.usage.busy) state.busy_since = now;
    state.usage.busy = is_backlogged_ = true;
  }
}

void Uplink::on_sent(ConnId conn, std::size_t bytes, TimePoint now) {
  if (Uplink* local = local_with(conn)) return local->on_sent(conn, bytes, now);
  const auto it = connections_.find(conn);
  if (it == connections_.end() || it->second.in_flight == 0) return;
  account_busy_time(now);
  const std::size_t bytes_taken = std::min(bytes, it->second.in_flight);
  SourceState& state = sources_.at(it->second.source_id);
  it->second.in_flight -= bytes_taken;
  state.in_flight -= bytes_taken;
  in_flight_ -= bytes_taken;
  set_ready(it->second.source_id, true);
  pump(now);
  const bool is_transmitting = transmission_ && connections_.at(transmission_->conn).source_id == it->second.source_id;
  if (state.in_flight == 0 && !is_transmitting) {
    state.usage.busy = false;
    state.usage.busy_seconds += seconds(now - state.busy_since);
  }
}

void Uplink::account_busy_time(TimePoint now) {
  if (transmission_ || in_flight_ > 0) recent_seconds_ += seconds(std::max(Duration{}, now - accounted_until_));
  accounted_until_ = now;
  if (recent_seconds_ > kRecentSecondsMax) {  // older bytes count for less and less
    recent_seconds_ /= 2;
    recent_bytes_ /= 2;
  }
}

std::size_t Uplink::in_flight(ConnId conn) const {
  if (const Uplink* local = local_with(conn)) return local->in_flight(conn);
  const auto it = connections_.find(conn);
  return it == connections_.end() ? 0 : it->second.in_flight;
}

Uplink::Usage Uplink::usage(const Source& source, TimePoint now) const {
  if (const Uplink* local = local_with(source)) return local->usage(source, now);
  const auto id = source_ids_.find(&source);
  if (id == source_ids_.end()) return {};
  const SourceState& state = sources_.at(id->second);
  Usage usage = state.usage;
  if (usage.busy) usage.busy_seconds += seconds(now - state.busy_since);
  // Behind a link slower than the limit, the pacer waits at times, too. That does not make the limit the bottleneck.
  const auto rate = measured_rate(), limit = pacer_.rate();
  if (rate && limit && rate->bits_per_s < kLimitReachedShare * limit->bits_per_s) usage.own_limit = false;
  if (state.in_flight >= kWindowBytes * state.conns.size()) usage.own_limit = false;  // the source waits for the path
  return usage;
}

std::optional<BitRate> Uplink::measured_rate() const {
  if (recent_seconds_ < kMeasuredSecondsMin || recent_bytes_ <= 0) return std::nullopt;
  return BitRate::from_bytes_per_s(recent_bytes_ / recent_seconds_);
}

}  // namespace echoline::overlay

// Transport of bytes in a world: uplink, delay, downlink, flow control, and decoding at the receiver.
#include <cstring>

#include "sim/world_parts.hpp"

namespace echoline::sim {

using namespace overlay;

namespace {

Duration time_for(std::size_t bytes, const std::optional<BitRate>& rate) {
  return rate ? from_seconds(static_cast<double>(bytes) / rate->bytes_per_s()) : Duration{};
}

// Priority data of an idle connection: ten full packets, the initial quantum of Linux's sch_fq.
constexpr std::size_t kBurst = 15'140;
constexpr Duration kRetransmission = std::chrono::milliseconds(200);

std::string describe(const Frame& frame) {
  if (frame.type == FrameType::kChunk) return fmt::format("chunk {} of {} bytes", frame.chunk.index, frame.body.size());
  if (frame.type == FrameType::kApplication) return fmt::format("application message of {} bytes", frame.body.size());
  static constexpr std::string_view kNames[] = {
      "Enrol",        "Enrolled",    "Renew",        "Renewed",    "Hello",    "Welcome",   "Assign",    "DialChild",
      "NeedHelp",     "Help",        "Announcement", "Manifest",   "Beacon",   "PeerHello", "Have",      "MoreStreams",
      "ChunkRequest", "CannotServe", "EdgeStatus",   "EdgeFailed", "Poisoned", "Installed", "Heartbeat", "Draining",
      "Goodbye",      "Trouble",     "Grant",        "Release",    "Notice",   "Return"};
  const auto message = decode_control(frame.body.bytes());
  if (!message) return "an unreadable control message";
  const auto index = message->index();
  return std::string(index < std::size(kNames) ? kNames[index] : "control");
}

}  // namespace

void World::send(std::size_t h, act::Send&& s) {
  Host& host = *hosts_[h];
  const Side side = find(h, s.conn);
  if (!side || end(side).state != End::State::kOpen) return;
  std::size_t unreported_bytes = s.head.size() + s.tail.size();
  if (host.corrupt_bytes_min && s.tail.size() >= *host.corrupt_bytes_min) {
    host.corrupt_bytes_min.reset();
    std::vector<std::byte> copy(s.tail.bytes().begin(), s.tail.bytes().end());
    copy.back() ^= std::byte{1};
    s.tail = Slice(std::move(copy));
  }
  if (!host.malice)
    return queue_transfer(side,
                          {std::move(s.head), std::move(s.tail), unreported_bytes, Transfer::Last::kNo, {}, {}, 0});
  for (act::Send& out : host.malice->outgoing(std::move(s), now_)) {
    const Side target = find(h, out.conn);  // malice may send on other connections too
    if (!target || end(target).state != End::State::kOpen) continue;
    const std::size_t sent_bytes_of_message =
        target.connection == side.connection ? std::exchange(unreported_bytes, 0) : 0;
    queue_transfer(target,
                   {std::move(out.head), std::move(out.tail), sent_bytes_of_message, Transfer::Last::kNo, {}, {}, 0});
  }
  if (unreported_bytes > 0) queue_transfer(side, {{}, {}, unreported_bytes, Transfer::Last::kNo, {}, {}, 0});
}

void World::queue_transfer(const Side& from, Transfer&& t) {
  End& self = end(from);
  Host& host = *hosts_[self.host];
  if (t.last == Transfer::Last::kReset || (!host.link.up && host.links_stopped_until <= now_ && self.outbound.empty()))
    return start_transfer(from, std::move(t));
  if (self.outbound.empty())
    (t.size() <= kBurst ? host.priority_senders : host.senders).push({from, from.connection->generation});
  self.outbound.push(std::move(t));
  serve_uplink(self.host);
}

// Connections take turns by transfer, as packets do in a kernel's fair queue. As there, a connection that starts with
// at most a burst need not wait for a turn of all others, which here would be a chunk of each.
void World::serve_uplink(std::size_t h) {
  Host& host = *hosts_[h];
  while (!host.up_busy && !(host.priority_senders.empty() && host.senders.empty())) {
    if (host.links_stopped_until > now_) {
      host.up_busy = true;
      return push(host.links_stopped_until, kUplink, h);
    }
    const auto [side, generation] = (host.priority_senders.empty() ? host.senders : host.priority_senders).pop();
    if (side.connection->generation != generation || end(side).outbound.empty()) continue;
    End& self = end(side);
    Transfer t = self.outbound.pop();
    if (!self.outbound.empty()) host.senders.push({side, generation});
    const Duration sending_time = time_for(t.size(), host.link.up);
    start_transfer(side, std::move(t));
    if (sending_time == Duration{}) continue;
    host.up_busy = true;
    push(now_ + sending_time, kUplink, h);
  }
}

// Starts a transfer on the uplink. Its first byte reaches the receiver's downlink after the delay, and it arrives when
// its last byte has passed both.
void World::start_transfer(const Side& from, Transfer&& t) {
  End &self = end(from), &peer = end(other(from));
  Host& host = *hosts_[self.host];
  const std::size_t bytes = t.size();
  host.bytes_sent += bytes;
  const TimePoint begin = now_;
  t.through = t.last == Transfer::Last::kReset ? now_ : begin + time_for(bytes, host.link.up);
  self.unread_bytes += bytes;
  if (t.reported_bytes > 0) {
    self.unreported.push(t.reported_bytes);
    push(t.through, kSent, from);
  }
  Duration latency = delay_and_jitter(self.host, peer.host);
  if (options_.stall_share > 0 && random_.uniform() < options_.stall_share)
    latency += kRetransmission * (1 << random_.below(4));
  const TimePoint crossed_at =
      t.last == Transfer::Last::kReset ? t.through : region_link_passed_at(self.host, peer.host, bytes, t.through);
  t.arrives_at = std::max(crossed_at + latency, peer.last_arrival);
  peer.last_arrival = t.arrives_at;
  const TimePoint first_byte_at = std::max({begin + latency, t.arrives_at - (t.through - begin), peer.first_arrival});
  peer.first_arrival = first_byte_at;
  const TimePoint arrives_at = t.arrives_at;
  peer.inbound.push(std::move(t));
  if (hosts_[peer.host]->link.down)
    push(std::max(first_byte_at, now_), kFirst, other(from));
  else
    push(arrives_at, kArrive, other(from));
}

void World::on_sent(const Side& side) {
  const std::size_t h = end(side).host;
  Host& host = *hosts_[h];
  // Room for twice the path's content, and at least a slow system's buffer.
  const double path_bytes =
      host.link.up ? host.link.up->bytes_per_s() * seconds(2 * (delay(h, end(other(side)).host) + options_.jitter)) : 0;
  const std::size_t buffer_bytes = std::max<std::size_t>(256 * 1024, static_cast<std::size_t>(2 * path_bytes));
  while (host.process && side.connection->used) {
    End& self = end(side);
    if (self.state != End::State::kOpen || self.through == 0 || self.unreported.empty()) return;
    // A transfer larger than the buffer is taken when nothing else waits.
    if (self.unread_bytes > std::max(buffer_bytes, self.unreported.front())) return;
    if (host.links_stopped_until > now_) return push(host.links_stopped_until, kWake, side);
    --self.through;
    host.process->core().on_sent(self.id, self.unreported.pop(), now_);
    perform_actions(h);
  }
}

void World::on_first(const Side& to) {
  End& self = end(to);
  if (self.scheduled >= self.inbound.size()) return;  // its sender died meanwhile
  const Transfer& t = self.inbound[self.scheduled++];
  Host& host = *hosts_[self.host];
  const TimePoint arrives_at =
      std::max(t.arrives_at, std::max(now_, host.down_free) + time_for(t.size(), host.link.down));
  if (t.size() > 0) host.down_free = arrives_at;
  push(arrives_at, kArrive, to);
}

void World::on_arrive(const Side& to) {
  End &self = end(to), &peer = end(other(to));
  if (self.arrived >= self.inbound.size()) return;  // its sender died meanwhile
  if (is_cut(peer.host, self.host)) {
    ++self.parked;
    return;
  }
  const TimePoint stopped_until =
      std::max(hosts_[self.host]->links_stopped_until, hosts_[peer.host]->links_stopped_until);
  if (stopped_until > now_ && !peer.vanished) return push(stopped_until, kArrive, to);
  if (self.state == End::State::kClosed) {
    // No process reads it. A restarted machine answers with a reset.
    if (self.vanished && hosts_[self.host]->powered && peer.state == End::State::kOpen) {
      self.vanished = false;
      queue_transfer(to, {{}, {}, 0, Transfer::Last::kReset, {}, {}, 0});
    }
    self.inbound.pop();
    if (self.scheduled > 0) --self.scheduled;
    return;
  }
  ++self.arrived;
  if (self.state == End::State::kOpen) read(to);
}

void World::read(Side to) {
  const auto generation = to.connection->generation;
  const auto live = [&] { return to.connection->generation == generation && end(to).state == End::State::kOpen; };
  while (live() && end(to).arrived > 0 && end(to).reading && hosts_[end(to).host]->reading) {
    End& self = end(to);
    const std::size_t h = self.host;
    Transfer& t = self.inbound.front();
    const std::size_t size = t.size(), begin = t.read_bytes;
    std::size_t taken_bytes = 0;
    if (begin < size) {
      Core& core = hosts_[h]->process->core();
      taken_bytes = std::min(size - begin, core.read_bytes_max(size - begin));
      if (options_.split_transfer_share > 0 && taken_bytes > 1 && random_.uniform() < options_.split_transfer_share)
        taken_bytes = 1 + random_.below(taken_bytes - 1);
      t.read_bytes += taken_bytes;
      core.on_received(taken_bytes, now_);
    }
    const Slice head = t.head, tail = t.tail;
    const Transfer::Last last = t.last;
    if (begin + taken_bytes == size) {
      self.inbound.pop();
      --self.arrived;
      if (self.scheduled > 0) --self.scheduled;
    }
    // Tells the sender that there is room again.
    End& sender = end(other(to));
    if (is_cut(h, sender.host)) {
      sender.held_bytes += taken_bytes;
    } else {
      sender.unread_bytes -= std::min(sender.unread_bytes, taken_bytes);
      if (sender.through > 0) push(now_ + delay(h, sender.host), kWake, other(to));
    }
    if (last != Transfer::Last::kNo) {
      if (last == Transfer::Last::kReset) sender.state = End::State::kClosed;
      return break_connection(to, last == Transfer::Last::kEnd ? "closed by the peer" : "connection reset by the peer");
    }
    const std::size_t end_of_taken = begin + taken_bytes, head_bytes = head.size();
    if (begin < head_bytes && !decode_part(to, head, begin, std::min(end_of_taken, head_bytes))) return;
    if (end_of_taken > head_bytes && live() &&
        !decode_part(to, tail, std::max(begin, head_bytes) - head_bytes, end_of_taken - head_bytes))
      return;
    if (hosts_[h]->process) perform_actions(h);
  }
}

// Passes bytes [begin, end_of) of a slice to the decoder, and each complete frame to the core. False: the connection is
// gone.
bool World::decode_part(const Side& to, const Slice& slice, std::size_t begin, std::size_t end_of) {
  const auto generation = to.connection->generation;
  const std::size_t h = end(to).host;
  const ConnId conn = end(to).id;
  while (begin < end_of) {
    FrameDecoder& decoder = end(to).decoder;
    if (begin == 0 && end_of == slice.size() && decoder.adopt(slice)) {
      begin = end_of;
    } else {
      const auto room = decoder.room();
      const std::size_t n = std::min(room.size(), end_of - begin);
      std::memcpy(room.data(), slice.data() + begin, n);
      begin += n;
      if (const Status status = decoder.advance(n); !status) {
        break_connection(to, status.error().message());
        return false;
      }
    }
    auto frame = decoder.take();
    if (!frame) continue;
    hash_event(41, h, frame->body.size() ^ conn.value << 24);
    const std::size_t from = end(other(to)).host;
    if (trace_sink_) trace_line("host {} connection {} (host {}): {}", h, conn, from, describe(*frame));
    if (observer_) observer_->on_frame(HostId{from}, HostId{h}, end(to).peer, *frame);
    hosts_[h]->process->core().on_frame(conn, std::move(*frame), now_);
    perform_actions(h);
    if (to.connection->generation != generation || end(to).state != End::State::kOpen) return false;
  }
  return true;
}

void World::set_reading(std::size_t h, const act::SetReading& reading) {
  Host& host = *hosts_[h];
  if (reading.conn) {
    const Side side = find(h, *reading.conn);
    if (!side) return;
    end(side).reading = reading.on;
    if (reading.on) push(now_, kRead, side);
    return;
  }
  host.reading = reading.on;
  if (!reading.on) return;
  for (const auto& [conn, side] : host.connections)
    if (end(side).arrived > 0) push(now_, kRead, side);
}

}  // namespace echoline::sim

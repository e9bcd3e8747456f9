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
  std::size_t told = s.head.size() + s.tail.size();
  if (host.corrupt_bytes_min && s.tail.size() >= *host.corrupt_bytes_min) {
    host.corrupt_bytes_min.reset();
    std::vector<std::byte> copy(s.tail.bytes().begin(), s.tail.bytes().end());
    copy.back() ^= std::byte{1};
    s.tail = Slice(std::move(copy));
  }
  if (!host.malice) return transfer(side, {std::move(s.head), std::move(s.tail), told, Transfer::Last::kNo, {}, {}, 0});
  for (act::Send& out : host.malice->outgoing(std::move(s), now_)) {
    const Side over = find(h, out.conn);  // malice may send on other connections too
    if (!over || end(over).state != End::State::kOpen) continue;
    const std::size_t tell = over.connection == side.connection ? std::exchange(told, 0) : 0;
    transfer(over, {std::move(out.head), std::move(out.tail), tell, Transfer::Last::kNo, {}, {}, 0});
  }
  if (told > 0) transfer(side, {{}, {}, told, Transfer::Last::kNo, {}, {}, 0});
}

void World::transfer(const Side& from, Transfer&& t) {
  End& self = end(from);
  Host& host = *hosts_[self.host];
  if (t.last == Transfer::Last::kReset || (!host.link.up && host.clogged_until <= now_ && self.outbound.empty()))
    return launch(from, std::move(t));
  if (self.outbound.empty()) (t.size() <= kBurst ? host.begun : host.sending).push({from, from.connection->generation});
  self.outbound.push(std::move(t));
  serve_uplink(self.host);
}

// Connections take turns by transfer, as packets do in a kernel's fair queue. As there, a connection that starts with
// at most a burst need not wait for a turn of all others, which here would be a chunk of each.
void World::serve_uplink(std::size_t h) {
  Host& host = *hosts_[h];
  while (!host.up_busy && !(host.begun.empty() && host.sending.empty())) {
    if (host.clogged_until > now_) {
      host.up_busy = true;
      return push(host.clogged_until, kUplink, h);
    }
    const auto [side, generation] = (host.begun.empty() ? host.sending : host.begun).pop();
    if (side.connection->generation != generation || end(side).outbound.empty()) continue;
    End& self = end(side);
    Transfer t = self.outbound.pop();
    if (!self.outbound.empty()) host.sending.push({side, generation});
    const Duration takes = time_for(t.size(), host.link.up);
    launch(side, std::move(t));
    if (takes == Duration{}) continue;
    host.up_busy = true;
    push(now_ + takes, kUplink, h);
  }
}

// Starts a transfer on the uplink. Its first byte reaches the receiver's downlink after the delay, and it arrives when
// its last byte has passed both.
void World::launch(const Side& from, Transfer&& t) {
  End &self = end(from), &peer = end(other(from));
  Host& host = *hosts_[self.host];
  const std::size_t bytes = t.size();
  host.bytes_sent += bytes;
  const TimePoint begin = now_;
  t.through = t.last == Transfer::Last::kReset ? now_ : begin + time_for(bytes, host.link.up);
  self.unread_bytes += bytes;
  if (t.told_bytes > 0) {
    self.untold.push(t.told_bytes);
    push(t.through, kSent, from);
  }
  Duration late = delay_and_jitter(self.host, peer.host);
  if (options_.stall_share > 0 && random_.uniform() < options_.stall_share)
    late += kRetransmission * (1 << random_.below(4));
  const TimePoint crossed_at =
      t.last == Transfer::Last::kReset ? t.through : crossed(self.host, peer.host, bytes, t.through);
  t.there = std::max(crossed_at + late, peer.last_arrival);
  peer.last_arrival = t.there;
  const TimePoint first = std::max({begin + late, t.there - (t.through - begin), peer.first_arrival});
  peer.first_arrival = first;
  const TimePoint there = t.there;
  peer.inbound.push(std::move(t));
  if (hosts_[peer.host]->link.down)
    push(std::max(first, now_), kFirst, other(from));
  else
    push(there, kArrive, other(from));
}

void World::on_sent(const Side& side) {
  const std::size_t h = end(side).host;
  Host& host = *hosts_[h];
  // Room for twice the path's content, and at least a slow system's buffer.
  const double path_bytes =
      host.link.up ? host.link.up->bytes_per_s() * seconds(2 * (delay(h, end(other(side)).host) + options_.jitter)) : 0;
  const std::size_t room = std::max<std::size_t>(256 * 1024, static_cast<std::size_t>(2 * path_bytes));
  while (host.process && side.connection->used) {
    End& self = end(side);
    if (self.state != End::State::kOpen || self.through == 0 || self.untold.empty()) return;
    // A transfer larger than the room is taken when nothing else waits.
    if (self.unread_bytes > std::max(room, self.untold.front())) return;
    if (host.clogged_until > now_) return push(host.clogged_until, kWake, side);
    --self.through;
    host.process->core().on_sent(self.id, self.untold.pop(), now_);
    drain(h);
  }
}

void World::on_first(const Side& to) {
  End& self = end(to);
  if (self.scheduled >= self.inbound.size()) return;  // its sender died meanwhile
  const Transfer& t = self.inbound[self.scheduled++];
  Host& host = *hosts_[self.host];
  const TimePoint there = std::max(t.there, std::max(now_, host.down_free) + time_for(t.size(), host.link.down));
  if (t.size() > 0) host.down_free = there;
  push(there, kArrive, to);
}

void World::on_arrive(const Side& to) {
  End &self = end(to), &peer = end(other(to));
  if (self.arrived >= self.inbound.size()) return;  // its sender died meanwhile
  if (is_cut(peer.host, self.host)) {
    ++self.parked;
    return;
  }
  const TimePoint clogged = std::max(hosts_[self.host]->clogged_until, hosts_[peer.host]->clogged_until);
  if (clogged > now_ && !peer.vanished) return push(clogged, kArrive, to);
  if (self.state == End::State::kClosed) {
    // No process reads it. A restarted machine answers with a reset.
    if (self.vanished && hosts_[self.host]->powered && peer.state == End::State::kOpen) {
      self.vanished = false;
      transfer(to, {{}, {}, 0, Transfer::Last::kReset, {}, {}, 0});
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
    std::size_t take = 0;
    if (begin < size) {
      Core& core = hosts_[h]->process->core();
      take = std::min(size - begin, core.read_bytes_max(size - begin));
      if (options_.split_share > 0 && take > 1 && random_.uniform() < options_.split_share)
        take = 1 + random_.below(take - 1);
      t.read_bytes += take;
      core.on_received(take, now_);
    }
    const Slice head = t.head, tail = t.tail;
    const Transfer::Last last = t.last;
    if (begin + take == size) {
      self.inbound.pop();
      --self.arrived;
      if (self.scheduled > 0) --self.scheduled;
    }
    // Tells the sender that there is room again.
    End& sender = end(other(to));
    if (is_cut(h, sender.host)) {
      sender.held_bytes += take;
    } else {
      sender.unread_bytes -= std::min(sender.unread_bytes, take);
      if (sender.through > 0) push(now_ + delay(h, sender.host), kWake, other(to));
    }
    if (last != Transfer::Last::kNo) {
      if (last == Transfer::Last::kReset) sender.state = End::State::kClosed;
      return lost(to, last == Transfer::Last::kEnd ? "closed by the peer" : "connection reset by the peer");
    }
    const std::size_t end_of_take = begin + take, head_bytes = head.size();
    if (begin < head_bytes && !feed(to, head, begin, std::min(end_of_take, head_bytes))) return;
    if (end_of_take > head_bytes && live() &&
        !feed(to, tail, std::max(begin, head_bytes) - head_bytes, end_of_take - head_bytes))
      return;
    if (hosts_[h]->process) drain(h);
  }
}

// Passes bytes [begin, end_of) of a slice to the decoder, and each complete frame to the core. False: the connection is
// gone.
bool World::feed(const Side& to, const Slice& slice, std::size_t begin, std::size_t end_of) {
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
        lost(to, status.error().message());
        return false;
      }
    }
    auto frame = decoder.take();
    if (!frame) continue;
    trace(41, h, frame->body.size() ^ conn.value << 24);
    const std::size_t from = end(other(to)).host;
    if (sink_) say("host {} connection {} (host {}): {}", h, conn, from, describe(*frame));
    if (observer_) observer_->on_frame(HostId{from}, HostId{h}, end(to).peer, *frame);
    hosts_[h]->process->core().on_frame(conn, std::move(*frame), now_);
    drain(h);
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

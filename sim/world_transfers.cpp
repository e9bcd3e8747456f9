// Transport of bytes in a world: uplink, delay, downlink, flow control, and decoding at the receiver.
#include <cstring>

#include "sim/world_parts.hpp"

namespace echoline::sim {

using namespace overlay;

namespace {

// An absent rate is unlimited.
Duration time_for(std::size_t bytes, const std::optional<BitRate>& rate) {
  return rate ? from_seconds(static_cast<double>(bytes) / rate->bytes_per_s()) : Duration{};
}

// A connection without queued data that sends at most this much goes first. It is the initial quantum of Linux's
// sch_fq: ten full packets.
constexpr std::size_t kBurstBytes = 15'140;
constexpr Duration kRetransmissionTimeout = std::chrono::milliseconds(200);

std::string describe(const Frame& frame) {
  if (frame.type == FrameType::kChunk) return fmt::format("chunk {} of {} bytes", frame.chunk.index, frame.body.size());
  if (frame.type == FrameType::kApplication) return fmt::format("application message of {} bytes", frame.body.size());
  // By the index of a message's type in ControlMessage.
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

void World::send(std::size_t host_index, act::Send&& message) {
  Host& host = *hosts_[host_index];
  const Side side = find_side(host_index, message.conn);
  if (!side || end(side).state != End::State::kOpen) return;
  std::size_t unreported_bytes = message.head.size() + message.tail.size();
  if (host.corrupt_bytes_min && message.tail.size() >= *host.corrupt_bytes_min) {
    host.corrupt_bytes_min.reset();
    std::vector<std::byte> copy(message.tail.bytes().begin(), message.tail.bytes().end());
    copy.back() ^= std::byte{1};
    message.tail = Slice(std::move(copy));
  }
  if (!host.rewriter)
    return queue_transfer(
        side, {.head = std::move(message.head), .tail = std::move(message.tail), .reported_bytes = unreported_bytes});
  // The core expects a report of the bytes that it wrote itself. They are reported with the first transfer on their
  // connection.
  for (act::Send& out : host.rewriter->rewrite(std::move(message), now_)) {
    const Side target = find_side(host_index, out.conn);  // the rewriter may send on other connections too
    if (!target || end(target).state != End::State::kOpen) continue;
    const std::size_t reported_bytes = target.connection == side.connection ? std::exchange(unreported_bytes, 0) : 0;
    queue_transfer(target,
                   {.head = std::move(out.head), .tail = std::move(out.tail), .reported_bytes = reported_bytes});
  }
  // If the rewriter withholds the message, an empty transfer reports its bytes.
  if (unreported_bytes > 0) queue_transfer(side, {.head = {}, .tail = {}, .reported_bytes = unreported_bytes});
}

void World::queue_transfer(const Side& from, Transfer&& transfer) {
  End& self = end(from);
  Host& host = *hosts_[self.host];
  // A reset overtakes the queue. On an unlimited uplink, nothing has to wait for its turn.
  if (transfer.ending == Transfer::Ending::kReset ||
      (!host.link.up && host.links_stopped_until <= now_ && self.outbound.empty()))
    return start_transfer(from, std::move(transfer));
  if (self.outbound.empty())
    (transfer.size() <= kBurstBytes ? host.priority_senders : host.senders).push({from, from.connection->generation});
  self.outbound.push(std::move(transfer));
  serve_uplink(self.host);
}

// Connections take turns by transfer, as packets do in a kernel's fair queue. A transfer here can be a whole chunk, so
// waiting for all other connections would take much longer than there. So, as in the kernel, a connection that starts
// with at most kBurstBytes goes first.
void World::serve_uplink(std::size_t host_index) {
  Host& host = *hosts_[host_index];
  while (!host.uplink_busy && !(host.priority_senders.empty() && host.senders.empty())) {
    if (host.links_stopped_until > now_) {
      host.uplink_busy = true;
      return push(host.links_stopped_until, kUplink, host_index);
    }
    const auto [side, generation] = (host.priority_senders.empty() ? host.senders : host.priority_senders).pop();
    if (side.connection->generation != generation || end(side).outbound.empty()) continue;
    End& self = end(side);
    Transfer transfer = self.outbound.pop();
    if (!self.outbound.empty()) host.senders.push({side, generation});
    const Duration sending_time = time_for(transfer.size(), host.link.up);
    start_transfer(side, std::move(transfer));
    if (sending_time == Duration{}) continue;
    host.uplink_busy = true;
    push(now_ + sending_time, kUplink, host_index);
  }
}

// Starts a transfer on the uplink. Its first byte reaches the receiver's downlink after the delay, and it arrives when
// its last byte has passed both.
void World::start_transfer(const Side& from, Transfer&& transfer) {
  End &self = end(from), &peer = end(peer_side(from));
  Host& host = *hosts_[self.host];
  const std::size_t bytes = transfer.size();
  host.bytes_sent += bytes;
  transfer.sent_at = transfer.ending == Transfer::Ending::kReset ? now_ : now_ + time_for(bytes, host.link.up);
  self.unread_bytes += bytes;
  if (transfer.reported_bytes > 0) {
    self.unreported.push(transfer.reported_bytes);
    push(transfer.sent_at, kSent, from);
  }
  Duration latency = delay_and_jitter(self.host, peer.host);
  if (options_.stalled_transfer_share > 0 && random_.uniform() < options_.stalled_transfer_share)
    latency += kRetransmissionTimeout * (1 << random_.below(4));  // up to 8 times: TCP doubles the timeout each time
  const TimePoint crossed_at =
      transfer.ending == Transfer::Ending::kReset
          ? transfer.sent_at
          : region_links_.passed_at(options_.regions, host.region, hosts_[peer.host]->region, bytes, transfer.sent_at);
  transfer.arrives_at = std::max(crossed_at + latency, peer.last_arrival);
  peer.last_arrival = transfer.arrives_at;
  // The first byte is ahead of the last one by the time on the uplink.
  const TimePoint first_byte_at =
      std::max({now_ + latency, transfer.arrives_at - (transfer.sent_at - now_), peer.first_arrival});
  peer.first_arrival = first_byte_at;
  const TimePoint arrives_at = transfer.arrives_at;  // `transfer` is moved away below
  peer.inbound.push(std::move(transfer));
  if (hosts_[peer.host]->link.down)
    push(first_byte_at, kFirstByte, peer_side(from));
  else
    push(arrives_at, kArrives, peer_side(from));
}

// Reports sent bytes to the core while the sockets' buffers have room.
void World::report_sent_bytes(const Side& side) {
  const std::size_t host_index = end(side).host;
  Host& host = *hosts_[host_index];
  // The buffers hold twice the data in flight in a round trip, and at least kBufferBytesMin.
  constexpr std::size_t kBufferBytesMin = 256 * 1024;
  const double in_flight_bytes =
      host.link.up
          ? host.link.up->bytes_per_s() * seconds(2 * (delay(host_index, end(peer_side(side)).host) + options_.jitter))
          : 0;
  const std::size_t buffer_bytes = std::max(kBufferBytesMin, static_cast<std::size_t>(2 * in_flight_bytes));
  while (host.process && side.connection->in_use) {
    End& self = end(side);
    if (self.state != End::State::kOpen || self.unreported_sent == 0 || self.unreported.empty()) return;
    // A transfer larger than the buffer is taken when nothing else waits.
    if (self.unread_bytes > std::max(buffer_bytes, self.unreported.front())) return;
    if (host.links_stopped_until > now_) return push(host.links_stopped_until, kWake, side);
    --self.unreported_sent;
    host.process->core().on_sent(self.id, self.unreported.pop(), now_);
    perform_actions(host_index);
  }
}

// The first byte is at the downlink: computes when the last one has passed it.
void World::on_first_byte(const Side& to) {
  End& self = end(to);
  if (self.on_downlink_transfers >= self.inbound.size()) return;  // its sender died meanwhile
  const Transfer& transfer = self.inbound[self.on_downlink_transfers++];
  Host& host = *hosts_[self.host];
  const TimePoint starts_at = std::max(now_, host.downlink_free_at);
  const TimePoint arrives_at = std::max(transfer.arrives_at, starts_at + time_for(transfer.size(), host.link.down));
  if (transfer.size() > 0) host.downlink_free_at = arrives_at;
  push(arrives_at, kArrives, to);
}

void World::on_arrive(const Side& to) {
  End &self = end(to), &peer = end(peer_side(to));
  if (self.arrived_transfers >= self.inbound.size()) return;  // its sender died meanwhile
  if (partitions_.separates(peer.host, self.host)) {
    ++self.parked_transfers;
    return;
  }
  const TimePoint stopped_until =
      std::max(hosts_[self.host]->links_stopped_until, hosts_[peer.host]->links_stopped_until);
  if (stopped_until > now_ && !peer.vanished) return push(stopped_until, kArrives, to);
  if (self.state == End::State::kClosed) {
    // No process reads the transfer. A restarted machine answers with a reset.
    if (self.vanished && hosts_[self.host]->has_power && peer.state == End::State::kOpen) {
      self.vanished = false;
      queue_transfer(to, Transfer::of_ending(Transfer::Ending::kReset));
    }
    self.inbound.pop();
    if (self.on_downlink_transfers > 0) --self.on_downlink_transfers;
    return;
  }
  ++self.arrived_transfers;
  if (self.state == End::State::kOpen) read_arrived(to);
}

// Passes arrived transfers to the decoder and the core, until the core stops reading.
void World::read_arrived(Side to) {
  const auto generation = to.connection->generation;
  const auto is_open = [&] { return to.connection->generation == generation && end(to).state == End::State::kOpen; };
  while (is_open() && end(to).arrived_transfers > 0 && end(to).reading && hosts_[end(to).host]->reading) {
    End& self = end(to);
    const std::size_t host_index = self.host;
    Transfer& transfer = self.inbound.front();
    const std::size_t size = transfer.size(), begin = transfer.read_bytes;  // an earlier read may have taken a part
    std::size_t taken_bytes = 0;
    if (begin < size) {
      Core& core = hosts_[host_index]->process->core();
      taken_bytes = std::min(size - begin, core.read_bytes_max(size - begin));
      if (options_.split_transfer_share > 0 && taken_bytes > 1 && random_.uniform() < options_.split_transfer_share)
        taken_bytes = 1 + random_.below(taken_bytes - 1);
      transfer.read_bytes += taken_bytes;
      core.on_received(taken_bytes, now_);
    }
    const Slice head = transfer.head, tail = transfer.tail;  // copies: pop() below removes the transfer
    const Transfer::Ending ending = transfer.ending;
    if (begin + taken_bytes == size) {
      self.inbound.pop();
      --self.arrived_transfers;
      if (self.on_downlink_transfers > 0) --self.on_downlink_transfers;
    }
    // The receiver's buffer has room again. The sender is notified after the delay, or after a partition.
    End& sender = end(peer_side(to));
    if (partitions_.separates(host_index, sender.host)) {
      sender.unacknowledged_bytes += taken_bytes;
    } else {
      sender.unread_bytes -= std::min(sender.unread_bytes, taken_bytes);
      if (sender.unreported_sent > 0) push(now_ + delay(host_index, sender.host), kWake, peer_side(to));
    }
    if (ending != Transfer::Ending::kNone) {
      if (ending == Transfer::Ending::kReset) sender.state = End::State::kClosed;
      return break_connection(to,
                              ending == Transfer::Ending::kEnd ? "closed by the peer" : "connection reset by the peer");
    }
    const std::size_t end_of_taken = begin + taken_bytes, head_bytes = head.size();
    if (begin < head_bytes && !decode_part(to, head, begin, std::min(end_of_taken, head_bytes))) return;
    if (end_of_taken > head_bytes && is_open() &&
        !decode_part(to, tail, std::max(begin, head_bytes) - head_bytes, end_of_taken - head_bytes))
      return;
    if (hosts_[host_index]->process) perform_actions(host_index);
  }
}

// Passes bytes [begin, end_byte) of a slice to the decoder, and each complete frame to the core. False: the connection
// is gone.
bool World::decode_part(const Side& to, const Slice& slice, std::size_t begin, std::size_t end_byte) {
  const auto generation = to.connection->generation;
  const std::size_t host_index = end(to).host;
  const ConnId conn = end(to).id;
  while (begin < end_byte) {
    FrameDecoder& decoder = end(to).decoder;
    if (begin == 0 && end_byte == slice.size() && decoder.adopt(slice)) {  // the whole slice, without a copy
      begin = end_byte;
    } else {
      const auto room = decoder.room();
      const std::size_t copied_bytes = std::min(room.size(), end_byte - begin);
      std::memcpy(room.data(), slice.data() + begin, copied_bytes);
      begin += copied_bytes;
      if (const Status status = decoder.advance(copied_bytes); !status) {
        break_connection(to, status.error().message());
        return false;
      }
    }
    auto frame = decoder.take();
    if (!frame) continue;
    hash_event(kHashFrame, host_index, frame->body.size() ^ conn.value << 24);
    const std::size_t from = end(peer_side(to)).host;
    if (trace_.sink) trace_line("host {} connection {} (host {}): {}", host_index, conn, from, describe(*frame));
    if (observer_) observer_->on_frame(HostId{from}, HostId{host_index}, end(to).peer, *frame);
    hosts_[host_index]->process->core().on_frame(conn, std::move(*frame), now_);
    perform_actions(host_index);
    if (to.connection->generation != generation || end(to).state != End::State::kOpen) return false;
  }
  return true;
}

void World::set_reading(std::size_t host_index, const act::SetReading& reading) {
  Host& host = *hosts_[host_index];
  if (reading.conn) {
    const Side side = find_side(host_index, *reading.conn);
    if (!side) return;
    end(side).reading = reading.on;
    if (reading.on) push(now_, kRead, side);
    return;
  }
  host.reading = reading.on;
  if (!reading.on) return;
  for (const auto& [conn, side] : host.connections)
    if (end(side).arrived_transfers > 0) push(now_, kRead, side);
}

}  // namespace echoline::sim

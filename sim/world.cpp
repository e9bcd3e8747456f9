// Hosts, processes, time and faults of a simulated world. world_connections.cpp and world_transfers.cpp have the
// connections.
#include "sim/world.hpp"

#include "sim/world_parts.hpp"

namespace echoline::sim {

using namespace overlay;

namespace {

constexpr std::uint64_t kWorldRandomStream = 1;                // differs from the streams of disks and fleet
constexpr std::uint16_t kPort = 7070;                          // of every host
constexpr std::uint64_t kRetransmissionMaxNs = 1'000'000'000;  // longest time from a partition's end to the next one

}  // namespace

World::World(const WorldOptions& options)
    : options_(options), random_(options.seed, kWorldRandomStream), trace_{.hash = mix64(options.seed), .sink = {}} {}
World::~World() = default;

HostId World::add_host(const AccessLink& link, Duration clock_skew, std::uint32_t region) {
  const std::size_t i = hosts_.size();
  auto host = std::make_unique<Host>(options_.seed, i);
  host->link = link;
  host->region = region;
  host->unix_origin_s = options_.unix_origin_s + seconds(clock_skew);
  host->endpoint = {fmt::format("10.{}.{}.{}", i >> 16 & 255, i >> 8 & 255, i & 255), kPort};
  addresses_.host_by_address[host->endpoint.host] = i;
  hosts_.push_back(std::move(host));
  return HostId{i};
}

Endpoint World::endpoint_of(HostId host) const { return hosts_[host.value]->endpoint; }
double World::unix_origin_s(HostId host) const { return hosts_[host.value]->unix_origin_s; }
Disk& World::disk(HostId host) { return hosts_[host.value]->disk; }
bool World::is_alive(HostId host) const { return hosts_[host.value]->process != nullptr; }
Process* World::process(HostId host) const { return hosts_[host.value]->process.get(); }
std::uint64_t World::bytes_sent(HostId host) const { return hosts_[host.value]->bytes_sent; }

void World::start(HostId id, std::unique_ptr<Process> process) {
  Host& host = *hosts_[id.value];
  ECHO_CHECK(!host.process, "host {} runs a process already", id);
  host.process = std::move(process);
  ++host.incarnation;
  host.next_accepted_id = 2;
  host.timer_at = kNever;
  host.reading = host.has_power = true;
  hash_event(kHashStart, id.value, host.incarnation);
  trace_line("host {} starts", id);
}

void World::stop(HostId id) {
  Host& host = *hosts_[id.value];
  if (!host.process) return;
  hash_event(kHashStop, id.value, 0);
  trace_line("host {} stops", id);
  for (const auto& [conn, side] : std::map(host.connections)) close(id.value, conn);  // a copy: close() erases
  host.disk.complete_all(now_);
  host.certificate.clear();
  host.process.reset();
}

void World::kill(HostId id, Death death) {
  Host& host = *hosts_[id.value];
  if (!host.process) return;
  hash_event(kHashKill, id.value, static_cast<std::uint64_t>(death));
  trace_line("host {} {}", id, death == Death::kCrash ? "crashes" : "loses power");
  const bool crash = death == Death::kCrash;
  for (const auto& [conn, side] : host.connections) {
    End &self = end(side), &peer = end(peer_side(side));
    self.state = End::State::kClosed;
    self.vanished = !crash;
    self.outbound.clear();
    Fifo<Transfer>& outgoing = peer.inbound;  // all transfers from this end that the peer has not read
    // Data that has not left the uplink is lost.
    while (!outgoing.empty() && outgoing.back().sent_at > now_) {
      Transfer& unsent = outgoing.back();
      const bool is_first_unsent = outgoing.size() == 1 || outgoing[outgoing.size() - 2].sent_at <= now_;
      if (is_first_unsent) {  // a random part of it may have left
        const std::size_t sent_bytes = unsent.size() ? random_.below(unsent.size()) : 0;
        const std::size_t sent_head_bytes = std::min(sent_bytes, unsent.head.size());
        if (sent_bytes > 0 && unsent.ending == Transfer::Ending::kNone) {
          unsent.head = unsent.head.part(0, sent_head_bytes);
          unsent.tail = sent_bytes > sent_head_bytes ? unsent.tail.part(0, sent_bytes - sent_head_bytes) : Slice();
          unsent.sent_at = now_;
          break;
        }
      }
      outgoing.pop_back();
    }
    peer.on_downlink_transfers = std::min(peer.on_downlink_transfers, peer.inbound.size());
    peer.arrived_transfers = std::min(peer.arrived_transfers, peer.inbound.size());
    if (crash && peer.state != End::State::kClosed) queue_transfer(side, Transfer::of_ending(Transfer::Ending::kReset));
    if (peer.state == End::State::kClosed || peer.state == End::State::kNone) free_connection(*side.connection);
  }
  host.connections.clear();
  host.certificate.clear();
  host.paused_until = {};
  host.has_power = crash;  // after a crash, the machine refuses connections; without power, it answers nothing
  if (crash)
    host.disk.on_crash(now_);
  else
    host.disk.on_power_loss(now_);
  host.process.reset();
}

void World::set_nat(HostId host, bool behind_nat) { hosts_[host.value]->behind_nat = behind_nat; }
void World::set_rewriter(HostId host, std::unique_ptr<MessageRewriter> rewriter) {
  hosts_[host.value]->rewriter = std::move(rewriter);
}
void World::corrupt_next(HostId host, std::size_t bytes_min) { hosts_[host.value]->corrupt_bytes_min = bytes_min; }

void World::stop_links(HostId id, TimePoint until) {
  Host& host = *hosts_[id.value];
  host.links_stopped_until = std::max(host.links_stopped_until, until);
  host.downlink_free_at = std::max(host.downlink_free_at, until);
  hash_event(kHashStopLinks, id.value, 0);
  trace_line("host {} is clogged until {:.3f}", id, seconds(until.time_since_epoch()));
}

void World::pause(HostId id, TimePoint until) {
  Host& host = *hosts_[id.value];
  if (!host.process) return;
  host.paused_until = std::max(host.paused_until, until);
  hash_event(kHashPause, id.value, 0);
  trace_line("host {} is paused until {:.3f}", id, seconds(until.time_since_epoch()));
}

bool World::is_paused(HostId id) const { return hosts_[id.value]->paused_until > now_; }

std::uint64_t World::start_partition(const std::vector<HostId>& from, const std::vector<HostId>& to, bool one_way) {
  const std::uint64_t number = partitions_.start(from, to, one_way, hosts_.size());
  hash_event(kHashPartition, number, one_way);
  trace_line("partition {}{}: from {} hosts to {}", number, one_way ? " (one way)" : "", from.size(), to.size());
  return number;
}

void World::end_partition(std::uint64_t number) {
  if (!partitions_.end(number)) return;
  hash_event(kHashPartitionEnd, number, 0);
  trace_line("partition {} is healed", number);
  for (const auto& connection : connections_.all)
    for (const std::size_t end_index : {0, 1}) {
      const Side side{connection.get(), end_index};
      End &self = end(side), &peer = end(peer_side(side));
      if (!connection->in_use || partitions_.separates(peer.host, self.host)) continue;
      if (self.parked_transfers == 0 && self.unacknowledged_bytes == 0) continue;
      // TCP uses the healed path from its next retransmission on.
      const TimePoint retransmitted_at =
          now_ + delay_and_jitter(peer.host, self.host) + Duration(random_.below(kRetransmissionMaxNs));
      for (; self.parked_transfers > 0; --self.parked_transfers) push(retransmitted_at, kArrives, side);
      self.unread_bytes -= std::min(self.unread_bytes, std::exchange(self.unacknowledged_bytes, 0));
      push(retransmitted_at, kWake, side);
    }
}

bool World::reset_random_connection(HostId id) {
  Host& host = *hosts_[id.value];
  if (!host.process || host.connections.empty()) return false;
  auto it = host.connections.begin();
  std::advance(it, random_.below(host.connections.size()));
  if (end(it->second).state != End::State::kOpen) return false;
  const Side side = it->second;
  trace_line("host {} loses connection {}", id, it->first);
  break_connection(side, "connection reset by the network");
  return true;
}

void World::reset_all_connections(HostId id) {
  Host& host = *hosts_[id.value];
  for (const auto& [conn, side] : std::map(host.connections)) {  // a copy: break_connection() erases
    if (!host.process || !find_side(id.value, conn) || end(side).state != End::State::kOpen) continue;
    trace_line("host {} loses connection {}", id, conn);
    break_connection(side, "connection reset by the network");
  }
}

void World::change_address(HostId id) {
  Host& host = *hosts_[id.value];
  addresses_.host_by_address.erase(host.endpoint.host);
  // New addresses are in 172.16.0.0/12, numbered, so that none is used twice or is another host's first one
  // (10.0.0.0/8).
  const std::uint64_t change = ++addresses_.changes;
  host.endpoint.host = fmt::format("172.{}.{}.{}", 16 + (change >> 16 & 15), change >> 8 & 255, change & 255);
  addresses_.host_by_address[host.endpoint.host] = id.value;
  hash_event(kHashChangeAddress, id.value, change);
  trace_line("host {} is at {} from now on", id, host.endpoint.host);
  for (const auto& [conn, side] : std::map(host.connections)) {  // a copy: the loop erases, and so may the core
    if (!find_side(id.value, conn)) continue;
    End &self = end(side), &peer = end(peer_side(side));
    if (self.state != End::State::kOpen) {
      break_connection(side, "the network has changed");
      continue;
    }
    self.outbound.clear();
    while (peer.inbound.size() > peer.arrived_transfers)
      peer.inbound.pop_back();  // data on its way to the peer is lost
    peer.on_downlink_transfers = std::min(peer.on_downlink_transfers, peer.inbound.size());
    self.state = End::State::kClosed;
    host.connections.erase(conn);
    trace_line("host {} connection {} ends: the network has changed", id, conn);
    if (peer.state == End::State::kClosed || peer.state == End::State::kNone) free_connection(*side.connection);
    host.process->core().on_closed(conn, "the network has changed", now_);
    perform_actions(id.value);
  }
}

void World::step_clock(HostId id, Duration shift) {
  hosts_[id.value]->unix_origin_s += seconds(shift);
  hash_event(kHashClockStep, id.value, static_cast<std::uint64_t>(shift.count()));
  trace_line("the clock of host {} is set by {:.0f} s", id, seconds(shift));
}

void World::set_connections_max(HostId id, std::size_t connections_max) {
  hosts_[id.value]->connections_max = connections_max;
}

void World::run_at(TimePoint time, std::function<void()> work) {
  push(std::max(time, now_), kScript, 0, scripts_.add(std::move(work)));
}

void World::push(TimePoint at, EventKind kind, std::uint64_t host, std::uint64_t detail, std::uint64_t generation) {
  queue_.push(at, kind, static_cast<std::uint32_t>(host), detail, generation);
}

void World::push(TimePoint at, EventKind kind, const Side& side) {
  push(at, kind, end(side).host, side.connection->slot << 1 | side.end_index, side.connection->generation);
}

World::Side World::side_of(const Event& event) {
  Connection& connection = *connections_.all[event.detail >> 1];
  if (!connection.in_use || connection.generation != event.generation) return {};
  return {&connection, event.detail & 1};
}

bool World::run(TimePoint until) {
  return run(until, [] { return false; });
}

bool World::run(TimePoint until, const std::function<bool()>& done) {
  while (queue_.next_at() <= until && !queue_.empty()) {
    const Event event = queue_.pop();
    now_ = event.at;
    ++events_;
    hash_event(kHashQueuedEvent + event.kind, event.host, event.detail);
    handle(event);
    if (done()) return true;
  }
  if (until != kNever) now_ = std::max(now_, until);
  return done();
}

void World::handle(const Event& event) {
  // Events of a paused process wait. Scripts and the uplink belong to the world, not to a process.
  if (event.kind != kScript && event.kind != kUplink && hosts_[event.host]->paused_until > now_) {
    Host& host = *hosts_[event.host];
    // on_timer() ignores an event at another time than `timer_at`.
    if (event.kind == kTimer && host.timer_at == event.at) host.timer_at = host.paused_until;
    return queue_.push(host.paused_until, event.kind, event.host, event.detail, event.generation);
  }
  switch (event.kind) {
    case kScript: {
      const auto script = scripts_.waiting.extract(event.detail);
      return script.mapped()();
    }
    case kTimer:
      return on_timer(event);
    case kUplink:
      hosts_[event.host]->uplink_busy = false;
      return serve_uplink(event.host);
    case kDisk:
      if (hosts_[event.host]->process && hosts_[event.host]->incarnation == event.detail) on_disk(event.host);
      return;
    default:
      break;
  }
  const Side side = side_of(event);
  if (!side) return;
  switch (event.kind) {
    case kSent:
      ++end(side).unreported_sent;
      return report_sent_bytes(side);
    case kWake:
      return report_sent_bytes(side);
    case kFirstByte:
      return on_first_byte(side);
    case kArrives:
      return on_arrive(side);
    case kRead:
      return read_arrived(side);
    case kSyn:
      return on_syn(side);
    case kConnected:
      return on_connected(side);
    case kAccepts:
      return on_accept(side);
    case kDialFails:
      return break_connection(side, side.connection->failure);
    default:
      return;
  }
}

void World::check() const {
  connections_.check();
  ECHO_CHECK(addresses_.host_by_address.size() == hosts_.size());
  for (std::size_t i = 0; i < hosts_.size(); ++i)
    ECHO_CHECK(addresses_.host_by_address.at(hosts_[i]->endpoint.host) == i, "host {}", i);
}

void World::hash_event(std::uint64_t kind, std::uint64_t host, std::uint64_t detail) {
  trace_.hash = mix64(trace_.hash ^ mix64(static_cast<std::uint64_t>(now_.time_since_epoch().count()) ^ kind << 56 ^
                                          host << 36 ^ detail));
}

void World::note(const std::string& text) {
  for (const char c : text) trace_.hash = mix64(trace_.hash ^ static_cast<unsigned char>(c));
  trace_line("{}", text);
}

Duration World::delay(std::size_t from, std::size_t to) const {
  return options_.regions.delay(hosts_[from]->region, hosts_[to]->region, options_.delay);
}

Duration World::delay_and_jitter(std::size_t from, std::size_t to) {
  if (options_.jitter <= Duration{}) return delay(from, to);
  return delay(from, to) + Duration(random_.below(static_cast<std::uint64_t>(options_.jitter.count())));
}

void World::perform_actions(std::size_t host_index) {
  Host& host = *hosts_[host_index];
  if (host.performing_actions) return;  // an outer call performs the new actions too
  host.performing_actions = true;
  Core* core = &host.process->core();
  for (auto actions = core->take_actions(); !actions.empty(); actions = core->take_actions())
    for (Action& action : actions) perform(host_index, std::move(action));
  host.performing_actions = false;
  arm_timer(host_index);
  if (observer_) observer_->on_step(HostId{host_index});
}

void World::arm_timer(std::size_t host_index) {
  Host& host = *hosts_[host_index];
  const TimePoint deadline = std::max(host.process->core().next_deadline(), now_);
  if (deadline == kNever || deadline >= host.timer_at) return;  // an earlier timer is set and will check again
  host.timer_at = deadline;
  push(deadline, kTimer, host_index, host.incarnation);
}

void World::on_timer(const Event& event) {
  Host& host = *hosts_[event.host];
  if (!host.process || host.incarnation != event.detail || host.timer_at != event.at) return;
  host.timer_at = kNever;
  Core& core = host.process->core();
  if (core.next_deadline() > now_) return arm_timer(event.host);
  core.on_timer(now_);
  perform_actions(event.host);
}

void World::perform(std::size_t host_index, Action&& action) {
  Host& host = *hosts_[host_index];
  hash_event(kHashAction, host_index, action.index());
  if (auto* sending = std::get_if<act::Send>(&action)) return send(host_index, std::move(*sending));
  if (const auto* dialling = std::get_if<act::Dial>(&action)) return dial(host_index, *dialling);
  if (const auto* closing = std::get_if<act::Close>(&action)) return close(host_index, closing->conn);
  if (const auto* admit = std::get_if<act::Admit>(&action)) {  // until then the decoder takes only small messages
    if (const Side side = find_side(host_index, admit->conn)) end(side).decoder.admit();
    return;
  }
  if (const auto* reading = std::get_if<act::SetReading>(&action)) return set_reading(host_index, *reading);
  if (const auto* use = std::get_if<act::UseCertificate>(&action)) {
    host.certificate.assign(reinterpret_cast<const char*>(use->certificate.data()), use->certificate.size());
    return;
  }
  if (std::holds_alternative<act::SaveState>(action) || std::holds_alternative<act::Spool>(action) ||
      std::holds_alternative<act::ReadChunk>(action) || std::holds_alternative<act::DropSpool>(action))
    return push(host.disk.submit(std::move(action), now_), kDisk, host_index, host.incarnation);
  host.process->on_action(std::move(action), now_);
}

void World::on_disk(std::size_t host_index) {
  Host& host = *hosts_[host_index];
  Disk::Answer answer = host.disk.complete(now_);
  Core& core = host.process->core();
  if (const auto* saved = std::get_if<Disk::Saved>(&answer))
    core.on_saved(saved->status, now_);
  else if (const auto* spooled = std::get_if<Disk::Spooled>(&answer))
    core.on_spooled(spooled->publication, spooled->chunk, spooled->status, now_);
  else if (auto* chunk_read = std::get_if<Disk::ChunkRead>(&answer))
    core.on_chunk_read(chunk_read->publication, chunk_read->chunk, std::move(chunk_read->data), now_);
  else
    return;
  perform_actions(host_index);
}

}  // namespace echoline::sim

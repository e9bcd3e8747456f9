#include "sim/network.hpp"

#include <tuple>

namespace echoline::sim {

using namespace overlay;

// One end of a connection, as its host knows it.
struct Network::Connection {
  Connection() = default;
  Connection(std::size_t host, ConnId id) : peer_host(host), peer(id) {}
  std::size_t peer_host = 0;
  ConnId peer;
  FrameDecoder decoder;
  TimePoint first_arrival{}, last_arrival{};  // of the last transfer at the peer, so that jitter keeps the order
  // Flow control: what the peer has not read stays in the sockets' buffers, and the sender is told that its bytes were
  // taken only while there is room.
  std::size_t unread_bytes = 0;
  std::deque<std::size_t> untold;
};

struct Network::Transfer {
  ConnId from, to;
  std::size_t to_host = 0;
  std::vector<std::byte> head;
  Slice tail;
  bool end = false;  // the sender closed
  std::size_t size() const { return head.size() + tail.length; }
};

struct Network::Host {
  AccessLink link;
  Core* core = nullptr;
  std::function<void(const Action&)> to_application;
  std::map<ConnId, Connection> connections;
  TimePoint up_free{}, down_free{}, timer_at = kNever, died_at = kNever;
  bool reading = true, draining = false;
  std::deque<Transfer> unread;
  std::uint64_t next_accepted = 2, bytes_sent = 0;
  std::optional<std::size_t> corrupt_bytes_min;
  bool alive() const { return died_at == kNever; }
};

namespace {

Duration time_for(std::size_t bytes, const std::optional<BitRate>& rate) {
  return rate ? from_seconds(static_cast<double>(bytes) / rate->bytes_per_s()) : Duration{};
}

}  // namespace

Network::Network(Duration delay, Duration jitter, std::uint64_t seed)
    : delay_(delay), jitter_(jitter), random_(seed, 1), trace_(mix64(seed)) {}
Network::~Network() = default;

HostId Network::add_host(AccessLink link) {
  hosts_.push_back(std::make_unique<Host>());
  hosts_.back()->link = link;
  return HostId{hosts_.size() - 1};
}

Endpoint Network::endpoint_of(HostId host) const {
  return {fmt::format("10.{}.{}.{}", host.value >> 16 & 255, host.value >> 8 & 255, host.value & 255), 7070};
}

void Network::attach(HostId host, Core& core, std::function<void(const Action&)> to_application) {
  hosts_[host.value]->core = &core;
  hosts_[host.value]->to_application = std::move(to_application);
}

void Network::call(HostId host, const std::function<void(TimePoint)>& work) {
  if (!hosts_[host.value]->alive()) return;
  work(now_);
  drain(host.value);
}

void Network::at(TimePoint time, std::function<void()> work) {
  queue_.push({std::max(time, now_), sequence_++, std::move(work)});
}

bool Network::alive(HostId host) const { return hosts_[host.value]->alive(); }
std::uint64_t Network::bytes_sent(HostId host) const { return hosts_[host.value]->bytes_sent; }
void Network::corrupt_next(HostId host, std::size_t bytes_min) { hosts_[host.value]->corrupt_bytes_min = bytes_min; }

void Network::kill(HostId id, Death death) {
  Host& host = *hosts_[id.value];
  if (!host.alive()) return;
  host.died_at = now_;
  trace(1, id.value, static_cast<std::uint64_t>(death));
  if (death == Death::kSilent) return;
  for (const auto& [conn, c] : host.connections)
    at(now_ + delay_, [this, h = c.peer_host, peer = c.peer] {
      Host& p = *hosts_[h];
      if (!p.alive() || !p.connections.erase(peer)) return;
      p.core->on_closed(peer, "connection reset by the peer", now_);
      drain(h);
    });
  host.connections.clear();
}

bool Network::run(TimePoint until, const std::function<bool()>& done) {
  while (!queue_.empty() && queue_.top().at <= until) {
    auto event = std::move(const_cast<Event&>(queue_.top()));  // popped at once; its order keys stay
    queue_.pop();
    now_ = event.at;
    event.run();
    if (done()) return true;
  }
  return done();
}

void Network::trace(std::uint64_t a, std::uint64_t b, std::uint64_t c) {
  trace_ = mix64(trace_ ^ mix64(static_cast<std::uint64_t>(now_.time_since_epoch().count()) ^ a << 56 ^ b << 32 ^ c));
}

void Network::drain(std::size_t h) {
  Host& host = *hosts_[h];
  if (host.draining) return;
  host.draining = true;
  for (auto actions = host.core->take_actions(); !actions.empty(); actions = host.core->take_actions())
    for (Action& action : actions) perform(h, std::move(action));
  host.draining = false;
  arm_timer(h);
}

void Network::arm_timer(std::size_t h) {
  Host& host = *hosts_[h];
  const TimePoint deadline = std::max(host.core->next_deadline(), now_);
  if (deadline == kNever || deadline >= host.timer_at) return;  // an earlier one is set and will look again
  host.timer_at = deadline;
  at(deadline, [this, h, deadline] {
    Host& self = *hosts_[h];
    if (!self.alive() || self.timer_at != deadline) return;
    self.timer_at = kNever;
    if (self.core->next_deadline() <= now_) self.core->on_timer(now_);
    drain(h);
  });
}

void Network::perform(std::size_t h, Action&& action) {
  Host& host = *hosts_[h];
  trace(2, h, action.index());
  if (auto* s = std::get_if<act::Send>(&action)) {
    const auto it = host.connections.find(s->conn);
    if (it != host.connections.end())
      send(h, {s->conn, it->second.peer, it->second.peer_host, std::move(s->head), std::move(s->tail), false});
  } else if (const auto* d = std::get_if<act::Dial>(&action)) {
    dial(h, *d);
  } else if (const auto* c = std::get_if<act::Close>(&action)) {
    close(h, c->conn);
  } else if (const auto* admit = std::get_if<act::Admit>(&action)) {
    if (const auto it = host.connections.find(admit->conn); it != host.connections.end()) it->second.decoder.admit();
  } else if (const auto* reading = std::get_if<act::SetReading>(&action)) {
    host.reading = reading->on;
    if (host.reading)
      at(now_, [this, h] {
        Host& self = *hosts_[h];
        while (self.alive() && self.reading && !self.unread.empty()) {
          Transfer transfer = std::move(self.unread.front());
          self.unread.pop_front();
          read(h, transfer);
        }
      });
  } else {
    host.to_application(action);
  }
}

void Network::dial(std::size_t h, const act::Dial& dial) {
  std::optional<std::size_t> found;
  for (std::size_t i = 0; i < hosts_.size() && !found; ++i)
    if (endpoint_of(HostId{i}) == dial.to) found = i;
  at(now_ + delay_, [this, h, found, conn = dial.conn] {
    if (!found || !hosts_[*found]->alive() || !hosts_[*found]->core) {
      at(now_ + delay_, [this, h, conn] {
        if (!hosts_[h]->alive()) return;
        hosts_[h]->core->on_closed(conn, "connection refused", now_);
        drain(h);
      });
      return;
    }
    Host& peer = *hosts_[*found];
    const ConnId accepted{peer.next_accepted};
    peer.next_accepted += 2;
    peer.connections[accepted] = Connection(h, conn);
    peer.core->on_accepted(accepted, endpoint_of(HostId{h}).host, now_);
    drain(*found);
    at(now_ + delay_, [this, h, conn, to = *found, accepted] {
      Host& self = *hosts_[h];
      if (!self.alive()) return;
      self.connections[conn] = Connection(to, accepted);
      if (!hosts_[to]->alive() && hosts_[to]->connections.empty()) {  // crashed meanwhile
        self.connections.erase(conn);
        self.core->on_closed(conn, "connection reset by the peer", now_);
      } else {
        self.core->on_connected(conn, now_);
      }
      drain(h);
    });
  });
}

// The sender's uplink carries it after what was sent before; its first byte reaches the receiver's downlink after the
// delay; it is there when its last byte has passed both.
void Network::send(std::size_t h, Transfer&& t) {
  Host& host = *hosts_[h];
  Connection& connection = host.connections.at(t.from);
  const std::size_t bytes = t.size();
  if (host.corrupt_bytes_min && t.tail.length >= *host.corrupt_bytes_min) {
    host.corrupt_bytes_min.reset();
    auto copy = std::make_shared<std::vector<std::byte>>(t.tail.bytes().begin(), t.tail.bytes().end());
    copy->back() ^= std::byte{1};
    t.tail = {copy, 0, copy->size()};
  }
  host.bytes_sent += bytes;
  const TimePoint begin = std::max(now_, host.up_free);
  const TimePoint through = begin + time_for(bytes, host.link.up);
  host.up_free = through;
  connection.unread_bytes += bytes;
  if (!t.end)
    at(through, [this, h, conn = t.from, bytes] {
      const auto it = hosts_[h]->connections.find(conn);
      if (it == hosts_[h]->connections.end()) return;
      it->second.untold.push_back(bytes);
      tell_sent(h, conn);
    });
  const Duration extra =
      jitter_ > Duration{} ? Duration(random_.below(static_cast<std::uint64_t>(jitter_.count()))) : Duration{};
  const TimePoint last = std::max(through + delay_ + extra, connection.last_arrival);
  connection.last_arrival = last;
  const TimePoint first = std::max({begin + delay_ + extra, last - (through - begin), connection.first_arrival});
  connection.first_arrival = first;
  auto shared = std::make_shared<Transfer>(std::move(t));
  const auto& down = hosts_[shared->to_host]->link.down;
  const auto lost = [this, h, through] { return hosts_[h]->died_at < through; };  // still in a dead sender's queue
  if (!down) {
    at(last, [this, shared, lost] {
      if (!lost()) arrive(shared->to_host, shared);
    });
    return;
  }
  at(first, [this, shared, lost, last] {
    if (lost()) return;
    Host& receiver = *hosts_[shared->to_host];
    const TimePoint there =
        std::max(last, std::max(now_, receiver.down_free) + time_for(shared->size(), receiver.link.down));
    receiver.down_free = there;
    at(there, [this, shared] { arrive(shared->to_host, shared); });
  });
}

void Network::tell_sent(std::size_t h, ConnId conn) {
  Host& host = *hosts_[h];
  // Room for twice what the path holds, and at least what a system gives a slow one.
  const double path_bytes = host.link.up ? host.link.up->bytes_per_s() * seconds(2 * (delay_ + jitter_)) : 0;
  const std::size_t room = std::max<std::size_t>(256 * 1024, static_cast<std::size_t>(2 * path_bytes));
  for (;;) {
    const auto it = host.connections.find(conn);
    if (!host.alive() || it == host.connections.end() || it->second.untold.empty() || it->second.unread_bytes > room)
      return;
    const std::size_t bytes = it->second.untold.front();
    it->second.untold.pop_front();
    host.core->on_sent(conn, bytes, now_);
    drain(h);
  }
}

void Network::arrive(std::size_t h, const std::shared_ptr<Transfer>& t) {
  Host& host = *hosts_[h];
  if (!host.alive()) return;
  if (!host.reading || !host.unread.empty()) {
    host.unread.push_back(std::move(*t));
    return;
  }
  read(h, *t);
}

void Network::read(std::size_t h, Transfer& t) {
  Host& host = *hosts_[h];
  trace(3, h, t.size() ^ t.to.value << 24);
  const auto connection = host.connections.find(t.to);
  if (connection == host.connections.end()) return;
  at(now_ + delay_, [this, from = connection->second.peer_host, conn = t.from, bytes = t.size()] {
    const auto it = hosts_[from]->connections.find(conn);
    if (it == hosts_[from]->connections.end()) return;
    it->second.unread_bytes -= bytes;
    tell_sent(from, conn);
  });
  if (t.end) {
    host.connections.erase(t.to);
    host.core->on_closed(t.to, "closed by the peer", now_);
    return drain(h);
  }
  host.core->on_received(t.size(), now_);
  for (const std::span<const std::byte> part : {std::span<const std::byte>(t.head), t.tail.bytes()}) {
    bool first = true;
    for (;;) {
      const auto it = host.connections.find(t.to);
      if (it == host.connections.end()) return drain(h);  // closed by the core meanwhile
      FrameDecoder& decoder = it->second.decoder;
      if (std::exchange(first, false)) decoder.feed(part);
      const auto frame = decoder.next();
      if (!frame) {
        const std::string reason = frame.error().message();
        close(h, t.to);
        host.core->on_closed(t.to, reason, now_);
        return drain(h);
      }
      if (!*frame) break;
      host.core->on_frame(t.to, **frame, now_);
      drain(h);
    }
  }
  drain(h);
}

void Network::close(std::size_t h, ConnId conn) {
  Host& host = *hosts_[h];
  const auto it = host.connections.find(conn);
  if (it == host.connections.end()) return;
  send(h, {conn, it->second.peer, it->second.peer_host, {}, {}, true});
  host.connections.erase(it);
}

}  // namespace echoline::sim

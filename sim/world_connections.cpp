// Opening and closing of a world's connections: dialling, certificates, closing.
#include <algorithm>

#include "sim/world_parts.hpp"

namespace echoline::sim {

using namespace overlay;
using trust::PeerIdentity;

namespace {

constexpr Duration kSynRetry = std::chrono::seconds(1);  // interval of the first packet's retransmissions

}  // namespace

World::Side World::find_side(std::size_t host_index, ConnId conn) {
  const auto it = hosts_[host_index]->connections.find(conn);
  return it == hosts_[host_index]->connections.end() ? Side{} : it->second;
}

World::Connection& World::ConnectionSlots::take() {
  if (free.empty()) {
    free.push_back(all.size());
    all.push_back(std::make_unique<Connection>());
    all.back()->slot = free.back();
  }
  Connection& connection = *all[free.back()];
  free.pop_back();
  connection.in_use = true;
  return connection;
}

void World::ConnectionSlots::check() const {
  for (const std::size_t slot : free) ECHO_CHECK(!all[slot]->in_use, "slot {}", slot);
  const auto in_use = std::count_if(all.begin(), all.end(), [](const auto& connection) { return connection->in_use; });
  ECHO_CHECK(free.size() + static_cast<std::size_t>(in_use) == all.size());
}

void World::dial(std::size_t host_index, const act::Dial& dial) {
  Connection& connection = connections_.take();
  connection.service = dial.service;
  connection.expected = dial.expected;
  connection.dialled = now_;
  const Side side{&connection, 0};
  End& self = end(side);
  self.host = host_index;
  self.incarnation = hosts_[host_index]->incarnation;
  self.id = dial.conn;
  self.state = End::State::kOpening;
  const bool reached_limit = hosts_[host_index]->connections.size() >= hosts_[host_index]->connections_max;
  ECHO_CHECK(hosts_[host_index]->connections.emplace(dial.conn, side).second, "host {} dials connection {} twice",
             host_index, dial.conn);
  if (reached_limit) return fail_dial(side, "too many open files", now_);
  const auto address = addresses_.host_by_address.find(dial.to.host);
  if (address == addresses_.host_by_address.end()) return fail_dial(side, "no route to host", now_ + options_.delay);
  end(peer_side(side)).host = address->second;
  trace_line("host {} dials host {} (connection {})", host_index, address->second, dial.conn);
  push(now_ + delay_and_jitter(host_index, address->second), kSyn, side);
}

void World::fail_dial(const Side& dialler, std::string reason, TimePoint at) {
  dialler.connection->failure = std::move(reason);
  push(at, kDialFails, dialler);
}

// The first packet has reached the dialled host. If the path is blocked, the packet is sent again until the dial times
// out.
void World::on_syn(const Side& dialler) {
  Connection& connection = *dialler.connection;
  const std::size_t from = end(dialler).host, to = end(peer_side(dialler)).host;
  Host& server = *hosts_[to];
  const TimePoint deadline = connection.dialled + options_.dial_timeout;
  const TimePoint links_stopped_until = std::max(server.links_stopped_until, hosts_[from]->links_stopped_until);
  if (partitions_.separates(from, to) || partitions_.separates(to, from) || links_stopped_until > now_) {
    const TimePoint retry_at = std::max(now_ + kSynRetry, links_stopped_until);
    if (retry_at >= deadline) return fail_dial(dialler, "connection timed out", deadline);
    return push(retry_at, kSyn, dialler);
  }
  if (server.behind_nat || blocked_dials_.contains({from, to}) || (!server.process && !server.has_power))
    return fail_dial(dialler, "connection timed out", deadline);
  if (!server.process) return fail_dial(dialler, "connection refused", now_ + delay(from, to));
  end(peer_side(dialler)).incarnation = server.incarnation;
  // The TCP and TLS handshakes take two round trips. The first of the four delays has passed.
  push(now_ + 3 * delay(from, to), kConnected, dialler);
}

// The dialler has completed the handshake and knows its peer; the peer learns of the dialler a little later.
void World::on_connected(const Side& dialler) {
  Connection& connection = *dialler.connection;
  End &self = end(dialler), &peer = end(peer_side(dialler));
  const Host& server = *hosts_[peer.host];
  if (!server.process || server.incarnation != peer.incarnation)
    return break_connection(dialler, "connection reset during the handshake");
  if (certificates_.authority) {
    const bool expects_learner = connection.expected == kLearnerId;
    // The learner's certificate is valid however old it is.
    const auto identity = verify_certificate(server.certificate, self.host,
                                             expects_learner ? CertificateDates::kIgnored : CertificateDates::kChecked);
    if (!identity) return break_connection(dialler, identity.error().message());
    const bool is_expected =
        expects_learner ? identity->kind == PeerIdentity::Kind::kLearner
                        : identity->kind == PeerIdentity::Kind::kWorker && identity->worker == connection.expected;
    if (!is_expected)
      return break_connection(
          dialler, fmt::format("expected {}, found {}",
                               expects_learner ? "the learner" : fmt::format("worker {}", connection.expected),
                               to_text(*identity)));
  }
  self.state = End::State::kOpen;
  peer.state = End::State::kOpening;
  peer.last_arrival = peer.first_arrival = now_ + delay(self.host, peer.host);
  push(peer.last_arrival, kAccepts, dialler);
  trace_line("host {} connection {} is connected to host {}", self.host, self.id, peer.host);
  hosts_[self.host]->process->core().on_connected(self.id, now_);
  perform_actions(self.host);
}

// The dialled end opens, after the dialling one. The dialler's certificate is checked only here.
void World::on_accept(const Side& dialler) {
  Connection& connection = *dialler.connection;
  End &client = end(dialler), &self = end(peer_side(dialler));
  Host& server = *hosts_[self.host];
  const auto refuse = [&] {
    self.state = End::State::kClosed;
    if (client.state == End::State::kClosed) return free_connection(connection);
    queue_transfer(peer_side(dialler), Transfer::of_ending(Transfer::Ending::kReset));
  };
  if (!server.process || server.incarnation != self.incarnation) {
    if (server.has_power) return refuse();
    // The machine lost power, so the dialler gets no answer.
    self.state = End::State::kClosed;
    self.vanished = true;
    return;
  }
  PeerIdentity identity;
  // A worker that enrols has no certificate yet.
  if (certificates_.authority && connection.service != act::Service::kEnrol) {
    const auto proven = verify_certificate(hosts_[client.host]->certificate, self.host, CertificateDates::kChecked);
    if (!proven) {
      trace_line("host {} refuses host {}: {}", self.host, client.host, proven.error().message());
      return refuse();
    }
    identity = *proven;
  }
  if (server.links_stopped_until > now_) return push(server.links_stopped_until, kAccepts, dialler);
  if (server.connections.size() >= server.connections_max) return refuse();
  self.id = ConnId{server.next_accepted_id};
  server.next_accepted_id += 2;  // the core gives odd ids to the connections that it dials
  self.state = End::State::kOpen;
  self.peer = identity.kind == PeerIdentity::Kind::kWorker ? std::optional(identity.worker) : std::nullopt;
  server.connections.emplace(self.id, peer_side(dialler));
  trace_line("host {} accepts connection {} of host {}, {}", self.host, self.id, client.host, to_text(identity));
  server.process->core().on_accepted(self.id, {hosts_[client.host]->endpoint.host, identity}, now_);
  perform_actions(self.host);
  if (self.arrived_transfers > 0) push(now_, kRead, peer_side(dialler));
}

// Checks a certificate at the run's time as the host `verifier` knows it.
Result<PeerIdentity> World::verify_certificate(const std::string& certificate, std::size_t verifier,
                                               CertificateDates dates) {
  return certificates_.verify(certificate, hosts_[verifier]->process->core().run_unix_s(now_), dates);
}

void World::close(std::size_t host_index, ConnId conn) {
  const Side side = find_side(host_index, conn);
  if (!side) return;
  End &self = end(side), &peer = end(peer_side(side));
  hosts_[host_index]->connections.erase(conn);
  const bool opening = self.state == End::State::kOpening;
  self.state = End::State::kClosed;
  if (opening || peer.state == End::State::kNone || peer.state == End::State::kClosed)
    return free_connection(*side.connection);
  queue_transfer(side, Transfer::of_ending(Transfer::Ending::kEnd));
}

// The connection broke: notifies this end's core; the peer will see a reset.
void World::break_connection(const Side& side, std::string reason) {
  End &self = end(side), &peer = end(peer_side(side));
  const std::size_t host_index = self.host;
  const ConnId conn = self.id;
  hosts_[host_index]->connections.erase(conn);
  const bool opening = self.state == End::State::kOpening;
  self.state = End::State::kClosed;
  trace_line("host {} connection {} ends: {}", host_index, conn, reason);
  if (!opening && (peer.state == End::State::kOpen || peer.state == End::State::kOpening))
    queue_transfer(side, Transfer::of_ending(Transfer::Ending::kReset));
  else
    free_connection(*side.connection);
  hosts_[host_index]->process->core().on_closed(conn, reason, now_);
  perform_actions(host_index);
}

// Frees a connection that both ends have closed. Pending events see another generation and are ignored.
void World::free_connection(Connection& connection) {
  if (!connection.in_use) return;
  connection.in_use = false;
  ++connection.generation;
  connection.failure.clear();
  for (End& end_of_connection : connection.ends) end_of_connection = End{};
  connections_.free.push_back(connection.slot);
}

}  // namespace echoline::sim

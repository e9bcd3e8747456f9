// A worker's children: admits, serves and closes them. Called by MemberCore.
#include "overlay/member/children.hpp"

#include <algorithm>

#include "base/log.hpp"

namespace echoline::overlay {

Children::Children(const MemberConfig& config, const Identity& identity, const LearnerLink& learner, Parents& parents,
                   PublicationStore& store, Transport& transport, Uplink& uplink)
    : config_(config),
      identity_(identity),
      learner_(learner),
      parents_(parents),
      transport_(transport),
      edges_(store, uplink, /*catch_ups_on_demand=*/false),
      pending_peers_(config.core.connections),
      grants_(*config.checker, config.state.worker) {}

// ---- from the learner ----

void Children::dial(const DialChild& child) {
  if (child.worker == config_.state.worker || edges_.connections() >= config_.core.connections.members) return;
  dialled_.insert_or_assign(transport_.dial(child.endpoint, act::Service::kData, child.worker), child);
}

void Children::release(const Release& release, TimePoint now) {
  grants_.release(release.child, release.issued,
                  identity_.learner_unix_ms(now) + grant_lifetime_ms(learner_.membership().away_max()));
  close_ungranted(now);
}

void Children::on_beacon(const Beacon& beacon) {
  grants_.on_beacon(beacon.sequence, grant_lifetime_ms(learner_.membership().away_max()));
}

void Children::revoke(const WorkerSet& revoked) {
  revoked_ = revoked;
  for (const ConnId conn : edges_.all_connections())
    if (revoked_.contains(*edges_.child_of(conn))) close(conn);
}

void Children::close_ungranted(TimePoint now) {
  for (const auto& [child, helped] : grants_.take_ended(identity_.learner_unix_ms(now)))
    for (const ConnId conn : edges_.connections_of(child, helped)) {
      log::info("worker {}: no longer serves worker {}, whose grant has ended", config_.state.worker, child);
      close(conn);
    }
}

void Children::close_all() {
  for (const ConnId conn : edges_.all_connections()) close(conn);
  for (const ConnId conn : pending_peers_.take_all()) close(conn);
}

// ---- connections ----

void Children::close(ConnId conn) {
  on_closed(conn);
  transport_.close(conn);
}

void Children::on_closed(ConnId conn) {
  pending_peers_.erase(conn);
  dialled_.erase(conn);
  edges_.close(conn);
}

void Children::refuse(ConnId conn, WorkerId worker, const std::string& why) {
  log::warn("worker {}: closing a connection of worker {}: {}", config_.state.worker, worker, why);
  close(conn);
}

void Children::on_accepted(ConnId conn, const PeerInfo& peer, TimePoint now) {
  const WorkerId worker = peer.identity.worker;
  if (peer.identity.kind == trust::PeerIdentity::Kind::kAnonymous || revoked_.contains(worker) ||
      budgets_.is_barred(worker, now))
    return transport_.close(conn);
  add_pending_peer(conn, peer, now);
}

bool Children::on_connected(ConnId conn, TimePoint now) {
  const auto child = dialled_.find(conn);
  if (child == dialled_.end()) return false;
  trust::PeerIdentity identity;  // proven, because a dial succeeds only if the expected worker answers
  identity.kind = trust::PeerIdentity::Kind::kWorker;
  identity.worker = child->second.worker;
  add_pending_peer(conn, {.host = child->second.endpoint.host, .identity = identity}, now);
  // Introduces this node as the parent. The message is small enough for a peer that has not admitted this node.
  transport_.send(conn, EdgeStatus{{}, parents_.progress()}, now);
  return true;
}

void Children::add_pending_peer(ConnId conn, PeerInfo peer, TimePoint now) {
  for (const ConnId other : pending_peers_.add(conn, std::move(peer), now + Core::kHandshakeTimeout)) close(other);
}

void Children::on_timer(TimePoint now) {
  for (const ConnId conn : pending_peers_.take_expired(now)) close(conn);
}

void Children::on_frame(ConnId conn, const Frame& frame, TimePoint now) {
  if (const PendingPeer* pending = pending_peers_.find(conn)) return on_pending_peer(conn, *pending, frame, now);
  if (const auto child = edges_.child_of(conn)) return on_child_frame(conn, *child, frame, now);
  transport_.close(conn);
}

void Children::on_pending_peer(ConnId conn, PendingPeer pending, const Frame& frame, TimePoint now) {
  const WorkerId worker = pending.peer.identity.worker;
  if (revoked_.contains(worker)) return refuse(conn, worker, "its certificate is revoked");
  auto message = decode_control(frame.body.bytes());
  if (!message) return refuse(conn, worker, message.error().message());
  if (auto* hello = std::get_if<PeerHello>(&*message)) {
    if (hello->run_id != config_.state.run_id)
      return refuse(conn, worker, fmt::format("it belongs to run '{}'", hello->run_id));
    if (pending.hello || worker == kLearnerId || worker == config_.state.worker)
      return refuse(conn, worker, "it cannot be a child");
    if (budgets_.is_barred(worker, now) || !within_budget(worker, MessageBudget::Kind::kHave, frame.body.size(), now))
      return refuse(conn, worker, "it says too much");
    if (const Status granted = grants_.accept(worker, *hello, identity_.learner_unix_ms(now)); !granted)
      return refuse(conn, worker, granted.error().message());
    transport_.admit(conn);  // for the list of its chunks, which may be longer than a first message
    if (hello->have_follows) return pending_peers_.await_have(conn, std::move(*hello), now + Core::kHandshakeTimeout);
    return open_edge(conn, worker, std::move(*hello), now);
  }
  if (auto* have = std::get_if<Have>(&*message); have && pending.hello) {
    if (!within_budget(worker, MessageBudget::Kind::kHave, frame.body.size(), now))
      return refuse(conn, worker, "it says too much");
    pending.hello->have = std::move(*have);
    return open_edge(conn, worker, std::move(*pending.hello), now);
  }
  // A parent that was asked to dial introduces itself by its status.
  if (!std::holds_alternative<EdgeStatus>(*message) || !parents_.on_dialled_by(worker, conn, now))
    return refuse(conn, worker, "it did not introduce itself");
  pending_peers_.erase(conn);
}

void Children::open_edge(ConnId conn, WorkerId child, PeerHello hello, TimePoint now) {
  pending_peers_.erase(conn);
  const bool helped = hello.catch_up_to.has_value();
  // Help is not limited to certain stripes, and the hello of a further stream of an open edge lists no stripes.
  const bool wanted_was_checked =
      helped || (hello.stream != 0 && !edges_.connections_of(child, /*helped=*/false).empty());
  if (const Status granted = wanted_was_checked ? ok() : grants_.check_wanted(child, hello.have.wanted); !granted)
    return refuse(conn, child, granted.error().message());
  if (hello.stream == 0)  // a new edge replaces the old one, whose connections are dead
    for (const ConnId old : edges_.connections_of(child, helped)) close(old);
  const bool adds_stream = hello.stream != 0 && !edges_.connections_of(child, helped).empty();
  if ((adds_stream && !parents_.has_room_for_streams(non_parent_connections())) ||
      !edges_.open(conn, child, std::move(hello), now))
    close(conn);
}

void Children::on_child_frame(ConnId conn, WorkerId child, const Frame& frame, TimePoint now) {
  if (frame.type != FrameType::kControl)
    return refuse(conn, child, "a child sent something other than control messages");
  auto message = decode_control(frame.body.bytes());
  if (!message) return refuse(conn, child, message.error().message());
  const auto kind = MessageBudget::kind_of(*message);
  if (kind && !within_budget(child, *kind, frame.body.size(), now)) return;
  if (auto* have = std::get_if<Have>(&*message)) {
    const Status granted = edges_.is_helped(conn) ? ok() : grants_.check_wanted(child, have->wanted);
    if (!granted) return refuse(conn, child, granted.error().message());
    return edges_.update(conn, std::move(*have), now);
  }
  if (const auto* grant = std::get_if<SignedGrant>(&*message)) {
    const Status granted = grants_.renew(child, *grant, identity_.learner_unix_ms(now));
    if (!granted) refuse(conn, child, granted.error().message());
    return;
  }
  if (const auto* request = std::get_if<ChunkRequest>(&*message)) return edges_.send_again(conn, *request, now);
  if (const auto* more = std::get_if<MoreStreams>(&*message)) return dial_more_streams(child, more->streams);
  refuse(conn, child, "a child sent a message that is not for a parent");
}

// Only for a child that this worker has dialled before, because it knows the address of no other child.
void Children::dial_more_streams(WorkerId child, std::size_t streams) {
  const auto dialled_before = std::find_if(dialled_.begin(), dialled_.end(),
                                           [&](const auto& dialled) { return dialled.second.worker == child; });
  if (dialled_before == dialled_.end()) return;
  const DialChild target = dialled_before->second;
  for (std::size_t connected = edges_.connections_of(child).size();
       connected < std::min<std::size_t>(streams, StreamProbe::kStreamsMax); ++connected)
    dialled_.insert_or_assign(transport_.dial(target.endpoint, act::Service::kData, target.worker), target);
}

// Returns whether the caller may use the message. Messages share the downlink with publications, so long ones count for
// more. A child that goes far beyond its budget is closed and barred for a while.
bool Children::within_budget(WorkerId child, MessageBudget::Kind kind, std::size_t bytes, TimePoint now) {
  const auto is_connected = [this](WorkerId id) { return !edges_.connections_of(id).empty(); };
  const auto verdict = budgets_.count(child, kind, bytes, learner_.heartbeat(), is_connected, now);
  if (verdict != MessageBudget::Verdict::kTooMuch) return verdict == MessageBudget::Verdict::kAccept;
  log::warn("worker {}: refuses worker {} as a child for {}: it says too much: of {}", config_.state.worker, child,
            echoline::to_text(ChildBudgets::kBarredTime), budgets_.limit_text(child, kind));
  for (const ConnId conn : edges_.connections_of(child)) close(conn);
  return false;
}

void Children::on_store_changed(TimePoint now) {
  edges_.on_store_changed(now);
  for (const EdgeTrouble& trouble : edges_.take_troubles())
    log::info("worker {}: worker {} has to ask for help to reach version {}", config_.state.worker, trouble.child,
              trouble.what.target);
}

void Children::check() const {
  for (const ConnId conn : edges_.all_connections()) {
    ECHO_CHECK(!pending_peers_.find(conn), "connection {} is of a child and of a stranger", conn);
    ECHO_CHECK(!revoked_.contains(*edges_.child_of(conn)), "a revoked worker is a child");
  }
}

}  // namespace echoline::overlay

// Chooses the publications and chunks to send to each child. Called by the learner's core and by a worker's Children.
#include "overlay/edge_sender.hpp"

#include <algorithm>

namespace echoline::overlay {

bool EdgeSender::open(ConnId conn, WorkerId child, PeerHello hello, TimePoint now) {
  const auto [it, added] = edges_.try_emplace({child, hello.catch_up_to.has_value()});
  Edge& edge = it->second;
  if (edge.conns.size() >= kStreamsMax) return false;
  edge.owner = this;
  edge.child = child;
  edge.conns.push_back(conn);
  connections_[conn].edge = &edge;
  uplink_.open(conn, edge);
  if (added || hello.stream == 0) {
    edge.catch_up_to = hello.catch_up_to;
    edge.full_only = hello.full_only;
    store_have(edge, std::move(hello.have));
  }
  send(edge, now);
  return true;
}

void EdgeSender::close(ConnId conn) {
  const auto connection = connections_.find(conn);
  if (connection == connections_.end()) return;
  Edge& edge = *connection->second.edge;
  uplink_.close(conn);
  connections_.erase(connection);
  std::erase(edge.conns, conn);
  edge.lossy = true;
  if (!edge.conns.empty()) return;  // the child reports again which chunks it lacks
  std::erase_if(troubles_, [&](const EdgeTrouble& t) { return t.child == edge.child; });
  edges_.erase({edge.child, edge.catch_up_to.has_value()});
}

std::optional<WorkerId> EdgeSender::child_of(ConnId conn) const {
  const auto connection = connections_.find(conn);
  if (connection == connections_.end()) return std::nullopt;
  return connection->second.edge->child;
}

bool EdgeSender::helps(ConnId conn) const {
  const auto connection = connections_.find(conn);
  return connection != connections_.end() && connection->second.edge->catch_up_to.has_value();
}

std::vector<ConnId> EdgeSender::all_connections() const {
  std::vector<ConnId> all;
  for (const auto& [conn, connection] : connections_) all.push_back(conn);
  return all;
}

std::vector<ConnId> EdgeSender::connections_of(WorkerId child) const {
  std::vector<ConnId> all = connections_of(child, false);
  const std::vector<ConnId> helping = connections_of(child, true);
  all.insert(all.end(), helping.begin(), helping.end());
  return all;
}

std::vector<ConnId> EdgeSender::connections_of(WorkerId child, bool helped) const {
  const auto it = edges_.find({child, helped});
  return it == edges_.end() ? std::vector<ConnId>() : it->second.conns;
}

std::vector<WorkerId> EdgeSender::children() const {
  std::vector<WorkerId> all;
  for (const auto& [key, edge] : edges_)
    if (!key.second) all.push_back(key.first);
  return all;
}

std::size_t EdgeSender::known_publications() const {
  std::size_t most = 0;
  for (const auto& [key, edge] : edges_) most = std::max(most, edge.known.size());
  return most;
}

void EdgeSender::update(ConnId conn, Have have, TimePoint now) {
  const auto connection = connections_.find(conn);
  if (connection == connections_.end()) return;
  store_have(*connection->second.edge, std::move(have));
  send(*connection->second.edge, now);
}

void EdgeSender::store_have(Edge& edge, Have have) {
  edge.position = have.position;
  edge.wanted = have.wanted;
  edge.reported_behind = false;
  // Chunks sent on live connections are still on their path, though the child could not list them yet.
  if (std::exchange(edge.lossy, false)) {
    edge.closed.clear();
    edge.known.clear();
  }
  edge.complete_at_child.clear();
  // For publications that are not stored here, only the child's newest list counts. This bounds the memory to one list.
  std::erase_if(edge.known, [&](const auto& known) { return store_.find(known.first) == nullptr; });
  for (auto& [key, item] : have.items) {
    Known& known = edge.known[item.publication];
    known.version = key.version;
    known.chunks.insert_all(item.chunks);
    if (!item.complete) continue;
    edge.complete_at_child.insert(key);
    edge.closed.insert(item.publication);
  }
  plan_path(edge);
}

void EdgeSender::send_again(ConnId conn, const ChunkRequest& request, TimePoint now) {
  const auto connection = connections_.find(conn);
  const StoredPublication* stored = store_.find(request.publication);
  if (connection == connections_.end() || !stored || !stored->have.contains(request.index)) return;
  Edge& edge = *connection->second.edge;
  Known& entry = edge.known[stored->id];
  entry.version = stored->key().version;
  ChunkSet& known = entry.chunks;
  if (edge.position && *edge.position >= stored->key().version) {  // some of its chunks were lost
    edge.position = stored->key().base;
    known = stored->have;
  }
  edge.complete_at_child.erase(stored->key());
  known.erase(request.index);
  plan_path(edge);
  send(edge, now);
}

void EdgeSender::send(const Edge& edge, TimePoint now) {
  uplink_.wake(edge);
  uplink_.pump(now);
}

void EdgeSender::send_all(TimePoint now) {
  for (const auto& [key, edge] : edges_) uplink_.wake(edge);
  uplink_.pump(now);
}

void EdgeSender::send_to_all(const ControlMessage& status, TimePoint now) {
  const Slice frame(encode_control(status));
  for (auto& [key, edge] : edges_) edge.status = frame;
  send_all(now);
}

void EdgeSender::on_store_changed(TimePoint now) {
  for (auto& [key, edge] : edges_) plan_path(edge);
  send_all(now);
}

void EdgeSender::report_trouble(Edge& edge, CannotServe what, bool delta) {
  troubles_.push_back({edge.child, edge.position, what, delta});
  if (!catch_ups_on_demand_) edge.trouble_message = Slice(encode_control(what));
}

// Whether the child has, or was sent, every chunk of the publication that it wants over this edge.
bool EdgeSender::has_all(const Edge& edge, const StoredPublication& stored) const {
  if (edge.complete_at_child.contains(stored.key())) return true;
  if (!stored.complete || !edge.closed.contains(stored.id)) return false;
  const auto known = edge.known.find(stored.id);
  return known != edge.known.end() && known->second.chunks.count_of(edge.wanted) >= stored.have.count_of(edge.wanted);
}

void EdgeSender::set_foldable_from(std::optional<Version> oldest) {
  foldable_from_ = oldest;
  std::erase_if(refused_deltas_, [&](Version version) { return !oldest || version < *oldest; });
}

void EdgeSender::refuse_delta_from(Version version, TimePoint now) {
  refused_deltas_.insert(version);
  for (auto& [key, edge] : edges_) {
    if (edge.position != version) continue;
    edge.reported_behind = false;
    plan_path(edge);
  }
  send_all(now);
}

// Over an edge with some of the stripes, only publications that the child's other parents also have are of use.
bool EdgeSender::can_fold_for(const Edge& edge) const {
  return foldable_from_ && edge.position && *edge.position >= *foldable_from_ &&
         !refused_deltas_.contains(*edge.position) && !edge.full_only && edge.wanted.share() == 1;
}

// True if the path has many deltas and no folded delta exists. If one exists, the plan has already weighed it.
bool EdgeSender::has_many_deltas(const Edge& edge, const std::vector<PublicationKey>& path, std::uint64_t bytes) const {
  const auto hint = store_.full_bytes_hint();
  if (path.size() <= kDeltasMax || path.front().base != edge.position) return false;
  if (!hint || static_cast<double>(bytes) < kDeltasShare * static_cast<double>(*hint)) return false;
  return std::count_if(store_.entries().begin(), store_.entries().end(),
                       [&](const auto& entry) { return entry.first.base == edge.position; }) == 1;
}

// The cheapest path from the child's version to the newest, in bytes still to send: a shortest path over the stored
// publications. A full snapshot starts at any version; a delta continues from its base.
void EdgeSender::plan_path(Edge& edge) {
  edge.path.clear();
  const std::optional<Version> newest = std::max(store_.newest(), target_min_);  // an absent version is the lowest
  if (!newest) return;
  const Version target = edge.catch_up_to ? std::min(*newest, *edge.catch_up_to) : *newest;
  if (edge.position && *edge.position >= target) return;

  const auto hint = store_.full_bytes_hint();
  struct Reach {
    std::uint64_t cost = 0;
    std::optional<PublicationKey> via;  // the last publication on the path
    bool missing = false;               // chunks of the last publication are missing
    bool some_missing = false;          // chunks of one on the path are missing
  };
  std::map<Version, Reach> best;
  if (edge.position) best[*edge.position] = {};
  const auto relax = [&](const PublicationKey& key, std::uint64_t missing_bytes, bool missing) {
    if (edge.position && key.version <= *edge.position) return;
    if (edge.full_only && (!key.full() || key.version < target)) return;
    std::uint64_t cost = missing_bytes;
    bool some_missing = missing;
    if (key.base) {
      const auto from = best.find(*key.base);
      if (from == best.end()) return;
      cost += from->second.cost;
      some_missing |= from->second.some_missing;
    }
    const auto [it, added] = best.try_emplace(key.version);
    if (added || cost < it->second.cost || (cost == it->second.cost && key.base))
      it->second = {cost, key, missing, some_missing};
  };
  auto complete_key = edge.complete_at_child.begin();
  const auto relax_complete_before = [&](const PublicationKey* end) {  // not stored here, complete at the child
    for (; complete_key != edge.complete_at_child.end() && (!end || *complete_key < *end); ++complete_key)
      if (!std::as_const(store_).find(*complete_key)) relax(*complete_key, 0, false);
  };
  for (const auto& [key, stored] : store_.entries()) {  // ascending versions, so a base is settled before its deltas
    relax_complete_before(&key);
    const auto known = edge.known.find(stored.id);
    const std::uint64_t have = known == edge.known.end() ? 0
                                                         : std::uint64_t{known->second.chunks.count_of(edge.wanted)} *
                                                               stored.announcement.chunk_bytes;
    const bool missing = !has_all(edge, stored);
    // A publication that is still arriving costs its final size: a snapshot that has just begun is no shortcut.
    std::uint64_t bytes = stored.bytes;
    if (stored.manifest)
      bytes = stored.manifest->payload_bytes;
    else if (key.full() && hint)
      bytes = std::max(bytes, *hint);
    bytes = static_cast<std::uint64_t>(static_cast<double>(bytes) * edge.wanted.share());
    relax(key, missing ? bytes - std::min(have, bytes) : 0, missing);
  }
  relax_complete_before(nullptr);

  // A publication of which every chunk was sent will be complete at the child. From then on, only publications that
  // start at its version are of use.
  std::optional<Version> version_to_come = edge.position;
  for (const auto& [version, reach] : best)
    if (!reach.some_missing) version_to_come = std::max(version_to_come, std::optional(version));
  if (version_to_come != edge.position) {
    edge.position = version_to_come;
    forget_unneeded(edge);
    return plan_path(edge);
  }

  const bool delta = can_fold_for(edge);
  auto end = best.lower_bound(target);
  for (auto it = end; it != best.end(); ++it)
    if (it->second.cost < end->second.cost) end = it;
  const double factor = catch_ups_on_demand_ ? kSnapshotFactor : kHandOverFactor;
  const bool costly = end != best.end() && hint &&
                      static_cast<double>(end->second.cost) > factor * edge.wanted.share() * static_cast<double>(*hint);
  if (end == best.end()) {
    report_trouble(edge, {target, false}, delta);
    // Another node brings the child to `target`; this node sends the later publications again.
    if (!catch_ups_on_demand_) edge.position = target;
    return;
  }
  std::vector<PublicationKey> path;
  for (std::optional<Version> at = end->first; at;) {
    const Reach& reach = best.at(*at);
    if (!reach.via) break;
    if (reach.missing) path.push_back(*reach.via);
    at = reach.via->base;
  }
  std::reverse(path.begin(), path.end());
  const bool many = delta && has_many_deltas(edge, path, end->second.cost);
  if (!costly && !many) edge.reported_behind = false;
  if ((costly || many) && !edge.reported_behind) {
    edge.reported_behind = true;
    report_trouble(edge, {target, true}, delta && path.size() > 1);  // a path of one delta needs no folding
  }
  if (many || (costly && edge.catch_up_to && catch_ups_on_demand_)) return;  // wait for the far cheaper publication
  edge.path = std::move(path);
  forget_unneeded(edge);
}

void EdgeSender::forget_unneeded(Edge& edge) {
  std::erase_if(edge.complete_at_child,
                [&](const PublicationKey& key) { return edge.position && key.version <= *edge.position; });
  const auto is_not_stored = [&](const PublicationId& id) { return store_.find(id) == nullptr; };
  std::erase_if(edge.closed, is_not_stored);
  std::erase_if(edge.known, [&](const auto& item) {
    return edge.position && item.second.version <= *edge.position && is_not_stored(item.first);
  });
  for (const ConnId conn : edge.conns) std::erase_if(connections_.at(conn).announced, is_not_stored);
}

std::optional<OutFrame> EdgeSender::next_frame(Edge& edge, ConnId conn) {
  if (conn == edge.conns.front())
    for (std::optional<Slice>* message : {&edge.trouble_message, &edge.status})
      if (*message) return OutFrame{*std::exchange(*message, std::nullopt), {}};
  for (auto it = edge.path.begin(); it != edge.path.end();) {
    StoredPublication* stored = store_.find(*it);
    if (!stored) {
      it = edge.path.erase(it);
      continue;
    }
    if (connections_.at(conn).announced.insert(stored->id).second)
      return OutFrame{Slice(encode_control(stored->signed_announcement)), {}};
    if (stored->manifest && edge.closed.insert(stored->id).second)
      return OutFrame{Slice(encode_control(stored->signed_manifest)), {}};
    Known& entry = edge.known[stored->id];
    entry.version = it->version;
    ChunkSet& known = entry.chunks;
    if (const auto index = stored->have.first_not_in(known, edge.wanted)) {
      const StoredChunk* chunk = store_.fetch(*stored, *index);
      if (!chunk) return std::nullopt;  // it is being read from disk
      known.insert(*index);
      chunk_bytes_ += chunk->length;
      if (edge.catch_up_to) helped_bytes_ += chunk->length;
      return OutFrame{chunk->head, chunk->data};
    }
    if (has_all(edge, *stored))
      it = edge.path.erase(it);
    else
      ++it;  // its next chunk has not arrived here yet; a chunk of a later publication may have
  }
  return std::nullopt;
}

std::vector<EdgeReport> EdgeSender::reports(TimePoint now) const {
  std::vector<EdgeReport> all;
  for (const auto& [key, edge] : edges_) {
    if (key.second) continue;
    const Uplink::Usage usage = uplink_.usage(edge, now);
    EdgeReport report;
    report.child = edge.child;
    report.bytes = usage.bytes;
    if (usage.busy_seconds > 0)
      report.rate = BitRate::from_bytes_per_s(static_cast<double>(usage.bytes) / usage.busy_seconds);
    report.limit = !usage.busy ? EdgeLimit::kNothingToSend : usage.own_limit ? EdgeLimit::kOwnLimit : EdgeLimit::kPath;
    report.streams = static_cast<std::uint32_t>(edge.conns.size());
    all.push_back(report);
  }
  return all;
}

}  // namespace echoline::overlay

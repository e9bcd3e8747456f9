// Chooses the publications and chunks to send to each child. Called by the learner's core and by a worker's Children.
#include "overlay/edge_sender.hpp"

#include <algorithm>

namespace echoline::overlay {

bool EdgeSender::open(ConnId conn, WorkerId child, PeerHello hello, TimePoint now, bool is_local) {
  // A child that asks for a version to catch up to is a helped one. It gets an edge of its own.
  const auto [it, added] = edges_.try_emplace({child, hello.catch_up_to.has_value()});
  Edge& edge = it->second;
  if (edge.conns.size() >= kStreamsMax) return false;
  edge.owner = this;
  edge.child = child;
  if (added) edge.is_in_local_network = is_local;
  edge.conns.push_back(conn);
  connections_[conn].edge = &edge;
  uplink_.open(conn, edge);
  if (added || hello.stream == 0) {  // the hello of a further stream lists no chunks
    edge.catch_up_to = hello.catch_up_to;
    edge.full_only = hello.full_only;
    store_have(edge, std::move(hello.have));
  }
  wake_and_send(edge, now);
  return true;
}

void EdgeSender::close(ConnId conn) {
  const auto connection = connections_.find(conn);
  if (connection == connections_.end()) return;
  Edge& edge = *connection->second.edge;
  uplink_.close(conn);
  connections_.erase(connection);
  std::erase(edge.conns, conn);
  edge.has_lost_connection = true;
  if (!edge.conns.empty()) return;  // the child will report over another connection which chunks it has
  std::erase_if(troubles_, [&](const EdgeTrouble& trouble) { return trouble.child == edge.child; });
  edges_.erase({edge.child, edge.catch_up_to.has_value()});
}

std::optional<WorkerId> EdgeSender::child_of(ConnId conn) const {
  const auto connection = connections_.find(conn);
  if (connection == connections_.end()) return std::nullopt;
  return connection->second.edge->child;
}

bool EdgeSender::is_helped(ConnId conn) const {
  const auto connection = connections_.find(conn);
  return connection != connections_.end() && connection->second.edge->catch_up_to.has_value();
}

std::vector<ConnId> EdgeSender::all_connections() const {
  std::vector<ConnId> conns;
  for (const auto& [conn, connection] : connections_) conns.push_back(conn);
  return conns;
}

std::vector<ConnId> EdgeSender::connections_of(WorkerId child) const {
  std::vector<ConnId> conns = connections_of(child, /*helped=*/false);
  const std::vector<ConnId> helping = connections_of(child, /*helped=*/true);
  conns.insert(conns.end(), helping.begin(), helping.end());
  return conns;
}

std::vector<ConnId> EdgeSender::connections_of(WorkerId child, bool helped) const {
  const auto it = edges_.find({child, helped});
  return it == edges_.end() ? std::vector<ConnId>() : it->second.conns;
}

std::vector<WorkerId> EdgeSender::children() const {
  std::vector<WorkerId> ids;
  for (const auto& [key, edge] : edges_)
    if (!key.helped) ids.push_back(key.child);
  return ids;
}

std::size_t EdgeSender::known_publications() const {
  std::size_t largest = 0;
  for (const auto& [key, edge] : edges_) largest = std::max(largest, edge.known.size());
  return largest;
}

void EdgeSender::update(ConnId conn, Have have, TimePoint now) {
  const auto connection = connections_.find(conn);
  if (connection == connections_.end()) return;
  store_have(*connection->second.edge, std::move(have));
  wake_and_send(*connection->second.edge, now);
}

void EdgeSender::store_have(Edge& edge, Have have) {
  edge.position = have.position;
  edge.wanted = have.wanted;
  edge.was_reported_behind = false;
  // Normally the chunks already sent stay known: they may be on their way, so that the child could not list them yet.
  // After a lost connection, only the child's list counts.
  if (std::exchange(edge.has_lost_connection, false)) {
    edge.manifests_known.clear();
    edge.known.clear();
  }
  edge.complete_at_child.clear();
  // For publications that are not stored here, only the child's newest list counts. This bounds the memory to one list.
  std::erase_if(edge.known, [&](const auto& known) { return store_.find(known.first) == nullptr; });
  for (auto& [key, item] : have.items) {
    KnownChunks& known = edge.known[item.publication];
    known.version = key.version;
    known.chunks.insert_all(item.chunks);
    if (!item.complete) continue;
    edge.complete_at_child.insert(key);
    edge.manifests_known.insert(item.publication);
  }
  plan_path(edge);
}

void EdgeSender::send_again(ConnId conn, const ChunkRequest& request, TimePoint now) {
  const auto connection = connections_.find(conn);
  const StoredPublication* stored = store_.find(request.publication);
  if (connection == connections_.end() || !stored || !stored->have.contains(request.index)) return;
  Edge& edge = *connection->second.edge;
  KnownChunks& known = edge.known[stored->id];
  known.version = stored->key().version;
  if (edge.position && *edge.position >= stored->key().version) {  // the child was thought to have this version
    edge.position = stored->key().base;
    known.chunks = stored->have;  // it lacks only the requested one
  }
  edge.complete_at_child.erase(stored->key());
  known.chunks.erase(request.index);
  plan_path(edge);
  wake_and_send(edge, now);
}

void EdgeSender::wake_and_send(const Edge& edge, TimePoint now) {
  uplink_.wake(edge);
  uplink_.pump(now);
}

void EdgeSender::wake_all_and_send(TimePoint now) {
  for (const auto& [key, edge] : edges_) uplink_.wake(edge);
  uplink_.pump(now);
}

void EdgeSender::send_to_all(const ControlMessage& status, TimePoint now) {
  const Slice frame(encode_control(status));
  for (auto& [key, edge] : edges_) edge.status = frame;
  wake_all_and_send(now);
}

void EdgeSender::on_store_changed(TimePoint now) {
  for (auto& [key, edge] : edges_) plan_path(edge);
  wake_all_and_send(now);
}

void EdgeSender::report_trouble(Edge& edge, CannotServe what, bool can_fold) {
  troubles_.push_back({.child = edge.child, .position = edge.position, .what = what, .can_fold = can_fold});
  if (!catch_ups_on_demand_) edge.trouble_message = Slice(encode_control(what));
}

// Whether the child has, or was sent, every chunk of the publication that it wants over this edge.
bool EdgeSender::child_has_all(const Edge& edge, const StoredPublication& stored) const {
  if (edge.complete_at_child.contains(stored.key())) return true;
  if (!stored.complete || !edge.manifests_known.contains(stored.id)) return false;
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
    edge.was_reported_behind = false;
    plan_path(edge);
  }
  wake_all_and_send(now);
}

// A folded delta is stored only here. So it is of use only over an edge with all stripes: the child's other parents
// could not send the rest.
bool EdgeSender::can_fold_for(const Edge& edge) const {
  return foldable_from_ && edge.position && *edge.position >= *foldable_from_ &&
         !refused_deltas_.contains(*edge.position) && !edge.full_only && edge.wanted.share() == 1;
}

// Whether the path should be replaced by one folded delta: it has many deltas, and no folded one is stored. If one is
// stored, plan_path() has already compared it.
bool EdgeSender::has_many_deltas(const Edge& edge, const std::vector<PublicationKey>& path, std::uint64_t bytes) const {
  const auto snapshot_bytes = store_.full_bytes_hint();
  if (path.size() <= kDeltasMax || path.front().base != edge.position) return false;
  if (!snapshot_bytes || static_cast<double>(bytes) < kDeltasBytesFraction * static_cast<double>(*snapshot_bytes))
    return false;
  return std::count_if(store_.entries().begin(), store_.entries().end(), [&](const auto& entry) {
           return entry.first.base == edge.position;
         }) == 1;  // only the path's first delta
}

// Finds the path from the child's version to the newest with the fewest bytes still to send: a shortest path over the
// stored publications. A full snapshot starts at any version; a delta continues from its base.
void EdgeSender::plan_path(Edge& edge) {
  edge.path.clear();
  const std::optional<Version> newest = std::max(store_.newest(), target_min_);  // an absent version is the lowest
  if (!newest) return;
  const Version target = edge.catch_up_to ? std::min(*newest, *edge.catch_up_to) : *newest;
  if (edge.position && *edge.position >= target) return;

  const auto snapshot_bytes = store_.full_bytes_hint();
  // The cheapest path to one version.
  struct Path {
    std::uint64_t cost_bytes = 0;
    std::optional<PublicationKey> last;  // the last publication on the path
    bool last_lacks_chunks = false;      // the child lacks chunks of `last`
    bool lacks_chunks = false;           // the child lacks chunks of some publication on the path
  };
  std::map<Version, Path> cheapest_to;  // by the version that the path reaches
  if (edge.position) cheapest_to[*edge.position] = {};
  // Extends the paths by one publication. `missing_bytes`: still to send of it.
  const auto extend_paths_by = [&](const PublicationKey& key, std::uint64_t missing_bytes, bool last_lacks_chunks) {
    if (edge.position && key.version <= *edge.position) return;
    if (edge.full_only && (!key.full() || key.version < target)) return;
    std::uint64_t cost_bytes = missing_bytes;
    bool lacks_chunks = last_lacks_chunks;
    if (key.base) {
      const auto base_path = cheapest_to.find(*key.base);
      if (base_path == cheapest_to.end()) return;
      cost_bytes += base_path->second.cost_bytes;
      lacks_chunks |= base_path->second.lacks_chunks;
    }
    const auto [it, added] = cheapest_to.try_emplace(key.version);
    const bool is_delta_at_equal_cost = cost_bytes == it->second.cost_bytes && key.base;
    if (added || cost_bytes < it->second.cost_bytes || is_delta_at_equal_cost)
      it->second = {
          .cost_bytes = cost_bytes, .last = key, .last_lacks_chunks = last_lacks_chunks, .lacks_chunks = lacks_chunks};
  };
  auto complete_key = edge.complete_at_child.begin();
  // Extends the paths by publications that are complete at the child but not stored here, with keys before `end` (null:
  // all). They cost nothing.
  const auto extend_by_complete_before = [&](const PublicationKey* end) {
    for (; complete_key != edge.complete_at_child.end() && (!end || *complete_key < *end); ++complete_key)
      if (!std::as_const(store_).find(*complete_key))
        extend_paths_by(*complete_key, /*missing_bytes=*/0, /*last_lacks_chunks=*/false);
  };
  for (const auto& [key, stored] : store_.entries()) {  // ascending versions, so a base is settled before its deltas
    extend_by_complete_before(&key);
    const auto known = edge.known.find(stored.id);
    const std::uint64_t have_bytes =
        known == edge.known.end()
            ? 0
            : std::uint64_t{known->second.chunks.count_of(edge.wanted)} * stored.announcement.chunk_bytes;
    const bool child_lacks_chunks = !child_has_all(edge, stored);
    // A publication that is still arriving costs its final size: a snapshot that has just begun is no shortcut.
    std::uint64_t bytes = stored.bytes;
    if (stored.manifest)
      bytes = stored.manifest->payload_bytes;
    else if (key.full() && snapshot_bytes)
      bytes = std::max(bytes, *snapshot_bytes);
    bytes = static_cast<std::uint64_t>(static_cast<double>(bytes) * edge.wanted.share());
    extend_paths_by(key, child_lacks_chunks ? bytes - std::min(have_bytes, bytes) : 0, child_lacks_chunks);
  }
  extend_by_complete_before(/*end=*/nullptr);

  // If every chunk of a path was sent, the child will reach the path's version. Only publications that start at that
  // version are then of use, so the path is planned again from there.
  std::optional<Version> version_to_come = edge.position;
  for (const auto& [version, path] : cheapest_to)
    if (!path.lacks_chunks) version_to_come = std::max(version_to_come, std::optional(version));
  if (version_to_come != edge.position) {
    edge.position = version_to_come;
    forget_unneeded(edge);
    return plan_path(edge);
  }

  const bool can_fold = can_fold_for(edge);
  auto chosen = cheapest_to.lower_bound(target);  // the cheapest path to the target or beyond
  for (auto it = chosen; it != cheapest_to.end(); ++it)
    if (it->second.cost_bytes < chosen->second.cost_bytes) chosen = it;
  if (chosen == cheapest_to.end()) {
    report_trouble(edge, {.target = target, .snapshot_is_cheaper = false}, can_fold);
    // Another node brings the child to `target`; from there, this node sends again.
    if (!catch_ups_on_demand_) edge.position = target;
    return;
  }
  const double factor = catch_ups_on_demand_ ? kSnapshotFactor : kHandOverFactor;
  const bool is_costly = snapshot_bytes && static_cast<double>(chosen->second.cost_bytes) >
                                               factor * edge.wanted.share() * static_cast<double>(*snapshot_bytes);
  std::vector<PublicationKey> path;
  for (std::optional<Version> version = chosen->first; version;) {  // from the target back to the child's version
    const Path& step = cheapest_to.at(*version);
    if (!step.last) break;
    if (step.last_lacks_chunks) path.push_back(*step.last);
    version = step.last->base;
  }
  std::reverse(path.begin(), path.end());
  const bool has_too_many_deltas = can_fold && has_many_deltas(edge, path, chosen->second.cost_bytes);
  if (!is_costly && !has_too_many_deltas) edge.was_reported_behind = false;
  if ((is_costly || has_too_many_deltas) && !edge.was_reported_behind) {
    edge.was_reported_behind = true;
    report_trouble(edge, {.target = target, .snapshot_is_cheaper = true},
                   can_fold && path.size() > 1);  // a path of one delta needs no folding
  }
  if (has_too_many_deltas || (is_costly && edge.catch_up_to && catch_ups_on_demand_))
    return;  // waits for the far cheaper publication that was requested
  edge.path = std::move(path);
  forget_unneeded(edge);
}

void EdgeSender::forget_unneeded(Edge& edge) {
  std::erase_if(edge.complete_at_child,
                [&](const PublicationKey& key) { return edge.position && key.version <= *edge.position; });
  const auto is_not_stored = [&](const PublicationId& id) { return store_.find(id) == nullptr; };
  std::erase_if(edge.manifests_known, is_not_stored);
  std::erase_if(edge.known, [&](const auto& item) {
    return edge.position && item.second.version <= *edge.position && is_not_stored(item.first);
  });
  for (const ConnId conn : edge.conns) std::erase_if(connections_.at(conn).announced, is_not_stored);
}

std::optional<OutFrame> EdgeSender::next_frame(Edge& edge, ConnId conn) {
  if (conn == edge.conns.front())  // each message is sent once, on one connection
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
    if (stored->manifest && edge.manifests_known.insert(stored->id).second)
      return OutFrame{Slice(encode_control(stored->signed_manifest)), {}};
    KnownChunks& known = edge.known[stored->id];
    known.version = it->version;
    if (const auto index = stored->have.first_not_in(known.chunks, edge.wanted)) {
      const StoredChunk* chunk = store_.fetch(*stored, *index);
      if (!chunk) return std::nullopt;  // it is being read from disk
      known.chunks.insert(*index);
      chunk_bytes_sent_ += chunk->length;
      if (edge.catch_up_to) helped_bytes_sent_ += chunk->length;
      return OutFrame{chunk->head, chunk->data};
    }
    if (child_has_all(edge, *stored))
      it = edge.path.erase(it);
    else
      ++it;  // its next chunk has not arrived here yet; a chunk of a later publication may have
  }
  return std::nullopt;
}

std::vector<EdgeReport> EdgeSender::reports(TimePoint now) const {
  std::vector<EdgeReport> edge_reports;
  for (const auto& [key, edge] : edges_) {
    if (key.helped) continue;
    const Uplink::Usage usage = uplink_.usage(edge, now);
    EdgeReport report;
    report.child = edge.child;
    report.bytes = usage.bytes;
    if (usage.busy_seconds > 0)
      report.rate = BitRate::from_bytes_per_s(static_cast<double>(usage.bytes) / usage.busy_seconds);
    report.limit = !usage.busy ? EdgeLimit::kNothingToSend : usage.own_limit ? EdgeLimit::kOwnLimit : EdgeLimit::kPath;
    report.streams = static_cast<std::uint32_t>(edge.conns.size());
    edge_reports.push_back(report);
  }
  return edge_reports;
}

}  // namespace echoline::overlay

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
  lines_[conn].edge = &edge;
  uplink_.open(conn, edge);
  if (added || hello.stream == 0) {
    edge.catch_up_to = hello.catch_up_to;
    edge.full_only = hello.full_only;
    take(edge, std::move(hello.have));
  }
  send(edge, now);
  return true;
}

void EdgeSender::close(ConnId conn) {
  const auto line = lines_.find(conn);
  if (line == lines_.end()) return;
  Edge& edge = *line->second.edge;
  uplink_.close(conn);
  lines_.erase(line);
  std::erase(edge.conns, conn);
  edge.lossy = true;
  if (!edge.conns.empty()) return;  // the child reports again which chunks it lacks
  std::erase_if(troubles_, [&](const EdgeTrouble& t) { return t.child == edge.child; });
  edges_.erase({edge.child, edge.catch_up_to.has_value()});
}

std::optional<WorkerId> EdgeSender::child_of(ConnId conn) const {
  const auto line = lines_.find(conn);
  if (line == lines_.end()) return std::nullopt;
  return line->second.edge->child;
}

bool EdgeSender::helps(ConnId conn) const {
  const auto line = lines_.find(conn);
  return line != lines_.end() && line->second.edge->catch_up_to.has_value();
}

std::vector<ConnId> EdgeSender::all_connections() const {
  std::vector<ConnId> all;
  for (const auto& [conn, line] : lines_) all.push_back(conn);
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
  const auto line = lines_.find(conn);
  if (line == lines_.end()) return;
  take(*line->second.edge, std::move(have));
  send(*line->second.edge, now);
}

void EdgeSender::take(Edge& edge, Have have) {
  edge.position = have.position;
  edge.wanted = have.wanted;
  edge.said_behind = false;
  // Chunks sent on live connections are still on their way, though the child could not list them yet.
  if (std::exchange(edge.lossy, false)) {
    edge.closed.clear();
    edge.known.clear();
  }
  edge.whole.clear();
  // For publications that are not stored here, only the child's newest list counts. This bounds the memory to one list.
  std::erase_if(edge.known, [&](const auto& known) { return store_.find(known.first) == nullptr; });
  for (auto& [key, item] : have.items) {
    Known& known = edge.known[item.publication];
    known.version = key.version;
    known.chunks.insert_all(item.chunks);
    if (!item.complete) continue;
    edge.whole.insert(key);
    edge.closed.insert(item.publication);
  }
  plan(edge);
}

void EdgeSender::send_again(ConnId conn, const ChunkRequest& request, TimePoint now) {
  const auto line = lines_.find(conn);
  const StoredPublication* stored = store_.find(request.publication);
  if (line == lines_.end() || !stored || !stored->have.contains(request.index)) return;
  Edge& edge = *line->second.edge;
  Known& entry = edge.known[stored->id];
  entry.version = stored->key().version;
  ChunkSet& known = entry.chunks;
  if (edge.position && *edge.position >= stored->key().version) {  // some of its chunks were lost
    edge.position = stored->key().base;
    known = stored->have;
  }
  edge.whole.erase(stored->key());
  known.erase(request.index);
  plan(edge);
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

void EdgeSender::tell_all(const ControlMessage& status, TimePoint now) {
  const Slice frame(encode_control(status));
  for (auto& [key, edge] : edges_) edge.status = frame;
  send_all(now);
}

void EdgeSender::on_store_changed(TimePoint now) {
  for (auto& [key, edge] : edges_) plan(edge);
  send_all(now);
}

void EdgeSender::complain(Edge& edge, CannotServe what, bool delta) {
  troubles_.push_back({edge.child, edge.position, what, delta});
  if (!snapshots_come_) edge.complaint = Slice(encode_control(what));
}

// Whether the child has, or was sent, every chunk of the publication that it wants over this edge.
bool EdgeSender::has_all(const Edge& edge, const StoredPublication& stored) const {
  if (edge.whole.contains(stored.key())) return true;
  if (!stored.complete || !edge.closed.contains(stored.id)) return false;
  const auto known = edge.known.find(stored.id);
  return known != edge.known.end() && known->second.chunks.count_of(edge.wanted) >= stored.have.count_of(edge.wanted);
}

void EdgeSender::restorable_from(std::optional<Version> oldest) {
  restorable_ = oldest;
  std::erase_if(not_made_, [&](Version version) { return !oldest || version < *oldest; });
}

void EdgeSender::no_delta_from(Version version, TimePoint now) {
  not_made_.insert(version);
  for (auto& [key, edge] : edges_) {
    if (edge.position != version) continue;
    edge.said_behind = false;
    plan(edge);
  }
  send_all(now);
}

// Over an edge with some of the stripes, only publications that the child's other parents also have are of use.
bool EdgeSender::can_start_at(const Edge& edge) const {
  return restorable_ && edge.position && *edge.position >= *restorable_ && !not_made_.contains(*edge.position) &&
         !edge.full_only && edge.wanted.share() == 1;
}

// True if the path has many deltas and no folded delta exists. If one exists, the plan has already weighed it.
bool EdgeSender::goes_by_many_deltas(const Edge& edge, const std::vector<PublicationKey>& way,
                                     std::uint64_t bytes) const {
  const auto hint = store_.full_bytes_hint();
  if (way.size() <= kDeltasMax || way.front().base != edge.position) return false;
  if (!hint || static_cast<double>(bytes) < kDeltasShare * static_cast<double>(*hint)) return false;
  return std::count_if(store_.entries().begin(), store_.entries().end(),
                       [&](const auto& entry) { return entry.first.base == edge.position; }) == 1;
}

// The cheapest path from the child's version to the newest, in bytes still to send: a shortest path over the stored
// publications. A full snapshot starts at any version; a delta continues from its base.
void EdgeSender::plan(Edge& edge) {
  edge.path.clear();
  const std::optional<Version> newest = std::max(store_.newest(), reach_);  // an absent version is the lowest
  if (!newest) return;
  const Version target = edge.catch_up_to ? std::min(*newest, *edge.catch_up_to) : *newest;
  if (edge.position && *edge.position >= target) return;

  const auto hint = store_.full_bytes_hint();
  struct Reach {
    std::uint64_t cost = 0;
    std::optional<PublicationKey> via;
    bool missing = false;       // chunks of the last publication are missing
    bool some_missing = false;  // chunks of one on the path are missing
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
  auto whole = edge.whole.begin();
  const auto relax_whole_before = [&](const PublicationKey* end) {  // publications that only the child has whole
    for (; whole != edge.whole.end() && (!end || *whole < *end); ++whole)
      if (!std::as_const(store_).find(*whole)) relax(*whole, 0, false);
  };
  for (const auto& [key, stored] : store_.entries()) {  // ascending versions, so a base is settled before its deltas
    relax_whole_before(&key);
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
  relax_whole_before(nullptr);

  // Publications sent whole will arrive. From then on, only publications that start at their version are of use.
  std::optional<Version> arrives = edge.position;
  for (const auto& [version, reach] : best)
    if (!reach.some_missing) arrives = std::max(arrives, std::optional(version));
  if (arrives != edge.position) {
    edge.position = arrives;
    forget(edge);
    return plan(edge);
  }

  const bool delta = can_start_at(edge);
  auto end = best.lower_bound(target);
  for (auto it = end; it != best.end(); ++it)
    if (it->second.cost < end->second.cost) end = it;
  const double factor = snapshots_come_ ? kSnapshotFactor : kHandOverFactor;
  const bool dear = end != best.end() && hint &&
                    static_cast<double>(end->second.cost) > factor * edge.wanted.share() * static_cast<double>(*hint);
  if (end == best.end()) {
    complain(edge, {target, false}, delta);
    // Another node brings the child to `target`; this node sends the later publications again.
    if (!snapshots_come_) edge.position = target;
    return;
  }
  std::vector<PublicationKey> way;
  for (std::optional<Version> at = end->first; at;) {
    const Reach& reach = best.at(*at);
    if (!reach.via) break;
    if (reach.missing) way.push_back(*reach.via);
    at = reach.via->base;
  }
  std::reverse(way.begin(), way.end());
  const bool many = delta && goes_by_many_deltas(edge, way, end->second.cost);
  if (!dear && !many) edge.said_behind = false;
  if ((dear || many) && !edge.said_behind) {
    edge.said_behind = true;
    complain(edge, {target, true}, delta && way.size() > 1);  // a path of one delta needs no folding
  }
  if (many || (dear && edge.catch_up_to && snapshots_come_)) return;  // wait for the far cheaper publication
  edge.path = std::move(way);
  forget(edge);
}

void EdgeSender::forget(Edge& edge) {
  std::erase_if(edge.whole, [&](const PublicationKey& key) { return edge.position && key.version <= *edge.position; });
  const auto gone = [&](const PublicationId& id) { return store_.find(id) == nullptr; };
  std::erase_if(edge.closed, gone);
  std::erase_if(edge.known, [&](const auto& item) {
    return edge.position && item.second.version <= *edge.position && gone(item.first);
  });
  for (const ConnId conn : edge.conns) std::erase_if(lines_.at(conn).announced, gone);
}

std::optional<OutFrame> EdgeSender::next_frame(Edge& edge, ConnId conn) {
  if (conn == edge.conns.front())
    for (std::optional<Slice>* waiting : {&edge.complaint, &edge.status})
      if (*waiting) return OutFrame{*std::exchange(*waiting, std::nullopt), {}};
  for (auto it = edge.path.begin(); it != edge.path.end();) {
    StoredPublication* stored = store_.find(*it);
    if (!stored) {
      it = edge.path.erase(it);
      continue;
    }
    if (lines_.at(conn).announced.insert(stored->id).second)
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

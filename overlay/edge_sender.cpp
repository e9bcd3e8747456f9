#include "overlay/edge_sender.hpp"

#include <algorithm>

namespace echoline::overlay {

void EdgeSender::open(ConnId conn, PeerHello hello, TimePoint now) {
  Edge& edge = edges_[conn];
  edge.child = hello.worker;
  edge.catch_up_to = hello.catch_up_to;
  edge.full_only = hello.full_only;
  update(conn, std::move(hello.have), now);
}

std::vector<ConnId> EdgeSender::connections_of(WorkerId child) const {
  std::vector<ConnId> all;
  for (const auto& [conn, edge] : edges_)
    if (edge.child == child) all.push_back(conn);
  return all;
}

void EdgeSender::update(ConnId conn, Have have, TimePoint now) {
  const auto it = edges_.find(conn);
  if (it == edges_.end()) return;
  it->second.position = have.position;
  it->second.said_behind = false;
  for (auto& [key, chunks] : have.chunks) {
    // A bitmap of another size belongs to another publication under the same key: useless.
    const StoredPublication* stored = store_.find(key);
    if (!stored || stored->have.size() == chunks.size()) it->second.known[key] = std::move(chunks);
  }
  plan(conn, it->second);
  pump(now);
}

void EdgeSender::close(ConnId conn) {
  const auto it = edges_.find(conn);
  if (it == edges_.end()) return;
  in_flight_ -= it->second.in_flight;
  edges_.erase(it);
  if (transmission_ && transmission_->conn == conn) transmission_.reset();
  std::erase_if(troubles_, [&](const EdgeTrouble& t) { return t.conn == conn; });
}

std::optional<ConnId> EdgeSender::edge_of(WorkerId child) const {
  for (const auto& [conn, edge] : edges_)
    if (edge.child == child && !edge.catch_up_to) return conn;
  return std::nullopt;
}

std::vector<ConnId> EdgeSender::connections() const {
  std::vector<ConnId> all;
  for (const auto& [conn, edge] : edges_) all.push_back(conn);
  return all;
}

void EdgeSender::send_again(ConnId conn, const ChunkRequest& request, TimePoint now) {
  const auto it = edges_.find(conn);
  if (it == edges_.end()) return;
  const StoredPublication* stored = store_.find(request.key);
  if (!stored || request.index >= stored->have.size()) return;
  Edge& edge = it->second;
  edge.known.try_emplace(request.key, ChunkSet::all(stored->have.size())).first->second.erase(request.index);
  if (edge.position && *edge.position >= request.key.version) edge.position = request.key.base;  // not there after all
  plan(conn, edge);
  pump(now);
}

void EdgeSender::on_store_changed(TimePoint now) {
  for (auto& [conn, edge] : edges_) plan(conn, edge);
  pump(now);
}

void EdgeSender::complain(ConnId conn, Edge& edge, CannotServe what) {
  troubles_.push_back({conn, edge.child, what});
  if (!snapshots_come_) edge.control.push_back({encode_control(what), {}, 0});
}

// The cheapest way, by bytes still to send, from where the child is to the newest version: a shortest path over the
// stored publications, where a full snapshot starts anywhere and a delta continues from its base.
void EdgeSender::plan(ConnId conn, Edge& edge) {
  edge.path.clear();
  const std::optional<Version> newest = store_.newest();
  if (!newest) return;
  const Version target = edge.catch_up_to ? std::min(*newest, *edge.catch_up_to) : *newest;
  if (edge.position && *edge.position >= target) return;

  struct Reach {
    std::uint64_t cost = 0;
    std::optional<PublicationKey> via;
    bool missing = false;
  };
  std::map<Version, Reach> best;
  if (edge.position) best[*edge.position] = {};
  const auto relax = [&](const PublicationKey& key, std::uint64_t missing_bytes, bool missing) {
    if (edge.position && key.version <= *edge.position) return;
    if (edge.full_only && (!key.full() || key.version < target)) return;
    std::uint64_t cost = missing_bytes;
    if (key.base) {
      const auto from = best.find(*key.base);
      if (from == best.end()) return;
      cost += from->second.cost;
    }
    const auto [it, added] = best.try_emplace(key.version);
    if (added || cost < it->second.cost) it->second = {cost, key, missing};
  };
  auto only_known = edge.known.begin();
  const auto relax_known_before = [&](const PublicationKey* end) {  // what the child has and we have not
    for (; only_known != edge.known.end() && (!end || only_known->first < *end); ++only_known)
      if (only_known->second.complete() && !store_.find(only_known->first)) relax(only_known->first, 0, false);
  };
  for (const auto& [key, stored] : store_.entries()) {  // ascending versions, so a base is settled before its deltas
    relax_known_before(&key);
    const auto known = edge.known.find(key);
    const std::uint64_t have =
        known == edge.known.end() ? 0 : std::uint64_t{known->second.count()} * stored.manifest.chunk_bytes;
    const bool missing = known == edge.known.end() || !known->second.complete();
    relax(key, missing ? stored.manifest.payload_bytes - std::min(have, stored.manifest.payload_bytes) : 0, missing);
  }
  relax_known_before(nullptr);

  auto end = best.lower_bound(target);
  for (auto it = end; it != best.end(); ++it)
    if (it->second.cost < end->second.cost) end = it;
  const auto hint = store_.full_bytes_hint();
  const double factor = snapshots_come_ ? kSnapshotFactor : kHandOverFactor;
  const bool dear =
      end != best.end() && hint && static_cast<double>(end->second.cost) > factor * static_cast<double>(*hint);
  if (end == best.end()) {
    complain(conn, edge, {target, false});
    // The learner will bring the child here; what follows is ours to send again.
    if (!snapshots_come_) edge.position = target;
    return;
  }
  if (!dear) edge.said_behind = false;
  if (dear && !edge.said_behind) {
    edge.said_behind = true;
    complain(conn, edge, {target, true});
  }
  if (dear && edge.catch_up_to && snapshots_come_) return;  // wait for the snapshot

  for (std::optional<Version> at = end->first; at;) {
    const Reach& reach = best.at(*at);
    if (!reach.via) break;
    if (reach.missing) edge.path.push_back(*reach.via);
    at = reach.via->base;
  }
  std::reverse(edge.path.begin(), edge.path.end());
  for (const PublicationKey& key : edge.path)
    if (edge.announced.insert(key).second) edge.control.push_back({encode_control(store_.find(key)->manifest), {}, 0});

  // What has been sent whole will arrive: the child's position moves on, and older knowledge can go.
  for (const auto& [version, reach] : best)
    if (reach.cost == 0 && !reach.missing && (!edge.position || version > *edge.position)) edge.position = version;
  const auto past = [&](const PublicationKey& key) {
    return edge.position && key.version <= *edge.position && !store_.find(key);
  };
  std::erase_if(edge.known, [&](const auto& item) { return past(item.first); });
  std::erase_if(edge.announced, past);
}

// Starts the edge's next frame; false when there is nothing to send now.
bool EdgeSender::next_frame(Edge& edge) {
  if (!edge.control.empty()) {
    edge.frame = std::move(edge.control.front());
    edge.control.pop_front();
    return true;
  }
  for (auto it = edge.path.begin(); it != edge.path.end();) {
    const StoredPublication* stored = store_.find(*it);
    if (!stored) {
      it = edge.path.erase(it);
      continue;
    }
    const Manifest& m = stored->manifest;
    ChunkSet& known = edge.known.try_emplace(*it, ChunkSet(m.chunk_count())).first->second;
    if (known.complete()) {
      it = edge.path.erase(it);
      continue;
    }
    if (const auto index = stored->have.first_not_in(known)) {
      known.insert(*index);
      const ChunkHeader header{*it, *index, m.length_of(*index), stored->chunk_hashes[*index]};
      edge.frame = Frame{
          encode_chunk_header(header), {stored->payload, std::size_t{*index} * m.chunk_bytes, header.length_bytes}, 0};
      return true;
    }
    ++it;  // its next chunk has not arrived here yet; a later publication's may have
  }
  return false;
}

std::optional<ConnId> EdgeSender::pick() {
  auto it = last_ ? edges_.upper_bound(*last_) : edges_.begin();
  for (std::size_t i = 0; i < edges_.size(); ++i, ++it) {
    if (it == edges_.end()) it = edges_.begin();
    if (it->second.in_flight < kWindowBytes && (it->second.frame || next_frame(it->second))) return it->first;
  }
  return std::nullopt;
}

void EdgeSender::emit(ConnId conn, std::size_t bytes) {
  Edge& edge = edges_.at(conn);
  Frame& frame = *edge.frame;
  act::Send send{conn, {}, {}};
  const std::size_t from_head = frame.done < frame.head.size() ? std::min(bytes, frame.head.size() - frame.done) : 0;
  if (from_head == frame.head.size()) {
    send.head = std::move(frame.head);
    frame.head.assign(from_head, std::byte{});  // keeps its size for `done`
  } else if (from_head) {
    const auto begin = frame.head.begin() + static_cast<std::ptrdiff_t>(frame.done);
    send.head.assign(begin, begin + static_cast<std::ptrdiff_t>(from_head));
  }
  frame.done += from_head;
  if (bytes > from_head) {
    const std::size_t at = frame.done - frame.head.size();
    send.tail = {frame.tail.owner, frame.tail.offset + at, bytes - from_head};
    frame.done += bytes - from_head;
    chunk_bytes_ += bytes - from_head;
  }
  wire_bytes_ += bytes;
  busy_bytes_ += static_cast<double>(bytes);
  edge.in_flight += bytes;
  in_flight_ += bytes;
  if (frame.done == frame.size()) edge.frame.reset();
  actions_.push_back(std::move(send));
}

void EdgeSender::pump(TimePoint now) {
  account(now);
  for (;;) {
    if (transmission_) {
      if (now < transmission_->due) return;
      const Transmission t = *std::exchange(transmission_, std::nullopt);
      emit(t.conn, t.bytes);
    }
    const auto conn = pick();
    if (!conn) {
      busy_ = false;
      return;
    }
    last_ = conn;
    const Frame& frame = *edges_.at(*conn).frame;
    const std::size_t bytes = up_.slice_bytes(frame.size() - frame.done);
    transmission_ = {*conn, bytes, up_.occupy({bytes}, now, busy_)};
    busy_ = true;
  }
}

void EdgeSender::on_sent(ConnId conn, std::size_t bytes, TimePoint now) {
  account(now);
  if (const auto it = edges_.find(conn); it != edges_.end()) {
    const std::size_t n = std::min(bytes, it->second.in_flight);
    it->second.in_flight -= n;
    in_flight_ -= n;
  }
  pump(now);
}

void EdgeSender::account(TimePoint now) {
  if (transmission_ || in_flight_ > 0) busy_seconds_ += seconds(std::max(Duration{}, now - accounted_));
  accounted_ = now;
  if (busy_seconds_ > 10) busy_seconds_ /= 2, busy_bytes_ /= 2;
}

std::optional<BitRate> EdgeSender::measured_rate() const {
  if (busy_seconds_ < 0.05 || busy_bytes_ <= 0) return std::nullopt;
  return BitRate::from_bytes_per_s(busy_bytes_ / busy_seconds_);
}

}  // namespace echoline::overlay

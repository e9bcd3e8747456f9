// The limit on pending peers. Called by LearnerCore and Children.
#include "overlay/pending_peers.hpp"

#include <algorithm>

namespace echoline::overlay {

std::vector<ConnId> PendingPeers::add(ConnId conn, PeerInfo peer, TimePoint until) {
  const bool nobody = peer.identity.kind == trust::PeerIdentity::Kind::kNobody;
  std::string source = nobody ? peer.host : to_text(peer.identity);
  std::vector<ConnId> room;
  const auto drop = [&](ConnId old) {
    erase(old);
    room.push_back(old);
  };
  if (const auto same = by_source_.find(source);
      !nobody && same != by_source_.end() && same->second.size() >= limits_.per_identity)
    drop(same->second.front());
  if (all_.size() >= limits_.pending_peers && !all_.empty()) drop(oldest_of_most());
  by_source_[source].push_back(conn);
  deadlines_.emplace(until, conn);
  all_.emplace(conn, Entry{{std::move(peer), until, {}}, next_number_++, std::move(source)});
  return room;
}

ConnId PendingPeers::oldest_of_most() const {
  const auto worse = [&](const auto& a, const auto& b) {
    if (a.second.size() != b.second.size()) return a.second.size() < b.second.size();
    return all_.at(a.second.front()).number > all_.at(b.second.front()).number;
  };
  return std::max_element(by_source_.begin(), by_source_.end(), worse)->second.front();
}

const PendingPeer* PendingPeers::find(ConnId conn) const {
  const auto it = all_.find(conn);
  return it == all_.end() ? nullptr : &it->second.pending;
}

void PendingPeers::await_have(ConnId conn, PeerHello hello, TimePoint until) {
  PendingPeer& pending = all_.at(conn).pending;
  deadlines_.erase({pending.until, conn});
  pending.hello = std::move(hello);
  pending.until = until;
  deadlines_.emplace(until, conn);
}

void PendingPeers::erase(ConnId conn) {
  const auto it = all_.find(conn);
  if (it == all_.end()) return;
  deadlines_.erase({it->second.pending.until, conn});
  const auto source = by_source_.find(it->second.source);
  std::erase(source->second, conn);
  if (source->second.empty()) by_source_.erase(source);
  all_.erase(it);
}

std::vector<ConnId> PendingPeers::take_late(TimePoint now) {
  std::vector<ConnId> late;
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    late.push_back(deadlines_.begin()->second);
    erase(late.back());
  }
  return late;
}

std::vector<ConnId> PendingPeers::take_all() { return take_late(kNever); }

void PendingPeers::postpone(Duration late) {
  deadlines_.clear();
  for (auto& [conn, entry] : all_) {
    entry.pending.until += late;
    deadlines_.emplace(entry.pending.until, conn);
  }
}

}  // namespace echoline::overlay

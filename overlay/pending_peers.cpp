// The limit on pending peers. Called by LearnerCore and Children.
#include "overlay/pending_peers.hpp"

#include <algorithm>

namespace echoline::overlay {

std::vector<ConnId> PendingPeers::add(ConnId conn, PeerInfo peer, TimePoint deadline) {
  const bool is_anonymous = peer.identity.kind == trust::PeerIdentity::Kind::kAnonymous;
  // An anonymous peer is counted by its host. No limit holds for a host alone, because machines may share its address.
  std::string source = is_anonymous ? peer.host : to_text(peer.identity);
  std::vector<ConnId> dropped;
  const auto drop = [&](ConnId old) {
    erase(old);
    dropped.push_back(old);
  };
  if (const auto same_source = by_source_.find(source);
      !is_anonymous && same_source != by_source_.end() && same_source->second.size() >= limits_.per_identity)
    drop(same_source->second.front());
  if (all_.size() >= limits_.pending_peers && !all_.empty()) drop(oldest_of_largest_source());
  by_source_[source].push_back(conn);
  deadlines_.emplace(deadline, conn);
  all_.emplace(conn, Entry{.pending = {.peer = std::move(peer), .deadline = deadline, .hello = {}},
                           .arrival_number = next_arrival_number_++,
                           .source = std::move(source)});
  return dropped;
}

ConnId PendingPeers::oldest_of_largest_source() const {
  const auto closes_later = [&](const auto& a, const auto& b) {
    if (a.second.size() != b.second.size()) return a.second.size() < b.second.size();
    return all_.at(a.second.front()).arrival_number > all_.at(b.second.front()).arrival_number;
  };
  return std::max_element(by_source_.begin(), by_source_.end(), closes_later)->second.front();
}

const PendingPeer* PendingPeers::find(ConnId conn) const {
  const auto it = all_.find(conn);
  return it == all_.end() ? nullptr : &it->second.pending;
}

void PendingPeers::await_have(ConnId conn, PeerHello hello, TimePoint deadline) {
  PendingPeer& pending = all_.at(conn).pending;
  deadlines_.erase({pending.deadline, conn});
  pending.hello = std::move(hello);
  pending.deadline = deadline;
  deadlines_.emplace(deadline, conn);
}

void PendingPeers::erase(ConnId conn) {
  const auto it = all_.find(conn);
  if (it == all_.end()) return;
  deadlines_.erase({it->second.pending.deadline, conn});
  const auto source = by_source_.find(it->second.source);
  std::erase(source->second, conn);
  if (source->second.empty()) by_source_.erase(source);
  all_.erase(it);
}

std::vector<ConnId> PendingPeers::take_expired(TimePoint now) {
  std::vector<ConnId> expired;
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    expired.push_back(deadlines_.begin()->second);
    erase(expired.back());
  }
  return expired;
}

std::vector<ConnId> PendingPeers::take_all() { return take_expired(kNever); }

void PendingPeers::postpone(Duration pause) {
  deadlines_.clear();
  for (auto& [conn, entry] : all_) {
    entry.pending.deadline += pause;
    deadlines_.emplace(entry.pending.deadline, conn);
  }
}

}  // namespace echoline::overlay

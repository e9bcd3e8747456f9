// Pending peers: connections whose TLS handshake is done and whose first request has not come yet. The
// source of a pending peer is its certificate; a peer that enrols has none, so its source is its address. If a
// certificate has more than ConnectionLimits::per_identity connections, its oldest one is closed. If there are too many
// in total, the oldest one of the source with the most connections is closed. No I/O and no clock.
#pragma once
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "overlay/connection_limits.hpp"
#include "overlay/core.hpp"

namespace echoline::overlay {

struct PendingPeer {
  PeerInfo peer;
  TimePoint deadline;              // for the request
  std::optional<PeerHello> hello;  // the request, once it is granted and only its list of chunks is missing
};

class PendingPeers {
 public:
  explicit PendingPeers(const ConnectionLimits& limits) : limits_(limits) {}

  // Returns the connections that the caller must close to make room; they are already removed here.
  std::vector<ConnId> add(ConnId conn, PeerInfo peer, TimePoint deadline);
  const PendingPeer* find(ConnId conn) const;
  // The request was granted. The peer must list its chunks by `deadline`.
  void await_have(ConnId conn, PeerHello hello, TimePoint deadline);
  void erase(ConnId conn);
  // Removes and returns the connections whose deadline has passed. The caller closes them.
  std::vector<ConnId> take_expired(TimePoint now);
  std::vector<ConnId> take_all();
  void postpone(Duration pause);
  TimePoint next_deadline() const { return deadlines_.empty() ? kNever : deadlines_.begin()->first; }
  std::size_t size() const { return all_.size(); }

 private:
  struct Entry {
    PendingPeer pending;
    std::uint64_t arrival_number = 0;
    std::string source;
  };
  ConnId oldest_of_largest_source() const;

  ConnectionLimits limits_;
  std::map<ConnId, Entry> all_;
  std::map<std::string, std::deque<ConnId>> by_source_;  // oldest first
  std::set<std::pair<TimePoint, ConnId>> deadlines_;
  std::uint64_t next_arrival_number_ = 0;
};

}  // namespace echoline::overlay

// Connections of peers that have proven who they are (or that they are nobody yet) and have not said what they want.
// Whoever floods makes room first: the oldest of one certificate beyond its share, then the oldest of whoever has most.
// Pure.
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

struct Stranger {
  PeerInfo peer;
  TimePoint until;                 // by then it has said what it wants
  std::optional<PeerHello> hello;  // it has, and what it holds is still to come
};

class Strangers {
 public:
  explicit Strangers(const ConnectionLimits& limits) : limits_(limits) {}

  // Those that are to be closed to make room, already forgotten here.
  std::vector<ConnId> add(ConnId conn, PeerInfo peer, TimePoint until);
  const Stranger* find(ConnId conn) const;
  // It has been granted what it asks for, and says until then what it holds.
  void await_have(ConnId conn, PeerHello hello, TimePoint until);
  void erase(ConnId conn);
  std::vector<ConnId> take_late(TimePoint now);
  std::vector<ConnId> take_all();
  void excuse(Duration late);
  TimePoint next_deadline() const { return deadlines_.empty() ? kNever : deadlines_.begin()->first; }
  std::size_t size() const { return all_.size(); }

 private:
  struct Entry {
    Stranger stranger;
    std::uint64_t number = 0;  // in the order in which they came
    std::string source;
  };
  ConnId oldest_of_most() const;

  ConnectionLimits limits_;
  std::map<ConnId, Entry> all_;
  std::map<std::string, std::deque<ConnId>> by_source_;  // a certificate, or the address of who has none
  std::set<std::pair<TimePoint, ConnId>> deadlines_;
  std::uint64_t next_number_ = 0;
};

}  // namespace echoline::overlay

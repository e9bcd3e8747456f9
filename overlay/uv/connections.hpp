// All connections of a driver, and lists of those with a deadline, without a handshake, or with bytes to flush.
// Internal to overlay/uv; loop thread only.
#pragma once
#include <map>
#include <memory>

#include "overlay/connection_limits.hpp"
#include "overlay/uv/connection.hpp"
#include "overlay/uv/driver_parts.hpp"

namespace echoline::overlay {

class Connections {
 public:
  explicit Connections(const ConnectionLimits& limits) : limits_(limits) {}

  Connection& add(uv_loop_t& loop, SocketEvents& events, ConnId id);
  // Adds a connection under the next id of accepted connections.
  Connection& add_accepted(uv_loop_t& loop, SocketEvents& events);
  // Null if the connection is gone or leaving.
  Connection* find(ConnId id) const;
  // Forgets the connection, which its socket's close() deletes. Returns false if it was forgotten before.
  bool release(Connection& connection);

  void set_deadline(Connection& connection, TimePoint at) { deadlines_.set(connection.id, connection.deadline, at); }
  TimePoint first_deadline() const { return deadlines_.first(); }
  Connection& with_first_deadline() const { return *all_.at(deadlines_.all().begin()->second); }
  void postpone_deadlines(Duration by);

  void set_unproven(Connection& connection, std::string network);
  // The handshake is done, or the connection leaves.
  void set_proven(Connection& connection);
  bool is_full() const { return all_.size() >= limits_.total; }
  bool has_too_many_unproven() const { return unproven_.size() > limits_.unproven; }
  // The connection to close if there are too many: one that is closing anyway, or the oldest unproven one of the
  // network with the most. Null if there is none.
  Connection* first_to_close() const;

  void mark_for_flush(Connection& connection);
  // Calls `flush` for each connection that was marked since the last call and still exists.
  template <class Flush>
  void flush_marked(Flush flush) {
    for (const ConnId id : std::exchange(flush_list_, {})) {
      const auto it = all_.find(id);
      if (it == all_.end()) continue;
      it->second->needs_flush = false;
      flush(*it->second);
    }
  }

  // Round robin: calls `use` for each connection once, beginning after the one that was read last. Otherwise the first
  // connection could use up the read limit every time.
  template <class Use>
  void for_each_in_turn(Use use) const {
    const auto next = all_.upper_bound(last_read_);
    for (auto it = next; it != all_.end(); ++it) use(*it->second);
    for (auto it = all_.begin(); it != next; ++it) use(*it->second);
  }
  void set_last_read(const Connection& connection) { last_read_ = connection.id; }

  Connection* any() const { return all_.empty() ? nullptr : all_.begin()->second.get(); }
  bool any_is_leaving() const;
  void check() const;

 private:
  const ConnectionLimits limits_;
  std::map<ConnId, std::unique_ptr<Connection>> all_;
  Deadlines deadlines_;
  UnprovenConnections unproven_;
  std::vector<ConnId> flush_list_;
  ConnId last_read_{};
  std::uint64_t next_accepted_id_ = 2;  // even: the core numbers dialled connections with odd ids
};

}  // namespace echoline::overlay

// The table of connections. Called by the driver.
#include "overlay/uv/connections.hpp"

namespace echoline::overlay {

Connection& Connections::add(uv_loop_t& loop, SocketEvents& events, ConnId id) {
  return *(all_[id] = std::make_unique<Connection>(loop, events, id));
}

Connection& Connections::add_accepted(uv_loop_t& loop, SocketEvents& events) {
  const ConnId id{next_accepted_id_};
  next_accepted_id_ += 2;  // the odd ids are those of dialled connections
  return add(loop, events, id);
}

Connection* Connections::find(ConnId id) const {
  const auto it = all_.find(id);
  return it == all_.end() || it->second->is_leaving() ? nullptr : it->second.get();
}

bool Connections::release(Connection& connection) {
  const auto it = all_.find(connection.id);
  if (it == all_.end() || it->second.get() != &connection) return false;
  set_proven(connection);
  set_deadline(connection, kNever);
  (void)it->second.release();
  all_.erase(it);
  return true;
}

void Connections::postpone_deadlines(Duration by) {
  for (const auto& [id, connection] : all_)
    if (connection->deadline != kNever) set_deadline(*connection, connection->deadline + by);
}

void Connections::set_unproven(Connection& connection, std::string network) {
  connection.unproven_network = std::move(network);
  unproven_.add(connection.id, connection.unproven_network);
}

void Connections::set_proven(Connection& connection) {
  unproven_.remove(connection.id, std::exchange(connection.unproven_network, {}));
}

Connection* Connections::first_to_close() const {
  for (const auto& [at, id] : deadlines_.all())
    if (Connection& connection = *all_.at(id); connection.is_leaving()) return &connection;
  const auto unproven_id = unproven_.oldest_of_largest_network();
  return unproven_id ? all_.at(*unproven_id).get() : nullptr;
}

void Connections::mark_for_flush(Connection& connection) {
  if (!std::exchange(connection.needs_flush, true)) flush_list_.push_back(connection.id);
}

bool Connections::any_is_leaving() const {
  return std::any_of(all_.begin(), all_.end(), [](const auto& entry) { return entry.second->is_leaving(); });
}

void Connections::check() const {
  unproven_.check();
  std::size_t unproven = 0, deadlines = 0, to_flush = 0;
  for (const auto& [id, connection] : all_) {
    connection->check();
    unproven += !connection->unproven_network.empty();
    deadlines += connection->deadline != kNever;
    to_flush += connection->needs_flush;
    ECHO_CHECK(connection->deadline == kNever || deadlines_.all().contains({connection->deadline, id}),
               "{}: its deadline is not kept", id);
  }
  ECHO_CHECK(unproven == unproven_.size(), "{} connections are unproven, {} are counted", unproven, unproven_.size());
  ECHO_CHECK(deadlines == deadlines_.all().size(), "a deadline of a connection that is gone");
  const auto listed =
      std::count_if(flush_list_.begin(), flush_list_.end(), [&](ConnId id) { return all_.contains(id); });
  ECHO_CHECK(to_flush == static_cast<std::size_t>(listed), "{} connections need a flush, {} are listed", to_flush,
             listed);
}

}  // namespace echoline::overlay

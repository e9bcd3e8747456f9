// Sessions over WebSocket, many at a time, on a thread of their own. Private to data_plane/.
#pragma once
#include <functional>
#include <memory>
#include <string>

#include "base/result.hpp"
#include "base/units.hpp"
#include "data_plane/adapters/openenv/messages.hpp"

namespace echoline::data_plane::openenv {

struct ClientOptions {
  Endpoint endpoint;
  Duration deadline = std::chrono::seconds(60);  // of an answer; the connection, if there has to be one, included
  std::size_t answer_max = 1u << 20;             // bytes
};

class Session;

// Thread-safe, but for what is said of a session.
class Client {
 public:
  // Called on the client's thread; must not block.
  using Done = std::function<void(Result<std::string>)>;

  explicit Client(ClientOptions options);
  ~Client();  // ends all sessions; nothing is called any more
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // Not connected yet. ask() connects it, says one thing and hears one; one at a time. kStale: no answer in time;
  // kUnavailable: no connection, or it ended; kCorrupt: too long an answer; kNotFound: no such server there. After any
  // error the session is over.
  std::shared_ptr<Session> session();
  void ask(const std::shared_ptr<Session>& session, std::string message, Done done);
  // Says good-bye, where it is connected; what was asked is answered by nothing any more. `then`: the server has let go
  // of it, or takes too long.
  void end(const std::shared_ptr<Session>& session, std::function<void()> then);
  void run_after(Duration delay, std::function<void()> what);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace echoline::data_plane::openenv

// A WebSocket client for OpenEnv servers: many sessions at a time, on one thread. Private to data_plane/.
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
  Duration deadline = std::chrono::seconds(60);  // time-out of each answer, connecting included
  std::size_t answer_bytes_max = 1u << 20;
};

class Session;  // a WebSocket connection, in which the server keeps one environment

// Thread-safe, except that calls for the same session must not overlap.
class Client {
 public:
  // Called on the client's thread; must not block.
  using AnswerHandler = std::function<void(Result<std::string>)>;

  explicit Client(ClientOptions options);
  ~Client();  // ends all sessions; no callback runs afterwards
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // Makes a session, which is not connected yet; its first ask() connects it.
  std::shared_ptr<Session> session();
  // Sends one message and passes the next message of the server to `handler`. One request per session at a time.
  // kStale: no answer by the deadline; kUnavailable: not connected, or the connection ended; kCorrupt: the answer is
  // too long; kNotFound: the server has no such path. Any error ends the session.
  void ask(const std::shared_ptr<Session>& session, std::string message, AnswerHandler handler);
  // Closes the session. A pending ask() gets no answer. `then` is called when the server has closed it too, or takes
  // too long.
  void end(const std::shared_ptr<Session>& session, std::function<void()> then);
  // Runs the function on the client's thread after `delay`.
  void run_after(Duration delay, std::function<void()> function);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace echoline::data_plane::openenv

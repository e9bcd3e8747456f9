// A server on loopback with OpenEnv's protocol (sessions over WebSocket at /ws) that misbehaves on request. Its
// environment asks for a number from 1 to 9 that follows from the seed. Observations are {"prompt", "hint"}.
#pragma once
#include <atomic>
#include <list>
#include <mutex>
#include <string>
#include <thread>

namespace echoline {

class OpenEnvServer {
 public:
  OpenEnvServer();
  ~OpenEnvServer();
  std::string url() const;
  // Sets the fault of the next `times` messages of this type ("reset", "step"): "garbage", "huge", "close", "slow",
  // "binary", "error", "full", "untyped", "no reward", "nan", "other start".
  void misbehave(std::string fault, std::string type, int times);
  int number(std::uint64_t seed) const { return static_cast<int>(seed * 7 % 9) + 1; }
  std::atomic<int> resets = 0, sessions = 0, sessions_at_once_max = 0, close_messages = 0;

 private:
  void serve(int fd);
  // The fault to show in the answer to a message of this type; empty for none.
  std::string take_fault(const std::string& type);

  int listener_ = -1;
  int port_ = 0;
  std::atomic<bool> stopping_ = false;
  std::mutex mutex_;
  std::string fault_, faulty_type_;  // guarded by mutex_
  int faults_left_ = 0;              // guarded by mutex_
  std::list<std::thread> threads_;
  std::list<int> open_sockets_;  // guarded by mutex_
  std::thread acceptor_;
};

}  // namespace echoline

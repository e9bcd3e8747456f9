// Containers of the test's vast.ai: each is a session of real processes on this machine.
#pragma once
#include <sys/types.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tests/provisioner/vast_server.hpp"

namespace echoline::testing {

struct ProcessState {
  pid_t pid = 0, parent = 0, session = 0;
  char state = 'R';  // as in /proc: T is stopped
  bool is_stopped() const { return state == 'T'; }
};
// The processes of this machine that run or are stopped.
std::vector<ProcessState> read_processes();
// Sends a signal to all processes of a session.
void signal_session(pid_t session, int signal);

// The first process of a container is the supervisor; its child is the worker, whose children are the engine.
struct Container {
  std::int64_t id = 0;
  std::string label, request;  // the body of the create
  std::chrono::steady_clock::time_point created_at;
  pid_t session = -1;  // -1: not started yet
  bool has_exited = false, is_destroyed = false;
  bool had_worker = false, had_joined = false;
  std::optional<ProcessState> supervisor, worker, engine;  // as of the last update()
  bool runs() const { return session > 0 && !has_exited && !is_destroyed; }
};

class FakeHost {
 public:
  using Log = std::function<void(const std::string&)>;
  // `program` is the program of the image; `rollouts_per_s` limits each worker.
  FakeHost(provisioner::VastServer& server, std::filesystem::path folder, std::string program, double rollouts_per_s,
           Log log);
  ~FakeHost();  // kills all containers

  // Starts created containers after their boot time, kills destroyed ones, and reports exits to the server. Without its
  // first process, a container ends. Call often.
  void update(const std::vector<ProcessState>& processes);
  std::map<std::int64_t, Container>& containers() { return containers_; }

 private:
  void start(Container& container);
  void note_join(Container& container) const;
  std::filesystem::path folder_of(const Container& container) const;

  provisioner::VastServer& server_;
  const std::filesystem::path folder_;
  const Log log_;
  std::map<std::int64_t, Container> containers_;
  std::mutex mutex_;
  std::vector<Container> created_;
  std::vector<std::int64_t> destroyed_;
};

}  // namespace echoline::testing

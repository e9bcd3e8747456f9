// Runs untrusted programs where they can do no harm: the programs that graders run, and users' tasks.
//
// bubblewrap gives each program its own namespaces (user, process, network, mount, IPC, host name), a read-only view of
// the system's programs and libraries, and one writable folder, /tmp, in memory. A seccomp filter refuses the system
// calls that computing does not need. Resource limits, and a watch over all its processes, bound its use. A program has
// no network, none of this process's environment, files or descriptors, and no privileges. If this process is root, the
// program runs as another user. If the machine does not allow this, start() says why; nothing runs unprotected.
#pragma once
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.hpp"
#include "base/units.hpp"

namespace echoline::sandbox {

// Limits of a program with all its processes, unless noted otherwise. Memory and CPU time are measured every 10 ms, so
// a program can exceed them for that long.
struct Limits {
  std::optional<Duration> wall = std::chrono::seconds(10);
  std::optional<Duration> cpu = std::chrono::seconds(10);
  Bytes memory{512u << 20};   // includes /tmp; the address space of one process is limited to 16 times as much
  Bytes scratch{64u << 20};   // the size of /tmp
  Bytes file{64u << 20};      // the size of one file
  Bytes output{1u << 20};     // standard output and standard error, each; for a Process: the kept end of standard error
  unsigned processes = 32;    // threads count as processes
  unsigned open_files = 128;  // limit of each process
};

// A program to run.
struct Command {
  std::vector<std::string> argv;                   // the program's absolute path, then its arguments
  std::map<std::string, std::string> environment;  // complete, except for PATH, HOME and PWD
  std::map<std::string, std::string> files;        // path inside the sandbox to content; readable and executable
  // Files and folders of this machine to show at the same path inside, read-only, besides the system's. Their content
  // must be readable for other users; the folders above need not be.
  std::vector<std::filesystem::path> read_only;
  Limits limits;
};

// Why a program ended. In every case all its processes have ended.
enum class EndReason {
  kExit,      // the program exited, with a status
  kSignal,    // a signal killed it; also a status of 129 to 192, which shells use for one
  kWallTime,  // from here to kOutput: it reached this limit
  kCpuTime,
  kMemory,
  kOutput,
  kStopped,  // stop() or the end of the pool ended it
};
std::string_view to_string(EndReason reason);

// The end of a program.
struct End {
  EndReason reason = EndReason::kExit;
  int status = 0;        // for kExit: the exit status; for kSignal: the signal's number
  std::string out, err;  // at most Limits::output each; for a Process: no `out`, and the end of `err`
  Duration wall{}, cpu{};
  Bytes memory;  // the highest value seen
  // "exited with status 1", "used more memory than 512 MiB"; for logs.
  std::string description() const;
};

// A long-lived program; the caller talks to it over standard input and output. One thread at a time.
class Process {
 public:
  ~Process();  // ends the program; does not wait
  Process(Process&&) noexcept;
  Process& operator=(Process&&) noexcept;

  // kUnavailable if it has closed its input or ended, kStale if it has not read all within `wait`.
  Status write(std::string_view bytes, Duration wait);
  // The next line without its end. kStale if no whole line came within `wait` (the next call returns it), kExhausted if
  // it is longer than `bytes_max`, kUnavailable if the program ended or closed its output.
  Result<std::string> read_line(std::size_t bytes_max, Duration wait);
  void stop();
  // How it ended, if it has. wait() stops it first and takes as long as the kernel needs to end its processes.
  std::optional<End> ended() const;
  End wait();

 private:
  friend class Pool;
  struct Impl;
  explicit Process(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

struct PoolOptions {
  std::filesystem::path bubblewrap = "/usr/bin/bwrap";
  std::size_t running_max = 4;       // programs running to their end at the same time
  std::size_t waiting_max = 1024;    // programs waiting to run
  std::size_t long_lived_max = 256;  // long-lived programs, queued or running
};

// Runs many programs from its own thread, which is the parent of all of them: if this process ends in any way, they end
// too. All methods are thread-safe.
class Pool {
 public:
  // Runs a program as a check. kUnavailable if that fails: what the machine lacks, and what to do.
  static Result<std::unique_ptr<Pool>> start(PoolOptions options = {});
  ~Pool();  // calls stop() and waits until all processes have ended
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Runs a program to its end, with `input` as its standard input, a file. `on_end` is called once, on the pool's
  // thread, and must not block. An error there means that the program could not be run, not that it failed. kExhausted
  // if too many wait.
  Status run(Command command, std::string input, std::function<void(Result<End>)> on_end);
  // As above, but waits for the end.
  Result<End> run(Command command, std::string input = {});
  // Ends all programs without waiting for them. Waiting callers, now and later, get kCancelled.
  void stop();
  // kExhausted if there are too many long-lived programs.
  Result<Process> launch(Command command);

 private:
  struct Impl;
  explicit Pool(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace echoline::sandbox

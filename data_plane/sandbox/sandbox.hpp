// Programs that nobody trusts, run where they can do no harm: what graders run, and tasks of the user's own.
//
// bubblewrap gives each new namespaces of its own (user, process, network, mount, IPC, host name), a read-only view of
// the system's programs and libraries, and one folder to write to, /tmp, in memory. A seccomp filter refuses what a
// program for computing does not need, resource limits and a watch over all its processes bound the rest. There is no
// network, nothing of this process's environment, files or descriptors, and no more privilege than nobody has. Whoever
// runs as root runs them as another user. Where the machine allows none of this, start() says why: nothing is ever run
// without.
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

// Of a program with all processes that it starts, unless said otherwise. Memory and CPU time are looked at every 10 ms,
// so they can be passed by what 10 ms allow.
struct Limits {
  std::optional<Duration> wall = std::chrono::seconds(10);
  std::optional<Duration> cpu = std::chrono::seconds(10);
  Bytes memory{512u << 20};   // what is in /tmp included; one process's address space is limited to 16 times as much
  Bytes scratch{64u << 20};   // /tmp
  Bytes file{64u << 20};      // one file
  Bytes output{1u << 20};     // standard output and standard error, each; a Process: what is kept of standard error
  unsigned processes = 32;    // threads count
  unsigned open_files = 128;  // of one process
};

struct Command {
  std::vector<std::string> argv;                   // the program by its absolute path
  std::map<std::string, std::string> environment;  // all of it, beside PATH, HOME and PWD
  std::map<std::string, std::string> files;        // absolute path inside, and what the file holds; to read and to run
  // Folders and files of this machine that can be read at the same place inside, beside the system's. Others must be
  // allowed to read what is in them, but not to come by there.
  std::vector<std::filesystem::path> read_only;
  Limits limits;
};

// Why a program ended. Whatever it was, no process of it is left.
enum class Why {
  kExit,      // by itself, with a status
  kSignal,    // by a signal; a status of 129 to 192 is taken for one, as shells do
  kWallTime,  // the rest: it reached this limit
  kCpuTime,
  kMemory,
  kOutput,
  kStopped,  // whoever had started it wanted so
};
std::string_view to_string(Why why);

struct End {
  Why why = Why::kExit;
  int status = 0;        // of kExit; the signal's number for kSignal
  std::string out, err;  // at most Limits::output each; of a Process: no `out`, and the end of `err`
  Duration wall{}, cpu{};
  Bytes memory;  // the most that was seen
  // "exited with status 1", "used more memory than 512 MiB"; for logs.
  std::string words() const;
};

// A program that stays, with whom one speaks by its standard input and output. One thread at a time.
class Process {
 public:
  ~Process();  // ends it; does not wait
  Process(Process&&) noexcept;
  Process& operator=(Process&&) noexcept;

  // kUnavailable when it has closed its input or ended, kStale when it has not read all within `wait`.
  Status write(std::string_view bytes, Duration wait);
  // The next line without its end. kStale when none came within `wait` (what came is kept for the next call),
  // kExhausted when it is longer than `bytes_max`, kUnavailable when it ended or closed its output.
  Result<std::string> read_line(std::size_t bytes_max, Duration wait);
  void stop();
  // How it ended, once it has. wait() stops it first and takes as long as the kernel needs to end its processes.
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
  std::size_t running_max = 4;      // programs that run to their end at a time
  std::size_t waiting_max = 1024;   // programs that wait for their turn
  std::size_t processes_max = 256;  // programs that stay
};

// Runs many at a time, from one thread of its own, which is the parent of all of them: they end when it does, however
// this process ends. All methods are thread-safe.
class Pool {
 public:
  // Runs a program to see that it works. kUnavailable when it does not: what the machine lacks, and what to do.
  static Result<std::unique_ptr<Pool>> start(PoolOptions options = {});
  ~Pool();  // stop(), and waits until no process is left
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Runs a program to its end with `input` as its standard input, a file. `done` is called once, on the pool's thread,
  // and must not block; an error there means that it could not be run, not that it failed. kExhausted when too many
  // wait.
  Status run(Command command, std::string input, std::function<void(Result<End>)> done);
  // The same, waiting for it.
  Result<End> run(Command command, std::string input = {});
  // Ends all that run, and is not waited for; whoever has to wait yet gets kCancelled, now and later.
  void stop();
  // kExhausted when too many stay.
  Result<Process> launch(Command command);

 private:
  struct Impl;
  explicit Pool(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace echoline::sandbox

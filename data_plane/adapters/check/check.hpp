// Tries a task as a run uses it: problems and held-out problems, what responses of every kind are worth, here, on a
// worker's copy and from several threads, episodes played again, and how quick all that is.
//
// It calls the task on this process's own account: a task that crashes or hangs takes the caller along. Whoever wants
// to outlive that runs it in a process of its own and listens to `doing`.
#pragma once
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "base/clock.hpp"
#include "data_plane/adapters/adapter.hpp"

namespace echoline::data_plane {

// Something that a user should know.
struct Finding {
  std::string check;  // what was looked at: "problems", "held out", "demonstrations", "rewards", "failures", "breaks",
                      // "scores" (found again), "worker" (by a worker's copy), "episodes", "threads", "speed"
  bool wrong = true;  // a run would suffer; else it may be meant so
  std::string what;   // one line
  std::string problem;   // its id; empty: none
  std::string response;  // printable, shortened; empty: none
};

struct CheckOptions {
  std::string name, options_json;  // as make_adapter() takes them
  std::uint64_t seed = 1;
  Duration time = std::chrono::seconds(20);  // about; a task that is slower is looked at less closely
  std::size_t problems = 64;
  std::size_t batch = 64;  // asked at a time, for the speed
  std::size_t threads = 4;
  // Makes the adapter; for tests.
  std::function<Result<std::unique_ptr<Adapter>>(std::string_view options_json, AdapterUse)> make;
  // Hears of every call that might not come back, before it.
  std::function<void(std::string_view doing, std::string_view problem, std::string_view response)> doing;
};

struct CheckReport {
  std::vector<Finding> findings;                 // of each kind the first three
  std::map<std::string, std::uint64_t> further;  // by its check: how many more there were
  nlohmann::json facts;                          // what was looked at; docs/tasks.md has the fields
  bool sound() const;                            // nothing is wrong
};

// An error where the task cannot be made at all.
Result<CheckReport> check_adapter(const CheckOptions& options, const Clock& clock);

}  // namespace echoline::data_plane

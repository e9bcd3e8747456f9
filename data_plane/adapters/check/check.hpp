// Tries a task in the way a run uses it: problems and held-out problems, scores of every kind of response (in this
// process, in a worker's copy and from several threads), replayed episodes, and speed.
//
// It calls the task in this process, so a task that crashes or hangs takes the caller down. A caller that must survive
// runs it in a child process and records the calls of `before_call`.
#pragma once
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "base/clock.hpp"
#include "data_plane/adapters/adapter.hpp"

namespace echoline::data_plane {

// A mistake of the task, or a note about it, for the user.
struct Finding {
  // The check that found it: "problems", "held out", "demonstrations", "rewards", "failures", "breaks", "scores"
  // (scored again), "worker" (by a worker's copy), "episodes", "threads" or "speed".
  std::string check;
  bool wrong = true;     // a run would suffer; false: it may be intended
  std::string what;      // one line
  std::string problem;   // id of the problem; empty: none
  std::string response;  // printable, shortened; empty: none
};

struct CheckOptions {
  std::string name, options_json;  // arguments of make_adapter()
  std::uint64_t seed = 1;
  Duration time = std::chrono::seconds(20);  // approximate; a slower task is checked less thoroughly
  std::size_t problems = 64;                 // training problems to check
  std::size_t batch = 64;                    // responses scored at the same time, for the speed
  std::size_t threads = 4;
  // Replaces make_adapter() in tests.
  std::function<Result<std::unique_ptr<Adapter>>(std::string_view options_json, AdapterUse)> make;
  // Called before every call that may never return.
  std::function<void(std::string_view call, std::string_view problem, std::string_view response)> before_call;
};

struct CheckReport {
  std::vector<Finding> findings;                 // at most three of each kind
  std::map<std::string, std::uint64_t> further;  // number of findings left out, per check
  nlohmann::json facts;                          // what was measured; docs/reference/task-verbs.md lists the fields
  bool is_sound() const;                         // no finding has `wrong`
};

// Returns an error only if the task cannot be made at all.
Result<CheckReport> check_adapter(const CheckOptions& options, const Clock& clock);

}  // namespace echoline::data_plane

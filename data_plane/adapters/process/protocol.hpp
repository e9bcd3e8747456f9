// Messages of the protocol between echoline and a task's program: JSON Lines over standard input and output, specified
// in data_plane/adapters/process/FORMAT.md. Writes requests and parses answers, none of which it trusts. Private to
// data_plane/.
#pragma once
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.hpp"
#include "data_plane/adapters/adapter.hpp"

namespace echoline::data_plane::process {

inline constexpr int kProtocol = 1;  // version of the protocol; the program must name the same in its hello
inline constexpr std::size_t kLineBytesMax = 16u << 20;  // limit of an answer
inline constexpr std::size_t kItemsMax = 1024;           // items per request, at most

enum class Method { kProblems, kEvaluation, kScore, kStep };
std::string_view to_string(Method method);

// The program's description of itself, its answer to the first request.
struct Hello {
  std::string name;
  bool has_turns = false;                                 // call step(), not score()
  bool deterministic = false;                             // equal requests get equal answers on every machine
  std::uint64_t problem_count = 0, evaluation_count = 0;  // training and held-out problems
};

// A problem as the program sends it. The demonstration is no field of Problem, because workers do not need it.
struct ProblemWithDemonstration {
  Problem problem;
  std::optional<std::string> demonstration;
};

// Requests, each a line with its line end. `settings_json`: the run file's settings for the task.
std::string hello_request(std::uint64_t id, std::uint64_t seed, std::string_view settings_json);
std::string request(std::uint64_t id, Method method, Duration deadline, const std::vector<std::string_view>& items);
// Tells the program that these episodes have ended. A notice has no id and gets no answer.
std::string close_notice(const std::vector<std::uint64_t>& episodes);

// Items of requests, as JSON.
std::string rows_item(std::span<const std::uint64_t> rows);  // requests the problems with these numbers
std::string score_item(const Problem& problem, std::string_view response);
// `problem` is set only with the first response of an episode, which begins it; only then is `seed` sent too.
std::string step_item(std::uint64_t episode, std::string_view response, const Problem* problem, std::uint64_t seed);

// The `result` of the answer to request `id`. kUnavailable with the task's words if it reports an error; kCorrupt if
// the line is not JSON, is nested deeper than 64, or answers another request.
Result<nlohmann::json> read_answer(std::string_view line, std::uint64_t id);
// kCorrupt, naming the missing or invalid field.
Result<Hello> read_hello(const nlohmann::json& result);
// The items of an answer; kCorrupt unless there are `count`. An item may be an error: kUnavailable with the task's
// words, or kCorrupt.
Result<std::vector<Result<nlohmann::json>>> read_items(nlohmann::json result, std::size_t count);
Result<Score> read_score(const nlohmann::json& item);
Result<Step> read_step(const nlohmann::json& item);
// The score to add if the token limit ends the episode after this step; zero if the item has none.
Result<Score> read_cut(const nlohmann::json& item);
// `fallback_id` is used if the problem has no id.
Result<ProblemWithDemonstration> read_problem(const nlohmann::json& item, std::string_view fallback_id);

}  // namespace echoline::data_plane::process

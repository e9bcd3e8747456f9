// What is said to a task that is a program of its own: JSON Lines over its standard input and output, described in
// data_plane/adapters/process/FORMAT.md. Forms requests and reads answers; trusts none. Private to data_plane/.
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

inline constexpr int kProtocol = 1;
inline constexpr std::size_t kLineBytesMax = 16u << 20;  // of an answer
inline constexpr std::size_t kItemsMax = 1024;           // of a request

enum class Method { kProblems, kEvaluation, kScore, kStep };
std::string_view to_string(Method method);

// What a task says of itself.
struct Hello {
  std::string name;
  bool turns = false;          // it is asked to step(); else to score()
  bool deterministic = false;  // says the same of the same, wherever it runs
  std::uint64_t problems = 0, evaluation = 0;
};

// A problem as its task has it: with a response worth imitating, which workers need not know.
struct OwnProblem {
  Problem problem;
  std::optional<std::string> demonstration;
};

// Requests, each a line with its end. `settings_json` is what the run file has for the task.
std::string hello_request(std::uint64_t id, std::uint64_t seed, std::string_view settings_json);
std::string request(std::uint64_t id, Method method, Duration deadline, const std::vector<std::string_view>& items);
std::string close_notice(const std::vector<std::uint64_t>& episodes);

// Items of requests, as JSON.
std::string rows_item(std::span<const std::uint64_t> rows);
std::string score_item(const Problem& problem, std::string_view response);
// `problem` only with the first response of an episode.
std::string step_item(std::uint64_t episode, std::string_view response, const Problem* problem, std::uint64_t seed);

// The `result` of the answer to request `id`. kUnavailable with the task's words where it answers with an error;
// kCorrupt: not JSON, nested deeper than 64, or of another request.
Result<nlohmann::json> read_answer(std::string_view line, std::uint64_t id);
// kCorrupt naming what is missing or wrong.
Result<Hello> read_hello(const nlohmann::json& result);
// One for each of `count`; kCorrupt unless there are so many. One may be an error of its own, which is kUnavailable
// with the task's words, or kCorrupt.
Result<std::vector<Result<nlohmann::json>>> read_items(nlohmann::json result, std::size_t count);
Result<Score> read_score(const nlohmann::json& item);
Result<Step> read_step(const nlohmann::json& item);
// What is due besides where the episode ends after this step for want of room.
Result<Score> read_cut(const nlohmann::json& item);
// `fallback_id` where it has none.
Result<OwnProblem> read_problem(const nlohmann::json& item, std::string_view fallback_id);

}  // namespace echoline::data_plane::process

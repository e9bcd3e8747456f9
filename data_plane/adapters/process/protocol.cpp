// Writes requests and parses answers for Connection. Every field of an answer is checked, because a task is a user's
// program.
#include "data_plane/adapters/process/protocol.hpp"

#include <fmt/ranges.h>

#include <cmath>
#include <cstring>

#include "data_plane/adapters/json_depth.hpp"
#include "data_plane/limits.hpp"
#include "data_plane/policy_input.hpp"

namespace echoline::data_plane::process {
namespace {

using nlohmann::json;

constexpr std::size_t kComponentsMax = 64, kNameBytesMax = 128, kErrorBytesMax = 1024, kExcerptBytesMax = 80;
constexpr std::size_t kRequestEndBytesMax = 64;  // what follows the items in a request
constexpr std::size_t kItemKeysBytes = 256;      // approximate size of an item without prompt and response

template <class... Args>
Error answer_error(fmt::format_string<Args...> format, Args&&... args) {
  return fail(Code::kCorrupt, "task's answer", format, std::forward<Args>(args)...);
}

std::string json_text(const json& value) {
  return value.dump(-1, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace);
}
std::string excerpt(const json& value) { return json_text(value).substr(0, kExcerptBytesMax); }

// Whether eight bytes need no escaping: printable ASCII except '"' and '\\'. Tests them together: below() and equals()
// set the top bit of each byte that is below a value or equal to it, and a byte outside ASCII has its top bit set
// already. A borrow may set the bit of a later byte too, but only if an earlier byte already has it.
bool needs_no_escape(const char* bytes) {
  constexpr std::uint64_t kOnes = 0x0101010101010101, kTopBits = 0x8080808080808080;
  std::uint64_t word = 0;
  std::memcpy(&word, bytes, sizeof word);
  const auto below = [word](std::uint64_t limit) { return (word - kOnes * limit) & ~word; };
  const auto equals = [word](std::uint64_t character) {
    return ((word ^ kOnes * character) - kOnes) & ~(word ^ kOnes * character);
  };
  return ((word | below(0x20) | equals('"') | equals('\\')) & kTopBits) == 0;
}

// Appends a text as a JSON string and replaces invalid UTF-8. Copies runs of plain bytes without the JSON library,
// because responses are long and mostly plain.
void append_quoted(std::string& out, std::string_view text) {
  out += '"';
  std::size_t run_begin = 0;
  while (run_begin < text.size()) {
    std::size_t i = run_begin;
    while (i + 8 <= text.size() && needs_no_escape(text.data() + i)) i += 8;
    const auto is_plain = [&] {
      return text[i] >= 0x20 && static_cast<unsigned char>(text[i]) < 0x80 && text[i] != '"' && text[i] != '\\';
    };
    while (i < text.size() && is_plain()) ++i;
    out.append(text.substr(run_begin, i - run_begin));
    run_begin = i;
    while (i < text.size() && !is_plain()) ++i;
    if (i == run_begin) continue;
    const std::string quoted_run = json_text(text.substr(run_begin, i - run_begin));
    out.append(quoted_run, 1, quoted_run.size() - 2);  // without its quotation marks
    run_begin = i;
  }
  out += '"';
}

// `key_json`: the key with the punctuation around it, such as `,"id":`.
void append_text(std::string& out, std::string_view key_json, std::string_view text) {
  out += key_json;
  append_quoted(out, text);
}

void append_problem(std::string& out, const Problem& problem) {
  append_text(out, R"({"id":)", problem.id());
  if (!problem.metadata_json().empty())
    // Parsed and written again, because a line end inside the metadata would end the request.
    if (const json metadata = json::parse(problem.metadata_json(), nullptr, /*allow_exceptions=*/false);
        !metadata.is_discarded())
      out += ",\"metadata\":" + json_text(metadata);
  if (problem.messages().empty())
    append_text(out, R"(,"prompt":)", problem.prompt());
  else
    out += R"(,"prompt":)" + json_text(to_json(prompt_of(problem)));
  append_text(out, R"(,"reference":)", problem.reference());
  out += '}';
}

Result<double> read_finite(const json& item, const char* key) {
  const auto it = item.find(key);
  if (it == item.end() || !it->is_number() || !std::isfinite(it->get<double>()))
    return answer_error("expected a finite number '{}', found {}", key, excerpt(item));
  return it->get<double>();
}

Result<bool> read_flag(const json& item, const char* key, bool fallback) {
  const auto it = item.find(key);
  if (it == item.end()) return fallback;
  if (!it->is_boolean()) return answer_error("'{}' is {}, expected true or false", key, excerpt(*it));
  return it->get<bool>();
}

Result<std::string> read_text(const json& item, const char* key, std::size_t bytes_max) {
  const auto it = item.find(key);
  if (it == item.end()) return std::string();
  if (!it->is_string()) return answer_error("expected a text '{}', found {}", key, excerpt(item));
  const auto& value = it->get_ref<const std::string&>();
  if (value.size() > bytes_max)
    return answer_error("'{}' has {} bytes, at most {} are allowed", key, value.size(), bytes_max);
  return value;
}

Result<PolicyInput> read_input(const json& value, const char* key) {
  auto input = read_policy_input(value, kPromptBytesMax);
  if (!input) return answer_error("'{}': {}", key, input.error().detail);
  return input;
}

Result<std::uint64_t> read_count(const json& item, const char* key) {
  const auto it = item.find(key);
  if (it == item.end()) return std::uint64_t{0};
  if (!it->is_number_unsigned()) return answer_error("'{}' is {}, expected a whole number", key, excerpt(*it));
  return it->get<std::uint64_t>();
}

}  // namespace

std::string_view to_string(Method method) {
  switch (method) {
    case Method::kProblems:
      return "problems";
    case Method::kEvaluation:
      return "evaluation";
    case Method::kScore:
      return "score";
    case Method::kStep:
      return "step";
  }
  return "";
}

std::string hello_request(std::uint64_t id, std::uint64_t seed, std::string_view settings_json) {
  json settings = json::parse(settings_json, nullptr, /*allow_exceptions=*/false);
  if (!settings.is_object()) settings = json::object();
  return json_text({{"id", id},
                    {"method", "hello"},
                    {"protocol", kProtocol},
                    {"seed", seed},
                    {"settings", std::move(settings)}}) +
         "\n";
}

std::string request(std::uint64_t id, Method method, Duration deadline, const std::vector<std::string_view>& items) {
  std::string line = fmt::format(R"({{"deadline_ms":{},"id":{},"items":[)",
                                 std::chrono::duration_cast<std::chrono::milliseconds>(deadline).count(), id);
  std::size_t request_bytes = line.size() + kRequestEndBytesMax;
  for (const std::string_view item : items) request_bytes += item.size() + 1;
  line.reserve(request_bytes);
  for (const std::string_view item : items) {
    line += item;
    line += ',';
  }
  if (!items.empty()) line.pop_back();  // the last comma
  line += fmt::format("],\"method\":\"{}\"}}\n", to_string(method));
  return line;
}

std::string close_notice(const std::vector<std::uint64_t>& episodes) {
  return json_text({{"method", "close"}, {"episodes", episodes}}) + "\n";
}

// In the items below, the keys are in the order of the alphabet, as nlohmann::json writes them in other requests.
std::string rows_item(std::span<const std::uint64_t> rows) {
  return fmt::format("{{\"rows\":[{}]}}", fmt::join(rows, ","));
}

std::string score_item(const Problem& problem, std::string_view response) {
  std::string item;
  item.reserve(problem.prompt().size() + response.size() + kItemKeysBytes);
  item += R"({"problem":)";
  append_problem(item, problem);
  append_text(item, R"(,"response":)", response);
  item += '}';
  return item;
}

std::string step_item(std::uint64_t episode, std::string_view response, const Problem* problem, std::uint64_t seed) {
  std::string item = fmt::format(R"({{"episode":{})", episode);
  if (problem) {
    item += R"(,"problem":)";
    append_problem(item, *problem);
  }
  append_text(item, R"(,"response":)", response);
  if (problem) item += fmt::format(R"(,"seed":{})", seed);
  item += '}';
  return item;
}

Result<json> read_answer(std::string_view line, std::uint64_t id) {
  if (nests_too_deep(line)) return answer_error("nested deeper than {}", kJsonDepthMax);
  json answer = json::parse(line.begin(), line.end(), nullptr, /*allow_exceptions=*/false);
  if (!answer.is_object())
    return answer_error(
        "expected a JSON object on a line of its own, found '{}'",
        json(line.substr(0, kExcerptBytesMax)).dump(-1, ' ', /*ensure_ascii=*/true, json::error_handler_t::replace));
  const auto answered_id = answer.find("id");
  if (answered_id == answer.end() || !answered_id->is_number_unsigned() || answered_id->get<std::uint64_t>() != id)
    return answer_error("expected the answer to request {}, found {}", id, excerpt(answer));
  if (const auto error = answer.find("error"); error != answer.end())
    return fail(Code::kUnavailable, "task", "{}",
                (error->is_string() ? error->get<std::string>() : json_text(*error)).substr(0, kErrorBytesMax));
  const auto result = answer.find("result");
  if (result == answer.end() || !result->is_object())
    return answer_error("expected an object 'result' or an 'error', found {}", excerpt(answer));
  return std::move(*result);
}

Result<Hello> read_hello(const json& result) {
  const auto protocol = result.find("protocol");
  if (protocol == result.end() || *protocol != kProtocol)
    return answer_error("expected protocol {}, found {}", kProtocol,
                        protocol == result.end() ? "none" : excerpt(*protocol));
  Hello hello;
  ECHO_ASSIGN(hello.name, read_text(result, "name", kNameBytesMax));
  ECHO_ASSIGN(hello.has_turns, read_flag(result, "turns", /*fallback=*/false));
  ECHO_ASSIGN(hello.deterministic, read_flag(result, "deterministic", /*fallback=*/false));
  ECHO_ASSIGN(hello.problem_count, read_count(result, "problems"));
  ECHO_ASSIGN(hello.evaluation_count, read_count(result, "evaluation"));
  return hello;
}

Result<std::vector<Result<json>>> read_items(json result, std::size_t count) {
  const auto items = result.find("items");
  if (items == result.end() || !items->is_array() || items->size() != count)
    return answer_error("expected {} 'items', found {}", count,
                        items != result.end() && items->is_array() ? std::to_string(items->size()) : excerpt(result));
  std::vector<Result<json>> results;
  results.reserve(count);
  for (json& item : *items) {
    if (!item.is_object()) {
      results.emplace_back(answer_error("expected an object, found {}", excerpt(item)));
    } else if (const auto error = item.find("error"); error != item.end()) {
      results.emplace_back(
          fail(Code::kUnavailable, "task", "{}",
               (error->is_string() ? error->get<std::string>() : json_text(*error)).substr(0, kErrorBytesMax)));
    } else {
      results.emplace_back(std::move(item));
    }
  }
  return results;
}

Result<Score> read_score(const json& item) {
  Score score;
  ECHO_ASSIGN(score.reward, read_finite(item, "reward"));
  const bool has_full_reward = score.reward >= 1;  // which counts as correct if the program gives no verdict
  ECHO_ASSIGN(score.correct, read_flag(item, "correct", /*fallback=*/has_full_reward));
  const auto components = item.find("components");
  if (components == item.end()) return score;
  if (!components->is_object() || components->size() > kComponentsMax)
    return answer_error("'components' is {}, expected at most {} named numbers", excerpt(*components), kComponentsMax);
  for (const auto& [name, value] : components->items()) {
    if (name.empty() || name.size() > kNameBytesMax || !value.is_number() || !std::isfinite(value.get<double>()))
      return answer_error("component '{}' is {}, expected a name of 1 to {} bytes and a finite number",
                          name.substr(0, kExcerptBytesMax), excerpt(value), kNameBytesMax);
    score.components[name] = value.get<double>();
  }
  return score;
}

Result<Step> read_step(const json& item) {
  Step step;
  ECHO_ASSIGN(step.score, read_score(item));
  ECHO_ASSIGN(step.done, read_flag(item, "done", /*fallback=*/true));
  if (const auto observation = item.find("observation"); observation != item.end()) {
    ECHO_ASSIGN(step.observation, read_input(*observation, "observation"));
  }
  return step;
}

Result<Score> read_cut(const json& item) {
  const auto cut = item.find("cut");
  if (cut == item.end()) return Score{};
  if (!cut->is_object()) return answer_error("'cut' is {}, expected an object", excerpt(*cut));
  return read_score(*cut);
}

Result<ProblemWithDemonstration> read_problem(const json& item, std::string_view fallback_id) {
  ProblemWithDemonstration answer;
  Problem& problem = answer.problem;
  ECHO_ASSIGN(std::string id, read_text(item, "id", kNameBytesMax));
  const auto prompt = item.find("prompt");
  if (prompt == item.end()) return answer_error("expected a 'prompt', found {}", excerpt(item));
  ECHO_ASSIGN(PolicyInput input, read_input(*prompt, "prompt"));
  ECHO_ASSIGN(std::string reference, read_text(item, "reference", kReferenceBytesMax));
  problem.set_id(id.empty() ? std::string(fallback_id) : std::move(id));
  set_prompt(problem, std::move(input));
  problem.set_reference(std::move(reference));
  if (const auto metadata = item.find("metadata"); metadata != item.end()) {
    problem.set_metadata_json(json_text(*metadata));
    if (problem.metadata_json().size() > kMetadataBytesMax)
      return answer_error("'metadata' has {} bytes, at most {} are allowed", problem.metadata_json().size(),
                          kMetadataBytesMax);
  }
  if (item.contains("demonstration")) {
    ECHO_ASSIGN(answer.demonstration, read_text(item, "demonstration", kReferenceBytesMax));
  }
  return answer;
}

}  // namespace echoline::data_plane::process

// The program that loads a task's shared library inside the sandbox and answers requests for it
// (data_plane/adapters/process/FORMAT.md). It is embedded in echoline and shares no code with it. It checks the
// library's results. echoline checks this program's answers again, because the library could write them itself.
#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>

#include "clients/c/echoline_task.h"

namespace {

using nlohmann::json;

constexpr std::size_t kRequestBufferBytes = 1u << 20;
// The limits of data_plane/limits.hpp and trajectory.hpp.
constexpr std::size_t kPromptBytesMax = 256u << 10, kTextBytesMax = 64u << 10, kNameBytesMax = 128, kComponentsMax = 64;

// A mistake of the library, or its own error message. The reply to the request holds it.
struct LibraryError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Replaces bytes that are not UTF-8.
std::string with_valid_utf8(const std::string& text) {
  return json::parse(json(text).dump(-1, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace))
      .get<std::string>();
}

std::string checked_text(const echoline_text& text, const char* what, std::size_t bytes_max) {
  if (text.size == 0) return {};
  if (text.data == nullptr)
    throw LibraryError(std::string("'") + what + "' is NULL with a size of " + std::to_string(text.size));
  if (text.size > bytes_max)
    throw LibraryError(std::string("'") + what + "' has " + std::to_string(text.size) + " bytes, at most " +
                       std::to_string(bytes_max) + " are allowed");
  std::string copy(text.data, text.size);
  try {
    (void)json(copy).dump();
  } catch (const json::exception&) {
    throw LibraryError(std::string("'") + what + "' is not valid UTF-8");
  }
  return copy;
}

// Buffer for a library function's error message.
class ErrorBuffer {
 public:
  char* data() { return text_; }
  // Throws the buffer's message if a library function returned an error.
  void expect_success(int result, const char* function) {
    if (result == 0) return;
    text_[ECHOLINE_WHY_BYTES - 1] = '\0';
    const std::string message = with_valid_utf8(text_);
    throw LibraryError(message.empty()
                           ? std::string(function) + "() returned " + std::to_string(result) + " and does not say why"
                           : message);
  }

 private:
  char text_[ECHOLINE_WHY_BYTES] = {};
};

class Library {
 public:
  explicit Library(const char* path) {
    void* const handle = ::dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) throw LibraryError(with_valid_utf8(::dlerror()));
    void* const symbol = ::dlsym(handle, "echoline_task");
    if (symbol == nullptr) throw LibraryError("it exports no function 'echoline_task' (clients/c/echoline_task.h)");
    const auto get_table = reinterpret_cast<const echoline_task_table* (*)(std::uint32_t)>(symbol);
    table_ = get_table(ECHOLINE_TASK_ABI);
    const std::string version = std::to_string(ECHOLINE_TASK_ABI);
    if (table_ == nullptr) throw LibraryError("it has no ABI " + version + ": echoline_task() returned NULL");
    if (table_->abi != ECHOLINE_TASK_ABI)
      throw LibraryError("expected ABI " + version + ", found " + std::to_string(table_->abi));
    if (table_->size < sizeof *table_)
      throw LibraryError("its table has " + std::to_string(table_->size) + " bytes, expected " +
                         std::to_string(sizeof *table_) + " or more");
    if (!table_->open || !table_->close || !table_->problem_count || !table_->problem)
      throw LibraryError("its table lacks one of open, close, problem_count and problem");
    const bool has_episodes = table_->begin || table_->step || table_->destroy;
    if (has_episodes && (!table_->begin || !table_->step || !table_->destroy))
      throw LibraryError("its table has not all of begin, step and destroy");
    if (has_episodes == (table_->score != nullptr))
      throw LibraryError("its table must have either score or begin, step and destroy");
    if (table_->name != nullptr)
      name_ = checked_text({table_->name, ::strnlen(table_->name, kNameBytesMax + 1)}, "name", kNameBytesMax);
  }

  json hello(const json& request) {
    const std::string settings = request.at("settings").dump();
    ErrorBuffer error;
    error.expect_success(
        table_->open({settings.data(), settings.size()}, request.at("seed").get<std::uint64_t>(), &task_, error.data()),
        "open");
    return {{"protocol", 1},
            {"name", name_},
            {"turns", table_->score == nullptr},
            {"deterministic", table_->deterministic != 0},
            {"problems", table_->problem_count(task_, /*evaluation=*/0)},
            {"evaluation", table_->problem_count(task_, /*evaluation=*/1)}};
  }

  // The next three answer one item of a request (FORMAT.md of the task "process").
  json problems(const json& item, bool evaluation) {
    json problems = json::array();
    for (const json& row : item.at("rows")) {
      echoline_problem problem{};
      problem.size = sizeof problem;
      ErrorBuffer error;
      error.expect_success(table_->problem(task_, evaluation ? 1 : 0, row.get<std::uint64_t>(), &problem, error.data()),
                           "problem");
      json entry{{"prompt", checked_text(problem.prompt, "prompt", kPromptBytesMax)},
                 {"reference", checked_text(problem.reference, "reference", kTextBytesMax)}};
      if (problem.id.size > 0) entry["id"] = checked_text(problem.id, "id", kNameBytesMax);
      if (problem.demonstration.size > 0)
        entry["demonstration"] = checked_text(problem.demonstration, "demonstration", kTextBytesMax);
      if (problem.metadata.size > 0) {
        entry["metadata"] =
            json::parse(checked_text(problem.metadata, "metadata", kTextBytesMax), nullptr, /*allow_exceptions=*/false);
        if (entry["metadata"].is_discarded()) throw LibraryError("'metadata' is not valid JSON");
      }
      problems.push_back(std::move(entry));
    }
    return {{"problems", std::move(problems)}};
  }

  json score(const json& item) {
    const Problem problem(item.at("problem"));
    echoline_score score = new_score();
    ErrorBuffer error;
    error.expect_success(table_->score(task_, &problem.c_problem, text(item.at("response")), &score, error.data()),
                         "score");
    return to_json(score);
  }

  json step(const json& item) {
    const auto number = item.at("episode").get<std::uint64_t>();
    ErrorBuffer error;
    if (item.contains("problem")) {  // the episode's first step
      const Problem problem(item.at("problem"));
      void* episode = nullptr;
      error.expect_success(
          table_->begin(task_, &problem.c_problem, item.at("seed").get<std::uint64_t>(), &episode, error.data()),
          "begin");
      destroy_episode(number);
      episodes_[number] = episode;
    }
    const auto it = episodes_.find(number);
    if (it == episodes_.end()) throw LibraryError("no episode " + std::to_string(number));
    echoline_score score = new_score();
    error.expect_success(table_->step(it->second, text(item.at("response")), &score, error.data()), "step");
    json step = to_json(score);
    step["done"] = score.more == 0;
    step["observation"] = checked_text(score.observation, "observation", kPromptBytesMax);
    if (score.more == 0) {
      destroy_episode(number);
    } else if (table_->cut) {  // the score if the episode is cut off after this step
      echoline_score cut = new_score();
      error.expect_success(table_->cut(it->second, &cut, error.data()), "cut");
      step["cut"] = to_json(cut);
    }
    return step;
  }

  void destroy_episode(std::uint64_t number) {
    const auto it = episodes_.find(number);
    if (it == episodes_.end()) return;
    void* const episode = it->second;
    episodes_.erase(it);
    table_->destroy(episode);
  }

 private:
  static echoline_score new_score() {
    echoline_score score{};
    score.size = sizeof score;
    return score;
  }
  static echoline_text text(const json& value) {
    const auto& text = value.get_ref<const std::string&>();
    return {text.data(), text.size()};
  }

  // A problem of the C interface. It points into `item`, which must outlive it, and into `metadata`.
  struct Problem {
    explicit Problem(const json& item) {
      if (item.contains("metadata")) metadata = item.at("metadata").dump();
      c_problem.size = sizeof c_problem;
      c_problem.id = text(item.at("id"));
      c_problem.prompt = text(item.at("prompt"));
      c_problem.reference = text(item.at("reference"));
      c_problem.metadata = {metadata.data(), metadata.size()};
    }
    Problem(const Problem&) = delete;
    std::string metadata;
    echoline_problem c_problem{};
  };

  static json to_json(const echoline_score& score) {
    if (!std::isfinite(score.reward))
      throw LibraryError("the reward is " + std::to_string(score.reward) + ", expected a finite number");
    json result{{"reward", score.reward}};
    if (score.verdict < ECHOLINE_CORRECT_BY_REWARD || score.verdict > ECHOLINE_WRONG)
      throw LibraryError("the verdict is " + std::to_string(score.verdict) + ", expected 0, 1 or 2");
    if (score.verdict != ECHOLINE_CORRECT_BY_REWARD) result["correct"] = score.verdict == ECHOLINE_CORRECT;
    if (score.component_count > kComponentsMax || (score.component_count > 0 && score.components == nullptr))
      throw LibraryError(std::to_string(score.component_count) + " components" +
                         (score.components == nullptr
                              ? std::string(" at NULL")
                              : ", at most " + std::to_string(kComponentsMax) + " are allowed"));
    for (std::size_t i = 0; i < score.component_count; ++i) {
      const std::string name = checked_text(score.components[i].name, "component's name", kNameBytesMax);
      if (name.empty() || !std::isfinite(score.components[i].value))
        throw LibraryError("component '" + name + "' is " + std::to_string(score.components[i].value) +
                           ", expected a name and a finite number");
      result["components"][name] = score.components[i].value;
    }
    return result;
  }

  const echoline_task_table* table_ = nullptr;
  std::string name_;
  void* task_ = nullptr;
  std::map<std::uint64_t, void*> episodes_;
};

// The result of a request. `hello`, the first one, loads the library.
json result_of(std::unique_ptr<Library>& library, const char* path, const json& request) {
  const std::string method = request.at("method");
  if (method == "hello") {
    library = std::make_unique<Library>(path);
    return library->hello(request);
  }
  // Requests run one at a time, so a cancel is only read after the request that it should end, and has no effect.
  if (method == "ping" || method == "cancel") return json::object();
  if (!library) throw LibraryError("expected hello first");
  if (method == "close") {  // ends the listed episodes; the task stays open
    for (const json& number : request.at("episodes")) library->destroy_episode(number);
    return json::object();
  }
  json items = json::array();
  for (const json& item : request.at("items")) {
    try {
      if (method == "score")
        items.push_back(library->score(item));
      else if (method == "step")
        items.push_back(library->step(item));
      else if (method == "problems" || method == "evaluation")
        items.push_back(library->problems(item, method == "evaluation"));
      else
        throw LibraryError("unknown method '" + method + "'");
    } catch (const LibraryError& error) {
      items.push_back({{"error", error.what()}});
    }
  }
  return {{"items", std::move(items)}};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  // Moves the protocol to other descriptors, so that the library's own input and output cannot disturb it.
  std::FILE* const requests = ::fdopen(::dup(0), "r");
  const int answers_fd = ::dup(1);
  const int null_input = ::open("/dev/null", O_RDONLY);
  if (requests == nullptr || answers_fd < 0 || ::dup2(2, 1) < 0 || (null_input >= 0 && ::dup2(null_input, 0) < 0))
    return 2;
  ::setvbuf(requests, nullptr, _IOFBF, kRequestBufferBytes);
  std::unique_ptr<Library> library;
  char* line = nullptr;
  std::size_t line_capacity = 0;
  for (ssize_t size = 0; (size = ::getline(&line, &line_capacity, requests)) > 0;) {
    json reply, id;
    try {
      const json request = json::parse(line, line + size);
      if (request.contains("id")) id = request["id"];
      reply = {{"id", id}, {"result", result_of(library, argv[1], request)}};
    } catch (const std::exception& error) {
      reply = {{"id", id}, {"error", error.what()}};
    }
    if (id.is_null()) continue;  // a notice, which gets no reply
    // Replaces invalid UTF-8: an error's text may quote the request.
    const std::string text = reply.dump(-1, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace) + "\n";
    for (std::size_t written = 0; written < text.size();) {
      const ssize_t just_written = ::write(answers_fd, text.data() + written, text.size() - written);
      if (just_written <= 0) return 1;
      written += static_cast<std::size_t>(just_written);
    }
  }
  return 0;
}

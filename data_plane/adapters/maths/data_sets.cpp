// The published sets of mathematics problems, and any other JSON Lines file, as options of the run file's task.
#include <nlohmann/json.hpp>

#include "data_plane/adapters/maths/data_set.hpp"

namespace echoline::data_plane {
namespace {

using maths::DataSetOptions;
using maths::Row;
using maths::Rule;

// GSM8K (Cobbe et al. 2021, arXiv:2110.14168): {question, answer}; the answer is a worked solution that ends "#### N".
struct Gsm8kOptions : DataSetOptions {
  void read(ConfigSection s, AdapterUse use) {
    read_two_files(s, use, "JSON Lines file of {question, answer} to train on; an answer ends in \"#### N\"", "test",
                   "the same for evaluation; its problems are never trained on");
    rule = Rule::kGsm8kStrict;
    s.read_choice(
        "mode", rule,
        {{"strict", Rule::kGsm8kStrict}, {"flexible", Rule::kGsm8kFlexible}, {"last_number", Rule::kLastNumber}},
        "which text is the answer: the number after the last \"####\" (strict), the last number-like text as written "
        "(flexible), or without commas and the punctuation after it (last_number)");
    read_reward(s);
  }
};

Result<Row> gsm8k_row(const nlohmann::json& json) {
  ECHO_ASSIGN(std::string question, maths::text_at(json, "question"));
  ECHO_ASSIGN(std::string answer, maths::text_at(json, "answer"));
  const auto reference = maths::gsm8k_strict(answer, {}).answer;
  if (!reference) return fail(Code::kInvalid, "", "the answer must end in '#### ' and a number");
  return Row{.prompt = std::move(question), .reference = *reference, .demonstration = std::move(answer)};
}

// MATH (Hendrycks et al. 2021, arXiv:2103.03874): {problem, level, type, solution}; MATH-500 states the answer too.
struct MathOptions : DataSetOptions {
  void read(ConfigSection s, AdapterUse use) {
    read_files(s, use,
               "JSON Lines file of {problem, solution} or {problem, answer} to train on; a solution has its answer in "
               "\\boxed{}");
    rule = Rule::kMathReward;
    read_rule(s, rule, "how a response is graded; docs/reference/mathematics.md describes the rules");
    read_reward(s);
  }
};

Result<Row> math_row(const nlohmann::json& json) {
  ECHO_ASSIGN(std::string problem, maths::text_at(json, "problem"));
  std::string solution;
  if (json.contains("solution")) {
    ECHO_ASSIGN(solution, maths::text_at(json, "solution"));
  }
  if (json.contains("answer")) {
    ECHO_ASSIGN(std::string answer, maths::text_or_number_at(json, "answer"));
    return Row{.prompt = std::move(problem), .reference = std::move(answer), .demonstration = std::move(solution)};
  }
  if (solution.empty()) return fail(Code::kInvalid, "", "expected a string 'solution' or a string 'answer'");
  auto answer = maths::boxed_answer(solution);
  if (!answer) return fail(Code::kInvalid, "", "the solution must have its answer in \\boxed{{...}}");
  return Row{.prompt = std::move(problem), .reference = std::move(*answer), .demonstration = std::move(solution)};
}

// DAPO-Math-17k (Yu et al. 2025, arXiv:2503.14476): {prompt: [{role, content}], reward_model: {ground_truth}}.
struct DapoOptions : DataSetOptions {
  void read(ConfigSection s, AdapterUse use) {
    read_files(s, use,
               "JSON Lines file of {prompt: [{role, content}], reward_model: {ground_truth}} to train on; repeated "
               "rows count once");
    rule = Rule::kMathDapo;
    reward.wrong = -1;
    read_rule(s, rule, "how a response is graded; docs/reference/mathematics.md describes the rules");
    read_reward(s);
  }
};

Result<Row> dapo_row(const nlohmann::json& json) {
  ECHO_ASSIGN(PolicyInput prompt, maths::prompt_at(json, "prompt"));
  ECHO_ASSIGN(std::string answer, maths::text_or_number_at(json, "reward_model.ground_truth"));
  return Row{.prompt = std::move(prompt), .reference = std::move(answer)};
}

// A text with placeholders "{key}" for the row's values.
struct Template {
  std::vector<std::string> texts{""}, keys;  // text, key, text, key, ..., text

  // A '{' without a '}' before the next '{' stands for itself. "{{" is a literal brace.
  static Template parse(std::string_view text) {
    Template result;
    while (!text.empty()) {
      const bool opens_key = text[0] == '{' && !text.starts_with("{{");
      const std::size_t close = opens_key ? text.find_first_of("{}", 1) : std::string_view::npos;
      if (close != std::string_view::npos && text[close] == '}' && close > 1) {
        result.keys.emplace_back(text.substr(1, close - 1));
        result.texts.emplace_back();
        text.remove_prefix(close + 1);
      } else {
        result.texts.back() += text[0];
        text.remove_prefix(text.starts_with("{{") ? 2 : 1);
      }
    }
    return result;
  }

  Result<std::string> fill(const nlohmann::json& row) const {
    std::string text = texts[0];
    for (std::size_t i = 0; i < keys.size(); ++i) {
      ECHO_ASSIGN(const std::string value, maths::text_or_number_at(row, keys[i]));
      text += value;
      text += texts[i + 1];
    }
    return text;
  }
};

// Any JSON Lines file.
struct JsonlOptions : DataSetOptions {
  std::string prompt = "prompt", answer = "answer";
  std::optional<std::string> prompt_template;

  void read(ConfigSection s, AdapterUse use) {
    read_files(s, use, "JSON Lines file to train on: one object a line; repeated rows count once");
    const bool has_both = s.has("prompt") && s.has("template");
    s.read("prompt", prompt,
           "key of the prompt: a text, or a list of messages {role, content}; a path of keys has dots");
    s.read("answer", answer, "key of the reference answer, a string or a whole number");
    s.read("template", prompt_template,
           "instead of `prompt`: a text with {key} for the value of a key of the row; {{ is a literal brace");
    rule = Rule::kExact;
    read_rule(s, rule, "how a response is graded; docs/reference/mathematics.md describes the rules");
    read_reward(s);
    if (has_both) s.error("template", "expected 'prompt' or 'template', not both");
    if (prompt.empty()) s.error("prompt", "expected a key of the rows");
    if (answer.empty()) s.error("answer", "expected a key of the rows");
    if (prompt_template && Template::parse(*prompt_template).keys.empty())
      s.error("template", "expected a text with {key}, where key is one of the rows', found none");
  }
};

maths::RowReader jsonl_reader(const JsonlOptions& options) {
  std::optional<Template> prompt_template;
  if (options.prompt_template) prompt_template = Template::parse(*options.prompt_template);
  return
      [prompt_template, prompt = options.prompt, answer = options.answer](const nlohmann::json& json) -> Result<Row> {
        PolicyInput input;
        if (prompt_template) {
          ECHO_ASSIGN(input, prompt_template->fill(json));
        } else {
          ECHO_ASSIGN(input, maths::prompt_at(json, prompt));
        }
        ECHO_ASSIGN(std::string reference, maths::text_or_number_at(json, answer));
        return Row{.prompt = std::move(input), .reference = std::move(reference)};
      };
}

template <class Options>
void read_options(ConfigSection s) {
  Options().read(s, AdapterUse::kProblems);
}

}  // namespace

const BuiltIn kDapoMath{
    .name = "dapo_math",
    .meaning = "DAPO-Math-17k from JSON Lines files; 1 for the right answer behind \"Answer:\", -1 without it",
    .read_options = read_options<DapoOptions>,
    .make = [](std::string_view json, std::uint64_t seed, AdapterUse use) -> Result<std::unique_ptr<Adapter>> {
      ECHO_ASSIGN(const auto options, options_from_json<DapoOptions>("dapo_math", json, use));
      return make_data_set("dapo_math", options, dapo_row, seed, use);
    }};

const BuiltIn kGsm8k{
    .name = "gsm8k",
    .meaning = "Grade-school word problems from JSON Lines files; a right final number is worth 1",
    .read_options = read_options<Gsm8kOptions>,
    .make = [](std::string_view json, std::uint64_t seed, AdapterUse use) -> Result<std::unique_ptr<Adapter>> {
      ECHO_ASSIGN(const auto options, options_from_json<Gsm8kOptions>("gsm8k", json, use));
      return make_data_set("gsm8k", options, gsm8k_row, seed, use);
    }};

const BuiltIn kJsonl{
    .name = "jsonl",
    .meaning = "Problems from any JSON Lines file with a prompt and an answer, graded by a rule of your choice",
    .read_options = read_options<JsonlOptions>,
    .make = [](std::string_view json, std::uint64_t seed, AdapterUse use) -> Result<std::unique_ptr<Adapter>> {
      ECHO_ASSIGN(const auto options, options_from_json<JsonlOptions>("jsonl", json, use));
      return make_data_set("jsonl", options, jsonl_reader(options), seed, use);
    }};

const BuiltIn kMath{
    .name = "math",
    .meaning = "Competition problems (MATH, MATH-500) from JSON Lines files; the right answer in \\boxed{} is worth 1",
    .read_options = read_options<MathOptions>,
    .make = [](std::string_view json, std::uint64_t seed, AdapterUse use) -> Result<std::unique_ptr<Adapter>> {
      ECHO_ASSIGN(const auto options, options_from_json<MathOptions>("math", json, use));
      return make_data_set("math", options, math_row, seed, use);
    }};

}  // namespace echoline::data_plane

// GSM8K: grade-school word problems, JSON Lines of {question, answer}; an answer ends "#### N".
//
// Grading looks at the last 300 characters of the response. strict: the last "#### " followed by a run of digits, '.'
// and ',' (a '-' may lead), with ',' and '$' removed, must equal the reference. flexible: the last number counts, and
// the punctuation that ends a sentence is no part of it.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "base/files.hpp"
#include "base/random.hpp"
#include "data_plane/adapters/adapter_config.hpp"

namespace echoline::data_plane {
namespace {

constexpr std::size_t kGradedCharacters = 300;
constexpr std::uint64_t kFileBytesMax = 256u << 20;
constexpr std::string_view kMarker = "#### ";

// The last `count` characters; UTF-8 continuation bytes (10xxxxxx) are no characters of their own.
std::string_view last_characters(std::string_view text, std::size_t count) {
  std::size_t begin = text.size();
  while (begin > 0 && count > 0) {
    --begin;
    if ((static_cast<unsigned char>(text[begin]) & 0xc0) != 0x80) --count;
  }
  return text.substr(begin);
}

bool is_number_character(char c) { return (c >= '0' && c <= '9') || c == '.' || c == ','; }

// The text matching -?[0-9.,]+ at the very start of `text`; empty when there is none.
std::string_view number_at_start(std::string_view text) {
  const std::size_t sign = text.starts_with('-') ? 1 : 0;
  std::size_t end = sign;
  while (end < text.size() && is_number_character(text[end])) ++end;
  return end > sign ? text.substr(0, end) : std::string_view{};
}

std::string without_commas(std::string_view number) {
  std::string plain(number);
  std::erase(plain, ',');
  return plain;
}

std::optional<std::string> strict_answer(std::string_view text) {
  for (auto at = text.rfind(kMarker); at != std::string_view::npos;
       at = at == 0 ? at - 1 : text.rfind(kMarker, at - 1)) {
    const std::string_view number = number_at_start(text.substr(at + kMarker.size()));
    if (!number.empty()) return without_commas(number);
  }
  return std::nullopt;
}

std::optional<std::string> flexible_answer(std::string_view text) {
  for (std::size_t end = text.size(); end > 0;) {
    if (!is_number_character(text[end - 1])) {
      --end;
      continue;
    }
    std::size_t begin = end;
    while (begin > 0 && is_number_character(text[begin - 1])) --begin;
    std::string_view number = text.substr(begin, end - begin);
    while (!number.empty() && (number.back() == '.' || number.back() == ',')) number.remove_suffix(1);
    if (std::any_of(number.begin(), number.end(), [](char c) { return c >= '0' && c <= '9'; }))
      return (begin > 0 && text[begin - 1] == '-' ? "-" : "") + without_commas(number);
    end = begin;
  }
  return std::nullopt;
}

struct Row {
  std::string question, answer, reference;
};

Result<std::vector<Row>> read_rows(const std::string& path) {
  ECHO_ASSIGN(const std::string content, read_file(path, kFileBytesMax));
  std::vector<Row> rows;
  std::size_t line_number = 0;
  for (std::size_t begin = 0; begin < content.size();) {
    const std::size_t end = std::min(content.find('\n', begin), content.size());
    const std::string_view line = std::string_view(content).substr(begin, end - begin);
    begin = end + 1;
    ++line_number;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const auto wrong = [&](std::string_view why) {
      return fail(Code::kInvalid, "read gsm8k", "{}:{}: {}", path, line_number, why);
    };
    const auto json = nlohmann::json::parse(line.begin(), line.end(), nullptr, /*allow_exceptions=*/false);
    if (!json.is_object()) return wrong("expected a JSON object with 'question' and 'answer'");
    for (const char* key : {"question", "answer"})
      if (!json.contains(key) || !json[key].is_string()) return wrong(fmt::format("expected a string '{}'", key));
    Row row{json["question"], json["answer"], {}};
    const auto reference = strict_answer(row.answer);
    if (!reference) return wrong("the answer must end in '#### ' and a number");
    row.reference = *reference;
    rows.push_back(std::move(row));
  }
  if (rows.empty()) return fail(Code::kInvalid, "read gsm8k", "{}: no problems in it", path);
  return rows;
}

class Gsm8k final : public Adapter {
 public:
  Gsm8k(std::vector<Row> train, std::vector<Row> test, bool flexible, std::uint64_t seed)
      : train_(std::move(train)), test_(std::move(test)), flexible_(flexible), key_(mix64(seed)) {}

  std::string_view name() const override { return "gsm8k"; }

  Result<Problem> problem(std::uint64_t index) const override {
    if (train_.empty())
      return fail(Code::kUnavailable, "gsm8k problem", "this adapter was made for scoring; it has read no problems");
    const std::uint64_t row = shuffled_cycle(index, train_.size(), key_);
    return made("train", row, train_[row]);
  }

  std::vector<Problem> evaluation() const override {
    std::vector<Problem> problems;
    for (std::size_t i = 0; i < test_.size(); ++i) problems.push_back(made("test", i, test_[i]));
    return problems;
  }

  Result<Score> score(const Problem& problem, std::string_view response) const override {
    const std::string_view graded = last_characters(response, kGradedCharacters);
    const auto strict = strict_answer(graded);
    const auto answer = flexible_ ? flexible_answer(graded) : strict;
    const bool correct = answer && *answer == problem.reference();
    return Score{correct ? 1.0 : 0.0, {{"exact", correct ? 1.0 : 0.0}, {"format", strict ? 1.0 : 0.0}}, correct};
  }

  std::optional<std::string> demonstration(const Problem& problem) const override {
    constexpr std::string_view kPrefix = "gsm8k/train/";
    if (!problem.id().starts_with(kPrefix)) return std::nullopt;
    std::size_t row = 0;
    for (const char c : std::string_view(problem.id()).substr(kPrefix.size())) {
      if (c < '0' || c > '9' || row >= train_.size()) return std::nullopt;
      row = row * 10 + static_cast<std::size_t>(c - '0');
    }
    if (row >= train_.size() || problem.id().size() == kPrefix.size()) return std::nullopt;
    return train_[row].answer;
  }

 private:
  static Problem made(std::string_view split, std::uint64_t row_number, const Row& row) {
    Problem problem;
    problem.set_id(fmt::format("gsm8k/{}/{}", split, row_number));
    problem.set_prompt(row.question);
    problem.set_reference(row.reference);
    return problem;
  }

  std::vector<Row> train_, test_;
  bool flexible_;
  std::uint64_t key_;
};

enum class Mode { kStrict, kFlexible };

struct Options {
  std::filesystem::path train, test;
  Mode mode = Mode::kStrict;

  void read(ConfigSection s, AdapterUse use) {
    const auto file = [&](const char* key, std::filesystem::path& path, const char* meaning) {
      if (use == AdapterUse::kProblems)
        s.require(key, path, meaning);
      else
        s.read(key, path, meaning);
    };
    file("train", train, "JSON Lines file of {question, answer} to train on; an answer ends in \"#### N\"");
    file("test", test, "the same for evaluation; what is in it is never trained on");
    s.read_choice("mode", mode, {{"strict", Mode::kStrict}, {"flexible", Mode::kFlexible}},
                  "what counts as the answer: the number after the last \"####\" (strict), or the last number (flexible)");
  }
};

Result<std::unique_ptr<Adapter>> make(std::string_view json, std::uint64_t seed, AdapterUse use) {
  ECHO_ASSIGN(const Options o, options_from_json<Options>("gsm8k", json, use));
  std::vector<Row> train, test;
  if (use == AdapterUse::kProblems) {
    ECHO_ASSIGN(train, read_rows(o.train));
    ECHO_ASSIGN(test, read_rows(o.test));
    std::set<std::string_view> held_out;
    for (const Row& row : test) held_out.insert(row.question);
    std::erase_if(train, [&](const Row& row) { return held_out.contains(row.question); });
    if (train.empty())
      return fail(Code::kInvalid, "", "every problem of '{}' is held out in '{}'", o.train.string(), o.test.string());
  }
  return std::unique_ptr<Adapter>(
      std::make_unique<Gsm8k>(std::move(train), std::move(test), o.mode == Mode::kFlexible, seed));
}

}  // namespace

const BuiltIn kGsm8k{"gsm8k", "Grade-school word problems from JSON Lines files; a right final number is worth 1",
                     [](ConfigSection s) { Options().read(s, AdapterUse::kProblems); }, make};

}  // namespace echoline::data_plane

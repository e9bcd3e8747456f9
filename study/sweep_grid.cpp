// The grid of a sweep. parse_over() reads "--over KEY=V,V,..."; expand() evaluates the values and lists the
// combinations. A value V is a number, a range "a..b", an expression over keys, or literal text (always if it is quoted
// or bracketed).
#include "study/sweep_grid.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>

#include "base/suggest.hpp"
#include "base/text.hpp"
#include "study/sweep_expression.hpp"

namespace echoline::study {
namespace {

constexpr std::size_t kValuesBytesMax = 64 << 10;
constexpr std::size_t kWrittenMax = 16;  // different texts of a cell's values; further ones are not kept
// Calls of Enumeration::run(); a limit of its own, because empty ranges cause calls but no cells.
constexpr std::size_t kEnumerationCallsMax = 100 * kSweepCellsMax;
constexpr std::array<std::pair<std::string_view, std::string_view>, 3> kShortNames{
    {{"S", "staleness.budget"}, {"kappa", "staleness.publish_every"}, {"G", "rollout.group_size"}}};

std::string_view trimmed(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(" \t");
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t") + 1 - begin);
}

Status check_key(std::string_view key) {
  constexpr std::size_t kKeyBytesMax = 256;
  const auto is_allowed = [](unsigned char c) { return std::isalnum(c) != 0 || c == '_' || c == '.' || c == '-'; };
  if (key.empty() || key.size() > kKeyBytesMax || !std::all_of(key.begin(), key.end(), is_allowed))
    return fail(Code::kInvalid, "", "expected a key such as staleness.budget, found '{}'", printable(key, 80));
  return ok();
}

// One value as written and as parsed.
struct ParsedValue {
  std::string text;                     // as written; it is the value if `expressions` is empty
  std::vector<Expression> expressions;  // one, or both ends of a range
};

// Returns the run file's number for a key, if the file has one.
using NumberLookup = std::function<std::optional<double>(const std::string&)>;

// Parses the text of one value.
class ValueParser {
 public:
  ValueParser(const std::vector<std::string>& keys, const NumberLookup& number_in_run_file)
      : keys_(keys), number_in_run_file_(number_in_run_file) {}

  Result<ParsedValue> parse(std::string_view text) const {
    text = trimmed(text);
    ParsedValue parsed_value = literal(text);
    if (text.empty()) return fail(Code::kInvalid, "", "a value is missing");
    const bool is_quoted_or_list = std::string_view("[{\"'").find(text.front()) != std::string_view::npos;
    if (is_quoted_or_list) return parsed_value;
    std::vector<std::string_view> ends{text};
    if (const std::size_t dots = text.find(".."); dots != std::string_view::npos)
      ends = {text.substr(0, dots), text.substr(dots + 2)};
    for (const std::string_view end : ends) {
      auto expression = Expression::parse(end);
      if (!expression) {
        if (ends.size() == 1 && mentions_swept_key(end)) return std::move(expression).error();
        return literal(text);
      }
      std::vector<std::string> unknown;
      for (const std::string& name : expression->names())
        if (!is_known(name)) unknown.push_back(name);
      if (!unknown.empty()) {
        // Unknown names alone are text. Beside a known name, or as the second end of a range, they are a mistake.
        const bool all_unknown = unknown.size() == expression->names().size();
        const bool is_first_end = parsed_value.expressions.empty();
        if (all_unknown && is_first_end) return literal(text);
        return fail(Code::kInvalid, "", "'{}': '{}' is neither a swept key nor a key with a number in the file{}", text,
                    unknown.front(), did_you_mean(unknown.front(), keys_));
      }
      // A plain number stays as written, for example 0.10, and is not rewritten as 0.1.
      if (ends.size() == 1 && expression->is_plain_number()) return parsed_value;
      parsed_value.expressions.push_back(std::move(*expression));
    }
    return parsed_value;
  }

 private:
  static ParsedValue literal(std::string_view text) { return {.text = std::string(text), .expressions = {}}; }
  bool is_swept(const std::string& name) const {
    return std::find(keys_.begin(), keys_.end(), full_key(name)) != keys_.end();
  }
  bool is_known(const std::string& name) const {
    return is_swept(name) || number_in_run_file_(full_key(name)).has_value();
  }
  // Whether a text that is no valid expression was meant as one: it contains an operator and the name of a swept key.
  bool mentions_swept_key(std::string_view text) const {
    if (text.find_first_of("+-*/()") == std::string_view::npos) return false;
    const auto is_word_char = [](char c) {
      return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '.';
    };
    for (std::size_t begin = 0; begin < text.size();) {
      std::size_t end = begin;
      while (end < text.size() && is_word_char(text[end])) ++end;
      if (end > begin && is_swept(std::string(text.substr(begin, end - begin)))) return true;
      begin = std::max(end, begin + 1);
    }
    return false;
  }

  const std::vector<std::string>& keys_;
  const NumberLookup& number_in_run_file_;
};

// One key of a combination, before evaluation.
struct Assignment {
  std::string key;
  const ParsedValue* parsed_value;
  const std::string* axis_source;  // where the user gave its axis
};

// Calls add() for each combination of the values of one set of assignments; a range has several values. Recursive:
// run() gives a value to the first key whose expression contains only evaluated names, and calls itself for the other
// keys.
class Enumeration {
 public:
  Enumeration(const std::vector<Assignment>& assignments, const std::vector<std::string>& keys,
              const NumberLookup& number_in_run_file,
              const std::function<Status(KeyValues values, KeyValues written)>& add, std::size_t& calls)
      : assignments_(assignments), keys_(keys), number_in_run_file_(number_in_run_file), add_(add), calls_(calls) {}

  Status run() {
    if (++calls_ > kEnumerationCallsMax)
      return fail(Code::kInvalid, "sweep", "too many combinations; expected at most {} cells", kSweepCellsMax);
    if (values_.size() == assignments_.size()) return add_(in_order(&Value::text), in_order(&Value::written));
    const auto next = std::find_if(assignments_.begin(), assignments_.end(),
                                   [&](const Assignment& a) { return !values_.contains(a.key) && is_ready(a); });
    if (next == assignments_.end()) return cycle_error();
    const ParsedValue& parsed_value = *next->parsed_value;
    if (parsed_value.expressions.empty())
      return enumerate_with(*next, {.text = parsed_value.text, .written = parsed_value.text});
    ECHO_ASSIGN(const double first, evaluate(*next, parsed_value.expressions.front()));
    if (parsed_value.expressions.size() == 1)
      return enumerate_with(*next, {.text = number_text(first), .written = parsed_value.text});
    ECHO_ASSIGN(const double last, evaluate(*next, parsed_value.expressions.back()));
    if (first != std::floor(first) || last != std::floor(last))
      return error_for(*next, fmt::format("expected whole numbers as ends of the range, found {} to {}",
                                          number_text(first), number_text(last)));
    if (last - first >= static_cast<double>(kSweepCellsMax))
      return error_for(*next, fmt::format("expected a range of at most {} numbers, found {} to {}", kSweepCellsMax,
                                          number_text(first), number_text(last)));
    for (double n = first; n <= last; n += 1)  // no value if last < first
      ECHO_TRY(enumerate_with(*next, {.text = number_text(n), .written = number_text(n)}));
    return ok();
  }

 private:
  struct Value {
    std::string text, written;  // evaluated; as the user wrote it, or a number of the range
  };

  static Error error_for(const Assignment& a, std::string_view why) {
    return fail(Code::kInvalid, "", "{}: {}: {}", *a.axis_source, a.parsed_value->text, why);
  }

  bool is_assigned_key(const std::string& key) const {
    return std::any_of(assignments_.begin(), assignments_.end(), [&](const Assignment& a) { return a.key == key; });
  }
  bool is_ready(const Assignment& a) const {
    for (const Expression& expression : a.parsed_value->expressions)
      for (const std::string& name : expression.names())
        if (const std::string key = full_key(name); is_assigned_key(key) && !values_.contains(key)) return false;
    return true;
  }
  // Returns the error for the case that no assignment is ready, although some keys have no value yet.
  Error cycle_error() const {
    for (const Assignment& a : assignments_)
      if (!values_.contains(a.key)) return error_for(a, "its value depends on itself");
    return {};  // not reached
  }

  // Evaluates the expression with the values so far and the numbers of the file.
  Result<double> evaluate(const Assignment& a, const Expression& expression) const {
    auto value = expression.value([&](const std::string& name) -> std::optional<double> {
      const std::string key = full_key(name);
      const auto it = values_.find(key);
      if (it == values_.end()) return number_in_run_file_(key);
      const auto parsed = Expression::parse(it->second.text);
      if (!parsed || !parsed->names().empty()) return std::nullopt;
      const auto number = parsed->value([](const std::string&) { return std::nullopt; });
      return number ? std::optional(*number) : std::nullopt;
    });
    if (!value) return error_for(a, value.error().detail);
    return value;
  }

  // Enumerates the combinations in which the key has this value.
  Status enumerate_with(const Assignment& a, const Value& value) {
    values_[a.key] = value;
    const Status status = run();
    values_.erase(a.key);
    return status;
  }

  // One part of all values, in the order of the swept keys: `&Value::text` (evaluated) or `&Value::written` (as the
  // user wrote it).
  KeyValues in_order(std::string Value::*part) const {
    KeyValues ordered;
    for (const std::string& key : keys_)
      if (const auto it = values_.find(key); it != values_.end()) ordered.emplace_back(key, it->second.*part);
    return ordered;
  }

  const std::vector<Assignment>& assignments_;
  const std::vector<std::string>& keys_;
  const NumberLookup& number_in_run_file_;
  const std::function<Status(KeyValues values, KeyValues written)>& add_;
  std::size_t& calls_;  // of run(), counted over all sets of assignments
  std::map<std::string, Value> values_;
};

}  // namespace

std::string full_key(std::string_view key) {
  for (const auto& [short_name, full_name] : kShortNames)
    if (key == short_name) return std::string(full_name);
  return std::string(key);
}

std::string short_key(std::string_view key) {
  for (const auto& [short_name, full_name] : kShortNames)
    if (key == full_name) return std::string(short_name);
  return std::string(key);
}

Result<std::vector<std::string>> split_values(std::string_view text) {
  if (text.size() > kValuesBytesMax)
    return fail(Code::kInvalid, "", "expected at most {} bytes, found {}", kValuesBytesMax, text.size());
  std::vector<std::string> values;
  std::size_t begin = 0, depth = 0;
  char quote = 0;
  for (std::size_t i = 0; i <= text.size(); ++i) {
    const char c = i < text.size() ? text[i] : ',';  // a comma ends the last value
    if (i == text.size() && (quote != 0 || depth != 0))
      return fail(Code::kInvalid, "", "'{}': unclosed {}", printable(text, 80), quote != 0 ? "quote" : "bracket");
    if (quote != 0) {
      if (c == quote) quote = 0;
    } else if ((c == '"' || c == '\'') && trimmed(text.substr(begin, i - begin)).empty()) {
      quote = c;  // only at the start of a value; inside a word it is an apostrophe
    } else if (c == '(' || c == '[' || c == '{') {
      ++depth;
    } else if ((c == ')' || c == ']' || c == '}') && depth > 0) {
      --depth;
    } else if (c == ',' && depth == 0) {
      values.emplace_back(trimmed(text.substr(begin, i - begin)));
      begin = i + 1;
    }
  }
  return values;
}

Result<SweepAxis> parse_over(std::string_view text) {
  const auto with_option_name = [&](const Error& error) {
    return fail(Code::kInvalid, "", "--over {}: {}", printable(text, 120), error.detail);
  };
  const std::size_t equals = text.find('=');
  if (equals == std::string_view::npos)
    return with_option_name(fail(Code::kInvalid, "", "expected KEY=VALUE,VALUE,... such as staleness.budget=1,3,6"));
  const std::string key = full_key(trimmed(text.substr(0, equals)));
  if (const Status status = check_key(key); !status) return with_option_name(status.error());
  const auto values = split_values(text.substr(equals + 1));
  if (!values) return with_option_name(values.error());
  SweepAxis axis{.source = fmt::format("--over {}", printable(text, 120)), .points = {}};
  for (const std::string& value : *values) axis.points.push_back({{key, value}});
  return axis;
}

std::vector<std::string> swept_keys(const std::vector<SweepAxis>& axes) {
  std::vector<std::string> keys;
  for (const SweepAxis& axis : axes)
    for (const KeyValues& point : axis.points)
      for (const auto& [key, value] : point)
        if (std::find(keys.begin(), keys.end(), key) == keys.end()) keys.push_back(key);
  return keys;
}

Result<std::vector<GridCell>> expand(const std::vector<SweepAxis>& axes, const NumberLookup& number_in_run_file) {
  const std::vector<std::string> keys = swept_keys(axes);
  if (keys.size() > kSweptKeysMax)
    return fail(Code::kInvalid, "sweep", "expected at most {} swept keys, found {}", kSweptKeysMax, keys.size());
  const ValueParser value_parser(keys, number_in_run_file);
  std::vector<std::vector<std::vector<std::pair<std::string, ParsedValue>>>> parsed_values;  // by axis, point, key
  std::map<std::string, const SweepAxis*> axis_of;
  std::size_t combinations = 1;
  for (const SweepAxis& axis : axes) {
    auto& points = parsed_values.emplace_back();
    if (axis.points.empty()) return fail(Code::kInvalid, "", "{}: expected at least one value", axis.source);
    combinations *= axis.points.size();
    if (combinations > kSweepCellsMax)
      return fail(Code::kInvalid, "", "{}: expected at most {} cells in all", axis.source, kSweepCellsMax);
    for (const KeyValues& point : axis.points) {
      points.emplace_back();
      for (const auto& [key, text] : point) {
        if (const Status status = check_key(key); !status)
          return fail(Code::kInvalid, "", "{}: {}", axis.source, status.error().detail);
        if (const auto [it, is_new] = axis_of.emplace(key, &axis); !is_new && it->second != &axis)
          return fail(Code::kInvalid, "", "{}: '{}' is already swept by {}", axis.source, key, it->second->source);
        const auto is_key = [&name = key](const auto& each) { return each.first == name; };
        if (std::any_of(points.back().begin(), points.back().end(), is_key))
          return fail(Code::kInvalid, "", "{}: '{}' is there twice", axis.source, key);
        auto parsed_value = value_parser.parse(text);
        if (!parsed_value) return fail(Code::kInvalid, "", "{}: {}", axis.source, parsed_value.error().detail);
        points.back().emplace_back(key, std::move(*parsed_value));
      }
    }
  }
  std::vector<GridCell> cells;
  std::map<KeyValues, std::size_t> index_by_values;
  const std::function<Status(KeyValues, KeyValues)> add = [&](KeyValues values, KeyValues written) -> Status {
    const auto [it, is_new] = index_by_values.emplace(values, cells.size());
    if (is_new && cells.size() == kSweepCellsMax)
      return fail(Code::kInvalid, "sweep", "expected at most {} cells", kSweepCellsMax);
    if (is_new) cells.push_back({.values = std::move(values), .written = {}});
    auto& written_forms = cells[it->second].written;
    if (std::find(written_forms.begin(), written_forms.end(), written) == written_forms.end() &&
        written_forms.size() < kWrittenMax)
      written_forms.push_back(std::move(written));
    return ok();
  };
  std::size_t calls = 0;
  for (std::size_t combination = 0; combination < combinations; ++combination) {
    std::vector<Assignment> assignments;
    // Splits the number into one index for each axis; the last axis changes fastest.
    std::size_t remainder = combination, stride = combinations;
    for (std::size_t a = 0; a < axes.size(); ++a) {
      stride /= parsed_values[a].size();
      for (const auto& [key, parsed_value] : parsed_values[a][remainder / stride])
        assignments.push_back({.key = key, .parsed_value = &parsed_value, .axis_source = &axes[a].source});
      remainder %= stride;
    }
    ECHO_TRY(Enumeration(assignments, keys, number_in_run_file, add, calls).run());
  }
  if (cells.empty()) return fail(Code::kInvalid, "sweep", "the sweep has no cells: every range is empty");
  return cells;
}

}  // namespace echoline::study

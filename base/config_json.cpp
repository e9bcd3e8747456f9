// Parses JSON into the tree of a run file, in one pass and without YAML, for data larger than run files.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/config_tree.hpp"
#include "base/text.hpp"

namespace echoline {
namespace {

using Kind = ConfigNode::Kind;

constexpr std::size_t kReasonBytesMax = 300;

struct UnusableText {
  ConfigPlace place;
  std::string message;
};

// Parses text that is known to be valid JSON, so it checks neither the end of the text nor separators.
class Builder {
 public:
  Builder(std::string_view text, std::uint32_t source, std::vector<ConfigProblem>& problems)
      : text_(text), source_(source), problems_(problems) {}

  ConfigNode parse_value(std::size_t depth) {
    skip_space();
    ConfigNode node;
    node.place = place();
    if (++values_ > kDataValuesMax) throw UnusableText{node.place, fmt::format("more than {} values", kDataValuesMax)};
    if (depth > kConfigDepthMax)
      throw UnusableText{node.place, fmt::format("nested deeper than {} levels", kConfigDepthMax)};
    const char c = text_[offset_];
    if (c == '{' || c == '[') {
      parse_children(node, c, depth);
    } else if (c == '"') {
      node.kind = Kind::kScalar;
      node.quoted = true;
      node.text = parse_string();
    } else {
      const std::size_t end = text_.find_first_of(" \t\r\n,]}", offset_);
      node.text = text_.substr(offset_, end - offset_);
      offset_ = std::min(end, text_.size());
      node.kind = node.text == "null" ? Kind::kNull : Kind::kScalar;
    }
    return node;
  }

 private:
  ConfigPlace place() const { return {source_, line_, static_cast<int>(offset_ - line_start_) + 1}; }

  void skip_space() {
    for (; offset_ < text_.size(); ++offset_) {
      const char c = text_[offset_];
      if (c != ' ' && c != '\t' && c != '\r' && c != '\n') return;
      if (c != '\n') continue;
      ++line_;
      line_start_ = offset_ + 1;
    }
  }

  void parse_children(ConfigNode& node, char opening, std::size_t depth) {
    const char closing = opening == '{' ? '}' : ']';
    node.kind = opening == '{' ? Kind::kMapping : Kind::kSequence;
    ++offset_;
    for (skip_space(); text_[offset_] != closing; skip_space()) {
      if (text_[offset_] == ',') {
        ++offset_;
        continue;
      }
      if (opening == '[') {
        node.children.push_back(parse_value(depth + 1));
        continue;
      }
      node.key_places.push_back(place());
      node.keys.push_back(parse_string());
      skip_space();
      ++offset_;  // ':'
      node.children.push_back(parse_value(depth + 1));
    }
    ++offset_;
    drop_duplicates(node, problems_);
  }

  std::string parse_string() {
    const std::size_t begin = offset_++;
    for (; text_[offset_] != '"'; ++offset_)
      if (text_[offset_] == '\\') ++offset_;
    const std::string_view quoted = text_.substr(begin, ++offset_ - begin);
    if (quoted.find('\\') == std::string_view::npos) return std::string(quoted.substr(1, quoted.size() - 2));
    // The library resolves escapes.
    return nlohmann::json::parse(quoted.begin(), quoted.end()).get<std::string>();
  }

  std::string_view text_;
  std::uint32_t source_;
  std::vector<ConfigProblem>& problems_;
  std::size_t offset_ = 0, line_start_ = 0, values_ = 0;
  int line_ = 1;
};

}  // namespace

bool parse_json(std::string_view text, std::uint32_t source, ConfigNode& root, std::vector<ConfigProblem>& problems) {
  // Checks the whole text first, so that Builder needs no error handling.
  if (!nlohmann::json::accept(text.begin(), text.end())) {
    ConfigPlace place{source, 1, 1};
    std::string message = "expected JSON";
    try {
      [[maybe_unused]] const auto unused = nlohmann::json::parse(text.begin(), text.end());
    } catch (const nlohmann::json::parse_error& error) {
      const std::string_view before = text.substr(0, std::min<std::size_t>(error.byte, text.size()));
      place.line += static_cast<int>(std::count(before.begin(), before.end(), '\n'));
      place.column = std::max(1, static_cast<int>(before.size() - (before.rfind('\n') + 1)));
      message = error.what();  // "[json.exception...] parse error at line 1, column 2: what was expected"
      if (const auto colon = message.find(": "); colon != std::string::npos) message.erase(0, colon + 2);
      if (message.size() > kReasonBytesMax)
        message = printable(message, kReasonBytesMax);  // the message quotes the input
    } catch (const nlohmann::json::exception&) {
      message = "expected JSON, found a number out of range";
    }
    problems.push_back({place, message});
    return false;
  }
  try {
    root = Builder(text, source, problems).parse_value(/*depth=*/0);
  } catch (const UnusableText& unusable) {
    problems.push_back({unusable.place, unusable.message});
    return false;
  }
  return true;
}

}  // namespace echoline

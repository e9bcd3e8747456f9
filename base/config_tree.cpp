#include "base/config_tree.hpp"

#include <yaml-cpp/emitter.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/parser.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

namespace echoline {
namespace {

using Kind = ConfigNode::Kind;

// Ends the parse: the document cannot be used.
struct Unusable {
  ConfigPlace place;
  std::string message;
};

// Builds the tree from yaml-cpp's events, so that every limit holds before memory is spent.
class Builder : public YAML::EventHandler {
 public:
  Builder(std::uint32_t source, ConfigNode& root, std::vector<ConfigProblem>& problems, std::size_t values_max)
      : source_(source), root_(root), problems_(problems), values_max_(values_max) {}

  ConfigPlace place(const YAML::Mark& mark) const {
    return {source_, std::max(mark.line, 0) + 1, std::max(mark.column, 0) + 1};
  }

  void OnDocumentStart(const YAML::Mark&) override {}
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override { deliver(make(Kind::kNull, mark, "", anchor)); }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override {
    throw Unusable{place(mark), "aliases ('*name') are not supported; write the value out"};
  }
  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& text) override {
    ConfigNode node = make(Kind::kScalar, mark, tag, anchor);
    node.text = text;
    node.quoted = tag == "!";
    deliver(std::move(node));
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    open(make(Kind::kSequence, mark, tag, anchor));
  }
  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    open(make(Kind::kMapping, mark, tag, anchor));
  }
  void OnSequenceEnd() override { close(); }
  void OnMapEnd() override { close(); }

 private:
  // A collection being filled.
  struct Level {
    ConfigNode node;
    std::map<std::string, int> line_of_key;
    bool value_next = false;  // in a mapping: the key has come, its value has not
    bool drop_value = false;  // the key was a duplicate
  };

  ConfigNode make(Kind kind, const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor) {
    if (anchor != 0) throw Unusable{place(mark), "anchors ('&name') are not supported; write the value out"};
    if (!tag.empty() && tag != "?" && tag != "!")
      throw Unusable{place(mark), fmt::format("tags are not supported, found '{}'", tag)};
    if (++values_ > values_max_) throw Unusable{place(mark), fmt::format("more than {} values", values_max_)};
    ConfigNode node;
    node.kind = kind;
    node.place = place(mark);
    return node;
  }

  void open(ConfigNode node) {
    if (levels_.size() >= kConfigDepthMax)
      throw Unusable{node.place, fmt::format("nested deeper than {} levels", kConfigDepthMax)};
    levels_.push_back({std::move(node), {}, false, false});
  }

  void close() {
    ConfigNode node = std::move(levels_.back().node);
    levels_.pop_back();
    deliver(std::move(node));
  }

  void deliver(ConfigNode node) {
    if (levels_.empty()) {
      root_ = std::move(node);
      return;
    }
    Level& level = levels_.back();
    if (level.node.kind == Kind::kSequence) {
      level.node.children.push_back(std::move(node));
    } else if (!level.value_next) {
      if (node.kind != Kind::kScalar) throw Unusable{node.place, "expected a word as the key of a mapping"};
      const auto [first, is_new] = level.line_of_key.emplace(node.text, node.place.line);
      level.drop_value = !is_new;
      level.value_next = true;
      if (is_new) {
        level.node.keys.push_back(std::move(node.text));
        level.node.key_places.push_back(node.place);
      } else {
        problems_.push_back(
            {node.place, fmt::format("duplicate key '{}'; it is already set in line {}", node.text, first->second)});
      }
    } else {
      if (!level.drop_value) level.node.children.push_back(std::move(node));
      level.value_next = false;
    }
  }

  std::uint32_t source_;
  ConfigNode& root_;
  std::vector<ConfigProblem>& problems_;
  std::vector<Level> levels_;
  std::size_t values_max_;
  std::size_t values_ = 0;
};

// Length of the UTF-8 character at the start of `text`, or 0 when there is no valid one.
std::size_t utf8_length(std::string_view text) {
  const auto byte = [&](std::size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
  const unsigned lead = byte(0);
  if (lead < 0x80) return 1;
  const std::size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  unsigned code = lead & (0x7f >> length);
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
    code = code << 6 | (byte(i) & 0x3f);
  }
  constexpr unsigned kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool surrogate = code >= 0xd800 && code <= 0xdfff;
  return lead < 0xc2 || lead > 0xf4 || code < kLeast[length] || code > 0x10ffff || surrogate ? 0 : length;
}

// A run file is UTF-8 text, so that what is read can be written back and turned into JSON unchanged.
void check_text(std::string_view text, std::uint32_t source) {
  ConfigPlace place{source, 1, 1};
  for (std::size_t i = 0; i < text.size();) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const std::size_t length = utf8_length(text.substr(i));
    if (length == 0 || byte == 0x7f || (byte < 0x20 && byte != '\n' && byte != '\t' && byte != '\r'))
      throw Unusable{place, fmt::format("expected UTF-8 text, found the byte 0x{:02x}", byte)};
    i += length;
    ++place.column;
    if (byte == '\n') place = {source, place.line + 1, 1};
  }
}

void emit_text(YAML::Emitter& out, const std::string& text, bool quoted) {
  // Control characters survive only in double quotes.
  if (quoted || std::any_of(text.begin(), text.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; }))
    out << YAML::DoubleQuoted;
  out << text;
}

void emit(YAML::Emitter& out, const ConfigNode& node) {
  switch (node.kind) {
    case Kind::kNull:
      out << YAML::Null;
      break;
    case Kind::kScalar:
      emit_text(out, node.text, node.quoted);
      break;
    case Kind::kSequence:
      if (node.children.empty()) out << YAML::Flow;
      out << YAML::BeginSeq;
      for (const ConfigNode& child : node.children) emit(out, child);
      out << YAML::EndSeq;
      break;
    case Kind::kMapping:
      if (node.children.empty()) out << YAML::Flow;
      out << YAML::BeginMap;
      for (std::size_t i = 0; i < node.keys.size(); ++i) {
        out << YAML::Key;
        emit_text(out, node.keys[i], false);
        out << YAML::Value;
        emit(out, node.children[i]);
      }
      out << YAML::EndMap;
      break;
  }
}

nlohmann::ordered_json json_scalar(const std::string& text) {
  if (text == "true") return true;
  if (text == "false") return false;
  if (std::int64_t whole = 0; parse_whole(text, whole)) return whole;
  if (std::uint64_t whole = 0; parse_whole(text, whole)) return whole;
  if (double decimal = 0; parse_decimal(text, decimal)) return decimal;
  return text;
}

nlohmann::ordered_json json_value(const ConfigNode& node) {
  switch (node.kind) {
    case Kind::kNull:
      return nullptr;
    case Kind::kScalar:
      return node.quoted || node.is_text ? nlohmann::ordered_json(node.text) : json_scalar(node.text);
    case Kind::kSequence: {
      auto array = nlohmann::ordered_json::array();
      for (const ConfigNode& child : node.children) array.push_back(json_value(child));
      return array;
    }
    case Kind::kMapping: {
      auto object = nlohmann::ordered_json::object();
      for (std::size_t i = 0; i < node.keys.size(); ++i) object[node.keys[i]] = json_value(node.children[i]);
      return object;
    }
  }
  return nullptr;
}

template <class T>
bool parse_whole_as(std::string_view text, T& value) {
  std::string digits;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto digit = [&](std::size_t at) { return at < text.size() && text[at] >= '0' && text[at] <= '9'; };
    if (text[i] == '_' && i > 0 && digit(i - 1) && digit(i + 1)) continue;
    digits += text[i];
  }
  const char* end = digits.data() + digits.size();
  const auto [stop, error] = std::from_chars(digits.data(), end, value);
  return error == std::errc{} && stop == end && !digits.empty();
}

}  // namespace

ConfigNode* ConfigNode::find(std::string_view key) {
  const auto it = std::find(keys.begin(), keys.end(), key);
  return it == keys.end() ? nullptr : &children[static_cast<std::size_t>(it - keys.begin())];
}

bool parse_yaml(std::string_view text, std::uint32_t source, ConfigNode& root, std::vector<ConfigProblem>& problems,
                bool data) {
  const ConfigPlace start{source, 1, 1};
  if (const std::size_t most = data ? kDataBytesMax : kConfigBytesMax; text.size() > most) {
    problems.push_back({start, fmt::format("expected at most {} bytes, found {}", most, text.size())});
    return false;
  }
  root = ConfigNode{};
  root.place = start;
  const std::size_t values_max = data ? kDataValuesMax : kConfigValuesMax;
  Builder builder(source, root, problems, values_max);
  try {
    check_text(text, source);
    std::istringstream in{std::string(text)};
    YAML::Parser parser(in);
    parser.HandleNextDocument(builder);
    ConfigNode ignored;
    Builder rest(source, ignored, problems, values_max);
    if (parser.HandleNextDocument(rest)) throw Unusable{ignored.place, "expected one YAML document, found another"};
    return true;
  } catch (const Unusable& e) {
    problems.push_back({e.place, e.message});
  } catch (const YAML::Exception& e) {
    problems.push_back({builder.place(e.mark), "not valid YAML: " + e.msg});
  }
  return false;
}

bool parse_set_value(std::string_view text, std::uint32_t source, ConfigNode& root,
                     std::vector<ConfigProblem>& problems) {
  const std::size_t begin = std::min(text.find_first_not_of(" \t\r\n"), text.size());
  if (begin < text.size() && std::string_view("{[\"'").find(text[begin]) != std::string_view::npos)
    return parse_yaml(text, source, root, problems);
  text = text.substr(begin, text.find_last_not_of(" \t\r\n") + 1 - begin);
  root = ConfigNode{};
  root.place = {source, 1, 1};
  root.text = text;
  for (const char* null : {"", "~", "null", "Null", "NULL"})
    if (text == null) return true;
  root.kind = Kind::kScalar;
  try {
    check_text(text, source);
    if (text.size() <= kConfigBytesMax) return true;
    problems.push_back({root.place, fmt::format("expected at most {} bytes, found {}", kConfigBytesMax, text.size())});
  } catch (const Unusable& e) {
    problems.push_back({e.place, e.message});
  }
  return false;
}

std::string to_yaml(const ConfigNode& node) {
  YAML::Emitter out;
  emit(out, node);
  return std::string(out.c_str(), out.size()) + "\n";
}

std::string to_json(const ConfigNode& node) { return json_value(node).dump(); }

bool parse_whole(std::string_view text, std::int64_t& value) { return parse_whole_as(text, value); }
bool parse_whole(std::string_view text, std::uint64_t& value) { return parse_whole_as(text, value); }

bool parse_decimal(std::string_view text, double& value) {
  std::int64_t whole = 0;
  if (parse_whole(text, whole)) {
    value = static_cast<double>(whole);
    return true;
  }
  double parsed = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, parsed);
  if (error != std::errc{} || stop != end || !std::isfinite(parsed)) return false;
  value = parsed;
  return true;
}

}  // namespace echoline

// Parses and writes YAML with libyaml, for ConfigFile.
#include "base/config_tree.hpp"

#include <yaml.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>

namespace echoline {
namespace {

using Kind = ConfigNode::Kind;

// Ends the parse, because the document is unusable.
struct UnusableText {
  ConfigPlace place;
  std::string message;
};

// Whether a plain scalar means that there is no value.
bool is_null(std::string_view text) {
  for (const char* null : {"", "~", "null", "Null", "NULL"})
    if (text == null) return true;
  return false;
}

// Builds the tree from libyaml's events instead of libyaml's documents, so that every limit applies before memory is
// allocated.
class Builder {
 public:
  Builder(std::string_view text, std::uint32_t source, std::vector<ConfigProblem>& problems, std::size_t values_max)
      : source_(source), problems_(problems), values_max_(values_max) {
    ECHO_CHECK(yaml_parser_initialize(&parser_) == 1, "out of memory");
    yaml_parser_set_input_string(&parser_, reinterpret_cast<const unsigned char*>(text.data()), text.size());
  }
  ~Builder() {
    yaml_event_delete(&event_);
    yaml_parser_delete(&parser_);
  }
  Builder(const Builder&) = delete;
  Builder& operator=(const Builder&) = delete;

  // Reads the document's value; leaves `root` unchanged if there is none.
  void read_document(ConfigNode& root) {
    std::size_t documents = 0;
    for (yaml_event_type_t type = next_event(); type != YAML_STREAM_END_EVENT; type = next_event()) {
      if (type != YAML_DOCUMENT_START_EVENT) continue;
      if (++documents > 1) throw UnusableText{place(event_.start_mark), "expected one YAML document, found another"};
      next_event();
      root = read_value(/*depth=*/0);
    }
  }

 private:
  ConfigPlace place(const yaml_mark_t& mark) const {
    return {source_, static_cast<int>(mark.line) + 1, static_cast<int>(mark.column) + 1};
  }

  yaml_event_type_t next_event() {
    yaml_event_delete(&event_);
    if (yaml_parser_parse(&parser_, &event_) != 1) {
      std::string why = fmt::format("not valid YAML: {}", parser_.problem ? parser_.problem : "it cannot be read");
      if (parser_.context) why += fmt::format(" {}", parser_.context);
      throw UnusableText{place(parser_.problem_mark), why};
    }
    return event_.type;
  }

  // Reads the value that begins with the current event, and leaves its last event current.
  ConfigNode read_value(std::size_t depth) {
    ConfigNode node;
    node.place = place(event_.start_mark);
    switch (event_.type) {
      case YAML_SCALAR_EVENT: {
        const auto& scalar = event_.data.scalar;
        check_node(node, scalar.anchor, scalar.tag);
        node.quoted = scalar.style != YAML_PLAIN_SCALAR_STYLE;
        node.text.assign(reinterpret_cast<const char*>(scalar.value), scalar.length);
        if (!node.quoted && is_null(node.text))
          node.text.clear();
        else
          node.kind = Kind::kScalar;
        break;
      }
      case YAML_SEQUENCE_START_EVENT:
        check_node(node, event_.data.sequence_start.anchor, event_.data.sequence_start.tag);
        check_depth(node, depth);
        node.kind = Kind::kSequence;
        while (next_event() != YAML_SEQUENCE_END_EVENT) node.children.push_back(read_value(depth + 1));
        break;
      case YAML_MAPPING_START_EVENT:
        check_node(node, event_.data.mapping_start.anchor, event_.data.mapping_start.tag);
        check_depth(node, depth);
        node.kind = Kind::kMapping;
        while (next_event() != YAML_MAPPING_END_EVENT) {
          ConfigNode key = read_value(depth + 1);
          if (key.kind != Kind::kScalar) throw UnusableText{key.place, "expected a word as the key of a mapping"};
          node.keys.push_back(std::move(key.text));
          node.key_places.push_back(key.place);
          next_event();
          node.children.push_back(read_value(depth + 1));
        }
        drop_duplicates(node, problems_);
        break;
      default:  // an alias: no other event can begin a value
        throw UnusableText{node.place, "aliases ('*name') are not supported; write the value out"};
    }
    return node;
  }

  void check_node(const ConfigNode& node, const yaml_char_t* anchor, const yaml_char_t* tag) {
    if (anchor != nullptr) throw UnusableText{node.place, "anchors ('&name') are not supported; write the value out"};
    if (tag != nullptr)
      throw UnusableText{node.place,
                         fmt::format("tags are not supported, found '{}'", reinterpret_cast<const char*>(tag))};
    if (++values_ > values_max_) throw UnusableText{node.place, fmt::format("more than {} values", values_max_)};
  }

  static void check_depth(const ConfigNode& node, std::size_t depth) {
    if (depth >= kConfigDepthMax)
      throw UnusableText{node.place, fmt::format("nested deeper than {} levels", kConfigDepthMax)};
  }

  std::uint32_t source_;
  std::vector<ConfigProblem>& problems_;
  std::size_t values_max_;
  std::size_t values_ = 0;
  yaml_parser_t parser_{};
  yaml_event_t event_{};
};

// Length of the UTF-8 character at the start of `text`; 0 if it is invalid.
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
  // Leads below 0xc2 are continuation bytes, or begin characters that have a shorter form.
  const bool is_lead = lead >= 0xc2 && lead <= 0xf4;
  // The smallest code of each length; a smaller one has a shorter form.
  constexpr unsigned kCodeMin[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool is_surrogate = code >= 0xd800 && code <= 0xdfff;
  return is_lead && code >= kCodeMin[length] && code <= 0x10ffff && !is_surrogate ? length : 0;
}

// Requires UTF-8 text, so that it can be written and converted to JSON unchanged.
void check_text(std::string_view text, std::uint32_t source) {
  ConfigPlace place{source, 1, 1};
  for (std::size_t i = 0; i < text.size();) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const std::size_t length = utf8_length(text.substr(i));
    if (length == 0 || byte == 0x7f || (byte < 0x20 && byte != '\n' && byte != '\t' && byte != '\r'))
      throw UnusableText{place, fmt::format("expected UTF-8 text, found the byte 0x{:02x}", byte)};
    const std::string_view c = text.substr(i, length);
    // YAML excludes these too: the C1 controls 0x80 to 0x9f except NEL (0x85), and non-characters. Continuation bytes
    // are all 0x80 or above, so comparing signed chars orders them as unsigned bytes.
    if ((byte == 0xc2 && c[1] < '\xa0' && c[1] != '\x85') || c == "\xef\xbf\xbe" || c == "\xef\xbf\xbf")
      throw UnusableText{place, "expected UTF-8 text, found a control character"};
    i += length;
    ++place.column;
    if (byte == '\n') place = {source, place.line + 1, 1};
  }
}

// Writes a tree through libyaml.
class Writer {
 public:
  Writer() {
    ECHO_CHECK(yaml_emitter_initialize(&emitter_) == 1, "out of memory");
    yaml_emitter_set_unicode(&emitter_, 1);
    yaml_emitter_set_width(&emitter_, -1);  // no line is folded
    yaml_emitter_set_output(
        &emitter_,
        [](void* out, unsigned char* bytes, std::size_t size) {
          static_cast<std::string*>(out)->append(reinterpret_cast<const char*>(bytes), size);
          return 1;
        },
        &out_);
  }
  ~Writer() { yaml_emitter_delete(&emitter_); }
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  std::string write(const ConfigNode& root) {
    yaml_event_t event;
    emit(event, yaml_stream_start_event_initialize(&event, YAML_UTF8_ENCODING));
    emit(event, yaml_document_start_event_initialize(&event, nullptr, nullptr, nullptr, /*implicit=*/1));
    write_node(root);
    emit(event, yaml_document_end_event_initialize(&event, /*implicit=*/1));
    emit(event, yaml_stream_end_event_initialize(&event));
    return std::move(out_);
  }

 private:
  void emit(yaml_event_t& event, int initialized) {
    ECHO_CHECK(initialized == 1 && yaml_emitter_emit(&emitter_, &event) == 1, "YAML cannot be written: {}",
               emitter_.problem ? emitter_.problem : "out of memory");
  }

  void write_scalar(const std::string& text, yaml_scalar_style_t style) {
    yaml_event_t event;
    const auto* bytes = reinterpret_cast<const yaml_char_t*>(text.data());
    const auto size = static_cast<int>(text.size());
    emit(event, yaml_scalar_event_initialize(&event, nullptr, nullptr, bytes, size, /*plain_implicit=*/1,
                                             /*quoted_implicit=*/1, style));
  }

  void write_text(const std::string& text, bool quoted) {
    // Line breaks and control characters survive only in double quotes.
    const bool needs_quotes =
        std::any_of(text.begin(), text.end(), [](unsigned char c) { return c < 0x20 || c >= 0x7f; });
    write_scalar(text,
                 quoted || needs_quotes || is_null(text) ? YAML_DOUBLE_QUOTED_SCALAR_STYLE : YAML_PLAIN_SCALAR_STYLE);
  }

  void write_node(const ConfigNode& node) {
    const bool empty = node.children.empty();
    yaml_event_t event;
    switch (node.kind) {
      case Kind::kNull:
        write_scalar("~", YAML_PLAIN_SCALAR_STYLE);
        break;
      case Kind::kScalar:
        write_text(node.text, node.quoted);
        break;
      case Kind::kSequence:
        emit(event, yaml_sequence_start_event_initialize(&event, nullptr, nullptr, /*implicit=*/1,
                                                         empty ? YAML_FLOW_SEQUENCE_STYLE : YAML_BLOCK_SEQUENCE_STYLE));
        for (const ConfigNode& child : node.children) write_node(child);
        emit(event, yaml_sequence_end_event_initialize(&event));
        break;
      case Kind::kMapping:
        emit(event, yaml_mapping_start_event_initialize(&event, nullptr, nullptr, /*implicit=*/1,
                                                        empty ? YAML_FLOW_MAPPING_STYLE : YAML_BLOCK_MAPPING_STYLE));
        for (std::size_t i = 0; i < node.keys.size(); ++i) {
          write_text(node.keys[i], /*quoted=*/false);
          write_node(node.children[i]);
        }
        emit(event, yaml_mapping_end_event_initialize(&event));
        break;
    }
  }

  yaml_emitter_t emitter_{};
  std::string out_;
};

nlohmann::ordered_json json_scalar(const std::string& text) {
  if (text == "true") return true;
  if (text == "false") return false;
  if (std::int64_t integer = 0; parse_integer(text, integer)) return integer;
  if (std::uint64_t integer = 0; parse_integer(text, integer)) return integer;
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
bool parse_integer_as(std::string_view text, T& value) {
  std::string digits;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto is_digit = [&](std::size_t index) {
      return index < text.size() && text[index] >= '0' && text[index] <= '9';
    };
    // "1_000" is 1000.
    if (text[i] == '_' && i > 0 && is_digit(i - 1) && is_digit(i + 1)) continue;
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

void drop_duplicates(ConfigNode& mapping, std::vector<ConfigProblem>& problems) {
  std::vector<std::uint32_t> order(mapping.keys.size());  // indexes of the keys by name; equal ones in file order
  std::iota(order.begin(), order.end(), 0u);
  const auto key = [&](std::uint32_t i) -> const std::string& { return mapping.keys[i]; };
  std::sort(order.begin(), order.end(), [&](auto a, auto b) { return key(a) != key(b) ? key(a) < key(b) : a < b; });
  std::vector<std::uint32_t> duplicates;
  for (std::size_t i = 1, first = 0; i < order.size(); ++i) {
    if (key(order[i]) != key(order[first])) {
      first = i;
      continue;
    }
    duplicates.push_back(order[i]);
    problems.push_back(
        {mapping.key_places[order[i]], fmt::format("duplicate key '{}'; it is already set in line {}", key(order[i]),
                                                   mapping.key_places[order[first]].line)});
  }
  if (duplicates.empty()) return;
  std::sort(duplicates.begin(), duplicates.end());
  const auto drop_from = [&](auto& values) {
    std::size_t kept_count = 0;
    for (std::size_t i = 0; i < values.size(); ++i)
      if (!std::binary_search(duplicates.begin(), duplicates.end(), i)) {
        if (kept_count != i) values[kept_count] = std::move(values[i]);
        ++kept_count;
      }
    values.resize(kept_count);
  };
  drop_from(mapping.keys);
  drop_from(mapping.key_places);
  drop_from(mapping.children);
}

bool parse_yaml(std::string_view text, std::uint32_t source, ConfigNode& root, std::vector<ConfigProblem>& problems,
                bool is_data_file) {
  const ConfigPlace start{source, 1, 1};
  if (const std::size_t bytes_max = is_data_file ? kDataBytesMax : kConfigBytesMax; text.size() > bytes_max) {
    problems.push_back({start, fmt::format("expected at most {} bytes, found {}", bytes_max, text.size())});
    return false;
  }
  root = ConfigNode{};
  root.place = start;
  try {
    check_text(text, source);
    Builder(text, source, problems, is_data_file ? kDataValuesMax : kConfigValuesMax).read_document(root);
    return true;
  } catch (const UnusableText& e) {
    problems.push_back({e.place, e.message});
  }
  return false;
}

bool parse_set_value(std::string_view text, std::uint32_t source, ConfigNode& root,
                     std::vector<ConfigProblem>& problems) {
  const std::size_t begin = std::min(text.find_first_not_of(" \t\r\n"), text.size());
  // Only text in brackets or quotes is YAML.
  if (begin < text.size() && std::string_view("{[\"'").find(text[begin]) != std::string_view::npos)
    return parse_yaml(text, source, root, problems);
  text = text.substr(begin, text.find_last_not_of(" \t\r\n") + 1 - begin);
  root = ConfigNode{};
  root.place = {source, 1, 1};
  root.text = text;
  if (is_null(text)) return true;
  root.kind = Kind::kScalar;
  try {
    check_text(text, source);
    if (text.size() <= kConfigBytesMax) return true;
    problems.push_back({root.place, fmt::format("expected at most {} bytes, found {}", kConfigBytesMax, text.size())});
  } catch (const UnusableText& e) {
    problems.push_back({e.place, e.message});
  }
  return false;
}

std::string to_yaml(const ConfigNode& node) { return Writer().write(node); }

std::string to_json(const ConfigNode& node) { return json_value(node).dump(); }

bool parse_integer(std::string_view text, std::int64_t& value) { return parse_integer_as(text, value); }
bool parse_integer(std::string_view text, std::uint64_t& value) { return parse_integer_as(text, value); }

bool parse_decimal(std::string_view text, double& value) {
  // Integers first, because only they may contain '_'.
  std::int64_t integer = 0;
  if (parse_integer(text, integer)) {
    value = static_cast<double>(integer);
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

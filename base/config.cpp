// The reader of run files: every folder's read() functions call it. It also records what was read, for the reference
// and for the resolved form, which is the configuration with all defaults.
#include "base/config.hpp"

#include <algorithm>
#include <limits>
#include <type_traits>

#include "base/config_tree.hpp"
#include "base/files.hpp"

namespace echoline {

using Kind = ConfigNode::Kind;

// A mapping as seen by its reader, and everything that was read from it, in order.
struct ConfigSectionState {
  // The declaration of a key by its reader, for the reference and the resolved form. Data files have neither, because
  // they have very many keys.
  struct KeyDescription {
    std::optional<ConfigNode> value;  // the value that was read, or the default
    ConfigDoc doc;
    std::string type, range, default_text;
    std::string min_text, max_text;  // bounds of a number
    std::vector<std::string> choices;
    bool required = false;
  };
  // A key that was read or declared.
  struct ReadKey {
    std::string key;
    std::vector<std::unique_ptr<ConfigSectionState>> sections;
    bool is_list = false;  // `sections` are the elements of a list; false: at most one, a nested mapping
    std::unique_ptr<KeyDescription> description = {};
  };

  ConfigState* file;
  const ConfigNode* node;  // null if the section is absent
  ConfigPlace place;
  std::string path;
  std::vector<ReadKey> read_keys;
  std::vector<std::string> keys_tested;  // keys that has() tested, so their presence has a meaning for the caller

  // The dotted path of a key; for "", of the section.
  std::string dotted_path(std::string_view key) const {
    return path.empty() || key.empty() ? path + std::string(key) : path + "." + std::string(key);
  }

  // The value of a key; null if it has none.
  const ConfigNode* find(std::string_view key) const {
    const ConfigNode* value = node ? node->find(key) : nullptr;
    return value && value->kind != Kind::kNull ? value : nullptr;
  }

  // The entry of a key in `read_keys`, new if the key was not read before.
  ReadKey& entry_of(std::string_view key) {
    const auto it = std::find_if(read_keys.begin(), read_keys.end(), [&](const ReadKey& a) { return a.key == key; });
    if (it != read_keys.end()) return *it;
    read_keys.emplace_back().key = key;
    return read_keys.back();
  }
  KeyDescription& description_of(std::string_view key) {
    auto& description = entry_of(key).description;
    if (!description) description = std::make_unique<KeyDescription>();
    return *description;
  }
};

struct ConfigState {
  std::string name;
  std::filesystem::path folder;  // the folder of the loaded file; empty for a text
  bool is_blank = false;         // made by ConfigFile::blank(), for the reference: every list gets one element
  bool is_data_file = false;     // not a run file: keys() and resolved() are not available
  ConfigNode root;
  std::vector<std::string> set_keys;  // the keys of --set; source n of a position is set_keys[n - 1]
  std::vector<ConfigProblem> problems;
  std::unique_ptr<ConfigSectionState> root_section;

  void add_problem(const ConfigPlace& place, const std::string& path, std::string_view message) {
    // problem_line() names the key of a --set override itself.
    const bool is_set_key = place.source > 0 && set_keys[place.source - 1] == path;
    problems.push_back(
        {place, path.empty() || is_set_key ? std::string(message) : fmt::format("{}: {}", path, message)});
  }

  // The problem with its place, as users see it.
  std::string problem_line(const ConfigProblem& p) const {
    if (p.place.source > 0) return fmt::format("--set {}: {}", set_keys[p.place.source - 1], p.message);
    return fmt::format("{}:{}:{}: {}", name, p.place.line, p.place.column, p.message);
  }

  Error error(std::vector<ConfigProblem> list) const {
    std::stable_sort(list.begin(), list.end(), [](const auto& a, const auto& b) { return a.place < b.place; });
    std::string lines;
    for (const ConfigProblem& p : list) lines += (lines.empty() ? "" : "\n") + problem_line(p);
    return Error{Code::kInvalid, "", lines};
  }
};

namespace {

std::string describe(const ConfigNode& node) {
  switch (node.kind) {
    case Kind::kNull:
      return "nothing";
    case Kind::kScalar:
      return fmt::format("{}'{}'", node.quoted ? "the text " : "", node.text);
    case Kind::kSequence:
      return "a list";
    case Kind::kMapping:
      return "a mapping";
  }
  return "";
}

// The error for a value that is not what its reader expected.
Error mismatch_error(std::string_view what, const ConfigNode& node) {
  return Error{Code::kInvalid, "", fmt::format("expected {}, found {}", what, describe(node))};
}

// --- conversion between values and their texts; exact_text() gives a text that parses to the same value ---

struct ExactUnit {
  std::uint64_t factor;
  const char* name;
};

// The count in the largest unit that divides it, so that the text parses to the same count.
std::string in_largest_exact_unit(std::uint64_t count, std::initializer_list<ExactUnit> units) {
  const char* smallest = "";
  for (const ExactUnit& unit : units) {
    if (count > 0 && count % unit.factor == 0) return fmt::format("{} {}", count / unit.factor, unit.name);
    smallest = unit.name;
  }
  return fmt::format("{} {}", count, smallest);
}

std::string exact_text(std::int64_t v) { return fmt::format("{}", v); }
std::string exact_text(std::uint64_t v) { return fmt::format("{}", v); }
std::string exact_text(double v) { return fmt::format("{}", v); }
std::string exact_text(bool v) { return v ? "true" : "false"; }
std::string exact_text(const std::string& v) { return v; }
std::string exact_text(const std::filesystem::path& v) { return v.string(); }
std::string exact_text(Duration v) {
  if (v.count() <= 0) return fmt::format("{} s", seconds(v));
  return in_largest_exact_unit(static_cast<std::uint64_t>(v.count()), {{3'600'000'000'000, "h"},
                                                                       {60'000'000'000, "min"},
                                                                       {1'000'000'000, "s"},
                                                                       {1'000'000, "ms"},
                                                                       {1'000, "us"},
                                                                       {1, "ns"}});
}
std::string exact_text(Bytes v) {
  return in_largest_exact_unit(v.count, {{1ull << 30, "GiB"},
                                         {1'000'000'000, "GB"},
                                         {1ull << 20, "MiB"},
                                         {1'000'000, "MB"},
                                         {1ull << 10, "KiB"},
                                         {1'000, "kB"},
                                         {1, "B"}});
}
std::string exact_text(BitRate v) {
  constexpr std::pair<double, const char*> kUnits[] = {{1e9, "Gbit/s"}, {1e6, "Mbit/s"}, {1e3, "kbit/s"}};
  for (const auto& [factor, unit] : kUnits)  // only a unit whose text parses to the same rate
    if (v.bits_per_s >= factor && v.bits_per_s / factor * factor == v.bits_per_s)
      return fmt::format("{} {}", v.bits_per_s / factor, unit);
  return fmt::format("{} bit/s", v.bits_per_s);
}

Status convert(const ConfigNode& node, bool& value) {
  if (node.kind != Kind::kScalar || node.quoted || (node.text != "true" && node.text != "false"))
    return mismatch_error("true or false", node);
  value = node.text == "true";
  return ok();
}

template <std::integral T>
Status convert(const ConfigNode& node, T& value) {
  using Wide = std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>;
  Wide wide = 0;
  if (node.kind != Kind::kScalar || node.quoted || !parse_integer(node.text, wide) || !std::in_range<T>(wide))
    return mismatch_error("a whole number", node);
  value = static_cast<T>(wide);
  return ok();
}

Status convert(const ConfigNode& node, double& value) {
  if (node.kind != Kind::kScalar || node.quoted || !parse_decimal(node.text, value))
    return mismatch_error("a number", node);
  return ok();
}

template <class T>
Status convert_units(const ConfigNode& node, T& value, Result<T> (*parse)(std::string_view)) {
  // A collection is also passed to the parser, so that the message names the units.
  const std::string text = node.kind == Kind::kScalar ? node.text : describe(node);
  ECHO_ASSIGN(value, parse(text));
  return ok();
}
Status convert(const ConfigNode& node, Duration& value) { return convert_units(node, value, parse_duration); }
Status convert(const ConfigNode& node, Bytes& value) { return convert_units(node, value, parse_bytes); }
Status convert(const ConfigNode& node, BitRate& value) { return convert_units(node, value, parse_bit_rate); }

Status convert(const ConfigNode& node, std::string& value) {
  if (node.kind != Kind::kScalar) return mismatch_error("text", node);
  value = node.text;
  return ok();
}

Status convert(const ConfigNode& node, std::filesystem::path& value) {
  if (node.kind != Kind::kScalar || node.text.empty()) return mismatch_error("a path", node);
  value = node.text;
  return ok();
}

ConfigNode scalar_node(std::string text, bool is_text) {
  ConfigNode node;
  node.kind = Kind::kScalar;
  node.quoted = is_text && text.empty();  // without quotes, an empty text would be read as no value
  node.is_text = is_text;
  node.text = std::move(text);
  return node;
}

template <class T>
constexpr bool kIsText = std::same_as<T, std::string> || std::same_as<T, std::filesystem::path>;

template <class T>
constexpr bool kIsList = false;
template <class T>
constexpr bool kIsList<std::vector<T>> = true;

template <class T>
ConfigNode resolved_node(const T& value) {
  if constexpr (std::is_integral_v<T> && !std::same_as<T, bool>) {
    using Wide = std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>;
    return scalar_node(exact_text(static_cast<Wide>(value)), /*is_text=*/false);
  } else {
    return scalar_node(exact_text(value), kIsText<T>);
  }
}

template <class T>
ConfigNode resolved_node(const std::vector<T>& values) {
  ConfigNode node;
  node.kind = Kind::kSequence;
  for (const T& value : values) node.children.push_back(resolved_node(value));
  return node;
}

template <class T>
std::string range_text(const Limits<T>& limits) {
  const auto text = [](const T& v) { return resolved_node(v).text; };
  if (limits.min && limits.max) return fmt::format("{} to {}", text(*limits.min), text(*limits.max));
  if (limits.min) return "at least " + text(*limits.min);
  return limits.max ? "at most " + text(*limits.max) : "";
}

const char* const kAuto = "auto";  // ConfigSection::read_or_auto

template <class T>
std::string type_name() {
  if constexpr (std::same_as<T, bool>) return "true or false";
  if constexpr (std::is_integral_v<T>) return "whole number";
  if constexpr (std::same_as<T, double>) return "number";
  if constexpr (std::same_as<T, Duration>) return "duration";
  if constexpr (std::same_as<T, Bytes>) return "size";
  if constexpr (std::same_as<T, BitRate>) return "rate";
  if constexpr (std::same_as<T, std::string>) return "text";
  if constexpr (std::same_as<T, std::filesystem::path>) return "path";
  if constexpr (kIsList<T>) return "list: " + type_name<typename T::value_type>();
  return "";
}

// The bounds of a number, limited to those of its type.
template <class T>
Limits<T> within_type(Limits<T> limits) {
  if constexpr (std::is_integral_v<T>) {
    if (!limits.min) limits.min = std::numeric_limits<T>::min();
    if (!limits.max) limits.max = std::numeric_limits<T>::max();
  }
  return limits;
}

// The message about an invalid number: `why`, the parser's message, or a message with the range if there is one.
template <class T>
std::string number_problem(const ConfigNode& node, const Limits<T>& limits, const std::string& why) {
  const Limits<T> bounds = within_type(limits);
  const std::string range = range_text(bounds);
  if (range.empty()) return why;
  if constexpr (!std::is_arithmetic_v<T>) return why + "; expected " + range;
  return mismatch_error("a " + type_name<T>() + (bounds.min && bounds.max ? " from " : ", ") + range, node).detail;
}

// The path as an absolute one; a relative path refers to `folder`.
std::filesystem::path absolute_path(const std::filesystem::path& path, const std::filesystem::path& folder) {
  return path.empty() ? path : std::filesystem::absolute(folder / path).lexically_normal();
}

// The state of a nested section. A section that is not a mapping is a problem and then counts as absent.
std::unique_ptr<ConfigSectionState> make_section(ConfigState& file, const ConfigNode* node,
                                                 const ConfigPlace& place_if_absent, std::string path) {
  if (node && node->kind != Kind::kMapping) {
    file.add_problem(node->place, path, fmt::format("expected a mapping, found {}", describe(*node)));
    node = nullptr;
  }
  return std::make_unique<ConfigSectionState>(ConfigSectionState{.file = &file,
                                                                 .node = node,
                                                                 .place = node ? node->place : place_if_absent,
                                                                 .path = std::move(path),
                                                                 .read_keys = {},
                                                                 .keys_tested = {}});
}

void find_unknown_keys(const ConfigSectionState& section, std::vector<ConfigProblem>& problems) {
  for (std::size_t i = 0; section.node && i < section.node->keys.size(); ++i) {
    const std::string& key = section.node->keys[i];
    const auto is_key = [&](const auto& read_key) { return read_key.key == key; };
    if (std::any_of(section.read_keys.begin(), section.read_keys.end(), is_key)) continue;
    std::vector<std::string> known_keys;
    for (const auto& read_key : section.read_keys) known_keys.push_back(read_key.key);
    problems.push_back({section.node->key_places[i],
                        fmt::format("unknown key '{}'{}", section.dotted_path(key), did_you_mean(key, known_keys))});
  }
  for (const auto& read_key : section.read_keys)
    for (const auto& child : read_key.sections) find_unknown_keys(*child, problems);
}

ConfigNode resolve(const ConfigSectionState& section) {
  ConfigNode out;
  out.kind = Kind::kMapping;
  const auto& keys_tested = section.keys_tested;
  for (const auto& read_key : section.read_keys) {
    ConfigNode value;
    // Writing the default of a key whose absence has a meaning would change the file's meaning.
    if (!section.find(read_key.key) &&
        std::find(keys_tested.begin(), keys_tested.end(), read_key.key) != keys_tested.end())
      continue;
    if (read_key.is_list) {
      value.kind = Kind::kSequence;
      for (const auto& child : read_key.sections) value.children.push_back(resolve(*child));
    } else if (!read_key.sections.empty()) {
      value = resolve(*read_key.sections.front());
    } else if (read_key.description && read_key.description->value) {
      value = *read_key.description->value;
    } else {
      continue;
    }
    out.keys.push_back(read_key.key);
    out.children.push_back(std::move(value));
  }
  return out;
}

// Appends the keys of a section: first those with values, then its sections with their keys.
void collect_keys(const ConfigSectionState& section, std::vector<ConfigKey>& keys) {
  std::vector<const ConfigSectionState::ReadKey*> order;
  for (const auto& read_key : section.read_keys) order.push_back(&read_key);
  std::stable_partition(order.begin(), order.end(), [](const auto* read_key) { return read_key->sections.empty(); });
  for (const auto* read_key : order) {
    if (!read_key->description) continue;
    const auto& description = *read_key->description;
    const bool is_tested =
        std::find(section.keys_tested.begin(), section.keys_tested.end(), read_key->key) != section.keys_tested.end();
    const bool is_default_in_words = !description.doc.default_words.empty();
    keys.push_back(
        {.path = section.dotted_path(read_key->key),
         .type = description.type,
         .range = description.range,
         .default_text = is_default_in_words ? std::string(description.doc.default_words) : description.default_text,
         .meaning = std::string(description.doc.meaning),
         .when = "",
         .required = description.required,
         .default_is_literal = !is_default_in_words,
         .optional_section = is_tested,
         .min_text = description.min_text,
         .max_text = description.max_text,
         .choices = description.choices});
    for (const auto& child : read_key->sections) collect_keys(*child, keys);
  }
}

}  // namespace

const std::string& ConfigSection::path() const { return state_->path; }
bool ConfigSection::has(std::string_view key) const {
  state_->keys_tested.emplace_back(key);
  return state_->find(key) != nullptr;
}
std::vector<std::string> ConfigSection::keys() const {
  return state_->node ? state_->node->keys : std::vector<std::string>();
}

ConfigSection ConfigSection::section(std::string_view key, ConfigDoc doc) {
  auto& entry = state_->entry_of(key);
  if (entry.sections.empty()) {
    entry.sections.push_back(make_section(*state_->file, state_->find(key), state_->place, state_->dotted_path(key)));
    state_->description_of(key).type = "section";
    state_->description_of(key).doc = doc;
  }
  return ConfigSection(*entry.sections.front());
}

std::vector<ConfigSection> ConfigSection::sections(std::string_view key, ConfigDoc doc) {
  auto& entry = state_->entry_of(key);
  const ConfigNode* node = state_->find(key);
  if (node && node->kind != Kind::kSequence) {
    state_->file->add_problem(node->place, state_->dotted_path(key),
                              fmt::format("expected a list, found {}", describe(*node)));
    node = nullptr;
  }
  if (!entry.is_list) {
    entry.is_list = true;
    state_->description_of(key).type = "list";
    state_->description_of(key).doc = doc;
    for (std::size_t i = 0; node && i < node->children.size(); ++i)
      entry.sections.push_back(make_section(*state_->file, &node->children[i], node->children[i].place,
                                            fmt::format("{}[{}]", state_->dotted_path(key), i)));
    if (state_->file->is_blank)
      entry.sections.push_back(
          make_section(*state_->file, /*node=*/nullptr, state_->place, state_->dotted_path(key) + "[]"));
  }
  std::vector<ConfigSection> out;
  for (const auto& child : entry.sections) out.push_back(ConfigSection(*child));
  return out;
}

const ConfigNode* ConfigSection::find_value(std::string_view key, Absent absent, const ConfigDoc& doc, std::string type,
                                            std::string range) {
  state_->entry_of(key);
  if (!state_->file->is_data_file) {
    auto& description = state_->description_of(key);
    description.required = absent == Absent::kError;
    description.doc = doc;
    description.type = std::move(type);
    description.range = std::move(range);
  }
  const ConfigNode* node = state_->find(key);
  if (!node && absent == Absent::kError)
    state_->file->add_problem(state_->place, "", fmt::format("missing required key '{}'", state_->dotted_path(key)));
  return node;
}

template <class T>
bool ConfigSection::read_number(std::string_view key, T& value, const Limits<T>& limits, Absent absent,
                                const ConfigDoc& doc) {
  bool valid = false;
  Limits<T> documented_limits = limits;
  if (std::is_unsigned_v<T> && !documented_limits.min) documented_limits.min = T{};
  const bool may_be_auto = absent == Absent::kAuto;
  const ConfigNode* node = find_value(key, absent, doc, type_name<T>() + (may_be_auto ? " or auto" : ""),
                                      state_->file->is_data_file ? "" : range_text(documented_limits));
  if (!state_->file->is_data_file) {
    if (documented_limits.min) state_->description_of(key).min_text = resolved_node(*documented_limits.min).text;
    if (documented_limits.max) state_->description_of(key).max_text = resolved_node(*documented_limits.max).text;
  }
  if (may_be_auto && node && node->kind == Kind::kScalar && node->text == kAuto) node = nullptr;
  if (node) {
    const std::string or_auto = may_be_auto ? "; `auto` is allowed as well" : "";
    T parsed{};
    if (Status status = convert(*node, parsed); !status) {
      error(key, number_problem(*node, limits, status.error().detail) + or_auto);
    } else if ((limits.min && parsed < *limits.min) || (limits.max && parsed > *limits.max)) {
      error(key, mismatch_error(range_text(limits), *node).detail + or_auto);
    } else {
      value = parsed;
      valid = true;
    }
  }
  if (state_->file->is_data_file) return valid;
  if (may_be_auto) {
    state_->description_of(key).value = valid ? resolved_node(value) : scalar_node(kAuto, /*is_text=*/true);
    state_->description_of(key).default_text = kAuto;
    return valid;
  }
  if (valid || absent != Absent::kNothing) state_->description_of(key).value = resolved_node(value);
  if (absent == Absent::kDefault) state_->description_of(key).default_text = state_->description_of(key).value->text;
  return valid;
}

template <class T>
bool ConfigSection::read_unlimited(std::string_view key, T& value, Absent absent, const ConfigDoc& doc) {
  bool valid = false;
  if (absent == Absent::kDefault && !state_->file->is_data_file) {
    std::string text = to_json(resolved_node(value));  // JSON is valid YAML
    if constexpr (kIsText<T>) {                        // `text` is in quotes, which most texts do not need in YAML
      const bool needs_no_quotes = std::all_of(text.begin() + 1, text.end() - 1, [](char c) {
        return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '/';
      });
      if (needs_no_quotes) text = text.substr(1, text.size() - 2);
    }
    state_->description_of(key).default_text = text;
  }
  std::filesystem::path folder;  // stays empty, the working directory, for a --set value or a default
  if (const ConfigNode* node = find_value(key, absent, doc, type_name<T>(), "")) {
    const auto read_one = [&](const ConfigNode& value_node, auto& item) {
      const Status status = convert(value_node, item);
      if (!status) state_->file->add_problem(value_node.place, state_->dotted_path(key), status.error().detail);
      return status.has_value();
    };
    T parsed{};
    if constexpr (!kIsList<T>) {
      valid = read_one(*node, parsed);
    } else if (node->kind != Kind::kSequence) {
      error(key, mismatch_error("a list", *node).detail);
    } else {
      valid = true;
      for (const ConfigNode& child : node->children) {
        typename T::value_type item{};
        valid = read_one(child, item) && valid;
        parsed.push_back(std::move(item));
      }
    }
    if constexpr (std::same_as<T, std::string>) {
      if (valid && absent == Absent::kError && parsed.empty()) {
        error(key, "expected text, found it empty");
        valid = false;
      }
    }
    if (valid) value = std::move(parsed);
    if (valid && node->place.source == kFileSource) folder = state_->file->folder;
  }
  if constexpr (std::same_as<T, std::filesystem::path>) value = absolute_path(value, folder);
  if (!state_->file->is_data_file && (valid || absent != Absent::kNothing))
    state_->description_of(key).value = resolved_node(value);
  return valid;
}

std::optional<std::size_t> ConfigSection::choose_index(std::string_view key, const std::vector<std::string>& names,
                                                       const std::string& current, Absent absent,
                                                       const ConfigDoc& doc) {
  std::optional<std::size_t> chosen;
  const std::string names_text = fmt::format("{}", fmt::join(names, ", "));
  if (const ConfigNode* node = find_value(key, absent, doc, "choice", names_text)) {
    const auto it = node->kind == Kind::kScalar ? std::find(names.begin(), names.end(), node->text) : names.end();
    if (it != names.end())
      chosen = static_cast<std::size_t>(it - names.begin());
    else
      error(key, mismatch_error("one of " + names_text, *node).detail + did_you_mean(node->text, names));
  }
  if (state_->file->is_data_file) return chosen;
  state_->description_of(key).choices = names;
  const std::string& name = chosen ? names[*chosen] : current;
  if (!name.empty()) state_->description_of(key).value = scalar_node(name, /*is_text=*/true);
  if (absent == Absent::kDefault) state_->description_of(key).default_text = current;
  return chosen;
}

std::string ConfigSection::json(std::string_view key, ConfigDoc doc) {
  const ConfigNode* node = find_value(key, Absent::kNothing, doc, "mapping", "");
  if (!node) return "{}";
  state_->description_of(key).value = *node;
  return to_json(*node);
}

std::string ConfigSection::resolved_json() const { return to_json(resolve(*state_)); }

void ConfigSection::error(std::string_view key, std::string_view message) {
  const ConfigNode* node = state_->find(key);
  state_->file->add_problem(node ? node->place : state_->place, state_->dotted_path(key), message);
}

// The types of ConfigNumber and of ConfigUnlimited.
#define ECHOLINE_NUMBER(T) \
  template bool ConfigSection::read_number<T>(std::string_view, T&, const Limits<T>&, Absent, const ConfigDoc&);
#define ECHOLINE_UNLIMITED(T) \
  template bool ConfigSection::read_unlimited<T>(std::string_view, T&, Absent, const ConfigDoc&);
ECHOLINE_NUMBER(int)
ECHOLINE_NUMBER(std::int64_t)
ECHOLINE_NUMBER(std::uint32_t)
ECHOLINE_NUMBER(std::uint64_t)
ECHOLINE_NUMBER(double)
ECHOLINE_NUMBER(Duration)
ECHOLINE_NUMBER(Bytes)
ECHOLINE_NUMBER(BitRate)
ECHOLINE_UNLIMITED(bool)
ECHOLINE_UNLIMITED(std::string)
ECHOLINE_UNLIMITED(std::filesystem::path)
ECHOLINE_UNLIMITED(std::vector<std::string>)
ECHOLINE_UNLIMITED(std::vector<std::int64_t>)
ECHOLINE_UNLIMITED(std::vector<double>)
#undef ECHOLINE_NUMBER
#undef ECHOLINE_UNLIMITED

ConfigFile::ConfigFile(std::unique_ptr<ConfigState> state) : state_(std::move(state)) {}
ConfigFile::ConfigFile(ConfigFile&&) noexcept = default;
ConfigFile& ConfigFile::operator=(ConfigFile&&) noexcept = default;
ConfigFile::~ConfigFile() = default;

Result<ConfigFile> ConfigFile::load(const std::filesystem::path& path) {
  ECHO_ASSIGN(const std::string text, read_file(path, kConfigBytesMax));
  ECHO_ASSIGN(ConfigFile file, parse(text, path.string()));
  file.state_->folder = path.parent_path();
  return file;
}

Result<ConfigFile> ConfigFile::parse(std::string_view text, std::string name) {
  return parse_as(text, std::move(name), /*is_data_file=*/false);
}

Result<ConfigFile> ConfigFile::parse_yaml_data(std::string_view text, std::string name) {
  return parse_as(text, std::move(name), /*is_data_file=*/true);
}

Result<ConfigFile> ConfigFile::parse_as(std::string_view text, std::string name, bool is_data_file) {
  auto state = std::make_unique<ConfigState>();
  state->name = std::move(name);
  state->is_data_file = is_data_file;
  if (!parse_yaml(text, kFileSource, state->root, state->problems, is_data_file)) return state->error(state->problems);
  if (state->root.kind == Kind::kNull) {
    state->root.kind = Kind::kMapping;  // an empty file sets nothing
    state->root.place = {};             // it has no line that a message could name
  }
  if (state->root.kind != Kind::kMapping)
    return state->error(
        {{state->root.place, fmt::format("expected a mapping (key: value), found {}", describe(state->root))}});
  return ConfigFile(std::move(state));
}

Result<ConfigFile> ConfigFile::parse_json(std::string_view text, std::string name) {
  auto state = std::make_unique<ConfigState>();
  state->name = std::move(name);
  state->is_data_file = true;
  if (!echoline::parse_json(text, kFileSource, state->root, state->problems)) return state->error(state->problems);
  if (state->root.kind != Kind::kMapping)
    return state->error({{state->root.place, fmt::format("expected an object, found {}", describe(state->root))}});
  return ConfigFile(std::move(state));
}

ConfigFile ConfigFile::blank() {
  auto state = std::make_unique<ConfigState>();
  state->is_blank = true;
  state->root.kind = Kind::kMapping;
  return ConfigFile(std::move(state));
}

ConfigSection ConfigFile::root() {
  if (!state_->root_section) state_->root_section = make_section(*state_, &state_->root, state_->root.place, "");
  return ConfigSection(*state_->root_section);
}

Status ConfigFile::set(std::string_view dotted_key, std::string_view text) {
  ECHO_CHECK(!state_->root_section, "set() comes before the first read");
  state_->set_keys.emplace_back(dotted_key);
  const ConfigPlace place{.source = static_cast<std::uint32_t>(state_->set_keys.size())};
  std::vector<ConfigProblem> problems;
  ConfigNode value;
  if (!parse_set_value(text, place.source, value, problems)) return state_->error(std::move(problems));
  state_->problems.insert(state_->problems.end(), problems.begin(), problems.end());

  // Goes down to the key's node, and adds the mappings that are missing.
  ConfigNode* node = &state_->root;
  std::string_view keys_left = dotted_key;
  std::size_t depth = 0;
  while (true) {
    const std::size_t dot = keys_left.find('.');
    const std::string_view key = keys_left.substr(0, dot);
    if (key.empty() || ++depth > kConfigDepthMax)
      return state_->error(
          {{place, fmt::format("expected keys joined by dots such as 'learner.steps', found '{}'", dotted_key)}});
    if (node->kind == Kind::kNull) node->kind = Kind::kMapping;
    if (node->kind != Kind::kMapping)
      return state_->error({{place, fmt::format("there is no mapping to put '{}' in, but {}", key, describe(*node))}});
    if (!node->find(key)) {
      node->keys.emplace_back(key);
      node->key_places.push_back(place);
      node->children.emplace_back();
      node->children.back().place = place;
    }
    node = node->find(key);
    if (dot == std::string_view::npos) break;
    keys_left.remove_prefix(dot + 1);
  }
  *node = std::move(value);
  return ok();
}

ConfigFile ConfigFile::split(std::string_view key) {
  ECHO_CHECK(!state_->root_section, "split() comes before the first read");
  auto split_state = std::make_unique<ConfigState>();
  split_state->name = state_->name;
  split_state->folder = state_->folder;
  split_state->set_keys = state_->set_keys;
  split_state->root.kind = Kind::kMapping;
  split_state->root.place = state_->root.place;
  ConfigNode& root = state_->root;
  const auto it = std::find(root.keys.begin(), root.keys.end(), key);
  if (it != root.keys.end()) {
    const auto index = it - root.keys.begin();
    split_state->root.keys.push_back(*it);
    split_state->root.key_places.push_back(root.key_places[static_cast<std::size_t>(index)]);
    split_state->root.children.push_back(std::move(root.children[static_cast<std::size_t>(index)]));
    root.keys.erase(it);
    root.key_places.erase(root.key_places.begin() + index);
    root.children.erase(root.children.begin() + index);
  }
  return ConfigFile(std::move(split_state));
}

std::string ConfigFile::text() const { return to_yaml(state_->root); }

Status ConfigFile::finish() {
  std::vector<ConfigProblem> problems = state_->problems;
  if (state_->root_section) find_unknown_keys(*state_->root_section, problems);
  if (problems.empty()) return ok();
  return state_->error(std::move(problems));
}

std::string ConfigFile::resolved() const {
  ConfigNode empty;
  empty.kind = Kind::kMapping;
  return to_yaml(state_->root_section ? resolve(*state_->root_section) : empty);
}

std::vector<ConfigKey> ConfigFile::keys() const {
  std::vector<ConfigKey> keys;
  if (state_->root_section) collect_keys(*state_->root_section, keys);
  return keys;
}

}  // namespace echoline

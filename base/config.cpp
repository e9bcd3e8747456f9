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
  // For the reference and the resolved form. Data files have neither, because they have very many keys.
  struct Told {
    std::optional<ConfigNode> value;  // the value that was read, or the default
    ConfigDoc doc;
    std::string type, range, fallback;
    std::string least, most;
    std::vector<std::string> choices;
    bool required = false;
  };
  struct Asked {
    std::string key;
    std::vector<std::unique_ptr<ConfigSectionState>> sections;
    bool list = false;  // `sections` are the elements of a list; false: one nested mapping
    std::unique_ptr<Told> told = {};
  };

  ConfigState* file;
  const ConfigNode* node;  // null if the section is absent
  ConfigPlace place;
  std::string path;
  std::vector<Asked> asked;

  std::vector<std::string> tested;  // keys whose presence has a meaning for the caller

  // The dotted path of a key; for "", of the section.
  std::string full(std::string_view key) const {
    return path.empty() || key.empty() ? path + std::string(key) : path + "." + std::string(key);
  }

  // The value of a key; null if it has none.
  const ConfigNode* find(std::string_view key) const {
    const ConfigNode* value = node ? node->find(key) : nullptr;
    return value && value->kind != Kind::kNull ? value : nullptr;
  }

  Asked& ask(std::string_view key) {
    const auto it = std::find_if(asked.begin(), asked.end(), [&](const Asked& a) { return a.key == key; });
    if (it != asked.end()) return *it;
    asked.emplace_back().key = key;
    return asked.back();
  }
  Told& tell(std::string_view key) {
    auto& told = ask(key).told;
    if (!told) told = std::make_unique<Told>();
    return *told;
  }
};

struct ConfigState {
  std::string name;
  std::filesystem::path folder;  // of the loaded file; empty for a text
  bool blank = false;
  bool data = false;  // keys() and resolved() are not available
  ConfigNode root;
  std::vector<std::string> set_keys;  // of the --set overrides; source n of a position is set_keys[n - 1]
  std::vector<ConfigProblem> problems;
  std::unique_ptr<ConfigSectionState> root_section;

  void problem(const ConfigPlace& place, const std::string& path, std::string_view message) {
    const bool named = place.source > 0 && set_keys[place.source - 1] == path;
    problems.push_back({place, path.empty() || named ? std::string(message) : fmt::format("{}: {}", path, message)});
  }

  std::string line(const ConfigProblem& p) const {
    if (p.place.source > 0) return fmt::format("--set {}: {}", set_keys[p.place.source - 1], p.message);
    return fmt::format("{}:{}:{}: {}", name, p.place.line, p.place.column, p.message);
  }

  Error error(std::vector<ConfigProblem> list) const {
    std::stable_sort(list.begin(), list.end(), [](const auto& a, const auto& b) { return a.place < b.place; });
    std::string text;
    for (const ConfigProblem& p : list) text += (text.empty() ? "" : "\n") + line(p);
    return Error{Code::kInvalid, "", text};
  }
};

namespace {

std::string found(const ConfigNode& node) {
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

Error expected(std::string_view what, const ConfigNode& node) {
  return Error{Code::kInvalid, "", fmt::format("expected {}, found {}", what, found(node))};
}

// --- exact texts of values, which parse to the same value ---

struct ExactUnit {
  std::uint64_t factor;
  const char* name;
};

std::string exact_units(std::uint64_t count, std::initializer_list<ExactUnit> units) {
  const char* smallest = "";
  for (const ExactUnit& unit : units) {
    if (count > 0 && count % unit.factor == 0) return fmt::format("{} {}", count / unit.factor, unit.name);
    smallest = unit.name;
  }
  return fmt::format("{} {}", count, smallest);
}

std::string exact(std::int64_t v) { return fmt::format("{}", v); }
std::string exact(std::uint64_t v) { return fmt::format("{}", v); }
std::string exact(double v) { return fmt::format("{}", v); }
std::string exact(bool v) { return v ? "true" : "false"; }
std::string exact(const std::string& v) { return v; }
std::string exact(const std::filesystem::path& v) { return v.string(); }
std::string exact(Duration v) {
  if (v.count() <= 0) return fmt::format("{} s", seconds(v));
  return exact_units(static_cast<std::uint64_t>(v.count()), {{3'600'000'000'000, "h"},
                                                             {60'000'000'000, "min"},
                                                             {1'000'000'000, "s"},
                                                             {1'000'000, "ms"},
                                                             {1'000, "us"},
                                                             {1, "ns"}});
}
std::string exact(Bytes v) {
  return exact_units(v.count, {{1ull << 30, "GiB"},
                               {1'000'000'000, "GB"},
                               {1ull << 20, "MiB"},
                               {1'000'000, "MB"},
                               {1ull << 10, "KiB"},
                               {1'000, "kB"},
                               {1, "B"}});
}
std::string exact(BitRate v) {
  constexpr std::pair<double, const char*> kUnits[] = {{1e9, "Gbit/s"}, {1e6, "Mbit/s"}, {1e3, "kbit/s"}};
  for (const auto& [factor, unit] : kUnits)
    if (v.bits_per_s >= factor && v.bits_per_s / factor * factor == v.bits_per_s)
      return fmt::format("{} {}", v.bits_per_s / factor, unit);
  return fmt::format("{} bit/s", v.bits_per_s);
}

Status convert(const ConfigNode& node, bool& value) {
  if (node.kind != Kind::kScalar || node.quoted || (node.text != "true" && node.text != "false"))
    return expected("true or false", node);
  value = node.text == "true";
  return ok();
}

template <std::integral T>
Status convert(const ConfigNode& node, T& value) {
  using Wide = std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>;
  Wide wide = 0;
  if (node.kind != Kind::kScalar || node.quoted || !parse_whole(node.text, wide) || !std::in_range<T>(wide))
    return expected("a whole number", node);
  value = static_cast<T>(wide);
  return ok();
}

Status convert(const ConfigNode& node, double& value) {
  if (node.kind != Kind::kScalar || node.quoted || !parse_decimal(node.text, value)) return expected("a number", node);
  return ok();
}

template <class T>
Status convert_units(const ConfigNode& node, T& value, Result<T> (*parse)(std::string_view)) {
  // A collection is also passed to the parser, so that the message names the units.
  const std::string text = node.kind == Kind::kScalar ? node.text : found(node);
  ECHO_ASSIGN(value, parse(text));
  return ok();
}
Status convert(const ConfigNode& node, Duration& value) { return convert_units(node, value, parse_duration); }
Status convert(const ConfigNode& node, Bytes& value) { return convert_units(node, value, parse_bytes); }
Status convert(const ConfigNode& node, BitRate& value) { return convert_units(node, value, parse_bit_rate); }

Status convert(const ConfigNode& node, std::string& value) {
  if (node.kind != Kind::kScalar) return expected("text", node);
  value = node.text;
  return ok();
}

Status convert(const ConfigNode& node, std::filesystem::path& value) {
  if (node.kind != Kind::kScalar || node.text.empty()) return expected("a path", node);
  value = node.text;
  return ok();
}

ConfigNode scalar_node(std::string text, bool is_text) {
  ConfigNode node;
  node.kind = Kind::kScalar;
  node.quoted = is_text && text.empty();
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
    return scalar_node(exact(static_cast<Wide>(value)), false);
  } else {
    return scalar_node(exact(value), kIsText<T>);
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

// The message about an invalid number, including the range.
template <class T>
std::string not_a_number(const ConfigNode& node, const Limits<T>& limits, const std::string& why) {
  const Limits<T> all = within_type(limits);
  const std::string range = range_text(all);
  if (range.empty()) return why;
  if constexpr (!std::is_arithmetic_v<T>) return why + "; expected " + range;
  return expected("a " + type_name<T>() + (all.min && all.max ? " from " : ", ") + range, node).detail;
}

// An absolute path; a relative one refers to the folder of its value.
std::filesystem::path placed(const std::filesystem::path& path, const std::filesystem::path& folder) {
  return path.empty() ? path : std::filesystem::absolute(folder / path).lexically_normal();
}

// The mapping of a nested section. A section that is not a mapping is a problem and then counts as absent.
std::unique_ptr<ConfigSectionState> nested(ConfigState& file, const ConfigNode* node, const ConfigPlace& fallback,
                                           std::string path) {
  if (node && node->kind != Kind::kMapping) {
    file.problem(node->place, path, fmt::format("expected a mapping, found {}", found(*node)));
    node = nullptr;
  }
  return std::make_unique<ConfigSectionState>(
      ConfigSectionState{&file, node, node ? node->place : fallback, std::move(path), {}, {}});
}

void find_unknown_keys(const ConfigSectionState& section, std::vector<ConfigProblem>& problems) {
  for (std::size_t i = 0; section.node && i < section.node->keys.size(); ++i) {
    const std::string& key = section.node->keys[i];
    const auto is_key = [&](const auto& asked) { return asked.key == key; };
    if (std::any_of(section.asked.begin(), section.asked.end(), is_key)) continue;
    std::vector<std::string> known;
    for (const auto& asked : section.asked) known.push_back(asked.key);
    problems.push_back(
        {section.node->key_places[i], fmt::format("unknown key '{}'{}", section.full(key), did_you_mean(key, known))});
  }
  for (const auto& asked : section.asked)
    for (const auto& child : asked.sections) find_unknown_keys(*child, problems);
}

ConfigNode resolve(const ConfigSectionState& section) {
  ConfigNode out;
  out.kind = Kind::kMapping;
  const auto& tested = section.tested;
  for (const auto& asked : section.asked) {
    ConfigNode value;
    // Writing the default of a key whose absence has a meaning would change the file's meaning.
    if (!section.find(asked.key) && std::find(tested.begin(), tested.end(), asked.key) != tested.end()) continue;
    if (asked.list) {
      value.kind = Kind::kSequence;
      for (const auto& child : asked.sections) value.children.push_back(resolve(*child));
    } else if (!asked.sections.empty()) {
      value = resolve(*asked.sections.front());
    } else if (asked.told && asked.told->value) {
      value = *asked.told->value;
    } else {
      continue;
    }
    out.keys.push_back(asked.key);
    out.children.push_back(std::move(value));
  }
  return out;
}

// The keys of a section, before its sections.
void collect_keys(const ConfigSectionState& section, std::vector<ConfigKey>& keys) {
  std::vector<const ConfigSectionState::Asked*> order;
  for (const auto& asked : section.asked) order.push_back(&asked);
  std::stable_partition(order.begin(), order.end(), [](const auto* asked) { return asked->sections.empty(); });
  for (const auto* each : order) {
    const auto& asked = *each;
    if (!asked.told) continue;
    const auto& told = *asked.told;
    const bool tested = std::find(section.tested.begin(), section.tested.end(), asked.key) != section.tested.end();
    const bool in_words = !told.doc.fallback.empty();
    keys.push_back({section.full(asked.key), told.type, told.range,
                    in_words ? std::string(told.doc.fallback) : told.fallback, std::string(told.doc.meaning), "",
                    told.required, !in_words, tested, told.least, told.most, told.choices});
    for (const auto& child : asked.sections) collect_keys(*child, keys);
  }
}

}  // namespace

const std::string& ConfigSection::path() const { return state_->path; }
bool ConfigSection::has(std::string_view key) const {
  state_->tested.emplace_back(key);
  return state_->find(key) != nullptr;
}
std::vector<std::string> ConfigSection::keys() const {
  return state_->node ? state_->node->keys : std::vector<std::string>();
}

ConfigSection ConfigSection::section(std::string_view key, ConfigDoc doc) {
  auto& asked = state_->ask(key);
  if (asked.sections.empty()) {
    asked.sections.push_back(nested(*state_->file, state_->find(key), state_->place, state_->full(key)));
    state_->tell(key).type = "section";
    state_->tell(key).doc = doc;
  }
  return ConfigSection(*asked.sections.front());
}

std::vector<ConfigSection> ConfigSection::sections(std::string_view key, ConfigDoc doc) {
  auto& asked = state_->ask(key);
  const ConfigNode* node = state_->find(key);
  if (node && node->kind != Kind::kSequence) {
    state_->file->problem(node->place, state_->full(key), fmt::format("expected a list, found {}", found(*node)));
    node = nullptr;
  }
  if (!asked.list) {
    asked.list = true;
    state_->tell(key).type = "list";
    state_->tell(key).doc = doc;
    for (std::size_t i = 0; node && i < node->children.size(); ++i)
      asked.sections.push_back(nested(*state_->file, &node->children[i], node->children[i].place,
                                      fmt::format("{}[{}]", state_->full(key), i)));
    if (state_->file->blank)
      asked.sections.push_back(nested(*state_->file, nullptr, state_->place, state_->full(key) + "[]"));
  }
  std::vector<ConfigSection> out;
  for (const auto& child : asked.sections) out.push_back(ConfigSection(*child));
  return out;
}

const ConfigNode* ConfigSection::wanted(std::string_view key, Absent absent, const ConfigDoc& doc, std::string type,
                                        std::string range) {
  state_->ask(key);
  if (!state_->file->data) {
    auto& told = state_->tell(key);
    told.required = absent == Absent::kError;
    told.doc = doc;
    told.type = std::move(type);
    told.range = std::move(range);
  }
  const ConfigNode* node = state_->find(key);
  if (!node && absent == Absent::kError)
    state_->file->problem(state_->place, "", fmt::format("missing required key '{}'", state_->full(key)));
  return node;
}

template <class T>
bool ConfigSection::read_number(std::string_view key, T& value, const Limits<T>& limits, Absent absent,
                                const ConfigDoc& doc) {
  bool good = false;
  Limits<T> told = limits;
  if (std::is_unsigned_v<T> && !told.min) told.min = T{};
  const bool may_be_auto = absent == Absent::kAuto;
  const ConfigNode* node = wanted(key, absent, doc, type_name<T>() + (may_be_auto ? " or auto" : ""),
                                  state_->file->data ? "" : range_text(told));
  if (!state_->file->data) {
    if (told.min) state_->tell(key).least = resolved_node(*told.min).text;
    if (told.max) state_->tell(key).most = resolved_node(*told.max).text;
  }
  if (may_be_auto && node && node->kind == Kind::kScalar && node->text == kAuto) node = nullptr;
  if (node) {
    const std::string or_auto = may_be_auto ? "; `auto` is allowed as well" : "";
    T given{};
    if (Status status = convert(*node, given); !status) {
      error(key, not_a_number(*node, limits, status.error().detail) + or_auto);
    } else if ((limits.min && given < *limits.min) || (limits.max && given > *limits.max)) {
      error(key, expected(range_text(limits), *node).detail + or_auto);
    } else {
      value = given;
      good = true;
    }
  }
  if (state_->file->data) return good;
  if (may_be_auto) {
    state_->tell(key).value = good ? resolved_node(value) : scalar_node(kAuto, true);
    state_->tell(key).fallback = kAuto;
    return good;
  }
  if (good || absent != Absent::kNothing) state_->tell(key).value = resolved_node(value);
  if (absent == Absent::kDefault) state_->tell(key).fallback = state_->tell(key).value->text;
  return good;
}

template <class T>
bool ConfigSection::read_text(std::string_view key, T& value, Absent absent, const ConfigDoc& doc) {
  bool good = false;
  if (absent == Absent::kDefault && !state_->file->data) {
    std::string text = to_json(resolved_node(value));  // which is valid YAML
    if constexpr (kIsText<T>) {
      const bool plain = std::all_of(text.begin() + 1, text.end() - 1, [](char c) {
        return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '/';
      });
      if (plain) text = text.substr(1, text.size() - 2);
    }
    state_->tell(key).fallback = text;
  }
  std::filesystem::path folder;
  if (const ConfigNode* node = wanted(key, absent, doc, type_name<T>(), "")) {
    const auto read_one = [&](const ConfigNode& from, auto& to) {
      const Status status = convert(from, to);
      if (!status) state_->file->problem(from.place, state_->full(key), status.error().detail);
      return status.has_value();
    };
    T given{};
    if constexpr (!kIsList<T>) {
      good = read_one(*node, given);
    } else if (node->kind != Kind::kSequence) {
      error(key, expected("a list", *node).detail);
    } else {
      good = true;
      for (const ConfigNode& child : node->children) {
        typename T::value_type item{};
        good = read_one(child, item) && good;
        given.push_back(std::move(item));
      }
    }
    if constexpr (std::same_as<T, std::string>) {
      if (good && absent == Absent::kError && given.empty()) {
        error(key, "expected text, found it empty");
        good = false;
      }
    }
    if (good) value = std::move(given);
    if (good && node->place.source == 0) folder = state_->file->folder;
  }
  if constexpr (std::same_as<T, std::filesystem::path>) value = placed(value, folder);
  if (!state_->file->data && (good || absent != Absent::kNothing)) state_->tell(key).value = resolved_node(value);
  return good;
}

std::optional<std::size_t> ConfigSection::choose_index(std::string_view key, const std::vector<std::string>& names,
                                                       const std::string& current, Absent absent,
                                                       const ConfigDoc& doc) {
  std::optional<std::size_t> chosen;
  const std::string list = fmt::format("{}", fmt::join(names, ", "));
  if (const ConfigNode* node = wanted(key, absent, doc, "choice", list)) {
    const auto it = node->kind == Kind::kScalar ? std::find(names.begin(), names.end(), node->text) : names.end();
    if (it != names.end())
      chosen = static_cast<std::size_t>(it - names.begin());
    else
      error(key, expected("one of " + list, *node).detail + did_you_mean(node->text, names));
  }
  if (state_->file->data) return chosen;
  state_->tell(key).choices = names;
  const std::string& name = chosen ? names[*chosen] : current;
  if (!name.empty()) state_->tell(key).value = scalar_node(name, true);
  if (absent == Absent::kDefault) state_->tell(key).fallback = current;
  return chosen;
}

std::string ConfigSection::json(std::string_view key, ConfigDoc doc) {
  const ConfigNode* node = wanted(key, Absent::kNothing, doc, "mapping", "");
  if (!node) return "{}";
  state_->tell(key).value = *node;
  return to_json(*node);
}

std::string ConfigSection::resolved_json() const { return to_json(resolve(*state_)); }

void ConfigSection::error(std::string_view key, std::string_view message) {
  const ConfigNode* node = state_->find(key);
  state_->file->problem(node ? node->place : state_->place, state_->full(key), message);
}

#define ECHOLINE_NUMBER(T) \
  template bool ConfigSection::read_number<T>(std::string_view, T&, const Limits<T>&, Absent, const ConfigDoc&);
#define ECHOLINE_TEXT(T) template bool ConfigSection::read_text<T>(std::string_view, T&, Absent, const ConfigDoc&);
ECHOLINE_NUMBER(int)
ECHOLINE_NUMBER(std::int64_t)
ECHOLINE_NUMBER(std::uint32_t)
ECHOLINE_NUMBER(std::uint64_t)
ECHOLINE_NUMBER(double)
ECHOLINE_NUMBER(Duration)
ECHOLINE_NUMBER(Bytes)
ECHOLINE_NUMBER(BitRate)
ECHOLINE_TEXT(bool)
ECHOLINE_TEXT(std::string)
ECHOLINE_TEXT(std::filesystem::path)
ECHOLINE_TEXT(std::vector<std::string>)
ECHOLINE_TEXT(std::vector<std::int64_t>)
ECHOLINE_TEXT(std::vector<double>)
#undef ECHOLINE_NUMBER
#undef ECHOLINE_TEXT

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
  return parse_as(text, std::move(name), false);
}

Result<ConfigFile> ConfigFile::parse_yaml_data(std::string_view text, std::string name) {
  return parse_as(text, std::move(name), true);
}

Result<ConfigFile> ConfigFile::parse_as(std::string_view text, std::string name, bool data) {
  auto state = std::make_unique<ConfigState>();
  state->name = std::move(name);
  state->data = data;
  if (!parse_yaml(text, 0, state->root, state->problems, data)) return state->error(state->problems);
  if (state->root.kind == Kind::kNull) {
    state->root.kind = Kind::kMapping;  // an empty file sets nothing
    state->root.place = {};
  }
  if (state->root.kind != Kind::kMapping)
    return state->error(
        {{state->root.place, fmt::format("expected a mapping (key: value), found {}", found(state->root))}});
  return ConfigFile(std::move(state));
}

Result<ConfigFile> ConfigFile::parse_json(std::string_view text, std::string name) {
  auto state = std::make_unique<ConfigState>();
  state->name = std::move(name);
  state->data = true;
  if (!echoline::parse_json(text, 0, state->root, state->problems)) return state->error(state->problems);
  if (state->root.kind != Kind::kMapping)
    return state->error({{state->root.place, fmt::format("expected an object, found {}", found(state->root))}});
  return ConfigFile(std::move(state));
}

ConfigFile ConfigFile::blank() {
  auto state = std::make_unique<ConfigState>();
  state->blank = true;
  state->root.kind = Kind::kMapping;
  return ConfigFile(std::move(state));
}

ConfigSection ConfigFile::root() {
  if (!state_->root_section) state_->root_section = nested(*state_, &state_->root, state_->root.place, "");
  return ConfigSection(*state_->root_section);
}

Status ConfigFile::set(std::string_view dotted_key, std::string_view text) {
  ECHO_CHECK(!state_->root_section, "set() comes before the first read");
  state_->set_keys.emplace_back(dotted_key);
  const ConfigPlace place{static_cast<std::uint32_t>(state_->set_keys.size()), 1, 1};
  std::vector<ConfigProblem> problems;
  ConfigNode value;
  if (!parse_set_value(text, place.source, value, problems)) return state_->error(std::move(problems));
  state_->problems.insert(state_->problems.end(), problems.begin(), problems.end());

  ConfigNode* at = &state_->root;
  std::string_view rest = dotted_key;
  std::size_t depth = 0;
  while (true) {
    const std::size_t dot = rest.find('.');
    const std::string_view key = rest.substr(0, dot);
    if (key.empty() || ++depth > kConfigDepthMax)
      return state_->error(
          {{place, fmt::format("expected keys joined by dots such as 'learner.steps', found '{}'", dotted_key)}});
    if (at->kind == Kind::kNull) at->kind = Kind::kMapping;
    if (at->kind != Kind::kMapping)
      return state_->error({{place, fmt::format("there is no mapping to put '{}' in, but {}", key, found(*at))}});
    if (!at->find(key)) {
      at->keys.emplace_back(key);
      at->key_places.push_back(place);
      at->children.emplace_back();
      at->children.back().place = place;
    }
    at = at->find(key);
    if (dot == std::string_view::npos) break;
    rest.remove_prefix(dot + 1);
  }
  *at = std::move(value);
  return ok();
}

ConfigFile ConfigFile::split(std::string_view key) {
  ECHO_CHECK(!state_->root_section, "split() comes before the first read");
  auto state = std::make_unique<ConfigState>();
  state->name = state_->name;
  state->folder = state_->folder;
  state->set_keys = state_->set_keys;
  state->root.kind = Kind::kMapping;
  state->root.place = state_->root.place;
  ConfigNode& root = state_->root;
  const auto it = std::find(root.keys.begin(), root.keys.end(), key);
  if (it != root.keys.end()) {
    const auto at = it - root.keys.begin();
    state->root.keys.push_back(*it);
    state->root.key_places.push_back(root.key_places[static_cast<std::size_t>(at)]);
    state->root.children.push_back(std::move(root.children[static_cast<std::size_t>(at)]));
    root.keys.erase(it);
    root.key_places.erase(root.key_places.begin() + at);
    root.children.erase(root.children.begin() + at);
  }
  return ConfigFile(std::move(state));
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

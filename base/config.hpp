// Reads run files: YAML with positions, so that every mistake is reported as `file:line:col: message`, all at once.
//
//   ECHO_ASSIGN(ConfigFile file, ConfigFile::load("run.yaml"));
//   ECHO_TRY(file.set("learner.steps", "50"));                       // --set learner.steps=50
//   ConfigSection learner = file.root().section("learner");
//   learner.require("steps", steps, {.min = 1, .max = 1'000'000}, "steps of the whole run");  // absent: an error
//   learner.read("uplink", uplink, "the learner's link");            // absent: `uplink` keeps its default
//   if (budget < kappa) learner.error("staleness", "expected at least publish_every");
//   ECHO_TRY(file.finish());                                         // every problem, or none
//
// The reader is also the documentation: run on ConfigFile::blank(), it records every key with its type, range, default
// and meaning (base/config_reference.hpp turns them into pages).
//
// A read does not fail at once. It records the problem and leaves the value unchanged; finish() reports all problems. A
// key that was never read is an error too, so every key must be read, even if another key makes it irrelevant. Not
// accepted: aliases and anchors, more than 1 MiB, 64 levels or 100,000 values. JSON files are YAML too. Not
// thread-safe; sections must not outlive their file.
#pragma once
#include <concepts>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.hpp"
#include "base/suggest.hpp"
#include "base/units.hpp"

namespace echoline {

// Inclusive bounds of a value; an absent bound is no limit.
template <class T>
struct Limits {
  std::optional<T> min = std::nullopt;
  std::optional<T> max = std::nullopt;
};

// Ordered values, to which Limits apply. Integers accept digits and '_' (1_000_000). A Duration, Bytes or BitRate must
// have a unit (base/units.hpp); a plain number must not.
template <class T>
concept ConfigNumber = std::same_as<T, int> || std::same_as<T, std::int64_t> || std::same_as<T, std::uint32_t> ||
    std::same_as<T, std::uint64_t> || std::same_as<T, double> || std::same_as<T, Duration> || std::same_as<T, Bytes> ||
    std::same_as<T, BitRate>;
// Values to which no Limits apply. Booleans are `true` and `false` only. A relative path is relative to the folder of
// its file; from --set or as a default, to the working directory. The resulting paths are absolute.
template <class T>
concept ConfigUnlimited = std::same_as<T, bool> || std::same_as<T, std::string> ||
    std::same_as<T, std::filesystem::path> || std::same_as<T, std::vector<std::string>> ||
    std::same_as<T, std::vector<std::int64_t>> || std::same_as<T, std::vector<double>>;

// The meaning of a key for the reference, as text with static lifetime. `default_words` describe the default of a
// key if that is not a value.
struct ConfigDoc {
  ConfigDoc() = default;
  ConfigDoc(const char* meaning_text, const char* words = "") : meaning(meaning_text), default_words(words) {}
  std::string_view meaning, default_words;
};

// A key or section as declared by its reader.
struct ConfigKey {
  std::string path;          // dotted: "learner.warm_start.batch", "offers[].price"
  std::string type;          // "whole number", "duration", ..., "section" or "list" of sections
  std::string range;         // "1 to 64", "at least 0", "star, chains"; empty: any value
  std::string default_text;  // the default, as YAML or in words; empty if there is none
  std::string meaning;
  std::string when;  // "key: value", such as "adapter: gsm8k": the condition under which the key is read; may be empty
  bool required = false;
  bool default_is_literal = false;   // `default_text` is YAML
  bool optional_section = false;     // the reader tests whether the section is present, so leaving it out has a meaning
  std::string min_text, max_text;    // bounds of a number; empty if there are none
  std::vector<std::string> choices;  // the names of a choice
};

struct ConfigNode;          // a value in the parsed file
struct ConfigState;         // a file: its parsed tree and its problems
struct ConfigSectionState;  // a mapping, and which of its keys were read

// One mapping of the file. An absent section reads as an empty one: defaults stay, required keys are errors.
class ConfigSection {
 public:
  // Dotted path in the file: "" for the root, "fleet.offers[2]" for an element of a list.
  const std::string& path() const;
  // Whether the key has a value. Does not count as reading the key. resolved() omits a tested key without a value.
  bool has(std::string_view key) const;
  // The keys of this mapping, in file order, for mappings with user-defined names.
  std::vector<std::string> keys() const;

  // A nested mapping; an error if the key has another value.
  ConfigSection section(std::string_view key, ConfigDoc doc = {});
  // The mappings of a list; empty if the key is absent.
  std::vector<ConfigSection> sections(std::string_view key, ConfigDoc doc = {});

  // Optional keys: `value` holds the default, and keeps it if the key is absent or invalid.
  template <ConfigNumber T>
  void read(std::string_view key, T& value, std::type_identity_t<Limits<T>> limits, ConfigDoc doc = {}) {
    read_number(key, value, limits, Absent::kDefault, doc);
  }
  template <ConfigNumber T>
  void read(std::string_view key, T& value, ConfigDoc doc = {}) {
    read_number(key, value, {}, Absent::kDefault, doc);
  }
  template <ConfigUnlimited T>
  void read(std::string_view key, T& value, ConfigDoc doc = {}) {
    read_unlimited(key, value, Absent::kDefault, doc);
  }
  // Sets `value` only if the key is present and not null.
  template <ConfigNumber T>
  void read(std::string_view key, std::optional<T>& value, std::type_identity_t<Limits<T>> limits, ConfigDoc doc = {}) {
    T read_value = value.value_or(T{});
    if (read_number(key, read_value, limits, value ? Absent::kDefault : Absent::kNothing, doc)) value = read_value;
  }
  template <ConfigNumber T>
  void read(std::string_view key, std::optional<T>& value, ConfigDoc doc = {}) {
    read(key, value, Limits<T>{}, doc);
  }
  template <ConfigUnlimited T>
  void read(std::string_view key, std::optional<T>& value, ConfigDoc doc = {}) {
    T read_value = value.value_or(T{});
    if (read_unlimited(key, read_value, value ? Absent::kDefault : Absent::kNothing, doc))
      value = std::move(read_value);
  }

  // A number or the word `auto`, which is the default. Sets `value` only for a number.
  template <ConfigNumber T>
  void read_or_auto(std::string_view key, std::optional<T>& value, std::type_identity_t<Limits<T>> limits,
                    ConfigDoc doc = {}) {
    T read_value{};
    if (read_number(key, read_value, limits, Absent::kAuto, doc)) value = read_value;
  }

  // Required keys; a required string or path must not be empty.
  template <ConfigNumber T>
  void require(std::string_view key, T& value, std::type_identity_t<Limits<T>> limits, ConfigDoc doc = {}) {
    read_number(key, value, limits, Absent::kError, doc);
  }
  template <ConfigNumber T>
  void require(std::string_view key, T& value, ConfigDoc doc = {}) {
    read_number(key, value, {}, Absent::kError, doc);
  }
  template <ConfigUnlimited T>
  void require(std::string_view key, T& value, ConfigDoc doc = {}) {
    read_unlimited(key, value, Absent::kError, doc);
  }

  // One of a few names: read_choice("planner", planner, {{"star", Planner::kStar}, {"chains", Planner::kChains}}, doc).
  template <class E>
  void read_choice(std::string_view key, E& value,
                   std::initializer_list<std::pair<std::string_view, std::type_identity_t<E>>> choices,
                   ConfigDoc doc = {}) {
    choose(key, value, choices, Absent::kDefault, doc);
  }
  // As above, for values that are the names themselves.
  void read_choice(std::string_view key, std::string& value, const std::vector<std::string>& names,
                   ConfigDoc doc = {}) {
    if (const auto chosen = choose_index(key, names, value, Absent::kDefault, doc)) value = names[*chosen];
  }
  template <class E>
  void require_choice(std::string_view key, E& value,
                      std::initializer_list<std::pair<std::string_view, std::type_identity_t<E>>> choices,
                      ConfigDoc doc = {}) {
    choose(key, value, choices, Absent::kError, doc);
  }

  // A subtree as JSON text, such as an adapter's own configuration; "{}" if absent. Plain scalars become JSON numbers,
  // booleans and null by YAML's core schema; quoted ones become strings.
  std::string json(std::string_view key, ConfigDoc doc = {});
  // This section as it was read, including defaults, as JSON text that gives the same values when read.
  std::string resolved_json() const;

  // Records a problem found by the caller, at the key's value (or at the section, if the key is absent or "").
  void error(std::string_view key, std::string_view message);

 private:
  friend class ConfigFile;
  explicit ConfigSection(ConfigSectionState& state) : state_(&state) {}

  // An absent key: keeps the default, leaves the value unset, is a problem, or is like the value `auto`.
  enum class Absent { kDefault, kNothing, kError, kAuto };

  // Returns whether the key is present and valid, so that `value` was set.
  template <class T>
  bool read_number(std::string_view key, T& value, const Limits<T>& limits, Absent absent, const ConfigDoc& doc);
  template <class T>
  bool read_unlimited(std::string_view key, T& value, Absent absent, const ConfigDoc& doc);
  template <class E>
  void choose(std::string_view key, E& value, std::initializer_list<std::pair<std::string_view, E>> choices,
              Absent absent, const ConfigDoc& doc) {
    std::vector<std::string> names;
    std::string current;
    for (const auto& [name, meaning] : choices) {
      names.emplace_back(name);
      if (meaning == value && current.empty()) current = name;
    }
    if (const auto chosen = choose_index(key, names, current, absent, doc)) value = choices.begin()[*chosen].second;
  }
  std::optional<std::size_t> choose_index(std::string_view key, const std::vector<std::string>& names,
                                          const std::string& current, Absent absent, const ConfigDoc& doc);
  // Records the key as read. Returns its value, or null. A missing required key is a problem.
  const ConfigNode* find_value(std::string_view key, Absent absent, const ConfigDoc& doc, std::string type,
                               std::string range);

  ConfigSectionState* state_;
};

class ConfigFile {
 public:
  // kNotFound, kIo or kExhausted if the file cannot be read; kInvalid if it is not YAML with a mapping as its root.
  // finish() reports duplicate keys, and everything that only reading the keys can find.
  static Result<ConfigFile> load(const std::filesystem::path& path);
  // Messages name the text `name`.
  static Result<ConfigFile> parse(std::string_view text, std::string name);
  // As parse(), for larger data such as offers: at most 128 MiB and 5,000,000 values. Strict JSON is a third faster
  // than YAML. keys() and resolved() are not available.
  static Result<ConfigFile> parse_json(std::string_view text, std::string name);
  static Result<ConfigFile> parse_yaml_data(std::string_view text, std::string name);
  // An empty file in which every list has one element, for documenting a reader.
  static ConfigFile blank();
  ConfigFile(ConfigFile&&) noexcept;
  ConfigFile& operator=(ConfigFile&&) noexcept;
  ~ConfigFile();

  ConfigSection root();
  // Overrides or adds one key; call before any read. Problems with it are reported as `--set a.b: ...`. The text is
  // taken literally; lists and mappings are written in brackets: [a, b], {a: 1}.
  Status set(std::string_view dotted_key, std::string_view text);
  // Removes a key from the root; call before any read. Returns a file with that key alone and its original positions;
  // empty if the key is absent.
  ConfigFile split(std::string_view key);
  // The file as YAML, as parsed and set, whether or not it was read.
  std::string text() const;

  // kInvalid with every problem so far, one per line in file order. Call it after all reads.
  Status finish();
  // The configuration as it was read, including defaults, as YAML that gives the same values when read.
  std::string resolved() const;
  // Every section and key that was read, in reading order. A section comes before its content: first its keys, then its
  // sections.
  std::vector<ConfigKey> keys() const;

 private:
  explicit ConfigFile(std::unique_ptr<ConfigState> state);
  static Result<ConfigFile> parse_as(std::string_view text, std::string name, bool is_data_file);
  std::unique_ptr<ConfigState> state_;
};

}  // namespace echoline

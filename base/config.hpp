// Run files: YAML read with positions, so that every mistake is reported at once as `file:line:col: message`.
//
//   ECHO_ASSIGN(ConfigFile file, ConfigFile::load("run.yaml"));
//   ECHO_TRY(file.set("learner.steps", "50"));                       // --set learner.steps=50
//   ConfigSection learner = file.root().section("learner");
//   learner.require("steps", steps, {.min = 1, .max = 1'000'000}, "steps of the whole run");  // absent: an error
//   learner.read("uplink", uplink, "the learner's link");            // absent: `uplink` keeps its default
//   if (budget < kappa) learner.error("staleness", "expected at least publish_every");
//   ECHO_TRY(file.finish());                                         // every problem, or none
//
// The reader is the documentation as well: run over ConfigFile::blank(), it leaves behind every key with its type,
// range, default and meaning (base/config_reference.hpp makes pages of them).
//
// Reads never fail on the spot: they note the problem, leave the value as it was, and finish() reports them all.
// A key that nobody asked for is an error too, so each key must be read, even where another key makes it idle.
// Not accepted: aliases and anchors, more than 1 MiB, 64 levels or 100,000 values. JSON files are YAML as well.
// Not thread-safe; sections must not outlive their file.
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

// Inclusive bounds of a value; an absent bound does not limit.
template <class T>
struct Limits {
  std::optional<T> min = std::nullopt;
  std::optional<T> max = std::nullopt;
};

// Values with an order, to which Limits apply. Integers accept digits and '_' (1_000_000); a Duration, Bytes or
// BitRate must carry its unit (base/units.hpp), a plain number must not.
template <class T>
concept ConfigNumber = std::same_as<T, int> || std::same_as<T, std::int64_t> || std::same_as<T, std::uint32_t> ||
    std::same_as<T, std::uint64_t> || std::same_as<T, double> || std::same_as<T, Duration> || std::same_as<T, Bytes> ||
    std::same_as<T, BitRate>;
// Values without bounds. Booleans are `true` and `false` only. A relative path refers to the folder of the file that
// names it, a relative one of a --set or a default to the working directory; what is read is absolute.
template <class T>
concept ConfigText = std::same_as<T, bool> || std::same_as<T, std::string> || std::same_as<T, std::filesystem::path> ||
    std::same_as<T, std::vector<std::string>> || std::same_as<T, std::vector<std::int64_t>> ||
    std::same_as<T, std::vector<double>>;

// What a key means, for the reference: text that lives as long as the program. `fallback` says what an absent key means
// where that is not simply the default value.
struct ConfigDoc {
  ConfigDoc() = default;
  ConfigDoc(const char* meaning_text, const char* fallback_text = "")
      : meaning(meaning_text), fallback(fallback_text) {}
  std::string_view meaning, fallback;
};

// A key or section as its reader declares it.
struct ConfigKey {
  std::string path;      // dotted: "learner.warm_start.batch", "offers[].price"
  std::string type;      // "whole number", "duration", ..., "section" or "list" of sections
  std::string range;     // "1 to 64", "at least 0", "star, chains"; empty when any value will do
  std::string fallback;  // the default, as YAML or in words; empty when there is none
  std::string meaning;
  std::string when;  // the value of another key with which alone it is read: "adapter: gsm8k"
  bool required = false;
  bool fallback_is_value = false;
  bool presence = false;             // that the section is there means something in itself
  std::string least, most;           // the ends of a number's range; empty where there is none
  std::vector<std::string> choices;  // the names of a choice
};

struct ConfigNode;          // a value of the parsed file
struct ConfigState;         // a file: its parsed tree and the errors so far
struct ConfigSectionState;  // a mapping of it, and which of its keys were asked for

// One mapping of the file. A section that is absent reads as an empty one: defaults stay, required keys are errors.
class ConfigSection {
 public:
  // Dotted place in the file: "" for the root, "fleet.offers[2]" for an element of a list.
  const std::string& path() const;
  // True when the key has a value; asking does not count as reading it. Where it has none, resolved() leaves it out.
  bool has(std::string_view key) const;
  // The keys of this mapping, in file order, for mappings whose keys are names the user chose.
  std::vector<std::string> keys() const;

  // A nested mapping; an error when the key holds something else.
  ConfigSection section(std::string_view key, ConfigDoc doc = {});
  // The mappings of a list; empty when the key is absent.
  std::vector<ConfigSection> sections(std::string_view key, ConfigDoc doc = {});

  // Optional keys: `value` comes in as the default and stays it when the key is absent or wrong.
  template <ConfigNumber T>
  void read(std::string_view key, T& value, std::type_identity_t<Limits<T>> limits, ConfigDoc doc = {}) {
    read_number(key, value, limits, Absent::kDefault, doc);
  }
  template <ConfigNumber T>
  void read(std::string_view key, T& value, ConfigDoc doc = {}) {
    read_number(key, value, {}, Absent::kDefault, doc);
  }
  template <ConfigText T>
  void read(std::string_view key, T& value, ConfigDoc doc = {}) {
    read_text(key, value, Absent::kDefault, doc);
  }
  // `value` is set only when the key is present and not null.
  template <ConfigNumber T>
  void read(std::string_view key, std::optional<T>& value, std::type_identity_t<Limits<T>> limits, ConfigDoc doc = {}) {
    T given = value.value_or(T{});
    if (read_number(key, given, limits, value ? Absent::kDefault : Absent::kNothing, doc)) value = given;
  }
  template <ConfigNumber T>
  void read(std::string_view key, std::optional<T>& value, ConfigDoc doc = {}) {
    read(key, value, Limits<T>{}, doc);
  }
  template <ConfigText T>
  void read(std::string_view key, std::optional<T>& value, ConfigDoc doc = {}) {
    T given = value.value_or(T{});
    if (read_text(key, given, value ? Absent::kDefault : Absent::kNothing, doc)) value = std::move(given);
  }

  // A number, or the word `auto`, which is the default: `value` is set only where there is a number.
  template <ConfigNumber T>
  void read_or_auto(std::string_view key, std::optional<T>& value, std::type_identity_t<Limits<T>> limits,
                    ConfigDoc doc = {}) {
    T given{};
    if (read_number(key, given, limits, Absent::kAuto, doc)) value = given;
  }

  // Keys that must be there; a required string or path must not be empty either.
  template <ConfigNumber T>
  void require(std::string_view key, T& value, std::type_identity_t<Limits<T>> limits, ConfigDoc doc = {}) {
    read_number(key, value, limits, Absent::kError, doc);
  }
  template <ConfigNumber T>
  void require(std::string_view key, T& value, ConfigDoc doc = {}) {
    read_number(key, value, {}, Absent::kError, doc);
  }
  template <ConfigText T>
  void require(std::string_view key, T& value, ConfigDoc doc = {}) {
    read_text(key, value, Absent::kError, doc);
  }

  // One of a few names: read_choice("planner", planner, {{"star", Planner::kStar}, {"chains", Planner::kChains}}, doc).
  template <class E>
  void read_choice(std::string_view key, E& value,
                   std::initializer_list<std::pair<std::string_view, std::type_identity_t<E>>> choices,
                   ConfigDoc doc = {}) {
    choose(key, value, choices, Absent::kDefault, doc);
  }
  // The same where the value is the name itself.
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

  // A subtree as JSON text for whoever understands it, such as an adapter's own configuration; "{}" when absent.
  // Plain scalars become JSON numbers, booleans and null as YAML's core schema has them, quoted ones strings.
  std::string json(std::string_view key, ConfigDoc doc = {});
  // This section as it was read, defaults included, as JSON text that reads back to the same values.
  std::string resolved_json() const;

  // Notes a problem that only the caller can see, where the key's value is (or the section, when the key is absent or
  // "").
  void error(std::string_view key, std::string_view message);

 private:
  friend class ConfigFile;
  explicit ConfigSection(ConfigSectionState& state) : state_(&state) {}

  // The meaning of an absent key. kAuto: the same as the value `auto`.
  enum class Absent { kDefault, kNothing, kError, kAuto };

  // True when the key is present and right, so that `value` was set.
  template <class T>
  bool read_number(std::string_view key, T& value, const Limits<T>& limits, Absent absent, const ConfigDoc& doc);
  template <class T>
  bool read_text(std::string_view key, T& value, Absent absent, const ConfigDoc& doc);
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
  // Counts as asking for the key; its value, or null when it has none. A missing required key is noted.
  const ConfigNode* wanted(std::string_view key, Absent absent, const ConfigDoc& doc, std::string type,
                           std::string range);

  ConfigSectionState* state_;
};

class ConfigFile {
 public:
  // kNotFound, kIo or kExhausted when the file cannot be read; kInvalid when it is not YAML with a mapping at its
  // root (what can only be found by reading keys, and duplicate keys, wait for finish()).
  static Result<ConfigFile> load(const std::filesystem::path& path);
  // `name` stands for the file in messages.
  static Result<ConfigFile> parse(std::string_view text, std::string name);
  // The same for data, such as offers, which may be larger: at most 128 MiB and 5,000,000 values. Strict JSON is a
  // third faster than YAML. Their keys() and resolved() are not kept.
  static Result<ConfigFile> parse_json(std::string_view text, std::string name);
  static Result<ConfigFile> parse_yaml_data(std::string_view text, std::string name);
  // A file that has nothing in it and in which every list has one element, for a reader to be documented.
  static ConfigFile blank();
  ConfigFile(ConfigFile&&) noexcept;
  ConfigFile& operator=(ConfigFile&&) noexcept;
  ~ConfigFile();

  ConfigSection root();
  // Overrides or adds one key before anything is read; problems with it are reported as `--set a.b: ...`. The text is
  // taken as it stands; lists and mappings are written in brackets: [a, b], {a: 1}.
  Status set(std::string_view dotted_key, std::string_view text);
  // Takes a key of the root out of the file, before anything is read: a file with that key alone, whose places are
  // still those of the whole; empty where there is none.
  ConfigFile split(std::string_view key);
  // As YAML, as it was parsed and set, whether it was read or not.
  std::string text() const;

  // kInvalid with every problem so far, one per line in file order; call it after all reads.
  Status finish();
  // The configuration as it was read, defaults included, as YAML that reads back to the same values.
  std::string resolved() const;
  // Every section and key that was asked for, in the order of asking; a section comes before what is in it, first its
  // keys, then further sections.
  std::vector<ConfigKey> keys() const;

 private:
  explicit ConfigFile(std::unique_ptr<ConfigState> state);
  static Result<ConfigFile> parse_as(std::string_view text, std::string name, bool data);
  std::unique_ptr<ConfigState> state_;
};

}  // namespace echoline

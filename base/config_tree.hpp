// The parsed form of a run file; reads and writes YAML. Private to base/; only config_tree.cpp uses libyaml.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.hpp"

namespace echoline {

inline constexpr std::size_t kConfigBytesMax = 1 << 20;
inline constexpr std::size_t kConfigDepthMax = 64;
inline constexpr std::size_t kConfigValuesMax = 100'000;
// For data files: a hundred thousand offers.
inline constexpr std::size_t kDataBytesMax = 128 << 20;
inline constexpr std::size_t kDataValuesMax = 5'000'000;

// The position of a value. Line and column count from 1; source 0 is the file, n the n-th --set.
struct ConfigPlace {
  std::uint32_t source = 0;
  int line = 1;
  int column = 1;
  friend auto operator<=>(const ConfigPlace&, const ConfigPlace&) = default;
};

struct ConfigNode {
  enum class Kind { kNull, kScalar, kSequence, kMapping };
  Kind kind = Kind::kNull;
  ConfigPlace place;
  std::string text;               // of a scalar
  bool quoted = false;            // a quoted or block scalar is always text
  bool is_text = false;           // a plain scalar that was read as text
  std::vector<std::string> keys;  // of a mapping, in file order and unique; key_places and children correspond
  std::vector<ConfigPlace> key_places;
  std::vector<ConfigNode> children;  // the values of a mapping, or the items of a sequence

  ConfigNode* find(std::string_view key);
  const ConfigNode* find(std::string_view key) const { return const_cast<ConfigNode*>(this)->find(key); }
};

struct ConfigProblem {
  ConfigPlace place;
  std::string message;
};

// Keeps the first of several equal keys in a mapping; the others become problems.
void drop_duplicates(ConfigNode& mapping, std::vector<ConfigProblem>& problems);

// Parses one YAML document. Adds problems: duplicate keys (the first one stays). If the text is unusable, adds a last
// problem and returns false. `data`: allows the size of data files.
bool parse_yaml(std::string_view text, std::uint32_t source, ConfigNode& root, std::vector<ConfigProblem>& problems,
                bool data = false);

// Like parse_yaml() with `data`, for strict JSON.
bool parse_json(std::string_view text, std::uint32_t source, ConfigNode& root, std::vector<ConfigProblem>& problems);

// Parses the value of a --set. Lists and mappings in brackets and quoted texts are YAML. All other text is taken
// literally, so that "::" is an address and not a mapping.
bool parse_set_value(std::string_view text, std::uint32_t source, ConfigNode& root,
                     std::vector<ConfigProblem>& problems);

std::string to_yaml(const ConfigNode& node);

// A subtree as JSON text; plain scalars have the types of YAML's core schema.
std::string to_json(const ConfigNode& node);

// Parses a number in the form of run files; false if the text is not exactly a number that fits.
bool parse_whole(std::string_view text, std::int64_t& value);
bool parse_whole(std::string_view text, std::uint64_t& value);
bool parse_decimal(std::string_view text, double& value);

}  // namespace echoline

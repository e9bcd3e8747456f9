// The parsed form of a run file, and YAML in and out of it. Private to base/: libyaml stops in config_tree.cpp.
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
// Of a file of data: a hundred thousand offers.
inline constexpr std::size_t kDataBytesMax = 128 << 20;
inline constexpr std::size_t kDataValuesMax = 5'000'000;

// Where a value stands. Line and column count from 1; source 0 is the file, n the n-th --set.
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
  bool quoted = false;            // a scalar in quotes or a block scalar is always text
  bool is_text = false;           // what was read from a scalar was text, whatever it looks like
  std::vector<std::string> keys;  // of a mapping, in file order and unique; places and children go with them
  std::vector<ConfigPlace> key_places;
  std::vector<ConfigNode> children;  // the values of a mapping, or the items of a sequence

  ConfigNode* find(std::string_view key);
  const ConfigNode* find(std::string_view key) const { return const_cast<ConfigNode*>(this)->find(key); }
};

struct ConfigProblem {
  ConfigPlace place;
  std::string message;
};

// Of keys that a mapping has more than once the first stays; the others are problems.
void drop_duplicates(ConfigNode& mapping, std::vector<ConfigProblem>& problems);

// Parses one YAML document. `problems` receives what is wrong: duplicate keys (the first one stays) and, when the
// text cannot be used at all, one last problem with the return value false. `data`: it may be larger than run files
// are.
bool parse_yaml(std::string_view text, std::uint32_t source, ConfigNode& root, std::vector<ConfigProblem>& problems,
                bool data = false);

// The same for strict JSON, which is not limited to the size of a run file.
bool parse_json(std::string_view text, std::uint32_t source, ConfigNode& root, std::vector<ConfigProblem>& problems);

// The value of a --set: a list or mapping in brackets and a text in quotes are YAML, anything else is taken as it
// stands, so that "::" is an address and not a mapping.
bool parse_set_value(std::string_view text, std::uint32_t source, ConfigNode& root,
                     std::vector<ConfigProblem>& problems);

std::string to_yaml(const ConfigNode& node);

// JSON text of a subtree; plain scalars have the types of YAML's core schema.
std::string to_json(const ConfigNode& node);

// Whole and decimal numbers as a run file writes them; false when the text is not exactly one that fits.
bool parse_whole(std::string_view text, std::int64_t& value);
bool parse_whole(std::string_view text, std::uint64_t& value);
bool parse_decimal(std::string_view text, double& value);

}  // namespace echoline

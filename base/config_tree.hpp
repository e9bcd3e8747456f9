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
// Data files, such as a list of 100,000 rental offers, may be larger than run files.
inline constexpr std::size_t kDataBytesMax = 128 << 20;
inline constexpr std::size_t kDataValuesMax = 5'000'000;

inline constexpr std::uint32_t kFileSource = 0;

// The position of a value. Line and column count from 1. The source is kFileSource for the file, and n for the n-th
// --set of the command line.
struct ConfigPlace {
  std::uint32_t source = kFileSource;
  int line = 1;
  int column = 1;
  friend auto operator<=>(const ConfigPlace&, const ConfigPlace&) = default;
};

struct ConfigNode {
  enum class Kind { kNull, kScalar, kSequence, kMapping };
  Kind kind = Kind::kNull;
  ConfigPlace place;
  std::string text;      // the text of a scalar
  bool quoted = false;   // written as a quoted or block scalar, which is always text
  bool is_text = false;  // a reader took this plain scalar as text, so to_json() must not print a number or boolean
  std::vector<std::string> keys;  // keys of a mapping, in file order and unique; key_places and children correspond
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

// Parses one YAML document. Reports duplicate keys in `problems`, keeps the first, and still returns true. If the text
// is unusable, adds one more problem and returns false. `is_data_file` allows the size of data files.
bool parse_yaml(std::string_view text, std::uint32_t source, ConfigNode& root, std::vector<ConfigProblem>& problems,
                bool is_data_file = false);

// Like parse_yaml() with `is_data_file`, for strict JSON.
bool parse_json(std::string_view text, std::uint32_t source, ConfigNode& root, std::vector<ConfigProblem>& problems);

// Parses the value of a --set. Bracketed lists and mappings, and quoted texts, are parsed as YAML. All other text is
// taken literally, so that "::" is an address and not a mapping.
bool parse_set_value(std::string_view text, std::uint32_t source, ConfigNode& root,
                     std::vector<ConfigProblem>& problems);

std::string to_yaml(const ConfigNode& node);

// A subtree as JSON text; plain scalars have the types of YAML's core schema.
std::string to_json(const ConfigNode& node);

// Parses a number as run files write it, such as 1_000_000. False if the text is anything else, or does not fit.
// parse_decimal() also accepts 0.5 and 1e-3.
bool parse_integer(std::string_view text, std::int64_t& value);
bool parse_integer(std::string_view text, std::uint64_t& value);
bool parse_decimal(std::string_view text, double& value);

}  // namespace echoline

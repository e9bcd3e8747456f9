// Properties of the built-in adapters, for choosing one. They are known without options or files.
#pragma once
#include <optional>
#include <string_view>
#include <vector>

#include "data_plane/adapters/adapter.hpp"

namespace echoline::data_plane {

struct AdapterKind {
  std::string_view name, meaning;
  std::optional<bool> many_turns;        // in an episode; absent: depends on its options or program
  std::optional<Repeatable> repeatable;  // absent: depends on its options or program
  bool needs_file = false;               // problems come from a file that the options must name
  bool needs_sandbox = false;            // scoring starts programs, so it needs bubblewrap
};

// In alphabetical order, like adapter_names().
std::vector<AdapterKind> adapter_kinds();

// "cheaply", "costly", "not".
std::string_view to_string(Repeatable repeatable);

}  // namespace echoline::data_plane

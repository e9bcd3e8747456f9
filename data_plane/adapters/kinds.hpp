// What the built-in adapters are, for who chooses one: no options and no files are needed to know it.
#pragma once
#include <optional>
#include <string_view>
#include <vector>

#include "data_plane/adapters/adapter.hpp"

namespace echoline::data_plane {

struct AdapterKind {
  std::string_view name, meaning;
  std::optional<bool> turns;             // many; absent: as its options or its program say
  std::optional<Repeatable> repeatable;  // likewise
  bool file = false;                     // problems come from a file that has to be named
  bool sandbox = false;                  // grading starts programs, so bubblewrap is needed where it is done
};

// In alphabetical order, as adapter_names().
std::vector<AdapterKind> adapter_kinds();

// "cheaply", "costly", "not".
std::string_view to_string(Repeatable repeatable);

}  // namespace echoline::data_plane

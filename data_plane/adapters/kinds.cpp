// The table of the built-in adapters' properties.
#include "data_plane/adapters/kinds.hpp"

#include "data_plane/adapters/adapter_config.hpp"

namespace echoline::data_plane {
namespace {

struct Row {
  const BuiltIn* adapter;
  std::optional<bool> many_turns = false;
  std::optional<Repeatable> repeatable = Repeatable::kCheaply;
  bool needs_file = false, needs_sandbox = false;
};

constexpr Row kRows[] = {
    {.adapter = &kArithmetic},
    {.adapter = &kCode, .repeatable = Repeatable::kCostly, .needs_file = true, .needs_sandbox = true},
    {.adapter = &kCountdown},
    {.adapter = &kDapoMath, .needs_file = true},
    {.adapter = &kGsm8k, .needs_file = true},
    {.adapter = &kGuess, .many_turns = true},
    {.adapter = &kJsonl, .needs_file = true},
    {.adapter = &kLibrary,
     .many_turns = std::nullopt,
     .repeatable = std::nullopt,
     .needs_file = true,
     .needs_sandbox = true},
    {.adapter = &kMath, .needs_file = true},
    {.adapter = &kNemoGym, .many_turns = std::nullopt, .repeatable = Repeatable::kNot, .needs_file = true},
    {.adapter = &kOpenEnv, .many_turns = std::nullopt, .repeatable = Repeatable::kNot},
    {.adapter = &kPoker, .many_turns = true},
    {.adapter = &kProcess, .many_turns = std::nullopt, .repeatable = std::nullopt, .needs_sandbox = true},
};

}  // namespace

std::vector<AdapterKind> adapter_kinds() {
  std::vector<AdapterKind> kinds;
  for (const Row& row : kRows)
    kinds.push_back({.name = row.adapter->name,
                     .meaning = row.adapter->meaning,
                     .many_turns = row.many_turns,
                     .repeatable = row.repeatable,
                     .needs_file = row.needs_file,
                     .needs_sandbox = row.needs_sandbox});
  return kinds;
}

std::string_view to_string(Repeatable repeatable) {
  switch (repeatable) {
    case Repeatable::kCheaply:
      return "cheaply";
    case Repeatable::kCostly:
      return "costly";
    case Repeatable::kNot:
      return "not";
  }
  return "";
}

}  // namespace echoline::data_plane

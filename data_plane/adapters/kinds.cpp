#include "data_plane/adapters/kinds.hpp"

#include "data_plane/adapters/adapter_config.hpp"

namespace echoline::data_plane {
namespace {

struct Row {
  const BuiltIn* adapter;
  std::optional<bool> turns;
  std::optional<Repeatable> repeatable;
  bool file, sandbox;
};

constexpr Row kRows[] = {
    {&kArithmetic, false, Repeatable::kCheaply, false, false}, {&kCode, false, Repeatable::kCostly, true, true},
    {&kCountdown, false, Repeatable::kCheaply, false, false},  {&kDapoMath, false, Repeatable::kCheaply, true, false},
    {&kGsm8k, false, Repeatable::kCheaply, true, false},       {&kGuess, true, Repeatable::kCheaply, false, false},
    {&kJsonl, false, Repeatable::kCheaply, true, false},       {&kLibrary, std::nullopt, std::nullopt, true, true},
    {&kMath, false, Repeatable::kCheaply, true, false},        {&kNemoGym, std::nullopt, Repeatable::kNot, true, false},
    {&kOpenEnv, std::nullopt, Repeatable::kNot, false, false}, {&kPoker, true, Repeatable::kCheaply, false, false},
    {&kProcess, std::nullopt, std::nullopt, false, true},
};

}  // namespace

std::vector<AdapterKind> adapter_kinds() {
  std::vector<AdapterKind> kinds;
  for (const Row& row : kRows)
    kinds.push_back({row.adapter->name, row.adapter->meaning, row.turns, row.repeatable, row.file, row.sandbox});
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

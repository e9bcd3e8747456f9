// What a language model reads and writes at the table. Private to data_plane/.
#pragma once
#include <optional>
#include <string>
#include <string_view>

#include "data_plane/adapters/poker/game.hpp"

namespace echoline::data_plane::poker {

// The rules, and in which form an action is wanted.
std::string explain(const Rules& rules, std::uint64_t hands);

// What a player who has to act knows, and what it may do. `hand` counts from 1 and is left out where there is one.
std::string describe(const View& view, std::uint64_t hand, std::uint64_t hands);

// How a hand has ended, for its player: "Your opponent folds. You win 100."
std::string describe_end(const View& view, Chips won);

// The action of the last "<action>...</action>": fold, check, call or "raise N" (N chips put in over the whole hand),
// in any case. Nothing where there is none, where it says something else, or where it is not legal now: with something
// owed there is no check, without no call.
std::optional<Action> parse_answer(std::string_view response, const Legal& legal);

// "<action>raise 600</action>": what parse_answer() reads as this action.
std::string answer(Action action, const Legal& legal);

}  // namespace echoline::data_plane::poker

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

// The same game in few characters, for models that read no prose.

// What a player who has to act knows, in a line: "s 9s8h 8c8d5c Cc/cR 2 4: " is the small blind with these cards on
// this board; the opponent (in capitals) has called and the player checked before the flop (c is both), then checked
// and the opponent raised; 2 big blinds are to call, and 4 are in the pot. '-' stands for no board, and for no betting.
std::string describe_tersely(const View& view);

// The last letter of the response: f folds, c checks or calls, r is the smallest raise, p a raise by the pot, a all-in;
// where these are less or more than is legal, they are the nearest legal raise. Nothing for every other letter, a fold
// with nothing owed, and a raise where none is legal.
std::optional<Action> parse_letter(std::string_view response, const View& view);

// The letter that comes closest to this action.
std::string letter(Action action, const View& view);

}  // namespace echoline::data_plane::poker

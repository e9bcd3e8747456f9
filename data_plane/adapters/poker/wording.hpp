// Texts that describe the game to a language model, and parsers of its answers. Private to data_plane/.
#pragma once
#include <optional>
#include <string>
#include <string_view>

#include "data_plane/adapters/poker/game.hpp"

namespace echoline::data_plane::poker {

// Explains the rules and the form of an answer.
std::string explain(const Rules& rules, std::uint64_t hands);

// Describes the game to the player who has to act, and its legal actions. `hand` counts from 1 and is left out if there
// is only one hand.
std::string describe(const View& view, std::uint64_t hand, std::uint64_t hands);

// Describes the end of a hand to a player: "Your opponent folds. You win 100."
std::string describe_end(const View& view, Chips won);

// Parses the last "<action>...</action>": fold, check, call or "raise N" (N chips put in over the whole hand), in upper
// or lower case. Nothing if it is missing, says anything else, or is illegal now: a check is illegal if chips are owed,
// a call if none are.
std::optional<Action> parse_answer(std::string_view response, const LegalActions& legal);

// The inverse of parse_answer(): "<action>raise 600</action>".
std::string answer_text(Action action, const LegalActions& legal);

// The functions below describe the same game in few characters, for models that read no prose.

// The state in one line. "s 9s8h 8c8d5c Cc/cR 2 4: " is the small blind with these cards and this board. Before the
// flop the opponent (capitals) called and the player checked (c is both); then the player checked and the opponent
// raised. 2 big blinds are owed and the pot has 4. '-' stands for an empty board and for no betting.
std::string describe_tersely(const View& view);

// Parses the response's last letter: f folds, c checks or calls, r is the smallest raise, p a raise by the pot, a
// all-in. A raise outside the legal range becomes the nearest legal one. Nothing for any other letter, a fold if
// nothing is owed, and a raise if none is legal.
std::optional<Action> parse_letter(std::string_view response, const View& view);

// The letter nearest to this action.
std::string letter_of(Action action, const View& view);

}  // namespace echoline::data_plane::poker

// The interface of a poker player, and the built-in players.
#pragma once
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data_plane/adapters/poker/game.hpp"

namespace echoline::data_plane::poker {

// A player; use from one thread at a time. A policy or a server of language models can be one, so deciding can fail.
// The built-in players never fail.
class Player {
 public:
  virtual ~Player() = default;
  virtual std::string_view name() const = 0;
  // Called on this player's turn. All its randomness comes from `random`, so that hands can be replayed.
  virtual Result<Action> decide(const View& view, Random& random) = 0;
};

// random: folds, calls or raises with equal probability, if legal; raises to any legal total.
// caller: always checks or calls.
// tight: plays good cards and bets them; docs/reference/poker.md has its rules.
// kInvalid for any other name, with the list.
Result<std::unique_ptr<Player>> make_player(std::string_view name);
std::vector<std::string> player_names();

// The share of the pot that `own` wins against unknown cards: the mean over `deals` random choices of the opponent's
// cards and the rest of the board. `board` holds 0, 3, 4 or 5 cards.
double equity(const Hole& own, std::span<const Card> board, int deals, Random& random);

// Twice the Chen formula's points of two hole cards: 40 for a pair of aces, -2 for 7 2 of two suits.
int chen_half_points(const Hole& own);

}  // namespace echoline::data_plane::poker

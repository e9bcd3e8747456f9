// Who sits at a table: the seam to anything that decides, and the built-in players.
#pragma once
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data_plane/adapters/poker/game.hpp"

namespace echoline::data_plane::poker {

// Something that plays; one thread at a time. A policy or a server of language models is one too, which is why deciding
// can fail; the built-in ones never do.
class Player {
 public:
  virtual ~Player() = default;
  virtual std::string_view name() const = 0;
  // Called where it is this player's turn. What is random about it comes from `random`, so that hands can be repeated.
  virtual Result<Action> decide(const View& view, Random& random) = 0;
};

// random: fold, call and raise alike, as far as they are legal; a raise to any legal total.
// caller: checks or calls whatever happens.
// tight: plays good cards and bets them; the rules stand in docs/tasks.md, "Poker".
// kInvalid on another name, with the list.
Result<std::unique_ptr<Player>> make_player(std::string_view name);
std::vector<std::string> player_names();

// The share of the pot that `own` wins against cards nobody has seen: the mean over `deals` random ways to deal the
// other player's cards and the rest of the board. `board` holds 0, 3, 4 or 5 cards.
double equity(const Hole& own, std::span<const Card> board, int deals, Random& random);

// Points of the Chen formula for two hole cards, twice: 40 for a pair of aces, -2 for 7 2 of two suits.
int chen_half_points(const Hole& own);

}  // namespace echoline::data_plane::poker

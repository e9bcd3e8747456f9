// Hands between two players, and how much better one of them is.
#pragma once
#include <array>
#include <cstdint>

#include "base/result.hpp"
#include "data_plane/adapters/poker/players.hpp"

namespace echoline::data_plane::poker {

// The random numbers of hand `hand` of a table: what is dealt, and what a player in a position draws. They do not
// depend on who sits there or on what was done before, so other players meet the same luck in the same position.
struct HandRandom {
  HandRandom(std::uint64_t seed, std::uint64_t hand);
  Random deal;
  std::array<Random, 2> position;
};

// Plays one hand to its end; returns the chips that position 0 wins. Fails where a player does, or does what is not
// legal.
Result<Chips> play_hand(Betting& betting, const Deal& deal, const std::array<Player*, 2>& at_position,
                        std::array<Random, 2>& random);

struct MatchResult {
  std::uint64_t hands = 0;
  double bb_per_100 = 0;             // big blinds that the first player won per hundred hands
  double bb_per_100_half_width = 0;  // half of the 95 % confidence interval (normal; pairs of hands are what varies)
  std::array<double, 2> bb_per_100_at{};  // the same in position 0 (big blind) and 1 alone
};

// Deals every hand twice, with the players in each other's positions: who had the better cards cancels out. Requires at
// least one pair of hands, and rules that pass check(); the same seed gives the same result.
Result<MatchResult> duplicate_match(Player& first, Player& second, const Rules& rules, std::uint64_t pairs,
                                    std::uint64_t seed);

}  // namespace echoline::data_plane::poker

// Plays hands between two players and measures which one is better.
#pragma once
#include <array>
#include <cstdint>

#include "base/result.hpp"
#include "data_plane/adapters/poker/players.hpp"

namespace echoline::data_plane::poker {

// The random numbers of hand `hand` of a table: the deal, and each position's draws. They do not depend on the players
// or on earlier actions, so all players have the same luck in the same position.
struct HandRandom {
  HandRandom(std::uint64_t seed, std::uint64_t hand);
  Random deal;
  std::array<Random, 2> by_position;
};

// Plays one hand to its end and returns the chips that position 0 wins. Fails if a player fails or acts illegally.
Result<Chips> play_hand(Betting& betting, const Deal& deal, const std::array<Player*, 2>& players,
                        std::array<Random, 2>& random);

struct MatchResult {
  std::uint64_t hands = 0;
  double bb_per_100 = 0;                  // big blinds that the first player won per hundred hands
  double bb_per_100_half_width = 0;       // half of the 95 % confidence interval (normal; a pair is one sample)
  std::array<double, 2> bb_per_100_at{};  // the same in position 0 (big blind) and 1 alone
};

// Deals every hand twice, with swapped positions, so that luck cancels out. Requires at least one pair of hands and
// rules that pass check(). The same seed gives the same result.
Result<MatchResult> duplicate_match(Player& first, Player& second, const Rules& rules, std::uint64_t pairs,
                                    std::uint64_t seed);

}  // namespace echoline::data_plane::poker

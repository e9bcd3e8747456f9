// Plays single hands for the task "poker", and duplicate matches between two players. A duplicate match plays every
// deal twice with swapped positions, so that luck cancels out.
#include "data_plane/adapters/poker/match.hpp"

#include <cmath>

namespace echoline::data_plane::poker {
namespace {

constexpr double kStandardErrorsAt95Percent = 1.96;  // half width of a normal distribution's 95 % interval
constexpr std::uint64_t kStreamsPerHand = 3;         // random streams: the deal, and the draws of each position

// Running mean and variance (Welford).
class Moments {
 public:
  void add(double sample) {
    const double deviation = sample - mean_;
    mean_ += deviation / static_cast<double>(++count_);
    squared_deviations_ += deviation * (sample - mean_);
  }
  double mean() const { return mean_; }
  double standard_error() const {
    if (count_ < 2) return 0;
    const auto n = static_cast<double>(count_);
    return std::sqrt(squared_deviations_ / (n - 1) / n);
  }

 private:
  std::uint64_t count_ = 0;
  double mean_ = 0, squared_deviations_ = 0;
};

}  // namespace

HandRandom::HandRandom(std::uint64_t seed, std::uint64_t hand)
    : deal(seed, kStreamsPerHand * hand),
      by_position{Random(seed, kStreamsPerHand * hand + 1), Random(seed, kStreamsPerHand * hand + 2)} {}

Result<Chips> play_hand(Betting& betting, const Deal& deal, const std::array<Player*, 2>& players,
                        std::array<Random, 2>& random) {
  betting.restart();
  while (!betting.is_over()) {
    const auto position = static_cast<std::size_t>(betting.position_to_act());
    ECHO_ASSIGN(const Action action,
                players[position]->decide(view_of(betting, deal, betting.position_to_act()), random[position]));
    ECHO_TRY(betting.act(action));
  }
  return chips_won_by_position_0(betting, deal);
}

Result<MatchResult> duplicate_match(Player& first, Player& second, const Rules& rules, std::uint64_t pairs,
                                    std::uint64_t seed) {
  ECHO_TRY(rules.check());
  if (pairs == 0) return fail(Code::kInvalid, "", "a match needs at least one pair of hands");
  Betting betting(rules);
  Moments pair_mean, as_big_blind, as_small_blind;
  // Chips won in one hand, divided by this, are big blinds per hundred hands.
  const double chips_per_unit = static_cast<double>(rules.big_blind) / 100;
  for (std::uint64_t pair = 0; pair < pairs; ++pair) {
    HandRandom hand_random(seed, pair);
    const Deal deal = Deal::draw(hand_random.deal);
    auto draws = hand_random.by_position, same_draws = hand_random.by_position;
    ECHO_ASSIGN(const Chips won_as_big_blind, play_hand(betting, deal, {&first, &second}, draws));
    ECHO_ASSIGN(const Chips lost_as_small_blind, play_hand(betting, deal, {&second, &first}, same_draws));
    const double big_blind_result = static_cast<double>(won_as_big_blind) / chips_per_unit,
                 small_blind_result = static_cast<double>(-lost_as_small_blind) / chips_per_unit;
    as_big_blind.add(big_blind_result);
    as_small_blind.add(small_blind_result);
    pair_mean.add((big_blind_result + small_blind_result) / 2);
  }
  return MatchResult{.hands = 2 * pairs,
                     .bb_per_100 = pair_mean.mean(),
                     .bb_per_100_half_width = kStandardErrorsAt95Percent * pair_mean.standard_error(),
                     .bb_per_100_at = {as_big_blind.mean(), as_small_blind.mean()}};
}

}  // namespace echoline::data_plane::poker

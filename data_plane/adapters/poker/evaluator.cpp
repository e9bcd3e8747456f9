// Finds the best hand by counting ranks and suits in the bits of a CardSet.
#include "data_plane/adapters/poker/evaluator.hpp"

#include <array>

namespace echoline::data_plane::poker {
namespace {

using Ranks = std::uint32_t;  // bit 0: deuce ... bit 12: ace

HandValue hand_value(Category category, Ranks hand_ranks, Ranks kickers) {
  return {static_cast<std::uint32_t>(category) << HandValue::kCategoryShift | hand_ranks << kRanks | kickers};
}

// The `count` highest of `ranks`, or all if there are fewer.
Ranks highest(Ranks ranks, int count) {
  Ranks chosen = 0;
  for (int i = 0; i < count; ++i) chosen |= std::bit_floor(ranks ^ chosen);
  return chosen;
}

// The highest rank of a straight, 0 without one. The ace also counts below the deuce.
Ranks top_of_straight(Ranks ranks) {
  const Ranks from_ace = ranks << 1 | ranks >> 12;                 // bit 0: the ace again, below the deuce
  const Ranks pairs = from_ace & from_ace >> 1;                    // starts of two in a row
  return std::bit_floor(pairs & pairs >> 2 & from_ace >> 4) << 3;  // bit i of from_ace is rank i - 1
}

// The ranks of the suit with five or more cards, 0 without one. Counts the bits of the four lanes of 16 bits at once,
// by sums of 2, 4, 8 and 16 neighbouring bits.
Ranks flush_ranks(CardSet cards) {
  std::uint64_t counts = cards.bits();
  counts -= counts >> 1 & 0x5555'5555'5555'5555;
  counts = (counts & 0x3333'3333'3333'3333) + (counts >> 2 & 0x3333'3333'3333'3333);
  counts = (counts + (counts >> 4)) & 0x0f0f'0f0f'0f0f'0f0f;
  counts = (counts + (counts >> 8)) & 0x000f'000f'000f'000f;
  counts = (counts + 0x000b'000b'000b'000b) & 0x0010'0010'0010'0010;  // 5 + 11 carries into bit 4
  return counts == 0 ? 0 : cards.ranks_of(std::countr_zero(counts) / CardSet::kLaneBits);
}

}  // namespace

std::string_view to_string(Category category) {
  constexpr std::array<std::string_view, 9> kNames = {"high card",       "pair",           "two pair",
                                                      "three of a kind", "straight",       "flush",
                                                      "full house",      "four of a kind", "straight flush"};
  return kNames[static_cast<std::size_t>(category)];
}

// Seven cards with five of one suit cannot also hold four of a kind or a full house, so the flush is tested first.
HandValue evaluate(CardSet cards) {
  if (const Ranks flush = flush_ranks(cards); flush != 0) {
    if (const Ranks top = top_of_straight(flush); top != 0) return hand_value(Category::kStraightFlush, top, 0);
    return hand_value(Category::kFlush, 0, highest(flush, 5));
  }
  // The ranks of clubs, diamonds, hearts and spades; then those in any suit, in two or more, in three or more.
  const Ranks c = cards.ranks_of(0), d = cards.ranks_of(1), h = cards.ranks_of(2), s = cards.ranks_of(3);
  const Ranks in_any_suit = c | d | h | s;
  const Ranks in_two_suits = (c & d) | (h & s) | ((c | d) & (h | s));
  const Ranks in_three_suits = (c & d & (h | s)) | (h & s & (c | d));
  if (const Ranks four = c & d & h & s; four != 0)
    return hand_value(Category::kFourOfAKind, four, highest(in_any_suit ^ four, 1));
  const Ranks three = highest(in_three_suits, 1), pairs = highest(in_two_suits ^ three, 2), pair = highest(pairs, 1);
  if (three != 0 && pair != 0) return hand_value(Category::kFullHouse, three, pair);
  if (const Ranks top = top_of_straight(in_any_suit); top != 0) return hand_value(Category::kStraight, top, 0);
  if (three != 0) return hand_value(Category::kThreeOfAKind, three, highest(in_any_suit ^ three, 2));
  if (pairs != pair) return hand_value(Category::kTwoPair, pairs, highest(in_any_suit ^ pairs, 1));
  if (pair != 0) return hand_value(Category::kPair, pair, highest(in_any_suit ^ pair, 3));
  return hand_value(Category::kHighCard, 0, highest(in_any_suit, 5));
}

}  // namespace echoline::data_plane::poker

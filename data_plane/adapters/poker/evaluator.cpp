#include "data_plane/adapters/poker/evaluator.hpp"

#include <array>

namespace echoline::data_plane::poker {
namespace {

using Ranks = std::uint32_t;  // bit 0: deuce ... bit 12: ace

HandValue value(Category category, Ranks made_of, Ranks kickers) {
  return {static_cast<std::uint32_t>(category) << 26 | made_of << 13 | kickers};
}

// The `count` highest of `ranks`, or all if there are fewer.
Ranks highest(Ranks ranks, int count) {
  Ranks taken = 0;
  for (int i = 0; i < count; ++i) taken |= std::bit_floor(ranks ^ taken);
  return taken;
}

// The highest rank of a straight, 0 without one. The ace also counts below the deuce.
Ranks straight(Ranks ranks) {
  const Ranks from_ace = ranks << 1 | ranks >> 12;
  const Ranks pairs = from_ace & from_ace >> 1;                    // starts of two in a row
  return std::bit_floor(pairs & pairs >> 2 & from_ace >> 4) << 3;  // bit i of from_ace is rank i - 1
}

// The ranks of the suit with five or more cards, 0 without one. Counts the bits of the four lanes at once.
Ranks suited(CardSet cards) {
  std::uint64_t n = cards.bits();
  n -= n >> 1 & 0x5555'5555'5555'5555;
  n = (n & 0x3333'3333'3333'3333) + (n >> 2 & 0x3333'3333'3333'3333);
  n = (n + (n >> 4)) & 0x0f0f'0f0f'0f0f'0f0f;
  n = (n + (n >> 8)) & 0x000f'000f'000f'000f;
  n = (n + 0x000b'000b'000b'000b) & 0x0010'0010'0010'0010;  // 5 + 11 carries into bit 4
  return n == 0 ? 0 : cards.ranks_of(std::countr_zero(n) / 16);
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
  if (const Ranks flush = suited(cards); flush != 0) {
    if (const Ranks top = straight(flush); top != 0) return value(Category::kStraightFlush, top, 0);
    return value(Category::kFlush, 0, highest(flush, 5));
  }
  const Ranks c = cards.ranks_of(0), d = cards.ranks_of(1), h = cards.ranks_of(2), s = cards.ranks_of(3);
  const Ranks any = c | d | h | s;
  const Ranks twice = (c & d) | (h & s) | ((c | d) & (h | s));
  const Ranks thrice = (c & d & (h | s)) | (h & s & (c | d));
  if (const Ranks four = c & d & h & s; four != 0) return value(Category::kFourOfAKind, four, highest(any ^ four, 1));
  const Ranks three = highest(thrice, 1), pairs = highest(twice ^ three, 2), pair = highest(pairs, 1);
  if (three != 0 && pair != 0) return value(Category::kFullHouse, three, pair);
  if (const Ranks top = straight(any); top != 0) return value(Category::kStraight, top, 0);
  if (three != 0) return value(Category::kThreeOfAKind, three, highest(any ^ three, 2));
  if (pairs != pair) return value(Category::kTwoPair, pairs, highest(any ^ pairs, 1));
  if (pair != 0) return value(Category::kPair, pair, highest(any ^ pair, 3));
  return value(Category::kHighCard, 0, highest(any, 5));
}

}  // namespace echoline::data_plane::poker

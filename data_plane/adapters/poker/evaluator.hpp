// What five, six or seven cards are worth at showdown.
#pragma once
#include <compare>
#include <cstdint>
#include <string_view>

#include "data_plane/adapters/poker/cards.hpp"

namespace echoline::data_plane::poker {

enum class Category : std::uint8_t {
  kHighCard,
  kPair,
  kTwoPair,
  kThreeOfAKind,
  kStraight,
  kFlush,
  kFullHouse,
  kFourOfAKind,
  kStraightFlush,
};
std::string_view to_string(Category category);

// The best five cards of a hand: equal where they tie, greater where they win. Category, then the ranks that make it (a
// mask of 13 bits), then the kickers (another): masks with equally many bits compare as the ranks do, highest first.
struct HandValue {
  std::uint32_t bits = 0;
  Category category() const { return static_cast<Category>(bits >> 26); }
  auto operator<=>(const HandValue&) const = default;
};

// Requires 5 to 7 cards. No table; some 15 ns.
HandValue evaluate(CardSet cards);

}  // namespace echoline::data_plane::poker

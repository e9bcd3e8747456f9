// The value of five, six or seven cards at showdown.
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

// The value of the best five cards: equal if hands tie, greater if a hand wins. Holds the category, the ranks that make
// it (a mask of 13 bits), then the kickers (another mask). Masks with equally many bits compare like their ranks,
// highest first.
struct HandValue {
  static constexpr int kCategoryShift = 2 * kRanks;
  std::uint32_t bits = 0;
  Category category() const { return static_cast<Category>(bits >> kCategoryShift); }
  auto operator<=>(const HandValue&) const = default;
};

// Requires 5 to 7 cards. Takes about 15 ns and uses no table.
HandValue evaluate(CardSet cards);

}  // namespace echoline::data_plane::poker

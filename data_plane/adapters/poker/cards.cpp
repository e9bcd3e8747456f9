#include "data_plane/adapters/poker/cards.hpp"

namespace echoline::data_plane::poker {

std::string to_string(Card card) {
  return {kRankLetters[static_cast<std::size_t>(card.rank())], kSuitLetters[static_cast<std::size_t>(card.suit())]};
}

std::string to_string(std::span<const Card> cards, std::string_view between) {
  std::string text;
  for (const Card card : cards) {
    if (!text.empty()) text += between;
    text += to_string(card);
  }
  return text;
}

std::optional<Card> parse_card(char rank, char suit) {
  const auto r = kRankLetters.find(rank), s = kSuitLetters.find(suit);
  if (r == std::string_view::npos || s == std::string_view::npos) return std::nullopt;
  return Card(static_cast<int>(r), static_cast<int>(s));
}

}  // namespace echoline::data_plane::poker

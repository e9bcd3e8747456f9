// Converts cards to text and back.
#include "data_plane/adapters/poker/cards.hpp"

namespace echoline::data_plane::poker {

std::string to_string(Card card) {
  return {kRankLetters[static_cast<std::size_t>(card.rank())], kSuitLetters[static_cast<std::size_t>(card.suit())]};
}

std::string to_string(std::span<const Card> cards, std::string_view separator) {
  std::string text;
  for (const Card card : cards) {
    if (!text.empty()) text += separator;
    text += to_string(card);
  }
  return text;
}

std::optional<Card> parse_card(char rank, char suit) {
  const auto rank_index = kRankLetters.find(rank), suit_index = kSuitLetters.find(suit);
  if (rank_index == std::string_view::npos || suit_index == std::string_view::npos) return std::nullopt;
  return Card(static_cast<int>(rank_index), static_cast<int>(suit_index));
}

}  // namespace echoline::data_plane::poker

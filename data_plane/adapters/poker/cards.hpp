// Playing cards as bits: a set of cards is one 64-bit word, one lane of 16 bits for each suit, one bit for each rank.
#pragma once
#include <array>
#include <bit>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/random.hpp"

namespace echoline::data_plane::poker {

inline constexpr int kRanks = 13, kSuits = 4, kDeckCards = kRanks * kSuits;
inline constexpr std::string_view kRankLetters = "23456789TJQKA", kSuitLetters = "cdhs";

// A card by its position in a new deck: 2c 2d 2h 2s 3c ... As.
class Card {
 public:
  constexpr Card() = default;
  constexpr Card(int rank, int suit) : index_(static_cast<std::uint8_t>(rank * kSuits + suit)) {}
  static constexpr Card from_index(int index) { return Card(index / kSuits, index % kSuits); }
  constexpr int index() const { return index_; }
  constexpr int rank() const { return index_ / kSuits; }  // 0 for a deuce ... 12 for an ace
  constexpr int suit() const { return index_ % kSuits; }
  bool operator==(const Card&) const = default;

 private:
  std::uint8_t index_ = 0;
};

class CardSet {
 public:
  static constexpr int kLaneBits = 16;  // bits of one suit
  static constexpr std::uint32_t kRankMask = (1u << kRanks) - 1;

  constexpr CardSet() = default;
  constexpr explicit CardSet(std::span<const Card> cards) {
    for (const Card card : cards) add(card);
  }
  constexpr void add(Card card) { bits_ |= bit(card); }
  constexpr bool contains(Card card) const { return (bits_ & bit(card)) != 0; }
  constexpr int size() const { return std::popcount(bits_); }
  // The ranks of one suit; bit 0 is the deuce.
  constexpr std::uint32_t ranks_of(int suit) const {
    return static_cast<std::uint32_t>(bits_ >> (kLaneBits * suit)) & kRankMask;
  }
  constexpr std::uint64_t bits() const { return bits_; }
  constexpr CardSet operator|(CardSet other) const {
    other.bits_ |= bits_;
    return other;
  }

 private:
  static constexpr std::uint64_t bit(Card card) { return std::uint64_t{1} << (kLaneBits * card.suit() + card.rank()); }
  std::uint64_t bits_ = 0;
};

// "Td", as in the text protocol of the ACPC.
std::string to_string(Card card);
std::string to_string(std::span<const Card> cards, std::string_view separator = "");
// The card named by these two characters, if any.
std::optional<Card> parse_card(char rank, char suit);

// Draws cards without replacement, uniformly at random.
class Deck {
 public:
  Deck() {
    for (int i = 0; i < kDeckCards; ++i) cards_[static_cast<std::size_t>(i)] = Card::from_index(i);
  }
  // A deck without the cards in `removed`.
  explicit Deck(CardSet removed) : cards_left_(0) {
    for (int i = 0; i < kDeckCards; ++i)
      if (!removed.contains(Card::from_index(i))) cards_[cards_left_++] = Card::from_index(i);
  }
  // Requires cards_left() > 0.
  Card draw(Random& random) {
    const std::size_t index = random.below(cards_left_);
    const Card card = cards_[index];
    cards_[index] = cards_[--cards_left_];
    cards_[cards_left_] = card;  // kept beyond the end, so that put_back() is free
    return card;
  }
  std::size_t cards_left() const { return cards_left_; }  // number of cards
  // Undoes the last `count` draws. The deck has the same cards, in another order.
  void put_back(std::size_t count) { cards_left_ += count; }

 private:
  std::array<Card, kDeckCards> cards_;
  std::size_t cards_left_ = kDeckCards;
};

}  // namespace echoline::data_plane::poker

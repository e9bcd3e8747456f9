// The evaluator against counting: every five-card hand, and a slow reference that shares nothing with it.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <vector>

#include "data_plane/adapters/poker/evaluator.hpp"
#include "data_plane/adapters/poker/players.hpp"

namespace echoline::data_plane::poker {
namespace {

CardSet set_of(std::string_view text) {  // such as "As Kd"
  CardSet cards;
  for (std::size_t i = 0; i + 1 < text.size(); i += 3) cards.add(*parse_card(text[i], text[i + 1]));
  return cards;
}

// Five cards as a list with the order of their values: the category, then ranks by frequency and height.
using Reference = std::array<int, 6>;
Reference reference(const std::array<Card, 5>& cards) {
  std::array<int, kRanks> times{};
  for (const Card card : cards) ++times[static_cast<std::size_t>(card.rank())];
  std::array<std::pair<int, int>, 5> groups{};  // each is {number of cards, rank}
  std::size_t group_count = 0;
  for (int rank = 0; rank < kRanks; ++rank)
    if (const int n = times[static_cast<std::size_t>(rank)]; n > 0) groups[group_count++] = {n, rank};
  std::sort(groups.begin(), groups.begin() + static_cast<std::ptrdiff_t>(group_count), std::greater<>());
  const bool flush = std::all_of(cards.begin(), cards.end(), [&](Card c) { return c.suit() == cards[0].suit(); });
  const int high = groups[0].second, low = groups[group_count - 1].second;
  const bool wheel = group_count == 5 && high == 12 && groups[1].second == 3;  // ace, 2, 3, 4 and 5
  const bool straight = wheel || (group_count == 5 && high - low == 4);
  const auto category = [&] {
    if (straight) return flush ? 8 : 4;
    if (flush) return 5;
    if (groups[0].first == 4) return 7;
    if (groups[0].first == 3) return groups[1].first == 2 ? 6 : 3;
    if (groups[0].first == 2) return groups[1].first == 2 ? 2 : 1;
    return 0;
  };
  Reference value{category()};
  if (straight) {
    value[1] = wheel ? 3 : high;
    return value;
  }
  for (std::size_t i = 0; i < group_count; ++i) value[i + 1] = groups[i].second;
  return value;
}

TEST(Evaluator, EveryFiveCardHandIsCountedAndOrderedAsByTheReference) {
  std::array<std::uint64_t, 9> counts{};
  std::map<std::uint32_t, Reference> classes;
  std::array<Card, 5> hand;
  const auto visit_hands = [&](auto&& self, int cards_chosen, int first_index) -> void {
    if (cards_chosen == 5) {
      const HandValue value = evaluate(CardSet(hand));
      const Reference expected = reference(hand);
      const auto entry = classes.emplace(value.bits, expected).first;
      ASSERT_EQ(entry->second, expected) << to_string(hand);
      ++counts[static_cast<std::size_t>(value.category())];
      return;
    }
    for (int i = first_index; i < kDeckCards && !testing::Test::HasFatalFailure(); ++i) {
      hand[static_cast<std::size_t>(cards_chosen)] = Card::from_index(i);
      self(self, cards_chosen + 1, i + 1);
    }
  };
  visit_hands(visit_hands, 0, 0);
  EXPECT_EQ(counts, (std::array<std::uint64_t, 9>{1302540, 1098240, 123552, 54912, 10200, 5108, 3744, 624, 40}));
  EXPECT_EQ(classes.size(), 7462u);  // the known number of hands that differ in worth
  // Equal values have equal references, and greater values have greater ones.
  for (auto lower = classes.begin(), higher = std::next(lower); higher != classes.end(); ++lower, ++higher)
    ASSERT_LT(lower->second, higher->second) << lower->first;
}

TEST(Evaluator, SixAndSevenCardsAreWorthTheirBestFive) {
  Random random(3);
  std::array<std::uint64_t, 9> category_counts{};
  for (int round = 0; round < 60'000; ++round) {
    Deck deck;
    std::vector<Card> cards;
    // Every other hand comes from a short deck, so that rare categories occur.
    while (cards.size() < (round % 3 == 0 ? 6u : 7u)) {
      const Card card = deck.draw(random);
      if (round % 2 == 0 || (card.rank() < 6 && card.suit() < 3)) cards.push_back(card);
    }
    std::vector<bool> left_out(cards.size(), false);
    std::fill(left_out.begin(), left_out.begin() + static_cast<std::ptrdiff_t>(cards.size() - 5), true);
    HandValue best;
    do {
      CardSet five;
      for (std::size_t i = 0; i < cards.size(); ++i)
        if (!left_out[i]) five.add(cards[i]);
      best = std::max(best, evaluate(five));
    } while (std::prev_permutation(left_out.begin(), left_out.end()));
    ASSERT_EQ(evaluate(CardSet(cards)), best) << to_string(cards);
    ++category_counts[static_cast<std::size_t>(best.category())];
  }
  for (const std::uint64_t count : category_counts) EXPECT_GT(count, 30u);
}

TEST(Evaluator, KickersAndTiesByHand) {
  const auto better = [](std::string_view a, std::string_view b) { return evaluate(set_of(a)) > evaluate(set_of(b)); };
  EXPECT_TRUE(better("2c 3d 4h 5s 6c Kd Kh", "Ac 2d 3h 4s 5c Kd Kh"));  // the wheel is the lowest straight
  EXPECT_TRUE(better("As Ks Qs Js Ts 9s 8s", "Ks Qs Js Ts 9s Ad Ac"));
  EXPECT_TRUE(better("Ac Ad Kh Ks 9c 9d 2h", "Ac Ad Kh Ks 8c 8d 2h"));  // three pairs: the third is a kicker
  EXPECT_TRUE(better("2c 2d 2h 3s 3c 3d 4h", "2c 2d 2h As Ac Kd 4h"));  // threes full of deuces
  EXPECT_EQ(evaluate(set_of("Ac Ad Ah As Kc Kd Kh")), evaluate(set_of("Ac Ad Ah As Ks Qd Qh")));
  EXPECT_EQ(to_string(evaluate(set_of("Ac Kc Qc Jc Tc 9d 8d")).category()), "straight flush");
}

TEST(Cards, AreReadFromTheirText) {
  CardSet all;
  for (int i = 0; i < kDeckCards; ++i) {
    const std::string text = to_string(Card::from_index(i));
    ASSERT_EQ(parse_card(text[0], text[1]), Card::from_index(i));
    all.add(Card::from_index(i));
  }
  EXPECT_EQ(all.size(), 52);
  EXPECT_FALSE(parse_card('1', 'c'));
  EXPECT_FALSE(parse_card('t', 'c'));
  EXPECT_FALSE(parse_card('T', 'C'));
  EXPECT_FALSE(parse_card('\0', 'c'));
}

TEST(Cards, EveryPlaceInADealIsEqualForEveryCard) {
  Random random(9);
  std::array<std::array<int, 2>, kDeckCards> times{};
  for (int i = 0; i < 52'000; ++i) {
    const Deal deal = Deal::draw(random);
    ++times[static_cast<std::size_t>(deal.holes[0][0].index())][0];
    ++times[static_cast<std::size_t>(deal.board[4].index())][1];
    CardSet dealt = CardSet(deal.holes[0]) | CardSet(deal.holes[1]) | CardSet(deal.board);
    ASSERT_EQ(dealt.size(), 9);
  }
  for (const auto& place : times)
    for (const int n : place) EXPECT_NEAR(n, 1000, 200);  // six standard deviations
}

TEST(Equity, AgreesWithCounting) {
  Random random(4);
  const Hole aces{*parse_card('A', 'c'), *parse_card('A', 'd')}, worst{*parse_card('7', 'c'), *parse_card('2', 'd')};
  EXPECT_NEAR(equity(aces, {}, 40'000, random), 0.852, 0.01);  // the published shares against random cards
  EXPECT_NEAR(equity(worst, {}, 40'000, random), 0.346, 0.01);
  const std::array<Card, 5> royal{Card(12, 3), Card(11, 3), Card(10, 3), Card(9, 3), Card(8, 3)};
  EXPECT_EQ(equity(aces, royal, 100, random), 0.5);  // both hands play the board
}

TEST(Chen, PointsOfKnownHands) {
  const auto points = [](std::string_view text) {
    return chen_half_points({*parse_card(text[0], text[1]), *parse_card(text[2], text[3])}) / 2.0;
  };
  EXPECT_EQ(points("AcAd"), 20);
  EXPECT_EQ(points("AsKs"), 12);
  EXPECT_EQ(points("TcTd"), 10);
  EXPECT_EQ(points("5d7d"), 6);
  EXPECT_EQ(points("2h7s"), -1);
  EXPECT_EQ(points("2h2s"), 5);
}

}  // namespace
}  // namespace echoline::data_plane::poker

// The rules of a hand, its players and their matches.
#include <gtest/gtest.h>

#include "data_plane/adapters/poker/evaluator.hpp"
#include "data_plane/adapters/poker/match.hpp"

namespace echoline::data_plane::poker {
namespace {

// The betting after actions such as "cr300c", which have no marks between rounds. An illegal action fails the test.
Betting betting_after(std::string_view actions, const Rules& rules = {}) {
  Betting betting(rules);
  for (std::size_t i = 0; i < actions.size();) {
    const char kind = actions[i++];
    Chips raise_to = 0;
    while (i < actions.size() && actions[i] >= '0' && actions[i] <= '9')
      raise_to = 10 * raise_to + (actions[i++] - '0');
    const Action action = kind == 'f' ? Action::fold() : kind == 'c' ? Action::call() : Action::raise(raise_to);
    const auto status = betting.act(action);
    EXPECT_TRUE(status) << actions << ": " << status.error().message();
  }
  return betting;
}

using Raise = std::optional<std::array<Chips, 2>>;  // the smallest and the largest raise

TEST(Rules, BlindsAndStackAreChecked) {
  EXPECT_TRUE(Rules{}.check());
  EXPECT_TRUE((Rules{.stack = 3, .small_blind = 1, .big_blind = 2}.check()));
  for (const Rules& wrong : {Rules{20'000, 0, 100}, Rules{20'000, 101, 100}, Rules{100, 50, 100},
                             Rules{200'000, 50, 100}, Rules{2'000'000'000, 5'000'000, 10'000'000}, Rules{-5, 50, 100}})
    EXPECT_FALSE(wrong.check()) << wrong.stack << ' ' << wrong.small_blind << ' ' << wrong.big_blind;
}

TEST(Game, TurnsAndSmallestRaises) {
  Betting start(Rules{});
  EXPECT_EQ(start.position_to_act(), 1);  // the small blind
  EXPECT_EQ(start.legal().owed, 50);
  EXPECT_EQ(start.legal().raise, (Raise{{200, 20'000}}));
  EXPECT_EQ(betting_after("c").position_to_act(), 0);
  EXPECT_EQ(betting_after("c").legal().owed, 0);
  EXPECT_EQ(betting_after("c").legal().raise, (Raise{{200, 20'000}}));
  EXPECT_EQ(betting_after("cc").position_to_act(), 0);  // the big blind begins on the flop
  EXPECT_EQ(betting_after("cc").round(), 1);
  EXPECT_EQ(betting_after("cc").legal().raise, (Raise{{200, 20'000}}));    // 100 put in, and a big blind
  EXPECT_EQ(betting_after("r250").legal().raise, (Raise{{400, 20'000}}));  // 2 x 250 - 100
  EXPECT_EQ(betting_after("r250r1000").legal().raise, (Raise{{1750, 20'000}}));
  EXPECT_EQ(betting_after("r250c").legal().raise, (Raise{{350, 20'000}}));  // a new round: a big blind again
  EXPECT_EQ(betting_after("r250cr500").legal().raise, (Raise{{750, 20'000}}));
}

TEST(Game, AShortAllInIsLegalAndDoesNotReopen) {
  const Rules rules{1000, 50, 100};
  EXPECT_EQ(betting_after("r600", rules).legal().raise, (Raise{{1000, 1000}}));  // 1,100 would be full
  const Betting all_in = betting_after("r600r1000", rules);
  EXPECT_EQ(all_in.legal().raise, std::nullopt);
  EXPECT_EQ(all_in.legal().owed, 400);
  const Betting called = betting_after("r600r1000c", rules);
  EXPECT_TRUE(called.is_showdown());
  EXPECT_EQ(called.round(), 3);  // the whole board is dealt
  EXPECT_EQ(called.pot(), 2000);
}

TEST(Game, FoldsNeedADebt) {
  Betting betting = betting_after("c");
  EXPECT_FALSE(betting.act(Action::fold()));
  const Betting before = betting;
  EXPECT_FALSE(betting.act(Action::raise(199)));
  EXPECT_FALSE(betting.act(Action::raise(20'001)));
  EXPECT_FALSE(betting.act(Action::raise(-5)));
  EXPECT_EQ(betting, before);  // a refused action changes nothing
  EXPECT_FALSE(betting_after("f").act(Action::call()));
  EXPECT_EQ(betting_after("f").act(Action::call()).error().detail, "'c' after the hand was over");
  EXPECT_EQ(betting_after("r250").legal().allows(Action::fold()), true);
  EXPECT_NE(betting.act(Action::fold()).error().detail.find("check or raise to 200 ... 20000"), std::string::npos);
}

Deal deal_of(std::string_view text) {  // "AcAd KcKd 2c3c4d5d9s"
  Deal deal;
  std::vector<Card> cards;
  for (std::size_t i = 0; i + 1 < text.size(); i += 2) {
    if (text[i] == ' ') ++i;
    cards.push_back(*parse_card(text[i], text[i + 1]));
  }
  EXPECT_EQ(cards.size(), 9u);
  deal.holes = {Hole{cards[0], cards[1]}, Hole{cards[2], cards[3]}};
  std::copy(cards.begin() + 4, cards.end(), deal.board.begin());
  return deal;
}

TEST(Game, PaysWinsOfAHand) {
  const Deal aces_first = deal_of("AcAd KcKd 2c3h4d9s9h"), split = deal_of("2c2d 3c3d AsKsQsJsTs");
  EXPECT_EQ(chips_won_by_position_0(betting_after("f"), aces_first), 50);  // the small blind alone
  // The chips of the raise that was not called come back.
  EXPECT_EQ(chips_won_by_position_0(betting_after("r300f"), aces_first), -100);
  EXPECT_EQ(chips_won_by_position_0(betting_after("r300ccccccc"), aces_first), 300);
  EXPECT_EQ(chips_won_by_position_0(betting_after("r20000c"), split), 0);
  EXPECT_EQ(chips_won_by_position_0(betting_after("ccr555f"), aces_first), 100);
}

TEST(Game, APlayerSeesOnlyItsCards) {
  const Deal deal = deal_of("AcAd KcKd 2c3h4d9s9h");
  const Betting flop = betting_after("cc"), over = betting_after("r20000c"), folded = betting_after("r300f");
  EXPECT_EQ(view_of(flop, deal, 1).board.size(), 3u);
  EXPECT_EQ(view_of(flop, deal, 1).own_cards, deal.holes[1]);
  EXPECT_FALSE(view_of(flop, deal, 1).opponent_cards);
  EXPECT_FALSE(view_of(folded, deal, 1).opponent_cards);
  EXPECT_EQ(view_of(over, deal, 1).opponent_cards, deal.holes[0]);
  EXPECT_EQ(view_of(over, deal, 1).board.size(), 5u);
}

// Independent bookkeeping from the actions alone: each player's stack after the hand is over and the pot is paid.
std::array<Chips, 2> stacks_after(const Betting& betting, const Deal& deal) {
  const Rules& rules = betting.rules();
  std::array<Chips, 2> stacks{rules.stack - rules.big_blind, rules.stack - rules.small_blind};
  Chips pot = rules.big_blind + rules.small_blind;
  std::optional<std::size_t> folded;
  for (const auto& step : betting.steps()) {
    const auto own = static_cast<std::size_t>(step.position);
    const Chips own_bet = rules.stack - stacks[own], other_bet = rules.stack - stacks[1 - own];
    Chips payment = 0;
    if (step.action.kind == Action::Kind::kFold) folded = own;
    if (step.action.kind == Action::Kind::kCall) payment = other_bet - own_bet;
    if (step.action.kind == Action::Kind::kRaise) payment = step.action.to - own_bet;
    EXPECT_GE(payment, 0);
    stacks[own] -= payment;
    pot += payment;
    EXPECT_GE(stacks[own], 0);
  }
  std::array<CardSet, 2> cards;
  for (std::size_t i = 0; i < 2; ++i) cards[i] = CardSet(deal.holes[i]) | CardSet(deal.board);
  const auto first = evaluate(cards[0]), second = evaluate(cards[1]);
  if (!folded && first == second) {
    EXPECT_EQ(pot % 2, 0);  // no odd chip
    return {stacks[0] + pot / 2, stacks[1] + pot / 2};
  }
  const std::size_t winner = folded ? 1 - *folded : first > second ? 0 : 1;
  stacks[winner] += pot;
  return stacks;
}

// Plays like another player, and checks before every action that exactly the legal actions are accepted.
class CheckedPlayer final : public Player {
 public:
  explicit CheckedPlayer(std::unique_ptr<Player> player) : player_(std::move(player)) {}
  std::string_view name() const override { return player_->name(); }
  Result<Action> decide(const View& view, Random& random) override {
    const LegalActions legal = view.betting.legal();
    try_out(view.betting, Action::fold(), legal.owed > 0);
    try_out(view.betting, Action::call(), true);
    const Chips stack = view.betting.rules().stack,
                highest_bet = std::max(view.betting.put_in(0), view.betting.put_in(1));
    EXPECT_EQ(legal.raise.has_value(), highest_bet < stack);
    for (const Chips raise_to : {highest_bet, stack + 1, highest_bet + static_cast<Chips>(random.below(1000))})
      try_out(view.betting, Action::raise(raise_to),
              legal.raise && raise_to >= legal.raise->front() && raise_to <= stack);
    if (legal.raise) {
      EXPECT_TRUE(legal.raise->front() == stack ||
                  legal.raise->front() >= highest_bet + view.betting.rules().big_blind);
      try_out(view.betting, Action::raise(legal.raise->front()), true);
      try_out(view.betting, Action::raise(legal.raise->front() - 1), false);
    }
    Random same_random = random;
    const auto action = player_->decide(view, random);
    EXPECT_EQ(*action, *player_->decide(view, same_random));  // equal random numbers give the same action
    return action;
  }

 private:
  static void try_out(Betting betting, Action action, bool legal) {
    ASSERT_EQ(betting.act(action).has_value(), legal) << to_string(action);
  }
  std::unique_ptr<Player> player_;
};

TEST(Game, ChipsAreConservedAndOnlyLegalActionsAreTakenWithEveryPlayer) {
  Random rules_random(5);
  for (const std::string& name : player_names()) {
    CheckedPlayer player(*make_player(name)), random(*make_player("random"));
    std::uint64_t showdowns = 0, folds = 0;
    for (std::uint64_t hand = 0; hand < 100'000; ++hand) {
      const Chips big_blind = 2 + rules_random.between(0, 200);
      const Chips more_stack_max = hand % 2 == 0 ? 5 * big_blind : 999 * big_blind - 1;
      const Chips stack = big_blind + 1 + rules_random.between(0, more_stack_max);
      const Chips small_blind = 1 + rules_random.between(0, big_blind - 1);
      const Rules rules{.stack = stack, .small_blind = small_blind, .big_blind = big_blind};
      ASSERT_TRUE(rules.check());
      Betting betting(rules);
      HandRandom hand_random(17, hand);
      const Deal deal = Deal::draw(hand_random.deal);
      std::array<Player*, 2> seats{&player, &random};
      if (hand % 4 < 2) std::swap(seats[0], seats[1]);
      const auto won = play_hand(betting, deal, seats, hand_random.by_position);
      ASSERT_TRUE(won) << won.error().message();
      const auto stacks = stacks_after(betting, deal);
      ASSERT_EQ(stacks[0] + stacks[1], 2 * rules.stack);
      ASSERT_EQ(stacks[0] - rules.stack, *won);
      ++(betting.is_showdown() ? showdowns : folds);
      Betting replayed(rules);  // the actions alone lead to the same hand
      for (const auto& step : betting.steps()) ASSERT_TRUE(replayed.act(step.action));
      ASSERT_EQ(replayed, betting);
    }
    EXPECT_GT(showdowns, 5'000u) << name;
    EXPECT_GT(folds, 5'000u) << name;
  }
}

TEST(Players, AreKnownByName) {
  EXPECT_EQ(player_names(), (std::vector<std::string>{"caller", "random", "tight"}));
  for (const std::string& name : player_names()) EXPECT_EQ((*make_player(name))->name(), name);
  EXPECT_NE(make_player("tigth").error().detail.find("did you mean 'tight'?"), std::string::npos);
}

TEST(Players, TheTightOneFollowsItsRules) {
  const auto tight = *make_player("tight");
  Random random(1);
  const auto decision = [&](std::string_view cards, std::string_view actions) {
    const Deal deal = deal_of(cards);
    const Betting betting = betting_after(actions);
    return to_string(*tight->decide(view_of(betting, deal, betting.position_to_act()), random));
  };
  EXPECT_EQ(decision("KcKd AcAd 2c3h4d9s9h", ""), "r300");  // 20 points, to three big blinds
  EXPECT_EQ(decision("KcKd 7h2s 2c3h4d9s9h", ""), "f");     // -1 point
  EXPECT_EQ(decision("KcKd 7d5d 2c3h4d9s9h", ""), "c");     // 6 points
  EXPECT_EQ(decision("7h2s AcAd 2c3h4d9s9h", "c"), "c");    // a check is free
  EXPECT_EQ(decision("7h2s AcAd 2c3h4d9s9h", "r300"), "f");
  EXPECT_EQ(decision("TcTd AcAd 2c3h4d9s9h", "r300"), "c");    // 10 points
  EXPECT_EQ(decision("TcTd AcAd 2c3h4d9s9h", "r20000"), "f");  // but it does not call a raise of all chips
  EXPECT_EQ(decision("AcAd TcTd 2c3h4d9s9h", "r20000"), "c");
  EXPECT_EQ(decision("AcAd KcKd AhAs2c4d9s", "cc"), "r300");  // nearly certain to win, so it raises by the pot
  EXPECT_EQ(decision("KcKd AcAd AhAs2c4d9s", "ccr20000"), "c");
  EXPECT_EQ(decision("7h2s KcKd AhAs9c4d9s", "cc"), "c");  // a hand without worth, and a check is free
  EXPECT_EQ(decision("KcKd 7h2s AhAs9c4d9s", "ccr300"), "f");
}

TEST(Match, TheSameSeedGivesTheSameResultAndEqualPlayersTie) {
  const auto tight = *make_player("tight"), other_tight = *make_player("tight"), random = *make_player("random");
  const auto a = duplicate_match(*tight, *random, {}, 500, 1), b = duplicate_match(*tight, *random, {}, 500, 1);
  EXPECT_EQ(a->bb_per_100, b->bb_per_100);
  EXPECT_EQ(a->hands, 1000u);
  EXPECT_NE(a->bb_per_100, duplicate_match(*tight, *random, {}, 500, 2)->bb_per_100);
  // Both play the same hands in both positions, so nothing varies.
  const auto tie = duplicate_match(*tight, *other_tight, {}, 200, 1);
  EXPECT_EQ(tie->bb_per_100, 0);
  EXPECT_EQ(tie->bb_per_100_half_width, 0);
  EXPECT_EQ(tie->bb_per_100_at[0], -tie->bb_per_100_at[1]);
}

TEST(Match, SwappedPlayersSwapTheSign) {
  const auto tight = *make_player("tight"), random = *make_player("random");
  const auto one = duplicate_match(*tight, *random, {}, 500, 7), other = duplicate_match(*random, *tight, {}, 500, 7);
  EXPECT_NEAR(one->bb_per_100, -other->bb_per_100, 1e-9);
  EXPECT_NEAR(one->bb_per_100_half_width, other->bb_per_100_half_width, 1e-9);
  EXPECT_NEAR(one->bb_per_100_at[0], -other->bb_per_100_at[1], 1e-9);
}

TEST(Match, TheTightPlayerBeatsTheOthersAndDuplicatesNarrowTheInterval) {
  for (const std::string name : {"random", "caller"}) {
    const auto tight = *make_player("tight"), other = *make_player(name);
    const auto result = duplicate_match(*tight, *other, {}, 10'000, 3);
    EXPECT_GT(result->bb_per_100, 2 * result->bb_per_100_half_width) << name;
  }
  // Two callers: the player with the better cards loses the same amount in the other position.
  const auto caller = *make_player("caller"), other_caller = *make_player("caller");
  EXPECT_EQ(duplicate_match(*caller, *other_caller, {}, 1000, 3)->bb_per_100_half_width, 0);
}

TEST(Match, TheIntervalHoldsTheTruthAsOftenAsItSays) {
  const auto caller = *make_player("caller"), random = *make_player("random");
  const double truth = duplicate_match(*caller, *random, {}, 200'000, 99)->bb_per_100;
  int intervals_with_truth = 0;
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    const auto result = duplicate_match(*caller, *random, {}, 500, seed);
    intervals_with_truth += std::abs(result->bb_per_100 - truth) <= result->bb_per_100_half_width;
  }
  EXPECT_GE(intervals_with_truth, 177);  // 190 expected, with a standard deviation of 3
}

class Cheat final : public Player {
 public:
  std::string_view name() const override { return "cheat"; }
  Result<Action> decide(const View&, Random&) override { return Action::raise(1); }
};

TEST(Match, AnIllegalActionEndsIt) {
  Cheat cheat;
  const auto caller = *make_player("caller");
  EXPECT_EQ(duplicate_match(cheat, *caller, {}, 10, 1).error().code, Code::kInvalid);
  EXPECT_FALSE(duplicate_match(*caller, *caller, Rules{1, 1, 1}, 10, 1));
  EXPECT_FALSE(duplicate_match(*caller, *caller, {}, 0, 1));
}

}  // namespace
}  // namespace echoline::data_plane::poker

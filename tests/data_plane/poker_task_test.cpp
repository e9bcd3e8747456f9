// Hold'em as a task: what is said, what is understood, and what an episode is worth.
#include <gtest/gtest.h>

#include "data_plane/adapters/adapter.hpp"
#include "data_plane/adapters/poker/match.hpp"
#include "data_plane/adapters/poker/wording.hpp"

namespace echoline::data_plane::poker {
namespace {

constexpr Legal kFacingABet{200, std::array<Chips, 2>{500, 20'000}}, kFree{0, std::array<Chips, 2>{200, 20'000}}, kAllIn{500, {}};

std::string understood(std::string_view response, const Legal& legal) {
  const auto action = parse_answer(response, legal);
  return action ? to_string(*action) : "-";
}

TEST(Wording, TheLastActionCounts) {
  EXPECT_EQ(understood("<action>call</action>", kFacingABet), "c");
  EXPECT_EQ(understood("Not <action>fold</action>, but\n<action> Raise 500\n</action> it is", kFacingABet), "r500");
  EXPECT_EQ(understood("<action>fold <action>CALL</action>", kFacingABet), "c");
  EXPECT_EQ(understood("<action>check</action>", kFree), "c");
  EXPECT_EQ(understood("<action>fold</action>", kFacingABet), "f");
  for (const char* wrong : {"", "call", "<action>call", "call</action>", "</action><action>", "<action></action>",
                            "<action>check</action>", "<action>bet 500</action>", "<action>raise</action>",
                            "<action>raise 499</action>", "<action>raise 20001</action>", "<action>raise -500</action>",
                            "<action>raise 500.0</action>", "<action>raise 5e2</action>", "<action>raise 500 chips</action>",
                            "<action>raise 99999999999999999999</action>", "<action>raise  600</action>",
                            "<action>call</action> and <action>dance</action>", "<Action>call</Action>"})
    EXPECT_EQ(understood(wrong, kFacingABet), "-") << wrong;
  EXPECT_EQ(understood("<action>fold</action>", kFree), "-");
  EXPECT_EQ(understood("<action>call</action>", kFree), "-");
  EXPECT_EQ(understood("<action>raise 20000</action>", kAllIn), "-");
  EXPECT_EQ(understood(std::string(1u << 20, '<') + "<action>call</action>", kFacingABet), "c");
  EXPECT_EQ(understood("<action>" + std::string(1000, ' ') + "call</action>", kFacingABet), "-");
}

TEST(Wording, EveryLegalActionIsUnderstoodAsItIsWritten) {
  for (const Legal& legal : {kFacingABet, kFree, kAllIn})
    for (const Action action : {Action::fold(), Action::call(), Action::raise(500), Action::raise(20'000)}) {
      const auto again = parse_answer("I think ... " + answer(action, legal), legal);
      EXPECT_EQ(again.has_value(), legal.allows(action)) << answer(action, legal);
      if (again) EXPECT_EQ(*again, action);
    }
}

TEST(Wording, AStateIsDescribed) {
  Betting betting(Rules{});
  for (const Action action : {Action::call(), Action::call(), Action::call(), Action::raise(300)}) ASSERT_TRUE(betting.act(action));
  Deal deal;
  deal.holes = {Hole{*parse_card('9', 's'), *parse_card('8', 'h')}, Hole{*parse_card('A', 'c'), *parse_card('K', 'd')}};
  deal.board = {*parse_card('8', 'c'), *parse_card('8', 'd'), *parse_card('5', 'c'), *parse_card('6', 's'), *parse_card('2', 'c')};
  EXPECT_EQ(describe(view_of(betting, deal, 0), 1, 1),
            "You are the big blind.\nYour cards: 9s 8h\nBoard: 8c 8d 5c\n"
            "Betting: before the flop: your opponent calls, you check; flop: you check, your opponent raises to 300\n"
            "The pot is 400; you have put in 100 and have 19900 left.\n"
            "Your choices: fold, call (200 more), raise N with N from 500 to 20000");
  ASSERT_TRUE(betting.act(Action::raise(20'000)));
  EXPECT_TRUE(describe(view_of(betting, deal, 1), 2, 3).starts_with("Hand 2 of 3. You are the small blind.\n"));
  EXPECT_TRUE(describe(view_of(betting, deal, 1), 2, 3).ends_with("Your choices: fold, call (19700 more)"));
  ASSERT_TRUE(betting.act(Action::call()));
  EXPECT_EQ(describe_end(view_of(betting, deal, 0), 20'000),
            "Showdown on 8c 8d 5c 6s 2c: you have 9s 8h (three of a kind), your opponent Ac Kd (pair). You win 20000.");
  Betting short_one(Rules{1000, 50, 100});
  ASSERT_TRUE(short_one.act(Action::raise(600)));
  EXPECT_TRUE(describe(view_of(short_one, deal, 0), 1, 1).ends_with("Your choices: fold, call (500 more), raise 1000"));
  ASSERT_TRUE(short_one.act(Action::fold()));
  EXPECT_EQ(describe_end(view_of(short_one, deal, 0), -100), "You fold. You lose 100.");
  EXPECT_EQ(describe_end(view_of(short_one, deal, 1), 100), "Your opponent folds. You win 100.");
}

}  // namespace
}  // namespace echoline::data_plane::poker

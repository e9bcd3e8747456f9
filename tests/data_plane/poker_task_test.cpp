// Hold'em as a task: prompts, parsing of answers, and scores of episodes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "data_plane/adapters/adapter.hpp"
#include "data_plane/adapters/poker/match.hpp"
#include "data_plane/adapters/poker/wording.hpp"

namespace echoline::data_plane::poker {
namespace {

constexpr LegalActions kFacingABet{200, std::array<Chips, 2>{500, 20'000}}, kFree{0, std::array<Chips, 2>{200, 20'000}},
    kAllIn{500, {}};

std::string parsed_answer(std::string_view response, const LegalActions& legal) {
  const auto action = parse_answer(response, legal);
  return action ? to_string(*action) : "-";
}

TEST(Wording, TheLastActionCounts) {
  EXPECT_EQ(parsed_answer("<action>call</action>", kFacingABet), "c");
  EXPECT_EQ(parsed_answer("Not <action>fold</action>, but\n<action> Raise 500\n</action> it is", kFacingABet), "r500");
  EXPECT_EQ(parsed_answer("<action>fold <action>CALL</action>", kFacingABet), "c");
  EXPECT_EQ(parsed_answer("<action>check</action>", kFree), "c");
  EXPECT_EQ(parsed_answer("<action>fold</action>", kFacingABet), "f");
  for (const char* wrong :
       {"", "call", "<action>call", "call</action>", "</action><action>", "<action></action>", "<action>check</action>",
        "<action>bet 500</action>", "<action>raise</action>", "<action>raise 499</action>",
        "<action>raise 20001</action>", "<action>raise -500</action>", "<action>raise 500.0</action>",
        "<action>raise 5e2</action>", "<action>raise 500 chips</action>", "<action>raise 99999999999999999999</action>",
        "<action>raise  600</action>", "<action>call</action> and <action>dance</action>", "<Action>call</Action>"})
    EXPECT_EQ(parsed_answer(wrong, kFacingABet), "-") << wrong;
  EXPECT_EQ(parsed_answer("<action>fold</action>", kFree), "-");
  EXPECT_EQ(parsed_answer("<action>call</action>", kFree), "-");
  EXPECT_EQ(parsed_answer("<action>raise 20000</action>", kAllIn), "-");
  EXPECT_EQ(parsed_answer(std::string(1u << 20, '<') + "<action>call</action>", kFacingABet), "c");
  EXPECT_EQ(parsed_answer("<action>" + std::string(1000, ' ') + "call</action>", kFacingABet), "-");
}

TEST(Wording, EveryLegalActionIsUnderstoodAsItIsWritten) {
  for (const LegalActions& legal : {kFacingABet, kFree, kAllIn})
    for (const Action action : {Action::fold(), Action::call(), Action::raise(500), Action::raise(20'000)}) {
      const auto again = parse_answer("I think ... " + answer_text(action, legal), legal);
      EXPECT_EQ(again.has_value(), legal.allows(action)) << answer_text(action, legal);
      if (again) {
        EXPECT_EQ(*again, action);
      }
    }
}

TEST(Wording, AStateIsDescribed) {
  Betting betting(Rules{});
  for (const Action action : {Action::call(), Action::call(), Action::call(), Action::raise(300)})
    ASSERT_TRUE(betting.act(action));
  Deal deal;
  deal.holes = {Hole{*parse_card('9', 's'), *parse_card('8', 'h')}, Hole{*parse_card('A', 'c'), *parse_card('K', 'd')}};
  deal.board = {*parse_card('8', 'c'), *parse_card('8', 'd'), *parse_card('5', 'c'), *parse_card('6', 's'),
                *parse_card('2', 'c')};
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

TEST(Wording, TerseIsOneLineAndOneLetter) {
  Betting betting(Rules{});
  Deal deal;
  deal.holes = {Hole{*parse_card('9', 's'), *parse_card('8', 'h')}, Hole{*parse_card('A', 'c'), *parse_card('K', 'd')}};
  deal.board = {*parse_card('8', 'c'), *parse_card('8', 'd'), *parse_card('5', 'c'), *parse_card('6', 's'),
                *parse_card('2', 'c')};
  EXPECT_EQ(describe_tersely(view_of(betting, deal, 1)), "s AcKd - - 0.5 1.5: ");
  for (const Action action : {Action::call(), Action::call(), Action::call(), Action::raise(300)})
    ASSERT_TRUE(betting.act(action));
  const View big = view_of(betting, deal, 0);
  EXPECT_EQ(describe_tersely(big), "b 9s8h 8c8d5c Cc/cR 2 4: ");
  const auto read = [&](std::string_view response) {
    const auto action = parse_letter(response, big);
    return action ? to_string(*action) : "-";
  };
  // 100 are in, 200 owed: the pot of 400, the call, and their sum again.
  EXPECT_EQ(read("f") + read("c") + read("r") + read("p") + read("a"), "fcr500r900r20000");
  EXPECT_EQ(read("I call: c\n"), "c");
  for (const char* wrong : {"", " ", "x", "C", "cx", "1"}) EXPECT_EQ(read(wrong), "-") << wrong;
  EXPECT_EQ(letter_of(Action::raise(600), big), "r");
  EXPECT_EQ(letter_of(Action::raise(1500), big), "p");
  EXPECT_EQ(letter_of(Action::raise(15'000), big), "a");
  EXPECT_EQ(letter_of(Action::fold(), big) + letter_of(Action::call(), big), "fc");
  ASSERT_TRUE(betting.act(Action::raise(20'000)));
  const View small = view_of(betting, deal, 1);
  EXPECT_EQ(describe_tersely(small), "s AcKd 8c8d5c cC/CrR 197 203: ");
  EXPECT_FALSE(parse_letter("a", small)) << "the other one is all-in";
  Betting free(Rules{});
  ASSERT_TRUE(free.act(Action::call()));
  EXPECT_FALSE(parse_letter("f", view_of(free, deal, 0))) << "no chips are owed";
}

std::unique_ptr<Adapter> make_valid(std::string_view options, std::uint64_t seed = 1) {
  auto adapter = make_adapter("poker", options, seed);
  EXPECT_TRUE(adapter) << adapter.error().message();
  return std::move(adapter).value();
}

// A policy that picks one of the offered choices at random.
std::string any_choice(std::string_view text, Random& random) {
  const std::string_view choices = text.substr(text.rfind("Your choices: "));
  const bool owed = choices.find("call") != std::string_view::npos;
  std::vector<std::string> possible{owed ? "call" : "check"};
  if (owed) possible.emplace_back("fold");
  if (const auto raise = choices.find("raise N with N from "); raise != std::string_view::npos) {
    const Chips least = std::stoll(std::string(choices.substr(raise + 20)));
    const Chips most = std::stoll(std::string(choices.substr(choices.rfind(' ') + 1)));
    possible.push_back(fmt::format("raise {}", random.between(least, most)));
  } else if (const auto all_in = choices.find("raise "); all_in != std::string_view::npos) {
    possible.emplace_back(choices.substr(all_in));
  }
  return fmt::format("<action>{}</action>", possible[random.below(possible.size())]);
}

struct PlayedEpisode {
  Score score;
  std::vector<std::string> texts;  // the prompt and the observations
  bool operator==(const PlayedEpisode& other) const {
    return score.reward == other.score.reward && score.components == other.score.components &&
           score.correct == other.score.correct && texts == other.texts;
  }
};

template <class Policy>
PlayedEpisode play(const Adapter& adapter, const Problem& problem, Policy policy, std::size_t turns_max = kTurnsMax) {
  PlayedEpisode played;
  const auto episode = adapter.begin(problem, 0);
  EXPECT_TRUE(episode) << episode.error().message();
  played.texts.push_back(problem.prompt());
  for (bool done = false; !done;) {
    if (played.texts.size() > turns_max) {
      add(played.score, (*episode)->cut());
      break;
    }
    const auto step = step_and_wait(**episode, policy(std::string_view(played.texts.back())));
    EXPECT_TRUE(step) << step.error().message();
    add(played.score, step->score);
    done = step->done;
    if (!done) played.texts.push_back(step->observation.text);
  }
  return played;
}

TEST(PokerTask, OfferedActionsAreAcceptedAndAnswersAloneDecide) {
  for (const char* opponent : {"caller", "random", "tight"}) {
    const auto adapter = make_valid(fmt::format(R"({{"opponent":"{}","hands":4,"stack":3000}})", opponent));
    for (std::uint64_t index = 0; index < 300; ++index) {
      const Problem problem = adapter->problem(index).value();
      Random random(index), again(index);
      const PlayedEpisode one = play(*adapter, problem, [&](auto text) { return any_choice(text, random); });
      const PlayedEpisode other =
          play(*make_valid(fmt::format(R"({{"opponent":"{}","hands":4,"stack":3000}})", opponent)), problem,
               [&](auto text) { return any_choice(text, again); });
      ASSERT_EQ(one, other) << problem.id();
      ASSERT_EQ(one.score.components.at("faults"), 0) << one.texts.back();
      ASSERT_NEAR(one.score.reward, one.score.components.at("won_bb") - one.score.components.at("baseline_bb"), 1e-9);
      ASSERT_LE(std::abs(one.score.components.at("won_bb")), 30);
      ASSERT_EQ(one.score.correct, one.score.components.at("won_bb") > 0);
    }
  }
}

TEST(PokerTask, TersePolicyPlaysTheSameGame) {
  const auto adapter = make_valid(R"({"opponent":"tight","hands":3,"wording":"terse"})");
  const auto full = make_valid(R"({"opponent":"tight","hands":3})");
  for (std::uint64_t index = 0; index < 100; ++index) {
    const Problem problem = adapter->problem(index).value(), full_problem = full->problem(index).value();
    EXPECT_EQ(problem.reference(), full_problem.reference());
    ASSERT_LT(problem.prompt().size(), 40u);
    const PlayedEpisode terse = play(*adapter, problem, [](auto) { return "c"; });
    const PlayedEpisode same = play(*full, full_problem, [](std::string_view text) {
      return text.substr(text.rfind("Your choices: ")).find("call") != std::string_view::npos
                 ? "<action>call</action>"
                 : "<action>check</action>";
    });
    ASSERT_EQ(terse.score.reward, same.score.reward);
    ASSERT_EQ(terse.score.components, same.score.components);
    ASSERT_EQ(terse.texts.size(), same.texts.size());
    const auto shown = adapter->demonstration(problem);
    ASSERT_TRUE(shown && shown->size() == 1);
    EXPECT_EQ(step_and_wait(**adapter->begin(problem, 0), *shown)->score.components.at("faults"), 0) << *shown;
    EXPECT_EQ(step_and_wait(**adapter->begin(problem, 0), "?")->score.components.at("faults"), 1);
  }
}

constexpr auto kCalls = [](std::string_view text) {
  return text.substr(text.rfind("Your choices: ")).find("call") != std::string_view::npos ? "<action>call</action>"
                                                                                          : "<action>check</action>";
};

// Plays both players by the same function, and returns the opponent's prompts as well.
template <class Policy>
PlayedEpisode play_both(const Adapter& adapter, const Problem& problem, std::vector<std::string>& side_prompts,
                        Policy policy) {
  PlayedEpisode played;
  const auto episode = adapter.begin(problem, 0);
  std::string asked = problem.prompt();
  played.texts.push_back(asked);
  for (bool done = false; !done;) {
    const auto step = step_and_wait(**episode, policy(std::string_view(asked)));
    EXPECT_TRUE(step) << step.error().message();
    add(played.score, step->score);
    done = step->done;
    if (step->side_prompt)
      side_prompts.push_back(asked = step->side_prompt->text);
    else if (!done)
      played.texts.push_back(asked = step->observation.text);
  }
  return played;
}

TEST(PokerTask, ThePolicySitsOppositeItself) {
  const std::string rest = R"("evaluation_opponent":"caller","hands":4,"stack":3000})";
  const auto itself = *make_adapter("poker", R"({"opponent":"policy",)" + rest, 1, AdapterUse::kScoring),
             caller = make_valid(R"({"opponent":"caller",)" + rest);
  const auto learners = make_valid(R"({"opponent":"policy",)" + rest);
  EXPECT_EQ(play(*learners, *learners->problem(3), kCalls), play(*caller, *caller->problem(3), kCalls))
      << "a learner has no side prompts";
  for (std::uint64_t index = 0; index < 100; ++index) {
    const Problem problem = itself->problem(index).value();
    EXPECT_EQ(problem.prompt(), caller->problem(index)->prompt());
    EXPECT_EQ(itself->repeatable(problem), Repeatable::kNot);
    // A policy that always calls equals the caller, in either position.
    std::vector<std::string> side_prompts;
    PlayedEpisode both = play_both(*itself, problem, side_prompts, kCalls);
    EXPECT_EQ(both.score.components.at("opponent_faults"), 0);
    both.score.components.erase("opponent_faults");
    EXPECT_EQ(both, play(*caller, problem, kCalls));
    ASSERT_FALSE(side_prompts.empty());
    for (const std::string& side_prompt : side_prompts) {
      EXPECT_THAT(side_prompt, ::testing::StartsWith("You play heads-up")) << "the prompt is complete by itself";
      const auto cards = [](const std::string& text) { return text.substr(text.rfind("Your cards: "), 17); };
      EXPECT_NE(cards(side_prompt), cards(problem.prompt()));
    }
    // With random answers, one player wins what the other loses, and each fault counts for the right player.
    Random random(index), again(index);
    std::vector<std::string> first, second;
    const PlayedEpisode one = play_both(*itself, problem, first, [&](auto text) { return any_choice(text, random); });
    EXPECT_EQ(one, play_both(*itself, problem, second, [&](auto text) { return any_choice(text, again); }));
    EXPECT_EQ(first, second);
    EXPECT_LE(std::abs(one.score.components.at("won_bb")), 30);
    std::vector<std::string> asked;
    const PlayedEpisode faulty =
        play_both(*itself, problem, asked, [&](auto text) { return asked.empty() ? std::string(kCalls(text)) : "?"; });
    EXPECT_GT(faulty.score.components.at("opponent_faults"), 0);
  }
  for (const Problem& problem : itself->evaluation()) {
    EXPECT_EQ(itself->repeatable(problem), Repeatable::kCheaply);
    EXPECT_EQ(play(*itself, problem, kCalls), play(*caller, problem, kCalls)) << "an evaluation has no side prompts";
  }
}

TEST(PokerTask, TheBaselinesOwnActionsAreWorthNothing) {
  // A policy that plays like the baseline wins as much as the baseline, in both positions and over several hands.
  const auto adapter = make_valid(R"({"opponent":"tight","baseline":"caller","hands":6})");
  for (std::uint64_t index = 0; index < 100; ++index) {
    const PlayedEpisode played = play(*adapter, adapter->problem(index).value(), [](std::string_view text) {
      return text.substr(text.rfind("Your choices: ")).find("call") != std::string_view::npos
                 ? "<action>call</action>"
                 : "<action>check</action>";
    });
    ASSERT_NEAR(played.score.reward, 0, 1e-9) << index;
  }
}

TEST(PokerTask, AFaultIsACheckOrAFoldAndCosts) {
  const auto adapter =
      make_valid(R"({"opponent":"caller","baseline":"none","format_penalty":2,"evaluation_problems":2})");
  const auto deals = adapter->evaluation();
  EXPECT_NE(deals[0].prompt().find("You are the big blind."), std::string::npos);
  EXPECT_NE(deals[1].prompt().find("You are the small blind."), std::string::npos);
  // The small blind owes chips: it folds at once.
  const PlayedEpisode folded = play(*adapter, deals[1], [](auto) { return "I do not know"; });
  EXPECT_EQ(folded.score.components,
            (std::map<std::string, double>{{"won_bb", -0.5}, {"baseline_bb", 0}, {"faults", 1}}));
  EXPECT_EQ(folded.score.reward, -2.5);
  EXPECT_FALSE(folded.score.correct);
  // The big blind owes a caller nothing: four checks, and a showdown over one big blind.
  const PlayedEpisode checked = play(*adapter, deals[0], [](auto) { return "<action>fold</action>"; });
  EXPECT_EQ(checked.score.components.at("faults"), 4);
  EXPECT_EQ(checked.score.reward, checked.score.components.at("won_bb") - 8);
  EXPECT_LE(std::abs(checked.score.components.at("won_bb")), 1);
  ASSERT_EQ(checked.texts.size(), 4u);
  EXPECT_TRUE(checked.texts[1].starts_with("That is none of your choices: you check.\nYou are the big blind.\n"))
      << checked.texts[1];
}

TEST(PokerTask, APolicyWithoutRoomForAnAnswerFolds) {
  const auto adapter = make_valid(R"({"opponent":"caller","baseline":"none","stack":1000,"evaluation_problems":2})");
  const auto call = [](auto text) {
    return text.find("call (") != std::string_view::npos ? "<action>call</action>" : "<action>raise 300</action>";
  };
  const PlayedEpisode cut = play(*adapter, adapter->evaluation()[0], call, 1);
  EXPECT_EQ(cut.score.reward, -3);
  EXPECT_FALSE(cut.score.correct);
}

TEST(PokerTask, ProblemsAreReproducedHeldOutAndFromBothPositions) {
  const auto a = make_valid("{}", 5), b = make_valid("{}", 5), c = make_valid("{}", 6);
  int differ = 0;
  std::set<std::string> held_out;
  for (const Problem& problem : a->evaluation()) held_out.insert(problem.reference());
  EXPECT_EQ(held_out.size(), 256u);
  for (std::uint64_t i = 0; i < 200; ++i) {
    const Problem problem = a->problem(i).value();
    EXPECT_EQ(problem.SerializeAsString(), b->problem(i)->SerializeAsString());
    EXPECT_FALSE(held_out.contains(problem.reference()));
    EXPECT_NE(problem.prompt().find(i % 2 == 0 ? "You are the big blind." : "You are the small blind."),
              std::string::npos);
    differ += problem.prompt() != c->problem(i)->prompt();
    const auto shown = a->demonstration(problem);
    ASSERT_TRUE(shown);
    const auto first = step_and_wait(**a->begin(problem, 0), *shown);
    EXPECT_EQ(first->score.components.at("faults"), 0) << *shown;
  }
  EXPECT_GT(differ, 190);
}

TEST(PokerTask, AnInvalidProblemIsRefused) {
  const auto adapter = make_valid("{}");
  for (const char* wrong : {"", "1", "1:", ":1", "1:2", "1:01", "-1:0", "99999999999999999999:0", "x:0", "1:0 "}) {
    Problem problem;
    problem.set_reference(wrong);
    EXPECT_FALSE(adapter->begin(problem, 0)) << wrong;
    EXPECT_FALSE(adapter->demonstration(problem)) << wrong;
  }
  EXPECT_FALSE(adapter->score(Problem(), "<action>call</action>"));
}

TEST(PokerTask, WrongOptionsAreNamed) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {R"({"opponent":"shark"})", "opponent: expected one of caller, random, tight"},
      {R"({"stack":100})", "expected more than the big blind, 100"},
      {R"({"small_blind":200})", "expected 1 to the big blind"},
      {R"({"evaluation_problems":3})", "expected an even number"},
      {R"({"hands":0})", "hands: expected"},
  };
  for (const auto& [options, expected] : cases) {
    const auto adapter = make_adapter("poker", options, 1);
    ASSERT_FALSE(adapter) << options;
    EXPECT_NE(adapter.error().message().find(expected), std::string::npos) << adapter.error().message();
  }
}

}  // namespace
}  // namespace echoline::data_plane::poker

// The ACPC protocol: lines, and a match of both sides against each other.
#include <gtest/gtest.h>

#include <deque>

#include "data_plane/adapters/poker/acpc.hpp"

namespace echoline::data_plane::poker {
namespace {

std::string error_of(std::string_view line, const Rules& rules = {}) {
  const auto state = parse_match_state(line, rules);
  EXPECT_FALSE(state) << line;
  return state ? "" : state.error().detail;
}

TEST(AcpcLines, AKnownStateIsRead) {
  const std::string line = "MATCHSTATE:0:30:cc/r250c/:9s8h|/8c8d5c/6s";
  const auto state = parse_match_state(line + "\r\n", {});
  ASSERT_TRUE(state) << state.error().message();
  EXPECT_EQ(state->position, 0);
  EXPECT_EQ(state->hand, 30u);
  EXPECT_EQ(state->betting.round(), 2);
  EXPECT_EQ(state->betting.pot(), 500);
  EXPECT_EQ(state->betting.position_to_act(), 0);
  EXPECT_EQ(to_string(state->own_cards), "9s8h");
  EXPECT_EQ(to_string(state->board), "8c8d5c6s");
  EXPECT_EQ(match_state_line(state->view(), state->hand), line);
}

TEST(AcpcLines, OtherStatesRoundTrip) {
  for (const std::string line : {"MATCHSTATE:1:0::|JdTc", "MATCHSTATE:0:1:f:Kh7c|", "MATCHSTATE:1:2:r300:|JdTc",
                                 "MATCHSTATE:0:3:r20000c///:9s8h|AcAd/8c8d5c/6s/2h",
                                 "MATCHSTATE:1:18446744073709551615:cc/cc/r20000f:|JdTc/8c8d5c/6s",
                                 "MATCHSTATE:1:4:cc/cc/cc/cc:9s8h|JdTc/8c8d5c/6s/2h"}) {
    const auto state = parse_match_state(line, {});
    ASSERT_TRUE(state) << state.error().message();
    EXPECT_EQ(match_state_line(state->view(), state->hand), line);
  }
}

TEST(AcpcLines, FaultsAreNamedWithTheirPlace) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "character 1: expected MATCHSTATE:"},
      {"MATCHSTATE:2:0::|JdTc", "expected a position, 0 or 1"},
      {"MATCHSTATE:1:-1::|JdTc", "the number of a hand"},
      {"MATCHSTATE:1:07::|JdTc", "the number of a hand"},
      {"MATCHSTATE:1:99999999999999999999::|JdTc", "the number of a hand"},
      {"MATCHSTATE:1:0:x:|JdTc", "an action"},
      {"MATCHSTATE:1:0:r150:|JdTc", "'r150' is not legal here, which is fold, call 50 or raise to 200 ... 20000"},
      {"MATCHSTATE:1:0:cf:|JdTc", "'f' is not legal here"},
      {"MATCHSTATE:1:0:fc:|JdTc", "after the hand was over"},
      {"MATCHSTATE:1:0:cccc:|JdTc", "'/', since a round has ended"},
      {"MATCHSTATE:1:0:c/c:|JdTc", "an action"},
      {"MATCHSTATE:1:0:cc/:|JdTc", "'/' and the cards of a round"},
      {"MATCHSTATE:1:0:cc/:|JdTc/8c8d", "a card such as Td"},
      {"MATCHSTATE:1:0::|JdJd", "occurs twice"},
      {"MATCHSTATE:1:0::9s8h|JdTc", "'|'"},
      {"MATCHSTATE:1:0:r20000c///:|JdTc/8c8d5c/6s/2h", "a card such as Td"},
      {"MATCHSTATE:1:0::|JdTc/8c8d5c", "the end of the line"},
      {std::string("MATCHSTATE:1:0::|Jd\0c", 22), "a card such as Td"},
      {std::string(20'000, 'c'), "20000 bytes"},
  };
  for (const auto& [line, expected] : cases) {
    const std::string message = error_of(line);
    EXPECT_NE(message.find(expected), std::string::npos) << line << ": " << message;
  }
  EXPECT_NE(error_of("MATCHSTATE:1:0:r200:|JdTc", {150, 50, 100}).find("not legal"), std::string::npos);
}

TEST(AcpcLines, Actions) {
  EXPECT_EQ(*parse_action("f"), Action::fold());
  EXPECT_EQ(*parse_action("r500"), Action::raise(500));
  for (const char* wrong : {"", "r", "r-5", "r05", "r5x", "cc", "C", "r99999999999999999999", " c"})
    EXPECT_FALSE(parse_action(wrong)) << wrong;
}

// Carries lines between a dealer and two clients until none is left. `meddle` may change a client's line.
template <class Meddle>
void play_match(AcpcDealer& dealer, std::array<AcpcClient*, 2> clients, Meddle meddle) {
  std::deque<AcpcDealer::Line> to_clients;
  const auto to_dealer = [&](int seat, const std::string& line) {
    const auto lines = dealer.on_line(seat, line);
    ASSERT_TRUE(lines) << lines.error().message();
    to_clients.insert(to_clients.end(), lines->begin(), lines->end());
  };
  for (int seat = 0; seat < 2; ++seat) to_dealer(seat, clients[static_cast<std::size_t>(seat)]->greeting());
  while (!to_clients.empty() && !testing::Test::HasFatalFailure()) {
    const AcpcDealer::Line line = to_clients.front();
    to_clients.pop_front();
    const auto answer = clients[static_cast<std::size_t>(line.seat)]->on_line(line.text);
    ASSERT_TRUE(answer) << answer.error().message();
    if (!answer->empty()) to_dealer(line.seat, meddle(line.seat, *answer));
  }
}
const auto kUnchanged = [](int, const std::string& line) { return line; };

TEST(Acpc, AMatchRepeatsForASeedAndAllSidesCountAlike) {
  for (int round = 0; round < 2; ++round) {
    static std::string first_score;
    auto dealer = *AcpcDealer::make({.hands = 300, .seed = 5, .names = {"tight", "random"}});
    const auto tight = *make_player("tight"), random = *make_player("random");
    AcpcClient tight_client(*tight, {}, 1), random_client(*random, {}, 2);
    EXPECT_FALSE(dealer.seat_to_act());
    play_match(dealer, {&tight_client, &random_client}, kUnchanged);
    EXPECT_TRUE(dealer.is_done());
    EXPECT_FALSE(dealer.seat_to_act());
    EXPECT_EQ(tight_client.hands(), 300u);
    EXPECT_EQ(tight_client.won(), dealer.won()[0]);
    EXPECT_EQ(random_client.won(), dealer.won()[1]);
    EXPECT_EQ(dealer.faults(), (std::array<std::uint64_t, 2>{0, 0}));
    EXPECT_EQ(dealer.score_line(), fmt::format("SCORE:{}|{}:tight|random", tight_client.won(), random_client.won()));
    if (round == 0) first_score = dealer.score_line();
    EXPECT_EQ(dealer.score_line(), first_score);
  }
}

TEST(Acpc, IllegalAnswersAreFaultsAndOldOnesAreIgnored) {
  auto dealer = *AcpcDealer::make({.hands = 1, .seed = 5});
  EXPECT_TRUE(dealer.on_line(0, "# hello\r\n")->empty());
  EXPECT_TRUE(dealer.on_line(0, "VERSION:2.0.0\r\n")->empty());
  const auto begin = *dealer.on_line(1, "VERSION:2.0.0");
  ASSERT_EQ(begin.size(), 2u);
  EXPECT_EQ(dealer.seat_to_act(), 1);  // in hand 0 seat 1 has the small blind
  const std::string state = begin[1].text.substr(0, begin[1].text.size() - 2);
  EXPECT_TRUE(dealer.on_line(0, begin[0].text)->empty());  // not its turn
  EXPECT_FALSE(dealer.on_line(1, "hello"));                // no protocol at all
  const auto next = *dealer.on_line(1, state + ":c\r\n");
  ASSERT_EQ(next.size(), 2u);
  EXPECT_TRUE(dealer.on_line(1, state + ":c")->empty());  // the dealer has this answer already
  const std::string option = next[0].text.substr(0, next[0].text.size() - 2);
  const auto flop = *dealer.on_line(0, option + ":f");  // a check instead, because the seat owes nothing
  EXPECT_EQ(dealer.faults(), (std::array<std::uint64_t, 2>{1, 0}));
  ASSERT_EQ(flop.size(), 2u);
  EXPECT_NE(flop[0].text.find(":cc/:"), std::string::npos);
  const std::string on_flop = flop[0].text.substr(0, flop[0].text.size() - 2);
  EXPECT_TRUE(dealer.on_line(0, state + ":c").has_value());  // an earlier state, although it was sent to the other seat
  const auto bet = *dealer.on_line(0, on_flop + ":r500");
  const auto end =
      *dealer.on_line(1, bet[1].text.substr(0, bet[1].text.size() - 2) + ":x");  // a fold, because the seat owes chips
  EXPECT_EQ(dealer.faults(), (std::array<std::uint64_t, 2>{1, 1}));
  EXPECT_NE(end[0].text.find(":cc/r500f:"), std::string::npos);
  EXPECT_TRUE(dealer.is_done());
  EXPECT_EQ(dealer.score_line(), "SCORE:100|-100:one|two");
  EXPECT_TRUE(dealer.on_line(1, "anything")->empty());
}

TEST(Acpc, AVersionComesFirst) {
  auto dealer = *AcpcDealer::make({.hands = 1});
  EXPECT_NE(dealer.on_line(0, "VERSION:1.0.0").error().detail.find("expected 'VERSION:2.0.0' first"),
            std::string::npos);
  EXPECT_FALSE(AcpcDealer::make({.hands = 0}));
  EXPECT_FALSE(AcpcDealer::make({.names = {"a", "b|c"}}));
  EXPECT_FALSE(AcpcDealer::make({.rules = {1, 1, 1}}));
}

TEST(Acpc, AClientCountsAnEndOnceAndRefusesOtherRules) {
  const auto caller = *make_player("caller");
  AcpcClient client(*caller, {}, 1);
  EXPECT_EQ(client.greeting(), "VERSION:2.0.0\r\n");
  const auto answer = [&](std::string_view line) { return client.on_line(line).value(); };
  EXPECT_EQ(answer("; a comment\r\n"), "");
  EXPECT_EQ(answer("MATCHSTATE:1:0::|JdTc\r\n"), std::string("MATCHSTATE:1:0::|JdTc:c\r\n"));
  EXPECT_EQ(answer("MATCHSTATE:0:1::9s8h|\r\n"), "");  // the other's turn
  for (int i = 0; i < 2; ++i) EXPECT_EQ(answer("MATCHSTATE:0:0:f:9s8h|\r\n"), "");
  EXPECT_EQ(client.won(), 50);
  EXPECT_EQ(client.hands(), 1u);
  EXPECT_FALSE(client.on_line("MATCHSTATE:0:1:r30000:9s8h|\r\n"));
}

}  // namespace
}  // namespace echoline::data_plane::poker

// The text protocol of the Annual Computer Poker Competition (ACPC), version 2.0.0: player's and dealer's side, without
// sockets.
//
//   player: VERSION:2.0.0
//   dealer: MATCHSTATE:<position>:<hand>:<betting>:<cards>     after every action, to both; and when the hand is over
//   player: MATCHSTATE:<position>:<hand>:<betting>:<cards>:<action>     when it is its turn
//
// Betting is "f", "c" and "r<chips put in over the whole hand>", with rounds separated by '/'. Cards are the hands of
// position 0 and 1, as far as the receiver may see them, separated by a vertical bar; then the board, each round after
// a '/'. Lines end in "\r\n"; lines that begin with '#' or ';' are comments. AcpcDealer::score_line() is the dealer's
// last line.
#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.hpp"
#include "data_plane/adapters/poker/match.hpp"

namespace echoline::data_plane::poker {

inline constexpr std::string_view kAcpcVersion = "VERSION:2.0.0";
inline constexpr std::size_t kAcpcLineBytesMax = 16 * 1024;  // longer than any hand under Rules::check()
inline constexpr std::uint64_t kAcpcHandsMax = 10'000'000;

// The content of one MATCHSTATE line.
struct MatchState {
  int position = 0;
  std::uint64_t hand = 0;
  Betting betting;
  Hole own_cards;                      // the receiver's two cards
  std::optional<Hole> opponent_cards;  // the opponent's two cards, at showdown
  std::vector<Card> board;

  View view() const {
    return {.position = position,
            .betting = betting,
            .own_cards = own_cards,
            .opponent_cards = opponent_cards,
            .board = board};
  }
};

// "MATCHSTATE:0:30:cc/r250c/:9s8h|/8c8d5c/6s", without an end of line.
std::string match_state_line(const View& view, std::uint64_t hand);

// Parses such a line, with or without its line end, and replays its betting by the rules, so the state is reachable.
// kInvalid with the place and what was expected there.
Result<MatchState> parse_match_state(std::string_view line, const Rules& rules);

// Parses "f", "c" or "r600". Betting checks whether the action is legal.
Result<Action> parse_action(std::string_view text);

// The player's side. It accepts any bytes from the dealer.
class AcpcClient {
 public:
  // `player` must outlive it. `seed` seeds the player's random draws.
  AcpcClient(Player& player, const Rules& rules, std::uint64_t seed) : player_(player), rules_(rules), seed_(seed) {}

  // The first line to send.
  std::string greeting() const;
  // Returns the answer to a line of the dealer; empty if none is due. Fails if the line is not a state of these rules,
  // or if the player fails.
  Result<std::string> on_line(std::string_view line);

  std::uint64_t hands() const { return hands_; }  // completed hands
  Chips won() const { return won_; }

 private:
  void count_hand(const MatchState& state);

  Player& player_;
  Rules rules_;
  std::uint64_t seed_, hands_ = 0;
  std::optional<std::uint64_t> last_counted_hand_;  // the dealer reports the end of a hand once or twice
  Chips won_ = 0;
};

// The dealer's side, for two seats. Position 0 is the big blind. The seats alternate positions: seat s is in position
// (s + hand) mod 2.
class AcpcDealer {
 public:
  struct Options {
    Rules rules = {};
    std::uint64_t hands = 1000, seed = 1;
    std::array<std::string, 2> names{"one", "two"};
  };
  struct Line {
    int seat;
    std::string text;  // the line with its end
  };

  // kInvalid, without an operation, for invalid rules, hands (1 to kAcpcHandsMax) or names (1 to 64 letters, digits,
  // '_', '-' and '.').
  static Result<AcpcDealer> make(Options options);

  // Returns the lines to send after a line of a seat. The match begins when both seats have sent their version.
  // Comments, and answers to an earlier state, are ignored. An illegal action counts as a fault and becomes a check, or
  // a fold if the seat owes chips. Fails if the seat violates the protocol.
  Result<std::vector<Line>> on_line(int seat, std::string_view line);

  bool is_done() const { return hand_ == options_.hands; }
  bool has_greeted(int seat) const { return greeted_[static_cast<std::size_t>(seat)]; }
  // Absent before and after the match.
  std::optional<int> seat_to_act() const;
  std::uint64_t hand() const { return hand_; }  // number of the current hand, from 0
  std::array<std::uint64_t, 2> faults() const { return faults_; }
  std::array<Chips, 2> won() const { return {won_by_seat_0_, -won_by_seat_0_}; }
  // "SCORE:-150|150:one|two".
  std::string score_line() const;

 private:
  explicit AcpcDealer(Options options);
  int position_of(int seat) const { return static_cast<int>((static_cast<std::uint64_t>(seat) + hand_) % 2); }
  std::string state_line(int seat) const;
  void add_state_lines(std::vector<Line>& lines) const;
  Status accept_greeting(int seat, std::string_view line);
  void deal();

  Options options_;
  std::array<bool, 2> greeted_{};  // indexed by seat, as all arrays here
  Betting betting_;
  Deal deal_;
  std::uint64_t hand_ = 0;
  std::array<std::uint64_t, 2> faults_{};
  Chips won_by_seat_0_ = 0;
};

}  // namespace echoline::data_plane::poker

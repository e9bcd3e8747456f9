// Heads-up no-limit hold'em: exact rules of one hand, as in the Annual Computer Poker Competition.
//
// Position 0 posts the big blind and acts first from the flop on; position 1 posts the small blind and acts first
// before the flop. Both begin every hand with the same stack, so at showdown both have put in the same and a split pot
// leaves no odd chip. Errors have no operation; the caller adds it.
#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "data_plane/adapters/poker/cards.hpp"

namespace echoline::data_plane::poker {

using Chips = std::int64_t;

inline constexpr Chips kStackMax = 1'000'000'000;
inline constexpr Chips kStackInBigBlindsMax = 1'000;  // bounds the actions of a hand

struct Rules {
  Chips stack = 20'000, small_blind = 50, big_blind = 100;
  // kInvalid unless 1 <= small blind <= big blind < stack <= 1,000 big blinds.
  Status check() const;
  bool operator==(const Rules&) const = default;
};

struct Action {
  enum class Kind : std::uint8_t { kFold, kCall, kRaise };
  Kind kind = Kind::kCall;  // a check if nothing is owed
  Chips to = 0;             // for a raise: the player's total chips put in over the whole hand

  static Action fold() { return {.kind = Kind::kFold, .to = 0}; }
  static Action call() { return {.kind = Kind::kCall, .to = 0}; }
  static Action raise(Chips to) { return {.kind = Kind::kRaise, .to = to}; }
  bool operator==(const Action&) const = default;
};
// "f", "c" or "r600".
std::string to_string(Action action);

// The legal actions of the player to act. A call is always legal, a fold if chips are owed.
struct LegalActions {
  Chips owed = 0;                             // chips to call; 0: the call is a check
  std::optional<std::array<Chips, 2>> raise;  // least and most; nothing if the opponent is all-in
  bool allows(Action action) const;
  // The nearest legal raise; a call if no raise is legal.
  Action raise_near(Chips to) const;
};
// "fold, call 100 or raise to 400 ... 20000": for messages.
std::string to_string(const LegalActions& legal);

inline constexpr int kRounds = 4;  // before the flop, flop, turn, river
// Number of open board cards in a round.
constexpr std::size_t board_size(int round) { return round == 0 ? 0 : static_cast<std::size_t>(round) + 2; }

// The betting of one hand, which needs no cards.
class Betting {
 public:
  struct Step {
    int round, position;
    Action action;
    bool operator==(const Step&) const = default;
  };

  // Requires rules that pass check().
  explicit Betting(const Rules& rules) : rules_(rules) { restart(); }
  void restart();

  const Rules& rules() const { return rules_; }
  bool is_over() const { return over_; }
  std::optional<int> folded_position() const { return folded_position_; }
  bool is_showdown() const { return over_ && !folded_position_; }
  int position_to_act() const { return position_to_act_; }  // requires !is_over()
  int round() const { return round_; }                      // 0 to 3; also 3 after a call of an all-in
  Chips put_in(int position) const { return put_in_[static_cast<std::size_t>(position)]; }
  Chips pot() const { return put_in_[0] + put_in_[1]; }
  std::span<const Step> steps() const { return steps_; }
  LegalActions legal() const;  // requires !is_over()
  // kInvalid, without a change, if the action is illegal or the hand is over.
  Status act(Action action);

  bool operator==(const Betting&) const = default;

 private:
  void next_round();

  Rules rules_;
  std::array<Chips, 2> put_in_{};
  Chips raise_min_ = 0;  // total chips put in by the smallest full raise; only an all-in may be smaller
  int round_ = 0, position_to_act_ = 1;
  int actions_in_round_ = 0;
  bool over_ = false;
  std::optional<int> folded_position_;
  std::vector<Step> steps_;
};

// The two cards that only their player sees.
using Hole = std::array<Card, 2>;

// All cards of a hand, visible or not.
struct Deal {
  std::array<Hole, 2> holes;  // indexed by position
  std::array<Card, 5> board;
  static Deal draw(Random& random);
};

// Chips that position 0 wins, and position 1 loses. Requires a hand that is over.
Chips chips_won_by_position_0(const Betting& betting, const Deal& deal);

// The information a player may base an action on. Refers to betting and board, which must outlive it.
struct View {
  int position = 0;
  const Betting& betting;
  Hole own_cards;
  std::optional<Hole> opponent_cards;  // at showdown
  std::span<const Card> board;
};
View view_of(const Betting& betting, const Deal& deal, int position);

}  // namespace echoline::data_plane::poker

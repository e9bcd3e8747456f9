// Heads-up no-limit hold'em: exact rules of one hand, as the Annual Computer Poker Competition plays it.
//
// Position 0 posts the big blind and acts first after the flop; position 1 posts the small blind and acts first before
// it. Both begin every hand with the same stack, so what both have put in at showdown is equal and a split pot leaves
// no odd chip.
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
  Kind kind = Kind::kCall;  // with nothing owed a call is a check
  Chips to = 0;             // of a raise: what its player has then put in over the whole hand

  static Action fold() { return {Kind::kFold, 0}; }
  static Action call() { return {Kind::kCall, 0}; }
  static Action raise(Chips to) { return {Kind::kRaise, to}; }
  bool operator==(const Action&) const = default;
};
// "f", "c" or "r600".
std::string to_string(Action action);

// What the player whose turn it is may do. A call is always legal, a fold where something is owed.
struct Legal {
  Chips owed = 0;                             // to call; 0: it is a check
  std::optional<std::array<Chips, 2>> raise;  // least and most; nothing where the other one is all-in
  bool allows(Action action) const;
  // The raise nearest to this one; a call where no raise is legal.
  Action raise_near(Chips to) const;
};
// "fold, call 100 or raise to 400 ... 20000": for messages.
std::string to_string(const Legal& legal);

inline constexpr int kRounds = 4;  // before the flop, flop, turn, river
// Board cards that lie open in a round.
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
  bool over() const { return over_; }
  std::optional<int> folded() const { return folded_; }  // who has folded
  bool showdown() const { return over_ && !folded_; }
  int to_act() const { return to_act_; }  // requires !over()
  int round() const { return round_; }    // 3 as well after an all-in was called
  Chips put_in(int position) const { return put_in_[static_cast<std::size_t>(position)]; }
  Chips pot() const { return put_in_[0] + put_in_[1]; }
  std::span<const Step> steps() const { return steps_; }
  Legal legal() const;  // requires !over()
  // kInvalid, and nothing has happened, where the action is not legal or the hand is over.
  Status act(Action action);

  bool operator==(const Betting&) const = default;

 private:
  void next_round();

  Rules rules_;
  std::array<Chips, 2> put_in_{};
  Chips raise_least_ = 0;  // the smallest full raise; all-in is legal below it
  int round_ = 0, to_act_ = 1, acted_ = 0;
  bool over_ = false;
  std::optional<int> folded_;
  std::vector<Step> steps_;
};

using Hole = std::array<Card, 2>;

// All cards of a hand, open or not.
struct Deal {
  std::array<Hole, 2> holes;
  std::array<Card, 5> board;
  static Deal draw(Random& random);
};

// Chips that position 0 wins, and position 1 loses. Requires a hand that is over.
Chips won_by_first(const Betting& betting, const Deal& deal);

// What one player sees: no more may decide an action. Refers to betting and board, which must outlive it.
struct View {
  int position = 0;
  const Betting& betting;
  Hole own;
  std::optional<Hole> other;  // at showdown
  std::span<const Card> board;
};
View view_of(const Betting& betting, const Deal& deal, int position);

}  // namespace echoline::data_plane::poker

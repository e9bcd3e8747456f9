// The rules of the game: legal actions, the rounds of betting, and the outcome of a hand.
#include "data_plane/adapters/poker/game.hpp"

#include <algorithm>

#include "data_plane/adapters/poker/evaluator.hpp"

namespace echoline::data_plane::poker {

Status Rules::check() const {
  if (small_blind < 1 || small_blind > big_blind)
    return fail(Code::kInvalid, "", "small blind {}: expected 1 to the big blind, {}", small_blind, big_blind);
  if (stack <= big_blind || stack > kStackMax || stack / big_blind > kStackInBigBlindsMax)
    return fail(Code::kInvalid, "",
                "stack {}: expected more than the big blind, {}, and at most {} of them and {} chips", stack, big_blind,
                kStackInBigBlindsMax, kStackMax);
  return ok();
}

std::string to_string(Action action) {
  if (action.kind == Action::Kind::kRaise) return fmt::format("r{}", action.to);
  return action.kind == Action::Kind::kFold ? "f" : "c";
}

bool LegalActions::allows(Action action) const {
  switch (action.kind) {
    case Action::Kind::kFold:
      return owed > 0;
    case Action::Kind::kCall:
      return true;
    case Action::Kind::kRaise:
      return raise && action.to >= raise->front() && action.to <= raise->back();
  }
  return false;
}

Action LegalActions::raise_near(Chips to) const {
  return raise ? Action::raise(std::clamp(to, raise->front(), raise->back())) : Action::call();
}

std::string to_string(const LegalActions& legal) {
  std::string text = legal.owed > 0 ? fmt::format("fold, call {}", legal.owed) : "check";
  if (legal.raise) text += fmt::format(" or raise to {} ... {}", legal.raise->front(), legal.raise->back());
  return text;
}

void Betting::restart() {
  put_in_ = {rules_.big_blind, rules_.small_blind};
  raise_min_ = 2 * rules_.big_blind;
  round_ = actions_in_round_ = 0;
  position_to_act_ = 1;
  over_ = false;
  folded_position_.reset();
  steps_.clear();
}

LegalActions Betting::legal() const {
  ECHO_CHECK(!over_);
  const Chips highest_bet = std::max(put_in_[0], put_in_[1]);
  LegalActions legal{.owed = highest_bet - put_in(position_to_act_), .raise = {}};
  if (highest_bet < rules_.stack) legal.raise = {std::min(raise_min_, rules_.stack), rules_.stack};
  return legal;
}

Status Betting::act(Action action) {
  if (over_) return fail(Code::kInvalid, "", "'{}' after the hand was over", to_string(action));
  if (const LegalActions allowed = legal(); !allowed.allows(action))
    return fail(Code::kInvalid, "", "'{}' is not legal here, which is {}", to_string(action), to_string(allowed));
  const Chips highest_bet = std::max(put_in_[0], put_in_[1]);
  Chips& own_bet = put_in_[static_cast<std::size_t>(position_to_act_)];
  steps_.push_back({.round = round_, .position = position_to_act_, .action = action});
  ++actions_in_round_;
  if (action.kind == Action::Kind::kFold) {
    folded_position_ = position_to_act_;
    over_ = true;
    return ok();
  }
  if (action.kind == Action::Kind::kRaise) {
    // The next raise must add at least as much as this one. An all-in that adds less does not change the smallest
    // raise.
    const Chips added = action.to - highest_bet;
    raise_min_ = std::max(raise_min_, action.to + added);
    own_bet = action.to;
  } else {
    own_bet = highest_bet;
    const bool have_both_acted = actions_in_round_ >= 2;
    if (have_both_acted) {
      next_round();
      return ok();
    }
  }
  position_to_act_ = 1 - position_to_act_;
  return ok();
}

void Betting::next_round() {
  if (put_in_[0] == rules_.stack) round_ = kRounds - 1;  // deals the rest of the board without betting
  over_ = round_ == kRounds - 1;
  if (over_) return;
  ++round_;
  position_to_act_ = actions_in_round_ = 0;
  raise_min_ = put_in_[0] + rules_.big_blind;
}

Deal Deal::draw(Random& random) {
  Deck deck;
  Deal deal;
  for (Hole& hole : deal.holes)
    for (Card& card : hole) card = deck.draw(random);
  for (Card& card : deal.board) card = deck.draw(random);
  return deal;
}

Chips chips_won_by_position_0(const Betting& betting, const Deal& deal) {
  ECHO_CHECK(betting.is_over());
  if (const auto loser = betting.folded_position()) return *loser == 0 ? -betting.put_in(0) : betting.put_in(1);
  const CardSet board(deal.board);
  const auto value_of_position_0 = evaluate(board | CardSet(deal.holes[0])),
             value_of_position_1 = evaluate(board | CardSet(deal.holes[1]));
  return value_of_position_0 == value_of_position_1  ? 0
         : value_of_position_0 > value_of_position_1 ? betting.put_in(1)
                                                     : -betting.put_in(0);
}

View view_of(const Betting& betting, const Deal& deal, int position) {
  const auto own_position = static_cast<std::size_t>(position);
  return {.position = position,
          .betting = betting,
          .own_cards = deal.holes[own_position],
          .opponent_cards = betting.is_showdown() ? std::optional(deal.holes[1 - own_position]) : std::nullopt,
          .board = std::span(deal.board).first(board_size(betting.round()))};
}

}  // namespace echoline::data_plane::poker

// Implements the built-in players, which are opponents and baselines of the task "poker" and of matches.
// docs/reference/poker.md states the tight player's rules with the same thresholds.
#include "data_plane/adapters/poker/players.hpp"

#include <algorithm>

#include "base/suggest.hpp"
#include "data_plane/adapters/poker/evaluator.hpp"

namespace echoline::data_plane::poker {
namespace {

class RandomPlayer final : public Player {
 public:
  std::string_view name() const override { return "random"; }
  Result<Action> decide(const View& view, Random& random) override {
    const LegalActions legal = view.betting.legal();
    const std::uint64_t fold_choices = legal.owed > 0 ? 1 : 0;
    const std::uint64_t choice = random.below(1 + fold_choices + (legal.raise ? 1 : 0));
    if (choice < fold_choices) return Action::fold();
    if (choice == fold_choices) return Action::call();
    return Action::raise(random.between(legal.raise->front(), legal.raise->back()));
  }
};

class Caller final : public Player {
 public:
  std::string_view name() const override { return "caller"; }
  Result<Action> decide(const View&, Random&) override { return Action::call(); }
};

class TightPlayer final : public Player {
 public:
  std::string_view name() const override { return "tight"; }
  Result<Action> decide(const View& view, Random& random) override {
    const Spot spot(view);
    return view.betting.round() == 0 ? before_flop(spot, chen_half_points(view.own_cards))
                                     : after_flop(spot, equity(view.own_cards, view.board, kDeals, random));
  }

 private:
  static constexpr Chips kLargeRaiseBigBlinds = 20;
  static constexpr int kDeals = 100;  // deals per estimate, whose standard error is at most 0.05

  // The inputs of the tight player's rules.
  struct Spot {
    explicit Spot(const View& view)
        : legal(view.betting.legal()),
          pot(view.betting.pot()),
          own_bet(view.betting.put_in(view.position)),
          big_blind(view.betting.rules().big_blind) {
      for (const auto& step : view.betting.steps())
        raises += step.round == view.betting.round() && step.action.kind == Action::Kind::kRaise;
    }
    // Raises by a share of the pot, counted after a call.
    Action raise_by(double pot_share) const {
      const auto raise = static_cast<Chips>(pot_share * static_cast<double>(pot + legal.owed));
      return legal.raise_near(own_bet + legal.owed + raise);
    }
    Action fold_or_check() const { return legal.owed > 0 ? Action::fold() : Action::call(); }

    LegalActions legal;
    Chips pot, own_bet, big_blind;
    int raises = 0;  // raises in this round
  };

  // The rows are for no earlier raise, for one, and for several or a large one. Each has the half points from which the
  // player raises, and those from which it calls.
  static Action before_flop(const Spot& spot, int half_points) {
    struct Thresholds {
      int raise, call;
    };
    constexpr std::array<Thresholds, 3> kThresholds = {{{16, 10}, {24, 16}, {32, 24}}};
    const bool is_large_raise = spot.legal.owed > kLargeRaiseBigBlinds * spot.big_blind;
    const Thresholds& thresholds = kThresholds[is_large_raise ? 2 : static_cast<std::size_t>(std::min(spot.raises, 2))];
    if (half_points >= thresholds.raise) return spot.legal.raise_near(3 * (spot.own_bet + spot.legal.owed));
    return half_points >= thresholds.call ? Action::call() : spot.fold_or_check();
  }

  static Action after_flop(const Spot& spot, double equity_share) {
    if (equity_share >= 0.9 || (equity_share >= 0.8 && spot.raises < 2)) return spot.raise_by(1.0);
    if (equity_share >= 0.6 && spot.raises == 0) return spot.raise_by(0.5);
    // The share of the pot that a call has to win on average.
    const double pot_odds = static_cast<double>(spot.legal.owed) / static_cast<double>(spot.pot + spot.legal.owed);
    // A margin, because a player who bets has better than random cards.
    constexpr double kCallMargin = 0.1;
    return equity_share >= pot_odds + kCallMargin ? Action::call() : spot.fold_or_check();
  }
};

template <class T>
std::unique_ptr<Player> make_instance() {
  return std::make_unique<T>();
}
struct PlayerKind {
  std::string_view name;
  std::unique_ptr<Player> (*make)();
};
constexpr std::array<PlayerKind, 3> kPlayerKinds = {{{"caller", make_instance<Caller>},
                                                     {"random", make_instance<RandomPlayer>},
                                                     {"tight", make_instance<TightPlayer>}}};

}  // namespace

Result<std::unique_ptr<Player>> make_player(std::string_view name) {
  for (const PlayerKind& kind : kPlayerKinds)
    if (kind.name == name) return kind.make();
  name = name.substr(0, 64);
  return fail(Code::kInvalid, "", "unknown player '{}'{}; known: {}", name, did_you_mean(name, player_names()),
              fmt::join(player_names(), ", "));
}

std::vector<std::string> player_names() {
  std::vector<std::string> names;
  for (const PlayerKind& kind : kPlayerKinds) names.emplace_back(kind.name);
  return names;
}

double equity(const Hole& own, std::span<const Card> board, int deals, Random& random) {
  const CardSet own_cards = CardSet(own) | CardSet(board);
  Deck deck(own_cards);
  constexpr std::size_t kPlayerCards = 7;  // two of the player and five of the board
  // Unknown cards among those of which the opponent makes a hand: the rest of the board, and two in hand.
  const std::size_t hidden_cards = kPlayerCards - board.size();
  int half_pots = 0;
  for (int i = 0; i < deals; ++i) {
    CardSet dealt, opponent_cards(board);
    // Deals the rest of the board, which both players share, and then the opponent's two cards.
    for (std::size_t card = 0; card + 2 < hidden_cards; ++card) dealt.add(deck.draw(random));
    opponent_cards = opponent_cards | dealt;
    for (int card = 0; card < 2; ++card) opponent_cards.add(deck.draw(random));
    const HandValue own_value = evaluate(own_cards | dealt), opponent_value = evaluate(opponent_cards);
    half_pots += own_value > opponent_value ? 2 : own_value == opponent_value ? 1 : 0;  // equal hands share the pot
    deck.put_back(hidden_cards);
  }
  return half_pots / (2.0 * deals);
}

// The Chen formula in half points: those of the higher card, then those for pairs, suits and gaps. The formula rounds
// up to whole points, so the result is even. Ranks count from 0 (a deuce): 9 is a jack, 10 a queen.
int chen_half_points(const Hole& own) {
  const auto [low, high] = std::minmax({own[0].rank(), own[1].rank()});
  constexpr std::array<int, 4> kHighCards = {12, 14, 16, 20};  // J Q K A
  // Below the jack, a card has half its number in points, so its number in half points.
  const int high_card_half_points = high >= 9 ? kHighCards[static_cast<std::size_t>(high - 9)] : high + 2;
  constexpr int kPairMin = 10, kOneSuit = 4, kStraight = 2;  // half points: the least for a pair; additions
  if (low == high) return std::max(2 * high_card_half_points, kPairMin);
  const int ranks_between = high - low - 1;
  constexpr std::array<int, 5> kGapPenalty = {0, 2, 4, 8, 10};  // indexed by the number of ranks between the two cards
  int half_points = high_card_half_points - kGapPenalty[static_cast<std::size_t>(std::min(ranks_between, 4))];
  if (own[0].suit() == own[1].suit()) half_points += kOneSuit;
  if (ranks_between <= 1 && high < 10) half_points += kStraight;
  return half_points + (half_points & 1);
}

}  // namespace echoline::data_plane::poker

// Implements the built-in players, which are opponents and baselines of the task "poker" and of matches.
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
    const Legal legal = view.betting.legal();
    const std::uint64_t fold = legal.owed > 0 ? 1 : 0;
    const std::uint64_t choice = random.below(1 + fold + (legal.raise ? 1 : 0));
    if (choice < fold) return Action::fold();
    if (choice == fold) return Action::call();
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
    return view.betting.round() == 0 ? before_flop(spot, chen_half_points(view.own))
                                     : after_flop(spot, equity(view.own, view.board, kDeals, random));
  }

 private:
  static constexpr int kDeals = 100;  // per estimate; its standard error is at most 0.05

  // The inputs of the tight player's rules.
  struct Spot {
    explicit Spot(const View& view)
        : legal(view.betting.legal()),
          pot(view.betting.pot()),
          own(view.betting.put_in(view.position)),
          big_blind(view.betting.rules().big_blind) {
      for (const auto& step : view.betting.steps())
        raises += step.round == view.betting.round() && step.action.kind == Action::Kind::kRaise;
    }
    // Raises by a share of the pot after a call.
    Action raise_by(double share) const {
      return legal.raise_near(own + legal.owed + static_cast<Chips>(share * static_cast<double>(pot + legal.owed)));
    }
    Action give_up() const { return legal.owed > 0 ? Action::fold() : Action::call(); }

    Legal legal;
    Chips pot, own, big_blind;
    int raises = 0;  // in this round
  };

  // Thresholds in points for raising and calling: after no raise, after one, and after several or a large one.
  static Action before_flop(const Spot& spot, int half_points) {
    struct Row {
      int raise, call;
    };
    constexpr std::array<Row, 3> kRows = {{{16, 10}, {24, 16}, {32, 24}}};
    const bool large = spot.legal.owed > 20 * spot.big_blind;
    const Row& row = kRows[large ? 2 : static_cast<std::size_t>(std::min(spot.raises, 2))];
    if (half_points >= row.raise) return spot.legal.raise_near(3 * (spot.own + spot.legal.owed));
    return half_points >= row.call ? Action::call() : spot.give_up();
  }

  static Action after_flop(const Spot& spot, double share) {
    if (share >= 0.9 || (share >= 0.8 && spot.raises < 2)) return spot.raise_by(1.0);
    if (share >= 0.6 && spot.raises == 0) return spot.raise_by(0.5);
    const double price = static_cast<double>(spot.legal.owed) / static_cast<double>(spot.pot + spot.legal.owed);
    return share >= price + 0.1 ? Action::call() : spot.give_up();  // a player who bets has better than random cards
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
  for (const PlayerKind& known : kPlayerKinds)
    if (known.name == name) return known.make();
  name = name.substr(0, 64);
  return fail(Code::kInvalid, "", "unknown player '{}'{}; known: {}", name, did_you_mean(name, player_names()),
              fmt::join(player_names(), ", "));
}

std::vector<std::string> player_names() {
  std::vector<std::string> names;
  for (const PlayerKind& known : kPlayerKinds) names.emplace_back(known.name);
  return names;
}

double equity(const Hole& own, std::span<const Card> board, int deals, Random& random) {
  const CardSet mine = CardSet(own) | CardSet(board);
  Deck deck(mine);
  const std::size_t hidden = 7 - board.size();  // unknown cards among the opponent's seven
  int half_pots = 0;
  for (int i = 0; i < deals; ++i) {
    CardSet dealt, theirs(board);
    for (std::size_t c = 0; c + 2 < hidden; ++c) dealt.add(deck.draw(random));
    theirs = theirs | dealt;
    for (int c = 0; c < 2; ++c) theirs.add(deck.draw(random));
    const HandValue me = evaluate(mine | dealt), them = evaluate(theirs);
    half_pots += me > them ? 2 : me == them ? 1 : 0;
    deck.put_back(hidden);
  }
  return half_pots / (2.0 * deals);
}

// The Chen formula: points of the higher card, then for pairs, suits and gaps; half points are rounded up.
int chen_half_points(const Hole& own) {
  const auto [low, high] = std::minmax({own[0].rank(), own[1].rank()});
  constexpr std::array<int, 4> kHighCards = {12, 14, 16, 20};  // J Q K A
  const int card = high >= 9 ? kHighCards[static_cast<std::size_t>(high - 9)] : high + 2;
  if (low == high) return std::max(2 * card, 10);
  const int between = high - low - 1;
  constexpr std::array<int, 5> kDistance = {0, 2, 4, 8, 10};
  int half_points = card - kDistance[static_cast<std::size_t>(std::min(between, 4))];
  if (own[0].suit() == own[1].suit()) half_points += 4;
  if (between <= 1 && high < 10) half_points += 2;  // both cards can be in a straight
  return half_points + (half_points & 1);
}

}  // namespace echoline::data_plane::poker

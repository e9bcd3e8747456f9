// Hands of hold'em per second on one core, against shuffling a deck in the same process.
#include <CLI/CLI.hpp>
#include <ctime>

#include "data_plane/adapters/poker/evaluator.hpp"
#include "data_plane/adapters/poker/match.hpp"
#include "tests/bench/measure.hpp"

using namespace echoline;
using namespace echoline::data_plane::poker;

namespace {

// Processor seconds per unit of `work`, the median of five.
template <class F>
double seconds_each(std::uint64_t units, F&& work) {
  std::vector<double> seconds;
  for (int i = 0; i < 5; ++i) {
    const std::clock_t begin = std::clock();
    work(units);
    seconds.push_back(static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC / static_cast<double>(units));
  }
  return bench::median(std::move(seconds));
}

double match_seconds(const char* first, const char* second, std::uint64_t hands) {
  const auto a = *make_player(first), b = *make_player(second);
  return seconds_each(hands, [&](std::uint64_t n) { (void)duplicate_match(*a, *b, {}, n / 2, 1).value(); });
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Hands of hold'em per second, and over shuffling alone");
  bool smoke = false;
  app.add_flag("--smoke", smoke, "few hands, only to see that it works");
  CLI11_PARSE(app, argc, argv);
  const std::uint64_t hands = smoke ? 200 : 200'000;

  std::uint64_t sink = 0;
  const double shuffle = seconds_each(hands, [&](std::uint64_t n) {
    Random random(1);
    for (std::uint64_t i = 0; i < n; ++i) {
      Deck deck;
      while (deck.cards_left() > 0) sink += static_cast<std::uint64_t>(deck.draw(random).index());
    }
  });
  Random random(2);
  std::vector<CardSet> sevens(4096);
  for (CardSet& seven : sevens) {
    Deck deck;
    for (int i = 0; i < 7; ++i) seven.add(deck.draw(random));
  }
  const double evaluation = seconds_each(hands * 10, [&](std::uint64_t n) {
    for (std::uint64_t i = 0; i < n; ++i) sink += evaluate(sevens[i % sevens.size()]).bits;
  });
  fmt::print("{:<28}{:>14}{:>24}\n", "", "per second", "time over a shuffle's");
  const auto row = [&](const std::string& what, double seconds) {
    fmt::print("{:<28}{:>14.0f}{:>24.3f}\n", what, 1 / seconds, seconds / shuffle);
  };
  row("shuffles of 52 cards", shuffle);
  row("evaluations of 7 cards", evaluation);
  for (const char* other : {"caller", "random", "tight"})
    row(fmt::format("hands, random and {}", other), match_seconds("random", other, hands));
  row("hands, tight and tight", match_seconds("tight", "tight", hands));
  return sink == 0 ? 1 : 0;  // so that nothing is left out
}

// Writes and parses the texts of the task "poker".
#include "data_plane/adapters/poker/wording.hpp"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <utility>

#include "data_plane/adapters/poker/evaluator.hpp"

namespace echoline::data_plane::poker {
namespace {

constexpr std::string_view kBegin = "<action>", kEnd = "</action>", kRaise = "raise ";
constexpr std::size_t kActionBytesMax = 64;
constexpr std::array<std::string_view, kRounds> kRoundNames = {"before the flop", "flop", "turn", "river"};

bool is_space(char letter) { return letter == ' ' || letter == '\n' || letter == '\t' || letter == '\r'; }

// Trims white space and converts to lower case.
std::string trimmed_lower_case(std::string_view text) {
  while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
  std::string lower(text);
  for (char& letter : lower)
    if (letter >= 'A' && letter <= 'Z') letter = static_cast<char>(letter - 'A' + 'a');
  return lower;
}

std::optional<Chips> parse_chips(std::string_view digits) {
  Chips value = 0;
  const char* const end = digits.data() + digits.size();
  if (digits.empty() || digits[0] == '-') return std::nullopt;
  const auto parsed = std::from_chars(digits.data(), end, value);
  return parsed.ec == std::errc{} && parsed.ptr == end ? std::optional(value) : std::nullopt;
}

// The text in the last pair of tags, unless it is too long for an action.
std::optional<std::string_view> last_action(std::string_view response) {
  const auto end = response.rfind(kEnd);
  const auto begin = end == std::string_view::npos ? end : response.substr(0, end).rfind(kBegin);
  if (begin == std::string_view::npos) return std::nullopt;
  const std::size_t content = begin + kBegin.size();
  return end - content > kActionBytesMax ? std::nullopt : std::optional(response.substr(content, end - content));
}

// "before the flop: you raise to 300, your opponent calls; flop: ..."
std::string betting_so_far(const View& view) {
  std::string text;
  int round = -1;
  std::array<Chips, 2> put_in = {view.betting.rules().big_blind, view.betting.rules().small_blind};
  for (const auto& [step_round, position, action] : view.betting.steps()) {
    text += step_round == round ? ", " : text.empty() ? "" : "; ";
    if (step_round != round) text += fmt::format("{}: ", kRoundNames[static_cast<std::size_t>(step_round)]);
    round = step_round;
    const bool is_own_action = position == view.position;
    const auto verb = [&](std::string_view word) {
      return fmt::format("{} {}{}", is_own_action ? "you" : "your opponent", word, is_own_action ? "" : "s");
    };
    Chips& acting_player_bet = put_in[static_cast<std::size_t>(position)];
    const Chips other_bet = put_in[static_cast<std::size_t>(1 - position)];
    if (action.kind == Action::Kind::kFold) text += verb("fold");
    if (action.kind == Action::Kind::kCall) text += verb(other_bet > acting_player_bet ? "call" : "check");
    if (action.kind == Action::Kind::kRaise) text += fmt::format("{} to {}", verb("raise"), action.to);
    acting_player_bet = action.kind == Action::Kind::kRaise  ? action.to
                        : action.kind == Action::Kind::kCall ? other_bet
                                                             : acting_player_bet;
  }
  return text.empty() ? "none" : text;
}

std::string choices_text(const LegalActions& legal) {
  std::string text = legal.owed > 0 ? fmt::format("fold, call ({} more)", legal.owed) : "check";
  if (legal.raise && legal.raise->front() == legal.raise->back())
    text += fmt::format(", raise {}", legal.raise->front());
  if (legal.raise && legal.raise->front() < legal.raise->back())
    text += fmt::format(", raise N with N from {} to {}", legal.raise->front(), legal.raise->back());
  return text;
}

// Chips in big blinds, rounded to a tenth: "2", "1.5".
std::string in_big_blinds(Chips chips, const Rules& rules) {
  // 10 * chips / big_blind plus a half, doubled above and below so that whole numbers suffice; the division rounds
  // down.
  const Chips tenths = (20 * chips + rules.big_blind) / (2 * rules.big_blind);
  return tenths % 10 == 0 ? fmt::format("{}", tenths / 10) : fmt::format("{}.{}", tenths / 10, tenths % 10);
}

// The total for a raise by the pot, counted after a call.
Chips pot_raise(const View& view, const LegalActions& legal) {
  return view.betting.put_in(view.position) + legal.owed + view.betting.pot() + legal.owed;
}

// The raises for the letters r, p and a. Requires that a raise is legal.
std::array<std::pair<char, Action>, 3> lettered_raises(const View& view, const LegalActions& legal) {
  return {{{'r', Action::raise(legal.raise->front())},
           {'p', legal.raise_near(pot_raise(view, legal))},
           {'a', Action::raise(legal.raise->back())}}};
}

}  // namespace

std::string explain(const Rules& rules, std::uint64_t hands) {
  return fmt::format(
      "You play heads-up no-limit Texas hold'em{}. The blinds are {} and {}; both players begin every hand with {} "
      "chips. "
      "The small blind acts first before the flop, the big blind after it. You want to win as many chips as possible.\n"
      "End each answer with one of your choices, such as <action>call</action> or <action>raise {}</action>. "
      "The number of a raise is what you have then put in over the whole hand. "
      "An answer without a possible action counts as a check, or as a fold where there is something to call.",
      hands > 1 ? fmt::format(", {} hands", hands) : "", rules.small_blind, rules.big_blind, rules.stack,
      3 * rules.big_blind);
}

std::string describe(const View& view, std::uint64_t hand, std::uint64_t hands) {
  const LegalActions legal = view.betting.legal();
  const Chips put_in = view.betting.put_in(view.position);
  return fmt::format(
      "{}You are the {} blind.\nYour cards: {}\nBoard: {}\nBetting: {}\n"
      "The pot is {}; you have put in {} and have {} left.\nYour choices: {}",
      hands > 1 ? fmt::format("Hand {} of {}. ", hand, hands) : "", view.position == 0 ? "big" : "small",
      to_string(view.own_cards, " "), view.board.empty() ? "none" : to_string(view.board, " "), betting_so_far(view),
      view.betting.pot(), put_in, view.betting.rules().stack - put_in, choices_text(legal));
}

std::string describe_end(const View& view, Chips won) {
  const auto outcome = won > 0   ? fmt::format("You win {}.", won)
                       : won < 0 ? fmt::format("You lose {}.", -won)
                                 : "The pot is split.";
  if (const auto folded = view.betting.folded_position())
    return fmt::format("{}. {}", *folded == view.position ? "You fold" : "Your opponent folds", outcome);
  const auto hand = [&](const Hole& hole) {
    const HandValue value = evaluate(CardSet(view.board) | CardSet(hole));
    return fmt::format("{} ({})", to_string(hole, " "), to_string(value.category()));
  };
  return fmt::format("Showdown on {}: you have {}, your opponent {}. {}", to_string(view.board, " "),
                     hand(view.own_cards), hand(view.opponent_cards.value()), outcome);
}

std::optional<Action> parse_answer(std::string_view response, const LegalActions& legal) {
  const auto tagged_text = last_action(response);
  if (!tagged_text) return std::nullopt;
  const std::string text = trimmed_lower_case(*tagged_text);
  if (text == "fold" && legal.owed > 0) return Action::fold();
  if (text == (legal.owed > 0 ? "call" : "check")) return Action::call();
  if (!text.starts_with(kRaise)) return std::nullopt;
  const auto to = parse_chips(std::string_view(text).substr(kRaise.size()));
  return to && legal.allows(Action::raise(*to)) ? std::optional(Action::raise(*to)) : std::nullopt;
}

std::string answer_text(Action action, const LegalActions& legal) {
  const auto text = [&]() -> std::string {
    if (action.kind == Action::Kind::kRaise) return fmt::format("{}{}", kRaise, action.to);
    if (action.kind == Action::Kind::kFold) return "fold";
    return legal.owed > 0 ? "call" : "check";
  };
  return fmt::format("{}{}{}", kBegin, text(), kEnd);
}

std::string describe_tersely(const View& view) {
  const Rules& rules = view.betting.rules();
  std::string betting;
  int round = 0;
  for (const auto& [step_round, position, action] : view.betting.steps()) {
    // A '/' for each round that has ended since the previous step.
    betting.append(static_cast<std::size_t>(step_round - std::exchange(round, step_round)), '/');
    const char letter = to_string(action)[0];
    betting += position == view.position ? letter : static_cast<char>(letter - 'a' + 'A');
  }
  return fmt::format("{} {} {} {} {} {}: ", view.position == 0 ? 'b' : 's', to_string(view.own_cards, ""),
                     view.board.empty() ? "-" : to_string(view.board, ""), betting.empty() ? "-" : betting,
                     in_big_blinds(view.betting.legal().owed, rules), in_big_blinds(view.betting.pot(), rules));
}

std::optional<Action> parse_letter(std::string_view response, const View& view) {
  while (!response.empty() && is_space(response.back())) response.remove_suffix(1);
  if (response.empty()) return std::nullopt;
  const LegalActions legal = view.betting.legal();
  const char letter = response.back();
  if (letter == 'c') return Action::call();
  if (letter == 'f' && legal.owed > 0) return Action::fold();
  if (legal.raise) {
    for (const auto& [name, raise] : lettered_raises(view, legal))
      if (letter == name) return raise;
  }
  return std::nullopt;
}

std::string letter_of(Action action, const View& view) {
  if (action.kind != Action::Kind::kRaise) return to_string(action);
  const auto raises = lettered_raises(view, view.betting.legal());
  const auto distance = [&](const auto& raise) { return std::abs(raise.second.to - action.to); };
  return std::string(1, std::ranges::min_element(raises, {}, distance)->first);
}

}  // namespace echoline::data_plane::poker

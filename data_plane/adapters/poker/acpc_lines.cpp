// Writes and parses lines of the ACPC protocol.
#include <charconv>

#include "base/text.hpp"
#include "data_plane/adapters/poker/acpc.hpp"

namespace echoline::data_plane::poker {
namespace {

constexpr std::string_view kPrefix = "MATCHSTATE:";

// Parses a line from left to right and stops at the first unexpected text.
class Reader {
 public:
  explicit Reader(std::string_view line) : line_(line), rest_(line) {}
  bool at_end() const { return rest_.empty(); }
  bool at(char c) const { return rest_.starts_with(c); }
  bool take(std::string_view text) {
    if (!rest_.starts_with(text)) return false;
    rest_.remove_prefix(text.size());
    return true;
  }
  std::optional<Card> card() {
    const auto card = rest_.size() < 2 ? std::nullopt : parse_card(rest_[0], rest_[1]);
    if (card) rest_.remove_prefix(2);
    return card;
  }
  // Digits without a sign or leading zeros.
  template <class Number>
  std::optional<Number> number() {
    Number value{};
    if (rest_.empty() || rest_[0] < '0' || rest_[0] > '9') return std::nullopt;
    const auto [end, error] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), value);
    const auto digits = static_cast<std::size_t>(end - rest_.data());
    if (error != std::errc{} || (digits > 1 && rest_[0] == '0')) return std::nullopt;
    rest_.remove_prefix(digits);
    return value;
  }
  std::optional<Action> action() {
    if (take("f")) return Action::fold();
    if (take("c")) return Action::call();
    if (!take("r")) return std::nullopt;
    const auto to = number<Chips>();
    return to ? std::optional(Action::raise(*to)) : std::nullopt;
  }
  Error error_expecting(std::string_view expected) const {
    return fail(Code::kInvalid, "poker state", "character {}: expected {}, found '{}', in '{}'",
                line_.size() - rest_.size() + 1, expected, printable(rest_, 16), printable(line_, 256));
  }

 private:
  std::string_view line_, rest_;
};

std::string betting_text(const Betting& betting) {
  std::string text;
  int round = 0;
  for (const auto& step : betting.steps()) {
    for (; round < step.round; ++round) text += '/';
    text += to_string(step.action);
  }
  return text.append(static_cast<std::size_t>(betting.round() - round), '/');
}

std::string cards_text(const View& view) {
  const std::string own = to_string(view.own), other = view.other ? to_string(*view.other) : "";
  std::string text = view.position == 0 ? own + '|' + other : other + '|' + own;
  for (std::size_t i = 0; i < view.board.size(); ++i) {
    if (i == 0 || i >= 3) text += '/';
    text += to_string(view.board[i]);
  }
  return text;
}

Status read_betting(Reader& reader, Betting& betting) {
  while (!reader.at(':')) {
    const auto action = reader.action();
    if (!action) return reader.error_expecting("an action (f, c or r<chips>) or ':'");
    const int round = betting.round();
    if (const auto done = betting.act(*action); !done)
      return reader.error_expecting(fmt::format("something else before this ({})", done.error().detail));
    for (int i = round; i < betting.round(); ++i)
      if (!reader.take("/")) return reader.error_expecting("'/', since a round has ended");
  }
  return ok();
}

Status read_cards(Reader& reader, std::span<Card> cards, CardSet& seen) {
  for (Card& card : cards) {
    const auto read = reader.card();
    if (!read || seen.contains(*read))
      return reader.error_expecting(read ? "another card: this one occurs twice" : "a card such as Td");
    seen.add(card = *read);
  }
  return ok();
}

Status read_cards(Reader& reader, MatchState& state) {
  CardSet seen;
  for (int position = 0; position < 2; ++position) {
    if (position == 1 && !reader.take("|")) return reader.error_expecting("'|'");
    if (position == state.position) {
      ECHO_TRY(read_cards(reader, state.own, seen));
    } else if (state.betting.showdown()) {
      ECHO_TRY(read_cards(reader, state.other.emplace(), seen));
    }
  }
  for (int round = 1; round <= state.betting.round(); ++round) {
    if (!reader.take("/")) return reader.error_expecting("'/' and the cards of a round");
    const std::size_t before = state.board.size();
    state.board.resize(board_size(round));
    ECHO_TRY(read_cards(reader, std::span(state.board).subspan(before), seen));
  }
  return ok();
}

}  // namespace

std::string match_state_line(const View& view, std::uint64_t hand) {
  return fmt::format("{}{}:{}:{}:{}", kPrefix, view.position, hand, betting_text(view.betting), cards_text(view));
}

Result<MatchState> parse_match_state(std::string_view line, const Rules& rules) {
  ECHO_TRY(rules.check());
  if (line.size() > kAcpcLineBytesMax)
    return fail(Code::kInvalid, "poker state", "{} bytes: expected at most {}", line.size(), kAcpcLineBytesMax);
  if (line.ends_with('\n')) line.remove_suffix(1);
  if (line.ends_with('\r')) line.remove_suffix(1);
  Reader reader(line);
  MatchState state{.betting = Betting(rules), .own = {}, .other = {}, .board = {}};
  if (!reader.take(kPrefix)) return reader.error_expecting(kPrefix);
  const auto position = reader.number<int>();
  if (!position || *position > 1) return reader.error_expecting("a position, 0 or 1");
  state.position = *position;
  const auto hand = reader.take(":") ? reader.number<std::uint64_t>() : std::nullopt;
  if (!hand) return reader.error_expecting("':' and the number of a hand");
  state.hand = *hand;
  if (!reader.take(":")) return reader.error_expecting("':'");
  ECHO_TRY(read_betting(reader, state.betting));
  if (!reader.take(":")) return reader.error_expecting("':'");
  ECHO_TRY(read_cards(reader, state));
  if (!reader.at_end()) return reader.error_expecting("the end of the line");
  return state;
}

Result<Action> parse_action(std::string_view text) {
  Reader reader(text.substr(0, 64));
  const auto action = reader.action();
  if (!action || !reader.at_end()) return reader.error_expecting("an action: f, c or r<chips>");
  return *action;
}

}  // namespace echoline::data_plane::poker

// Writes and parses lines of the ACPC protocol.
#include <charconv>

#include "base/text.hpp"
#include "data_plane/adapters/poker/acpc.hpp"

namespace echoline::data_plane::poker {
namespace {

constexpr std::string_view kPrefix = "MATCHSTATE:";
constexpr std::size_t kUnreadBytesShown = 16, kLineBytesShown = 256, kActionBytesMax = 64;
constexpr std::size_t kFlopCards = 3;  // later rounds have one card each

// Parses a line from left to right and stops at the first unexpected text.
class Reader {
 public:
  explicit Reader(std::string_view line) : line_(line), unread_(line) {}
  bool at_end() const { return unread_.empty(); }
  bool next_is(char c) const { return unread_.starts_with(c); }
  // Skips this text. False if another one comes next.
  bool skip(std::string_view text) {
    if (!unread_.starts_with(text)) return false;
    unread_.remove_prefix(text.size());
    return true;
  }
  std::optional<Card> read_card() {
    const auto card = unread_.size() < 2 ? std::nullopt : parse_card(unread_[0], unread_[1]);
    if (card) unread_.remove_prefix(2);
    return card;
  }
  // Digits without a sign or leading zeros.
  template <class Number>
  std::optional<Number> read_number() {
    Number value{};
    if (unread_.empty() || unread_[0] < '0' || unread_[0] > '9') return std::nullopt;
    const auto [end, error] = std::from_chars(unread_.data(), unread_.data() + unread_.size(), value);
    const auto digits = static_cast<std::size_t>(end - unread_.data());
    if (error != std::errc{} || (digits > 1 && unread_[0] == '0')) return std::nullopt;
    unread_.remove_prefix(digits);
    return value;
  }
  std::optional<Action> read_action() {
    if (skip("f")) return Action::fold();
    if (skip("c")) return Action::call();
    if (!skip("r")) return std::nullopt;
    const auto to = read_number<Chips>();
    return to ? std::optional(Action::raise(*to)) : std::nullopt;
  }
  Error error_expecting(std::string_view expected) const {
    return fail(Code::kInvalid, "poker state", "character {}: expected {}, found '{}', in '{}'",
                line_.size() - unread_.size() + 1, expected, printable(unread_, kUnreadBytesShown),
                printable(line_, kLineBytesShown));
  }

 private:
  std::string_view line_, unread_;
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
  const std::string own_cards = to_string(view.own_cards),
                    other_cards = view.opponent_cards ? to_string(*view.opponent_cards) : "";
  std::string text = view.position == 0 ? own_cards + '|' + other_cards : other_cards + '|' + own_cards;
  for (std::size_t i = 0; i < view.board.size(); ++i) {
    if (i == 0 || i >= kFlopCards) text += '/';
    text += to_string(view.board[i]);
  }
  return text;
}

Status read_betting(Reader& reader, Betting& betting) {
  while (!reader.next_is(':')) {
    const auto action = reader.read_action();
    if (!action) return reader.error_expecting("an action (f, c or r<chips>) or ':'");
    const int round = betting.round();
    if (const auto acted = betting.act(*action); !acted)
      return reader.error_expecting(fmt::format("something else before this ({})", acted.error().detail));
    for (int i = round; i < betting.round(); ++i)
      if (!reader.skip("/")) return reader.error_expecting("'/', since a round has ended");
  }
  return ok();
}

Status read_cards(Reader& reader, std::span<Card> cards, CardSet& seen) {
  for (Card& card : cards) {
    const auto parsed_card = reader.read_card();
    if (!parsed_card || seen.contains(*parsed_card))
      return reader.error_expecting(parsed_card ? "another card: this one occurs twice" : "a card such as Td");
    card = *parsed_card;
    seen.add(card);
  }
  return ok();
}

Status read_cards(Reader& reader, MatchState& state) {
  CardSet seen;
  for (int position = 0; position < 2; ++position) {
    if (position == 1 && !reader.skip("|")) return reader.error_expecting("'|'");
    if (position == state.position) {
      ECHO_TRY(read_cards(reader, state.own_cards, seen));
    } else if (state.betting.is_showdown()) {
      ECHO_TRY(read_cards(reader, state.opponent_cards.emplace(), seen));
    }
  }
  for (int round = 1; round <= state.betting.round(); ++round) {
    if (!reader.skip("/")) return reader.error_expecting("'/' and the cards of a round");
    const std::size_t cards_before = state.board.size();
    state.board.resize(board_size(round));
    ECHO_TRY(read_cards(reader, std::span(state.board).subspan(cards_before), seen));
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
  MatchState state{.betting = Betting(rules), .own_cards = {}, .opponent_cards = {}, .board = {}};
  if (!reader.skip(kPrefix)) return reader.error_expecting(kPrefix);
  const auto position = reader.read_number<int>();
  if (!position || *position > 1) return reader.error_expecting("a position, 0 or 1");
  state.position = *position;
  const auto hand = reader.skip(":") ? reader.read_number<std::uint64_t>() : std::nullopt;
  if (!hand) return reader.error_expecting("':' and the number of a hand");
  state.hand = *hand;
  if (!reader.skip(":")) return reader.error_expecting("':'");
  ECHO_TRY(read_betting(reader, state.betting));
  if (!reader.skip(":")) return reader.error_expecting("':'");
  ECHO_TRY(read_cards(reader, state));
  if (!reader.at_end()) return reader.error_expecting("the end of the line");
  return state;
}

Result<Action> parse_action(std::string_view text) {
  Reader reader(text.substr(0, kActionBytesMax));
  const auto action = reader.read_action();
  if (!action || !reader.at_end()) return reader.error_expecting("an action: f, c or r<chips>");
  return *action;
}

}  // namespace echoline::data_plane::poker

// The protocol of the Annual Computer Poker Competition (ACPC). AcpcClient answers a dealer's lines; AcpcDealer sends
// them to two clients and keeps the score. acpc_tcp.cpp connects both to sockets. A seat is one of the two connections;
// its position, big or small blind, alternates with the hands.
#include "data_plane/adapters/poker/acpc.hpp"

#include <algorithm>

#include "base/names.hpp"
#include "base/text.hpp"

namespace echoline::data_plane::poker {
namespace {

constexpr std::string_view kLineEnd = "\r\n";
constexpr std::size_t kNameBytesMax = 64;

std::string_view without_line_end(std::string_view line) {
  if (line.ends_with('\n')) line.remove_suffix(1);
  if (line.ends_with('\r')) line.remove_suffix(1);
  return line;
}

bool is_comment_or_empty(std::string_view line) {
  return line.empty() || line.starts_with('#') || line.starts_with(';');
}

bool is_name(std::string_view name) {
  return !name.empty() && name.size() <= kNameBytesMax && has_only_name_characters(name);
}

// The chips that the receiver of the state wins in a finished hand.
Chips won_by_receiver(const MatchState& state) {
  Deal deal;
  const auto own_position = static_cast<std::size_t>(state.position);
  deal.holes[own_position] = state.own_cards;
  if (state.opponent_cards) deal.holes[1 - own_position] = *state.opponent_cards;
  std::copy(state.board.begin(), state.board.end(), deal.board.begin());
  const Chips won_by_position_0 = chips_won_by_position_0(state.betting, deal);
  return state.position == 0 ? won_by_position_0 : -won_by_position_0;
}

}  // namespace

std::string AcpcClient::greeting() const { return fmt::format("{}{}", kAcpcVersion, kLineEnd); }

Result<std::string> AcpcClient::on_line(std::string_view line) {
  line = without_line_end(line);
  if (is_comment_or_empty(line)) return std::string{};
  ECHO_ASSIGN(const MatchState state, parse_match_state(line, rules_));
  if (state.betting.is_over()) count_hand(state);
  if (state.betting.is_over() || state.betting.position_to_act() != state.position) return std::string{};
  // Each decision has its own random stream, so a repeated question gets the same answer.
  Random random(seed_, mix64(state.hand) + state.betting.steps().size());
  ECHO_ASSIGN(const Action action, player_.decide(state.view(), random));
  return fmt::format("{}:{}{}", line, to_string(action), kLineEnd);
}

void AcpcClient::count_hand(const MatchState& state) {
  if (last_counted_hand_ == state.hand) return;
  last_counted_hand_ = state.hand;
  ++hands_;
  won_ += won_by_receiver(state);
}

Result<AcpcDealer> AcpcDealer::make(Options options) {
  ECHO_TRY(options.rules.check());
  if (options.hands < 1 || options.hands > kAcpcHandsMax)
    return fail(Code::kInvalid, "", "{} hands: expected 1 to {}", options.hands, kAcpcHandsMax);
  for (const std::string& name : options.names)
    if (!is_name(name))
      return fail(Code::kInvalid, "", "name '{}': expected 1 to 64 letters, digits, '_', '-' and '.'",
                  printable(name, 80));
  return AcpcDealer(std::move(options));
}

AcpcDealer::AcpcDealer(Options options) : options_(std::move(options)), betting_(options_.rules) { deal(); }

void AcpcDealer::deal() {
  betting_.restart();
  HandRandom random(options_.seed, hand_);
  deal_ = Deal::draw(random.deal);
}

std::optional<int> AcpcDealer::seat_to_act() const {
  if (!greeted_[0] || !greeted_[1] || is_done()) return std::nullopt;
  return position_of(0) == betting_.position_to_act() ? 0 : 1;
}

std::string AcpcDealer::state_line(int seat) const {
  return match_state_line(view_of(betting_, deal_, position_of(seat)), hand_);
}

void AcpcDealer::add_state_lines(std::vector<Line>& lines) const {
  for (int seat = 0; seat < 2; ++seat)
    lines.push_back({.seat = seat, .text = fmt::format("{}{}", state_line(seat), kLineEnd)});
}

Status AcpcDealer::accept_greeting(int seat, std::string_view line) {
  if (line != kAcpcVersion)
    return fail(Code::kInvalid, "poker dealer", "seat {}: expected '{}' first, found '{}'", seat, kAcpcVersion,
                printable(line, 64));
  greeted_[static_cast<std::size_t>(seat)] = true;
  return ok();
}

Result<std::vector<AcpcDealer::Line>> AcpcDealer::on_line(int seat, std::string_view line) {
  line = without_line_end(line);
  std::vector<Line> lines;
  if (is_comment_or_empty(line) || is_done()) return lines;
  if (!greeted_[static_cast<std::size_t>(seat)]) {
    ECHO_TRY(accept_greeting(seat, line));
    if (greeted_[0] && greeted_[1]) add_state_lines(lines);
    return lines;
  }
  if (seat_to_act() != seat) return lines;  // a line out of turn is ignored
  const std::string current_state = state_line(seat);
  if (!line.starts_with(current_state) || !line.substr(current_state.size()).starts_with(':')) {
    // An answer to an earlier state is ignored; anything else is an error.
    ECHO_TRY(parse_match_state(line.substr(0, line.rfind(':')), options_.rules));
    return lines;
  }
  const auto action = parse_action(line.substr(current_state.size() + 1));
  if (!action || !betting_.act(*action)) {  // illegal: becomes a fold, or a check if there is no bet to call
    ++faults_[static_cast<std::size_t>(seat)];
    ECHO_TRY(betting_.act(betting_.legal().owed > 0 ? Action::fold() : Action::call()));
  }
  add_state_lines(lines);
  if (!betting_.is_over()) return lines;
  const Chips won_by_position_0 = chips_won_by_position_0(betting_, deal_);
  won_by_seat_0_ += position_of(0) == 0 ? won_by_position_0 : -won_by_position_0;
  ++hand_;
  if (!is_done()) {
    deal();
    add_state_lines(lines);
  }
  return lines;
}

std::string AcpcDealer::score_line() const {
  return fmt::format("SCORE:{}|{}:{}|{}", won_by_seat_0_, -won_by_seat_0_, options_.names[0], options_.names[1]);
}

}  // namespace echoline::data_plane::poker

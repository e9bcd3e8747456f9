#include "data_plane/adapters/poker/acpc.hpp"

#include <algorithm>

#include "base/text.hpp"

namespace echoline::data_plane::poker {
namespace {

constexpr std::string_view kLineEnd = "\r\n";

std::string_view without_line_end(std::string_view line) {
  if (line.ends_with('\n')) line.remove_suffix(1);
  if (line.ends_with('\r')) line.remove_suffix(1);
  return line;
}

bool says_nothing(std::string_view line) { return line.empty() || line.starts_with('#') || line.starts_with(';'); }

bool is_name(std::string_view name) {
  const auto allowed = [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || c == '-' ||
           c == '.';
  };
  return !name.empty() && name.size() <= 64 && std::all_of(name.begin(), name.end(), allowed);
}

// The chips that the viewer wins in a finished hand.
Chips won_by_viewer(const MatchState& state) {
  Deal deal;
  const auto own = static_cast<std::size_t>(state.position);
  deal.holes[own] = state.own;
  if (state.other) deal.holes[1 - own] = *state.other;
  std::copy(state.board.begin(), state.board.end(), deal.board.begin());
  const Chips first = won_by_first(state.betting, deal);
  return state.position == 0 ? first : -first;
}

}  // namespace

std::string AcpcClient::greeting() const { return fmt::format("{}{}", kAcpcVersion, kLineEnd); }

Result<std::string> AcpcClient::take(std::string_view line) {
  line = without_line_end(line);
  if (says_nothing(line)) return std::string{};
  ECHO_ASSIGN(const MatchState state, parse_match_state(line, rules_));
  if (state.betting.over()) settle(state);
  if (state.betting.over() || state.betting.to_act() != state.position) return std::string{};
  // Each decision has its own random stream, so a repeated question gets the same answer.
  Random random(seed_, mix64(state.hand) + state.betting.steps().size());
  ECHO_ASSIGN(const Action action, player_.decide(state.view(), random));
  return fmt::format("{}:{}{}", line, to_string(action), kLineEnd);
}

void AcpcClient::settle(const MatchState& state) {
  if (settled_ == state.hand) return;
  settled_ = state.hand;
  ++hands_;
  won_ += won_by_viewer(state);
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
  HandRandom luck(options_.seed, hand_);
  deal_ = Deal::draw(luck.deal);
}

std::optional<int> AcpcDealer::waits_for() const {
  if (!greeted_[0] || !greeted_[1] || done()) return std::nullopt;
  return position_of(0) == betting_.to_act() ? 0 : 1;
}

std::string AcpcDealer::state_line(int seat) const {
  return match_state_line(view_of(betting_, deal_, position_of(seat)), hand_);
}

void AcpcDealer::show(std::vector<Line>& lines) const {
  for (int seat = 0; seat < 2; ++seat) lines.push_back({seat, fmt::format("{}{}", state_line(seat), kLineEnd)});
}

Status AcpcDealer::greet(int seat, std::string_view line) {
  if (line != kAcpcVersion)
    return fail(Code::kInvalid, "poker dealer", "seat {}: expected '{}' first, found '{}'", seat, kAcpcVersion,
                printable(line, 64));
  greeted_[static_cast<std::size_t>(seat)] = true;
  return ok();
}

Result<std::vector<AcpcDealer::Line>> AcpcDealer::take(int seat, std::string_view line) {
  line = without_line_end(line);
  std::vector<Line> lines;
  if (says_nothing(line) || done()) return lines;
  if (!greeted_[static_cast<std::size_t>(seat)]) {
    ECHO_TRY(greet(seat, line));
    if (greeted_[0] && greeted_[1]) show(lines);
    return lines;
  }
  if (waits_for() != seat) return lines;
  const std::string present = state_line(seat);
  if (!line.starts_with(present) || !line.substr(present.size()).starts_with(':')) {
    // An answer to an earlier state is ignored; anything else is an error.
    ECHO_TRY(parse_match_state(line.substr(0, line.rfind(':')), options_.rules));
    return lines;
  }
  const auto action = parse_action(line.substr(present.size() + 1));
  if (!action || !betting_.act(*action)) {
    ++faults_[static_cast<std::size_t>(seat)];
    ECHO_TRY(betting_.act(betting_.legal().owed > 0 ? Action::fold() : Action::call()));
  }
  show(lines);
  if (!betting_.over()) return lines;
  const Chips first = won_by_first(betting_, deal_);
  won_by_seat_0_ += position_of(0) == 0 ? first : -first;
  if (++hand_; !done()) {
    deal();
    show(lines);
  }
  return lines;
}

std::string AcpcDealer::score_line() const {
  return fmt::format("SCORE:{}|{}:{}|{}", won_by_seat_0_, -won_by_seat_0_, options_.names[0], options_.names[1]);
}

}  // namespace echoline::data_plane::poker

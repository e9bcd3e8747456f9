// Any bytes as a line of the ACPC protocol, to either side of it, and as the answer of a language model.
#include <cstdint>
#include <string_view>

#include "data_plane/adapters/poker/acpc.hpp"
#include "data_plane/adapters/poker/wording.hpp"

using namespace echoline;
using namespace echoline::data_plane::poker;

namespace {

void read_as_state(std::string_view line, const Rules& rules) {
  const auto state = parse_match_state(line, rules);
  if (!state) return;
  const std::string written = match_state_line(state->view(), state->hand);
  const auto reread = parse_match_state(written, rules);
  ECHO_CHECK(reread && reread->betting == state->betting && match_state_line(reread->view(), reread->hand) == written);
  if (state->betting.is_over()) return;
  Betting next_betting = state->betting;
  ECHO_CHECK(next_betting.act(Action::call()).has_value());
}

void send_to_client(std::string_view line) {
  const auto player = *make_player("random");
  AcpcClient client(*player, {}, 1);
  const auto answer = client.on_line(line);
  if (answer && !answer->empty()) ECHO_CHECK(answer->starts_with("MATCHSTATE:") && answer->ends_with("\r\n"));
}

// Sends lines of the seat that has to act. A first "!" stands for the state that the seat received, and ':'.
void send_to_dealer(std::string_view bytes) {
  auto dealer = *AcpcDealer::make({.hands = 3});
  std::array<std::string, 2> states;
  const auto send_line = [&](int seat, std::string_view line) {
    const auto lines = dealer.on_line(seat, line);
    if (!lines) return false;
    for (const auto& reply : *lines) {
      ECHO_CHECK(reply.text.size() <= kAcpcLineBytesMax && reply.text.ends_with("\r\n"));
      ECHO_CHECK(parse_match_state(reply.text, {}).has_value());
      states[static_cast<std::size_t>(reply.seat)] = reply.text.substr(0, reply.text.size() - 2);
    }
    ECHO_CHECK(dealer.won()[0] + dealer.won()[1] == 0);
    return true;
  };
  for (int seat = 0; seat < 2; ++seat) ECHO_CHECK(send_line(seat, kAcpcVersion));
  while (!bytes.empty() && !dealer.is_done()) {
    const auto end = std::min(bytes.find('\n'), bytes.size() - 1);
    std::string line(bytes.substr(0, end + 1));
    bytes.remove_prefix(end + 1);
    const int seat = dealer.seat_to_act().value();
    if (line.starts_with('!')) line = states[static_cast<std::size_t>(seat)] + ":" + line.substr(1);
    if (!send_line(seat, line)) return;
  }
}

void answer_with(std::string_view response) {
  Betting betting(Rules{});
  Random cards(response.size());
  const Deal deal = Deal::draw(cards);
  for (int turn = 0; turn < 3 && !betting.is_over(); ++turn) {
    const LegalActions legal = betting.legal();
    const View view = view_of(betting, deal, betting.position_to_act());
    if (const auto action = parse_letter(response, view)) {
      ECHO_CHECK(legal.allows(*action) && parse_letter(letter_of(*action, view), view) == action);
    }
    if (const auto action = parse_answer(response, legal)) {
      ECHO_CHECK(legal.allows(*action) && parse_answer(answer_text(*action, legal), legal) == action);
      ECHO_CHECK(betting.act(*action).has_value());
    } else {
      ECHO_CHECK(betting.act(Action::call()).has_value());
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  read_as_state(bytes, {});
  read_as_state(bytes, {.stack = 7, .small_blind = 1, .big_blind = 2});
  if (const auto action = parse_action(bytes)) ECHO_CHECK(to_string(*action) == bytes);
  send_to_client(bytes);
  send_to_dealer(bytes);
  answer_with(bytes);
  return 0;
}

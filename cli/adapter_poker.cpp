// echoline adapter poker: plays matches between built-in players, and with remote players and dealers over the ACPC
// protocol.
#include <nlohmann/json.hpp>

#include "cli/adapter_verbs.hpp"
#include "cli/output.hpp"
#include "cli/verbs.hpp"
#include "data_plane/adapters/poker/acpc_tcp.hpp"

namespace echoline::cli {
namespace {

using namespace data_plane::poker;
using nlohmann::json;

// Options of all three verbs.
struct TableOptions {
  Rules rules;
  std::uint64_t seed = 1;
  bool json = false;

  void add_options(Verb& verb, const std::string& seed_meaning) {
    verb.add_option("--stack", rules.stack, "chips of each player at the beginning of every hand")->show_default();
    verb.add_option("--small-blind", rules.small_blind, "chips")->show_default();
    verb.add_option("--big-blind", rules.big_blind, "chips")->show_default();
    verb.add_option("--seed", seed, seed_meaning)->show_default();
    verb.add_flag("--json", json, "print JSON");
  }
  // Big blinds won per 100 hands.
  double bb_per_100(Chips won, std::uint64_t hands) const {
    if (hands == 0) return 0;
    return 100.0 * static_cast<double>(won) / static_cast<double>(rules.big_blind) / static_cast<double>(hands);
  }
};

void print(const json& object) { fmt::print("{}\n", object.dump(2)); }

struct MatchArguments {
  TableOptions table;
  std::string first, second;
  std::uint64_t pairs = 10'000;
};

Status run_match_verb(const MatchArguments& args) {
  ECHO_ASSIGN(const auto first, make_player(args.first));
  ECHO_ASSIGN(const auto second, make_player(args.second));
  ECHO_ASSIGN(const MatchResult result,
              duplicate_match(*first, *second, args.table.rules, args.pairs, args.table.seed));
  if (args.table.json)
    print({{"schema_version", 1},
           {"first", args.first},
           {"second", args.second},
           {"hands", result.hands},
           {"bb_per_100", result.bb_per_100},
           {"bb_per_100_half_width_95", result.bb_per_100_half_width},
           {"bb_per_100_as_big_blind", result.bb_per_100_at[0]},
           {"bb_per_100_as_small_blind", result.bb_per_100_at[1]}});
  else
    fmt::print(
        "{} wins {:.1f} +- {:.1f} big blinds per 100 hands (95 %) from {}\n{} hands; as the big blind {:.1f}, as the "
        "small blind {:.1f}\n",
        args.first, result.bb_per_100, result.bb_per_100_half_width, args.second, result.hands, result.bb_per_100_at[0],
        result.bb_per_100_at[1]);
  return ok();
}

struct ServeArguments {
  TableOptions table;
  std::string player, bind = "127.0.0.1", patience = "1 min";
  std::uint16_t port = 0;
  std::uint64_t hands = 1000;
};

Status serve(const ServeArguments& args) {
  ECHO_ASSIGN(const Duration patience, parse_duration(args.patience));
  AcpcDealer::Options options{.rules = args.table.rules, .hands = args.hands, .seed = args.table.seed};
  if (!args.player.empty()) options.names[1] = args.player;
  ECHO_ASSIGN(AcpcDealer dealer, AcpcDealer::make(options));
  ECHO_ASSIGN(const auto listener, Listener::open(args.bind, args.port));
  print_stderr("{} port {}: {}\n", args.bind, listener->port(),
               args.player.empty() ? "waiting for two players" : "waiting for a player");
  std::unique_ptr<Player> built_in_player;  // in the second seat
  std::array<std::unique_ptr<Seat>, 2> seats;
  if (!args.player.empty()) {
    ECHO_ASSIGN(built_in_player, make_player(args.player));
    seats[1] = make_seat(*built_in_player, args.table.rules, args.table.seed);
  }
  for (auto& seat : seats)
    if (!seat) {
      ECHO_ASSIGN(auto connection, listener->accept(SystemClock().now() + patience));
      seat = make_seat(std::move(connection));
    }
  ECHO_TRY(run_match(dealer, {seats[0].get(), seats[1].get()}, patience));
  const auto chips_won = dealer.won();
  if (args.table.json)
    print({{"schema_version", 1},
           {"hands", dealer.hand()},
           {"names", options.names},
           {"chips", chips_won},
           {"bb_per_100",
            {args.table.bb_per_100(chips_won[0], dealer.hand()), args.table.bb_per_100(chips_won[1], dealer.hand())}},
           {"illegal_actions", dealer.faults()}});
  else
    fmt::print("{}\n", dealer.score_line());
  return ok();
}

struct JoinArguments {
  TableOptions table;
  std::string dealer, player = "tight", patience = "10 min";
};

Status join(const JoinArguments& args) {
  ECHO_ASSIGN(const Duration patience, parse_duration(args.patience));
  ECHO_TRY(args.table.rules.check());
  ECHO_ASSIGN(const auto player, make_player(args.player));
  ECHO_ASSIGN(const auto dealer, LineSocket::connect(args.dealer, patience));
  AcpcClient client(*player, args.table.rules, args.table.seed);
  ECHO_TRY(play_against(*dealer, client, patience));
  const double bb_per_100 = args.table.bb_per_100(client.won(), client.hands());
  if (args.table.json)
    print({{"schema_version", 1}, {"hands", client.hands()}, {"chips", client.won()}, {"bb_per_100", bb_per_100}});
  else
    fmt::print("{} hands, {} chips: {:.1f} big blinds per 100 hands\n", client.hands(), client.won(), bb_per_100);
  return ok();
}

// Returns the exit code.
int report_if_failed(std::string_view verb, const Status& status) {
  return status ? 0 : report_error(verb, status.error());
}

void add_match(Verb& poker, int& exit_code) {
  auto* verb = poker.add_verb(
      "match", "Measure how much better one built-in player is: every deal is played from both positions");
  auto args = std::make_shared<MatchArguments>();
  verb->add_option("first", args->first, "the player whose winnings are reported")->required()->one_of(player_names());
  verb->add_option("second", args->second, "the opponent")->required()->one_of(player_names());
  verb->add_option("--pairs", args->pairs, "number of deals; each is played as two hands")->positive()->show_default();
  args->table.add_options(*verb, "the same seed gives the same hands");
  verb->callback([args, &exit_code] { exit_code = report_if_failed("adapter poker match", run_match_verb(*args)); });
}

void add_serve(Verb& poker, int& exit_code) {
  auto* verb = poker.add_verb("serve", "Deal a match for players that connect over TCP (ACPC protocol 2.0.0)");
  auto args = std::make_shared<ServeArguments>();
  verb->add_option("--port", args->port, "port; 0: any free port, which is printed on stderr")->show_default();
  verb->add_option("--bind", args->bind, "address of this machine to listen on; the connection is not encrypted")
      ->show_default();
  verb->add_option(
          "--player", args->player,
          "built-in player of the second seat; without it, both seats are for connecting players, in their order")
      ->one_of(player_names());
  verb->add_option("--hands", args->hands, "number of hands in the match")->positive()->show_default();
  verb->add_option("--patience", args->patience, "time limit for a player to connect, and for each action")
      ->show_default();
  args->table.add_options(*verb, "the same seed gives the same deals");
  verb->callback([args, &exit_code] { exit_code = report_if_failed("adapter poker serve", serve(*args)); });
}

void add_join(Verb& poker, int& exit_code) {
  auto* verb =
      poker.add_verb("join", "Play at the table of a remote dealer (ACPC protocol 2.0.0) until the match ends");
  auto args = std::make_shared<JoinArguments>();
  verb->add_option("dealer", args->dealer, "HOST:PORT")->required();
  verb->add_option("--player", args->player, "the player to use")->one_of(player_names())->show_default();
  verb->add_option("--patience", args->patience, "time limit for each message of the dealer")->show_default();
  args->table.add_options(*verb, "seed of the player's random choices");
  verb->callback([args, &exit_code] { exit_code = report_if_failed("adapter poker join", join(*args)); });
}

}  // namespace

void add_adapter_poker(Verb& adapter, int& exit_code) {
  auto* poker = adapter.add_verb(
      "poker", "Heads-up no-limit hold'em: matches between players on this machine or over the ACPC protocol");
  poker->require_verb();
  add_match(*poker, exit_code);
  add_serve(*poker, exit_code);
  add_join(*poker, exit_code);
}

}  // namespace echoline::cli

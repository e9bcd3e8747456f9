// The task "poker": heads-up no-limit hold'em. An episode is one or several hands, and each response is one action. The
// opponent is a built-in player, the policy itself, or a model behind a server.
//
// The problem fixes the cards and the opponent's random draws: all members of a group have the same position and cards,
// and only the responses differ. A hand in which the opponent folds before the policy acts is dealt again. The reward
// is the big blinds won per hand, minus the baseline player's result with the same cards and position, minus a penalty
// for each response that is not a legal action. Such a response counts as a check, or as a fold if chips are owed. Only
// workers ask an opponent that is the policy or a server, and not before the policy's first action. Until then, for the
// baseline, and on the learner, the opponent of evaluations plays.
#include <charconv>

#include "base/text.hpp"
#include "data_plane/adapters/adapter_config.hpp"
#include "data_plane/adapters/aside_server.hpp"
#include "data_plane/adapters/poker/match.hpp"
#include "data_plane/adapters/poker/wording.hpp"

namespace echoline::data_plane {
namespace {

using namespace poker;

constexpr std::uint64_t kDealsMax = 4096;                   // per hand, until the opponent does not fold at once
constexpr std::string_view kHeldOut = "poker/evaluation/";  // followed by the number
constexpr std::uint64_t kTraining = 0x7261696e, kEvaluation = 0x6576616c;  // random streams of deals

enum class Asked { kNobody, kPolicy, kServer };

struct Options {
  Rules rules;
  std::string_view opponent = "tight", baseline = "tight", evaluation_opponent = "tight";  // names of built-in players
  Asked asked = Asked::kNobody;  // replaces `opponent` in training
  AsideServerOptions server;
  std::uint64_t hands = 1, evaluation_problems = 256;
  double format_penalty = 1;
  bool terse = false;

  void read(ConfigSection s, AdapterUse) {
    std::string_view who = opponent;
    s.read_choice(
        "opponent", who,
        {{"caller", "caller"}, {"random", "random"}, {"tight", "tight"}, {"policy", "policy"}, {"server", "server"}},
        "the opponent: a built-in player (docs/reference/poker.md describes them), the policy itself, or a model "
        "behind a server");
    asked = who == "policy" ? Asked::kPolicy : who == "server" ? Asked::kServer : Asked::kNobody;
    if (asked == Asked::kNobody) opponent = evaluation_opponent = who;
    s.read_choice("evaluation_opponent", evaluation_opponent,
                  {{"caller", "caller"}, {"random", "random"}, {"tight", "tight"}},
                  {"the opponent in held-out hands", "opponent, or tight if that is not a built-in player"});
    if (asked != Asked::kNobody) opponent = evaluation_opponent;
    server.read(s.section("server", "The opponent with `opponent: server`."));
    if (asked == Asked::kServer && !(server.url && server.model))
      s.error("server", "expected url and model, because opponent is 'server'");
    s.read_choice(
        "baseline", baseline, {{"none", ""}, {"caller", "caller"}, {"random", "random"}, {"tight", "tight"}},
        "the player whose winnings with the same cards in the same position are subtracted, so that neither counts");
    s.read("hands", hands, {.min = 1, .max = 1000}, "hands in an episode; the position alternates");
    s.read("stack", rules.stack, {.min = 2, .max = kStackMax}, "chips of both players at the beginning of every hand");
    s.read("small_blind", rules.small_blind, {.min = 1, .max = kStackMax}, "chips that one player must put in");
    s.read("big_blind", rules.big_blind, {.min = 1, .max = kStackMax},
           "chips that the other player must put in; the unit of rewards");
    s.read("format_penalty", format_penalty, {.min = 0.0, .max = 1000.0},
           "big blinds subtracted for an answer that is not a legal action");
    s.read_choice("wording", terse, {{"full", false}, {"terse", true}},
                  "how hands are described and answered: in sentences, or terse, a line and a letter, for models that "
                  "read no prose");
    s.read("evaluation_problems", evaluation_problems, {.min = 2, .max = 100'000},
           "problems held out of training, determined by the seed; an even number, as both positions are played");
    if (const auto sound = rules.check(); !sound) s.error("stack", sound.error().detail);
    if (evaluation_problems % 2 != 0)
      s.error("evaluation_problems", "expected an even number: both positions are played");
  }
};

// Cards and position of a problem. Problem::reference holds them as "<deals>:<position>".
struct Seating {
  std::uint64_t deals = 0;
  int position = 0;  // in the first hand
};

Result<Seating> parse_seating(std::string_view text) {
  Seating seating;
  const char* const end = text.data() + text.size();
  const auto deals = std::from_chars(text.data(), end, seating.deals);
  if (deals.ec == std::errc{} && end - deals.ptr == 2 && *deals.ptr == ':' &&
      (deals.ptr[1] == '0' || deals.ptr[1] == '1')) {
    seating.position = deals.ptr[1] - '0';
    return seating;
  }
  return fail(Code::kInvalid, "poker", "'{}': expected the number of the deals, ':' and the position, 0 or 1",
              printable(text, 64));
}

class PokerEpisode final : public QuickEpisode {
 public:
  // Deals the first hand. `asks`: the opponent's actions are asides.
  static Result<std::unique_ptr<PokerEpisode>> begin(const Options& options, const Seating& seating, bool asks) {
    auto episode = std::unique_ptr<PokerEpisode>(new PokerEpisode(options, seating));
    ECHO_ASSIGN(episode->opponent_, make_player(options.opponent));
    if (!options.baseline.empty()) {
      ECHO_ASSIGN(episode->baseline_, make_player(options.baseline));
    }
    ECHO_TRY(episode->deal());
    episode->asks_ = asks;
    return episode;
  }

  View view() const { return view_of(betting_, deal_, position()); }
  // The text about the hand for the policy.
  std::string description() const { return description_of(view()); }
  // The prompt for an opponent in its first turn: includes the rules.
  std::string prompt_of(const View& view) const {
    return options_.terse ? description_of(view)
                          : fmt::format("{}\n\n{}", explain(options_.rules, options_.hands), description_of(view));
  }

  Result<Step> take(std::string_view response) override {
    const bool own = !std::exchange(asked_, false);
    const View view = view_of(betting_, deal_, own ? position() : 1 - position());
    const Legal legal = betting_.legal();
    const auto answered = options_.terse ? parse_letter(response, view) : parse_answer(response, legal);
    ECHO_TRY(betting_.act(answered.value_or(legal.owed > 0 ? Action::fold() : Action::call())));
    Step step{.score = scored(0, 0, own && !answered ? 1 : 0), .done = false, .observation = std::exchange(told_, {})};
    if (asks_) step.score.components["opponent_faults"] = !own && !answered ? 1 : 0;
    if (own && !answered && !options_.terse)
      step.observation.text +=
          fmt::format("That is none of your choices: you {}.\n", legal.owed > 0 ? "fold" : "check");
    while (!step.done && !step.aside) {
      ECHO_TRY(let_opponent_act());
      if (asked_) {
        told_ = std::exchange(step.observation, {}).text;  // kept until the policy's turn
        step.aside = Told(prompt_of(view_of(betting_, deal_, 1 - position())));
      } else if (betting_.over()) {
        ECHO_TRY(end_hand(step));
      } else {
        step.observation.text += description();
        break;
      }
    }
    return step;
  }

  // Cut off, the policy loses the chips it has put in.
  Score cut() override {
    const Chips won = -betting_.put_in(position());
    const auto baseline = baseline_result();
    Score score = scored(won, baseline ? *baseline : 0, 0);
    score.correct = won_ + won > 0;
    return score;
  }

 private:
  PokerEpisode(const Options& options, const Seating& seating)
      : options_(options), seating_(seating), luck_(0, 0), betting_(options.rules) {}

  int position() const { return static_cast<int>((static_cast<std::uint64_t>(seating_.position) + hand_) % 2); }

  std::string description_of(const View& view) const {
    return options_.terse ? describe_tersely(view) : describe(view, hand_ + 1, options_.hands);
  }

  Status deal() {
    for (std::uint64_t i = 0; i < kDealsMax; ++i) {
      luck_ = HandRandom(seating_.deals, hand_ * kDealsMax + i);
      deal_ = Deal::draw(luck_.deal);
      draws_ = luck_.position;
      betting_.restart();
      if (asks_) return ok();  // the opponent's action is not known before it is asked
      ECHO_TRY(let_opponent_act());
      if (!betting_.over()) return ok();
    }
    return fail(Code::kExhausted, "poker", "the opponent folds every hand; choose another");
  }

  Status let_opponent_act() {
    const auto other = static_cast<std::size_t>(1 - position());
    while (!betting_.over() && betting_.to_act() != position() && !asked_) {
      if (asks_) {
        asked_ = true;
        return ok();
      }
      ECHO_ASSIGN(const Action action, opponent_->decide(view_of(betting_, deal_, betting_.to_act()), draws_[other]));
      ECHO_TRY(betting_.act(action));
    }
    return ok();
  }

  Status end_hand(Step& step) {
    const Chips first = won_by_first(betting_, deal_), won = position() == 0 ? first : -first;
    ECHO_ASSIGN(const Chips baseline, baseline_result());
    add(step.score, scored(won, baseline, 0));
    won_ += won;
    step.score.correct = won_ > 0;
    if (!options_.terse) step.observation.text += describe_end(view(), won);
    step.done = hand_ + 1 == options_.hands;
    if (step.done) return ok();
    ++hand_;
    if (!options_.terse) step.observation.text += "\n\n";
    return deal();
  }

  // The baseline player's result in the policy's position, with the same luck.
  Result<Chips> baseline_result() const {
    if (!baseline_) return Chips{0};
    std::array<Player*, 2> players{opponent_.get(), opponent_.get()};
    players[static_cast<std::size_t>(position())] = baseline_.get();
    Betting betting(options_.rules);
    auto draws = luck_.position;
    ECHO_ASSIGN(const Chips first, play_hand(betting, deal_, players, draws));
    return position() == 0 ? first : -first;
  }

  // The episode's score from one hand.
  Score scored(Chips won, Chips baseline, int faults) const {
    const double hands = static_cast<double>(options_.hands),
                 unit = hands * static_cast<double>(options_.rules.big_blind);
    const double won_bb = static_cast<double>(won) / unit, baseline_bb = static_cast<double>(baseline) / unit;
    return {won_bb - baseline_bb - options_.format_penalty * faults / hands,
            {{"won_bb", won_bb}, {"baseline_bb", baseline_bb}, {"faults", faults}},
            false};
  }

  const Options options_;
  Seating seating_;
  std::unique_ptr<Player> opponent_, baseline_;
  HandRandom luck_;  // the hand's random streams, with only the cards drawn
  std::array<Random, 2> draws_ = luck_.position;
  Betting betting_;
  Deal deal_;
  std::uint64_t hand_ = 0;
  Chips won_ = 0;
  bool asks_ = false, asked_ = false;  // the opponent acts by asides; an aside is pending
  std::string told_;                   // for the policy's next turn
};

class Poker final : public Adapter {
 public:
  Poker(const Options& options, std::uint64_t seed, bool asks, std::unique_ptr<AsideServer> server)
      : options_(options), seed_(seed), asks_(asks), server_(std::move(server)) {}

  std::string_view name() const override { return "poker"; }
  bool one_response() const override { return false; }

  Result<Problem> problem(std::uint64_t index) const override {
    const Seating seating{mix64(mix64(seed_ ^ kTraining) + index), static_cast<int>(index % 2)};
    return made(fmt::format("poker/train/{}", index), seating);
  }

  // Each deal is played from both positions.
  std::vector<Problem> evaluation() const override {
    std::vector<Problem> problems;
    for (std::uint64_t i = 0; i < options_.evaluation_problems; ++i) {
      const Seating seating{mix64(mix64(seed_ ^ kEvaluation) + i / 2), static_cast<int>(i % 2)};
      problems.push_back(made(fmt::format("{}{}", kHeldOut, i), seating).value());
    }
    return problems;
  }

  Result<std::unique_ptr<Episode>> begin(const Problem& problem, std::uint64_t seed) const override {
    ECHO_ASSIGN(const Seating seating, parse_seating(problem.reference()));
    const bool asks = asks_ && !problem.id().starts_with(kHeldOut);
    ECHO_ASSIGN(std::unique_ptr<Episode> episode, PokerEpisode::begin(options_, seating, asks));
    return asks && server_ ? server_->answering(std::move(episode), seed) : std::move(episode);
  }

  // The learner cannot reproduce the answer of an opponent that was asked.
  Repeatable repeatable(const Problem& problem) const override {
    return options_.asked == Asked::kNobody || problem.id().starts_with(kHeldOut) ? Repeatable::kCheaply
                                                                                  : Repeatable::kNot;
  }

  // The tight player's first action.
  std::optional<std::string> demonstration(const Problem& problem) const override {
    const auto seating = parse_seating(problem.reference());
    if (!seating) return std::nullopt;
    const auto episode = PokerEpisode::begin(options_, *seating, false);
    const auto teacher = make_player("tight");
    if (!episode || !teacher) return std::nullopt;
    Random random(seating->deals);
    const View view = (*episode)->view();
    const auto action = (*teacher)->decide(view, random);
    if (!action) return std::nullopt;
    return options_.terse ? letter(*action, view) : answer(*action, view.betting.legal());
  }

 private:
  Result<Problem> made(std::string id, const Seating& seating) const {
    ECHO_ASSIGN(const auto episode, PokerEpisode::begin(options_, seating, false));
    Problem problem;
    problem.set_id(std::move(id));
    problem.set_prompt(episode->prompt_of(episode->view()));
    problem.set_reference(fmt::format("{}:{}", seating.deals, seating.position));
    return problem;
  }

  Options options_;
  std::uint64_t seed_;
  const bool asks_;
  std::unique_ptr<AsideServer> server_;  // answers the asides; null: the policy does
};

Result<std::unique_ptr<Adapter>> make(std::string_view json, std::uint64_t seed, AdapterUse use) {
  ECHO_ASSIGN(const Options options, options_from_json<Options>("poker", json, use));
  const bool asks = options.asked != Asked::kNobody && use == AdapterUse::kScoring;
  std::unique_ptr<AsideServer> server;
  if (options.asked == Asked::kServer) {
    ECHO_ASSIGN(server, AsideServer::start(options.server));  // the learner starts one only to check its options
    if (!asks) server.reset();
  }
  return std::unique_ptr<Adapter>(std::make_unique<Poker>(options, seed, asks, std::move(server)));
}

}  // namespace

const BuiltIn kPoker{
    "poker",
    "Heads-up no-limit hold'em against a built-in player, the policy itself or a server; the reward is big blinds won",
    [](ConfigSection s) { Options().read(s, AdapterUse::kProblems); }, make, /*many_turns=*/true};

}  // namespace echoline::data_plane

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
#include "data_plane/adapters/poker/match.hpp"
#include "data_plane/adapters/poker/wording.hpp"
#include "data_plane/adapters/side_prompt_server.hpp"

namespace echoline::data_plane {
namespace {

using namespace poker;

constexpr std::uint64_t kDealsMax = 4096;  // deals per hand, until the opponent does not fold at once
constexpr std::size_t kReferenceBytesShown = 64;
constexpr std::string_view kHeldOutIdPrefix = "poker/evaluation/";  // followed by the number
// Any two different numbers, so that training and held-out deals differ.
constexpr std::uint64_t kTrainingStream = 0x7261696e, kEvaluationStream = 0x6576616c;

// An opponent that only a worker can ask, during the episode.
enum class LiveOpponent { kNone, kPolicy, kServer };

struct Options {
  Rules rules;
  std::string_view opponent = "tight", baseline = "tight", evaluation_opponent = "tight";  // names of built-in players
  LiveOpponent live_opponent = LiveOpponent::kNone;  // replaces `opponent` in training
  SidePromptServerOptions server;
  std::uint64_t hands = 1, evaluation_problems = 256;
  double format_penalty = 1;
  bool terse = false;  // see describe_tersely() in wording.hpp

  void read(ConfigSection s, AdapterUse) {
    std::string_view opponent_choice = opponent;
    s.read_choice(
        "opponent", opponent_choice,
        {{"caller", "caller"}, {"random", "random"}, {"tight", "tight"}, {"policy", "policy"}, {"server", "server"}},
        "the opponent: a built-in player (docs/reference/poker.md describes them), the policy itself, or a model "
        "behind a server");
    live_opponent = opponent_choice == "policy"   ? LiveOpponent::kPolicy
                    : opponent_choice == "server" ? LiveOpponent::kServer
                                                  : LiveOpponent::kNone;
    if (live_opponent == LiveOpponent::kNone) opponent = evaluation_opponent = opponent_choice;
    s.read_choice("evaluation_opponent", evaluation_opponent,
                  {{"caller", "caller"}, {"random", "random"}, {"tight", "tight"}},
                  {"the opponent in held-out hands", "opponent, or tight if that is not a built-in player"});
    if (live_opponent != LiveOpponent::kNone) opponent = evaluation_opponent;
    server.read(s.section("server", "The opponent with `opponent: server`."));
    if (live_opponent == LiveOpponent::kServer && !(server.url && server.model))
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
    if (const auto valid = rules.check(); !valid) s.error("stack", valid.error().detail);
    if (evaluation_problems % 2 != 0)
      s.error("evaluation_problems", "expected an even number: both positions are played");
  }
};

// Where an episode starts. Problem::reference holds it as "<deals_seed>:<position>".
struct DealAndPosition {
  std::uint64_t deals_seed = 0;  // the seed of all cards and of the players' random draws
  int position = 0;              // the policy's position in the first hand
};

Result<DealAndPosition> parse_start(std::string_view text) {
  DealAndPosition start;
  const char* const end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, start.deals_seed);
  if (parsed.ec == std::errc{} && end - parsed.ptr == 2 && *parsed.ptr == ':' &&
      (parsed.ptr[1] == '0' || parsed.ptr[1] == '1')) {
    start.position = parsed.ptr[1] - '0';
    return start;
  }
  return fail(Code::kInvalid, "poker", "'{}': expected the number of the deals, ':' and the position, 0 or 1",
              printable(text, kReferenceBytesShown));
}

class PokerEpisode final : public QuickEpisode {
 public:
  // Deals the first hand. `opponent_by_side_prompt`: side prompts, which the caller of step() gets answered, ask for
  // the opponent's actions.
  static Result<std::unique_ptr<PokerEpisode>> begin(const Options& options, const DealAndPosition& start,
                                                     bool opponent_by_side_prompt) {
    auto episode = std::unique_ptr<PokerEpisode>(new PokerEpisode(options, start));
    ECHO_ASSIGN(episode->opponent_, make_player(options.opponent));
    if (!options.baseline.empty()) {
      ECHO_ASSIGN(episode->baseline_, make_player(options.baseline));
    }
    ECHO_TRY(episode->deal());
    // Set only now: before the policy's first action, the built-in opponent plays.
    episode->opponent_by_side_prompt_ = opponent_by_side_prompt;
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

  Result<Step> step_now(std::string_view response) override {
    // After a side prompt, the response is the opponent's action.
    const bool policy_acts = !std::exchange(side_prompt_pending_, false);
    const View view = view_of(betting_, deal_, policy_acts ? position() : 1 - position());
    const LegalActions legal = betting_.legal();
    const auto action = options_.terse ? parse_letter(response, view) : parse_answer(response, legal);
    ECHO_TRY(betting_.act(action.value_or(legal.owed > 0 ? Action::fold() : Action::call())));
    Step step{.score = hand_score(/*won=*/0, /*baseline=*/0, /*faults=*/policy_acts && !action ? 1 : 0),
              .done = false,
              .observation = std::exchange(pending_observation_, {})};
    if (opponent_by_side_prompt_) step.score.components["opponent_faults"] = !policy_acts && !action ? 1 : 0;
    if (policy_acts && !action && !options_.terse)
      step.observation.text +=
          fmt::format("That is none of your choices: you {}.\n", legal.owed > 0 ? "fold" : "check");
    while (!step.done && !step.side_prompt) {
      ECHO_TRY(play_opponent());
      if (side_prompt_pending_) {
        pending_observation_ = std::exchange(step.observation, {}).text;  // kept until the policy's turn
        step.side_prompt = PolicyInput(prompt_of(view_of(betting_, deal_, 1 - position())));
      } else if (betting_.is_over()) {
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
    Score score = hand_score(won, baseline ? *baseline : 0, /*faults=*/0);
    score.correct = chips_won_ + won > 0;
    return score;
  }

 private:
  PokerEpisode(const Options& options, const DealAndPosition& start)
      : options_(options), start_(start), random_streams_(/*seed=*/0, /*hand=*/0), betting_(options.rules) {}

  int position() const { return static_cast<int>((static_cast<std::uint64_t>(start_.position) + hand_) % 2); }

  std::string description_of(const View& view) const {
    return options_.terse ? describe_tersely(view) : describe(view, hand_ + 1, options_.hands);
  }

  // Deals a hand, again if the opponent folds before the policy acts.
  Status deal() {
    for (std::uint64_t i = 0; i < kDealsMax; ++i) {
      random_streams_ = HandRandom(start_.deals_seed, hand_ * kDealsMax + i);
      deal_ = Deal::draw(random_streams_.deal);
      player_draws_ = random_streams_.by_position;
      betting_.restart();
      if (opponent_by_side_prompt_) return ok();  // the opponent's action is not known before it is asked
      ECHO_TRY(play_opponent());
      if (!betting_.is_over()) return ok();
    }
    return fail(Code::kExhausted, "poker", "the opponent folds every hand; choose another");
  }

  // Plays the opponent's actions until it is the policy's turn, a side prompt must ask the opponent, or the hand is
  // over.
  Status play_opponent() {
    const auto other = static_cast<std::size_t>(1 - position());
    while (!betting_.is_over() && betting_.position_to_act() != position() && !side_prompt_pending_) {
      if (opponent_by_side_prompt_) {
        side_prompt_pending_ = true;
        return ok();
      }
      ECHO_ASSIGN(const Action action,
                  opponent_->decide(view_of(betting_, deal_, betting_.position_to_act()), player_draws_[other]));
      ECHO_TRY(betting_.act(action));
    }
    return ok();
  }

  Status end_hand(Step& step) {
    const Chips won_by_position_0 = chips_won_by_position_0(betting_, deal_),
                won = position() == 0 ? won_by_position_0 : -won_by_position_0;
    ECHO_ASSIGN(const Chips baseline, baseline_result());
    add(step.score, hand_score(won, baseline, /*faults=*/0));
    chips_won_ += won;
    step.score.correct = chips_won_ > 0;
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
    auto draws = random_streams_.by_position;
    ECHO_ASSIGN(const Chips won_by_position_0, play_hand(betting, deal_, players, draws));
    return position() == 0 ? won_by_position_0 : -won_by_position_0;
  }

  // The part of the episode's score from one hand: big blinds per hand, so it is divided by the number of hands.
  Score hand_score(Chips won, Chips baseline, int faults) const {
    const double hands = static_cast<double>(options_.hands),
                 chips_per_unit = hands * static_cast<double>(options_.rules.big_blind);  // unit: a big blind per hand
    const double won_bb = static_cast<double>(won) / chips_per_unit,
                 baseline_bb = static_cast<double>(baseline) / chips_per_unit;
    return {.reward = won_bb - baseline_bb - options_.format_penalty * faults / hands,
            .components = {{"won_bb", won_bb}, {"baseline_bb", baseline_bb}, {"faults", faults}},
            .correct = false};
  }

  const Options options_;
  DealAndPosition start_;
  std::unique_ptr<Player> opponent_, baseline_;
  HandRandom random_streams_;  // the hand's random streams, set by deal(); no player has drawn from them
  std::array<Random, 2> player_draws_ = random_streams_.by_position;
  Betting betting_;
  Deal deal_;
  std::uint64_t hand_ = 0;
  Chips chips_won_ = 0;
  bool opponent_by_side_prompt_ = false;  // side prompts ask for the opponent's actions
  bool side_prompt_pending_ = false;
  std::string pending_observation_;  // text for the policy's next turn, while a side prompt comes first
};

class Poker final : public Adapter {
 public:
  Poker(const Options& options, std::uint64_t seed, bool opponent_by_side_prompt,
        std::unique_ptr<SidePromptServer> server)
      : options_(options), seed_(seed), opponent_by_side_prompt_(opponent_by_side_prompt), server_(std::move(server)) {}

  std::string_view name() const override { return "poker"; }
  bool has_one_response() const override { return false; }

  Result<Problem> problem(std::uint64_t index) const override {
    const DealAndPosition start{.deals_seed = mix64(mix64(seed_ ^ kTrainingStream) + index),
                                .position = static_cast<int>(index % 2)};
    return make_problem(fmt::format("poker/train/{}", index), start);
  }

  // Each deal is played from both positions.
  std::vector<Problem> evaluation() const override {
    std::vector<Problem> problems;
    for (std::uint64_t i = 0; i < options_.evaluation_problems; ++i) {
      const DealAndPosition start{.deals_seed = mix64(mix64(seed_ ^ kEvaluationStream) + i / 2),
                                  .position = static_cast<int>(i % 2)};
      problems.push_back(make_problem(fmt::format("{}{}", kHeldOutIdPrefix, i), start).value());
    }
    return problems;
  }

  Result<std::unique_ptr<Episode>> begin(const Problem& problem, std::uint64_t seed) const override {
    ECHO_ASSIGN(const DealAndPosition start, parse_start(problem.reference()));
    const bool opponent_by_side_prompt = opponent_by_side_prompt_ && !problem.id().starts_with(kHeldOutIdPrefix);
    ECHO_ASSIGN(std::unique_ptr<Episode> episode, PokerEpisode::begin(options_, start, opponent_by_side_prompt));
    return opponent_by_side_prompt && server_ ? server_->answer_side_prompts_of(std::move(episode), seed)
                                              : std::move(episode);
  }

  // The learner cannot reproduce the answer of an opponent that was asked.
  Repeatable repeatable(const Problem& problem) const override {
    return options_.live_opponent == LiveOpponent::kNone || problem.id().starts_with(kHeldOutIdPrefix)
               ? Repeatable::kCheaply
               : Repeatable::kNot;
  }

  // The tight player's first action.
  std::optional<std::string> demonstration(const Problem& problem) const override {
    const auto start = parse_start(problem.reference());
    if (!start) return std::nullopt;
    const auto episode = PokerEpisode::begin(options_, *start, /*opponent_by_side_prompt=*/false);
    const auto teacher = make_player("tight");
    if (!episode || !teacher) return std::nullopt;
    Random random(start->deals_seed);
    const View view = (*episode)->view();
    const auto action = (*teacher)->decide(view, random);
    if (!action) return std::nullopt;
    return options_.terse ? letter_of(*action, view) : answer_text(*action, view.betting.legal());
  }

 private:
  Result<Problem> make_problem(std::string id, const DealAndPosition& start) const {
    ECHO_ASSIGN(const auto episode, PokerEpisode::begin(options_, start, /*opponent_by_side_prompt=*/false));
    Problem problem;
    problem.set_id(std::move(id));
    problem.set_prompt(episode->prompt_of(episode->view()));
    problem.set_reference(fmt::format("{}:{}", start.deals_seed, start.position));
    return problem;
  }

  Options options_;
  std::uint64_t seed_;
  const bool opponent_by_side_prompt_;
  std::unique_ptr<SidePromptServer> server_;  // answers the side prompts; null: the policy does
};

Result<std::unique_ptr<Adapter>> make(std::string_view json, std::uint64_t seed, AdapterUse use) {
  ECHO_ASSIGN(const Options options, options_from_json<Options>("poker", json, use));
  const bool opponent_by_side_prompt = options.live_opponent != LiveOpponent::kNone && use == AdapterUse::kScoring;
  std::unique_ptr<SidePromptServer> server;
  if (options.live_opponent == LiveOpponent::kServer) {
    ECHO_ASSIGN(server, SidePromptServer::start(options.server));  // the learner starts one only to check its options
    if (!opponent_by_side_prompt) server.reset();
  }
  return std::unique_ptr<Adapter>(std::make_unique<Poker>(options, seed, opponent_by_side_prompt, std::move(server)));
}

}  // namespace

const BuiltIn kPoker{.name = "poker",
                     .meaning =
                         "Heads-up no-limit hold'em against a built-in player, the policy itself or a server; the "
                         "reward is big blinds won",
                     .read_options = [](ConfigSection s) { Options().read(s, AdapterUse::kProblems); },
                     .make = make,
                     .many_turns = true};

}  // namespace echoline::data_plane

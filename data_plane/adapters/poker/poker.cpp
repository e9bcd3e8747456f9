// Heads-up no-limit hold'em as a task: an episode is one hand or several, against a built-in player, the policy itself
// or a model behind a server, each answer one action.
//
// The cards, and what the opponent draws at random, belong to the problem: all members of a group sit in the same
// position with the same cards, and answers alone decide. A hand in which the opponent folds before the policy has
// anything to say is dealt anew. Rewards are big blinds won per hand, less what the baseline player wins with the same
// cards in the same position, less a penalty for every answer that is no legal action; such an answer is a check, or a
// fold where something is owed. An opponent that has to be asked is asked by workers alone, and not before the policy
// was: until then, against the baseline, and wherever the learner plays, the opponent of evaluations sits there.
#include <charconv>

#include "base/text.hpp"
#include "data_plane/adapters/adapter_config.hpp"
#include "data_plane/adapters/aside_server.hpp"
#include "data_plane/adapters/poker/match.hpp"
#include "data_plane/adapters/poker/wording.hpp"

namespace echoline::data_plane {
namespace {

using namespace poker;

constexpr std::uint64_t kDealsMax = 4096;                   // of one hand, until the opponent does not fold at once
constexpr std::string_view kHeldOut = "poker/evaluation/";  // and the number
constexpr std::uint64_t kTraining = 0x7261696e, kEvaluation = 0x6576616c;  // streams of deals

enum class Asked { kNobody, kPolicy, kServer };

struct Options {
  Rules rules;
  std::string_view opponent = "tight", baseline = "tight", evaluation_opponent = "tight";  // of those that are built in
  Asked asked = Asked::kNobody;  // instead of `opponent`, in training
  AsideServerOptions server;
  std::uint64_t hands = 1, evaluation_problems = 256;
  double format_penalty = 1;
  bool terse = false;

  void read(ConfigSection s, AdapterUse) {
    std::string_view who = opponent;
    s.read_choice(
        "opponent", who,
        {{"caller", "caller"}, {"random", "random"}, {"tight", "tight"}, {"policy", "policy"}, {"server", "server"}},
        "who sits opposite: a built-in player (docs/tasks.md says how they play), the policy itself, or a model behind "
        "a server");
    asked = who == "policy" ? Asked::kPolicy : who == "server" ? Asked::kServer : Asked::kNobody;
    if (asked == Asked::kNobody) opponent = evaluation_opponent = who;
    s.read_choice(
        "evaluation_opponent", evaluation_opponent, {{"caller", "caller"}, {"random", "random"}, {"tight", "tight"}},
        {"who sits opposite where held-out hands are played", "opponent, or tight where that is none of these"});
    if (asked != Asked::kNobody) opponent = evaluation_opponent;
    server.read(s.section("server", "With `opponent: server`, who sits opposite."));
    if (asked == Asked::kServer && !(server.url && server.model))
      s.error("server", "expected its url and model, as opponent is 'server'");
    s.read_choice("baseline", baseline, {{"none", ""}, {"caller", "caller"}, {"random", "random"}, {"tight", "tight"}},
                  "whose winnings with the same cards in the same position are subtracted, so that neither counts");
    s.read("hands", hands, {.min = 1, .max = 1000}, "hands of an episode; the position changes after each");
    s.read("stack", rules.stack, {.min = 2, .max = kStackMax}, "chips of both players at the beginning of every hand");
    s.read("small_blind", rules.small_blind, {.min = 1, .max = kStackMax}, "chips that one player has to put in");
    s.read("big_blind", rules.big_blind, {.min = 1, .max = kStackMax}, "and the other; rewards are counted in these");
    s.read("format_penalty", format_penalty, {.min = 0.0, .max = 1000.0},
           "big blinds that an answer costs which is no legal action");
    s.read_choice(
        "wording", terse, {{"full", false}, {"terse", true}},
        "how hands are told and answered: in words, or terse, a line and a letter, for models that read no prose");
    s.read("evaluation_problems", evaluation_problems, {.min = 2, .max = 100'000},
           "problems held out of training, the same for the same seed; an even number, as both positions are played");
    if (const auto sound = rules.check(); !sound) s.error("stack", sound.error().detail);
    if (evaluation_problems % 2 != 0)
      s.error("evaluation_problems", "expected an even number: both positions are played");
  }
};

// Which cards and which position: what Problem::reference holds, as "<deals>:<position>".
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
  // Deals the first hand. `asks`: the opponent is asked.
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
  // What the policy is told of the hand.
  std::string description() const { return description_of(view()); }
  // All that somebody has to know who is asked for the first time.
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
        told_ = std::exchange(step.observation, {}).text;  // when it is the policy's turn
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

  // Who does not go on gives up what has been put in.
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
      if (asks_) return ok();  // whatever it does is known when it was asked
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

  // What the baseline player wins where the policy sits, with the same luck.
  Result<Chips> baseline_result() const {
    if (!baseline_) return Chips{0};
    std::array<Player*, 2> players{opponent_.get(), opponent_.get()};
    players[static_cast<std::size_t>(position())] = baseline_.get();
    Betting betting(options_.rules);
    auto draws = luck_.position;
    ECHO_ASSIGN(const Chips first, play_hand(betting, deal_, players, draws));
    return position() == 0 ? first : -first;
  }

  // Chips of one hand as a part of the episode's score.
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
  HandRandom luck_;  // of the hand, before anything was drawn but the cards
  std::array<Random, 2> draws_ = luck_.position;
  Betting betting_;
  Deal deal_;
  std::uint64_t hand_ = 0;
  Chips won_ = 0;
  bool asks_ = false, asked_ = false;  // the opponent; it is asked now
  std::string told_;                   // for the policy, when it is its turn
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

  // The same deals from both positions.
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

  // Nobody else knows what somebody who was asked has answered.
  Repeatable repeatable(const Problem& problem) const override {
    return options_.asked == Asked::kNobody || problem.id().starts_with(kHeldOut) ? Repeatable::kCheaply
                                                                                  : Repeatable::kNot;
  }

  // What the tight player says to the first question.
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
  std::unique_ptr<AsideServer> server_;  // who is asked; none: the policy
};

Result<std::unique_ptr<Adapter>> make(std::string_view json, std::uint64_t seed, AdapterUse use) {
  ECHO_ASSIGN(const Options options, options_from_json<Options>("poker", json, use));
  const bool asks = options.asked != Asked::kNobody && use == AdapterUse::kScoring;
  std::unique_ptr<AsideServer> server;
  if (options.asked == Asked::kServer) {
    ECHO_ASSIGN(server, AsideServer::start(options.server));  // on a learner it only says what is wrong with it
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

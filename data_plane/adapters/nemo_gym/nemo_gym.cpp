// The task "nemo_gym": data sets of NeMo Gym. One of its resources servers scores each response, which is one turn.
#include <mutex>
#include <nlohmann/json.hpp>

#include "data_plane/adapters/maths/data_set.hpp"
#include "data_plane/adapters/nemo_gym/messages.hpp"
#include "data_plane/adapters/nemo_gym/verifier.hpp"

namespace echoline::data_plane {
namespace {

struct Options : maths::DataSetOptions {
  nemo_gym::VerifierOptions verifier;
  double correct_at = 1;

  void read(ConfigSection s, AdapterUse use) {
    s.require("url", verifier.url, "URL of the resources server, http or https; workers must reach it too");
    read_files(s, use, "a data set of NeMo Gym, JSON Lines: {responses_create_params: {input}, ...}");
    s.read("sessions", verifier.sessions, "each response has its own session: call /seed_session before /verify");
    s.read("at_once", verifier.in_flight_max, {.min = 1, .max = 1024}, "requests that a worker has in flight");
    s.read("tries", verifier.tries, {.min = 1, .max = 20}, "attempts after temporary errors, with growing pauses");
    s.read("deadline", verifier.deadline, {.min = std::chrono::milliseconds(10), .max = std::chrono::hours(1)},
           "the longest wait for an answer");
    s.read("correct_at", correct_at, "the least reward that counts as correct");
    if (!verifier.url.empty() && !verifier.url.starts_with("http://") && !verifier.url.starts_with("https://"))
      s.error("url", fmt::format("expected a URL such as http://host:8000, found '{}'", verifier.url.substr(0, 200)));
    verifier.url = without_trailing_slashes(verifier.url);
    rule = maths::Rule::kExact;  // a data set must have a rule, but this task never applies it: the server scores
  }
};

// One response, which the server scores.
class VerifiedEpisode final : public Episode {
 public:
  VerifiedEpisode(nemo_gym::Verifier& verifier, Problem problem, double correct_at)
      : verifier_(verifier), problem_(std::move(problem)), correct_at_(correct_at) {}
  ~VerifiedEpisode() override {
    const std::lock_guard lock(state_->mutex);
    state_->is_wanted = false;
  }

  void step(std::string response, StepHandler on_step) override {
    auto body = nemo_gym::verify_body(problem_, response);
    if (!body) return on_step(std::move(body).error());
    verifier_.verify(
        problem_.reference(), *std::move(body),
        [state = state_, correct_at = correct_at_, on_step = std::move(on_step)](const Result<std::string>& answer) {
          const std::lock_guard lock(state->mutex);
          if (!state->is_wanted) return;
          if (!answer) return on_step(answer.error());
          auto score = nemo_gym::read_verdict(*answer, correct_at);
          if (!score) return on_step(std::move(score).error());
          on_step(Step{.score = *std::move(score), .done = true, .observation = {}});
        });
  }

 private:
  // Shared with the request, which may outlive the episode.
  struct RequestState {
    std::mutex mutex;
    bool is_wanted = true;  // false: the episode was destroyed
  };
  nemo_gym::Verifier& verifier_;
  const Problem problem_;
  const double correct_at_;
  const std::shared_ptr<RequestState> state_ = std::make_shared<RequestState>();
};

class NemoGym final : public Adapter {
 public:
  NemoGym(const Options& options, std::unique_ptr<Adapter> rows)
      : rows_(std::move(rows)), correct_at_(options.correct_at), verifier_(options.verifier) {}

  std::string_view name() const override { return "nemo_gym"; }
  Result<Problem> problem(std::uint64_t index) const override { return rows_->problem(index); }
  std::vector<Problem> evaluation() const override { return rows_->evaluation(); }
  Result<std::unique_ptr<Episode>> begin(const Problem& problem, std::uint64_t) const override {
    return std::unique_ptr<Episode>(std::make_unique<VerifiedEpisode>(verifier_, problem, correct_at_));
  }
  Repeatable repeatable(const Problem&) const override { return Repeatable::kNot; }
  std::optional<std::string> demonstration(const Problem&) const override { return std::nullopt; }

 private:
  const std::unique_ptr<Adapter> rows_;
  const double correct_at_;
  mutable nemo_gym::Verifier verifier_;
};

Result<std::unique_ptr<Adapter>> make(std::string_view options_json, std::uint64_t seed, AdapterUse use) {
  ECHO_ASSIGN(const Options options, options_from_json<Options>("nemo_gym", options_json, use));
  ECHO_ASSIGN(auto rows, maths::make_data_set("nemo_gym", options, nemo_gym::read_row, seed, use));
  return std::unique_ptr<Adapter>(std::make_unique<NemoGym>(options, std::move(rows)));
}

}  // namespace

const BuiltIn kNemoGym{.name = "nemo_gym",
                       .meaning =
                           "A data set of NeMo Gym, verified by one of its resources servers "
                           "(docs/how-to/connect-an-environment-server.md)",
                       .read_options = [](ConfigSection s) { Options().read(s, AdapterUse::kProblems); },
                       .make = make};

}  // namespace echoline::data_plane

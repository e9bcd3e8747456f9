// Any bytes as a trajectory, as messages, and as a response to grade; checks what must hold for every input. libFuzzer
// calls it when ECHOLINE_FUZZ is on, data_plane_test on spoiled trajectories in every ordinary test run.
#include <cstdint>
#include <string_view>

#include "data_plane/adapters/adapter.hpp"
#include "data_plane/routed_experts.hpp"
#include "data_plane/trajectory.hpp"

using namespace echoline;
using namespace echoline::data_plane;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  if (const auto trajectory = parse_trajectory(bytes)) {
    ECHO_CHECK(check(*trajectory).has_value());
    ECHO_CHECK(trajectory->logprobs_size() == trajectory->response_tokens_size());
    ECHO_CHECK(oldest_version(*trajectory).value == trajectory->spans(0).version());
    const auto reread = parse_trajectory(trajectory->SerializeAsString());
    ECHO_CHECK(reread.has_value(), "a sound trajectory does not round-trip");
  }
  if (const auto message = parse_worker_message(bytes))
    for (const Trajectory& trajectory : message->submission().trajectories())
      if (check(trajectory)) ECHO_CHECK(oldest_version(trajectory).value <= trajectory.spans(0).version());
  (void)parse_learner_message(bytes).has_value();
  // The first byte chooses the number of tokens, and the shape of experts that are packed.
  if (size > 0) {
    const std::size_t tokens = data[0];
    if (const auto experts = unpack_experts(bytes.substr(1), tokens)) {
      ECHO_CHECK(experts->tokens() == tokens || experts->choices() == 0);
      ECHO_CHECK(experts->choices() == 0 || tokens == 0 ||
                 unpack_experts(pack_experts(*experts), tokens).value() == *experts);
    }
    RoutedExperts any{.layers = 1 + data[0] % 3u, .per_token = 1 + data[0] % 5u, .values = {}};
    for (const std::uint8_t byte : std::basic_string_view(data, size)) any.values.push_back(std::int16_t(byte - 1));
    if (make_canonical(any)) ECHO_CHECK(unpack_experts(pack_experts(any), any.tokens()).value() == any);
  }
  if (const auto vitals = parse_vitals(bytes)) ECHO_CHECK(vitals->busy_s() >= 0 && vitals->busy_s() <= 1e10);

  static const auto adapters = [] {
    std::vector<std::unique_ptr<Adapter>> valid_adapters;
    for (const auto& [name, config] : {std::pair{"arithmetic", R"({"partial_credit":0.5})"}, std::pair{"gsm8k", "{}"},
                                       std::pair{"gsm8k", R"({"mode":"flexible"})"}})
      valid_adapters.push_back(std::move(make_adapter(name, config, 1, AdapterUse::kScoring)).value());
    return valid_adapters;
  }();
  Problem problem;
  problem.set_reference("-1200");
  for (const auto& adapter : adapters) {
    const Score score = *adapter->score(problem, bytes);
    ECHO_CHECK(score.reward >= 0 && score.reward <= 1 && (score.reward == 1) == score.correct, "reward {}",
               score.reward);
  }

  // A problem's id names its task, whatever else the id holds.
  static const auto several =
      std::move(
          make_adapter(kSeveralTasksAdapter, several_tasks_options({{"sums", "arithmetic"}}), 1, AdapterUse::kScoring))
          .value();
  for (const std::string& id : {std::string(bytes), "sums:" + std::string(bytes), std::string("sums")}) {
    problem.set_id(id);
    problem.set_prompt(std::string(bytes));
    ECHO_CHECK(several->score(problem, bytes).has_value() == id.starts_with("sums:"), "{}", id.size());
    (void)several->demonstration(problem);
  }
  return 0;
}

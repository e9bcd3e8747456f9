// Reads any bytes as a scenario of `echoline sim run`, and as the tables that it can name. libFuzzer calls it when
// ECHOLINE_FUZZ is on; run_scenario_test calls it on mutated scenarios in every ordinary test run.
#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

#include "sim/run_tables.hpp"
#include "study/sim_run_config.hpp"

using namespace echoline;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto expect = [&](bool holds, const char* what, std::string_view more = "") {
    ECHO_CHECK(holds, "{}\n--- input\n{}\n--- {}", what, text, more);
  };
  const auto run = study::load_sim_run(ConfigFile::parse(text, "fuzz"));
  if (run) {
    const sim::RunScenario& s = run->scenario;
    expect(!s.offers.empty() && s.offers.size() <= 1'000'000, "offers");
    expect(s.request.paths.regions.graph.links.size() == s.request.paths.regions.regions.size(), "ways");
    for (const sim::RunOffer& o : s.offers)
      expect(o.region < s.regions.size() && o.rate_share > 0, "a region", o.offer.id);
    expect(!s.delta_bytes.empty() && s.request.delta_bytes.count > 0 && s.request.full_bytes.count > 0, "bytes");
    if (s.offers.size() <= 64 && s.pacing.trajectories_per_step <= 4096) {  // the beginning of the run itself
      sim::RunScenario few = s;
      few.time_max = std::min<Duration>(few.time_max, std::chrono::minutes(12));
      few.pacing.steps_total = std::min<std::uint64_t>(*few.pacing.steps_total, 8);
      const auto result = sim::simulate_run(few);
      expect(result.has_value() ? !result->ended.empty() : !result.error().message().empty(), "an end");
    }
  } else {
    expect(!run.error().message().empty(), "a reason");
  }
  const std::vector<std::string> regions{"here", "there"};
  const auto placed = [&](const Error& error) {
    return error.code == Code::kInvalid && error.detail.starts_with("fuzz:");
  };
  if (const auto lengths = sim::parse_lengths(text, "fuzz")) {
    expect(!lengths->values.empty() && lengths->values.size() == lengths->cumulative_weights.size() &&
               lengths->cumulative_weights.back() > 0,
           "weights");
  } else {
    expect(placed(lengths.error()), "a place", lengths.error().detail);
  }
  if (const auto trace = sim::parse_preemptions(text, "fuzz", regions)) {
    for (std::size_t i = 0; i < trace->size(); ++i) {
      expect((*trace)[i].share >= 0 && (*trace)[i].share <= 1, "a share");
      expect(i == 0 || (*trace)[i].at >= (*trace)[i - 1].at, "in order");
    }
  } else {
    expect(placed(trace.error()), "a place", trace.error().detail);
  }
  if (const auto slow = sim::parse_slowdowns(text, "fuzz", regions)) {
    for (const sim::Slowdown& s : *slow)
      expect(s.share >= 0 && s.share <= 1 && s.token_rate_left > 0 && s.link_rate_left > 0, "shares");
  } else {
    expect(placed(slow.error()), "a place", slow.error().detail);
  }
  return 0;
}

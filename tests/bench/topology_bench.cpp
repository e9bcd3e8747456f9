// T_b over the physical bound by formula, in random fleets, for every topology: the table of docs/overlay.md.
#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "tests/chains/random_fleets.hpp"

using namespace echoline;
using namespace echoline::chains;

int main(int argc, char** argv) {
  CLI::App app("Topologies in random fleets, by formula");
  std::size_t fleets = 200;
  double quorum = 0.9;
  app.add_option("--fleets", fleets, "how many random fleets")->check(CLI::Range(1, 100'000))->capture_default_str();
  app.add_option("--quorum", quorum, "q of T_b")->check(CLI::Range(0.01, 1.0))->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  fmt::print("{} fleets, q = {}: T_b over the bound, median and 95th percentile\n\n", fleets, quorum);
  fmt::print("{:<12}{:>18}{:>18}{:>18}{:>18}\n", "", "unequal links", "straggler *", "scarce uplinks", "straggler *");
  for (const TopologyPolicy policy : {TopologyPolicy::kStar, TopologyPolicy::kEcho2, TopologyPolicy::kBestChains,
                                      TopologyPolicy::kStripes, TopologyPolicy::kTrees}) {
    fmt::print("{:<12}", to_string(policy));
    for (const bool scarce : {false, true})
      for (const bool straggler : {false, true}) {
        const auto times = times_over_bound(fleets, policy, quorum, straggler, scarce);
        fmt::print("{:>10.3f}{:>8.3f}", quantile(times, 0.5), quantile(times, 0.95));
      }
    fmt::print("\n");
  }
  fmt::print("\n* of all but the straggler, over the bound without it\n");
  return 0;
}

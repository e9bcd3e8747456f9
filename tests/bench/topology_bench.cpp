// T_b over the physical bound by formula, in random fleets, for every topology: the table of docs/overlay.md.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <ctime>
#include <map>
#include <set>

#include "tests/chains/random_fleets.hpp"

using namespace echoline;
using namespace echoline::chains;

namespace {

// Counts the topologies that `auto` chooses for small payloads at 40 ms per hop, and prints T_b of trees over T_b of
// the choice.
void small_payloads(std::size_t fleets, double quorum) {
  fmt::print(
      "\nchunks of 256 KiB, 40 ms to a neighbour: what is soonest, and T_b of trees over it, median and 95th "
      "percentile\n\n");
  for (const std::uint64_t bytes : {10'000ull, 300'000ull, 3'000'000ull, 30'000'000ull, 1'000'000'000ull}) {
    Random random(1);
    std::map<std::string_view, std::size_t> chosen;
    std::vector<double> over;
    for (std::size_t i = 0; i < fleets; ++i) {
      RandomFleet fleet = random_fleet(random, false, i % 2 == 0);
      for (WorkerLink& link : fleet.links) link.delay = std::chrono::milliseconds(40);
      const auto choice = choose_topology(fleet.learner_up, BitRate::from_mbit_per_s(50), fleet.workers, fleet.links,
                                          {Bytes{bytes}, Bytes{256 * 1024}, quorum});
      ++chosen[to_string(choice->topology.policy)];
      for (const Candidate& c : choice->candidates)
        if (c.policy == TopologyPolicy::kTrees) over.push_back(seconds(c.predicted) / seconds(choice->predicted));
    }
    std::sort(over.begin(), over.end());
    fmt::print("{:>14} bytes: {:.2f}, {:.2f};", bytes, quantile(over, 0.5), quantile(over, 0.95));
    for (const auto& [name, count] : chosen) fmt::print(" {} {}", name, count);
    fmt::print("\n");
  }
}

// One to four regions with links of 50 to 2000 Mbit/s between them: T_b over the bound, and the number of times that a
// payload crosses to a region other than the learner's.
void over_regions(double quorum) {
  constexpr std::size_t kFleets = 500;
  constexpr Bytes kPayload{1'000'000'000}, kChunk{16 * 1024};
  fmt::print(
      "\n{} fleets in one to four regions, q = {}: T_b over the bound (median, 95th percentile), crossings a region "
      "(median)\n\n",
      kFleets, quorum);
  struct Row {
    std::string_view name;
    TopologyPolicy policy;
    bool regions;
    std::vector<double> over{}, crossings{};
  };
  std::vector<Row> rows{{"star", TopologyPolicy::kStar, true},
                        {"echo2", TopologyPolicy::kEcho2, true},
                        {"best_chains", TopologyPolicy::kBestChains, true},
                        {"stripes", TopologyPolicy::kStripes, true},
                        {"trees *", TopologyPolicy::kTrees, false},
                        {"trees", TopologyPolicy::kTrees, true}};
  Random random(5);
  for (std::size_t i = 0; i < kFleets; ++i) {
    const RandomFleet fleet = random_regions(random, i % 4 == 1, i % 2 == 0);
    const double bound = seconds(lower_bound(kPayload, fleet.learner_up, fleet.links, quorum, fleet.regions));
    std::map<WorkerId, std::uint32_t> region{{kLearnerId, fleet.regions.learner_region}};
    std::set<std::uint32_t> others;
    for (const ChainWorker& w : fleet.workers)
      if ((region[w.id] = w.region) != fleet.regions.learner_region) others.insert(w.region);
    for (Row& row : rows) {
      const Topology topology = plan_chains(fleet.learner_up, BitRate::from_mbit_per_s(50), fleet.workers, row.policy,
                                            quorum, row.regions ? fleet.regions : Regions{})
                                    .value();
      const auto times =
          broadcast_time(topology, kPayload, kChunk, fleet.learner_up, fleet.links, fleet.regions).value();
      row.over.push_back(seconds(times.quorum_time(quorum)) / bound);
      if (others.empty()) continue;
      double shares = 0;
      for (const auto& [id, parents] : topology.parents())
        for (const WorkerId parent : parents)
          shares += region.at(id) != region.at(parent) && others.contains(region.at(id));
      row.crossings.push_back(shares / topology.stripes() / static_cast<double>(others.size()));
    }
  }
  for (Row& row : rows) {
    std::sort(row.over.begin(), row.over.end());
    std::sort(row.crossings.begin(), row.crossings.end());
    fmt::print("{:<12}{:>10.3f}{:>8.3f}{:>10.2f}\n", row.name, quantile(row.over, 0.5), quantile(row.over, 0.95),
               quantile(row.crossings, 0.5));
  }
  fmt::print("\n* without notice of regions\n");
}

// The time of a choice, against sorting as many workers.
void planning() {
  fmt::print("\nchoosing: milliseconds of CPU, and times those of sorting the workers by name\n\n");
  for (const std::size_t n : {std::size_t{100}, std::size_t{1'000}, std::size_t{10'000}}) {
    Random random(2);
    RandomFleet fleet;
    for (std::uint64_t id = 1; id <= n; ++id) {
      const BitRate up = BitRate::from_mbit_per_s(5 * std::pow(100.0, random.uniform())), down{up.bits_per_s * 4};
      fleet.workers.push_back({WorkerId{id}, up, down, random.uniform(), true, true});
      fleet.links.push_back({WorkerId{id}, up, down, {}});
    }
    const auto cpu = [] { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; };
    std::vector<std::string> names;
    for (const ChainWorker& w : fleet.workers) names.push_back(fmt::format("{}", mix64(w.id.value)));
    const double begin = cpu();
    for (int i = 0; i < 10; ++i) {
      auto copy = names;
      std::sort(copy.begin(), copy.end());
    }
    const double sorted = cpu();
    const auto choice = choose_topology(fleet.learner_up, BitRate::from_mbit_per_s(50), fleet.workers, fleet.links,
                                        {Bytes{100'000'000}, Bytes{256 * 1024}, 0.9});
    ECHO_CHECK(choice.has_value());
    const double chose = cpu() - sorted;
    fmt::print("{:>7} workers: {:>8.1f} ms, {:.0f} x\n", n, 1e3 * chose, chose / std::max(1e-9, (sorted - begin) / 10));
  }
}

}  // namespace

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
                                      TopologyPolicy::kStripes, TopologyPolicy::kTrees, TopologyPolicy::kAuto}) {
    fmt::print("{:<12}", to_string(policy));
    for (const bool scarce : {false, true})
      for (const bool straggler : {false, true}) {
        const auto times = times_over_bound(fleets, policy, quorum, straggler, scarce);
        fmt::print("{:>10.3f}{:>8.3f}", quantile(times, 0.5), quantile(times, 0.95));
      }
    fmt::print("\n");
  }
  fmt::print("\n* of all but the straggler, over the bound without it\n");
  small_payloads(fleets, quorum);
  over_regions(1);
  over_regions(quorum);
  planning();
  return 0;
}

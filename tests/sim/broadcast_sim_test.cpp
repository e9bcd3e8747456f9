#include "sim/broadcast_scenario.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace echoline::sim {
namespace {

using std::chrono::milliseconds;

BroadcastScenario homogeneous(std::size_t workers, double learner_mbit, double worker_mbit) {
  BroadcastScenario s;
  s.workers = workers;
  s.learner_up = BitRate::from_mbit_per_s(learner_mbit);
  s.worker_link = {BitRate::from_mbit_per_s(worker_mbit), BitRate::from_mbit_per_s(worker_mbit)};
  s.chain_rate = BitRate::from_mbit_per_s(worker_mbit);
  return s;
}

BroadcastResult run(const BroadcastScenario& s) {
  auto result = simulate_broadcast(s);
  EXPECT_TRUE(result.has_value()) << (result ? "" : result.error().message());
  if (!result) return {};
  EXPECT_TRUE(result->finished) << "seed " << s.seed << ": " << result->unfinished;
  return std::move(*result);
}

void print(const char* name, const BroadcastResult& r) {
  std::printf("%-28s T_b %.3f s, last %.3f s, formula %.3f s, bound %.3f s, learner %.2f MB, dup %llu, %llu events\n", name,
              r.publications[0].t_b ? seconds(*r.publications[0].t_b) : -1, seconds(r.publications[0].last()), seconds(r.predicted),
              seconds(r.lower_bound), static_cast<double>(r.learner_chunk_bytes_sent.count) / 1e6,
              static_cast<unsigned long long>(r.chunks_duplicate), static_cast<unsigned long long>(r.events));
}

TEST(BroadcastSim, ChainsTakeWhatTheFormulaSays) {
  for (const bool in_cores : {false, true})
    for (const std::size_t workers : {3u, 6u, 16u}) {
      BroadcastScenario s = homogeneous(workers, 24, 8);
      s.limits_in_cores = in_cores;
      s.chunk = {16 * 1024};
      s.delay = milliseconds(20);
      const BroadcastResult r = run(s);
      print(in_cores ? "chains, limits in cores" : "chains, limits in network", r);
      EXPECT_NEAR(seconds(r.publications[0].last()) / seconds(r.predicted), 1, 0.1) << workers;
      EXPECT_GE(r.publications[0].last(), r.lower_bound);
      EXPECT_EQ(r.chunks_duplicate, 0u);
    }
}

}  // namespace
}  // namespace echoline::sim

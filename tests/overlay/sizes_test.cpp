// Limits of nodes that follow from the policy's size, and the hosts that others can dial.
#include "overlay/sizes.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "chains/planner.hpp"
#include "overlay/uv/hosts.hpp"
#include "overlay/uv/node.hpp"

namespace echoline::overlay {
namespace {

using testing::HasSubstr;

constexpr Bytes kMiB{1u << 20}, kGiB{1u << 30};

TEST(Sizes, EveryNodeHasRoomForASnapshotOfAnyPolicy) {
  for (const std::uint64_t bytes : {1'000ull, 300ull << 20, 1'200'000'000ull, 16'000'000'000ull, 140'000'000'000ull}) {
    const Bytes policy{bytes};
    const std::uint64_t snapshot = publication_bytes_max(policy).count;
    EXPECT_GT(snapshot, bytes);
    EXPECT_GE(learner_store_bytes(policy).count, 2 * snapshot);
    EXPECT_GT(worker_memory_bytes(policy, false).count, snapshot);
    EXPECT_GE(worker_disk_bytes(policy).count, 3 * snapshot);
    EXPECT_LE(snapshot / chunk_bytes_min(policy).count, kChunksMax);
  }
  EXPECT_EQ(worker_memory_bytes({16'000'000'000}, true).count, 64 * kMiB.count) << "the disk has the rest";
  EXPECT_EQ(learner_store_bytes({}).count, kGiB.count);
}

// Formula 4.2 with the overhead of protocol and network: three workers in a row at 1 MB/s forward ten chunks of (2048 +
// 8 + 96) * 1.05 bytes.
TEST(Sizes, TheLoadOfALinkIncludesHeadsAndHeaders) {
  const Bytes payload{20'480}, chunk{2048};
  EXPECT_EQ(on_the_wire(chunk, chunk).count, 2260u);
  EXPECT_EQ(on_the_wire(payload, chunk).count, 22'596u);
  EXPECT_EQ(on_the_wire({20'481}, chunk).count, 22'707u) << "one more chunk head";
  EXPECT_EQ(on_the_wire({}, chunk).count, 0u);
  const BitRate rate = BitRate::from_bytes_per_s(1e6);
  std::vector<chains::WorkerLink> links;
  std::vector<chains::ChainWorker> workers;
  for (std::uint64_t i = 1; i <= 3; ++i) {
    links.push_back({WorkerId{i}, rate, rate, Duration{}});
    workers.push_back({WorkerId{i}, rate, rate, 1.0, true, true});
  }
  const auto topology = chains::plan_chains(rate, rate, workers, chains::TopologyPolicy::kBestChains);
  ASSERT_TRUE(topology) << topology.error().message();
  ASSERT_EQ(topology->depth(), 3u);
  const auto broadcast_seconds = [&](Bytes bytes, Bytes chunk_size) {
    return seconds(chains::broadcast_time(*topology, bytes, chunk_size, rate, links)->last());
  };
  EXPECT_NEAR(broadcast_seconds(payload, chunk), 12 * 2048e-6, 1e-6);
  EXPECT_NEAR(broadcast_seconds(on_the_wire(payload, chunk), on_the_wire(chunk, chunk)), 12 * 2259.6e-6, 5e-6);
}

TEST(Sizes, ALearnerThatHasNoRoomForItsPolicyDoesNotStart) {
  const auto start_error = [](LearnerOptions options) {
    options.run_id = "run";
    const auto node = LearnerNode::start(std::move(options), {});
    return node ? std::string() : node.error().message();
  };
  LearnerOptions small_chunks;
  small_chunks.policy_bytes = {16'000'000'000};
  small_chunks.network.chunk = {1024};
  EXPECT_THAT(start_error(small_chunks), HasSubstr("chunk must be at least 15737 bytes"));
  LearnerOptions small_store;
  small_store.policy_bytes = {300'000'000};
  small_store.network.store = Bytes{300'000'000};
  EXPECT_THAT(start_error(small_store), HasSubstr("room for a snapshot"));
  small_store.network.store.reset();
  EXPECT_EQ(start_error(small_store), "");
}

TEST(Hosts, TheAddressOfALearnerOnAllInterfacesIsOneToDial) {
  for (const char* any_address : {"0.0.0.0", "::"}) {
    EXPECT_EQ(local_endpoint_of({any_address, 7}), (Endpoint{"127.0.0.1", 7}));
    for (const Endpoint& endpoint : remote_endpoints_of({any_address, 7})) {
      EXPECT_NE(endpoint.host, any_address);
      EXPECT_FALSE(endpoint.host.starts_with("127.")) << endpoint.host;
      EXPECT_NE(endpoint.host, "::1");
      EXPECT_EQ(endpoint.port, 7);
    }
  }
  EXPECT_EQ(local_endpoint_of({"10.0.0.3", 7}), (Endpoint{"10.0.0.3", 7}));
  EXPECT_EQ(remote_endpoints_of({"10.0.0.3", 7}), std::vector<Endpoint>{Endpoint({"10.0.0.3", 7})});
}

TEST(Hosts, NamesAreLookedUp) {
  EXPECT_EQ(*resolve("10.0.0.3"), "10.0.0.3");
  EXPECT_EQ(*resolve("::1"), "::1");
  const auto local = resolve("localhost");
  ASSERT_TRUE(local.has_value()) << local.error().message();
  EXPECT_TRUE(*local == "127.0.0.1" || *local == "::1") << *local;
  const auto none = resolve("no host has a space");
  ASSERT_FALSE(none.has_value());
  EXPECT_EQ(none.error().code, Code::kInvalid);
  EXPECT_THAT(none.error().message(), HasSubstr("no host has a space"));
}

}  // namespace
}  // namespace echoline::overlay

// Figures of docs/store.md: bytes, requests and seconds of a policy that travels through S3 on a limited link. Small by
// default; ECHOLINE_STORE_BENCH_MB=1000 for the page's.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <random>

#include "delta/digest.hpp"
#include "tests/store/s3_server.hpp"
#include "tests/store/world.hpp"

namespace echoline::store {
namespace {

constexpr double kMbitPerSecond = 400;
constexpr std::uint64_t kVersions = 6;
constexpr double kDensity = 0.01;

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Normal weights in bf16, in layers of 4 million.
delta::OwnedState make_policy(std::size_t megabytes) {
  constexpr std::int64_t kLayerElements = 4'000'000;
  const auto elements = static_cast<std::int64_t>(megabytes) * 500'000;
  delta::StateView layout;
  for (std::int64_t first = 0; first < elements; first += kLayerElements)
    layout.push_back({.name = fmt::format("layers.{:05}.weight", first / kLayerElements),
                      .dtype = delta::DType::kBF16,
                      .shape = {std::min(kLayerElements, elements - first)},
                      .bytes = {}});
  delta::OwnedState state = *delta::OwnedState::empty_like(layout);
  std::mt19937 random(1);
  std::normal_distribution<float> weight(0, 0.02F);
  for (std::size_t tensor = 0; tensor < state.size(); ++tensor) {
    const auto bytes = state.mutable_bytes(tensor);
    for (std::size_t i = 0; i + 1 < bytes.size(); i += 2) {
      const float value = weight(random);
      std::uint32_t bits = 0;
      std::memcpy(&bits, &value, sizeof bits);
      bytes[i] = static_cast<std::byte>(bits >> 16);
      bytes[i + 1] = static_cast<std::byte>(bits >> 24);
    }
  }
  state.seal();
  return state;
}

// Changes 1 % of the weights by one unit in the last place, as a small learning rate does.
void take_step(delta::OwnedState& state, std::uint64_t step) {
  std::mt19937_64 random(step);
  std::geometric_distribution<std::size_t> gap(kDensity);
  for (std::size_t tensor = 0; tensor < state.size(); ++tensor) {
    const auto bytes = state.mutable_bytes(tensor);
    for (std::size_t i = gap(random); 2 * i + 1 < bytes.size(); i += 1 + gap(random))
      bytes[2 * i] ^= static_cast<std::byte>(1);
  }
  state.seal();
}

TEST(StoreBench, APolicyThroughALimitedService) {
  const char* const size = std::getenv("ECHOLINE_STORE_BENCH_MB");
  const std::size_t megabytes = size ? std::strtoul(size, nullptr, 10) : 20;
  S3Server::Settings service;
  service.mbit_per_s = kMbitPerSecond;
  service.part_bytes_min = 5u << 20;
  S3Server server(service);
  ::setenv("AWS_ACCESS_KEY_ID", service.access_key.c_str(), 1);
  ::setenv("AWS_SECRET_ACCESS_KEY", service.secret_key.c_str(), 1);
  const StoreAddress address{.url = "s3://policies/run", .endpoint = server.endpoint(), .region = service.region};
  const auto learner = open_object_store(address), reader_side = open_object_store(address);
  ASSERT_TRUE(learner && reader_side);
  World world(testing::TempDir());  // on a disk, as a reader's weights are
  const SystemClock clock;
  auto opened =
      PolicyWriter::open(**learner, world.key, {.run_id = "run", .holder = kHolderA, .settings = {}, .resumed_at = {}},
                         clock, world.waiter());
  ASSERT_TRUE(opened) << opened.error().message();
  PolicyWriter& writer = **opened;

  std::vector<std::byte> patch;
  const auto sink = [&](std::span<const std::byte> bytes) {
    patch.insert(patch.end(), bytes.begin(), bytes.end());
    return ok();
  };
  delta::OwnedState newest = make_policy(megabytes);
  double began = now_s();
  ASSERT_TRUE(delta::write_snapshot(newest.view(), sink));
  std::printf("policy %.0f MB; snapshot %.1f MB, encoded in %.2f s\n", static_cast<double>(newest.total_bytes()) / 1e6,
              static_cast<double>(patch.size()) / 1e6, now_s() - began);
  began = now_s();
  const Traffic before = (*learner)->traffic();
  ASSERT_TRUE(writer.publish(Version{0}, std::nullopt, patch));
  std::printf("snapshot ready %.2f s after its encoding, %lu requests\n", now_s() - began,
              static_cast<unsigned long>((*learner)->traffic().requests - before.requests));

  const auto follow = [&](const char* what, const std::string& name) {
    const Traffic earlier = (*reader_side)->traffic();
    const double start = now_s();
    const auto reader = PolicyReader::open(**reader_side, world.key.public_key());
    ASSERT_TRUE(reader) << reader.error().message();
    auto replica = Replica::open(world.folder(name), **reader);
    ASSERT_TRUE(replica) << replica.error().message();
    const auto step = replica->follow();
    ASSERT_TRUE(step) << step.error().message();
    EXPECT_EQ(step->digest, newest.digest());
    EXPECT_EQ(World::digest_in(world.folder(name)), newest.digest());
    const Traffic traffic = (*reader_side)->traffic();
    std::printf("%s: version %lu installed in %.2f s, %.1f MB, %lu requests, %u snapshots, %u deltas\n", what,
                static_cast<unsigned long>(step->name.version.value), now_s() - start,
                static_cast<double>(traffic.bytes_received - earlier.bytes_received) / 1e6,
                static_cast<unsigned long>(traffic.requests - earlier.requests), step->snapshots, step->deltas);
  };
  follow("cold join by the snapshot", "fast");
  follow("nothing new", "fast");
  std::filesystem::copy(world.folder("fast"), world.folder("late"), std::filesystem::copy_options::recursive);
  delta::OwnedState previous = *delta::copy_of(newest.view());
  for (std::uint64_t version = 1; version <= kVersions; ++version) {
    take_step(newest, version);
    patch.clear();
    began = now_s();
    const auto stats = delta::write_delta(previous.view(), newest.view(), sink);
    ASSERT_TRUE(stats);
    const double encoded = now_s();
    const Traffic earlier = (*learner)->traffic();
    ASSERT_TRUE(writer.publish(Version{version}, Version{version - 1}, patch));
    const double ready = now_s();
    const Traffic traffic = (*learner)->traffic();
    std::printf("version %lu: density %.4f, %.3f MB; encoded %.2f s, ready %.2f s later, %lu requests\n",
                static_cast<unsigned long>(version), stats->density(), static_cast<double>(patch.size()) / 1e6,
                encoded - began, ready - encoded, static_cast<unsigned long>(traffic.requests - earlier.requests));
    follow("  fast path", "fast");
    ASSERT_TRUE(delta::apply_delta(patch, previous));
  }
  follow("late by all deltas", "late");
  follow("cold join by snapshot and deltas", "cold");
  EXPECT_EQ(server.requests()["refused"], 0u);
}

}  // namespace
}  // namespace echoline::store

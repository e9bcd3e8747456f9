// The simulated disk: what a process finds on it after errors, crashes and power losses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "base/random.hpp"
#include "overlay/wire/sealer.hpp"
#include "talker.hpp"

namespace echoline::sim {
namespace {

using namespace overlay;
using std::chrono::milliseconds;
using std::chrono::seconds;

// A publication of a few chunks, and the spool actions of a core for it.
struct Material {
  std::vector<SealedChunk> chunks;
  PublicationId id{};
  std::vector<act::Spool> spools;
};

Material make_material(std::size_t chunks, std::uint32_t chunk_bytes = 4096) {
  Announcement announcement;
  announcement.run_id = "run";
  announcement.chunk_bytes = chunk_bytes;
  Sealer sealer(announcement, trust::SigningKey(trust::SigningKey::Seed{}));
  std::vector<std::byte> bytes(chunks * chunk_bytes);
  Random random(1);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random.next());
  Material m;
  m.id = sealer.id();
  m.chunks = *sealer.write(bytes);
  auto [last, manifest] = sealer.finish({});
  m.chunks.insert(m.chunks.end(), last.begin(), last.end());
  m.spools.push_back({m.id, Slice(encode_control(sealer.signed_announcement())), std::nullopt, 0, {}});
  for (const SealedChunk& c : m.chunks)
    m.spools.push_back(
        {m.id, Slice(encode_chunk_head(c.head)), c.head.index, std::uint64_t{c.head.index} * chunk_bytes, c.data});
  m.spools.push_back({m.id, Slice(encode_control(manifest)), std::nullopt, 0, {}});
  return m;
}

class Disks : public testing::Test {
 protected:
  Disks() : world_({}), host_(world_.add_host({})), talker_(&start_talker(world_, host_)) {}
  void act(Action action) {
    world_.call(host_, [&](TimePoint) { talker_->perform(std::move(action)); });
  }
  void spool(const Material& m) {
    for (const act::Spool& s : m.spools) act(s);
  }
  void run(Duration time) { world_.run(world_.now() + time); }
  Disk& disk() { return world_.disk(host_); }

  World world_;
  HostId host_;
  Talker* talker_;
};

TEST_F(Disks, ASavedStateIsThereAndAnswersKeepTheirOrder) {
  act(act::SaveState{"one"});
  act(act::SaveState{"two"});
  EXPECT_FALSE(disk().state());
  run(seconds(1));
  EXPECT_EQ(talker_->saved.size(), 2u);
  EXPECT_EQ(disk().state(), "two");
}

TEST_F(Disks, ACrashKeepsTheOldStateOrTheNew) {
  act(act::SaveState{"old"});
  run(seconds(1));
  bool old_seen = false, new_seen = false;
  for (int i = 0; i < 40; ++i) {
    const std::string next = "new" + std::to_string(i), before = *disk().state();
    act(act::SaveState{next});
    world_.kill(host_, i % 2 ? Death::kCrash : Death::kPowerLoss);
    EXPECT_TRUE(disk().state() == before || disk().state() == next);
    (disk().state() == next ? new_seen : old_seen) = true;
    talker_ = &start_talker(world_, host_);
  }
  EXPECT_TRUE(old_seen && new_seen);
}

TEST_F(Disks, SpoolsAreReadBack) {
  const Material m = make_material(10);
  spool(m);
  act(act::ReadChunk{m.id, 4, 4 * 4096, 4096});
  run(seconds(2));
  EXPECT_EQ(talker_->spooled.size(), 10u);
  ASSERT_EQ(talker_->chunk_read.size(), 1u);
  ASSERT_TRUE(talker_->chunk_read[0].has_value());
  EXPECT_TRUE(std::ranges::equal(talker_->chunk_read[0]->bytes(), m.chunks[4].data.bytes()));
  const auto frames = disk().read_spool(m.id);
  ASSERT_EQ(frames.size(), 12u);
  for (std::size_t i = 0; i < 10; ++i) {
    EXPECT_EQ(frames[i + 1].chunk.index, i);
    EXPECT_TRUE(std::ranges::equal(frames[i + 1].body.bytes(), m.chunks[i].data.bytes()));
  }
  EXPECT_EQ(disk().bytes(), 10u * 4096);
  const auto payload = disk().open(m.id, 10 * 4096);
  ASSERT_TRUE(payload.has_value());
  EXPECT_EQ(payload->size(), 10u * 4096);
  act(act::DropSpool{m.id});
  run(seconds(1));
  EXPECT_EQ(disk().bytes(), 0u);
  EXPECT_TRUE(disk().spools().empty());
  EXPECT_EQ(payload->pieces().size(), 10u);  // an open file stays readable
}

TEST_F(Disks, AFullDiskAndABrokenOneSaySo) {
  DiskOptions o;
  o.capacity_bytes = 3 * 4096;
  disk().configure(o);
  const Material m = make_material(5);
  spool(m);
  run(seconds(1));
  EXPECT_EQ(std::count_if(talker_->spooled.begin(), talker_->spooled.end(), [](const Status& s) { return !s; }), 2);
  EXPECT_TRUE(disk().has_write_failed());
  o.write_error_share = o.read_error_share = 1;
  disk().configure(o);
  act(act::SaveState{"x"});
  act(act::ReadChunk{m.id, 0, 0, 4096});
  run(seconds(1));
  EXPECT_FALSE(talker_->saved.at(0).has_value());
  EXPECT_FALSE(talker_->chunk_read.at(0).has_value());
  EXPECT_FALSE(disk().state());
}

// After any power loss, the log yields unchanged chunks, in order, up to its end. Proofs detect damage within the
// payload.
TEST_F(Disks, APowerLossTakesUnsyncedWrites) {
  std::size_t shortened_logs = 0, damaged_spools = 0, intact_spools = 0;
  const Material m = make_material(12);
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    Disk disk(seed, 0);
    TimePoint now{};
    for (const act::Spool& s : m.spools) {
      now = disk.submit(s, now);
      disk.complete(now);
    }
    if (seed % 4 == 0) now += seconds(5);  // all is synced
    disk.on_power_loss(now);
    const auto frames = disk.read_spool(m.id);
    if (seed % 4 == 0) {
      EXPECT_EQ(frames.size(), 14u);
    }
    std::size_t intact_chunks = 0;
    for (const Frame& frame : frames)
      if (frame.type == FrameType::kChunk && trust::blake3(frame.body.bytes()) == m.chunks.at(frame.chunk.index).hash)
        ++intact_chunks;
    // A whole log has 12 chunks, the announcement and the manifest.
    shortened_logs += frames.size() < 14;
    intact_spools += intact_chunks == 12;
    damaged_spools += frames.size() > 2 && intact_chunks + 2 < frames.size();
  }
  EXPECT_GT(shortened_logs, 50u);
  EXPECT_GT(damaged_spools, 10u);
  EXPECT_GE(intact_spools, 50u);
}

TEST_F(Disks, AProcessCrashLosesOnlyUnwrittenData) {
  const Material m = make_material(20);
  spool(m);
  run(milliseconds(15));
  const std::size_t reported_chunks = talker_->spooled.size();
  world_.kill(host_, Death::kCrash);
  const auto frames = disk().read_spool(m.id);
  EXPECT_GE(frames.size(), reported_chunks + 1);  // the announcement and every chunk reported as written
  for (std::size_t i = 1; i < frames.size(); ++i)
    if (frames[i].type == FrameType::kChunk) {
      EXPECT_EQ(trust::blake3(frames[i].body.bytes()), m.chunks.at(frames[i].chunk.index).hash);
    }
}

TEST(Disk, BitsRot) {
  Disk disk(1, 1);
  disk.configure({});
  act::Spool spool;
  spool.publication[0] = std::byte{7};
  spool.chunk = 0;
  spool.record = Slice(std::vector<std::byte>(8, std::byte{1}));
  spool.data = Slice(std::vector<std::byte>(100, std::byte{5}));
  EXPECT_EQ(disk.corrupt_pieces(3), 0u) << "the disk is empty";
  EXPECT_FALSE(disk.is_corrupted());
  disk.complete(disk.submit(act::Spool(spool), TimePoint{}));
  EXPECT_EQ(disk.corrupt_pieces(1), 1u);
  EXPECT_TRUE(disk.is_corrupted());
  const auto pieces = disk.pieces(spool.publication);
  ASSERT_EQ(pieces.size(), 1u);
  EXPECT_EQ(std::count(pieces[0].bytes().begin(), pieces[0].bytes().end(), std::byte{5}), 99);
  EXPECT_EQ(spool.data.bytes()[0], std::byte{5}) << "data in memory is unchanged";
}

}  // namespace
}  // namespace echoline::sim

// Which versions a store keeps.
#include "store/retention.hpp"

#include <gtest/gtest.h>

#include <set>

#include "tests/store/world.hpp"

namespace echoline::store {
namespace {

VersionName name_of(std::uint64_t version) { return {.epoch = 0, .version = Version{version}}; }

// Versions 0 to `last`; an anchor every `every` versions, which has a delta as well.
Contents contents_of(std::uint64_t last, std::uint64_t every) {
  Contents contents;
  for (std::uint64_t version = 0; version <= last; ++version) {
    Manifest manifest{.name = name_of(version)};
    if (version % every == 0) contents[{manifest.name, manifest.kind}] = manifest;
    if (version == 0) continue;
    manifest.kind = delta::PatchKind::kDelta;
    manifest.base = name_of(version - 1);
    contents[{manifest.name, manifest.kind}] = manifest;
  }
  return contents;
}

Contents after(Contents contents, const RetentionRules& rules) {
  for (const auto& entry : entries_to_remove(contents, rules)) contents.erase(entry);
  return contents;
}

// Whether a version can be rebuilt.
bool is_whole(const Contents& contents, VersionName name) {
  while (!contents.count({name, delta::PatchKind::kSnapshot})) {
    const auto delta = contents.find({name, delta::PatchKind::kDelta});
    if (delta == contents.end()) return false;
    name = *delta->second.base;
  }
  return true;
}

TEST(Retention, KeepsTheNewestDeltasAndTheirChain) {
  const Contents kept = after(contents_of(260, 50), {.deltas_kept = 100, .anchors_kept = 2});
  // 161 is the 100th newest delta; it needs the anchor of 150 and the deltas in between.
  EXPECT_TRUE(kept.count({name_of(150), delta::PatchKind::kSnapshot}));
  EXPECT_TRUE(kept.count({name_of(151), delta::PatchKind::kDelta}));
  EXPECT_FALSE(kept.count({name_of(150), delta::PatchKind::kDelta}));
  EXPECT_FALSE(kept.count({name_of(100), delta::PatchKind::kSnapshot}));
  EXPECT_EQ(kept.size(), 110u + 3u);
}

TEST(Retention, KeepsAnchorsBeyondTheDeltas) {
  const Contents kept = after(contents_of(260, 20), {.deltas_kept = 10, .anchors_kept = 10});
  EXPECT_TRUE(kept.count({name_of(80), delta::PatchKind::kSnapshot}));
  EXPECT_FALSE(kept.count({name_of(60), delta::PatchKind::kSnapshot}));
}

TEST(Retention, EveryKeptVersionIsWhole) {
  for (std::uint32_t every = 1; every <= 7; ++every)
    for (std::uint64_t last = 0; last <= 30; ++last)
      for (std::uint32_t deltas = 1; deltas <= 9; ++deltas)
        for (std::uint32_t anchors = 1; anchors <= 3; ++anchors) {
          const Contents kept = after(contents_of(last, every), {.deltas_kept = deltas, .anchors_kept = anchors});
          for (const auto& [entry, manifest] : kept)
            EXPECT_TRUE(is_whole(kept, entry.first)) << last << " " << every << " " << deltas << " " << anchors;
          EXPECT_TRUE(is_whole(kept, name_of(last)));
          for (std::uint64_t back = 0; back < std::min<std::uint64_t>(deltas, last); ++back)
            EXPECT_TRUE(is_whole(kept, name_of(last - back)));
        }
}

TEST(Retention, AGapInAChainRemovesNothing) {
  Contents contents = contents_of(60, 20);
  contents.erase({name_of(55), delta::PatchKind::kDelta});
  EXPECT_TRUE(entries_to_remove(contents, {.deltas_kept = 6, .anchors_kept = 1}).empty());
}

TEST(Retention, TheWriterRemovesWhatIsNotKept) {
  World world;
  world.settings.anchor_every = 4;
  world.settings.retention = {.deltas_kept = 5, .anchors_kept = 2};
  MemoryStore store(world.objects);
  auto writer = world.open_writer(store);
  ASSERT_TRUE(writer);
  for (std::uint64_t version = 0; version <= 23; ++version) {
    const auto base = (*writer)->newest();
    ASSERT_TRUE((*writer)->publish(
        Version{version}, base, base ? world.policies.delta(version - 1, version) : world.policies.snapshot(version)));
    if ((*writer)->wants_anchor()) {
      ASSERT_TRUE((*writer)->publish(Version{version}, std::nullopt, world.policies.snapshot(version)));
    }
  }
  std::set<std::string> folders;
  for (const auto& [key, content] : world.objects.objects)
    if (parse_publication_key(key)) folders.insert(key.substr(0, key.rfind('/')));
  EXPECT_EQ(folders,
            (std::set<std::string>{
                "deltas/00000000.000000000017", "deltas/00000000.000000000018", "deltas/00000000.000000000019",
                "deltas/00000000.000000000020", "deltas/00000000.000000000021", "deltas/00000000.000000000022",
                "deltas/00000000.000000000023", "snapshots/00000000.000000000016", "snapshots/00000000.000000000020"}));
}

}  // namespace
}  // namespace echoline::store

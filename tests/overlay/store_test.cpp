// The publication store: it accepts proven data only, and keeps to its budgets of memory and disk.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "overlay/publication_store.hpp"
#include "tests/overlay/made.hpp"

namespace echoline::overlay {
namespace {

using Put = PublicationStore::Put;
using testing::HasSubstr;

// A store whose disk answers only when the test says so.
struct TestStore {
  explicit TestStore(StoreLimits limits = {Bytes{1 << 20}, Bytes{1 << 20}, false}) : store(limits, checker, actions) {}
  SignatureChecker checker{"run", made_key("authority").public_key()};
  std::vector<Action> actions;
  PublicationStore store;

  Status begin(const Made& made, std::uint64_t keep_from = 0) {
    return store.begin(made.announcement, made.opening, Version{keep_from});
  }
  Result<bool> close(const Made& made) { return store.close(made.manifest, made.closing); }
  Result<Put> put(const Frame& chunk, std::uint64_t keep_from = 0, bool installable_now = false) {
    return store.put(chunk, Version{keep_from}, installable_now);
  }
  // Puts all chunks; returns the error of the first that failed.
  Status put_publication(const Made& made, std::uint64_t keep_from = 0, bool installable_now = false) {
    ECHO_TRY(begin(made, keep_from));
    for (std::size_t i = 0; i < made.chunks.size(); ++i)
      if (const auto added = put(made.chunk(i), keep_from, installable_now); !added) return added.error();
    if (const auto closed = close(made); !closed) return closed.error();
    return ok();
  }
  template <class T>
  std::vector<T> take() {
    std::vector<T> found;
    for (Action& a : std::exchange(actions, {}))
      if (auto* t = std::get_if<T>(&a)) found.push_back(std::move(*t));
    return found;
  }
  // Completes the disk's pending writes, and returns them.
  std::vector<act::Spool> finish_writes() {
    auto spools = take<act::Spool>();
    for (const act::Spool& s : spools)
      if (s.chunk) store.on_spooled(s.publication, *s.chunk, true);
    return spools;
  }
  // Puts the first `chunks` chunks, with a disk that keeps up.
  void spool(const Made& made, std::size_t chunks) {
    ASSERT_TRUE(begin(made).has_value());
    for (std::size_t i = 0; i < chunks; ++i) {
      ASSERT_TRUE(put(made.chunk(i)).has_value());
      finish_writes();
    }
  }
  StoredPublication& entry(const PublicationKey& key) { return *store.find(key); }
};

TEST(PublicationStore, ProvesChunksInAnyOrder) {
  TestStore test;
  const Made made = make(delta(3, 2), 2500);
  EXPECT_EQ(test.put(made.chunk(0)).error().code, Code::kNotFound);
  EXPECT_EQ(test.close(made).error().code, Code::kNotFound);
  ASSERT_TRUE(test.begin(made).has_value());
  ASSERT_TRUE(test.begin(made).has_value());  // a repetition has no effect
  EXPECT_EQ(*test.put(made.chunk(2)), Put::kAdded);
  EXPECT_EQ(*test.put(made.chunk(2)), Put::kDuplicate);
  EXPECT_FALSE(*test.close(made));
  EXPECT_FALSE(*test.close(made));
  EXPECT_EQ(*test.put(made.chunk(0)), Put::kAdded);
  EXPECT_FALSE(test.entry(made.key()).complete);
  EXPECT_EQ(*test.put(made.chunk(1)), Put::kCompleted);
  EXPECT_TRUE(test.entry(made.key()).complete);
  EXPECT_EQ(test.store.find(made.id), &test.entry(made.key()));
  EXPECT_EQ(test.store.memory().count, 2500u);
  const auto delivery = test.store.delivery(test.entry(made.key()));
  ASSERT_TRUE(delivery.has_value());
  EXPECT_EQ(delivery->bytes, 2500u);
  EXPECT_EQ(delivery->publication.policy_digest, digest_of(3));
  const Slice bytes = *delivery->publication.payload.bytes();
  EXPECT_TRUE(std::equal(bytes.bytes().begin(), bytes.bytes().end(), made.payload.begin(), made.payload.end()));
  EXPECT_TRUE(test.take<act::Spool>().empty());
}

TEST(PublicationStore, TheManifestMayArriveLast) {
  TestStore test;
  const Made made = make(full(3), 2500);
  ASSERT_TRUE(test.begin(made).has_value());
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(*test.put(made.chunk(i)), Put::kAdded);
  EXPECT_TRUE(*test.close(made));
  EXPECT_EQ(test.store.full_bytes_hint(), 2500u);
  const Made empty = make(delta(4, 3), 0);
  ASSERT_TRUE(test.begin(empty).has_value());
  EXPECT_TRUE(*test.close(empty));  // it has no chunks
  EXPECT_EQ(test.store.full_bytes_hint(), 2500u);
  EXPECT_EQ(test.store.newest(), Version{4});
}

TEST(PublicationStore, RefusesForgedChunks) {
  TestStore test;
  const Made made = make(full(3), 2500), other = make(full(4), 2500), forged = make(full(3), 2500, {.key = "mallory"});
  ASSERT_TRUE(test.begin(made).has_value());
  const auto refused = [&](const Frame& frame) {
    const auto put = test.put(frame);
    EXPECT_FALSE(put.has_value());
    return put ? std::string() : put.error().detail;
  };
  EXPECT_THAT(refused(with_flipped_bit(made.chunk(0), 5)), HasSubstr("chunk 0: its proof fails"));
  Frame frame = made.chunk(0);
  frame.chunk.index = 1;
  EXPECT_THAT(refused(frame), HasSubstr("chunk 1: its proof fails"));
  frame = other.chunk(0);
  frame.chunk.publication = made.id;
  EXPECT_THAT(refused(frame), HasSubstr("proof fails"));
  frame = forged.chunk(0);
  frame.chunk.publication = made.id;
  EXPECT_THAT(refused(frame), HasSubstr("proof fails"));
  frame = made.chunk(0);
  frame.body = frame.body.part(0, 100);
  EXPECT_THAT(refused(frame), HasSubstr("does not belong to it"));
  frame = made.chunk(0);
  frame.chunk.signature.bytes[0] ^= std::byte{1};
  EXPECT_THAT(refused(frame), HasSubstr("proof fails"));
  EXPECT_EQ(test.entry(made.key()).have.count(), 0u);
  EXPECT_EQ(test.store.memory().count, 0u);
  // A verified seal is remembered, but only for the chunks it covers.
  EXPECT_EQ(*test.put(made.chunk(0)), Put::kAdded);
  EXPECT_THAT(refused(with_flipped_bit(made.chunk(1), 5)), HasSubstr("proof fails"));
  EXPECT_EQ(*test.put(made.chunk(1)), Put::kAdded);
  ASSERT_FALSE(*test.close(made));
  frame = make(full(3), 5000).chunk(4);
  frame.chunk.publication = made.id;
  EXPECT_THAT(refused(frame), HasSubstr("does not belong to it"));  // beyond its end
  EXPECT_EQ(*test.put(made.chunk(2)), Put::kCompleted);
}

TEST(PublicationStore, DropsAPublicationThatDiffersFromItsManifest) {
  const Made made = make(full(3), 2500);
  for (const bool last : {true, false}) {
    Manifest false_manifest = made.manifest;
    if (last)
      false_manifest.content[0] ^= std::byte{1};
    else
      false_manifest.payload_bytes -= 1;
    const SignedManifest closing = sign(false_manifest, made_key("authority"));
    TestStore test;
    ASSERT_TRUE(test.begin(made).has_value());
    for (std::size_t i = 0; i < 2; ++i) ASSERT_TRUE(test.put(made.chunk(i)).has_value());
    if (last) {
      ASSERT_TRUE(test.put(made.chunk(2)).has_value());
      EXPECT_THAT(test.store.close(false_manifest, closing).error().detail, HasSubstr("not what its manifest says"));
    } else {
      ASSERT_TRUE(test.store.close(false_manifest, closing).has_value());
      EXPECT_THAT(test.put(made.chunk(2)).error().detail, HasSubstr("not what its manifest says"));
    }
    EXPECT_EQ(test.store.find(made.id), nullptr);
    EXPECT_EQ(test.store.memory().count, 0u);
  }
}

TEST(PublicationStore, APublicationHasOneManifest) {
  TestStore test;
  const Made made = make(full(3), 2500);
  ASSERT_TRUE(test.begin(made).has_value());
  ASSERT_TRUE(test.close(made).has_value());
  Manifest other = made.manifest;
  other.policy_digest = digest_of(9);
  EXPECT_EQ(test.store.close(other, sign(other, made_key("authority"))).error().code, Code::kCorrupt);
  other = make(full(4), 10).manifest;
  other.payload_bytes = std::uint64_t{kChunksMax} * 1024 + 1;  // allowed in chunks of 1 MiB, but not of 1 KiB
  ASSERT_TRUE(test.begin(make(full(4), 10)).has_value());
  EXPECT_THAT(test.store.close(other, sign(other, made_key("authority"))).error().detail,
              HasSubstr("more than 1048576 chunks"));
}

TEST(PublicationStore, ALaterAnnouncementReplacesOneThatIsNotComplete) {
  TestStore test;
  const Made before = make(full(3), 2500), after = make(full(3), 2600, {.issued_unix_s = kMadeUnix_s + 1});
  ASSERT_TRUE(test.begin(before).has_value());
  ASSERT_TRUE(test.put(before.chunk(0)).has_value());
  ASSERT_TRUE(test.begin(after).has_value());
  EXPECT_EQ(test.entry(full(3)).id, after.id);
  EXPECT_EQ(test.entry(full(3)).have.count(), 0u);
  EXPECT_EQ(test.store.memory().count, 0u);
  EXPECT_EQ(test.put(before.chunk(1)).error().code, Code::kNotFound);
  EXPECT_EQ(test.begin(before).error().code, Code::kStale);  // an older announcement never replaces a later one
  ASSERT_TRUE(test.put_publication(after).has_value());
  EXPECT_EQ(test.begin(make(full(3), 10, {.issued_unix_s = kMadeUnix_s + 2})).error().code, Code::kStale);
}

TEST(PublicationStore, StaysWithinItsMemoryBudget) {
  TestStore test({Bytes{3000}, {}, false});
  ASSERT_TRUE(test.put_publication(make(full(0), 1000)).has_value());
  ASSERT_TRUE(test.put_publication(make(delta(1, 0), 1000)).has_value());
  ASSERT_TRUE(test.put_publication(make(delta(2, 1), 1000), 2).has_value());
  ASSERT_TRUE(test.put_publication(make(delta(3, 2), 1000), 2).has_value());  // version 0 is erased
  EXPECT_EQ(test.store.find(full(0)), nullptr);
  EXPECT_NE(test.store.find(delta(1, 0)), nullptr);
  const Status status =
      test.put_publication(make(delta(4, 3), 2500), 2);  // version 1 is erased, and the others are still needed
  ASSERT_FALSE(status.has_value());
  EXPECT_EQ(status.error().code, Code::kExhausted);
  EXPECT_THAT(status.error().detail, HasSubstr("raise the memory budget or give the node a state folder"));
  EXPECT_LE(test.store.memory().count, 3000u);
  EXPECT_LE(test.store.memory_peak().count, 3000u);
}

TEST(PublicationStore, ErasesPartialsOnly) {
  TestStore test;
  ASSERT_TRUE(test.put_publication(make(full(1), 1000)).has_value());
  for (std::uint64_t v = 2; v <= 4; ++v) ASSERT_TRUE(test.begin(make(delta(v, 1), 2000)).has_value());
  test.store.erase_partial_up_to(Version{3});
  EXPECT_NE(test.store.find(full(1)), nullptr);
  EXPECT_EQ(test.store.find(delta(2, 1)), nullptr);
  EXPECT_EQ(test.store.find(delta(3, 1)), nullptr);
  EXPECT_NE(test.store.find(delta(4, 1)), nullptr);
}

// ---- with a disk ----

constexpr StoreLimits kSmallMemory{Bytes{10'000}, Bytes{100'000}, true};

TEST(PublicationStore, WritesEverythingInOrder) {
  TestStore test(kSmallMemory);
  const Made made = make(full(3), 2500);
  ASSERT_TRUE(test.put_publication(made).has_value());
  const auto spools = test.finish_writes();
  ASSERT_EQ(spools.size(), 5u);
  const auto record = [&](std::size_t i) {
    return decode_control(spools[i].record.bytes().subspan(kFrameHeaderBytes));
  };
  EXPECT_EQ(std::get<SignedAnnouncement>(*record(0)), made.opening);
  EXPECT_EQ(std::get<SignedManifest>(*record(4)), made.closing);
  for (std::uint32_t i = 0; i < 3; ++i) {
    EXPECT_EQ(spools[1 + i].chunk, i);
    EXPECT_EQ(spools[1 + i].offset, i * 1024u);
    EXPECT_EQ(spools[1 + i].data.data(), made.chunks[i].data.data());
    EXPECT_EQ(spools[1 + i].publication, made.id);
  }
  test.store.erase(made.key());
  ASSERT_EQ(test.take<act::DropSpool>().size(), 1u);
  EXPECT_EQ(test.store.disk().count, 0u);
}

TEST(PublicationStore, ChunksOnDiskLeaveMemoryAndAreReadBack) {
  TestStore test(kSmallMemory);
  const Made made = make(full(3), 40'000);
  ASSERT_TRUE(test.begin(made).has_value());
  for (std::size_t i = 0; i < made.chunks.size(); ++i) {
    ASSERT_TRUE(test.put(made.chunk(i)).has_value());
    test.finish_writes();
    EXPECT_FALSE(test.store.is_congested());
  }
  ASSERT_TRUE(*test.close(made));
  EXPECT_LE(test.store.memory().count, 10'000u);
  EXPECT_LE(test.store.memory_peak().count, 12'000u);
  EXPECT_EQ(test.store.disk().count, 40'000u);
  StoredPublication& entry = test.entry(full(3));
  const auto delivery = test.store.delivery(entry);
  ASSERT_TRUE(delivery.has_value());
  EXPECT_EQ(delivery->spooled, made.id);  // the file has the whole payload
  EXPECT_EQ(delivery->bytes, 40'000u);
  test.actions.clear();
  EXPECT_EQ(test.store.fetch(entry, 0), nullptr);
  const auto reads = test.take<act::ReadChunk>();  // of this chunk and the next ones
  ASSERT_GT(reads.size(), 1u);
  EXPECT_EQ(test.store.fetch(entry, 0), nullptr);
  EXPECT_TRUE(test.take<act::ReadChunk>().empty());  // not requested twice
  for (const act::ReadChunk& read : reads) {
    EXPECT_EQ(read.offset, read.chunk * 1024u);
    EXPECT_EQ(read.length, made.chunks[read.chunk].data.size());
    EXPECT_TRUE(test.store.on_chunk_read(made.id, read.chunk, made.chunks[read.chunk].data));
  }
  ASSERT_NE(test.store.fetch(entry, reads.back().chunk), nullptr);
  EXPECT_EQ(test.store.fetch(entry, reads.back().chunk)->data.size(), 1024u);
}

TEST(PublicationStore, APublicationIsDroppedIfTheDiskReturnsOtherBytes) {
  TestStore test(kSmallMemory);
  const Made made = make(full(3), 40'000);
  test.spool(made, made.chunks.size());
  EXPECT_EQ(test.store.fetch(test.entry(full(3)), 0), nullptr);
  EXPECT_FALSE(test.store.on_chunk_read(made.id, 0, with_flipped_bit(made.chunk(0), 1).body));
  EXPECT_EQ(test.store.find(made.id), nullptr);
  EXPECT_EQ(test.store.memory().count, 0u);
  EXPECT_TRUE(test.store.on_chunk_read(made.id, 1, made.chunks[1].data));  // a late answer has no effect
}

// A publication is dropped while some of its chunks are in memory and others are being read, and is announced again.
TEST(PublicationStore, ARestartedPublicationForgetsItsEarlierChunks) {
  TestStore test(kSmallMemory);
  const Made made = make(full(3), 40'000);
  test.spool(made, made.chunks.size());
  EXPECT_EQ(test.store.fetch(test.entry(full(3)), 0), nullptr);
  test.store.erase(full(3));
  ASSERT_TRUE(test.begin(made).has_value());
  EXPECT_TRUE(test.store.on_chunk_read(made.id, 9, made.chunks[9].data));
  test.spool(made, 20);
  EXPECT_EQ(test.entry(full(3)).have.count(), 20u);
  EXPECT_LE(test.store.memory().count, 10'000u);
}

TEST(PublicationStore, AWriteBeforeARestartDoesNotMarkAChunkAsOnDisk) {
  TestStore test(kSmallMemory);
  const Made made = make(full(3), 1000);
  ASSERT_TRUE(test.begin(made).has_value());
  ASSERT_TRUE(test.put(made.chunk(0)).has_value());
  test.store.erase(full(3));
  ASSERT_TRUE(test.put_publication(made).has_value());
  test.store.on_spooled(made.id, 0, true);  // the first write; the file was dropped after it
  EXPECT_FALSE(test.store.delivery(test.entry(full(3)))->spooled.has_value());
  test.store.on_spooled(made.id, 0, true);
  EXPECT_TRUE(test.entry(full(3)).chunks[0].on_disk);
}

TEST(PublicationStore, IsCongestedWhileTheDiskIsBehind) {
  TestStore test(kSmallMemory);
  const Made made = make(full(3), 40'000);
  ASSERT_TRUE(test.begin(made).has_value());
  for (std::size_t i = 0; i < 10; ++i) ASSERT_TRUE(test.put(made.chunk(i)).has_value());
  EXPECT_TRUE(test.store.is_congested());
  test.finish_writes();
  EXPECT_FALSE(test.store.is_congested());
  // After a failed write, the store works as without a disk.
  ASSERT_TRUE(test.put(made.chunk(10)).has_value());
  test.store.on_spooled(made.id, 10, false);
  EXPECT_TRUE(test.store.has_disk_failed());
  EXPECT_FALSE(test.store.is_congested());
}

TEST(PublicationStore, ChunksTheDiskRefusedAreWrittenOnARetry) {
  TestStore test(kSmallMemory);
  const Made made = make(full(3), 1000);
  ASSERT_TRUE(test.begin(made).has_value());
  ASSERT_TRUE(test.put(made.chunk(0)).has_value());
  EXPECT_FALSE(test.entry(full(3)).chunks[0].on_disk);
  test.take<act::Spool>();
  test.store.on_spooled(made.id, 0, false);
  const Made next = make(full(4), 1000);
  ASSERT_TRUE(test.begin(next).has_value());
  EXPECT_TRUE(test.store.has_disk_failed());
  ASSERT_TRUE(test.put(next.chunk(0)).has_value());
  test.take<act::Spool>();
  test.store.on_spooled(next.id, 0, true);
  const auto retried = test.take<act::Spool>();
  ASSERT_EQ(retried.size(), 1u);
  EXPECT_TRUE(retried[0].publication == made.id && retried[0].chunk == 0u);
  test.store.on_spooled(made.id, 0, true);
  EXPECT_FALSE(test.store.has_disk_failed());
  EXPECT_TRUE(test.entry(full(3)).chunks[0].on_disk);
}

// A publication larger than memory is dropped while the disk fails, and the disk's late success no longer helps it. The
// disk still counts as working again, and the publication finds room when it comes again.
TEST(PublicationStore, ADiskWorksAgainAlthoughItsPublicationWasDropped) {
  TestStore test(kSmallMemory);
  const Made made = make(full(3), 40'000);
  ASSERT_TRUE(test.begin(made).has_value());
  ASSERT_TRUE(test.put(made.chunk(0)).has_value());
  test.store.on_spooled(made.id, 0, false);
  Status put_status = ok();
  for (std::uint32_t i = 1; put_status; ++i)
    if (const auto put = test.put(made.chunk(i)); !put) put_status = put.error();
  EXPECT_EQ(put_status.error().code, Code::kExhausted);
  test.store.erase(full(3));
  EXPECT_TRUE(test.store.has_disk_failed());
  test.store.on_spooled(made.id, 1, true);
  EXPECT_FALSE(test.store.has_disk_failed());
  test.take<act::Spool>();
  EXPECT_NO_FATAL_FAILURE(test.spool(made, made.chunks.size()));
}

// A full disk does not become busy with refused writes.
TEST(PublicationStore, OnlyAFewRefusedChunksAreRetriedAtOnce) {
  TestStore test({Bytes{100'000}, Bytes{100'000}, true});
  const Made made = make(full(3), 40'000);
  ASSERT_TRUE(test.begin(made).has_value());
  for (std::size_t i = 0; i < 30; ++i) ASSERT_TRUE(test.put(made.chunk(i)).has_value());
  test.take<act::Spool>();
  for (std::uint32_t i = 0; i < 29; ++i) test.store.on_spooled(made.id, i, false);
  EXPECT_TRUE(test.take<act::Spool>().empty());
  test.store.on_spooled(made.id, 29, true);
  EXPECT_EQ(test.take<act::Spool>().size(), 2u);
  ASSERT_TRUE(test.begin(make(full(4), 1000)).has_value());
  EXPECT_EQ(test.take<act::Spool>().size(), 1u);  // its announcement
}

// A delta from the worker's version needs none of the other deltas to its target.
TEST(PublicationStore, AnInstallableDeltaGetsTheRoomOfOtherPaths) {
  TestStore test({Bytes{20'000}, {}, false});
  for (std::uint64_t v = 4; v <= 5; ++v) ASSERT_TRUE(test.put_publication(make(delta(v, v - 1), 9000), 3).has_value());
  const Made installable_now = make(delta(5, 2), 15'000);
  ASSERT_TRUE(test.put_publication(installable_now, 3, true).has_value());
  EXPECT_TRUE(test.entry(delta(5, 2)).complete);
}

// It does not need stalled snapshots either, of older versions or of its own.
TEST(PublicationStore, AnInstallableDeltaGetsTheRoomOfStalledSnapshots) {
  TestStore test({Bytes{27'000}, {}, false});
  ASSERT_TRUE(test.put_publication(make(full(0), 9000)).has_value());
  for (const std::uint64_t v : {1, 2, 3}) {
    const Made snapshot = make(full(v), 9000);
    ASSERT_TRUE(test.begin(snapshot).has_value());
    ASSERT_TRUE(test.put(snapshot.chunk(0)).has_value());
  }
  const std::uint64_t begun_bytes = test.entry(full(1)).bytes;
  ASSERT_TRUE(test.put_publication(make(delta(1, 0), 27'000 - 9000 - 3 * begun_bytes)).has_value());
  EXPECT_EQ(test.put_publication(make(delta(2, 1), begun_bytes)).error().code, Code::kExhausted);
  test.store.erase(delta(2, 1));
  ASSERT_TRUE(test.put_publication(make(delta(2, 1), begun_bytes), 0, true).has_value());
  EXPECT_EQ(test.store.find(full(1)), nullptr);
  EXPECT_NE(test.store.find(full(2)), nullptr);  // there is room for both
  test.store.erase(delta(2, 1));
  ASSERT_TRUE(test.put_publication(make(delta(2, 1), 2 * begun_bytes), 0, true).has_value());
  EXPECT_EQ(test.store.find(full(2)), nullptr);
  EXPECT_NE(test.store.find(full(3)), nullptr);  // it may be complete sooner
  EXPECT_NE(test.store.find(full(0)), nullptr);
  EXPECT_NE(test.store.find(delta(1, 0)), nullptr);
}

// A later version cannot be installed before the missing one, and makes room for it.
TEST(PublicationStore, LaterVersionsMakeRoomForEarlierOnes) {
  TestStore test({Bytes{20'000}, {}, false});
  ASSERT_TRUE(test.put_publication(make(delta(2, 1), 9000)).has_value());
  ASSERT_TRUE(test.put_publication(make(delta(3, 2), 9000)).has_value());
  const Made missing = make(delta(1, 0), 9000);
  ASSERT_TRUE(test.put_publication(missing).has_value());
  EXPECT_NE(test.store.find(missing.id), nullptr);
  EXPECT_NE(test.store.find(delta(2, 1)), nullptr);
  EXPECT_EQ(test.store.find(delta(3, 2)), nullptr);
  // A snapshot needs no base, and stays.
  ASSERT_TRUE(test.begin(make(full(4), 1000)).has_value());
  EXPECT_FALSE(test.put_publication(make(delta(3, 2), 9000)).has_value());
  EXPECT_NE(test.store.find(full(4)), nullptr);
}

TEST(PublicationStore, RecoveredChunksAreVerifiedAndNotWrittenAgain) {
  TestStore test(kSmallMemory);
  const Made made = make(full(3), 3000);
  test.store.set_recovering(true);
  ASSERT_TRUE(test.begin(made).has_value());
  ASSERT_TRUE(test.put(made.chunk(0)).has_value());
  EXPECT_EQ(test.put(with_flipped_bit(made.chunk(1), 9)).error().code, Code::kCorrupt);
  test.store.set_recovering(false);
  EXPECT_TRUE(test.take<act::Spool>().empty());
  EXPECT_EQ(test.store.disk().count, 1024u);
  ASSERT_TRUE(test.put(made.chunk(1)).has_value());
  EXPECT_EQ(test.take<act::Spool>().size(), 1u);
}

TEST(PublicationStore, StaysWithinItsDiskBudget) {
  TestStore test({Bytes{10'000}, Bytes{5000}, true});
  ASSERT_TRUE(test.put_publication(make(full(0), 3000)).has_value());
  test.finish_writes();
  ASSERT_TRUE(test.put_publication(make(full(1), 3000), 1).has_value());
  EXPECT_EQ(test.store.find(full(0)), nullptr);
  EXPECT_EQ(test.take<act::DropSpool>().size(), 1u);
  EXPECT_THAT(test.put_publication(make(full(2), 3000), 1).error().detail, HasSubstr("raise the disk budget"));
  EXPECT_LE(test.store.disk().count, 5000u);
}

// After one failed write, the next may succeed. The budget also holds while the disk fails now and then.
TEST(PublicationStore, StaysWithinItsDiskBudgetWhileWritesFailNowAndThen) {
  TestStore test({Bytes{10'000}, Bytes{5000}, true});
  ASSERT_TRUE(test.put_publication(make(full(0), 3000)).has_value());
  test.finish_writes();
  const Made made = make(full(1), 3000);
  ASSERT_TRUE(test.begin(made).has_value());
  ASSERT_TRUE(test.put(made.chunk(0)).has_value());
  test.take<act::Spool>();
  test.store.on_spooled(made.id, 0, false);
  EXPECT_TRUE(test.store.has_disk_failed());
  EXPECT_THAT(test.put(made.chunk(1)).error().detail, HasSubstr("raise the disk budget"));
  ASSERT_TRUE(test.put(made.chunk(1), 1).has_value());
  EXPECT_EQ(test.store.find(full(0)), nullptr);
  EXPECT_LE(test.store.disk().count, 5000u);
}

// The number is limited even for small publications: a run of a hundred thousand steps has as many deltas of a few
// hundred bytes.
TEST(PublicationStore, KeepsALimitedNumberOfPublications) {
  StoreLimits limits{Bytes{1 << 20}, Bytes{1 << 20}, true};
  limits.publications_max = 8;
  TestStore test(limits);
  ASSERT_TRUE(test.put_publication(make(full(1), 300)).has_value());
  for (std::uint64_t version = 2; version <= 400; ++version) {
    ASSERT_TRUE(test.put_publication(make(delta(version, version - 1), 100), version).has_value());
    test.finish_writes();
    EXPECT_LE(test.store.entries().size(), 8u);
    EXPECT_LE(test.store.residents_listed(), 100u);
  }
  EXPECT_EQ(test.store.entries().begin()->first.version, Version{393});
  EXPECT_EQ(test.store.newest(), Version{400});
  EXPECT_EQ(test.store.memory().count, 800u);
  EXPECT_EQ(test.store.disk().count, 800u);
}

TEST(PublicationStore, KeepsMorePublicationsIfAllAreNeeded) {
  StoreLimits limits{Bytes{1 << 20}, Bytes{1 << 20}, false};
  limits.publications_max = 3;
  TestStore test(limits);
  ASSERT_TRUE(test.put_publication(make(full(10), 300)).has_value());
  for (std::uint64_t version = 11; version <= 20; ++version)
    ASSERT_TRUE(test.put_publication(make(delta(version, version - 1), 100), 12).has_value());
  EXPECT_EQ(test.store.entries().size(), 9u);                                   // from version 12 on
  ASSERT_TRUE(test.put_publication(make(delta(21, 20), 100), 21).has_value());  // the application has version 20
  EXPECT_EQ(test.store.entries().size(), 3u);
}

}  // namespace
}  // namespace echoline::overlay

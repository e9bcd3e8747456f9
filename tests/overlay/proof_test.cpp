// The learner's signatures: a reader accepts only complete data that the learner signed for this run and purpose.
#include "overlay/wire/proof.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "overlay/state.hpp"
#include "tests/overlay/made.hpp"

namespace echoline::overlay {
namespace {

using testing::HasSubstr;

const trust::SigningKey kKey = made_key("authority"), kOther = made_key("somebody else");
const SignatureChecker kChecker("run", kKey.public_key());

bool proves(const ChunkHead& head, std::span<const std::byte> bytes, const SignatureChecker& checker = kChecker) {
  return checker.seal_holds(head, SignatureChecker::root_of(head, trust::blake3(bytes)));
}

struct SealedPieces {
  std::vector<std::vector<std::byte>> pieces;
  std::vector<ChunkHead> heads;
  std::vector<trust::Hash> hashes;
};

SealedPieces sealed(std::size_t count, std::uint32_t first) {
  SealedPieces s;
  for (std::size_t i = 0; i < count; ++i) s.pieces.push_back(random_bytes(count * 100 + i, 1 + i % 70));
  const std::vector<std::span<const std::byte>> views(s.pieces.begin(), s.pieces.end());
  PublicationId id{};
  id[0] = std::byte{7};
  s.heads = seal(id, first, views, kKey, s.hashes);
  return s;
}

TEST(Seal, ProvesEveryChunkOfEveryCount) {
  for (std::size_t count = 1; count <= kSealChunksMax; ++count) {
    SCOPED_TRACE(count);
    const SealedPieces s = sealed(count, 1000);
    ASSERT_EQ(s.heads.size(), count);
    for (std::size_t i = 0; i < count; ++i) {
      const ChunkHead& head = s.heads[i];
      EXPECT_EQ(head.index, 1000 + i);
      EXPECT_EQ(head.seal_first, 1000u);
      EXPECT_EQ(head.seal_count, count);
      EXPECT_EQ(head.length, s.pieces[i].size());
      EXPECT_EQ(head.path.size(), static_cast<std::size_t>(std::bit_width(count - 1)));
      EXPECT_EQ(s.hashes[i], trust::blake3(s.pieces[i]));
      EXPECT_TRUE(proves(head, s.pieces[i]));
      if (count > 1) {  // another chunk's bytes, or its own at another index
        EXPECT_FALSE(proves(head, s.pieces[(i + 1) % count]));
        ChunkHead elsewhere = head;
        elsewhere.index = s.heads[(i + 1) % count].index;
        EXPECT_FALSE(proves(elsewhere, s.pieces[i]));
      }
    }
  }
}

TEST(Seal, AnyFlippedBitFails) {
  for (const std::size_t count : {std::size_t{1}, std::size_t{5}, std::size_t{64}}) {
    const SealedPieces s = sealed(count, 128);
    const std::size_t i = count / 2;
    const auto fails = [&](auto&& change) {
      ChunkHead head = s.heads[i];
      std::vector<std::byte> bytes = s.pieces[i];
      change(head, bytes);
      EXPECT_FALSE(proves(head, bytes)) << count;
    };
    for (std::size_t bit = 0; bit < 8 * s.pieces[i].size(); ++bit)
      fails([&](auto&, auto& bytes) { bytes[bit / 8] ^= static_cast<std::byte>(1u << bit % 8); });
    for (std::size_t bit = 0; bit < 8 * 16; ++bit)
      fails([&](auto& head, auto&) { head.publication[bit / 8] ^= static_cast<std::byte>(1u << bit % 8); });
    for (std::size_t bit = 0; bit < 8 * 64; ++bit)
      fails([&](auto& head, auto&) { head.signature.bytes[bit / 8] ^= static_cast<std::byte>(1u << bit % 8); });
    for (std::size_t bit = 0; bit < 256 * s.heads[i].path.size(); ++bit)
      fails([&](auto& head, auto&) { head.path[bit / 256][bit / 8 % 32] ^= static_cast<std::byte>(1u << bit % 8); });
    for (std::size_t bit = 0; bit < 32; ++bit)  // the whole seal moved, so the index within it is the same
      fails([&](auto& head, auto&) {
        const std::uint32_t by = head.index - head.seal_first;
        head.seal_first ^= std::uint32_t{1} << bit;
        head.index = head.seal_first + by;
      });
    for (std::size_t bit = 0; bit < 16; ++bit)
      fails([&](auto& head, auto&) { head.seal_count ^= static_cast<std::uint16_t>(1u << bit); });
    fails([](auto&, auto& bytes) { bytes.push_back({}); });
    fails([](auto&, auto& bytes) { bytes.pop_back(); });
  }
}

TEST(Seal, IsValidOnlyForItsRun) {
  const SealedPieces s = sealed(3, 0);
  EXPECT_FALSE(proves(s.heads[0], s.pieces[0], SignatureChecker("run", kOther.public_key())));
  // An inner node of the tree is not a chunk, and a chunk's hash is not a root.
  std::vector<std::byte> both;
  for (const trust::Hash& h : {s.hashes[0], s.hashes[1]}) both.insert(both.end(), h.begin(), h.end());
  ChunkHead inner = s.heads[0];
  inner.path.erase(inner.path.begin());
  EXPECT_FALSE(proves(inner, both));
  EXPECT_FALSE(kChecker.seal_holds(s.heads[0], s.hashes[0]));
}

// ---- announcements, manifests, beacons ----

template <class SignedMessage>
std::string refusal(const SignedMessage& message, const SignatureChecker& checker = kChecker) {
  const auto opened = checker.open(message);
  if (opened) return "accepted";
  EXPECT_EQ(opened.error().code, Code::kCorrupt);
  return opened.error().detail;
}

template <class SignedMessage>
void no_bit_may_differ(const SignedMessage& message) {
  ASSERT_EQ(refusal(message), "accepted");
  for (std::size_t bit = 0; bit < 8 * message.body.size(); ++bit) {
    SignedMessage changed = message;
    changed.body[bit / 8] = static_cast<char>(changed.body[bit / 8] ^ (1 << bit % 8));
    EXPECT_THAT(refusal(changed), HasSubstr("not the learner's")) << bit;
  }
  for (std::size_t bit = 0; bit < 8 * 64; ++bit) {
    SignedMessage changed = message;
    changed.signature.bytes[bit / 8] ^= static_cast<std::byte>(1u << bit % 8);
    EXPECT_THAT(refusal(changed), HasSubstr("not the learner's")) << bit;
  }
  SignedMessage longer = message;
  longer.body.push_back('\0');
  EXPECT_THAT(refusal(longer), HasSubstr("not the learner's"));
  EXPECT_THAT(refusal(message, SignatureChecker("run", kOther.public_key())), HasSubstr("not the learner's"));
}

Beacon beacon() { return {"run", 3, 17, 1000, 2000, Version{9}, {WorkerId{2}, WorkerId{5}}}; }

TEST(Signed, CanBeReadAgainAndNoBitMayDiffer) {
  const Announcement announcement = made_announcement(delta(9, 7), {.epoch = 2});
  const SignedAnnouncement opening = sign(announcement, kKey);
  EXPECT_EQ(*kChecker.open(opening), announcement);
  EXPECT_EQ(announced_chunk_bytes(opening), 1024u);
  EXPECT_EQ(announced_chunk_bytes({}), 0u);
  no_bit_may_differ(opening);
  EXPECT_NE(id_of(opening), id_of(sign(made_announcement(delta(9, 8)), kKey)));

  const Manifest manifest{id_of(opening), 12'345, trust::blake3(random_bytes(1, 1)), digest_of(9),
                          std::string(kNoteBytesMax, 'n')};
  EXPECT_EQ(*kChecker.open(sign(manifest, kKey)), manifest);
  Manifest longer = manifest;
  longer.note += 'n';
  EXPECT_FALSE(kChecker.open(sign(longer, kKey)));
  EXPECT_EQ(manifest.chunk_count(1024), 13u);
  EXPECT_EQ(Manifest{}.chunk_count(1024), 0u);
  no_bit_may_differ(sign(manifest, kKey));

  const Beacon b = *kChecker.open(sign(beacon(), kKey));
  EXPECT_EQ(b.epoch, 3u);
  EXPECT_EQ(b.sequence, 17u);
  EXPECT_EQ(b.issued_unix_ms, 1000u);
  EXPECT_EQ(b.expires_unix_ms, 2000u);
  EXPECT_EQ(b.newest, Version{9});
  EXPECT_EQ(b.revoked, (WorkerSet{WorkerId{2}, WorkerId{5}}));
  no_bit_may_differ(sign(beacon(), kKey));
}

TEST(Signed, IsForOnePurposeOnly) {
  // The same bytes, signed for one purpose, do not pass for another.
  const SignedAnnouncement a = sign(made_announcement(full(1)), kKey);
  EXPECT_THAT(refusal(SignedManifest{a}), HasSubstr("this manifest is not"));
  EXPECT_THAT(refusal<Signed>(a), HasSubstr("this beacon is not"));
  const SignedBeacon b = sign(beacon(), kKey);
  EXPECT_THAT(refusal(SignedAnnouncement{b}), HasSubstr("this announcement is not"));
}

TEST(Signed, LimitsHoldEvenForTheLearner) {
  EXPECT_THAT(refusal(sign(made_announcement(full(1), {.run_id = "other"}), kKey)),
              HasSubstr("of run 'run', found one of 'other'"));
  EXPECT_THAT(refusal(sign(made_announcement(delta(5, 5)), kKey)), HasSubstr("base below version 5, found 5"));
  EXPECT_THAT(refusal(sign(made_announcement(full(5), {.chunk_bytes = 1023}), kKey)), HasSubstr("found 1023"));
  EXPECT_THAT(refusal(sign(made_announcement(full(5), {.chunk_bytes = kChunkBytesMax + 1}), kKey)),
              HasSubstr("1024 to 1048576 bytes, found 1048577"));
  EXPECT_THAT(refusal(sign(Manifest{{}, std::uint64_t{kChunksMax} * kChunkBytesMax + 1, {}, {}, {}}, kKey)),
              HasSubstr("more than 1048576 chunks"));
  Beacon other = beacon();
  other.run_id = "other";
  EXPECT_THAT(refusal(sign(other, kKey)), HasSubstr("found one of 'other'"));
  Beacon many = beacon();
  many.revoked = {};
  for (std::uint64_t i = 0; i < kRevokedMax; ++i) many.revoked.append(1 + 3 * i, 2 + 3 * i);
  EXPECT_EQ(kChecker.open(sign(many, kKey))->revoked, many.revoked);
  many.revoked.append(1 << 20, 1 << 20);
  EXPECT_THAT(refusal(sign(many, kKey)), HasSubstr("found 16386 numbers"));
}

TEST(WorkerSet, KeepsRangesAndFillsOnlyEmptyGaps) {
  WorkerSet set{WorkerId{2}, WorkerId{3}, WorkerId{5}, WorkerId{9}, WorkerId{12}};
  EXPECT_EQ(set.ranges(), (std::vector<WorkerSet::Range>{{2, 3}, {5, 5}, {9, 9}, {12, 12}}));
  for (std::uint64_t id = 0; id < 15; ++id)
    EXPECT_EQ(set.contains(WorkerId{id}), (std::set<std::uint64_t>{2, 3, 5, 9, 12}.contains(id))) << id;
  WorkerSet same = set;
  same.widen(4, {});
  EXPECT_EQ(same, set);
  set.widen(2, {WorkerId{4}, WorkerId{20}});  // worker 4 is a member, so the range must not include it
  EXPECT_EQ(set.ranges(), (std::vector<WorkerSet::Range>{{2, 3}, {5, 12}}));
  set.widen(1, {WorkerId{4}, WorkerId{20}});
  EXPECT_EQ(set.ranges().size(), 2u) << "it keeps an extra range rather than revoke a member";
  EXPECT_FALSE(WorkerSet().contains(WorkerId{0}));
}

// ---- the sealer ----

TEST(Sealer, CutsTheSameChunksHoweverTheBytesArrive) {
  const Made whole = make(full(3), 150 * 1024 + 1);
  ASSERT_EQ(whole.chunks.size(), 151u);
  EXPECT_EQ(whole.manifest.payload_bytes, 150u * 1024 + 1);
  EXPECT_EQ(whole.manifest.policy_digest, digest_of(3));
  EXPECT_EQ(whole.manifest.publication, whole.id);
  EXPECT_EQ(whole.id, id_of(whole.opening));
  trust::Hasher content;
  for (std::size_t i = 0; i < whole.chunks.size(); ++i) {
    const SealedChunk& chunk = whole.chunks[i];
    const auto expected = std::span(whole.payload).subspan(i * 1024).first(i < 150 ? 1024 : 1);
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), chunk.data.bytes().begin(), chunk.data.bytes().end()));
    EXPECT_EQ(chunk.head.index, i);
    EXPECT_EQ(chunk.head.publication, whole.id);
    EXPECT_EQ(chunk.hash, trust::blake3(expected));
    EXPECT_TRUE(proves(chunk.head, expected));
    content.update(chunk.hash);
  }
  EXPECT_EQ(whole.manifest.content, content.finish());
  // As few seals as the number allows: 64, 64, 22, and the last chunk alone.
  EXPECT_EQ(whole.chunks[0].head.seal_count, 64u);
  EXPECT_EQ(whole.chunks[127].head.seal_first, 64u);
  EXPECT_EQ(whole.chunks[128].head.seal_count, 22u);
  EXPECT_EQ(whole.chunks[150].head.seal_count, 1u);
  for (const std::size_t piece : {std::size_t{1000}, std::size_t{1024}, std::size_t{70'000}}) {
    const Made cut = make(full(3), 150 * 1024 + 1, {.write_bytes = piece});
    EXPECT_EQ(cut.manifest, whole.manifest) << piece;
    EXPECT_EQ(cut.chunks.size(), whole.chunks.size());
    for (const SealedChunk& chunk : cut.chunks) EXPECT_TRUE(proves(chunk.head, chunk.data.bytes()));
  }
}

// If bytes arrive one chunk at a time, the first chunks leave at once, and later ones share signatures.
TEST(Sealer, SealsGrowWithThePublication) {
  const Made trickled = make(full(3), 3000 * 1024, {.write_bytes = 1024});
  std::set<std::uint32_t> seals;
  for (const SealedChunk& chunk : trickled.chunks) {
    seals.insert(chunk.head.seal_first);
    EXPECT_LE(chunk.head.seal_count, std::max(1u, chunk.head.seal_first / 8)) << "at most an eighth waits";
  }
  EXPECT_EQ(trickled.chunks[7].head.seal_count, 1u);
  EXPECT_EQ(trickled.chunks[2000].head.seal_count, kSealChunksMax);
  EXPECT_LE(seals.size(),
            16u + 8 * 4 + 3000 / kSealChunksMax);  // 8 ln(512 / 16) < 8 * 4 seals until they reach kSealChunksMax
}

TEST(Sealer, AnEmptyPayloadIsAPublication) {
  const Made empty = make(delta(2, 1), 0);
  EXPECT_TRUE(empty.chunks.empty());
  EXPECT_EQ(empty.manifest.payload_bytes, 0u);
  EXPECT_EQ(empty.manifest.content, trust::Hasher().finish());
  EXPECT_EQ(make(delta(2, 1), 1024).chunks.size(), 1u);
}

TEST(Sealer, RefusesTooManyChunks) {
  Sealer sealer(made_announcement(full(0)), kKey);
  // The size is refused before any byte is read.
  const std::vector<std::byte> one(1);
  const std::span<const std::byte> huge(one.data(), std::size_t{kChunksMax} * 1024 + 1);
  const auto written = sealer.write(huge);
  ASSERT_FALSE(written.has_value());
  EXPECT_EQ(written.error().code, Code::kExhausted);
  EXPECT_THAT(written.error().detail, HasSubstr("more than 1048576 chunks of 1024 bytes; use larger chunks"));
  EXPECT_EQ(sealer.bytes(), 0u);
}

// ---- state files ----

template <class Decode>
void refuses_all_damage(const std::string& bytes, Decode&& decode) {
  ASSERT_TRUE(decode(bytes).has_value());
  for (std::size_t n = 0; n < bytes.size(); ++n)
    EXPECT_EQ(decode(std::string_view(bytes).substr(0, n)).error().code, Code::kCorrupt) << n;
  for (std::size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    std::string changed = bytes;
    changed[bit / 8] = static_cast<char>(changed[bit / 8] ^ (1 << bit % 8));
    EXPECT_EQ(decode(changed).error().code, Code::kCorrupt) << bit;
  }
  EXPECT_EQ(decode(bytes + '\0').error().code, Code::kCorrupt);
}

WorkerState worker_state() {
  WorkerState s;
  s.run_id = "run";
  s.authority = random_bytes(1, 30);
  s.certificate = random_bytes(2, 40);
  s.worker = WorkerId{12};
  s.floor = Installed{Version{7}, digest_of(7), 2};
  s.beacon_sequence = 1ull << 40;
  s.clock_offset_ms = -10'800'000;
  return s;
}
LearnerState learner_state() {
  LearnerState s;
  s.run_id = "run";
  s.next_worker = 5;
  s.next_serial = 9;
  trust::Nonce nonce{};
  nonce[3] = std::byte{4};
  s.used_tokens = {{trust::Nonce{}, 17}, {nonce, 1'700'000'000}};
  s.revoked = {{WorkerId{2}, 1'700'000'000}, {WorkerId{4}, 17}};
  s.published = {{Version{1}, digest_of(1)}, {Version{5}, digest_of(5)}};
  s.epoch = 3;
  s.port = 7070;
  s.known = {{WorkerId{1}, {"vast-1", made_key("one").public_key(), 1'700'003'600, "gpu.example"}},
             {WorkerId{4}, {std::string("\xff\0", 2), {}, 0, ""}}};
  s.issue_reserved = 1ull << 41;
  return s;
}

TEST(State, CanBeReadAgainAndEveryDamageIsDetected) {
  EXPECT_EQ(*decode_worker_state(encode(worker_state())), worker_state());
  WorkerState fresh = worker_state();
  fresh.floor.reset();
  EXPECT_EQ(*decode_worker_state(encode(fresh)), fresh);
  refuses_all_damage(encode(worker_state()), [](std::string_view b) { return decode_worker_state(b); });
  EXPECT_EQ(*decode_learner_state(encode(learner_state())), learner_state());
  EXPECT_EQ(*decode_learner_state(encode(LearnerState{})), LearnerState{});
  refuses_all_damage(encode(learner_state()), [](std::string_view b) { return decode_learner_state(b); });
}

TEST(State, OneKindIsNotAcceptedAsTheOther) {
  EXPECT_THAT(decode_worker_state(encode(learner_state())).error().detail,
              HasSubstr("begins with 'echoline worker 3'"));
  EXPECT_THAT(decode_learner_state(encode(worker_state())).error().detail,
              HasSubstr("begins with 'echoline learner 3'"));
  LearnerState zero = learner_state();
  zero.next_worker = 0;
  EXPECT_THAT(decode_learner_state(encode(zero)).error().detail, HasSubstr("ids that begin at 0"));
}

}  // namespace
}  // namespace echoline::overlay

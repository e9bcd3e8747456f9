// A parent's chunks for its children: all that they lack, by the cheapest path, and nothing twice.
#include "overlay/edge_sender.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "tests/overlay/made.hpp"

namespace echoline::overlay {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using testing::UnorderedElementsAre;

const TimePoint kNow = TimePoint(std::chrono::seconds(1));
constexpr ConnId kConn{2};
constexpr WorkerId kChild{1};

struct Sent {
  std::map<PublicationKey, std::vector<std::uint32_t>> chunks;
  std::vector<CannotServe> complaints;
  std::vector<PublicationKey> announced;
  std::vector<PublicationId> closed;
  std::vector<std::uint32_t> statuses;  // the progress that they report
  std::vector<PublicationKey> keys() const {
    std::vector<PublicationKey> keys;
    for (const auto& [key, indices] : chunks) keys.push_back(key);
    return keys;
  }
};

struct Parent {
  explicit Parent(bool is_learner) : sender(store, uplink, is_learner) {}
  SignatureChecker checker{"run", made_key("authority").public_key()};
  std::vector<Action> actions;
  PublicationStore store{{Bytes{1 << 30}, {}, false}, checker, actions};
  Pacer pacer;
  Uplink uplink{pacer, actions};
  EdgeSender sender;
  std::map<PublicationId, PublicationKey> names;

  void begin(const Made& made) {
    ASSERT_TRUE(store.begin(made.announcement, made.opening).has_value());
    names[made.id] = made.key();
    sender.on_store_changed(kNow);
  }
  void put(const Made& made, std::size_t first, std::size_t count) {
    for (std::size_t i = first; i < first + count; ++i) ASSERT_TRUE(store.put(made.chunk(i), {}).has_value());
    sender.on_chunk_arrived(kNow);
  }
  void close(const Made& made) {
    ASSERT_TRUE(store.close(made.manifest, made.closing).has_value());
    sender.on_store_changed(kNow);
  }
  void add(const PublicationKey& key, std::size_t bytes) {
    const Made made = make(key, bytes);
    begin(made);
    put(made, 0, made.chunks.size());
    close(made);
  }
  bool open(Have have, ConnId conn = kConn, std::uint32_t stream = 0, std::optional<Version> catch_up_to = {},
            bool full_only = false, WorkerId child = kChild) {
    return sender.open(conn, child, {"run", stream, catch_up_to, full_only, std::move(have)}, kNow);
  }
  Sent take(ConnId conn = kConn) {
    Sent sent;
    for (std::vector<Action> batch = std::exchange(actions, {}); !batch.empty(); batch = std::exchange(actions, {})) {
      std::vector<std::byte> stream;
      for (const Action& a : batch) {
        const auto* send = std::get_if<act::Send>(&a);
        if (!send || send->conn != conn) {
          others.push_back(a);
          continue;
        }
        for (const Slice& part : {send->head, send->tail})
          stream.insert(stream.end(), part.bytes().begin(), part.bytes().end());
      }
      read(stream, sent);
      sender_sent(conn, stream.size());
    }
    return sent;
  }
  void sender_sent(ConnId conn, std::size_t bytes) { uplink.on_sent(conn, bytes, kNow); }
  void read(std::span<const std::byte> stream, Sent& sent) {
    FrameDecoder decoder;
    decoder.admit();
    while (!stream.empty()) {
      const auto room = decoder.room();
      const std::size_t n = std::min(room.size(), stream.size());
      std::memcpy(room.data(), stream.data(), n);
      stream = stream.subspan(n);
      ASSERT_TRUE(decoder.advance(n).has_value());
      const auto frame = decoder.take();
      if (!frame) continue;
      if (frame->type == FrameType::kChunk) {
        ASSERT_TRUE(announced.contains(frame->chunk.publication)) << "announced before its chunks";
        sent.chunks[names.at(frame->chunk.publication)].push_back(frame->chunk.index);
        continue;
      }
      const auto m = decode_control(frame->body.bytes());
      ASSERT_TRUE(m.has_value());
      if (const auto* c = std::get_if<CannotServe>(&*m)) sent.complaints.push_back(*c);
      if (const auto* a = std::get_if<SignedAnnouncement>(&*m)) {
        announced.insert(id_of(*a));
        sent.announced.push_back(names.at(id_of(*a)));
      }
      if (const auto* s = std::get_if<EdgeStatus>(&*m)) sent.statuses.push_back(s->progress.at(0).chunks.at(0));
      if (const auto* c = std::get_if<SignedManifest>(&*m)) sent.closed.push_back(checker.open(*c)->publication);
    }
  }
  std::set<PublicationId> announced;
  std::vector<Action> others;  // on other connections
};

ChunkSet chunks(std::initializer_list<std::uint32_t> indices) {
  ChunkSet set;
  for (const std::uint32_t i : indices) set.insert(i);
  return set;
}

TEST(EdgeSender, SendsOnlyChunksTheChildLacks) {
  Parent parent(false);
  parent.add(full(0), 4000);
  parent.add(delta(1, 0), 3000);
  const Made first = make(delta(1, 0), 3000);
  ASSERT_TRUE(parent.open({Version{0}, {}, {{delta(1, 0), {first.id, chunks({1}), false}}}}));
  const Sent sent = parent.take();
  EXPECT_THAT(sent.chunks, ElementsAre(std::pair(delta(1, 0), std::vector<std::uint32_t>{0, 2})));
  EXPECT_THAT(sent.closed, ElementsAre(first.id));
  parent.add(delta(2, 1), 100);
  EXPECT_THAT(parent.take().keys(), ElementsAre(delta(2, 1)));
  parent.sender.send_again(kConn, {first.id, 2}, kNow);  // it arrived incomplete
  EXPECT_THAT(parent.take().chunks, ElementsAre(std::pair(delta(1, 0), std::vector<std::uint32_t>{2})));
  parent.sender.send_again(kConn, {PublicationId{}, 2}, kNow);  // an unknown publication
  parent.sender.send_again(kConn, {first.id, 99}, kNow);
  parent.sender.send_again(ConnId{98}, {first.id, 1}, kNow);
  const Sent nothing = parent.take();
  EXPECT_THAT(nothing.chunks, IsEmpty());
  EXPECT_THAT(nothing.complaints, IsEmpty());
  EXPECT_EQ(parent.sender.chunk_bytes_sent(), 3000 - 1024 + 100 + (3000 - 2048));
}

// A snapshot that has only begun to arrive is no shortcut past a delta in flight.
TEST(EdgeSender, AnArrivingPublicationCostsItsFullSize) {
  Parent parent(true);
  parent.add(full(0), 20'000);
  ASSERT_TRUE(parent.open({Version{0}, {}, {}}));
  const Made delta_1 = make(delta(1, 0), 4000), snapshot = make(full(1), 20'000);
  parent.begin(delta_1);
  parent.put(delta_1, 0, 2);
  parent.begin(snapshot);
  parent.put(snapshot, 0, 1);
  parent.put(delta_1, 2, 2);
  parent.close(delta_1);
  EXPECT_THAT(parent.take().keys(), ElementsAre(delta(1, 0)));
  parent.put(snapshot, 1, snapshot.chunks.size() - 1);
  parent.close(snapshot);
  EXPECT_THAT(parent.take().keys(), IsEmpty());
}

TEST(EdgeSender, SendsChunksOfAnOpenPublicationAsTheyArrive) {
  Parent parent(true);
  const Made made = make(full(0), 5000);
  parent.begin(made);
  ASSERT_TRUE(parent.open({}));
  EXPECT_THAT(parent.take().announced, ElementsAre(full(0)));
  for (std::uint32_t i = 0; i < 5; ++i) {
    parent.put(made, i, 1);
    const Sent sent = parent.take();
    EXPECT_THAT(sent.chunks.at(full(0)), ElementsAre(i));
    EXPECT_THAT(sent.announced, IsEmpty());
  }
  parent.close(made);
  EXPECT_THAT(parent.take().closed, ElementsAre(made.id));
}

TEST(EdgeSender, ALaterPublicationDoesNotWaitForAGapInAnEarlierOne) {
  Parent parent(true);
  const Made slow = make(full(0), 3000), fast = make(delta(1, 0), 2000);
  ASSERT_TRUE(parent.open({}));
  parent.begin(slow);
  parent.put(slow, 0, 1);
  parent.begin(fast);
  parent.put(fast, 0, 2);
  EXPECT_THAT(parent.take().keys(), ElementsAre(full(0), delta(1, 0)));
  parent.put(slow, 1, 2);
  EXPECT_THAT(parent.take().chunks, ElementsAre(std::pair(full(0), std::vector<std::uint32_t>{1, 2})));
}

TEST(EdgeSender, ALateChildGetsTheCheapestPathByBytes) {
  {  // three deltas of 1000 are cheaper than a snapshot of 5000
    Parent parent(true);
    for (std::uint64_t v = 1; v <= 3; ++v) parent.add(delta(v, v - 1), 1000);
    parent.add(full(3), 5000);
    parent.open({Version{0}, {}, {}});
    EXPECT_THAT(parent.take().keys(), ElementsAre(delta(1, 0), delta(2, 1), delta(3, 2)));
  }
  {  // but more expensive than one of 2500
    Parent parent(true);
    for (std::uint64_t v = 1; v <= 4; ++v) parent.add(delta(v, v - 1), 1000);
    parent.add(full(3), 2500);
    parent.open({Version{0}, {}, {}});
    EXPECT_THAT(parent.take().keys(), ElementsAre(full(3), delta(4, 3)));
  }
  {  // unless the child already has most of the deltas
    Parent parent(true);
    for (std::uint64_t v = 1; v <= 4; ++v) parent.add(delta(v, v - 1), 1000);
    parent.add(full(3), 2500);
    parent.open({Version{0},
                 {},
                 {{delta(1, 0), {make(delta(1, 0), 1000).id, ChunkSet::all(1), true}},
                  {delta(2, 1), {make(delta(2, 1), 1000).id, ChunkSet::all(1), true}}}});
    EXPECT_THAT(parent.take().keys(), ElementsAre(delta(3, 2), delta(4, 3)));
  }
  {  // also deltas that the parent no longer has
    Parent parent(true);
    parent.add(delta(2, 1), 1000);
    parent.open({Version{0}, {}, {{delta(1, 0), {make(delta(1, 0), 1000).id, ChunkSet::all(1), true}}}});
    EXPECT_THAT(parent.take().keys(), ElementsAre(delta(2, 1)));
  }
  {  // but a part of a publication that the parent no longer has does not help
    Parent parent(true);
    parent.add(delta(2, 1), 1000);
    parent.open({Version{0}, {}, {{delta(1, 0), {make(delta(1, 0), 3000).id, chunks({0}), false}}}});
    EXPECT_THAT(parent.take().keys(), IsEmpty());
    EXPECT_EQ(parent.sender.take_troubles().size(), 1u);
  }
  {  // a folded delta counts too
    Parent parent(true);
    for (std::uint64_t v = 1; v <= 3; ++v) parent.add(delta(v, v - 1), 1000);
    parent.add(delta(3, 0), 1500);
    parent.open({Version{0}, {}, {}});
    EXPECT_THAT(parent.take().keys(), ElementsAre(delta(3, 0)));
  }
  {  // after a failed installation only a full snapshot helps
    Parent parent(true);
    parent.add(full(0), 1000);
    parent.add(delta(1, 0), 10);
    parent.open({}, kConn, 0, Version{1}, true);
    EXPECT_THAT(parent.take().keys(), IsEmpty());
    EXPECT_EQ(parent.sender.take_troubles().size(), 1u);
    parent.add(full(1), 1000);
    EXPECT_THAT(parent.take().keys(), ElementsAre(full(1)));
  }
}

TEST(EdgeSender, ReportsAnUnservableVersionOnceAndGoesOnFromThere) {
  Parent parent(false);
  parent.add(delta(5, 4), 1000);
  parent.open({Version{2}, {}, {}});
  const Sent sent = parent.take();
  EXPECT_THAT(sent.chunks, IsEmpty());
  ASSERT_EQ(sent.complaints.size(), 1u);
  EXPECT_EQ(sent.complaints[0].target, Version{5});
  EXPECT_FALSE(sent.complaints[0].snapshot_is_cheaper);
  const auto troubles = parent.sender.take_troubles();
  ASSERT_EQ(troubles.size(), 1u);
  EXPECT_EQ(troubles[0].child, kChild);
  EXPECT_EQ(troubles[0].position, Version{2});
  parent.add(delta(6, 5), 1000);  // another parent brings the child to 5, and this one sends the rest
  const Sent rest = parent.take();
  EXPECT_THAT(rest.keys(), ElementsAre(delta(6, 5)));
  EXPECT_THAT(rest.complaints, IsEmpty());
}

TEST(EdgeSender, ALearnerAsksForASnapshotWhenDeltasCostMore) {
  Parent parent(true);
  parent.add(full(0), 2000);
  for (std::uint64_t v = 1; v <= 3; ++v) parent.add(delta(v, v - 1), 1000);
  parent.open({Version{0}, {}, {}}, kConn, 0, Version{3});
  EXPECT_THAT(parent.take().keys(), IsEmpty());  // waits: 3000 > 1.25 * 2000
  const auto troubles = parent.sender.take_troubles();
  ASSERT_EQ(troubles.size(), 1u);
  EXPECT_TRUE(troubles[0].what.snapshot_is_cheaper);
  parent.add(full(3), 2000);
  EXPECT_THAT(parent.take().keys(), ElementsAre(full(3)));
}

TEST(EdgeSender, ALearnerAsksForOneDeltaInsteadOfMany) {
  const auto behind = [](std::uint64_t versions, std::optional<Version> restorable, const StripeMask& wanted = {}) {
    Parent parent(true);
    parent.add(full(0), 20'000);
    for (std::uint64_t v = 1; v <= versions; ++v) parent.add(delta(v, v - 1), 1000);
    parent.sender.set_foldable_from(restorable);
    parent.open({Version{0}, wanted, {}});
    const auto troubles = parent.sender.take_troubles();
    EXPECT_EQ(parent.take().keys().size(), troubles.empty() ? versions : 0);  // it waits
    if (troubles.empty()) return false;
    EXPECT_TRUE(troubles.size() == 1 && troubles[0].can_fold && troubles[0].position == Version{0});
    parent.sender.refuse_delta_from(Version{0}, kNow);
    EXPECT_EQ(parent.take().keys().size(), versions);
    EXPECT_TRUE(parent.sender.take_troubles().empty());
    return true;
  };
  EXPECT_TRUE(behind(4, Version{0}));
  EXPECT_FALSE(behind(3, Version{0}));
  EXPECT_FALSE(behind(4, Version{1}));  // version 0 cannot be restored any more
  EXPECT_FALSE(behind(4, std::nullopt));
  EXPECT_FALSE(behind(4, Version{0}, {4, 0b1011}));  // the child's other parent would not have it
}

TEST(EdgeSender, OneDeltaInsteadOfManyIsSentAndNotAskedForAgain) {
  Parent parent(true);
  parent.add(full(0), 100'000);
  for (std::uint64_t v = 1; v <= 5; ++v) parent.add(delta(v, v - 1), 10'000);
  parent.sender.set_foldable_from(Version{0});
  parent.add(delta(5, 0), 12'000);
  for (std::uint64_t v = 6; v <= 8; ++v) parent.add(delta(v, v - 1), 10'000);
  parent.open({Version{0}, {}, {}});
  EXPECT_THAT(parent.take().keys(), ElementsAre(delta(5, 0), delta(6, 5), delta(7, 6), delta(8, 7)));
  EXPECT_THAT(parent.sender.take_troubles(), IsEmpty());
  // A child that has most of the deltas does not wait for it either.
  std::map<PublicationKey, Have::Item> items;
  for (std::uint64_t v = 1; v <= 5; ++v)
    items[delta(v, v - 1)] = {make(delta(v, v - 1), 10'000).id, ChunkSet::all(9), false};
  parent.open({Version{0}, {}, std::move(items)}, ConnId{4}, 0, {}, false, WorkerId{2});
  EXPECT_EQ(parent.take(ConnId{4}).keys().size(), 8u);
  EXPECT_THAT(parent.sender.take_troubles(), IsEmpty());
}

// The learner does not make an expensive single delta again.
TEST(EdgeSender, ALearnerAsksForASnapshotIfOneDeltaCostsMore) {
  Parent parent(true);
  parent.add(full(0), 2000);
  parent.add(delta(1, 0), 9000);
  parent.sender.set_foldable_from(Version{0});
  parent.open({Version{0}, {}, {}}, kConn, 0, Version{1});
  const auto troubles = parent.sender.take_troubles();
  ASSERT_EQ(troubles.size(), 1u);
  EXPECT_FALSE(troubles[0].can_fold);
  EXPECT_THAT(parent.take().keys(), IsEmpty());
}

// The child has all chunks of version 1 without knowing that these are all, and has version 2 complete. It needs the
// closing of version 1.
TEST(EdgeSender, AChildContinuesOnlyFromAClosedPublication) {
  Parent parent(true);
  for (std::uint64_t v = 1; v <= 2; ++v) parent.add(delta(v, v - 1), 1000);
  parent.open({Version{0},
               {},
               {{delta(1, 0), {make(delta(1, 0), 1000).id, ChunkSet::all(1), false}},
                {delta(2, 1), {make(delta(2, 1), 1000).id, ChunkSet::all(1), true}}}});
  const Sent sent = parent.take();
  EXPECT_THAT(sent.keys(), IsEmpty());
  EXPECT_THAT(sent.closed, ElementsAre(make(delta(1, 0), 1000).id));
}

// When the delta arrives, the child will have version 2.
TEST(EdgeSender, OneDeltaFromAVersionThatTheChildHasLeftIsUseless) {
  Parent parent(true);
  for (std::uint64_t v = 1; v <= 2; ++v) parent.add(delta(v, v - 1), 1000);
  parent.open({Version{0}, {}, {}});
  EXPECT_THAT(parent.take().keys(), ElementsAre(delta(1, 0), delta(2, 1)));
  for (std::uint64_t v = 3; v <= 6; ++v) {
    const Made made = make(delta(v, v - 1), 1000);
    ASSERT_TRUE(parent.store.begin(made.announcement, made.opening).has_value());
    parent.names[made.id] = made.key();
    for (std::size_t i = 0; i < made.chunks.size(); ++i) ASSERT_TRUE(parent.store.put(made.chunk(i), {}).has_value());
    ASSERT_TRUE(parent.store.close(made.manifest, made.closing).has_value());
  }
  parent.add(delta(6, 1), 1100);
  EXPECT_THAT(parent.take().keys(), ElementsAre(delta(3, 2), delta(4, 3), delta(5, 4), delta(6, 5)));
}

TEST(EdgeSender, AWorkerHandsAChildOverOnlyIfItCostsMoreThanTwice) {
  for (const auto& [bytes, handed_over] : {std::pair(std::size_t{1200}, false), std::pair(std::size_t{1400}, true)}) {
    Parent parent(false);
    parent.add(full(0), 2000);
    for (std::uint64_t v = 1; v <= 3; ++v) parent.add(delta(v, v - 1), bytes);
    parent.open({Version{0}, {}, {}});
    const Sent sent = parent.take();
    EXPECT_EQ(sent.complaints.size(), handed_over ? 1u : 0u) << bytes;
    EXPECT_THAT(sent.keys(), ElementsAre(delta(1, 0), delta(2, 1), delta(3, 2)));  // and serves it in the meantime
  }
}

TEST(EdgeSender, SendsOnlyItsStripes) {
  Parent parent(false);
  parent.add(full(0), 8 * 1024);
  ASSERT_TRUE(parent.open({{}, {4, 0b0101}, {}}));
  EXPECT_THAT(parent.take().chunks.at(full(0)), ElementsAre(0u, 2u, 4u, 6u));
  // Another parent died: this one now serves one stripe more.
  const Made made = make(full(0), 8 * 1024);
  parent.sender.update(kConn, {{}, {4, 0b1101}, {{full(0), {made.id, chunks({0, 2, 4, 6}), false}}}}, kNow);
  EXPECT_THAT(parent.take().chunks.at(full(0)), ElementsAre(3u, 7u));
  parent.sender.update(kConn, {{}, StripeMask::none(), {}}, kNow);
  parent.add(delta(1, 0), 5000);
  EXPECT_THAT(parent.take().chunks, IsEmpty());
}

TEST(EdgeSender, StreamsShareAnEdgeAndLostChunksAreSentAgain) {
  Parent parent(false);
  const Made made = make(full(0), 1 << 20);
  ASSERT_TRUE(parent.open({}));
  ASSERT_TRUE(parent.open({}, ConnId{4}, 1));
  EXPECT_THAT(parent.sender.connections_of(kChild), ElementsAre(kConn, ConnId{4}));
  EXPECT_EQ(parent.sender.child_of(ConnId{4}), kChild);
  parent.begin(made);
  parent.put(made, 0, made.chunks.size());
  parent.close(made);
  // Both windows are full. The second connection breaks and loses its data.
  const std::size_t lost = parent.uplink.in_flight(ConnId{4});
  EXPECT_GT(lost, 200'000u);
  parent.sender.close(ConnId{4});
  Sent sent = parent.take();
  std::vector<std::uint32_t> got = sent.chunks.at(full(0));
  EXPECT_LT(got.size(), made.chunks.size());
  ChunkSet have;
  for (const std::uint32_t i : got) have.insert(i);
  parent.sender.update(kConn, {{}, {}, {{full(0), {made.id, have, false}}}}, kNow);
  sent = parent.take();
  for (const std::uint32_t i : sent.chunks.at(full(0))) {
    EXPECT_FALSE(have.contains(i));
    have.insert(i);
  }
  EXPECT_EQ(have.count(), made.chunks.size());
}

TEST(EdgeSender, ChunksInFlightAreNotSentAgain) {
  Parent parent(false);
  const Made made = make(full(0), 5000);
  ASSERT_TRUE(parent.open({}));
  parent.begin(made);
  parent.put(made, 0, 3);
  EXPECT_EQ(parent.take().chunks.at(full(0)).size(), 3u);
  parent.sender.update(kConn, {{}, {}, {{full(0), {made.id, chunks({0}), false}}}}, kNow);
  EXPECT_THAT(parent.take().chunks, IsEmpty());
  parent.put(made, 3, 2);
  parent.close(made);
  EXPECT_THAT(parent.take().chunks.at(full(0)), ElementsAre(3u, 4u));
}

TEST(EdgeSender, ChunksOfAReplacedPublicationDoNotCountForTheNewOne) {
  Parent parent(false);
  const Made before = make(full(0), 5000), after = make(full(0), 5000, {.issued_unix_s = kMadeUnix_s + 1, .seed = 1});
  ASSERT_TRUE(parent.open({}));
  parent.begin(before);
  parent.put(before, 0, 3);
  EXPECT_EQ(parent.take().chunks.at(full(0)).size(), 3u);
  parent.begin(after);
  parent.put(after, 0, 5);
  parent.close(after);
  EXPECT_THAT(parent.take().chunks.at(full(0)), ElementsAre(0u, 1u, 2u, 3u, 4u));
}

TEST(EdgeSender, BoundsTheQueueOfAChildThatDoesNotRead) {
  Parent parent(false);
  parent.add(full(0), 1 << 20);
  ASSERT_TRUE(parent.open({}));  // its window is full, and it never reads
  const std::uint64_t before = parent.uplink.bytes_sent();
  for (std::uint32_t i = 0; i < 1000; ++i) parent.sender.send_to_all(EdgeStatus{{}, {{PublicationId{}, {i}}}}, kNow);
  EXPECT_EQ(parent.uplink.bytes_sent(), before);
  const Sent sent = parent.take();
  EXPECT_LE(sent.statuses.size(), 100u);
  ASSERT_FALSE(sent.statuses.empty());
  EXPECT_EQ(sent.statuses.back(), 999u);  // the latest status replaces the others
}

TEST(EdgeSender, KeepsItsLimitsAndReports) {
  Parent parent(false);
  for (std::uint64_t i = 0; i < EdgeSender::kStreamsMax; ++i)
    EXPECT_TRUE(parent.open({}, ConnId{2 * i + 2}, static_cast<std::uint32_t>(i)));
  EXPECT_FALSE(parent.open({}, ConnId{100}, 16));
  EXPECT_EQ(parent.sender.connections(), EdgeSender::kStreamsMax);
  // A helped worker, and no child for long.
  ASSERT_TRUE(parent.open({}, ConnId{200}, 0, Version{0}, false, WorkerId{2}));
  EXPECT_THAT(parent.sender.children(), ElementsAre(kChild));
  const auto reports = parent.sender.reports(kNow);
  ASSERT_EQ(reports.size(), 1u);
  EXPECT_EQ(reports[0].child, kChild);
  EXPECT_EQ(reports[0].streams, EdgeSender::kStreamsMax);
  EXPECT_EQ(reports[0].limit, EdgeLimit::kNothingToSend);
  parent.sender.send_to_all(EdgeStatus{{}, {{PublicationId{}, {7}}}}, kNow);
  EXPECT_THAT(parent.take(ConnId{2}).statuses, ElementsAre(7u));  // once, on the first connection
  for (const ConnId conn : parent.sender.all_connections()) parent.sender.close(conn);
  EXPECT_EQ(parent.sender.connections(), 0u);
  EXPECT_THAT(parent.sender.children(), IsEmpty());
}

// A child may send any list again and again: each replaces the list before.
TEST(EdgeSender, ListsOfUnknownPublicationsAreNotKept) {
  Parent parent(false);
  const Made made = make(full(0), 5000);
  parent.begin(made);
  parent.sender.open(kConn, kChild, {}, kNow);
  for (std::uint64_t round = 0; round < 100; ++round) {
    Have have;
    have.items[full(0)] = {made.id, ChunkSet::all(1), false};
    for (std::uint64_t i = 0; i < 50; ++i) {
      PublicationId id{};
      id[0] = static_cast<std::byte>(round), id[1] = static_cast<std::byte>(i), id[2] = std::byte{1};
      have.items[full(1000 + i)] = {id, ChunkSet::all(1000), i % 2 == 0};
    }
    parent.sender.update(kConn, have, kNow);
    EXPECT_LE(parent.sender.known_publications(), 51u);
  }
}

}  // namespace
}  // namespace echoline::overlay

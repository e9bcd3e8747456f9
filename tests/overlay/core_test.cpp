// The pure parts, one by one: link pacing, the publication store, what a parent sends, what a member delivers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/random.hpp"
#include "overlay/learner_core.hpp"
#include "overlay/member_core.hpp"

namespace echoline::overlay {
namespace {

using std::chrono::milliseconds;
using testing::ElementsAre;
using testing::HasSubstr;

const BitRate kMegabytePerS = BitRate::from_mbit_per_s(8);
TimePoint at(double s) { return TimePoint(from_seconds(s)); }

SharedBytes random_bytes(std::uint64_t seed, std::size_t count) {
  Random random(seed);
  auto bytes = std::make_shared<std::vector<std::byte>>(count);
  for (std::byte& b : *bytes) b = static_cast<std::byte>(random.next());
  return bytes;
}
PreparedPublication prepared(std::uint64_t version, std::optional<std::uint64_t> base, std::size_t bytes,
                             std::uint64_t chunk = 1024) {
  Publication p{Version{version}, {}, {}, random_bytes(version * 2 + base.has_value(), bytes)};
  if (base) p.base = Version{*base};
  auto result = prepare(p, Bytes{chunk});
  EXPECT_TRUE(result.has_value());
  return std::move(*result);
}
PublicationKey full(std::uint64_t v) { return {Version{v}, {}}; }
PublicationKey delta(std::uint64_t v, std::uint64_t base) { return {Version{v}, Version{base}}; }
ChunkHeader header_of(const PreparedPublication& p, std::uint32_t i) {
  return {p.manifest.key, i, p.manifest.length_of(i), p.chunk_hashes[i]};
}
std::span<const std::byte> bytes_of(const PreparedPublication& p, std::uint32_t i) {
  return std::span(*p.payload).subspan(std::size_t{i} * p.manifest.chunk_bytes, p.manifest.length_of(i));
}

// ---- pacing ----

TEST(Pacer, HoldsItsRateAndGrantsNothingForIdleTime) {
  Pacer link(kMegabytePerS);
  EXPECT_EQ(link.occupy({1000}, at(5), false), at(5.001));  // however long it was idle
  EXPECT_EQ(link.occupy({1000}, at(5.0003), true), at(5.002));
  EXPECT_EQ(link.occupy({1000}, at(5.010), true), at(5.003));  // late: made up
  EXPECT_EQ(link.occupy({1000}, at(6), true), at(5.951));      // but no more than kLatenessMax of it
  EXPECT_EQ(link.occupy({1000}, at(7), false), at(7.001));
  EXPECT_EQ(Pacer().occupy({1 << 30}, at(1), true), at(1));
}

// Pumps a sender whose timer comes up to `late` after its deadline, and checks what leaves, over all and over 100 ms.
TEST(EdgeSender, UploadLimitHoldsAcrossEdgesAndLateTimers) {
  for (const double late_ms : {0.0, 4.0, 20.0}) {
    PublicationStore store(Bytes{100 << 20});
    ASSERT_TRUE(store.add(prepared(0, {}, 12'000'000, 64 * 1024), {}).has_value());
    std::vector<Action> actions;
    Pacer up(BitRate::from_mbit_per_s(24));
    EdgeSender sender(store, up, actions, true);
    for (std::uint64_t i = 1; i <= 3; ++i) sender.open(ConnId{2 * i}, {"run", WorkerId{i}, {}, false, {}}, at(1));
    Random random(7);
    TimePoint now = at(1);
    std::map<std::int64_t, std::uint64_t> per_100ms;
    std::map<ConnId, std::uint64_t> per_edge;
    while (now < at(11)) {
      for (const Action& a : std::exchange(actions, {})) {
        const auto& send = std::get<act::Send>(a);
        const std::size_t n = send.head.size() + send.tail.length;
        per_100ms[(now - at(1)) / milliseconds(100)] += n;
        per_edge[send.conn] += n;
        sender.on_sent(send.conn, n, now);
      }
      ASSERT_NE(sender.next_deadline(), kNever);
      now = std::max(now, sender.next_deadline()) + from_seconds(random.uniform() * late_ms / 1000);
      sender.on_timer(now);
    }
    std::uint64_t total = 0;
    for (const auto& [slot, bytes] : per_100ms) {
      total += bytes;
      EXPECT_LE(static_cast<double>(bytes), 300e3 + 3e6 * (0.010 + 2 * late_ms / 1000)) << slot;
    }
    EXPECT_NEAR(static_cast<double>(total), 30e6, 0.03 * 30e6) << late_ms;
    for (const auto& [conn, bytes] : per_edge) EXPECT_NEAR(static_cast<double>(bytes), 10e6, 0.03 * 10e6);
    ASSERT_TRUE(sender.measured_rate().has_value());
    EXPECT_NEAR(sender.measured_rate()->mbit_per_s(), 24, 1);
  }
}

MemberConfig member_config(LinkLimits limits = {}) {
  MemberConfig c;
  c.learner = {"10.0.0.0", 1};
  c.data = {"10.0.0.1", 1};
  c.run_id = "run";
  c.limits = limits;
  return c;
}

TEST(Core, DownloadLimitHolds) {
  for (const double late_ms : {0.0, 3.0}) {
    MemberCore core(member_config({{}, kMegabytePerS}));
    Random random(3);
    TimePoint now = at(1);
    std::uint64_t total = 0;
    while (now < at(11)) {  // somebody always has more to read
      const std::size_t n = core.read_bytes_max(1 << 20);
      EXPECT_LE(n, 16 * 1024u);
      core.on_received(n, now);
      total += n;
      const auto paused = core.take_actions();
      ASSERT_EQ(paused.size(), 1u);
      EXPECT_FALSE(std::get<act::SetReading>(paused[0]).on);
      now = core.next_deadline() + from_seconds(random.uniform() * late_ms / 1000);
      core.on_timer(now);
      const auto resumed = core.take_actions();
      ASSERT_EQ(resumed.size(), 1u);
      EXPECT_TRUE(std::get<act::SetReading>(resumed[0]).on);
    }
    EXPECT_NEAR(static_cast<double>(total), 10e6, 0.03 * 10e6) << late_ms;
  }
}

// ---- store ----

TEST(PublicationStore, VerifiesChunksAndTheWhole) {
  const PreparedPublication p = prepared(3, 2, 2500);
  PublicationStore store(Bytes{10'000});
  EXPECT_EQ(store.put(header_of(p, 0), bytes_of(p, 0)).error().code, Code::kNotFound);
  ASSERT_TRUE(store.begin(p.manifest, {}).has_value());
  ASSERT_TRUE(store.begin(p.manifest, {}).has_value());                                   // again: nothing happens
  EXPECT_EQ(*store.put(header_of(p, 2), bytes_of(p, 2)), PublicationStore::Put::kAdded);  // any order
  EXPECT_EQ(*store.put(header_of(p, 2), bytes_of(p, 2)), PublicationStore::Put::kDuplicate);
  std::vector<std::byte> bad(bytes_of(p, 0).begin(), bytes_of(p, 0).end());
  bad[5] ^= std::byte{1};
  EXPECT_THAT(store.put(header_of(p, 0), bad).error().detail, HasSubstr("expected XXH3-64"));
  ChunkHeader wrong = header_of(p, 0);
  wrong.index = 3;
  EXPECT_EQ(store.put(wrong, bytes_of(p, 0)).error().code, Code::kCorrupt);
  EXPECT_EQ(store.put(header_of(p, 1), bytes_of(p, 2)).error().code, Code::kCorrupt);  // wrong length
  EXPECT_EQ(*store.put(header_of(p, 0), bytes_of(p, 0)), PublicationStore::Put::kAdded);
  EXPECT_FALSE(store.find(delta(3, 2))->complete());
  EXPECT_EQ(*store.put(header_of(p, 1), bytes_of(p, 1)), PublicationStore::Put::kCompleted);
  EXPECT_EQ(*store.find(delta(3, 2))->payload, *p.payload);
  Manifest other = p.manifest;
  other.payload_bytes = 7;
  EXPECT_EQ(store.begin(other, {}).error().code, Code::kCorrupt);
}

TEST(PublicationStore, DropsAPayloadWhoseDigestIsWrong) {
  const PreparedPublication p = prepared(3, {}, 1500);
  Manifest lie = p.manifest;
  lie.payload_digest[0] ^= std::byte{1};
  PublicationStore store(Bytes{10'000});
  ASSERT_TRUE(store.begin(lie, {}).has_value());
  ASSERT_TRUE(store.put(header_of(p, 0), bytes_of(p, 0)).has_value());
  EXPECT_THAT(store.put(header_of(p, 1), bytes_of(p, 1)).error().detail, HasSubstr("expected payload digest"));
  EXPECT_EQ(store.find(full(3)), nullptr);
  EXPECT_EQ(store.bytes(), Bytes{0});
}

TEST(PublicationStore, KeepsToItsBudget) {
  PublicationStore store(Bytes{3000});
  ASSERT_TRUE(store.add(prepared(0, {}, 1000), {}).has_value());
  ASSERT_TRUE(store.add(prepared(1, 0, 1000), {}).has_value());
  ASSERT_TRUE(store.add(prepared(2, 1, 1000), Version{2}).has_value());
  ASSERT_TRUE(store.add(prepared(3, 2, 1000), Version{2}).has_value());  // 0 goes
  EXPECT_EQ(store.find(full(0)), nullptr);
  EXPECT_NE(store.find(delta(1, 0)), nullptr);
  const Status status = store.add(prepared(4, 3, 2500), Version{2});  // 1 goes, the rest is still needed
  ASSERT_FALSE(status.has_value());
  EXPECT_EQ(status.error().code, Code::kExhausted);
  EXPECT_THAT(status.error().detail, HasSubstr("store_bytes_max"));
  EXPECT_LE(store.bytes().count, 3000u);
}

TEST(Prepare, NamesMistakes) {
  EXPECT_EQ(prepare({Version{1}, {}, {}, nullptr}, Bytes{1024}).error().code, Code::kInvalid);
  EXPECT_EQ(prepare({Version{1}, Version{1}, {}, random_bytes(1, 5)}, Bytes{1024}).error().code, Code::kInvalid);
  EXPECT_EQ(prepare({Version{1}, {}, {}, random_bytes(1, 5)}, Bytes{1023}).error().code, Code::kInvalid);
  EXPECT_TRUE(
      prepare({Version{1}, Version{0}, {}, random_bytes(1, 0)}, Bytes{1024}).has_value());  // an empty delta is fine
}

// ---- what a parent sends ----

struct Parent {
  explicit Parent(bool is_learner) : sender(store, up, actions, is_learner) {}
  PublicationStore store{Bytes{1 << 30}};
  Pacer up;
  std::vector<Action> actions;
  EdgeSender sender;

  void add(PreparedPublication p) {
    ASSERT_TRUE(store.add(std::move(p), {}).has_value());
    sender.on_store_changed(at(1));
  }
  void open(Have have, std::optional<Version> catch_up_to = {}, bool full_only = false) {
    sender.open(ConnId{2}, {"run", WorkerId{1}, catch_up_to, full_only, std::move(have)}, at(1));
  }
  // Chunks sent since the last call, by publication, and complaints.
  std::map<PublicationKey, std::vector<std::uint32_t>> take() {
    std::map<PublicationKey, std::vector<std::uint32_t>> sent;
    FrameDecoder decoder;
    decoder.admit();
    std::vector<std::byte> stream;
    for (const Action& a : std::exchange(actions, {})) {
      const auto& send = std::get<act::Send>(a);
      stream.insert(stream.end(), send.head.begin(), send.head.end());
      stream.insert(stream.end(), send.tail.bytes().begin(), send.tail.bytes().end());
    }
    sender.on_sent(ConnId{2}, stream.size(), at(1));
    decoder.feed(stream);
    for (;;) {
      const auto frame = decoder.next();
      EXPECT_TRUE(frame.has_value());
      if (!frame || !*frame) return sent;
      if ((*frame)->type == FrameType::kChunk) {
        sent[(*frame)->chunk.key].push_back((*frame)->chunk.index);
        EXPECT_EQ(chunk_hash((*frame)->body), (*frame)->chunk.xxh3_64);
      } else if (const auto m = decode_control((*frame)->body); m && std::holds_alternative<CannotServe>(*m)) {
        complaints.push_back(std::get<CannotServe>(*m));
      }
    }
  }
  std::vector<PublicationKey> take_keys() {
    std::vector<PublicationKey> keys;
    for (const auto& [key, chunks] : take()) keys.push_back(key);
    return keys;
  }
  std::vector<CannotServe> complaints;
};

TEST(EdgeSender, SendsOnlyWhatTheChildLacks) {
  Parent parent(false);
  parent.add(prepared(0, {}, 4000));
  parent.add(prepared(1, 0, 3000));
  ChunkSet some(3);
  some.insert(1);
  parent.open({Version{0}, {{delta(1, 0), some}}});
  const auto sent = parent.take();
  EXPECT_THAT(sent, ElementsAre(std::pair(delta(1, 0), std::vector<std::uint32_t>{0, 2})));
  parent.add(prepared(2, 1, 100));
  EXPECT_THAT(parent.take_keys(), ElementsAre(delta(2, 1)));
  parent.sender.send_again(ConnId{2}, {delta(1, 0), 2}, at(1));  // it did not arrive whole
  EXPECT_THAT(parent.take(), ElementsAre(std::pair(delta(1, 0), std::vector<std::uint32_t>{2})));
  parent.sender.send_again(ConnId{2}, {delta(9, 8), 2}, at(1));  // nonsense
  EXPECT_TRUE(parent.take().empty());
  EXPECT_TRUE(parent.complaints.empty());
}

TEST(EdgeSender, ALaggardGetsTheCheapestWayByBytes) {
  {  // three deltas of 1000 are cheaper than a snapshot of 5000
    Parent parent(true);
    for (std::uint64_t v = 1; v <= 3; ++v) parent.add(prepared(v, v - 1, 1000));
    parent.add(prepared(3, {}, 5000));
    parent.open({Version{0}, {}});
    EXPECT_THAT(parent.take_keys(), ElementsAre(delta(1, 0), delta(2, 1), delta(3, 2)));
  }
  {  // and dearer than one of 2500
    Parent parent(true);
    for (std::uint64_t v = 1; v <= 4; ++v) parent.add(prepared(v, v - 1, 1000));
    parent.add(prepared(3, {}, 2500));
    parent.open({Version{0}, {}});
    EXPECT_THAT(parent.take_keys(), ElementsAre(full(3), delta(4, 3)));
  }
  {  // unless most of the deltas are there already
    Parent parent(true);
    for (std::uint64_t v = 1; v <= 4; ++v) parent.add(prepared(v, v - 1, 1000));
    parent.add(prepared(3, {}, 2500));
    parent.open({Version{0}, {{delta(1, 0), ChunkSet::all(1)}, {delta(2, 1), ChunkSet::all(1)}}});
    EXPECT_THAT(parent.take_keys(), ElementsAre(delta(3, 2), delta(4, 3)));
  }
  {  // a folded delta counts too
    Parent parent(true);
    for (std::uint64_t v = 1; v <= 3; ++v) parent.add(prepared(v, v - 1, 1000));
    parent.add(prepared(3, 0, 1500));
    parent.open({Version{0}, {}});
    EXPECT_THAT(parent.take_keys(), ElementsAre(delta(3, 0)));
  }
  {  // after a failed installation only a full snapshot helps
    Parent parent(true);
    parent.add(prepared(0, {}, 1000));
    parent.add(prepared(1, 0, 10));
    parent.open({{}, {}}, Version{1}, true);
    EXPECT_TRUE(parent.take().empty());
    EXPECT_EQ(parent.sender.take_troubles().size(), 1u);
    parent.add(prepared(1, {}, 1000));
    EXPECT_THAT(parent.take_keys(), ElementsAre(full(1)));
  }
}

TEST(EdgeSender, SaysWhatItCannotServeOnceAndGoesOnFromThere) {
  Parent parent(false);
  parent.add(prepared(5, 4, 1000));
  parent.open({Version{2}, {}});
  EXPECT_TRUE(parent.take().empty());
  ASSERT_EQ(parent.complaints.size(), 1u);
  EXPECT_EQ(parent.complaints[0].target, Version{5});
  EXPECT_FALSE(parent.complaints[0].behind);
  parent.add(prepared(6, 5, 1000));  // the learner brings the child to 5; the rest comes from here
  EXPECT_THAT(parent.take_keys(), ElementsAre(delta(6, 5)));
  EXPECT_EQ(parent.complaints.size(), 1u);
}

TEST(EdgeSender, ALearnerAsksForASnapshotWhenDeltasCostMore) {
  Parent parent(true);
  parent.add(prepared(0, {}, 2000));
  for (std::uint64_t v = 1; v <= 3; ++v) parent.add(prepared(v, v - 1, 1000));
  parent.open({Version{0}, {}}, Version{3});
  EXPECT_TRUE(parent.take().empty());  // waits: 3000 > 1.25 * 2000
  const auto troubles = parent.sender.take_troubles();
  ASSERT_EQ(troubles.size(), 1u);
  EXPECT_TRUE(troubles[0].what.behind);
  parent.add(prepared(3, {}, 2000));
  EXPECT_THAT(parent.take_keys(), ElementsAre(full(3)));
}

// ---- member ----

// A member that has joined and been given a parent, driven by hand.
struct Joined {
  MemberCore core{member_config()};
  ConnId control{1}, parent{3};
  std::vector<Action> actions;
  TimePoint now = at(1);

  Joined() {
    core.start(now);
    core.on_connected(control, now);
    tell(control, Welcome{WorkerId{7}, milliseconds(500), std::chrono::seconds(9), "welcome"});
    tell(control, Assign{WorkerId{4}, {"10.0.0.4", 1}});
    core.on_connected(parent, now);
    take();
  }
  void take() {
    for (Action& a : core.take_actions()) actions.push_back(std::move(a));
  }
  void tell(ConnId conn, const ControlMessage& m) {
    const auto frame = encode_control(m);
    core.on_frame(conn, {FrameType::kControl, std::span(frame).subspan(kFrameHeaderBytes), {}}, now);
    take();
  }
  void chunk(ConnId conn, const PreparedPublication& p, std::uint32_t i, bool corrupt = false) {
    std::vector<std::byte> bytes(bytes_of(p, i).begin(), bytes_of(p, i).end());
    if (corrupt) bytes.back() ^= std::byte{4};
    core.on_frame(conn, {FrameType::kChunk, bytes, header_of(p, i)}, now);
    take();
  }
  void whole(const PreparedPublication& p) {
    tell(parent, p.manifest);
    for (std::uint32_t i = 0; i < p.manifest.chunk_count(); ++i) chunk(parent, p, i);
  }
  std::vector<PublicationKey> delivered() const {
    std::vector<PublicationKey> keys;
    for (const Action& a : actions)
      if (const auto* d = std::get_if<act::Deliver>(&a)) keys.push_back({d->publication.version, d->publication.base});
    return keys;
  }
  template <class T>
  std::vector<T> said(ConnId conn) const {  // control messages of one kind
    std::vector<T> all;
    for (const Action& a : actions)
      if (const auto* s = std::get_if<act::Send>(&a); s && s->conn == conn)
        if (const auto m = decode_control(std::span(s->head).subspan(kFrameHeaderBytes));
            m && std::holds_alternative<T>(*m))
          all.push_back(std::get<T>(*m));
    return all;
  }
  template <class T>
  const T* last() const {
    for (auto it = actions.rbegin(); it != actions.rend(); ++it)
      if (const auto* t = std::get_if<T>(&*it)) return t;
    return nullptr;
  }
};

TEST(Member, DeliversInAnOrderThatCanBeInstalled) {
  Joined m;
  EXPECT_EQ(m.said<PeerHello>(m.parent).size(), 1u);
  m.whole(prepared(2, 1, 1500));
  m.whole(prepared(1, 0, 1500));
  EXPECT_TRUE(m.delivered().empty());
  m.whole(prepared(0, {}, 3000));
  EXPECT_THAT(m.delivered(), ElementsAre(full(0), delta(1, 0), delta(2, 1)));
  m.whole(prepared(1, {}, 500));  // behind: ignored
  m.whole(prepared(5, {}, 500));  // ahead: a jump
  m.whole(prepared(6, 5, 0));     // nothing changed
  m.whole(prepared(4, 3, 10));
  EXPECT_THAT(m.delivered(), ElementsAre(full(0), delta(1, 0), delta(2, 1), full(5), delta(6, 5)));
  m.core.installed(Version{5}, {}, m.now);
  m.core.installed(Version{2}, {}, m.now);  // never backwards
  m.core.installed(Version{9}, {}, m.now);  // never delivered
  m.take();
  const auto acks = m.said<Ack>(m.control);
  ASSERT_EQ(acks.size(), 1u);
  EXPECT_EQ(acks[0].version, Version{5});
}

TEST(Member, ACorruptChunkIsRefusedAndAskedForAgain) {
  Joined m;
  const auto p = prepared(0, {}, 3000);
  m.tell(m.parent, p.manifest);
  m.chunk(m.parent, p, 0);
  m.chunk(m.parent, p, 1, true);
  m.chunk(m.parent, p, 2);
  EXPECT_TRUE(m.delivered().empty());
  const auto requests = m.said<ChunkRequest>(m.parent);
  ASSERT_EQ(requests.size(), 1u);
  EXPECT_EQ(requests[0].index, 1u);
  m.chunk(m.parent, p, 1);
  EXPECT_THAT(m.delivered(), ElementsAre(full(0)));
  EXPECT_EQ(*m.last<act::Deliver>()->publication.payload, *p.payload);
  EXPECT_EQ(m.core.stats().chunks_corrupt, 1u);
}

TEST(Member, GivesUpAnEdgeThatKeepsCorruptingAndSaysSo) {
  Joined m;
  const auto p = prepared(0, {}, 3000);
  m.tell(m.parent, p.manifest);
  for (int i = 0; i < MemberCore::kCorruptChunksMax; ++i) m.chunk(m.parent, p, 1, true);
  ASSERT_EQ(m.said<EdgeFailed>(m.control).size(), 1u);
  EXPECT_EQ(m.said<EdgeFailed>(m.control)[0].parent, WorkerId{4});
  ASSERT_NE(m.last<act::Close>(), nullptr);
  EXPECT_EQ(m.last<act::Close>()->conn, m.parent);
  EXPECT_LE(m.core.next_deadline(), m.now + milliseconds(50));  // and tries again
  m.now += milliseconds(50);
  m.core.on_timer(m.now);
  m.take();
  EXPECT_EQ(m.last<act::Dial>()->to, (Endpoint{"10.0.0.4", 1}));
}

TEST(Member, ForwardsEachChunkAsItComes) {
  Joined m;
  const auto p = prepared(0, {}, 3000);
  m.core.on_accepted(ConnId{2}, "10.0.0.9", m.now);
  m.tell(ConnId{2}, PeerHello{"run", WorkerId{9}, {}, false, {}});
  m.tell(m.parent, p.manifest);
  m.chunk(m.parent, p, 2);
  EXPECT_EQ(m.core.stats().chunk_bytes_forwarded.count, p.manifest.length_of(2));
  m.chunk(m.parent, p, 0, true);  // never a bad one
  EXPECT_EQ(m.core.stats().chunk_bytes_forwarded.count, p.manifest.length_of(2));
  m.core.on_accepted(ConnId{4}, "10.0.0.9", m.now);
  m.tell(ConnId{4}, PeerHello{"another run", WorkerId{9}, {}, false, {}});
  EXPECT_EQ(m.last<act::Close>()->conn, ConnId{4});
}

TEST(Member, DialsAnewWhenReassignedAndSaysWhatItHas) {
  Joined m;
  const auto p = prepared(0, {}, 3000);
  m.tell(m.parent, p.manifest);
  m.chunk(m.parent, p, 1);
  m.tell(m.control, Assign{WorkerId{5}, {"10.0.0.5", 1}});
  const ConnId second = m.last<act::Dial>()->conn;
  m.core.on_connected(second, m.now);
  m.take();
  const auto hello = m.said<PeerHello>(second);
  ASSERT_EQ(hello.size(), 1u);
  EXPECT_TRUE(hello[0].have.chunks.at(full(0)).contains(1));
  EXPECT_EQ(hello[0].have.chunks.at(full(0)).count(), 1u);
}

TEST(Member, AsksTheLearnerWhenItsParentCannotServe) {
  Joined m;
  m.tell(m.parent, CannotServe{Version{5}, false});
  ASSERT_NE(m.last<act::Dial>(), nullptr);
  EXPECT_EQ(m.last<act::Dial>()->to, (Endpoint{"10.0.0.0", 1}));
  const ConnId helper = m.last<act::Dial>()->conn;
  m.core.on_connected(helper, m.now);
  const auto p = prepared(5, {}, 100);
  m.tell(helper, p.manifest);
  EXPECT_EQ(m.said<PeerHello>(helper).at(0).catch_up_to, Version{5});
  m.chunk(helper, p, 0);
  EXPECT_THAT(m.delivered(), ElementsAre(full(5)));
  EXPECT_EQ(m.last<act::Close>()->conn, helper);
  EXPECT_EQ(m.said<Have>(m.parent).at(0).position, Version{5});
}

TEST(Member, EndsWhenTheLearnerIsSilentAbsentOrWrong) {
  Joined silent;
  silent.now += std::chrono::seconds(9);
  silent.core.on_timer(silent.now);
  silent.take();
  EXPECT_THAT(silent.last<act::Disconnected>()->reason, HasSubstr("nothing heard"));
  EXPECT_EQ(silent.core.next_deadline(), kNever);

  MemberCore absent(member_config());
  absent.start(at(1));
  EXPECT_EQ(absent.next_deadline(), at(11));
  absent.on_timer(at(11));
  const auto actions = absent.take_actions();
  EXPECT_THAT(std::get<act::Disconnected>(actions.back()).reason, HasSubstr("did not answer within 10 s"));

  Joined confused;
  confused.tell(confused.control, Ack{});
  EXPECT_THAT(confused.last<act::Disconnected>()->reason, HasSubstr("not for a worker"));
}

TEST(Member, GivesUpAfterThreeFailedInstallations) {
  Joined m;
  m.whole(prepared(1, {}, 100));
  for (int i = 0; i < MemberCore::kInstallFailuresMax; ++i) m.core.install_failed(Version{1}, "digest", m.now);
  m.take();
  EXPECT_EQ(m.delivered().size(), 3u);  // the verified snapshot again, twice
  EXPECT_THAT(m.last<act::Disconnected>()->reason, HasSubstr("could not be installed after 3 attempts: digest"));
}

TEST(Member, RefusesWhatItCannotStore) {
  Joined m;
  m.tell(m.parent, Manifest{full(0), {}, {}, 300ull << 20, 64 * 1024});
  EXPECT_THAT(m.last<act::Disconnected>()->reason, HasSubstr("store_bytes_max"));
}

// ---- learner ----

struct Hall {
  LearnerCore core;
  TimePoint now = at(1);
  std::vector<Action> actions;
  std::uint64_t next = 2;

  static LearnerConfig config(double up_mbit = 16) {
    LearnerConfig c;
    c.self = {"10.0.0.0", 1};
    c.run_id = "run";
    c.limits.up = BitRate::from_mbit_per_s(up_mbit);
    return c;
  }
  explicit Hall(double up_mbit = 16) : core(config(up_mbit)) {}
  void take() {
    for (Action& a : core.take_actions()) actions.push_back(std::move(a));
  }
  void tell(ConnId conn, const ControlMessage& m) {
    const auto frame = encode_control(m);
    core.on_frame(conn, {FrameType::kControl, std::span(frame).subspan(kFrameHeaderBytes), {}}, now);
    take();
  }
  ConnId join(const std::string& run = "run") {
    const ConnId conn{next};
    next += 2;
    core.on_accepted(conn, "10.0.0.9", now);
    tell(conn, Hello{run, "w", {"0.0.0.0", 9}, kMegabytePerS, kMegabytePerS});
    return conn;
  }
  template <class T>
  std::vector<T> all() const {
    std::vector<T> found;
    for (const Action& a : actions)
      if (const auto* t = std::get_if<T>(&a)) found.push_back(*t);
    return found;
  }
};

TEST(Learner, PlansChainsAndReattachesTheTailOfTheDead) {
  Hall hall(16);  // two chains of 8
  for (int i = 0; i < 4; ++i) hall.join();
  ASSERT_EQ(hall.core.topology().chains.size(), 2u);
  EXPECT_EQ(hall.all<act::Joined>().at(0).member.data.host, "10.0.0.9");  // where it was seen to come from
  const WorkerId seed = hall.core.topology().chains[0][0], tail = hall.core.topology().chains[0][1];
  hall.core.on_closed(ConnId{2 * seed.value}, "reset", hall.now);
  hall.take();
  EXPECT_EQ(hall.core.topology().parent_of(tail), kLearnerId);
  EXPECT_EQ(hall.all<act::Lost>().at(0).worker, seed);
}

TEST(Learner, PlansAsManyChainsForWorkersThatComeAfterThePublication) {
  Hall hall(16);
  ASSERT_TRUE(hall.core.publish(prepared(0, {}, 10), hall.now).has_value());
  for (int i = 0; i < 4; ++i) hall.join();
  EXPECT_THAT(hall.core.topology().chains, ElementsAre(testing::SizeIs(2), testing::SizeIs(2)));
}

TEST(Learner, CutsOutWorkersWithoutHeartbeat) {
  Hall hall;
  hall.join();
  const ConnId lively = hall.join();
  for (int i = 0; i < 6; ++i) {
    hall.now += milliseconds(500);
    hall.tell(lively, Heartbeat{});
    hall.core.on_timer(hall.now);
    hall.take();
  }
  ASSERT_EQ(hall.all<act::Lost>().size(), 1u);
  EXPECT_EQ(hall.all<act::Lost>()[0].worker, WorkerId{1});
  EXPECT_THAT(hall.all<act::Lost>()[0].reason, HasSubstr("no heartbeat for 3 s"));
}

TEST(Learner, MeasuresTheQuorumOfThoseWhoWereThere) {
  Hall hall;
  std::vector<ConnId> conns;
  for (int i = 0; i < 11; ++i) conns.push_back(hall.join());
  ASSERT_TRUE(hall.core.publish(prepared(0, {}, 1000), hall.now).has_value());
  hall.join();  // too late to count
  for (std::size_t i = 0; i < 8; ++i) {
    hall.now += milliseconds(10);
    hall.tell(conns[i], Ack{Version{0}, {}});
  }
  EXPECT_TRUE(hall.all<act::BroadcastDone>().empty());  // 8 of 11; ceil(9.9) = 10 needed
  hall.core.on_closed(conns[10], "reset", hall.now);    // 8 of 10; 9 needed
  hall.now += milliseconds(10);
  hall.tell(conns[8], Ack{Version{0}, {}});
  ASSERT_EQ(hall.all<act::BroadcastDone>().size(), 1u);
  const BroadcastReport report = hall.all<act::BroadcastDone>()[0].report;
  EXPECT_EQ(report.t_b, milliseconds(90));
  EXPECT_EQ(report.workers, 10u);
}

TEST(Learner, ClosesStrangersThatSayNothing) {
  Hall hall;
  hall.core.on_accepted(ConnId{2}, "10.0.0.9", hall.now);
  EXPECT_EQ(hall.core.next_deadline(), hall.now + LearnerCore::kHandshakeTimeout);
  hall.now = hall.core.next_deadline();
  hall.core.on_timer(hall.now);
  hall.take();
  EXPECT_EQ(hall.all<act::Close>().size(), 1u);
  EXPECT_EQ(hall.core.next_deadline(), kNever);
}

TEST(Learner, GivesUpAWorkerThatDoesNotRead) {
  Hall hall;
  const ConnId conn = hall.join();
  const std::vector<std::byte> message(kApplicationBytesMax);
  for (int i = 0; i < 15; ++i) hall.core.send_message(WorkerId{1}, message, hall.now);
  hall.core.on_sent(conn, 15 * message.size(), hall.now);  // it has read them all
  for (int i = 0; i < 15; ++i) hall.core.send_message(WorkerId{1}, message, hall.now);
  hall.take();
  EXPECT_TRUE(hall.all<act::Lost>().empty());
  hall.core.send_message(WorkerId{1}, message, hall.now);
  hall.take();
  EXPECT_EQ(hall.all<act::Lost>().size(), 1u);
}

TEST(Learner, TrustsOnlyAcknowledgementsThatCanBeTrue) {
  Hall hall;
  const ConnId conn = hall.join();
  hall.tell(conn, Ack{Version{4}, {}});
  ASSERT_EQ(hall.all<act::Lost>().size(), 1u);
  EXPECT_THAT(hall.all<act::Lost>()[0].reason, HasSubstr("not published"));
}

TEST(Learner, RefusesBadPublications) {
  Hall hall;
  ASSERT_TRUE(hall.core.publish(prepared(3, {}, 10), hall.now).has_value());
  EXPECT_EQ(hall.core.publish(prepared(3, {}, 10), hall.now).error().code, Code::kInvalid);
  EXPECT_EQ(hall.core.publish(prepared(5, 4, 10), hall.now).error().code, Code::kInvalid);  // unknown base
  EXPECT_EQ(hall.core.provide_snapshot(prepared(4, {}, 10), hall.now).error().code, Code::kInvalid);
  EXPECT_TRUE(hall.core.publish(prepared(4, 3, 10), hall.now).has_value());
}

TEST(Learner, DemotesAParentWhoseEdgesKeepFailing) {
  Hall hall(8);  // one chain
  for (int i = 0; i < 3; ++i) hall.join();
  const auto chain = hall.core.topology().chains.at(0);
  for (int i = 0; i < 3; ++i) hall.tell(ConnId{2 * chain[1].value}, EdgeFailed{chain[0], "refused"});
  EXPECT_THAT(hall.core.topology().chains.at(0), ElementsAre(chain[1], chain[2], chain[0]));
}

}  // namespace
}  // namespace echoline::overlay

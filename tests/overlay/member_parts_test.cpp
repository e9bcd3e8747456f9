// Parts of publications that a worker's application gets while they arrive.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/overlay/member.hpp"

namespace echoline::overlay {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using testing::SizeIs;

MemberConfig with_parts(Bytes unread_max = {1 << 20}) {
  MemberConfig c = config();
  c.parts_unread_max = unread_max;
  return c;
}

TEST(MemberParts, DeliversPartsOfTheFirstSnapshot) {
  Member m(with_parts());
  const Made early = make(delta(1, 0), 3500), first = make(full(1), 3500), other = make(full(2), 3500);
  m.deliver_control(m.parent, early.opening);
  m.deliver_frame(m.parent, early.chunk(0));
  EXPECT_THAT(m.all<act::DeliverPart>(), IsEmpty()) << "its base is missing";
  m.deliver_control(m.parent, first.opening);
  m.deliver_control(m.parent, other.opening);
  for (std::size_t i = 0; i < 3; ++i) {
    m.deliver_frame(m.parent, first.chunk(i));
    m.deliver_frame(m.parent, other.chunk(i));
  }
  std::vector<std::byte> delivered_bytes;
  for (const auto& p : m.all<act::DeliverPart>()) {
    EXPECT_EQ(p.part.id, first.id) << "one at a time";
    EXPECT_EQ(p.part.base, std::nullopt);
    EXPECT_EQ(p.part.offset, delivered_bytes.size());
    delivered_bytes.insert(delivered_bytes.end(), p.part.bytes.bytes().begin(), p.part.bytes.bytes().end());
  }
  EXPECT_EQ(delivered_bytes.size(), 3072u);
  m.deliver_frame(m.parent, first.chunk(3));
  m.deliver_control(m.parent, first.closing);
  EXPECT_THAT(m.delivered(), ElementsAre(full(1)));
}

TEST(MemberParts, DeliversPartsOfALaterSnapshot) {
  Member m(with_parts());
  m.deliver_publication(make(full(3), 3500));
  m.actions.clear();
  const auto part_versions = [&] {  // the version of every delivered part, in order
    std::vector<std::uint64_t> versions;
    std::map<PublicationId, std::uint64_t> bytes;
    for (const auto& p : m.all<act::DeliverPart>()) {
      EXPECT_EQ(p.part.offset, std::exchange(bytes[p.part.id], p.part.offset + p.part.bytes.size()));
      versions.push_back(p.part.version.value);
    }
    return versions;
  };
  const Made old = make(full(2), 3500), ahead = make(full(7), 3500), next = make(delta(4, 3), 3500);
  m.deliver_control(m.parent, old.opening);
  m.deliver_frame(m.parent, old.chunk(0));
  EXPECT_THAT(part_versions(), IsEmpty()) << "the member has a later version";
  m.deliver_control(m.parent, ahead.opening);
  m.deliver_frame(m.parent, ahead.chunk(0));
  m.deliver_control(m.parent, next.opening);
  for (std::size_t i = 0; i < 4; ++i) m.deliver_frame(m.parent, next.chunk(i));
  m.deliver_frame(m.parent, ahead.chunk(1));
  EXPECT_THAT(part_versions(), ElementsAre(7, 4, 4, 4, 4, 7)) << "the parts of both, interleaved";
  m.deliver_control(m.parent, next.closing);
  m.deliver_frame(m.parent, ahead.chunk(2));
  m.deliver_frame(m.parent, ahead.chunk(3));
  EXPECT_THAT(part_versions(), ElementsAre(7, 4, 4, 4, 4, 7, 7, 7)) << "the delta does not restart the snapshot";
  m.deliver_control(m.parent, ahead.closing);
  EXPECT_THAT(m.delivered(), ElementsAre(delta(4, 3), full(7)));
}

TEST(MemberParts, DeliversNoMorePartsThanTheApplicationReads) {
  Member m(with_parts(Bytes{2048}));
  const Made first = make(full(1), 7500);
  const auto part_count = [&] { return m.all<act::DeliverPart>().size(); };
  m.deliver_control(m.parent, first.opening);
  for (std::size_t i = 0; i < 5; ++i) m.deliver_frame(m.parent, first.chunk(i));
  EXPECT_EQ(part_count(), 2u);
  m.core.on_parts_consumed(1024);
  m.take();
  EXPECT_EQ(part_count(), 3u);
  m.core.on_parts_consumed(std::uint64_t{1} << 40);
  m.take();
  EXPECT_EQ(part_count(), 5u) << "every received chunk";
  for (std::size_t i = 5; i < 8; ++i) m.deliver_frame(m.parent, first.chunk(i));
  m.core.on_parts_consumed(1024);
  m.take();
  EXPECT_EQ(part_count(), 6u);
  m.deliver_control(m.parent, first.closing);
  EXPECT_THAT(m.delivered(), ElementsAre(full(1)));
  m.core.on_parts_consumed(2048);
  m.take();
  EXPECT_EQ(part_count(), 6u) << "the application has the whole publication";
}

// The member reads from disk only the chunks that left memory before the application read them.
TEST(MemberParts, DeliversPartsFromDisk) {
  MemberConfig c = with_parts(Bytes{1024});
  c.store = {Bytes{3000}, Bytes{1 << 20}, true};
  Member m(c);
  const Made first = make(full(1), 7500);
  const auto part_count = [&] { return m.all<act::DeliverPart>().size(); };
  m.deliver_control(m.parent, first.opening);
  for (std::size_t i = 0; i < 5; ++i) {
    m.deliver_frame(m.parent, first.chunk(i));
    m.core.on_spooled(first.id, static_cast<std::uint32_t>(i), ok(), m.now);
  }
  EXPECT_EQ(part_count(), 1u);
  EXPECT_THAT(m.all<act::ReadChunk>(), IsEmpty()) << "the application has not asked yet";
  std::vector<std::byte> all;
  const Slice payload(first.payload);
  for (int i = 0; i < 20; ++i) {
    for (const auto& p : m.all<act::DeliverPart>()) {
      EXPECT_EQ(p.part.offset, all.size());
      all.insert(all.end(), p.part.bytes.bytes().begin(), p.part.bytes.bytes().end());
      m.core.on_parts_consumed(p.part.bytes.size());
    }
    const auto requests = m.all<act::ReadChunk>();
    m.actions.clear();
    for (const act::ReadChunk& request : requests)
      m.core.on_chunk_read(request.publication, request.chunk, payload.part(request.offset, request.length), m.now);
    m.take();
  }
  EXPECT_THAT(all, SizeIs(5 * 1024));
  EXPECT_TRUE(std::ranges::equal(all, std::span(first.payload).first(all.size())));
}

TEST(MemberParts, DeliversNothingOfSnapshotsThatDoNotRepair) {
  Member m(with_parts());
  m.deliver_publication(make(full(2), 3500));
  m.deliver_publication(make(delta(3, 2), 3500));
  m.core.installed(Version{2}, digest_of(2), m.now);
  m.core.installed(Version{3}, digest_of(3), m.now);
  m.deliver_publication(make(delta(4, 3), 3500));
  m.core.install_failed(Version{4}, "it does not fit", m.now);
  m.take();
  m.actions.clear();
  const Made before = make(full(3), 3500), repairs = make(full(4), 3500);
  m.deliver_control(m.parent, before.opening);
  m.deliver_frame(m.parent, before.chunk(0));
  EXPECT_THAT(m.all<act::DeliverPart>(), IsEmpty());
  m.deliver_control(m.parent, repairs.opening);
  m.deliver_frame(m.parent, repairs.chunk(0));
  EXPECT_THAT(m.all<act::DeliverPart>(), SizeIs(1));
}

TEST(MemberParts, DeliversPartsOfTheNextDelta) {
  Member m(with_parts());
  const auto delta_bytes = [&] {  // the delivered bytes of deltas, by version
    std::map<std::uint64_t, std::vector<std::byte>> bytes;
    for (const auto& p : m.all<act::DeliverPart>()) {
      if (!p.part.base) continue;
      auto& of_version = bytes[p.part.version.value];
      EXPECT_EQ(p.part.offset, of_version.size());
      EXPECT_EQ(p.part.base->value + 1, p.part.version.value);
      of_version.insert(of_version.end(), p.part.bytes.bytes().begin(), p.part.bytes.bytes().end());
    }
    return bytes;
  };
  const Made first = make(delta(1, 0), 3500), second = make(delta(2, 1), 3500);
  m.deliver_control(m.parent, first.opening);
  m.deliver_frame(m.parent, first.chunk(0));  // its base is missing
  m.deliver_publication(make(full(0), 3000));
  EXPECT_THAT(delta_bytes(), IsEmpty());
  m.deliver_frame(m.parent, first.chunk(2));
  EXPECT_EQ(delta_bytes().at(1).size(), 1024u) << "only up to the missing chunk";
  m.deliver_control(m.parent, second.opening);
  m.deliver_frame(m.parent, second.chunk(0));
  EXPECT_FALSE(delta_bytes().contains(2));
  m.deliver_frame(m.parent, first.chunk(1));
  EXPECT_EQ(delta_bytes().at(1).size(), 3072u);
  m.deliver_frame(m.parent, first.chunk(1));
  m.deliver_frame(m.parent, first.chunk(3));
  EXPECT_EQ(delta_bytes().at(1), first.payload);
  EXPECT_THAT(m.delivered(), ElementsAre(full(0))) << "the publication is not closed";
  m.deliver_control(m.parent, first.closing);
  EXPECT_THAT(m.delivered(), ElementsAre(full(0), delta(1, 0)));
  EXPECT_EQ(m.all<act::DeliverPublication>().back().publication.id, first.id);
  for (std::size_t i = 1; i < second.chunks.size(); ++i) m.deliver_frame(m.parent, second.chunk(i));
  EXPECT_EQ(delta_bytes().at(2), second.payload);
  // A delta on another version 2 is useless here.
  m.deliver_control(m.parent, second.closing);
  const Made other = make(delta(3, 2), 3500, {.base_digest = digest_of(99)});
  m.deliver_control(m.parent, other.opening);
  m.deliver_frame(m.parent, other.chunk(0));
  EXPECT_FALSE(delta_bytes().contains(3));

  Member without_parts;
  without_parts.deliver_publication(make(full(0), 3000));
  without_parts.deliver_publication(make(delta(1, 0), 3500));
  EXPECT_THAT(without_parts.all<act::DeliverPart>(), IsEmpty());
}

}  // namespace
}  // namespace echoline::overlay

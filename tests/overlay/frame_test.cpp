// The framed stream: it may be cut anywhere, and every length is checked before use.
#include "overlay/wire/frame.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "overlay/wire/bytes.hpp"
#include "overlay/wire/control.hpp"
#include "tests/overlay/made.hpp"

namespace echoline::overlay {
namespace {

using testing::HasSubstr;
using Bytes_ = std::vector<std::byte>;

Bytes_ copy_of(const Slice& slice) { return {slice.bytes().begin(), slice.bytes().end()}; }

void append(Bytes_& to, std::span<const std::byte> bytes) { to.insert(to.end(), bytes.begin(), bytes.end()); }

// Feeds `stream` to the decoder, at most `piece` bytes at a time.
Result<std::vector<Frame>> decode(FrameDecoder& decoder, std::span<const std::byte> stream, std::size_t piece) {
  std::vector<Frame> frames;
  while (!stream.empty()) {
    const std::span<std::byte> room = decoder.room();
    const std::size_t n = std::min({piece, room.size(), stream.size()});
    ECHO_CHECK(n > 0);
    std::memcpy(room.data(), stream.data(), n);
    stream = stream.subspan(n);
    ECHO_TRY(decoder.advance(n));
    if (auto frame = decoder.take()) frames.push_back(std::move(*frame));
  }
  return frames;
}

Result<std::vector<Frame>> decode(std::span<const std::byte> stream, bool admitted = true,
                                  std::size_t piece = SIZE_MAX) {
  FrameDecoder decoder;
  if (admitted) decoder.admit();
  return decode(decoder, stream, piece);
}

std::string refusal(std::span<const std::byte> stream, bool admitted = true) {
  const auto frames = decode(stream, admitted);
  if (frames) return "accepted";
  EXPECT_EQ(frames.error().code, Code::kCorrupt);
  return frames.error().detail;
}

Bytes_ chunk_frame(const Frame& chunk) {
  Bytes_ frame = copy_of(chunk.head);
  append(frame, chunk.body.bytes());
  return frame;
}

Bytes_ header(std::uint16_t magic, std::uint8_t type, std::uint8_t flags, std::uint32_t length) {
  Bytes_ h(kFrameHeaderBytes);
  put_le(h.data(), magic);
  put_le(h.data() + 2, type);
  put_le(h.data() + 3, flags);
  put_le(h.data() + 4, length);
  return h;
}

TEST(Frame, BytesAreAsDocumented) {
  EXPECT_EQ(encode_frame(FrameType::kApplication, Bytes_{std::byte{7}}),
            (Bytes_{std::byte{0x02}, std::byte{0xEC}, std::byte{2}, {}, std::byte{1}, {}, {}, {}, std::byte{7}}));
  ChunkHead head;
  head.publication[0] = std::byte{0x11};
  head.publication[15] = std::byte{0x22};
  head.index = 0x03020100;
  head.length = 0x00040506;
  head.seal_first = 0x03020100;
  head.seal_count = 2;
  head.signature.bytes[0] = std::byte{0x33};
  head.signature.bytes[63] = std::byte{0x44};
  head.path.resize(1);
  head.path[0][31] = std::byte{0x55};
  Bytes_ expected(8 + 96 + 32);
  const auto put = [&](std::size_t at, std::initializer_list<int> bytes) {
    for (const int b : bytes) expected[at++] = static_cast<std::byte>(b);
  };
  put(0, {0x02, 0xEC, 3, 0, 0x86, 0x05, 0x04, 0x00});  // body: 96 + 32 + 0x040506
  put(8, {0x11});
  put(8 + 15, {0x22, 0x00, 0x01, 0x02, 0x03, 0x06, 0x05, 0x04, 0x00, 0x00, 0x01, 0x02, 0x03, 2, 0, 1, 0, 0x33});
  put(8 + 95, {0x44});
  put(8 + 96 + 31, {0x55});
  EXPECT_EQ(encode_chunk_head(head), expected);
  EXPECT_EQ(application_header(0x0201, true),
            (Bytes_{std::byte{0x02}, std::byte{0xEC}, std::byte{2}, std::byte{1}, std::byte{1}, std::byte{2}, {}, {}}));
}

TEST(Frame, TheFramesDoNotDependOnWhereTheStreamIsCut) {
  const Made small = make(delta(6, 5), 1), large = make(full(5), 5000);
  Bytes_ stream;
  append(stream, encode_frame(FrameType::kControl, random_bytes(1, 0)));
  append(stream, encode_frame(FrameType::kControl, random_bytes(2, 300)));
  for (std::size_t i = 0; i < large.chunks.size(); ++i) append(stream, chunk_frame(large.chunk(i)));
  append(stream, encode_frame(FrameType::kApplication, random_bytes(3, 60'000)));
  append(stream, chunk_frame(small.chunk(0)));
  for (const std::size_t piece : {std::size_t{1}, std::size_t{7}, std::size_t{8}, std::size_t{40}, std::size_t{999},
                                  std::size_t{65536}, stream.size()}) {
    SCOPED_TRACE(piece);
    const auto frames = decode(stream, true, piece);
    ASSERT_TRUE(frames.has_value()) << frames.error().message();
    ASSERT_EQ(frames->size(), 2 + large.chunks.size() + 2);
    EXPECT_TRUE((*frames)[0].body.empty());
    EXPECT_EQ(copy_of((*frames)[1].body), random_bytes(2, 300));
    for (std::size_t i = 0; i < large.chunks.size(); ++i) {
      const Frame& frame = (*frames)[2 + i];
      EXPECT_EQ(frame.type, FrameType::kChunk);
      EXPECT_EQ(copy_of(frame.head), copy_of(large.chunk(i).head));
      EXPECT_EQ(copy_of(frame.body), copy_of(large.chunks[i].data));
      EXPECT_EQ(frame.chunk.publication, large.id);
      EXPECT_EQ(frame.chunk.index, i);
      EXPECT_EQ(frame.chunk.length, large.chunks[i].data.size());
      EXPECT_EQ(frame.chunk.seal_first, large.chunks[i].head.seal_first);
      EXPECT_EQ(frame.chunk.path, large.chunks[i].head.path);
      EXPECT_EQ(frame.chunk.signature, large.chunks[i].head.signature);
    }
    EXPECT_EQ(copy_of(frames->end()[-2].body), random_bytes(3, 60'000));
    EXPECT_EQ(frames->back().chunk.seal_count, 1u);
    EXPECT_TRUE(frames->back().chunk.path.empty());
  }
}

TEST(Frame, NoFrameFollowsOneThatWasNotTaken) {
  FrameDecoder decoder;
  const Bytes_ frame = encode_frame(FrameType::kControl, random_bytes(1, 20));
  for (std::size_t done = 0; done < frame.size();) {
    const auto room = decoder.room();
    ASSERT_FALSE(room.empty());
    ASSERT_FALSE(decoder.take().has_value());
    std::memcpy(room.data(), frame.data() + done, 1);
    ASSERT_TRUE(decoder.advance(1).has_value());
    ++done;
  }
  EXPECT_TRUE(decoder.room().empty());
  ASSERT_TRUE(decoder.take().has_value());
  EXPECT_EQ(decoder.room().size(), kFrameHeaderBytes);
  EXPECT_EQ(decoder.buffered_bytes(), 0u);
}

TEST(Frame, LimitsAreCheckedBeforeABodyIsAwaited) {
  constexpr std::uint16_t kMagic = 0xEC02;
  const auto chunk_max = static_cast<std::uint32_t>(kChunkHeadBytesMax + kChunkBytesMax);
  EXPECT_THAT(refusal(header(0x4547, 1, 0, 0)), HasSubstr("expected magic 0xec02, found 0x4547"));
  EXPECT_THAT(refusal(header(0xEC01, 1, 0, 0)), HasSubstr("not an echoline node of this version"));
  EXPECT_THAT(refusal(header(kMagic, 0, 0, 0)), HasSubstr("type 1 to 3, found 0"));
  EXPECT_THAT(refusal(header(kMagic, 4, 0, 0)), HasSubstr("type 1 to 3, found 4"));
  EXPECT_THAT(refusal(header(kMagic, 1, 1, 8)), HasSubstr("flags 0, found 0x01"));
  EXPECT_THAT(refusal(header(kMagic, 2, 1, 0)), HasSubstr("flags 0, found 0x01")) << "a continuation without a message";
  EXPECT_THAT(refusal(header(kMagic, 2, 3, 8)), HasSubstr("flags 0, found 0x03"));
  EXPECT_THAT(refusal(header(kMagic, 1, 0, kControlBytesMax + 1)), HasSubstr("262144 bytes, found 262145"));
  EXPECT_THAT(refusal(header(kMagic, 2, 0, kApplicationBytesMax + 1)), HasSubstr("65536 bytes, found 65537"));
  EXPECT_THAT(refusal(header(kMagic, 3, 0, chunk_max + 1)), HasSubstr("found " + std::to_string(chunk_max + 1)));
  EXPECT_THAT(refusal(header(kMagic, 3, 0, kChunkHeadFixedBytes)), HasSubstr("more than 96 bytes, found 96"));
  EXPECT_THAT(refusal(header(kMagic, 1, 0, 0xFFFFFFFF)), HasSubstr("found 4294967295"));
  for (const auto& [type, most] : {std::pair(1, std::uint32_t{kControlBytesMax}),
                                   std::pair(2, std::uint32_t{kApplicationBytesMax}), std::pair(3, chunk_max)})
    EXPECT_EQ(refusal(header(kMagic, static_cast<std::uint8_t>(type), 0, most)), "accepted");
}

TEST(Frame, AnUnknownPeerMayOnlyIntroduceItself) {
  EXPECT_EQ(refusal(encode_frame(FrameType::kControl, random_bytes(1, kPendingPeerBytesMax)), false), "accepted");
  EXPECT_THAT(refusal(encode_frame(FrameType::kControl, random_bytes(1, kPendingPeerBytesMax + 1)), false),
              HasSubstr("4096 bytes before its sender is admitted, found 4097"));
  EXPECT_THAT(refusal(encode_frame(FrameType::kApplication, random_bytes(1, 10)), false), HasSubstr("not admitted"));
  EXPECT_THAT(refusal(make(full(0), 10).chunk(0).head.bytes(), false), HasSubstr("not admitted"));
  // After the introduction, the next frame may be of any kind.
  FrameDecoder decoder;
  ASSERT_TRUE(decode(decoder, encode_frame(FrameType::kControl, random_bytes(1, 100)), SIZE_MAX).has_value());
  decoder.admit();
  EXPECT_TRUE(decode(decoder, encode_frame(FrameType::kControl, random_bytes(1, 5000)), SIZE_MAX).has_value());
  EXPECT_TRUE(decode(decoder, chunk_frame(make(full(0), 10).chunk(0)), SIZE_MAX).has_value());
}

TEST(Frame, MemoryGrowsOnlyWithBytesThatArrived) {
  FrameDecoder decoder;
  decoder.admit();
  const Bytes_ start = header(0xEC02, 1, 0, kControlBytesMax);
  ASSERT_TRUE(decode(decoder, start, SIZE_MAX).has_value());
  for (std::size_t came = 0; came < kControlBytesMax - 64 * 1024;) {
    const std::size_t room = decoder.room().size();
    EXPECT_LE(room, 64 * 1024u) << came;
    ASSERT_TRUE(decoder.advance(room).has_value());
    came += room;
    EXPECT_EQ(decoder.buffered_bytes(), came);
  }
}

// A chunk frame with a changed head. Its body has the length that the frame states.
std::string chunk_refusal(std::size_t at, std::uint32_t value, std::size_t width) {
  Bytes_ frame = chunk_frame(make(full(0), 5 * 1024).chunk(3));  // a seal of 5 chunks has a path of 3 hashes
  for (std::size_t i = 0; i < width; ++i) frame[kFrameHeaderBytes + at + i] = static_cast<std::byte>(value >> (8 * i));
  return refusal(frame);
}

TEST(Frame, AChunkHeadMustNotContradictItself) {
  EXPECT_EQ(chunk_refusal(16, 4, 4), "accepted");  // another index of the same seal: its proof will fail
  EXPECT_THAT(chunk_refusal(16, 5, 4), HasSubstr("chunk 5 is outside of its seal of 5 chunks from 0 on"));
  EXPECT_THAT(chunk_refusal(16, kChunksMax, 4), HasSubstr("index below 1048576, found 1048576"));
  EXPECT_THAT(chunk_refusal(16, 0xFFFFFFFF, 4), HasSubstr("index below"));
  EXPECT_THAT(chunk_refusal(20, 0, 4), HasSubstr("cannot hold"));
  EXPECT_THAT(chunk_refusal(20, 1023, 4), HasSubstr("cannot hold a head of 192 and a chunk of 1023 bytes"));
  EXPECT_THAT(chunk_refusal(20, kChunkBytesMax + 1, 4), HasSubstr("cannot hold"));
  EXPECT_THAT(chunk_refusal(20, 0xFFFFFFFF, 4), HasSubstr("cannot hold"));
  EXPECT_THAT(chunk_refusal(24, 4, 4), HasSubstr("chunk 3 is outside of its seal of 5 chunks from 4 on"));
  EXPECT_THAT(chunk_refusal(24, 0xFFFFFFFF, 4), HasSubstr("outside"));
  EXPECT_THAT(chunk_refusal(28, 0, 2), HasSubstr("seal of 0 chunks"));
  EXPECT_THAT(chunk_refusal(28, kSealChunksMax + 1, 2), HasSubstr("seal of 65 chunks"));
  EXPECT_THAT(chunk_refusal(28, 4, 2), HasSubstr("expected a path of 2 hashes in a seal of 4 chunks, found 3"));
  EXPECT_THAT(chunk_refusal(30, 6, 2), HasSubstr("expected a path of 3 hashes in a seal of 5 chunks, found 6"));
  EXPECT_THAT(chunk_refusal(30, 0xFFFF, 2), HasSubstr("found 65535"));
}

TEST(Frame, AdoptsBytesThatAreInMemoryAlready) {
  const Made made = make(full(0), 3000);
  FrameDecoder decoder;
  decoder.admit();
  EXPECT_EQ(decoder.awaiting_chunk(), nullptr);
  EXPECT_FALSE(decoder.adopt(made.chunks[0].data));
  for (std::size_t i = 0; i < 3; ++i) {
    const Frame chunk = made.chunk(i);
    ASSERT_TRUE(decode(decoder, chunk.head.bytes(), 50).has_value());
    ASSERT_NE(decoder.awaiting_chunk(), nullptr);
    EXPECT_EQ(decoder.awaiting_chunk()->index, i);
    EXPECT_FALSE(decoder.adopt(chunk.body.part(1, chunk.body.size() - 1)));  // of another length
    ASSERT_TRUE(decoder.adopt(chunk.body));
    const auto frame = decoder.take();
    ASSERT_TRUE(frame.has_value());
    EXPECT_EQ(frame->body.data(), chunk.body.data());  // not a copy
    EXPECT_EQ(copy_of(frame->head), copy_of(chunk.head));
    EXPECT_EQ(frame->chunk.index, i);
  }
  ASSERT_TRUE(decode(decoder, made.chunk(0).head.bytes(), SIZE_MAX).has_value());
  ASSERT_TRUE(decoder.advance(0).has_value());
  decoder.room()[0] = {};
  ASSERT_TRUE(decoder.advance(1).has_value());
  EXPECT_EQ(decoder.awaiting_chunk(), nullptr);
  EXPECT_FALSE(decoder.adopt(made.chunks[0].data));  // its bytes have begun to arrive
}

TEST(Frame, KeysAndEndpointsAsText) {
  EXPECT_EQ(to_text(delta(7, 6)), "version 7 on 6");
  EXPECT_EQ(to_text(full(7)), "version 7 (full)");
  EXPECT_EQ(to_text(Endpoint{"127.0.0.1", 7070}), "127.0.0.1:7070");
  EXPECT_EQ(to_text(Endpoint{"::1", 7070}), "[::1]:7070");
}

TEST(Payload, PiecesAndTheWhole) {
  EXPECT_EQ(Payload().bytes()->size(), 0u);
  const Slice one(random_bytes(1, 100)), two(random_bytes(2, 50));
  EXPECT_EQ(Payload({one}).bytes()->data(), one.data());  // no copy
  const Payload both({one, two});
  EXPECT_EQ(both.size(), 150u);
  const Slice whole = *both.bytes();
  EXPECT_EQ(copy_of(whole.part(0, 100)), copy_of(one));
  EXPECT_EQ(copy_of(whole.part(100, 50)), copy_of(two));
  // The chunks of a learner's publication may follow each other in one file.
  const Payload parts({whole.part(0, 70), whole.part(70, 80)});
  EXPECT_EQ(parts.bytes()->data(), whole.data());  // no copy
  EXPECT_EQ(parts.bytes()->size(), 150u);
  const Payload with_gap({whole.part(0, 70), whole.part(71, 79)});
  EXPECT_NE(with_gap.bytes()->data(), whole.data());
  EXPECT_EQ(with_gap.bytes()->size(), 149u);
}

}  // namespace
}  // namespace echoline::overlay

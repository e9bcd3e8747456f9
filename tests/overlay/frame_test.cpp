#include "overlay/frame.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "base/random.hpp"
#include "overlay/control.hpp"

namespace echoline::overlay {
namespace {

using testing::HasSubstr;
using Bytes_ = std::vector<std::byte>;

Bytes_ body(std::size_t n) {
  Random random(n);
  Bytes_ bytes(n);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random.next());
  return bytes;
}

struct Decoded {
  FrameType type;
  Bytes_ body;
  ChunkHeader chunk;
};

// Decodes `stream` fed in pieces of `piece` bytes.
Result<std::vector<Decoded>> decode(const Bytes_& stream, std::size_t piece, bool admitted = true) {
  FrameDecoder decoder;
  if (admitted) decoder.admit();
  std::vector<Decoded> frames;
  for (std::size_t at = 0; at < stream.size(); at += piece) {
    decoder.feed(std::span(stream).subspan(at, std::min(piece, stream.size() - at)));
    for (;;) {
      ECHO_ASSIGN(const auto frame, decoder.next());
      if (!frame) break;
      frames.push_back({frame->type, Bytes_(frame->body.begin(), frame->body.end()), frame->chunk});
    }
  }
  return frames;
}

Bytes_ chunk_frame(const ChunkHeader& header, const Bytes_& bytes) {
  Bytes_ frame = encode_chunk_header(header);
  frame.insert(frame.end(), bytes.begin(), bytes.end());
  return frame;
}

TEST(Frame, BytesAreAsDocumented) {
  const Bytes_ expected{std::byte{0x01},
                        std::byte{0xEC},
                        std::byte{3},
                        std::byte{1},  // magic, chunk, has base
                        std::byte{33},
                        {},
                        {},
                        {},  // body: 32 + 1
                        std::byte{9},
                        {},
                        {},
                        {},
                        {},
                        {},
                        {},
                        {},  // version
                        std::byte{8},
                        {},
                        {},
                        {},
                        {},
                        {},
                        {},
                        {},  // base
                        std::byte{2},
                        {},
                        {},
                        {},  // index
                        std::byte{1},
                        {},
                        {},
                        {},  // length
                        std::byte{0x88},
                        std::byte{0x77},
                        std::byte{0x66},
                        std::byte{0x55},
                        std::byte{0x44},
                        std::byte{0x33},
                        std::byte{0x22},
                        std::byte{0x11}};
  EXPECT_EQ(encode_chunk_header({{Version{9}, Version{8}}, 2, 1, 0x1122334455667788ull}), expected);
  EXPECT_EQ(encode_frame(FrameType::kApplication, Bytes_{std::byte{7}}),
            (Bytes_{std::byte{0x01}, std::byte{0xEC}, std::byte{2}, {}, std::byte{1}, {}, {}, {}, std::byte{7}}));
}

TEST(Frame, AnyCuttingOfTheStreamGivesTheSameFrames) {
  Bytes_ stream;
  const auto append = [&](const Bytes_& bytes) { stream.insert(stream.end(), bytes.begin(), bytes.end()); };
  append(encode_frame(FrameType::kControl, body(0)));
  append(encode_frame(FrameType::kControl, body(300)));
  append(chunk_frame({{Version{5}, {}}, 7, 1000, 42}, body(1000)));
  append(encode_frame(FrameType::kApplication, body(77)));
  append(chunk_frame({{Version{6}, Version{5}}, 0, 1, 43}, body(1)));
  for (const std::size_t piece :
       {std::size_t{1}, std::size_t{7}, std::size_t{8}, std::size_t{40}, std::size_t{999}, stream.size()}) {
    const auto frames = decode(stream, piece);
    ASSERT_TRUE(frames.has_value()) << frames.error().message();
    ASSERT_EQ(frames->size(), 5u) << piece;
    EXPECT_EQ((*frames)[1].body, body(300));
    EXPECT_EQ((*frames)[2].body, body(1000));
    EXPECT_EQ((*frames)[2].chunk.key, (PublicationKey{Version{5}, {}}));
    EXPECT_EQ((*frames)[2].chunk.index, 7u);
    EXPECT_EQ((*frames)[2].chunk.xxh3_64, 42u);
    EXPECT_EQ((*frames)[3].type, FrameType::kApplication);
    EXPECT_EQ((*frames)[4].chunk.key, (PublicationKey{Version{6}, Version{5}}));
  }
}

// A header of the given fields.
Bytes_ header(std::uint16_t magic, std::uint8_t type, std::uint8_t flags, std::uint32_t length) {
  Bytes_ h(8);
  std::memcpy(h.data(), &magic, 2);
  h[2] = std::byte{type};
  h[3] = std::byte{flags};
  std::memcpy(h.data() + 4, &length, 4);
  return h;
}

TEST(Frame, LimitsAreCheckedBeforeABodyIsAwaited) {
  struct Case {
    Bytes_ bytes;
    std::string expected;
  };
  const std::vector<Case> cases{
      {header(0x4547, 1, 0, 0), "expected magic 0xec01, found 0x4547"},
      {header(0xEC01, 0, 0, 0), "type 1 to 3, found 0"},
      {header(0xEC01, 4, 0, 0), "type 1 to 3, found 4"},
      {header(0xEC01, 1, 1, 0), "unknown flags"},
      {header(0xEC01, 3, 2, 100), "unknown flags"},
      {header(0xEC01, 1, 0, kControlBytesMax + 1), "announces 262145 bytes, the limit is 262144"},
      {header(0xEC01, 2, 0, kApplicationBytesMax + 1), "announces 4194305 bytes"},
      {header(0xEC01, 3, 0, kChunkBytesMax + 33), "announces 4194337 bytes"},
      {header(0xEC01, 3, 0, 32), "expected more than 32"},
      {header(0xEC01, 1, 0, 0xFFFFFFFF), "announces 4294967295 bytes"},
  };
  for (const Case& c : cases) {
    FrameDecoder decoder;
    decoder.admit();
    decoder.feed(c.bytes);
    const auto frame = decoder.next();
    ASSERT_FALSE(frame.has_value()) << c.expected;
    EXPECT_EQ(frame.error().code, Code::kCorrupt);
    EXPECT_THAT(frame.error().detail, HasSubstr(c.expected));
  }
}

TEST(Frame, MemoryGrowsOnlyWithBytesThatCame) {
  FrameDecoder decoder;
  decoder.admit();
  const Bytes_ start = header(0xEC01, 2, 0, kApplicationBytesMax);
  decoder.feed(start);
  ASSERT_TRUE(decoder.next().has_value());
  EXPECT_LE(decoder.buffered_bytes(), start.size());
}

TEST(Frame, AStrangerMayOnlyIntroduceItself) {
  const auto application = decode(encode_frame(FrameType::kApplication, body(10)), 100, false);
  ASSERT_FALSE(application.has_value());
  EXPECT_THAT(application.error().detail, HasSubstr("introduction"));
  EXPECT_TRUE(decode(encode_frame(FrameType::kControl, body(10)), 100, false).has_value());
}

TEST(Frame, ChunkHeaderMustAgreeWithItsFrame) {
  Bytes_ frame = chunk_frame({{Version{5}, Version{4}}, 0, 10, 1}, body(10));
  frame[8 + 20] = std::byte{9};  // length
  EXPECT_THAT(decode(frame, 100).error().detail, HasSubstr("says 9 bytes, the frame holds 10"));
  frame = chunk_frame({{Version{5}, Version{5}}, 0, 10, 1}, body(10));
  EXPECT_THAT(decode(frame, 100).error().detail, HasSubstr("base below version 5"));
  frame = chunk_frame({{Version{5}, {}}, 0, 10, 1}, body(10));
  frame[8 + 8] = std::byte{1};  // base of a full snapshot
  EXPECT_THAT(decode(frame, 100).error().detail, HasSubstr("names base 1"));
}

// ---- control messages ----

template <class T>
T round_trip(const T& message) {
  const Bytes_ frame = encode_control(message);
  const auto decoded = decode_control(std::span(frame).subspan(kFrameHeaderBytes));
  EXPECT_TRUE(decoded.has_value()) << (decoded ? "" : decoded.error().message());
  return decoded ? std::get<T>(*decoded) : T{};
}

TEST(Control, EveryMessageSurvivesTheWire) {
  const Hello hello = round_trip(Hello{"run", "offer-1", {"10.0.0.1", 7070}, BitRate{8e6}, {}});
  EXPECT_EQ(hello.name, "offer-1");
  EXPECT_EQ(hello.data, (Endpoint{"10.0.0.1", 7070}));
  EXPECT_EQ(hello.up, BitRate{8e6});
  EXPECT_EQ(hello.down, std::nullopt);
  EXPECT_EQ(round_trip(Welcome{WorkerId{3}, std::chrono::seconds(1), std::chrono::seconds(9), "x"}).learner_timeout,
            std::chrono::seconds(9));
  EXPECT_EQ(round_trip(Assign{kLearnerId, {"h", 1}}).parent, kLearnerId);
  Manifest manifest{{Version{2}, Version{1}}, {}, {}, 1'000'001, 65536};
  manifest.payload_digest[3] = std::byte{9};
  EXPECT_EQ(round_trip(manifest), manifest);
  EXPECT_EQ(manifest.chunk_count(), 16u);
  EXPECT_EQ(manifest.length_of(15), 1'000'001u - 15 * 65536u);
  ChunkSet some(70);
  some.insert(0);
  some.insert(69);
  PeerHello peer{"run",
                 WorkerId{4},
                 Version{9},
                 true,
                 {Version{7}, {{{Version{8}, Version{7}}, some}, {{Version{9}, {}}, ChunkSet::all(3)}}}};
  const PeerHello got = round_trip(peer);
  EXPECT_EQ(got.catch_up_to, Version{9});
  EXPECT_TRUE(got.full_only);
  EXPECT_EQ(got.have.position, Version{7});
  const ChunkSet& chunks = got.have.chunks.at({Version{8}, Version{7}});
  EXPECT_TRUE(chunks.contains(0) && chunks.contains(69) && !chunks.contains(1));
  EXPECT_EQ(chunks.count(), 2u);
  EXPECT_TRUE(got.have.chunks.at({Version{9}, {}}).complete());
  EXPECT_EQ(round_trip(ChunkRequest{{Version{1}, {}}, 5}).index, 5u);
  EXPECT_TRUE(round_trip(CannotServe{Version{1}, true}).behind);
  EXPECT_EQ(round_trip(EdgeFailed{WorkerId{1}, std::string(5000, 'r')}).reason.size(), kTextBytesMax);
  EXPECT_EQ(round_trip(Ack{Version{8}, manifest.payload_digest}).policy_digest, manifest.payload_digest);
  const Heartbeat beat = round_trip(Heartbeat{Version{0}, 1, 2, 3, 4, BitRate{5}, "app"});
  EXPECT_EQ(beat.version, Version{0});
  EXPECT_EQ(beat.chunks_corrupt, 4u);
  EXPECT_EQ(beat.application, "app");
  EXPECT_EQ(round_trip(Goodbye{"why"}).reason, "why");
}

TEST(Control, NonsenseIsRefused) {
  const auto refuse = [](const ControlMessage& message) {
    const Bytes_ frame = encode_control(message);
    const auto decoded = decode_control(std::span(frame).subspan(kFrameHeaderBytes));
    EXPECT_FALSE(decoded.has_value());
    return decoded ? std::string() : decoded.error().detail;
  };
  EXPECT_THAT(refuse(Hello{"r", "n", {"h", 0}, {}, {}}), HasSubstr("port from 1 to 65535, found 0"));
  EXPECT_THAT(refuse(Hello{"r", "n", {"h", 1}, BitRate{-1}, {}}), HasSubstr("positive rate"));
  EXPECT_THAT(refuse(Welcome{}), HasSubstr("without a worker id"));
  EXPECT_THAT(refuse(Manifest{{Version{1}, Version{1}}, {}, {}, 1, 65536}), HasSubstr("base below version 1"));
  EXPECT_THAT(refuse(Manifest{{Version{1}, {}}, {}, {}, 1, 1}), HasSubstr("found 1"));
  EXPECT_THAT(refuse(Manifest{{Version{1}, {}}, {}, {}, 1ull << 60, 65536}), HasSubstr("more than 524288 chunks"));
  EXPECT_THAT(decode_control(body(50)).error().detail, HasSubstr("50 bytes"));
  EXPECT_THAT(decode_control({}).error().detail, HasSubstr("unknown kind"));
}

TEST(ChunkSet, BitmapsAreChecked) {
  EXPECT_FALSE(ChunkSet::from_bytes(9, "x").has_value());
  EXPECT_FALSE(ChunkSet::from_bytes(9, std::string("\x00\x02", 2)).has_value());  // bit 9 of 9
  const auto set = ChunkSet::from_bytes(9, std::string("\x00\x01", 2));
  ASSERT_TRUE(set.has_value());
  EXPECT_TRUE(set->contains(8));
  EXPECT_EQ(ChunkSet::all(9).first_not_in(*set), 0u);
  EXPECT_EQ(set->first_not_in(ChunkSet::all(9)), std::nullopt);
  ChunkSet all = ChunkSet::all(128);
  all.erase(127);
  EXPECT_EQ(ChunkSet::all(128).first_not_in(all), 127u);
  EXPECT_FALSE(all.complete());
  EXPECT_TRUE(ChunkSet(0).complete());
}

}  // namespace
}  // namespace echoline::overlay

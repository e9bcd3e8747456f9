// Mutated streams: the decoder and the control decoder may refuse, but never crash, loop, or hold more than a frame.
#include <gtest/gtest.h>

#include "base/random.hpp"
#include "overlay/control.hpp"
#include "overlay/frame.hpp"

namespace echoline::overlay {
namespace {

std::vector<std::byte> corpus() {
  std::vector<std::byte> stream;
  const auto append = [&](const std::vector<std::byte>& bytes) {
    stream.insert(stream.end(), bytes.begin(), bytes.end());
  };
  append(encode_control(Hello{"run", "offer", {"10.0.0.1", 7070}, BitRate{8e6}, BitRate{8e6}}));
  append(encode_control(
      PeerHello{"run", WorkerId{4}, Version{9}, false, {Version{7}, {{{Version{8}, Version{7}}, ChunkSet(70)}}}}));
  append(encode_control(Manifest{{Version{2}, Version{1}}, {}, {}, 1'000'001, 65536}));
  append(encode_chunk_header({{Version{2}, Version{1}}, 3, 64, 77}));
  append(std::vector<std::byte>(64, std::byte{5}));
  append(encode_frame(FrameType::kApplication, std::vector<std::byte>(33, std::byte{6})));
  append(encode_control(Heartbeat{Version{3}, 1, 2, 3, 4, BitRate{5}, "app"}));
  append(encode_control(Ack{Version{3}, {}}));
  return stream;
}

void decode_all(std::span<const std::byte> stream, Random& random) {
  FrameDecoder decoder;
  decoder.admit();
  std::size_t frames = 0;
  while (!stream.empty()) {
    const std::size_t n = std::min<std::size_t>(stream.size(), 1 + random.below(200));
    decoder.feed(stream.first(n));
    stream = stream.subspan(n);
    for (;;) {
      const auto frame = decoder.next();
      if (!frame) {
        EXPECT_EQ(frame.error().code, Code::kCorrupt);
        return;
      }
      if (!*frame) break;
      ASSERT_LT(++frames, 100'000u);
      if ((*frame)->type == FrameType::kControl) (void)decode_control((*frame)->body).has_value();
    }
    ASSERT_LE(decoder.buffered_bytes(), kFrameHeaderBytes + kChunkHeaderBytes + kChunkBytesMax);
  }
}

TEST(FrameFuzz, MutatedStreams) {
  const std::vector<std::byte> seed = corpus();
  for (std::uint64_t round = 0; round < 20'000; ++round) {
    Random random(round);
    std::vector<std::byte> stream = seed;
    for (std::uint64_t i = random.below(6); i > 0; --i) {
      const std::size_t at = random.below(stream.size());
      switch (random.below(4)) {
        case 0:
          stream[at] = static_cast<std::byte>(random.next());
          break;
        case 1:
          stream[at] ^= static_cast<std::byte>(1u << random.below(8));
          break;
        case 2:
          stream.resize(at + 1);
          break;
        case 3:
          stream.insert(stream.begin() + static_cast<std::ptrdiff_t>(at), 1 + random.below(40),
                        static_cast<std::byte>(random.next()));
          break;
      }
    }
    decode_all(stream, random);
    if (HasFailure()) FAIL() << "round " << round;
  }
}

TEST(FrameFuzz, MutatedControlMessages) {
  const std::vector<std::byte> seed = corpus();
  for (std::uint64_t round = 0; round < 20'000; ++round) {
    Random random(round, 1);
    const std::size_t from = random.below(seed.size());
    std::vector<std::byte> body(seed.begin() + static_cast<std::ptrdiff_t>(from), seed.end());
    body.resize(random.below(body.size() + 1));
    if (!body.empty()) body[random.below(body.size())] = static_cast<std::byte>(random.next());
    const auto message = decode_control(body);
    // What is accepted can be written and read again.
    if (!message) continue;
    const std::vector<std::byte> frame = encode_control(*message);
    EXPECT_TRUE(decode_control(std::span(frame).subspan(kFrameHeaderBytes)).has_value()) << round;
  }
}

}  // namespace
}  // namespace echoline::overlay

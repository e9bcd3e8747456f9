// The overlay's fuzz target on a mutated corpus.
#include "tests/overlay/overlay_fuzz.hpp"

#include <gtest/gtest.h>

#include "overlay/state.hpp"
#include "overlay/wire/bytes.hpp"
#include "tests/fuzz/input.hpp"
#include "tests/overlay/relay_peer.hpp"

namespace echoline::overlay {
namespace {

using Bytes_ = std::vector<std::byte>;

void append(Bytes_& to, std::span<const std::byte> bytes) { to.insert(to.end(), bytes.begin(), bytes.end()); }

void run_target(FuzzKind kind, const Bytes_& bytes) {
  Bytes_ input{static_cast<std::byte>(kind)};
  append(input, bytes);
  test::fuzz_input(input);
}

void mutate(Bytes_& bytes, Random& random, std::size_t from = 0) {
  for (std::uint64_t i = 1 + random.below(4); i > 0 && bytes.size() > from; --i) {
    const std::size_t at = from + random.below(bytes.size() - from);
    const auto here = bytes.begin() + static_cast<std::ptrdiff_t>(at);
    switch (random.below(5)) {
      case 0:
        bytes[at] = static_cast<std::byte>(random.next());
        break;
      case 1:
        bytes[at] ^= static_cast<std::byte>(1u << random.below(8));
        break;
      case 2:
        bytes.resize(at + 1);
        break;
      case 3:
        bytes.insert(here, 1 + random.below(40), static_cast<std::byte>(random.next()));
        break;
      case 4:
        bytes.erase(here,
                    here + static_cast<std::ptrdiff_t>(1 + random.below(std::min<std::size_t>(40, bytes.size() - at))));
        break;
    }
  }
}

// Changes the body of a frame, and adjusts its length.
void mutate_frame(Bytes_& frame, Random& random) {
  mutate(frame, random, kFrameHeaderBytes);
  put_le<std::uint32_t>(frame.data() + 4, static_cast<std::uint32_t>(frame.size() - kFrameHeaderBytes));
}

PublicationId some_id() { return fuzz_publications()[1].id; }

// One message of every kind.
std::vector<ControlMessage> messages() {
  ChunkSet some;
  some.insert(1);
  some.insert(65);
  const Have have{
      Version{0}, {4, 5}, {{delta(1, 0), {some_id(), some, false}}, {full(2), {{}, ChunkSet::all(3), true}}}};
  Heartbeat beat;
  beat.installed = Installed{Version{0}, digest_of(0), 0};
  beat.forwarding_rate = BitRate{1e6};
  beat.progress = {{some_id(), {1, 2}}};
  beat.edges = {{WorkerId{2}, 1000, BitRate{1e6}, EdgeLimit::kPath, 2}};
  beat.holdings = {{full(0), 3000}, {delta(1, 0), 1500}};
  beat.application = "app";
  const auto now_ms = static_cast<std::uint64_t>(kMadeUnix_s * 1e3);
  const SignedBeacon beacon =
      sign(Beacon{"run", 0, 9, now_ms, now_ms + 60'000, Version{2}, {WorkerId{5}}}, made_key("authority"));
  std::vector<ControlMessage> all{
      Enrol{"echo1.token", "vast-7", made_key("w").public_key(), {}},
      Enrolled{WorkerId{3}, random_bytes(1, 100), random_bytes(2, 100)},
      Renew{made_key("w").public_key()},
      Renewed{random_bytes(3, 100)},
      Hello{"run", "w", {"10.0.0.1", 7070}, BitRate{8e6}, BitRate{8e6}, Installed{}},
      Welcome{WorkerId{7}, std::chrono::seconds(1), std::chrono::seconds(9), now_ms, "app"},
      Assign{2, {{WorkerId{4}, {"10.0.0.4", 1}, 2, true}, {kLearnerId, {"10.0.0.0", 1}, 1, false}}},
      DialChild{WorkerId{6}, {"10.0.0.6", 1}},
      NeedHelp{Version{2}, false, Version{0}},
      Help{{WorkerId{6}, {"10.0.0.6", 1}, 1, false}, Version{2}, true},
      beacon,
      PeerHello{"run", 0, {}, false, have},
      PeerHello{"run", 0, Version{2}, true, {}, made_grant(9, 7, {.catch_up_to = Version{2}, .full_only = true})},
      made_grant(9, 7, {.stripes = 4, .mask = 5}),
      Release{WorkerId{9}, now_ms},
      Notice{"text"},
      Return{made_key("w").public_key(), {}},
      have,
      MoreStreams{4},
      ChunkRequest{some_id(), 1},
      CannotServe{Version{2}, true},
      EdgeStatus{beacon, beat.progress},
      EdgeFailed{WorkerId{2}, EdgeTroubleKind::kUnreachable, "why"},
      Poisoned{WorkerId{2}, some_id(), 1},
      Installed{Version{2}, digest_of(2), 0},
      beat,
      Draining{},
      Goodbye{"why"},
      Trouble{"no room"}};
  for (const Made& made : fuzz_publications()) {
    all.push_back(made.opening);
    all.push_back(made.closing);
  }
  return all;
}

std::vector<Bytes_> message_frames() {
  std::vector<Bytes_> frames;
  for (const ControlMessage& message : messages()) frames.push_back(encode_control(message));
  return frames;
}

// The frames of the publications, and of forged ones with the same names.
std::vector<Bytes_> publication_frames(bool with_forged) {
  std::vector<Bytes_> frames;
  std::vector<Made> all = fuzz_publications();
  if (with_forged) {
    all.push_back(make(full(0), 3000, {.key = "mallory", .seed = 1}));
    all.push_back(make(delta(1, 0), 1500, {.run_id = "other", .seed = 1}));
  }
  for (const Made& made : all) {
    frames.push_back(encode_control(made.opening));
    for (std::size_t i = 0; i < made.chunks.size(); ++i) {
      const Frame chunk = made.chunk(i);
      Bytes_& frame = frames.emplace_back(chunk.head.bytes().begin(), chunk.head.bytes().end());
      append(frame, chunk.body.bytes());
    }
    frames.push_back(encode_control(made.closing));
  }
  return frames;
}

// Some of the frames, in some order, a few of them changed.
Bytes_ shuffled(std::vector<Bytes_> frames, Random& random, std::uint64_t options) {
  Bytes_ stream{static_cast<std::byte>(options)};
  const bool ordered = random.below(2) == 0;
  if (ordered) {
    for (std::uint64_t i = random.below(4); i > 0; --i)
      frames.insert(frames.begin() + static_cast<std::ptrdiff_t>(random.below(frames.size())),
                    frames[random.below(frames.size())]);
    for (std::uint64_t i = random.below(4); i > 0; --i) mutate_frame(frames[random.below(frames.size())], random);
    for (const Bytes_& frame : frames) append(stream, frame);
  } else {
    for (std::uint64_t i = 1 + random.below(2 * frames.size()); i > 0; --i) {
      Bytes_ frame = frames[random.below(frames.size())];
      if (random.below(4) == 0) mutate_frame(frame, random);
      append(stream, frame);
    }
  }
  if (random.below(8) == 0) mutate(stream, random, 1);
  return stream;
}

template <class Round>
void rounds(std::uint64_t count, Round&& round) {
  for (std::uint64_t i = 0; i < count; ++i) {
    SCOPED_TRACE(i);
    Random random(i);
    round(random);
    if (testing::Test::HasFailure()) FAIL();
  }
}

TEST(OverlayFuzz, Streams) {
  std::vector<Bytes_> frames = message_frames();
  for (const Bytes_& frame : publication_frames(false)) frames.push_back(frame);
  frames.push_back(encode_frame(FrameType::kApplication, random_bytes(1, 33)));
  rounds(10'000, [&](Random& random) { run_target(FuzzKind::kStream, shuffled(frames, random, random.next())); });
}

TEST(OverlayFuzz, ControlMessages) {
  const std::vector<Bytes_> frames = message_frames();
  for (const Bytes_& frame : frames) run_target(FuzzKind::kControl, {frame.begin() + kFrameHeaderBytes, frame.end()});
  rounds(60'000, [&](Random& random) {
    const Bytes_& frame = frames[random.below(frames.size())];
    Bytes_ body(frame.begin() + kFrameHeaderBytes, frame.end());
    mutate(body, random);
    run_target(FuzzKind::kControl, body);
  });
}

TEST(OverlayFuzz, SignedBodies) {
  std::vector<Bytes_> bodies;
  for (const ControlMessage& message : messages())
    std::visit(
        [&](const auto& m) {
          if constexpr (std::is_base_of_v<Signed, std::decay_t<decltype(m)>>) {
            const auto bytes = std::as_bytes(std::span(m.body));
            bodies.emplace_back(bytes.begin(), bytes.end());
          }
        },
        message);
  ASSERT_EQ(bodies.size(), 8u);
  rounds(30'000, [&](Random& random) {
    Bytes_ body = bodies[random.below(bodies.size())];
    mutate(body, random);
    body.insert(body.begin(), static_cast<std::byte>(random.below(3)));
    run_target(FuzzKind::kSigned, body);
  });
}

TEST(OverlayFuzz, StateFiles) {
  WorkerState worker{"run", random_bytes(1, 60), random_bytes(2, 60), WorkerId{7}, Installed{Version{3}, {}, 1}, 12};
  LearnerState learner;
  learner.run_id = "run";
  learner.used_tokens[{}] = 17;
  learner.revoked = {{WorkerId{2}, 1}};
  learner.published = {{Version{1}, digest_of(1)}, {Version{5}, digest_of(5)}};
  learner.port = 7070;
  learner.known[WorkerId{1}].name = "vast";
  std::vector<Bytes_> bodies;
  for (const auto& [file, magic] : {std::pair(encode(worker), std::string_view("echoline worker 3\n")),
                                    std::pair(encode(learner), std::string_view("echoline learner 3\n"))}) {
    const auto bytes = std::as_bytes(std::span(file)).subspan(magic.size() + sizeof(trust::Hash));
    bodies.emplace_back(bytes.begin(), bytes.end());
  }
  rounds(20'000, [&](Random& random) {
    Bytes_ body = bodies[random.below(bodies.size())];
    mutate(body, random);
    run_target(FuzzKind::kState, body);
  });
}

TEST(OverlayFuzz, PublicationStores) {
  const std::vector<Bytes_> frames = publication_frames(true);
  rounds(1'500, [&](Random& random) { run_target(FuzzKind::kStore, shuffled(frames, random, random.below(4))); });
}

TEST(OverlayFuzz, Spools) {
  const Made& made = fuzz_publications()[0];
  Bytes_ log = encode_control(made.opening);
  for (std::size_t i = 0; i < made.chunks.size(); ++i) append(log, made.chunk(i).head.bytes());
  append(log, encode_control(made.closing));
  rounds(1'500, [&](Random& random) {
    Bytes_ cut = log, payload = made.payload;
    if (random.below(4)) mutate(cut, random);
    if (random.below(4) == 0) mutate(payload, random);
    Bytes_ input(4);
    put_le<std::uint32_t>(input.data(), static_cast<std::uint32_t>(cut.size()));
    append(input, cut);
    append(input, payload);
    run_target(FuzzKind::kSpool, input);
  });
}

TEST(OverlayFuzz, Members) {
  std::vector<Bytes_> frames = message_frames();
  for (const Bytes_& frame : publication_frames(true)) frames.push_back(frame);
  rounds(1'500, [&](Random& random) { run_target(FuzzKind::kMember, shuffled(frames, random, random.below(4))); });
}

TEST(OverlayFuzz, Learners) {
  std::vector<Bytes_> frames = message_frames();
  frames.push_back(encode_frame(FrameType::kApplication, random_bytes(1, 33)));
  rounds(1'500, [&](Random& random) { run_target(FuzzKind::kLearner, shuffled(frames, random, random.below(4))); });
}

TEST(OverlayFuzz, MutatedGreetingsOfARelay) {
  using namespace relay;
  ControlFrames frames(Mac{}, ControlFrames::End::kRelay);
  const std::string all[] = {client_hello(made_key("authority")), control_greeting(Nonce{}),
                             ticket_greeting(Ticket{}, Mac{}),
                             frames.seal(ControlFrame::Type::kAccepted) + frames.seal(ControlFrame::Type::kOpen, "x")};
  const auto bytes_of = [](const std::string& text) {
    const auto bytes = std::as_bytes(std::span(text));
    return Bytes_(bytes.begin(), bytes.end());
  };
  for (const std::string& text : all) run_target(FuzzKind::kRelay, bytes_of(text));
  rounds(10'000, [&](Random& random) {
    Bytes_ body = bytes_of(all[random.below(std::size(all))]);
    mutate(body, random);
    run_target(FuzzKind::kRelay, body);
  });
}

}  // namespace
}  // namespace echoline::overlay

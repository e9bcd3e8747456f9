// Fuzz target: the overlay's input from the network and from disk. No input crashes a node, and only data that the
// learner signed is accepted.
#include "tests/overlay/overlay_fuzz.hpp"

#include <cstring>
#include <fstream>

#include "base/log.hpp"
#include "overlay/learner/learner_core.hpp"
#include "overlay/member/member_core.hpp"
#include "overlay/relay/client_hello.hpp"
#include "overlay/relay/protocol.hpp"
#include "overlay/uv/disk.hpp"
#include "overlay/wire/bytes.hpp"
#include "tests/overlay/folder.hpp"

namespace echoline::overlay {
namespace {

using ByteSpan = std::span<const std::byte>;

const TimePoint kNow(std::chrono::seconds(1));

const Made* genuine(const PublicationId& id) {
  for (const Made& made : fuzz_publications())
    if (made.id == id) return &made;
  return nullptr;
}

// Feeds `stream` to a decoder, at most `piece_bytes` at a time. Passes every frame to `use`, up to the first unreadable
// one.
template <class Use>
void each_frame(ByteSpan stream, bool admitted, std::size_t piece_bytes, Use&& use) {
  FrameDecoder decoder;
  if (admitted) decoder.admit();
  while (!stream.empty()) {
    const auto room = decoder.room();
    const std::size_t n = std::min({piece_bytes, room.size(), stream.size()});
    ECHO_CHECK(n > 0);
    std::memcpy(room.data(), stream.data(), n);
    stream = stream.subspan(n);
    if (const Status advanced = decoder.advance(n); !advanced) {
      ECHO_CHECK(advanced.error().code == Code::kCorrupt);
      return;
    }
    ECHO_CHECK(decoder.buffered_bytes() <= kChunkBytesMax);
    if (auto frame = decoder.take()) use(std::move(*frame));
  }
}

// Checks that a decoded message can be encoded again, with the same meaning.
void fuzz_control(ByteSpan bytes) {
  const auto message = decode_control(bytes);
  if (!message) {
    ECHO_CHECK(message.error().code == Code::kCorrupt);
    return;
  }
  const auto frame = encode_control(*message);
  ECHO_CHECK(frame.size() <= kFrameHeaderBytes + kControlBytesMax);
  const auto again = decode_control(std::span(frame).subspan(kFrameHeaderBytes));
  ECHO_CHECK(again.has_value() && encode_control(*again) == frame);
}

void fuzz_stream(std::byte options, ByteSpan bytes) {
  const bool admitted = (options & std::byte{1}) != std::byte{};
  each_frame(bytes, admitted, 1 + static_cast<std::size_t>(options) * 4, [&](const Frame& frame) {
    if (frame.type == FrameType::kControl) fuzz_control(frame.body.bytes());
    if (frame.type == FrameType::kChunk) {
      const auto head = encode_chunk_head(frame.chunk);
      ECHO_CHECK(std::equal(head.begin(), head.end(), frame.head.bytes().begin(), frame.head.bytes().end()));
      ECHO_CHECK(frame.body.size() == frame.chunk.length);
    }
    ECHO_CHECK(admitted || (frame.type == FrameType::kControl && frame.body.size() <= kPendingPeerBytesMax));
  });
}

// Accepts every signature as the learner's.
class Gullible final : public SignatureChecker {
 public:
  using SignatureChecker::SignatureChecker;

 protected:
  bool verify(std::string_view, std::span<const std::byte>, const trust::Signature&) const override { return true; }
};

void fuzz_signed(std::byte message_type, ByteSpan bytes) {
  static const trust::SigningKey key = made_key("authority");
  static const Gullible gullible("run", key.public_key());
  const Signed message{std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()), {}};
  const auto same = [](const auto& a, const auto& b) { return a.has_value() && *a == b; };
  switch (static_cast<int>(message_type) % 4) {
    case 0:
      (void)announced_chunk_bytes({message});
      if (const auto opened = gullible.open(SignedAnnouncement{message}))
        ECHO_CHECK(same(gullible.open(sign(*opened, key)), *opened));
      break;
    case 1:
      if (const auto opened = gullible.open(SignedManifest{message}))
        ECHO_CHECK(same(gullible.open(sign(*opened, key)), *opened));
      break;
    case 2:
      if (const auto opened = gullible.open(message)) ECHO_CHECK(opened->revoked.ranges().size() <= kRevokedMax);
      break;
    case 3:
      if (const auto opened = open(gullible, SignedGrant{message}))
        for (const Grant::From& from : opened->from)
          ECHO_CHECK(StripeMask::is_valid(opened->stripe_count, from.stripe_mask));
      break;
  }
}

void fuzz_state(ByteSpan bytes) {
  const trust::Hash hash = trust::blake3(bytes);
  const auto file = [&](std::string_view magic) {
    return std::string(magic) + std::string(reinterpret_cast<const char*>(hash.data()), hash.size()) +
           std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  };
  if (const auto state = decode_worker_state(file("echoline worker 3\n")))
    ECHO_CHECK(*decode_worker_state(encode(*state)) == *state);
  if (const auto state = decode_learner_state(file("echoline learner 3\n")))
    ECHO_CHECK(*decode_learner_state(encode(*state)) == *state);
}

const std::shared_ptr<const SignatureChecker>& checker() {
  static const auto made = std::make_shared<const SignatureChecker>("run", made_key("authority").public_key());
  return made;
}

void fuzz_store(std::byte options, ByteSpan bytes) {
  std::vector<Action> actions;
  const std::uint64_t memory_max = (options & std::byte{2}) != std::byte{} ? 2500 : 1 << 20;
  PublicationStore store({Bytes{memory_max}, Bytes{1 << 20}, (options & std::byte{1}) != std::byte{}}, *checker(),
                         actions);
  each_frame(bytes, true, SIZE_MAX, [&](const Frame& frame) {
    if (frame.type == FrameType::kChunk) (void)store.put(frame, Version{1}).has_value();
    if (frame.type != FrameType::kControl) return;
    const auto message = decode_control(frame.body.bytes());
    if (!message) return;
    if (const auto* announcement = std::get_if<SignedAnnouncement>(&*message))
      if (const auto opened = checker()->open(*announcement)) (void)store.begin(*opened, *announcement).has_value();
    if (const auto* manifest = std::get_if<SignedManifest>(&*message))
      if (const auto opened = checker()->open(*manifest)) (void)store.close(*opened, *manifest).has_value();
    for (Action& action : std::exchange(actions, {}))
      if (const auto* spool = std::get_if<act::Spool>(&action); spool && spool->chunk)
        store.on_spooled(spool->publication, *spool->chunk, true);
  });
  std::uint64_t memory_bytes = 0;
  for (const auto& [key, stored] : store.entries()) {
    const Made* made = genuine(stored.id);
    ECHO_CHECK(made && made->key() == key);
    std::uint64_t stored_bytes = 0;
    for (std::uint32_t i = 0; i < stored.chunks.size(); ++i) {
      if (!stored.have.contains(i)) continue;
      const StoredChunk& chunk = stored.chunks[i];
      const Slice& expected = made->chunks.at(i).data;
      ECHO_CHECK(chunk.hash == made->chunks[i].hash && chunk.length == expected.size());
      ECHO_CHECK(chunk.data.empty() || std::equal(expected.bytes().begin(), expected.bytes().end(),
                                                  chunk.data.bytes().begin(), chunk.data.bytes().end()));
      stored_bytes += chunk.length;
      memory_bytes += chunk.data.size();
    }
    ECHO_CHECK(stored_bytes == stored.bytes);
    ECHO_CHECK(stored.complete == (stored.manifest && stored.have.count() == made->chunks.size()));
  }
  ECHO_CHECK(memory_bytes == store.memory().count);
  ECHO_CHECK((options & std::byte{1}) != std::byte{} || memory_bytes <= memory_max);
}

// ---- cores ----

MemberConfig member_config() {
  static const WorkerState state = [] {
    const trust::Authority authority = made_authority();
    WorkerState s;
    s.run_id = "run";
    s.authority = authority.certificate();
    s.certificate = *authority.issue({made_key("worker").public_key(), trust::PeerIdentity::Kind::kWorker, WorkerId{7},
                                      1, kMadeUnix_s, trust::kWorkerLifetimeMax});
    s.worker = WorkerId{7};
    return s;
  }();
  static const trust::SigningKey key = made_key("worker");
  MemberConfig c{{}, {"10.0.0.0", 1}, {"10.0.0.7", 1}, "w", key, state, checker(), {}, false, {}, {}};
  c.core.unix_origin_s = kMadeUnix_s - 1;
  c.join_timeout = std::chrono::seconds(10);
  c.away_max = c.join_timeout;
  return c;
}

// Performs no action. Checks that only genuine publications go to the application.
void check_deliveries(Core& core) {
  if (const auto* member = dynamic_cast<const MemberCore*>(&core)) member->check();
  for (const Action& action : core.take_actions())
    if (const auto* deliver = std::get_if<act::DeliverPublication>(&action)) {
      const Made* made = nullptr;
      for (const Made& m : fuzz_publications())
        if (m.key() == PublicationKey{deliver->publication.version, deliver->publication.base}) made = &m;
      ECHO_CHECK(made && deliver->publication.policy_digest == made->manifest.policy_digest);
      ECHO_CHECK(deliver->bytes == made->payload.size());
      if (deliver->spooled) continue;
      const Slice bytes = *deliver->publication.payload.bytes();
      ECHO_CHECK(std::equal(made->payload.begin(), made->payload.end(), bytes.bytes().begin(), bytes.bytes().end()));
    }
}

void deliver_control(Core& core, ConnId conn, const ControlMessage& message) {
  const Slice frame(encode_control(message));
  core.on_frame(conn, {FrameType::kControl, frame.part(kFrameHeaderBytes, frame.size() - kFrameHeaderBytes), {}, {}},
                kNow);
}

void run_timers(Core& core, int steps) {
  for (TimePoint now = kNow; steps > 0 && core.next_deadline() != kNever; --steps) {
    now = std::max(now, core.next_deadline());
    core.on_timer(now);
    check_deliveries(core);
  }
}

// `from`: 0 the learner, 1 a parent, 2 a child, 3 a stranger.
void fuzz_member(std::byte from, ByteSpan bytes) {
  MemberCore core(member_config());
  core.start(kNow);
  core.on_connected(ConnId{1}, kNow);
  deliver_control(core, ConnId{1},
                  Welcome{WorkerId{7}, std::chrono::milliseconds(500), std::chrono::seconds(9),
                          static_cast<std::uint64_t>(kMadeUnix_s * 1e3), ""});
  deliver_control(core, ConnId{1},
                  Assign{2, {{WorkerId{4}, {"10.0.0.4", 1}, 1, false}, {WorkerId{5}, {"10.0.0.5", 1}, 2, true}}});
  core.on_connected(ConnId{3}, kNow);
  const PeerInfo child{"10.0.0.9", {trust::PeerIdentity::Kind::kWorker, WorkerId{9}}};
  core.on_accepted(ConnId{2}, child, kNow);
  deliver_control(core, ConnId{2}, PeerHello{"run", 0, {}, false, {}, made_grant(9, 7)});
  core.on_accepted(ConnId{4}, child, kNow);
  check_deliveries(core);
  const ConnId conn{std::array<std::uint64_t, 4>{1, 3, 2, 4}[static_cast<std::size_t>(from) % 4]};
  each_frame(bytes, conn != ConnId{4}, SIZE_MAX, [&](Frame frame) {
    core.on_frame(conn, std::move(frame), kNow);
    check_deliveries(core);
  });
  run_timers(core, 5);
}

// `from`: 0 a worker, 1 the seed on its data connection, 2 a stranger with a certificate, 3 one without.
void fuzz_learner(std::byte from, ByteSpan bytes) {
  static const auto authority = std::make_shared<const trust::Authority>(made_authority());
  LearnerConfig config;
  config.policy = chains::TopologyPolicy::kEcho2;  // chains, which the tests can foretell
  config.network.silence_min = {};
  config.self = {"10.0.0.0", 1};
  config.authority = authority;
  config.checker = checker();
  config.core.unix_origin_s = kMadeUnix_s - 1;
  LearnerCore core(std::move(config));
  core.start(kNow);
  const auto worker = [](std::uint64_t id) {
    return PeerInfo{"10.0.0.9", {trust::PeerIdentity::Kind::kWorker, WorkerId{id}}};
  };
  for (const std::uint64_t id : {1, 2}) {
    core.on_accepted(ConnId{2 * id}, worker(id), kNow);
    deliver_control(core, ConnId{2 * id}, Hello{"run", "w", {"10.0.0.1", 1}, {}, {}, {}});
  }
  core.on_timer(kNow + 2 * TopologyPlan::kDelay);
  core.on_accepted(ConnId{6}, worker(1), kNow);
  deliver_control(core, ConnId{6}, PeerHello{"run", 0, {}, false, {}, made_grant(1, 0)});
  core.on_accepted(ConnId{8}, worker(3), kNow);
  core.on_accepted(ConnId{10}, {"10.0.0.9", {}}, kNow);
  for (const Made& made : fuzz_publications()) {
    ECHO_CHECK(core.begin(made.announcement, made.opening, false, kNow).has_value());
    ECHO_CHECK(core.add(made.id, made.chunks, kNow).has_value());
    ECHO_CHECK(core.finish(made.manifest, made.closing, kNow).has_value());
  }
  check_deliveries(core);
  const ConnId conn{std::array<std::uint64_t, 4>{2, 6, 8, 10}[static_cast<std::size_t>(from) % 4]};
  each_frame(bytes, conn < ConnId{8}, SIZE_MAX, [&](Frame frame) {
    core.on_frame(conn, std::move(frame), kNow);
    check_deliveries(core);
  });
  run_timers(core, 3);            // too short for a worker to count as silent
  bool other_is_present = false;  // what one worker says costs no other its place
  for (const WorkerView& view : core.stats().workers) other_is_present |= view.info.id == WorkerId{2};
  ECHO_CHECK(other_is_present || conn == ConnId{2});
}

// ---- disk ----

void fuzz_spool(ByteSpan bytes) {
  static const TemporaryFolder folder;
  if (bytes.size() < 4) return;
  const std::size_t log_bytes = std::min<std::size_t>(get_le<std::uint32_t>(bytes.data()), bytes.size() - 4);
  const auto put = [&](const char* name, ByteSpan content) {
    std::ofstream file(folder / "spool" / name, std::ios::binary | std::ios::trunc);
    file.write(reinterpret_cast<const char*>(content.data()), static_cast<std::streamsize>(content.size()));
  };
  const auto disk = *Disk::open(folder.path());
  put("00.log", bytes.subspan(4, log_bytes));
  put("00.payload", bytes.subspan(4 + log_bytes));
  MemberConfig config = member_config();
  config.store.disk = true;
  MemberCore core(std::move(config));
  std::size_t frames = 0, frames_needed = 0;
  disk->recover([&](Frame frame) {
    ++frames;
    const bool is_needed = core.recover(std::move(frame), kNow);
    frames_needed += is_needed;
    return is_needed;
  });
  // Truncated records do not come back, nor does an unusable spool.
  std::size_t frames_again = 0;
  disk->recover([&](Frame) { return ++frames_again > 0; });
  ECHO_CHECK(frames_again == (frames_needed > 0 ? frames : 0));
  ECHO_CHECK(std::filesystem::exists(folder / "spool" / "00.payload") == (frames_needed > 0));
  core.start(kNow);
  check_deliveries(core);
}

// A relay says of any first bytes that they are whole, or may become so, or are refused. More bytes change no verdict
// but "incomplete".
void fuzz_relay(ByteSpan bytes) {
  const std::string text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  const auto hello = relay::read_client_hello(bytes);
  if (hello) {
    ECHO_CHECK(hello->server_name.size() <= 255 && (hello->is_complete || hello->server_name.empty()));
    if (hello->is_complete) {
      const std::string longer = text + "x";
      const auto again = relay::read_client_hello(std::as_bytes(std::span(longer)));
      ECHO_CHECK(again && again->server_name == hello->server_name);
      const auto half = relay::read_client_hello(bytes.first(bytes.size() / 2));
      ECHO_CHECK(half && (!half->is_complete || half->server_name == hello->server_name));
    }
  } else {
    ECHO_CHECK(hello.error().code == Code::kCorrupt || hello.error().code == Code::kExhausted);
  }
  if (const auto greeting = relay::read_greeting(text); greeting) {
    using Kind = relay::Greeting::Kind;
    ECHO_CHECK(greeting->kind != Kind::kControl || text == relay::control_greeting(greeting->nonce));
    ECHO_CHECK(greeting->kind != Kind::kTicket || text == relay::ticket_greeting(greeting->ticket, greeting->proof));
  }
  relay::ControlFrames frames(relay::Mac{}, relay::ControlFrames::End::kLearner);
  frames.feed(text);
  for (auto frame = frames.take(); frame && *frame; frame = frames.take())
    ECHO_CHECK((*frame)->body.size() <= relay::ControlFrames::kBodyBytesMax);
}

}  // namespace
}  // namespace echoline::overlay

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace echoline::overlay;
  static const bool quiet = [] {
    echoline::log::configure(echoline::log::Level::kOff, "fuzz");
    return true;
  }();
  if (!quiet || size < 2) return 0;
  const auto bytes = std::as_bytes(std::span(data, size)).subspan(1);
  const auto input = bytes.subspan(1);  // after the byte of options
  switch (static_cast<FuzzKind>(data[0] % kFuzzKinds)) {
    case FuzzKind::kStream:
      fuzz_stream(bytes[0], input);
      break;
    case FuzzKind::kControl:
      fuzz_control(bytes);
      break;
    case FuzzKind::kSigned:
      fuzz_signed(bytes[0], input);
      break;
    case FuzzKind::kState:
      fuzz_state(bytes);
      break;
    case FuzzKind::kStore:
      fuzz_store(bytes[0], input);
      break;
    case FuzzKind::kSpool:
      fuzz_spool(bytes);
      break;
    case FuzzKind::kMember:
      fuzz_member(bytes[0], input);
      break;
    case FuzzKind::kLearner:
      fuzz_learner(bytes[0], input);
      break;
    case FuzzKind::kRelay:
      fuzz_relay(bytes);
      break;
  }
  return 0;
}

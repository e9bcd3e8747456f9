// Changes the outgoing messages of malicious workers. The world calls it for each message.
#include "sim/malice.hpp"

#include <algorithm>

namespace echoline::sim {

using namespace overlay;

namespace {

constexpr int kFloodRepeats = 100;
constexpr int kRequestsPerHeartbeat = 20;                      // repeated chunk requests to each parent
constexpr int kFloodMessages = 20, kFloodMessageRepeats = 10;  // of one kind, for each heartbeat
constexpr std::uint64_t kGarbageBytesMax = 200;
// Random requests are for chunks with an index below this. False reports claim up to this many chunks too many.
constexpr std::uint64_t kGuessedChunks = 64;
constexpr std::size_t kFrameTypeOffset = 2;  // of the type in a frame's header

FrameType type_of(const act::Send& send) {
  return send.head.size() < kFrameHeaderBytes ? FrameType::kApplication
                                              : static_cast<FrameType>(send.head.data()[kFrameTypeOffset]);
}

std::optional<ControlMessage> message_of(const act::Send& send) {
  if (type_of(send) != FrameType::kControl || !send.tail.empty()) return std::nullopt;
  auto message = decode_control(send.head.bytes().subspan(kFrameHeaderBytes));
  if (!message) return std::nullopt;
  return *std::move(message);
}

}  // namespace

std::string to_text(const MaliceOptions& options) {
  std::string text;
  const auto add = [&](bool applies, const std::string& habit) {
    if (applies) text += (text.empty() ? "" : ", ") + habit;
  };
  add(options.flip_share > 0, fmt::format("flips {} of its chunks", options.flip_share));
  add(options.replay_share > 0, fmt::format("replays {}", options.replay_share));
  add(options.garbage_share > 0, fmt::format("garbage {}", options.garbage_share));
  add(options.forward_nothing, "forwards nothing");
  add(options.withhold_share > 0, fmt::format("withholds {} of its chunks", options.withhold_share));
  add(options.forge_share > 0, fmt::format("forges {} of what the learner signs", options.forge_share));
  add(options.misreport_progress, "lies about progress");
  add(options.repeat_requests, "asks for chunks again and again");
  add(options.slander, "slanders its parents");
  add(options.flood, "floods");
  add(options.flood_kind.has_value(),
      fmt::format("floods by kind {}", options.flood_kind ? static_cast<int>(*options.flood_kind) : 0));
  add(options.reconnect, "reconnects");
  add(options.leak, "leaks its grants");
  return text.empty() ? "honest" : text;
}

std::vector<act::Send> MaliciousRewriter::rewrite(act::Send&& send, TimePoint) {
  std::vector<act::Send> to_send;
  const ConnId conn = send.conn;
  const bool is_chunk = type_of(send) == FrameType::kChunk;
  if (is_chunk && (options_.forward_nothing || random_.uniform() < options_.withhold_share)) return to_send;
  const auto message = message_of(send);
  const bool is_repeatable = is_chunk || (message && (std::holds_alternative<SignedAnnouncement>(*message) ||
                                                      std::holds_alternative<SignedManifest>(*message)));
  if (options_.replay_share > 0 && is_repeatable) {
    if (remembered_frames_.size() < kRememberedFramesMax)
      remembered_frames_.push_back(send);
    else
      remembered_frames_[random_.below(kRememberedFramesMax)] = send;
    if (random_.uniform() < options_.replay_share) {
      act::Send replayed = remembered_frames_[random_.below(remembered_frames_.size())];
      replayed.conn = conn;
      to_send.push_back(std::move(replayed));
    }
  }
  if (is_chunk && random_.uniform() < options_.flip_share) {
    std::vector<std::byte> copy(send.tail.bytes().begin(), send.tail.bytes().end());
    copy[random_.below(copy.size())] ^= std::byte{1} << static_cast<int>(random_.below(8));
    send.tail = Slice(std::move(copy));
    ++chunks_flipped_;
  }
  if (options_.misreport_progress && message) falsify_progress(send);
  if (message && options_.forge_share > 0 && random_.uniform() < options_.forge_share) forge(*message, send, to_send);
  if (message && std::holds_alternative<Hello>(*message))
    parent_connections_.erase(conn);  // a new process reuses the id
  if (const auto* hello = message ? std::get_if<PeerHello>(&*message) : nullptr) {
    parent_connections_.insert(conn);
    // Forgets the connection with the lowest id, which is mostly the oldest.
    if (parent_connections_.size() > kParentConnectionsMax) parent_connections_.erase(parent_connections_.begin());
    if (options_.leak && accomplices_ && hello->grant) {
      accomplices_->hellos.push_back(*hello);
      // The intruder claims to hold nothing, so that a deceived parent would send it everything.
      accomplices_->hellos.back().have.items.clear();
      accomplices_->hellos.back().have.position.reset();
    }
  }
  if (options_.repeat_requests && message) repeat_requests(*message, to_send);
  if (options_.flood_kind && message && std::holds_alternative<Heartbeat>(*message)) flood_with_kind(conn, to_send);
  const bool accuses = options_.slander && message && std::holds_alternative<Heartbeat>(*message);
  to_send.push_back(std::move(send));
  const std::vector<WorkerId> parents = accuses && options_.parents ? options_.parents() : std::vector<WorkerId>();
  if (!parents.empty()) {
    Poisoned poisoned;
    poisoned.parent = parents[random_.below(parents.size())];
    poisoned.index = static_cast<std::uint32_t>(random_.below(8));  // one of the first chunks
    to_send.push_back({.conn = conn, .head = Slice(encode_control(poisoned)), .tail = {}});
    EdgeFailed failed;
    failed.parent = parents[random_.below(parents.size())];
    failed.kind = static_cast<EdgeTroubleKind>(random_.below(4));  // any of the four kinds
    failed.reason = "slander";
    to_send.push_back({.conn = conn, .head = Slice(encode_control(failed)), .tail = {}});
  }
  if (options_.flood && message && !std::holds_alternative<Hello>(*message))
    for (int i = 0; i < kFloodRepeats; ++i) to_send.push_back(to_send.back());
  if (random_.uniform() < options_.garbage_share) {
    const auto body = garbage(1 + random_.below(kGarbageBytesMax));
    const bool without_frame = random_.below(2) != 0;
    to_send.push_back(
        {.conn = conn, .head = Slice(without_frame ? body : encode_frame(FrameType::kControl, body)), .tail = {}});
  }
  return to_send;
}

void MaliciousRewriter::repeat_requests(const ControlMessage& message, std::vector<act::Send>& to_send) {
  const auto* heartbeat = std::get_if<Heartbeat>(&message);
  if (!heartbeat || heartbeat->progress.empty()) return;
  for (const ConnId parent : parent_connections_)
    for (int i = 0; i < kRequestsPerHeartbeat; ++i) {
      const ChunkRequest request{.publication = heartbeat->progress.front().publication,
                                 .index = static_cast<std::uint32_t>(random_.below(kGuessedChunks))};
      to_send.push_back({.conn = parent, .head = Slice(encode_control(request)), .tail = {}});
    }
}

void MaliciousRewriter::flood_with_kind(ConnId conn, std::vector<act::Send>& to_send) {
  using Kind = MessageBudget::Kind;
  const auto random_publication = [&] {
    PublicationId id;
    for (std::byte& byte : id) byte = static_cast<std::byte>(random_.next());
    return id;
  };
  const auto random_message = [&]() -> ControlMessage {
    switch (*options_.flood_kind) {
      case Kind::kRenew: {
        Renew renew;
        for (std::byte& byte : renew.key.bytes) byte = static_cast<std::byte>(random_.next());
        return renew;
      }
      case Kind::kNeedHelp:
        return NeedHelp{.target = Version{random_.below(1000)}, .full_only = random_.below(2) == 0, .position = {}};
      case Kind::kAck:
        return Installed{.version = Version{random_.below(1000)}, .policy_digest = {}, .epoch = 1};
      case Kind::kTrouble:
        return Trouble{fmt::format("trouble {}", random_.next())};
      case Kind::kChunkRequest:
        return ChunkRequest{.publication = random_publication(),
                            .index = static_cast<std::uint32_t>(random_.below(kGuessedChunks))};
      default: {  // kHave
        Have have;
        constexpr int kItems = 16;
        for (int i = 0; i < kItems; ++i)
          have.items[{Version{random_.below(100'000)}, {}}].publication = random_publication();
        return have;
      }
    }
  };
  const bool to_parents = *options_.flood_kind == Kind::kHave || *options_.flood_kind == Kind::kChunkRequest;
  std::vector<ConnId> targets;
  if (to_parents)
    for (const ConnId parent : parent_connections_) targets.push_back(parent);
  else
    targets.push_back(conn);  // of a heartbeat, so it leads to the learner
  for (const ConnId target : targets)
    for (int i = 0; i < kFloodMessages; ++i) {
      const Slice encoded(encode_control(random_message()));
      for (int sent = 0; sent < kFloodMessageRepeats; ++sent)
        to_send.push_back({.conn = target, .head = encoded, .tail = {}});
    }
}

// Sends a forged message, signed with the accomplices' key, ahead of the learner's message: a later version, a new
// epoch, or a policy with another digest. Replaces a beacon by the first beacon, or by a forged one that revokes all
// workers.
void MaliciousRewriter::forge(const ControlMessage& message, act::Send& send, std::vector<act::Send>& to_send) {
  if (!accomplices_) return;
  const auto& [hellos, checker, signing_key] = *accomplices_;
  const auto& key = signing_key;  // clang before version 16 cannot capture structured bindings
  const auto send_ahead = [&](const auto& forged) {
    to_send.push_back({.conn = send.conn, .head = Slice(encode_control(sign(forged, key))), .tail = {}});
  };
  if (const auto* announced = std::get_if<SignedAnnouncement>(&message)) {
    auto announcement = checker->open(*announced);
    if (!announcement) return;
    if (random_.below(2) == 0)
      ++announcement->epoch;
    else
      announcement->key.version.value += 1 + random_.below(3);
    send_ahead(*announcement);
  } else if (const auto* closed = std::get_if<SignedManifest>(&message)) {
    auto manifest = checker->open(*closed);
    if (!manifest) return;
    manifest->policy_digest[0] ^= std::byte{1};
    send_ahead(*manifest);
  } else if (const auto* status = std::get_if<EdgeStatus>(&message); status && status->beacon) {
    auto beacon = checker->open(*status->beacon);
    if (!beacon) return;
    if (!first_beacon_) first_beacon_ = status->beacon;
    EdgeStatus changed = *status;
    constexpr std::uint64_t kIdMax = 2'000'000;  // no id of a simulated fleet is larger
    beacon->sequence += 1000;                    // newer than the learner's next beacons
    beacon->revoked = {};
    beacon->revoked.append(1, kIdMax);  // all ids from 1 to kIdMax
    changed.beacon = random_.below(2) == 0 ? *first_beacon_ : Signed(sign(*beacon, key));
    send.head = Slice(encode_control(changed));
  }
}

// Claims to hold more chunks than it does, or none, and to have forwarded more than it has.
void MaliciousRewriter::falsify_progress(act::Send& send) {
  auto message = message_of(send);  // rewrite() has checked that `send` has one
  const auto distort = [&](std::vector<Progress>& progress) {
    const bool exaggerates = random_.below(2) == 0;
    for (Progress& item : progress)
      for (std::uint32_t& chunks : item.chunks)
        chunks = exaggerates ? chunks + 1 + static_cast<std::uint32_t>(random_.below(kGuessedChunks)) : 0;
  };
  if (auto* heartbeat = std::get_if<Heartbeat>(&*message)) {
    distort(heartbeat->progress);
    heartbeat->forwarding_rate = BitRate::from_mbit_per_s(static_cast<double>(1 + random_.below(100'000)));
    // Claims ten times the rate of each edge, and that only the path limits it.
    for (EdgeReport& edge : heartbeat->edges) edge.rate = {edge.rate.bits_per_s * 10}, edge.limit = EdgeLimit::kPath;
    heartbeat->chunk_bytes_forwarded *= 2;
  } else if (auto* status = std::get_if<EdgeStatus>(&*message)) {
    distort(status->progress);
  } else {
    return;
  }
  send.head = Slice(encode_control(*message));
}

std::vector<std::byte> MaliciousRewriter::garbage(std::size_t bytes) {
  std::vector<std::byte> content(bytes);
  for (std::byte& byte : content) byte = static_cast<std::byte>(random_.next());
  return content;
}

}  // namespace echoline::sim

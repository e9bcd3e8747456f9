// Changes the outgoing messages of malicious workers. The world calls it for each message.
#include "sim/malice.hpp"

#include <algorithm>

namespace echoline::sim {

using namespace overlay;

namespace {

FrameType type_of(const act::Send& send) {
  return send.head.size() < kFrameHeaderBytes ? FrameType::kApplication : static_cast<FrameType>(send.head.data()[2]);
}

std::optional<ControlMessage> message_of(const act::Send& send) {
  if (type_of(send) != FrameType::kControl || !send.tail.empty()) return std::nullopt;
  auto message = decode_control(send.head.bytes().subspan(kFrameHeaderBytes));
  if (!message) return std::nullopt;
  return *std::move(message);
}

}  // namespace

std::string to_text(const MaliceOptions& o) {
  std::string text;
  const auto add = [&](bool on, const std::string& what) {
    if (on) text += (text.empty() ? "" : ", ") + what;
  };
  add(o.flip_share > 0, fmt::format("flips {} of its chunks", o.flip_share));
  add(o.replay_share > 0, fmt::format("replays {}", o.replay_share));
  add(o.garbage_share > 0, fmt::format("garbage {}", o.garbage_share));
  add(o.forward_nothing, "forwards nothing");
  add(o.withhold_share > 0, fmt::format("withholds {} of its chunks", o.withhold_share));
  add(o.forge_share > 0, fmt::format("forges {} of what the learner signs", o.forge_share));
  add(o.misreport_progress, "lies about progress");
  add(o.repeat_requests, "asks for chunks again and again");
  add(o.slander, "slanders its parents");
  add(o.flood, "floods");
  add(o.flood_kind.has_value(), fmt::format("floods by kind {}", o.flood_kind ? static_cast<int>(*o.flood_kind) : 0));
  add(o.reconnect, "reconnects");
  add(o.leak, "leaks its grants");
  return text.empty() ? "honest" : text;
}

std::vector<act::Send> Malicious::outgoing(act::Send&& send, TimePoint) {
  std::vector<act::Send> out;
  const ConnId conn = send.conn;
  const bool chunk = type_of(send) == FrameType::kChunk;
  if (chunk && (options_.forward_nothing || random_.uniform() < options_.withhold_share)) return out;
  const auto message = message_of(send);
  const bool memorable = chunk || (message && (std::holds_alternative<SignedAnnouncement>(*message) ||
                                               std::holds_alternative<SignedManifest>(*message)));
  if (options_.replay_share > 0 && memorable) {
    if (remembered_.size() < kRememberedFramesMax)
      remembered_.push_back(send);
    else
      remembered_[random_.below(kRememberedFramesMax)] = send;
    if (random_.uniform() < options_.replay_share) {
      act::Send again = remembered_[random_.below(remembered_.size())];
      again.conn = conn;
      out.push_back(std::move(again));
    }
  }
  if (chunk && random_.uniform() < options_.flip_share) {
    std::vector<std::byte> copy(send.tail.bytes().begin(), send.tail.bytes().end());
    copy[random_.below(copy.size())] ^= std::byte{1} << static_cast<int>(random_.below(8));
    send.tail = Slice(std::move(copy));
    ++flipped_;
  }
  if (options_.misreport_progress && message) falsify_progress(send);
  if (message && options_.forge_share > 0 && random_.uniform() < options_.forge_share) forge(*message, send, out);
  if (message && std::holds_alternative<Hello>(*message)) upstream_.erase(conn);  // an earlier process's
  if (const auto* hello = message ? std::get_if<PeerHello>(&*message) : nullptr) {
    upstream_.insert(conn);
    if (upstream_.size() > kRememberedEdgesMax) upstream_.erase(upstream_.begin());
    if (options_.leak && accomplices_ && hello->grant) {
      accomplices_->hellos.push_back(*hello);
      accomplices_->hellos.back().have.items.clear();
      accomplices_->hellos.back().have.position.reset();
    }
  }
  if (options_.repeat_requests && message) repeat_requests(*message, out);
  if (options_.flood_kind && message && std::holds_alternative<Heartbeat>(*message)) flood_with_kind(conn, out);
  const bool accuse = options_.slander && message && std::holds_alternative<Heartbeat>(*message);
  out.push_back(std::move(send));
  const std::vector<WorkerId> parents = accuse && options_.parents ? options_.parents() : std::vector<WorkerId>();
  if (!parents.empty()) {
    Poisoned poisoned;
    poisoned.parent = parents[random_.below(parents.size())];
    poisoned.index = static_cast<std::uint32_t>(random_.below(8));
    out.push_back({conn, Slice(encode_control(poisoned)), {}});
    const EdgeFailed failed{parents[random_.below(parents.size())], static_cast<EdgeTroubleKind>(random_.below(4)),
                            "slander"};
    out.push_back({conn, Slice(encode_control(failed)), {}});
  }
  if (options_.flood && message && !std::holds_alternative<Hello>(*message))
    for (int i = 0; i < 100; ++i) out.push_back(out.back());
  if (random_.uniform() < options_.garbage_share) {
    const auto body = garbage(1 + random_.below(200));
    out.push_back({conn, Slice(random_.below(2) ? body : encode_frame(FrameType::kControl, body)), {}});
  }
  return out;
}

void Malicious::repeat_requests(const ControlMessage& message, std::vector<act::Send>& out) {
  const auto* beat = std::get_if<Heartbeat>(&message);
  if (!beat || beat->progress.empty()) return;
  for (const ConnId parent : upstream_)
    for (int i = 0; i < 20; ++i) {
      const ChunkRequest request{beat->progress.front().publication, static_cast<std::uint32_t>(random_.below(64))};
      out.push_back({parent, Slice(encode_control(request)), {}});
    }
}

void Malicious::flood_with_kind(ConnId conn, std::vector<act::Send>& out) {
  using Kind = MessageBudget::Kind;
  const auto id = [&] {
    PublicationId unknown;
    for (std::byte& b : unknown) b = static_cast<std::byte>(random_.next());
    return unknown;
  };
  const auto one = [&]() -> ControlMessage {
    switch (*options_.flood_kind) {
      case Kind::kRenew: {
        Renew renew;
        for (std::byte& b : renew.key.bytes) b = static_cast<std::byte>(random_.next());
        return renew;
      }
      case Kind::kNeedHelp:
        return NeedHelp{Version{random_.below(1000)}, random_.below(2) == 0, {}};
      case Kind::kAck:
        return Installed{Version{random_.below(1000)}, {}, 1};
      case Kind::kTrouble:
        return Trouble{fmt::format("trouble {}", random_.next())};
      case Kind::kChunkRequest:
        return ChunkRequest{id(), static_cast<std::uint32_t>(random_.below(64))};
      default: {
        Have have;
        for (std::uint64_t v = 0; v < 16; ++v) have.items[{Version{random_.below(100'000)}, {}}].publication = id();
        return have;
      }
    }
  };
  const bool to_parents = *options_.flood_kind == Kind::kHave || *options_.flood_kind == Kind::kChunkRequest;
  std::vector<ConnId> over(1, conn);
  if (to_parents) over.assign(upstream_.begin(), upstream_.end());
  for (const ConnId each : over)
    for (int i = 0; i < 20; ++i) {
      const Slice said(encode_control(one()));
      for (int again = 0; again < 10; ++again) out.push_back({each, said, {}});
    }
}

// Sends a message with an untrusted signature ahead of the learner's: the next version, a new epoch, or a policy with
// another digest. Replaces beacons by old ones, or by ones that revoke all workers.
void Malicious::forge(const ControlMessage& message, act::Send& send, std::vector<act::Send>& out) {
  if (!accomplices_) return;
  const auto& [hellos, checker, signing_key] = *accomplices_;
  const auto& key = signing_key;  // clang before version 16 cannot capture structured bindings
  const auto ahead = [&](const auto& forged) {
    out.push_back({send.conn, Slice(encode_control(sign(forged, key))), {}});
  };
  if (const auto* announced = std::get_if<SignedAnnouncement>(&message)) {
    auto announcement = checker->open(*announced);
    if (!announcement) return;
    if (random_.below(2) == 0)
      ++announcement->epoch;
    else
      announcement->key.version.value += 1 + random_.below(3);
    ahead(*announcement);
  } else if (const auto* closed = std::get_if<SignedManifest>(&message)) {
    auto manifest = checker->open(*closed);
    if (!manifest) return;
    manifest->policy_digest[0] ^= std::byte{1};
    ahead(*manifest);
  } else if (const auto* status = std::get_if<EdgeStatus>(&message); status && status->beacon) {
    auto beacon = checker->open(*status->beacon);
    if (!beacon) return;
    if (!beacon_) beacon_ = status->beacon;
    EdgeStatus changed = *status;
    beacon->sequence += 1000;
    beacon->revoked = {};
    beacon->revoked.append(1, 2'000'000);
    changed.beacon = random_.below(2) == 0 ? *beacon_ : Signed(sign(*beacon, key));
    send.head = Slice(encode_control(changed));
  }
}

// Claims to hold everything or nothing, and wrong amounts on its edges.
void Malicious::falsify_progress(act::Send& send) {
  auto message = message_of(send);
  const auto distort = [&](std::vector<Progress>& progress) {
    const bool more = random_.below(2) == 0;
    for (Progress& p : progress)
      for (std::uint32_t& chunks : p.chunks)
        chunks = more ? chunks + 1 + static_cast<std::uint32_t>(random_.below(64)) : 0;
  };
  if (auto* beat = std::get_if<Heartbeat>(&*message)) {
    distort(beat->progress);
    beat->forwarding_rate = BitRate::from_mbit_per_s(static_cast<double>(1 + random_.below(100'000)));
    for (EdgeReport& edge : beat->edges) edge.rate = {edge.rate.bits_per_s * 10}, edge.limit = EdgeLimit::kPath;
    beat->chunk_bytes_forwarded *= 2;
  } else if (auto* status = std::get_if<EdgeStatus>(&*message)) {
    distort(status->progress);
  } else {
    return;
  }
  send.head = Slice(encode_control(*message));
}

std::vector<std::byte> Malicious::garbage(std::size_t bytes) {
  std::vector<std::byte> all(bytes);
  for (std::byte& b : all) b = static_cast<std::byte>(random_.next());
  return all;
}

}  // namespace echoline::sim

#include "overlay/control.hpp"

#include <cmath>
#include <cstring>

#include "overlay/control.pb.h"

namespace echoline::overlay {
namespace {

template <class... F>
struct Overloaded : F... {
  using F::operator()...;
};

std::string cut(const std::string& text) { return text.substr(0, kTextBytesMax); }
std::string to_string(const Digest& d) { return std::string(reinterpret_cast<const char*>(d.data()), d.size()); }

template <class Message>
void set_key(Message& to, const PublicationKey& key) {
  to.set_version(key.version.value);
  if (key.base) to.set_base(key.base->value);
}
void set_endpoint(wire::Endpoint& to, const Endpoint& from) {
  to.set_host(cut(from.host));
  to.set_port(from.port);
}
void set_have(wire::Have& to, const Have& from) {
  if (from.position) to.set_position(from.position->value);
  for (const auto& [key, chunks] : from.chunks) {
    wire::HaveItem& item = *to.add_items();
    set_key(item, key);
    item.set_chunks(chunks.size());
    if (!chunks.complete()) item.set_bitmap(chunks.to_bytes());
  }
}

template <class... Args>
Error bad(fmt::format_string<Args...> format, Args&&... args) {
  return fail(Code::kCorrupt, "read control message", format, std::forward<Args>(args)...);
}
Result<std::string> text(const std::string& from, std::string_view what) {
  if (from.size() > kTextBytesMax) return bad("{} of {} bytes, the limit is {}", what, from.size(), kTextBytesMax);
  return from;
}
Result<Digest> digest(const std::string& from, std::string_view what) {
  Digest d;
  if (from.size() != d.size()) return bad("{}: expected {} bytes, found {}", what, d.size(), from.size());
  std::memcpy(d.data(), from.data(), d.size());
  return d;
}
template <class Message>
Result<PublicationKey> key_of(const Message& from) {
  PublicationKey key{Version{from.version()}, std::nullopt};
  if (from.has_base()) {
    if (from.base() >= from.version())
      return bad("expected a base below version {}, found {}", from.version(), from.base());
    key.base = Version{from.base()};
  }
  return key;
}
Result<Endpoint> endpoint_of(const wire::Endpoint& from) {
  ECHO_ASSIGN(std::string host, text(from.host(), "host"));
  if (from.port() < 1 || from.port() > 65535) return bad("expected a port from 1 to 65535, found {}", from.port());
  return Endpoint{std::move(host), static_cast<std::uint16_t>(from.port())};
}
Result<std::optional<BitRate>> rate_of(bool has, double value, std::string_view what) {
  if (!has) return std::optional<BitRate>();
  if (!std::isfinite(value) || value <= 0) return bad("{}: expected a positive rate, found {}", what, value);
  return std::optional(BitRate{value});
}
Result<Have> have_of(const wire::Have& from) {
  Have have;
  if (from.has_position()) have.position = Version{from.position()};
  if (static_cast<std::size_t>(from.items_size()) > kHaveItemsMax)
    return bad("{} publications listed, the limit is {}", from.items_size(), kHaveItemsMax);
  std::uint64_t chunks_total = 0;
  for (const wire::HaveItem& item : from.items()) {
    ECHO_ASSIGN(const PublicationKey key, key_of(item));
    chunks_total += item.chunks();
    if (chunks_total > 4ull * kChunksMax)
      return bad("{} chunks listed, the limit is {}", chunks_total, 4ull * kChunksMax);
    if (item.bitmap().empty()) {
      have.chunks[key] = ChunkSet::all(item.chunks());
      continue;
    }
    auto set = ChunkSet::from_bytes(item.chunks(), item.bitmap());
    if (!set)
      return bad("{}: a bitmap of {} bytes does not fit {} chunks", to_text(key), item.bitmap().size(), item.chunks());
    have.chunks[key] = std::move(*set);
  }
  return have;
}
Result<Manifest> manifest_of(const wire::Manifest& from) {
  Manifest m;
  ECHO_ASSIGN(m.key, key_of(from));
  ECHO_ASSIGN(m.policy_digest, digest(from.policy_digest(), "policy digest"));
  ECHO_ASSIGN(m.payload_digest, digest(from.payload_digest(), "payload digest"));
  m.payload_bytes = from.payload_bytes();
  m.chunk_bytes = from.chunk_bytes();
  if (m.chunk_bytes < kChunkBytesMin || m.chunk_bytes > kChunkBytesMax)
    return bad("expected a chunk of {} to {} bytes, found {}", kChunkBytesMin, kChunkBytesMax, m.chunk_bytes);
  if (m.payload_bytes > std::uint64_t{kChunksMax} * m.chunk_bytes)
    return bad("a payload of {} bytes in chunks of {} has more than {} chunks", m.payload_bytes, m.chunk_bytes,
               kChunksMax);
  return m;
}
Status check_protocol(std::uint32_t found) {
  if (found != kProtocol)
    return bad("expected protocol {}, found {}: use the same release on every machine", kProtocol, found);
  return ok();
}

}  // namespace

std::vector<std::byte> encode_control(const ControlMessage& message) {
  wire::ControlMessage out;
  std::visit(Overloaded{
                 [&](const Hello& m) {
                   auto& w = *out.mutable_hello();
                   w.set_protocol(kProtocol);
                   w.set_run_id(cut(m.run_id));
                   w.set_name(cut(m.name));
                   set_endpoint(*w.mutable_data(), m.data);
                   if (m.up) w.set_up_bits_per_s(m.up->bits_per_s);
                   if (m.down) w.set_down_bits_per_s(m.down->bits_per_s);
                 },
                 [&](const Welcome& m) {
                   auto& w = *out.mutable_welcome();
                   w.set_worker(m.worker.value);
                   w.set_heartbeat_ns(static_cast<std::uint64_t>(m.heartbeat.count()));
                   w.set_learner_timeout_ns(static_cast<std::uint64_t>(m.learner_timeout.count()));
                   w.set_application(m.application);
                 },
                 [&](const Assign& m) {
                   auto& w = *out.mutable_assign();
                   w.set_parent(m.parent.value);
                   set_endpoint(*w.mutable_endpoint(), m.endpoint);
                 },
                 [&](const Manifest& m) {
                   auto& w = *out.mutable_manifest();
                   set_key(w, m.key);
                   w.set_policy_digest(to_string(m.policy_digest));
                   w.set_payload_digest(to_string(m.payload_digest));
                   w.set_payload_bytes(m.payload_bytes);
                   w.set_chunk_bytes(m.chunk_bytes);
                 },
                 [&](const Have& m) { set_have(*out.mutable_have(), m); },
                 [&](const PeerHello& m) {
                   auto& w = *out.mutable_peer_hello();
                   w.set_protocol(kProtocol);
                   w.set_run_id(cut(m.run_id));
                   w.set_worker(m.worker.value);
                   if (m.catch_up_to) w.set_catch_up_to(m.catch_up_to->value);
                   w.set_full_only(m.full_only);
                   set_have(*w.mutable_have(), m.have);
                 },
                 [&](const ChunkRequest& m) {
                   auto& w = *out.mutable_chunk_request();
                   set_key(w, m.key);
                   w.set_index(m.index);
                 },
                 [&](const CannotServe& m) {
                   auto& w = *out.mutable_cannot_serve();
                   w.set_target(m.target.value);
                   w.set_behind(m.behind);
                 },
                 [&](const EdgeFailed& m) {
                   auto& w = *out.mutable_edge_failed();
                   w.set_parent(m.parent.value);
                   w.set_reason(cut(m.reason));
                 },
                 [&](const Ack& m) {
                   auto& w = *out.mutable_ack();
                   w.set_version(m.version.value);
                   w.set_policy_digest(to_string(m.policy_digest));
                 },
                 [&](const Heartbeat& m) {
                   auto& w = *out.mutable_heartbeat();
                   if (m.version) w.set_version(m.version->value);
                   w.set_chunk_bytes_in(m.chunk_bytes_in);
                   w.set_chunk_bytes_forwarded(m.chunk_bytes_forwarded);
                   w.set_chunks_duplicate(m.chunks_duplicate);
                   w.set_chunks_corrupt(m.chunks_corrupt);
                   if (m.forwarding_rate) w.set_forwarding_bits_per_s(m.forwarding_rate->bits_per_s);
                   w.set_application(m.application);
                 },
                 [&](const Goodbye& m) { out.mutable_goodbye()->set_reason(cut(m.reason)); },
             },
             message);
  std::string body;
  ECHO_CHECK(out.SerializeToString(&body), "control message cannot be written");
  return encode_frame(FrameType::kControl, std::as_bytes(std::span(body)));
}

Result<ControlMessage> decode_control(std::span<const std::byte> body) {
  wire::ControlMessage in;
  if (!in.ParseFromArray(body.data(), static_cast<int>(body.size())))
    return bad("{} bytes are not a valid message", body.size());
  switch (in.kind_case()) {
    case wire::ControlMessage::kHello: {
      const auto& w = in.hello();
      ECHO_TRY(check_protocol(w.protocol()));
      Hello m;
      ECHO_ASSIGN(m.run_id, text(w.run_id(), "run id"));
      ECHO_ASSIGN(m.name, text(w.name(), "name"));
      ECHO_ASSIGN(m.data, endpoint_of(w.data()));
      ECHO_ASSIGN(m.up, rate_of(w.has_up_bits_per_s(), w.up_bits_per_s(), "up"));
      ECHO_ASSIGN(m.down, rate_of(w.has_down_bits_per_s(), w.down_bits_per_s(), "down"));
      return ControlMessage(std::move(m));
    }
    case wire::ControlMessage::kWelcome: {
      const auto& w = in.welcome();
      constexpr std::uint64_t kDayNs = 86'400'000'000'000;
      if (w.worker() == 0) return bad("a welcome without a worker id");
      if (w.heartbeat_ns() < 1'000'000 || w.heartbeat_ns() > kDayNs || w.learner_timeout_ns() < 1'000'000 ||
          w.learner_timeout_ns() > kDayNs)
        return bad("expected a heartbeat and a timeout from 1 ms to a day, found {} ns and {} ns", w.heartbeat_ns(),
                   w.learner_timeout_ns());
      return ControlMessage(
          Welcome{WorkerId{w.worker()}, Duration(w.heartbeat_ns()), Duration(w.learner_timeout_ns()), w.application()});
    }
    case wire::ControlMessage::kAssign: {
      ECHO_ASSIGN(Endpoint endpoint, endpoint_of(in.assign().endpoint()));
      return ControlMessage(Assign{WorkerId{in.assign().parent()}, std::move(endpoint)});
    }
    case wire::ControlMessage::kManifest: {
      ECHO_ASSIGN(Manifest m, manifest_of(in.manifest()));
      return ControlMessage(m);
    }
    case wire::ControlMessage::kHave: {
      ECHO_ASSIGN(Have m, have_of(in.have()));
      return ControlMessage(std::move(m));
    }
    case wire::ControlMessage::kPeerHello: {
      const auto& w = in.peer_hello();
      ECHO_TRY(check_protocol(w.protocol()));
      PeerHello m;
      ECHO_ASSIGN(m.run_id, text(w.run_id(), "run id"));
      m.worker = WorkerId{w.worker()};
      if (w.has_catch_up_to()) m.catch_up_to = Version{w.catch_up_to()};
      m.full_only = w.full_only();
      ECHO_ASSIGN(m.have, have_of(w.have()));
      return ControlMessage(std::move(m));
    }
    case wire::ControlMessage::kChunkRequest: {
      ECHO_ASSIGN(const PublicationKey key, key_of(in.chunk_request()));
      return ControlMessage(ChunkRequest{key, in.chunk_request().index()});
    }
    case wire::ControlMessage::kCannotServe:
      return ControlMessage(CannotServe{Version{in.cannot_serve().target()}, in.cannot_serve().behind()});
    case wire::ControlMessage::kEdgeFailed: {
      ECHO_ASSIGN(std::string reason, text(in.edge_failed().reason(), "reason"));
      return ControlMessage(EdgeFailed{WorkerId{in.edge_failed().parent()}, std::move(reason)});
    }
    case wire::ControlMessage::kAck: {
      ECHO_ASSIGN(const Digest d, digest(in.ack().policy_digest(), "policy digest"));
      return ControlMessage(Ack{Version{in.ack().version()}, d});
    }
    case wire::ControlMessage::kHeartbeat: {
      const auto& w = in.heartbeat();
      Heartbeat m;
      if (w.has_version()) m.version = Version{w.version()};
      m.chunk_bytes_in = w.chunk_bytes_in();
      m.chunk_bytes_forwarded = w.chunk_bytes_forwarded();
      m.chunks_duplicate = w.chunks_duplicate();
      m.chunks_corrupt = w.chunks_corrupt();
      ECHO_ASSIGN(m.forwarding_rate,
                  rate_of(w.has_forwarding_bits_per_s(), w.forwarding_bits_per_s(), "forwarding rate"));
      if (w.application().size() > kHeartbeatApplicationBytesMax)
        return bad("a heartbeat carries {} application bytes, the limit is {}", w.application().size(),
                   kHeartbeatApplicationBytesMax);
      m.application = w.application();
      return ControlMessage(std::move(m));
    }
    case wire::ControlMessage::kGoodbye: {
      ECHO_ASSIGN(std::string reason, text(in.goodbye().reason(), "reason"));
      return ControlMessage(Goodbye{std::move(reason)});
    }
    case wire::ControlMessage::KIND_NOT_SET:
      break;
  }
  return bad("a message of unknown kind: use the same release on every machine");
}

}  // namespace echoline::overlay

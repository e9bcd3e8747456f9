// Converts control messages to and from protobuf, and checks them. Called by cores and driver.
#include "overlay/wire/control.hpp"

#include <cmath>
#include <cstring>

#include "base/text.hpp"
#include "overlay/trust/authority.hpp"
#include "overlay/wire/bytes.hpp"
#include "overlay/wire/control.pb.h"

namespace echoline::overlay {
namespace {

// In this file, `proto` is the protobuf form of `message`.

// The error of a message that breaks a rule.
template <class... Args>
Error bad(fmt::format_string<Args...> format, Args&&... args) {
  return fail(Code::kCorrupt, "read control message", format, std::forward<Args>(args)...);
}

// ---- values ----

// Text for people, on one line. Both encoding and decoding clean it, so callers never see a peer's raw bytes.
std::string line(std::string_view text) { return printable(text, kTextBytesMax - std::string_view("...").size()); }

// Binary fields, unchanged.
Result<std::string> bytes_of(const std::string& from, std::string_view what, std::size_t bytes_max) {
  if (from.size() > bytes_max) return bad("{} of {} bytes, the limit is {}", what, from.size(), bytes_max);
  return from;
}

Result<std::string> line_of(const std::string& from, std::string_view what) {
  ECHO_ASSIGN(const std::string text, bytes_of(from, what, kTextBytesMax));
  return line(text);
}

// Binary fields of a fixed length.
template <class Array>
Result<Array> array_of(const std::string& from, std::string_view what) {
  Array array{};
  if (!copy_exact(from, array)) return bad("{}: expected {} bytes, found {}", what, array.size(), from.size());
  return array;
}

Result<std::vector<std::byte>> der_of(const std::string& from, std::string_view what) {
  if (from.empty() || from.size() > trust::kCertificateBytesMax)
    return bad("{}: expected 1 to {} bytes, found {}", what, trust::kCertificateBytesMax, from.size());
  const auto bytes = std::as_bytes(std::span(from));
  return std::vector<std::byte>(bytes.begin(), bytes.end());
}

template <class Message>
void set_key(Message& to, const PublicationKey& key) {
  to.set_version(key.version.value);
  if (key.base) to.set_base(key.base->value);
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

Result<std::optional<BitRate>> rate_of(bool has, double value, std::string_view what) {
  if (!has) return std::optional<BitRate>();
  if (!std::isfinite(value) || value <= 0) return bad("{}: expected a positive rate, found {}", what, value);
  return std::optional(BitRate{value});
}

Status check_protocol(std::uint32_t found) {
  if (found != kProtocol)
    return bad("expected protocol {}, found {}: use the same release on every machine", kProtocol, found);
  return ok();
}

template <class Items>
Status check_count(const Items& items, std::string_view what, std::size_t count_max = kReportsMax) {
  if (static_cast<std::size_t>(items.size()) > count_max)
    return bad("{} {} listed, the limit is {}", items.size(), what, count_max);
  return ok();
}

// ---- parts of messages ----

void write(const Endpoint& message, wire::Endpoint& proto) {
  proto.set_host(line(message.host));
  proto.set_port(message.port);
}
Result<Endpoint> read(const wire::Endpoint& proto) {
  ECHO_ASSIGN(std::string host, line_of(proto.host(), "host"));
  if (proto.port() < 1 || proto.port() > 65535) return bad("expected a port from 1 to 65535, found {}", proto.port());
  return Endpoint{std::move(host), static_cast<std::uint16_t>(proto.port())};
}

void write(const Signed& message, wire::Signed& proto) {
  proto.set_body(message.body);
  proto.set_signature(bytes_as_string(message.signature.bytes));
}
template <class Message = Signed>
Result<Message> read_signed(const wire::Signed& proto) {
  Message message;
  ECHO_ASSIGN(message.body, bytes_of(proto.body(), "signed body", kSignedBytesMax));
  ECHO_ASSIGN(message.signature.bytes, array_of<decltype(trust::Signature::bytes)>(proto.signature(), "signature"));
  return message;
}

template <class Body>
Result<std::optional<SignedGrant>> read_grant(const Body& proto) {
  if (!proto.has_grant()) return std::optional<SignedGrant>();
  ECHO_ASSIGN(SignedGrant grant, read_signed<SignedGrant>(proto.grant()));
  return std::optional(std::move(grant));
}

void write(const Installed& message, wire::Installed& proto) {
  proto.set_version(message.version.value);
  proto.set_policy_digest(bytes_as_string(message.policy_digest));
  proto.set_epoch(message.epoch);
  proto.set_verify_ns(static_cast<std::uint64_t>(message.verify.count()));
  proto.set_install_ns(static_cast<std::uint64_t>(message.install.count()));
}
Result<Installed> read(const wire::Installed& proto) {
  const auto stage = [](std::uint64_t ns) {  // a duration of at most kStageMax
    return Duration(static_cast<std::int64_t>(std::min(ns, static_cast<std::uint64_t>(kStageMax.count()))));
  };
  ECHO_ASSIGN(const Digest digest, array_of<Digest>(proto.policy_digest(), "policy digest"));
  return Installed{Version{proto.version()}, digest, proto.epoch(), stage(proto.verify_ns()),
                   stage(proto.install_ns())};
}

void write(const Parent& message, wire::Parent& proto) {
  proto.set_worker(message.worker.value);
  write(message.endpoint, *proto.mutable_endpoint());
  proto.set_stripes(message.stripe_mask);
  proto.set_dials(message.dials);
}
Result<Parent> read(const wire::Parent& proto) {
  ECHO_ASSIGN(Endpoint endpoint, read(proto.endpoint()));
  return Parent{WorkerId{proto.worker()}, std::move(endpoint), proto.stripes(), proto.dials()};
}

void write(const Have& message, wire::Have& proto) {
  if (message.position) proto.set_position(message.position->value);
  proto.set_stripes(message.wanted.stripes);
  proto.set_wanted(message.wanted.wanted);
  for (const auto& [key, have] : message.items) {
    wire::HaveItem& item = *proto.add_items();
    set_key(item, key);
    item.set_publication(bytes_as_string(have.publication));
    const std::uint32_t chunk_count = have.complete ? have.chunks.count() : have.chunks.end();
    item.set_chunks(chunk_count);
    if (!have.complete) item.set_bitmap(have.chunks.to_bytes(chunk_count));  // without a bitmap: all chunks
  }
}
Result<Have> read(const wire::Have& proto) {
  Have have;
  if (proto.has_position()) have.position = Version{proto.position()};
  if (!StripeMask::is_valid(proto.stripes(), proto.wanted()))
    return bad("expected a power of two of at most {} stripes, found {} with mask {:#x}", kStripesMax, proto.stripes(),
               proto.wanted());
  have.wanted = {proto.stripes(), proto.wanted()};
  ECHO_TRY(check_count(proto.items(), "publications", kHaveItemsMax));
  constexpr std::uint64_t kChunksListedMax = 2ull * kChunksMax;  // twice as many as an honest child lists
  std::uint64_t chunks_total = 0;
  for (const wire::HaveItem& item : proto.items()) {
    ECHO_ASSIGN(const PublicationKey key, key_of(item));
    Have::Item& to = have.items[key];
    ECHO_ASSIGN(to.publication, array_of<PublicationId>(item.publication(), "publication"));
    chunks_total += item.chunks();
    if (chunks_total > kChunksListedMax)
      return bad("{} chunks listed, the limit is {}", chunks_total, kChunksListedMax);
    to.complete = item.bitmap().empty() && item.chunks() > 0;
    if (to.complete) {
      to.chunks = ChunkSet::all(item.chunks());
      continue;
    }
    auto set = ChunkSet::from_bytes(item.chunks(), item.bitmap());
    if (!set)
      return bad("{}: a bitmap of {} bytes does not fit {} chunks", to_text(key), item.bitmap().size(), item.chunks());
    to.chunks = std::move(*set);
  }
  return have;
}

template <class Message>
void write_progress(const std::vector<Progress>& items, Message& proto) {
  for (const Progress& item : items) {
    wire::Progress& proto_progress = *proto.add_progress();
    proto_progress.set_publication(bytes_as_string(item.publication));
    for (const std::uint32_t chunk_count : item.chunks) proto_progress.add_chunks(chunk_count);
  }
}
template <class Message>
Result<std::vector<Progress>> read_progress(const Message& proto) {
  ECHO_TRY(check_count(proto.progress(), "progress items"));
  std::vector<Progress> items;
  for (const wire::Progress& proto_progress : proto.progress()) {
    Progress item;
    ECHO_ASSIGN(item.publication, array_of<PublicationId>(proto_progress.publication(), "publication"));
    ECHO_TRY(check_count(proto_progress.chunks(), "stripes", kStripesMax));
    item.chunks.assign(proto_progress.chunks().begin(), proto_progress.chunks().end());
    items.push_back(std::move(item));
  }
  return items;
}

// ---- messages: write_to puts a message into the envelope, read decodes it ----

void write_to(wire::ControlMessage& out, const Enrol& message) {
  auto& proto = *out.mutable_enrol();
  proto.set_token(message.token);
  proto.set_instance(line(message.instance));
  proto.set_public_key(bytes_as_string(message.key.bytes));
  proto.set_proof(bytes_as_string(message.proof.bytes));
}
Result<Enrol> read(const wire::Enrol& proto) {
  Enrol message;
  ECHO_ASSIGN(message.token, bytes_of(proto.token(), "token", kTokenBytesMax));
  ECHO_ASSIGN(message.instance, line_of(proto.instance(), "instance"));
  ECHO_ASSIGN(message.key.bytes, array_of<decltype(trust::PublicKey::bytes)>(proto.public_key(), "public key"));
  ECHO_ASSIGN(message.proof.bytes, array_of<decltype(trust::Signature::bytes)>(proto.proof(), "proof"));
  return message;
}

void write_to(wire::ControlMessage& out, const Return& message) {
  auto& proto = *out.mutable_return_to();
  proto.set_public_key(bytes_as_string(message.key.bytes));
  proto.set_proof(bytes_as_string(message.proof.bytes));
}
Result<Return> read(const wire::Return& proto) {
  Return message;
  ECHO_ASSIGN(message.key.bytes, array_of<decltype(trust::PublicKey::bytes)>(proto.public_key(), "public key"));
  ECHO_ASSIGN(message.proof.bytes, array_of<decltype(trust::Signature::bytes)>(proto.proof(), "proof"));
  return message;
}

std::string as_string(const std::vector<std::byte>& der) {
  return std::string(reinterpret_cast<const char*>(der.data()), der.size());
}

void write_to(wire::ControlMessage& out, const Enrolled& message) {
  auto& proto = *out.mutable_enrolled();
  proto.set_worker(message.worker.value);
  proto.set_certificate(as_string(message.certificate));
  proto.set_authority(as_string(message.authority));
  proto.set_unix_ms(message.unix_ms);
}
Result<Enrolled> read(const wire::Enrolled& proto) {
  Enrolled message;
  if (proto.worker() == 0) return bad("an enrolment without a worker id");
  message.worker = WorkerId{proto.worker()};
  ECHO_ASSIGN(message.certificate, der_of(proto.certificate(), "certificate"));
  ECHO_ASSIGN(message.authority, der_of(proto.authority(), "authority"));
  message.unix_ms = proto.unix_ms();
  return message;
}

void write_to(wire::ControlMessage& out, const Renew& message) {
  out.mutable_renew()->set_public_key(bytes_as_string(message.key.bytes));
}
Result<Renew> read(const wire::Renew& proto) {
  Renew message;
  ECHO_ASSIGN(message.key.bytes, array_of<decltype(trust::PublicKey::bytes)>(proto.public_key(), "public key"));
  return message;
}
void write_to(wire::ControlMessage& out, const Renewed& message) {
  out.mutable_renewed()->set_certificate(as_string(message.certificate));
}
Result<Renewed> read(const wire::Renewed& proto) {
  ECHO_ASSIGN(std::vector<std::byte> der, der_of(proto.certificate(), "certificate"));
  return Renewed{std::move(der)};
}

void write_to(wire::ControlMessage& out, const Hello& message) {
  auto& proto = *out.mutable_hello();
  proto.set_protocol(kProtocol);
  proto.set_run_id(line(message.run_id));
  proto.set_name(line(message.name));
  write(message.data, *proto.mutable_data());
  if (message.up) proto.set_up_bits_per_s(message.up->bits_per_s);
  if (message.down) proto.set_down_bits_per_s(message.down->bits_per_s);
  if (message.installed) write(*message.installed, *proto.mutable_installed());
  if (!message.place.empty()) proto.set_place(line(message.place));
}
Result<Hello> read(const wire::Hello& proto) {
  ECHO_TRY(check_protocol(proto.protocol()));
  Hello message;
  ECHO_ASSIGN(message.run_id, line_of(proto.run_id(), "run id"));
  ECHO_ASSIGN(message.name, line_of(proto.name(), "name"));
  ECHO_ASSIGN(message.data, read(proto.data()));
  ECHO_ASSIGN(message.up, rate_of(proto.has_up_bits_per_s(), proto.up_bits_per_s(), "up"));
  ECHO_ASSIGN(message.down, rate_of(proto.has_down_bits_per_s(), proto.down_bits_per_s(), "down"));
  if (proto.has_installed()) {
    ECHO_ASSIGN(message.installed, read(proto.installed()));
  }
  ECHO_ASSIGN(message.place, line_of(proto.place(), "place"));
  return message;
}

void write_to(wire::ControlMessage& out, const Welcome& message) {
  auto& proto = *out.mutable_welcome();
  proto.set_worker(message.worker.value);
  proto.set_heartbeat_ns(static_cast<std::uint64_t>(message.heartbeat.count()));
  proto.set_patience_ns(static_cast<std::uint64_t>(message.patience.count()));
  proto.set_unix_ms(message.unix_ms);
  proto.set_application(message.application);
  proto.set_away_ns(static_cast<std::uint64_t>(message.away_max.count()));
  proto.set_policy_bytes(message.policy.count);
}
Result<Welcome> read(const wire::Welcome& proto) {
  constexpr std::uint64_t kDayNs = 86'400'000'000'000;
  if (proto.worker() == 0) return bad("a welcome without a worker id");
  constexpr std::uint64_t kMillisecondNs = 1'000'000;
  for (const std::uint64_t ns : {proto.heartbeat_ns(), proto.patience_ns()})
    if (ns < kMillisecondNs || ns > kDayNs)
      return bad("expected a heartbeat and a patience from 1 ms to a day, found {} ns and {} ns", proto.heartbeat_ns(),
                 proto.patience_ns());
  if (proto.away_ns() > kDayNs) return bad("expected to be away for at most a day, found {} ns", proto.away_ns());
  if (proto.policy_bytes() > kPolicyBytesMax)
    return bad("expected a policy of at most {} bytes, found {}", kPolicyBytesMax, proto.policy_bytes());
  return Welcome{
      WorkerId{proto.worker()}, Duration(proto.heartbeat_ns()), Duration(proto.patience_ns()), proto.unix_ms(),
      proto.application(),      Duration(proto.away_ns()),      Bytes{proto.policy_bytes()}};
}

void write_to(wire::ControlMessage& out, const Assign& message) {
  auto& proto = *out.mutable_assign();
  proto.set_stripes(message.stripe_count);
  for (const Parent& parent : message.parents) write(parent, *proto.add_parents());
  if (message.grant) write(*message.grant, *proto.mutable_grant());
}
Result<Assign> read(const wire::Assign& proto) {
  Assign message;
  message.stripe_count = proto.stripes();
  std::uint64_t assigned_stripes = 0;  // bit j: stripe j has a parent
  for (const wire::Parent& proto_parent : proto.parents()) {
    ECHO_ASSIGN(Parent parent, read(proto_parent));
    if (!StripeMask::is_valid(message.stripe_count, parent.stripe_mask) || parent.stripe_mask == 0 ||
        (assigned_stripes & parent.stripe_mask))
      return bad("the stripes {:#x} of parent {} do not fit {} stripes", parent.stripe_mask, parent.worker,
                 message.stripe_count);
    assigned_stripes |= parent.stripe_mask;
    message.parents.push_back(std::move(parent));
  }
  if (!StripeMask::is_valid(message.stripe_count, assigned_stripes) ||
      static_cast<unsigned>(std::popcount(assigned_stripes)) != message.stripe_count)
    return bad("expected a parent for each of {} stripes, found the mask {:#x}", message.stripe_count,
               assigned_stripes);
  ECHO_ASSIGN(message.grant, read_grant(proto));
  return message;
}

void write_to(wire::ControlMessage& out, const SignedGrant& message) { write(message, *out.mutable_grant()); }
void write_to(wire::ControlMessage& out, const Release& message) {
  out.mutable_release()->set_child(message.child.value);
  out.mutable_release()->set_issued(message.issued);
}
Result<Release> read(const wire::Release& proto) { return Release{WorkerId{proto.child()}, proto.issued()}; }

void write_to(wire::ControlMessage& out, const DialChild& message) {
  auto& proto = *out.mutable_dial_child();
  proto.set_worker(message.worker.value);
  write(message.endpoint, *proto.mutable_endpoint());
}
Result<DialChild> read(const wire::DialChild& proto) {
  ECHO_ASSIGN(Endpoint endpoint, read(proto.endpoint()));
  if (proto.worker() == 0) return bad("expected a worker, found the learner, which has no parent");
  return DialChild{WorkerId{proto.worker()}, std::move(endpoint)};
}

void write_to(wire::ControlMessage& out, const NeedHelp& message) {
  auto& proto = *out.mutable_need_help();
  proto.set_target(message.target.value);
  proto.set_full_only(message.full_only);
  if (message.position) proto.set_position(message.position->value);
  proto.set_stalled(message.stalled);
}
Result<NeedHelp> read(const wire::NeedHelp& proto) {
  NeedHelp message{Version{proto.target()}, proto.full_only(), {}, proto.stalled()};
  if (proto.has_position()) message.position = Version{proto.position()};
  return message;
}

void write_to(wire::ControlMessage& out, const Help& message) {
  auto& proto = *out.mutable_help();
  write(message.from, *proto.mutable_from());
  proto.set_target(message.target.value);
  proto.set_full_only(message.full_only);
  if (message.grant) write(*message.grant, *proto.mutable_grant());
}
Result<Help> read(const wire::Help& proto) {
  ECHO_ASSIGN(Parent from, read(proto.from()));
  ECHO_ASSIGN(std::optional<SignedGrant> grant, read_grant(proto));
  return Help{std::move(from), Version{proto.target()}, proto.full_only(), std::move(grant)};
}

void write_to(wire::ControlMessage& out, const SignedAnnouncement& message) {
  write(message, *out.mutable_announcement());
}
void write_to(wire::ControlMessage& out, const SignedManifest& message) { write(message, *out.mutable_manifest()); }
void write_to(wire::ControlMessage& out, const SignedBeacon& message) { write(message, *out.mutable_beacon()); }

void write_to(wire::ControlMessage& out, const PeerHello& message) {
  auto& proto = *out.mutable_peer_hello();
  proto.set_protocol(kProtocol);
  proto.set_run_id(line(message.run_id));
  proto.set_stream(message.stream);
  if (message.catch_up_to) proto.set_catch_up_to(message.catch_up_to->value);
  proto.set_full_only(message.full_only);
  write(message.have, *proto.mutable_have());
  proto.set_have_follows(message.have_follows);
  if (message.grant) write(*message.grant, *proto.mutable_grant());
}
Result<PeerHello> read(const wire::PeerHello& proto) {
  ECHO_TRY(check_protocol(proto.protocol()));
  PeerHello message;
  ECHO_ASSIGN(message.run_id, line_of(proto.run_id(), "run id"));
  message.stream = proto.stream();
  if (proto.has_catch_up_to()) message.catch_up_to = Version{proto.catch_up_to()};
  message.full_only = proto.full_only();
  ECHO_ASSIGN(message.have, read(proto.have()));
  message.have_follows = proto.have_follows();
  ECHO_ASSIGN(message.grant, read_grant(proto));
  return message;
}

void write_to(wire::ControlMessage& out, const Have& message) { write(message, *out.mutable_have()); }

void write_to(wire::ControlMessage& out, const MoreStreams& message) {
  out.mutable_more_streams()->set_streams(message.streams);
}
Result<MoreStreams> read(const wire::MoreStreams& proto) { return MoreStreams{proto.streams()}; }

void write_to(wire::ControlMessage& out, const ChunkRequest& message) {
  auto& proto = *out.mutable_chunk_request();
  proto.set_publication(bytes_as_string(message.publication));
  proto.set_index(message.index);
}
Result<ChunkRequest> read(const wire::ChunkRequest& proto) {
  ECHO_ASSIGN(const PublicationId id, array_of<PublicationId>(proto.publication(), "publication"));
  return ChunkRequest{id, proto.index()};
}

void write_to(wire::ControlMessage& out, const CannotServe& message) {
  auto& proto = *out.mutable_cannot_serve();
  proto.set_target(message.target.value);
  proto.set_behind(message.snapshot_is_cheaper);
}
Result<CannotServe> read(const wire::CannotServe& proto) {
  return CannotServe{Version{proto.target()}, proto.behind()};
}

void write_to(wire::ControlMessage& out, const EdgeStatus& message) {
  auto& proto = *out.mutable_edge_status();
  if (message.beacon) write(*message.beacon, *proto.mutable_beacon());
  write_progress(message.progress, proto);
}
Result<EdgeStatus> read(const wire::EdgeStatus& proto) {
  EdgeStatus message;
  if (proto.has_beacon()) {
    ECHO_ASSIGN(message.beacon, read_signed(proto.beacon()));
  }
  ECHO_ASSIGN(message.progress, read_progress(proto));
  return message;
}

void write_to(wire::ControlMessage& out, const EdgeFailed& message) {
  auto& proto = *out.mutable_edge_failed();
  proto.set_parent(message.parent.value);
  proto.set_kind(static_cast<std::uint32_t>(message.kind));
  proto.set_reason(line(message.reason));
}
Result<EdgeFailed> read(const wire::EdgeFailed& proto) {
  EdgeFailed message;
  message.parent = WorkerId{proto.parent()};
  static_assert(static_cast<int>(EdgeTroubleKind::kRefused) == 3);  // the last one
  if (proto.kind() > 3) return bad("expected a kind of failure from 0 to 3, found {}", proto.kind());
  message.kind = static_cast<EdgeTroubleKind>(proto.kind());
  ECHO_ASSIGN(message.reason, line_of(proto.reason(), "reason"));
  return message;
}

void write_to(wire::ControlMessage& out, const Poisoned& message) {
  auto& proto = *out.mutable_poisoned();
  proto.set_parent(message.parent.value);
  proto.set_publication(bytes_as_string(message.publication));
  proto.set_index(message.index);
}
Result<Poisoned> read(const wire::Poisoned& proto) {
  ECHO_ASSIGN(const PublicationId id, array_of<PublicationId>(proto.publication(), "publication"));
  return Poisoned{WorkerId{proto.parent()}, id, proto.index()};
}

void write_to(wire::ControlMessage& out, const Installed& message) { write(message, *out.mutable_ack()); }

void write_to(wire::ControlMessage& out, const Heartbeat& message) {
  auto& proto = *out.mutable_heartbeat();
  if (message.installed) write(*message.installed, *proto.mutable_installed());
  proto.set_chunk_bytes_in(message.chunk_bytes_in);
  proto.set_chunk_bytes_forwarded(message.chunk_bytes_forwarded);
  proto.set_chunks_duplicate(message.chunks_duplicate);
  proto.set_chunks_corrupt(message.chunks_corrupt);
  if (message.forwarding_rate) proto.set_forwarding_bits_per_s(message.forwarding_rate->bits_per_s);
  write_progress(message.progress, proto);
  for (const EdgeReport& report : message.edges) {
    wire::EdgeReport& proto_report = *proto.add_edges();
    proto_report.set_child(report.child.value);
    proto_report.set_bytes(report.bytes);
    proto_report.set_bits_per_s(report.rate.bits_per_s);
    proto_report.set_limit(static_cast<std::uint32_t>(report.limit));
    proto_report.set_streams(report.streams);
  }
  for (const Holding& holding : message.holdings) {
    wire::Holding& proto_holding = *proto.add_holdings();
    set_key(proto_holding, holding.key);
    proto_holding.set_payload_bytes(holding.payload_bytes);
  }
  proto.set_application(message.application);
}
Result<Heartbeat> read(const wire::Heartbeat& proto) {
  Heartbeat message;
  if (proto.has_installed()) {
    ECHO_ASSIGN(message.installed, read(proto.installed()));
  }
  message.chunk_bytes_in = proto.chunk_bytes_in();
  message.chunk_bytes_forwarded = proto.chunk_bytes_forwarded();
  message.chunks_duplicate = proto.chunks_duplicate();
  message.chunks_corrupt = proto.chunks_corrupt();
  ECHO_ASSIGN(message.forwarding_rate,
              rate_of(proto.has_forwarding_bits_per_s(), proto.forwarding_bits_per_s(), "forwarding rate"));
  ECHO_ASSIGN(message.progress, read_progress(proto));
  ECHO_TRY(check_count(proto.edges(), "edges"));
  for (const wire::EdgeReport& proto_report : proto.edges()) {
    static_assert(static_cast<int>(EdgeLimit::kOwnLimit) == 3);  // the last one
    if (proto_report.limit() > 3) return bad("expected an edge limit from 0 to 3, found {}", proto_report.limit());
    if (!std::isfinite(proto_report.bits_per_s()) || proto_report.bits_per_s() < 0)
      return bad("expected an edge's rate, found {}", proto_report.bits_per_s());
    message.edges.push_back({WorkerId{proto_report.child()}, proto_report.bytes(), BitRate{proto_report.bits_per_s()},
                             static_cast<EdgeLimit>(proto_report.limit()), proto_report.streams()});
  }
  ECHO_TRY(check_count(proto.holdings(), "holdings"));
  for (const wire::Holding& proto_holding : proto.holdings()) {
    ECHO_ASSIGN(const PublicationKey key, key_of(proto_holding));
    message.holdings.push_back({key, proto_holding.payload_bytes()});
  }
  ECHO_ASSIGN(message.application, bytes_of(proto.application(), "application part", kHeartbeatApplicationBytesMax));
  return message;
}

void write_to(wire::ControlMessage& out, const Draining&) { out.mutable_draining(); }
Result<Draining> read(const wire::Draining&) { return Draining{}; }
void write_to(wire::ControlMessage& out, const Goodbye& message) {
  out.mutable_goodbye()->set_reason(line(message.reason));
  out.mutable_goodbye()->set_run_ended(message.run_ended);
}
Result<Goodbye> read(const wire::Goodbye& proto) {
  ECHO_ASSIGN(std::string reason, line_of(proto.reason(), "reason"));
  return Goodbye{std::move(reason), proto.run_ended()};
}
void write_to(wire::ControlMessage& out, const Trouble& message) {
  out.mutable_trouble()->set_text(line(message.text));
}
Result<Trouble> read(const wire::Trouble& proto) {
  ECHO_ASSIGN(std::string what, line_of(proto.text(), "text"));
  return Trouble{std::move(what)};
}

void write_to(wire::ControlMessage& out, const Notice& message) { out.mutable_notice()->set_text(line(message.text)); }
Result<Notice> read(const wire::Notice& proto) {
  ECHO_ASSIGN(std::string what, line_of(proto.text(), "text"));
  return Notice{std::move(what)};
}

template <class T>
Result<ControlMessage> envelope(Result<T> message) {
  if (!message) return std::move(message).error();
  return ControlMessage(*std::move(message));
}

}  // namespace

std::vector<std::byte> encode_control(const ControlMessage& message) {
  wire::ControlMessage out;
  std::visit([&](const auto& alternative) { write_to(out, alternative); }, message);
  std::string body;
  ECHO_CHECK(out.SerializeToString(&body), "control message cannot be written");
  return encode_frame(FrameType::kControl, std::as_bytes(std::span(body)));
}

Result<ControlMessage> decode_control(std::span<const std::byte> body) {
  wire::ControlMessage in;
  if (!in.ParseFromArray(body.data(), static_cast<int>(body.size())))
    return bad("{} bytes are not a valid message", body.size());
  using Kind = wire::ControlMessage;
  switch (in.kind_case()) {
    case Kind::kEnrol:
      return envelope(read(in.enrol()));
    case Kind::kReturnTo:
      return envelope(read(in.return_to()));
    case Kind::kGrant:
      return envelope(read_signed<SignedGrant>(in.grant()));
    case Kind::kRelease:
      return envelope(read(in.release()));
    case Kind::kNotice:
      return envelope(read(in.notice()));
    case Kind::kEnrolled:
      return envelope(read(in.enrolled()));
    case Kind::kRenew:
      return envelope(read(in.renew()));
    case Kind::kRenewed:
      return envelope(read(in.renewed()));
    case Kind::kHello:
      return envelope(read(in.hello()));
    case Kind::kWelcome:
      return envelope(read(in.welcome()));
    case Kind::kAssign:
      return envelope(read(in.assign()));
    case Kind::kDialChild:
      return envelope(read(in.dial_child()));
    case Kind::kNeedHelp:
      return envelope(read(in.need_help()));
    case Kind::kHelp:
      return envelope(read(in.help()));
    case Kind::kAnnouncement:
      return envelope(read_signed<SignedAnnouncement>(in.announcement()));
    case Kind::kManifest:
      return envelope(read_signed<SignedManifest>(in.manifest()));
    case Kind::kBeacon:
      return envelope(read_signed<SignedBeacon>(in.beacon()));
    case Kind::kPeerHello:
      return envelope(read(in.peer_hello()));
    case Kind::kHave:
      return envelope(read(in.have()));
    case Kind::kMoreStreams:
      return envelope(read(in.more_streams()));
    case Kind::kChunkRequest:
      return envelope(read(in.chunk_request()));
    case Kind::kCannotServe:
      return envelope(read(in.cannot_serve()));
    case Kind::kEdgeStatus:
      return envelope(read(in.edge_status()));
    case Kind::kEdgeFailed:
      return envelope(read(in.edge_failed()));
    case Kind::kPoisoned:
      return envelope(read(in.poisoned()));
    case Kind::kAck:
      return envelope(read(in.ack()));
    case Kind::kHeartbeat:
      return envelope(read(in.heartbeat()));
    case Kind::kDraining:
      return envelope(read(in.draining()));
    case Kind::kGoodbye:
      return envelope(read(in.goodbye()));
    case Kind::kTrouble:
      return envelope(read(in.trouble()));
    case Kind::KIND_NOT_SET:
      break;
  }
  return bad("a message of unknown kind: use the same release on every machine");
}

}  // namespace echoline::overlay

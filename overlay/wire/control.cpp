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

// In this file, `m` is a message and `w` its protobuf form.

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

template <class Array>
Result<Array> array_of(const std::string& from, std::string_view what) {
  Array a{};
  if (!copy(from, a)) return bad("{}: expected {} bytes, found {}", what, a.size(), from.size());
  return a;
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

void write(const Endpoint& m, wire::Endpoint& w) {
  w.set_host(line(m.host));
  w.set_port(m.port);
}
Result<Endpoint> read(const wire::Endpoint& w) {
  ECHO_ASSIGN(std::string host, line_of(w.host(), "host"));
  if (w.port() < 1 || w.port() > 65535) return bad("expected a port from 1 to 65535, found {}", w.port());
  return Endpoint{std::move(host), static_cast<std::uint16_t>(w.port())};
}

void write(const Signed& m, wire::Signed& w) {
  w.set_body(m.body);
  w.set_signature(raw(m.signature.bytes));
}
template <class Message = Signed>
Result<Message> read_signed(const wire::Signed& w) {
  Message m;
  ECHO_ASSIGN(m.body, bytes_of(w.body(), "signed body", kSignedBytesMax));
  ECHO_ASSIGN(m.signature.bytes, array_of<decltype(trust::Signature::bytes)>(w.signature(), "signature"));
  return m;
}

template <class Body>
Result<std::optional<SignedGrant>> read_grant(const Body& w) {
  if (!w.has_grant()) return std::optional<SignedGrant>();
  ECHO_ASSIGN(SignedGrant grant, read_signed<SignedGrant>(w.grant()));
  return std::optional(std::move(grant));
}

void write(const Installed& m, wire::Installed& w) {
  w.set_version(m.version.value);
  w.set_policy_digest(raw(m.policy_digest));
  w.set_epoch(m.epoch);
  w.set_verify_ns(static_cast<std::uint64_t>(m.verify.count()));
  w.set_install_ns(static_cast<std::uint64_t>(m.install.count()));
}
Result<Installed> read(const wire::Installed& w) {
  const auto stage = [](std::uint64_t ns) {
    return Duration(static_cast<std::int64_t>(std::min(ns, static_cast<std::uint64_t>(kStageMax.count()))));
  };
  ECHO_ASSIGN(const Digest digest, array_of<Digest>(w.policy_digest(), "policy digest"));
  return Installed{Version{w.version()}, digest, w.epoch(), stage(w.verify_ns()), stage(w.install_ns())};
}

void write(const Parent& m, wire::Parent& w) {
  w.set_worker(m.worker.value);
  write(m.endpoint, *w.mutable_endpoint());
  w.set_stripes(m.stripe_mask);
  w.set_dials(m.dials);
}
Result<Parent> read(const wire::Parent& w) {
  ECHO_ASSIGN(Endpoint endpoint, read(w.endpoint()));
  return Parent{WorkerId{w.worker()}, std::move(endpoint), w.stripes(), w.dials()};
}

void write(const Have& m, wire::Have& w) {
  if (m.position) w.set_position(m.position->value);
  w.set_stripes(m.wanted.stripes);
  w.set_wanted(m.wanted.wanted);
  for (const auto& [key, have] : m.items) {
    wire::HaveItem& item = *w.add_items();
    set_key(item, key);
    item.set_publication(raw(have.publication));
    const std::uint32_t size = have.complete ? have.chunks.count() : have.chunks.end();
    item.set_chunks(size);
    if (!have.complete) item.set_bitmap(have.chunks.to_bytes(size));
  }
}
Result<Have> read(const wire::Have& w) {
  Have have;
  if (w.has_position()) have.position = Version{w.position()};
  if (!StripeMask::valid(w.stripes(), w.wanted()))
    return bad("expected a power of two of at most {} stripes, found {} with mask {:#x}", kStripesMax, w.stripes(),
               w.wanted());
  have.wanted = {w.stripes(), w.wanted()};
  ECHO_TRY(check_count(w.items(), "publications", kHaveItemsMax));
  std::uint64_t chunks_total = 0;
  for (const wire::HaveItem& item : w.items()) {
    ECHO_ASSIGN(const PublicationKey key, key_of(item));
    Have::Item& to = have.items[key];
    ECHO_ASSIGN(to.publication, array_of<PublicationId>(item.publication(), "publication"));
    chunks_total += item.chunks();
    if (chunks_total > 2ull * kChunksMax)
      return bad("{} chunks listed, the limit is {}", chunks_total, 2ull * kChunksMax);
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
void write_progress(const std::vector<Progress>& items, Message& w) {
  for (const Progress& item : items) {
    wire::Progress& p = *w.add_progress();
    p.set_publication(raw(item.publication));
    for (const std::uint32_t n : item.chunks) p.add_chunks(n);
  }
}
template <class Message>
Result<std::vector<Progress>> read_progress(const Message& w) {
  ECHO_TRY(check_count(w.progress(), "progress items"));
  std::vector<Progress> items;
  for (const wire::Progress& p : w.progress()) {
    Progress item;
    ECHO_ASSIGN(item.publication, array_of<PublicationId>(p.publication(), "publication"));
    ECHO_TRY(check_count(p.chunks(), "stripes", kStripesMax));
    item.chunks.assign(p.chunks().begin(), p.chunks().end());
    items.push_back(std::move(item));
  }
  return items;
}

// ---- messages: write_to puts a message into the envelope, read decodes it ----

void write_to(wire::ControlMessage& out, const Enrol& m) {
  auto& w = *out.mutable_enrol();
  w.set_token(m.token);
  w.set_instance(line(m.instance));
  w.set_public_key(raw(m.key.bytes));
  w.set_proof(raw(m.proof.bytes));
}
Result<Enrol> read(const wire::Enrol& w) {
  Enrol m;
  ECHO_ASSIGN(m.token, bytes_of(w.token(), "token", kTokenBytesMax));
  ECHO_ASSIGN(m.instance, line_of(w.instance(), "instance"));
  ECHO_ASSIGN(m.key.bytes, array_of<decltype(trust::PublicKey::bytes)>(w.public_key(), "public key"));
  ECHO_ASSIGN(m.proof.bytes, array_of<decltype(trust::Signature::bytes)>(w.proof(), "proof"));
  return m;
}

void write_to(wire::ControlMessage& out, const Return& m) {
  auto& w = *out.mutable_return_to();
  w.set_public_key(raw(m.key.bytes));
  w.set_proof(raw(m.proof.bytes));
}
Result<Return> read(const wire::Return& w) {
  Return m;
  ECHO_ASSIGN(m.key.bytes, array_of<decltype(trust::PublicKey::bytes)>(w.public_key(), "public key"));
  ECHO_ASSIGN(m.proof.bytes, array_of<decltype(trust::Signature::bytes)>(w.proof(), "proof"));
  return m;
}

std::string as_string(const std::vector<std::byte>& der) {
  return std::string(reinterpret_cast<const char*>(der.data()), der.size());
}

void write_to(wire::ControlMessage& out, const Enrolled& m) {
  auto& w = *out.mutable_enrolled();
  w.set_worker(m.worker.value);
  w.set_certificate(as_string(m.certificate));
  w.set_authority(as_string(m.authority));
  w.set_unix_ms(m.unix_ms);
}
Result<Enrolled> read(const wire::Enrolled& w) {
  Enrolled m;
  if (w.worker() == 0) return bad("an enrolment without a worker id");
  m.worker = WorkerId{w.worker()};
  ECHO_ASSIGN(m.certificate, der_of(w.certificate(), "certificate"));
  ECHO_ASSIGN(m.authority, der_of(w.authority(), "authority"));
  m.unix_ms = w.unix_ms();
  return m;
}

void write_to(wire::ControlMessage& out, const Renew& m) { out.mutable_renew()->set_public_key(raw(m.key.bytes)); }
Result<Renew> read(const wire::Renew& w) {
  Renew m;
  ECHO_ASSIGN(m.key.bytes, array_of<decltype(trust::PublicKey::bytes)>(w.public_key(), "public key"));
  return m;
}
void write_to(wire::ControlMessage& out, const Renewed& m) {
  out.mutable_renewed()->set_certificate(as_string(m.certificate));
}
Result<Renewed> read(const wire::Renewed& w) {
  ECHO_ASSIGN(std::vector<std::byte> der, der_of(w.certificate(), "certificate"));
  return Renewed{std::move(der)};
}

void write_to(wire::ControlMessage& out, const Hello& m) {
  auto& w = *out.mutable_hello();
  w.set_protocol(kProtocol);
  w.set_run_id(line(m.run_id));
  w.set_name(line(m.name));
  write(m.data, *w.mutable_data());
  if (m.up) w.set_up_bits_per_s(m.up->bits_per_s);
  if (m.down) w.set_down_bits_per_s(m.down->bits_per_s);
  if (m.installed) write(*m.installed, *w.mutable_installed());
  if (!m.place.empty()) w.set_place(line(m.place));
}
Result<Hello> read(const wire::Hello& w) {
  ECHO_TRY(check_protocol(w.protocol()));
  Hello m;
  ECHO_ASSIGN(m.run_id, line_of(w.run_id(), "run id"));
  ECHO_ASSIGN(m.name, line_of(w.name(), "name"));
  ECHO_ASSIGN(m.data, read(w.data()));
  ECHO_ASSIGN(m.up, rate_of(w.has_up_bits_per_s(), w.up_bits_per_s(), "up"));
  ECHO_ASSIGN(m.down, rate_of(w.has_down_bits_per_s(), w.down_bits_per_s(), "down"));
  if (w.has_installed()) {
    ECHO_ASSIGN(m.installed, read(w.installed()));
  }
  ECHO_ASSIGN(m.place, line_of(w.place(), "place"));
  return m;
}

void write_to(wire::ControlMessage& out, const Welcome& m) {
  auto& w = *out.mutable_welcome();
  w.set_worker(m.worker.value);
  w.set_heartbeat_ns(static_cast<std::uint64_t>(m.heartbeat.count()));
  w.set_patience_ns(static_cast<std::uint64_t>(m.patience.count()));
  w.set_unix_ms(m.unix_ms);
  w.set_application(m.application);
  w.set_away_ns(static_cast<std::uint64_t>(m.away_max.count()));
  w.set_policy_bytes(m.policy.count);
}
Result<Welcome> read(const wire::Welcome& w) {
  constexpr std::uint64_t kDayNs = 86'400'000'000'000;
  if (w.worker() == 0) return bad("a welcome without a worker id");
  for (const std::uint64_t ns : {w.heartbeat_ns(), w.patience_ns()})
    if (ns < 1'000'000 || ns > kDayNs)
      return bad("expected a heartbeat and a patience from 1 ms to a day, found {} ns and {} ns", w.heartbeat_ns(),
                 w.patience_ns());
  if (w.away_ns() > kDayNs) return bad("expected to be away for at most a day, found {} ns", w.away_ns());
  if (w.policy_bytes() > kPolicyBytesMax)
    return bad("expected a policy of at most {} bytes, found {}", kPolicyBytesMax, w.policy_bytes());
  return Welcome{WorkerId{w.worker()}, Duration(w.heartbeat_ns()), Duration(w.patience_ns()), w.unix_ms(),
                 w.application(),      Duration(w.away_ns()),      Bytes{w.policy_bytes()}};
}

void write_to(wire::ControlMessage& out, const Assign& m) {
  auto& w = *out.mutable_assign();
  w.set_stripes(m.stripe_count);
  for (const Parent& parent : m.parents) write(parent, *w.add_parents());
  if (m.grant) write(*m.grant, *w.mutable_grant());
}
Result<Assign> read(const wire::Assign& w) {
  Assign m;
  m.stripe_count = w.stripes();
  std::uint64_t assigned_stripes = 0;  // bit j: stripe j has a parent
  for (const wire::Parent& p : w.parents()) {
    ECHO_ASSIGN(Parent parent, read(p));
    if (!StripeMask::valid(m.stripe_count, parent.stripe_mask) || parent.stripe_mask == 0 ||
        (assigned_stripes & parent.stripe_mask))
      return bad("the stripes {:#x} of parent {} do not fit {} stripes", parent.stripe_mask, parent.worker,
                 m.stripe_count);
    assigned_stripes |= parent.stripe_mask;
    m.parents.push_back(std::move(parent));
  }
  if (!StripeMask::valid(m.stripe_count, assigned_stripes) ||
      static_cast<unsigned>(std::popcount(assigned_stripes)) != m.stripe_count)
    return bad("expected a parent for each of {} stripes, found the mask {:#x}", m.stripe_count, assigned_stripes);
  ECHO_ASSIGN(m.grant, read_grant(w));
  return m;
}

void write_to(wire::ControlMessage& out, const SignedGrant& m) { write(m, *out.mutable_grant()); }
void write_to(wire::ControlMessage& out, const Release& m) {
  out.mutable_release()->set_child(m.child.value);
  out.mutable_release()->set_issued(m.issued);
}
Result<Release> read(const wire::Release& w) { return Release{WorkerId{w.child()}, w.issued()}; }

void write_to(wire::ControlMessage& out, const DialChild& m) {
  auto& w = *out.mutable_dial_child();
  w.set_worker(m.worker.value);
  write(m.endpoint, *w.mutable_endpoint());
}
Result<DialChild> read(const wire::DialChild& w) {
  ECHO_ASSIGN(Endpoint endpoint, read(w.endpoint()));
  if (w.worker() == 0) return bad("expected a worker, found the learner, which has no parent");
  return DialChild{WorkerId{w.worker()}, std::move(endpoint)};
}

void write_to(wire::ControlMessage& out, const NeedHelp& m) {
  auto& w = *out.mutable_need_help();
  w.set_target(m.target.value);
  w.set_full_only(m.full_only);
  if (m.position) w.set_position(m.position->value);
  w.set_stalled(m.stalled);
}
Result<NeedHelp> read(const wire::NeedHelp& w) {
  NeedHelp m{Version{w.target()}, w.full_only(), {}, w.stalled()};
  if (w.has_position()) m.position = Version{w.position()};
  return m;
}

void write_to(wire::ControlMessage& out, const Help& m) {
  auto& w = *out.mutable_help();
  write(m.from, *w.mutable_from());
  w.set_target(m.target.value);
  w.set_full_only(m.full_only);
  if (m.grant) write(*m.grant, *w.mutable_grant());
}
Result<Help> read(const wire::Help& w) {
  ECHO_ASSIGN(Parent from, read(w.from()));
  ECHO_ASSIGN(std::optional<SignedGrant> grant, read_grant(w));
  return Help{std::move(from), Version{w.target()}, w.full_only(), std::move(grant)};
}

void write_to(wire::ControlMessage& out, const SignedAnnouncement& m) { write(m, *out.mutable_announcement()); }
void write_to(wire::ControlMessage& out, const SignedManifest& m) { write(m, *out.mutable_manifest()); }
void write_to(wire::ControlMessage& out, const SignedBeacon& m) { write(m, *out.mutable_beacon()); }

void write_to(wire::ControlMessage& out, const PeerHello& m) {
  auto& w = *out.mutable_peer_hello();
  w.set_protocol(kProtocol);
  w.set_run_id(line(m.run_id));
  w.set_stream(m.stream);
  if (m.catch_up_to) w.set_catch_up_to(m.catch_up_to->value);
  w.set_full_only(m.full_only);
  write(m.have, *w.mutable_have());
  w.set_have_follows(m.have_follows);
  if (m.grant) write(*m.grant, *w.mutable_grant());
}
Result<PeerHello> read(const wire::PeerHello& w) {
  ECHO_TRY(check_protocol(w.protocol()));
  PeerHello m;
  ECHO_ASSIGN(m.run_id, line_of(w.run_id(), "run id"));
  m.stream = w.stream();
  if (w.has_catch_up_to()) m.catch_up_to = Version{w.catch_up_to()};
  m.full_only = w.full_only();
  ECHO_ASSIGN(m.have, read(w.have()));
  m.have_follows = w.have_follows();
  ECHO_ASSIGN(m.grant, read_grant(w));
  return m;
}

void write_to(wire::ControlMessage& out, const Have& m) { write(m, *out.mutable_have()); }

void write_to(wire::ControlMessage& out, const MoreStreams& m) { out.mutable_more_streams()->set_streams(m.streams); }
Result<MoreStreams> read(const wire::MoreStreams& w) { return MoreStreams{w.streams()}; }

void write_to(wire::ControlMessage& out, const ChunkRequest& m) {
  auto& w = *out.mutable_chunk_request();
  w.set_publication(raw(m.publication));
  w.set_index(m.index);
}
Result<ChunkRequest> read(const wire::ChunkRequest& w) {
  ECHO_ASSIGN(const PublicationId id, array_of<PublicationId>(w.publication(), "publication"));
  return ChunkRequest{id, w.index()};
}

void write_to(wire::ControlMessage& out, const CannotServe& m) {
  auto& w = *out.mutable_cannot_serve();
  w.set_target(m.target.value);
  w.set_behind(m.snapshot_is_cheaper);
}
Result<CannotServe> read(const wire::CannotServe& w) { return CannotServe{Version{w.target()}, w.behind()}; }

void write_to(wire::ControlMessage& out, const EdgeStatus& m) {
  auto& w = *out.mutable_edge_status();
  if (m.beacon) write(*m.beacon, *w.mutable_beacon());
  write_progress(m.progress, w);
}
Result<EdgeStatus> read(const wire::EdgeStatus& w) {
  EdgeStatus m;
  if (w.has_beacon()) {
    ECHO_ASSIGN(m.beacon, read_signed(w.beacon()));
  }
  ECHO_ASSIGN(m.progress, read_progress(w));
  return m;
}

void write_to(wire::ControlMessage& out, const EdgeFailed& m) {
  auto& w = *out.mutable_edge_failed();
  w.set_parent(m.parent.value);
  w.set_kind(static_cast<std::uint32_t>(m.kind));
  w.set_reason(line(m.reason));
}
Result<EdgeFailed> read(const wire::EdgeFailed& w) {
  EdgeFailed m;
  m.parent = WorkerId{w.parent()};
  if (w.kind() > 3) return bad("expected a kind of failure from 0 to 3, found {}", w.kind());
  m.kind = static_cast<EdgeTroubleKind>(w.kind());
  ECHO_ASSIGN(m.reason, line_of(w.reason(), "reason"));
  return m;
}

void write_to(wire::ControlMessage& out, const Poisoned& m) {
  auto& w = *out.mutable_poisoned();
  w.set_parent(m.parent.value);
  w.set_publication(raw(m.publication));
  w.set_index(m.index);
}
Result<Poisoned> read(const wire::Poisoned& w) {
  ECHO_ASSIGN(const PublicationId id, array_of<PublicationId>(w.publication(), "publication"));
  return Poisoned{WorkerId{w.parent()}, id, w.index()};
}

void write_to(wire::ControlMessage& out, const Installed& m) { write(m, *out.mutable_ack()); }

void write_to(wire::ControlMessage& out, const Heartbeat& m) {
  auto& w = *out.mutable_heartbeat();
  if (m.installed) write(*m.installed, *w.mutable_installed());
  w.set_chunk_bytes_in(m.chunk_bytes_in);
  w.set_chunk_bytes_forwarded(m.chunk_bytes_forwarded);
  w.set_chunks_duplicate(m.chunks_duplicate);
  w.set_chunks_corrupt(m.chunks_corrupt);
  if (m.forwarding_rate) w.set_forwarding_bits_per_s(m.forwarding_rate->bits_per_s);
  write_progress(m.progress, w);
  for (const EdgeReport& report : m.edges) {
    wire::EdgeReport& e = *w.add_edges();
    e.set_child(report.child.value);
    e.set_bytes(report.bytes);
    e.set_bits_per_s(report.rate.bits_per_s);
    e.set_limit(static_cast<std::uint32_t>(report.limit));
    e.set_streams(report.streams);
  }
  for (const Holding& holding : m.holdings) {
    wire::Holding& h = *w.add_holdings();
    set_key(h, holding.key);
    h.set_payload_bytes(holding.payload_bytes);
  }
  w.set_application(m.application);
}
Result<Heartbeat> read(const wire::Heartbeat& w) {
  Heartbeat m;
  if (w.has_installed()) {
    ECHO_ASSIGN(m.installed, read(w.installed()));
  }
  m.chunk_bytes_in = w.chunk_bytes_in();
  m.chunk_bytes_forwarded = w.chunk_bytes_forwarded();
  m.chunks_duplicate = w.chunks_duplicate();
  m.chunks_corrupt = w.chunks_corrupt();
  ECHO_ASSIGN(m.forwarding_rate, rate_of(w.has_forwarding_bits_per_s(), w.forwarding_bits_per_s(), "forwarding rate"));
  ECHO_ASSIGN(m.progress, read_progress(w));
  ECHO_TRY(check_count(w.edges(), "edges"));
  for (const wire::EdgeReport& e : w.edges()) {
    if (e.limit() > 3) return bad("expected an edge limit from 0 to 3, found {}", e.limit());
    if (!std::isfinite(e.bits_per_s()) || e.bits_per_s() < 0)
      return bad("expected an edge's rate, found {}", e.bits_per_s());
    m.edges.push_back(
        {WorkerId{e.child()}, e.bytes(), BitRate{e.bits_per_s()}, static_cast<EdgeLimit>(e.limit()), e.streams()});
  }
  ECHO_TRY(check_count(w.holdings(), "holdings"));
  for (const wire::Holding& h : w.holdings()) {
    ECHO_ASSIGN(const PublicationKey key, key_of(h));
    m.holdings.push_back({key, h.payload_bytes()});
  }
  ECHO_ASSIGN(m.application, bytes_of(w.application(), "application part", kHeartbeatApplicationBytesMax));
  return m;
}

void write_to(wire::ControlMessage& out, const Draining&) { out.mutable_draining(); }
Result<Draining> read(const wire::Draining&) { return Draining{}; }
void write_to(wire::ControlMessage& out, const Goodbye& m) {
  out.mutable_goodbye()->set_reason(line(m.reason));
  out.mutable_goodbye()->set_run_ended(m.run_ended);
}
Result<Goodbye> read(const wire::Goodbye& w) {
  ECHO_ASSIGN(std::string reason, line_of(w.reason(), "reason"));
  return Goodbye{std::move(reason), w.run_ended()};
}
void write_to(wire::ControlMessage& out, const Trouble& m) { out.mutable_trouble()->set_text(line(m.text)); }
Result<Trouble> read(const wire::Trouble& w) {
  ECHO_ASSIGN(std::string what, line_of(w.text(), "text"));
  return Trouble{std::move(what)};
}

void write_to(wire::ControlMessage& out, const Notice& m) { out.mutable_notice()->set_text(line(m.text)); }
Result<Notice> read(const wire::Notice& w) {
  ECHO_ASSIGN(std::string what, line_of(w.text(), "text"));
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
  std::visit([&](const auto& m) { write_to(out, m); }, message);
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

// Encodes and decodes state files. Called by LearnerFile, WorkerFile and the nodes at their start.
#include "overlay/state.hpp"

#include <cstring>

#include "overlay/trust/hash.hpp"
#include "overlay/wire/bytes.hpp"
#include "overlay/wire/control.pb.h"

namespace echoline::overlay {
namespace {

constexpr std::string_view kOperation = "read state file";
constexpr std::string_view kWorkerMagic = "echoline worker 3\n";
constexpr std::string_view kLearnerMagic = "echoline learner 3\n";

std::vector<std::byte> bytes_of(const std::string& text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

// In this file, `s` is a state and `w` its protobuf form; the other short names are repeated fields of `w`.

// Layout: magic, BLAKE3 of the body, body.
template <class Body>
std::string wrap(std::string_view magic, const Body& body) {
  std::string text;
  ECHO_CHECK(body.SerializeToString(&text));
  return std::string(magic) + raw(trust::blake3(std::as_bytes(std::span(text)))) + text;
}

template <class Body>
Result<Body> unwrap(std::string_view magic, std::string_view bytes) {
  constexpr std::size_t kHashBytes = std::tuple_size_v<trust::Hash>;
  if (bytes.substr(0, magic.size()) != magic || bytes.size() < magic.size() + kHashBytes)
    return fail(Code::kCorrupt, kOperation, "expected a file that begins with '{}', found {} other bytes",
                magic.substr(0, magic.size() - 1), bytes.size());
  const std::string_view body = bytes.substr(magic.size() + kHashBytes);
  if (raw(trust::blake3(std::as_bytes(std::span(body)))) != bytes.substr(magic.size(), kHashBytes))
    return fail(Code::kCorrupt, kOperation, "its {} bytes do not have the hash they were written with", body.size());
  Body message;
  if (!message.ParseFromArray(body.data(), static_cast<int>(body.size())))
    return fail(Code::kCorrupt, kOperation, "its {} bytes are not readable", body.size());
  return message;
}

}  // namespace

std::string encode(const WorkerState& s) {
  wire::WorkerState w;
  w.set_run_id(s.run_id);
  w.set_authority(raw(s.authority));
  w.set_certificate(raw(s.certificate));
  w.set_worker(s.worker.value);
  if (s.floor) {
    w.mutable_floor()->set_version(s.floor->version.value);
    w.mutable_floor()->set_policy_digest(raw(s.floor->policy_digest));
    w.mutable_floor()->set_epoch(s.floor->epoch);
  }
  w.set_beacon_sequence(s.beacon_sequence);
  w.set_clock_offset_ms(s.clock_offset_ms);
  return wrap(kWorkerMagic, w);
}

Result<WorkerState> decode_worker_state(std::string_view bytes) {
  ECHO_ASSIGN(const auto w, unwrap<wire::WorkerState>(kWorkerMagic, bytes));
  WorkerState s;
  s.run_id = w.run_id();
  s.authority = bytes_of(w.authority());
  s.certificate = bytes_of(w.certificate());
  s.worker = WorkerId{w.worker()};
  if (w.has_floor()) {
    s.floor.emplace().version = Version{w.floor().version()};
    s.floor->epoch = w.floor().epoch();
    if (!copy(w.floor().policy_digest(), s.floor->policy_digest))
      return fail(Code::kCorrupt, kOperation, "a policy digest of {} bytes", w.floor().policy_digest().size());
  }
  s.beacon_sequence = w.beacon_sequence();
  s.clock_offset_ms = w.clock_offset_ms();
  return s;
}

std::string encode(const LearnerState& s) {
  wire::LearnerState w;
  w.set_run_id(s.run_id);
  w.set_next_worker(s.next_worker);
  w.set_next_serial(s.next_serial);
  for (const auto& [nonce, expires] : s.used_tokens) {
    wire::UsedToken& t = *w.add_used_tokens();
    t.set_nonce(raw(nonce));
    t.set_expires_unix_s(expires);
  }
  for (const auto& [id, until_unix_s] : s.revoked) {
    wire::Revoked& r = *w.add_revoked();
    r.set_worker(id.value);
    r.set_until_unix_s(until_unix_s);
  }
  for (const auto& [version, digest] : s.published) {
    wire::Installed& p = *w.add_published();
    p.set_version(version.value);
    p.set_policy_digest(raw(digest));
  }
  w.set_epoch(s.epoch);
  w.set_port(s.port);
  for (const auto& [id, worker] : s.known) {
    wire::KnownWorker& k = *w.add_known();
    k.set_worker(id.value);
    k.set_name(worker.name);
    k.set_public_key(raw(worker.key.bytes));
    k.set_until_unix_s(worker.until_unix_s);
    k.set_host(worker.host);
  }
  for (const auto& [id, conduct] : s.conduct) {
    wire::Conduct& c = *w.add_conduct();
    c.set_worker(id.value);
    c.set_seen_ms(conduct.seen_ms);
    c.set_quarantined_until_ms(conduct.quarantined_until_ms);
    c.set_slanders(conduct.accuses_falsely);
    c.set_role(static_cast<std::uint32_t>(conduct.role));
    for (const auto& [parent, bad_chunks] : conduct.bad_chunks_of) {
      wire::Word& accusation = *c.add_bad_chunks_of();
      accusation.set_worker(parent.value);
      accusation.set_count(static_cast<std::uint32_t>(bad_chunks.count));
      accusation.set_at_ms(bad_chunks.last_event_ms);
    }
    c.set_broken(static_cast<std::uint32_t>(conduct.malformed.count));
    c.set_broken_at_ms(conduct.malformed.last_event_ms);
  }
  w.set_issue_reserved(s.issue_reserved);
  return wrap(kLearnerMagic, w);
}

Result<LearnerState> decode_learner_state(std::string_view bytes) {
  ECHO_ASSIGN(const auto w, unwrap<wire::LearnerState>(kLearnerMagic, bytes));
  LearnerState s;
  s.run_id = w.run_id();
  s.next_worker = w.next_worker();
  s.next_serial = w.next_serial();
  if (s.next_worker < 1 || s.next_serial < 1) return fail(Code::kCorrupt, kOperation, "ids that begin at 0");
  for (const wire::UsedToken& t : w.used_tokens()) {
    trust::Nonce nonce;
    if (!copy(t.nonce(), nonce)) return fail(Code::kCorrupt, kOperation, "a nonce of {} bytes", t.nonce().size());
    s.used_tokens[nonce] = t.expires_unix_s();
  }
  for (const wire::Revoked& r : w.revoked()) s.revoked[WorkerId{r.worker()}] = r.until_unix_s();
  s.epoch = w.epoch();
  s.port = static_cast<std::uint16_t>(w.port());
  for (const wire::Conduct& c : w.conduct()) {
    Conduct::StoredConduct& conduct = s.conduct[WorkerId{c.worker()}];
    if (c.role() > static_cast<std::uint32_t>(chains::Role::kRolloutOnly))
      return fail(Code::kCorrupt, kOperation, "a role numbered {}", c.role());
    conduct.seen_ms = c.seen_ms();
    conduct.quarantined_until_ms = c.quarantined_until_ms();
    conduct.accuses_falsely = c.slanders();
    conduct.role = static_cast<chains::Role>(c.role());
    for (const wire::Word& accusation : c.bad_chunks_of())
      conduct.bad_chunks_of[WorkerId{accusation.worker()}] = {.count = static_cast<int>(accusation.count()),
                                                              .last_event_ms = accusation.at_ms()};
    conduct.malformed = {static_cast<int>(std::min<std::uint32_t>(c.broken(), Conduct::kMalformedMax)),
                         c.broken_at_ms()};
  }
  for (const wire::KnownWorker& k : w.known()) {
    KnownWorker& worker = s.known[WorkerId{k.worker()}];
    worker = {.name = k.name(), .key = {}, .until_unix_s = k.until_unix_s(), .host = k.host()};
    if (!copy(k.public_key(), worker.key.bytes))
      return fail(Code::kCorrupt, kOperation, "a public key of {} bytes", k.public_key().size());
  }
  s.issue_reserved = w.issue_reserved();
  for (const wire::Installed& p : w.published())
    if (!copy(p.policy_digest(), s.published[Version{p.version()}]))
      return fail(Code::kCorrupt, kOperation, "a policy digest of {} bytes", p.policy_digest().size());
  return s;
}

}  // namespace echoline::overlay

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

// In this file, `proto` is the protobuf form of `state`, and proto_... are its parts. Some of its fields have older
// names: `slanders` is accuses_falsely, `broken` is malformed, and a `Word` is an accusation.

// Makes a state file: magic, BLAKE3 of the body, body.
template <class Body>
std::string wrap(std::string_view magic, const Body& body) {
  std::string text;
  ECHO_CHECK(body.SerializeToString(&text));
  return std::string(magic) + bytes_as_string(trust::blake3(std::as_bytes(std::span(text)))) + text;
}

template <class Body>
Result<Body> unwrap(std::string_view magic, std::string_view bytes) {
  constexpr std::size_t kHashBytes = std::tuple_size_v<trust::Hash>;
  if (bytes.substr(0, magic.size()) != magic || bytes.size() < magic.size() + kHashBytes)
    return fail(Code::kCorrupt, kOperation, "expected a file that begins with '{}', found {} bytes that do not",
                magic.substr(0, magic.size() - 1), bytes.size());
  const std::string_view body = bytes.substr(magic.size() + kHashBytes);
  if (bytes_as_string(trust::blake3(std::as_bytes(std::span(body)))) != bytes.substr(magic.size(), kHashBytes))
    return fail(Code::kCorrupt, kOperation, "its {} bytes do not have the hash they were written with", body.size());
  Body message;
  if (!message.ParseFromArray(body.data(), static_cast<int>(body.size())))
    return fail(Code::kCorrupt, kOperation, "its {} bytes are not readable", body.size());
  return message;
}

}  // namespace

std::string encode(const WorkerState& state) {
  wire::WorkerState proto;
  proto.set_run_id(state.run_id);
  proto.set_authority(bytes_as_string(state.authority));
  proto.set_certificate(bytes_as_string(state.certificate));
  proto.set_worker(state.worker.value);
  if (state.floor) {
    proto.mutable_floor()->set_version(state.floor->version.value);
    proto.mutable_floor()->set_policy_digest(bytes_as_string(state.floor->policy_digest));
    proto.mutable_floor()->set_epoch(state.floor->epoch);
  }
  proto.set_beacon_sequence(state.beacon_sequence);
  proto.set_clock_offset_ms(state.clock_offset_ms);
  return wrap(kWorkerMagic, proto);
}

Result<WorkerState> decode_worker_state(std::string_view bytes) {
  ECHO_ASSIGN(const auto proto, unwrap<wire::WorkerState>(kWorkerMagic, bytes));
  WorkerState state;
  state.run_id = proto.run_id();
  state.authority = bytes_of(proto.authority());
  state.certificate = bytes_of(proto.certificate());
  state.worker = WorkerId{proto.worker()};
  if (proto.has_floor()) {
    state.floor.emplace().version = Version{proto.floor().version()};
    state.floor->epoch = proto.floor().epoch();
    if (!copy_exact(proto.floor().policy_digest(), state.floor->policy_digest))
      return fail(Code::kCorrupt, kOperation, "a policy digest of {} bytes", proto.floor().policy_digest().size());
  }
  state.beacon_sequence = proto.beacon_sequence();
  state.clock_offset_ms = proto.clock_offset_ms();
  return state;
}

std::string encode(const LearnerState& state) {
  wire::LearnerState proto;
  proto.set_run_id(state.run_id);
  proto.set_next_worker(state.next_worker);
  proto.set_next_serial(state.next_serial);
  for (const auto& [nonce, expires] : state.used_tokens) {
    wire::UsedToken& proto_token = *proto.add_used_tokens();
    proto_token.set_nonce(bytes_as_string(nonce));
    proto_token.set_expires_unix_s(expires);
  }
  for (const auto& [id, until_unix_s] : state.revoked) {
    wire::Revoked& proto_revoked = *proto.add_revoked();
    proto_revoked.set_worker(id.value);
    proto_revoked.set_until_unix_s(until_unix_s);
  }
  for (const auto& [version, digest] : state.published) {
    wire::Installed& proto_published = *proto.add_published();
    proto_published.set_version(version.value);
    proto_published.set_policy_digest(bytes_as_string(digest));
  }
  proto.set_epoch(state.epoch);
  proto.set_port(state.port);
  for (const auto& [id, worker] : state.known) {
    wire::KnownWorker& proto_known = *proto.add_known();
    proto_known.set_worker(id.value);
    proto_known.set_name(worker.name);
    proto_known.set_public_key(bytes_as_string(worker.key.bytes));
    proto_known.set_until_unix_s(worker.until_unix_s);
    proto_known.set_host(worker.host);
  }
  for (const auto& [id, conduct] : state.conduct) {
    wire::Conduct& proto_conduct = *proto.add_conduct();
    proto_conduct.set_worker(id.value);
    proto_conduct.set_seen_ms(conduct.seen_ms);
    proto_conduct.set_quarantined_until_ms(conduct.quarantined_until_ms);
    proto_conduct.set_slanders(conduct.accuses_falsely);
    proto_conduct.set_role(static_cast<std::uint32_t>(conduct.role));
    for (const auto& [parent, bad_chunks] : conduct.bad_chunks_of) {
      wire::Word& accusation = *proto_conduct.add_bad_chunks_of();
      accusation.set_worker(parent.value);
      accusation.set_count(static_cast<std::uint32_t>(bad_chunks.count));
      accusation.set_at_ms(bad_chunks.last_event_ms);
    }
    proto_conduct.set_broken(static_cast<std::uint32_t>(conduct.malformed.count));
    proto_conduct.set_broken_at_ms(conduct.malformed.last_event_ms);
  }
  proto.set_issue_reserved(state.issue_reserved);
  return wrap(kLearnerMagic, proto);
}

Result<LearnerState> decode_learner_state(std::string_view bytes) {
  ECHO_ASSIGN(const auto proto, unwrap<wire::LearnerState>(kLearnerMagic, bytes));
  LearnerState state;
  state.run_id = proto.run_id();
  state.next_worker = proto.next_worker();
  state.next_serial = proto.next_serial();
  if (state.next_worker < 1 || state.next_serial < 1) return fail(Code::kCorrupt, kOperation, "ids that begin at 0");
  for (const wire::UsedToken& proto_token : proto.used_tokens()) {
    trust::Nonce nonce;
    if (!copy_exact(proto_token.nonce(), nonce))
      return fail(Code::kCorrupt, kOperation, "a nonce of {} bytes", proto_token.nonce().size());
    state.used_tokens[nonce] = proto_token.expires_unix_s();
  }
  for (const wire::Revoked& proto_revoked : proto.revoked())
    state.revoked[WorkerId{proto_revoked.worker()}] = proto_revoked.until_unix_s();
  state.epoch = proto.epoch();
  state.port = static_cast<std::uint16_t>(proto.port());
  for (const wire::Conduct& proto_conduct : proto.conduct()) {
    Conduct::StoredConduct& conduct = state.conduct[WorkerId{proto_conduct.worker()}];
    if (proto_conduct.role() > static_cast<std::uint32_t>(chains::Role::kRolloutOnly))
      return fail(Code::kCorrupt, kOperation, "a role numbered {}", proto_conduct.role());
    conduct.seen_ms = proto_conduct.seen_ms();
    conduct.quarantined_until_ms = proto_conduct.quarantined_until_ms();
    conduct.accuses_falsely = proto_conduct.slanders();
    conduct.role = static_cast<chains::Role>(proto_conduct.role());
    for (const wire::Word& accusation : proto_conduct.bad_chunks_of())
      conduct.bad_chunks_of[WorkerId{accusation.worker()}] = {.count = static_cast<int>(accusation.count()),
                                                              .last_event_ms = accusation.at_ms()};
    conduct.malformed = {static_cast<int>(std::min<std::uint32_t>(proto_conduct.broken(), Conduct::kMalformedMax)),
                         proto_conduct.broken_at_ms()};
  }
  for (const wire::KnownWorker& proto_known : proto.known()) {
    KnownWorker& worker = state.known[WorkerId{proto_known.worker()}];
    worker = {
        .name = proto_known.name(), .key = {}, .until_unix_s = proto_known.until_unix_s(), .host = proto_known.host()};
    if (!copy_exact(proto_known.public_key(), worker.key.bytes))
      return fail(Code::kCorrupt, kOperation, "a public key of {} bytes", proto_known.public_key().size());
  }
  state.issue_reserved = proto.issue_reserved();
  for (const wire::Installed& proto_published : proto.published())
    if (!copy_exact(proto_published.policy_digest(), state.published[Version{proto_published.version()}]))
      return fail(Code::kCorrupt, kOperation, "a policy digest of {} bytes", proto_published.policy_digest().size());
  return state;
}

}  // namespace echoline::overlay

// The state of a node that survives restarts, as the bytes of its state file. Byte-exact in FORMAT.md.
#pragma once
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "overlay/learner/conduct.hpp"
#include "overlay/trust/token.hpp"
#include "overlay/wire/control.hpp"

namespace echoline::overlay {

struct WorkerState {
  std::string run_id;
  std::vector<std::byte> authority, certificate;  // DER
  WorkerId worker;
  // The last version that was verified for activation. The worker never activates an older one.
  std::optional<Installed> floor;
  std::uint64_t beacon_sequence = 0;
  std::int64_t clock_offset_ms = 0;  // the learner's clock minus this machine's, at the last welcome
  friend bool operator==(const WorkerState&, const WorkerState&) = default;
};

// An enrolled machine. It may come back with its key until a day after its last certificate has expired.
struct KnownWorker {
  std::string name;                // the instance name at enrolment
  trust::PublicKey key{};          // zeros: not known
  std::uint64_t until_unix_s = 0;  // the end of its last certificate
  std::string host;                // its address for other workers, if its token named one
  friend bool operator==(const KnownWorker&, const KnownWorker&) = default;
};

struct LearnerState {
  std::string run_id;
  std::uint64_t next_worker = 1, next_serial = 1;
  std::map<trust::Nonce, std::uint64_t> used_tokens;  // the expiry of each token [unix seconds]
  std::map<WorkerId, std::uint64_t> revoked;          // the last expiry of each worker's certificates [unix seconds]
  std::map<Version, Digest> published;                // the most recent; a version's digest never changes
  // A learner that resumes from an earlier version invalidates the later ones and begins a new epoch. Only the learner
  // can make workers go back, and only this way.
  std::uint64_t epoch = 0;
  std::uint16_t port = 0;  // its last port, so that its workers find it again
  std::map<WorkerId, KnownWorker> known;
  std::uint64_t issue_reserved = 0;                    // an upper bound on all issue times so far
  std::map<WorkerId, Conduct::StoredConduct> conduct;  // only workers with entries
  friend bool operator==(const LearnerState&, const LearnerState&) = default;
};

std::string encode(const WorkerState& state);
std::string encode(const LearnerState& state);
// kCorrupt: damaged or of another kind.
Result<WorkerState> decode_worker_state(std::string_view bytes);
Result<LearnerState> decode_learner_state(std::string_view bytes);

}  // namespace echoline::overlay

// What a node keeps across restarts, as the bytes of its state file. Byte-exact in FORMAT.md.
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
  // The version that was verified and about to be activated: nothing older is ever activated again.
  std::optional<Installed> floor;
  std::uint64_t beacon_sequence = 0;
  std::int64_t clock_offset_ms = 0;  // the learner's clock minus this machine's, when it was last welcomed
  friend bool operator==(const WorkerState&, const WorkerState&) = default;
};

// A machine that has enrolled: it may come back with its key until a day after its last certificate has ended.
struct KnownWorker {
  std::string name;                // the instance it enrolled as
  trust::PublicKey key{};          // zeros: not known
  std::uint64_t until_unix_s = 0;  // the end of its last certificate
  std::string host;                // where it is reached, if whoever issued its token said so
  friend bool operator==(const KnownWorker&, const KnownWorker&) = default;
};

struct LearnerState {
  std::string run_id;
  std::uint64_t next_worker = 1, next_serial = 1;
  std::map<trust::Nonce, std::uint64_t> used_tokens;  // until when [unix seconds] they would be valid
  std::map<WorkerId, std::uint64_t> revoked;          // until when [unix seconds] a certificate of theirs may be valid
  std::map<Version, Digest> published;                // the most recent; a version's digest never changes
  // A learner that resumes from before a version it has published disowns what came later and begins a new epoch: the
  // one way for workers to go back, and for nobody else to send them there.
  std::uint64_t epoch = 0;
  std::uint16_t port = 0;  // where it listened, so that its workers find it again
  std::map<WorkerId, KnownWorker> known;
  std::uint64_t issue_reserved = 0;           // all issue times so far are below
  std::map<WorkerId, Conduct::Kept> conduct;  // of those of whom there is something to remember
  friend bool operator==(const LearnerState&, const LearnerState&) = default;
};

std::string encode(const WorkerState& state);
std::string encode(const LearnerState& state);
// kCorrupt: damaged or of another kind.
Result<WorkerState> decode_worker_state(std::string_view bytes);
Result<LearnerState> decode_learner_state(std::string_view bytes);

}  // namespace echoline::overlay

// The input of the overlay's fuzz target: a kind, then bytes for it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tests/overlay/made.hpp"

namespace echoline::overlay {

enum class FuzzKind : std::uint8_t {
  kStream,   // a byte of options, then a stream of frames
  kControl,  // the body of a control frame
  kSigned,   // a byte for the message's type, then a body, treated as signed by the learner
  kState,    // the body of a state file
  kStore,    // a byte of options, then frames that arrive at a publication store
  kSpool,    // the length of the log (4 bytes), the log, the payload: a spool on disk
  kMember,   // a byte for the sender, then frames that a worker receives
  kLearner,  // a byte for the sender, then frames that the learner receives
  kRelay,    // the first bytes of a connection to a relay, or control frames
};
inline constexpr std::uint8_t kFuzzKinds = 9;

// The genuine publications that inputs are made of.
inline const std::vector<Made>& fuzz_publications() {
  static const std::vector<Made> all{make(full(0), 3000), make(delta(1, 0), 1500), make(delta(2, 1), 0)};
  return all;
}

}  // namespace echoline::overlay

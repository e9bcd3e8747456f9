// The state machine of a remote engine: can it take requests? Private to worker/engines/.
#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>

#include "base/result.hpp"

namespace echoline::worker {

class RemotePhase {
 public:
  enum Phase : std::uint8_t {
    kEmpty,      // no policy yet
    kDown,       // waits for the next attempt
    kWaking,     // waits until the server is healthy; a server started by this worker reads the policy as it starts
    kSuspected,  // like kWaking, after an odd answer; the server may have kept its weights and requests.
    kLoading,    // a script of calls brings it to the newest policy and verifies it
    kReady,
    kBroken,  // for good
  };
  static constexpr std::array<std::string_view, 7> kNames{"empty",   "down",  "waking", "suspected",
                                                          "loading", "ready", "broken"};

  bool is(Phase phase) const { return phase_ == phase; }
  // Waits for the answer to a health check.
  bool looked_at() const { return is(kWaking) || is(kSuspected); }
  const std::optional<Error>& error() const { return error_; }  // of kBroken

  // Moves to the next phase (checked).
  void move(Phase to) {
    constexpr auto bit = [](auto... phases) { return static_cast<std::uint8_t>((0 | ... | (1 << phases))); };
    constexpr std::array<std::uint8_t, 7> follow{
        bit(kDown),                                 // after kEmpty
        bit(kWaking, kBroken),                      // kDown
        bit(kLoading, kDown, kBroken),              // kWaking
        bit(kLoading, kDown, kBroken),              // kSuspected
        bit(kLoading, kReady, kDown, kBroken),      // kLoading
        bit(kLoading, kSuspected, kDown, kBroken),  // kReady
        bit(),                                      // kBroken
    };
    ECHO_CHECK((follow[phase_] >> to & 1) != 0, "no transition from phase {} to {}", kNames[phase_], kNames[to]);
    phase_ = to;
  }
  void break_down(Error error) {
    move(kBroken);
    error_ = std::move(error);
  }

 private:
  Phase phase_ = kEmpty;
  std::optional<Error> error_;
};

}  // namespace echoline::worker

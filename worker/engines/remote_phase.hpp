// The state machine of a remote engine, which drives an inference server. The phase decides whether the server can take
// requests. Private to worker/engines/.
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
    kEmpty,      // no policy yet, so no server is started or contacted
    kDown,       // there is no usable server; the engine will start or contact one after a delay
    kWaking,     // waits until the server is healthy; a server that this worker has started reads the policy first
    kSuspected,  // a ready server gave an unexpected answer, so the engine checks the server's health
    kLoading,    // a sequence of HTTP calls loads the newest policy into the server and verifies it
    kReady,
    kBroken,  // permanent: no transition leaves this phase
  };
  static constexpr std::array<std::string_view, 7> kNames{"empty",   "down",  "waking", "suspected",
                                                          "loading", "ready", "broken"};

  bool is(Phase phase) const { return phase_ == phase; }
  // Whether the engine waits for the answer to a health check.
  bool awaits_health_check() const { return is(kWaking) || is(kSuspected); }
  const std::optional<Error>& error() const { return error_; }  // of kBroken

  // Moves to the next phase. Ends the process if the transition is not allowed.
  void move(Phase to) {
    // Bit n of a set: the n-th phase.
    constexpr auto set_of = [](auto... phases) { return static_cast<std::uint8_t>((0 | ... | (1 << phases))); };
    constexpr std::array<std::uint8_t, 7> allowed_next{
        set_of(kDown),                                 // after kEmpty
        set_of(kWaking, kBroken),                      // kDown
        set_of(kLoading, kDown, kBroken),              // kWaking
        set_of(kLoading, kDown, kBroken),              // kSuspected; kLoading first checks the weights
        set_of(kLoading, kReady, kDown, kBroken),      // kLoading
        set_of(kLoading, kSuspected, kDown, kBroken),  // kReady
        set_of(),                                      // kBroken
    };
    ECHO_CHECK((allowed_next[phase_] >> to & 1) != 0, "no transition from phase {} to {}", kNames[phase_], kNames[to]);
    phase_ = to;
  }
  void mark_broken(Error error) {
    move(kBroken);
    error_ = std::move(error);
  }

 private:
  Phase phase_ = kEmpty;
  std::optional<Error> error_;
};

}  // namespace echoline::worker

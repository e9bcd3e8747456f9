// Remembers hosts behind paths that drop large packets. Called by the driver after each handshake or timeout.
#include "overlay/narrow_paths.hpp"

#include <fmt/format.h>

#include <utility>

namespace echoline::overlay {
namespace {

constexpr int kStallsForProof = 2;  // failures with usual segments that prove a narrow path, if small ones pass

}  // namespace

void NarrowPaths::on_handshake_timeout(const std::string& host, bool small_segments, const Stall& stall) {
  if (hosts_.size() >= kHostsMax && !hosts_.contains(host)) return;
  Host& known = hosts_[host];
  if (known.is_narrow) return;        // the path is known; this timeout has another reason
  known.try_small = !small_segments;  // tries the other size next
  if (small_segments) {               // small segments do not help: the other end may be stopped
    known.stalls = 0;
    return;
  }
  ++known.stalls;
  known.is_narrow = stall.is_proof();
  known.packet_bytes = stall.packet_bytes;
}

std::optional<std::string> NarrowPaths::on_handshake_done(const std::string& host, bool small_segments) {
  const auto it = hosts_.find(host);
  if (it == hosts_.end()) return std::nullopt;
  Host& known = it->second;
  if (!small_segments) {
    if (!known.is_narrow) hosts_.erase(it);
    return std::nullopt;
  }
  // Several failures with usual segments and none with small ones are unlikely to be chance.
  known.is_narrow = known.is_narrow || known.stalls >= kStallsForProof;
  known.try_small = known.is_narrow;
  if (!known.is_narrow || std::exchange(known.was_reported, true)) return std::nullopt;
  return fmt::format(
      "the path to {} swallows packets of {} bytes without an error; packets of {} bytes arrive and are used from now "
      "on; to avoid this, correct the MTU of a link on the path, or let ICMP through",
      host, known.packet_bytes, kPacketBytes);
}

}  // namespace echoline::overlay

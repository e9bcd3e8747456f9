// Hosts behind paths that drop large packets without an error: connections are made, but full packets never arrive.
// Handshakes are padded to fill a packet (uv/tls), so dialling shows such a path. No I/O and no clock.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>

namespace echoline::overlay {

class NarrowPaths {
 public:
  static constexpr std::uint32_t kPacketBytes = 1280;  // the minimum that IPv6 guarantees
  static constexpr int kSegmentBytes = 1220;           // TCP payload of such a packet, over IPv4 or IPv6
  static constexpr std::size_t kHostsMax = 1024;

  // A connection whose handshake timed out, as this machine's kernel describes it.
  struct Stall {
    std::uint32_t packet_bytes = 0;     // the largest packet this end sends
    std::uint32_t retransmissions = 0;  // of the oldest bytes that did not arrive
    std::uint32_t overtaken_by = 0;     // later segments that did arrive
    std::uint32_t out_of_order = 0;     // segments that arrived here before earlier ones
    // Proves that size is the cause: small segments arrive, and retransmitted large ones do not.
    bool is_proof() const { return (retransmissions >= 2 && overtaken_by > 0) || out_of_order > 0; }
  };

  // Whether the next connection to this host should have small segments.
  bool wants_small_segments(const std::string& host) const {
    return hosts_.contains(host) && hosts_.at(host).try_small;
  }
  void on_handshake_timeout(const std::string& host, bool small_segments, const Stall& stall);
  // A handshake with this host succeeded, with small segments or usual ones. Returns a message for the operator, once
  // per host, if the path drops large packets.
  std::optional<std::string> on_handshake_done(const std::string& host, bool small_segments);

 private:
  struct Host {
    bool try_small = false;  // the next connection has small segments
    bool is_narrow = false;  // proven: the path drops large packets
    bool was_reported = false;
    int stalls = 0;                  // with usual segments, since the last evidence that size is not the cause
    std::uint32_t packet_bytes = 0;  // the size that was dropped
  };
  std::map<std::string, Host> hosts_;  // hosts with a stall
};

}  // namespace echoline::overlay

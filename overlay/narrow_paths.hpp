// Which hosts are reached by paths that swallow large packets and say nothing: connections are made, and what fills a
// packet never arrives. Handshakes are padded to fill one (uv/tls), so it shows when a node is dialled. Pure.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>

namespace echoline::overlay {

class NarrowPaths {
 public:
  static constexpr std::uint32_t kPacketBytes = 1280;  // that IPv6 promises to carry
  static constexpr int kSegmentBytes = 1220;           // of TCP, that fit these by IPv4 and IPv6
  static constexpr std::size_t kHostsMax = 1024;

  // Of a connection that was made and whose handshake was not done in time, as this end's kernel tells.
  struct Stall {
    std::uint32_t packet_bytes = 0;     // of the largest packet it sends there
    std::uint32_t retransmissions = 0;  // of the oldest bytes that did not arrive
    std::uint32_t overtaken_by = 0;     // later segments that did arrive
    std::uint32_t out_of_order = 0;     // segments that arrived here, while those before them did not
    // What is small arrives, before it and again and again, what is large does not.
    bool proof() const { return (retransmissions >= 2 && overtaken_by > 0) || out_of_order > 0; }
  };

  // Whether the next connection to this host should have small segments.
  bool small(const std::string& host) const { return hosts_.contains(host) && hosts_.at(host).try_small; }
  void stalled(const std::string& host, bool small, const Stall& stall);
  // A handshake with this host was done, with small segments or the usual ones. What a person should know, once: the
  // path swallows large packets.
  std::optional<std::string> passed(const std::string& host, bool small);

 private:
  struct Host {
    bool try_small = false, proven = false, told = false;
    int stalls = 0;  // of usual segments, since these or small ones last told that it is not their size
    std::uint32_t packet_bytes = 0;
  };
  std::map<std::string, Host> hosts_;  // that stalled
};

}  // namespace echoline::overlay

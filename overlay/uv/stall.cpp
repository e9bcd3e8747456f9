// Reads TCP_INFO of a stalled connection. Called by the driver after a handshake timeout.
#include "overlay/uv/stall.hpp"

#include <linux/tcp.h>  // has more fields than netinet/tcp.h, and excludes it
#include <netinet/in.h>
#include <sys/socket.h>

namespace echoline::overlay {

NarrowPaths::Stall stall_of(int fd) {
  tcp_info info{};  // an older kernel fills in fewer fields
  socklen_t size = sizeof info;
  if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return {};
  return {.packet_bytes = info.tcpi_pmtu,
          .retransmissions = info.tcpi_unacked > 0 ? info.tcpi_retransmits : 0u,
          .overtaken_by = info.tcpi_sacked,
          .out_of_order = info.tcpi_rcv_ooopack};
}

}  // namespace echoline::overlay

// Limits on a node's connections, derived from the number of files its process may open.
#pragma once
#include <algorithm>
#include <cstddef>

namespace echoline::overlay {

struct ConnectionLimits {
  std::size_t files = 0;          // files the process may open
  std::size_t total = 0;          // connections, in any stage
  std::size_t unproven = 0;       // accepted connections whose TLS handshake is not done
  std::size_t pending_peers = 0;  // connections whose handshake is done, without a request yet
  std::size_t per_identity = 0;   // pending peers with the same certificate
  std::size_t members = 0;        // workers of a learner; at a worker, connections to children

  // Leaves a reserve for all other files of the process: databases, checkpoints, state, spools. FORMAT.md promises
  // these fractions. A member may have several connections, so there are fewer members than connections left for them.
  static constexpr ConnectionLimits of(std::size_t files) {
    const std::size_t reserve = std::clamp<std::size_t>(files / 4, 64, 512);
    ConnectionLimits limits;
    limits.files = files;
    limits.total = std::max<std::size_t>(16, files - std::min(files, reserve));
    limits.unproven = limits.pending_peers = std::min<std::size_t>(1024, limits.total / 4);
    limits.per_identity = std::min<std::size_t>(16, limits.pending_peers / 2);
    limits.members = (limits.total - limits.unproven - limits.pending_peers) * 2 / 3;
    return limits;
  }
};

}  // namespace echoline::overlay

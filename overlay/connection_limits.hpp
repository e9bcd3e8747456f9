// Limits on a node's connections, derived from the number of files its process may open.
#pragma once
#include <algorithm>
#include <cstddef>

namespace echoline::overlay {

struct ConnectionLimits {
  std::size_t files = 0;          // files the process may open
  std::size_t total = 0;          // connections, in any stage
  std::size_t unproven = 0;       // accepted, TLS handshake not done
  std::size_t pending_peers = 0;  // handshake done, no request yet
  std::size_t per_identity = 0;   // pending peers with one certificate
  std::size_t members = 0;        // workers at a learner

  // The reserve is for all other files of the process: databases, checkpoints, state, spools.
  static constexpr ConnectionLimits of(std::size_t files) {
    const std::size_t reserve = std::clamp<std::size_t>(files / 4, 64, 512);
    ConnectionLimits l;
    l.files = files;
    l.total = std::max<std::size_t>(16, files - std::min(files, reserve));
    l.unproven = l.pending_peers = std::min<std::size_t>(1024, l.total / 4);
    l.per_identity = std::min<std::size_t>(16, l.pending_peers / 2);
    l.members = (l.total - l.unproven - l.pending_peers) * 2 / 3;
    return l;
  }
};

}  // namespace echoline::overlay

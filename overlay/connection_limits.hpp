// How many connections a node may hold, by how many files its process may have open.
#pragma once
#include <algorithm>
#include <cstddef>

namespace echoline::overlay {

struct ConnectionLimits {
  std::size_t files = 0;         // that the process may have open
  std::size_t total = 0;         // connections, however far they are
  std::size_t unproven = 0;      // accepted, whose handshake is not done
  std::size_t strangers = 0;     // proven, that have not said what they want
  std::size_t per_identity = 0;  // of these, with one certificate
  std::size_t members = 0;       // workers at a learner

  // What is not given to connections stays for everything else a process opens: databases, checkpoints, state, spools.
  static constexpr ConnectionLimits of(std::size_t files) {
    const std::size_t reserve = std::clamp<std::size_t>(files / 4, 64, 512);
    ConnectionLimits l;
    l.files = files;
    l.total = std::max<std::size_t>(16, files - std::min(files, reserve));
    l.unproven = l.strangers = std::min<std::size_t>(1024, l.total / 4);
    l.per_identity = std::min<std::size_t>(16, l.strangers / 2);
    l.members = (l.total - l.unproven - l.strangers) * 2 / 3;
    return l;
  }
};

}  // namespace echoline::overlay

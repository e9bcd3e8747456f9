// The keys of section `network` of a run file that the overlay uses, and the rules that the learner's core has beside
// them.
#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "base/units.hpp"
#include "chains/regions.hpp"
#include "chains/topology.hpp"

namespace echoline {
class ConfigSection;
}

namespace echoline::overlay {

struct NetworkSettings {
  std::string bind = "127.0.0.1";  // an address or host name; "::" for all of IPv4 and IPv6
  std::uint16_t port = 0;          // 0: any free port
  std::optional<BitRate> uplink;   // B, the learner's; absent: unlimited
  std::optional<Bytes> chunk;      // unit that is proven and forwarded; absent: by payload and fleet
  chains::TopologyPolicy topology = chains::TopologyPolicy::kAuto;
  Duration heartbeat_timeout = std::chrono::seconds(3);  // of silence, before a worker is away: its leases return
  // Of silence, before it is silent: its place is given to others. Never later than heartbeat_timeout.
  Duration silence_min = std::chrono::seconds(2);
  // Recent publications that the learner keeps in memory for late workers; absent: by the policy's size.
  std::optional<Bytes> store;
  double quorum = 0.9;  // q: the fraction of the active workers that defines T_b
};

// Reads these keys of the section; mistakes are noted in it.
void read(ConfigSection section, NetworkSettings& settings);

// How long a worker tries to enrol, and again to be welcomed, before it gives up.
inline constexpr Duration kJoinTimeout = std::chrono::seconds(30);

// The rules of the learner's core. It uses heartbeat_timeout, silence_min and quorum of `network`.
struct LearnerRules {
  NetworkSettings network;
  BitRate chain_rate = BitRate::from_mbit_per_s(8);  // b: rate a chain is planned for; chains = max(1, floor(up / b))
  // Where the learner's uplink has no limit: what it sends at least, and what topologies and predictions go by (absent:
  // the same).
  BitRate up_least = BitRate::from_mbit_per_s(64);
  std::optional<BitRate> up_expected;
  chains::TopologyPolicy policy = chains::TopologyPolicy::kTrees;
  // It is the first of them: another is taken where the model expects it to be so much sooner for the workers that are
  // there (chains/choice.hpp).
  bool chooses_policy = false;
  Duration heartbeat = std::chrono::milliseconds(500);
  Duration away_max = std::chrono::minutes(5);  // before a worker that is away is gone
  chains::Regions regions;                      // where the learner and its workers stand
};

}  // namespace echoline::overlay

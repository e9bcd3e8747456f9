// The keys of section `network` of a run file that the overlay uses, and further rules of the learner's core.
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
  // A relay through which workers reach a learner that no connection from outside reaches: "HOST:PORT". Empty: none.
  std::string relay;
  std::string relay_key_file;     // holds the relay's key, unless ECHOLINE_RELAY_KEY does
  std::optional<BitRate> uplink;  // the learner's uplink; absent: unlimited
  std::optional<Bytes> chunk;     // unit of proof and forwarding; absent: chosen by the payload's size and the fleet
  chains::TopologyPolicy topology = chains::TopologyPolicy::kAuto;
  // A worker without a heartbeat for this long is away: its leases (rights to work) go to other workers.
  Duration heartbeat_timeout = std::chrono::seconds(3);
  // The shortest silence after which a worker loses its place in the topology. Never above heartbeat_timeout.
  Duration silence_min = std::chrono::seconds(2);
  // Recent publications that the learner keeps in memory for late workers; absent: by the policy's size.
  std::optional<Bytes> store;
  double quorum = 0.9;  // the fraction of the active workers that ends the broadcast time T_b
};

// Reads these keys of the section and reports mistakes to it.
void read(ConfigSection section, NetworkSettings& settings);

// How long a worker tries to enrol, and then to be welcomed, before it gives up.
inline constexpr Duration kJoinTimeout = std::chrono::seconds(30);

// The rules of the learner's core. It uses heartbeat_timeout, silence_min and quorum of `network`.
struct LearnerRules {
  NetworkSettings network;
  // Planned rate of a chain. The learner feeds max(1, floor(its uplink / chain_rate)) chains.
  BitRate chain_rate = BitRate::from_mbit_per_s(8);
  // If the learner's uplink has no limit: its minimum rate, and the rate that topologies and predictions assume
  // (absent: the minimum).
  BitRate uplink_min = BitRate::from_mbit_per_s(64);
  std::optional<BitRate> uplink_expected;
  chains::TopologyPolicy policy = chains::TopologyPolicy::kTrees;
  // True: `policy` is only the first one. The learner takes another if the broadcast-time model expects it to be
  // sufficiently faster for the current workers (chains/choice.hpp).
  bool chooses_policy = false;
  Duration heartbeat = std::chrono::milliseconds(500);
  Duration away_max = std::chrono::minutes(5);  // after this, a worker that is away counts as lost
  chains::Regions regions;                      // the regions of the learner and its workers
};

}  // namespace echoline::overlay

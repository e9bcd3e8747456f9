// Reads section `network` of a run file. Called by the readers of run files.
#include "overlay/settings.hpp"

#include "base/config.hpp"

namespace echoline::overlay {

void read(ConfigSection section, NetworkSettings& settings) {
  section.read("bind", settings.bind,
               "the address that the learner listens on; `::` lets workers join from other machines");
  std::uint32_t port = settings.port;
  section.read("port", port, {.min = 0, .max = 65535}, "0: any free port");
  settings.port = static_cast<std::uint16_t>(port);
  const Limits<BitRate> positive{.min = BitRate{1000}, .max = BitRate{1e12}};
  section.read("relay", settings.relay,
               "HOST:PORT of an `echoline relay` through which workers reach a learner that can open no port");
  section.read("relay_key_file", settings.relay_key_file,
               "a file of mode 600 that holds the relay's key; alternatively, set ECHOLINE_RELAY_KEY");
  section.read("uplink", settings.uplink, positive,
               {"B: the learner's upload limit; without it, plans assume 1 Gbit/s", "unlimited"});
  section.read("chunk", settings.chunk, {.min = Bytes{1024}, .max = Bytes{1u << 20}},
               {"the piece in which a publication is proven and passed on", "by the payload, the fleet and its links"});
  using chains::TopologyPolicy;
  section.read_choice(
      "topology", settings.topology,
      {{"auto", TopologyPolicy::kAuto},
       {"trees", TopologyPolicy::kTrees},
       {"stripes", TopologyPolicy::kStripes},
       {"best_chains", TopologyPolicy::kBestChains},
       {"echo2", TopologyPolicy::kEcho2},
       {"star", TopologyPolicy::kStar}},
      "the topology of a broadcast. auto: the one that the model expects to be fastest, for the planned fleet first "
      "and then for the workers present. trees: a tree for each share of the chunks. stripes: chains for each share. "
      "best_chains: the fastest number of chains. echo2: B / b chains as in ECHO-2. star: the learner sends to every "
      "worker");
  section.read(
      "heartbeat_timeout", settings.heartbeat_timeout,
      {.min = std::chrono::milliseconds(200), .max = std::chrono::hours(1)},
      "a worker without a heartbeat for this long is away: other workers get its work, its machine and place are kept");
  section.read(
      "silence_min", settings.silence_min, {.min = Duration(0), .max = std::chrono::hours(1)},
      "the shortest silence after which a worker loses its place in the topology, even if it was heard regularly "
      "until then; never later than heartbeat_timeout");
  section.read(
      "store", settings.store, {.min = Bytes{1u << 20}, .max = Bytes{1ull << 50}},
      {"recent publications that the learner keeps for late workers; those of a policy of at least 64 MiB are on "
       "the disk of the run's folder",
       "by the policy's size"});
  section.read("quorum", settings.quorum, {.min = 0.01, .max = 1.0},
               "q: a version counts as broadcast, and T_b ends, when this share of the fleet has installed it");
}

}  // namespace echoline::overlay

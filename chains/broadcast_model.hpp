// Models the time of a broadcast: the physical lower bound, and the times over a topology whose nodes forward chunks.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "base/units.hpp"
#include "chains/regions.hpp"
#include "chains/topology.hpp"

namespace echoline::chains {

// One worker's access link: its rates in both directions. `delay` is the one-way delay from its parent, used if the
// regions do not state it.
struct WorkerLink {
  WorkerId id;
  BitRate up;
  BitRate down;
  Duration delay{};
  std::uint32_t region = 0;  // index in Regions::links
};

// The number of workers that make up a fraction q of n, q in (0, 1] (checked): ceil(q n), at least one.
std::size_t quorum_count(double q, std::size_t n);

// The time of a broadcast that no schedule can beat: max{F/B, F/d_min, N*F/(B + sum u)} (Kumar-Ross), without delays. F
// is the payload, B the learner's uplink, u the uplinks and d_min the least downlink of the N workers. Zero without
// workers. With q < 1, the bound is on the time until k = ceil(q N) workers hold the payload. Then d_min is the k-th
// fastest downlink, and all nodes together must upload k*F. With regions, no worker receives faster than its region
// (inflow_max()), and all workers together receive no faster than the links between regions deliver
// (delivered_rate_max()).
Duration lower_bound(Bytes payload, BitRate learner_up, std::span<const WorkerLink> workers, double q = 1,
                     const Regions& regions = {});

// The number of chunks of a payload: ceil(F / c); 0 for an empty payload. The chunk size c must be positive.
std::uint64_t chunk_count(Bytes payload, Bytes chunk_size);

// Costs of a chunk besides its content: the bytes of its proof (overlay/FORMAT.md), and a node's time
// (docs/overlay.md).
inline constexpr double kChunkOverheadBytes = 300, kChunkOverheadSeconds = 15e-6;
inline constexpr std::uint64_t kBestChunkMin = 2 * 1024, kBestChunkMax = 1024 * 1024;  // bytes
// Returns the chunk size c, a power of two from kBestChunkMin to kBestChunkMax, with which a payload of F bytes arrives
// soonest over a topology of depth h and s stripes. It minimises the costs of all chunks, plus the time of the first
// chunk from hop to hop: (F/c)(kChunkOverheadBytes/r + kChunkOverheadSeconds) + (h - 1) s c/r. `bound` is the
// broadcast's lower_bound(), which gives the receiving rate r = F / bound.
Bytes best_chunk(Bytes payload, const Topology& topology, Duration bound);

struct Completion {
  WorkerId id;
  Duration time;  // from the start of the broadcast until the worker holds the whole payload
};

struct BroadcastTimes {
  std::vector<Completion> workers;  // ascending id

  // The time until ceil(q * N) workers hold the payload, q in (0, 1]; zero without workers.
  Duration quorum_time(double q) const;
  Duration last() const { return quorum_time(1.0); }  // until all workers hold it
  Duration time_of(WorkerId id) const;                // the worker must be present (checked)
};

// Returns when each worker of a topology holds the payload's chunks of all stripes. A node's uplink is shared max-min
// fairly by its children. A child takes at most its downlink, divided evenly by the stripes that carry data. A link
// between regions is shared in the same way by the edges that cross it. The topology must be valid (validate()).
// Returns kInvalid for chunk size 0, for an inter-region link without capacity, and for a worker without a link, with a
// rate that is not positive, or in an unknown region.
Result<BroadcastTimes> broadcast_time(const Topology& topology, Bytes payload, Bytes chunk_size, BitRate learner_up,
                                      std::span<const WorkerLink> links, const Regions& regions = {});

}  // namespace echoline::chains

// How long a broadcast takes: the physical lower bound, and store-and-forward time of chains and whole topologies.
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

// One worker's access link. `delay` is the one-way delay from its parent, where the regions do not say it.
struct WorkerLink {
  WorkerId id;
  BitRate up;
  BitRate down;
  Duration delay{};
  std::uint32_t region = 0;  // of Regions::ways
};

// Workers that a fraction q in (0, 1] (checked) of n is: ceil(q n), at least one.
std::size_t counted(double q, std::size_t n);

// No schedule is faster: max{F/B, F/d_min, N*F/(B + sum u)} (Kumar-Ross). Zero without workers. Delays not counted.
// With q < 1, for the time until k = ceil(q N) workers hold the payload: d_min is the k-th fastest downlink, and k*F
// have to be uploaded, at most by all. With regions, nobody receives faster than its region (inflow()), and of a
// region's n workers, n - (N - k) at least have to be sent to by it and over the ways to it.
Duration lower_bound(Bytes payload, BitRate learner_up, std::span<const WorkerLink> workers, double q = 1,
                     const Regions& regions = {});

// Chunks a payload is cut into: ceil(F / c); 0 for an empty payload. `chunk` must be positive.
std::uint64_t chunk_count(Bytes payload, Bytes chunk);

// The chunk, a power of two, with which a payload F is there soonest over a topology of depth h and s stripes, at a
// rate r of each receiver: the c that makes (F/c)(o/r + t) + (h - 1) s c/r least, which is what its chunks cost on the
// way and what the first one takes from hop to hop. o and t: bytes that a chunk adds (its proof), and what a node
// spends on one (overlay/FORMAT.md, docs/overlay.md). `bound`: lower_bound(), from which r follows.
inline constexpr double kBytesPerChunk = 300, kSecondsPerChunk = 15e-6;
inline constexpr std::uint64_t kBestChunkMin = 2 * 1024, kBestChunkMax = 1024 * 1024;
Bytes best_chunk(Bytes payload, const Topology& topology, Duration bound);

struct Completion {
  WorkerId id;
  Duration time;  // from the start of the broadcast until it holds the whole payload
};

struct BroadcastTimes {
  std::vector<Completion> workers;  // ascending id

  // Until ceil(q * N) workers hold the payload, q in (0, 1]; zero without workers.
  Duration fraction(double q) const;
  Duration last() const { return fraction(1.0); }
  Duration of(WorkerId id) const;  // the worker must be in it (checked)
};

// Completion time of every worker of a topology, all of its stripes. Everybody's uplink is shared max-min fairly by its
// children, of which none takes more than its downlink, shared evenly by the stripes that carry anything; a way between
// regions likewise by all that cross it. Errors (kInvalid): a worker without a link or with a rate that is not
// positive, of a region that is not there, a way that carries nothing, chunk 0. The topology must be valid
// (validate()).
Result<BroadcastTimes> broadcast_time(const Topology& topology, Bytes payload, Bytes chunk, BitRate learner_up,
                                      std::span<const WorkerLink> links, const Regions& regions = {});

}  // namespace echoline::chains

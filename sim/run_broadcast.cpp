// Delivery times of a simulated run's publications, computed by chains/.
#include "sim/run_broadcast.hpp"

#include <algorithm>
#include <cmath>

#include "chains/choice.hpp"
#include "chains/fleet_graph.hpp"
#include "chains/score.hpp"

namespace echoline::sim {
namespace {

constexpr double kMaxDeliverySeconds = 1e9;  // finite, so that times can be added
constexpr std::size_t kReplanDivisor = 20;   // plans again if more than 1 in this many workers joined, left or changed

}  // namespace

void RunBroadcast::add(const Receiver& receiver) {
  members_[receiver.id] = receiver;
  ++members_changed_;
}

void RunBroadcast::remove(WorkerId id) { members_changed_ += members_.erase(id); }

Status RunBroadcast::change_links(const Receiver& receiver) {
  members_[receiver.id] = receiver;
  for (chains::WorkerLink& link : links_)
    if (link.id == receiver.id) {
      link.up = receiver.up;
      link.down = receiver.down;
    }
  ++links_changed_;
  return times_.payload.count > 0 ? compute_times(times_.payload) : ok();
}

Status RunBroadcast::plan() {
  const provisioner::PlanRequest& request = scenario_.request;
  BitRate slowest = members_.begin()->second.up, fastest = slowest;
  std::vector<double> ups;
  for (const auto& [id, receiver] : members_) {
    slowest = std::min(slowest, receiver.up);
    fastest = std::max(fastest, receiver.up);
    ups.push_back(receiver.up.bits_per_s);
  }
  const std::size_t middle = ups.size() / 2;
  std::nth_element(ups.begin(), ups.begin() + static_cast<std::ptrdiff_t>(middle), ups.end());
  median_up_ = {ups[middle]};
  std::vector<chains::ChainWorker> workers;
  for (const auto& [id, receiver] : members_) {
    // Reliability as the learner would have measured it: 0.995 is 995 successes of 1000.
    constexpr std::uint32_t kForwardAttempts = 1000;
    // Without an expected worker rate, scores are relative to the fastest worker.
    const chains::PeerStats stats{
        .forwarding_rate = receiver.up,
        .cap = request.paths.worker_rate.value_or(fastest),
        .attempts = kForwardAttempts,
        .successes = static_cast<std::uint32_t>(std::lround(receiver.reliability * kForwardAttempts)),
        .age = Duration{}};
    workers.push_back({.id = id,
                       .up = receiver.up,
                       .down = receiver.down,
                       .score = chains::peer_score(stats),
                       .may_forward = true,
                       .may_seed = true,
                       .region = receiver.region});
  }
  links_.clear();
  for (const auto& [id, receiver] : members_)
    links_.push_back({.id = id,
                      .up = receiver.up,
                      .down = receiver.down,
                      .delay = request.paths.delay_expected,
                      .region = receiver.region});
  // Without an expected rate, chains run at the slowest worker's.
  const BitRate chain_rate = request.paths.worker_rate.value_or(slowest);
  chains::TopologyPolicy policy = request.topology;
  // Compares topologies again when the fleet has doubled or halved. The real learner compares at intervals.
  if (policy == chains::TopologyPolicy::kAuto) {
    if (!chosen_policy_ || members_.size() >= 2 * chosen_for_size_ || 2 * members_.size() <= chosen_for_size_) {
      ECHO_ASSIGN(const chains::Choice choice,
                  chains::choose_topology(request.learner_up, chain_rate, workers, links_,
                                          {request.delta_bytes, request.chunk, request.quorum}, chosen_policy_,
                                          request.paths.regions.graph));
      chosen_policy_ = choice.topology.policy;
      chosen_for_size_ = members_.size();
    }
    policy = *chosen_policy_;
  }
  ECHO_ASSIGN(topology_, chains::plan_chains(request.learner_up, chain_rate, workers, policy, request.quorum,
                                             request.paths.regions.graph));
  copies_sent_.clear();
  const chains::Regions& regions = request.paths.regions.graph;
  const auto region_of = [&](WorkerId id) {
    return id == kLearnerId ? regions.learner_region : members_.at(id).region;
  };
  std::size_t edges_between_regions = 0;
  for (std::size_t stripe = 0; stripe < topology_.stripes(); ++stripe)
    for (const chains::Edge& edge : chains::edges_of(topology_, stripe)) {
      ++copies_sent_[edge.from];
      if (regions.several() && region_of(edge.to) != region_of(edge.from)) ++edges_between_regions;
    }
  // A stripe is 1 / stripes() of the payload.
  copies_between_regions_ = static_cast<double>(edges_between_regions) / topology_.stripes();
  for (auto& [id, copies] : copies_sent_) copies /= topology_.stripes();
  depth_ = topology_.depth();
  ++topologies_planned_;
  members_changed_ = links_changed_ = 0;
  times_.payload = {};
  return ok();
}

Status RunBroadcast::prepare(Bytes payload) {
  if (members_.empty()) {
    topology_ = {};
    times_ = {};
    links_.clear();  // so that the next call with members plans again
    copies_sent_.clear();
    copies_between_regions_ = 0;
    return ok();
  }
  if (links_.empty() || members_changed_ * kReplanDivisor > members_.size()) ECHO_TRY(plan());
  // A changed link has changed the times already (change_links()). It counts only from the next publication on towards
  // a new plan.
  members_changed_ += std::exchange(links_changed_, 0);
  return times_.payload == payload ? ok() : compute_times(payload);
}

Status RunBroadcast::compute_times(Bytes payload) {
  const provisioner::PlanRequest& request = scenario_.request;
  const Bytes sent_size{static_cast<std::uint64_t>(wire_bytes(payload))};
  ECHO_ASSIGN(times_.broadcast, chains::broadcast_time(topology_, sent_size, chunk_size(sent_size), request.learner_up,
                                                       links_, request.paths.regions.graph));
  times_.payload = payload;
  times_.first = Duration::max();
  for (chains::Completion& completion : times_.broadcast.workers) {
    completion.time = std::min(completion.time, from_seconds(kMaxDeliverySeconds));
    times_.first = std::min(times_.first, completion.time);
  }
  times_.median = times_.broadcast.quorum_time(0.5);
  times_.quorum = times_.broadcast.quorum_time(request.quorum);
  return ok();
}

// The configured size of a chunk, or the best one for this number of bytes.
Bytes RunBroadcast::chunk_size(Bytes sent_size) const {
  const provisioner::PlanRequest& request = scenario_.request;
  if (request.chunk.count > 0) return request.chunk;
  return chains::best_chunk(
      sent_size, topology_,
      chains::lower_bound(sent_size, request.learner_up, links_, request.quorum, request.paths.regions.graph));
}

double RunBroadcast::wire_bytes(Bytes payload) const {
  return static_cast<double>(payload.count) * (1 + scenario_.wire_overhead);
}

Duration RunBroadcast::time_of(WorkerId id) const {
  const auto it = std::lower_bound(times_.broadcast.workers.begin(), times_.broadcast.workers.end(), id,
                                   [](const auto& completion, WorkerId wanted) { return completion.id < wanted; });
  if (it != times_.broadcast.workers.end() && it->id == id) return it->time;
  const auto member = members_.find(id);
  if (member == members_.end()) return times_.median;
  // The worker joined after the topology was planned: the median time, but not less than its downlink needs.
  const double download_s = wire_bytes(times_.payload) / member->second.down.bytes_per_s();
  return std::max(times_.median, from_seconds(download_s));
}

Duration RunBroadcast::lower_bound() const {
  return chains::lower_bound(times_.payload, scenario_.request.learner_up, links_, scenario_.request.quorum,
                             scenario_.request.paths.regions.graph);
}

double RunBroadcast::copies_sent_by(WorkerId id) const {
  const auto it = copies_sent_.find(id);
  return it == copies_sent_.end() ? 0 : it->second;
}

// The neighbour is a worker of the receiver's region with the median uplink.
Duration RunBroadcast::neighbour_transfer_time(Bytes payload, const Receiver& receiver) const {
  const BitRate up = median_up_.bits_per_s > 0 ? median_up_ : scenario_.request.learner_up;
  const double rate = std::min(up, receiver.down).bytes_per_s();
  return from_seconds(std::min(kMaxDeliverySeconds, wire_bytes(payload) / rate)) +
         scenario_.request.paths.regions.graph.delay(receiver.region, receiver.region,
                                                     scenario_.request.paths.delay_expected);
}

}  // namespace echoline::sim

#include "sim/run_broadcast.hpp"

#include <algorithm>
#include <cmath>

#include "chains/choice.hpp"
#include "chains/fleet_graph.hpp"
#include "chains/score.hpp"

namespace echoline::sim {
namespace {

constexpr double kLongest = 1e9;           // seconds; finite, so that times can be added
constexpr std::size_t kChangedShare = 20;  // plans again when one in this many has joined or left

}  // namespace

void RunBroadcast::add(const Receiver& receiver) {
  members_[receiver.id] = receiver;
  ++changed_;
}

void RunBroadcast::remove(WorkerId id) { changed_ += members_.erase(id); }

Status RunBroadcast::relink(const Receiver& receiver) {
  members_[receiver.id] = receiver;
  for (chains::WorkerLink& link : links_)
    if (link.id == receiver.id) link.up = receiver.up, link.down = receiver.down;
  ++unseen_;
  return payload_.count > 0 ? reckon(payload_) : ok();
}

Status RunBroadcast::plan() {
  const provisioner::PlanRequest& request = scenario_.request;
  BitRate slowest = members_.begin()->second.up, fastest = slowest;
  std::vector<double> ups;
  for (const auto& [id, r] : members_) {
    slowest = std::min(slowest, r.up);
    fastest = std::max(fastest, r.up);
    ups.push_back(r.up.bits_per_s);
  }
  std::nth_element(ups.begin(), ups.begin() + static_cast<std::ptrdiff_t>(ups.size() / 2), ups.end());
  usual_up_ = {ups[ups.size() / 2]};
  std::vector<chains::ChainWorker> workers;
  for (const auto& [id, r] : members_) {
    constexpr std::uint32_t kStated = 1000;
    const chains::PeerStats stated{r.up, request.paths.worker_rate.value_or(fastest), kStated,
                                   static_cast<std::uint32_t>(std::lround(r.reliability * kStated)), Duration{}};
    workers.push_back({id, r.up, r.down, chains::peer_score(stated), true, true, r.region});
  }
  links_.clear();
  for (const auto& [id, r] : members_) links_.push_back({id, r.up, r.down, request.paths.delay_expected, r.region});
  const BitRate chain_rate = request.paths.worker_rate.value_or(slowest);
  chains::TopologyPolicy policy = request.topology;
  // Compares topologies when the fleet's size has changed a lot; the real learner compares.
  if (policy == chains::TopologyPolicy::kAuto) {
    if (!chosen_ || members_.size() >= 2 * chosen_for_ || 2 * members_.size() <= chosen_for_) {
      ECHO_ASSIGN(const chains::Choice choice,
                  chains::choose_topology(request.learner_up, chain_rate, workers, links_,
                                          {request.delta_bytes, request.chunk, request.quorum}, chosen_,
                                          request.paths.regions.ways));
      chosen_ = choice.topology.policy;
      chosen_for_ = members_.size();
    }
    policy = *chosen_;
  }
  ECHO_ASSIGN(topology_, chains::plan_chains(request.learner_up, chain_rate, workers, policy, request.quorum,
                                             request.paths.regions.ways));
  copies_.clear();
  const chains::Regions& ways = request.paths.regions.ways;
  const auto region_of = [&](WorkerId id) { return id == kLearnerId ? ways.learner : members_.at(id).region; };
  std::size_t crossing = 0;
  for (std::size_t s = 0; s < topology_.stripes(); ++s)
    for (const chains::Edge& edge : chains::edges_of(topology_, s)) {
      ++copies_[edge.from];
      if (ways.several()) crossing += region_of(edge.to) != region_of(edge.from) ? 1 : 0;
    }
  crossing_ = static_cast<double>(crossing) / topology_.stripes();
  for (auto& [id, n] : copies_) n /= topology_.stripes();
  depth_ = topology_.depth();
  ++planned_;
  changed_ = unseen_ = 0;
  payload_ = {};
  return ok();
}

Status RunBroadcast::prepare(Bytes payload) {
  if (members_.empty()) {
    topology_ = {};
    times_ = {};
    links_.clear();
    copies_.clear();
    crossing_ = 0;
    first_ = half_ = quorum_ = {};
    payload_ = {};
    changed_ = 1;
    return ok();
  }
  if (links_.empty() || changed_ * kChangedShare > members_.size()) ECHO_TRY(plan());
  changed_ += std::exchange(unseen_, 0);
  return payload_ == payload ? ok() : reckon(payload);
}

Status RunBroadcast::reckon(Bytes payload) {
  const provisioner::PlanRequest& request = scenario_.request;
  const Bytes sent{static_cast<std::uint64_t>(on_the_wire(payload))};
  ECHO_ASSIGN(times_, chains::broadcast_time(topology_, sent, chunk_of(sent), request.learner_up, links_,
                                             request.paths.regions.ways));
  payload_ = payload;
  first_ = Duration::max();
  for (chains::Completion& c : times_.workers) {
    c.time = std::min(c.time, from_seconds(kLongest));
    first_ = std::min(first_, c.time);
  }
  half_ = times_.fraction(0.5);
  quorum_ = times_.fraction(request.quorum);
  return ok();
}

Bytes RunBroadcast::chunk_of(Bytes sent) const {
  const provisioner::PlanRequest& request = scenario_.request;
  if (request.chunk.count > 0) return request.chunk;
  return chains::best_chunk(
      sent, topology_,
      chains::lower_bound(sent, request.learner_up, links_, request.quorum, request.paths.regions.ways));
}

double RunBroadcast::on_the_wire(Bytes payload) const {
  return static_cast<double>(payload.count) * (1 + scenario_.wire_overhead);
}

Duration RunBroadcast::time_of(WorkerId id) const {
  const auto it = std::lower_bound(times_.workers.begin(), times_.workers.end(), id,
                                   [](const auto& c, auto v) { return c.id < v; });
  if (it != times_.workers.end() && it->id == id) return it->time;
  const auto member = members_.find(id);
  if (member == members_.end()) return half_;
  const double alone = on_the_wire(payload_) / member->second.down.bytes_per_s();
  return std::max(half_, from_seconds(alone));
}

Duration RunBroadcast::lower_bound() const {
  return chains::lower_bound(payload_, scenario_.request.learner_up, links_, scenario_.request.quorum,
                             scenario_.request.paths.regions.ways);
}

double RunBroadcast::copies_of(WorkerId id) const {
  const auto it = copies_.find(id);
  return it == copies_.end() ? 0 : it->second;
}

Duration RunBroadcast::from_a_neighbour(Bytes payload, const Receiver& receiver) const {
  const BitRate up = usual_up_.bits_per_s > 0 ? usual_up_ : scenario_.request.learner_up;
  const double rate = std::min(up, receiver.down).bytes_per_s();
  return from_seconds(std::min(kLongest, on_the_wire(payload) / rate)) +
         scenario_.request.paths.regions.ways.delay(receiver.region, receiver.region,
                                                    scenario_.request.paths.delay_expected);
}

}  // namespace echoline::sim

// The checks behind Invariants. The world and the fleet call them as observers; the soak test calls the last ones.
#include "sim/invariants.hpp"

#include <algorithm>

namespace echoline::sim {

using namespace overlay;

namespace {

// Chunks that memory may hold beyond the budget: read back, or received before reading stopped.
constexpr std::uint64_t kSlackChunks = 40;
constexpr std::uint64_t kStepsPerLearnerCheck = 256;
// Bytes that an edge may carry twice when it opens or changes: two windows of data in flight.
constexpr std::uint64_t kEdgeChangeBytes = 2 * Uplink::kWindowBytes + 2 * kChunkBytesMax;
constexpr double kWasteShare = 0.02;
// Bad chunks after which a child must have left its parent. Two would suffice, but a complaint may cross a new
// assignment.
constexpr std::uint64_t kBadChunksNoticed = 8;
// Items that a child may list, plus as many that have left the store since.
constexpr std::size_t kKnownMax = 2 * kHaveItemsMax;
// Messages tolerated beyond the budget: some are in flight when the learner expels the worker, and are not accepted.
constexpr std::uint64_t kExcessMessagesMax = 512;

}  // namespace

Invariants::Invariants(World& world, Fleet& fleet) : world_(world), fleet_(fleet) {}

void Invariants::violated(const char* rule, std::string text) {
  world_.note(fmt::format("VIOLATED ({}): {}", rule, text));
  violations_.push_back({world_.now(), rule, std::move(text)});
}

bool Invariants::is_honest(HostId host) const {
  const auto worker = fleet_.worker_on(host);
  return !worker || !fleet_.worker(*worker).options.malice.any();
}

void Invariants::on_frame(HostId from, HostId to, std::optional<WorkerId> as, const Frame& frame) {
  const HostId learner = fleet_.learner_host();
  if (frame.type == FrameType::kChunk) {
    ++counts_.chunks;
    if (to == fleet_.intruder_host() && is_honest(from))
      violated(kGranted, fmt::format("host {} sent a chunk to a machine that the learner never sent there", from));
    if (!fleet_.published_content().matches(frame.chunk.publication, frame.chunk.index, frame.body))
      on_bad_chunk(from, to, frame);
    if (const auto worker = fleet_.worker_on(to); worker && from == learner && is_honest(to))
      on_chunk_of_learner(*worker, frame);
    return;
  }
  if (frame.type != FrameType::kControl) return;
  counts_.intrusions += from == fleet_.intruder_host();
  const bool to_intruder = to == fleet_.intruder_host() && is_honest(from);
  if (!to_intruder && to != learner) return;
  const auto message = decode_control(frame.body.bytes());
  if (!message) return;
  if (to_intruder &&
      (std::holds_alternative<SignedAnnouncement>(*message) || std::holds_alternative<SignedManifest>(*message)))
    violated(kGranted, fmt::format("host {} accepted as its child a machine that the learner never sent there", from));
  if (const auto worker = fleet_.worker_on(from); worker && to == learner)
    on_message_to_learner(*worker, as.value_or(fleet_.worker(*worker).id()), *message);
}

void Invariants::on_bad_chunk(HostId from, HostId to, const Frame& frame) {
  if (is_honest(from))
    violated(kBytes,
             fmt::format("host {} sent host {} a chunk {} that the learner never made", from, to, frame.chunk.index));
  const auto parent = fleet_.worker_on(from), child = fleet_.worker_on(to);
  if (!faults_over_ || !parent || !child || !is_honest(to) || !fleet_.worker(*child).joined) return;
  if (world_.paused(fleet_.learner_host())) return;  // it learns of the chunk later, and only it can separate the two
  const MemberCore* member = fleet_.member(*child);
  if (member) suspected_ = {*child, fleet_.worker(*parent).id(), member->stats().chunks_corrupt};
}

// Called after the child has checked the chunk. The chunk counts only if the child lacked it, and so checked its hash.
void Invariants::count_bad_chunk(std::size_t child, const WorkerStats& stats) {
  if (!suspected_ || suspected_->child != child) return;
  if (stats.chunks_corrupt > suspected_->corrupt_chunks_before)
    ++bad_chunks_[{suspected_->parent, fleet_.worker(child).id()}];
  suspected_.reset();
}

void Invariants::on_chunk_of_learner(std::size_t worker, const Frame& frame) {
  const std::uint64_t bytes = frame.body.size();
  counts_.learner_chunk_bytes += bytes;
  ChildView& child = children_[worker];
  const PublishedContent::Publication* p = fleet_.published_content().find(frame.chunk.publication);
  ChunkSet& held = child.held_chunks[frame.chunk.publication];
  // Versions up to the child's position count as held, except those that came through help: parents learn of these
  // separately.
  const bool passed = p && child.position && p->key.version <= *child.position &&
                      !(child.catch_up_target && p->key.version <= *child.catch_up_target);
  if (held.contains(frame.chunk.index) || passed) counts_.learner_wasted_bytes += bytes;
  held.insert(frame.chunk.index);
}

// The learner expels the worker at the first message beyond the budget. From then on it takes no message of the worker,
// over this connection or the next.
void Invariants::on_flood(WorkerId from, const ControlMessage& message) {
  const auto kind = MessageBudget::kind_of(message);
  if (!kind) return;
  if (floods_learner_process_ != fleet_.learner_processes()) floods_.clear();
  floods_learner_process_ = fleet_.learner_processes();
  ++counts_.flood_messages;
  Flood& flood = floods_.try_emplace(from, Flood{MessageBudget(fleet_.learner_options().heartbeat)}).first->second;
  if (flood.budget.take(*kind, world_.now()) != MessageBudget::Verdict::kTooMuch) return;
  counts_.floods += ++flood.too_many == 1;
  if (flood.too_many == kExcessMessagesMax)
    violated(kFlood,
             fmt::format("the learner still takes messages of worker {}, {} beyond its budget", from, flood.too_many));
}

void Invariants::on_message_to_learner(std::size_t worker, WorkerId as, const ControlMessage& message) {
  if (fleet_.worker(worker).options.malice.floods()) on_flood(as, message);
  if (const auto* hello = std::get_if<PeerHello>(&message)) {
    allowed_waste_ += kEdgeChangeBytes;
    if (hello->stream == 0) record_have(worker, hello->have, true);
    if (hello->catch_up_to) children_[worker].catch_up_target = hello->catch_up_to;
  } else if (const auto* have = std::get_if<Have>(&message)) {
    allowed_waste_ += kEdgeChangeBytes;
    record_have(worker, *have, false);
  } else if (std::holds_alternative<EdgeFailed>(message)) {
    ++counts_.edge_failures;
  } else if (std::holds_alternative<Heartbeat>(message)) {
    presence(as).last_heartbeat_at = world_.now();
  } else if (const auto* request = std::get_if<ChunkRequest>(&message)) {
    children_[worker].held_chunks[request->publication].erase(request->index);
  }
}

void Invariants::record_have(std::size_t worker, const Have& have, bool starts_connection) {
  ChildView& child = children_[worker];
  if (starts_connection) child.held_chunks.clear();
  child.position = have.position;
  for (const auto& [key, item] : have.items) {
    if (starts_connection)
      child.held_chunks[item.publication] = item.chunks;
    else
      child.held_chunks[item.publication].insert_all(item.chunks);
  }
}

void Invariants::on_step(HostId host) {
  if (const LearnerCore* learner = fleet_.learner()) learner->check();
  if (const auto worker = fleet_.worker_on(host))
    if (const MemberCore* member = fleet_.member(*worker)) {
      member->check();
      const WorkerStats stats = member->stats();
      check_budget(*worker, fleet_.worker(*worker).options.store, stats.memory.count, world_.disk(host).known_bytes(),
                   world_.disk(host).write_failed());
      if (stats.known_publications > kKnownMax)
        violated(kBudget,
                 fmt::format("worker {} remembers {} publications for one child", *worker, stats.known_publications));
      count_bad_chunk(*worker, stats);
    }
  if (++steps_ % kStepsPerLearnerCheck == 0) check_learner();
}

void Invariants::check_budget(std::size_t worker, const StoreLimits& limits, std::uint64_t memory, std::uint64_t disk,
                              bool disk_failed) {
  const std::uint64_t slack = limits.disk ? kSlackChunks * fleet_.chunk_bytes() : 0;
  // Budgets count the content of chunks; on disk each has a header and a proof.
  const std::uint64_t chunk_head_bytes = (limits.disk_max.count / fleet_.chunk_bytes() + 1) * kChunkHeadBytesMax;
  // Data that the disk refused must be in memory, with the rest of its publication.
  const std::uint64_t memory_max = limits.memory_max.count + (limits.disk && disk_failed ? limits.disk_max.count : 0);
  if (memory > memory_max + slack)
    violated(kBudget,
             fmt::format("worker {} holds {} bytes in memory, at most {} are allowed", worker, memory, memory_max));
  if (disk > limits.disk_max.count + slack + chunk_head_bytes)
    violated(kBudget, fmt::format("worker {} holds {} bytes on disk, at most {} are allowed", worker, disk,
                                  limits.disk_max.count));
}

void Invariants::on_delivered(std::size_t worker, const act::Deliver& delivery) {
  ++counts_.deliveries;
  const Publication& p = delivery.publication;
  const PublicationKey key{p.version, p.base};
  std::vector<Slice> pieces = p.payload.pieces();
  if (delivery.spooled && world_.disk(fleet_.worker(worker).host).rotten()) return;  // its application detects that
  if (delivery.spooled) pieces = world_.disk(fleet_.worker(worker).host).pieces(*delivery.spooled);
  if (fleet_.published_content().matches(key, p.policy_digest, pieces)) return;
  std::uint64_t payload_bytes = 0;
  for (const Slice& piece : pieces) payload_bytes += piece.size();
  violated(kBytes, fmt::format("worker {} is given {} that the learner never published ({}{} of {} bytes)", worker,
                               to_text(key), delivery.spooled ? "on its disk, " : "", payload_bytes, delivery.bytes));
}

void Invariants::on_activated(std::size_t worker, const Installed& active) {
  ++counts_.activations;
  // A policy from which a learner resumed belongs to several epochs; any of them is valid.
  const std::set<std::uint64_t> epochs = fleet_.published_content().epochs_of(active.policy_digest);
  std::optional<std::pair<std::uint64_t, Version>>& last_activation = active_[fleet_.worker(worker).id()];
  for (const std::uint64_t epoch : epochs)
    if (const std::pair activation{epoch, active.version}; !last_activation || activation >= *last_activation) {
      last_activation = activation;
      return;
    }
  violated(kMonotonicVersion, fmt::format("worker {} activates version {} of epoch {} after version {} of epoch {}",
                                          worker, active.version, epochs.empty() ? 0 : *epochs.rbegin(),
                                          last_activation ? last_activation->second.value : 0,
                                          last_activation ? last_activation->first : 0));
}

void Invariants::on_identity(std::size_t worker, WorkerId) {
  slanderers_ += fleet_.worker(worker).options.malice.slander;
}

void Invariants::on_topology(const chains::Topology& topology) {
  ++counts_.topologies;
  for (std::uint32_t s = 0; s < topology.stripes(); ++s) {
    std::set<WorkerId> seen;
    for (const auto& chain : topology.stripe(s))
      for (const WorkerId id : chain)
        if (!seen.insert(id).second) violated(kTree, fmt::format("worker {} is in the topology twice", id));
  }
  // Trees: several children, and for a moment those of a worker that has left.
  check_parents(topology.parents(), topology.policy == chains::TopologyPolicy::kTrees ? topology.size() : 1);
}

void Invariants::check_parents(const std::map<WorkerId, std::vector<WorkerId>>& parents, std::size_t children_max) {
  const std::size_t stripes = parents.empty() ? 0 : parents.begin()->second.size();
  for (std::size_t s = 0; s < stripes; ++s) {
    std::map<WorkerId, std::size_t> children;
    for (const auto& [id, worker_parents] : parents) {
      if (worker_parents.size() != stripes)
        return violated(kTree, fmt::format("worker {} has {} parents", id, worker_parents.size()));
      if (++children[worker_parents[s]] > children_max && worker_parents[s] != kLearnerId)
        violated(kTree, fmt::format("worker {} has {} children, at most {} are allowed", worker_parents[s],
                                    children[worker_parents[s]], children_max));
      WorkerId ancestor = id;
      std::size_t hops = 0;
      for (; ancestor != kLearnerId && hops <= parents.size(); ++hops) {
        const auto it = parents.find(ancestor);
        if (it == parents.end())
          return violated(kTree, fmt::format("the parent of worker {}, {}, is not in the topology", id, ancestor));
        ancestor = it->second[s];
      }
      if (ancestor != kLearnerId) return violated(kTree, fmt::format("worker {} is in a cycle", id));
    }
  }
}

Invariants::Presence& Invariants::presence(WorkerId id) {
  if (presence_learner_process_ != fleet_.learner_processes()) presence_.clear();  // a new process knows no worker
  presence_learner_process_ = fleet_.learner_processes();
  return presence_[id];
}

void Invariants::on_joined(WorkerId id) {
  Presence& p = presence(id);
  if (p.connected) violated(kPresence, fmt::format("worker {} joins, but was present", id));
  counts_.back += p.away_since != TimePoint{};
  p = {true, {}, world_.now()};
}

void Invariants::on_away(WorkerId id, const std::string& reason) {
  Presence& p = presence(id);
  if (!p.connected) violated(kPresence, fmt::format("worker {} is away, but was not present", id));
  const Duration silence = world_.now() - p.last_heartbeat_at,
                 heartbeat_timeout = fleet_.learner_options().network.heartbeat_timeout;
  if (reason.starts_with("no heartbeat") && silence < heartbeat_timeout)
    violated(kPresence, fmt::format("worker {} is reported away after {} of silence, not {}", id,
                                    echoline::to_text(silence), echoline::to_text(heartbeat_timeout)));
  ++counts_.away;
  p.connected = false;
  p.away_since = world_.now();
}

void Invariants::on_lost(WorkerId id, const std::string& reason) {
  const Presence p = presence(id);
  presence_.erase(id);
  const auto worker = fleet_.worker_of(id);
  if (worker && !fleet_.worker(*worker).options.malice.any() && Fleet::is_expelled_for_messages(reason))
    return violated(kBlame, fmt::format("worker {} is expelled although it is honest: {}", *worker, reason));
  const bool may_be_lost = reason.starts_with("it left") || reason.starts_with("expelled");
  if (!worker || fleet_.worker(*worker).options.malice.any() || may_be_lost) return;
  ++counts_.lost;
  const Duration away = world_.now() - p.away_since, away_max = fleet_.learner_options().away_max;
  if (p.connected) violated(kPresence, fmt::format("worker {} is lost, but was not away before: {}", id, reason));
  if (!p.connected && away < away_max)
    violated(kPresence, fmt::format("worker {} is lost after {}, but its place is kept for {}", id,
                                    echoline::to_text(away), echoline::to_text(away_max)));
}

std::string Invariants::worker_missing_from_topology() const {
  const LearnerCore* learner = fleet_.learner();
  if (!learner) return "";
  const LearnerStats stats = learner->stats();
  for (std::size_t i = 0; i < fleet_.workers(); ++i) {
    const Fleet::Worker& w = fleet_.worker(i);
    if (!w.wanted || !w.joined || w.options.malice.any()) continue;
    const auto view = std::find_if(stats.workers.begin(), stats.workers.end(),
                                   [&](const WorkerView& v) { return v.info.id == w.id(); });
    if (view == stats.workers.end() || view->silent || !stats.topology.contains(w.id()))
      return fmt::format("worker {} is a member but has no place: {}", w.id(),
                         view == stats.workers.end() ? "the learner does not know it"
                         : view->silent              ? "it is silent"
                                                     : "it is not in the topology");
  }
  return "";
}

// Whether corrupting senders are at least as many as honest workers. Then a corrupting sender may have only one honest
// accuser, and that accuser counts as the liar.
bool Invariants::honest_are_outnumbered() const {
  std::size_t corrupt = 0, honest = 0;
  for (std::size_t i = 0; i < fleet_.workers(); ++i) {
    const MaliceOptions& malice = fleet_.worker(i).options.malice;
    corrupt += malice.flip_share > 0 || malice.forge_share > 0;
    honest += !malice.any();
  }
  return corrupt > Conduct::kLoneAccusationsMax && honest <= corrupt;
}

void Invariants::check_learner() {
  if (!fleet_.application_error().empty() &&
      std::none_of(violations_.begin(), violations_.end(),
                   [](const Violation& v) { return v.rule == std::string(kSound); }))
    violated(kSound, fleet_.application_error());
  const LearnerCore* learner = fleet_.learner();
  if (!learner) return;
  const LearnerStats stats = learner->stats();
  counts_.quarantined = std::max(counts_.quarantined, stats.quarantined);
  if (stats.known_publications > kKnownMax)
    violated(kBudget, fmt::format("the learner remembers {} publications for one child", stats.known_publications));
  for (const WorkerView& view : stats.workers) {
    const auto worker = fleet_.worker_of(view.info.id);
    if (view.quarantined && !stats.topology.children_of(view.info.id).empty())
      violated(kBlame, fmt::format("worker {} is quarantined but has children", view.info.id));
    if (view.quarantined && worker && slanderers_ < 2 && !fleet_.worker(*worker).options.malice.any() &&
        !honest_are_outnumbered())
      violated(kBlame, fmt::format("worker {} is quarantined although it is honest", *worker));
  }
  const auto wasted_bytes_max =
      static_cast<std::uint64_t>(kWasteShare * static_cast<double>(counts_.learner_chunk_bytes)) + allowed_waste_;
  if (counts_.learner_wasted_bytes > wasted_bytes_max)
    violated(kFrugal, fmt::format("{} of the {} chunk bytes of the learner were for children that had them",
                                  counts_.learner_wasted_bytes, counts_.learner_chunk_bytes));
}

void Invariants::check_liveness() {
  if (const std::string missing_worker = worker_missing_from_topology(); faults_over_ && !missing_worker.empty())
    violated(kPresence, missing_worker);
  std::set<WorkerId> quarantined;  // the command to leave them may still be on its way to their children
  if (const LearnerCore* learner = fleet_.learner())
    for (const WorkerView& view : learner->stats().workers)
      if (view.quarantined) quarantined.insert(view.info.id);
  if (faults_over_)
    for (const auto& [pair, chunks] : bad_chunks_)
      if (chunks >= kBadChunksNoticed && !quarantined.contains(pair.first) && !honest_are_outnumbered())
        violated(kBlame, fmt::format("worker {} forwarded {} bad chunks to worker {}, but they were not separated",
                                     pair.first, chunks, pair.second));
  const auto newest = fleet_.newest();
  if (!newest) return;
  for (std::size_t i = 0; i < fleet_.workers(); ++i) {
    const Fleet::Worker& w = fleet_.worker(i);
    if (!w.wanted || w.options.malice.starves_itself() || (w.active && w.active->version == *newest)) continue;
    violated(kLiveness,
             fmt::format("the worker on host {} ({}) has {}, the newest is version {}; {}{}", w.host.value,
                         to_text(w.options.malice), w.active ? fmt::format("version {}", w.active->version) : "nothing",
                         *newest, w.joined ? "it is a member" : "it is no member",
                         w.last_end.empty() ? "" : fmt::format("; its last process ended: {}", w.last_end)));
  }
}

}  // namespace echoline::sim

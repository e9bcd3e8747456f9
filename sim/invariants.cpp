// The checks behind Invariants. The world and the fleet call them as observers. The soak test calls check_liveness() at
// its end.
#include "sim/invariants.hpp"

#include <algorithm>

namespace echoline::sim {

using namespace overlay;

namespace {

// Chunks that a worker with a disk may hold beyond a budget: read back from the disk for a child, or received before
// its connections stopped reading.
constexpr std::uint64_t kSlackChunks = 40;
constexpr std::uint64_t kStepsPerStatisticsCheck = 256;
// Bytes that an edge may carry twice when it opens or changes: two windows of data in flight, each exceeded by a chunk.
constexpr std::uint64_t kEdgeChangeBytes = 2 * Uplink::kWindowBytes + 2 * kChunkBytesMax;
// Share of the learner's chunk bytes that children may receive twice, apart from those of changed edges.
constexpr double kWastedShareMax = 0.02;
// Bad chunks after which a child must have left its parent. The learner acts on two complaints, but a complaint may
// still be on its way when the learner assigns a parent again.
constexpr std::uint64_t kBadChunksNoticed = 8;
// Publications that a node remembers for one child: those that the child may list, plus as many that it has since
// dropped.
constexpr std::size_t kKnownPublicationsMax = 2 * kHaveItemsMax;
// Messages tolerated beyond the budget: some are in flight when the learner expels the worker, and are not accepted.
constexpr std::uint64_t kExcessMessagesMax = 512;

}  // namespace

Invariants::Invariants(World& world, Fleet& fleet) : world_(world), fleet_(fleet) {}

void Invariants::report_violation(const char* rule, std::string text) {
  world_.note(fmt::format("VIOLATED ({}): {}", rule, text));
  violations_.push_back({world_.now(), rule, std::move(text)});
}

bool Invariants::is_honest(HostId host) const {
  const auto worker = fleet_.worker_on_host(host);
  return !worker || !fleet_.worker(*worker).options.malice.any();
}

void Invariants::on_frame(HostId from, HostId to, std::optional<WorkerId> certified_id, const Frame& frame) {
  const HostId learner = fleet_.learner_host();
  if (frame.type == FrameType::kChunk) {
    ++counts_.chunks;
    if (to == fleet_.intruder_host() && is_honest(from))
      report_violation(kOnlyAssignedChildren,
                       fmt::format("host {} sent a chunk to a machine that the learner never sent there", from));
    if (!fleet_.published_content().matches(frame.chunk.publication, frame.chunk.index, frame.body))
      on_bad_chunk(from, to, frame);
    if (const auto worker = fleet_.worker_on_host(to); worker && from == learner && is_honest(to))
      on_chunk_of_learner(*worker, frame);
    return;
  }
  if (frame.type != FrameType::kControl) return;
  if (from == fleet_.intruder_host()) ++counts_.intrusions;
  const bool honest_to_intruder = to == fleet_.intruder_host() && is_honest(from);
  if (!honest_to_intruder && to != learner) return;
  const auto message = decode_control(frame.body.bytes());
  if (!message) return;
  if (honest_to_intruder &&
      (std::holds_alternative<SignedAnnouncement>(*message) || std::holds_alternative<SignedManifest>(*message)))
    report_violation(kOnlyAssignedChildren,
                     fmt::format("host {} accepted as its child a machine that the learner never sent there", from));
  if (const auto worker = fleet_.worker_on_host(from); worker && to == learner)
    on_message_to_learner(*worker, certified_id.value_or(fleet_.worker(*worker).id()), *message);
}

void Invariants::on_bad_chunk(HostId from, HostId to, const Frame& frame) {
  if (is_honest(from))
    report_violation(kBytes, fmt::format("host {} sent host {} a chunk {} that the learner never made", from, to,
                                         frame.chunk.index));
  const auto parent = fleet_.worker_on_host(from), child = fleet_.worker_on_host(to);
  if (!faults_over_ || !parent || !child || !is_honest(to) || !fleet_.worker(*child).joined) return;
  if (world_.is_paused(fleet_.learner_host())) return;  // only the learner can separate the two, and it is stopped
  const MemberCore* member = fleet_.member(*child);
  if (member) chunk_in_delivery_ = {*child, fleet_.worker(*parent).id(), member->stats().chunks_corrupt};
}

// Called after the child has processed the chunk. The chunk counts only if the child lacked it: a child checks the hash
// of no other chunk.
void Invariants::count_bad_chunk(std::size_t child, const WorkerStats& stats) {
  if (!chunk_in_delivery_ || chunk_in_delivery_->child != child) return;
  if (stats.chunks_corrupt > chunk_in_delivery_->corrupt_chunks_before)
    ++bad_chunks_[{chunk_in_delivery_->parent, fleet_.worker(child).id()}];
  chunk_in_delivery_.reset();
}

void Invariants::on_chunk_of_learner(std::size_t worker, const Frame& frame) {
  const std::uint64_t bytes = frame.body.size();
  counts_.learner_chunk_bytes += bytes;
  ChildView& child = children_[worker];
  const PublishedContent::Publication* published = fleet_.published_content().find(frame.chunk.publication);
  ChunkSet& held = child.held_chunks[frame.chunk.publication];
  // Versions up to the child's position count as held. Versions that a helper brought (catch_up_target) do not, because
  // parents learn of them only later.
  const bool held_by_position = published && child.position && published->key.version <= *child.position &&
                                !(child.catch_up_target && published->key.version <= *child.catch_up_target);
  if (held.contains(frame.chunk.index) || held_by_position) counts_.learner_wasted_bytes += bytes;
  held.insert(frame.chunk.index);
}

// The learner expels the worker at the first message beyond the budget. From then on it takes no message of the worker,
// over this connection or the next.
void Invariants::on_flood(WorkerId from, const ControlMessage& message) {
  const auto kind = MessageBudget::kind_of(message);
  if (!kind) return;
  ++counts_.flood_messages;
  Flood& flood =
      learner_view().floods.try_emplace(from, Flood{MessageBudget(fleet_.learner_options().heartbeat)}).first->second;
  if (flood.budget.count(*kind, world_.now()) != MessageBudget::Verdict::kTooMuch) return;
  if (++flood.messages_over_budget == 1) ++counts_.floods;
  if (flood.messages_over_budget == kExcessMessagesMax)
    report_violation(kFlood, fmt::format("the learner still takes messages of worker {}, {} beyond its budget", from,
                                         flood.messages_over_budget));
}

void Invariants::on_message_to_learner(std::size_t worker, WorkerId sender_id, const ControlMessage& message) {
  if (fleet_.worker(worker).options.malice.floods()) on_flood(sender_id, message);
  if (const auto* hello = std::get_if<PeerHello>(&message)) {
    waste_allowance_bytes_ += kEdgeChangeBytes;
    // Only an edge's first stream lists what the child has.
    if (hello->stream == 0) record_have(worker, hello->have, /*starts_connection=*/true);
    if (hello->catch_up_to) children_[worker].catch_up_target = hello->catch_up_to;
  } else if (const auto* have = std::get_if<Have>(&message)) {
    waste_allowance_bytes_ += kEdgeChangeBytes;
    record_have(worker, *have, /*starts_connection=*/false);
  } else if (std::holds_alternative<EdgeFailed>(message)) {
    ++counts_.edge_failures;
  } else if (std::holds_alternative<Heartbeat>(message)) {
    learner_view().presence[sender_id].last_heartbeat_at = world_.now();
  } else if (const auto* request = std::get_if<ChunkRequest>(&message)) {
    children_[worker].held_chunks[request->publication].erase(request->index);  // the child does not have it after all
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
  if (const auto worker = fleet_.worker_on_host(host))
    if (const MemberCore* member = fleet_.member(*worker)) {
      member->check();
      const WorkerStats stats = member->stats();
      check_budget(*worker, fleet_.worker(*worker).options.store, stats.memory.count,
                   world_.disk(host).recorded_bytes(), world_.disk(host).has_write_failed());
      if (stats.known_publications > kKnownPublicationsMax)
        report_violation(kBudget, fmt::format("worker {} remembers {} publications for one child", *worker,
                                              stats.known_publications));
      count_bad_chunk(*worker, stats);
    }
  if (++steps_ % kStepsPerStatisticsCheck == 0) check_learner_statistics();
}

void Invariants::check_budget(std::size_t worker, const StoreLimits& limits, std::uint64_t memory_bytes,
                              std::uint64_t disk_bytes, bool disk_failed) {
  const std::uint64_t slack_bytes = limits.disk ? kSlackChunks * fleet_.chunk_bytes() : 0;
  // Budgets count the content of chunks; on disk each has a header and a proof.
  const std::uint64_t chunk_head_bytes = (limits.disk_max.count / fleet_.chunk_bytes() + 1) * kChunkHeadBytesMax;
  // Data that the disk refused must be in memory, with the rest of its publication.
  const std::uint64_t memory_bytes_max =
      limits.memory_max.count + (limits.disk && disk_failed ? limits.disk_max.count : 0);
  if (memory_bytes > memory_bytes_max + slack_bytes)
    report_violation(kBudget, fmt::format("worker {} holds {} bytes in memory, at most {} are allowed", worker,
                                          memory_bytes, memory_bytes_max));
  if (disk_bytes > limits.disk_max.count + slack_bytes + chunk_head_bytes)
    report_violation(kBudget, fmt::format("worker {} holds {} bytes on disk, at most {} are allowed", worker,
                                          disk_bytes, limits.disk_max.count));
}

void Invariants::on_delivered(std::size_t worker, const act::DeliverPublication& delivery) {
  ++counts_.deliveries;
  const Publication& publication = delivery.publication;
  const PublicationKey key{publication.version, publication.base};
  std::vector<Slice> pieces = publication.payload.pieces();
  if (delivery.spooled) {
    const Disk& disk = world_.disk(fleet_.worker(worker).host);
    if (disk.is_corrupted()) return;  // the worker's application detects that
    pieces = disk.pieces(*delivery.spooled);
  }
  if (fleet_.published_content().matches(key, publication.policy_digest, pieces)) return;
  std::uint64_t payload_bytes = 0;
  for (const Slice& piece : pieces) payload_bytes += piece.size();
  report_violation(kBytes,
                   fmt::format("worker {} is given {} that the learner never published ({}{} of {} bytes)", worker,
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
  report_violation(
      kMonotonicVersion,
      fmt::format("worker {} activates version {} of epoch {} after version {} of epoch {}", worker, active.version,
                  epochs.empty() ? 0 : *epochs.rbegin(), last_activation ? last_activation->second.value : 0,
                  last_activation ? last_activation->first : 0));
}

void Invariants::on_new_identity(std::size_t worker, WorkerId) {
  // Each identity of a slandering worker can accuse once more.
  if (fleet_.worker(worker).options.malice.slander) ++slandering_identities_;
}

void Invariants::on_topology(const chains::Topology& topology) {
  ++counts_.topologies;
  for (std::uint32_t stripe = 0; stripe < topology.stripes(); ++stripe) {
    std::set<WorkerId> seen;
    for (const auto& chain : topology.stripe(stripe))
      for (const WorkerId id : chain)
        if (!seen.insert(id).second) report_violation(kTree, fmt::format("worker {} is in the topology twice", id));
  }
  // In trees a worker has several children, for a moment even those of a worker that has left. So any number is
  // allowed.
  const bool are_trees = topology.policy == chains::TopologyPolicy::kTrees;
  check_parents(topology.parents(), are_trees ? topology.size() : 1);
}

void Invariants::check_parents(const std::map<WorkerId, std::vector<WorkerId>>& parents, std::size_t children_max) {
  const std::size_t stripes = parents.empty() ? 0 : parents.begin()->second.size();
  for (std::size_t stripe = 0; stripe < stripes; ++stripe) {
    std::map<WorkerId, std::size_t> child_counts;
    for (const auto& [id, worker_parents] : parents) {
      if (worker_parents.size() != stripes)
        return report_violation(kTree, fmt::format("worker {} has {} parents", id, worker_parents.size()));
      if (++child_counts[worker_parents[stripe]] > children_max && worker_parents[stripe] != kLearnerId)
        report_violation(kTree, fmt::format("worker {} has {} children, at most {} are allowed", worker_parents[stripe],
                                            child_counts[worker_parents[stripe]], children_max));
      WorkerId ancestor = id;
      std::size_t hops = 0;
      for (; ancestor != kLearnerId && hops <= parents.size(); ++hops) {
        const auto it = parents.find(ancestor);
        if (it == parents.end())
          return report_violation(kTree,
                                  fmt::format("the parent of worker {}, {}, is not in the topology", id, ancestor));
        ancestor = it->second[stripe];
      }
      if (ancestor != kLearnerId) return report_violation(kTree, fmt::format("worker {} is in a cycle", id));
    }
  }
}

Invariants::LearnerView& Invariants::learner_view() {
  if (learner_view_.learner_start != fleet_.learner_starts())
    learner_view_ = {.learner_start = fleet_.learner_starts(), .presence = {}, .floods = {}};
  return learner_view_;
}

void Invariants::on_joined(WorkerId id) {
  Presence& presence_of_worker = learner_view().presence[id];
  if (presence_of_worker.connected) report_violation(kPresence, fmt::format("worker {} joins, but was present", id));
  if (presence_of_worker.away_since != TimePoint{}) ++counts_.back;
  presence_of_worker = {.connected = true, .away_since = {}, .last_heartbeat_at = world_.now()};
}

void Invariants::on_away(WorkerId id, const std::string& reason) {
  Presence& presence_of_worker = learner_view().presence[id];
  if (!presence_of_worker.connected)
    report_violation(kPresence, fmt::format("worker {} is away, but was not present", id));
  const Duration silence = world_.now() - presence_of_worker.last_heartbeat_at,
                 heartbeat_timeout = fleet_.learner_options().network.heartbeat_timeout;
  if (reason.starts_with("no heartbeat") && silence < heartbeat_timeout)
    report_violation(kPresence, fmt::format("worker {} is reported away after {} of silence, not {}", id,
                                            echoline::to_text(silence), echoline::to_text(heartbeat_timeout)));
  ++counts_.away;
  presence_of_worker.connected = false;
  presence_of_worker.away_since = world_.now();
}

void Invariants::on_lost(WorkerId id, const std::string& reason) {
  const Presence presence_of_worker = learner_view().presence[id];
  learner_view_.presence.erase(id);
  const auto worker = fleet_.worker_with_id(id);
  if (worker && !fleet_.worker(*worker).options.malice.any() && Fleet::is_expelled_for_messages(reason))
    return report_violation(kBlame, fmt::format("worker {} is expelled although it is honest: {}", *worker, reason));
  const bool left_or_expelled = reason.starts_with("it left") || reason.starts_with("expelled");
  if (!worker || fleet_.worker(*worker).options.malice.any() || left_or_expelled) return;
  ++counts_.lost;
  const Duration away = world_.now() - presence_of_worker.away_since, away_max = fleet_.learner_options().away_max;
  if (presence_of_worker.connected)
    report_violation(kPresence, fmt::format("worker {} is lost, but was not away before: {}", id, reason));
  if (!presence_of_worker.connected && away < away_max)
    report_violation(kPresence, fmt::format("worker {} is lost after {}, but its place is kept for {}", id,
                                            echoline::to_text(away), echoline::to_text(away_max)));
}

std::string Invariants::worker_missing_from_topology() const {
  const LearnerCore* learner = fleet_.learner();
  if (!learner) return "";
  const LearnerStats stats = learner->stats();
  for (std::size_t i = 0; i < fleet_.worker_count(); ++i) {
    const Fleet::Worker& worker = fleet_.worker(i);
    if (!worker.should_run || !worker.joined || worker.options.malice.any()) continue;
    const auto view = std::find_if(stats.workers.begin(), stats.workers.end(),
                                   [&](const WorkerView& candidate) { return candidate.info.id == worker.id(); });
    if (view == stats.workers.end() || view->silent || !stats.topology.contains(worker.id()))
      return fmt::format("worker {} is a member but has no place: {}", worker.id(),
                         view == stats.workers.end() ? "the learner does not know it"
                         : view->silent              ? "it is silent"
                                                     : "it is not in the topology");
  }
  return "";
}

// Whether there are at least as many corrupting workers as honest ones. Then a corrupting worker may have only one
// honest accuser, and the learner may take that accuser for the liar.
bool Invariants::honest_may_be_outvoted() const {
  std::size_t corrupt = 0, honest = 0;
  for (std::size_t i = 0; i < fleet_.worker_count(); ++i) {
    const MaliceOptions& malice = fleet_.worker(i).options.malice;
    corrupt += malice.flip_share > 0 || malice.forge_share > 0 ? 1 : 0;
    honest += malice.any() ? 0 : 1;
  }
  return corrupt > Conduct::kLoneAccusationsMax && honest <= corrupt;
}

void Invariants::check_learner_statistics() {
  fleet_.check();
  world_.check();
  if (!fleet_.application_error().empty() &&
      std::none_of(violations_.begin(), violations_.end(),
                   [](const Violation& violation) { return violation.rule == std::string(kSound); }))
    report_violation(kSound, fleet_.application_error());
  const LearnerCore* learner = fleet_.learner();
  if (!learner) return;
  const LearnerStats stats = learner->stats();
  // Two equal accusations convince the learner, so two slandering identities can cause the quarantine of an honest
  // worker.
  constexpr std::size_t kConvincingAccusers = 2;
  counts_.quarantined = std::max(counts_.quarantined, stats.quarantined);
  if (stats.known_publications > kKnownPublicationsMax)
    report_violation(kBudget,
                     fmt::format("the learner remembers {} publications for one child", stats.known_publications));
  for (const WorkerView& view : stats.workers) {
    const auto worker = fleet_.worker_with_id(view.info.id);
    if (view.quarantined && !stats.topology.children_of(view.info.id).empty())
      report_violation(kBlame, fmt::format("worker {} is quarantined but has children", view.info.id));
    if (view.quarantined && worker && slandering_identities_ < kConvincingAccusers &&
        !fleet_.worker(*worker).options.malice.any() && !honest_may_be_outvoted())
      report_violation(kBlame, fmt::format("worker {} is quarantined although it is honest", *worker));
  }
  const auto wasted_bytes_max =
      static_cast<std::uint64_t>(kWastedShareMax * static_cast<double>(counts_.learner_chunk_bytes)) +
      waste_allowance_bytes_;
  if (counts_.learner_wasted_bytes > wasted_bytes_max)
    report_violation(kFrugal, fmt::format("{} of the {} chunk bytes of the learner were for children that had them",
                                          counts_.learner_wasted_bytes, counts_.learner_chunk_bytes));
}

void Invariants::check_liveness() {
  if (const std::string missing_worker = worker_missing_from_topology(); faults_over_ && !missing_worker.empty())
    report_violation(kPresence, missing_worker);
  std::set<WorkerId> quarantined;  // their children may not have received the command to leave them yet
  if (const LearnerCore* learner = fleet_.learner())
    for (const WorkerView& view : learner->stats().workers)
      if (view.quarantined) quarantined.insert(view.info.id);
  if (faults_over_)
    for (const auto& [pair, chunks] : bad_chunks_)
      if (chunks >= kBadChunksNoticed && !quarantined.contains(pair.first) && !honest_may_be_outvoted())
        report_violation(kBlame,
                         fmt::format("worker {} forwarded {} bad chunks to worker {}, but they were not separated",
                                     pair.first, chunks, pair.second));
  const auto newest = fleet_.newest();
  if (!newest) return;
  for (std::size_t i = 0; i < fleet_.worker_count(); ++i) {
    const Fleet::Worker& worker = fleet_.worker(i);
    if (!worker.should_run || worker.options.malice.starves_itself() ||
        (worker.active && worker.active->version == *newest))
      continue;
    report_violation(
        kLiveness,
        fmt::format(
            "the worker on host {} ({}) has {}, the newest is version {}; {}{}", worker.host.value,
            to_text(worker.options.malice),
            worker.active ? fmt::format("version {}", worker.active->version) : "nothing", *newest,
            worker.joined ? "it is a member" : "it is no member",
            worker.last_end_reason.empty() ? "" : fmt::format("; its last process ended: {}", worker.last_end_reason)));
  }
}

}  // namespace echoline::sim

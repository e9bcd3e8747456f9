// The learner's publications: opening, chunks, closing, acknowledgements, and help for late workers. Called by the
// application through the driver, and by the other parts of LearnerCore.
#include <algorithm>

#include "base/log.hpp"
#include "chains/broadcast_model.hpp"
#include "overlay/learner/learner_core.hpp"
#include "overlay/sizes.hpp"

namespace echoline::overlay {

// The base of the newest version's delta. Absent if the newest publication is not a delta.
std::optional<Version> LearnerCore::base_of_newest() const {
  const auto& entries = std::as_const(store_).entries();
  for (auto entry = entries.rbegin(); entry != entries.rend(); ++entry)
    if (const PublicationKey& key = entry->first; key.base)
      return key.version == publications_.newest() ? key.base : std::nullopt;
  return std::nullopt;
}

Status LearnerCore::begin(const Announcement& announcement, const SignedAnnouncement& as_signed, bool catch_up,
                          TimePoint now) {
  const PublicationKey& key = announcement.key;
  if (catch_up) {
    const bool published = publications_.is_published(key.version);
    const Status begun =
        published ? store_.begin(announcement, as_signed, key.version)
                  : fail(Code::kInvalid, "publish", "{}: that version was not published (recently)", to_text(key));
    catch_ups_.on_begun(id_of(as_signed));  // after a failure, CatchUps does not find it and gives it up
    return begun;
  }
  ECHO_TRY(publications_.check_next(key));
  ECHO_TRY(store_.begin(announcement, as_signed, key.version));
  publications_.announce(key.version);
  if (!workers_.empty()) {
    Broadcast broadcast;
    broadcast.version = key.version;
    broadcast.base = key.base;
    broadcast.id = id_of(as_signed);
    broadcast.published = now;
    const std::set<WorkerId> late = late_workers();  // they cannot use this version soon
    for (const auto& [id, worker] : workers_)
      if (!worker.presence.is_silent() && !worker.is_node())
        (worker.is_straggler || late.contains(id) ? broadcast.stragglers : broadcast.active).insert(id);
    // If all workers are stragglers, T_b is measured over them.
    if (broadcast.active.empty()) broadcast.active = std::exchange(broadcast.stragglers, {});
    for (const WorkerId id : broadcast.active)
      if (workers_.at(id).view.installed < key.version) broadcast.waiting_for.insert(id);
    broadcast.chunk_bytes_sent_before = edges_.chunk_bytes_sent();
    broadcast.topology = topology();
    for (const chains::SourceNode& node : source_nodes(now)) broadcast.nodes.push_back(node.id);
    publications_.broadcasts().begin(std::move(broadcast));
  }
  edges_.on_store_changed(now);
  request_next_catch_up(now);
  return ok();
}

// Adds one chunk. If there is no room for a snapshot, which serves every worker, drops deltas to its version that were
// made for single workers.
Status LearnerCore::add_own(const PublicationId& id, const PublicationKey& key, const SealedChunk& chunk) {
  const auto is_for_single_workers = [&](const PublicationKey& other) {
    return other.base && other.version == key.version && other.base != base_of_newest();
  };
  for (;;) {  // until the chunk fits, or no such delta is left
    const Status status = store_.add_own(id, chunk.head, chunk.hash, chunk.data, key.version);
    if (status || !key.full() || key.version != publications_.newest()) return status;
    const auto& entries = std::as_const(store_).entries();
    const auto it = std::find_if(entries.begin(), entries.end(),
                                 [&](const auto& entry) { return is_for_single_workers(entry.first); });
    if (it == entries.end()) return status;
    store_.erase(PublicationKey(it->first));
  }
}

Status LearnerCore::add(const PublicationId& id, std::vector<SealedChunk> chunks, TimePoint now) {
  const StoredPublication* stored = store_.find(id);
  if (!stored) return fail(Code::kNotFound, "publish", "chunks of a publication that was not begun, or was dropped");
  const PublicationKey key = stored->key();
  for (SealedChunk& chunk : chunks)
    if (const Status added = add_own(id, key, chunk); !added) {
      store_.erase(key);
      edges_.on_store_changed(now);
      return added;
    }
  edges_.on_chunk_arrived(now);
  return ok();
}

Status LearnerCore::finish(const Manifest& manifest, const SignedManifest& as_signed, TimePoint now, Duration sealing) {
  const StoredPublication* stored = store_.find(manifest.publication);
  if (!stored) return fail(Code::kNotFound, "publish", "a publication that was not begun, or was dropped, is closed");
  const PublicationKey key = stored->key();
  const Result<bool> added = publications_.close(key, manifest, as_signed);
  if (!added) {
    store_.erase(key);
    edges_.on_store_changed(now);
    return added.error();
  }
  publications_.broadcasts().on_encoded(manifest.publication, sealing, now);
  // A new digest must be on disk before the publication closes; save() closes it then.
  if (*added)
    save(now);
  else if (file_.is_settled())
    close_saved_publications(now);
  return ok();
}

void LearnerCore::abandon(const PublicationId& id, TimePoint now) {
  const StoredPublication* stored = store_.find(id);
  if (!stored || stored->manifest) return;
  store_.erase(PublicationKey(stored->key()));
  publications_.abandon(id);
  edges_.on_store_changed(now);
}

void LearnerCore::close_saved_publications(TimePoint now) {
  for (const Publications::Closing& closing : publications_.take_closing()) {
    const auto closed = store_.close(closing.manifest, closing.as_signed);
    if (!closed) log::error("version {}: {}", closing.version, closed.error().message());
    edges_.raise_target(closing.version);  // even if it has expired: it is published, so children must get there
    publications_.broadcasts().on_closed(closing.manifest.publication, now);
  }
  const auto deltas = deltas_back_to({});
  edges_.set_foldable_from(deltas.empty() ? std::nullopt : deltas.back()->key().base);
  edges_.on_store_changed(now);
  request_next_catch_up(now);
}

// The stored deltas that follow one another to the newest version, newest first: back to `from`, or as far as one fold
// may reach.
std::vector<const StoredPublication*> LearnerCore::deltas_back_to(Version from) const {
  std::vector<const StoredPublication*> deltas;
  const auto newest = publications_.newest_published();
  if (!newest) return deltas;
  Version oldest_reached = *newest;
  const std::uint64_t policy_bytes = config_.policy_bytes.count;
  std::uint64_t bytes = 0;
  // Among the publications of one version the published delta comes first here, because its base is the latest.
  const auto& entries = store_.entries();
  for (auto entry = entries.rbegin(); entry != entries.rend(); ++entry) {
    const auto& [key, stored] = *entry;
    if (oldest_reached <= from || deltas.size() >= config_.folded_deltas_max) break;
    if (key.version > oldest_reached) continue;
    if (key.version < oldest_reached || !key.base || !stored.complete) break;
    bytes += stored.bytes;
    if (policy_bytes > 0 && bytes > policy_bytes / kFoldShare) break;
    deltas.push_back(&stored);
    oldest_reached = *key.base;
  }
  return deltas;
}

Result<StoredDeltas> LearnerCore::deltas_from(Version from) const {
  const auto deltas = deltas_back_to(from);
  if (deltas.empty() || deltas.back()->key().base != from)
    return fail(Code::kNotFound, "find deltas",
                "the deltas from version {} on are no longer stored, or too many to fold", from);
  StoredDeltas result{.from = from,
                      .to = deltas.front()->key().version,
                      .base_digest = deltas.back()->announcement.base_digest,
                      .digest = deltas.front()->manifest->policy_digest,
                      .note = deltas.front()->manifest->note,
                      .deltas = {}};
  for (auto delta = deltas.rbegin(); delta != deltas.rend(); ++delta) {
    std::vector<Slice> pieces;
    for (const StoredChunk& chunk : (*delta)->chunks) pieces.push_back(chunk.data);
    result.deltas.emplace_back(std::move(pieces));
  }
  return result;
}

// ---- acknowledgements ----

std::vector<std::uint32_t> LearnerCore::chunks_by_stripe(const StoredPublication& stored) const {
  const std::uint32_t stripes = topology().stripes();
  std::vector<std::uint32_t> chunks;
  for (std::uint32_t stripe = 0; stripe < stripes; ++stripe)
    chunks.push_back(stored.have.count_of({stripes, std::uint64_t{1} << stripe}));
  return chunks;
}

std::string LearnerCore::never_published_text(const Installed& installed) {
  return fmt::format("it says that it has installed version {} with digest {}, which was never published",
                     installed.version, to_hex(installed.policy_digest));
}

void LearnerCore::on_ack(Worker& worker, const Installed& ack, TimePoint now) {
  const WorkerId id = worker.view.info.id;
  if (ack.epoch != epoch()) return;  // its versions are void
  if (ack.version > publications_.newest())
    return remove_worker(id, fmt::format("it acknowledged version {}, which is not published", ack.version),
                         /*send_goodbye=*/true, now);
  if (!publications_.is_published(ack)) return on_malformed(id, never_published_text(ack), now);
  if (worker.view.installed && ack.version < *worker.view.installed) return;
  const bool is_new = worker.view.installed != ack.version;
  const bool was_late_node = worker.is_node() && is_late(worker);
  // All chunks of installed versions have arrived, also those that were on their way at the last heartbeat.
  for (auto& [publication, chunks] : worker.reported.progress) {
    const StoredPublication* stored = store_.find(publication);
    if (!stored || stored->key().version > ack.version || chunks.size() != topology().stripes()) continue;
    const auto all_chunks = chunks_by_stripe(*stored);
    count_delivered_bytes(worker, publication, std::exchange(chunks, all_chunks), all_chunks);
  }
  worker.view.installed = ack.version;
  worker.view.installed_digest = ack.policy_digest;
  worker.presence.on_installed();
  std::vector<WorkerId> senders;  // a helper, or else the parents
  if (const auto helper = helpers_.helper_of(id))
    senders.push_back(*helper);
  else
    for (const Parent& edge : worker.place.parents()) senders.push_back(edge.worker);
  helpers_.on_installed(id);
  if (is_new) {
    for (const WorkerId sender : senders) credit_delivery(sender, id, now);
    worker.is_straggler = false;
  }
  if ((!worker.place.assigned && plan_.is_trees()) || (was_late_node && !is_late(worker))) plan_soon(now);
  actions_.push_back(act::ReportInstalled{id, ack.version, ack.policy_digest});
  publications_.broadcasts().on_acknowledged(id, ack, worker.view.delay.value_or(Duration{}), now);
  report_finished_broadcasts(now);
}

Bytes LearnerCore::chunk_size_for(const PublicationKey& key, TimePoint now) const {
  constexpr std::uint64_t kFirstDeltaShare = 8;  // the first delta is assumed to have 1/8 of the policy's bytes
  // No delta is assumed to have less than 1/256 of them: one without changes may be followed by one with many.
  constexpr std::uint64_t kDeltaShareMin = 256;
  constexpr Bytes kDefaultChunk{64 * 1024};  // if the size of the publication is unknown
  const std::uint64_t policy_bytes = config_.policy_bytes.count;
  Bytes payload{0};
  for (const auto& [known, stored] : store_.entries())
    if (stored.complete && known.full() == key.full()) payload = std::max(payload, Bytes{stored.bytes});
  if (payload.count == 0)
    payload = {key.full() ? policy_bytes : policy_bytes / kFirstDeltaShare};
  else if (!key.full())
    payload = std::max(payload, Bytes{policy_bytes / kDeltaShareMin});
  if (payload.count == 0) return kDefaultChunk;
  std::vector<chains::WorkerLink> links;
  for (const chains::ChainWorker& worker : fleet(now).workers)
    links.push_back({.id = worker.id, .up = worker.up, .down = worker.down, .delay = {}, .region = worker.region});
  const Duration time_min =
      chains::lower_bound(payload, sources_up(now), links, config_.network.quorum, config_.regions);
  return std::max(chains::best_chunk(payload, topology(), time_min), chunk_bytes_min(config_.policy_bytes));
}

// See BroadcastTimes::ExpectedLateness.
double LearnerCore::expected_lateness(const Broadcast& broadcast, TimePoint now) const {
  double lateness = 1;
  std::vector<chains::WorkerLink> links;
  for (const auto& [id, worker] : workers_) {
    if (worker.is_node()) continue;
    const chains::ChainWorker planned = chain_worker(worker, now);
    links.push_back({.id = id, .up = planned.up, .down = planned.down, .delay = {}, .region = planned.region});
  }
  if (const StoredPublication* stored = store_.find(broadcast.id))
    if (const auto times =
            chains::broadcast_time(chains::remove_nodes(broadcast.topology, broadcast.nodes), {stored->bytes},
                                   {stored->announcement.chunk_bytes}, sources_up(now), links, config_.regions)) {
      Duration last_acker{}, others{};  // expected times of the last worker, and of the slowest other one
      for (const chains::Completion& completion : times->workers) {
        if (!broadcast.active.contains(completion.id)) continue;
        Duration& slowest = completion.id == broadcast.last_acker ? last_acker : others;
        slowest = std::max(slowest, completion.time);
      }
      if (others > Duration{}) lateness = std::max(1.0, seconds(last_acker) / seconds(others));
    }
  return lateness;
}

void LearnerCore::report_finished_broadcasts(TimePoint now) {
  const auto expected = [&](const Broadcast& broadcast) { return expected_lateness(broadcast, now); };
  for (const BroadcastTimes::Done& done : publications_.broadcasts().take_done(expected, now)) report_broadcast(done);
}

// Later broadcasts do not wait for a straggler until it has installed something.
void LearnerCore::give_up_stragglers(TimePoint now) {
  for (const BroadcastTimes::Done& done : publications_.broadcasts().take_given_up(now)) {
    for (const WorkerId id : done.broadcast.waiting_for)
      if (Worker* worker = workers_.find(id); worker && !std::exchange(worker->is_straggler, true))
        log::warn("worker {} has not acknowledged version {} {} after the others: broadcasts do not wait for it", id,
                  done.broadcast.version, echoline::to_text(now - done.ended_at));
    report_broadcast(done);
  }
}

void LearnerCore::report_broadcast(const BroadcastTimes::Done& done) {
  const Broadcast& broadcast = done.broadcast;
  BroadcastReport report;
  report.version = broadcast.version;
  report.base = broadcast.base;
  if (const StoredPublication* stored = store_.find(broadcast.id))
    report.payload = {stored->bytes}, report.chunk = {stored->announcement.chunk_bytes};
  report.t_b = done.ended_at - broadcast.published;
  report.parts = BroadcastTimes::parts_of(broadcast, done.ended_at);
  report.workers = broadcast.active.size() + broadcast.stragglers.size();
  report.acknowledged = done.acknowledged;
  report.learner_bytes_sent = {edges_.chunk_bytes_sent() - broadcast.chunk_bytes_sent_before};
  report.depth = broadcast.topology.depth();
  report.topology = chains::remove_nodes(broadcast.topology, broadcast.nodes);
  actions_.push_back(act::ReportBroadcast{std::move(report)});
}

// ---- late workers ----

void LearnerCore::request_next_catch_up(TimePoint now) {
  for (const EdgeTrouble& trouble : edges_.take_troubles()) {
    if (!config_.catch_ups_on_demand) {
      if (!trouble.what.snapshot_is_cheaper)
        log::error("worker {} cannot be brought to version {}: the application provides no full snapshot",
                   trouble.child, trouble.what.target);
    } else if (!catch_ups_.enqueue(trouble.can_fold ? trouble.position : std::nullopt)) {
      edges_.refuse_delta_from(*trouble.position, now);
    }
  }
  std::vector<Version> given_up;
  const auto next = catch_ups_.next(publications_.newest_published(), store_, given_up);
  for (const Version from : given_up) edges_.refuse_delta_from(from, now);
  if (next) actions_.push_back(act::RequestCatchUp{next->version, next->base});
}

// Reserves the learner's uplink for one more worker. Returns false if there is none to spare.
bool LearnerCore::reserve_uplink_for(const Worker& worker, const NeedHelp& need, Version target, TimePoint now) {
  std::map<PublicationKey, std::uint64_t> complete_bytes;
  for (const auto& [key, stored] : store_.entries())
    if (stored.complete) complete_bytes[key] = stored.bytes;
  const std::uint64_t snapshot_bytes = store_.full_bytes_hint().value_or(0);
  std::uint64_t bytes =
      cheapest_path_bytes(complete_bytes, need.position, target, need.full_only).value_or(snapshot_bytes);
  if (config_.catch_ups_on_demand && snapshot_bytes > 0) bytes = std::min(bytes, snapshot_bytes);
  const HelpBudget::Request request{.bytes = static_cast<double>(bytes),
                                    .bytes_max = static_cast<double>(std::max(bytes, snapshot_bytes)),
                                    .uplink_bytes_per_s = up_pacer_.rate().value_or(config_.uplink_min).bytes_per_s(),
                                    .queue_time_max = kHelpPauseHeartbeats * config_.heartbeat,
                                    .sent_total_bytes = edges_.helped_bytes_sent()};
  return helpers_.reserve_budget(worker.view.info.id, target, request, now);
}

std::vector<Helpers::Candidate> LearnerCore::possible_helpers(const Worker& worker, const NeedHelp& need,
                                                              Version target, TimePoint now) const {
  const WorkerId self = worker.view.info.id;
  std::vector<Helpers::Candidate> candidates;
  for (const auto& [id, other] : workers_) {
    if (id == self || other.presence.is_silent() || !reach_.is_reachable(id) || other.draining) continue;
    if (conduct_.is_quarantined(id, unix_ms(now)) || conduct_.are_separated(id, self, unix_ms(now))) continue;
    const auto bytes = cheapest_path_bytes(other.reported.holdings, need.position, target, need.full_only);
    if (!bytes) continue;
    const Conduct::Record* record = conduct_.find(id);
    const bool has_lost_right = record && record->ladder.role() == chains::Role::kRolloutOnly;
    candidates.push_back(
        {.id = id, .bytes = *bytes, .children = other.reported.edges.size(), .failed = has_lost_right});
  }
  return candidates;
}

// The worker that can help with the fewest bytes becomes the helper. The learner helps only if no worker can, or if
// each would need more than kHandOverFactor times as many bytes as a new snapshot of the learner. A node that already
// helps n workers counts as needing 1 + n times the bytes.
void LearnerCore::on_need_help(Worker& worker, const NeedHelp& need, TimePoint now) {
  if (need.stalled) on_stalled(worker, now);
  const WorkerId id = worker.view.info.id;
  helpers_.end(id);
  const auto newest = publications_.newest();
  if (!newest) return;
  Version target = std::min(need.target, *newest);  // later versions were withdrawn
  const auto& open = publications_.broadcasts().open_broadcasts();
  const bool newest_under_way = !open.empty() && open.back().version == newest;
  if (const auto base = base_of_newest(); base && newest_under_way && !need.full_only && is_late(worker))
    target = std::min(target, *base);  // the newest comes from the parents, and no worker may hold it whole yet
  const auto snapshot = config_.catch_ups_on_demand ? store_.full_bytes_hint() : std::nullopt;
  const double cost_max = snapshot ? EdgeSender::kHandOverFactor * static_cast<double>(*snapshot) *
                                         static_cast<double>(1 + helpers_.helped_count(kLearnerId))
                                   : std::numeric_limits<double>::infinity();
  const Helpers::Choice choice = helpers_.choose(id, possible_helpers(worker, need, target, now), cost_max);
  if (!choice.helper && (choice.some_candidate_full || !reserve_uplink_for(worker, need, target, now)))
    return;  // the worker calls again
  Help help{.from = {}, .target = target, .full_only = need.full_only, .grant = {}};
  help.from.stripe_mask = 1;  // help has one stripe: all chunks
  help.from.worker = choice.helper.value_or(kLearnerId);
  help.from.endpoint = choice.helper ? workers_.at(*choice.helper).view.info.data : config_.self;
  helpers_.begin(id, help.from.worker);
  if (choice.helper) {
    worker.place.remember_sender(*choice.helper, now);
    log::info("worker {} is helped by worker {} to reach version {}", id, *choice.helper, target);
  }
  Grant unsigned_grant;
  unsigned_grant.from = {{help.from.worker, help.from.stripe_mask}};
  unsigned_grant.catch_up_to = target;
  unsigned_grant.full_only = need.full_only;
  help.grant = sign_grant(id, std::move(unsigned_grant), now);
  send_control(worker.control, help, now);
}

}  // namespace echoline::overlay

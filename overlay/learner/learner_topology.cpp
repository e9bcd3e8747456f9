// Carries the learner's topology out: sends workers their parents, and measures hops. Called by the other parts of
// LearnerCore.
#include <algorithm>

#include "base/log.hpp"
#include "overlay/learner/learner_core.hpp"

namespace echoline::overlay {
namespace {

constexpr BitRate kUnlimited = BitRate{1e11};  // stands for the rate of a link without a limit

}  // namespace

BitRate LearnerCore::learner_up() const {
  return up_pacer_.rate().value_or(config_.uplink_expected.value_or(config_.uplink_min));
}

chains::ChainWorker LearnerCore::chain_worker(const Worker& worker, TimePoint now) const {
  const MemberInfo& info = worker.view.info;
  chains::PeerStats stats;
  stats.forwarding_rate = worker.view.forwarding_rate.value_or(BitRate{0});
  stats.cap = worker.up().value_or(BitRate{0});
  const Conduct::Record* record = conduct_.find(info.id);
  stats.attempts = record ? record->attempts : 0;
  stats.successes = record ? record->successes : 0;
  // A worker counts as fresh until its next two heartbeats are due.
  stats.age = std::max(Duration{}, now - worker.presence.last_frame_at() - 2 * config_.heartbeat);
  chains::ChainWorker planned;
  planned.id = info.id;
  planned.down = worker.down().value_or(kUnlimited);
  // Only in trees a worker may send more than one copy. There, one with an unknown uplink is planned for one copy.
  planned.up = worker.up().value_or(plan_.is_trees() ? std::min(learner_up(), planned.down) : kUnlimited);
  const bool is_slow = slow_hops_.is_slow(info.id, now);
  if (is_slow) planned.up = std::min(planned.up, slow_hops_.uplink_of(info.id).value_or(planned.up));
  planned.score = chains::peer_score(stats);
  const chains::Role role = record ? record->ladder.role() : chains::Role::kSeed;
  const bool is_available =
      !conduct_.is_quarantined(info.id, unix_ms(now)) && !worker.draining && reach_.is_reachable(info.id);
  planned.may_forward = is_available && !is_slow && role != chains::Role::kRolloutOnly;
  planned.region = worker.region;
  planned.may_seed = role == chains::Role::kSeed && !is_slow && !conduct_.accuses(info.id, unix_ms(now));
  return planned;
}

// A late worker lacks the base of the newest publication and must receive that first, so no other worker should wait
// behind it.
bool LearnerCore::is_late(const Worker& worker) const {
  const auto newest = publications_.newest();
  const auto needed = newest ? publications_.newest_published(newest) : std::nullopt;
  if (!needed || worker.view.installed >= needed) return false;
  return !cheapest_path_bytes(worker.reported.holdings, worker.view.installed, *needed, /*full_only=*/false);
}

// Returns none if at least three quarters of the workers are late, because they then have to forward to each other.
std::set<WorkerId> LearnerCore::late_workers() const {
  std::set<WorkerId> late;
  std::size_t present_count = 0;
  for (const auto& [id, worker] : workers_) {
    if (worker.presence.is_silent()) continue;
    ++present_count;
    if (is_late(worker)) late.insert(id);
  }
  if (4 * late.size() >= 3 * present_count) late.clear();
  return late;
}

TopologyPlan::Fleet LearnerCore::fleet(TimePoint now) const {
  std::set<WorkerId> leaves;  // late workers forward nothing; in trees any worker can be a leaf for a while
  if (plan_.is_trees()) leaves = late_workers();
  TopologyPlan::Fleet fleet{.learner_up = learner_up(), .workers = {}};
  fleet.nodes = source_nodes(now);
  for (const auto& [id, worker] : workers_) {
    if (worker.is_node()) continue;
    const bool is_leaf = leaves.contains(id);
    const bool is_only_helped = is_leaf && helpers_.helper_of(id) && !worker.place.assigned;
    if (worker.presence.is_silent() || is_only_helped) continue;
    fleet.workers.push_back(chain_worker(worker, now));
    if (is_leaf) fleet.workers.back().may_forward = false;
  }
  return fleet;
}

// A node that lacks the newest publication's base, cannot be dialled or leaves would only delay its children. A node of
// unknown uplink is taken to have the learner's.
std::vector<chains::SourceNode> LearnerCore::source_nodes(TimePoint now) const {
  std::vector<chains::SourceNode> nodes;
  for (const auto& [id, worker] : workers_) {
    if (!worker.is_node() || worker.presence.is_silent()) continue;
    const bool may_feed =
        !is_late(worker) && !worker.draining && reach_.is_reachable(id) && !conduct_.is_quarantined(id, unix_ms(now));
    BitRate up = may_feed ? worker.up().value_or(learner_up()) : BitRate{0};
    if (slow_hops_.is_slow(id, now)) up = std::min(up, slow_hops_.uplink_of(id).value_or(up));
    nodes.push_back({.id = id, .up = up});
  }
  return nodes;
}

BitRate LearnerCore::sources_up(TimePoint now) const { return chains::total_up(learner_up(), source_nodes(now)); }

void LearnerCore::plan_soon(TimePoint now) { plan_.plan_soon(workers_.size(), now); }

void LearnerCore::plan_now(TimePoint now) {
  const bool is_in_use = publications_.has_announced() && topology().size() > 0;
  // Late workers without a place get a helper, as if they had asked for one.
  if (is_in_use && plan_.is_trees() && base_of_newest())
    for (const WorkerId id : late_workers())
      if (Worker& worker = workers_.at(id); !worker.place.assigned && !helpers_.helper_of(id))
        on_need_help(worker,
                     {.target = *publications_.newest(),
                      .full_only = false,
                      .position = worker.view.installed,
                      .stalled = false},
                     now);
  set_topology(plan_.next(fleet(now), is_in_use, now), now);
}

void LearnerCore::choose_topology_kind(TimePoint now) {
  if (!plan_.take_comparison(workers_.size(), !publications_.broadcasts().open_broadcasts().empty(), now)) return;
  // The newest complete delta, or else the newest snapshot. Its size stands for the next publication's.
  const StoredPublication* typical = nullptr;
  const auto& entries = std::as_const(store_).entries();
  for (auto entry = entries.rbegin(); entry != entries.rend(); ++entry)
    if (entry->second.complete && (!typical || (entry->first.base && typical->key().full()))) typical = &entry->second;
  TopologyPlan::Fleet fleet = this->fleet(now);
  if (!typical || fleet.workers.empty()) return;
  std::vector<Duration> delays;
  for (const auto& [id, worker] : workers_)
    if (worker.view.delay) delays.push_back(*worker.view.delay);
  const auto middle = delays.begin() + static_cast<std::ptrdiff_t>(delays.size() / 2);
  if (!delays.empty()) std::nth_element(delays.begin(), middle, delays.end());
  // Workers that could not be dialled get the median delay of the others.
  const Duration median_delay = delays.empty() ? Duration{} : *middle;
  std::vector<chains::WorkerLink> links;
  for (chains::ChainWorker& planned : fleet.workers) {
    const Worker& worker = workers_.at(planned.id);
    // An unknown uplink is taken to be no faster than the learner's and the worker's downlink.
    if (!worker.up()) planned.up = std::min({planned.up, fleet.learner_up, planned.down});
    links.push_back({.id = planned.id,
                     .up = planned.up,
                     .down = planned.down,
                     .delay = worker.view.delay.value_or(median_delay),
                     .region = planned.region});
  }
  auto change = plan_.choose(
      fleet, links,
      {.payload = {typical->bytes}, .chunk = {typical->announcement.chunk_bytes}, .quorum = config_.network.quorum});
  if (!change) return;
  log::info("{}", change->text);
  actions_.push_back(act::ReportTopologyChoice{std::move(change->text)});
  set_topology(std::move(change->topology), now);
  plan_soon(now);  // for workers that have no place in it yet
}

void LearnerCore::move_behind_others(WorkerId id, TimePoint now) {
  if (const Worker* worker = workers_.find(id); worker && worker->is_node())
    return set_topology(plan_.workers_topology(), now);  // source_nodes() gives it no children
  if (topology().contains(id)) set_topology(plan_.with_worker_last(id, fleet(now), now), now);
}

void LearnerCore::remove_from_topology(WorkerId id, TimePoint now) {
  if (topology().contains(id)) set_topology(plan_.without(id, fleet(now), now), now);
}

// Sends an assignment to every worker whose parents have changed.
void LearnerCore::set_topology(chains::Topology topology, TimePoint now) {
  topology = chains::separate_pairs(std::move(topology), conduct_.separated_pairs(unix_ms(now)));
  if (!plan_.set(std::move(topology), learner_up(), source_nodes(now))) return;
  const std::uint32_t stripes = this->topology().stripes();
  for (const auto& [id, parents] : this->topology().parents()) {
    Worker& worker = workers_.at(id);
    std::map<WorkerId, std::uint64_t> mask_by_parent;
    for (std::uint32_t stripe = 0; stripe < stripes; ++stripe)
      mask_by_parent[parents[stripe]] |= std::uint64_t{1} << stripe;
    Assign assign;
    assign.stripe_count = stripes;
    for (const auto& [parent, mask] : mask_by_parent) {
      const bool dials = reach_.parent_dials(parent, id);
      const Endpoint& endpoint = parent == kLearnerId ? config_.self : workers_.at(parent).view.info.data;
      assign.parents.push_back({.worker = parent, .endpoint = endpoint, .stripe_mask = mask, .dials = dials});
    }
    if (worker.place.assigned == assign) continue;
    issue_grant(worker, assign, now);
    for (const Parent& edge : assign.parents)
      if (edge.dials) send_control(workers_.at(edge.worker).control, DialChild{id, worker.view.info.data}, now);
    for (const Parent& edge : worker.place.parents())
      if (const Worker* former = workers_.find(edge.worker); former && !mask_by_parent.contains(edge.worker))
        // Ends all grants older than the one just issued.
        send_control(former->control, Release{id, identities_.last_issue_time() - 1}, now);
    worker.place.replace(std::move(assign), now);
    send_control(worker.control, *worker.place.assigned, now);
  }
  actions_.push_back(act::ReportTopology{this->topology()});
}

void LearnerCore::issue_grant(Worker& worker, Assign& assign, TimePoint now) {
  Grant unsigned_grant;
  unsigned_grant.stripe_count = assign.stripe_count;
  for (const Parent& edge : assign.parents) unsigned_grant.from.push_back({edge.worker, edge.stripe_mask});
  assign.grant = sign_grant(worker.view.info.id, std::move(unsigned_grant), now);
  worker.place.renew_grant_at = now + grant_lifetime(config_.away_max) / 2;
}

// Fills in run, child and times, and signs the grant.
SignedGrant LearnerCore::sign_grant(WorkerId child, Grant unsigned_grant, TimePoint now) {
  unsigned_grant.run_id = state().run_id;
  unsigned_grant.child = child;
  unsigned_grant.issued = issue_time(now);
  unsigned_grant.expires_unix_ms = unix_ms(now) + grant_lifetime_ms(config_.away_max);
  return sign(unsigned_grant, config_.authority->key());
}

// Grants that have half their life behind them are issued again, for a few workers at a time. Children of the learner
// whose grants have ended are disconnected.
void LearnerCore::renew_grants(TimePoint now) {
  // Each grant needs a signature, so they are spread over about kHeartbeatsForAll heartbeats.
  constexpr std::size_t kGrantsMin = 16, kHeartbeatsForAll = 16;
  std::size_t grants_left = kGrantsMin + workers_.size() / kHeartbeatsForAll;
  for (auto& [id, worker] : workers_) {
    if (!worker.place.assigned || now < worker.place.renew_grant_at) continue;
    issue_grant(worker, *worker.place.assigned, now);
    send_control(worker.control, *worker.place.assigned, now);
    if (--grants_left == 0) break;
  }
  for (const auto& [child, helped] : grants_.take_ended(unix_ms(now)))
    close_edges(edges_.connections_of(child, helped));
}

// ---- what workers report ----

// Counts the bytes that a child reports to have received from each parent, to compare with the parent's own report.
// Help is not counted, because its rate does not show what a helper can do.
void LearnerCore::count_delivered_bytes(const Worker& child, const PublicationId& id,
                                        const std::vector<std::uint32_t>& chunks_before,
                                        const std::vector<std::uint32_t>& chunks_now) {
  const StoredPublication* stored = store_.find(id);
  const auto& assigned = child.place.assigned;
  if (!stored || !assigned || helpers_.helper_of(child.view.info.id) || chunks_before.size() != chunks_now.size() ||
      chunks_now.size() != assigned->stripe_count)
    return;
  for (const Parent& edge : assigned->parents) {
    Worker* parent = workers_.find(edge.worker);
    if (!parent) continue;
    for (std::uint32_t stripe = 0; stripe < chunks_now.size(); ++stripe)
      if ((edge.stripe_mask >> stripe & 1) && chunks_now[stripe] > chunks_before[stripe])
        parent->view.bytes_delivered +=
            Bytes{std::uint64_t{chunks_now[stripe] - chunks_before[stripe]} * stored->announcement.chunk_bytes};
  }
}

void LearnerCore::on_heartbeat(Worker& worker, const Heartbeat& beat, TimePoint now) {
  worker.presence.on_heartbeat(now);
  worker.view.bytes_in = {beat.chunk_bytes_in};
  worker.view.bytes_forwarded = {beat.chunk_bytes_forwarded};
  worker.view.chunks_duplicate = beat.chunks_duplicate;
  worker.view.chunks_corrupt = beat.chunks_corrupt;
  worker.view.forwarding_rate = beat.forwarding_rate;
  const Status application_status = config_.check_heartbeat ? config_.check_heartbeat(beat.application) : ok();
  if (application_status) worker.view.application_bytes = beat.application;
  if (application_status && config_.reports_heartbeats)
    actions_.push_back(act::ReportHeartbeat{{worker.view.info.id, worker.view.bytes_in, worker.view.bytes_forwarded,
                                             worker.view.bytes_delivered, beat.application}});
  HeartbeatReport& reported = worker.reported;
  const auto progress_before = std::exchange(reported.progress, {});
  for (const Progress& item : beat.progress) {
    const auto before = progress_before.find(item.publication);
    count_delivered_bytes(
        worker, item.publication,
        before == progress_before.end() ? std::vector<std::uint32_t>(item.chunks.size()) : before->second, item.chunks);
    reported.progress[item.publication] = item.chunks;
  }
  reported.edges.clear();
  for (const EdgeReport& report : beat.edges) reported.edges[report.child] = report;
  reported.holdings.clear();
  for (const Holding& holding : beat.holdings) reported.holdings[holding.key] = holding.payload_bytes;
  const bool is_being_helped = helpers_.helper_of(worker.view.info.id) && is_late(worker);
  if (!worker.place.assigned && plan_.is_trees() && !is_being_helped) plan_soon(now);
  if (!application_status)
    on_malformed(worker.view.info.id, "its heartbeat: " + application_status.error().message(), now);
}

// ---- slow hops ----

void LearnerCore::measure_hops(TimePoint now) {
  const std::uint32_t stripes = topology().stripes();
  std::map<WorkerId, std::size_t> stripe_edges;  // by parent: its edges, each counted once per stripe
  for (const auto& [id, parents] : topology().parents())
    for (const WorkerId parent : parents) ++stripe_edges[parent];
  for (const auto& [id, worker] : workers_) {
    for (const Parent& edge : worker.place.parents()) {
      const Worker* sender = workers_.find(edge.worker);
      if (edge.worker != kLearnerId && !sender) continue;
      // Reported as if nothing had to cross it, because its rate shows nothing: the hop carries older publications, or
      // its sender shares its uplink with workers that it helps.
      if (is_late(worker) || helpers_.helped_count(edge.worker) > 0) {
        slow_hops_.monitor().observe({edge.worker, id}, /*held_by_sender=*/0, /*held_by_receiver=*/0, std::nullopt,
                                     now);
        continue;
      }
      std::uint64_t sender_bytes = 0, receiver_bytes = 0;  // held, of the chunks that cross this hop
      for (const Broadcast& broadcast : publications_.broadcasts().open_broadcasts()) {
        const StoredPublication* stored = store_.find(broadcast.id);
        if (!stored) continue;
        const std::uint64_t chunks_total = stored->have.count_of({stripes, edge.stripe_mask});
        const auto chunks_held_by = [&](const Worker& holder) {
          if (holder.view.installed >= broadcast.version) return chunks_total;
          const auto it = holder.reported.progress.find(broadcast.id);
          std::uint64_t chunks = 0;
          if (it != holder.reported.progress.end() && it->second.size() == stripes)
            for (std::uint32_t stripe = 0; stripe < stripes; ++stripe)
              if (edge.stripe_mask >> stripe & 1) chunks += it->second[stripe];
          return chunks;
        };
        const std::uint64_t sender_chunks = sender ? chunks_held_by(*sender) : chunks_total;
        sender_bytes += sender_chunks * stored->announcement.chunk_bytes;
        // A receiver that has installed the version is not behind, even if the sender's report is older.
        const bool is_installed = worker.view.installed >= broadcast.version;
        const std::uint64_t receiver_chunks = is_installed ? sender_chunks : chunks_held_by(worker);
        receiver_bytes += receiver_chunks * stored->announcement.chunk_bytes;
      }
      const double copies = static_cast<double>(stripe_edges[edge.worker]) / static_cast<double>(stripes);
      slow_hops_.monitor().observe({edge.worker, id}, sender_bytes, receiver_bytes, planned_rate(edge, worker, copies),
                                   now);
    }
  }
  for (const HopMonitor::Finding& finding : slow_hops_.find(now)) on_slow_hop(finding, now);
}

// The rate to expect over one edge of a parent that sends `copies` of the policy in all; absent if the parent's uplink
// is not known.
std::optional<BitRate> LearnerCore::planned_rate(const Parent& parent, const Worker& child, double copies) const {
  const Worker* sender = workers_.find(parent.worker);
  const auto up = parent.worker == kLearnerId ? up_pacer_.rate() : sender ? sender->up() : std::nullopt;
  if (!up) return std::nullopt;
  // The fraction of all chunks that crosses this edge; at most this fraction of what the learner sends.
  const double stripe_share = static_cast<double>(std::popcount(parent.stripe_mask)) / topology().stripes();
  BitRate rate = std::min(BitRate{up->bits_per_s * stripe_share / std::max(stripe_share, copies)},
                          BitRate{learner_up().bits_per_s * stripe_share});
  // A child that is far behind receives from all its parents at once.
  if (const auto down = child.down()) rate = std::min(rate, BitRate{down->bits_per_s * stripe_share});
  return rate;
}

void LearnerCore::on_slow_hop(const HopMonitor::Finding& finding, TimePoint now) {
  if (!workers_.contains(finding.hop.to)) return;
  const Worker* sender = workers_.find(finding.hop.from);
  std::optional<EdgeLimit> reported_limit;
  if (sender)
    if (const auto report = sender->reported.edges.find(finding.hop.to); report != sender->reported.edges.end())
      reported_limit = report->second.limit;
  const auto fault = slow_hops_.find_cause(finding, reported_limit, sender ? sender->up() : std::nullopt, now);
  if (!fault) return;
  log::warn("{}", fault->hop.text);
  actions_.push_back(act::ReportSlowHop{fault->hop});
  move_behind_others(fault->worker, now);
  if (!plan_.is_trees()) return;
  plan_.on_slow_hop();
  plan_soon(now);
}

}  // namespace echoline::overlay

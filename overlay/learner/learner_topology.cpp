// Carries the learner's topology out: sends workers their parents, and measures hops. Called by the other parts of
// LearnerCore.
#include <algorithm>

#include "base/log.hpp"
#include "overlay/learner/learner_core.hpp"

namespace echoline::overlay {
namespace {

constexpr BitRate kUnlimited = BitRate{1e11};  // for a link without a limit

}  // namespace

BitRate LearnerCore::learner_up() const { return up_.rate().value_or(config_.up_expected.value_or(config_.up_least)); }

chains::ChainWorker LearnerCore::chain_worker(const Worker& worker, TimePoint now) const {
  const MemberInfo& info = worker.view.info;
  chains::PeerStats stats;
  stats.forwarding_rate = worker.view.forwarding_rate.value_or(BitRate{0});
  stats.cap = info.up.value_or(BitRate{0});
  const Conduct::Record* record = conduct_.find(info.id);
  stats.attempts = record ? record->attempts : 0;
  stats.successes = record ? record->successes : 0;
  // Between two heartbeats all workers are equally fresh.
  stats.age = std::max(Duration{}, now - worker.presence.last_frame_at() - 2 * config_.heartbeat);
  chains::ChainWorker w;
  w.id = info.id;
  w.down = info.down.value_or(kUnlimited);
  // In trees a worker of unknown uplink sends at most one copy, as workers elsewhere always do.
  w.up = info.up.value_or(plan_.is_trees() ? std::min(learner_up(), w.down) : kUnlimited);
  const bool slow = slow_hops_.is_slow(info.id, now);
  if (slow) w.up = std::min(w.up, slow_hops_.uplink_of(info.id).value_or(w.up));
  w.score = chains::peer_score(stats);
  const chains::Role role = record ? record->ladder.role() : chains::Role::kSeed;
  const bool trusted =
      !conduct_.is_quarantined(info.id, unix_ms(now)) && !worker.draining && reach_.is_reachable(info.id);
  w.may_forward = trusted && !slow && role != chains::Role::kRolloutOnly;
  w.region = worker.region;
  w.may_seed = role == chains::Role::kSeed && !slow && !conduct_.accuses(info.id, unix_ms(now));
  return w;
}

// The worker lacks the base of the newest publication and gets that first, so no other worker should wait behind it.
bool LearnerCore::is_late(const Worker& worker) const {
  const auto newest = publications_.newest();
  const auto needed = newest ? publications_.newest_published(newest) : std::nullopt;
  if (!needed || worker.view.installed >= needed) return false;
  return !cheapest_path_bytes(worker.reported.holdings, worker.view.installed, *needed, false);
}

// None if nearly all are catching up: then they have to help each other.
std::set<WorkerId> LearnerCore::late_workers() const {
  std::set<WorkerId> behind;
  std::size_t present_count = 0;
  for (const auto& [id, worker] : workers_) {
    if (worker.presence.is_silent()) continue;
    ++present_count;
    if (is_late(worker)) behind.insert(id);
  }
  if (4 * behind.size() >= 3 * present_count) behind.clear();
  return behind;
}

TopologyPlan::Fleet LearnerCore::fleet(TimePoint now) const {
  std::set<WorkerId> leaves;  // in trees any worker can be a leaf for a while
  if (plan_.is_trees()) leaves = late_workers();
  TopologyPlan::Fleet fleet{learner_up(), {}};
  for (const auto& [id, worker] : workers_) {
    const bool leaf = leaves.contains(id);
    if (worker.presence.is_silent() || (leaf && helpers_.helper_of(id) && !worker.place.assigned)) continue;
    fleet.workers.push_back(chain_worker(worker, now));
    if (leaf) fleet.workers.back().may_forward = false;
  }
  return fleet;
}

void LearnerCore::plan_soon(TimePoint now) { plan_.plan_soon(workers_.size(), now); }

void LearnerCore::plan_now(TimePoint now) {
  const bool under_way = publications_.has_announced() && topology().size() > 0;
  if (under_way && plan_.is_trees() && base_of_newest())
    for (const WorkerId id : late_workers())
      if (Worker& worker = workers_.at(id); !worker.place.assigned && !helpers_.helper_of(id))
        on_need_help(worker, {*publications_.newest(), false, worker.view.installed}, now);
  set_topology(plan_.next(fleet(now), under_way, now), now);
}

void LearnerCore::choose_policy(TimePoint now) {
  if (!plan_.take_choice(workers_.size(), !publications_.broadcasts().open().empty(), now)) return;
  const StoredPublication* newest_complete = nullptr;  // a delta, if there is one
  const auto& entries = std::as_const(store_).entries();
  for (auto entry = entries.rbegin(); entry != entries.rend(); ++entry)
    if (entry->second.complete && (!newest_complete || (entry->first.base && newest_complete->key().full())))
      newest_complete = &entry->second;
  TopologyPlan::Fleet fleet = this->fleet(now);
  if (!newest_complete || fleet.workers.empty()) return;
  std::vector<Duration> delays;
  for (const auto& [id, worker] : workers_)
    if (worker.view.delay) delays.push_back(*worker.view.delay);
  const auto middle = delays.begin() + static_cast<std::ptrdiff_t>(delays.size() / 2);
  if (!delays.empty()) std::nth_element(delays.begin(), middle, delays.end());
  const Duration median_delay =
      delays.empty() ? Duration{} : *middle;  // stands for that of workers that could not be dialled
  std::vector<chains::WorkerLink> links;
  for (chains::ChainWorker& w : fleet.workers) {
    const WorkerView& view = workers_.at(w.id).view;
    if (!view.info.up) w.up = std::min({w.up, fleet.learner_up, w.down});
    links.push_back({w.id, w.up, w.down, view.delay.value_or(median_delay), w.region});
  }
  auto change = plan_.choose(
      fleet, links, {{newest_complete->bytes}, {newest_complete->announcement.chunk_bytes}, config_.network.quorum});
  if (!change) return;
  log::info("{}", change->text);
  actions_.push_back(act::ChoseTopology{std::move(change->text)});
  set_topology(std::move(change->topology), now);
  plan_soon(now);  // for workers that have no place in it yet
}

void LearnerCore::move_back(WorkerId id, TimePoint now) {
  if (topology().contains(id)) set_topology(plan_.moved_back(id, fleet(now), now), now);
}

void LearnerCore::remove_from_topology(WorkerId id, TimePoint now) {
  if (topology().contains(id)) set_topology(plan_.without(id, fleet(now), now), now);
}

// Sends an assignment to every worker whose parents have changed.
void LearnerCore::set_topology(chains::Topology topology, TimePoint now) {
  topology = chains::separate_pairs(std::move(topology), conduct_.separated_pairs(unix_ms(now)));
  if (!plan_.set(std::move(topology))) return;
  const std::uint32_t stripes = this->topology().stripes();
  for (const auto& [id, parents] : this->topology().parents()) {
    Worker& worker = workers_.at(id);
    std::map<WorkerId, std::uint64_t> masks;
    for (std::uint32_t s = 0; s < stripes; ++s) masks[parents[s]] |= std::uint64_t{1} << s;
    Assign assign;
    assign.stripe_count = stripes;
    for (const auto& [parent, mask] : masks) {
      const bool dials = reach_.parent_dials(parent, id);
      const Endpoint& endpoint = parent == kLearnerId ? config_.self : workers_.at(parent).view.info.data;
      assign.parents.push_back({parent, endpoint, mask, dials});
    }
    if (worker.place.assigned == assign) continue;
    grant(worker, assign, now);
    for (const Parent& p : assign.parents)
      if (p.dials) send_control(workers_.at(p.worker).control, DialChild{id, worker.view.info.data}, now);
    for (const Parent& p : worker.place.parents())
      if (const Worker* former = workers_.find(p.worker); former && !masks.contains(p.worker))
        send_control(former->control, Release{id, identities_.issued() - 1}, now);
    worker.place.replace(std::move(assign), now);
    send_control(worker.control, *worker.place.assigned, now);
  }
  actions_.push_back(act::TopologyChanged{this->topology()});
}

void LearnerCore::grant(Worker& worker, Assign& assign, TimePoint now) {
  Grant unsigned_grant;
  unsigned_grant.stripe_count = assign.stripe_count;
  for (const Parent& p : assign.parents) unsigned_grant.from.push_back({p.worker, p.stripe_mask});
  assign.grant = sign_grant(worker.view.info.id, std::move(unsigned_grant), now);
  worker.place.grant_at = now + grant_lifetime(config_.away_max) / 2;
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
  std::size_t grants_left = 16 + workers_.size() / 16;
  for (auto& [id, worker] : workers_) {
    if (!worker.place.assigned || now < worker.place.grant_at) continue;
    grant(worker, *worker.place.assigned, now);
    send_control(worker.control, *worker.place.assigned, now);
    if (--grants_left == 0) break;
  }
  for (const auto& [child, helped] : grants_.take_ended(unix_ms(now)))
    close_edges(edges_.connections_of(child, helped));
}

// ---- what workers report ----

// Counts the bytes that a child reports to have received from each parent, to compare with the parent's own report.
// Help is not counted, because its rate does not show what a helper can do.
void LearnerCore::count_delivered(const Worker& child, const PublicationId& id,
                                  const std::vector<std::uint32_t>& chunks_before,
                                  const std::vector<std::uint32_t>& chunks_now) {
  const StoredPublication* stored = store_.find(id);
  const auto& assigned = child.place.assigned;
  if (!stored || !assigned || helpers_.helper_of(child.view.info.id) || chunks_before.size() != chunks_now.size() ||
      chunks_now.size() != assigned->stripe_count)
    return;
  for (const Parent& p : assigned->parents) {
    Worker* parent = workers_.find(p.worker);
    if (!parent) continue;
    for (std::uint32_t s = 0; s < chunks_now.size(); ++s)
      if ((p.stripe_mask >> s & 1) && chunks_now[s] > chunks_before[s])
        parent->view.bytes_delivered +=
            Bytes{std::uint64_t{chunks_now[s] - chunks_before[s]} * stored->announcement.chunk_bytes};
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
  if (application_status) worker.view.app_bytes = beat.application;
  if (application_status && config_.reports_heartbeats)
    actions_.push_back(act::HeartbeatReceived{worker.view.info.id, worker.view.bytes_in, worker.view.bytes_forwarded,
                                              worker.view.bytes_delivered, beat.application});
  Reported& reported = worker.reported;
  const auto before = std::exchange(reported.progress, {});
  for (const Progress& p : beat.progress) {
    const auto known = before.find(p.publication);
    count_delivered(worker, p.publication,
                    known == before.end() ? std::vector<std::uint32_t>(p.chunks.size()) : known->second, p.chunks);
    reported.progress[p.publication] = p.chunks;
  }
  reported.edges.clear();
  for (const EdgeReport& report : beat.edges) reported.edges[report.child] = report;
  reported.holdings.clear();
  for (const Holding& holding : beat.holdings) reported.holdings[holding.key] = holding.payload_bytes;
  const bool helped = helpers_.helper_of(worker.view.info.id) && is_late(worker);
  if (!worker.place.assigned && plan_.is_trees() && !helped) plan_soon(now);
  if (!application_status)
    on_malformed(worker.view.info.id, "its heartbeat: " + application_status.error().message(), now);
}

// ---- slow hops ----

void LearnerCore::measure_hops(TimePoint now) {
  const std::uint32_t stripes = topology().stripes();
  std::map<WorkerId, std::size_t> children;  // edges of each parent, weighed by stripes
  for (const auto& [id, parents] : topology().parents())
    for (const WorkerId parent : parents) ++children[parent];
  for (const auto& [id, worker] : workers_) {
    for (const Parent& p : worker.place.parents()) {
      const Worker* sender = workers_.find(p.worker);
      if (p.worker != kLearnerId && !sender) continue;
      // Not measured: the hop carries older publications, or its sender shares its uplink with workers it helps.
      if (is_late(worker) || helpers_.helped_by(p.worker) > 0) {
        slow_hops_.monitor().observe({p.worker, id}, 0, 0, std::nullopt, now);
        continue;
      }
      std::uint64_t at_sender = 0, at_receiver = 0;
      for (const Broadcast& b : publications_.broadcasts().open()) {
        const StoredPublication* stored = store_.find(b.id);
        if (!stored) continue;
        const std::uint64_t all = stored->have.count_of({stripes, p.stripe_mask});
        const auto chunks_at = [&](const Worker& w) {
          if (w.view.installed >= b.version) return all;
          const auto it = w.reported.progress.find(b.id);
          std::uint64_t n = 0;
          if (it != w.reported.progress.end() && it->second.size() == stripes)
            for (std::uint32_t s = 0; s < stripes; ++s)
              if (p.stripe_mask >> s & 1) n += it->second[s];
          return n;
        };
        const std::uint64_t sent = sender ? chunks_at(*sender) : all;
        at_sender += sent * stored->announcement.chunk_bytes;
        const bool is_installed = worker.view.installed >= b.version;
        at_receiver += (is_installed ? sent : chunks_at(worker)) * stored->announcement.chunk_bytes;
      }
      const double copies = static_cast<double>(children[p.worker]) / static_cast<double>(stripes);
      slow_hops_.monitor().observe({p.worker, id}, at_sender, at_receiver, planned_rate(p, worker, copies), now);
    }
  }
  for (const HopMonitor::Finding& finding : slow_hops_.find(now)) on_slow_hop(finding, now);
}

// The rate to expect over one edge of a parent that sends `copies` in all; absent if the parent's uplink is not known.
std::optional<BitRate> LearnerCore::planned_rate(const Parent& parent, const Worker& child, double copies) const {
  const Worker* sender = workers_.find(parent.worker);
  const auto up = parent.worker == kLearnerId ? up_.rate() : sender ? sender->view.info.up : std::nullopt;
  if (!up) return std::nullopt;
  // At most these stripes' part of what the learner sends.
  const double part = static_cast<double>(std::popcount(parent.stripe_mask)) / topology().stripes();
  BitRate rate =
      std::min(BitRate{up->bits_per_s * part / std::max(part, copies)}, BitRate{learner_up().bits_per_s * part});
  // A child that is far behind receives from all its parents at once.
  if (const auto down = child.view.info.down) rate = std::min(rate, BitRate{down->bits_per_s * part});
  return rate;
}

void LearnerCore::on_slow_hop(const HopMonitor::Finding& finding, TimePoint now) {
  if (!workers_.contains(finding.hop.to)) return;
  const Worker* sender = workers_.find(finding.hop.from);
  std::optional<EdgeLimit> limit;
  if (sender)
    if (const auto report = sender->reported.edges.find(finding.hop.to); report != sender->reported.edges.end())
      limit = report->second.limit;
  const auto fault = slow_hops_.find_cause(finding, limit, sender ? sender->view.info.up : std::nullopt, now);
  if (!fault) return;
  log::warn("{}", fault->hop.text);
  actions_.push_back(act::FoundSlowHop{fault->hop});
  move_back(fault->worker, now);
  if (!plan_.is_trees()) return;
  plan_.on_slow_hop();
  plan_soon(now);
}

}  // namespace echoline::overlay

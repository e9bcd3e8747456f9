// The learner's topology: who forwards to whom, and how it is mended.
#include <algorithm>

#include "base/log.hpp"
#include "chains/choice.hpp"
#include "overlay/learner/catch_up.hpp"
#include "overlay/learner/learner_core.hpp"

namespace echoline::overlay {
namespace {

// Stands for a link nobody limits.
constexpr BitRate kUnlimited = BitRate{1e11};
constexpr std::size_t kSlowHopsKept = 64;
// Longer than a slow uplink is held against somebody: who says again and again that its parents are slow costs one of
// them its place, once.
constexpr Duration kSuspicion = std::chrono::minutes(2);
static_assert(kSuspicion > LearnerCore::kSlowMemory + std::chrono::seconds(10));

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
  // Between two heartbeats nobody is staler than another.
  stats.age = std::max(Duration{}, now - worker.presence.heard_at() - 2 * config_.heartbeat);
  chains::ChainWorker w;
  w.id = info.id;
  w.down = info.down.value_or(kUnlimited);
  // In trees nobody is asked for more than one copy whose uplink is not known; elsewhere nobody is anyway.
  const bool trees = topology_.policy == chains::TopologyPolicy::kTrees;
  w.up = info.up.value_or(trees ? std::min(learner_up(), w.down) : kUnlimited);
  const bool slow = worker.slow_until && now < *worker.slow_until;
  if (slow && worker.slow_up) w.up = std::min(w.up, *worker.slow_up);
  w.score = chains::peer_score(stats);
  const chains::Role role = record ? record->ladder.role() : chains::Role::kSeed;
  const bool trusted = !conduct_.quarantined(info.id, unix_ms(now)) && !worker.draining && reach_.is_reachable(info.id);
  w.may_forward = trusted && !slow && role != chains::Role::kRolloutOnly;
  w.region = worker.region;
  w.may_seed = role == chains::Role::kSeed && !slow && !conduct_.accuses(info.id, unix_ms(now));
  return w;
}

// It lacks what the newest publication builds on, and has to be given that first: nobody should wait behind it.
bool LearnerCore::catching_up(const Worker& worker) const {
  const auto newest_published = newest();
  if (!newest_published) return false;
  auto before = state_.published.lower_bound(*newest_published);
  if (before == state_.published.begin()) return false;
  const Version needed = (--before)->first;
  if (worker.view.installed && *worker.view.installed >= needed) return false;
  return !cheapest_way(worker.reported.holdings, worker.view.installed, needed, false);
}

// Where nearly all are catching up nobody is: they have to help each other, and what they do is what the fleet does.
std::set<WorkerId> LearnerCore::those_behind() const {
  std::set<WorkerId> behind;
  std::size_t heard = 0;
  for (const auto& [id, worker] : workers_) {
    if (worker.presence.is_silent()) continue;
    ++heard;
    if (catching_up(worker)) behind.insert(id);
  }
  if (4 * behind.size() >= 3 * heard) behind.clear();
  return behind;
}

std::vector<chains::ChainWorker> LearnerCore::chain_workers(TimePoint now) const {
  std::set<WorkerId> leaves;  // in trees anybody can be one for a while
  if (topology_.policy == chains::TopologyPolicy::kTrees) leaves = those_behind();
  std::vector<chains::ChainWorker> all;
  for (const auto& [id, worker] : workers_) {
    if (worker.presence.is_silent() || (leaves.contains(id) && worker.helper && !worker.place.assigned)) continue;
    all.push_back(chain_worker(worker, now));
    if (leaves.contains(id)) all.back().may_forward = false;
  }
  return all;
}

void LearnerCore::plan_soon(TimePoint now) {
  plan_at_ = std::min(plan_at_, now + kPlanDelay + kPlanDelayPerWorker * static_cast<std::int64_t>(workers_.size()));
}

// While nothing is under way, plan as if all had come at once; later, leave the others where they are, unless the best
// topology depends on who is there. Trees are mended then, and planned anew only where mending leaves them slow: that
// moves nearly everybody, so while trouble goes on it waits, longer every time.
void LearnerCore::plan_anew(TimePoint now) {
  plan_at_ = kNever;
  using enum chains::TopologyPolicy;
  const bool under_way = newest_ && topology_.size() > 0;
  if (under_way && topology_.policy == kTrees) {
    if (base_of_newest())
      for (const WorkerId id : those_behind())
        if (Worker& worker = workers_.at(id); !worker.place.assigned && !worker.helper)
          on_need_help(worker, {*newest(), false, worker.view.installed}, now);
    chains::MendedTrees mended = mended_trees(std::nullopt, now);
    const bool worth_it = std::exchange(stripes_lag_, false) || mended.slow();
    if (now < plan_not_before_ || !worth_it) return set_mended(std::move(mended), now);
    const bool quiet = now >= plan_not_before_ + 8 * plan_pause_;
    plan_pause_ =
        quiet ? kPlanPauseBeats * config_.heartbeat : std::min(2 * plan_pause_, kPlanPauseBeatsMax * config_.heartbeat);
    plan_not_before_ = now + plan_pause_;
  } else if (under_way && topology_.policy != kBestChains && topology_.policy != kStripes) {
    chains::Topology next = topology_;
    for (const auto& [id, worker] : workers_)
      if (!topology_.contains(id) && !worker.presence.is_silent())
        next = chains::append(next, chain_worker(worker, now));
    return set_topology(std::move(next), now);
  }
  auto planned = chains::plan_chains(learner_up(), config_.chain_rate, chain_workers(now), topology_.policy,
                                     config_.network.quorum, config_.regions);
  ECHO_CHECK(planned.has_value(), "{}", planned ? "" : planned.error().message());  // the inputs were checked at hello
  set_topology(std::move(*planned), now);
}

chains::MendedTrees LearnerCore::mended_trees(std::optional<WorkerId> moved, TimePoint now) const {
  return chains::mend_trees(topology_, learner_up(), chain_workers(now), config_.network.quorum, moved,
                            config_.regions);
}

void LearnerCore::set_mended(chains::MendedTrees mended, TimePoint now) {
  if (mended.slow()) plan_at_ = std::min(plan_at_, std::max(now + kPlanDelay, plan_not_before_));
  set_topology(std::move(mended.topology), now);
}

// The fleet is another one than was planned for, or its links are. All topologies are compared by the same model; who
// does not say what its uplink is counts as in trees. Between broadcasts, so that nobody is moved in the middle of one,
// unless there is always one under way.
void LearnerCore::choose_policy(TimePoint now) {
  if (!config_.chooses_policy) return;
  const Duration pause = std::max<Duration>(kChooseBeats * config_.heartbeat,
                                            kChoosePerWorker * static_cast<std::int64_t>(workers_.size()));
  if (choose_at_ == kNever) choose_at_ = now + pause;
  if (now < choose_at_ || (!broadcasts_.open().empty() && now < choose_at_ + pause)) return;
  choose_at_ = now + pause;
  const StoredPublication* carried = nullptr;  // a delta is what it usually is
  const auto& entries = std::as_const(store_).entries();
  for (auto entry = entries.rbegin(); entry != entries.rend(); ++entry)
    if (entry->second.complete && (!carried || (entry->first.base && carried->key().full()))) carried = &entry->second;
  std::vector<chains::ChainWorker> workers = chain_workers(now);
  if (!carried || workers.empty()) return;
  std::vector<Duration> delays;  // where nobody could measure it, it is as usual
  for (const auto& [id, worker] : workers_)
    if (worker.view.delay) delays.push_back(*worker.view.delay);
  const auto middle = delays.begin() + static_cast<std::ptrdiff_t>(delays.size() / 2);
  if (!delays.empty()) std::nth_element(delays.begin(), middle, delays.end());
  const Duration usual = delays.empty() ? Duration{} : *middle;
  std::vector<chains::WorkerLink> links;
  for (chains::ChainWorker& w : workers) {
    const WorkerView& view = workers_.at(w.id).view;
    if (!view.info.up) w.up = std::min({w.up, learner_up(), w.down});
    links.push_back({w.id, w.up, w.down, view.delay.value_or(usual), w.region});
  }
  auto choice = chains::choose_topology(learner_up(), config_.chain_rate, workers, links,
                                        {{carried->bytes}, {carried->announcement.chunk_bytes}, config_.network.quorum},
                                        topology_.policy, config_.regions);
  if (!choice || choice->topology.policy == topology_.policy) {
    sooner_ = 0;
    return;
  }
  if (++sooner_ < kSoonerInARow) return;
  sooner_ = 0;
  const auto present = std::find_if(choice->candidates.begin(), choice->candidates.end(),
                                    [&](const chains::Candidate& c) { return c.policy == topology_.policy; });
  const std::string text = fmt::format(
      "topology {} instead of {}: it is expected to bring {} to {} workers in {} instead of {}, and nothing could in "
      "less than {}",
      to_string(choice->topology.policy), to_string(topology_.policy), echoline::to_text(Bytes{carried->bytes}),
      workers.size(), echoline::to_text(choice->predicted), echoline::to_text(present->predicted),
      echoline::to_text(choice->lower_bound));
  log::info("{}", text);
  actions_.push_back(act::ChoseTopology{text});
  set_topology(std::move(choice->topology), now);
  plan_soon(now);  // whoever has no place in it yet
}

// Behind the others, where fewest wait for it; what it may do there follows from its record.
void LearnerCore::move_back(WorkerId id, TimePoint now) {
  if (!topology_.contains(id)) return;
  if (topology_.policy == chains::TopologyPolicy::kTrees) return set_mended(mended_trees(id, now), now);
  if (topology_.policy == chains::TopologyPolicy::kStripes) return plan_anew(now);  // what it can carry has changed
  set_topology(chains::append(chains::detach(topology_, id), chain_worker(workers_.at(id), now)), now);
}

// A worker that is gone, from its place; who is left gets its children.
void LearnerCore::take_out(WorkerId id, TimePoint now) {
  if (!topology_.contains(id)) return;
  if (topology_.policy == chains::TopologyPolicy::kTrees) return set_mended(mended_trees(std::nullopt, now), now);
  set_topology(chains::detach(topology_, id), now);
}

// Tells every worker whose parents changed, and only those.
void LearnerCore::set_topology(chains::Topology topology, TimePoint now) {
  topology = chains::keep_apart(std::move(topology), conduct_.apart(unix_ms(now)));
  if (topology == topology_) return;
  topology_ = std::move(topology);
  const std::uint32_t stripes = topology_.stripes();
  for (const auto& [id, parents] : topology_.parents()) {
    Worker& worker = workers_.at(id);
    std::map<WorkerId, std::uint64_t> masks;
    for (std::uint32_t s = 0; s < stripes; ++s) masks[parents[s]] |= std::uint64_t{1} << s;
    Assign assign;
    assign.stripes = stripes;
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
  actions_.push_back(act::TopologyChanged{topology_});
}

void LearnerCore::grant(Worker& worker, Assign& assign, TimePoint now) {
  Grant what;
  what.stripes = assign.stripes;
  for (const Parent& p : assign.parents) what.from.push_back({p.worker, p.stripes});
  assign.grant = sign_grant(worker.view.info.id, std::move(what), now);
  worker.place.grant_at = now + grant_lifetime(config_.away_max) / 2;
}

// Run, child and times are filled in here.
SignedGrant LearnerCore::sign_grant(WorkerId child, Grant what, TimePoint now) {
  what.run_id = state_.run_id;
  what.child = child;
  what.issued = issue_time(now);
  what.expires_unix_ms = unix_ms(now) + grant_lifetime_ms(config_.away_max);
  return sign(what, config_.authority->key());
}

// What was granted long ago is granted anew, a few workers at a time; who of its own children has none any more goes.
void LearnerCore::grant_anew(TimePoint now) {
  std::size_t left = 16 + workers_.size() / 16;
  for (auto& [id, worker] : workers_) {
    if (!worker.place.assigned || now < worker.place.grant_at) continue;
    grant(worker, *worker.place.assigned, now);
    send_control(worker.control, *worker.place.assigned, now);
    if (--left == 0) break;
  }
  for (const auto& [child, helped] : grants_.take_ended(unix_ms(now)))
    for (const ConnId conn : edges_.connections_of(child, helped)) {
      edges_.close(conn);
      close(conn);
    }
}

// ---- what workers report ----

// The other end of what a parent says that it forwards. Helpers are not counted: what they send is not what they can.
void LearnerCore::count_delivered(const Worker& child, const PublicationId& id,
                                  const std::vector<std::uint32_t>& before,
                                  const std::vector<std::uint32_t>& now_there) {
  const StoredPublication* stored = store_.find(id);
  const auto& assigned = child.place.assigned;
  if (!stored || !assigned || child.helper || before.size() != now_there.size() ||
      now_there.size() != assigned->stripes)
    return;
  for (const Parent& p : assigned->parents) {
    Worker* parent = workers_.find(p.worker);
    if (!parent) continue;
    for (std::uint32_t s = 0; s < now_there.size(); ++s)
      if ((p.stripes >> s & 1) && now_there[s] > before[s])
        parent->view.bytes_delivered +=
            Bytes{std::uint64_t{now_there[s] - before[s]} * stored->announcement.chunk_bytes};
  }
}

void LearnerCore::on_heartbeat(Worker& worker, const Heartbeat& beat, TimePoint now) {
  worker.presence.on_heartbeat(now);
  worker.view.bytes_in = {beat.chunk_bytes_in};
  worker.view.bytes_forwarded = {beat.chunk_bytes_forwarded};
  worker.view.chunks_duplicate = beat.chunks_duplicate;
  worker.view.chunks_corrupt = beat.chunks_corrupt;
  worker.view.forwarding_rate = beat.forwarding_rate;
  const Status sound = config_.check_heartbeat ? config_.check_heartbeat(beat.application) : ok();
  if (sound) worker.view.app_bytes = beat.application;
  if (sound && config_.tells_heartbeats)
    actions_.push_back(act::HeardFrom{worker.view.info.id, worker.view.bytes_in, worker.view.bytes_forwarded,
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
  if (!worker.place.assigned && topology_.policy == chains::TopologyPolicy::kTrees &&
      !(worker.helper && catching_up(worker)))
    plan_soon(now);
  if (!sound) on_broken(worker.view.info.id, "its heartbeat: " + sound.error().message(), now);
}

// ---- slow hops ----

void LearnerCore::watch_hops(TimePoint now) {
  const std::uint32_t stripes = topology_.stripes();
  std::map<WorkerId, std::size_t> children;  // edges of each parent, weighed by stripes
  for (const auto& [id, parents] : topology_.parents())
    for (const WorkerId parent : parents) ++children[parent];
  std::set<WorkerId> helping;
  for (const auto& [id, worker] : workers_)
    if (worker.helper) helping.insert(*worker.helper);
  for (const auto& [id, worker] : workers_) {
    for (const Parent& p : worker.place.parents()) {
      const Worker* sender = workers_.find(p.worker);
      if (p.worker != kLearnerId && !sender) continue;
      // What comes over this hop is not what is under way, or not all that its sender sends.
      if (catching_up(worker) || helping.contains(p.worker)) {
        hops_.observe({p.worker, id}, 0, 0, std::nullopt, now);
        continue;
      }
      std::uint64_t at_sender = 0, at_receiver = 0;
      for (const Broadcast& b : broadcasts_.open()) {
        const StoredPublication* stored = store_.find(b.id);
        if (!stored) continue;
        const auto bytes = [&](const std::map<PublicationId, std::vector<std::uint32_t>>& progress) {
          const auto it = progress.find(b.id);
          std::uint64_t n = 0;
          if (it != progress.end() && it->second.size() == stripes)
            for (std::uint32_t s = 0; s < stripes; ++s)
              if (p.stripes >> s & 1) n += it->second[s];
          return n * stored->announcement.chunk_bytes;
        };
        const bool done = worker.view.installed && *worker.view.installed >= b.version;
        const std::uint64_t all =
            std::uint64_t{stored->have.count_of({stripes, p.stripes})} * stored->announcement.chunk_bytes;
        const std::uint64_t sent = p.worker == kLearnerId ? all
                                   : sender->view.installed && *sender->view.installed >= b.version
                                       ? all
                                       : bytes(sender->reported.progress);
        at_sender += sent;
        at_receiver += done ? sent : bytes(worker.reported.progress);
      }
      const double copies = static_cast<double>(children[p.worker]) / static_cast<double>(stripes);
      hops_.observe({p.worker, id}, at_sender, at_receiver, planned_rate(p, worker, copies), now);
    }
  }
  const std::vector<HopMonitor::Finding> found = hops_.find();
  // Who receives slowly from several parents at once is the cause, whatever their uplinks do.
  std::map<WorkerId, std::size_t> slow_parents;
  for (const HopMonitor::Finding& finding : found)
    if (++slow_parents[finding.hop.to] == 2) suspected_[finding.hop.to] = now + kSuspicion;
  std::set<WorkerId> mended;  // the worst hop of a worker is mended, the others are looked at anew
  for (const HopMonitor::Finding& finding : found) {
    if (mended.contains(finding.hop.from) || mended.contains(finding.hop.to)) continue;
    on_slow_hop(finding, now);
    mended.insert({finding.hop.from, finding.hop.to});
  }
}

// What should come over one edge of a parent that sends so many copies in all; nothing when its uplink is not known.
std::optional<BitRate> LearnerCore::planned_rate(const Parent& parent, const Worker& child, double copies) const {
  const Worker* sender = workers_.find(parent.worker);
  const auto up = parent.worker == kLearnerId ? up_.rate() : sender ? sender->view.info.up : std::nullopt;
  if (!up) return std::nullopt;
  // No more than these stripes' part of what the learner sends ever comes this way.
  const double part = static_cast<double>(std::popcount(parent.stripes)) / topology_.stripes();
  BitRate rate =
      std::min(BitRate{up->bits_per_s * part / std::max(part, copies)}, BitRate{learner_up().bits_per_s * part});
  // A child that has much to make up for is sent to by all its parents at once.
  if (const auto down = child.view.info.down) rate = std::min(rate, BitRate{down->bits_per_s * part});
  return rate;
}

// The sender is taken to be the cause, and the receiver put in its place. If the receiver is slow there again, it was
// the receiver all along; and so it was if the sender brings others what they lack: its uplink is there for all of
// them.
void LearnerCore::on_slow_hop(const HopMonitor::Finding& finding, TimePoint now) {
  const auto [from, to] = finding.hop;
  const Worker* receiver = workers_.find(to);
  const Worker* sender = workers_.find(from);
  if (!receiver) return;
  if (receiver->slow_until && now < *receiver->slow_until) return;  // known, and nobody is behind it
  const auto suspect = suspected_.find(to);
  const bool receiver_again = suspect != suspected_.end() && now < suspect->second;
  const bool blame_receiver = from == kLearnerId || receiver_again || finding.alone;
  std::string cause = blame_receiver ? "the receiver's link" : "sender uplink";
  if (sender)
    if (const auto report = sender->reported.edges.find(to); report != sender->reported.edges.end()) {
      if (report->second.limit == EdgeLimit::kOwnLimit) cause = "the sender's own rate limit";
      if (report->second.limit == EdgeLimit::kReceiver) cause = "the receiver, which does not read fast enough";
    }
  SlowHop hop{from, to,
              fmt::format("{} -> {} limited by {}: {} instead of {}",
                          from == kLearnerId ? std::string("learner") : fmt::format("worker {}", from), to, cause,
                          echoline::to_text(finding.rate), echoline::to_text(finding.expected))};
  log::warn("{}", hop.text);
  actions_.push_back(act::FoundSlowHop{hop});
  slow_hops_.push_back(std::move(hop));
  if (slow_hops_.size() > kSlowHopsKept) slow_hops_.erase(slow_hops_.begin());
  suspected_[to] = now + kSuspicion;
  const WorkerId blamed = blame_receiver ? to : from;
  Worker& worker = workers_.at(blamed);
  if (!blame_receiver) {
    // All its edges share the uplink, so all of it is taken to be slower by as much as this one.
    const double part = finding.rate.bits_per_s / finding.expected.bits_per_s;
    const auto up = worker.view.info.up;
    worker.slow_up = BitRate{std::max(1.0, up ? up->bits_per_s * part : finding.rate.bits_per_s)};
  }
  worker.slow_until = now + kSlowMemory;
  hops_.forget(blamed);
  move_back(blamed, now);
  if (topology_.policy != chains::TopologyPolicy::kTrees) return;
  stripes_lag_ = true;
  plan_soon(now);
}

}  // namespace echoline::overlay

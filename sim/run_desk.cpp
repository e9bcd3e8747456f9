#include "sim/run_desk.hpp"

#include <algorithm>
#include <utility>

namespace echoline::sim {
namespace {

using namespace replay_buffer;

constexpr std::uint32_t kLeasesPerGrantMax = 256;
constexpr std::uint64_t kLeasesLiveMax = 1'000'000;
constexpr double kNotWaitedForFactor = 20;  // as in replay_buffer/records
constexpr double kStepMemory = 0.7;         // as in learner/rollout_desk
// The medians over all workers are taken anew for every grant in a small fleet, and after so long in a large one.
constexpr std::size_t kSmallFleet = 128;
constexpr double kUsualEvery = 5;
constexpr double kLookAgain = 0.5;  // in a large fleet, whether work would still be stranded

}  // namespace

RunDesk::Known& RunDesk::known_of(std::uint64_t worker) {
  const auto [it, is_new] = known_.try_emplace(worker);
  if (is_new) {
    it->second.trusted = first_groups(options_.lease, options_.pacing, options_.group_size);
    usual_.stale = true;
  }
  return it->second;
}

const RunDesk::Usual& RunDesk::usual(double now) {
  const bool small = known_.size() <= kSmallFleet;
  if (usual_.at_s >= 0 && !(small && usual_.stale) && now - usual_.at_s < kUsualEvery) return usual_;
  std::vector<double> batches, tokens, rates;
  for (const auto& [worker, known] : known_) {
    if (const auto batch_s = known.pace.batch_seconds()) batches.push_back(*batch_s);
    if (const auto per_token = known.pace.seconds_per_token()) tokens.push_back(*per_token);
    if (const auto rate = known.pace.groups_per_s()) rates.push_back(*rate);
  }
  usual_ = {median(std::move(batches)), median(std::move(tokens)), median(rates), 0, 0, now, false};
  usual_.measured = static_cast<double>(rates.size());
  for (const double rate : rates) usual_.sum += rate_that_counts(rate, usual_.groups_per_s);
  return usual_;
}

std::uint64_t RunDesk::version_min() const {
  return step_ - std::min<std::uint64_t>(step_, options_.pacing.staleness_budget);
}

std::uint64_t RunDesk::ahead() const { return (waiting_fresh_ + live_due_) * options_.group_size; }

bool RunDesk::closed(std::uint64_t version) const {
  return room(minded_, step_, Version{version}, ahead()) < options_.group_size;
}

void RunDesk::note_overdue(double now) {
  for (; !due_.empty() && due_.top().first < now; due_.pop()) {
    const auto it = live_.find(due_.top().second);
    if (it == live_.end() || it->second.overdue || it->second.due_s > due_.top().first) continue;
    it->second.overdue = true;
    --stock_[it->second.version].live;
    --live_due_;
    double& until = not_waited_for_until_s_[it->second.worker];
    until = std::max(until, now + kNotWaitedForFactor * (it->second.due_s - it->second.granted_s));
  }
}

std::uint64_t RunDesk::take_group() {
  if (pool_.empty()) return next_group_++;
  const std::uint64_t group = *pool_.begin();
  pool_.erase(pool_.begin());
  return group;
}

// What others have lost is anybody's.
std::uint64_t RunDesk::share_left(const Known& known) const {
  if (!options_.equal_shares) return kLeasesLiveMax;
  const std::uint64_t batches = step_ == 0 ? options_.pacing.lookahead_steps + 1 : 1;  // at first those in stock as well
  const std::uint64_t groups = batches * options_.pacing.trajectories_per_step / options_.group_size, workers = known_.size();
  const std::uint64_t share = (groups + workers - 1) / workers;
  return share - std::min(share, known.given) + pool_.size();
}

std::vector<DeskLease> RunDesk::grant(std::uint64_t worker, std::uint64_t version, std::uint64_t groups_max, double now) {
  note_overdue(now);
  Known& known = known_of(worker);
  const std::uint64_t stock = ahead();
  if (step_s_) fresh_s_ = (minded_.staleness_budget + 1.0) * *step_s_;
  const Usual& usual = this->usual(now);
  const std::optional<double> batch_s = known.pace.batch_seconds();
  known.too_slow = stock >= options_.pacing.trajectories_per_step && step_s_ && batch_s &&
                   !in_time(minded_, step_, Version{version}, *batch_s, *step_s_);
  const double average = usual.measured > 0 ? usual.sum / usual.measured : 1;
  const double all = usual.sum + (static_cast<double>(known_.size()) - usual.measured) * average;
  const std::uint64_t groups = (std::uint64_t{options_.pacing.lookahead_steps} + 1) *
                               options_.pacing.trajectories_per_step / options_.group_size;
  const double own = rate_that_counts(known.pace.groups_per_s().value_or(average), usual.groups_per_s);
  const std::uint64_t held_max = std::min(known.trusted, groups_held_max(groups, own, all));
  const std::uint64_t could_take =
      std::min({groups_max, std::uint64_t{kLeasesPerGrantMax},
                kLeasesLiveMax - std::min<std::uint64_t>(live_.size(), kLeasesLiveMax),
                held_max - std::min(known.live, held_max), share_left(known)});
  const std::uint64_t allowed = room(minded_, step_, Version{version}, stock) / options_.group_size;
  if (allowed < could_take && !known.too_slow)
    if (const auto bound = binding(minded_, step_, Version{version})) bound_.note(*bound, step_);
  const std::uint64_t wanted = known.too_slow ? 0 : std::min(could_take, allowed);
  std::vector<DeskLease> leases;
  if (wanted == 0) return leases;
  const double lease_s = lease_seconds(options_.lease, known.pace.seconds_per_token(), usual.seconds_per_token);
  const double due = now + patience_seconds(options_.lease, batch_s, usual.batch_s, fresh_s_);
  for (std::uint64_t i = 0; i < wanted; ++i) {
    DeskLease lease{next_lease_++, take_group(), worker, version, now, due, now + lease_s, lease_s, false};
    live_[lease.id] = lease;
    known.leases.push_back(lease.id);
    ++known.live, ++known.given;
    Stock& of = stock_[version];
    ++of.live, ++of.live_all, ++live_due_;
    due_.emplace(lease.due_s, lease.id);
    expiry_.emplace(lease.expires_s, lease.id);
    leases.push_back(lease);
  }
  return leases;
}

void RunDesk::end(const DeskLease& ended, bool to_pool) {
  const DeskLease lease = ended;
  Stock& stock = stock_[lease.version];
  --stock.live_all;
  if (!lease.overdue) --stock.live, --live_due_;
  if (const auto known = known_.find(lease.worker); known != known_.end()) {
    std::erase(known->second.leases, lease.id);
    --known->second.live;
  }
  if (to_pool) pool_.insert(lease.group);
  live_.erase(lease.id);
}

std::optional<RunDesk::Taken> RunDesk::submit(std::uint64_t id, const DeskGroup& group, std::uint32_t tokens_longest, double now) {
  note_overdue(now);
  const auto it = live_.find(id);
  if (it == live_.end() || now > it->second.expires_s) {
    rejected_["refused: lease expired"] += options_.group_size;
    return std::nullopt;
  }
  const DeskLease lease = it->second;
  const bool fresh = admissible(step_, Version{lease.version}, options_.pacing.staleness_budget);
  end(lease, !fresh);
  Known& known = known_of(lease.worker);
  if (!fresh) {
    reject_stale(lease.version, 1);
    known.pace.handed_in(lease.granted_s, now, tokens_longest);
    return std::nullopt;
  }
  lost_with_.erase(lease.group);
  const Taken taken{std::max(0.0, now - std::max(lease.granted_s, known.accounted_until_s))};
  known.accounted_until_s = now;
  known.pace.handed_in(lease.granted_s, now, tokens_longest);
  known.trusted = groups_trusted(known.trusted, 1);
  usual_.stale = true;
  auto& waiting = stock_[lease.version].waiting;
  waiting.push_back(group);
  waiting.back().id = lease.group;
  waiting.back().version = lease.version;
  ++waiting_fresh_;
  return taken;
}

void RunDesk::give_back(std::uint64_t id) {
  const auto it = live_.find(id);
  if (it == live_.end()) return;
  unfinished_["given back"] += options_.group_size;
  end(it->second, true);
}

void RunDesk::release_worker(std::uint64_t worker) {
  const auto known = known_.find(worker);
  if (known == known_.end()) return;
  for (const std::uint64_t id : std::vector(known->second.leases)) {
    const DeskLease lease = live_.at(id);
    end(lease, true);
    unfinished_["worker lost"] += options_.group_size;
    if (!set_aside_after(0, ++lost_with_[lease.group])) continue;
    pool_.erase(lease.group);
    lost_with_.erase(lease.group);
    ++set_aside_;
  }
  known_.erase(known);
  not_waited_for_until_s_.erase(worker);
  usual_.stale = true;
}

void RunDesk::expire(double now) {
  note_overdue(now);
  while (!expiry_.empty() && expiry_.top().first < now) {
    const std::uint64_t id = expiry_.top().second;
    const double at = expiry_.top().first;
    expiry_.pop();
    const auto it = live_.find(id);
    if (it == live_.end() || it->second.expires_s > at) continue;
    DeskLease& lease = it->second;
    const double until = renewed(options_.lease, lease.granted_s, now, lease.lease_s);
    if (until > now) {
      lease.expires_s = until;
      expiry_.emplace(until, id);
      continue;
    }
    Known& known = known_of(lease.worker);
    known.trusted = groups_trusted_after_lapse(known.trusted);
    unfinished_["lease expired"] += options_.group_size;
    end(lease, true);
  }
}

std::optional<std::vector<DeskGroup>> RunDesk::batch(std::uint64_t groups, double now) {
  note_overdue(now);
  if (waiting_fresh_ < groups) return std::nullopt;
  if (stranded_since_s_ > 0 && known_.size() > kSmallFleet && now < look_again_s_) return std::nullopt;
  std::map<std::uint64_t, std::uint64_t> left_out;  // live leases of who is not waited for, by version
  for (auto it = not_waited_for_until_s_.begin(); it != not_waited_for_until_s_.end();) {
    if (now >= it->second) {
      it = not_waited_for_until_s_.erase(it);
      continue;
    }
    if (const auto known = known_.find(it->first); known != known_.end())
      for (const std::uint64_t id : known->second.leases)
        if (const DeskLease& lease = live_.at(id); !lease.overdue) ++left_out[lease.version];
    ++it;
  }
  std::vector<VersionStock> ascending;
  for (auto it = stock_.lower_bound(version_min()); it != stock_.end(); ++it) {
    const auto out = left_out.find(it->first);
    const std::uint64_t live = it->second.live - (out == left_out.end() ? 0 : out->second);
    ascending.push_back({Version{it->first}, it->second.waiting.size() * options_.group_size, live * options_.group_size});
  }
  if (stranded(minded_, step_, ascending) > 0) {
    if (stranded_since_s_ == 0) stranded_since_s_ = now;
    look_again_s_ = now + kLookAgain;
    return std::nullopt;
  }
  if (stranded_since_s_ > 0) stranded_s_ += now - std::exchange(stranded_since_s_, 0);
  std::vector<DeskGroup> batch;
  for (auto it = stock_.lower_bound(version_min()); it != stock_.end() && batch.size() < groups; ++it) {
    auto& waiting = it->second.waiting;
    for (; !waiting.empty() && batch.size() < groups; waiting.pop_front()) batch.push_back(waiting.front());
  }
  waiting_fresh_ -= batch.size();
  return batch;
}

std::uint64_t RunDesk::consumed(double now) {
  ++step_;
  if (consumed_at_s_ && now > *consumed_at_s_) {
    const double took = std::max(0.0, now - *consumed_at_s_ - std::exchange(stranded_s_, 0));
    step_s_ = step_s_ ? kStepMemory * *step_s_ + (1 - kStepMemory) * took : took;
  }
  consumed_at_s_ = now;
  for (auto& [worker, known] : known_) known.given = 0;
  std::uint64_t dropped = 0;
  for (auto it = stock_.begin(); it != stock_.end() && it->first < version_min();) {
    dropped += it->second.waiting.size();
    reject_stale(it->first, it->second.waiting.size());
    waiting_fresh_ -= it->second.waiting.size();
    it->second.waiting.clear();
    it = it->second.live_all == 0 ? stock_.erase(it) : std::next(it);
  }
  return dropped * options_.group_size;
}

void RunDesk::reject_stale(std::uint64_t version, std::uint64_t groups) {
  if (groups == 0) return;
  rejected_["stale"] += groups * options_.group_size;
  stale_by_age_[step_ - std::min(step_, version)] += groups * options_.group_size;
}

std::uint64_t RunDesk::waiting() const { return waiting_fresh_ * options_.group_size; }

std::map<std::uint64_t, std::uint64_t> RunDesk::waiting_by_age() const {
  std::map<std::uint64_t, std::uint64_t> ages;
  for (const auto& [version, stock] : stock_)
    if (!stock.waiting.empty()) ages[step_ - std::min(step_, version)] += stock.waiting.size() * options_.group_size;
  return ages;
}

std::map<std::uint64_t, std::uint64_t> RunDesk::in_flight_by_age() const {
  std::map<std::uint64_t, std::uint64_t> ages;
  for (const auto& [version, stock] : stock_)
    if (stock.live_all > 0) ages[step_ - std::min(step_, version)] += stock.live_all * options_.group_size;
  return ages;
}

bool RunDesk::too_slow(std::uint64_t worker) const {
  const auto it = known_.find(worker);
  return it != known_.end() && it->second.too_slow;
}

}  // namespace echoline::sim

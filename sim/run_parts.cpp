#include "sim/run_parts.hpp"

namespace echoline::sim {

namespace {

constexpr std::uint64_t kLengthStream = 31;  // random stream of the seed

}  // namespace

void AwaitedQuorums::on_lost(const SimWorker& worker, double now_s) {
  for (auto it = awaited_.begin(); it != awaited_.end();) {
    const std::uint64_t version = it->first;
    // A syncing worker's version is 0, although it has not installed that yet.
    const bool was_awaited = worker.was_sent(version) && (worker.version < version || worker.is(WorkerState::kSyncing));
    if (was_awaited && it->second.targets > 0) --it->second.targets;
    it = was_awaited && record_if_reached(it->second, now_s) ? awaited_.erase(it) : std::next(it);
  }
}

void AwaitedQuorums::on_installed(const SimWorker& worker, std::uint64_t version_before, double now_s) {
  for (auto it = awaited_.begin(); it != awaited_.end();) {
    const bool counts = it->first <= worker.version && worker.was_sent(it->first) &&
                        (it->first > version_before || worker.is(WorkerState::kSyncing));
    it->second.installed += counts ? 1 : 0;
    it = counts && record_if_reached(it->second, now_s) ? awaited_.erase(it) : std::next(it);
  }
}

bool AwaitedQuorums::record_if_reached(const Quorum& quorum, double now_s) {
  if (quorum.targets == 0) return true;  // all target workers have left
  if (quorum.installed < count_for(quorum)) return false;
  SimPublication& row = publications_[quorum.index];
  row.t_b_s = now_s - row.at_s + seconds(scenario_.acknowledge_time);
  row.installed = quorum.installed;
  row.workers = quorum.targets;
  // Counts deltas only, because the run's rate is planned by them.
  if (!row.snapshot || scenario_.publication_form == PublicationForm::kSnapshot)
    measured_.push_back({from_seconds(*row.t_b_s), row.bytes});
  return true;
}

void AwaitedQuorums::check() const {
  for (const auto& [version, quorum] : awaited_)
    ECHO_CHECK(quorum.installed < count_for(quorum) && publications_[quorum.index].version == version, "version {}",
               version);
}

ResponseLengths::ResponseLengths(const RunScenario& scenario)
    : scenario_(scenario), draws_(scenario.seed, kLengthStream), mean_(mean_tokens(scenario)) {}

Work ResponseLengths::draw_work(const replay_buffer::LiveLease& lease) {
  Work work{.lease = lease.record.id, .version = lease.record.version, .granted_s = lease.record.granted_unix_s};
  const double tokens_max = scenario_.lease.tokens_max;
  for (std::uint32_t i = 0; i < scenario_.pacing.group_size; ++i) {
    const double drawn =
        scenario_.token_histogram ? draws_.sample(*scenario_.token_histogram) : draws_.lognormal(scenario_.tokens);
    const auto tokens = static_cast<std::uint32_t>(std::clamp(std::floor(drawn + 0.5), 1.0, tokens_max));
    work.tokens += tokens;
    work.longest = std::max(work.longest, tokens);
  }
  return work;
}

}  // namespace echoline::sim

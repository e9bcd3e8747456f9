// Judges reports of workers about each other. Called by LearnerCore (learner_conduct.cpp).
#include "overlay/learner/conduct.hpp"

#include <algorithm>

namespace echoline::overlay {
namespace {

TimePoint time_of(std::uint64_t unix_ms) { return TimePoint(std::chrono::milliseconds(unix_ms)); }
bool within(std::uint64_t at_ms, std::uint64_t memory_ms, std::uint64_t now_ms) { return now_ms < at_ms + memory_ms; }

bool failed(const Conduct::TimedCount& recent, std::uint64_t now_ms) {
  return recent.count >= Conduct::kFailuresInARow && within(recent.at_ms, Conduct::kEdgeMemoryMs, now_ms);
}

}  // namespace

Conduct::Conduct(Duration heartbeat, std::map<WorkerId, StoredConduct> kept) : heartbeat_(heartbeat) {
  for (auto& [id, stored] : kept) {
    Record& record = records_.try_emplace(id, heartbeat_).first->second;
    record.ladder = chains::RoleLadder(stored.role, time_of(stored.seen_ms));
    record.kept = std::move(stored);
  }
}

Conduct::Record& Conduct::record_of(WorkerId id, std::uint64_t now_ms) {
  Record& record = records_.try_emplace(id, heartbeat_).first->second;
  record.kept.seen_ms = std::max(record.kept.seen_ms, now_ms);
  return record;
}

const Conduct::Record* Conduct::find(WorkerId id) const {
  const auto it = records_.find(id);
  return it == records_.end() ? nullptr : &it->second;
}

// An honest worker never has kAccusationsMax parents.
void Conduct::drop_oldest_if_full(std::map<WorkerId, TimedCount>& counts, WorkerId accused) {
  if (counts.size() >= kAccusationsMax && !counts.contains(accused))
    counts.erase(std::min_element(counts.begin(), counts.end(),
                                  [](const auto& a, const auto& b) { return a.second.at_ms < b.second.at_ms; }));
}

// ---- bad chunks ----

bool Conduct::is_credible(const Record& record, const TimedCount& recent, std::uint64_t now_ms) const {
  return recent.count >= kBadChunksMax && within(recent.at_ms, kAccusationMemoryMs, now_ms) &&
         !record.kept.accuses_falsely;
}

// An accusation by a quarantined worker separates the two, and counts against no worker.
bool Conduct::counts_against(const Record& record, const TimedCount& recent, std::uint64_t now_ms) const {
  const std::uint64_t until = record.kept.quarantined_until_ms;
  return is_credible(record, recent, now_ms) && (now_ms >= until || recent.at_ms + kAccusationMemoryMs < until);
}

// Number of workers it has accused. Each accusation's weight falls as the number grows.
std::size_t Conduct::accusations_by(const Record& record, std::uint64_t now_ms) const {
  return static_cast<std::size_t>(
      std::count_if(record.kept.bad_chunks_of.begin(), record.kept.bad_chunks_of.end(),
                    [&](const auto& recent) { return is_credible(record, recent.second, now_ms); }));
}

double Conduct::weight_against(WorkerId id, std::uint64_t now_ms) const {
  double weight = 0;
  for (const auto& [accuser, record] : records_)
    if (const auto recent = record.kept.bad_chunks_of.find(id);
        recent != record.kept.bad_chunks_of.end() && counts_against(record, recent->second, now_ms))
      weight += 1.0 / static_cast<double>(std::max<std::size_t>(1, accusations_by(record, now_ms)));
  return weight;
}

std::size_t Conduct::lone_accusations(WorkerId id, std::uint64_t now_ms, const IsConnected& is_connected) const {
  const Record& record = records_.at(id);
  std::size_t alone = 0;
  for (const auto& [accused, recent] : record.kept.bad_chunks_of) {
    const WorkerId accused_id = accused;  // clang captures no structured binding before version 16
    if (!is_credible(record, recent, now_ms) || is_quarantined(accused_id, now_ms) ||
        (is_connected && !is_connected(accused_id)))
      continue;
    alone += std::none_of(records_.begin(), records_.end(), [&](const auto& other) {
      const auto& counts = other.second.kept.bad_chunks_of;
      const auto accusation = counts.find(accused_id);
      return other.first != id && accusation != counts.end() && is_credible(other.second, accusation->second, now_ms);
    });
  }
  return alone;
}

// Children that lately installed what it sent them, and do not accuse it.
std::size_t Conduct::satisfied_children(WorkerId id, std::uint64_t now_ms) const {
  const Record* record = find(id);
  if (!record) return 0;
  return static_cast<std::size_t>(std::count_if(record->served.begin(), record->served.end(), [&](const auto& served) {
    if (!within(served.second, kEdgeMemoryMs, now_ms)) return false;
    const Record* child = find(served.first);
    if (!child) return true;
    const auto recent = child->kept.bad_chunks_of.find(id);
    return recent == child->kept.bad_chunks_of.end() || !within(recent->second.at_ms, kAccusationMemoryMs, now_ms);
  }));
}

Conduct::Ruling Conduct::on_bad_chunk(WorkerId child, WorkerId parent, std::uint64_t now_ms,
                                      const IsConnected& is_connected) {
  Record& accuser = record_of(child, now_ms);
  if (accuser.kept.accuses_falsely || is_quarantined(parent, now_ms)) return Ruling::kNothing;
  drop_oldest_if_full(accuser.kept.bad_chunks_of, parent);
  TimedCount& recent = accuser.kept.bad_chunks_of[parent];
  if (!within(recent.at_ms, kAccusationMemoryMs, now_ms)) recent.count = 0;
  recent.at_ms = now_ms;
  if (recent.count >= kBadChunksMax) return Ruling::kNothing;  // said before
  if (++recent.count < kBadChunksMax) return Ruling::kNothing;
  if (lone_accusations(child, now_ms, is_connected) > kLoneAccusationsMax) {
    ++quarantines_;
    accuser.kept.accuses_falsely = true;
    accuser.kept.quarantined_until_ms = std::max(accuser.kept.quarantined_until_ms, now_ms + kAccusationMemoryMs);
    return Ruling::kChild;
  }
  constexpr double kRounding = 1e-9;
  const double needed = std::max(kQuarantineWeight, static_cast<double>(satisfied_children(parent, now_ms)));
  if (is_quarantined(child, now_ms) || weight_against(parent, now_ms) < needed - kRounding) return Ruling::kSeparate;
  ++quarantines_;
  record_of(parent, now_ms).kept.quarantined_until_ms = now_ms + kAccusationMemoryMs;
  return Ruling::kParent;
}

// ---- edges that fail ----

// The workers at the other ends of its failed edges.
std::set<WorkerId> Conduct::failed_edge_partners(WorkerId id, std::uint64_t now_ms) const {
  std::set<WorkerId> others;
  for (const auto& [child, record] : records_) {
    if (record.kept.accuses_falsely) continue;
    for (const auto& [parent, recent] : record.failures_of) {
      if (!failed(recent, now_ms)) continue;
      if (child == id) others.insert(parent);
      if (parent == id) others.insert(child);
    }
  }
  return others;
}

// Clears its failures: the next demotion takes new ones.
void Conduct::demote(WorkerId id, std::uint64_t now_ms) {
  Record& record = record_of(id, now_ms);
  record.ladder.demote(time_of(now_ms));
  record.failures_of.clear();
  for (auto& [child, other] : records_) other.failures_of.erase(id);
}

Conduct::Ruling Conduct::on_edge_failed(WorkerId child, WorkerId parent, TimePoint now, std::uint64_t now_ms,
                                        int weight) {
  Record& reporter = record_of(child, now_ms);
  if (reporter.kept.accuses_falsely) return Ruling::kNothing;
  drop_oldest_if_full(reporter.failures_of, parent);
  TimedCount& recent = reporter.failures_of[parent];
  if (!within(recent.at_ms, kEdgeMemoryMs, now_ms)) recent.count = 0;
  if (recent.count > 0 && now_ms < recent.at_ms + kFailureSpacingMs) return Ruling::kNothing;
  recent.at_ms = now_ms;
  ++record_of(parent, now_ms).attempts;
  if (recent.count >= kFailuresInARow) return Ruling::kNothing;  // they are already separated, as far as possible
  if (recent.count + weight >= kFailuresInARow && !reporter.separations.take(now)) return Ruling::kNothing;
  recent.count += weight;
  if (recent.count < kFailuresInARow) return Ruling::kNothing;
  const std::size_t of_parent = failed_edge_partners(parent, now_ms).size(),
                    of_child = failed_edge_partners(child, now_ms).size();
  if (of_parent >= 2 && of_parent > of_child) {
    demote(parent, now_ms);
    return Ruling::kParent;
  }
  if (of_child > kFailedPartnersMax && of_child > of_parent) {
    demote(child, now_ms);
    return Ruling::kChild;
  }
  return Ruling::kSeparate;
}

bool Conduct::on_delivery(WorkerId parent, WorkerId child, std::uint64_t now_ms) {
  if (const auto it = records_.find(child); it != records_.end()) it->second.failures_of.erase(parent);
  Record& record = record_of(parent, now_ms);
  ++record.attempts;
  ++record.successes;
  if (record.served.size() >= kAccusationsMax && !record.served.contains(child))
    record.served.erase(std::min_element(record.served.begin(), record.served.end(),
                                         [](const auto& a, const auto& b) { return a.second < b.second; }));
  record.served[child] = now_ms;
  return record.ladder.record_delivery();
}

bool Conduct::count_malformed(WorkerId id, std::uint64_t now_ms) {
  TimedCount& said = record_of(id, now_ms).kept.malformed;
  if (!within(said.at_ms, kAccusationMemoryMs, now_ms)) said.count = 0;
  said.at_ms = now_ms;
  return ++said.count >= kMalformedMax;
}

bool Conduct::take_retry(WorkerId id, std::uint64_t now_ms) {
  const auto it = records_.find(id);
  return it != records_.end() && it->second.ladder.retry_if_rested(time_of(now_ms));
}

// ---- what follows ----

bool Conduct::is_quarantined(WorkerId id, std::uint64_t now_ms) const {
  const Record* record = find(id);
  return record && now_ms < record->kept.quarantined_until_ms;
}

bool Conduct::accuses(WorkerId id, std::uint64_t now_ms) const {
  const Record* record = find(id);
  if (!record) return false;
  const auto unproven = [&](const auto& recent) {
    return recent.second.count >= kBadChunksMax && within(recent.second.at_ms, kAccusationMemoryMs, now_ms) &&
           !is_quarantined(recent.first, now_ms);
  };
  return std::any_of(record->kept.bad_chunks_of.begin(), record->kept.bad_chunks_of.end(), unproven) ||
         std::any_of(record->failures_of.begin(), record->failures_of.end(),
                     [&](const auto& recent) { return failed(recent.second, now_ms); });
}

std::set<std::pair<WorkerId, WorkerId>> Conduct::separated_pairs(std::uint64_t now_ms) const {
  std::set<std::pair<WorkerId, WorkerId>> pairs;
  for (const auto& [child, record] : records_) {
    if (record.kept.accuses_falsely) continue;
    for (const auto& [parent, recent] : record.kept.bad_chunks_of)
      if (is_credible(record, recent, now_ms) && !is_quarantined(parent, now_ms))
        pairs.insert(std::minmax(child, parent));
    for (const auto& [parent, recent] : record.failures_of)
      if (failed(recent, now_ms)) pairs.insert(std::minmax(child, parent));
  }
  return pairs;
}

bool Conduct::are_separated(WorkerId a, WorkerId b, std::uint64_t now_ms) const {
  const auto reports_failure = [&](WorkerId child, WorkerId parent) {
    const Record* record = find(child);
    if (!record || record->kept.accuses_falsely) return false;
    const auto bad_chunks = record->kept.bad_chunks_of.find(parent);
    const auto failures = record->failures_of.find(parent);
    return (bad_chunks != record->kept.bad_chunks_of.end() && is_credible(*record, bad_chunks->second, now_ms) &&
            !is_quarantined(parent, now_ms)) ||
           (failures != record->failures_of.end() && failed(failures->second, now_ms));
  };
  return reports_failure(a, b) || reports_failure(b, a);
}

void Conduct::prune(const std::set<WorkerId>& present, std::uint64_t now_ms) {
  for (auto& [id, record] : records_) {
    if (present.contains(id)) record.kept.seen_ms = std::max(record.kept.seen_ms, now_ms);
    std::erase_if(record.kept.bad_chunks_of,
                  [&](const auto& recent) { return !within(recent.second.at_ms, kAccusationMemoryMs, now_ms); });
    std::erase_if(record.failures_of,
                  [&](const auto& recent) { return !within(recent.second.at_ms, kEdgeMemoryMs, now_ms); });
    std::erase_if(record.served, [&](const auto& s) { return !within(s.second, kEdgeMemoryMs, now_ms); });
    if (!within(record.kept.malformed.at_ms, kAccusationMemoryMs, now_ms)) record.kept.malformed = {};
    if (record.kept.quarantined_until_ms <= now_ms) {
      record.kept.quarantined_until_ms = 0;
      record.kept.accuses_falsely = false;
    }
    record.kept.role = record.ladder.role();
  }
  std::erase_if(records_, [&](const auto& item) {
    const StoredConduct& kept = item.second.kept;
    return !present.contains(item.first) &&
           !within(kept.seen_ms, kept.is_clean() ? kEdgeMemoryMs : kRecordMemoryMs, now_ms);
  });
  while (records_.size() > std::max(kRecordsMax, present.size())) {
    auto oldest = records_.end();  // clean records are dropped first
    for (auto it = records_.begin(); it != records_.end(); ++it) {
      const auto rank = [](const Record& r) { return std::pair(!r.kept.is_clean(), r.kept.seen_ms); };
      if (!present.contains(it->first) && (oldest == records_.end() || rank(it->second) < rank(oldest->second)))
        oldest = it;
    }
    if (oldest == records_.end()) return;
    records_.erase(oldest);
  }
}

void Conduct::check() const {
  for (const auto& [id, record] : records_)
    ECHO_CHECK(std::max({record.kept.bad_chunks_of.size(), record.failures_of.size(), record.served.size()}) <=
                   kAccusationsMax,
               "worker {} has words about more workers than are kept", id);
}

std::map<WorkerId, Conduct::StoredConduct> Conduct::kept() const {
  std::map<WorkerId, StoredConduct> all;
  for (const auto& [id, record] : records_) {
    StoredConduct kept = record.kept;
    kept.role = record.ladder.role();
    if (!kept.is_clean()) all.emplace(id, std::move(kept));
  }
  return all;
}

}  // namespace echoline::overlay

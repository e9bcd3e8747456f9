// Judges reports of workers about each other. Called by LearnerCore (learner_conduct.cpp).
#include "overlay/learner/conduct.hpp"

#include <algorithm>

namespace echoline::overlay {
namespace {

// The ladder's times count from 1970, because a role outlives the process that gave it.
TimePoint time_of(std::uint64_t unix_ms) { return TimePoint(std::chrono::milliseconds(unix_ms)); }
// Whether the event is recent enough to count.
bool is_recent(std::uint64_t last_event_ms, std::uint64_t memory_ms, std::uint64_t now_ms) {
  return now_ms < last_event_ms + memory_ms;
}

// Whether an edge counts as failed: it failed several times in a row, the last time recently.
bool has_failed(const Conduct::TimedCount& failures, std::uint64_t now_ms) {
  return failures.count >= Conduct::kFailuresInARow &&
         is_recent(failures.last_event_ms, Conduct::kEdgeMemoryMs, now_ms);
}

}  // namespace

Conduct::Conduct(Duration heartbeat, std::map<WorkerId, StoredConduct> earlier) : heartbeat_(heartbeat) {
  for (auto& [id, stored] : earlier) {
    Record& record = records_.try_emplace(id, heartbeat_).first->second;
    record.ladder = chains::RoleLadder(stored.role, time_of(stored.seen_ms));
    record.stored = std::move(stored);
  }
}

Conduct::Record& Conduct::record_of(WorkerId id, std::uint64_t now_ms) {
  Record& record = records_.try_emplace(id, heartbeat_).first->second;
  record.stored.seen_ms = std::max(record.stored.seen_ms, now_ms);
  return record;
}

const Conduct::Record* Conduct::find(WorkerId id) const {
  const auto it = records_.find(id);
  return it == records_.end() ? nullptr : &it->second;
}

// Bounds the memory for one accuser. An honest worker never has kAccusationsMax parents.
void Conduct::drop_oldest_if_full(std::map<WorkerId, TimedCount>& counts, WorkerId accused) {
  if (counts.size() >= kAccusationsMax && !counts.contains(accused))
    counts.erase(std::min_element(counts.begin(), counts.end(), [](const auto& a, const auto& b) {
      return a.second.last_event_ms < b.second.last_event_ms;
    }));
}

// ---- bad chunks ----

// Whether a count of bad chunks is an accusation: there were enough of them lately, and `record`'s worker is no liar.
bool Conduct::is_credible(const Record& record, const TimedCount& bad_chunks, std::uint64_t now_ms) const {
  return bad_chunks.count >= kBadChunksMax && is_recent(bad_chunks.last_event_ms, kAccusationMemoryMs, now_ms) &&
         !record.stored.accuses_falsely;
}

// An accusation by a quarantined worker counts against no worker, unless the accusation is older than the quarantine.
bool Conduct::counts_against(const Record& record, const TimedCount& bad_chunks, std::uint64_t now_ms) const {
  const std::uint64_t quarantined_until_ms = record.stored.quarantined_until_ms;
  // A quarantine lasts kAccusationMemoryMs, so this compares its beginning.
  const bool quarantined_later = bad_chunks.last_event_ms + kAccusationMemoryMs < quarantined_until_ms;
  return is_credible(record, bad_chunks, now_ms) && (now_ms >= quarantined_until_ms || quarantined_later);
}

// Number of workers that `record`'s worker accuses. The weight of each accusation falls as the number grows.
std::size_t Conduct::accusations_by(const Record& record, std::uint64_t now_ms) const {
  return static_cast<std::size_t>(
      std::count_if(record.stored.bad_chunks_of.begin(), record.stored.bad_chunks_of.end(),
                    [&](const auto& accusation) { return is_credible(record, accusation.second, now_ms); }));
}

// Sum of the weights of all accusations of bad chunks against this worker.
double Conduct::weight_against(WorkerId id, std::uint64_t now_ms) const {
  double weight = 0;
  for (const auto& [accuser, record] : records_)
    if (const auto bad_chunks = record.stored.bad_chunks_of.find(id);
        bad_chunks != record.stored.bad_chunks_of.end() && counts_against(record, bad_chunks->second, now_ms))
      weight += 1.0 / static_cast<double>(std::max<std::size_t>(1, accusations_by(record, now_ms)));
  return weight;
}

// Number of workers that this worker alone accuses of bad chunks.
std::size_t Conduct::lone_accusations(WorkerId id, std::uint64_t now_ms, const IsConnected& is_connected) const {
  const Record& record = records_.at(id);
  std::size_t lone_count = 0;
  for (const auto& [accused, bad_chunks] : record.stored.bad_chunks_of) {
    const WorkerId accused_id = accused;  // clang captures no structured binding before version 16
    if (!is_credible(record, bad_chunks, now_ms) || is_quarantined(accused_id, now_ms) ||
        (is_connected && !is_connected(accused_id)))
      continue;
    lone_count += std::none_of(records_.begin(), records_.end(), [&](const auto& other) {
      const auto& counts = other.second.stored.bad_chunks_of;
      const auto accusation = counts.find(accused_id);
      return other.first != id && accusation != counts.end() && is_credible(other.second, accusation->second, now_ms);
    });
  }
  return lone_count;
}

// Number of children that lately installed what this worker sent them, and do not accuse it.
std::size_t Conduct::satisfied_children(WorkerId id, std::uint64_t now_ms) const {
  const Record* record = find(id);
  if (!record) return 0;
  return static_cast<std::size_t>(
      std::count_if(record->delivered_ms.begin(), record->delivered_ms.end(), [&](const auto& served) {
        if (!is_recent(served.second, kEdgeMemoryMs, now_ms)) return false;
        const Record* child = find(served.first);
        if (!child) return true;
        const auto bad_chunks = child->stored.bad_chunks_of.find(id);
        return bad_chunks == child->stored.bad_chunks_of.end() ||
               !is_recent(bad_chunks->second.last_event_ms, kAccusationMemoryMs, now_ms);
      }));
}

Conduct::Ruling Conduct::on_bad_chunk(WorkerId child, WorkerId parent, std::uint64_t now_ms,
                                      const IsConnected& is_connected) {
  Record& accuser = record_of(child, now_ms);
  if (accuser.stored.accuses_falsely || is_quarantined(parent, now_ms)) return Ruling::kNothing;
  drop_oldest_if_full(accuser.stored.bad_chunks_of, parent);
  TimedCount& bad_chunks = accuser.stored.bad_chunks_of[parent];
  if (!is_recent(bad_chunks.last_event_ms, kAccusationMemoryMs, now_ms)) bad_chunks.count = 0;
  bad_chunks.last_event_ms = now_ms;
  if (bad_chunks.count >= kBadChunksMax) return Ruling::kNothing;  // it already counts as an accusation
  if (++bad_chunks.count < kBadChunksMax) return Ruling::kNothing;
  if (lone_accusations(child, now_ms, is_connected) > kLoneAccusationsMax) {
    ++quarantines_;
    accuser.stored.accuses_falsely = true;
    accuser.stored.quarantined_until_ms = std::max(accuser.stored.quarantined_until_ms, now_ms + kAccusationMemoryMs);
    return Ruling::kChildAtFault;
  }
  constexpr double kRounding = 1e-9;  // because the weights are sums of fractions
  // Children that installed what the parent sent testify for it, so that a few liars cannot remove a good parent.
  const double weight_needed = std::max(kQuarantineWeight, static_cast<double>(satisfied_children(parent, now_ms)));
  if (is_quarantined(child, now_ms) || weight_against(parent, now_ms) < weight_needed - kRounding)
    return Ruling::kSeparate;
  ++quarantines_;
  record_of(parent, now_ms).stored.quarantined_until_ms = now_ms + kAccusationMemoryMs;
  return Ruling::kParentAtFault;
}

// ---- edges that fail ----

// Returns the workers at the other ends of this worker's failed edges.
std::set<WorkerId> Conduct::failed_edge_partners(WorkerId id, std::uint64_t now_ms) const {
  std::set<WorkerId> partners;
  for (const auto& [child, record] : records_) {
    if (record.stored.accuses_falsely) continue;
    for (const auto& [parent, failures] : record.failures_of) {
      if (!has_failed(failures, now_ms)) continue;
      if (child == id) partners.insert(parent);
      if (parent == id) partners.insert(child);
    }
  }
  return partners;
}

// Takes a role away. Clears the worker's failures, so that only new ones lead to another demotion.
void Conduct::demote(WorkerId id, std::uint64_t now_ms) {
  Record& record = record_of(id, now_ms);
  record.ladder.demote(time_of(now_ms));
  record.failures_of.clear();
  for (auto& [child, other] : records_) other.failures_of.erase(id);
}

Conduct::Ruling Conduct::on_edge_failed(WorkerId child, WorkerId parent, TimePoint now, std::uint64_t now_ms,
                                        int weight) {
  Record& reporter = record_of(child, now_ms);
  if (reporter.stored.accuses_falsely) return Ruling::kNothing;
  drop_oldest_if_full(reporter.failures_of, parent);
  TimedCount& failures = reporter.failures_of[parent];
  if (!is_recent(failures.last_event_ms, kEdgeMemoryMs, now_ms)) failures.count = 0;
  if (failures.count > 0 && now_ms < failures.last_event_ms + kFailureSpacingMs) return Ruling::kNothing;
  failures.last_event_ms = now_ms;
  ++record_of(parent, now_ms).attempts;
  if (failures.count >= kFailuresInARow) return Ruling::kNothing;  // they are already separated, as far as possible
  // Limits how many edges one reporter can rule out.
  if (failures.count + weight >= kFailuresInARow && !reporter.separations.take(now)) return Ruling::kNothing;
  failures.count += weight;
  if (failures.count < kFailuresInARow) return Ruling::kNothing;
  // The worker that fails with more partners than the other one is at fault. One failed edge alone proves nothing.
  constexpr std::size_t kPartnersOfFaultyParentMin = 2;
  const std::size_t parents_partners = failed_edge_partners(parent, now_ms).size();
  const std::size_t childs_partners = failed_edge_partners(child, now_ms).size();
  if (parents_partners >= kPartnersOfFaultyParentMin && parents_partners > childs_partners) {
    demote(parent, now_ms);
    return Ruling::kParentAtFault;
  }
  if (childs_partners > kFailedPartnersMax && childs_partners > parents_partners) {
    demote(child, now_ms);
    return Ruling::kChildAtFault;
  }
  return Ruling::kSeparate;
}

bool Conduct::on_delivery(WorkerId parent, WorkerId child, std::uint64_t now_ms) {
  if (const auto it = records_.find(child); it != records_.end()) it->second.failures_of.erase(parent);
  Record& record = record_of(parent, now_ms);
  ++record.attempts;
  ++record.successes;
  // Bounds the memory, with the limit of accusations.
  if (record.delivered_ms.size() >= kAccusationsMax && !record.delivered_ms.contains(child))
    record.delivered_ms.erase(std::min_element(record.delivered_ms.begin(), record.delivered_ms.end(),
                                               [](const auto& a, const auto& b) { return a.second < b.second; }));
  record.delivered_ms[child] = now_ms;
  return record.ladder.record_delivery();
}

bool Conduct::count_malformed(WorkerId id, std::uint64_t now_ms) {
  TimedCount& malformed = record_of(id, now_ms).stored.malformed;
  if (!is_recent(malformed.last_event_ms, kAccusationMemoryMs, now_ms)) malformed.count = 0;
  malformed.last_event_ms = now_ms;
  return ++malformed.count >= kMalformedMax;
}

bool Conduct::take_retry(WorkerId id, std::uint64_t now_ms) {
  const auto it = records_.find(id);
  return it != records_.end() && it->second.ladder.retry_if_rested(time_of(now_ms));
}

// ---- consequences ----

bool Conduct::is_quarantined(WorkerId id, std::uint64_t now_ms) const {
  const Record* record = find(id);
  return record && now_ms < record->stored.quarantined_until_ms;
}

bool Conduct::accuses(WorkerId id, std::uint64_t now_ms) const {
  const Record* record = find(id);
  if (!record) return false;
  // Unlike is_credible(), also for a worker whose accusations do not count.
  const auto is_unproven = [&](const auto& accusation) {
    const auto& [accused, bad_chunks] = accusation;
    return bad_chunks.count >= kBadChunksMax && is_recent(bad_chunks.last_event_ms, kAccusationMemoryMs, now_ms) &&
           !is_quarantined(accused, now_ms);
  };
  return std::any_of(record->stored.bad_chunks_of.begin(), record->stored.bad_chunks_of.end(), is_unproven) ||
         std::any_of(record->failures_of.begin(), record->failures_of.end(),
                     [&](const auto& failures) { return has_failed(failures.second, now_ms); });
}

std::set<std::pair<WorkerId, WorkerId>> Conduct::separated_pairs(std::uint64_t now_ms) const {
  std::set<std::pair<WorkerId, WorkerId>> pairs;
  for (const auto& [child, record] : records_) {
    if (record.stored.accuses_falsely) continue;
    for (const auto& [parent, bad_chunks] : record.stored.bad_chunks_of)
      if (is_credible(record, bad_chunks, now_ms) && !is_quarantined(parent, now_ms))
        pairs.insert(std::minmax(child, parent));
    for (const auto& [parent, failures] : record.failures_of)
      if (has_failed(failures, now_ms)) pairs.insert(std::minmax(child, parent));
  }
  return pairs;
}

bool Conduct::are_separated(WorkerId a, WorkerId b, std::uint64_t now_ms) const {
  const auto reports_failure = [&](WorkerId child, WorkerId parent) {
    const Record* record = find(child);
    if (!record || record->stored.accuses_falsely) return false;
    const auto bad_chunks = record->stored.bad_chunks_of.find(parent);
    const auto failures = record->failures_of.find(parent);
    return (bad_chunks != record->stored.bad_chunks_of.end() && is_credible(*record, bad_chunks->second, now_ms) &&
            !is_quarantined(parent, now_ms)) ||
           (failures != record->failures_of.end() && has_failed(failures->second, now_ms));
  };
  return reports_failure(a, b) || reports_failure(b, a);
}

void Conduct::prune(const std::set<WorkerId>& present, std::uint64_t now_ms) {
  for (auto& [id, record] : records_) {
    if (present.contains(id)) record.stored.seen_ms = std::max(record.stored.seen_ms, now_ms);
    std::erase_if(record.stored.bad_chunks_of, [&](const auto& entry) {
      return !is_recent(entry.second.last_event_ms, kAccusationMemoryMs, now_ms);
    });
    std::erase_if(record.failures_of,
                  [&](const auto& entry) { return !is_recent(entry.second.last_event_ms, kEdgeMemoryMs, now_ms); });
    std::erase_if(record.delivered_ms,
                  [&](const auto& entry) { return !is_recent(entry.second, kEdgeMemoryMs, now_ms); });
    if (!is_recent(record.stored.malformed.last_event_ms, kAccusationMemoryMs, now_ms)) record.stored.malformed = {};
    if (record.stored.quarantined_until_ms <= now_ms) {
      record.stored.quarantined_until_ms = 0;
      record.stored.accuses_falsely = false;
    }
    record.stored.role = record.ladder.role();
  }
  std::erase_if(records_, [&](const auto& item) {
    const StoredConduct& stored = item.second.stored;
    const std::uint64_t memory_ms = stored.is_clean() ? kEdgeMemoryMs : kRecordMemoryMs;
    return !present.contains(item.first) && !is_recent(stored.seen_ms, memory_ms, now_ms);
  });
  while (records_.size() > std::max(kRecordsMax, present.size())) {
    auto oldest = records_.end();  // of the absent workers; one with a clean record, if there is any
    for (auto it = records_.begin(); it != records_.end(); ++it) {
      const auto rank = [](const Record& candidate) {
        return std::pair(!candidate.stored.is_clean(), candidate.stored.seen_ms);
      };
      if (!present.contains(it->first) && (oldest == records_.end() || rank(it->second) < rank(oldest->second)))
        oldest = it;
    }
    if (oldest == records_.end()) return;
    records_.erase(oldest);
  }
}

void Conduct::check() const {
  for (const auto& [id, record] : records_)
    ECHO_CHECK(std::max({record.stored.bad_chunks_of.size(), record.failures_of.size(), record.delivered_ms.size()}) <=
                   kAccusationsMax,
               "worker {} accuses more workers than are remembered", id);
}

std::map<WorkerId, Conduct::StoredConduct> Conduct::stored_records() const {
  std::map<WorkerId, StoredConduct> unclean;
  for (const auto& [id, record] : records_) {
    StoredConduct stored = record.stored;
    stored.role = record.ladder.role();
    if (!stored.is_clean()) unclean.emplace(id, std::move(stored));
  }
  return unclean;
}

}  // namespace echoline::overlay

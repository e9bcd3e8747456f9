#include "overlay/learner/conduct.hpp"

#include <algorithm>

namespace echoline::overlay {
namespace {

TimePoint time_of(std::uint64_t unix_ms) { return TimePoint(std::chrono::milliseconds(unix_ms)); }
bool within(std::uint64_t at_ms, std::uint64_t memory_ms, std::uint64_t now_ms) { return now_ms < at_ms + memory_ms; }

bool failed(const Conduct::Word& word, std::uint64_t now_ms) {
  return word.count >= Conduct::kFailuresInARow && within(word.at_ms, Conduct::kEdgeMemoryMs, now_ms);
}

}  // namespace

Conduct::Conduct(Duration heartbeat, std::map<WorkerId, Kept> kept) : heartbeat_(heartbeat) {
  for (auto& [id, k] : kept) {
    Record& record = records_.try_emplace(id, heartbeat_).first->second;
    record.ladder = chains::RoleLadder(k.role, time_of(k.seen_ms));
    record.kept = std::move(k);
  }
}

Conduct::Record& Conduct::of(WorkerId id, std::uint64_t now_ms) {
  Record& record = records_.try_emplace(id, heartbeat_).first->second;
  record.kept.seen_ms = std::max(record.kept.seen_ms, now_ms);
  return record;
}

const Conduct::Record* Conduct::find(WorkerId id) const {
  const auto it = records_.find(id);
  return it == records_.end() ? nullptr : &it->second;
}

// The oldest word makes room: no honest worker has so many parents.
void Conduct::make_room(std::map<WorkerId, Word>& words, WorkerId of) {
  if (words.size() >= kWordsMax && !words.contains(of))
    words.erase(std::min_element(words.begin(), words.end(),
                                 [](const auto& a, const auto& b) { return a.second.at_ms < b.second.at_ms; }));
}

// ---- bad chunks ----

bool Conduct::believed(const Record& record, const Word& word, std::uint64_t now_ms) const {
  return word.count >= kBadChunksMax && within(word.at_ms, kWordMemoryMs, now_ms) && !record.kept.slanders;
}

// The word of a quarantined worker separates the two, and counts against no worker.
bool Conduct::weighs(const Record& record, const Word& word, std::uint64_t now_ms) const {
  const std::uint64_t until = record.kept.quarantined_until_ms;
  return believed(record, word, now_ms) && (now_ms >= until || word.at_ms + kWordMemoryMs < until);
}

// Number of workers it has accused. Each accusation's weight falls as the number grows.
std::size_t Conduct::words_of(const Record& record, std::uint64_t now_ms) const {
  return static_cast<std::size_t>(
      std::count_if(record.kept.bad_chunks_of.begin(), record.kept.bad_chunks_of.end(),
                    [&](const auto& word) { return believed(record, word.second, now_ms); }));
}

double Conduct::weight_against(WorkerId id, std::uint64_t now_ms) const {
  double weight = 0;
  for (const auto& [accuser, record] : records_)
    if (const auto word = record.kept.bad_chunks_of.find(id);
        word != record.kept.bad_chunks_of.end() && weighs(record, word->second, now_ms))
      weight += 1.0 / static_cast<double>(std::max<std::size_t>(1, words_of(record, now_ms)));
  return weight;
}

std::size_t Conduct::accused_alone(WorkerId id, std::uint64_t now_ms, const Here& here) const {
  const Record& record = records_.at(id);
  std::size_t alone = 0;
  for (const auto& [accused, word] : record.kept.bad_chunks_of) {
    const WorkerId of = accused;  // clang captures no structured binding before version 16
    if (!believed(record, word, now_ms) || is_quarantined(of, now_ms) || (here && !here(of))) continue;
    alone += std::none_of(records_.begin(), records_.end(), [&](const auto& other) {
      const auto& words = other.second.kept.bad_chunks_of;
      const auto same = words.find(of);
      return other.first != id && same != words.end() && believed(other.second, same->second, now_ms);
    });
  }
  return alone;
}

// Children that lately got from it what they could install, and say nothing ill of it.
std::size_t Conduct::vouching_for(WorkerId id, std::uint64_t now_ms) const {
  const Record* record = find(id);
  if (!record) return 0;
  return static_cast<std::size_t>(std::count_if(record->served.begin(), record->served.end(), [&](const auto& served) {
    if (!within(served.second, kEdgeMemoryMs, now_ms)) return false;
    const Record* child = find(served.first);
    if (!child) return true;
    const auto word = child->kept.bad_chunks_of.find(id);
    return word == child->kept.bad_chunks_of.end() || !within(word->second.at_ms, kWordMemoryMs, now_ms);
  }));
}

Conduct::Ruling Conduct::bad_chunk(WorkerId child, WorkerId parent, std::uint64_t now_ms, const Here& here) {
  Record& accuser = of(child, now_ms);
  if (accuser.kept.slanders || is_quarantined(parent, now_ms)) return Ruling::kNothing;
  make_room(accuser.kept.bad_chunks_of, parent);
  Word& word = accuser.kept.bad_chunks_of[parent];
  if (!within(word.at_ms, kWordMemoryMs, now_ms)) word.count = 0;
  word.at_ms = now_ms;
  if (word.count >= kBadChunksMax) return Ruling::kNothing;  // said before
  if (++word.count < kBadChunksMax) return Ruling::kNothing;
  if (accused_alone(child, now_ms, here) > kAccusedAloneMax) {
    ++quarantines_;
    accuser.kept.slanders = true;
    accuser.kept.quarantined_until_ms = std::max(accuser.kept.quarantined_until_ms, now_ms + kWordMemoryMs);
    return Ruling::kChild;
  }
  constexpr double kRounding = 1e-9;
  const double needed = std::max(kWeightToCondemn, static_cast<double>(vouching_for(parent, now_ms)));
  if (is_quarantined(child, now_ms) || weight_against(parent, now_ms) < needed - kRounding) return Ruling::kPart;
  ++quarantines_;
  of(parent, now_ms).kept.quarantined_until_ms = now_ms + kWordMemoryMs;
  return Ruling::kParent;
}

// ---- edges that fail ----

// At the other end of failed edges.
std::set<WorkerId> Conduct::failed_with(WorkerId id, std::uint64_t now_ms) const {
  std::set<WorkerId> others;
  for (const auto& [child, record] : records_) {
    if (record.kept.slanders) continue;
    for (const auto& [parent, word] : record.failures_of) {
      if (!failed(word, now_ms)) continue;
      if (child == id) others.insert(parent);
      if (parent == id) others.insert(child);
    }
  }
  return others;
}

// Its failures are answered for: the next step takes new ones.
void Conduct::step_down(WorkerId id, std::uint64_t now_ms) {
  Record& record = of(id, now_ms);
  record.ladder.demoted(time_of(now_ms));
  record.failures_of.clear();
  for (auto& [child, other] : records_) other.failures_of.erase(id);
}

Conduct::Ruling Conduct::edge_failed(WorkerId child, WorkerId parent, TimePoint now, std::uint64_t now_ms, int weighs) {
  Record& reporter = of(child, now_ms);
  if (reporter.kept.slanders) return Ruling::kNothing;
  make_room(reporter.failures_of, parent);
  Word& word = reporter.failures_of[parent];
  if (!within(word.at_ms, kEdgeMemoryMs, now_ms)) word.count = 0;
  if (word.count > 0 && now_ms < word.at_ms + kFailureSpacingMs) return Ruling::kNothing;
  word.at_ms = now_ms;
  ++of(parent, now_ms).attempts;
  if (word.count >= kFailuresInARow) return Ruling::kNothing;  // they are apart, as far as that could be done
  if (word.count + weighs >= kFailuresInARow && !reporter.partings.take(now)) return Ruling::kNothing;
  word.count += weighs;
  if (word.count < kFailuresInARow) return Ruling::kNothing;
  const std::size_t of_parent = failed_with(parent, now_ms).size(), of_child = failed_with(child, now_ms).size();
  if (of_parent >= 2 && of_parent > of_child) {
    step_down(parent, now_ms);
    return Ruling::kParent;
  }
  if (of_child > kFailedWithMax && of_child > of_parent) {
    step_down(child, now_ms);
    return Ruling::kChild;
  }
  return Ruling::kPart;
}

bool Conduct::on_delivery(WorkerId parent, WorkerId child, std::uint64_t now_ms) {
  if (const auto it = records_.find(child); it != records_.end()) it->second.failures_of.erase(parent);
  Record& record = of(parent, now_ms);
  ++record.attempts;
  ++record.successes;
  if (record.served.size() >= kWordsMax && !record.served.contains(child))
    record.served.erase(std::min_element(record.served.begin(), record.served.end(),
                                         [](const auto& a, const auto& b) { return a.second < b.second; }));
  record.served[child] = now_ms;
  return record.ladder.delivered();
}

bool Conduct::count_malformed(WorkerId id, std::uint64_t now_ms) {
  Word& said = of(id, now_ms).kept.broken;
  if (!within(said.at_ms, kWordMemoryMs, now_ms)) said.count = 0;
  said.at_ms = now_ms;
  return ++said.count >= kBrokenMax;
}

bool Conduct::take_retry(WorkerId id, std::uint64_t now_ms) {
  const auto it = records_.find(id);
  return it != records_.end() && it->second.ladder.tries_again(time_of(now_ms));
}

// ---- what follows ----

bool Conduct::is_quarantined(WorkerId id, std::uint64_t now_ms) const {
  const Record* record = find(id);
  return record && now_ms < record->kept.quarantined_until_ms;
}

bool Conduct::accuses(WorkerId id, std::uint64_t now_ms) const {
  const Record* record = find(id);
  if (!record) return false;
  const auto unproven = [&](const auto& word) {
    return word.second.count >= kBadChunksMax && within(word.second.at_ms, kWordMemoryMs, now_ms) &&
           !is_quarantined(word.first, now_ms);
  };
  return std::any_of(record->kept.bad_chunks_of.begin(), record->kept.bad_chunks_of.end(), unproven) ||
         std::any_of(record->failures_of.begin(), record->failures_of.end(),
                     [&](const auto& word) { return failed(word.second, now_ms); });
}

std::set<std::pair<WorkerId, WorkerId>> Conduct::pairs_apart(std::uint64_t now_ms) const {
  std::set<std::pair<WorkerId, WorkerId>> pairs;
  for (const auto& [child, record] : records_) {
    if (record.kept.slanders) continue;
    for (const auto& [parent, word] : record.kept.bad_chunks_of)
      if (believed(record, word, now_ms) && !is_quarantined(parent, now_ms)) pairs.insert(std::minmax(child, parent));
    for (const auto& [parent, word] : record.failures_of)
      if (failed(word, now_ms)) pairs.insert(std::minmax(child, parent));
  }
  return pairs;
}

bool Conduct::are_apart(WorkerId a, WorkerId b, std::uint64_t now_ms) const {
  const auto says = [&](WorkerId child, WorkerId parent) {
    const Record* record = find(child);
    if (!record || record->kept.slanders) return false;
    const auto bad = record->kept.bad_chunks_of.find(parent);
    const auto edge = record->failures_of.find(parent);
    return (bad != record->kept.bad_chunks_of.end() && believed(*record, bad->second, now_ms) &&
            !is_quarantined(parent, now_ms)) ||
           (edge != record->failures_of.end() && failed(edge->second, now_ms));
  };
  return says(a, b) || says(b, a);
}

void Conduct::prune(const std::set<WorkerId>& present, std::uint64_t now_ms) {
  for (auto& [id, record] : records_) {
    if (present.contains(id)) record.kept.seen_ms = std::max(record.kept.seen_ms, now_ms);
    std::erase_if(record.kept.bad_chunks_of,
                  [&](const auto& word) { return !within(word.second.at_ms, kWordMemoryMs, now_ms); });
    std::erase_if(record.failures_of,
                  [&](const auto& word) { return !within(word.second.at_ms, kEdgeMemoryMs, now_ms); });
    std::erase_if(record.served, [&](const auto& s) { return !within(s.second, kEdgeMemoryMs, now_ms); });
    if (!within(record.kept.broken.at_ms, kWordMemoryMs, now_ms)) record.kept.broken = {};
    if (record.kept.quarantined_until_ms <= now_ms) {
      record.kept.quarantined_until_ms = 0;
      record.kept.slanders = false;
    }
    record.kept.role = record.ladder.role();
  }
  std::erase_if(records_, [&](const auto& item) {
    const Kept& kept = item.second.kept;
    return !present.contains(item.first) &&
           !within(kept.seen_ms, kept.clean() ? kEdgeMemoryMs : kRecordMemoryMs, now_ms);
  });
  while (records_.size() > std::max(kRecordsMax, present.size())) {
    auto oldest = records_.end();  // the clean ones first
    for (auto it = records_.begin(); it != records_.end(); ++it) {
      const auto rank = [](const Record& r) { return std::pair(!r.kept.clean(), r.kept.seen_ms); };
      if (!present.contains(it->first) && (oldest == records_.end() || rank(it->second) < rank(oldest->second)))
        oldest = it;
    }
    if (oldest == records_.end()) return;
    records_.erase(oldest);
  }
}

void Conduct::check() const {
  for (const auto& [id, record] : records_)
    ECHO_CHECK(
        std::max({record.kept.bad_chunks_of.size(), record.failures_of.size(), record.served.size()}) <= kWordsMax,
        "worker {} has words about more workers than are kept", id);
}

std::map<WorkerId, Conduct::Kept> Conduct::kept() const {
  std::map<WorkerId, Kept> all;
  for (const auto& [id, record] : records_) {
    Kept kept = record.kept;
    kept.role = record.ladder.role();
    if (!kept.clean()) all.emplace(id, std::move(kept));
  }
  return all;
}

}  // namespace echoline::overlay

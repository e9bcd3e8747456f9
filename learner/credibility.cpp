#include "learner/credibility.hpp"

#include <algorithm>

#include "base/result.hpp"

namespace echoline::learner {

// The median; nothing while there are fewer than two.
std::optional<double> Credibility::usual_but_of(WorkerId worker) const {
  std::vector<double> others;
  for (const auto& [id, record] : records_)
    if (id != worker && record.off) others.push_back(*record.off);
  if (others.size() < 2) return std::nullopt;
  const auto middle = others.begin() + static_cast<std::ptrdiff_t>(others.size() / 2);
  std::nth_element(others.begin(), middle, others.end());
  return *middle;
}

std::vector<Credibility::Verdict> Credibility::judge(const std::map<WorkerId, Scrutiny>& seen, std::uint64_t step) {
  std::vector<WorkerId> due;
  for (const auto& [id, scrutiny] : seen) {
    Record& record = records_[id];
    record.step = step;
    record.pending.responses += scrutiny.responses;
    record.pending.surprise += scrutiny.surprise;
    record.pending.dispute += scrutiny.dispute;
    if (record.pending.responses < kResponses) continue;
    const auto n = static_cast<double>(record.pending.responses);
    record.off = std::max(record.pending.surprise, record.pending.dispute) / n;
    record.pending = {};
    due.push_back(id);
  }
  std::erase_if(records_, [&](const auto& item) { return item.second.step + kMemorySteps < step; });
  std::vector<Verdict> verdicts;
  for (const WorkerId id : due) {
    Record& record = records_.at(id);
    const auto usual = usual_but_of(id);
    const bool off = usual && *record.off > kNats && *record.off > kTimesOthers * *usual;
    record.in_a_row = off ? record.in_a_row + 1 : 0;
    if (record.in_a_row < kInARow) continue;
    verdicts.push_back({id, fmt::format("its responses are not the policy's: they are off by {:.1f} nats a token, those of "
                                        "others by {:.2f}",
                                        *record.off, *usual)});
  }
  for (const Verdict& verdict : verdicts) records_.erase(verdict.worker);
  return verdicts;
}

}  // namespace echoline::learner

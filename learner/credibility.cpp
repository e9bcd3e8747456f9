#include "learner/credibility.hpp"

#include <algorithm>

#include "base/result.hpp"

namespace echoline::learner {

// The median of the other workers; absent if there are fewer than two.
std::optional<double> Credibility::usual_but_of(WorkerId worker, double Scrutiny::*what) const {
  std::vector<double> others;
  for (const auto& [id, record] : records_)
    if (id != worker && record.last) others.push_back((*record.last).*what);
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
    record.last = {1, record.pending.surprise / n, record.pending.dispute / n};
    record.pending = {};
    due.push_back(id);
  }
  std::erase_if(records_, [&](const auto& item) { return item.second.step + kMemorySteps < step; });
  std::vector<Verdict> verdicts;
  for (const WorkerId id : due) {
    Record& record = records_.at(id);
    const auto off = [&](double Scrutiny::*what, const Limit& limit) {
      const auto usual = usual_but_of(id, what);
      const double own = (*record.last).*what;
      return usual && own > limit.nats && own > limit.times_others * *usual;
    };
    const bool made_up = off(&Scrutiny::surprise, kSurprise) || off(&Scrutiny::dispute, kDispute);
    record.in_a_row = made_up ? record.in_a_row + 1 : 0;
    if (record.in_a_row < kInARow) continue;
    verdicts.push_back(
        {id, fmt::format("its responses are not the policy's: its tokens are {:.1f} nats less likely than the "
                         "policy's, and its log-probabilities are off by {:.1f}; for other workers, {:.2f} and {:.2f}",
                         record.last->surprise, record.last->dispute, *usual_but_of(id, &Scrutiny::surprise),
                         *usual_but_of(id, &Scrutiny::dispute))});
  }
  for (const Verdict& verdict : verdicts) records_.erase(verdict.worker);
  return verdicts;
}

}  // namespace echoline::learner

// Judges workers by their responses' log-probabilities. The training loop calls it after every step.
#include "learner/credibility.hpp"

#include <algorithm>

#include "base/result.hpp"

namespace echoline::learner {

// The median of the other workers' last means; absent if there are fewer than two.
std::optional<double> Credibility::median_of_others(WorkerId worker, double Scrutiny::*figure) const {
  std::vector<double> values;
  for (const auto& [id, record] : records_)
    if (id != worker && record.last_means) values.push_back((*record.last_means).*figure);
  if (values.size() < 2) return std::nullopt;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

std::vector<Credibility::Verdict> Credibility::judge(const std::map<WorkerId, Scrutiny>& scrutinies,
                                                     std::uint64_t step) {
  // First updates the means of all workers, because a judgement compares a worker with the others.
  std::vector<WorkerId> to_judge;
  for (const auto& [id, scrutiny] : scrutinies) {
    Record& record = records_[id];
    record.newest_step = step;
    record.unjudged.responses += scrutiny.responses;
    record.unjudged.surprise += scrutiny.surprise;
    record.unjudged.dispute += scrutiny.dispute;
    if (record.unjudged.responses < kResponsesJudged) continue;
    const auto responses = static_cast<double>(record.unjudged.responses);
    record.last_means = Scrutiny{.responses = 1,
                                 .surprise = record.unjudged.surprise / responses,
                                 .dispute = record.unjudged.dispute / responses};
    record.unjudged = {};
    to_judge.push_back(id);
  }
  std::erase_if(records_, [&](const auto& item) { return item.second.newest_step + kMemorySteps < step; });
  std::vector<Verdict> verdicts;
  for (const WorkerId id : to_judge) {
    Record& record = records_.at(id);
    const auto exceeds = [&](double Scrutiny::*figure, const Limit& limit) {
      const auto median = median_of_others(id, figure);
      const double own = (*record.last_means).*figure;
      return median && own > limit.nats && own > limit.times_others * *median;
    };
    const bool is_over_limit =
        exceeds(&Scrutiny::surprise, kSurpriseLimit) || exceeds(&Scrutiny::dispute, kDisputeLimit);
    record.over_limit_in_a_row = is_over_limit ? record.over_limit_in_a_row + 1 : 0;
    if (record.over_limit_in_a_row < kInARowMax) continue;
    verdicts.push_back(  // both medians exist, because the worker is over a limit
        {id, fmt::format("its responses are not the policy's: its tokens are {:.1f} nats less likely than the "
                         "policy's, and its log-probabilities are off by {:.1f}; for other workers, {:.2f} and {:.2f}",
                         record.last_means->surprise, record.last_means->dispute,
                         *median_of_others(id, &Scrutiny::surprise), *median_of_others(id, &Scrutiny::dispute))});
  }
  // From now on, no worker is compared with an expelled one.
  for (const Verdict& verdict : verdicts) records_.erase(verdict.worker);
  return verdicts;
}

}  // namespace echoline::learner

// Chooses responses to grade again and judges the results, for Regrader.
#include "learner/regrading.hpp"

#include <algorithm>

#include "base/result.hpp"

namespace echoline::learner {
namespace {

constexpr std::uint64_t kRecentResponses = 50;  // responses in a recent mean

}  // namespace

void RegradingRules::Mean::add(double seconds) {
  ++count;
  value += (seconds - value) / static_cast<double>(std::min(count, kRecentResponses));
}

double RegradingRules::share_at(const Mean& seconds_each) const {
  if (!step_seconds_ || seconds_each.value <= 0) return 1;
  return std::min(1.0, kShareOfStep * *step_seconds_ / (seconds_each.value * static_cast<double>(step_responses_)));
}

double RegradingRules::share() const { return share_at(seconds_each_); }

double RegradingRules::share(WorkerId worker) const {
  const auto known = records_.find(worker);
  return known != records_.end() && known->second.seconds_each.count > 0 ? share_at(known->second.seconds_each)
                                                                         : share();
}

bool RegradingRules::should_grade(WorkerId worker) {
  ++counts_.responses;
  if (records_.size() >= kWorkersMax && !records_.contains(worker)) records_.erase(records_.begin());  // bounds memory
  Record& record = records_[worker];
  const bool chosen_by_chance = random_.uniform() < share(worker);
  if (record.expelled || (record.chosen >= kFirstResponses && record.differences == 0 && !chosen_by_chance))
    return false;
  ++record.chosen;
  ++counts_.chosen;
  return true;
}

void RegradingRules::on_queue_full(WorkerId worker) {
  ++counts_.queue_overflows;
  --records_[worker].chosen;  // kFirstResponses counts graded responses only
}

void RegradingRules::on_step_measured(double step_seconds, std::uint64_t step_responses) {
  step_seconds_ = step_seconds;
  step_responses_ = std::max<std::uint64_t>(1, step_responses);
}

std::optional<std::string> RegradingRules::record_result(WorkerId worker, const Regraded& regraded) {
  using Verdict = Regraded::Verdict;
  ++counts_.graded;
  counts_.seconds += regraded.seconds;
  Record& record = records_[worker];
  seconds_each_.add(regraded.seconds);
  record.seconds_each.add(regraded.seconds);
  switch (regraded.verdict) {
    case Verdict::kUnsettled:
      ++counts_.undecided;
      return std::nullopt;
    case Verdict::kLate:
      ++counts_.explained_by_timeout;
      return std::nullopt;
    case Verdict::kImpossible:
      ++counts_.task_failures;
      return std::nullopt;
    case Verdict::kSame:
      if (record.differences > 0 && ++record.same >= kForgivenAfter) {
        record.same = 0;
        --record.differences;
      }
      return std::nullopt;
    case Verdict::kDifferent:
      break;
  }
  ++counts_.differences;
  record.same = 0;
  if (record.expelled || ++record.differences < kDifferencesMax) return std::nullopt;
  record.expelled = true;
  counts_.expelled.push_back(
      {worker, fmt::format("wrong score: {} of its responses were graded again, twice each, and have another reward "
                           "than it reports; the last one: {}",
                           record.differences, regraded.detail)});
  return counts_.expelled.back().reason;
}

}  // namespace echoline::learner

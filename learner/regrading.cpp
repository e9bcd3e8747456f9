// Chooses responses to grade again and judges the results, for Regrader.
#include "learner/regrading.hpp"

#include <algorithm>

#include "base/result.hpp"

namespace echoline::learner {
namespace {

constexpr std::uint64_t kRecentResponses = 50;  // responses in a recent mean

}  // namespace

// The mean of all values at first; later, an average in which old values count less and less.
void RegradingRules::Mean::add(double seconds) {
  ++count;
  value += (seconds - value) / static_cast<double>(std::min(count, kRecentResponses));
}

double RegradingRules::graded_fraction_at(const Mean& seconds_per_response) const {
  if (!step_seconds_ || seconds_per_response.value <= 0) return 1;
  const double all_responses_s = seconds_per_response.value * static_cast<double>(step_responses_);
  return std::min(1.0, kShareOfStep * *step_seconds_ / all_responses_s);
}

double RegradingRules::graded_fraction() const { return graded_fraction_at(seconds_per_response_); }

double RegradingRules::graded_fraction(WorkerId worker) const {
  const auto entry = records_.find(worker);
  return entry != records_.end() && entry->second.seconds_per_response.count > 0
             ? graded_fraction_at(entry->second.seconds_per_response)
             : graded_fraction();
}

bool RegradingRules::should_grade(WorkerId worker) {
  ++counts_.responses;
  // Bounds the memory: drops the worker with the lowest id, which joined first.
  if (records_.size() >= kWorkersMax && !records_.contains(worker)) records_.erase(records_.begin());
  Record& record = records_[worker];
  const bool chosen_by_chance = random_.uniform() < graded_fraction(worker);
  const bool is_always_chosen = record.chosen < kFirstResponses || record.differences > 0;
  if (record.expelled || (!is_always_chosen && !chosen_by_chance)) return false;
  ++record.chosen;
  ++counts_.chosen;
  return true;
}

void RegradingRules::on_queue_full(WorkerId worker) {
  ++counts_.left_out;
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
  seconds_per_response_.add(regraded.seconds);
  record.seconds_per_response.add(regraded.seconds);
  switch (regraded.verdict) {
    // These three are no evidence for or against the worker.
    case Verdict::kUnsettled:
      ++counts_.unsettled;
      return std::nullopt;
    case Verdict::kLate:
      ++counts_.late;
      return std::nullopt;
    case Verdict::kImpossible:
      ++counts_.impossible;
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
  ++counts_.different;
  record.same = 0;
  if (record.expelled || ++record.differences < kDifferencesMax) return std::nullopt;
  record.expelled = true;
  counts_.expelled.push_back(
      {worker, fmt::format("wrong score: the learner graded {} of its responses twice each, and found another reward "
                           "than it reported; the last one: {}",
                           record.differences, regraded.detail)});
  return counts_.expelled.back().reason;
}

}  // namespace echoline::learner

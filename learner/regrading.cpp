#include "learner/regrading.hpp"

#include <algorithm>

#include "base/result.hpp"

namespace echoline::learner {
namespace {

constexpr std::uint64_t kRecent = 50;  // responses in a recent mean

}  // namespace

void Regrading::Mean::add(double seconds) {
  ++count;
  value += (seconds - value) / static_cast<double>(std::min(count, kRecent));
}

double Regrading::share_at(const Mean& seconds_each) const {
  if (!step_seconds_ || seconds_each.value <= 0) return 1;
  return std::min(1.0, kShareOfStep * *step_seconds_ / (seconds_each.value * static_cast<double>(step_responses_)));
}

double Regrading::share() const { return share_at(seconds_each_); }

double Regrading::share(WorkerId worker) const {
  const auto known = records_.find(worker);
  return known != records_.end() && known->second.seconds_each.count > 0 ? share_at(known->second.seconds_each)
                                                                         : share();
}

bool Regrading::wanted(WorkerId worker) {
  ++counts_.responses;
  if (records_.size() >= kWorkersMax && !records_.contains(worker)) records_.erase(records_.begin());
  Record& record = records_[worker];
  const bool drawn = random_.uniform() < share(worker);
  if (record.expelled || (record.chosen >= kFirst && record.differences == 0 && !drawn)) return false;
  ++record.chosen;
  ++counts_.chosen;
  return true;
}

void Regrading::left_out(WorkerId worker) {
  ++counts_.left_out;
  --records_[worker].chosen;  // kFirst counts graded responses only
}

void Regrading::step_measured(double seconds, std::uint64_t responses) {
  step_seconds_ = seconds;
  step_responses_ = std::max<std::uint64_t>(1, responses);
}

std::optional<std::string> Regrading::judge(WorkerId worker, const Regraded& regraded) {
  using Verdict = Regraded::Verdict;
  ++counts_.graded;
  counts_.seconds += regraded.seconds;
  Record& record = records_[worker];
  seconds_each_.add(regraded.seconds);
  record.seconds_each.add(regraded.seconds);
  switch (regraded.verdict) {
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
      if (record.differences > 0 && ++record.same >= kForgivenAfter) record.same = 0, --record.differences;
      return std::nullopt;
    case Verdict::kDifferent:
      break;
  }
  ++counts_.different;
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

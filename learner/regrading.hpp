// Chooses which rewards of workers the learner grades again, and judges workers by the results. Only for tasks whose
// grading is slow (Repeatable::kCostly); the rewards of others are all checked at once. Pure. Private to learner/.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/ids.hpp"
#include "base/random.hpp"

namespace echoline::learner {

// The result of grading one response again.
struct Regraded {
  enum class Verdict {
    kSame,        // the worker's grade
    kDifferent,   // another grade than the worker's, the same in two tries
    kUnsettled,   // a different grade in each try: no evidence against the worker
    kLate,        // a timeout, here or at the worker, explains the difference
    kImpossible,  // the task failed here, so there is no second grade
  };
  Verdict verdict = Verdict::kSame;
  std::string detail;  // the expected and the found grade
  double seconds = 0;  // spent on grading
};

struct RegradingCounts {
  struct Expelled {
    WorkerId worker;
    std::string reason;
  };
  std::uint64_t responses = 0;  // accepted responses that can be graded again
  std::uint64_t chosen = 0;     // those that were chosen
  std::uint64_t left_out = 0;   // chosen, but not graded, because the queue was full
  std::uint64_t graded = 0;     // graded again, with any result
  // Results other than kSame, as Regraded::Verdict explains them.
  std::uint64_t different = 0, unsettled = 0, late = 0, impossible = 0;
  double seconds = 0;  // sum over the graded responses
  std::vector<Expelled> expelled;
};

// Chooses all responses while grading takes less than a twentieth of a learner step, otherwise the fraction that this
// allows. Workers cannot predict the choice: they know the run's seed, but not `secret`. The first responses of every
// worker are always chosen, and so are all of a worker with a difference until it is forgiven.
class RegradingRules {
 public:
  static constexpr double kShareOfStep = 0.05;         // share of a learner step's time that grading may take
  static constexpr std::uint64_t kFirstResponses = 8;  // number of a worker's first responses that are always chosen
  // A program written by the policy may behave differently at each run, and the learner's two grades may agree by
  // chance. So it takes three differences to expel a worker, and one is forgiven for every hundred equal grades.
  static constexpr std::uint32_t kDifferencesMax = 3;
  static constexpr std::uint64_t kForgivenAfter = 100;
  static constexpr std::size_t kWorkersMax = 65'536;  // workers remembered at once

  explicit RegradingRules(std::uint64_t secret) : random_(secret) {}

  // A response of this worker was accepted. Returns whether to grade it again.
  bool should_grade(WorkerId worker);
  // The chosen response is not graded, because the queue is full.
  void on_queue_full(WorkerId worker);
  // `step_seconds`: the measured time of a learner step; `step_responses`: the responses that it trains on.
  void on_step_measured(double step_seconds, std::uint64_t step_responses);
  // Takes a result. Returns the reason if the worker must be expelled now.
  std::optional<std::string> record_result(WorkerId worker, const Regraded& regraded);

  // The fraction of a worker's responses, after its first ones, that is chosen; without an argument, the fraction for
  // an average worker. A worker whose responses take longer to grade has a lower fraction, so that it does not lower
  // the fractions of others.
  double graded_fraction(WorkerId worker) const;
  double graded_fraction() const;
  const RegradingCounts& counts() const { return counts_; }

 private:
  // Recent mean duration of grading one response.
  struct Mean {
    double value = 0;
    std::uint64_t count = 0;
    void add(double seconds);
  };
  struct Record {
    std::uint64_t chosen = 0, same = 0;  // `same`: since the last difference or forgiveness
    std::uint32_t differences = 0;
    Mean seconds_per_response;
    bool expelled = false;
  };
  double graded_fraction_at(const Mean& seconds_per_response) const;
  Random random_;
  std::map<WorkerId, Record> records_;
  std::optional<double> step_seconds_;
  std::uint64_t step_responses_ = 1;
  Mean seconds_per_response_;
  RegradingCounts counts_;
};

}  // namespace echoline::learner

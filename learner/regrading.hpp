// Which rewards of workers the learner grades again where that takes long (Repeatable::kCostly), and what follows of
// what it finds. Pure. Private to learner/.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/ids.hpp"
#include "base/random.hpp"

namespace echoline::learner {

// What came of looking at one response again.
struct Regraded {
  enum class Verdict {
    kSame,        // as its worker says
    kDifferent,   // something else, twice the same
    kUnsettled,   // something else each time: it can be held against nobody
    kLate,        // time ran out over it, here or there, and that explains it
    kImpossible,  // the task failed here
  };
  Verdict verdict = Verdict::kSame;
  std::string detail;  // what was expected and what was found
  double seconds = 0;  // that it took
};

struct RegradingCounts {
  struct Expelled {
    WorkerId worker;
    std::string reason;
  };
  std::uint64_t responses = 0;  // taken in that could be graded again
  std::uint64_t chosen = 0;     // of those
  std::uint64_t left_out = 0;   // chosen, but too many waited already
  std::uint64_t graded = 0;     // looked at, whatever came of it
  std::uint64_t different = 0, unsettled = 0, late = 0, impossible = 0;
  double seconds = 0;
  std::vector<Expelled> expelled;
};

// All responses while grading them takes less than a twentieth of a learner step, otherwise as large a share as that
// allows. Which ones nobody can foresee: `secret` is not the run's seed, which workers know. Of every worker the first
// ones are looked at, and all of one that was found to differ, until it is forgiven.
class Regrading {
 public:
  static constexpr double kShareOfStep = 0.05;
  static constexpr std::uint64_t kFirst = 8;
  // A program that a policy wrote may do something else each time, and two looks that agree with each other by chance
  // convict nobody: it takes three such responses, and one is forgiven for every hundred that are as the worker said.
  static constexpr std::uint32_t kDifferencesMax = 3;
  static constexpr std::uint64_t kForgivenAfter = 100;
  static constexpr std::size_t kWorkersMax = 65'536;  // remembered at once

  explicit Regrading(std::uint64_t secret) : random_(secret) {}

  // A response of this worker was taken in; whether it is to be looked at.
  bool wanted(WorkerId worker);
  // It will not be: too many wait.
  void left_out(WorkerId worker);
  // A learner step as measured, for which so many responses are needed.
  void step_measured(double seconds, std::uint64_t responses);
  // What came of it; why the worker has to go, when it has to now.
  std::optional<std::string> judge(WorkerId worker, const Regraded& regraded);

  // Of the responses of a worker whose first ones were looked at; as it is without knowing whose. A worker whose
  // responses take longer than those of others is looked at less, and nobody else is for it.
  double share(WorkerId worker) const;
  double share() const;
  const RegradingCounts& counts() const { return counts_; }

 private:
  // Of what one look takes, lately.
  struct Mean {
    double value = 0;
    std::uint64_t count = 0;
    void add(double seconds);
  };
  struct Record {
    std::uint64_t chosen = 0, same = 0;  // `same` since it was last found to differ, or forgiven
    std::uint32_t differences = 0;
    Mean seconds_each;
    bool expelled = false;
  };
  double share_at(const Mean& seconds_each) const;
  Random random_;
  std::map<WorkerId, Record> records_;
  std::optional<double> step_seconds_;
  std::uint64_t step_responses_ = 1;
  Mean seconds_each_;
  RegradingCounts counts_;
};

}  // namespace echoline::learner

// Checks workers' submissions, stores them together, and acknowledges them once they are durable. Private to learner/.
#pragma once
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "learner/desk_scores.hpp"

namespace echoline::learner {

// One thread, the desk's.
class DeskSubmissions {
 public:
  // The parts must outlive it.
  DeskSubmissions(DeskContext& desk, const OfferedPolicies& policies, Discipline& discipline, DeskScores& scores,
                  const StepBatches& batches)
      : desk_(desk), policies_(policies), discipline_(discipline), scores_(scores), batches_(batches) {}

  using Submissions = std::vector<std::pair<WorkerId, schema::Submission>>;
  // Stores submissions in one transaction. False if the database cannot store: the submissions wait for another try.
  bool store(const Submissions& submissions);
  void refuse_unreadable(WorkerId worker, const std::string& what);

  const std::map<std::string, std::uint64_t>& refused() const { return refused_; }  // submissions by reason

 private:
  std::optional<Refusal> refusal_if_unpublished(const schema::Submission& submission) const;
  // Passes responses to a client's requests on, instead of storing them.
  void pass_on(const Submissions& submissions);
  void acknowledge(WorkerId worker, const schema::Submission& submission, const replay_buffer::Verdict& verdict);

  DeskContext& desk_;
  const OfferedPolicies& policies_;
  Discipline& discipline_;
  DeskScores& scores_;
  const StepBatches& batches_;
  std::map<std::string, std::uint64_t> refused_;
};

}  // namespace echoline::learner

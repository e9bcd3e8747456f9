// A run whose training loop is in a Tinker client: executes the client's operations, in their order, with the built-in
// trainer, publishes policies, and passes requests for samples to workers. Private to learner/.
#pragma once
#include <functional>
#include <memory>
#include <string>

#include "learner/external/tinker_link.hpp"
#include "learner/external/tinker_server.hpp"
#include "learner/publisher.hpp"
#include "learner/run_fleet.hpp"
#include "learner/run_journal.hpp"
#include "learner/run_task.hpp"
#include "learner/sample_desk.hpp"

namespace echoline::learner {

// One thread, the main one, except samples().
class TinkerRun {
 public:
  // The parts that the run drives; they outlive it.
  struct Parts {
    RunJournal& journal;
    PolicySource& policy_source;
    RunFleet& fleet;
    Publisher& publisher;
    std::function<void(const std::string& phase)> write_status;
  };
  TinkerRun(const RunHost& run, const RunTask& task);
  ~TinkerRun();

  SampleDesk& samples() { return samples_; }
  // Listens for clients, and writes the address and the key to the run's folder.
  Status listen(const RunRecord& record, std::function<std::size_t()> workers);
  // Publishes the current policy and serves clients until the run's steps are done and their sessions have ended. False
  // when the run was asked to stop first. A checkpoint is written in either case.
  Result<bool> serve(const Parts& parts);
  // Ends the service of clients, which get the reason.
  void stop(const std::string& reason);

 private:
  using Answer = tinker::Answer;
  Status execute(const Parts& parts, tinker::DueOperation due);
  // These return the answer for the client, or the error that it gets.
  Result<Answer> create_model(const Parts& parts, const tinker::DueOperation& due, const tinker::CreateModel& create);
  Result<Answer> train(const Parts& parts, const DatumBatch& batch);
  Result<Answer> optim_step(const Parts& parts, const tinker::OptimStep& step);
  Result<Answer> save_weights(const Parts& parts, const tinker::DueOperation& due, const tinker::SaveWeights& save);
  Result<Answer> load_weights(const Parts& parts, const tinker::DueOperation& due, const tinker::LoadWeights& load);
  Result<Answer> save_for_sampler(const Parts& parts, const tinker::DueOperation& due,
                                  const tinker::SaveForSampler& save);
  // Publishes the current policy, unless workers have it already. False if the run must stop first.
  Result<bool> publish(const Parts& parts);
  // An error if the run cannot go on. Call it a few times a second.
  Status keep_alive(const Parts& parts, const std::string& phase);
  Result<DatumTrainer*> trainer(const Parts& parts) const;
  std::filesystem::path state_folder(const Parts& parts, const std::string& model, const std::string& name) const;
  bool is_last_step_done(const Parts& parts) const;

  const RunHost run_;
  const RunTask& task_;
  const std::string base_model_;
  tinker::TinkerLink link_;
  SampleDesk samples_;
  std::unique_ptr<tinker::Server> server_;
  std::filesystem::path address_file_;
  std::optional<Version> published_;
  std::optional<Error> run_error_;  // it ends the run
  struct Sums {
    double loss = 0;
    std::size_t examples = 0;
    Duration train_time{};
  };
  Sums since_step_;  // since the last update of the weights
  TimePoint step_began_at_{};
};

}  // namespace echoline::learner

// Several inference servers of a worker as one engine, each with GPUs of its own. They read one copy of the policy.
// Private to worker/engines/.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "base/clock.hpp"
#include "worker/engines/remote.hpp"

namespace echoline::worker {

// A sequence stays with its engine, also during a restart of the engine. If an engine breaks, its sequences begin again
// on other engines. The set is broken when all its engines are broken.
//
// A policy is written into the folder once, and all engines load it at the same time. The set does not wait for an
// engine that restarts: this engine loads the newest policy before it takes sequences again.
class EngineSet final : public Engine {
 public:
  // `engines`: at least one; all read `folder`.
  EngineSet(std::vector<std::unique_ptr<FolderEngine>> engines, std::shared_ptr<PolicyFolder> folder, EngineHost host)
      : engines_(std::move(engines)), folder_(std::move(folder)), host_(std::move(host)) {}
  ~EngineSet() override;

  // The sum over the engines. An engine that is not ready counts as full: its capacity is the number of its sequences.
  std::size_t capacity() const override;
  std::size_t sequences_in_progress() const override { return assigned_.size(); }
  void submit(Sequence sequence) override;
  std::vector<Outcome> poll(Duration time) override;
  void abort(std::uint64_t id) override;
  std::uint64_t progress() const override;

  void decode_part(const overlay::PublicationPart& part) override { folder_->decode_part(part); }
  Status install(const overlay::Publication& publication) override;
  // Version and digest of the ready engine with the oldest version.
  std::optional<Version> version() const override { return engine_with_oldest_policy().version(); }
  const overlay::Digest& digest() const override { return engine_with_oldest_policy().digest(); }
  bool can_take_work() const override;
  Status status() const override;  // that of the first engine, if all are broken

 private:
  struct Assigned {
    std::size_t engine = 0;  // index in engines_
    Sequence sequence;
  };

  const Engine& engine_with_oldest_policy() const;
  // The engine of the last sequence if `sequence` has the same prompt; otherwise the one with the most free places.
  std::size_t choose_engine(const Sequence& sequence) const;
  // Number of further sequences that the engine can compute at once; negative if it has too many already.
  std::ptrdiff_t free_places(const FolderEngine& engine) const;
  void assign(Sequence sequence);
  void reassign_sequences_of_broken();
  // Advances all engines. Waits shortly for answers from the server of one engine; the calls take the engines in turn.
  void advance();
  // Advances all engines until `is_over` returns true. kCancelled: the worker was asked to stop.
  Status advance_until(const std::function<bool()>& is_over);

  std::vector<std::unique_ptr<FolderEngine>> engines_;
  std::shared_ptr<PolicyFolder> folder_;
  const EngineHost host_;
  const SystemClock clock_;
  std::map<std::uint64_t, Assigned> assigned_;  // by the sequence's id
  std::size_t last_engine_ = 0;                 // index of the engine that got the last submitted sequence
  std::vector<model::Token> last_prompt_;       // of that sequence
  // Modulo the number of engines: index of the engine for which advance() waits next.
  std::size_t next_awaited_engine_ = 0;
};

}  // namespace echoline::worker

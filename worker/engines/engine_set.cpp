// Distributes sequences over a worker's inference servers, and brings each policy to all of them.
#include "worker/engines/engine_set.hpp"

#include <algorithm>
#include <tuple>

#include "base/log.hpp"
#include "base/parallel.hpp"

namespace echoline::worker {
namespace {

using EngineState = FolderEngine::State;

// advance() waits this long for answers from one engine's server. The wait is short, because answers from the other
// servers stay unread meanwhile.
constexpr Duration kAwaitOneEngine = std::chrono::milliseconds(2);

}  // namespace

// Ends the servers at the same time, because each may take seconds.
EngineSet::~EngineSet() {
  for_each_parallel(engines_.size(), static_cast<unsigned>(engines_.size()),
                    [this](unsigned, std::size_t i) { engines_[i].reset(); });
}

std::size_t EngineSet::capacity() const {
  std::size_t sum = 0;
  for (const auto& engine : engines_)  // an engine that is not ready takes no further sequences
    sum += engine->state() == EngineState::kReady ? engine->capacity() : engine->sequences_in_progress();
  return sum;
}

std::ptrdiff_t EngineSet::free_places(const FolderEngine& engine) const {
  return static_cast<std::ptrdiff_t>(engine.capacity()) - static_cast<std::ptrdiff_t>(engine.sequences_in_progress());
}

// Returns the ready engine with the most free places. If none is ready, returns the one with the most free places among
// those that are not broken. Equal prompts that come one after another go to the same engine while places are free,
// because an engine reads them only once.
std::size_t EngineSet::choose_engine(const Sequence& sequence) const {
  const FolderEngine& last = *engines_[last_engine_];
  if (last.state() == EngineState::kReady && free_places(last) > 0 && sequence.prompt == last_prompt_)
    return last_engine_;
  const auto rank = [this](std::size_t i) {
    const EngineState state = engines_[i]->state();
    return std::tuple(state == EngineState::kReady, state != EngineState::kBroken, free_places(*engines_[i]));
  };
  std::size_t best = 0;
  for (std::size_t i = 1; i < engines_.size(); ++i)
    if (rank(i) > rank(best)) best = i;
  return best;
}

void EngineSet::assign(Sequence sequence) {
  last_engine_ = choose_engine(sequence);
  last_prompt_ = sequence.prompt;
  assigned_[sequence.id] = {last_engine_, sequence};
  engines_[last_engine_]->submit(std::move(sequence));
}

void EngineSet::submit(Sequence sequence) { assign(std::move(sequence)); }

std::vector<Outcome> EngineSet::poll(Duration time) {
  const TimePoint end = clock_.now() + time;
  std::vector<Outcome> outcomes;
  for (;;) {
    for (const auto& engine : engines_)
      for (Outcome& outcome : engine->poll(Duration{}))
        if (assigned_.erase(outcome.id) > 0) outcomes.push_back(std::move(outcome));
    reassign_sequences_of_broken();
    const bool is_over = !outcomes.empty() || assigned_.empty() || clock_.now() >= end;
    const bool all_are_broken = !status(), policy_waits = host_.policy_waits && *host_.policy_waits;
    if (is_over || all_are_broken || policy_waits) return outcomes;
    advance();
  }
}

void EngineSet::reassign_sequences_of_broken() {
  if (!status()) return;  // all engines are broken, so no engine can take the sequences
  for (std::size_t i = 0; i < engines_.size(); ++i) {
    FolderEngine& engine = *engines_[i];
    if (engine.state() != EngineState::kBroken || engine.sequences_in_progress() == 0) continue;
    std::vector<Sequence> sequences;
    for (const auto& [id, assigned] : assigned_)
      if (assigned.engine == i) sequences.push_back(assigned.sequence);
    log::error("engine {} of {} is given up: {}; its {} responses begin again on the others", i + 1, engines_.size(),
               engine.status().error().detail, sequences.size());
    for (Sequence& sequence : sequences) {
      engine.abort(sequence.id);
      assign(std::move(sequence));
    }
  }
}

void EngineSet::abort(std::uint64_t id) {
  const auto it = assigned_.find(id);
  if (it == assigned_.end()) return;
  engines_[it->second.engine]->abort(id);
  assigned_.erase(it);
}

std::uint64_t EngineSet::progress() const {
  std::uint64_t sum = 0;
  for (const auto& engine : engines_) sum += engine->progress();
  return sum;
}

void EngineSet::advance() {
  for (const auto& engine : engines_) engine->advance(Duration{});
  // Skips broken engines, because their advance() would return at once.
  for (std::size_t i = 0; i < engines_.size(); ++i) {
    FolderEngine& engine = *engines_[next_awaited_engine_++ % engines_.size()];
    if (engine.state() != EngineState::kBroken) return engine.advance(kAwaitOneEngine);
  }
}

Status EngineSet::advance_until(const std::function<bool()>& is_over) {
  while (!is_over()) {
    if (host_.stop && *host_.stop) return fail(Code::kCancelled, "install policy", "asked to stop");
    advance();
    if (host_.on_wait) host_.on_wait();
  }
  return status();
}

Status EngineSet::install(const overlay::Publication& publication) {
  ECHO_TRY(status());
  const auto has_any = [this](EngineState state) {
    return std::ranges::any_of(engines_, [state](const auto& engine) { return engine->state() == state; });
  };
  // The folder's files must not change while an engine loads them.
  ECHO_TRY(advance_until([&] { return !has_any(EngineState::kLoading); }));
  for (const auto& engine : engines_) engine->release_folder();
  ECHO_TRY(folder_->install(publication));
  for (const auto& engine : engines_) engine->begin_load(publication);
  if (!publication.activate) return status();  // a newer policy waits, so no engine loads this one
  // Waits until one engine is ready with the policy and none loads it, or until all are broken.
  return advance_until([&] {
    if (has_any(EngineState::kLoading)) return false;
    return has_any(EngineState::kReady) || !has_any(EngineState::kStarting);
  });
}

const Engine& EngineSet::engine_with_oldest_policy() const {
  // In the order: ready engines before others, engines with a policy before those without, older versions first.
  const auto rank = [](const FolderEngine& engine) {
    return std::tuple(engine.state() != EngineState::kReady, !engine.version(), engine.version());
  };
  return **std::ranges::min_element(engines_, [&](const auto& a, const auto& b) { return rank(*a) < rank(*b); });
}

bool EngineSet::can_take_work() const {
  return std::ranges::any_of(engines_, [](const auto& engine) { return engine->state() == EngineState::kReady; });
}

Status EngineSet::status() const {
  for (const auto& engine : engines_)
    if (engine->state() != EngineState::kBroken) return ok();
  return engines_.front()->status();
}

}  // namespace echoline::worker

// The built-in engine: generates for a batch of sequences, on the thread that calls poll(). make.cpp makes it.
#include "worker/engines/builtin.hpp"

#include "model/running_batch.hpp"
#include "model/runtime.hpp"
#include "model/transformer.hpp"
#include "worker/engines/builtin_installer.hpp"

namespace echoline::worker {
namespace {

class Builtin final : public Engine {
 public:
  Builtin(std::shared_ptr<model::Transformer> model, const BuiltinOptions& options)
      : sampling_(options.sampling),
        ends_(options.ends),
        batch_(model, {.rows_max = static_cast<std::int64_t>(options.rows_max),
                       .cache_max = options.cache_max,
                       .records_experts = options.records_experts}),
        installer_(model, static_cast<unsigned>(options.threads),
                   model::DeviceWeights::of(model, static_cast<unsigned>(options.threads))),
        policy_waits_(options.policy_waits) {
    if (!options.records_experts || !options.model.experts) return;  // no experts: Response::experts stays empty
    mixture_layers_ = static_cast<std::uint32_t>(options.model.mixture_layers());
    experts_per_token_ = static_cast<std::uint32_t>(options.model.experts->per_token);
  }

  std::size_t capacity() const override { return batch_.rows_max(); }
  std::size_t sequences_in_progress() const override { return batch_.running() + batch_.waiting() + refused_.size(); }

  void submit(Sequence sequence) override {
    model::Sequence batch_sequence{
        .id = sequence.id, .prompt = std::move(sequence.prompt), .sampling = sampling_, .ends = ends_};
    batch_sequence.sampling.tokens_max = sequence.tokens_max;
    batch_sequence.sampling.seed = sequence.seed;
    if (sequence.sampling) {
      batch_sequence.sampling.temperature = sequence.sampling->temperature;
      batch_sequence.sampling.top_p = sequence.sampling->top_p;
      batch_sequence.sampling.top_k = sequence.sampling->top_k;
      batch_sequence.sampling.min_p = 0;  // off: SequenceSampling has no such setting
      batch_sequence.sampling.eos = std::move(sequence.sampling->end_tokens);
      batch_sequence.ends = std::move(sequence.sampling->ends);
    }
    if (Status added = batch_.add(std::move(batch_sequence)); !added)
      refused_.push_back({sequence.id, std::move(added).error()});
  }

  std::vector<Outcome> poll(Duration time) override {
    std::vector<Outcome> outcomes = std::exchange(refused_, {});
    const TimePoint deadline = clock_.now() + time;
    while (outcomes.empty() && sequences_in_progress() > 0) {
      for (model::Ended& ended : batch_.step()) outcomes.push_back(to_outcome(std::move(ended)));
      ++progress_;
      const bool policy_waits = policy_waits_ && policy_waits_->load(std::memory_order_relaxed);
      if (policy_waits || clock_.now() >= deadline) break;
    }
    return outcomes;
  }

  void abort(std::uint64_t id) override {
    batch_.abort(id);
    std::erase_if(refused_, [&](const Outcome& outcome) { return outcome.id == id; });
  }

  std::uint64_t progress() const override { return progress_; }

  void decode_part(const overlay::PublicationPart& part) override { installer_.decode_part(part); }
  Status install(const overlay::Publication& publication) override {
    ECHO_TRY(installer_.install(publication));
    batch_.set_weights_version(publication.version.value);
    return ok();
  }
  std::optional<Version> version() const override { return installer_.version(); }
  const overlay::Digest& digest() const override { return installer_.digest(); }

 private:
  Outcome to_outcome(model::Ended&& ended) const {
    if (!ended.generation) {
      // kCorrupt: log-probabilities are not finite, which only the weights can cause.
      const bool caused_by_policy = ended.generation.error().code == Code::kCorrupt;
      return {.id = ended.id, .response = std::move(ended.generation).error(), .caused_by_policy = caused_by_policy};
    }
    const model::Finish finish = ended.generation->finish;
    Response response{.tokens = std::move(ended.generation->tokens),
                      .logprobs = std::move(ended.generation->logprobs),
                      .spans = {},
                      .ended = finish == model::Finish::kEos || finish == model::Finish::kStopped,
                      .experts = {mixture_layers_, experts_per_token_, std::move(ended.generation->experts)}};
    for (const model::Span& span : ended.spans) response.spans.push_back({Version{span.version}, span.end});
    return {ended.id, std::move(response)};
  }

  const SystemClock clock_;
  model::Sampling sampling_;
  std::function<bool(std::span<const model::Token>)> ends_;
  model::RunningBatch batch_;
  Installer installer_;
  const std::atomic<bool>* policy_waits_;                     // may be null
  std::vector<Outcome> refused_;                              // sequences that the batch refused; poll() returns them
  std::uint32_t mixture_layers_ = 0, experts_per_token_ = 0;  // of Response::experts; 0: they are not recorded
  std::uint64_t progress_ = 0;
};

}  // namespace

Result<std::unique_ptr<Engine>> make_builtin_engine(const BuiltinOptions& options) {
  model::use_threads(options.threads);
  model::keep_freed_memory();  // each token allocates the same sizes again
  ECHO_ASSIGN(const torch::Device device, model::device_named(options.device));
  // The model has no weights yet: the policy comes from the learner, in bf16.
  ECHO_ASSIGN(std::shared_ptr<model::Transformer> model, model::create(options.model, device, torch::kBFloat16));
  return std::unique_ptr<Engine>(std::make_unique<Builtin>(std::move(model), options));
}

}  // namespace echoline::worker

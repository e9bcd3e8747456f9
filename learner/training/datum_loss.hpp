// Losses of a client's own examples (learner/datum_trainer.hpp) and their gradients. Private to learner/training/.
#pragma once
#include "learner/datum_trainer.hpp"
#include "learner/training/optimizer.hpp"
#include "model/transformer.hpp"

namespace echoline::learner {

// Computes the batch's loss in parts of at most `microbatch_tokens` tokens. Unless it is forward_only, adds the
// gradient to that which the optimizer has gathered. kInvalid: an example does not fit the model.
Result<DatumResult> compute_datum_loss(model::Transformer& model, AdamW& optimizer, const DatumBatch& batch,
                                       std::int64_t microbatch_tokens);

// kInvalid names the first setting out of range.
Result<OptimizerConfig> optimizer_config(const AdamSettings& settings, const OptimizerConfig& run);

}  // namespace echoline::learner

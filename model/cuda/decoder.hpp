// Decodes on a GPU: a step samples one more token for many rows. All kernels of a step are recorded once (as a CUDA
// graph) and then replayed, because launching each kernel takes longer than its work. A step copies only token ids,
// page numbers, temperatures and uniform numbers to the device, and tokens and log-probabilities back. Private to
// model/.
//
// A recording is valid for one number of rows and for the addresses of weights and cache. The number of rows is rounded
// up, so that there are few recordings; surplus rows do nothing. If an address changes, all recordings are made again.
#pragma once
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "model/cuda/backend.hpp"
#include "model/paged_cache.hpp"
#include "model/sampler.hpp"

namespace echoline::model::cuda {

struct DecodeRow {
  Token id;           // the row's last token; its keys and values are not in the cache yet
  const Pages* text;  // pages of the tokens before it, with a free slot for `id` in a page that no other row shares
  SampleRequest request;
};

// Use from the model's thread.
class Decoder {
 public:
  // A decoder for the model; null if the model is on a CPU, check() fails or the device cannot be opened. Logs the
  // reason, except for a CPU.
  static std::unique_ptr<Decoder> open_if_supported(Transformer& model, PagedCache& cache);
  // The model and the cache must outlive the decoder. Requires that check() succeeds.
  Decoder(Transformer& model, PagedCache& cache, std::unique_ptr<DeviceBackend> backend);
  ~Decoder();

  // kInvalid, with the reason, if the kernels do not support the model.
  static Status check(const Transformer& model);

  // Runs a pass over each row's last token and samples the next one, by the rules of sample_tokens(). After a failure,
  // which is logged, the result is absent, in this step and the next 511: the caller must use libtorch's operations.
  std::optional<SampledTokens> step(std::span<const DecodeRow> rows);

  // Runs a pass over right-padded rows ids (int64 [rows, tokens], on the CPU) and stores the keys and values of the
  // first lengths[r] tokens of row r in page_lists[r]. Returns the normalised hidden states of the rows' last tokens
  // [rows, hidden]; absent as in step(). Throws c10::Error if memory does not suffice.
  std::optional<torch::Tensor> prefill(const torch::Tensor& ids, const std::vector<std::int64_t>& lengths,
                                       const std::vector<const Pages*>& page_lists);

  std::size_t recordings() const { return recordings_.size(); }
  std::size_t kernels() const { return kernels_; }  // number of kernels of the last step

 private:
  struct Buffers;
  SampledTokens attempt_step(std::span<const DecodeRow> rows);
  torch::Tensor attempt_prefill(const torch::Tensor& ids, const std::vector<std::int64_t>& lengths,
                                const std::vector<const Pages*>& page_lists);
  // Logs "`what` N rows failed: `why`", and disables the kernels for some steps.
  void switch_to_libtorch(std::string_view what, std::size_t rows, std::string_view why);
  // Makes the buffers large enough. If they must grow, discards the recordings.
  void allocate_buffers(std::int64_t rows, std::int64_t pages);
  // The addresses that a recording contains: of weights, cache, and rotations for at least `positions` positions.
  std::vector<const void*> addresses(std::int64_t positions);
  void queue_step(std::int64_t rows);
  void multiply_gate_up(const Transformer::Layer& layer, const torch::Tensor& x, const torch::Tensor& out);
  void project(std::int64_t rows, const torch::Tensor& input, const torch::Tensor& norm, const torch::Tensor& weight,
               const torch::Tensor& bias, const torch::Tensor& output, bool adding);

  Transformer& model_;
  PagedCache& cache_;
  std::unique_ptr<DeviceBackend> backend_;
  std::unique_ptr<Buffers> buffers_;
  std::vector<const void*> addresses_;  // addresses() when the recordings were made
  std::map<std::int64_t, std::unique_ptr<DeviceBackend::Recording>> recordings_;  // by number of rows
  std::int64_t steps_until_retry_ = 0;  // above 0: the kernels are disabled after a failure
  std::size_t kernels_ = 0;
};

}  // namespace echoline::model::cuda

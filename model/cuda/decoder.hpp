// Decoding on a GPU: one more token for many rows. All kernels of a step are recorded once and then replayed. Only
// token ids, pages and uniform numbers are copied to the device, tokens and log-probabilities back. Private to model/.
//
// A recording is for one number of rows (there are few such numbers; surplus rows do nothing) and for the addresses of
// weights and cache. It is made again after these have moved.
#pragma once
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "model/cuda/machine.hpp"
#include "model/paged_cache.hpp"
#include "model/sampler.hpp"

namespace echoline::model::cuda {

struct DecodeRow {
  Token id;           // the last token; its keys and values are not in the pages yet
  const Pages* text;  // has a place of its own for them
  Draw draw;
};

// Use from the model's thread.
class Decoder {
 public:
  // Null for a model on a CPU, of another type than bf16, or of an unsupported shape, and if the machine cannot be
  // opened. Except on a CPU, the reason is logged.
  static std::unique_ptr<Decoder> of(Transformer& model, PagedCache& cache);
  // Both must outlive it. Requires that check() succeeds.
  Decoder(Transformer& model, PagedCache& cache, std::unique_ptr<Machine> machine);
  ~Decoder();

  // kInvalid: why the kernels do not support the model.
  static Status check(const Transformer& model);

  // As draw(). Nothing after a failure, which is logged; the caller may use another way, or try again later.
  std::optional<Drawn> step(std::span<const DecodeRow> rows);

  // Reads the texts of right-padded rows ids (int64 [rows, tokens], on the CPU), the first lengths[r] tokens of row r,
  // and stores their keys and values in texts[r]. Returns the last tokens' normalised hidden states [rows, hidden].
  // Nothing: as in step(). Throws c10::Error if memory does not suffice.
  std::optional<torch::Tensor> read(const torch::Tensor& ids, const std::vector<std::int64_t>& lengths,
                                    const std::vector<const Pages*>& texts);

  std::size_t recordings() const { return recordings_.size(); }
  std::size_t kernels() const { return kernels_; }  // of the last step

 private:
  struct Buffers;
  Drawn attempt(std::span<const DecodeRow> rows);
  torch::Tensor attempt_to_read(const torch::Tensor& ids, const std::vector<std::int64_t>& lengths,
                                const std::vector<const Pages*>& texts);
  void pause(std::string_view what, std::size_t rows, std::string_view why);
  void provide(std::int64_t rows, std::int64_t pages);
  std::vector<const void*> addresses(std::int64_t positions);
  void queue(std::int64_t rows);
  void multiply_gate_up(const Transformer::Layer& layer, const torch::Tensor& x, const torch::Tensor& out);
  void project(std::int64_t rows, const torch::Tensor& from, const torch::Tensor& norm, const torch::Tensor& weight,
               const torch::Tensor& bias, const torch::Tensor& to, bool adding);

  Transformer& model_;
  PagedCache& cache_;
  std::unique_ptr<Machine> machine_;
  std::unique_ptr<Buffers> buffers_;
  std::vector<const void*> addresses_;                                      // used in the recordings
  std::map<std::int64_t, std::unique_ptr<Machine::Recording>> recordings_;  // by number of rows
  std::int64_t pause_ = 0;                                                  // steps until the next attempt
  std::size_t kernels_ = 0;
};

}  // namespace echoline::model::cuda

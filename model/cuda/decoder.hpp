// Decoding on a GPU. One token more for many rows: all kernels of a step are recorded once and replayed from then on,
// and only token ids, pages and uniform numbers cross to the device, tokens and log-probabilities back. Private to
// model/.
//
// A recording is for a number of rows (of which there are few: the rows behind the last one do nothing) and for the
// addresses of weights and cache, and is made again where these have moved.
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
  Token id;           // the last token, whose keys and values are not in its pages yet
  const Pages* text;  // with a place of its own for them
  Draw draw;
};

// One thread, that of the model.
class Decoder {
 public:
  // Nothing for a model on a CPU, of another type than bf16, of a shape that the kernels are not for, or where the
  // machine cannot be opened; except on a CPU, the log says why.
  static std::unique_ptr<Decoder> of(Transformer& model, PagedCache& cache);
  // Both outlive it. check() has passed.
  Decoder(Transformer& model, PagedCache& cache, std::unique_ptr<Machine> machine);
  ~Decoder();

  // kInvalid: what about the model the kernels are not for.
  static Status check(const Transformer& model);

  // As draw() gives it. Nothing: something failed, which the log has; another way may work, and so may this one later.
  std::optional<Drawn> step(std::span<const DecodeRow> rows);

  // Reads the texts of right-padded rows ids (int64 [rows, tokens], on the CPU), the first lengths[r] tokens of row r,
  // and keeps their keys and values in texts[r]. Returns the last tokens' normalised hidden states [rows, hidden].
  // Nothing: as step(). Throws c10::Error where memory does not suffice.
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
  std::vector<const void*> addresses_;                                      // that the recordings are for
  std::map<std::int64_t, std::unique_ptr<Machine::Recording>> recordings_;  // by rows
  std::int64_t pause_ = 0;                                                  // steps until the next attempt
  std::size_t kernels_ = 0;
};

}  // namespace echoline::model::cuda

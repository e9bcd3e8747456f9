// The kernels of training_kernels.hpp on tensors: norms, rotations, the gate, the softmax over the vocabulary and the
// optimizer's update, each as one kernel. Only in programs whose libtorch has CUDA and that were built with a CUDA
// compiler.
//
// All work is queued on libtorch's current stream and nothing waits for the device. Functions throw c10::Error for
// tensors of other shapes and where a kernel cannot be started.
#pragma once
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "model/torch.hpp"

namespace echoline::model::training {

// Whether this program has the kernels.
bool have_kernels();
// Turns them off and on, for comparisons in tests and benchmarks. On at first.
void use_kernels(bool on);
// Whether the kernels take tensors like x: on a GPU of compute capability 8.0 or newer, in bf16 or fp32, whose last
// dimension is a multiple of 8.
bool kernels_take(const torch::Tensor& x);

// Bytes of the memory of a device; nothing where it cannot be told.
std::optional<std::uint64_t> memory_of(int index);

// x / rms(x), rounded to x's type, times the weight [width]: x [..., width]. With an `addend` (unless undefined) like x
// of the sum of both, which is the second of what is returned; x otherwise.
std::pair<torch::Tensor, torch::Tensor> norm(const torch::Tensor& x, const torch::Tensor& addend,
                                             const torch::Tensor& weight, double eps);
// The gradients of x, or of the sum, and of the weight. `beside`: what is added to the first, unless undefined.
std::pair<torch::Tensor, torch::Tensor> norm_backward(const torch::Tensor& x, const torch::Tensor& weight,
                                                      const torch::Tensor& slope, const torch::Tensor& beside,
                                                      double eps);

// Norm (unless undefined) and rotation of queries and keys; values are copied: qkv [tokens, (heads + 2 kv_heads) * dim]
// -> [tokens, heads + 2 kv_heads, dim]. dim: a multiple of 4, at most 256.
struct Heads {
  torch::Tensor cos, sin;        // fp32 [positions, dim]; row t has position t % positions
  torch::Tensor q_norm, k_norm;  // [dim] of qkv's type, or undefined
  std::int64_t heads, kv_heads;
  double eps;
};
bool rotates(const torch::Tensor& qkv, const Heads& heads);
torch::Tensor rotate(const torch::Tensor& qkv, const Heads& heads);
// The gradients of qkv and of the norms. Slopes: [rows, heads of a kind, dim], the last two dimensions dense. Keys and
// values of token t come from all rows copies[copies_first[t]] to copies[copies_first[t + 1]] (int32); undefined: from
// row t. They may have a multiple of kv_heads heads, as gather() makes them.
struct HeadSlopes {
  torch::Tensor qkv, q_norm, k_norm;
};
HeadSlopes rotate_backward(const torch::Tensor& qkv, const Heads& heads, const torch::Tensor& q_slope,
                           const torch::Tensor& k_slope, const torch::Tensor& v_slope,
                           const torch::Tensor& copies_first, const torch::Tensor& copies);

// from[rows], each head `repeats` times one behind the other: from [tokens, heads, dim], dense but for the first
// dimension; rows int32.
torch::Tensor gather(const torch::Tensor& from, const torch::Tensor& rows, std::int64_t repeats);

// silu(gate), rounded, times up: [rows, width] each, dense but for the first dimension and of the same strides.
torch::Tensor gate(const torch::Tensor& gate, const torch::Tensor& up);
// Writes the gradients of both, which have their strides.
void gate_backward(const torch::Tensor& gate, const torch::Tensor& up, const torch::Tensor& slope,
                   const torch::Tensor& gate_slope, const torch::Tensor& up_slope);

// Under softmax(logits / temperature), rows of [rows, vocabulary]: log-probabilities of the targets, entropies and
// logarithms of the sums, each fp32 [rows].
void score(const torch::Tensor& logits, const torch::Tensor& targets, double temperature, const torch::Tensor& logprobs,
           const torch::Tensor& entropies, const torch::Tensor& log_sums);
// Replaces logits by their gradients, for slopes [rows] of the log-probabilities.
void score_backward(const torch::Tensor& logits, const torch::Tensor& targets, double temperature,
                    const torch::Tensor& log_sums, const torch::Tensor& slopes);

// The tensors of an optimizer, each on the same device and dense.
struct Updated {
  torch::Tensor parameter;         // bf16 or fp32
  torch::Tensor master;            // fp32
  torch::Tensor moment1, moment2;  // fp32; or int8 and uint8
  torch::Tensor scale1, scale2;    // fp32, of blocks of 256; or undefined
  torch::Tensor gradient;          // fp32; undefined: zeros
  torch::Tensor fresh;             // bf16, for add_gradients()
  bool decays = false, replaces = false;
};
// sum += fresh, or sum = fresh where it replaces: one kernel.
void add_gradients(const std::vector<Updated>& tensors);
// The sum of squares of all gradients: a tensor fp64 of one element. Squares of 8 values are added in fp32.
torch::Tensor sum_of_squares(const std::vector<Updated>& tensors);
struct UpdateNumbers {
  double clip, beta1, beta2, correction1, correction2, epsilon, rate, weight_decay;
};
// One AdamW update, bit for bit as libtorch's kernels for CUDA make it one after the other
// (learner/training/optimizer). thresholds: fp32 [256] where moments have scales.
void update(const std::vector<Updated>& tensors, const UpdateNumbers& numbers, const torch::Tensor& thresholds);

}  // namespace echoline::model::training

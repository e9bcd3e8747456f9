// Runs the kernels of training_kernels.hpp on tensors: norms, rotations, the gate, the softmax over the vocabulary and
// the optimizer's update, each as one kernel. Only in programs built with a CUDA compiler whose libtorch has CUDA.
//
// All work is queued on libtorch's current stream, without waiting. Functions throw c10::Error for tensors of other
// shapes and if a kernel cannot be started.
#pragma once
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "model/torch.hpp"

namespace echoline::model::training {

// Whether this program has the kernels.
bool have_kernels();
// Turns the kernels off or on, so that tests and benchmarks can compare. Initially they are on.
void use_kernels(bool enabled);
// Whether the kernels support tensors like x: on a GPU of compute capability 8.0 or newer, in bf16 or fp32, with a last
// dimension that is a multiple of 8.
bool kernels_support(const torch::Tensor& x);

// The total memory of the CUDA device `index` in bytes; nothing if it is unknown.
std::optional<std::uint64_t> total_memory_of(int index);

// Adds `addend`, which has the shape and type of x, to x [..., width], unless it is undefined. Returns the norm of the
// sum (sum / rms(sum), rounded to its type, times the weight [width]) and the sum itself.
std::pair<torch::Tensor, torch::Tensor> norm(const torch::Tensor& x, const torch::Tensor& addend,
                                             const torch::Tensor& weight, double eps);
// In all names below, a slope is the gradient of the loss with respect to a value.
//
// The gradients of x (which here is the sum) and of the weight, from the slope of the norm. `added_slope` is added to
// the gradient of x, unless it is undefined.
std::pair<torch::Tensor, torch::Tensor> norm_backward(const torch::Tensor& x, const torch::Tensor& weight,
                                                      const torch::Tensor& slope, const torch::Tensor& added_slope,
                                                      double eps);

struct RotationParameters {
  torch::Tensor cos, sin;        // fp32 [positions, dim]; row t has position t % positions
  torch::Tensor q_norm, k_norm;  // [dim] of qkv's type, or undefined
  std::int64_t heads, kv_heads;
  double eps;
};
// Whether rotate() and rotate_backward() can be called.
bool supports_rotate(const torch::Tensor& qkv, const RotationParameters& parameters);
// Applies norm (unless undefined) and rotation to queries and keys, and copies values: qkv [tokens, (heads + 2
// kv_heads) * dim] -> [tokens, heads + 2 kv_heads, dim]. dim: a multiple of 4, at most 256.
torch::Tensor rotate(const torch::Tensor& qkv, const RotationParameters& parameters);
// The gradients of qkv and of the norms.
struct HeadSlopes {
  torch::Tensor qkv, q_norm, k_norm;
};
// Returns the gradients of rotate()'s inputs. q_slope, k_slope and v_slope are [rows, heads, dim], dense in the last
// two dimensions. If gather() has copied the key and value of each token t to several rows, these are rows copies[i]
// for i from copies_first[t] to below copies_first[t + 1] (both int32), and their slopes are summed. If copies_first
// and `copies` are undefined, they are row t. k_slope and v_slope may have a multiple of kv_heads heads, as gather()
// makes them.
HeadSlopes rotate_backward(const torch::Tensor& qkv, const RotationParameters& parameters, const torch::Tensor& q_slope,
                           const torch::Tensor& k_slope, const torch::Tensor& v_slope,
                           const torch::Tensor& copies_first, const torch::Tensor& copies);

// A copy of source[rows], with each head repeated `repeats` times consecutively. `source` is [tokens, heads, dim],
// dense except in the first dimension; `rows` is int32.
torch::Tensor gather(const torch::Tensor& source, const torch::Tensor& rows, std::int64_t repeats);

// silu(gate), rounded, times `up`. Both are [rows, width], dense except in the first dimension, with equal strides.
torch::Tensor gate(const torch::Tensor& gate, const torch::Tensor& up);
// Writes the gradients of gate and up to gate_slope and up_slope, which have the strides of gate and up.
void gate_backward(const torch::Tensor& gate, const torch::Tensor& up, const torch::Tensor& slope,
                   const torch::Tensor& gate_slope, const torch::Tensor& up_slope);

// For each row of logits [rows, vocabulary], writes the log-probability of its target under softmax(logits /
// temperature), the entropy, and the logarithm of the softmax's denominator, each fp32 [rows].
void score(const torch::Tensor& logits, const torch::Tensor& targets, double temperature, const torch::Tensor& logprobs,
           const torch::Tensor& entropies, const torch::Tensor& log_sums);
// Replaces logits by their gradients, given the slopes [rows] of the log-probabilities.
void score_backward(const torch::Tensor& logits, const torch::Tensor& targets, double temperature,
                    const torch::Tensor& log_sums, const torch::Tensor& slopes);

// A parameter with its optimizer state and gradient, all dense on the same device.
struct TensorUpdate {
  torch::Tensor parameter;         // bf16 or fp32
  torch::Tensor master;            // fp32
  torch::Tensor moment1, moment2;  // fp32; or int8 and uint8
  torch::Tensor scale1, scale2;    // of 8-bit moments: fp32, per block of 256 values; otherwise undefined
  torch::Tensor gradient;          // fp32; undefined: zeros
  torch::Tensor new_gradient;      // bf16, for add_gradients(), which adds it to `gradient`
  bool decays = false;             // weight decay applies
  bool replaces = false;           // for add_gradients(): `gradient` has no value yet, so new_gradient replaces it
};
// gradient += new_gradient, or gradient = new_gradient if `replaces`: one kernel for all tensors.
void add_gradients(const std::vector<TensorUpdate>& tensors);
// The sum of the squares of all gradients, as an fp64 tensor of one element. Groups of eight squares are summed in
// fp32, and their sums in fp64.
torch::Tensor sum_of_squares(const std::vector<TensorUpdate>& tensors);
// Factors of the update; learner/training/optimizer computes them. Gradients are multiplied by `clip`, unless it is 1
// or more. correctionN = 1 - betaN^step (N = 1, 2) is AdamW's bias correction.
struct AdamWFactors {
  double clip, beta1, beta2, correction1, correction2, epsilon, rate, weight_decay;  // rate: the learning rate
};
// One AdamW update, bit for bit equal to the sequence of libtorch's CUDA kernels (learner/training/optimizer).
// thresholds: fp32 [256], random numbers in [0, 1) for rounding 8-bit moments; undefined unless moments have scales.
void update(const std::vector<TensorUpdate>& tensors, const AdamWFactors& factors, const torch::Tensor& thresholds);

}  // namespace echoline::model::training

// Implements training_device.hpp in programs without the kernels: nothing is supported, and a call throws.
#include "model/cuda/training_device.hpp"

namespace echoline::model::training {
namespace {

using torch::Tensor;

[[noreturn]] void throw_no_kernels() { TORCH_CHECK(false, "this program was built without CUDA kernels"); }

}  // namespace

bool have_kernels() { return false; }
void use_kernels(bool) {}
bool kernels_support(const Tensor&) { return false; }
std::optional<std::uint64_t> total_memory_of(int) { return std::nullopt; }
bool supports_rotate(const Tensor&, const RotationParameters&) { return false; }
std::pair<Tensor, Tensor> norm(const Tensor&, const Tensor&, const Tensor&, double) { throw_no_kernels(); }
std::pair<Tensor, Tensor> norm_backward(const Tensor&, const Tensor&, const Tensor&, const Tensor&, double) {
  throw_no_kernels();
}
Tensor rotate(const Tensor&, const RotationParameters&) { throw_no_kernels(); }
HeadSlopes rotate_backward(const Tensor&, const RotationParameters&, const Tensor&, const Tensor&, const Tensor&,
                           const Tensor&, const Tensor&) {
  throw_no_kernels();
}
Tensor gather(const Tensor&, const Tensor&, std::int64_t) { throw_no_kernels(); }
Tensor gate(const Tensor&, const Tensor&) { throw_no_kernels(); }
void gate_backward(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&) { throw_no_kernels(); }
void score(const Tensor&, const Tensor&, double, const Tensor&, const Tensor&, const Tensor&) { throw_no_kernels(); }
void score_backward(const Tensor&, const Tensor&, double, const Tensor&, const Tensor&) { throw_no_kernels(); }
void add_gradients(const std::vector<TensorUpdate>&) { throw_no_kernels(); }
Tensor sum_of_squares(const std::vector<TensorUpdate>&) { throw_no_kernels(); }
void update(const std::vector<TensorUpdate>&, const AdamWFactors&, const Tensor&) { throw_no_kernels(); }

}  // namespace echoline::model::training

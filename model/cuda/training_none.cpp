// Implements training_device.hpp in programs without the kernels.
#include "model/cuda/training_device.hpp"

namespace echoline::model::training {
namespace {

using torch::Tensor;

[[noreturn]] void none() { TORCH_CHECK(false, "this program was built without CUDA kernels"); }

}  // namespace

bool have_kernels() { return false; }
void use_kernels(bool) {}
bool kernels_support(const Tensor&) { return false; }
std::optional<std::uint64_t> total_memory_of(int) { return std::nullopt; }
bool supports_rotate(const Tensor&, const RotationParameters&) { return false; }
std::pair<Tensor, Tensor> norm(const Tensor&, const Tensor&, const Tensor&, double) { none(); }
std::pair<Tensor, Tensor> norm_backward(const Tensor&, const Tensor&, const Tensor&, const Tensor&, double) { none(); }
Tensor rotate(const Tensor&, const RotationParameters&) { none(); }
HeadSlopes rotate_backward(const Tensor&, const RotationParameters&, const Tensor&, const Tensor&, const Tensor&,
                           const Tensor&, const Tensor&) {
  none();
}
Tensor gather(const Tensor&, const Tensor&, std::int64_t) { none(); }
Tensor gate(const Tensor&, const Tensor&) { none(); }
void gate_backward(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&) { none(); }
void score(const Tensor&, const Tensor&, double, const Tensor&, const Tensor&, const Tensor&) { none(); }
void score_backward(const Tensor&, const Tensor&, double, const Tensor&, const Tensor&) { none(); }
void add_gradients(const std::vector<TensorUpdate>&) { none(); }
Tensor sum_of_squares(const std::vector<TensorUpdate>&) { none(); }
void update(const std::vector<TensorUpdate>&, const AdamWFactors&, const Tensor&) { none(); }

}  // namespace echoline::model::training

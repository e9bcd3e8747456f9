// Checks and launches the kernels of a training pass on a GPU, for device_ops.
#include "model/cuda/training_device.hpp"

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>

#include "model/cuda/training_launch.hpp"

namespace echoline::model::training {

using torch::Tensor;

namespace {

std::atomic<bool> kernels_enabled = true;

// Whether the device meets the requirements of the kernels and of libtorch's flash attention: compute capability 8.0.
bool is_supported(const torch::Device& device) {
  static std::mutex mutex;
  static std::map<int, bool> support_by_device;
  const std::lock_guard lock(mutex);
  const int index = device.index() < 0 ? 0 : device.index();  // below 0: "cuda" without an index
  if (const auto it = support_by_device.find(index); it != support_by_device.end()) return it->second;
  int major = 0;
  const bool is_supported_here =
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index) == cudaSuccess && major >= 8;
  return support_by_device[index] = is_supported_here;
}

// Queues the kernel of `job` on the device of `tensor`.
template <class Job>
void start(const Job& job, const Tensor& tensor) {
  const c10::cuda::CUDAGuard guard(tensor.device());
  const cudaError_t error = launch(job, c10::cuda::getCurrentCUDAStream(tensor.device().index()).stream());
  TORCH_CHECK(error == cudaSuccess, "a training kernel cannot be started: ", cudaGetErrorString(error));
}

// Calls f(T{}) with the type T of x's values.
template <class F>
void with_type_of(const Tensor& x, const F& f) {
  if (x.scalar_type() == torch::kBFloat16)
    f(Bf16{});
  else
    f(float{});
}

template <class T>
T* data(const Tensor& tensor) {
  return tensor.defined() ? static_cast<T*>(tensor.data_ptr()) : nullptr;
}
float* floats(const Tensor& tensor) { return data<float>(tensor); }

void check_like(const Tensor& a, const Tensor& b) {
  TORCH_CHECK(a.is_cuda() && b.is_cuda() && a.scalar_type() == b.scalar_type(),
              "tensors of different devices or types");
}
void check_fp32(const Tensor& tensor) {
  TORCH_CHECK(tensor.is_cuda() && tensor.scalar_type() == torch::kFloat && tensor.is_contiguous(),
              "not dense fp32 on a device");
}

// The column sums of the fp32 matrix `sums`, in the type of `like`.
Tensor column_sums_of(const Tensor& sums, const Tensor& like) {
  const Tensor out = torch::empty({sums.size(1)}, like.options().requires_grad(false));
  with_type_of(like, [&](auto type) {
    using T = decltype(type);
    start(ColumnSumsJob<T>{.sums = floats(sums), .out = data<T>(out), .rows = sums.size(0), .width = sums.size(1)},
          sums);
  });
  return out;
}

// The number of parts of `part_size` items that `count` items need.
std::int64_t part_count(std::int64_t count, std::int64_t part_size) { return (count + part_size - 1) / part_size; }

// An uninitialised fp32 matrix on x's device.
Tensor fp32_like(const Tensor& x, std::int64_t rows, std::int64_t width) {
  return torch::empty({rows, width}, x.options().dtype(torch::kFloat).requires_grad(false));
}

template <class T>
RotateJob<T> rotate_job(const Tensor& qkv, const RotationParameters& parameters) {
  const std::int64_t all_heads = parameters.heads + 2 * parameters.kv_heads;
  return {.x = data<T>(qkv),
          .out = nullptr,
          .cos = floats(parameters.cos),
          .sin = floats(parameters.sin),
          .q_norm = data<T>(parameters.q_norm),
          .k_norm = data<T>(parameters.k_norm),
          .tokens = qkv.size(0),
          .positions = parameters.cos.size(0),
          .heads = static_cast<int>(parameters.heads),
          .kv_heads = static_cast<int>(parameters.kv_heads),
          .dim = static_cast<int>(qkv.size(1) / all_heads),
          .eps = static_cast<float>(parameters.eps)};
}

// The optimizer's tensors as entries on the device, for kernels that process all tensors in parts of kUpdatePart
// values.
struct Table {
  Tensor entries;
  std::int64_t count = 0, parts = 0;
  const UpdateEntry* data() const { return static_cast<const UpdateEntry*>(entries.data_ptr()); }
};

Table table_of(const std::vector<TensorUpdate>& tensors) {
  Table table;
  table.count = static_cast<std::int64_t>(tensors.size());
  // Pinned memory of this call only. libtorch does not reuse it before the copy to the device is done.
  const auto bytes = static_cast<std::int64_t>(tensors.size() * sizeof(UpdateEntry));
  const Tensor host = torch::empty({bytes}, torch::TensorOptions().dtype(torch::kByte).pinned_memory(true));
  auto* entry = reinterpret_cast<UpdateEntry*>(host.data_ptr());
  torch::Device device = torch::kCPU;
  for (const TensorUpdate& tensor_update : tensors) {
    // A tensor of the right size that is defined: add_gradients() sets no master, and a gradient of zeros is undefined.
    const Tensor& sized_tensor = tensor_update.gradient.defined() ? tensor_update.gradient : tensor_update.master;
    device = sized_tensor.device();
    bool is_aligned = true;
    for (const Tensor* tensor :
         {&tensor_update.parameter, &tensor_update.master, &tensor_update.moment1, &tensor_update.moment2,
          &tensor_update.scale1, &tensor_update.scale2, &tensor_update.gradient, &tensor_update.new_gradient})
      if (tensor->defined()) {
        TORCH_CHECK(tensor->is_contiguous() && tensor->device() == device,
                    "a tensor of the optimizer is not dense, or on another device");
        is_aligned &= reinterpret_cast<std::uintptr_t>(tensor->data_ptr()) % 16 == 0;  // for loads of 16 bytes
      }
    *entry++ = {.parameter = data<void>(tensor_update.parameter),
                .master = floats(tensor_update.master),
                .moment1 = data<void>(tensor_update.moment1),
                .moment2 = data<void>(tensor_update.moment2),
                .scale1 = floats(tensor_update.scale1),
                .scale2 = floats(tensor_update.scale2),
                .gradient = floats(tensor_update.gradient),
                .new_gradient = data<Bf16>(tensor_update.new_gradient),
                .count = sized_tensor.numel(),
                .first_part = table.parts,
                .parameter_is_fp32 =
                    tensor_update.parameter.defined() && tensor_update.parameter.scalar_type() == torch::kFloat,
                .decays = tensor_update.decays,
                .replaces = tensor_update.replaces,
                .aligned = is_aligned};
    table.parts += part_count(sized_tensor.numel(), kUpdatePart);
  }
  table.entries = host.to(device, /*non_blocking=*/true);
  return table;
}

}  // namespace

bool have_kernels() { return true; }
void use_kernels(bool enabled) { kernels_enabled = enabled; }

bool kernels_support(const Tensor& x) {
  const auto type = x.scalar_type();
  return kernels_enabled && x.is_cuda() && (type == torch::kBFloat16 || type == torch::kFloat) && x.dim() > 0 &&
         x.size(-1) % 8 == 0 && x.numel() > 0 && is_supported(x.device());
}

std::optional<std::uint64_t> total_memory_of(int index) {
  cudaDeviceProp properties;
  if (cudaGetDeviceProperties(&properties, index) != cudaSuccess) return std::nullopt;
  return properties.totalGlobalMem;
}

std::pair<Tensor, Tensor> norm(const Tensor& input, const Tensor& optional_addend, const Tensor& weight, double eps) {
  const Tensor x = input.contiguous(), dense_weight = weight.contiguous(), out = torch::empty_like(x);
  const Tensor addend = optional_addend.defined() ? optional_addend.contiguous() : Tensor();
  const Tensor sum = optional_addend.defined() ? torch::empty_like(x) : Tensor();
  check_like(x, dense_weight);
  if (optional_addend.defined()) {
    check_like(x, addend);
    TORCH_CHECK(x.sizes() == addend.sizes(), "an addend of other sizes");
  }
  with_type_of(x, [&](auto type) {
    using T = decltype(type);
    const std::int64_t width = x.size(-1);
    start(NormJob<T>{.x = data<T>(x),
                     .weight = data<T>(dense_weight),
                     .out = data<T>(out),
                     .addend = data<T>(addend),
                     .sum = data<T>(sum),
                     .rows = x.numel() / width,
                     .width = width,
                     .eps = static_cast<float>(eps)},
          x);
  });
  return {out, optional_addend.defined() ? sum : input};
}

std::pair<Tensor, Tensor> norm_backward(const Tensor& input, const Tensor& weight, const Tensor& slope,
                                        const Tensor& optional_added_slope, double eps) {
  const Tensor x = input.contiguous(), dense_weight = weight.contiguous(), dense_slope = slope.contiguous(),
               x_slope = torch::empty_like(x);
  const Tensor added_slope = optional_added_slope.defined() ? optional_added_slope.contiguous() : Tensor();
  check_like(x, dense_weight);
  check_like(x, dense_slope);
  if (optional_added_slope.defined()) check_like(x, added_slope);
  const std::int64_t width = x.size(-1), rows = x.numel() / width;
  const Tensor sums = fp32_like(x, part_count(rows, kNormBackwardRows), width);
  with_type_of(x, [&](auto type) {
    using T = decltype(type);
    start(NormBackwardJob<T>{.x = data<T>(x),
                             .weight = data<T>(dense_weight),
                             .slope = data<T>(dense_slope),
                             .added_slope = data<T>(added_slope),
                             .x_slope = data<T>(x_slope),
                             .sums = floats(sums),
                             .rows = rows,
                             .width = width,
                             .eps = static_cast<float>(eps)},
          x);
  });
  return {x_slope, column_sums_of(sums, dense_weight)};
}

bool supports_rotate(const Tensor& qkv, const RotationParameters& parameters) {
  const std::int64_t dim = qkv.size(1) / (parameters.heads + 2 * parameters.kv_heads);
  const auto fits = [&](const Tensor& norm) { return !norm.defined() || norm.scalar_type() == qkv.scalar_type(); };
  return kernels_support(qkv) && dim % 4 == 0 && dim <= kDimMax && fits(parameters.q_norm) && fits(parameters.k_norm) &&
         parameters.q_norm.defined() == parameters.k_norm.defined();
}

Tensor rotate(const Tensor& input, const RotationParameters& parameters) {
  const Tensor qkv = input.contiguous();
  const std::int64_t all_heads = parameters.heads + 2 * parameters.kv_heads;
  check_fp32(parameters.cos);
  check_fp32(parameters.sin);
  const Tensor out =
      torch::empty({qkv.size(0), all_heads, qkv.size(1) / all_heads}, qkv.options().requires_grad(false));
  with_type_of(qkv, [&](auto type) {
    using T = decltype(type);
    RotateJob<T> job = rotate_job<T>(qkv, parameters);
    job.out = data<T>(out);
    start(job, qkv);
  });
  return out;
}

HeadSlopes rotate_backward(const Tensor& input, const RotationParameters& parameters, const Tensor& q_slope,
                           const Tensor& k_slope, const Tensor& v_slope, const Tensor& copies_first,
                           const Tensor& copies) {
  const Tensor qkv = input.contiguous(), slope = torch::empty_like(qkv);
  const std::int64_t all_heads = parameters.heads + 2 * parameters.kv_heads, dim = qkv.size(1) / all_heads;
  for (const Tensor* tensor : {&q_slope, &k_slope, &v_slope}) {
    check_like(qkv, *tensor);
    // The kernel loads two values at a time, so the stride of rows must be even.
    TORCH_CHECK(tensor->dim() == 3 && tensor->size(2) == dim && tensor->stride(2) == 1 && tensor->stride(1) == dim &&
                    tensor->stride(0) % 2 == 0,
                "slopes of heads are not dense rows");
  }
  // The gradients of both norms, side by side.
  const Tensor sums = fp32_like(qkv, part_count(qkv.size(0), kRotateBackwardTokens), 2 * dim);
  with_type_of(qkv, [&](auto type) {
    using T = decltype(type);
    start(RotateBackwardJob<T>{.forward = rotate_job<T>(qkv, parameters),
                               .q_slope = data<T>(q_slope),
                               .k_slope = data<T>(k_slope),
                               .v_slope = data<T>(v_slope),
                               .q_stride = q_slope.stride(0),
                               .k_stride = k_slope.stride(0),
                               .v_stride = v_slope.stride(0),
                               .copies_first = data<std::int32_t>(copies_first),
                               .copies = data<std::int32_t>(copies),
                               .x_slope = data<T>(slope),
                               .sums = floats(sums),
                               .repeats = static_cast<int>(k_slope.size(1) / parameters.kv_heads)},
          qkv);
  });
  HeadSlopes slopes{.qkv = slope, .q_norm = {}, .k_norm = {}};
  if (parameters.q_norm.defined()) {
    const Tensor both = column_sums_of(sums, parameters.q_norm);
    slopes.q_norm = both.narrow(0, 0, dim);
    slopes.k_norm = both.narrow(0, dim, dim);
  }
  return slopes;
}

Tensor gather(const Tensor& source, const Tensor& rows, std::int64_t repeats) {
  const std::int64_t heads = source.size(1), dim = source.size(2),
                     bytes = static_cast<std::int64_t>(source.element_size());
  TORCH_CHECK(source.dim() == 3 && source.stride(2) == 1 && source.stride(1) == dim && dim * bytes % 16 == 0 &&
                  source.stride(0) * bytes % 16 == 0 && rows.scalar_type() == torch::kInt && rows.is_contiguous(),
              "heads to gather are not dense rows");
  const Tensor out = torch::empty({rows.numel(), heads * repeats, dim}, source.options().requires_grad(false));
  with_type_of(source, [&](auto type) {
    using T = decltype(type);
    start(GatherJob<T>{.source = data<T>(source),
                       .target = data<T>(out),
                       .rows = data<std::int32_t>(rows),
                       .count = rows.numel(),
                       .stride = source.stride(0),
                       .width = static_cast<int>(heads * dim),
                       .dim = static_cast<int>(dim),
                       .repeats = static_cast<int>(repeats)},
          source);
  });
  return out;
}

namespace {
template <class T>
GateJob<T> gate_job(const Tensor& gate, const Tensor& up) {
  for (const Tensor* tensor : {&gate, &up})
    TORCH_CHECK(tensor->dim() == 2 && tensor->stride(1) == 1 && tensor->size(1) % 8 == 0 &&
                    tensor->stride(0) % 8 == 0 && tensor->sizes() == gate.sizes() &&
                    tensor->stride(0) == gate.stride(0),
                "gates are not rows of the same strides");
  check_like(gate, up);
  return {.gate = data<T>(gate),
          .up = data<T>(up),
          .slope = nullptr,
          .out = nullptr,
          .gate_slope = nullptr,
          .up_slope = nullptr,
          .rows = gate.size(0),
          .width = gate.size(1),
          .stride = gate.stride(0)};
}
}  // namespace

Tensor gate(const Tensor& gate_rows, const Tensor& up_rows) {
  const Tensor out = torch::empty(gate_rows.sizes(), gate_rows.options().requires_grad(false));
  with_type_of(gate_rows, [&](auto type) {
    using T = decltype(type);
    GateJob<T> job = gate_job<T>(gate_rows, up_rows);
    job.out = data<T>(out);
    start(job, gate_rows);
  });
  return out;
}

void gate_backward(const Tensor& gate_rows, const Tensor& up_rows, const Tensor& slope, const Tensor& g_slope,
                   const Tensor& u_slope) {
  const Tensor dense_slope = slope.contiguous();
  check_like(gate_rows, dense_slope);
  with_type_of(gate_rows, [&](auto type) {
    using T = decltype(type);
    GateJob<T> job = gate_job<T>(gate_rows, up_rows);
    const GateJob<T> slopes = gate_job<T>(g_slope, u_slope);
    TORCH_CHECK(slopes.stride == job.stride, "gradients of gates have other strides");
    job.slope = data<T>(dense_slope);
    job.gate_slope = data<T>(g_slope);
    job.up_slope = data<T>(u_slope);
    start(job, gate_rows);
  });
}

namespace {
template <class T>
ScoreJob<T> score_job(const Tensor& logits, const Tensor& targets, double temperature) {
  TORCH_CHECK(logits.dim() == 2 && logits.is_contiguous() && targets.is_contiguous() &&
                  targets.scalar_type() == torch::kLong && targets.numel() == logits.size(0),
              "logits are not dense [rows, vocabulary] with a target for each row");
  ScoreJob<T> job{};
  job.logits = data<T>(logits);
  job.targets = data<std::int64_t>(targets);
  job.rows = logits.size(0);
  job.width = logits.size(1);
  job.scale = static_cast<float>(1 / temperature);
  job.aligned = job.width % kValuesPerPack<T> == 0 && reinterpret_cast<std::uintptr_t>(job.logits) % 16 == 0;
  return job;
}
}  // namespace

void score(const Tensor& logits, const Tensor& targets, double temperature, const Tensor& logprobs,
           const Tensor& entropies, const Tensor& log_sums) {
  for (const Tensor* tensor : {&logprobs, &entropies, &log_sums}) check_fp32(*tensor);
  with_type_of(logits, [&](auto type) {
    using T = decltype(type);
    ScoreJob<T> job = score_job<T>(logits, targets, temperature);
    job.logprobs = floats(logprobs);
    job.entropies = floats(entropies);
    job.log_sums = floats(log_sums);
    start(job, logits);
  });
}

void score_backward(const Tensor& logits, const Tensor& targets, double temperature, const Tensor& log_sums,
                    const Tensor& slopes) {
  for (const Tensor* tensor : {&log_sums, &slopes}) check_fp32(*tensor);
  with_type_of(logits, [&](auto type) {
    using T = decltype(type);
    ScoreJob<T> job = score_job<T>(logits, targets, temperature);
    job.log_sums = floats(log_sums);
    job.slopes = floats(slopes);
    start(job, logits);
  });
}

void add_gradients(const std::vector<TensorUpdate>& tensors) {
  if (tensors.empty()) return;
  const Table table = table_of(tensors);
  start(AddJob{.entries = table.data(), .entry_count = table.count, .part_count = table.parts}, table.entries);
}

Tensor sum_of_squares(const std::vector<TensorUpdate>& tensors) {
  const Table table = table_of(tensors);
  const Tensor sums = torch::empty({table.parts}, table.entries.options().dtype(torch::kDouble));
  start(
      SquaresJob{
          .entries = table.data(), .entry_count = table.count, .part_count = table.parts, .sums = data<double>(sums)},
      sums);
  return sums.sum();
}

void update(const std::vector<TensorUpdate>& tensors, const AdamWFactors& factors, const Tensor& thresholds) {
  const Table table = table_of(tensors);
  // Scalars are computed in fp64 and rounded to fp32 once, as libtorch does for its kernels.
  UpdateJob job{};
  job.entries = table.data();
  job.entry_count = table.count;
  job.part_count = table.parts;
  job.thresholds = floats(thresholds);
  job.clip = static_cast<float>(factors.clip);
  job.beta1 = static_cast<float>(factors.beta1);
  job.one_minus_beta1 = static_cast<float>(1.0 - factors.beta1);
  job.beta2 = static_cast<float>(factors.beta2);
  job.one_minus_beta2 = static_cast<float>(1.0 - factors.beta2);
  job.inverse_correction2 = static_cast<float>(1.0 / factors.correction2);
  job.epsilon = static_cast<float>(factors.epsilon);
  job.decay_factor = static_cast<float>(1.0 - factors.rate * factors.weight_decay);
  job.step_factor = static_cast<float>(-factors.rate / factors.correction1);
  start(job, table.entries);
}

}  // namespace echoline::model::training

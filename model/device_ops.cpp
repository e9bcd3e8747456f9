// Defines the operations with gradients of a training pass on a GPU, as functions of libtorch's autograd.
#include "model/device_ops.hpp"

#include <torch/version.h>

#include <algorithm>

#include "model/cuda/training_device.hpp"

// Releases of libtorch with flash attention that aligns a segment's last query with its last key, and with bf16
// products that return fp32.
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 8)
#define ECHOLINE_FLASH_ATTENTION 1
#endif

namespace echoline::model {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

namespace {

// Logits are computed for parts of the rows, each of at most this many bytes of logits. Smaller parts would take
// longer, because each part reads and writes the whole sum of the weight's gradient.
constexpr std::int64_t kLogitBytes = std::int64_t{1} << 29;
constexpr std::int64_t kLogitRows = 256;  // rows of a part are a multiple of it, because products are computed in tiles

// In all names below, a slope is the gradient of the loss with respect to a value. backward() returns the gradients in
// the order of forward()'s parameters; those that get none are undefined.
struct NormAndSum : torch::autograd::Function<NormAndSum> {
  // `addend` is empty if there is none, because a Function takes no undefined tensors.
  static variable_list forward(AutogradContext* context, const Tensor& x, const Tensor& addend, const Tensor& weight,
                               double eps) {
    const bool adds = addend.numel() > 0;
    const auto [out, sum] = training::norm(x, adds ? addend : Tensor(), weight, eps);
    context->save_for_backward({sum, weight});
    context->saved_data["eps"] = eps;
    context->saved_data["adds"] = adds;
    context->set_materialize_grads(false);  // the gradient of an unused result is undefined, rather than zeros
    return {out, sum};
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const Tensor slope = gradients[0].defined() ? gradients[0] : torch::zeros_like(saved[0]);
    const auto [sum_slope, weight_slope] =
        training::norm_backward(saved[0], saved[1], slope, gradients[1], context->saved_data["eps"].toDouble());
    // Both addends of the sum have its gradient.
    return {sum_slope, context->saved_data["adds"].toBool() ? sum_slope : Tensor(), weight_slope, Tensor()};
  }
};

struct GatedOnDevice : torch::autograd::Function<GatedOnDevice> {
  static Tensor forward(AutogradContext* context, const Tensor& gate_input, const Tensor& up_input) {
    const Tensor gate = gate_input.contiguous(), up = up_input.contiguous();
    context->save_for_backward({gate, up});
    return training::gate(gate.flatten(0, -2), up.flatten(0, -2)).view(gate.sizes());
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const Tensor gate = torch::empty_like(saved[0]), up = torch::empty_like(saved[1]);
    const auto rows = [](const Tensor& tensor) { return tensor.flatten(0, -2); };
    training::gate_backward(rows(saved[0]), rows(saved[1]), rows(gradients[0].contiguous()), rows(gate), rows(up));
    return {gate, up};
  }
};

// See joint_gated(). `both` is [rows, 2 width], gate and up side by side.
struct JointGated : torch::autograd::Function<JointGated> {
  static Tensor half(const Tensor& both, std::int64_t index) {
    const std::int64_t width = both.size(1) / 2;
    return both.narrow(1, index * width, width);
  }
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& joint_weight, const Tensor&,
                        const Tensor&) {
    const Tensor both = torch::linear(x, joint_weight);
    context->save_for_backward({x, joint_weight, both});
    return training::gate(half(both, 0), half(both, 1));
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const Tensor &x = saved[0], &joint_weight = saved[1], &both = saved[2], both_slope = torch::empty_like(both);
    training::gate_backward(half(both, 0), half(both, 1), gradients[0], half(both_slope, 0), half(both_slope, 1));
    const auto weight_slopes = both_slope.t().mm(x).split(joint_weight.size(0) / 2);
    return {both_slope.mm(joint_weight), Tensor(), weight_slopes[0], weight_slopes[1]};
  }
};

// x[rows], for rows without repetition, so that the gradient can be copied instead of added.
struct SelectedRows : torch::autograd::Function<SelectedRows> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& rows) {
    context->save_for_backward({rows});
    context->saved_data["count"] = x.size(0);
    return x.index_select(0, rows);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const Tensor rows = context->get_saved_variables()[0];
    const Tensor x_gradient =
        torch::zeros({context->saved_data["count"].toInt(), gradients[0].size(1)}, gradients[0].options());
    return {x_gradient.index_copy_(0, rows, gradients[0]), Tensor()};
  }
};

training::RotationParameters rotation_parameters_of(const Rotation& rotation) {
  return {.cos = rotation.cos,
          .sin = rotation.sin,
          .q_norm = rotation.q_norm,
          .k_norm = rotation.k_norm,
          .heads = rotation.heads,
          .kv_heads = rotation.kv_heads,
          .eps = rotation.eps};
}

// An empty tensor if `norm` is undefined, because a Function takes no undefined tensors.
Tensor or_empty(const Tensor& norm) { return norm.defined() ? norm : torch::empty({0}); }

// Saves the numbers of a Rotation. saved_rotation_parameters() reads them again.
void save_heads(AutogradContext* context, const Rotation& rotation) {
  context->saved_data["heads"] = rotation.heads;
  context->saved_data["kv_heads"] = rotation.kv_heads;
  context->saved_data["eps"] = rotation.eps;
}
training::RotationParameters saved_rotation_parameters(AutogradContext* context, const Tensor& cos, const Tensor& sin,
                                                       const Tensor& q_norm, const Tensor& k_norm) {
  const auto norm = [](const Tensor& tensor) { return tensor.numel() > 0 ? tensor : Tensor(); };
  return {.cos = cos,
          .sin = sin,
          .q_norm = norm(q_norm),
          .k_norm = norm(k_norm),
          .heads = context->saved_data["heads"].toInt(),
          .kv_heads = context->saved_data["kv_heads"].toInt(),
          .eps = context->saved_data["eps"].toDouble()};
}

struct RotatedOnDevice : torch::autograd::Function<RotatedOnDevice> {
  static Tensor forward(AutogradContext* context, const Tensor& qkv, const Tensor& q_norm, const Tensor& k_norm,
                        const Rotation& rotation) {
    context->save_for_backward({qkv, q_norm, k_norm, rotation.cos, rotation.sin});
    save_heads(context, rotation);
    return training::rotate(qkv, rotation_parameters_of(rotation));
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const Tensor &qkv = saved[0], &q_norm = saved[1], &k_norm = saved[2], &cos = saved[3], &sin = saved[4];
    const training::RotationParameters rotation_parameters =
        saved_rotation_parameters(context, cos, sin, q_norm, k_norm);
    const Tensor slope = gradients[0].contiguous();
    const auto slopes = training::rotate_backward(
        qkv, rotation_parameters, slope.narrow(1, 0, rotation_parameters.heads),
        slope.narrow(1, rotation_parameters.heads, rotation_parameters.kv_heads),
        slope.narrow(1, rotation_parameters.heads + rotation_parameters.kv_heads, rotation_parameters.kv_heads),
        /*copies_first=*/{}, /*copies=*/{});
    return {slopes.qkv, slopes.q_norm, slopes.k_norm, Tensor()};
  }
};

#ifdef ECHOLINE_FLASH_ATTENTION
// See attend_on_device(). To save memory, only qkv before the rotation, the result of attention and the logarithms of
// the softmax's denominators are kept. The backward pass computes the rotated heads and gathered keys again.
struct AttendedOnDevice : torch::autograd::Function<AttendedOnDevice> {
  struct Operands {
    Tensor q, k, v;
  };
  // Indices of the tensors saved for the backward pass.
  enum Saved : std::size_t {
    kQkv,
    kQNorm,
    kKNorm,
    kCos,
    kSin,
    kOut,
    kLogSums,
    kSeed,
    kOffset,
    kQueriesFirst,
    kKeysFirst,
    kRows,
    kCopiesFirst,
    kCopies
  };
  // The rotated queries, and the rotated keys and values of `rows`. With `repeated`, each of these keys and values is
  // repeated for every query head that uses it. The backward pass needs that, because libtorch would otherwise make
  // gradients of the repeated size itself and sum them in bf16.
  static Operands operands(const Tensor& qkv, const training::RotationParameters& rotation_parameters,
                           const Tensor& rows, bool repeated) {
    const Tensor rotated = training::rotate(qkv, rotation_parameters);
    Tensor keys_values = rotated.narrow(1, rotation_parameters.heads, 2 * rotation_parameters.kv_heads);
    if (rows.defined() && rows.numel() > 0)
      keys_values =
          training::gather(keys_values, rows, repeated ? rotation_parameters.heads / rotation_parameters.kv_heads : 1);
    const std::int64_t heads = keys_values.size(1) / 2;
    return {rotated.narrow(1, 0, rotation_parameters.heads), keys_values.narrow(1, 0, heads),
            keys_values.narrow(1, heads, heads)};
  }

  static Tensor forward(AutogradContext* context, const Tensor& qkv, const Tensor& q_norm, const Tensor& k_norm,
                        const Rotation& rotation, const AttentionPlan& plan) {
    const training::RotationParameters rotation_parameters = rotation_parameters_of(rotation);
    const Operands attended = operands(qkv, rotation_parameters, plan.rows, /*repeated=*/false);
    // Queries and keys already contain the scale of the scores.
    const auto [out, log_sums, seed, offset, unused] = at::_flash_attention_forward(
        attended.q, attended.k, attended.v, plan.queries_first, plan.keys_first, plan.queries_max, plan.keys_max,
        /*dropout_p=*/0.0, /*is_causal=*/true, /*return_debug_mask=*/false,
        /*scale=*/1.0);
    context->save_for_backward({qkv, q_norm, k_norm, rotation.cos, rotation.sin, out, log_sums, seed, offset,
                                plan.queries_first, plan.keys_first, or_empty(plan.rows), or_empty(plan.copies_first),
                                or_empty(plan.copies)});
    save_heads(context, rotation);
    context->saved_data["queries_max"] = plan.queries_max;
    context->saved_data["keys_max"] = plan.keys_max;
    return out.flatten(1);
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const training::RotationParameters rotation_parameters =
        saved_rotation_parameters(context, saved[kCos], saved[kSin], saved[kQNorm], saved[kKNorm]);
    const Tensor &rows = saved[kRows], &out = saved[kOut];
    const Operands attended = operands(saved[kQkv], rotation_parameters, rows, /*repeated=*/true);
    const auto [dq, dk, dv] = at::_flash_attention_backward(
        gradients[0].view_as(out), attended.q, attended.k, attended.v, out, saved[kLogSums], saved[kQueriesFirst],
        saved[kKeysFirst], context->saved_data["queries_max"].toInt(), context->saved_data["keys_max"].toInt(),
        /*dropout_p=*/0.0,
        /*is_causal=*/true, saved[kSeed], saved[kOffset], /*scale=*/1.0);
    const bool gathered = rows.numel() > 0;
    const auto slopes =
        training::rotate_backward(saved[kQkv], rotation_parameters, dq.contiguous(), dk.contiguous(), dv.contiguous(),
                                  gathered ? saved[kCopiesFirst] : Tensor(), gathered ? saved[kCopies] : Tensor());
    return {slopes.qkv, slopes.q_norm, slopes.k_norm, Tensor(), Tensor()};
  }
};

// See linear_scores(). Computes logits for some rows at a time, and again in the backward pass.
struct ScoresOnDevice : torch::autograd::Function<ScoresOnDevice> {
  static std::int64_t rows_max(const Tensor& hidden, const Tensor& weight) {
    const std::int64_t rows = kLogitBytes / (weight.size(0) * static_cast<std::int64_t>(hidden.element_size()));
    return std::max(kLogitRows, rows / kLogitRows * kLogitRows);  // rounded down to a multiple of kLogitRows
  }
  // Calls f(begin, count) for parts of the rows. They have equal sizes, except that the last may be smaller.
  template <class F>
  static void for_each_part(const Tensor& hidden, const Tensor& weight, const F& f) {
    const std::int64_t rows = hidden.size(0), parts = (rows + rows_max(hidden, weight) - 1) / rows_max(hidden, weight);
    // The rows of an equal share, rounded up to a multiple of kLogitRows.
    const std::int64_t part_rows =
        parts == 0 ? 1 : ((rows + parts - 1) / parts + kLogitRows - 1) / kLogitRows * kLogitRows;
    for (std::int64_t begin = 0; begin < rows; begin += part_rows) f(begin, std::min(part_rows, rows - begin));
  }

  static variable_list forward(AutogradContext* context, const Tensor& hidden, const Tensor& weight,
                               const Tensor& targets, double temperature) {
    const Tensor logprobs = torch::empty({hidden.size(0)}, hidden.options().dtype(torch::kFloat).requires_grad(false));
    const Tensor entropies = torch::empty_like(logprobs), log_sums = torch::empty_like(logprobs);
    for_each_part(hidden, weight, [&](std::int64_t begin, std::int64_t count) {
      const Tensor logits = torch::linear(hidden.narrow(0, begin, count), weight);
      const auto part = [&](const Tensor& tensor) { return tensor.narrow(0, begin, count); };
      training::score(logits, part(targets), temperature, part(logprobs), part(entropies), part(log_sums));
    });
    context->save_for_backward({hidden, weight, targets, log_sums});
    context->saved_data["temperature"] = temperature;
    context->mark_non_differentiable({entropies});
    return {logprobs, entropies};
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const Tensor &hidden = saved[0], &weight = saved[1], &targets = saved[2], &log_sums = saved[3];
    const double temperature = context->saved_data["temperature"].toDouble();
    const Tensor hidden_slope = torch::empty_like(hidden), slopes = gradients[0].contiguous();
    Tensor weight_slope;  // an fp32 sum if there are several parts
    for_each_part(hidden, weight, [&](std::int64_t begin, std::int64_t count) {
      const auto part = [&](const Tensor& tensor) { return tensor.narrow(0, begin, count); };
      const Tensor rows = part(hidden), logits = torch::linear(rows, weight);
      training::score_backward(logits, part(targets), temperature, part(log_sums), part(slopes));
      const Tensor& logits_slope = logits;  // score_backward() has replaced the logits
      Tensor part_slope = part(hidden_slope);
      torch::mm_out(part_slope, logits_slope, weight);
      if (count == hidden.size(0))
        weight_slope = logits_slope.t().mm(rows);
      else if (hidden.scalar_type() == torch::kFloat)
        weight_slope = weight_slope.defined() ? weight_slope.addmm_(logits_slope.t(), rows) : logits_slope.t().mm(rows);
      else if (!weight_slope.defined())
        weight_slope = at::mm(logits_slope.t(), rows, torch::kFloat);
      else
        at::addmm_out(weight_slope, weight_slope, logits_slope.t(), rows, torch::kFloat);
    });
    if (!weight_slope.defined()) weight_slope = torch::zeros_like(weight);
    return {hidden_slope, weight_slope.to(weight.scalar_type()), Tensor(), Tensor()};
  }
};
#endif

}  // namespace

Tensor rms_norm_on_device(const Tensor& x, const Tensor& weight, double eps) {
  return NormAndSum::apply(x, torch::empty({0}), weight, eps)[0];
}

std::pair<Tensor, Tensor> norm_and_sum(const Tensor& x, const Tensor& addend, const Tensor& weight, double eps) {
  if (training::kernels_support(x) && weight.scalar_type() == x.scalar_type()) {
    const auto both = NormAndSum::apply(x, or_empty(addend), weight, eps);
    return {both[0], both[1]};
  }
  const Tensor sum = addend.defined() ? x + addend : x;
  return {rms_norm(sum, weight, eps), sum};
}

// The number of rows of `joint_weight` must be a multiple of 16. Each half of a product, gate or up, is then a multiple
// of 8 bf16 values, the 16 bytes that the kernel reads at once.
bool supports_joint_gated(const Tensor& x, const Tensor& joint_weight) {
  return joint_weight.defined() && training::kernels_support(x) && joint_weight.scalar_type() == x.scalar_type() &&
         joint_weight.size(0) % 16 == 0;
}

Tensor joint_gated(const Tensor& x, const Tensor& joint_weight, const Tensor& gate, const Tensor& up) {
  return JointGated::apply(x, joint_weight, gate, up);
}

Tensor gated_on_device(const Tensor& gate, const Tensor& up) { return GatedOnDevice::apply(gate, up); }

bool supports_rotate_on_device(const Tensor& qkv, const Rotation& rotation) {
  return qkv.is_cuda() && training::supports_rotate(qkv, rotation_parameters_of(rotation));
}

Tensor rotate_on_device(const Tensor& qkv, const Rotation& rotation) {
  return RotatedOnDevice::apply(qkv, or_empty(rotation.q_norm), or_empty(rotation.k_norm), rotation);
}

Tensor select_rows(const Tensor& x, const Tensor& rows) {
  return x.is_cpu() ? x.index_select(0, rows) : SelectedRows::apply(x, rows);
}

AttentionPlan attention_plan(const Tensor& segments, bool gathers, const torch::Device& device) {
  // A segment's `prefix` is the index of an earlier segment, which has no prefix of its own (Segment), or below 0.
  const std::int64_t count = segments.size(0);
  const auto* const all_segments = reinterpret_cast<const Segment*>(segments.data_ptr<std::int64_t>());
  const auto ints = [](std::int64_t count_of_ints) { return torch::empty({count_of_ints}, torch::kInt); };
  const Tensor queries_first = ints(count + 1), keys_first = ints(count + 1);
  auto *queries_first_data = queries_first.data_ptr<std::int32_t>(),
       *keys_first_data = keys_first.data_ptr<std::int32_t>();
  AttentionPlan plan;
  queries_first_data[0] = keys_first_data[0] = 0;
  bool needs_rows = gathers;
  for (std::int64_t i = 0; i < count; ++i) {
    const Segment& segment = all_segments[i];
    TORCH_CHECK(segment.begin == queries_first_data[i] && segment.count > 0 && segment.prefix < i,
                "segments are not consecutive");
    const bool has_prefix = segment.prefix >= 0;
    const std::int64_t segment_keys = segment.count + (has_prefix ? all_segments[segment.prefix].count : 0);
    needs_rows |= has_prefix;
    queries_first_data[i + 1] = queries_first_data[i] + static_cast<std::int32_t>(segment.count);
    keys_first_data[i + 1] = keys_first_data[i] + static_cast<std::int32_t>(segment_keys);
    plan.queries_max = std::max(plan.queries_max, segment.count);
    plan.keys_max = std::max(plan.keys_max, segment_keys);
  }
  if (needs_rows) {
    const std::int64_t tokens = queries_first_data[count], keys = keys_first_data[count];
    const Tensor rows = ints(keys), copies_first = ints(tokens + 1), copies = ints(keys);
    auto* const rows_data = rows.data_ptr<std::int32_t>();
    for (std::int64_t segment_index = 0, key = 0; segment_index < count; ++segment_index) {
      const Segment& segment = all_segments[segment_index];
      const auto add_keys = [&](const Segment& source) {
        for (std::int64_t token = 0; token < source.count; ++token)
          rows_data[key++] = static_cast<std::int32_t>(source.begin + token);
      };
      if (segment.prefix >= 0) add_keys(all_segments[segment.prefix]);
      add_keys(segment);
    }
    // Lists the keys of each token, its copies, by a counting sort: counts them, adds up the counts to each token's
    // first place in `copies`, and fills the places.
    auto* const copies_first_data = copies_first.data_ptr<std::int32_t>();
    std::fill(copies_first_data, copies_first_data + tokens + 1, 0);
    for (std::int64_t i = 0; i < keys; ++i) ++copies_first_data[rows_data[i] + 1];
    for (std::int64_t token = 0; token < tokens; ++token) copies_first_data[token + 1] += copies_first_data[token];
    std::vector<std::int32_t> next_copy(copies_first_data, copies_first_data + tokens);
    for (std::int64_t i = 0; i < keys; ++i)
      copies.data_ptr<std::int32_t>()[next_copy[static_cast<std::size_t>(rows_data[i])]++] =
          static_cast<std::int32_t>(i);
    plan.rows = upload(rows, device);
    plan.copies_first = upload(copies_first, device);
    plan.copies = upload(copies, device);
  }
  plan.queries_first = upload(queries_first, device);
  plan.keys_first = upload(keys_first, device);
  return plan;
}

bool supports_attend_on_device([[maybe_unused]] const Tensor& qkv, [[maybe_unused]] const Rotation& rotation) {
#ifdef ECHOLINE_FLASH_ATTENTION
  // libtorch's flash attention takes heads of a multiple of 8 values.
  const std::int64_t dim = qkv.size(1) / (rotation.heads + 2 * rotation.kv_heads);
  return qkv.is_cuda() && qkv.scalar_type() == torch::kBFloat16 && dim % 8 == 0 &&
         supports_rotate_on_device(qkv, rotation);
#else
  return false;
#endif
}

Tensor attend_on_device([[maybe_unused]] const Tensor& qkv, [[maybe_unused]] const Rotation& rotation,
                        [[maybe_unused]] const AttentionPlan& plan) {
#ifdef ECHOLINE_FLASH_ATTENTION
  return AttendedOnDevice::apply(qkv, or_empty(rotation.q_norm), or_empty(rotation.k_norm), rotation, plan);
#else
  TORCH_CHECK(false, "libtorch ", TORCH_VERSION, " has no flash attention");
#endif
}

bool supports_scores_on_device([[maybe_unused]] const Tensor& hidden, [[maybe_unused]] const Tensor& weight) {
#ifdef ECHOLINE_FLASH_ATTENTION
  return training::kernels_support(hidden) && hidden.scalar_type() == weight.scalar_type();
#else
  return false;
#endif
}

LinearScores linear_scores_on_device([[maybe_unused]] const Tensor& hidden, [[maybe_unused]] const Tensor& weight,
                                     [[maybe_unused]] const Tensor& targets, [[maybe_unused]] double temperature) {
#ifdef ECHOLINE_FLASH_ATTENTION
  const auto scores = ScoresOnDevice::apply(hidden, weight, targets, temperature);
  return {scores[0], scores[1]};
#else
  TORCH_CHECK(false, "libtorch ", TORCH_VERSION, " does not add up products of bf16 in fp32");
#endif
}

}  // namespace echoline::model

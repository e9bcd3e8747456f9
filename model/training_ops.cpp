// Defines the operations of a training pass, and chooses between the CPU's kernels, device_ops and libtorch's
// functions.
#include "model/training_ops.hpp"

#include <torch/version.h>

#include <algorithm>
#include <cmath>

#include "model/cuda/training_device.hpp"
#include "model/device_ops.hpp"
#include "model/kernels.hpp"
#include "model/parallel.hpp"
#include "model/training_kernels.hpp"

namespace echoline::model {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

namespace {

constexpr std::int64_t kPartValues = 1 << 15;  // values that justify another thread in an element-wise function
// The gradient of a norm's weight is first summed over parts of so many rows, then over the parts. So the order of the
// additions does not depend on the number of threads.
constexpr std::int64_t kPartRows = 64;
constexpr std::int64_t kQueriesMax = 256;                   // tokens per block of scores in libtorch's attention
constexpr std::int64_t kLogitsMax = std::int64_t{1} << 25;  // logits in memory at a time: 128 MiB
constexpr std::int64_t kAddedMax = std::int64_t{1} << 22;   // values of a product that are added to a sum at a time

bool uses_cpu_kernels(const Tensor& x) { return x.is_cpu() && x.scalar_type() == torch::kFloat; }

// Calls f(row) for each row of `row_values` values.
template <class F>
void parallel_for_rows(std::int64_t rows, std::int64_t row_values, const F& f) {
  parallel_for(rows, std::max<std::int64_t>(1, kPartValues / std::max<std::int64_t>(1, row_values)),
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t row = begin; row < end; ++row) f(row);
               });
}

// Calls f(row, sum) for each row, which must add the row's `width` floats to `sum`. Returns the sum over all rows.
template <class F>
Tensor sum_over_rows(std::int64_t rows, std::int64_t width, const F& f) {
  const std::int64_t parts = (rows + kPartRows - 1) / kPartRows;
  const Tensor sums = torch::zeros({parts, width}, torch::kFloat);
  float* const data = sums.data_ptr<float>();
  parallel_for(parts, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t part = begin; part < end; ++part)
      for (std::int64_t row = part * kPartRows; row < std::min(rows, (part + 1) * kPartRows); ++row)
        f(row, data + part * width);
  });
  return sums.sum(0);
}

// In the backward functions, dx is the gradient of the loss with respect to x; a slope is that of a result. They return
// the gradients in the order of forward()'s parameters; those that get none are undefined.
struct RmsNorm : torch::autograd::Function<RmsNorm> {
  static Tensor forward(AutogradContext* context, const Tensor& input, const Tensor& weight, double eps) {
    const Tensor x = input.contiguous(), out = torch::empty_like(x);
    const std::int64_t width = x.size(-1);
    const auto *x_data = x.data_ptr<float>(), *weight_data = weight.data_ptr<float>();
    auto* out_data = out.data_ptr<float>();
    parallel_for_rows(x.numel() / width, width, [&](std::int64_t row) {
      kernels().rms_norm(x_data + row * width, weight_data, width, static_cast<float>(eps), out_data + row * width);
    });
    context->save_for_backward({x, weight});
    context->saved_data["eps"] = eps;
    return out;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const Tensor &x = saved[0], dy = gradients[0].contiguous(), dx = torch::empty_like(x);
    const auto eps = static_cast<float>(context->saved_data["eps"].toDouble());
    const std::int64_t width = x.size(-1);
    const auto *x_data = x.data_ptr<float>(), *weight_data = saved[1].data_ptr<float>(),
               *dy_data = dy.data_ptr<float>();
    auto* dx_data = dx.data_ptr<float>();
    const Tensor dw = sum_over_rows(x.numel() / width, width, [&](std::int64_t row, float* sum) {
      training_kernels().rms_norm_backward(x_data + row * width, weight_data, dy_data + row * width, width, eps,
                                           dx_data + row * width, sum);
    });
    return {dx, dw, Tensor()};
  }
};

// See joint_product(). The product uses only `joint_weight`; q, k and v are passed so that they get its gradient.
struct JointProduct : torch::autograd::Function<JointProduct> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& joint_weight, const Tensor& q,
                        const Tensor& k, const Tensor& v) {
    context->save_for_backward({x, joint_weight});
    context->saved_data["rows"] = std::vector<std::int64_t>{q.size(0), k.size(0), v.size(0)};
    return torch::linear(x, joint_weight);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const auto parts = gradients[0].t().mm(saved[0]).split_with_sizes(context->saved_data["rows"].toIntVector());
    return {gradients[0].mm(saved[1]), Tensor(), parts[0], parts[1], parts[2]};
  }
};

// See rotate(). Without norms, q_norm and k_norm are empty, because a Function takes no undefined tensors.
struct Rotated : torch::autograd::Function<Rotated> {
  static const float* norm_of(const Tensor& weight) { return weight.numel() > 0 ? weight.data_ptr<float>() : nullptr; }

  static Tensor forward(AutogradContext* context, const Tensor& input, const Tensor& cos, const Tensor& sin,
                        const Tensor& q_norm, const Tensor& k_norm, std::int64_t heads, std::int64_t kv_heads,
                        double eps) {
    const Tensor qkv = input.contiguous();
    const std::int64_t tokens = qkv.size(0), all_heads = heads + 2 * kv_heads, dim = qkv.size(1) / all_heads;
    const Tensor out = qkv.view({tokens, all_heads, dim}).clone();
    auto* out_data = out.data_ptr<float>();
    const auto *cos_data = cos.data_ptr<float>(), *sin_data = sin.data_ptr<float>();
    const float* const norms[] = {norm_of(q_norm), norm_of(k_norm)};
    parallel_for_rows(tokens, all_heads * dim, [&](std::int64_t token) {
      const std::int64_t position = token % cos.size(0) * dim;  // of the token's row in cos and sin
      for (std::int64_t h = 0; h < heads + kv_heads; ++h)
        kernels().rotate(out_data + (token * all_heads + h) * dim, norms[h < heads ? 0 : 1], dim,
                         static_cast<float>(eps), cos_data + position, sin_data + position);
    });
    context->save_for_backward({qkv, cos, sin, q_norm, k_norm});
    context->saved_data["heads"] = heads;
    context->saved_data["kv_heads"] = kv_heads;
    context->saved_data["eps"] = eps;
    return out;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const Tensor &qkv = saved[0], &cos = saved[1], &q_norm = saved[3], &k_norm = saved[4];
    const std::int64_t heads = context->saved_data["heads"].toInt(), kv_heads = context->saved_data["kv_heads"].toInt();
    const auto eps = static_cast<float>(context->saved_data["eps"].toDouble());
    const std::int64_t tokens = qkv.size(0), all_heads = heads + 2 * kv_heads, dim = qkv.size(1) / all_heads;
    const Tensor qkv_gradient = gradients[0].reshape({tokens, all_heads * dim}).clone(torch::MemoryFormat::Contiguous);
    const auto *x_data = qkv.data_ptr<float>(), *cos_data = cos.data_ptr<float>(),
               *sin_data = saved[2].data_ptr<float>();
    auto* const gradient_data = qkv_gradient.data_ptr<float>();
    const float* const norms[] = {norm_of(q_norm), norm_of(k_norm)};
    const Tensor dw = sum_over_rows(tokens, 2 * dim, [&](std::int64_t token, float* sums) {
      const std::int64_t position = token % cos.size(0) * dim;
      for (std::int64_t h = 0; h < heads + kv_heads; ++h) {
        const std::int64_t head_offset = (token * all_heads + h) * dim, norm_index = h < heads ? 0 : 1;
        training_kernels().rotate_backward(x_data + head_offset, norms[norm_index], dim, eps, cos_data + position,
                                           sin_data + position, gradient_data + head_offset, sums + norm_index * dim);
      }
    });
    const bool has_norms = q_norm.numel() > 0;
    return {qkv_gradient,
            Tensor(),
            Tensor(),
            has_norms ? dw.narrow(0, 0, dim) : Tensor(),
            has_norms ? dw.narrow(0, dim, dim) : Tensor(),
            Tensor(),
            Tensor(),
            Tensor()};
  }
};

// See gated() and gelu_gated().
template <bool by_gelu>
struct Gated : torch::autograd::Function<Gated<by_gelu>> {
  static Tensor forward(AutogradContext* context, const Tensor& gate_input, const Tensor& up_input) {
    const Tensor gate = gate_input.contiguous(), up = up_input.contiguous(), out = torch::empty_like(gate);
    const auto *gate_data = gate.data_ptr<float>(), *up_data = up.data_ptr<float>();
    auto* out_data = out.data_ptr<float>();
    const auto gate_kernel = by_gelu ? training_kernels().gelu_gate : training_kernels().gate;
    parallel_for(gate.numel(), kPartValues, [&](std::int64_t begin, std::int64_t end) {
      gate_kernel(gate_data + begin, up_data + begin, end - begin, out_data + begin);
    });
    context->save_for_backward({gate, up});
    return out;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const Tensor dy = gradients[0].contiguous(), d_gate = torch::empty_like(dy), d_up = torch::empty_like(dy);
    const auto *gate_data = saved[0].data_ptr<float>(), *up_data = saved[1].data_ptr<float>(),
               *dy_data = dy.data_ptr<float>();
    auto *d_gate_data = d_gate.data_ptr<float>(), *d_up_data = d_up.data_ptr<float>();
    const auto gate_kernel = by_gelu ? training_kernels().gelu_gate_backward : training_kernels().gate_backward;
    parallel_for(dy.numel(), kPartValues, [&](std::int64_t begin, std::int64_t end) {
      gate_kernel(gate_data + begin, up_data + begin, dy_data + begin, end - begin, d_gate_data + begin,
                  d_up_data + begin);
    });
    return {d_gate, d_up};
  }
};

// Divides segments into families: a prefix segment and the segments that share it, or a segment without either.
struct Families {
  const Segment* segments;
  std::vector<std::int64_t> first_segment;  // first segment of each family; the last entry is the end
  explicit Families(const Tensor& tensor)
      : segments(reinterpret_cast<const Segment*>(tensor.data_ptr<std::int64_t>())) {
    static_assert(sizeof(Segment) == 3 * sizeof(std::int64_t));
    for (std::int64_t s = 0; s < tensor.size(0); ++s)
      if (segments[s].prefix < 0)
        first_segment.push_back(s);
      else
        TORCH_CHECK(!first_segment.empty() && segments[s].prefix == first_segment.back(), "segment ", s,
                    " does not follow its prefix");
    first_segment.push_back(tensor.size(0));
  }
  std::int64_t count() const { return std::ssize(first_segment) - 1; }
  std::int64_t size(std::int64_t family) const {
    return first_segment[static_cast<std::size_t>(family) + 1] - first_segment[static_cast<std::size_t>(family)];
  }
  const Segment* segments_of(std::int64_t family) const {
    return segments + first_segment[static_cast<std::size_t>(family)];
  }
};

// The numbers of query heads and of key-value heads. `group()` query heads share a key-value head.
struct HeadCounts {
  std::int64_t heads, kv_heads;
  std::int64_t all() const { return heads + 2 * kv_heads; }
  std::int64_t group() const { return heads / kv_heads; }
};

// The kernels' view of one key-value head of qkv [tokens, heads + 2 kv_heads, dim].
AttentionHead head_of(const float* qkv, HeadCounts head_counts, std::int64_t dim, std::int64_t kv_head,
                      std::int64_t window) {
  return {.q = qkv + kv_head * head_counts.group() * dim,
          .k = qkv + (head_counts.heads + kv_head) * dim,
          .v = qkv + (head_counts.heads + head_counts.kv_heads + kv_head) * dim,
          .stride = head_counts.all() * dim,
          .group = head_counts.group(),
          .dim = dim,
          .window = window};
}

// The keys and values that the queries [first_query, first_query + count) of a segment attend to: those of the prefix
// segment, and those of the segment itself (`own`) up to the last of these queries.
struct VisibleKeys {
  const Segment &own, *prefix;
  std::int64_t first_query, count;
  std::int64_t prefix_tokens() const { return prefix ? prefix->count : 0; }
  Tensor gather(const Tensor& all) const {  // [tokens, kv_heads, dim] -> [kv_heads, visible keys, dim]
    const Tensor own_rows = all.narrow(0, own.begin, first_query + count);
    return (prefix ? torch::cat({all.narrow(0, prefix->begin, prefix->count), own_rows}) : own_rows).transpose(0, 1);
  }
  // Adds `part`, which has the shape of a result of gather(), to the places in `all` from which gather() takes it.
  void scatter_add(const Tensor& all, const Tensor& part) const {
    const Tensor rows = part.transpose(0, 1);
    if (prefix) all.narrow(0, prefix->begin, prefix->count).add_(rows.narrow(0, 0, prefix->count));
    all.narrow(0, own.begin, first_query + count).add_(rows.narrow(0, prefix_tokens(), first_query + count));
  }
  // bool [group * count, visible keys]: true for a key after the query, or before its window.
  Tensor hidden_mask(const Tensor& like, std::int64_t group, std::int64_t window) const {
    const std::int64_t position = prefix_tokens() + first_query;  // of the first query
    const Tensor all = torch::ones({count, position + count}, like.options().dtype(torch::kBool));
    Tensor mask = all.triu(position + 1);
    if (window > 0) mask = mask.logical_or(all.tril(position - window));
    return mask.repeat({group, 1});
  }
};

// Calls f with the VisibleKeys of each block of queries.
template <class F>
void for_each_query_block(const Tensor& segments, const F& f) {
  const Families families(segments);
  for (std::int64_t family = 0; family < families.count(); ++family)
    for (std::int64_t s = 0; s < families.size(family); ++s) {
      const Segment& own = families.segments_of(family)[s];
      for (std::int64_t first_query = 0; first_query < own.count; first_query += kQueriesMax)
        f(VisibleKeys{.own = own,
                      .prefix = s > 0 ? families.segments_of(family) : nullptr,
                      .first_query = first_query,
                      .count = std::min(kQueriesMax, own.count - first_query)});
    }
}

// by_kv_head() turns [count, heads, n] for a block of tokens into [kv_heads, group * count, n]; by_token() is the
// inverse.
Tensor by_kv_head(const Tensor& rows, HeadCounts head_counts) {
  return rows.unflatten(1, {head_counts.kv_heads, head_counts.group()})
      .permute({1, 2, 0, 3})
      .reshape({head_counts.kv_heads, head_counts.group() * rows.size(0), rows.size(2)});
}
Tensor by_token(const Tensor& rows, HeadCounts head_counts) {
  return rows.unflatten(1, {head_counts.group(), -1}).permute({2, 0, 1, 3}).flatten(1, 2);
}

// See attend_packed(). `sums` and `sum` are logarithms of the softmax's denominators, so exp(score - sum) is a weight
// of the attention. With by_products, uses libtorch's matrix products, otherwise the CPU's kernels. `slope` is the
// gradient of the output.
struct PackedAttention : torch::autograd::Function<PackedAttention> {
  static Tensor forward(AutogradContext* context, const Tensor& qkv, const Tensor& segments, std::int64_t heads,
                        std::int64_t kv_heads, bool by_products, std::int64_t window) {
    const HeadCounts head_counts{heads, kv_heads};
    const std::int64_t tokens = qkv.size(0), dim = qkv.size(2);
    Tensor out, sums;
    if (by_products) {
      out = torch::empty({tokens, heads * dim}, qkv.options());
      sums = torch::empty({tokens, heads, 1}, qkv.options().dtype(torch::kFloat));
      const Tensor out_heads = out.view({tokens, heads, dim});
      const Tensor q = qkv.narrow(1, 0, heads), k = qkv.narrow(1, heads, kv_heads),
                   v = qkv.narrow(1, heads + kv_heads, kv_heads);
      for_each_query_block(segments, [&](const VisibleKeys& visible) {
        const Tensor scores =  // [kv_heads, group * queries of the block, visible keys]
            torch::bmm(by_kv_head(q.narrow(0, visible.own.begin + visible.first_query, visible.count), head_counts),
                       visible.gather(k).transpose(1, 2))
                .to(torch::kFloat)
                .masked_fill_(visible.hidden_mask(q, head_counts.group(), window), -INFINITY);
        const Tensor sum = scores.logsumexp(-1, /*keepdim=*/true);
        const Tensor attended = torch::bmm((scores - sum).exp_().to(qkv.scalar_type()), visible.gather(v));
        out_heads.narrow(0, visible.own.begin + visible.first_query, visible.count)
            .copy_(by_token(attended, head_counts));
        sums.narrow(0, visible.own.begin + visible.first_query, visible.count).copy_(by_token(sum, head_counts));
      });
    } else {
      const Tensor qkv_fp32 = qkv.to(torch::kFloat).contiguous();
      out = torch::empty({tokens, heads * dim}, qkv_fp32.options());
      sums = torch::empty({tokens, heads, 1}, qkv_fp32.options());
      const Families families(segments);
      // A task is one family of segments (a prefix and the segments that share it) for one key-value head.
      parallel_for(families.count() * kv_heads, 1, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t task = begin; task < end; ++task) {
          const std::int64_t kv_head = task / families.count(), family = task % families.count();
          training_kernels().attend(head_of(qkv_fp32.data_ptr<float>(), head_counts, dim, kv_head, window),
                                    families.segments_of(family), families.size(family),
                                    out.data_ptr<float>() + kv_head * head_counts.group() * dim, heads * dim,
                                    sums.data_ptr<float>() + kv_head * head_counts.group(), heads);
        }
      });
      out = out.to(qkv.scalar_type());
    }
    context->save_for_backward({qkv, segments, out, sums});
    context->saved_data["kv_heads"] = kv_heads;
    context->saved_data["by_products"] = by_products;
    context->saved_data["window"] = window;
    return out;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const Tensor &qkv = saved[0], &segments = saved[1], &sums = saved[3];
    const std::int64_t kv_heads = context->saved_data["kv_heads"].toInt(), dim = qkv.size(2);
    const std::int64_t heads = qkv.size(1) - 2 * kv_heads, window = context->saved_data["window"].toInt();
    const HeadCounts head_counts{heads, kv_heads};
    const Tensor out = saved[2].view({-1, heads, dim}), slope = gradients[0].reshape(out.sizes());
    Tensor qkv_gradient;
    if (context->saved_data["by_products"].toBool()) {
      qkv_gradient = torch::zeros(qkv.sizes(), qkv.options().dtype(torch::kFloat));
      const Tensor q = qkv.narrow(1, 0, heads), k = qkv.narrow(1, heads, kv_heads);
      const Tensor v = qkv.narrow(1, heads + kv_heads, kv_heads);
      const Tensor dq = qkv_gradient.narrow(1, 0, heads), dk = qkv_gradient.narrow(1, heads, kv_heads);
      const Tensor dv = qkv_gradient.narrow(1, heads + kv_heads, kv_heads);
      // Output gradient times output, by query: the part of the softmax's gradient that all keys of a query share.
      const Tensor totals = (out.to(torch::kFloat) * slope.to(torch::kFloat)).sum(-1, /*keepdim=*/true);
      for_each_query_block(segments, [&](const VisibleKeys& visible) {
        const auto rows = [&](const Tensor& tokens) {
          return by_kv_head(tokens.narrow(0, visible.own.begin + visible.first_query, visible.count), head_counts);
        };
        const Tensor queries = rows(q), keys = visible.gather(k), slope_rows = rows(slope);
        const Tensor weights = (torch::bmm(queries, keys.transpose(1, 2)).to(torch::kFloat) - rows(sums))
                                   .exp_()
                                   .masked_fill_(visible.hidden_mask(q, head_counts.group(), window), 0);
        const Tensor score_gradients =
            (torch::bmm(slope_rows, visible.gather(v).transpose(1, 2)).to(torch::kFloat) - rows(totals))
                .mul_(weights)
                .to(qkv.scalar_type());
        visible.scatter_add(dv, torch::bmm(weights.to(qkv.scalar_type()).transpose(1, 2), slope_rows));
        visible.scatter_add(dk, torch::bmm(score_gradients.transpose(1, 2), queries));
        dq.narrow(0, visible.own.begin + visible.first_query, visible.count)
            .copy_(by_token(torch::bmm(score_gradients, keys), head_counts));
      });
    } else {
      const Tensor qkv_fp32 = qkv.to(torch::kFloat).contiguous(), out_float = out.to(torch::kFloat),
                   dy = slope.to(torch::kFloat).contiguous();
      qkv_gradient = torch::empty_like(qkv_fp32);
      const Families families(segments);
      parallel_for(families.count() * kv_heads, 1, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t task = begin; task < end; ++task) {
          const std::int64_t kv_head = task / families.count(), family = task % families.count(),
                             head_offset = kv_head * head_counts.group() * dim;
          float* const gradient_data = qkv_gradient.data_ptr<float>();
          training_kernels().attend_backward(
              head_of(qkv_fp32.data_ptr<float>(), head_counts, dim, kv_head, window), families.segments_of(family),
              families.size(family), out_float.data_ptr<float>() + head_offset, dy.data_ptr<float>() + head_offset,
              heads * dim, sums.data_ptr<float>() + kv_head * head_counts.group(), heads, gradient_data + head_offset,
              gradient_data + (heads + kv_head) * dim, gradient_data + (heads + kv_heads + kv_head) * dim);
        }
      });
    }
    return {qkv_gradient.to(qkv.scalar_type()), Tensor(), Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 2)
#define ECHOLINE_FUSED_ATTENTION 1
// See AttentionMethod::kFused. Makes one call for a segment without a prefix. For a segment with a prefix, makes one
// call per block of queries, with a mask [queries, keys].
Tensor attend_fused(const Tensor& qkv, HeadCounts head_counts, const Tensor& segments) {
  const std::int64_t dim = qkv.size(2);
  const Families families(segments);
  std::vector<std::int64_t> counts;
  for (std::int64_t s = 0; s < segments.size(0); ++s) counts.push_back(families.segments[s].count);
  // Splits the tensor once, because the gradient of each part taken separately would be as large as the whole tensor.
  const auto split_by_segment = [&](std::int64_t first, std::int64_t heads) {
    return qkv.narrow(1, first, heads).split_with_sizes(counts);
  };
  const auto q = split_by_segment(0, head_counts.heads), k = split_by_segment(head_counts.heads, head_counts.kv_heads),
             v = split_by_segment(head_counts.heads + head_counts.kv_heads, head_counts.kv_heads);
  const auto by_head = [&](const Tensor& rows, std::int64_t copies) {  // -> [1, heads, tokens, dim]
    return (copies > 1 ? rows.repeat_interleave(copies, 1) : rows).transpose(0, 1).unsqueeze(0);
  };
  std::vector<Tensor> parts;
  for (std::size_t s = 0; s < q.size(); ++s) {
    const Segment& own = families.segments[s];
    const auto prefix = static_cast<std::size_t>(std::max<std::int64_t>(0, own.prefix));  // not used if there is none
    const std::int64_t prefix_tokens = own.prefix < 0 ? 0 : families.segments[prefix].count;
    const auto visible = [&](const std::vector<Tensor>& all, std::int64_t end) {
      return by_head(prefix_tokens > 0 ? torch::cat({all[prefix], all[s].narrow(0, 0, end)}) : all[s],
                     head_counts.group());
    };
    const std::int64_t step = prefix_tokens > 0 ? kQueriesMax : own.count;
    for (std::int64_t first_query = 0; first_query < own.count; first_query += step) {
      const std::int64_t count = std::min(step, own.count - first_query);
      std::optional<Tensor> mask;
      if (prefix_tokens > 0)
        mask = torch::ones({count, prefix_tokens + first_query + count}, qkv.options().dtype(torch::kBool))
                   .tril(prefix_tokens + first_query);
      // Scale 1, because queries and keys already contain the scale of the scores.
      parts.push_back(at::scaled_dot_product_attention(by_head(q[s].narrow(0, first_query, count), /*copies=*/1),
                                                       visible(k, first_query + count), visible(v, first_query + count),
                                                       mask, /*dropout_p=*/0.0,
                                                       /*is_causal=*/prefix_tokens == 0, /*scale=*/1.0)
                          .squeeze(0)
                          .transpose(0, 1));
    }
  }
  return torch::cat(parts).reshape({qkv.size(0), head_counts.heads * dim});
}
#endif

// Adds gradient^T rows to the fp32 `sum`. Computes some rows of `sum` at a time, to limit the memory of the product,
// which is bf16 and is widened for the addition.
void add_product_by_parts(const Tensor& sum, const Tensor& gradient, const Tensor& rows) {
  const std::int64_t count_max = std::max<std::int64_t>(1, kAddedMax / sum.size(1));
  for (std::int64_t begin = 0; begin < sum.size(0); begin += count_max) {
    const std::int64_t count = std::min(count_max, sum.size(0) - begin);
    sum.narrow(0, begin, count).add_(gradient.narrow(1, begin, count).t().mm(rows));
  }
}

// See linear_scores(). Computes logits for a part of the rows at a time. The backward pass computes them again, except
// on a CPU if all rows are one part: then they are kept. A frozen weight needs no gradient.
struct LinearLogprob : torch::autograd::Function<LinearLogprob> {
  static std::int64_t rows_max(const Tensor& weight) { return std::max<std::int64_t>(1, kLogitsMax / weight.size(0)); }
  static Tensor logits_of(const Tensor& hidden, const Tensor& weight) {
    return torch::linear(hidden, weight.to(hidden.scalar_type())).to(torch::kFloat);
  }

  static variable_list forward(AutogradContext* context, const Tensor& hidden, const Tensor& weight,
                               const Tensor& targets, double temperature) {
    const std::int64_t rows = hidden.size(0), vocabulary = weight.size(0);
    const Tensor logprobs = torch::empty({rows}, hidden.options().dtype(torch::kFloat).requires_grad(false));
    const Tensor entropies = torch::empty_like(logprobs), log_sums = torch::empty_like(logprobs);
    const bool keeps_logits = hidden.requires_grad() && hidden.is_cpu() && rows <= rows_max(weight);
    for (std::int64_t begin = 0; begin < rows; begin += rows_max(weight)) {
      const std::int64_t count = std::min(rows_max(weight), rows - begin);
      Tensor logits = logits_of(hidden.narrow(0, begin, count), weight);
      if (logits.is_cpu()) {
        const auto* logits_data = logits.data_ptr<float>();
        parallel_for_rows(count, vocabulary, [&](std::int64_t row) {
          const std::int64_t index = begin + row;
          training_kernels().score(logits_data + row * vocabulary, vocabulary, static_cast<float>(1 / temperature),
                                   targets.data_ptr<std::int64_t>()[index], logprobs.data_ptr<float>() + index,
                                   entropies.data_ptr<float>() + index, log_sums.data_ptr<float>() + index);
        });
        if (keeps_logits) context->saved_data["logits"] = logits;
      } else {
        // At most two tensors of [rows, vocabulary] exist at a time.
        const Tensor log_p = logits.div_(temperature).log_softmax(-1);
        logits = Tensor();
        logprobs.narrow(0, begin, count)
            .copy_(log_p.gather(1, targets.narrow(0, begin, count).unsqueeze(1)).squeeze(1));
        entropies.narrow(0, begin, count).copy_(log_p.exp().mul_(log_p).sum(-1).neg());
      }
    }
    context->save_for_backward({hidden, weight, targets, log_sums});
    context->saved_data["temperature"] = temperature;
    context->saved_data["is_frozen"] = !weight.requires_grad();
    context->mark_non_differentiable({entropies});
    return {logprobs, entropies};
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const Tensor &hidden = saved[0], &weight = saved[1], &targets = saved[2], &log_sums = saved[3];
    const double temperature = context->saved_data["temperature"].toDouble();
    const std::int64_t rows = hidden.size(0), vocabulary = weight.size(0);
    Tensor kept_logits;  // overwritten below; a second backward pass computes the logits again
    if (const auto saved_logits = context->saved_data.find("logits"); saved_logits != context->saved_data.end()) {
      kept_logits = saved_logits->second.toTensor();
      context->saved_data.erase("logits");
    }
    const Tensor hidden_gradient = torch::empty_like(hidden);
    const bool is_single_part = rows > 0 && rows <= rows_max(weight);
    const bool is_frozen = context->saved_data["is_frozen"].toBool();
    Tensor weight_gradient =
        is_single_part || is_frozen ? Tensor() : torch::zeros_like(weight, torch::kFloat);  // a sum over several parts
    for (std::int64_t begin = 0; begin < rows; begin += rows_max(weight)) {
      const std::int64_t count = std::min(rows_max(weight), rows - begin);
      const Tensor part = hidden.narrow(0, begin, count);
      const Tensor slopes = gradients[0].narrow(0, begin, count).contiguous();
      Tensor gradient =
          kept_logits.defined() ? kept_logits : logits_of(part, weight);  // the logits, then their gradient
      kept_logits = Tensor();
      if (gradient.is_cpu()) {
        auto* const logits_data = gradient.data_ptr<float>();
        parallel_for_rows(count, vocabulary, [&](std::int64_t row) {
          const std::int64_t index = begin + row;
          training_kernels().score_backward(logits_data + row * vocabulary, vocabulary,
                                            static_cast<float>(1 / temperature),
                                            targets.data_ptr<std::int64_t>()[index], log_sums.data_ptr<float>()[index],
                                            slopes.data_ptr<float>()[row]);
        });
      } else {
        // d log p[target] / d logit = (onehot - p) / temperature
        const Tensor scale = slopes.unsqueeze(1) / temperature;
        gradient = gradient.div_(temperature).softmax(-1).mul_(-scale);
        gradient.scatter_add_(1, targets.narrow(0, begin, count).unsqueeze(1), scale);
      }
      gradient = gradient.to(weight.scalar_type());
      hidden_gradient.narrow(0, begin, count).copy_(gradient.mm(weight));
      if (is_frozen) continue;
      if (is_single_part)
        weight_gradient = gradient.t().mm(part);
      else if (gradient.scalar_type() == torch::kFloat)
        weight_gradient.addmm_(gradient.t(), part);
      else
        add_product_by_parts(weight_gradient, gradient, part);
    }
    return {hidden_gradient, is_frozen ? Tensor() : weight_gradient.to(weight.scalar_type()), Tensor(), Tensor()};
  }
};

}  // namespace

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  TORCH_CHECK(weight.numel() == x.size(-1), "a norm of ", weight.numel(), " weights for ", x.size(-1), " values");
  if (uses_cpu_kernels(x)) return RmsNorm::apply(x, weight.to(torch::kFloat), eps);
  if (training::kernels_support(x) && weight.scalar_type() == x.scalar_type())
    return rms_norm_on_device(x, weight, eps);
  const Tensor x_fp32 = x.to(torch::kFloat);
  const Tensor normed = x_fp32 * torch::rsqrt(x_fp32.square().mean(-1, /*keepdim=*/true) + eps);
  return weight.scalar_type() == x.scalar_type() ? normed.to(x.scalar_type()) * weight
                                                 : (normed * weight).to(x.scalar_type());
}

Tensor joint_product(const Tensor& x, const Tensor& joint_weight, const Tensor& q, const Tensor& k, const Tensor& v) {
  return JointProduct::apply(x, joint_weight, q, k, v);
}

Tensor rotate(const Tensor& qkv, const Rotation& rotation) {
  const std::int64_t tokens = qkv.size(0), all_heads = rotation.heads + 2 * rotation.kv_heads,
                     rotated_heads = rotation.heads + rotation.kv_heads, dim = qkv.size(1) / all_heads;
  const auto fp32_or_empty = [](const Tensor& weight) {
    return weight.defined() ? weight.to(torch::kFloat) : torch::empty({0});
  };
  if (uses_cpu_kernels(qkv))
    return Rotated::apply(qkv, rotation.cos, rotation.sin, fp32_or_empty(rotation.q_norm),
                          fp32_or_empty(rotation.k_norm), rotation.heads, rotation.kv_heads, rotation.eps);
  if (supports_rotate_on_device(qkv, rotation)) return rotate_on_device(qkv, rotation);
  const Tensor rows = qkv.view({tokens, all_heads, dim});
  Tensor qk = rows.narrow(1, 0, rotated_heads).to(torch::kFloat);
  if (rotation.q_norm.defined()) {
    const Tensor norms =
        torch::cat({rotation.q_norm.expand({rotation.heads, dim}), rotation.k_norm.expand({rotation.kv_heads, dim})});
    qk = qk * torch::rsqrt(qk.square().mean(-1, /*keepdim=*/true) + rotation.eps) * norms;
  }
  const auto per_token = [&](const Tensor& angles) {
    return (angles.size(0) == tokens ? angles : angles.repeat({tokens / angles.size(0), 1})).unsqueeze(1);
  };
  // roll() swaps the halves of each head.
  qk =
      torch::addcmul(qk * per_token(rotation.cos), qk.roll(dim / 2, -1), per_token(rotation.sin)).to(qkv.scalar_type());
  return torch::cat({qk, rows.narrow(1, rotated_heads, rotation.kv_heads)}, 1);
}

Tensor gated(const Tensor& gate, const Tensor& up) {
  if (uses_cpu_kernels(gate)) return Gated</*by_gelu=*/false>::apply(gate, up);
  return training::kernels_support(gate) ? gated_on_device(gate, up) : torch::silu(gate) * up;
}

Tensor gelu_gated(const Tensor& gate, const Tensor& up) {
  if (uses_cpu_kernels(gate)) return Gated</*by_gelu=*/true>::apply(gate, up);
  return torch::gelu(gate, "tanh") * up;  // the GPU's kernels have no GELU
}

AttentionMethod fastest_attention(const torch::Device& device, [[maybe_unused]] bool has_window) {
  if (device.is_cpu()) return AttentionMethod::kKernels;
#ifdef ECHOLINE_FUSED_ATTENTION
  return has_window ? AttentionMethod::kProducts : AttentionMethod::kFused;
#else
  return AttentionMethod::kProducts;
#endif
}

Tensor attend_packed(const Tensor& qkv, std::int64_t heads, std::int64_t kv_heads, const Tensor& segments,
                     AttentionMethod method, std::int64_t window) {
  const Tensor counts = segments.select(1, 1);  // column 1 is Segment::count
  TORCH_CHECK(segments.is_cpu() && counts.sum().item<std::int64_t>() == qkv.size(0),
              "segments do not cover the tokens");
#ifdef ECHOLINE_FUSED_ATTENTION
  TORCH_CHECK(method != AttentionMethod::kFused || window == 0, "fused attention has no windows");
  if (method == AttentionMethod::kFused) return attend_fused(qkv, {heads, kv_heads}, segments);
#endif
  return PackedAttention::apply(qkv, segments, heads, kv_heads, method == AttentionMethod::kProducts, window);
}

LinearScores linear_scores(const Tensor& hidden, const Tensor& weight, const Tensor& targets, double temperature) {
  if (supports_scores_on_device(hidden, weight)) return linear_scores_on_device(hidden, weight, targets, temperature);
  const auto scores = LinearLogprob::apply(hidden, weight, targets, temperature);
  return {scores[0], scores[1]};
}

}  // namespace echoline::model

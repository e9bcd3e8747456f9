// AdamW for Trainer and the warm start.
#include "learner/training/optimizer.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "model/cuda/training_device.hpp"

namespace echoline::learner {
namespace {

constexpr std::int64_t kBlock = 256;  // values that share a scale
// Values per part of an update, a multiple of kBlock; bounds memory. On a CPU, they fit into caches. On a GPU, each
// part costs a dozen launches, so parts are larger.
std::int64_t values_per_part(const torch::Tensor& tensor) {
  return tensor.is_cpu() ? std::int64_t{1} << 20 : std::int64_t{1} << 26;
}
constexpr double kMoment1Steps = 127, kMoment2Steps = 255;  // codes of 8-bit moments
constexpr float kScaleMin = 1e-30f;                         // avoids a division by zero
constexpr double kNormMin = 1e-300;                         // the same for a gradient of zero

std::int64_t block_count(std::int64_t values) { return (values + kBlock - 1) / kBlock; }

// Cuts the values into blocks: [values] -> [blocks, kBlock]. The last block is filled up with zeros.
torch::Tensor in_blocks(const torch::Tensor& flat) {
  const std::int64_t missing = block_count(flat.numel()) * kBlock - flat.numel();
  return (missing > 0 ? torch::constant_pad_nd(flat, {0, missing}) : flat).view({-1, kBlock});
}

// The fraction between two codes from which a value is rounded up. Over successive updates, each place of a block
// passes evenly through [0, 1).
torch::Tensor thresholds(std::int64_t updates, const torch::Device& device) {
  // Additive constants of the R2 sequence, which covers a square evenly (Roberts 2018).
  constexpr double kPlaceFactor = 0.7548776662466927, kUpdateFactor = 0.5698402909980532;
  const torch::Tensor place = torch::arange(kBlock, torch::TensorOptions().dtype(torch::kFloat64).device(device));
  return (place * kPlaceFactor + static_cast<double>(updates) * kUpdateFactor).frac().to(torch::kFloat32);
}

// optimizer.hpp defines the codes of both moments. A scale is the largest magnitude of a block. narrow() drops the
// zeros that in_blocks() has added.
torch::Tensor decode_moment1(const torch::Tensor& codes, const torch::Tensor& scales) {
  const torch::Tensor root = in_blocks(codes.to(torch::kFloat32)).div_(kMoment1Steps);
  return root.mul(root.abs()).mul_(scales.unsqueeze(1)).view({-1}).narrow(0, 0, codes.numel());
}

torch::Tensor decode_moment2(const torch::Tensor& codes, const torch::Tensor& scales) {
  const torch::Tensor root = in_blocks(codes.to(torch::kFloat32)).div_(kMoment2Steps);
  return root.square().square_().mul_(scales.unsqueeze(1)).view({-1}).narrow(0, 0, codes.numel());
}

void encode_moment1(const torch::Tensor& values, const torch::Tensor& codes, const torch::Tensor& scales,
                    const torch::Tensor& threshold) {
  const torch::Tensor blocks = in_blocks(values);
  scales.copy_(blocks.abs().amax(1));
  const torch::Tensor share = blocks / scales.clamp_min(kScaleMin).unsqueeze(1);
  const torch::Tensor steps = share.sign().mul_(share.abs().sqrt_()).mul_(kMoment1Steps).add_(threshold).floor_();
  codes.copy_(steps.clamp_(-kMoment1Steps, kMoment1Steps).view({-1}).narrow(0, 0, codes.numel()));
}

// Never encodes a positive value as zero, because updates divide by it.
void encode_moment2(const torch::Tensor& values, const torch::Tensor& codes, const torch::Tensor& scales,
                    const torch::Tensor& threshold) {
  const torch::Tensor blocks = in_blocks(values);
  scales.copy_(blocks.amax(1));
  const torch::Tensor share = blocks / scales.clamp_min(kScaleMin).unsqueeze(1);
  const torch::Tensor steps = share.sqrt().sqrt_().mul_(kMoment2Steps).add_(threshold).floor_();
  codes.copy_(
      steps.clamp_(0, kMoment2Steps).maximum((share > 0).to(torch::kFloat32)).view({-1}).narrow(0, 0, codes.numel()));
}

}  // namespace

AdamW::AdamW(const NamedParameters& parameters, const OptimizerConfig& config) {
  slots_.reserve(parameters.size());
  for (const auto& [name, parameter] : parameters) {
    Slot& slot = slots_.emplace_back();
    slot.name = name;
    slot.parameter = parameter;
  }
  reset(config);
}

void AdamW::reset(const OptimizerConfig& config) {
  torch::NoGradGuard no_gradient;
  config_ = config;
  updates_ = 0;
  for (Slot& slot : slots_) {
    const torch::Device device = config_.on_host ? torch::Device(torch::kCPU) : slot.parameter.device();
    // W of the header's formulas: the parameter in fp32, where updates far below a bf16 step add up.
    slot.master = slot.parameter.detach().to(device, torch::kFloat32).clone().contiguous();
    const auto zeros = [&](torch::ScalarType type) { return torch::zeros_like(slot.master, type); };
    const bool is_coded = config_.moments == Moments::kInt8;
    slot.moment1 = zeros(is_coded ? torch::kInt8 : torch::kFloat32);
    slot.moment2 = zeros(is_coded ? torch::kUInt8 : torch::kFloat32);
    slot.scale1 = is_coded ? torch::zeros({block_count(slot.master.numel())}, slot.master.options()) : torch::Tensor();
    slot.scale2 = is_coded ? torch::zeros_like(slot.scale1) : torch::Tensor();
    slot.has_gathered = false;
    if (slot.parameter.scalar_type() != torch::kFloat32 && !slot.gradient.defined())
      slot.gradient = torch::zeros_like(slot.parameter, torch::kFloat32);
  }
  round_parameters();
}

void AdamW::round_parameters() {
  torch::NoGradGuard no_gradient;
  for (Slot& slot : slots_) slot.parameter.copy_(slot.master.to(torch::kBFloat16));
}

bool AdamW::is_fused() const {
  // The kernels need rows of a multiple of 8 values, so the query is about such a part of the tensor.
  return !slots_.empty() && slots_[0].master.is_cuda() && model::training::have_kernels() &&
         model::training::kernels_support(slots_[0].master.view({-1}).narrow(0, 0, slots_[0].master.numel() / 8 * 8));
}

void AdamW::gather_gradients() {
  torch::NoGradGuard no_gradient;
  const bool fused = is_fused();
  std::vector<model::training::TensorUpdate> added;
  for (Slot& slot : slots_) {
    const torch::Tensor new_gradient = slot.parameter.grad();
    if (!new_gradient.defined() || new_gradient.scalar_type() == torch::kFloat32) continue;
    slot.parameter.mutable_grad().reset();
    const bool is_first = !std::exchange(slot.has_gathered, true);
    if (fused && new_gradient.scalar_type() == torch::kBFloat16) {
      model::training::TensorUpdate& addition = added.emplace_back();
      addition.gradient = slot.gradient;
      addition.new_gradient = new_gradient.contiguous();
      addition.replaces = is_first;
      continue;
    }
    if (is_first) {
      slot.gradient.copy_(new_gradient);
      continue;
    }
    const torch::Tensor sum = slot.gradient.view({-1}), addend = new_gradient.reshape({-1});
    const std::int64_t part_values = values_per_part(sum);
    // In parts, because add_() first widens its addend to fp32, in new memory.
    for (std::int64_t begin = 0; begin < sum.numel(); begin += part_values) {
      const std::int64_t count = std::min(part_values, sum.numel() - begin);
      sum.narrow(0, begin, count).add_(addend.narrow(0, begin, count));
    }
  }
  if (!added.empty()) model::training::add_gradients(added);
}

void AdamW::clear_gradients() {
  for (Slot& slot : slots_) {
    slot.parameter.mutable_grad().reset();
    slot.has_gathered = false;
  }
}

double AdamW::learning_rate() const {
  if (updates_ < config_.warmup_updates)
    return config_.learning_rate * static_cast<double>(updates_ + 1) / static_cast<double>(config_.warmup_updates);
  if (config_.schedule == Schedule::kConstant) return config_.learning_rate;
  const double progress = std::min(1.0, static_cast<double>(updates_ - config_.warmup_updates) /
                                            static_cast<double>(config_.updates_expected - config_.warmup_updates));
  const double share_left =
      config_.schedule == Schedule::kLinear ? 1 - progress : (1 + std::cos(progress * std::numbers::pi)) / 2;
  return config_.learning_rate * (config_.final_share + (1 - config_.final_share) * share_left);
}

void AdamW::update(Slot& slot, const torch::Tensor& gradient, double clip_factor, double rate) {
  const auto update_number = static_cast<double>(updates_);  // step() has counted this update already
  const double correction1 = 1.0 - std::pow(config_.beta1, update_number),
               correction2 = 1.0 - std::pow(config_.beta2, update_number);
  const bool decays = slot.master.dim() >= 2 && config_.weight_decay > 0, is_coded = slot.scale1.defined();
  const torch::Device device = slot.master.device();
  const torch::Tensor threshold = is_coded ? thresholds(updates_, device) : torch::Tensor();
  const torch::Tensor gradients = gradient.reshape({-1}), parameters = slot.parameter.detach().view({-1});
  const std::int64_t part_values = values_per_part(slot.master);
  for (std::int64_t begin = 0; begin < gradients.numel(); begin += part_values) {
    const std::int64_t count = std::min(part_values, gradients.numel() - begin);
    const auto part = [&](const torch::Tensor& tensor) { return tensor.view({-1}).narrow(0, begin, count); };
    const auto scales = [&](const torch::Tensor& tensor) {
      return tensor.narrow(0, begin / kBlock, block_count(count));
    };
    // g, m and v: the gradient and the two moments, as in papers on Adam.
    torch::Tensor g = gradients.narrow(0, begin, count).to(device);
    if (clip_factor < 1.0) g = g * clip_factor;
    const torch::Tensor m = is_coded ? decode_moment1(part(slot.moment1), scales(slot.scale1)) : part(slot.moment1);
    const torch::Tensor v = is_coded ? decode_moment2(part(slot.moment2), scales(slot.scale2)) : part(slot.moment2);
    const torch::Tensor master = part(slot.master);
    m.mul_(config_.beta1).add_(g, 1.0 - config_.beta1);
    v.mul_(config_.beta2).addcmul_(g, g, 1.0 - config_.beta2);
    const torch::Tensor denominator = (v / correction2).sqrt_().add_(config_.epsilon);
    if (decays) master.mul_(1.0 - rate * config_.weight_decay);
    master.addcdiv_(m, denominator, -rate / correction1);
    if (is_coded) {
      encode_moment1(m, part(slot.moment1), scales(slot.scale1), threshold);
      encode_moment2(v, part(slot.moment2), scales(slot.scale2), threshold);
    }
    parameters.narrow(0, begin, count).copy_(master.to(torch::kBFloat16));
  }
}

// One entry per slot, with the gradient at the same index of `gradients`, which may be undefined.
std::vector<model::training::TensorUpdate> AdamW::fused_updates(const std::vector<torch::Tensor>& gradients) const {
  std::vector<model::training::TensorUpdate> entries;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    model::training::TensorUpdate& entry = entries.emplace_back();
    entry.parameter = slot.parameter.detach();
    entry.master = slot.master;
    entry.moment1 = slot.moment1;
    entry.moment2 = slot.moment2;
    entry.scale1 = slot.scale1;
    entry.scale2 = slot.scale2;
    if (gradients[i].defined()) entry.gradient = gradients[i].contiguous();
    entry.decays = slot.master.dim() >= 2 && config_.weight_decay > 0;
  }
  return entries;
}

double AdamW::gradient_norm(const std::vector<torch::Tensor>& gradients) const {
  double squared_norm = 0;
  if (is_fused()) {
    squared_norm = model::training::sum_of_squares(fused_updates(gradients)).item<double>();
  } else if (gradients.size() > 0 && slots_[0].parameter.is_cuda()) {
    std::vector<torch::Tensor> norms;  // read together, because each read waits for the device
    for (const torch::Tensor& gradient : gradients)
      if (gradient.defined()) norms.push_back(gradient.norm());
    if (!norms.empty()) squared_norm = torch::stack(norms).to(torch::kDouble).square().sum().item<double>();
  } else {
    for (const torch::Tensor& gradient : gradients) {
      if (!gradient.defined()) continue;
      const double norm = gradient.norm().item<double>();
      squared_norm += norm * norm;
    }
  }
  return std::sqrt(squared_norm);
}

void AdamW::update_fused(const std::vector<torch::Tensor>& gradients, double clip_factor, double rate) {
  const auto update_number = static_cast<double>(updates_);
  const torch::Device device = slots_[0].master.device();
  const model::training::AdamWFactors factors{.clip = clip_factor,
                                              .beta1 = config_.beta1,
                                              .beta2 = config_.beta2,
                                              .correction1 = 1.0 - std::pow(config_.beta1, update_number),
                                              .correction2 = 1.0 - std::pow(config_.beta2, update_number),
                                              .epsilon = config_.epsilon,
                                              .rate = rate,
                                              .weight_decay = config_.weight_decay};
  model::training::update(fused_updates(gradients), factors,
                          config_.moments == Moments::kInt8 ? thresholds(updates_, device) : torch::Tensor());
}

UpdateReport AdamW::step() {
  torch::NoGradGuard no_gradient;
  gather_gradients();
  std::vector<torch::Tensor> gradients;
  for (const Slot& slot : slots_) gradients.push_back(slot.has_gathered ? slot.gradient : slot.parameter.grad());
  UpdateReport report{.gradient_norm = gradient_norm(gradients), .learning_rate = learning_rate(), .applied = false};
  report.applied = std::isfinite(report.gradient_norm);
  if (report.applied) {
    ++updates_;
    const double clip_factor = std::min(1.0, config_.gradient_norm_max / std::max(report.gradient_norm, kNormMin));
    if (is_fused()) {
      update_fused(gradients, clip_factor, report.learning_rate);
    } else {
      for (std::size_t i = 0; i < slots_.size(); ++i) {
        Slot& slot = slots_[i];
        torch::Tensor gradient = std::move(gradients[i]);
        if (!gradient.defined()) gradient = torch::zeros_like(slot.parameter, torch::kFloat32);
        update(slot, gradient, clip_factor, report.learning_rate);
        // Frees the gradient before the next tensor's update, which needs memory of its own.
        gradient = torch::Tensor();
        slot.parameter.mutable_grad().reset();
      }
    }
  }
  clear_gradients();
  return report;
}

}  // namespace echoline::learner

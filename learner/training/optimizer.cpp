#include "learner/training/optimizer.hpp"

#include <algorithm>
#include <cmath>

namespace echoline::learner {

AdamW::AdamW(const NamedParameters& parameters, const OptimizerConfig& config) {
  slots_.reserve(parameters.size());
  for (const auto& [name, parameter] : parameters) {
    Slot slot{name, parameter, {}, {}, {}, {}};
    slots_.push_back(std::move(slot));
  }
  reset(config);
}

void AdamW::reset(const OptimizerConfig& config) {
  torch::NoGradGuard no_gradient;
  config_ = config;
  updates_ = 0;
  for (Slot& slot : slots_) {
    slot.master = slot.parameter.detach().to(torch::kFloat32).clone().contiguous();
    slot.moment1 = torch::zeros_like(slot.master);
    slot.moment2 = torch::zeros_like(slot.master);
  }
  publish();
}

void AdamW::publish() {
  torch::NoGradGuard no_gradient;
  for (Slot& slot : slots_) slot.parameter.copy_(slot.master.to(torch::kBFloat16));
}

void AdamW::gather_gradients() {
  torch::NoGradGuard no_gradient;
  for (Slot& slot : slots_) {
    const torch::Tensor fresh = slot.parameter.grad();
    if (!fresh.defined()) continue;
    slot.parameter.mutable_grad().reset();
    if (slot.gradient.defined())
      slot.gradient.add_(fresh);
    else
      slot.gradient = fresh.to(torch::kFloat32);
  }
}

void AdamW::clear_gradients() {
  for (Slot& slot : slots_) {
    slot.parameter.mutable_grad().reset();
    slot.gradient.reset();
  }
}

double AdamW::rate() const {
  if (updates_ >= config_.warmup_updates) return config_.learning_rate;
  return config_.learning_rate * static_cast<double>(updates_ + 1) / static_cast<double>(config_.warmup_updates);
}

UpdateReport AdamW::step() {
  torch::NoGradGuard no_gradient;
  gather_gradients();
  double squared_norm = 0;
  for (Slot& slot : slots_) {
    if (!slot.gradient.defined()) slot.gradient = torch::zeros_like(slot.master);
    const double norm = slot.gradient.norm().item<double>();
    squared_norm += norm * norm;
  }
  UpdateReport report{std::sqrt(squared_norm), rate(), std::isfinite(squared_norm)};
  if (report.applied) {
    ++updates_;
    const double scale = std::min(1.0, config_.gradient_norm_max / std::max(report.gradient_norm, 1e-300));
    const auto n = static_cast<double>(updates_);
    const double correction1 = 1.0 - std::pow(config_.beta1, n);
    const double correction2 = 1.0 - std::pow(config_.beta2, n);
    for (Slot& slot : slots_) {
      const torch::Tensor gradient = scale < 1.0 ? slot.gradient.mul_(scale) : slot.gradient;
      slot.moment1.mul_(config_.beta1).add_(gradient, 1.0 - config_.beta1);
      slot.moment2.mul_(config_.beta2).addcmul_(gradient, gradient, 1.0 - config_.beta2);
      const torch::Tensor denominator = (slot.moment2 / correction2).sqrt_().add_(config_.epsilon);
      if (slot.master.dim() >= 2 && config_.weight_decay > 0)
        slot.master.mul_(1.0 - report.learning_rate * config_.weight_decay);
      slot.master.addcdiv_(slot.moment1, denominator, -report.learning_rate / correction1);
    }
    publish();
  }
  clear_gradients();
  return report;
}

}  // namespace echoline::learner

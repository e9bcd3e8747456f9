// Checks and converts adapters that a trainer publishes; the external policy source calls it.
#include "learner/external/published_adapter.hpp"

#include <algorithm>
#include <memory>
#include <vector>

#include "model/bf16.hpp"
#include "model/finite.hpp"

namespace echoline::learner {
namespace {

constexpr std::string_view kOperation = "publish adapter";

std::string text_of(const model::AdapterConfig& adapter) {
  return fmt::format("rank {}, alpha {} and targets {}", adapter.rank, adapter.alpha, fmt::join(adapter.targets, ", "));
}

// Removes the name that PEFT's modules give an adapter, as in lora_A.default.weight.
void remove_default(std::string& name) {
  constexpr std::string_view kDefault = ".default", kWeight = ".weight";
  const std::size_t at = name.find(kDefault);
  if (at != std::string::npos && model::is_adapter_tensor(name) &&
      name.compare(at + kDefault.size(), kWeight.size(), kWeight) == 0)
    name.erase(at, kDefault.size());
}

// Copies a tensor of bf16 or fp32 values as bf16.
Status copy_rounded(const delta::TensorView& from, std::span<std::byte> to) {
  if (from.dtype != delta::DType::kBF16 && from.dtype != delta::DType::kF32)
    return fail(Code::kInvalid, kOperation, "tensor '{}' has type {}, expected BF16 or F32", from.name,
                delta::dtype_name(from.dtype));
  model::copy_as_bf16(from, to);
  return ok();
}

}  // namespace

Status check_adapter_config(std::string_view peft_json, const model::AdapterConfig& run_adapter) {
  ECHO_ASSIGN(const model::AdapterConfig published, model::AdapterConfig::from_json(peft_json));
  if (published.computes_as(run_adapter)) return ok();
  return fail(Code::kInvalid, kOperation, "its adapter_config.json has {}, expected the run's `learner.adapter`: {}",
              text_of(published), text_of(run_adapter));
}

Result<delta::OwnedState> join_published(const delta::SharedState& base, delta::StateView published,
                                         const model::AdapterConfig& run_adapter) {
  for (delta::TensorView& tensor : published) remove_default(tensor.name);
  ECHO_ASSIGN(published, delta::canonical(std::move(published)));
  const model::SplitPolicy parts = model::split_adapter(published);
  for (const delta::TensorView& tensor : parts.base) {
    const auto index = base->find(tensor.name);
    if (!index || !std::ranges::equal(base->bytes(*index), tensor.bytes))
      return fail(Code::kInvalid, kOperation,
                  "tensor '{}' is not that of the run's base, and with `learner.adapter` only the adapter is trained",
                  tensor.name);
  }
  ECHO_ASSIGN(const delta::StateView joined, model::join_adapter(base->view(), parts.adapter, run_adapter));
  ECHO_TRY(model::check_finite(parts.adapter));

  struct Owner {  // keeps the memory of the joined policy
    delta::SharedState base;
    delta::OwnedState adapter;
  };
  const auto owner = std::make_shared<Owner>();
  owner->base = base;
  ECHO_ASSIGN(const delta::StateView adapter_layout, model::adapter_layout(base->view(), run_adapter));
  ECHO_ASSIGN(owner->adapter, delta::OwnedState::empty_like(adapter_layout));
  // The policy's tensors are the adapter's, copied as bf16, and those of the base in the base's own memory.
  delta::StateView layout = joined;
  std::vector<std::span<std::byte>> memory;
  for (delta::TensorView& tensor : layout) {
    if (const auto index = owner->adapter.find(tensor.name)) {
      memory.push_back(owner->adapter.mutable_bytes(*index));
      ECHO_TRY(copy_rounded(tensor, memory.back()));
      tensor.dtype = delta::DType::kBF16;
    } else {
      const std::span<const std::byte> bytes = base->bytes(base->find(tensor.name).value());
      memory.emplace_back(const_cast<std::byte*>(bytes.data()), bytes.size());  // a shared state does not change
    }
  }
  return delta::OwnedState::over(layout, memory, owner);
}

}  // namespace echoline::learner

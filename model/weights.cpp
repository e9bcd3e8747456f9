// Copies weights between Transformer, policy states and safetensors files.
#include "model/weights.hpp"

#include <algorithm>

#include "delta/checkpoint.hpp"

namespace echoline::model {
namespace {

using torch::Tensor;
constexpr std::string_view kEmbedding = "model.embed_tokens.weight";
constexpr std::string_view kHead = "lm_head.weight";

// A tensor over memory that another object owns. Callers write through it only if they own that memory.
Tensor borrow(const std::byte* bytes, const std::vector<std::int64_t>& shape, torch::ScalarType type) {
  return torch::from_blob(const_cast<std::byte*>(bytes), shape, type);
}

// Calls body() without gradients, and returns its exceptions as errors.
template <class Body>
auto catch_torch_errors(std::string_view operation, Body&& body) -> decltype(body()) {
  try {
    torch::NoGradGuard no_grad;
    return body();
  } catch (const c10::Error& e) {
    return fail(Code::kExhausted, operation, "{}", e.what_without_backtrace());
  } catch (const std::exception& e) {
    return fail(Code::kExhausted, operation, "{}", e.what());
  }
}

// The weights with their names, in the order of a policy's tensors: bytewise by name.
std::vector<std::pair<std::string, Tensor>> sorted_parameters(const Transformer& model) {
  std::vector<std::pair<std::string, Tensor>> out;
  for (const auto& item : model.named_parameters()) out.emplace_back(item.key(), item.value());
  std::sort(out.begin(), out.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  return out;
}

std::string shape_text(const std::vector<std::int64_t>& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

}  // namespace

Status export_policy(const Transformer& model, delta::OwnedState& target) {
  return catch_torch_errors("export policy", [&]() -> Status {
    const auto parameters = sorted_parameters(model);
    const delta::StateView view = target.view();
    if (view.size() != parameters.size()) {
      return fail(Code::kInvalid, "export policy", "the state has {} tensors, expected {}", view.size(),
                  parameters.size());
    }
    for (std::size_t i = 0; i < view.size(); ++i) {
      const auto& [name, weight] = parameters[i];
      if (view[i].name != name || view[i].dtype != delta::DType::kBF16 || weight.sizes() != view[i].shape) {
        return fail(Code::kInvalid, "export policy", "tensor {} of the state is {} {} {}, expected {} BF16 {}", i,
                    view[i].name, delta::dtype_name(view[i].dtype), shape_text(view[i].shape), name,
                    shape_text(weight.sizes().vec()));
      }
    }
    for (std::size_t i = 0; i < view.size(); ++i) {
      borrow(target.mutable_bytes(i).data(), view[i].shape, torch::kBFloat16).copy_(parameters[i].second);
    }
    target.seal();
    return ok();
  });
}

Result<delta::OwnedState> export_policy(const Transformer& model) {
  ECHO_ASSIGN(const delta::StateView layout, policy_layout(model.config()));
  ECHO_ASSIGN(auto state, delta::OwnedState::empty_like(layout));
  ECHO_TRY(export_policy(model, state));
  return state;
}

Result<delta::SharedState> export_base(std::shared_ptr<const Transformer> model) {
  ModelConfig base_config = model->config();
  base_config.adapter.reset();
  ECHO_ASSIGN(const delta::StateView layout, policy_layout(base_config));
  const auto parameters = model->named_parameters();
  return catch_torch_errors("export policy", [&]() -> Result<delta::SharedState> {
    if (model->device().is_cpu() && model->dtype() == torch::kBFloat16) {
      std::vector<std::span<std::byte>> memory;
      for (const delta::TensorView& tensor : layout) {
        const Tensor& weight = parameters[tensor.name];
        memory.emplace_back(static_cast<std::byte*>(weight.data_ptr()), weight.nbytes());
      }
      ECHO_ASSIGN(delta::OwnedState base, delta::OwnedState::over(layout, memory, model));
      return delta::share(std::move(base));
    }
    ECHO_ASSIGN(delta::OwnedState base, delta::OwnedState::empty_like(layout));
    for (std::size_t i = 0; i < layout.size(); ++i)
      borrow(base.mutable_bytes(i).data(), layout[i].shape, torch::kBFloat16).copy_(parameters[layout[i].name]);
    base.seal();
    return delta::share(std::move(base));
  });
}

Result<delta::OwnedState> export_policy(const Transformer& model, const delta::SharedState& base) {
  ECHO_ASSIGN(const delta::StateView layout, policy_layout(model.config()));
  const auto parameters = model.named_parameters();
  struct Parts {  // keeps the memory of the policy
    delta::SharedState base;
    delta::OwnedState adapter;
  };
  const auto parts = std::make_shared<Parts>();
  parts->base = base;
  ECHO_ASSIGN(parts->adapter, delta::OwnedState::empty_like(split_adapter(layout).adapter));
  return catch_torch_errors("export policy", [&]() -> Result<delta::OwnedState> {
    std::vector<std::span<std::byte>> memory;
    for (const delta::TensorView& tensor : layout) {
      if (is_adapter_tensor(tensor.name)) {
        memory.push_back(parts->adapter.mutable_bytes(*parts->adapter.find(tensor.name)));
        borrow(memory.back().data(), tensor.shape, torch::kBFloat16).copy_(parameters[tensor.name]);
      } else {
        const std::span<const std::byte> bytes = base->bytes(base->find(tensor.name).value());
        memory.emplace_back(const_cast<std::byte*>(bytes.data()), bytes.size());  // a shared state is never written
      }
    }
    return delta::OwnedState::over(layout, memory, parts);
  });
}

Status init_adapter(Transformer& model, std::uint64_t seed) {
  ModelConfig base_config = model.config();
  base_config.adapter.reset();
  ECHO_ASSIGN(const delta::StateView base, policy_layout(base_config));
  ECHO_ASSIGN(const delta::OwnedState adapter, init_adapter(base, model.config().adapter.value(), seed));
  const auto parameters = model.named_parameters();
  return catch_torch_errors("initialise adapter", [&]() -> Status {
    for (const delta::TensorView& tensor : adapter.view())
      Tensor(parameters[tensor.name]).copy_(borrow(tensor.bytes.data(), tensor.shape, torch::kBFloat16));
    return ok();
  });
}

Status load_policy(Transformer& model, const delta::StateView& state) {
  constexpr std::string_view kOperation = "load policy";
  return catch_torch_errors(kOperation, [&]() -> Status {
    const auto parameters = sorted_parameters(model);
    std::vector<const delta::TensorView*> sources(parameters.size(), nullptr);
    for (const delta::TensorView& tensor : state) {
      std::string_view name = tensor.name;
      // A file may repeat the embedding as the head, although the model ties them: uses one tensor for both.
      const bool repeated_head = name == kHead && model.config().tie_embeddings;
      if (repeated_head) name = kEmbedding;
      const auto it =
          std::lower_bound(parameters.begin(), parameters.end(), name,
                           [](const auto& parameter, std::string_view wanted) { return parameter.first < wanted; });
      if (it == parameters.end() || it->first != name) {
        return fail(Code::kInvalid, kOperation, "tensor '{}' is unknown to a {} model of {} layers", tensor.name,
                    family_name(model.config().family), model.config().layers);
      }
      if (it->second.sizes() != tensor.shape) {
        return fail(Code::kInvalid, kOperation, "tensor '{}' has shape {}, expected {}", tensor.name,
                    shape_text(tensor.shape), shape_text(it->second.sizes().vec()));
      }
      if (tensor.dtype != delta::DType::kBF16 && tensor.dtype != delta::DType::kF32) {
        return fail(Code::kInvalid, kOperation, "tensor '{}' has type {}, expected BF16 or F32", tensor.name,
                    delta::dtype_name(tensor.dtype));
      }
      ECHO_ASSIGN(const std::uint64_t bytes, delta::tensor_bytes(tensor.dtype, tensor.shape));
      if (tensor.bytes.size() != bytes) {
        return fail(Code::kInvalid, kOperation, "tensor '{}' has {} bytes, expected {}", tensor.name,
                    tensor.bytes.size(), bytes);
      }
      const std::size_t index = static_cast<std::size_t>(it - parameters.begin());
      const bool head_seen_first = sources[index] && sources[index]->name == kHead;
      if (sources[index] && !repeated_head && !head_seen_first) {
        return fail(Code::kInvalid, kOperation, "tensor '{}' appears twice", tensor.name);
      }
      if (sources[index] && !std::ranges::equal(sources[index]->bytes, tensor.bytes)) {
        return fail(Code::kInvalid, kOperation, "'{}' differs from '{}', but the model ties them", kHead, kEmbedding);
      }
      sources[index] = &tensor;
    }
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (!sources[i]) {
        return fail(Code::kInvalid, kOperation, "tensor '{}' is missing", parameters[i].first);
      }
    }
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto type = sources[i]->dtype == delta::DType::kBF16 ? torch::kBFloat16 : torch::kFloat;
      // Views guarantee no alignment, so an unaligned one is copied first.
      const std::size_t value_bytes = type == torch::kFloat ? 4 : 2;
      std::vector<std::byte> aligned_copy;
      const std::byte* bytes = sources[i]->bytes.data();
      if (reinterpret_cast<std::uintptr_t>(bytes) % value_bytes != 0) {
        aligned_copy.assign(bytes, bytes + sources[i]->bytes.size());
        bytes = aligned_copy.data();
      }
      Tensor weight = parameters[i].second;
      weight.copy_(borrow(bytes, sources[i]->shape, type));
    }
    return ok();
  });
}

Status load_changes(Transformer& model, const delta::StateView& state, std::span<const delta::TensorWrite> written) {
  const auto parameters = sorted_parameters(model);
  // A state in fp32, or with a tied head that repeats the embedding, has other tensors than the model. `written` does
  // not fit the model's weights then, so the whole state is loaded.
  for (std::size_t i = 0; i < state.size(); ++i)
    if (state.size() != parameters.size() || state[i].name != parameters[i].first ||
        state[i].dtype != delta::DType::kBF16 || parameters[i].second.sizes() != state[i].shape)
      return load_policy(model, state);
  return catch_torch_errors("load changes", [&]() -> Status {
    for (const delta::TensorWrite& write : written) {
      const Tensor& weight = parameters[write.tensor].second;
      // Weights in this form have the same bytes as the policy, so that the change can be written as bytes.
      if (weight.is_cpu() && weight.scalar_type() == torch::kBFloat16 && weight.is_contiguous()) {
        write.write_to({static_cast<std::byte*>(weight.data_ptr()) + write.first_byte, write.byte_count});
        continue;
      }
      const auto elements = static_cast<std::int64_t>(write.byte_count / 2);
      Tensor part = weight.view(-1).narrow(0, static_cast<std::int64_t>(write.first_byte / 2), elements);
      const auto count = static_cast<std::int64_t>(write.values.size() / 2);
      const Tensor values = borrow(write.values.data(), {count}, torch::kBFloat16);
      if (write.whole) {
        part.copy_(values);
        continue;
      }
      Tensor positions = torch::empty({count}, torch::kInt64);
      std::copy(write.positions.begin(), write.positions.end(), positions.data_ptr<std::int64_t>());
      part.index_copy_(0, positions.to(part.device()), values.to(part.device(), part.scalar_type()));
    }
    return ok();
  });
}

Result<LoadedModel> load_model(const std::filesystem::path& folder, torch::Device device,
                               std::optional<torch::ScalarType> dtype) {
  ECHO_ASSIGN(ModelFiles files, ModelFiles::read(folder));
  ECHO_ASSIGN(const auto checkpoint, delta::Checkpoint::open(folder));
  ECHO_ASSIGN(auto transformer, catch_torch_errors("load model", [&]() -> Result<std::shared_ptr<Transformer>> {
                return std::make_shared<Transformer>(files.config, device, dtype);
              }));
  if (const Status loaded = load_policy(*transformer, checkpoint.view()); !loaded) {
    return fail(loaded.error().code, folder.string(), "{}", loaded.error().detail);
  }
  return LoadedModel{.transformer = std::move(transformer), .files = std::move(files)};
}

Result<std::shared_ptr<Transformer>> init(const ModelConfig& config, std::uint64_t seed, torch::Device device,
                                          std::optional<torch::ScalarType> dtype) {
  ECHO_ASSIGN(std::shared_ptr<Transformer> model, create(config, device, dtype));
  ECHO_ASSIGN(const delta::OwnedState policy, init_policy(config, seed));
  ECHO_TRY(load_policy(*model, policy.view()));
  return model;
}

}  // namespace echoline::model

// The weights of the models in vectors.json.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>

#include "model/bf16.hpp"
#include "model/policy.hpp"

namespace echoline::model {

// The value `index` of the tensor `name`, as weight() in make.py defines it.
inline float recipe_value(const std::string& name, std::uint64_t index, bool is_plain_norm) {
  std::uint64_t digest = 0xcbf29ce484222325;
  for (const char c : name) digest = (digest ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  std::uint64_t bits = digest + index + 0x9e3779b97f4a7c15;
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111eb;
  bits ^= bits >> 31;
  const double uniform = std::ldexp(static_cast<double>(bits >> 40), -24);
  return static_cast<float>(is_plain_norm ? uniform + 0.5 : uniform - 0.5);
}

// A policy of these values. Those of an adapter have the names that PEFT's model has, as those in its files.
inline delta::OwnedState recipe_policy(const ModelConfig& config) {
  delta::OwnedState policy = delta::OwnedState::empty_like(policy_layout(config).value()).value();
  const delta::StateView layout = policy.view();
  for (std::size_t i = 0; i < layout.size(); ++i) {
    const bool is_norm = layout[i].shape.size() == 1 && !layout[i].name.ends_with(".bias");
    const std::span<std::byte> bytes = policy.mutable_bytes(i);
    for (std::size_t byte = 0; byte < bytes.size(); byte += 2) {
      const std::uint16_t value = to_bf16(recipe_value(layout[i].name, byte / 2, is_norm && !config.norms_add_one()));
      std::memcpy(bytes.data() + byte, &value, sizeof value);
    }
  }
  policy.seal();
  return policy;
}

}  // namespace echoline::model

#include "data_plane/adapters/adapter_config.hpp"

#include <algorithm>
#include <bit>

#include "base/random.hpp"
#include "base/suggest.hpp"

namespace echoline::data_plane {

std::string unknown_name(std::string_view name, std::span<const std::string> known) {
  name = name.substr(0, 64);
  return fmt::format("'{}'{}; known: {}", name, did_you_mean(name, known), fmt::join(known, ", "));
}

Result<AdapterConfig> AdapterConfig::parse(std::string_view adapter, std::string_view json,
                                           std::initializer_list<std::string_view> known) {
  AdapterConfig config;
  config.adapter_ = adapter;
  config.object_ = json.empty() ? nlohmann::json::object()
                                : nlohmann::json::parse(json.begin(), json.end(), nullptr, /*allow_exceptions=*/false);
  if (!config.object_.is_object())
    return config.wrong("the configuration must be a JSON object, found {}",
                        config.object_.is_discarded() ? "invalid JSON" : config.object_.type_name());
  const std::vector<std::string> names(known.begin(), known.end());
  for (const auto& [key, value] : config.object_.items())
    if (std::find(names.begin(), names.end(), key) == names.end())
      return config.wrong("unknown key {}", unknown_name(key, names));
  return config;
}

Result<std::uint64_t> AdapterConfig::integer(const char* key, std::uint64_t fallback, std::uint64_t min,
                                             std::uint64_t max) const {
  if (!has(key)) return fallback;
  const nlohmann::json& value = object_[key];
  if (!value.is_number_unsigned() || value.get<std::uint64_t>() < min || value.get<std::uint64_t>() > max)
    return wrong("'{}' is {}, expected an integer from {} to {}", key, value.dump(), min, max);
  return value.get<std::uint64_t>();
}

Result<double> AdapterConfig::number(const char* key, double fallback, double min, double max) const {
  if (!has(key)) return fallback;
  const nlohmann::json& value = object_[key];
  if (!value.is_number() || !(value.get<double>() >= min && value.get<double>() <= max))
    return wrong("'{}' is {}, expected a number from {} to {}", key, value.dump(), min, max);
  return value.get<double>();
}

Result<std::string> AdapterConfig::text(const char* key, std::string fallback) const {
  if (!has(key)) return fallback;
  if (!object_[key].is_string()) return wrong("'{}' is {}, expected a string", key, object_[key].type_name());
  return object_[key].get<std::string>();
}

Result<std::vector<std::string>> AdapterConfig::texts(const char* key, std::vector<std::string> fallback) const {
  if (!has(key)) return fallback;
  const nlohmann::json& value = object_[key];
  const bool strings = value.is_array() && !value.empty() &&
                       std::all_of(value.begin(), value.end(), [](const auto& v) { return v.is_string(); });
  if (!strings) return wrong("'{}' must be a non-empty list of strings", key);
  return value.get<std::vector<std::string>>();
}

std::uint64_t permuted(std::uint64_t index, std::uint64_t size, std::uint64_t key) {
  ECHO_CHECK(index < size, "index {} of {}", index, size);
  const auto half_bits = std::max<std::uint64_t>(1, (static_cast<std::uint64_t>(std::bit_width(size - 1)) + 1) / 2);
  const std::uint64_t mask = (std::uint64_t{1} << half_bits) - 1;
  do {  // the domain is less than 4 x size (or 4), so the walk is short
    std::uint64_t left = index >> half_bits, right = index & mask;
    for (std::uint64_t round = 0; round < 4; ++round) {
      const std::uint64_t mixed = left ^ (mix64(mix64(key + round) ^ right) & mask);
      left = right;
      right = mixed;
    }
    index = (left << half_bits) | right;
  } while (index >= size);
  return index;
}

std::uint64_t shuffled_cycle(std::uint64_t index, std::uint64_t size, std::uint64_t key) {
  return permuted(index % size, size, mix64(key ^ mix64(index / size + 1)));
}

}  // namespace echoline::data_plane

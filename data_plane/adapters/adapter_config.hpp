// What the built-in adapters share: reading their JSON configuration with exact errors, and seeded permutations.
#pragma once
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>

#include "data_plane/adapters/adapter.hpp"

namespace echoline::data_plane {

// "'x'; did you mean 'y'?; known: a, b, y" (the suggestion only when one is near).
std::string unknown_name(std::string_view name, std::span<const std::string> known);

// A JSON object whose keys are all in `known`; each getter checks type and range and names the key.
class AdapterConfig {
 public:
  static Result<AdapterConfig> parse(std::string_view adapter, std::string_view json,
                                     std::initializer_list<std::string_view> known);
  bool has(const char* key) const { return object_.contains(key); }
  Result<std::uint64_t> integer(const char* key, std::uint64_t fallback, std::uint64_t min, std::uint64_t max) const;
  Result<double> number(const char* key, double fallback, double min, double max) const;
  Result<std::string> text(const char* key, std::string fallback) const;
  Result<std::vector<std::string>> texts(const char* key, std::vector<std::string> fallback) const;

  template <class... Args>
  Error wrong(fmt::format_string<Args...> format, Args&&... args) const {
    return fail(Code::kInvalid, "configure adapter", "{}: {}", adapter_,
                fmt::format(format, std::forward<Args>(args)...));
  }

 private:
  std::string adapter_;
  nlohmann::json object_;
};

// Position `index` of a pseudo-random permutation of [0, size) chosen by `key`; size > 0, index < size.
// A four-round Feistel network over the next even power of two, walked until it lands inside: no table, O(1) memory.
std::uint64_t permuted(std::uint64_t index, std::uint64_t size, std::uint64_t key);

// Position `index` of an endless stream that goes through [0, size) again and again, each time in another order.
std::uint64_t shuffled_cycle(std::uint64_t index, std::uint64_t size, std::uint64_t key);

// The built-in adapters; make_adapter() finds them by name.
Result<std::unique_ptr<Adapter>> make_arithmetic(std::string_view config_json, std::uint64_t seed, AdapterUse use);
Result<std::unique_ptr<Adapter>> make_gsm8k(std::string_view config_json, std::uint64_t seed, AdapterUse use);

}  // namespace echoline::data_plane

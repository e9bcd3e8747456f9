// Built-in adapters by name.
#include <algorithm>

#include "data_plane/adapters/adapter_config.hpp"

namespace echoline::data_plane {
namespace {

struct Entry {
  const char* name;
  Result<std::unique_ptr<Adapter>> (*make)(std::string_view config_json, std::uint64_t seed, AdapterUse use);
};

constexpr Entry kBuiltIn[] = {{"arithmetic", make_arithmetic}, {"gsm8k", make_gsm8k}};

}  // namespace

std::vector<std::string> adapter_names() {
  std::vector<std::string> names;
  for (const Entry& entry : kBuiltIn) names.emplace_back(entry.name);
  return names;
}

Result<std::unique_ptr<Adapter>> make_adapter(std::string_view name, std::string_view config_json, std::uint64_t seed,
                                              AdapterUse use) {
  for (const Entry& entry : kBuiltIn)
    if (entry.name == name) return entry.make(config_json, seed, use);
  return fail(Code::kInvalid, "make adapter", "unknown adapter {}", unknown_name(name, adapter_names()));
}

}  // namespace echoline::data_plane

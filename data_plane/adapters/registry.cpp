// Built-in adapters by name.
#include <algorithm>

#include "data_plane/adapters/adapter_config.hpp"

namespace echoline::data_plane {
namespace {

constexpr const BuiltIn* kBuiltIn[] = {&kArithmetic, &kCode, &kCountdown, &kDapoMath, &kGsm8k, &kGuess, &kJsonl, &kLibrary, &kMath, &kPoker, &kProcess};

Result<const BuiltIn*> find(std::string_view name) {
  for (const BuiltIn* adapter : kBuiltIn)
    if (adapter->name == name) return adapter;
  return fail(Code::kInvalid, "", "unknown adapter {}", unknown_name(name, adapter_names()));
}

}  // namespace

std::vector<std::string> adapter_names() {
  std::vector<std::string> names;
  for (const BuiltIn* adapter : kBuiltIn) names.emplace_back(adapter->name);
  return names;
}

Result<std::string> read_adapter_options(std::string_view name, ConfigSection& task) {
  ECHO_ASSIGN(const BuiltIn* adapter, find(name));
  ConfigSection options = task.section("options", adapter->meaning);
  adapter->read_options(options);
  return options.resolved_json();
}

Result<std::unique_ptr<Adapter>> make_adapter(std::string_view name, std::string_view options_json, std::uint64_t seed,
                                              AdapterUse use) {
  ECHO_ASSIGN(const BuiltIn* adapter, find(name));
  return adapter->make(options_json, seed, use);
}

}  // namespace echoline::data_plane

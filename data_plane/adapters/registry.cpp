// The table of built-in adapters, by name.
#include <algorithm>

#include "data_plane/adapters/adapter_config.hpp"

namespace echoline::data_plane {
namespace {

constexpr const BuiltIn* kBuiltIn[] = {&kArithmetic, &kCode, &kCountdown, &kDapoMath, &kGsm8k, &kGuess,  &kJsonl,
                                       &kLibrary,    &kMath, &kNemoGym,   &kOpenEnv,  &kPoker, &kProcess};

Result<const BuiltIn*> find_adapter(std::string_view name) {
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
  ECHO_ASSIGN(const BuiltIn* adapter, find_adapter(name));
  ConfigSection options = task.section("options", adapter->meaning);
  adapter->read_options(options);
  return options.resolved_json();
}

Result<std::unique_ptr<Adapter>> make_adapter(std::string_view name, std::string_view options_json, std::uint64_t seed,
                                              AdapterUse use) {
  if (name == kSeveralTasksAdapter) return make_several(options_json, seed, use);
  ECHO_ASSIGN(const BuiltIn* adapter, find_adapter(name));
  return adapter->make(options_json, seed, use);
}

bool has_many_turns(std::string_view name) {
  const auto adapter = find_adapter(name);
  return adapter && (*adapter)->many_turns;
}

Status can_be_scored_later(const Adapter& adapter) {
  if (adapter.has_one_response()) return ok();
  return fail(Code::kInvalid, "task.scored_by",
              "'{}' has many turns, and its observations depend on the policy's answers: workers must score it",
              adapter.name());
}

}  // namespace echoline::data_plane

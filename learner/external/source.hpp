// A run's policies from a trainer of the user's own, in another process and any language: docs/trainers.md.
#pragma once
#include <memory>

#include "learner/policy_source.hpp"

namespace echoline::learner {

// In the run's folder, while the run goes on: where the API is, for clients. {"socket": path} or {"url": ..., "token":
// ...}.
inline constexpr const char* kTrainerAddressFile = "trainer-api.json";

// A SourceMaker: serves the API, and waits for a trainer at every step.
Result<std::unique_ptr<PolicySource>> load_external(const SourceHost& host, bool resume);

}  // namespace echoline::learner

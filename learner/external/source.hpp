// Policies from the user's own trainer, in another process and any language: docs/trainers.md.
#pragma once
#include <memory>

#include "learner/policy_source.hpp"

namespace echoline::learner {

// A file in the run's folder with the API's address for clients while the run goes on: {"socket": path} or {"url": ...,
// "token": ...}.
inline constexpr const char* kTrainerAddressFile = "trainer-api.json";

// A SourceMaker: serves the API, and waits for the trainer at every step.
Result<std::unique_ptr<PolicySource>> load_external(const SourceHost& host, bool resume);

}  // namespace echoline::learner

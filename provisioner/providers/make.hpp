// The providers by name.
#pragma once
#include <filesystem>
#include <memory>
#include <string>

#include "provisioner/provider.hpp"

namespace echoline::provisioner {

// What providers need to know beside what is asked of them; each reads its own part.
struct ProviderOptions {
  std::filesystem::path log_folder;  // local: where instances write what they say
};

// kInvalid for a name that no provider has.
Result<std::unique_ptr<Provider>> make_provider(const std::string& name, const ProviderOptions& options);

}  // namespace echoline::provisioner

// The providers by name.
#pragma once
#include <filesystem>
#include <memory>
#include <string>

#include "provisioner/provider.hpp"

namespace echoline::provisioner {

// What providers need to know beside what is asked of them; each reads its own part.
struct ProviderOptions {
  std::filesystem::path log_folder;     // local: where instances write what they say
  std::string vast_url;                 // "": the service itself
  std::filesystem::path vast_key_file;  // where VAST_API_KEY is not set
  double vast_bid_raise_max = 0;        // VastOptions::bid_raise_max
  std::filesystem::path file;           // exec: its commands; ssh: its hosts
};

// kInvalid for a name that no provider has, and where something the provider needs is missing, such as a key.
Result<std::unique_ptr<Provider>> make_provider(const std::string& name, const ProviderOptions& options);

}  // namespace echoline::provisioner

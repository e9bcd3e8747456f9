// The providers by name. The rest of the program asks for what a provider can do, and knows none by its name.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "provisioner/provider.hpp"

namespace echoline::provisioner {

// Each is defined beside its provider.
const ProviderKind& local_kind();
const ProviderKind& vast_kind();
const ProviderKind& ssh_kind();
const ProviderKind& exec_kind();

// In the order in which texts for people name them.
const std::vector<const ProviderKind*>& provider_kinds();
std::vector<std::string> provider_names();
// Null for a name that no provider has.
const ProviderKind* provider_kind(std::string_view name);

// One more kind for as long as this lives, for programs that bring their own. Not while other threads use the list.
class AddedProvider {
 public:
  explicit AddedProvider(ProviderKind kind);
  ~AddedProvider();
  AddedProvider(const AddedProvider&) = delete;
  AddedProvider& operator=(const AddedProvider&) = delete;

 private:
  const ProviderKind kind_;
};

// kInvalid for a name that no provider has, and where something the provider needs is missing, such as a key.
Result<std::unique_ptr<Provider>> make_provider(const std::string& name, const ProviderOptions& options);

// ProviderKind::here; false for an unknown name.
bool is_here(std::string_view provider);

// "auto", "own" and the formats of all providers.
std::vector<std::string> offer_format_names();
// "a, b or c", for messages about names.
std::string one_of(const std::vector<std::string>& names);

// Searches the market of `provider`, or where it has none that of the first provider which has one. Waits. Errors as
// those of ProviderKind::search and of parse_offers().
Result<MarketAnswer> search_market(std::string_view provider, const ProviderOptions& options,
                                   const MarketQuestion& question);

// On a host, whichever provider it is of: ProviderKind::mapped_port and ProviderKind::own_instance.
std::optional<MappedPort> mapped_port(std::uint16_t port, const Environment& environment);
std::optional<OwnInstance> own_instance();

// ProviderKind::end_own_instance for a host of `provider`. Those of all, where the provider does not know of what
// service the host is, such as one that runs commands.
std::string end_own_instance_script(std::string_view provider);

}  // namespace echoline::provisioner

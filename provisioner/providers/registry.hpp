// The list of providers. The rest of the program asks for abilities of a ProviderKind, never for a provider's name.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "provisioner/provider.hpp"

namespace echoline::provisioner {

// Defined beside each provider.
const ProviderKind& local_kind();
const ProviderKind& vast_kind();
const ProviderKind& ssh_kind();
const ProviderKind& exec_kind();

// In the order in which they are shown.
const std::vector<const ProviderKind*>& provider_kinds();
std::vector<std::string> provider_names();
// Null for an unknown name.
const ProviderKind* provider_kind(std::string_view name);

// Adds a program's own provider to the list; the destructor removes it. While either runs, no other thread may use the
// list.
class AddedProvider {
 public:
  explicit AddedProvider(ProviderKind kind);
  ~AddedProvider();
  AddedProvider(const AddedProvider&) = delete;
  AddedProvider& operator=(const AddedProvider&) = delete;

 private:
  const ProviderKind kind_;
};

// kInvalid for an unknown name, or if the provider lacks something, such as a key.
Result<std::unique_ptr<Provider>> make_provider(const std::string& name, const ProviderOptions& options);

// The names of the environment variables with credentials of any provider, and of echoline itself.
std::vector<std::string> provider_secrets();
// Whether a variable of this name holds a credential: it is one of provider_secrets(), or its name ends like that of
// one (HF_TOKEN, AWS_SECRET_ACCESS_KEY). Workers on this machine and ssh inherit no credentials, because no worker
// reads any.
bool is_credential(std::string_view variable);

// ProviderKind::is_local; false for an unknown name.
bool is_local_provider(std::string_view provider);

// "auto", "own" and the formats of all providers.
std::vector<std::string> offer_format_names();
// Returns "a, b or c", for messages.
std::string join_with_or(const std::vector<std::string>& names);

// Searches the market of `provider`, or if it has none, of the first provider that has one. Blocks. Errors as those of
// ProviderKind::search and of parse_offers().
Result<MarketAnswer> search_market(std::string_view provider, const ProviderOptions& options,
                                   const MarketQuestion& question);

// Returns a function that calls ProviderKind::bill of the named provider; kNotFound if that has none. `options` must
// outlive the function.
std::function<Result<Bill>(const std::string& provider, double from_unix_s, double to_unix_s)> bill_reader(
    const ProviderOptions& options);

// For a host of any provider: ProviderKind::mapped_port and ProviderKind::own_instance.
std::optional<MappedPort> mapped_port(std::uint16_t port, const Environment& environment);
std::optional<OwnInstance> own_instance();

// ProviderKind::end_own_instance for a host of `provider`. If the provider has none, the lines of all providers,
// because the commands of "exec" may rent a host from any service.
std::string end_own_instance_script(std::string_view provider);

}  // namespace echoline::provisioner

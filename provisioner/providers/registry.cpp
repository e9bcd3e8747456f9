// The list of providers, and the calls that ask all of them.
#include "provisioner/providers/registry.hpp"

#include <algorithm>
#include <array>

namespace echoline::provisioner {
namespace {

// In the order in which they are shown. AddedProvider appends to it.
std::vector<const ProviderKind*>& kinds() {
  static std::vector<const ProviderKind*> list{&local_kind(), &vast_kind(), &ssh_kind(), &exec_kind()};
  return list;
}

}  // namespace

const std::vector<const ProviderKind*>& provider_kinds() { return kinds(); }

std::vector<std::string> provider_names() {
  std::vector<std::string> names;
  for (const ProviderKind* kind : kinds()) names.push_back(kind->name);
  return names;
}

const ProviderKind* provider_kind(std::string_view name) {
  for (const ProviderKind* kind : kinds())
    if (kind->name == name) return kind;
  return nullptr;
}

AddedProvider::AddedProvider(ProviderKind kind) : kind_(std::move(kind)) {
  ECHO_CHECK(!provider_kind(kind_.name), "provider {}", kind_.name);
  kinds().push_back(&kind_);
}
AddedProvider::~AddedProvider() { std::erase(kinds(), &kind_); }

Result<std::unique_ptr<Provider>> make_provider(const std::string& name, const ProviderOptions& options) {
  if (const ProviderKind* kind = provider_kind(name)) return kind->make(options);
  return fail(Code::kInvalid, "make provider", "expected {}, found '{}'", join_with_or(provider_names()), name);
}

std::vector<std::string> provider_secrets() {
  // `echoline worker` and `echoline evaluate` read these. The run gives each worker its own token.
  std::vector<std::string> names{"ECHOLINE_TOKEN", "ECHOLINE_API_KEY", "ECHOLINE_RELAY_KEY"};
  for (const ProviderKind* kind : kinds()) names.insert(names.end(), kind->secrets.begin(), kind->secrets.end());
  return names;
}

bool is_credential(std::string_view variable) {
  constexpr std::array<std::string_view, 9> kSuffixes{"_API_KEY",     "_ACCESS_KEY", "_SECRET_KEY",
                                                      "_PRIVATE_KEY", "_TOKEN",      "_SECRET",
                                                      "_PASSWORD",    "_PASSWD",     "_CREDENTIALS"};
  const std::vector<std::string> secrets = provider_secrets();
  return std::find(secrets.begin(), secrets.end(), variable) != secrets.end() ||
         std::any_of(kSuffixes.begin(), kSuffixes.end(),
                     [&](std::string_view suffix) { return variable.ends_with(suffix); });
}

bool is_local_provider(std::string_view provider) {
  const ProviderKind* kind = provider_kind(provider);
  return kind && kind->is_local;
}

std::vector<std::string> offer_format_names() {
  std::vector<std::string> names{kAutoFormat, kOwnFormat};
  for (const ProviderKind* kind : kinds())
    if (kind->offer_format) names.push_back(kind->offer_format->name);
  return names;
}

std::string join_with_or(const std::vector<std::string>& names) {
  return fmt::format("{} or {}", fmt::join(names.begin(), names.end() - 1, ", "), names.back());
}

Result<MarketAnswer> search_market(std::string_view provider, const ProviderOptions& options,
                                   const MarketQuestion& question) {
  const ProviderKind* const own_kind = provider_kind(provider);
  if (own_kind && own_kind->search) return own_kind->search(options, question);
  for (const ProviderKind* kind : kinds())
    if (kind->search) return kind->search(options, question);
  return fail(Code::kInvalid, "search the market", "no provider has a market to search; name a file in fleet.offers");
}

std::function<Result<Bill>(const std::string& provider, double from_unix_s, double to_unix_s)> bill_reader(
    const ProviderOptions& options) {
  return [&options](const std::string& provider, double from_unix_s, double to_unix_s) -> Result<Bill> {
    const ProviderKind* kind = provider_kind(provider);
    if (kind != nullptr && kind->bill) return kind->bill(options, from_unix_s, to_unix_s);
    return fail(Code::kNotFound, "bill", "provider '{}' has no bill", provider);
  };
}

std::optional<MappedPort> mapped_port(std::uint16_t port, const Environment& environment) {
  for (const ProviderKind* kind : kinds())
    if (kind->mapped_port)
      if (auto mapped = kind->mapped_port(port, environment)) return mapped;
  return std::nullopt;
}

std::optional<OwnInstance> own_instance() {
  std::optional<OwnInstance> instance;
  for (const ProviderKind* kind : kinds())  // all kinds, because each removes its secret from the environment
    if (kind->own_instance)
      if (auto found = kind->own_instance(); found && !instance) instance = std::move(found);
  return instance;
}

std::string end_own_instance_script(std::string_view provider) {
  if (const ProviderKind* kind = provider_kind(provider); kind && !kind->end_own_instance.empty())
    return kind->end_own_instance;
  std::string lines_of_all;
  for (const ProviderKind* kind : kinds()) lines_of_all += kind->end_own_instance;
  return lines_of_all;
}

}  // namespace echoline::provisioner

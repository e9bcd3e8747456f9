// The ProviderKind of vast.ai.
#include <arpa/inet.h>

#include <charconv>
#include <cstdlib>

#include "base/config.hpp"
#include "provisioner/providers/registry.hpp"
#include "provisioner/providers/vast.hpp"
#include "provisioner/providers/vast_bill.hpp"
#include "provisioner/providers/vast_search.hpp"

namespace echoline::provisioner {
namespace {

// Environment variables that the service sets in a container: the instance's number, and a key that can only end it.
constexpr const char* kIdVariable = "CONTAINER_ID";
constexpr const char* kKeyVariable = "CONTAINER_API_KEY";

std::string url_of(const ProviderOptions& options) {
  const std::string url = options.service(kVastName).url;
  if (!url.empty()) return url;
  const char* const env_url = std::getenv(kVastUrlVariable);
  return env_url != nullptr && *env_url != '\0' ? env_url : kVastUrl;
}

Result<std::string> key_of(const ProviderOptions& options) {
  return read_vast_key(options.service(kVastName).key_file.value_or(std::filesystem::path{}));
}

Result<std::unique_ptr<Provider>> make(const ProviderOptions& options) {
  VastOptions vast;
  vast.url = url_of(options);
  vast.bid_raise_max = options.service(kVastName).bid_raise_max;
  ECHO_ASSIGN(vast.key, key_of(options));
  return std::unique_ptr<Provider>(std::make_unique<VastProvider>(std::move(vast)));
}

void read_settings(ConfigSection section, ServiceSettings& settings) {
  section.read("url", settings.url, {"URL of the service", kVastUrl});
  section.read("key_file", settings.key_file, {"a file of mode 600 that holds the key", kVastKeyVariable});
  section.read("bid_raise_max", settings.bid_raise_max, {.min = 0.0, .max = 10.0},
               "a topped bid of a running machine is raised, to at most (1 + this) times the first bid; 0: never");
}

Result<MarketAnswer> search(const ProviderOptions& options, const MarketQuestion& question) {
  VastSearch search;
  search.url = url_of(options);
  search.disk = question.request.fleet.disk;
  search.stop = question.stop;
  ECHO_ASSIGN(const std::string reply, search_vast(search, question.request));
  OfferReadOptions reading;
  reading.disk = question.request.fleet.disk;
  ECHO_ASSIGN(std::vector<Offer> offers, read_vast(reply, search.url, reading));
  return MarketAnswer{.source = search.url, .format = kVastName, .offers = std::move(offers)};
}

Result<Bill> bill(const ProviderOptions& options, double from_unix_s, double to_unix_s) {
  VastBillQuestion question;
  question.url = url_of(options);
  ECHO_ASSIGN(question.key, key_of(options));
  question.from_unix_s = from_unix_s;
  question.to_unix_s = to_unix_s;
  return ask_vast_bill(question);
}

Result<Account> account(const ProviderOptions& options) {
  VastBillQuestion question;  // with short times, because ProviderKind::account waits only a few seconds
  question.url = url_of(options);
  ECHO_ASSIGN(question.key, key_of(options));
  question.timeout = std::chrono::seconds(10);
  question.pause = std::chrono::seconds(1);
  question.tries = 3;
  return ask_vast_account(question);
}

std::optional<MappedPort> read_mapped_port(std::uint16_t port, const Environment& environment) {
  const char* host = environment("PUBLIC_IPADDR");
  const char* outside_port = environment(fmt::format("VAST_TCP_PORT_{}", port).c_str());
  if (!host || !outside_port) return std::nullopt;
  const std::string_view text = outside_port;
  std::uint16_t port_number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), port_number);
  if (error != std::errc() || end != text.data() + text.size() || port_number == 0) return std::nullopt;
  in6_addr address;
  if (::inet_pton(AF_INET, host, &address) != 1 && ::inet_pton(AF_INET6, host, &address) != 1) return std::nullopt;
  return MappedPort{.host = host, .port = port_number};
}

std::optional<OwnInstance> read_own_instance() {
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value ? value : "");
  };
  const std::string id = variable(kIdVariable), key = variable(kKeyVariable), url = variable(kVastUrlVariable);
  ::unsetenv(kKeyVariable);  // so that no child process inherits the key
  if (id.empty() || key.empty()) return std::nullopt;
  return OwnInstance{.id = id, .end = [=] { return end_own_vast_instance(url, key, id); }};
}

}  // namespace

const ProviderKind& vast_kind() {
  static const ProviderKind kind{
      .name = kVastName,
      .meaning = "hosts of vast.ai",
      .make = make,
      .reports_phases = true,
      .starts_at_once = kVastStartsAtOnce,
      // A learner on a host of vast.ai has kKeyVariable. A local worker that inherited it would end that host.
      .secrets = {kVastKeyVariable, kKeyVariable},
      .settings_meaning = "vast.ai. The key comes from VAST_API_KEY or a file, and is sent to vast.ai only.",
      .read_settings = read_settings,
      .offer_format = OfferFormat{.name = kVastName,
                                  .meaning = "the reply to a search of vast.ai",
                                  .recognises = is_vast_reply,
                                  .read = [](std::string_view text, std::string_view name,
                                             const OfferReadOptions& reading) -> Result<OfferList> {
                                    ECHO_ASSIGN(auto offers, read_vast(text, name, reading));
                                    return OfferList{.offers = std::move(offers), .format = {}};
                                  }},
      .search = search,
      .title = "vast.ai",
      .bill = bill,
      .account = account,
      .mapped_port = read_mapped_port,
      .own_instance = read_own_instance,
      .end_own_instance = R"sh(  [ -z "${CONTAINER_API_KEY-}" ] || ! has curl || auth header= "$CONTAINER_API_KEY" |
    curl -qsSK- -X DELETE "${ECHOLINE_VAST_URL:-https://console.vast.ai}/api/v0/instances/$CONTAINER_ID/" >&2
)sh"};
  return kind;
}

}  // namespace echoline::provisioner

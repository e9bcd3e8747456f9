// The interface of providers. A Provider rents instances, lists them and ends them. Local processes and rented hosts
// take the same calls. A ProviderKind has the provider's name, its credentials and its other abilities.
// providers/registry.hpp lists the kinds.
#pragma once
#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/clock.hpp"
#include "base/result.hpp"
#include "base/units.hpp"
#include "provisioner/offers.hpp"

namespace echoline {
class ConfigSection;
}

namespace echoline::provisioner {

struct PlanRequest;

// ---- instances ----

// The provider's name and its own id of an instance ("vast:123"); written to the ledger.
struct InstanceId {
  std::string text;
  friend auto operator<=>(const InstanceId&, const InstanceId&) = default;
};

// The caller's number of a request; the answer repeats it. A request for a row of the ledger has the row's id.
using Ticket = std::int64_t;

struct LaunchSpec {
  Offer offer;
  std::string label;                 // LedgerRow::label, by which the provider knows the instance
  std::vector<std::string> argv;     // the command of the instance
  bool program_on_instance = false;  // argv[0] is a program on the instance and need not be copied there
  std::vector<std::pair<std::string, std::string>> env;  // added to the provider's environment
  std::string image;                                     // container image, if the provider uses those
  std::vector<std::uint16_t> ports;                      // must be reachable from outside
  Bytes disk;                                            // rented with the instance
  std::optional<double> bid_usd_per_hour;                // absent: on demand
};

struct InstanceInfo {
  InstanceId instance;
  std::string label;
  std::optional<double> usd_per_hour;
};

// The instance is rented. Its worker's join shows that it works.
struct Started {
  Ticket ticket = 0;
  InstanceId instance;
  std::optional<double> usd_per_hour;  // the provider's charge, if it reports one
};
// The instance's container runs now. Only of kinds with ProviderKind::reports_phases.
struct Running {
  InstanceId instance;
};
// The instance is not rented. With `perhaps_rented`, an instance with the request's label may exist all the same; only
// a listing can tell.
struct StartFailed {
  Ticket ticket = 0;
  Error error;
  bool retryable = false;  // the same offer may be requested again; false: the offer is gone or the request is invalid
  bool perhaps_rented = false;
  bool by_account = false;  // the account is the reason, not the offer: see AccountChanged
};
// The instance is not rented any more. Also reported if it was already gone.
struct Stopped {
  Ticket ticket = 0;
  InstanceId instance;
  std::string how;      // "exited with status 0"
  bool absent = false;  // the provider does not know the instance: it ended before, or belongs to another account
};
// The instance may still be rented, but the provider has given up for now. Call stop() again.
struct StopFailed {
  Ticket ticket = 0;
  InstanceId instance;
  Error error;
};
// The instance ended without stop().
struct Exited {
  InstanceId instance;
  std::string label;
  std::string why;  // "killed by signal 9", "outbid"
  bool outbid = false;
  bool still_rented = false;  // the instance does not work any more, but its disk still costs: call stop()
};
// The instance will end soon without stop(); an Exited follows.
struct Ending {
  InstanceId instance;
  std::string why;  // "outbid"
  bool outbid = false;
};
struct PriceChanged {
  InstanceId instance;
  double usd_per_hour = 0;
};
// The account's state or credit has changed.
struct AccountChanged {
  std::string trouble;               // why the provider cannot rent, such as a refused key; "" if it can
  bool needs_user = false;           // only the user can end the trouble
  bool key_refused = false;          // no instance can be stopped either
  std::optional<double> credit_usd;  // absent: unknown
};
// The instances whose label begins with the prefix. An instance that is missing here may exist unless the list is
// `complete`.
struct Listed {
  Ticket ticket = 0;
  bool complete = false;
  std::vector<InstanceInfo> instances;
  std::optional<Error> error;  // if not complete
};
using ProviderEvent = std::variant<Started, Running, StartFailed, Stopped, StopFailed, Exited, Ending, PriceChanged,
                                   AccountChanged, Listed>;

// No call blocks: poll() returns the results and spontaneous events. Use from one thread. Every start() is answered by
// one Started or StartFailed, every stop() by one Stopped or StopFailed, every list() by one Listed. There is no
// Exited for an instance that is being stopped.
class Provider {
 public:
  virtual ~Provider() = default;
  virtual void start(Ticket ticket, const LaunchSpec& spec) = 0;
  // Forgets a start whose request has not been sent. Returns whether there was one; it then has no answer.
  virtual bool cancel(Ticket) { return false; }
  // Reports events of an instance that an earlier process has started, as if this process had.
  virtual void watch(const InstanceId&, const std::string& /*label*/) {}
  // Requests an orderly end if the provider can, and forces it after `grace`.
  virtual void stop(Ticket ticket, const InstanceId& instance, Duration grace) = 0;
  // Lists the instances whose label begins with `label_prefix`, from any process.
  virtual void list(Ticket ticket, const std::string& label_prefix) = 0;
  // Returns events since the last call, and continues pending work. Call it often.
  virtual std::vector<ProviderEvent> poll(TimePoint now) = 0;
};

// ---- kinds of providers ----

// Section fleet.NAME of the run file, for a provider that has one.
struct ServiceSettings {
  std::string url;                                // "": the service itself
  std::optional<std::filesystem::path> key_file;  // used if the environment has no key
  double bid_raise_max = 0;  // if another bid is higher, ours is raised to at most (1 + this) times the first bid
  std::map<std::string, std::string> others;  // the provider's own settings, by name
};

// Settings of all providers. Each provider reads its own part.
struct ProviderOptions {
  std::filesystem::path log_folder = {};                 // where local instances write their logs
  std::filesystem::path file = {};                       // fleet.provider_file
  std::map<std::string, ServiceSettings> services = {};  // by provider name

  ServiceSettings service(std::string_view name) const {
    const auto it = services.find(std::string(name));
    return it == services.end() ? ServiceSettings{} : it->second;
  }
};

// A format of offers other than our own.
struct OfferFormat {
  std::string name;     // in fleet.offers_format and in plans: "vast"
  std::string meaning;  // for the run file's reference: "the reply to a search of vast.ai"
  // Whether a text that begins with `head` is in this format.
  std::function<bool(std::string_view head)> recognises;
  // Messages name the text `name`. Errors as those of parse_offers(). The caller sets OfferList::format.
  std::function<Result<OfferList>(std::string_view text, std::string_view name, const OfferReadOptions& reading)> read;
};

struct MarketQuestion {
  const PlanRequest& request;               // offers that it would refuse can be left out
  const std::atomic<bool>* stop = nullptr;  // true: the answer is not needed any more
};

struct MarketAnswer {
  std::string source, format;  // as in Market (plan.hpp)
  std::vector<Offer> offers;
};

// The provider's bill for one instance on one day (UTC), so far.
struct Charge {
  InstanceId instance;
  double day_unix_s = 0;
  double usd = 0;  // the total, which may contain more than rent and traffic
  double usd_rent = 0, usd_traffic = 0;
};

struct Bill {
  std::vector<Charge> charges;       // the charges of the whole account
  std::optional<double> credit_usd;  // the account's balance
};

struct Account {
  std::optional<double> credit_usd;
};

// Returns an environment variable; null if it is not set.
using Environment = std::function<const char*(const char* name)>;

// The address at which other machines reach a port of a container.
struct MappedPort {
  std::string host;  // a numeric address
  std::uint16_t port = 0;
};

// The instance that this process runs on.
struct OwnInstance {
  std::string id;
  std::function<Status()> end;  // waits until the service has ended it; an error otherwise
};

// Members after `make` are optional; a provider leaves empty the abilities that it lacks.
struct ProviderKind {
  std::string name;     // of offers, ledgers and fleet.provider: "vast"
  std::string meaning;  // for the run file's reference: "hosts of vast.ai"
  // kInvalid if something is missing, such as a key.
  std::function<Result<std::unique_ptr<Provider>>(const ProviderOptions&)> make;

  // Instances are processes of this machine, and end with the process that rented them.
  bool is_local = false;
  // Workers are processes on hosts, which see all GPUs of the host. The hosts run a copy of this program, unless
  // fleet.bundle names another.
  bool is_bare_host = false;
  // Started says that the instance is rented; Running follows when its container runs.
  bool reports_phases = false;
  // The most unanswered starts that are useful, because the service limits their rate; 0: any number.
  std::size_t starts_at_once = 0;
  // Credentials: names of environment variables. Workers on this machine do not inherit them.
  std::vector<std::string> secrets = {};
  // Section fleet.NAME of the run file: its description, which must live as long as the program, and its reader.
  const char* settings_meaning = "";
  std::function<void(ConfigSection section, ServiceSettings& settings)> read_settings = {};
  // The format in which its offers are published.
  std::optional<OfferFormat> offer_format = {};
  // Searches the market. Waits. kUnavailable if the market does not answer.
  std::function<Result<MarketAnswer>(const ProviderOptions&, const MarketQuestion&)> search = {};
  std::string title = {};  // the provider's name in messages about its bill: "vast.ai"
  // Reads the bill of these days. Waits. Returns the whole bill or an error: the sum of a part would be too small.
  std::function<Result<Bill>(const ProviderOptions&, double from_unix_s, double to_unix_s)> bill = {};
  // Asks the service whether it accepts the key. Waits a few seconds. kInvalid if it refuses the key, kUnavailable if
  // it does not answer.
  std::function<Result<Account>(const ProviderOptions&)> account = {};
  // Not empty if ports of its hosts are mapped. Runs on a host: returns the address at which other machines reach
  // `port`; absent if the environment does not have it.
  std::function<std::optional<MappedPort>(std::uint16_t port, const Environment&)> mapped_port = {};
  // Runs on a host: returns the host's own instance if the environment contains the secret that ends it. Removes that
  // secret from the environment.
  std::function<std::optional<OwnInstance>()> own_instance = {};
  // Lines of sh that end the instance, for a host that does not have the program yet. They do nothing on hosts of other
  // providers. They may call `has PROGRAM` and `auth PREFIX SECRET` (provisioner/host_script).
  std::string end_own_instance = {};
};

}  // namespace echoline::provisioner

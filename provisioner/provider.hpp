// All that a provider may do. A Provider rents instances, lists them and returns them: the same calls for a process on
// this machine and for a rented host. A ProviderKind has the provider's name, its credentials and its other abilities.
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

// The provider's own name for an instance, with the provider's before it ("vast:123"); written to the ledger.
struct InstanceId {
  std::string text;
  friend auto operator<=>(const InstanceId&, const InstanceId&) = default;
};

// The caller's number for what it asked, repeated in the answer: the ledger row where there is one.
using Ticket = std::int64_t;

struct LaunchSpec {
  Offer offer;
  std::string label;              // LedgerRow::label: what the provider knows the instance by
  std::vector<std::string> argv;  // what runs on the instance
  bool found_there = false;       // argv[0] is a program of the instance's, and need not be brought
  std::vector<std::pair<std::string, std::string>> env;  // added to what the provider passes on
  std::string image;                                     // of a container, where the provider runs those
  std::vector<std::uint16_t> ports;                      // that must be reachable from outside
  Bytes disk;
  std::optional<double> bid_usd_per_hour;  // absent: on demand
};

struct InstanceInfo {
  InstanceId instance;
  std::string label;
  std::optional<double> usd_per_hour;
};

// It is rented. That its worker works is seen when it joins.
struct Started {
  Ticket ticket = 0;
  InstanceId instance;
  std::optional<double> usd_per_hour;  // what the provider charges, where it says so
};
// Not rented, unless `perhaps_rented`: then it may exist under its label, and a listing has to tell.
struct StartFailed {
  Ticket ticket = 0;
  Error error;
  bool retryable = false;  // the same offer may be asked for again; false: the offer is gone or the request is wrong
  bool perhaps_rented = false;
};
// Nothing of it is rented any more. An instance that was already gone is stopped.
struct Stopped {
  Ticket ticket = 0;
  InstanceId instance;
  std::string how;      // "exited with status 0"
  bool absent = false;  // the service does not know it: gone before, or of another account
};
// It may still be rented, and the provider has given up for now: ask again.
struct StopFailed {
  Ticket ticket = 0;
  InstanceId instance;
  Error error;
};
// It ended and nobody had called stop().
struct Exited {
  InstanceId instance;
  std::string label;
  std::string why;  // "killed by signal 9", "outbid"
  bool outbid = false;
  bool still_rented = false;  // it works no more, but its disk still costs: call stop()
};
// It will end in a moment, and nobody had called stop(); an Exited follows.
struct Ending {
  InstanceId instance;
  std::string why;  // "outbid"
  bool outbid = false;
};
struct PriceChanged {
  InstanceId instance;
  double usd_per_hour = 0;
};
// What exists whose label begins with the prefix. Only where `complete` may anything be concluded from what is missing.
struct Listed {
  Ticket ticket = 0;
  bool complete = false;
  std::vector<InstanceInfo> instances;
  std::optional<Error> error;  // why it is not complete
};
using ProviderEvent = std::variant<Started, StartFailed, Stopped, StopFailed, Exited, Ending, PriceChanged, Listed>;

// No call waits: what comes of it, and what happens by itself, comes from poll(). Use from one thread. Every start() is
// answered by one Started or StartFailed, every stop() by one Stopped or StopFailed, every list() by one Listed; an
// instance that is being stopped has no Exited.
class Provider {
 public:
  virtual ~Provider() = default;
  virtual void start(Ticket ticket, const LaunchSpec& spec) = 0;
  // Asks politely where the provider can, and by force once `grace` is over.
  virtual void stop(Ticket ticket, const InstanceId& instance, Duration grace) = 0;
  // Of instances whose label begins with `label_prefix`, whoever started them.
  virtual void list(Ticket ticket, const std::string& label_prefix) = 0;
  // What happened since the last call; also carries on what is under way. Call it often.
  virtual std::vector<ProviderEvent> poll(TimePoint now) = 0;
};

// ---- kinds of providers ----

// Section fleet.NAME of the run file, for a provider that has one.
struct ServiceSettings {
  std::string url;                                // "": the service itself
  std::optional<std::filesystem::path> key_file;  // read where the environment has no key
  double bid_raise_max = 0;  // a bid that is topped is raised to at most (1 + this) times what it was at first
  std::map<std::string, std::string> others;  // further keys that the provider reads, by name
};

// Settings of all providers. Each provider reads its own part.
struct ProviderOptions {
  std::filesystem::path log_folder = {};                 // of instances on this machine
  std::filesystem::path file = {};                       // fleet.provider_file
  std::map<std::string, ServiceSettings> services = {};  // by the provider's name

  ServiceSettings service(std::string_view name) const {
    const auto it = services.find(std::string(name));
    return it == services.end() ? ServiceSettings{} : it->second;
  }
};

// A form of offers that is not our own.
struct OfferFormat {
  std::string name;     // in fleet.offers_format and in plans: "vast"
  std::string meaning;  // for the run file's reference: "the reply to a search of vast.ai"
  // Whether a text that begins like this is one.
  std::function<bool(std::string_view head)> recognises;
  // `name` stands for the text in messages. Errors as those of parse_offers().
  std::function<Result<std::vector<Offer>>(std::string_view text, std::string_view name, const OfferReading& reading)>
      read;
};

struct MarketQuestion {
  const PlanRequest& request;               // what it would refuse need not be found
  const std::atomic<bool>* stop = nullptr;  // true: the answer is not needed any more
};

struct MarketAnswer {
  std::string source, format;  // as in Market
  std::vector<Offer> offers;
};

// Charges of the service for one instance on one day (UTC), so far.
struct Charge {
  InstanceId instance;
  double day_unix_s = 0;
  double usd = 0, usd_rent = 0, usd_traffic = 0;
};

struct Bill {
  std::vector<Charge> charges;       // of the whole account
  std::optional<double> credit_usd;  // left on the account
};

// Returns an environment variable; null if it is not set.
using Environment = std::function<const char*(const char* name)>;

struct MappedPort {
  std::string host;  // a numeric address
  std::uint16_t port = 0;
};

// The instance that this process runs on.
struct OwnInstance {
  std::string id;
  std::function<Status()> end;  // waits until the service has ended it, or says why it does not
};

// Members after `make` are optional; a provider leaves empty the abilities that it lacks.
struct ProviderKind {
  std::string name;     // of offers, ledgers and fleet.provider: "vast"
  std::string meaning;  // for the run file's reference: "hosts of vast.ai"
  // kInvalid if something is missing, such as a key.
  std::function<Result<std::unique_ptr<Provider>>(const ProviderOptions&)> make;

  // Instances are processes of this machine, and end with the process that rented them.
  bool here = false;
  // Credentials: names of environment variables. Workers on this machine do not inherit them.
  std::vector<std::string> secrets = {};
  // Reads section fleet.NAME of the run file, which settings_meaning describes; both texts live as long as the program.
  const char* settings_meaning = "";
  std::function<void(ConfigSection section, ServiceSettings& settings)> read_settings = {};
  // The form in which its offers are published.
  std::optional<OfferFormat> offers = {};
  // Searches the market. Waits. kUnavailable if the market does not answer.
  std::function<Result<MarketAnswer>(const ProviderOptions&, const MarketQuestion&)> search = {};
  std::string title = {};  // for messages about its bill: "vast.ai"
  // Reads the bill of these days. Waits. Returns the whole bill or an error: the sum of a part would be too small.
  std::function<Result<Bill>(const ProviderOptions&, double from_unix_s, double to_unix_s)> bill = {};
  // Not empty if ports of its hosts are mapped. Runs on a host: returns the address at which other machines reach
  // `port`; absent if the environment does not have it.
  std::function<std::optional<MappedPort>(std::uint16_t port, const Environment&)> mapped_port = {};
  // Runs on a host: returns the host's own instance if the environment holds the secret that ends it. Removes that
  // secret from the environment.
  std::function<std::optional<OwnInstance>()> own_instance = {};
  // The same before a host has the program: lines of sh that end the instance, and do nothing on hosts of other
  // providers. They may call `has PROGRAM` and `auth PREFIX SECRET` (provisioner/host_script).
  std::string end_own_instance = {};
};

}  // namespace echoline::provisioner

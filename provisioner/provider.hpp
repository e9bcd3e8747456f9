// Where instances come from: the same few calls for a process on this machine and for a rented host. No call waits;
// what comes of it, and what happens by itself, comes from poll().
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/clock.hpp"
#include "base/result.hpp"
#include "base/units.hpp"
#include "provisioner/offers.hpp"

namespace echoline::provisioner {

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
  std::string state;  // in the provider's own words, for people
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

// Use from one thread. Every start() is answered by one Started or StartFailed, every stop() by one Stopped or
// StopFailed, every list() by one Listed; an instance that is being stopped has no Exited.
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

}  // namespace echoline::provisioner

// Where instances come from: the same five calls for a process on this machine and for a rented host.
#pragma once
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/result.hpp"
#include "base/units.hpp"
#include "provisioner/offers.hpp"

namespace echoline::provisioner {

// The provider's own name for an instance; written to the ledger.
struct InstanceId {
  std::string text;
  friend auto operator<=>(const InstanceId&, const InstanceId&) = default;
};

struct StartRequest {
  Offer offer;
  std::string label;                                     // LedgerRow::label
  std::vector<std::string> argv;                         // what runs on the instance
  std::vector<std::pair<std::string, std::string>> env;  // added to what the provider passes on
};

// An instance is gone. Exactly one of `status` and `signal` is present, or neither where the provider cannot know.
struct InstanceExit {
  InstanceId instance;
  std::string label;
  std::optional<int> status;
  std::optional<int> signal;
  bool requested = false;       // stop() had been called
  std::string to_text() const;  // "exited with status 3"
};

struct InstanceInfo {
  InstanceId instance;
  std::string label;
};

// Calls return at once or within the provider's own time limit. Use from one thread.
class Provider {
 public:
  virtual ~Provider() = default;
  virtual Result<InstanceId> start(const StartRequest& request) = 0;
  // What ended since the last call; also carries stops forward. Call it often.
  virtual std::vector<InstanceExit> poll() = 0;
  // Asks politely, and by force once `grace` is over. An instance that is already gone is success.
  virtual Status stop(const InstanceId& instance, Duration grace) = 0;
  // What is alive.
  virtual Result<std::vector<InstanceInfo>> list() = 0;
};

}  // namespace echoline::provisioner

// The relay: a process with one open port, through which workers reach a learner that can open none. It joins a
// worker's connection to one that the learner opens, and passes on bytes that it cannot read: TLS is between worker and
// learner, and the relay knows no key of any run. At worst, a relay that lies passes nothing on.
#pragma once
#include <memory>
#include <optional>

#include "base/result.hpp"
#include "overlay/trust/secret.hpp"
#include "overlay/types.hpp"

namespace echoline::overlay::relay {

struct RelayLimits {
  std::size_t runs = 64;                                // registered at a time
  std::size_t connections_per_run = 1024;               // of clients, waiting or joined
  std::size_t waiting_per_run = 64;                     // clients that the learner has not answered
  std::optional<BitRate> rate_per_run;                  // both directions together
  std::optional<Bytes> bytes_per_run;                   // since the relay's start
  Duration greeting_timeout = std::chrono::seconds(5);  // to say what a connection is for
  Duration waiting_timeout = std::chrono::seconds(10);  // for the learner to answer
  Duration idle_timeout = std::chrono::minutes(15);     // of a joined connection, without a byte in either direction
};

struct RelayOptions {
  Endpoint bind{"::", 7443};
  trust::Secret key;
  RelayLimits limits;
};

struct RelayStats {
  std::size_t runs = 0;         // registered now
  std::size_t connections = 0;  // open now, in any stage
  std::size_t waiting = 0;      // clients that their learner has not answered
  std::size_t joined = 0;       // pairs that pass bytes now
  std::uint64_t bytes = 0;      // passed since the start, in both directions
  std::uint64_t refused = 0;    // connections closed for a reason of the relay since the start
};

class Relay {
 public:
  // Listens, and serves on a thread of its own. kInvalid: the key is too short, or the port is in use.
  static Result<std::unique_ptr<Relay>> start(RelayOptions options);
  ~Relay();  // calls stop()

  Endpoint endpoint() const;
  RelayStats stats() const;  // waits for the loop; after stop(): the last state
  void stop();               // closes every connection. Idempotent.

 private:
  class Server;
  explicit Relay(std::unique_ptr<Server> server);
  std::unique_ptr<Server> server_;
};

}  // namespace echoline::overlay::relay

// Serves the worker's bundle (its program and libraries in one file) over HTTP to machines that show a join token. It
// uses the port on which workers join. HTTP, because even a bare machine has a client. A few machines are served at a
// time and the others wait; a token is good for a few downloads. A request without a token is refused at once. No I/O
// and no clock.
#pragma once
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>

#include "overlay/action.hpp"
#include "overlay/pacer.hpp"
#include "overlay/trust/token.hpp"

namespace echoline::overlay {

class BundleGate {
 public:
  static constexpr std::string_view kPath = "/bundle";
  static constexpr std::size_t kRequestBytesMax = 4096;
  static constexpr std::size_t kServedMax = 4, kWaitingMax = 64, kDownloadsPerToken = 3;
  static constexpr double kUplinkShare = 0.5;  // fraction of the learner's uplink for all downloads together

  // `up`: the learner's uplink; absent: no limit.
  BundleGate(std::shared_ptr<const trust::Authority> authority, Bytes size, std::optional<BitRate> up);

  // Whether a connection that begins with this byte, as "GET" does, is an HTTP request. Otherwise it carries frames,
  // which begin with another byte (FORMAT.md).
  static bool is_request(std::byte first) { return first == std::byte{'G'}; }

  struct Answer {
    std::string text;          // HTTP headers; for a refusal, the whole answer
    bool is_admitted = false;  // the bundle follows, once take_admitted() returns the connection
  };
  // `request`: all bytes received so far; an incomplete head is refused.
  Answer on_request(ConnId conn, std::string_view request, double now_unix_s);
  // Connections to which the bundle may be sent from now on; each is returned once.
  std::vector<ConnId> take_admitted();
  // The connection got the whole bundle, or is lost: the next one in the queue gets its place.
  void on_done(ConnId conn);
  // Counts bytes of the bundle that leave now. Returns the time at which more may follow.
  TimePoint pace(std::size_t bytes, TimePoint now) { return pacer_.occupy(Bytes{bytes}, now, /*busy=*/true); }

 private:
  struct TokenUse {
    std::size_t downloads = 0;
    double expires_unix_s = 0;
  };
  std::shared_ptr<const trust::Authority> authority_;
  Bytes size_;
  Pacer pacer_;
  std::deque<ConnId> waiting_;
  std::set<ConnId> served_;
  std::vector<ConnId> newly_admitted_;  // in served_, not yet returned by take_admitted()
  std::map<trust::Nonce, TokenUse> token_uses_;
};

}  // namespace echoline::overlay

// Gives the worker's bundle to machines that show a join token, in an HTTP request on the port on which workers join:
// even a bare machine has an HTTP client. A few machines are served at a time, the others wait, and a token is good for
// a few times. A machine without a token is refused at once. Pure.
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
  static constexpr std::size_t kAtOnce = 4, kWaitingMax = 64, kTimesPerToken = 3;
  static constexpr double kUplinkShare = 0.5;  // of the learner's, for all of them together

  // `up`: the learner's uplink; absent: no limit.
  BundleGate(std::shared_ptr<const trust::Authority> authority, Bytes size, std::optional<BitRate> up);

  // Whether what a stranger says first is a request, and no frame.
  static bool is_request(std::byte first) { return first == std::byte{'G'}; }

  struct Answer {
    std::string text;    // the whole answer where it is a refusal; what goes before the bundle where it is not
    bool serve = false;  // the bundle follows, once next() names the connection
  };
  // `request`: all that came; a head that is not whole is refused.
  Answer asked(ConnId conn, std::string_view request, double now_unix_s);
  // Connections whose turn has come since the last call.
  std::vector<ConnId> take_next();
  // It was sent, or is lost.
  void over(ConnId conn);
  // So many bytes of it are about to leave; more may follow then.
  TimePoint sent(std::size_t bytes, TimePoint now) { return pacer_.occupy(Bytes{bytes}, now, true); }

 private:
  struct Used {
    std::size_t times = 0;
    double until_unix_s = 0;
  };
  std::shared_ptr<const trust::Authority> authority_;
  Bytes size_;
  Pacer pacer_;
  std::deque<ConnId> waiting_;
  std::set<ConnId> served_;
  std::vector<ConnId> next_;
  std::map<trust::Nonce, Used> used_;
};

}  // namespace echoline::overlay

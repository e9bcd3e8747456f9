// A server on loopback that speaks the documented part of vast.ai's interface, with its quirks, and fails on request.
#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace echoline::provisioner {

struct VastInstance {
  std::int64_t id = 0;
  std::string label, image, actual_status = "loading", state = "running";
  std::string intended;  // intended_status; "": as `state`
  double usd_per_hour = 0.4;
  bool is_bid = false;
  double bid = 0, min_bid = 0.3;
};
// A row of the bill, with the service's names: seconds of Unix time, and US dollars.
struct VastCharge {
  std::int64_t instance = 0;                              // 0: a volume
  double start = 0, gpu = 0, disk = 0, bwd = 0, bwu = 0;  // bwd and bwu: traffic down and up
};

// Sets the answer of the next `times` requests of a kind ("create", "destroy", "show", "list", "bid", "state",
// "charges", "user").
struct VastFault {
  std::string kind;
  int status = 500;
  std::string body = "Internal Server Error", type = "text/plain";
  bool acts = false;                   // true: the request is carried out before this answer is sent
  std::chrono::milliseconds hangs{0};  // pause before the answer
  int times = 1;
};

class VastServer {
 public:
  static constexpr const char* kKey = "the-key-of-the-test";
  VastServer();
  ~VastServer();
  std::string url() const;

  void fault(VastFault fault);
  void remove_ask(std::int64_t ask);  // a create for this offer is answered with 410
  void put(VastInstance instance);
  void change(std::int64_t id, const std::function<void(VastInstance&)>& change);
  void remove(std::int64_t id);
  void charge(VastCharge charge);
  void credit(double usd);
  void lists_nothing(bool on);  // if on, listings are empty, whatever is rented
  void expire_key();
  // Answers 429 to requests of a kind that come sooner than the service's interval after the last one. The service's
  // clock runs `speed` times as fast as ours.
  void limit_rates(double speed);
  // A new instance's container runs this long after its create; without it, `actual_status` stays as it is.
  void run_containers_after(std::chrono::milliseconds time);
  void destroys_several(bool on);  // if off, the request that destroys several instances is refused
  // The request that destroys several instances succeeds, but this one stays.
  void keep_in_spite_of_success(std::int64_t id);
  // Each request fails with this probability, half of them after it was carried out. Seeded, so that a test repeats.
  void fail_randomly(double probability, std::uint64_t seed);
  int too_frequent() const;  // requests answered with 429 by limit_rates()
  // `call` is called on a thread of the server, before and after it carries out each create and destroy. The calls are
  // numbered from 0.
  void at_points(std::function<void(int point)> call);

  std::map<std::int64_t, VastInstance> rented() const;
  int count(const std::string& kind) const;  // requests so far
  std::vector<std::string> bodies() const;   // of creates
  std::string all_headers() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace echoline::provisioner

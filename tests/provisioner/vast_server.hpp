// A server on loopback that speaks the documented part of vast.ai's interface, with its quirks, and fails on request.
#pragma once
#include <chrono>
#include <cstdint>
#include <filesystem>
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

// The time for which an instance was rented, in seconds of Unix time.
struct VastRental {
  std::int64_t instance = 0;
  std::string label;
  double begin = 0, end = 0;  // end 0: it is rented
  double usd_per_hour = 0;
  bool disowned = false;  // the answer to its create said "success": false
  double usd(double now) const { return ((end > 0 ? end : now) - begin) / 3600 * usd_per_hour; }
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
  // As above, with all kinds of failures: also 429, an answer with "success": false, a connection that breaks during
  // the answer, and one that breaks `hang` after the request.
  void fail_in_every_way(double probability, std::uint64_t seed, std::chrono::milliseconds hang);
  // Calls these on a thread of the server after an instance was created (with the body of the request) or destroyed.
  void on_rental(std::function<void(const VastInstance&, const std::string& body)> created,
                 std::function<void(std::int64_t)> destroyed);
  // `call` gets a line for each request that creates or destroys, and for each that fails.
  void on_log(std::function<void(const std::string& line)> call);
  // The key that the service gives to a container. It destroys only its own instance, while that exists.
  static std::string key_of(std::int64_t instance) { return "the-key-of-instance-" + std::to_string(instance); }
  // From the creation of each instance to its end, so far.
  std::vector<VastRental> rentals() const;
  void bill_rentals();       // the bill has a row for each rental, by the second
  int too_frequent() const;  // requests answered with 429 by limit_rates()
  // The rows of searches, as JSON of the service's form. A search returns those that meet its conditions, without the
  // rented ones.
  void offer(const std::string& rows);
  // Each instance is a process group of this machine from now on. It runs its create's command, with the variables that
  // the service sets, a free port in place of 7070, and `environment`; HOME and the log ("ID.log") are in `folder`.
  // Destroying an instance kills the group and adds its row to the bill.
  void run_commands(const std::filesystem::path& folder, std::map<std::string, std::string> environment);
  std::vector<std::string> searches() const;  // bodies
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

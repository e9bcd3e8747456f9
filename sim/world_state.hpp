// The state of a simulated world (sim/world.hpp) that needs no host or connection: certificates, partitions, addresses,
// links between regions, scripts and the trace. Private to sim/.
#pragma once
#include <cmath>
#include <functional>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "base/ids.hpp"
#include "base/random.hpp"
#include "base/result.hpp"
#include "chains/regions.hpp"
#include "overlay/trust/authority.hpp"

namespace echoline::sim {

using HostId = Id<struct HostTag>;

// The authority whose certificates are accepted.
struct RunAuthority {
  std::string run_id;
  overlay::trust::PublicKey key;
};

enum class CertificateDates : std::uint8_t { kChecked, kIgnored };

// Checks certificates as the handshake does. Remembers the results, because parsing is slow.
struct Certificates {
  struct Checked {
    Result<overlay::trust::PeerIdentity> identity;
    double valid_from_unix_s;  // earliest time at which a check found it valid
  };
  std::optional<RunAuthority> authority;   // absent: all connections are anonymous
  std::map<std::string, Checked> checked;  // by the certificate's bytes
  Result<overlay::trust::PeerIdentity> verify(const std::string& certificate, double now_unix_s,
                                              CertificateDates dates);
};

class Partitions {
 public:
  std::uint64_t start(const std::vector<HostId>& from, const std::vector<HostId>& to, bool one_way,
                      std::size_t host_count);
  // Returns whether there was such a partition.
  bool end(std::uint64_t number) {
    return std::erase_if(partitions_, [&](const Partition& partition) { return partition.number == number; }) > 0;
  }
  bool separates(std::size_t from, std::size_t to) const;  // whether data from one host to the other is held back

 private:
  struct Partition {
    std::uint64_t number;
    std::vector<bool> from, to;  // by host
    bool one_way;
  };
  std::vector<Partition> partitions_;
  std::uint64_t next_number_ = 0;
};

// The hosts' present addresses.
struct Addresses {
  std::unordered_map<std::string, std::size_t> host_by_address;
  std::uint64_t changes = 0;
};

// All traffic from one region to another shares one link, in order of arrival.
struct RegionLinks {
  std::map<std::pair<std::uint32_t, std::uint32_t>, TimePoint> free_at;  // by regions (from, to)
  std::uint64_t bytes_crossed = 0;
  // The time at which data that leaves the uplink at `sent_at` has also crossed the link.
  TimePoint passed_at(const chains::Regions& regions, std::uint32_t from, std::uint32_t to, std::size_t bytes,
                      TimePoint sent_at);
};

// Functions that wait for their time, by the number that their event carries.
struct Scripts {
  std::unordered_map<std::uint64_t, std::function<void()>> waiting;
  std::uint64_t next = 0;
  std::uint64_t add(std::function<void()> work) {
    waiting.emplace(next, std::move(work));
    return next++;
  }
};

struct Trace {
  std::uint64_t hash = 0;
  std::function<void(const std::string&)> sink;
};

}  // namespace echoline::sim

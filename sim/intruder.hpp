// A machine with a valid certificate but no valid grant, that is, no permission of the learner to fetch from a parent.
// It goes from parent to parent and requests publications without a grant, with an expired grant, with one for another
// parent, with a self-signed one, and with its accomplices' grants.
#pragma once
#include <functional>
#include <map>

#include "base/random.hpp"
#include "overlay/core.hpp"
#include "overlay/wire/proof.hpp"
#include "sim/malice.hpp"

namespace echoline::sim {

struct IntruderConfig {
  overlay::CoreOptions core;
  std::string run_id;
  WorkerId id;
  std::uint64_t seed = 1;
  overlay::trust::SigningKey key;
  std::vector<std::byte> certificate, authority;
  overlay::SignedGrant expired_grant, absent_parent_grant;  // the second is for a parent that does not exist
  std::shared_ptr<const AccompliceState> accomplice_state;
  Duration interval{};  // between two of its connections
  std::shared_ptr<const overlay::SignatureChecker> checker;
  std::function<std::vector<WorkerId>()> parents;  // the existing parents
  std::function<std::optional<overlay::Endpoint>(WorkerId)> endpoint;
};

class Intruder final : public overlay::Core {
 public:
  static constexpr Duration kConnectionTime = std::chrono::seconds(3);  // then it leaves the parent
  static constexpr std::uint64_t kRandomStream = 77;  // other parts of the simulation use other streams of the seed
  explicit Intruder(IntruderConfig config)
      : Core(config.core), config_(std::move(config)), random_(config_.seed, kRandomStream) {}
  void start(TimePoint now);
  std::uint64_t requests_sent() const { return requests_sent_; }
  std::uint64_t chunks_received() const { return chunks_received_; }

  void on_accepted(ConnId conn, const overlay::PeerInfo&, TimePoint) override { close(conn); }
  void on_connected(ConnId conn, TimePoint now) override;
  void on_closed(ConnId conn, const std::string&, TimePoint) override { visits_.erase(conn); }
  void on_frame(ConnId, overlay::Frame frame, TimePoint) override {
    chunks_received_ += frame.type == overlay::FrameType::kChunk;
  }
  void on_sent(ConnId, std::size_t, TimePoint) override {}
  void on_timer(TimePoint now) override;
  TimePoint next_deadline() const override { return next_visit_at_; }

 private:
  struct Visit {  // an open connection to a parent
    overlay::PeerHello hello;
    TimePoint until;
  };
  // The next parent, and the request to it.
  std::pair<WorkerId, overlay::PeerHello> next_request(TimePoint now);

  IntruderConfig config_;
  Random random_;
  std::map<ConnId, Visit> visits_;
  TimePoint next_visit_at_ = kNever;
  std::uint64_t requests_sent_ = 0, chunks_received_ = 0;
};

}  // namespace echoline::sim

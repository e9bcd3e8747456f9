// The intruder of a soak test. Fleet::add_intruder() starts it.
#include "sim/intruder.hpp"

#include "overlay/wire/grant.hpp"

namespace echoline::sim {

using namespace overlay;

void Intruder::start(TimePoint now) {
  actions_.push_back(act::UseCertificate{config_.certificate, config_.authority});
  next_visit_at_ = now + config_.interval;
}

void Intruder::on_timer(TimePoint now) {
  if (now < next_visit_at_) return;
  next_visit_at_ = now + config_.interval;
  for (auto it = visits_.begin(); it != visits_.end();) {
    const auto visit = it++;
    if (visit->second.until > now) continue;
    close(visit->first);
    visits_.erase(visit);
  }
  auto [parent, hello] = next_request(now);
  if (const auto endpoint = config_.endpoint(parent))
    visits_[dial(*endpoint, act::Service::kData, parent)] = {std::move(hello), now + kConnectionTime};
}

std::pair<WorkerId, PeerHello> Intruder::next_request(TimePoint now) {
  const std::vector<WorkerId> parents = config_.parents();
  PeerHello hello;
  hello.run_id = config_.run_id;
  if (parents.empty()) return {WorkerId{}, hello};
  const WorkerId parent = parents[random_.below(parents.size())];
  // All kKinds kinds of requests are equally likely. Those after kSelfSigned carry an accomplice's grant, if there is
  // one.
  enum : std::uint64_t { kNoGrant, kExpired, kOtherParent, kSelfSigned, kKinds = 8 };
  const std::uint64_t kind = random_.below(kKinds), now_ms = unix_ms(now);
  constexpr std::uint64_t kHourInMs = 3'600'000;
  if (kind == kExpired) {
    hello.grant = config_.expired_grant;
  } else if (kind == kOtherParent) {
    hello.grant = config_.absent_parent_grant;
  } else if (kind == kSelfSigned) {
    const Grant grant{.run_id = config_.run_id,
                      .child = config_.id,
                      .issued = now_ms,
                      .expires_unix_ms = now_ms + kHourInMs,
                      .stripe_count = 1,
                      .from = {Grant::From{.parent = parent, .stripe_mask = 1}},
                      .catch_up_to = {},
                      .full_only = false};
    hello.grant = sign(grant, config_.key);
  } else if (kind > kSelfSigned && !config_.accomplice_state->hellos.empty()) {
    hello = config_.accomplice_state->hellos[random_.below(config_.accomplice_state->hellos.size())];
    // The first connection (stream) to the parent, without a list of held data to follow.
    hello.stream = 0;
    hello.have_follows = false;
    // The grant holds for the accomplice's parents, so the intruder goes to one of them.
    if (const auto grant = open(*config_.checker, *hello.grant); grant && !grant->from.empty())
      return {grant->from[random_.below(grant->from.size())].parent, hello};
  }
  return {parent, hello};
}

void Intruder::on_connected(ConnId conn, TimePoint now) {
  const auto visit = visits_.find(conn);
  if (visit == visits_.end()) return close(conn);
  ++requests_sent_;
  send_control(conn, visit->second.hello, now);
}

}  // namespace echoline::sim

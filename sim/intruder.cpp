// The intruder of a soak scenario, which Fleet starts.
#include "sim/intruder.hpp"

#include "overlay/wire/grant.hpp"

namespace echoline::sim {

using namespace overlay;

void Intruder::start(TimePoint now) {
  actions_.push_back(act::UseCertificate{config_.certificate, config_.authority});
  next_at_ = now + config_.interval;
}

void Intruder::on_timer(TimePoint now) {
  if (now < next_at_) return;
  next_at_ = now + config_.interval;
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
  const std::uint64_t kind = random_.below(8), ms = unix_ms(now);
  if (kind == 1) {
    hello.grant = config_.expired_grant;
  } else if (kind == 2) {
    hello.grant = config_.absent_parent_grant;
  } else if (kind == 3) {
    hello.grant = sign(Grant{config_.run_id, config_.id, ms, ms + 3'600'000, 1, {{parent, 1}}, {}, false}, config_.key);
  } else if (kind > 3 && !config_.accomplice_state->hellos.empty()) {
    hello = config_.accomplice_state->hellos[random_.below(config_.accomplice_state->hellos.size())];
    hello.stream = 0;
    hello.have_follows = false;
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

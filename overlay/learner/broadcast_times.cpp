// Measures the broadcast time T_b. Called by LearnerCore at publications and acknowledgements.
#include "overlay/learner/broadcast_times.hpp"

#include <algorithm>

#include "chains/broadcast_model.hpp"

namespace echoline::overlay {

void BroadcastTimes::begin(Broadcast broadcast) {
  if (broadcasts_.size() >= kBroadcastsMax) broadcasts_.erase(broadcasts_.begin());
  broadcasts_.push_back(std::move(broadcast));
}

void BroadcastTimes::abandon(const PublicationId& id) {
  std::erase_if(broadcasts_, [&](const Broadcast& broadcast) { return broadcast.id == id; });
}

void BroadcastTimes::on_encoded(const PublicationId& id, Duration sealing, TimePoint now) {
  for (Broadcast& broadcast : broadcasts_)
    if (broadcast.id == id) broadcast.encoded = now, broadcast.sealing = sealing;
}

void BroadcastTimes::on_closed(const PublicationId& id, TimePoint now) {
  for (Broadcast& broadcast : broadcasts_)
    if (broadcast.id == id) broadcast.closed = now;
}

void BroadcastTimes::on_acknowledged(WorkerId worker, const Installed& ack, Duration delay, TimePoint now) {
  for (Broadcast& broadcast : broadcasts_)
    if (broadcast.version <= ack.version && broadcast.waiting_for.erase(worker) > 0) {
      broadcast.second_last_ack = std::exchange(
          broadcast.last_ack,
          Broadcast::Ack{.received_at = now, .verify = ack.verify, .install = ack.install, .acknowledge = delay});
      broadcast.last_acker = worker;
    }
}

void BroadcastTimes::remove(WorkerId worker) {
  for (Broadcast& broadcast : broadcasts_) {
    broadcast.active.erase(worker);
    broadcast.waiting_for.erase(worker);
    broadcast.stragglers.erase(worker);
  }
}

// Whether the last worker alone makes T_b long: it took kOutlierFactor times longer than all others, and than its place
// in the topology and its link explain. Only for fleets of at least three workers in which the quorum is the whole
// fleet although q < 1 (q = 0.9: up to nine workers). T_b decides which machines are rented, so one must not decide it.
bool BroadcastTimes::is_last_outlier(const Broadcast& broadcast, const ExpectedLateness& expected) const {
  const std::size_t worker_count = broadcast.active.size();
  if (worker_count < 3 || quorum_ >= 1 || !broadcast.waiting_for.empty() ||
      chains::quorum_count(quorum_, worker_count) < worker_count)
    return false;
  if (broadcast.second_last_ack.received_at <= broadcast.published || !broadcast.active.contains(broadcast.last_acker))
    return false;
  const double lateness = seconds(broadcast.last_ack.received_at - broadcast.published) /
                          seconds(broadcast.second_last_ack.received_at - broadcast.published);
  return lateness > kOutlierFactor && lateness > kOutlierFactor * expected(broadcast);
}

// A single late worker, or one that leaves, delays the report but does not change T_b.
std::vector<BroadcastTimes::Done> BroadcastTimes::take_done(const ExpectedLateness& expected, TimePoint now) {
  std::vector<Done> done;
  std::erase_if(broadcasts_, [&](Broadcast& broadcast) {
    const std::size_t worker_count = broadcast.active.size();
    if (worker_count == 0) return true;  // all have left: there is no T_b
    const std::size_t acknowledged = worker_count - broadcast.waiting_for.size();
    if (acknowledged < chains::quorum_count(quorum_, worker_count)) return false;
    const bool leaves_out_last = is_last_outlier(broadcast, expected);
    TimePoint ended_at = now;  // if no active worker has acknowledged since the publication
    if (leaves_out_last)
      ended_at = broadcast.second_last_ack.received_at;
    else if (broadcast.last_ack.received_at > broadcast.published)
      ended_at = broadcast.last_ack.received_at;
    done.push_back({.broadcast = std::move(broadcast),
                    .ended_at = ended_at,
                    .acknowledged = leaves_out_last ? acknowledged - 1 : acknowledged});
    return true;
  });
  return done;
}

// In a small fleet the quorum is all workers. A worker that never acknowledges must not hide the time of the others.
std::vector<BroadcastTimes::Done> BroadcastTimes::take_given_up(TimePoint now) {
  std::vector<Done> done;
  std::erase_if(broadcasts_, [&](Broadcast& broadcast) {
    const std::size_t acknowledged = broadcast.active.size() - broadcast.waiting_for.size();
    if (acknowledged == 0 || acknowledged < broadcast.waiting_for.size()) return false;
    const TimePoint ended_at = broadcast.last_ack.received_at;
    if (now < ended_at + kStragglerFactor * (ended_at - broadcast.published) + kStragglerPatience) return false;
    done.push_back({.broadcast = std::move(broadcast), .ended_at = ended_at, .acknowledged = acknowledged});
    return true;
  });
  return done;
}

BroadcastParts BroadcastTimes::parts_of(const Broadcast& broadcast, TimePoint ended_at) {
  const bool ended_at_second_last =
      ended_at == broadcast.second_last_ack.received_at && ended_at < broadcast.last_ack.received_at;
  const Broadcast::Ack& ack = ended_at_second_last ? broadcast.second_last_ack : broadcast.last_ack;
  Duration time_left = ended_at - broadcast.published;  // of T_b, not yet attributed to a part
  const auto take = [&time_left](Duration part) {
    part = std::clamp(part, Duration{}, time_left);
    time_left -= part;
    return part;
  };
  BroadcastParts parts;
  parts.encode = take(broadcast.encoded - broadcast.published - broadcast.sealing);
  parts.seal = take(broadcast.closed - broadcast.published - parts.encode);
  // The worker's durations come before `send`, which has no measurement of its own and gets the rest.
  parts.install = take(ack.install);
  parts.verify = take(ack.verify);
  parts.acknowledge = take(ack.acknowledge);
  parts.send = time_left;
  return parts;
}

void BroadcastTimes::check() const {
  ECHO_CHECK(broadcasts_.size() <= kBroadcastsMax);
  for (const Broadcast& broadcast : broadcasts_) {
    ECHO_CHECK(std::includes(broadcast.active.begin(), broadcast.active.end(), broadcast.waiting_for.begin(),
                             broadcast.waiting_for.end()),
               "version {} waits for workers that it does not count", broadcast.version);
    ECHO_CHECK(broadcast.second_last_ack.received_at <= broadcast.last_ack.received_at,
               "version {}: acknowledgements out of order", broadcast.version);
  }
}

}  // namespace echoline::overlay

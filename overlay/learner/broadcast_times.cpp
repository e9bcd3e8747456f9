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
  std::erase_if(broadcasts_, [&](const Broadcast& b) { return b.id == id; });
}

void BroadcastTimes::on_encoded(const PublicationId& id, Duration sealing, TimePoint now) {
  for (Broadcast& b : broadcasts_)
    if (b.id == id) b.encoded = now, b.sealing = sealing;
}

void BroadcastTimes::on_closed(const PublicationId& id, TimePoint now) {
  for (Broadcast& b : broadcasts_)
    if (b.id == id) b.closed = now;
}

void BroadcastTimes::on_acknowledged(WorkerId worker, const Installed& ack, Duration delay, TimePoint now) {
  for (Broadcast& b : broadcasts_)
    if (b.version <= ack.version && b.waiting.erase(worker) > 0) {
      b.second_last = std::exchange(b.last, {now, ack.verify, ack.install, delay});
      b.acked_last = worker;
    }
}

void BroadcastTimes::remove(WorkerId worker) {
  for (Broadcast& b : broadcasts_) {
    b.active.erase(worker);
    b.waiting.erase(worker);
    b.stragglers.erase(worker);
  }
}

// Whether one machine alone makes a broadcast long: the last of at least three acknowledged more than kOutlierFactor
// later than all others, and than its position in the topology and its link explain. Only with q < 1, where the quorum
// is the whole fleet for up to nine workers. Machines are rented by T_b, so one must not decide it.
bool BroadcastTimes::last_is_outlier(const Broadcast& b, const Lateness& expected) const {
  const std::size_t n = b.active.size();
  if (n < 3 || quorum_ >= 1 || !b.waiting.empty() || chains::quorum_count(quorum_, n) < n) return false;
  if (b.second_last.at <= b.published || !b.active.contains(b.acked_last)) return false;
  const double lateness = seconds(b.last.at - b.published) / seconds(b.second_last.at - b.published);
  return lateness > kOutlierFactor && lateness > kOutlierFactor * expected(b);
}

// A worker that alone is late, or that leaves, delays the report but does not change T_b.
std::vector<BroadcastTimes::Done> BroadcastTimes::take_done(const Lateness& expected, TimePoint now) {
  std::vector<Done> done;
  std::erase_if(broadcasts_, [&](Broadcast& b) {
    const std::size_t n = b.active.size();
    if (n == 0) return true;
    const std::size_t have = n - b.waiting.size();
    if (have < chains::quorum_count(quorum_, n)) return false;
    const bool alone = last_is_outlier(b, expected);
    const TimePoint until = alone ? b.second_last.at : b.last.at > b.published ? b.last.at : now;
    done.push_back({std::move(b), until, alone ? have - 1 : have});
    return true;
  });
  return done;
}

// In a small fleet the quorum is all workers. A worker that never acknowledges must not hide the time of the others.
std::vector<BroadcastTimes::Done> BroadcastTimes::take_given_up(TimePoint now) {
  std::vector<Done> done;
  std::erase_if(broadcasts_, [&](Broadcast& b) {
    const std::size_t have = b.active.size() - b.waiting.size();
    if (have == 0 || have < b.waiting.size()) return false;
    if (now < b.last.at + kStragglerFactor * (b.last.at - b.published) + kStragglerPatience) return false;
    const TimePoint until = b.last.at;
    done.push_back({std::move(b), until, have});
    return true;
  });
  return done;
}

BroadcastParts BroadcastTimes::parts_of(const Broadcast& b, TimePoint until) {
  const Broadcast::Ack& ack = until == b.second_last.at && until < b.last.at ? b.second_last : b.last;
  Duration left = until - b.published;
  const auto take = [&left](Duration part) { return part = std::clamp(part, Duration{}, left), left -= part, part; };
  BroadcastParts parts;
  parts.encode = take(b.encoded - b.published - b.sealing);
  parts.seal = take(b.closed - b.published - parts.encode);
  parts.install = take(ack.install);
  parts.verify = take(ack.verify);
  parts.acknowledge = take(ack.acknowledge);
  parts.send = left;
  return parts;
}

void BroadcastTimes::check() const {
  ECHO_CHECK(broadcasts_.size() <= kBroadcastsMax);
  for (const Broadcast& b : broadcasts_) {
    ECHO_CHECK(std::includes(b.active.begin(), b.active.end(), b.waiting.begin(), b.waiting.end()),
               "version {} waits for workers that it does not count", b.version);
    ECHO_CHECK(b.second_last.at <= b.last.at, "version {}: acknowledgements out of order", b.version);
  }
}

}  // namespace echoline::overlay

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

void BroadcastTimes::encoded(const PublicationId& id, Duration sealing, TimePoint now) {
  for (Broadcast& b : broadcasts_)
    if (b.id == id) b.encoded = now, b.sealing = sealing;
}

void BroadcastTimes::closed(const PublicationId& id, TimePoint now) {
  for (Broadcast& b : broadcasts_)
    if (b.id == id) b.closed = now;
}

void BroadcastTimes::acknowledged(WorkerId worker, const Installed& ack, Duration delay, TimePoint now) {
  for (Broadcast& b : broadcasts_)
    if (b.version <= ack.version && b.waiting.erase(worker) > 0) {
      b.before = std::exchange(b.last, {now, ack.verify, ack.install, delay});
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

// Whether one machine alone makes a broadcast long: the last of at least three acknowledged more than kAloneFactor
// later than all others, and than its place and link explain. Only with q < 1, where the quorum is the whole fleet for
// up to nine workers. Machines are rented by T_b, so one must not decide it.
bool BroadcastTimes::last_is_alone(const Broadcast& b, const Lateness& expected) const {
  const std::size_t n = b.active.size();
  if (n < 3 || quorum_ >= 1 || !b.waiting.empty() || chains::counted(quorum_, n) < n) return false;
  if (b.before.at <= b.published || !b.active.contains(b.acked_last)) return false;
  const double late = seconds(b.last.at - b.published) / seconds(b.before.at - b.published);
  return late > kAloneFactor && late > kAloneFactor * expected(b);
}

// One that is alone in being late, or leaves, delays the report and not what it says.
std::vector<BroadcastTimes::Done> BroadcastTimes::take_done(const Lateness& expected, TimePoint now) {
  std::vector<Done> done;
  std::erase_if(broadcasts_, [&](Broadcast& b) {
    const std::size_t n = b.active.size();
    if (n == 0) return true;
    const std::size_t have = n - b.waiting.size();
    if (have < chains::counted(quorum_, n)) return false;
    const bool alone = last_is_alone(b, expected);
    const TimePoint until = alone ? b.before.at : b.last.at > b.published ? b.last.at : now;
    done.push_back({std::move(b), until, alone ? have - 1 : have});
    return true;
  });
  return done;
}

// In a small fleet the quorum is all workers. One that never acknowledges must not hide how long the others took.
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
  const Broadcast::Ack& ack = until == b.before.at && until < b.last.at ? b.before : b.last;
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
    ECHO_CHECK(b.before.at <= b.last.at, "version {}: acknowledgements out of order", b.version);
  }
}

}  // namespace echoline::overlay

// State of the driver that needs neither libuv nor TLS. Private to overlay/uv/.
#pragma once
#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "base/result.hpp"
#include "overlay/action.hpp"

namespace echoline::overlay {

// Work for the loop thread. Any thread adds; the loop thread takes.
class PostedWork {
 public:
  using Work = std::function<void(TimePoint)>;

  void open(Work first) {
    const std::lock_guard lock(mutex_);
    open_ = true;
    work_.push_back(std::move(first));
  }
  // Calls `wake` after queueing the work. False if the queue is not open.
  template <class Wake>
  bool add(Work work, Wake wake) {
    const std::lock_guard lock(mutex_);
    if (!open_) return false;
    work_.push_back(std::move(work));
    wake();
    return true;
  }
  std::vector<Work> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(work_, {});
  }
  // Closes the queue. False while work waits: it stays open.
  bool close() {
    const std::lock_guard lock(mutex_);
    open_ = open_ && !work_.empty();
    return !open_;
  }

 private:
  std::mutex mutex_;
  std::vector<Work> work_;
  bool open_ = false;
};

// Recognises a pause: a timer comes so late that the process or machine must have been stopped.
class PauseDetector {
 public:
  static constexpr Duration kPauseMin = std::chrono::seconds(1);  // a timer that is late by less shows no pause

  void arm(TimePoint at, TimePoint now) { armed_for_ = at == kNever ? kNever : std::max(at, now); }
  // The timer has fired. A pause is returned once; the next call, after other events were handled, returns none.
  std::optional<Duration> take(TimePoint now) {
    const bool is_late = now - armed_for_ > kPauseMin;
    was_reported_ = is_late && !was_reported_;
    return was_reported_ ? std::optional(now - armed_for_) : std::nullopt;
  }

 private:
  TimePoint armed_for_ = kNever;
  bool was_reported_ = false;
};

// Accepted connections whose handshake is not done, by the network they come from.
class UnprovenConnections {
 public:
  void add(ConnId id, const std::string& network) {
    by_network_[network].push_back(id);
    ++size_;
  }
  void remove(ConnId id, const std::string& network) {
    const auto from = by_network_.find(network);
    if (from == by_network_.end()) return;
    size_ -= std::erase(from->second, id);
    if (from->second.empty()) by_network_.erase(from);
  }
  std::size_t size() const { return size_; }
  // The connection to close first: the oldest one of the network with the most connections.
  std::optional<ConnId> oldest_of_largest_network() const {
    const auto most = std::max_element(by_network_.begin(), by_network_.end(), [](const auto& a, const auto& b) {
      return a.second.size() != b.second.size() ? a.second.size() < b.second.size()
                                                : a.second.front() > b.second.front();
    });
    return most == by_network_.end() ? std::nullopt : std::optional(most->second.front());
  }
  void check() const {
    std::size_t size = 0;
    for (const auto& [network, connections] : by_network_) size += connections.size();
    ECHO_CHECK(size == size_, "{} unproven connections are counted as {}", size, size_);
  }

 private:
  std::map<std::string, std::deque<ConnId>> by_network_;  // oldest first
  std::size_t size_ = 0;
};

// Deadlines of handshakes and flushes.
class Deadlines {
 public:
  // `deadline`: the connection's own copy, kNever for none.
  void set(ConnId id, TimePoint& deadline, TimePoint next) {
    if (deadline != kNever) all_.erase({deadline, id});
    deadline = next;
    if (next != kNever) all_.emplace(next, id);
  }
  TimePoint first() const { return all_.empty() ? kNever : all_.begin()->first; }
  const std::set<std::pair<TimePoint, ConnId>>& all() const { return all_; }

 private:
  std::set<std::pair<TimePoint, ConnId>> all_;
};

}  // namespace echoline::overlay

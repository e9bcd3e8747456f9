// A learner and workers on real sockets. The board records their callbacks, and tests wait for them.
#pragma once
#include <gtest/gtest.h>

#include <condition_variable>
#include <map>
#include <mutex>

#include "base/clock.hpp"
#include "overlay/uv/node.hpp"
#include "tests/overlay/folder.hpp"
#include "tests/overlay/made.hpp"

namespace echoline::overlay {

// Generous, because the machine may be busy.
inline constexpr Duration kPatience = std::chrono::seconds(60);

// A lock and a condition: callbacks write under it, tests wait until a condition holds.
class Board {
 public:
  template <class F>
  void write(F&& f) {
    const std::lock_guard lock(mutex_);
    f();
    changed_.notify_all();
  }
  template <class F>
  bool wait(F&& holds, Duration limit = kPatience) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, limit, holds);
  }
  template <class F>
  auto read(F&& f) {
    const std::lock_guard lock(mutex_);
    return f();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
};

struct TestLearner {
  Board board;
  std::map<WorkerId, MemberInfo> joined;
  std::map<WorkerId, std::string> lost, away;
  std::map<WorkerId, Version> acked;
  std::vector<std::pair<WorkerId, std::string>> messages;
  std::vector<BroadcastReport> reports;
  std::vector<Version> snapshot_requests;
  chains::Chains chains;
  bool wrong_digest = false;
  std::unique_ptr<LearnerNode> node;

  static LearnerOptions quick() {
    LearnerOptions options;
    options.policy = chains::TopologyPolicy::kEcho2;  // chains, which the tests can foretell
    options.run_id = "run";
    options.network.silence_min = {};
    options.heartbeat = std::chrono::milliseconds(200);
    options.network.heartbeat_timeout = std::chrono::seconds(10);
    options.network.chunk = {16 * 1024};
    options.uplink_expected = options.chain_rate;
    return options;
  }
  void start(LearnerOptions options = quick()) {
    LearnerEvents events;
    events.welcome = [](const MemberInfo& m) { return "hello " + m.name; };
    events.joined = [this](const MemberInfo& m) { board.write([&] { joined[m.id] = m; }); };
    events.away = [this](WorkerId id, const std::string& why) { board.write([&] { away[id] = why; }); };
    events.lost = [this](WorkerId id, const std::string& why) { board.write([&] { lost[id] = why; }); };
    events.installed = [this](WorkerId id, Version v, const Digest& d) {
      board.write([&] {
        acked[id] = v;
        wrong_digest |= d != digest_of(v.value);
      });
    };
    events.message = [this](WorkerId id, std::string bytes) {
      board.write([&] { messages.emplace_back(id, std::move(bytes)); });
    };
    events.broadcast_done = [this](const BroadcastReport& r) { board.write([&] { reports.push_back(r); }); };
    events.topology_changed = [this](const chains::Topology& t) { board.write([&] { chains = t.chains; }); };
    events.need_catch_up = [this](Version v, std::optional<Version>) {
      board.write([&] { snapshot_requests.push_back(v); });
    };
    auto started = LearnerNode::start(std::move(options), std::move(events));
    ASSERT_TRUE(started.has_value()) << started.error().message();
    node = std::move(*started);
  }
  // A publication of random bytes.
  Status publish(std::uint64_t version, std::optional<std::uint64_t> base, std::size_t bytes, bool catch_up = false) {
    PublicationHead head;
    head.version = Version{version};
    if (base) head.base = Version{*base}, head.base_digest = digest_of(*base);
    head.catch_up = catch_up;
    return node->publish(head, random_bytes(version, bytes), digest_of(version));
  }
  bool all_acked(std::size_t workers, std::uint64_t version) {
    return board.wait([&] {
      std::size_t acked_count = 0;
      for (const auto& [id, v] : acked) acked_count += v == Version{version} && !lost.contains(id);
      return acked_count == workers;
    });
  }
};

struct TestWorker {
  Board board;
  std::optional<WorkerId> id;
  std::string welcome, reason;
  int welcomes = 0, aways = 0;
  bool gone = false;             // disconnected() was called
  bool auto_install = true;      // each delivered publication is reported as installed at once
  std::vector<Publication> got;  // all delivered publications
  std::vector<std::string> messages;
  std::unique_ptr<WorkerNode> node;

  static WorkerOptions of(const TestLearner& learner, const std::string& name) {
    WorkerOptions options;
    options.learner = learner.node->endpoint();
    options.name = name;
    options.join_timeout = kPatience;
    options.away_max = kPatience;
    options.token = *learner.node->issue_token(name);
    return options;
  }
  void start(WorkerOptions options) {
    WorkerEvents events;
    events.joined = [this](WorkerId w, const std::string& bytes) {
      board.write([&] {
        id = w;
        welcome = bytes;
        ++welcomes;
      });
    };
    events.publication = [this](const Publication& p) {
      board.write([&] { got.push_back(p); });
      board.wait([&] { return node != nullptr; });  // it may come before start() has returned
      if (auto_install && p.activate) node->installed(p.version, p.policy_digest);
    };
    events.message = [this](std::string bytes) { board.write([&] { messages.push_back(std::move(bytes)); }); };
    events.away = [this](const std::string&) { board.write([&] { ++aways; }); };
    events.disconnected = [this](const std::string& why, bool) {
      board.write([&] {
        gone = true;
        reason = why;
      });
    };
    auto started = WorkerNode::start(std::move(options), std::move(events));
    ASSERT_TRUE(started.has_value()) << started.error().message();
    board.write([&] { node = std::move(*started); });
  }
  std::vector<std::byte> payload(std::size_t i) {
    const Publication p = board.read([&] { return got.at(i); });
    const Slice bytes = *p.payload.bytes();
    return {bytes.bytes().begin(), bytes.bytes().end()};
  }
  ~TestWorker() {
    if (node) node->stop();
  }
};

}  // namespace echoline::overlay

// A learner driven by hand, with workers that consist of their control connections only.
#pragma once
#include <map>
#include <set>

#include "overlay/learner/learner_core.hpp"
#include "tests/overlay/actions.hpp"
#include "tests/overlay/made.hpp"

namespace echoline::overlay {

inline const BitRate kMegabytePerS = BitRate::from_mbit_per_s(8);

// A learner's core, its clock, and all actions that it has returned.
struct Desk {
  static LearnerConfig config(double up_mbit) {
    LearnerConfig c;
    c.policy = chains::TopologyPolicy::kEcho2;  // chains, which the tests can foretell
    c.network.silence_min = {};
    c.self = {"10.0.0.0", 1};
    c.authority = std::make_shared<trust::Authority>(made_authority());
    c.checker = std::make_shared<SignatureChecker>("run", c.authority->public_key());
    c.core.limits.up = BitRate::from_mbit_per_s(up_mbit);
    c.core.unix_origin_s = kMadeUnix_s;
    return c;
  }
  LearnerCore core;
  TimePoint now = TimePoint(std::chrono::seconds(1));
  std::vector<Action> actions;
  std::uint64_t next_conn = 2;
  std::map<WorkerId, ConnId> control;  // the control connection of each worker that has joined

  explicit Desk(double up_mbit = 16) : Desk(config(up_mbit)) {}
  explicit Desk(LearnerConfig c) : core(std::move(c)) {
    core.start(now);
    take();
  }
  void take() {
    for (Action& a : core.take_actions()) actions.push_back(std::move(a));
  }
  void deliver_control(ConnId conn, const ControlMessage& m) {
    const Slice frame(encode_control(m));
    core.on_frame(conn, {FrameType::kControl, frame.part(8, frame.size() - 8), {}, {}}, now);
    take();
  }
  void deliver_control(std::uint64_t worker, const ControlMessage& m) {
    deliver_control(control.at(WorkerId{worker}), m);
  }
  ConnId accept_peer(const trust::PeerIdentity& identity, const std::string& host = "10.9.9.9") {
    const ConnId conn{next_conn};
    next_conn += 2;
    core.on_accepted(conn, {host, identity}, now);
    take();
    return conn;
  }
  // Worker `id` joins; it can be dialled back.
  ConnId join(std::uint64_t id, bool reachable = true, BitRate down = kMegabytePerS,
              std::optional<Installed> installed = {}) {
    trust::PeerIdentity identity{trust::PeerIdentity::Kind::kWorker, WorkerId{id}};
    identity.key = made_key("worker " + std::to_string(id)).public_key();
    const std::string host = "10.0.0." + std::to_string(id);
    const ConnId conn = accept_peer(identity, host);
    control[WorkerId{id}] = conn;
    deliver_control(conn, Hello{"run", "w", {host, 9}, kMegabytePerS, down, installed});
    const ConnId back = all<act::Dial>().back().conn;
    if (reachable)
      core.on_connected(back, now);
    else
      core.on_closed(back, "refused", now);
    take();
    return conn;
  }
  void join_all(std::uint64_t n) {
    for (std::uint64_t id = 1; id <= n; ++id) join(id);
    pass_time(2 * TopologyPlan::kDelay);
  }
  // Lets `time` pass. Every worker but `silent` sends a heartbeat each half second.
  void pass_time(Duration time, const std::set<std::uint64_t>& silent = {}) {
    for (const TimePoint end = now + time; now < end;) {
      now = std::min(end, now + std::chrono::milliseconds(500));
      for (const auto& [id, conn] : control)
        if (!silent.contains(id.value) && has(id)) deliver_control(conn, Heartbeat{});
      core.on_timer(now);
      take();
    }
  }
  bool has(WorkerId id) const {
    for (const WorkerView& view : core.stats().workers)
      if (view.info.id == id) return true;
    return false;
  }
  Status publish(const Made& made, bool catch_up = false) {
    ECHO_TRY(core.begin(made.announcement, made.opening, catch_up, now));
    ECHO_TRY(core.add(made.id, made.chunks, now));
    ECHO_TRY(core.finish(made.manifest, made.closing, now));
    take();
    return ok();
  }
  template <class T>
  std::vector<T> all() const {
    return all_of<T>(actions);
  }
  template <class T>
  std::vector<T> sent(ConnId conn) const {
    return sent_over<T>(actions, conn);
  }
  template <class T>
  std::vector<T> sent(std::uint64_t worker) const {
    return sent<T>(control.at(WorkerId{worker}));
  }
  std::string goodbye(ConnId conn) const {
    const auto found = sent<Goodbye>(conn);
    return found.empty() ? "" : found.back().reason;
  }
  std::string away(std::uint64_t worker) const {
    for (const auto& a : all<act::ReportWorkerAway>())
      if (a.worker == WorkerId{worker}) return a.reason;
    return "";
  }
  std::string lost(std::uint64_t worker) const {
    for (const auto& l : all<act::ReportWorkerLost>())
      if (l.worker == WorkerId{worker}) return l.reason;
    return "";
  }
  bool closed(ConnId conn) const {
    for (const auto& c : all<act::Close>())
      if (c.conn == conn) return true;
    return false;
  }
  const chains::Chains& chains() const { return core.topology().chains; }
  std::vector<std::uint64_t> chain(std::size_t i = 0) const {
    std::vector<std::uint64_t> ids;
    for (const WorkerId id : chains().at(i)) ids.push_back(id.value);
    return ids;
  }
};

}  // namespace echoline::overlay

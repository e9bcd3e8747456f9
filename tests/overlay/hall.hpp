// A simulated network for tests: a learner and workers without sockets. The hall carries the cores' messages under a
// virtual clock. Each node is one core with its disk and its application.
#pragma once
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "overlay/learner/learner_core.hpp"
#include "overlay/member/enrol_core.hpp"
#include "overlay/member/member_core.hpp"
#include "tests/overlay/actions.hpp"
#include "tests/overlay/made.hpp"

namespace echoline::overlay {

struct HallNode {
  // One publication's records on the node's disk.
  struct Spool {
    std::vector<act::Spool> records;
  };
  struct Delivered {
    PublicationKey key;
    bool activate = true;
    std::vector<std::byte> payload;
  };

  std::string name;
  WorkerId id;
  Endpoint endpoint;
  trust::PeerIdentity identity;
  std::unique_ptr<Core> core;
  bool alive = true;
  bool installs = true;     // each delivered publication is reported as installed at once
  bool reading = true;      // act::SetReading for all connections
  bool disk_fails = false;  // the state cannot be saved
  std::uint64_t next_accepted = 2;

  std::string state;  // the state file
  std::map<PublicationId, Spool> spools;
  std::vector<Delivered> delivered;
  std::vector<Action> events;  // for the application
  std::vector<std::vector<std::byte>> certificates;

  MemberCore& member() { return static_cast<MemberCore&>(*core); }
  LearnerCore& learner() { return static_cast<LearnerCore&>(*core); }
  std::vector<PublicationKey> keys() const {
    std::vector<PublicationKey> keys;
    for (const Delivered& d : delivered) keys.push_back(d.key);
    return keys;
  }
  template <class T>
  std::vector<T> all() const {
    return all_of<T>(events);
  }
  std::string end() const { return all<act::ReportEnd>().empty() ? "" : all<act::ReportEnd>().back().reason; }
};

class Hall {
 public:
  explicit Hall(std::function<void(LearnerConfig&)> configure = {});

  HallNode& learner() { return *nodes_.front(); }
  LearnerCore& core() { return learner().learner(); }
  const trust::Authority& authority() const { return *authority_; }
  TimePoint now() const { return now_; }

  // Starts a worker that has a certificate. `configure` may change its configuration.
  HallNode& join(std::function<void(MemberConfig&)> configure = {});
  // Starts `n` workers and waits until they have parents.
  std::vector<HallNode*> join_all(std::size_t n, std::function<void(MemberConfig&)> configure = {});
  // Starts a machine that enrols with this token. Its core ends with the answer.
  HallNode& enrol(const trust::Secret& token, const std::string& instance, const trust::SigningKey& key);
  // Kills the node's process. Its connections break.
  void kill(HallNode& node);
  // Restarts the worker's process with its files on disk.
  void restart(HallNode& worker, std::function<void(MemberConfig&)> configure = {});
  void restart_learner(std::optional<Version> resumed_at = {});
  // Breaks the connections between two nodes.
  void cut(HallNode& a, HallNode& b);

  // Publishes the whole payload at once.
  Status publish(const Made& made, bool catch_up = false);
  Status begin(const Made& made, bool catch_up = false);
  Status add(const Made& made, std::size_t first, std::size_t count);
  Status finish(const Made& made);

  void run_for(Duration time);
  // False when `holds` is not true within `limit` of the hall's time.
  bool run_until(const std::function<bool()>& holds, Duration limit = std::chrono::seconds(60));
  // True if every live worker has received all versions up to `version`.
  bool all_have(std::uint64_t version);
  // Performs what a core asked for after it was called directly.
  void settle(HallNode& node) { perform(node); }

  HallNode* node_of(WorkerId id);
  HallNode& parent_of(HallNode& worker);
  // The workers of the only chain, in order.
  std::vector<HallNode*> chain();
  // Chunk bytes that went from one node to the other.
  std::uint64_t chunk_bytes(const HallNode& from, const HallNode& to) const;

  // Called for every frame before its delivery. It may change the frame; false drops it.
  std::function<bool(HallNode& from, HallNode& to, Frame&)> tamper;
  // True if a connection can be opened in this direction. Without it, every one can.
  std::function<bool(HallNode& from, HallNode& to)> may_dial;
  // Answers act::RequestCatchUp; by default with a full snapshot of 1000 bytes.
  std::function<void(const act::RequestCatchUp&)> on_need_catch_up;

 private:
  struct End {
    HallNode* node = nullptr;
    ConnId conn;
    FrameDecoder decoder;
    std::deque<Slice> inbox;            // arrived, not read yet
    bool open = false, paused = false;  // `paused`: the core has stopped reading here
  };
  struct Link {
    End ends[2];
    act::Service service;
  };

  HallNode& add_node(std::string name);
  void start_member(HallNode& node, WorkerState state, std::function<void(MemberConfig&)> configure);
  void start_learner(std::optional<LearnerState> state, std::optional<Version> resumed_at);
  void call_at(TimePoint when, std::function<void()> event) { events_.emplace(when, std::move(event)); }
  // Calls `event` after the present event, unless the node's process has ended by then.
  void call_soon(HallNode& node, std::function<void(Core&)> event);
  void step();
  void perform(HallNode& node);
  void perform(HallNode& node, Action action);
  void dial(HallNode& from, const act::Dial& dial);
  void send(HallNode& from, const act::Send& send);
  void read(const std::shared_ptr<Link>& link, int side);
  void close(const std::shared_ptr<Link>& link, int side, const std::string& reason);
  std::pair<std::shared_ptr<Link>, int> find(HallNode& node, ConnId conn);
  void deliver(HallNode& node, const act::DeliverPublication& deliver);

  std::function<void(LearnerConfig&)> configure_learner_;
  std::shared_ptr<const trust::Authority> authority_;
  std::shared_ptr<const SignatureChecker> checker_;
  std::vector<std::unique_ptr<HallNode>> nodes_;
  // By node and connection: the link, and which of its two ends the node is.
  std::map<std::pair<const HallNode*, ConnId>, std::pair<std::shared_ptr<Link>, int>> links_;
  std::multimap<TimePoint, std::function<void()>> events_;
  std::map<std::pair<const HallNode*, const HallNode*>, std::uint64_t> chunk_bytes_;
  TimePoint now_{};
  std::uint64_t next_worker_ = 1, next_serial_ = 100, steps_at_now_ = 0;
};

}  // namespace echoline::overlay

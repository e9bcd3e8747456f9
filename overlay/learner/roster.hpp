// The learner's workers: connected, or away and expected back. Private to overlay/learner/.
#pragma once
#include <map>
#include <set>
#include <span>

#include "overlay/learner/presence.hpp"
#include "overlay/trainer_node.hpp"
#include "overlay/wire/grant.hpp"

namespace echoline::overlay {

// The parents from which a worker is assigned to receive, and those that may still send to it.
struct Place {
  // A worker may accuse a former parent or helper of bad chunks for this long after it was replaced: the last chunks or
  // the report may be late.
  static constexpr Duration kAccusationTime = std::chrono::seconds(60);

  std::optional<Assign> assigned;
  // When the grant, the signed proof of this assignment, is renewed.
  TimePoint renew_grant_at = kNever;
  std::map<WorkerId, TimePoint> accusable_until;  // by former parent or helper

  std::span<const Parent> parents() const {
    return assigned ? std::span<const Parent>(assigned->parents) : std::span<const Parent>();
  }
  const Parent* edge_from(WorkerId parent) const;  // null: `parent` is not assigned
  bool may_accuse(WorkerId sender, TimePoint now) const;
  void remember_sender(WorkerId sender, TimePoint now) { accusable_until[sender] = now + kAccusationTime; }
  void replace(Assign next, TimePoint now);
  void clear(TimePoint now);  // its parents become former ones
};

// Contents of a worker's last heartbeat.
struct HeartbeatReport {
  // Number of chunks held, per stripe: stripe j of s holds the chunks i with i mod s = j.
  std::map<PublicationId, std::vector<std::uint32_t>> progress;
  std::map<WorkerId, EdgeReport> edges;              // by child
  std::map<PublicationKey, std::uint64_t> holdings;  // payload bytes of whole publications
};

struct Worker {
  WorkerView view;
  trust::PublicKey key;      // of its certificate; certificates for other keys are refused
  std::uint32_t region = 0;  // of LearnerConfig::regions
  LinkLimits expected;       // links of a worker that states none, by LearnerConfig::links_of
  ConnId control;            // its connection to the learner
  MessageQueue messages;
  MessageAssembler incoming;
  Presence presence;
  Place place;
  HeartbeatReport reported;
  bool draining = false;      // it hands its children over, and then leaves
  bool is_straggler = false;  // it delayed a broadcast, and has installed nothing since

  bool is_node() const { return is_trainer_node(view.info.name); }
  std::optional<BitRate> down() const { return view.info.down ? view.info.down : expected.down; }
  // An expected uplink counts until the worker has forwarded faster.
  std::optional<BitRate> up() const {
    if (view.info.up || !expected.up) return view.info.up;
    return std::max(*expected.up, view.forwarding_rate.value_or(BitRate{0}));
  }
};

class Roster {
 public:
  using Workers = std::map<WorkerId, Worker>;

  // Connected workers.
  const Worker* find(WorkerId id) const;
  Worker* find(WorkerId id) { return const_cast<Worker*>(std::as_const(*this).find(id)); }
  Worker& at(WorkerId id) { return connected_.at(id); }
  const Worker& at(WorkerId id) const { return connected_.at(id); }
  Worker* find_by_control(ConnId control);
  bool contains(WorkerId id) const { return connected_.contains(id); }
  auto begin() { return connected_.begin(); }
  auto begin() const { return connected_.begin(); }
  auto end() { return connected_.end(); }
  auto end() const { return connected_.end(); }
  std::size_t size() const { return connected_.size(); }
  bool empty() const { return connected_.empty(); }

  const Workers& away() const { return away_; }
  bool is_known(WorkerId id) const { return contains(id) || away_.contains(id); }
  std::vector<WorkerId> all_ids() const;  // of connected and away workers
  std::uint64_t joined_count() const { return joined_; }
  std::uint64_t lost_count() const { return lost_; }

  // A worker connects, for the first time or again.
  Worker& join(WorkerId id, ConnId control, const LearnerRules& rules, TimePoint now);
  // Takes a worker out of the connected ones; empty if it is not among them. set_away() or drop() follows.
  Workers::node_type disconnect(WorkerId id);  // `node_type`: an element taken out of the map, which moves as a whole
  void set_away(Workers::node_type worker, const std::string& reason, TimePoint now);
  void drop(Workers::node_type) { ++lost_; }  // the worker is gone for good
  // Forgets a worker that is away. Returns whether there was one.
  bool forget_away(WorkerId id);
  void forget_connections() { by_control_.clear(); }
  // Part of a message of the application, as MessageAssembler::add().
  Result<std::optional<std::string>> add_part(WorkerId id, const Frame& part, std::size_t message_bytes_max);
  std::size_t incomplete_bytes() const { return incomplete_bytes_; }  // of messages of connected workers
  const Worker& sender_of_most_incomplete_bytes() const;              // at least one worker must be connected
  // The learner's process was suspended for `pause`, until now.
  void postpone(Duration pause, TimePoint now);
  void check() const;

 private:
  Workers connected_, away_;
  std::map<ConnId, WorkerId> by_control_;
  std::uint64_t joined_ = 0, lost_ = 0;
  std::size_t incomplete_bytes_ = 0;
};

}  // namespace echoline::overlay

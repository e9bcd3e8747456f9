// The nodes from which a worker receives. The learner assigns its parents, and at times a helper, which sends the
// publications that the parents no longer have. This class dials them, reports the chunks that are here, and asks for
// help. No I/O and no clock.
#pragma once
#include "base/token_bucket.hpp"
#include "overlay/member/learner_link.hpp"
#include "overlay/member/stall_watch.hpp"
#include "overlay/member/upstream.hpp"

namespace echoline::overlay {

class Parents {
 public:
  // Limit on the reports of failed edges that this worker sends. A burst, because many parents may fail at once; half
  // of what the learner accepts (MessageBudget), so that the learner never refuses one.
  static constexpr Allowance kFailureReports{.burst = 128, .per_s = 8};
  static constexpr int kCorruptChunksMax = 2;  // the edge to a parent is given up after so many corrupt chunks

  // The referenced objects must outlive this one.
  Parents(const MemberConfig& config, const InstallState& install_state, const PublicationStore& store,
          StallWatch& stall_watch, LearnerLink& learner, Transport& transport)
      : config_(config),
        install_state_(install_state),
        store_(store),
        stall_watch_(stall_watch),
        learner_(learner),
        transport_(transport) {}

  // Each handles a message of the learner. Parents that stay keep their connections.
  void assign(const Assign& assign, TimePoint now);
  void on_help(const Help& help, TimePoint now);
  void revoke(const WorkerSet& revoked);

  void close_all();

  // The parent or helper of this connection; null if there is none.
  Upstream* find(ConnId conn) { return const_cast<Upstream*>(std::as_const(*this).find(conn)); }
  const Upstream* find(ConnId conn) const;
  void on_connected(Upstream& upstream, ConnId conn, TimePoint now);
  // `worker` has dialled this node. Accepts the connection, and returns true, only if the worker is a parent that has
  // to dial this node.
  bool on_dialled_by(WorkerId worker, ConnId conn, TimePoint now);
  void on_closed(Upstream& upstream, ConnId conn, const std::string& reason, TimePoint now);
  // A message that is not about a publication or a status.
  void on_message(Upstream& upstream, const ControlMessage& message, TimePoint now);
  // A proof failed. The parent should have checked it, so it is at fault. Reports it to the learner, and gives the edge
  // up after kCorruptChunksMax. `upstream` may be gone afterwards.
  void on_forgery(Upstream& upstream, const PublicationId& id, std::uint32_t index, const std::string& what,
                  TimePoint now);
  // Gives the edge up and plans the next attempt. `upstream` may be gone afterwards.
  void fail_edge(Upstream& upstream, EdgeTroubleKind kind, const std::string& reason, TimePoint now);

  // Reports to every parent the version and the chunks that are here.
  void send_have(TimePoint now);
  // The parents cannot bring this worker to `target`: asks the learner for a helper. `stalled`: they do not refuse, but
  // nothing has come for too long.
  void request_help(Version target, TimePoint now, bool stalled = false);
  void end_help(TimePoint now);
  // Ends the help if the helper has brought this worker to its version.
  void end_help_if_done(TimePoint now);
  // There was no progress towards the newest version for too long (StallWatch).
  void on_stall(TimePoint now);
  // Stops or resumes reading from parents and helper.
  void pause_reading(bool pause);

  // `other_connections`: this worker's connections other than those to parents.
  void on_timer(std::size_t other_connections, TimePoint now);
  TimePoint next_deadline() const;
  void postpone(Duration pause, TimePoint now);
  // Whether an edge may have another stream (connection). Half of all connections stay free for further edges and
  // helpers.
  bool has_room_for_streams(std::size_t other_connections) const;
  std::vector<WorkerId> ids() const;
  // The number of chunks held here, by stripe, of each of the newest few publications.
  std::vector<Progress> progress() const;
  void check() const;

 private:
  template <class Self, class Use>
  static void for_each_edge(Self& self, Use use) {
    for (auto& [id, upstream] : self.parents_) use(upstream);
    if (self.helper_) use(*self.helper_);
  }
  void open(Upstream& upstream, TimePoint now);
  void dial(Upstream& upstream);
  void close(Upstream& upstream);
  void add_streams(Upstream& upstream, std::size_t other_connections, TimePoint now);
  void send_have(const Upstream& upstream, TimePoint now);
  Have make_have(const Upstream& upstream) const;
  std::optional<Version> position_for(const Upstream& upstream) const;
  bool holds_missing_chunks(const Upstream& upstream) const;

  const MemberConfig& config_;
  const InstallState& install_state_;
  const PublicationStore& store_;
  StallWatch& stall_watch_;
  LearnerLink& learner_;
  Transport& transport_;
  std::map<WorkerId, Upstream> parents_;
  std::optional<Upstream> helper_;
  int helper_silences_ = 0;  // failures of the last helper by heartbeat timeout; the next helper starts with this count
  std::uint32_t stripes_ = 1;  // number of stripes, the shares in which a publication travels
  bool reading_paused_ = false;
  TokenBucket failure_reports_{kFailureReports};
};

}  // namespace echoline::overlay

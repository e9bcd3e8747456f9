// The nodes from which a worker receives: its parents, which the learner assigns, and a helper beside them, which
// brings it to one version that its parents cannot give it. Dials them, says what is here, and asks for help. Pure.
#pragma once
#include "base/token_bucket.hpp"
#include "overlay/member/learner_link.hpp"
#include "overlay/member/stall_watch.hpp"
#include "overlay/member/upstream.hpp"

namespace echoline::overlay {

class Parents {
 public:
  static constexpr int kCorruptChunksMax = 2;  // from one parent, before the edge is given up

  // All references must outlive the parents.
  Parents(const MemberConfig& config, const Standing& standing, const PublicationStore& store, StallWatch& stall,
          LearnerLink& learner, Transport& transport)
      : config_(config), standing_(standing), store_(store), stall_(stall), learner_(learner), transport_(transport) {}

  // From the learner. Parents that stay keep their connections.
  void assign(const Assign& assign, TimePoint now);
  void on_help(const Help& help, TimePoint now);
  void revoke(const WorkerSet& revoked);
  void close_all();

  // The parent or helper of this connection.
  Upstream* find(ConnId conn) { return const_cast<Upstream*>(std::as_const(*this).find(conn)); }
  const Upstream* find(ConnId conn) const;
  void on_connected(Upstream& up, ConnId conn, TimePoint now);
  // This worker has dialled: it is taken if the learner has said that it would. Returns whether it is.
  bool on_dialled_by(WorkerId worker, ConnId conn, TimePoint now);
  void on_closed(Upstream& up, ConnId conn, const std::string& reason, TimePoint now);
  // A message that is not about a publication or a status.
  void on_message(Upstream& up, const ControlMessage& message, TimePoint now);
  // The learner cannot have sent this: the edge is to blame, for the parent had to check it. Reports it, and gives the
  // edge up after kCorruptChunksMax. `up` may be gone afterwards.
  void on_forgery(Upstream& up, const PublicationId& id, std::uint32_t index, const std::string& what, TimePoint now);
  // Gives the edge up and plans the next attempt. `up` may be gone afterwards.
  void fail(Upstream& up, EdgeTroubleKind kind, const std::string& reason, TimePoint now);

  // Says to every parent what is here.
  void send_have(TimePoint now);
  // The parents cannot bring this worker to `target`: the learner names a helper.
  void ask_for_help(Version target, TimePoint now, bool stalled = false);
  void end_help(TimePoint now);
  // The helper has brought this worker to its version.
  void end_help_if_done(TimePoint now);
  // Nothing has come nearer to the newest version for too long.
  void on_stall(TimePoint now);
  void hold_reading(bool hold);

  // `other_connections`: of this worker.
  void on_timer(std::size_t other_connections, TimePoint now);
  TimePoint next_deadline() const;
  void postpone(Duration late, TimePoint now);
  // Whether an edge may have another stream: streams leave room for edges, and for helpers.
  bool has_room_for_streams(std::size_t other_connections) const;
  std::vector<WorkerId> ids() const;
  // Chunks here, by stripe, of the newest few publications.
  std::vector<Progress> progress() const;
  void check() const;

 private:
  template <class Self, class Use>
  static void each(Self& self, Use use) {
    for (auto& [id, up] : self.parents_) use(up);
    if (self.helper_) use(*self.helper_);
  }
  void open(Upstream& up, TimePoint now);
  void dial(Upstream& up);
  void close(Upstream& up);
  void add_streams(Upstream& up, std::size_t other_connections, TimePoint now);
  void send_have(const Upstream& up, TimePoint now);
  Have have(const Upstream& up) const;
  std::optional<Version> position_for(const Upstream& up) const;
  bool holds_missing_chunks(const Upstream& up) const;

  const MemberConfig& config_;
  const Standing& standing_;
  const PublicationStore& store_;
  StallWatch& stall_;
  LearnerLink& learner_;
  Transport& transport_;
  std::map<WorkerId, Upstream> parents_;
  std::optional<Upstream> helper_;
  int helper_silences_ = 0;  // of the last helper
  std::uint32_t stripes_ = 1;
  bool reading_held_ = false;
  TokenBucket failures_reported_{{128, 8}};  // half of what the learner takes: many parents may fail at once
};

}  // namespace echoline::overlay

// A worker's edges from its parents and its helper. Called by MemberCore.
#include "overlay/member/parents.hpp"

#include <algorithm>
#include <bit>

#include "base/log.hpp"

namespace echoline::overlay {
namespace {

constexpr Duration kRedialFirst = std::chrono::milliseconds(50);  // doubled at every failure
constexpr Duration kRedialMax = std::chrono::seconds(2);
constexpr int kEdgeRedialDoublingsMax = 10;  // keeps the shift in range; kRedialMax is reached earlier
constexpr int kHelperFailuresMax = 3;        // after so many failures, the worker asks for another helper
constexpr std::size_t kProgressMax = 4;      // publications reported at a time, newest first

}  // namespace

// ---- from the learner ----

void Parents::assign(const Assign& assign, TimePoint now) {
  const bool count_changed = std::exchange(stripes_, assign.stripe_count) != assign.stripe_count;
  bool sources_changed = count_changed;
  std::set<WorkerId> assigned_ids;
  for (const Parent& parent : assign.parents) {
    assigned_ids.insert(parent.worker);
    EdgeTerms terms{.parent = parent, .grant = assign.grant, .catch_up_to = std::nullopt, .full_only = false};
    const auto it = parents_.find(parent.worker);
    if (it == parents_.end() || it->second.terms.parent.endpoint != parent.endpoint ||
        it->second.terms.parent.dials != parent.dials) {
      sources_changed = true;
      if (it != parents_.end()) close(it->second);
      open(parents_.insert_or_assign(parent.worker, Upstream(std::move(terms))).first->second, now);
      continue;
    }
    Upstream& upstream = it->second;
    const bool stripes_changed = count_changed || upstream.terms.parent.stripe_mask != parent.stripe_mask;
    sources_changed |= stripes_changed;
    upstream.terms = std::move(terms);
    upstream.reset_corrupt_count();
    // The grant must arrive before the new list of wanted stripes, which it permits.
    if (const auto conn = upstream.open_conn(); conn && upstream.terms.grant)
      transport_.send(*conn, *upstream.terms.grant, now);
    if (stripes_changed) send_have(upstream, now);
    if (upstream.streams().empty() && !parent.dials) {  // a new assignment ends the pause before the next attempt
      upstream.reset_failure_count();
      open(upstream, now);
    }
  }
  for (auto it = parents_.begin(); it != parents_.end();) {
    if (assigned_ids.contains(it->first)) {
      ++it;
      continue;
    }
    sources_changed = true;
    close(it->second);
    it = parents_.erase(it);
  }
  if (sources_changed) stall_watch_.restart_for_parents(now);  // a new grant alone brings no chunks
}

void Parents::on_help(const Help& help, TimePoint now) {
  stall_watch_.on_help();
  if (helper_ || install_state_.has_reached(help.target)) return;
  // If the helper is the only parent, which sends all stripes, its edge is opened again: the parent then is told
  // which chunks are missing here. Not before the first assignment after an absence, because the list of parents
  // may be outdated.
  const auto parent = parents_.find(help.from.worker);
  const bool is_only_parent = parent != parents_.end() && parents_.size() == 1;
  if (learner_.membership().is_assigned() && is_only_parent && !help.full_only && parent->second.is_open()) {
    stall_watch_.on_parents_restarted();
    close(parent->second);
    return open(parent->second, now);
  }
  stall_watch_.restart_for_helper(now);  // even if chunks came while the learner sought a helper
  EdgeTerms terms{.parent = help.from, .grant = help.grant, .catch_up_to = help.target, .full_only = help.full_only};
  helper_.emplace(std::move(terms), std::exchange(helper_silences_, 0));
  send_have(now);  // tells the parents not to send what the helper brings
  open(*helper_, now);
}

void Parents::revoke(const WorkerSet& revoked) {
  for (auto& [id, upstream] : parents_)
    if (revoked.contains(id)) close(upstream);  // the learner assigns another one
}

void Parents::close_all() {
  for_each_edge(*this, [&](Upstream& upstream) { close(upstream); });
  parents_.clear();
  helper_.reset();
}

// ---- connections ----

const Upstream* Parents::find(ConnId conn) const {
  for (const auto& [id, upstream] : parents_)
    if (upstream.contains(conn)) return &upstream;
  return helper_ && helper_->contains(conn) ? &*helper_ : nullptr;
}

void Parents::open(Upstream& upstream, TimePoint now) {
  if (upstream.terms.parent.dials) return upstream.await_parent(now + Core::kHandshakeTimeout);
  dial(upstream);
}

void Parents::dial(Upstream& upstream) {
  const Parent& parent = upstream.terms.parent;
  const Endpoint& to = parent.worker == kLearnerId ? config_.learner : parent.endpoint;
  upstream.add_dialled(transport_.dial(to, act::Service::kData, parent.worker));
}

void Parents::close(Upstream& upstream) {
  for (const Upstream::Stream& stream : upstream.streams()) transport_.close(stream.conn);
  upstream.close();
}

void Parents::on_connected(Upstream& upstream, ConnId conn, TimePoint now) {
  PeerHello hello;
  hello.run_id = config_.state.run_id;
  hello.stream = upstream.open_stream(conn, learner_.heartbeat(), now);
  hello.catch_up_to = upstream.terms.catch_up_to;
  hello.full_only = upstream.terms.full_only;
  hello.grant = upstream.terms.grant;
  if (hello.stream == 0) hello.have = make_have(upstream);
  // Before the parent has admitted this child, it accepts only short messages.
  hello.have_follows = encode_control(hello).size() > kFrameHeaderBytes + kPendingPeerBytesMax;
  const Have have_message = hello.have_follows ? std::exchange(hello.have, {}) : Have{};
  transport_.send(conn, hello, now);
  if (hello.have_follows) transport_.send(conn, have_message, now);
  if (reading_paused_) transport_.set_reading(conn, false);
}

bool Parents::on_dialled_by(WorkerId worker, ConnId conn, TimePoint now) {
  const auto it = parents_.find(worker);
  if (it == parents_.end() || !it->second.terms.parent.dials || !it->second.accepts_dial()) return false;
  transport_.admit(conn);
  it->second.add_accepted(conn);
  on_connected(it->second, conn, now);
  return true;
}

void Parents::on_closed(Upstream& upstream, ConnId conn, const std::string& reason, TimePoint now) {
  const bool was_open = upstream.remove_stream(conn);
  if (!upstream.is_open())
    return fail_edge(upstream, was_open ? EdgeTroubleKind::kLost : EdgeTroubleKind::kUnreachable, reason, now);
  if (was_open)
    send_have(upstream, now);  // the parent does not know what was lost on the way
  else
    upstream.settle_streams();
}

void Parents::on_message(Upstream& upstream, const ControlMessage& message, TimePoint now) {
  if (const auto* cannot = std::get_if<CannotServe>(&message)) {
    if (install_state_.has_reached(cannot->target)) return;
    if (upstream.is_helper()) end_help(now);
    return request_help(cannot->target, now);
  }
  const auto* goodbye = std::get_if<Goodbye>(&message);
  fail_edge(upstream, EdgeTroubleKind::kRefused,
            goodbye ? goodbye->reason : "the parent sent a message that is not for a child", now);
}

void Parents::on_forgery(Upstream& upstream, const PublicationId& id, std::uint32_t index, const std::string& what,
                         TimePoint now) {
  const Parent& parent = upstream.terms.parent;
  log::warn("worker {}: from {}: {}", config_.state.worker, parent.worker, what);
  // Before its first assignment, the learner does not know these parents, but it has chosen every helper.
  if (learner_.membership().is_assigned() || upstream.is_helper())
    learner_.send(Poisoned{parent.worker, id, index}, now);
  if (upstream.count_corrupt_chunk() < kCorruptChunksMax) return;
  if (!upstream.is_helper()) return fail_edge(upstream, EdgeTroubleKind::kRefused, what, now);
  const Version target = *upstream.terms.catch_up_to;  // another helper may bring it
  end_help(now);
  request_help(target, now);
}

void Parents::fail_edge(Upstream& upstream, EdgeTroubleKind kind, const std::string& reason, TimePoint now) {
  close(upstream);
  const int failures = upstream.count_failure(kind == EdgeTroubleKind::kSilent);
  if (upstream.is_helper()) {
    if (failures < kHelperFailuresMax) return upstream.pause(now + kRedialFirst * (1 << failures));
    const Version target = *upstream.terms.catch_up_to;
    helper_silences_ = upstream.silences();
    end_help(now);
    return request_help(target, now);
  }
  upstream.pause(now +
                 std::min<Duration>(kRedialMax, kRedialFirst * (1 << std::min(failures, kEdgeRedialDoublingsMax))));
  // The learner may not know the parents from before this worker came back.
  const WorkerId parent = upstream.terms.parent.worker;
  if (parent != kLearnerId && learner_.membership().is_assigned() && failure_reports_.take(now))
    learner_.send(EdgeFailed{parent, kind, reason}, now);
}

void Parents::pause_reading(bool pause) {
  if (pause == std::exchange(reading_paused_, pause)) return;
  for_each_edge(*this, [&](const Upstream& upstream) {
    for (const Upstream::Stream& stream : upstream.streams()) transport_.set_reading(stream.conn, !pause);
  });
}

// ---- time ----

void Parents::on_timer(std::size_t other_connections, TimePoint now) {
  for_each_edge(*this, [&](Upstream& upstream) {
    if (upstream.attempt_is_due(now)) open(upstream, now);
    if (upstream.parent_is_late(now))
      return fail_edge(upstream, EdgeTroubleKind::kUnreachable, "the parent did not open the connection", now);
    if (upstream.is_silent(now))
      return fail_edge(upstream, EdgeTroubleKind::kSilent, "nothing heard for too long", now);
    if (upstream.is_open() && !upstream.is_helper()) add_streams(upstream, other_connections, now);
  });
}

void Parents::add_streams(Upstream& upstream, std::size_t other_connections, TimePoint now) {
  const std::uint32_t wanted = upstream.update_streams_wanted(holds_missing_chunks(upstream), now);
  if (wanted <= upstream.streams().size()) return;
  if (upstream.terms.parent.dials) return transport_.send(upstream.streams().front().conn, MoreStreams{wanted}, now);
  if (!has_room_for_streams(other_connections)) return upstream.settle_streams();
  while (upstream.streams().size() < wanted) dial(upstream);
}

TimePoint Parents::next_deadline() const {
  TimePoint earliest = kNever;
  for_each_edge(*this, [&](const Upstream& upstream) { earliest = std::min(earliest, upstream.next_deadline()); });
  return earliest;
}

void Parents::postpone(Duration pause, TimePoint now) {
  for_each_edge(*this, [&](Upstream& upstream) { upstream.postpone(pause, now); });
}

bool Parents::has_room_for_streams(std::size_t other_connections) const {
  for_each_edge(*this, [&](const Upstream& upstream) { other_connections += upstream.streams().size(); });
  return other_connections < config_.core.connections.total / 2;
}

// ---- help ----

void Parents::request_help(Version target, TimePoint now, bool stalled) {
  const Duration pause = Core::kHelpPauseHeartbeats * learner_.heartbeat();
  if (helper_ || !learner_.membership().is_joined() || !stall_watch_.begin_call(pause, now)) return;
  const bool full_only = install_state_.repair_version_min() && !install_state_.position();
  log::info("worker {}: asking for help to reach version {}", config_.state.worker, target);
  learner_.send(NeedHelp{target, full_only, install_state_.position_version(), stalled}, now);
}

void Parents::end_help(TimePoint now) {
  if (!helper_) return;
  close(*helper_);
  helper_.reset();
  send_have(now);  // the parents have to send the rest
}

void Parents::end_help_if_done(TimePoint now) {
  if (helper_ && install_state_.has_reached(*helper_->terms.catch_up_to)) end_help(now);
}

void Parents::on_stall(TimePoint now) {
  // If nothing has come over a new connection, its path may be slow: the first bytes queue behind those of other
  // connections. So the next call for help waits longer.
  const auto has_received_nothing = [](const auto& parent) { return parent.second.has_received_nothing(); };
  const bool is_unanswered =
      helper_ ? helper_->has_received_nothing() : std::any_of(parents_.begin(), parents_.end(), has_received_nothing);
  if (is_unanswered) stall_watch_.count_unanswered_call();
  if (!helper_) return;
  helper_silences_ = helper_->silences();
  end_help(now);
}

// ---- versions and chunks of this worker ----

// The version to report as this worker's. For parents, it is the one to which the helper brings the worker, so that
// they do not send the same.
std::optional<Version> Parents::position_for(const Upstream& upstream) const {
  const auto position = install_state_.position_version();
  return helper_ && !upstream.is_helper() ? std::max(position, helper_->terms.catch_up_to) : position;
}

Have Parents::make_have(const Upstream& upstream) const {
  Have have;
  have.position = position_for(upstream);
  if (!upstream.is_helper()) have.wanted = {stripes_, upstream.terms.parent.stripe_mask};
  std::uint64_t bitmap_bits = 0;  // of all items; the message has room for kChunksMax
  for (auto it = store_.entries().rbegin(); it != store_.entries().rend() && have.items.size() < kHaveItemsMax; ++it) {
    const StoredPublication& stored = it->second;
    if (have.position && it->first.version <= *have.position) break;  // covered by the position
    bitmap_bits += stored.have.end();
    if (bitmap_bits > kChunksMax) break;
    have.items[it->first] = {stored.id, stored.have, stored.complete};
  }
  return have;
}

void Parents::send_have(const Upstream& upstream, TimePoint now) {
  if (config_.core.faults && config_.core.faults->fire("keep quiet about what is here")) return;
  if (const auto conn = upstream.open_conn()) transport_.send(*conn, make_have(upstream), now);
}

void Parents::send_have(TimePoint now) {
  for (auto& [id, upstream] : parents_) send_have(upstream, now);
}

bool Parents::holds_missing_chunks(const Upstream& upstream) const {
  const auto position = position_for(upstream);
  for (const auto& [id, chunks] : upstream.progress()) {
    const StoredPublication* stored = store_.find(id);
    if (!stored || (position && stored->key().version <= *position)) continue;  // not announced, or not wanted any more
    const auto stripes = static_cast<std::uint32_t>(chunks.size());
    for (std::uint32_t stripe = 0; stripe < stripes; ++stripe) {
      const bool is_wanted =
          upstream.is_helper() || (stripes == stripes_ && upstream.terms.parent.stripe_mask >> stripe & 1);
      // The parent may report any number of stripes; count_of() needs a power of two.
      if (is_wanted && std::has_single_bit(stripes) &&
          chunks[stripe] > stored->have.count_of({stripes, std::uint64_t{1} << stripe}))
        return true;
    }
  }
  return false;
}

std::vector<Progress> Parents::progress() const {
  std::vector<Progress> all;
  for (auto it = store_.entries().rbegin(); it != store_.entries().rend() && all.size() < kProgressMax; ++it) {
    Progress item{.publication = it->second.id, .chunks = {}};
    for (std::uint32_t stripe = 0; stripe < stripes_; ++stripe)
      item.chunks.push_back(it->second.have.count_of({stripes_, std::uint64_t{1} << stripe}));
    all.push_back(std::move(item));
  }
  return all;
}

std::vector<WorkerId> Parents::ids() const {
  std::vector<WorkerId> all;
  for (const auto& [id, upstream] : parents_) all.push_back(id);
  return all;
}

void Parents::check() const {
  for_each_edge(*this, [&](const Upstream& upstream) {
    upstream.check();
    ECHO_CHECK(upstream.is_helper() == (helper_ && &upstream == &*helper_), "worker {} is parent or helper",
               upstream.terms.parent.worker);
    for (const Upstream::Stream& stream : upstream.streams())
      ECHO_CHECK(find(stream.conn) == &upstream, "connection {} is of two edges", stream.conn);
  });
  for (const auto& [id, upstream] : parents_) ECHO_CHECK(upstream.terms.parent.worker == id);
}

}  // namespace echoline::overlay

// A worker's edges from its parents and its helper. Called by MemberCore.
#include "overlay/member/parents.hpp"

#include <algorithm>
#include <bit>

#include "base/log.hpp"

namespace echoline::overlay {
namespace {

constexpr Duration kRedialFirst = std::chrono::milliseconds(50);
constexpr Duration kRedialMax = std::chrono::seconds(2);
constexpr int kHelperFailuresMax = 3;
constexpr std::size_t kProgressMax = 4;  // publications reported at a time, newest first

}  // namespace

// ---- from the learner ----

void Parents::assign(const Assign& assign, TimePoint now) {
  const bool count_changed = std::exchange(stripes_, assign.stripe_count) != assign.stripe_count;
  bool sources_changed = count_changed;
  std::set<WorkerId> assigned_ids;
  for (const Parent& parent : assign.parents) {
    assigned_ids.insert(parent.worker);
    EdgeTerms terms{parent, assign.grant, std::nullopt, false};
    const auto it = parents_.find(parent.worker);
    if (it == parents_.end() || it->second.terms.parent.endpoint != parent.endpoint ||
        it->second.terms.parent.dials != parent.dials) {
      sources_changed = true;
      if (it != parents_.end()) close(it->second);
      open(parents_.insert_or_assign(parent.worker, Upstream(std::move(terms))).first->second, now);
      continue;
    }
    Upstream& up = it->second;
    const bool changed = count_changed || up.terms.parent.stripe_mask != parent.stripe_mask;
    sources_changed |= changed;
    up.terms = std::move(terms);
    up.forgive_corrupt();
    // The grant must arrive before the new list of wanted stripes, which it permits.
    if (const auto conn = up.open_conn(); conn && up.terms.grant) transport_.send(*conn, *up.terms.grant, now);
    if (changed) send_have(up, now);
    if (up.streams().empty() && !parent.dials) {
      up.forgive_failures();
      open(up, now);
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
  if (sources_changed) stall_.restart_for_parents(now);  // a new grant alone brings no chunks
}

void Parents::on_help(const Help& help, TimePoint now) {
  stall_.on_help();
  if (helper_ || install_state_.has_reached(help.target)) return;
  // A parent that sends all stripes can help by itself. It counts all chunks as sent, so its edge is opened again.
  // Before the first assignment after an absence, a parent may no longer be one.
  const auto parent = parents_.find(help.from.worker);
  if (learner_.membership().is_assigned() && parent != parents_.end() && parents_.size() == 1 && !help.full_only &&
      parent->second.is_open()) {
    stall_.on_parents_restarted();
    close(parent->second);
    return open(parent->second, now);
  }
  stall_.restart_for_helper(now);  // even if chunks came while the learner sought a helper
  helper_.emplace(EdgeTerms{help.from, help.grant, help.target, help.full_only}, std::exchange(helper_silences_, 0));
  send_have(now);  // the parents need not send it as well
  open(*helper_, now);
}

void Parents::revoke(const WorkerSet& revoked) {
  for (auto& [id, up] : parents_)
    if (revoked.contains(id)) close(up);  // the learner assigns another one
}

void Parents::close_all() {
  for_each_edge(*this, [&](Upstream& up) { close(up); });
  parents_.clear();
  helper_.reset();
}

// ---- connections ----

const Upstream* Parents::find(ConnId conn) const {
  for (const auto& [id, up] : parents_)
    if (up.contains(conn)) return &up;
  return helper_ && helper_->contains(conn) ? &*helper_ : nullptr;
}

void Parents::open(Upstream& up, TimePoint now) {
  if (up.terms.parent.dials) return up.await_parent(now + Core::kHandshakeTimeout);
  dial(up);
}

void Parents::dial(Upstream& up) {
  const Parent& parent = up.terms.parent;
  const Endpoint& to = parent.worker == kLearnerId ? config_.learner : parent.endpoint;
  up.add_dialled(transport_.dial(to, act::Service::kData, parent.worker));
}

void Parents::close(Upstream& up) {
  for (const Upstream::Stream& stream : up.streams()) transport_.close(stream.conn);
  up.close();
}

void Parents::on_connected(Upstream& up, ConnId conn, TimePoint now) {
  PeerHello hello;
  hello.run_id = config_.state.run_id;
  hello.stream = up.open_stream(conn, learner_.heartbeat(), now);
  hello.catch_up_to = up.terms.catch_up_to;
  hello.full_only = up.terms.full_only;
  hello.grant = up.terms.grant;
  if (hello.stream == 0) hello.have = make_have(up);
  // A parent admits a child by a short message.
  hello.have_follows = encode_control(hello).size() > kFrameHeaderBytes + kPendingPeerBytesMax;
  const Have have_message = hello.have_follows ? std::exchange(hello.have, {}) : Have{};
  transport_.send(conn, hello, now);
  if (hello.have_follows) transport_.send(conn, have_message, now);
  if (reading_paused_) transport_.set_reading(conn, false);
}

bool Parents::on_dialled_by(WorkerId worker, ConnId conn, TimePoint now) {
  const auto it = parents_.find(worker);
  if (it == parents_.end() || !it->second.terms.parent.dials || !it->second.may_be_dialled()) return false;
  transport_.admit(conn);
  it->second.add_accepted(conn);
  on_connected(it->second, conn, now);
  return true;
}

void Parents::on_closed(Upstream& up, ConnId conn, const std::string& reason, TimePoint now) {
  const bool was_open = up.remove_stream(conn);
  if (!up.is_open()) return fail(up, was_open ? EdgeTroubleKind::kLost : EdgeTroubleKind::kUnreachable, reason, now);
  if (was_open)
    send_have(up, now);  // the parent does not know what was lost on the way
  else
    up.settle_streams();
}

void Parents::on_message(Upstream& up, const ControlMessage& message, TimePoint now) {
  if (const auto* cannot = std::get_if<CannotServe>(&message)) {
    if (install_state_.has_reached(cannot->target)) return;
    if (up.helps()) end_help(now);
    return request_help(cannot->target, now);
  }
  const auto* goodbye = std::get_if<Goodbye>(&message);
  fail(up, EdgeTroubleKind::kRefused, goodbye ? goodbye->reason : "the parent sent a message that is not for a child",
       now);
}

void Parents::on_forgery(Upstream& up, const PublicationId& id, std::uint32_t index, const std::string& what,
                         TimePoint now) {
  const Parent& parent = up.terms.parent;
  log::warn("worker {}: from {}: {}", config_.state.worker, parent.worker, what);
  if (learner_.membership().is_assigned() || up.helps()) learner_.send(Poisoned{parent.worker, id, index}, now);
  if (up.count_corrupt() < kCorruptChunksMax) return;
  if (!up.helps()) return fail(up, EdgeTroubleKind::kRefused, what, now);
  const Version target = *up.terms.catch_up_to;  // another helper may bring it
  end_help(now);
  request_help(target, now);
}

void Parents::fail(Upstream& up, EdgeTroubleKind kind, const std::string& reason, TimePoint now) {
  close(up);
  const int failures = up.count_failure(kind == EdgeTroubleKind::kSilent);
  if (up.helps()) {
    if (failures < kHelperFailuresMax) return up.pause(now + kRedialFirst * (1 << failures));
    const Version target = *up.terms.catch_up_to;
    helper_silences_ = up.silences();
    end_help(now);
    return request_help(target, now);
  }
  up.pause(now + std::min<Duration>(kRedialMax, kRedialFirst * (1 << std::min(failures, 10))));
  // The learner may not know the parents from before this worker came back.
  const WorkerId parent = up.terms.parent.worker;
  if (parent != kLearnerId && learner_.membership().is_assigned() && failures_reported_.take(now))
    learner_.send(EdgeFailed{parent, kind, reason}, now);
}

void Parents::pause_reading(bool pause) {
  if (pause == std::exchange(reading_paused_, pause)) return;
  for_each_edge(*this, [&](const Upstream& up) {
    for (const Upstream::Stream& stream : up.streams()) transport_.set_reading(stream.conn, !pause);
  });
}

// ---- time ----

void Parents::on_timer(std::size_t other_connections, TimePoint now) {
  for_each_edge(*this, [&](Upstream& up) {
    if (up.attempt_is_due(now)) open(up, now);
    if (up.parent_is_late(now))
      return fail(up, EdgeTroubleKind::kUnreachable, "the parent did not open the connection", now);
    if (up.is_silent(now)) return fail(up, EdgeTroubleKind::kSilent, "nothing heard for too long", now);
    if (up.is_open() && !up.helps()) add_streams(up, other_connections, now);
  });
}

void Parents::add_streams(Upstream& up, std::size_t other_connections, TimePoint now) {
  const std::uint32_t wanted = up.streams_wanted(holds_missing_chunks(up), now);
  if (wanted <= up.streams().size()) return;
  if (up.terms.parent.dials) return transport_.send(up.streams().front().conn, MoreStreams{wanted}, now);
  if (!has_room_for_streams(other_connections)) return up.settle_streams();
  while (up.streams().size() < wanted) dial(up);
}

TimePoint Parents::next_deadline() const {
  TimePoint at = kNever;
  for_each_edge(*this, [&](const Upstream& up) { at = std::min(at, up.next_deadline()); });
  return at;
}

void Parents::postpone(Duration late, TimePoint now) {
  for_each_edge(*this, [&](Upstream& up) { up.postpone(late, now); });
}

bool Parents::has_room_for_streams(std::size_t other_connections) const {
  for_each_edge(*this, [&](const Upstream& up) { other_connections += up.streams().size(); });
  return other_connections < config_.core.connections.total / 2;
}

// ---- help ----

void Parents::request_help(Version target, TimePoint now, bool stalled) {
  const Duration pause = Core::kHelpPauseHeartbeats * learner_.heartbeat();
  if (helper_ || !learner_.membership().is_joined() || !stall_.may_ask(pause, now)) return;
  const bool full_only = install_state_.repair_version_min() && !install_state_.position();
  log::info("worker {}: asking for help to reach version {}", config_.state.worker, target);
  learner_.send(NeedHelp{target, full_only, install_state_.version(), stalled}, now);
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
  // The path may be that slow: the bytes of a new connection queue behind all that is on it.
  if (helper_ ? helper_->has_received_nothing() : std::any_of(parents_.begin(), parents_.end(), [](const auto& up) {
        return up.second.has_received_nothing();
      }))
    stall_.count_unanswered_call();
  if (!helper_) return;
  helper_silences_ = helper_->silences();
  end_help(now);
}

// ---- what is here ----

// The parents do not send what a helper brings.
std::optional<Version> Parents::position_for(const Upstream& up) const {
  const auto position = install_state_.version();
  return helper_ && !up.helps() ? std::max(position, helper_->terms.catch_up_to) : position;
}

Have Parents::make_have(const Upstream& up) const {
  Have have;
  have.position = position_for(up);
  if (!up.helps()) have.wanted = {stripes_, up.terms.parent.stripe_mask};
  std::uint64_t bits = 0;
  for (auto it = store_.entries().rbegin(); it != store_.entries().rend() && have.items.size() < kHaveItemsMax; ++it) {
    const StoredPublication& stored = it->second;
    if (have.position && it->first.version <= *have.position) break;  // covered by the position
    bits += stored.have.end();
    if (bits > kChunksMax) break;
    have.items[it->first] = {stored.id, stored.have, stored.complete};
  }
  return have;
}

void Parents::send_have(const Upstream& up, TimePoint now) {
  if (config_.core.faults && config_.core.faults->fire("keep quiet about what is here")) return;
  if (const auto conn = up.open_conn()) transport_.send(*conn, make_have(up), now);
}

void Parents::send_have(TimePoint now) {
  for (auto& [id, up] : parents_) send_have(up, now);
}

bool Parents::holds_missing_chunks(const Upstream& up) const {
  const auto position = position_for(up);
  for (const auto& [id, chunks] : up.progress()) {
    const StoredPublication* stored = store_.find(id);
    if (!stored || (position && stored->key().version <= *position)) continue;  // not announced, or not wanted any more
    const auto stripes = static_cast<std::uint32_t>(chunks.size());
    for (std::uint32_t s = 0; s < stripes; ++s) {
      const bool is_wanted = up.helps() || (stripes == stripes_ && up.terms.parent.stripe_mask >> s & 1);
      if (is_wanted && std::has_single_bit(stripes) &&
          chunks[s] > stored->have.count_of({stripes, std::uint64_t{1} << s}))
        return true;
    }
  }
  return false;
}

std::vector<Progress> Parents::progress() const {
  std::vector<Progress> all;
  for (auto it = store_.entries().rbegin(); it != store_.entries().rend() && all.size() < kProgressMax; ++it) {
    Progress p{it->second.id, {}};
    for (std::uint32_t s = 0; s < stripes_; ++s)
      p.chunks.push_back(it->second.have.count_of({stripes_, std::uint64_t{1} << s}));
    all.push_back(std::move(p));
  }
  return all;
}

std::vector<WorkerId> Parents::ids() const {
  std::vector<WorkerId> all;
  for (const auto& [id, up] : parents_) all.push_back(id);
  return all;
}

void Parents::check() const {
  for_each_edge(*this, [&](const Upstream& up) {
    up.check();
    ECHO_CHECK(up.helps() == (helper_ && &up == &*helper_), "worker {} is parent or helper", up.terms.parent.worker);
    for (const Upstream::Stream& stream : up.streams())
      ECHO_CHECK(find(stream.conn) == &up, "connection {} is of two edges", stream.conn);
  });
  for (const auto& [id, up] : parents_) ECHO_CHECK(up.terms.parent.worker == id);
}

}  // namespace echoline::overlay

// A worker's edges: connections to its parents, of its children, and to a helper.
#include <algorithm>

#include "base/log.hpp"
#include "overlay/member/member_core.hpp"

namespace echoline::overlay {
namespace {

constexpr Duration kRedialFirst = std::chrono::milliseconds(50);
constexpr Duration kRedialMax = std::chrono::seconds(2);
constexpr int kHelperFailuresMax = 3;
constexpr std::size_t kProgressMax = 4;  // publications reported at a time, newest first

}  // namespace

// ---- parents ----

Upstream* MemberCore::upstream_of(ConnId conn) {
  for (auto& [id, up] : parents_)
    if (up.stream_of(conn)) return &up;
  return helper_ && helper_->stream_of(conn) ? &*helper_ : nullptr;
}

void MemberCore::open_upstream(Upstream& up, TimePoint now) {
  up.redial_at = kNever;
  up.heard = false;
  up.next_stream = 0;
  if (up.parent.dials) {
    up.opens_by = now + kHandshakeTimeout;
    return;
  }
  add_streams(up, 1, now);
}

void MemberCore::add_streams(Upstream& up, std::uint32_t wanted, TimePoint now) {
  if (up.parent.dials) {
    if (up.up() && wanted > up.streams.size()) send_control(up.streams.front().conn, MoreStreams{wanted}, now);
    return;
  }
  if (up.up() && !has_room_for_streams()) return up.probe.settle(up.streams.size());
  while (up.streams.size() < wanted) {
    const Endpoint& to = up.parent.worker == kLearnerId ? config_.learner : up.parent.endpoint;
    up.streams.push_back({dial(to, act::Service::kData, up.parent.worker), up.next_stream++, false});
  }
}

// Streams that make an edge faster leave room for edges, and for whoever helps.
bool MemberCore::has_room_for_streams() const {
  std::size_t all = 1 + edges_.connections() + (helper_ ? helper_->streams.size() : 0);
  for (const auto& [id, up] : parents_) all += up.streams.size();
  return all < config_.core.connections.total / 2;
}

void MemberCore::upstream_opened(Upstream& up, Upstream::Stream& stream, TimePoint now) {
  const bool first = !up.up();
  stream.up = true;
  up.opens_by = kNever;
  if (first) up.silence.begin(pulse_.heartbeat(), now, up.silences);
  PeerHello hello;
  hello.run_id = file_.state().run_id;
  hello.stream = first ? 0 : std::max(1u, stream.number);
  hello.catch_up_to = up.catch_up_to;
  hello.full_only = up.full_only;
  hello.grant = up.grant;
  hello.have = first ? have(up) : Have{};
  // Before it is admitted a child says little.
  hello.have_follows = encode_control(hello).size() > kFrameHeaderBytes + kStrangerBytesMax;
  const Have what = hello.have_follows ? std::exchange(hello.have, {}) : Have{};
  send_control(stream.conn, hello, now);
  if (hello.have_follows) send_control(stream.conn, what, now);
  if (reading_held_) actions_.push_back(act::SetReading{stream.conn, false});
}

// The edge broke while this worker lives: tell the learner, who knows whether the parent does, and try again.
void MemberCore::upstream_failed(Upstream& up, EdgeTroubleKind kind, const std::string& reason, TimePoint now) {
  close_upstream(up);
  ++up.failures;
  if (kind == EdgeTroubleKind::kSilent) ++up.silences;
  if (up.catch_up_to) {
    if (up.failures < kHelperFailuresMax) {
      up.redial_at = now + kRedialFirst * (1 << up.failures);
      return;
    }
    const Version target = *up.catch_up_to;
    helper_silences_ = up.silences;
    end_help(now);
    return need_help(target, now);
  }
  up.redial_at = now + std::min<Duration>(kRedialMax, kRedialFirst * (1 << std::min(up.failures, 10)));
  // Of parents from before it came back the learner may know nothing.
  if (up.parent.worker != kLearnerId && assigned_ && failures_told_.take(now))
    tell_learner(EdgeFailed{up.parent.worker, kind, reason}, now);
}

void MemberCore::close_upstream(Upstream& up) {
  for (const Upstream::Stream& stream : up.streams) close(stream.conn);
  up.streams.clear();
  up.opens_by = kNever;
  up.progress.clear();
}

void MemberCore::on_upstream(Upstream& up, ConnId conn, Frame frame, TimePoint now) {
  up.silence.alive(now);
  up.heard = true;
  if (frame.type == FrameType::kChunk) return on_chunk(&up, conn, frame, now);
  const auto message = decode_control(frame.body.bytes());
  if (!message) return upstream_failed(up, EdgeTroubleKind::kRefused, message.error().message(), now);
  if (const auto* announcement = std::get_if<SignedAnnouncement>(&*message))
    return on_announcement(&up, *announcement, now);
  if (const auto* manifest = std::get_if<SignedManifest>(&*message)) return on_manifest(&up, *manifest, now);
  if (const auto* status = std::get_if<EdgeStatus>(&*message)) {
    up.silence.heard(now);
    up.progress.clear();
    for (const Progress& p : status->progress) up.progress[p.publication] = p.chunks;
    if (status->beacon) on_beacon(*status->beacon, now);
    return;
  }
  if (const auto* cannot = std::get_if<CannotServe>(&*message)) {
    if (standing_.has(cannot->target)) return;
    const Version target = cannot->target;
    if (up.catch_up_to) end_help(now);
    return need_help(target, now);
  }
  if (const auto* goodbye = std::get_if<Goodbye>(&*message))
    return upstream_failed(up, EdgeTroubleKind::kRefused, goodbye->reason, now);
  upstream_failed(up, EdgeTroubleKind::kRefused, "the parent sent a message that is not for a child", now);
}

// Where this worker stands for this parent: what a helper brings is not to be sent by the parents as well.
std::optional<Version> MemberCore::position_for(const Upstream& up) const {
  const auto position = standing_.version();
  return helper_ && !up.catch_up_to ? std::max(position, helper_->catch_up_to) : position;
}

Have MemberCore::have(const Upstream& up) const {
  Have have;
  have.position = position_for(up);
  if (!up.catch_up_to) have.wanted = {stripes_, up.parent.stripes};
  std::uint64_t bits = 0;
  for (auto it = store_.entries().rbegin(); it != store_.entries().rend() && have.items.size() < kHaveItemsMax; ++it) {
    const StoredPublication& stored = it->second;
    if (have.position && it->first.version <= *have.position) break;  // the position says it all
    bits += stored.have.end();
    if (bits > kChunksMax) break;
    have.items[it->first] = {stored.id, stored.have, stored.complete};
  }
  return have;
}

void MemberCore::tell_have(Upstream& up, TimePoint now) {
  if (fault("keep quiet about what is here")) return;
  for (const Upstream::Stream& stream : up.streams)
    if (stream.up) return send_control(stream.conn, have(up), now);
}

// Whether the parent says that it holds chunks for this worker that are not here.
bool MemberCore::behind(const Upstream& up) const {
  const auto position = position_for(up);
  for (const auto& [id, chunks] : up.progress) {
    const StoredPublication* stored = store_.find(id);
    if (!stored || (position && stored->key().version <= *position)) continue;  // not announced, or not wanted any more
    const auto stripes = static_cast<std::uint32_t>(chunks.size());
    for (std::uint32_t s = 0; s < stripes; ++s) {
      const bool ours = up.catch_up_to || (stripes == stripes_ && up.parent.stripes >> s & 1);
      if (ours && std::has_single_bit(stripes) && chunks[s] > stored->have.count_of({stripes, std::uint64_t{1} << s}))
        return true;
    }
  }
  return false;
}

std::vector<Progress> MemberCore::progress() const {
  std::vector<Progress> all;
  for (auto it = store_.entries().rbegin(); it != store_.entries().rend() && all.size() < kProgressMax; ++it) {
    Progress p{it->second.id, {}};
    for (std::uint32_t s = 0; s < stripes_; ++s)
      p.chunks.push_back(it->second.have.count_of({stripes_, std::uint64_t{1} << s}));
    all.push_back(std::move(p));
  }
  return all;
}

void MemberCore::drop_revoked() {
  for (const ConnId conn : edges_.all_connections()) {
    if (!revoked_.contains(*edges_.child_of(conn))) continue;
    edges_.close(conn);
    close(conn);
  }
  for (auto& [id, up] : parents_)
    if (revoked_.contains(id)) close_upstream(up);  // the learner reassigns
}

// Children that the learner does not send here any more.
void MemberCore::drop_ungranted(TimePoint now) {
  for (const auto& [child, helped] : grants_.take_ended(learner_unix_ms(now)))
    for (const ConnId conn : edges_.connections_of(child, helped)) {
      log::info("worker {}: worker {} is not to be served here any more", id_, child);
      edges_.close(conn);
      close(conn);
    }
}

void MemberCore::watch_edges(TimePoint now) {
  const auto watch = [&](Upstream& up) {
    if (now >= up.redial_at) open_upstream(up, now);
    if (now >= up.opens_by)
      return upstream_failed(up, EdgeTroubleKind::kUnreachable, "the parent did not open the connection", now);
    if (up.up() && now >= up.silence.deadline())
      return upstream_failed(up, EdgeTroubleKind::kSilent, "nothing heard for too long", now);
    if (!up.up() || up.catch_up_to) return;
    const std::uint32_t wanted = up.probe.observe(up.chunk_bytes, behind(up), now);
    if (wanted > up.streams.size()) add_streams(up, wanted, now);
  };
  for (auto& [id, up] : parents_) watch(up);
  if (helper_) watch(*helper_);
}

// ---- help ----

// The parents cannot bring this worker to `target`: the learner names somebody who can.
void MemberCore::need_help(Version target, TimePoint now, bool stalled) {
  if (helper_ || !membership_.joined() || !stall_.may_ask(kHelpBeats * pulse_.heartbeat(), now)) return;
  const bool full_only = standing_.repair() && !standing_.position();
  log::info("worker {}: asking for help to reach version {}", id_, target);
  tell_learner(NeedHelp{target, full_only, standing_.version(), stalled}, now);
}

void MemberCore::end_help(TimePoint now) {
  close_upstream(*helper_);
  helper_.reset();
  for (auto& [id, up] : parents_) tell_have(up, now);  // what did not come from elsewhere, they have to send
}

// ---- children ----

void MemberCore::meet(ConnId conn, PeerInfo peer, TimePoint now) {
  for (const ConnId other : strangers_.add(conn, std::move(peer), now + kHandshakeTimeout)) {
    dialled_children_.erase(other);
    close(other);
  }
}

void MemberCore::on_stranger(ConnId conn, const Stranger& stranger, const Frame& frame, TimePoint now) {
  const WorkerId who = stranger.peer.identity.worker;
  const auto refuse = [&](const std::string& why) {
    log::warn("worker {}: closing a connection of worker {}: {}", id_, who, why);
    strangers_.erase(conn);
    dialled_children_.erase(conn);
    close(conn);
  };
  auto message = decode_control(frame.body.bytes());
  if (!message) return refuse(message.error().message());
  if (auto* hello = std::get_if<PeerHello>(&*message)) {
    if (hello->run_id != file_.state().run_id) return refuse(fmt::format("it belongs to run '{}'", hello->run_id));
    if (stranger.hello || who == kLearnerId || who == id_ || revoked_.contains(who))
      return refuse("it cannot be a child");
    if (askers_.is_barred(who, now) || !within_budget(who, MessageBudget::Kind::kHave, frame.body.size(), now))
      return refuse("it says too much");
    if (const Status granted = grants_.show(who, *hello, learner_unix_ms(now)); !granted)
      return refuse(granted.error().message());
    actions_.push_back(act::Admit{conn});  // what it says of its chunks may be long
    if (hello->have_follows) return strangers_.await_have(conn, std::move(*hello), now + kHandshakeTimeout);
    return open_child(conn, who, std::move(*hello), now);
  }
  if (auto* have = std::get_if<Have>(&*message); have && stranger.hello) {
    if (!within_budget(who, MessageBudget::Kind::kHave, frame.body.size(), now)) return refuse("it says too much");
    PeerHello hello = *stranger.hello;
    hello.have = std::move(*have);
    return open_child(conn, who, std::move(hello), now);
  }
  // A parent that was asked to dial introduces itself by its status.
  const auto* status = std::get_if<EdgeStatus>(&*message);
  const auto parent = parents_.find(who);
  if (!status || parent == parents_.end() || !parent->second.parent.dials ||
      parent->second.streams.size() >= StreamProbe::kStreamsMax)
    return refuse("it did not introduce itself");
  strangers_.erase(conn);
  actions_.push_back(act::Admit{conn});
  Upstream& up = parent->second;
  up.streams.push_back({conn, up.next_stream++, false});
  upstream_opened(up, up.streams.back(), now);
}

void MemberCore::open_child(ConnId conn, WorkerId child, PeerHello hello, TimePoint now) {
  strangers_.erase(conn);
  const bool further = hello.catch_up_to || (hello.stream != 0 && !edges_.connections_of(child, false).empty());
  if (const Status granted = further ? ok() : grants_.check_wanted(child, hello.have.wanted); !granted) {
    log::warn("worker {}: closing a connection of worker {}: {}", id_, child, granted.error().message());
    return close(conn);
  }
  if (hello.stream == 0)  // begins anew: what was open before is dead
    for (const ConnId old : edges_.connections_of(child, hello.catch_up_to.has_value())) {
      edges_.close(old);
      close(old);
    }
  const bool faster = hello.stream != 0 && !edges_.connections_of(child, hello.catch_up_to.has_value()).empty();
  if ((faster && !has_room_for_streams()) || !edges_.open(conn, child, std::move(hello), now)) close(conn);
}

// Whether it is to be heard. What it says comes by the same downlink as publications, so it counts by its length, too;
// who goes on beyond that is no child for a while.
bool MemberCore::within_budget(WorkerId child, MessageBudget::Kind kind, std::size_t bytes, TimePoint now) {
  const auto connected = [this](WorkerId id) { return !edges_.connections_of(id).empty(); };
  const auto verdict = askers_.take(child, kind, bytes, pulse_.heartbeat(), connected, now);
  if (verdict != MessageBudget::Verdict::kTooMuch) return verdict == MessageBudget::Verdict::kTake;
  log::warn("worker {}: worker {} is no child for {}: it says too much: of {}", id_, child,
            echoline::to_text(Askers::kBarred), askers_.told(child, kind));
  for (const ConnId each : edges_.connections_of(child)) {
    edges_.close(each);
    close(each);
  }
  return false;
}

void MemberCore::on_child(ConnId conn, const Frame& frame, TimePoint now) {
  const auto refuse = [&](const std::string& why) {
    log::warn("worker {}: closing a child's connection: {}", id_, why);
    edges_.close(conn);
    close(conn);
  };
  if (!edges_.contains(conn)) return close(conn);
  if (frame.type != FrameType::kControl) return refuse("a child sent something other than control messages");
  auto message = decode_control(frame.body.bytes());
  if (!message) return refuse(message.error().message());
  const WorkerId who = *edges_.child_of(conn);
  const auto kind = MessageBudget::kind_of(*message);
  if (kind && !within_budget(who, *kind, frame.body.size(), now)) return;
  if (auto* have = std::get_if<Have>(&*message)) {
    const Status granted = edges_.helps(conn) ? ok() : grants_.check_wanted(who, have->wanted);
    if (!granted) return refuse(granted.error().message());
    return edges_.update(conn, std::move(*have), now);
  }
  if (const auto* grant = std::get_if<SignedGrant>(&*message)) {
    if (const Status granted = grants_.show_anew(who, *grant, learner_unix_ms(now)); !granted)
      return refuse(granted.error().message());
    return;
  }
  if (const auto* request = std::get_if<ChunkRequest>(&*message)) return edges_.send_again(conn, *request, now);
  if (const auto* more = std::get_if<MoreStreams>(&*message)) {
    const auto child = edges_.child_of(conn);
    for (const auto& [dialled, whom] : dialled_children_) {
      if (whom.worker != child) continue;
      const DialChild again = whom;
      for (std::size_t have = edges_.connections_of(*child).size();
           have < std::min<std::uint32_t>(more->streams, StreamProbe::kStreamsMax); ++have)
        dialled_children_.insert_or_assign(dial(again.endpoint, act::Service::kData, again.worker), again);
      return;
    }
    return;
  }
  refuse("a child sent a message that is not for a parent");
}

}  // namespace echoline::overlay

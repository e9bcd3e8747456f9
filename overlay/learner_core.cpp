#include "overlay/learner_core.hpp"

#include <algorithm>
#include <cmath>

#include "base/log.hpp"

namespace echoline::overlay {
namespace {

constexpr std::size_t kVersionsKept = 4096;
// Stands for a link nobody limits.
constexpr BitRate kUnlimited = BitRate{1e11};

}  // namespace

LearnerCore::LearnerCore(LearnerConfig config)
    : Core(config.limits),
      config_(std::move(config)),
      store_(config_.store_bytes_max),
      edges_(store_, up_, actions_, config_.snapshots_on_demand) {
  topology_.policy = config_.policy;
}

BitRate LearnerCore::learner_up() const {
  return up_.rate().value_or(BitRate{config_.chain_rate.bits_per_s * static_cast<double>(config_.chains_max)});
}

// ---- application ----

Status LearnerCore::publish(PreparedPublication p, TimePoint now) {
  const PublicationKey key = p.manifest.key;
  if (newest_ && key.version <= *newest_)
    return fail(Code::kInvalid, "publish", "{}: versions must grow, the last was {}", to_text(key), *newest_);
  if (key.base && !versions_.contains(*key.base))
    return fail(Code::kInvalid, "publish", "{}: its base was not published (recently)", to_text(key));
  const Bytes payload{p.manifest.payload_bytes};
  ECHO_TRY(store_.add(std::move(p), key.version));
  newest_ = key.version;
  versions_.insert(key.version);
  if (versions_.size() > kVersionsKept) versions_.erase(versions_.begin());
  if (!workers_.empty()) {
    Broadcast b{key.version, key.base, payload, now, {}, {}, edges_.wire_bytes_sent(), topology_.chains};
    for (const auto& [id, worker] : workers_) b.active.insert(id);
    b.waiting = b.active;
    if (broadcasts_.size() >= kBroadcastsMax) broadcasts_.erase(broadcasts_.begin());
    broadcasts_.push_back(std::move(b));
  }
  edges_.on_store_changed(now);
  ask_for_snapshot();
  return ok();
}

Status LearnerCore::provide_snapshot(PreparedPublication full, TimePoint now) {
  snapshot_requested_ = false;
  const PublicationKey key = full.manifest.key;
  if (!key.full()) return fail(Code::kInvalid, "provide snapshot", "{} is a delta", to_text(key));
  if (!versions_.contains(key.version))
    return fail(Code::kInvalid, "provide snapshot", "version {} was not published (recently)", key.version);
  ECHO_TRY(store_.add(std::move(full), Version{key.version.value + 1}));
  edges_.on_store_changed(now);
  ask_for_snapshot();
  return ok();
}

void LearnerCore::ask_for_snapshot() {
  const auto troubles = edges_.take_troubles();
  if (!config_.snapshots_on_demand)
    for (const EdgeTrouble& t : troubles)
      if (!t.what.behind)
        log::error("worker {} cannot be brought to version {}: nobody provides a full snapshot", t.child,
                   t.what.target);
  if (troubles.empty() || snapshot_requested_ || !config_.snapshots_on_demand) return;
  snapshot_requested_ = true;
  actions_.push_back(act::NeedSnapshot{*newest_});
}

void LearnerCore::send_message(WorkerId id, std::span<const std::byte> bytes, TimePoint now) {
  const auto it = workers_.find(id);
  if (it == workers_.end()) return;
  it->second.unsent += bytes.size() + kFrameHeaderBytes;
  if (it->second.unsent > kUnsentBytesMax)
    return lose(id, fmt::format("it does not take its messages: {} bytes are waiting", it->second.unsent), false, now);
  send_frame(it->second.control, encode_frame(FrameType::kApplication, bytes), now);
}

void LearnerCore::expel(WorkerId id, const std::string& reason, TimePoint now) { lose(id, reason, true, now); }

void LearnerCore::leave(TimePoint now) {
  for (const auto& [id, worker] : workers_) {
    send_control(worker.control, Goodbye{"the run has ended"}, now);
    close(worker.control);
  }
  for (const ConnId conn : edges_.connections()) {
    edges_.close(conn);
    close(conn);
  }
  for (const auto& [conn, stranger] : strangers_) close(conn);
  strangers_.clear();
  control_.clear();
  beat_at_ = kNever;
}

LearnerStats LearnerCore::stats() const {
  LearnerStats s;
  for (const auto& [id, worker] : workers_) s.workers.push_back(worker.view);
  s.topology = topology_.chains;
  s.chunk_bytes_sent = {edges_.chunk_bytes_sent()};
  s.bytes_sent = {bytes_sent_ + edges_.wire_bytes_sent()};
  s.bytes_received = bytes_received();
  s.joined = next_worker_ - 1;
  s.lost = lost_;
  return s;
}

// ---- connections ----

void LearnerCore::on_accepted(ConnId conn, const std::string& peer_host, TimePoint now) {
  if (strangers_.size() >= kStrangersMax) return close(conn);
  strangers_[conn] = {peer_host, now + kHandshakeTimeout};
}

void LearnerCore::on_closed(ConnId conn, const std::string& reason, TimePoint now) {
  strangers_.erase(conn);
  edges_.close(conn);
  if (const auto it = control_.find(conn); it != control_.end())
    lose(it->second, "its connection was lost: " + reason, false, now);
}

void LearnerCore::on_frame(ConnId conn, const FrameView& frame, TimePoint now) {
  if (edges_.contains(conn)) return on_edge(conn, frame, now);
  const auto it = control_.find(conn);
  if (it == control_.end()) return on_stranger(conn, frame, now);
  Worker& worker = workers_.at(it->second);
  worker.heard = now;
  if (frame.type == FrameType::kApplication) {
    actions_.push_back(
        act::MessageFrom{it->second, std::string(reinterpret_cast<const char*>(frame.body.data()), frame.body.size())});
    return;
  }
  if (frame.type == FrameType::kChunk) return lose(it->second, "it sent a chunk to the learner", true, now);
  const auto message = decode_control(frame.body);
  if (!message) return lose(it->second, message.error().message(), true, now);
  on_worker(worker, *message, now);
}

void LearnerCore::on_sent(ConnId conn, std::size_t bytes, TimePoint now) {
  if (edges_.contains(conn)) return edges_.on_sent(conn, bytes, now);
  if (const auto it = control_.find(conn); it != control_.end()) {
    std::size_t& unsent = workers_.at(it->second).unsent;
    unsent -= std::min(bytes, unsent);
  }
}

void LearnerCore::refuse(ConnId conn, const std::string& reason, TimePoint now) {
  log::warn("refusing a connection: {}", reason);
  strangers_.erase(conn);
  send_control(conn, Goodbye{reason}, now);
  close(conn);
}

void LearnerCore::on_stranger(ConnId conn, const FrameView& frame, TimePoint now) {
  const auto it = strangers_.find(conn);
  if (it == strangers_.end()) return;  // already closed here
  auto message = decode_control(frame.body);
  if (!message) return refuse(conn, message.error().message(), now);
  const Stranger stranger = it->second;
  if (auto* hello = std::get_if<Hello>(&*message)) return admit_worker(conn, stranger, std::move(*hello), now);
  if (auto* hello = std::get_if<PeerHello>(&*message)) return admit_edge(conn, std::move(*hello), now);
  refuse(conn, "expected an introduction first", now);
}

void LearnerCore::admit_worker(ConnId conn, const Stranger& stranger, Hello hello, TimePoint now) {
  if (hello.run_id != config_.run_id)
    return refuse(
        conn, fmt::format("this learner serves run '{}', the worker belongs to run '{}'", config_.run_id, hello.run_id),
        now);
  if (topology_.size() >= chains::kChainWorkersMax)
    return refuse(conn, "the run has as many workers as it can serve", now);
  if (hello.data.host == "0.0.0.0" || hello.data.host.empty()) hello.data.host = stranger.host;
  strangers_.erase(conn);
  const WorkerId id{next_worker_++};
  Worker& worker = workers_[id];
  worker.view.info = {id, hello.name, hello.data, hello.up, hello.down};
  worker.control = conn;
  worker.heard = now;
  control_[conn] = id;
  if (beat_at_ == kNever) beat_at_ = now + config_.heartbeat;
  actions_.push_back(act::Admit{conn});
  const std::string application = config_.welcome ? config_.welcome(worker.view.info) : std::string();
  // Several missed beats, not one, before a worker gives the learner up.
  send_control(conn, Welcome{id, config_.heartbeat, config_.heartbeat_timeout * 3, application}, now);
  if (newest_) send_control(conn, Heartbeat{newest_, 0, 0, 0, 0, {}, {}}, now);
  actions_.push_back(act::Joined{worker.view.info});
  // While nothing is under way, plan as if all had come at once; later, leave the others where they are, unless the
  // best number of chains depends on who is there.
  if (newest_ && topology_.size() > 0 && config_.policy != chains::TopologyPolicy::kBestChains)
    set_topology(chains::append(topology_, chain_worker(worker, now)), now);
  else
    plan_anew(now);
}

void LearnerCore::admit_edge(ConnId conn, PeerHello hello, TimePoint now) {
  const auto it = workers_.find(hello.worker);
  if (hello.run_id != config_.run_id || it == workers_.end())
    return refuse(conn, fmt::format("worker {} has not joined this run", hello.worker), now);
  if (!hello.catch_up_to && (!it->second.assigned || it->second.assigned->parent != kLearnerId))
    return refuse(conn, fmt::format("worker {} was assigned another parent", hello.worker), now);
  if (hello.catch_up_to && (!newest_ || *hello.catch_up_to > *newest_))
    return refuse(
        conn, fmt::format("worker {} asks for version {}, which is not published", hello.worker, *hello.catch_up_to),
        now);
  strangers_.erase(conn);
  if (const auto old = edges_.edge_of(hello.worker); old && !hello.catch_up_to) {
    edges_.close(*old);
    close(*old);
  }
  actions_.push_back(act::Admit{conn});
  edges_.open(conn, std::move(hello), now);
  ask_for_snapshot();
}

void LearnerCore::on_edge(ConnId conn, const FrameView& frame, TimePoint now) {
  const auto drop = [&](const std::string& why) {
    log::warn("closing a data connection: {}", why);
    edges_.close(conn);
    close(conn);
  };
  if (frame.type != FrameType::kControl) return drop("a child sent something other than control messages");
  auto message = decode_control(frame.body);
  if (!message) return drop(message.error().message());
  if (auto* have = std::get_if<Have>(&*message))
    edges_.update(conn, std::move(*have), now);
  else if (const auto* request = std::get_if<ChunkRequest>(&*message))
    edges_.send_again(conn, *request, now);
  else
    return drop("a child sent a message that is not for a parent");
  ask_for_snapshot();
}

// ---- from workers ----

void LearnerCore::on_worker(Worker& worker, const ControlMessage& message, TimePoint now) {
  const WorkerId id = worker.view.info.id;
  if (const auto* ack = std::get_if<Ack>(&message)) return on_ack(worker, *ack, now);
  if (const auto* failed = std::get_if<EdgeFailed>(&message)) return on_edge_failed(id, *failed, now);
  if (const auto* goodbye = std::get_if<Goodbye>(&message)) return lose(id, "it left: " + goodbye->reason, false, now);
  if (const auto* beat = std::get_if<Heartbeat>(&message)) {
    worker.view.bytes_in = {beat->chunk_bytes_in};
    worker.view.bytes_forwarded = {beat->chunk_bytes_forwarded};
    worker.view.chunks_duplicate = beat->chunks_duplicate;
    worker.view.chunks_corrupt = beat->chunks_corrupt;
    worker.view.forwarding_rate = beat->forwarding_rate;
    worker.view.app_bytes = beat->application;
    return;
  }
  lose(id, "it sent a message that is not for a learner", true, now);
}

void LearnerCore::on_ack(Worker& worker, const Ack& ack, TimePoint now) {
  const WorkerId id = worker.view.info.id;
  if (!newest_ || ack.version > *newest_)
    return lose(id, fmt::format("it acknowledged version {}, which is not published", ack.version), true, now);
  if (worker.view.installed && ack.version < *worker.view.installed) return;
  worker.view.installed = ack.version;
  worker.view.installed_digest = ack.policy_digest;
  if (worker.assigned)
    if (const auto parent = workers_.find(worker.assigned->parent); parent != workers_.end()) {
      ++parent->second.attempts;
      ++parent->second.successes;
      parent->second.ladder.succeeded();
    }
  actions_.push_back(act::Acked{id, ack.version, ack.policy_digest});
  for (Broadcast& b : broadcasts_)
    if (b.version <= ack.version) b.waiting.erase(id);
  check_broadcasts(now);
}

// A broadcast is done once ceil(q * n) of the workers that were active when it was published and still live have it.
void LearnerCore::check_broadcasts(TimePoint now) {
  std::erase_if(broadcasts_, [&](const Broadcast& b) {
    if (b.active.empty()) return true;
    const double needed = std::ceil(config_.quorum * static_cast<double>(b.active.size()) - 1e-9);
    if (static_cast<double>(b.active.size() - b.waiting.size()) < needed) return false;
    BroadcastReport report{b.version,       b.base,
                           b.payload,       now - b.published,
                           b.active.size(), {edges_.wire_bytes_sent() - b.wire_bytes_before},
                           b.topology,      0};
    for (const auto& chain : b.topology) report.depth = std::max(report.depth, chain.size());
    actions_.push_back(act::BroadcastDone{std::move(report)});
    return true;
  });
}

// Both ends live, the edge does not: a failure of the parent. It falls a role after three in a row.
void LearnerCore::on_edge_failed(WorkerId child, const EdgeFailed& failed, TimePoint now) {
  const auto parent = workers_.find(failed.parent);
  const auto current = topology_.parent_of(child);
  if (parent == workers_.end() || current != failed.parent) return;  // settled meanwhile
  log::warn("worker {} lost the connection to its parent {}: {}", child, failed.parent, failed.reason);
  ++parent->second.attempts;
  if (!parent->second.ladder.failed()) return;
  log::warn("worker {} is moved behind the others: it failed to forward", failed.parent);
  const chains::ChainWorker moved = chain_worker(parent->second, now);
  set_topology(chains::append(chains::detach(topology_, failed.parent), moved), now);
}

void LearnerCore::lose(WorkerId id, const std::string& reason, bool say_goodbye, TimePoint now) {
  const auto it = workers_.find(id);
  if (it == workers_.end()) return;
  const ConnId conn = it->second.control;
  if (say_goodbye) send_control(conn, Goodbye{reason}, now);
  close(conn);
  control_.erase(conn);
  workers_.erase(it);
  ++lost_;
  for (const ConnId edge : edges_.connections_of(id)) {
    edges_.close(edge);
    close(edge);
  }
  actions_.push_back(act::Lost{id, reason});
  for (Broadcast& b : broadcasts_) {
    b.active.erase(id);
    b.waiting.erase(id);
  }
  set_topology(chains::detach(topology_, id), now);
  check_broadcasts(now);
}

// ---- topology ----

chains::ChainWorker LearnerCore::chain_worker(const Worker& worker, TimePoint now) const {
  const MemberInfo& info = worker.view.info;
  chains::PeerStats stats;
  stats.forwarding_rate = worker.view.forwarding_rate.value_or(BitRate{0});
  stats.cap = info.up.value_or(BitRate{0});
  stats.attempts = worker.attempts;
  stats.successes = worker.successes;
  // Between two heartbeats nobody is staler than another.
  stats.age = std::max(Duration{}, now - worker.heard - 2 * config_.heartbeat);
  chains::ChainWorker w;
  w.id = info.id;
  w.up = info.up.value_or(worker.view.forwarding_rate.value_or(kUnlimited));
  w.down = info.down.value_or(kUnlimited);
  w.score = chains::peer_score(stats);
  w.may_forward = worker.ladder.role() != chains::Role::kRolloutOnly;
  w.may_seed = worker.ladder.role() == chains::Role::kSeed;
  return w;
}

void LearnerCore::plan_anew(TimePoint now) {
  std::vector<chains::ChainWorker> all;
  for (const auto& [id, worker] : workers_) all.push_back(chain_worker(worker, now));
  auto planned = chains::plan_chains(learner_up(), config_.chain_rate, all, config_.policy);
  ECHO_CHECK(planned.has_value(), "{}", planned ? "" : planned.error().message());  // the inputs were checked at hello
  set_topology(std::move(*planned), now);
}

// Tells every worker whose parent changed, and only those.
void LearnerCore::set_topology(chains::Topology topology, TimePoint now) {
  if (topology == topology_) return;
  topology_ = std::move(topology);
  for (const auto& chain : topology_.chains) {
    WorkerId parent = kLearnerId;
    for (const WorkerId id : chain) {
      Worker& worker = workers_.at(id);
      const Endpoint& endpoint = parent == kLearnerId ? config_.self : workers_.at(parent).view.info.data;
      if (!worker.assigned || worker.assigned->parent != parent) {
        worker.assigned = Assign{parent, endpoint};
        send_control(worker.control, *worker.assigned, now);
      }
      parent = id;
    }
  }
  actions_.push_back(act::TopologyChanged{topology_.chains});
}

// ---- time ----

void LearnerCore::on_timer(TimePoint now) {
  resume_reading(now);
  if (now >= beat_at_) {
    beat_at_ = now + config_.heartbeat;
    for (const auto& [id, worker] : workers_) send_control(worker.control, Heartbeat{newest_, 0, 0, 0, 0, {}, {}}, now);
    std::vector<WorkerId> silent;
    for (const auto& [id, worker] : workers_)
      if (now - worker.heard >= config_.heartbeat_timeout) silent.push_back(id);
    for (const WorkerId id : silent)
      lose(id, fmt::format("no heartbeat for {}", echoline::to_text(config_.heartbeat_timeout)), true, now);
  }
  std::erase_if(strangers_, [&](const auto& s) {
    if (s.second.until > now) return false;
    close(s.first);
    return true;
  });
  edges_.on_timer(now);
}

TimePoint LearnerCore::next_deadline() const {
  TimePoint at = std::min({edges_.next_deadline(), reading_deadline(), beat_at_});
  for (const auto& [conn, stranger] : strangers_) at = std::min(at, stranger.until);
  return at;
}

}  // namespace echoline::overlay

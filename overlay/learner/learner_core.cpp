// Connections, messages, state file and time of the learner. Called by the driver; the other parts are beside it.
#include "overlay/learner/learner_core.hpp"

#include <algorithm>

#include "base/log.hpp"

namespace echoline::overlay {
namespace {

constexpr Duration kOwnCertificateLifetime = std::chrono::hours(24 * 365);  // longer than any run
constexpr Version kEveryVersion{~std::uint64_t{0}};                         // above all versions
constexpr std::size_t kStatusPublicationsMax = 4;  // publications listed in one status to the children

}  // namespace

LearnerCore::LearnerCore(LearnerConfig config)
    : Core(config.core),
      config_(std::move(config)),
      file_(config_.state.value_or(LearnerState{}), config_.durable, actions_),
      identities_(file_.state(), config_.authority),
      conduct_(config_.heartbeat, config_.state ? config_.state->conduct : decltype(LearnerState::conduct){}),
      store_({.memory_max = config_.store_bytes_max, .disk_max = {}, .disk = false}, *config_.checker, actions_),
      edges_(store_, uplink_, config_.catch_ups_on_demand),
      plan_(config_),
      pending_peers_(config_.core.connections),
      publications_(file_.state(), config_.network.quorum),
      grants_(*config_.checker, kLearnerId) {
  LearnerState& state = file_.state();
  state.run_id = config_.authority->run_id();
  state.port = config_.self.port;
  auto& published = state.published;
  // Versions published after the one resumed from are void, so a new epoch begins.
  if (config_.resumed_at && !published.empty() && published.rbegin()->first > *config_.resumed_at) {
    ++state.epoch;
    published.erase(published.upper_bound(*config_.resumed_at), published.end());
  }
  if (!published.empty()) edges_.raise_target(published.rbegin()->first);
}

// The learner's own certificate may live long, because no other machine can use it.
void LearnerCore::start(TimePoint now) {
  trust::CertificateRequest request;
  request.subject = config_.authority->public_key();
  request.kind = trust::PeerIdentity::Kind::kLearner;
  request.serial = file_.state().next_serial++;
  request.now_unix_s = unix_s(now);
  request.lifetime = kOwnCertificateLifetime;
  auto certificate = config_.authority->issue(request);
  ECHO_CHECK(certificate.has_value(), "{}", certificate ? "" : certificate.error().message());
  actions_.push_back(act::UseCertificate{std::move(*certificate), config_.authority->certificate()});
  next_beat_at_ = now + config_.heartbeat;
  identities_.start(unix_ms(now));
  issue_time(now);  // reserves the next issue times, and so saves the state
}

// ---- the application ----

void LearnerCore::send_message(WorkerId id, Slice bytes, TimePoint now) {
  Worker* worker = workers_.find(id);
  if (!worker) return;
  MessageQueue& messages = worker->messages;
  messages.push(std::move(bytes));
  if (messages.bytes() > kUnsentBytesMax)
    return set_away(id, fmt::format("it does not take its messages: {} bytes wait for it", messages.bytes()), now);
  uplink_.wake(messages);
  uplink_.pump(now);
}

void LearnerCore::expel(WorkerId id, const std::string& reason, TimePoint now) {
  if (!workers_.is_known(id)) return;
  identities_.revoke(id, unix_s(now));
  save(now);
  remove_worker(id, reason, /*send_goodbye=*/true, now);
  forget_away(id, reason);
  make_beacon(now);  // tells the other workers about the revocation
}

void LearnerCore::give_up(WorkerId id, const std::string& reason, TimePoint now) {
  remove_worker(id, reason, /*send_goodbye=*/false, now);
  forget_away(id, reason);
}

void LearnerCore::leave(TimePoint now) {
  for (auto& [id, worker] : workers_) {
    send_control(worker.control, Goodbye{.reason = "the run has ended", .run_ended = true}, now);
    uplink_.close(worker.control);
    close(worker.control);
  }
  close_edges(edges_.all_connections());
  for (const ConnId conn : pending_peers_.take_all()) close(conn);
  for (const ConnId conn : reach_.end_all_dials()) close(conn);
  workers_.forget_connections();
  next_beat_at_ = kNever;
  plan_.stop();
  file_.stop();
}

LearnerStats LearnerCore::stats() const {
  LearnerStats stats;
  for (const auto& [id, worker] : workers_) {
    WorkerView& view = stats.workers.emplace_back(worker.view);
    view.silent = worker.presence.is_silent();
    view.reachable = reach_.is_reachable(id);
    const Conduct::Record* record = conduct_.find(id);
    view.quarantined = record && record->stored.quarantined_until_ms > 0;
  }
  for (const auto& [id, worker] : workers_.away())
    stats.away.push_back({worker.view.info, worker.presence.away_reason()});
  stats.topology = topology();
  stats.chunk_bytes_sent = {edges_.chunk_bytes_sent()};
  stats.bytes_sent = bytes_sent();
  stats.bytes_received = bytes_received();
  stats.joined = workers_.joined_count();
  stats.lost = workers_.lost_count();
  stats.quarantined = conduct_.quarantines();
  stats.floods = conduct_.floods();
  stats.slow_hops = slow_hops_.recent();
  stats.known_publications = edges_.known_publications();
  return stats;
}

void LearnerCore::check() const {
  publications_.check();
  identities_.check();
  conduct_.check();
  workers_.check();
  reach_.check();
  helpers_.check();
  catch_ups_.check();
  slow_hops_.check();
  plan_.check();
  const auto placed_count = std::count_if(workers_.begin(), workers_.end(),
                                          [](const auto& worker) { return worker.second.place.assigned.has_value(); });
  ECHO_CHECK(static_cast<std::size_t>(placed_count) == topology().size(), "{} workers have a place in a topology of {}",
             placed_count, topology().size());
}

// ---- connections ----

void LearnerCore::on_accepted(ConnId conn, const PeerInfo& peer, TimePoint now) {
  postpone_after_pause(now);
  if (!file_.was_saved()) return close(conn);  // the peer will try again
  for (const ConnId other : pending_peers_.add(conn, peer, now + kHandshakeTimeout)) close(other);
}

void LearnerCore::on_connected(ConnId conn, TimePoint now) {
  postpone_after_pause(now);
  close(conn);  // the learner dials only to test whether a worker can be reached
  if (const auto dial = reach_.end_dial(conn, /*connected=*/true, now)) on_reachability_tested(*dial, "", now);
}

void LearnerCore::on_closed(ConnId conn, const std::string& reason, TimePoint now) {
  postpone_after_pause(now);
  pending_peers_.erase(conn);
  identities_.drop_answer(conn);
  edges_.close(conn);
  if (const auto dial = reach_.end_dial(conn, /*connected=*/false, now))
    return on_reachability_tested(*dial, reason, now);
  if (const Worker* worker = workers_.find_by_control(conn))
    set_away(worker->view.info.id, "its connection was lost: " + reason, now);
}

void LearnerCore::on_corrupt(ConnId conn, const std::string& reason, TimePoint now) {
  postpone_after_pause(now);
  const Worker* worker = workers_.find_by_control(conn);
  const auto sender = worker ? std::optional(worker->view.info.id) : edges_.child_of(conn);
  on_closed(conn, reason, now);
  if (sender) on_malformed(*sender, reason, now);
}

void LearnerCore::on_frame(ConnId conn, Frame frame, TimePoint now) {
  postpone_after_pause(now);
  if (Worker* worker = workers_.find_by_control(conn)) {
    const WorkerId id = worker->view.info.id;
    if (worker->presence.on_frame(config_, now)) {
      log::info("worker {} is heard again", id);
      plan_soon(now);
    }
    if (frame.type == FrameType::kApplication) return on_message_part(id, frame, now);
    if (frame.type == FrameType::kChunk) return on_malformed(id, "it sent a chunk to the learner", now);
    const auto message = decode_control(frame.body.bytes());
    if (!message) return on_malformed(id, message.error().message(), now);
    if (const auto kind = MessageBudget::kind_of(*message); kind && !within_budget(id, *kind, now)) return;
    return on_worker_message(*worker, *message, now);
  }
  if (edges_.contains(conn)) return on_edge_frame(conn, frame, now);
  if (const PendingPeer* pending = pending_peers_.find(conn))
    on_pending_peer(conn, PendingPeer(*pending), frame, now);  // a copy, because the original may be erased
}

// Whole messages count against the budget, and so do parts that are smaller than an honest worker sends. A message
// beyond the budget is dropped as a whole.
void LearnerCore::on_message_part(WorkerId id, const Frame& frame, TimePoint now) {
  constexpr std::size_t kSmallPartBytes = 4096;
  // A node sends the shards of its ranks, as many as they have.
  const bool counts_as_message = (!frame.more || frame.body.size() < kSmallPartBytes) && !workers_.at(id).is_node();
  const bool is_within_budget = !counts_as_message || within_budget(id, MessageBudget::Kind::kApplication, now);
  if (!workers_.contains(id)) return;  // it was expelled
  auto message = workers_.add_part(id, frame, config_.message_bytes_max);
  if (!message) return on_malformed(id, message.error().message(), now);
  if (*message) {
    if (is_within_budget) actions_.push_back(act::DeliverWorkerMessage{id, std::move(**message)});
  } else if (workers_.incomplete_bytes() > config_.assembling_bytes_max) {
    const Worker& sender = workers_.sender_of_most_incomplete_bytes();
    set_away(sender.view.info.id,
             fmt::format("{} bytes of its messages are not whole; with those of other workers {}, the limit is {}",
                         sender.incoming.bytes(), workers_.incomplete_bytes(), config_.assembling_bytes_max),
             now);
  }
}

void LearnerCore::on_sent(ConnId conn, std::size_t bytes, TimePoint now) { uplink_.on_sent(conn, bytes, now); }

void LearnerCore::close_edges(const std::vector<ConnId>& conns) {
  for (const ConnId conn : conns) {
    edges_.close(conn);
    close(conn);
  }
}

void LearnerCore::refuse(ConnId conn, const std::string& reason, TimePoint now) {
  pending_peers_.erase(conn);
  log::warn("refusing a connection: {}", reason);
  send_control(conn, Goodbye{reason}, now);
  close(conn);
}

// ---- newcomers ----

void LearnerCore::on_pending_peer(ConnId conn, const PendingPeer& pending, const Frame& frame, TimePoint now) {
  using Kind = trust::PeerIdentity::Kind;
  if (frame.type != FrameType::kControl) return refuse(conn, "it did not introduce itself", now);
  auto message = decode_control(frame.body.bytes());
  if (!message) return refuse(conn, message.error().message(), now);
  if (pending.peer.identity.kind == Kind::kAnonymous) {
    const auto* return_request = std::get_if<Return>(&*message);
    const auto* enrol_request = std::get_if<Enrol>(&*message);
    if (!enrol_request && !return_request)
      return refuse(conn, "a machine without a certificate may only enrol, with a join token", now);
    const auto refusal = return_request ? identities_.reissue(conn, *return_request, unix_s(now))
                                        : identities_.enrol(conn, *enrol_request, unix_s(now));
    return refusal ? refuse(conn, *refusal, now) : save(now);
  }
  if (pending.peer.identity.kind != Kind::kWorker) return refuse(conn, "it has the learner's certificate", now);
  if (identities_.is_revoked(pending.peer.identity.worker))
    return refuse(conn, "the certificate of this worker was revoked", now);
  if (auto* have = std::get_if<Have>(&*message); have && pending.hello) {
    const WorkerId worker = pending.peer.identity.worker;
    PeerHello hello = *pending.hello;
    hello.have = std::move(*have);
    if (!within_budget(worker, MessageBudget::Kind::kHave, now, frame.body.size()))
      return refuse(conn, fmt::format("worker {} says too much", worker), now);
    return open_edge(conn, worker, std::move(hello), now);
  }
  if (pending.hello) return refuse(conn, "it did not list the chunks that it holds", now);
  if (auto* hello = std::get_if<Hello>(&*message)) return admit_worker(conn, pending, std::move(*hello), now);
  if (auto* hello = std::get_if<PeerHello>(&*message))
    return admit_edge(conn, pending.peer.identity.worker, std::move(*hello), now);
  refuse(conn, "it did not introduce itself", now);
}

void LearnerCore::renew_certificate(Worker& worker, const Renew& request, TimePoint now) {
  if (request.key != worker.key)
    return log::warn("worker {} asks for a certificate for another key than its own: refused", worker.view.info.id);
  const WorkerId id = worker.view.info.id;
  auto certificate = identities_.issue(id, request.key, unix_s(now));
  if (!certificate) return log::error("renewal of worker {}: {}", id, certificate.error().message());
  send_control(worker.control, Renewed{std::move(*certificate)}, now);
}

void LearnerCore::admit_worker(ConnId conn, const PendingPeer& pending, Hello hello, TimePoint now) {
  const WorkerId id = pending.peer.identity.worker;
  const std::size_t workers_max = std::min(chains::kChainWorkersMax, config_.core.connections.members);
  if (workers_.size() >= workers_max && !workers_.contains(id))
    return refuse(conn,
                  fmt::format("the run has {} workers, as many as its learner can serve with {} files open (ulimit -n)",
                              workers_.size(), config_.core.connections.files),
                  now);
  if (!within_budget(id, MessageBudget::Kind::kJoin, now)) {  // without a goodbye: a bad path may be the cause
    pending_peers_.erase(conn);
    return close(conn);
  }
  if (workers_.contains(id))
    set_away(id, "it joined again", now);  // the worker knows best that its old connection is dead
  if (const auto refusal = identities_.remember(pending.peer.identity, hello.name)) return refuse(conn, *refusal, now);
  const Endpoint stated_endpoint = hello.data;
  hello.data = identities_.endpoint_of(id, stated_endpoint, pending.peer.host);
  hello.name = state().known.at(id).name;
  const MemberInfo info{.id = id,
                        .name = hello.name,
                        .data = hello.data,
                        .up = hello.up,
                        .down = hello.down,
                        .place = std::move(hello.place)};
  const std::string application_bytes = config_.welcome ? config_.welcome(info) : std::string();
  if (application_bytes.size() > kWelcomeBytesMax) {
    log::error(
        "worker {} cannot be welcomed: the application's welcome has {} bytes, the limit is {}: send the rest as "
        "messages",
        id, application_bytes.size(), kWelcomeBytesMax);
    return refuse(conn, "the learner's application has no welcome for it", now);
  }
  pending_peers_.erase(conn);
  actions_.push_back(act::Admit{conn});
  Worker& worker = workers_.join(id, conn, config_, now);
  worker.view.info = info;
  worker.region = config_.region_of ? config_.region_of(info) : config_.regions.learner_region;
  worker.expected = config_.links_of ? config_.links_of(info) : LinkLimits{};
  ECHO_CHECK(!config_.regions.several() || worker.region < config_.regions.links.size());
  worker.view.installed.reset();
  reach_.add(id);
  worker.draining = false;
  // Versions of an earlier epoch are void, so the worker counts as having none.
  const bool has_version = hello.installed && hello.installed->epoch == epoch();
  if (has_version && publications_.is_published(*hello.installed)) {
    worker.view.installed = hello.installed->version;
    worker.view.installed_digest = hello.installed->policy_digest;
  }
  worker.key = pending.peer.identity.key;
  worker.messages.set_local(worker.is_node());
  uplink_.open(conn, worker.messages);
  send_control(conn,
               Welcome{.worker = id,
                       .heartbeat = config_.heartbeat,
                       .patience = config_.network.heartbeat_timeout * kLearnerPatience,
                       .unix_ms = unix_ms(now),
                       .application = application_bytes,
                       .away_max = config_.away_max,
                       .policy = config_.policy_bytes},
               now);
  if (!beacon_) make_beacon(now);
  send_control(conn, *beacon_, now);
  actions_.push_back(act::ReportWorkerJoined{worker.view.info});
  // A worker that listens on all addresses, or on loopback, states one of these hosts, which do not tell its address.
  static const std::set<std::string> kUnspecificHosts{"", "0.0.0.0", "::", "127.0.0.1", "::1"};
  if (!kUnspecificHosts.contains(stated_endpoint.host) && stated_endpoint.host != info.data.host)
    send_control(conn,
                 Notice{fmt::format("other workers dial {}, from where this worker connects, instead of {}: its token "
                                    "does not name that host (`echoline token --reach`)",
                                    to_text(info.data), to_text(stated_endpoint))},
                 now);
  test_reachability(worker, now);
  plan_soon(now);
  if (has_version && !worker.view.installed) on_malformed(id, never_published_text(*hello.installed), now);
}

void LearnerCore::admit_edge(ConnId conn, WorkerId id, PeerHello hello, TimePoint now) {
  const Worker* worker = workers_.find(id);
  if (hello.run_id != state().run_id || !worker)
    return refuse(conn, fmt::format("worker {} has not joined this run", id), now);
  if (!within_budget(id, MessageBudget::Kind::kHave, now))
    return refuse(conn, fmt::format("worker {} says too much", id), now);
  if (const Status granted = grants_.accept(id, hello, unix_ms(now)); !granted)
    return refuse(conn, fmt::format("worker {}: {}", id, granted.error().message()), now);
  if (!hello.catch_up_to && !worker->place.edge_from(kLearnerId))
    return refuse(conn, fmt::format("worker {} was assigned another parent", id), now);
  if (hello.catch_up_to > publications_.newest())
    return refuse(conn, fmt::format("worker {} asks for version {}, which is not published", id, *hello.catch_up_to),
                  now);
  actions_.push_back(act::Admit{conn});  // the list of its chunks may be long
  if (hello.have_follows) return pending_peers_.await_have(conn, std::move(hello), now + kHandshakeTimeout);
  open_edge(conn, id, std::move(hello), now);
}

void LearnerCore::open_edge(ConnId conn, WorkerId id, PeerHello hello, TimePoint now) {
  // Help is not limited to certain stripes, and the hello of a further stream of an open edge lists no stripes.
  const bool wanted_was_checked =
      hello.catch_up_to || (hello.stream != 0 && !edges_.connections_of(id, /*helped=*/false).empty());
  if (const Status granted = wanted_was_checked ? ok() : grants_.check_wanted(id, hello.have.wanted); !granted)
    return refuse(conn, fmt::format("worker {}: {}", id, granted.error().message()), now);
  pending_peers_.erase(conn);
  if (hello.stream == 0)  // the first of a new edge: its old connections are dead
    close_edges(edges_.connections_of(id, hello.catch_up_to.has_value()));
  const Worker* child = workers_.find(id);
  const bool is_local = child && child->is_node();
  if (!edges_.open(conn, id, std::move(hello), now, is_local)) return close(conn);
  request_next_catch_up(now);
}

void LearnerCore::on_edge_frame(ConnId conn, const Frame& frame, TimePoint now) {
  const WorkerId child = *edges_.child_of(conn);
  const auto drop = [&](const std::string& why) {
    log::warn("closing a data connection: {}", why);
    close_edges({conn});
  };
  const auto malformed = [&](const std::string& what) {
    drop(what);
    on_malformed(child, what, now);
  };
  if (frame.type != FrameType::kControl) return malformed("a child sent something other than control messages");
  auto message = decode_control(frame.body.bytes());
  if (!message) return malformed(message.error().message());
  const auto kind = MessageBudget::kind_of(*message);
  if (kind && !within_budget(child, *kind, now, frame.body.size())) return;
  if (auto* have = std::get_if<Have>(&*message)) {
    const Status granted = edges_.is_helped(conn) ? ok() : grants_.check_wanted(child, have->wanted);
    if (!granted) return drop(fmt::format("worker {}: {}", child, granted.error().message()));
    edges_.update(conn, std::move(*have), now);
  } else if (const auto* grant = std::get_if<SignedGrant>(&*message)) {
    if (const Status granted = grants_.renew(child, *grant, unix_ms(now)); !granted)
      return drop(fmt::format("worker {}: {}", child, granted.error().message()));
  } else if (const auto* request = std::get_if<ChunkRequest>(&*message))
    edges_.send_again(conn, *request, now);
  else
    return malformed("a child sent a message that is not for a parent");
  request_next_catch_up(now);
}

// ---- workers ----

void LearnerCore::on_worker_message(Worker& worker, const ControlMessage& message, TimePoint now) {
  const WorkerId id = worker.view.info.id;
  if (const auto* ack = std::get_if<Installed>(&message)) return on_ack(worker, *ack, now);
  if (const auto* beat = std::get_if<Heartbeat>(&message)) return on_heartbeat(worker, *beat, now);
  if (const auto* failed = std::get_if<EdgeFailed>(&message)) return on_edge_failed(worker, *failed, now);
  if (const auto* poisoned = std::get_if<Poisoned>(&message)) return on_poisoned(worker, *poisoned, now);
  if (const auto* need = std::get_if<NeedHelp>(&message)) return on_need_help(worker, *need, now);
  if (const auto* request = std::get_if<Renew>(&message)) return renew_certificate(worker, *request, now);
  if (std::get_if<Draining>(&message)) {
    worker.draining = true;
    return move_behind_others(id, now);
  }
  if (const auto* trouble = std::get_if<Trouble>(&message)) {
    if (++conduct_.record_of(id, unix_ms(now)).troubles_reported <= kTroublesMax)
      actions_.push_back(act::ReportWorkerTrouble{id, trouble->text});
    return;
  }
  if (const auto* goodbye = std::get_if<Goodbye>(&message))
    return remove_worker(id, "it left: " + goodbye->reason, /*send_goodbye=*/false, now);
  on_malformed(id, "it sent a message that is not for a learner", now);
}

// ---- state and time ----

// Answers and publications that wait for the state to be on disk follow in after_saved().
void LearnerCore::save(TimePoint now) {
  file_.state().conduct = conduct_.stored_records();
  if (file_.save()) after_saved(now);
}

void LearnerCore::on_saved(const Status& status, TimePoint now) {
  if (!status) {
    log::error("the overlay's state cannot be saved, so nothing is enrolled or published: {}",
               status.error().message());
    return file_.on_failed(now);
  }
  if (file_.on_succeeded()) return save(now);
  after_saved(now);
}

void LearnerCore::after_saved(TimePoint now) {
  for (Identities::PendingAnswer& pending : identities_.take_pending_answers()) {
    pending_peers_.erase(pending.conn);
    pending.answer.unix_ms = unix_ms(now);
    send_control(pending.conn, pending.answer, now);
    close(pending.conn);
  }
  close_saved_publications(now);
}

std::uint64_t LearnerCore::issue_time(TimePoint now) {
  if (identities_.advance_issue_time(unix_ms(now))) save(now);
  return identities_.last_issue_time();
}

void LearnerCore::make_beacon(TimePoint now) {
  Beacon beacon;
  beacon.run_id = state().run_id;
  beacon.epoch = epoch();
  beacon.sequence = issue_time(now);
  beacon.issued_unix_ms = unix_ms(now);
  beacon.expires_unix_ms = beacon.issued_unix_ms + static_cast<std::uint64_t>(seconds(kBeaconLifetime) * 1e3);
  beacon.newest = publications_.newest();
  beacon.revoked = identities_.revoked_workers([this] { return workers_.all_ids(); });
  beacon_ = sign(beacon, config_.authority->key());
}

void LearnerCore::on_beat(TimePoint now) {
  next_beat_at_ = now + config_.heartbeat;
  if (store_.erase_expired(unix_ms(now), kEveryVersion)) edges_.on_store_changed(now);
  request_next_catch_up(now);
  identities_.forget_expired([this](WorkerId id) { return workers_.is_known(id); }, now, unix_s(now));
  make_beacon(now);
  for (auto& [id, worker] : workers_) send_control(worker.control, *beacon_, now);
  renew_grants(now);
  EdgeStatus status{*beacon_, {}};
  for (const Broadcast& broadcast : publications_.broadcasts().open_broadcasts())
    if (const StoredPublication* stored = store_.find(broadcast.id);
        stored && status.progress.size() < kStatusPublicationsMax)
      status.progress.push_back({broadcast.id, chunks_by_stripe(*stored)});
  edges_.send_to_all(status, now);
  check_presence(now);
  check_conduct(now);
  give_up_stragglers(now);
  measure_hops(now);
  choose_topology_kind(now);
}

void LearnerCore::on_timer(TimePoint now) {
  postpone_after_pause(now);
  resume_reading(now);
  if (now >= plan_.next_deadline()) plan_now(now);
  if (now >= next_beat_at_) on_beat(now);
  for (const WorkerId id : reach_.take_planned(now)) test_reachability(workers_.at(id), now);
  if (file_.take_retry(now)) save(now);
  for (const ConnId conn : pending_peers_.take_expired(now)) close(conn);
  uplink_.on_timer(now);
}

TimePoint LearnerCore::next_deadline() const {
  return std::min({uplink_.next_deadline(), reading_deadline(), next_beat_at_, plan_.next_deadline(),
                   file_.next_deadline(), pending_peers_.next_deadline(), reach_.next_deadline()});
}

}  // namespace echoline::overlay

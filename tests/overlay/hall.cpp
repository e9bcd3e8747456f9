// Delivers messages, timers and disk events between the cores of a hall. See hall.hpp.
#include "tests/overlay/hall.hpp"

#include <cstring>

namespace echoline::overlay {
namespace {

constexpr Duration kLatency = std::chrono::milliseconds(1);
constexpr double kUnixOrigin_s = kMadeUnix_s;

trust::SigningKey key_of(const HallNode& node) { return made_key(node.name); }

}  // namespace

Hall::Hall(std::function<void(LearnerConfig&)> configure) : configure_learner_(std::move(configure)) {
  authority_ = std::make_shared<trust::Authority>(made_authority());
  checker_ = std::make_shared<SignatureChecker>("run", authority_->public_key());
  on_need_catch_up = [this](const act::RequestCatchUp& need) {
    ECHO_CHECK(publish(make({need.current, {}}, 1000, {.epoch = core().epoch()}), true).has_value());
  };
  add_node("learner");
  start_learner({}, {});
}

HallNode& Hall::add_node(std::string name) {
  HallNode& node = *nodes_.emplace_back(std::make_unique<HallNode>());
  node.name = std::move(name);
  node.endpoint = {fmt::format("10.0.0.{}", nodes_.size() - 1), 7070};
  return node;
}

void Hall::start_learner(std::optional<LearnerState> state, std::optional<Version> resumed_at) {
  HallNode& node = learner();
  node.identity = {.kind = trust::PeerIdentity::Kind::kLearner,
                   .worker = kLearnerId,
                   .serial = 1,
                   .expires_unix_s = 1e10,
                   .key = authority_->public_key()};
  LearnerConfig config;
  config.policy = chains::TopologyPolicy::kEcho2;  // chains, which the tests can foretell
  config.network.silence_min = {};
  config.folded_deltas_max = 0;  // late workers get the deltas that are stored
  config.core.unix_origin_s = kUnixOrigin_s;
  config.self = node.endpoint;
  config.authority = authority_;
  config.checker = checker_;
  config.state = std::move(state);
  config.resumed_at = resumed_at;
  config.durable = true;
  config.core.limits.up = BitRate::from_mbit_per_s(80);
  config.chain_rate = BitRate::from_mbit_per_s(80);  // one chain
  config.welcome = [](const MemberInfo& m) { return "hello " + m.name; };
  if (configure_learner_) configure_learner_(config);
  node.core = std::make_unique<LearnerCore>(std::move(config));
  node.alive = true;
  core().start(now_);
  perform(node);
}

HallNode& Hall::join(std::function<void(MemberConfig&)> configure) {
  HallNode& node = add_node(fmt::format("worker {}", next_worker_));
  node.id = WorkerId{next_worker_++};
  const trust::PublicKey key = key_of(node).public_key();
  trust::CertificateRequest request{key, trust::PeerIdentity::Kind::kWorker, node.id, next_serial_++,
                                    kUnixOrigin_s + seconds(now_.time_since_epoch())};
  WorkerState state;
  state.run_id = "run";
  state.authority = authority_->certificate();
  state.certificate = *authority_->issue(request);
  state.worker = node.id;
  node.identity = *trust::check_certificate(state.certificate, authority_->public_key(), "run", std::nullopt);
  start_member(node, std::move(state), std::move(configure));
  return node;
}

std::vector<HallNode*> Hall::join_all(std::size_t n, std::function<void(MemberConfig&)> configure) {
  std::vector<HallNode*> all;
  for (std::size_t i = 0; i < n; ++i) all.push_back(&join(configure));
  ECHO_CHECK(run_until([&] {
    for (HallNode* node : all)
      if (node->member().stats().parents.empty()) return false;
    return true;
  }));
  run_for(std::chrono::milliseconds(20));  // connections open
  return all;
}

void Hall::start_member(HallNode& node, WorkerState state, std::function<void(MemberConfig&)> configure) {
  MemberConfig config{.core = {},
                      .learner = learner().endpoint,
                      .data = node.endpoint,
                      .name = node.name,
                      .key = key_of(node),
                      .state = std::move(state),
                      .checker = checker_,
                      .store = {},
                      .durable = true,
                      .join_timeout = {},
                      .away_max = {},
                      .parts_unread_max = {},
                      .place = {}};
  config.core.unix_origin_s = kUnixOrigin_s;
  config.join_timeout = std::chrono::seconds(10);
  config.away_max = std::chrono::seconds(30);
  config.store.disk = true;
  if (configure) configure(config);
  const bool has_disk = config.store.disk;
  node.core = std::make_unique<MemberCore>(std::move(config));
  node.alive = node.reading = true;
  if (has_disk)  // the process reads back what an earlier one has spooled
    for (const auto& [id, spool] : node.spools)
      for (const act::Spool& record : spool.records) {
        FrameDecoder decoder;
        decoder.admit();
        for (auto bytes = record.record.bytes(); !bytes.empty();) {
          const auto room = decoder.room();
          const std::size_t n = std::min(room.size(), bytes.size());
          std::memcpy(room.data(), bytes.data(), n);
          bytes = bytes.subspan(n);
          ECHO_CHECK(decoder.advance(n).has_value());
        }
        if (record.chunk) ECHO_CHECK(decoder.adopt(record.data));
        node.member().recover(*decoder.take(), now_);
      }
  node.member().start(now_);
  perform(node);
}

HallNode& Hall::enrol(const trust::Secret& token, const std::string& instance, const trust::SigningKey& key) {
  HallNode& node = add_node(instance);
  EnrolConfig config{.core = {}, .learner = learner().endpoint, .key = key, .token = token, .instance = instance};
  config.core.unix_origin_s = kUnixOrigin_s;
  node.core = std::make_unique<EnrolCore>(std::move(config));
  static_cast<EnrolCore&>(*node.core).start(now_);
  perform(node);
  return node;
}

void Hall::kill(HallNode& node) {
  node.alive = false;
  for (auto it = links_.begin(); it != links_.end();) {
    const auto [key, value] = *it++;
    if (key.first == &node) close(value.first, value.second, "connection reset");
  }
}

void Hall::restart(HallNode& worker, std::function<void(MemberConfig&)> configure) {
  kill(worker);
  start_member(worker, *decode_worker_state(worker.state), std::move(configure));
}

void Hall::restart_learner(std::optional<Version> resumed_at) {
  kill(learner());
  start_learner(*decode_learner_state(learner().state), resumed_at);
}

void Hall::cut(HallNode& a, HallNode& b) {
  for (auto it = links_.begin(); it != links_.end();) {
    const auto [key, value] = *it++;
    const auto& [link, side] = value;
    if (key.first != &a || link->ends[1 - side].node != &b) continue;
    close(link, side, "connection reset");
    call_soon(a, [conn = key.second, this](Core& core) { core.on_closed(conn, "connection reset", now_); });
  }
}

// ---- publishing ----

Status Hall::begin(const Made& made, bool catch_up) {
  const Status status = core().begin(made.announcement, made.opening, catch_up, now_);
  perform(learner());
  return status;
}
Status Hall::add(const Made& made, std::size_t first, std::size_t count) {
  std::vector<SealedChunk> chunks(made.chunks.begin() + static_cast<std::ptrdiff_t>(first),
                                  made.chunks.begin() + static_cast<std::ptrdiff_t>(first + count));
  const Status status = core().add(made.id, std::move(chunks), now_);
  perform(learner());
  return status;
}
Status Hall::finish(const Made& made) {
  const Status status = core().finish(made.manifest, made.closing, now_);
  perform(learner());
  return status;
}
Status Hall::publish(const Made& made, bool catch_up) {
  ECHO_TRY(begin(made, catch_up));
  ECHO_TRY(add(made, 0, made.chunks.size()));
  return finish(made);
}

// ---- time ----

void Hall::step() {
  TimePoint next = events_.empty() ? kNever : events_.begin()->first;
  for (const auto& node : nodes_)
    if (node->alive) next = std::min(next, node->core->next_deadline());
  ECHO_CHECK(next != kNever, "no event and no deadline is left");
  steps_at_now_ = next > now_ ? 0 : steps_at_now_ + 1;
  ECHO_CHECK(steps_at_now_ < 100'000, "time stands still");
  now_ = std::max(now_, next);
  while (!events_.empty() && events_.begin()->first <= now_) {
    const auto event = std::move(events_.begin()->second);
    events_.erase(events_.begin());
    event();
  }
  for (std::size_t i = 0; i < nodes_.size(); ++i) {
    HallNode& node = *nodes_[i];
    if (!node.alive || node.core->next_deadline() > now_) continue;
    node.core->on_timer(now_);
    perform(node);
  }
}

void Hall::run_for(Duration time) {
  const TimePoint end = now_ + time;
  bool is_over = false;
  call_at(end, [&] { is_over = true; });
  while (!is_over) step();
}

bool Hall::run_until(const std::function<bool()>& holds, Duration limit) {
  const TimePoint end = now_ + limit;
  bool is_over = false;
  const auto alarm = events_.emplace(end, [&] { is_over = true; });
  while (!holds()) {
    if (is_over) return false;
    step();
  }
  if (!is_over) events_.erase(alarm);
  return true;
}

bool Hall::all_have(std::uint64_t version) {
  for (const auto& node : nodes_)
    if (node->alive && node->id != kLearnerId &&
        (node->delivered.empty() || node->delivered.back().key.version != Version{version}))
      return false;
  return true;
}

void Hall::call_soon(HallNode& node, std::function<void(Core&)> event) {
  call_at(now_, [this, &node, core = node.core.get(), event = std::move(event)] {
    if (!node.alive || node.core.get() != core) return;
    event(*core);
    perform(node);
  });
}

// ---- actions of cores ----

void Hall::perform(HallNode& node) {
  if (const auto* member = dynamic_cast<const MemberCore*>(node.core.get())) member->check();
  if (const auto* learner = dynamic_cast<const LearnerCore*>(node.core.get())) learner->check();
  for (Action& action : node.core->take_actions()) perform(node, std::move(action));
}

void Hall::perform(HallNode& node, Action action) {
  if (const auto* d = std::get_if<act::Dial>(&action)) return dial(node, *d);
  if (const auto* s = std::get_if<act::Send>(&action)) return send(node, *s);
  if (const auto* c = std::get_if<act::Close>(&action)) {
    if (const auto [link, side] = find(node, c->conn); link) close(link, side, "closed by the peer");
    return;
  }
  if (const auto* a = std::get_if<act::Admit>(&action)) {
    if (const auto [link, side] = find(node, a->conn); link) link->ends[side].decoder.admit();
    return;
  }
  if (const auto* r = std::get_if<act::SetReading>(&action)) {
    if (!r->conn) node.reading = r->on;
    for (const auto& [key, value] : std::map(links_)) {
      if (key.first != &node || (r->conn && key.second != *r->conn)) continue;
      if (r->conn) value.first->ends[value.second].paused = !r->on;
      call_at(now_, [this, value = value] { read(value.first, value.second); });
    }
    return;
  }
  if (const auto* u = std::get_if<act::UseCertificate>(&action)) return node.certificates.push_back(u->certificate);
  if (auto* s = std::get_if<act::SaveState>(&action)) {
    const Status status = node.disk_fails ? Status(fail(Code::kIo, "save", "no space left on device")) : ok();
    if (status) node.state = std::move(s->bytes);
    return call_soon(node, [this, status](Core& core) { core.on_saved(status, now_); });
  }
  if (auto* s = std::get_if<act::Spool>(&action)) {
    if (s->chunk)
      call_soon(node, [this, id = s->publication, i = *s->chunk](Core& core) { core.on_spooled(id, i, ok(), now_); });
    node.spools[s->publication].records.push_back(std::move(*s));
    return;
  }
  if (const auto* u = std::get_if<act::ReadChunk>(&action)) {
    Result<Slice> found = fail(Code::kIo, "read spool", "not there");
    for (const act::Spool& record : node.spools[u->publication].records)
      if (record.chunk == u->chunk) found = record.data;
    return call_soon(node, [this, read_chunk = *u, found](Core& core) {
      core.on_chunk_read(read_chunk.publication, read_chunk.chunk, found, now_);
    });
  }
  if (const auto* d = std::get_if<act::DropSpool>(&action)) {
    node.spools.erase(d->publication);
    return;
  }
  if (const auto* n = std::get_if<act::RequestCatchUp>(&action))
    call_at(now_, [this, need = *n] { on_need_catch_up(need); });
  if (const auto* d = std::get_if<act::DeliverPublication>(&action)) deliver(node, *d);
  node.events.push_back(std::move(action));
}

void Hall::deliver(HallNode& node, const act::DeliverPublication& d) {
  std::vector<std::byte> payload;
  if (d.spooled) {
    payload.resize(d.bytes);
    for (const act::Spool& record : node.spools.at(*d.spooled).records)
      if (record.chunk) std::memcpy(payload.data() + record.offset, record.data.data(), record.data.size());
  } else {
    const Slice bytes = *d.publication.payload.bytes();
    payload.assign(bytes.bytes().begin(), bytes.bytes().end());
  }
  ECHO_CHECK(payload.size() == d.bytes);
  node.delivered.push_back({{d.publication.version, d.publication.base}, d.publication.activate, std::move(payload)});
  if (node.installs && d.publication.activate)
    call_soon(node, [this, v = d.publication.version, digest = d.publication.policy_digest](Core& core) {
      static_cast<MemberCore&>(core).installed(v, digest, now_);
    });
}

// ---- the network ----

void Hall::dial(HallNode& from, const act::Dial& dial) {
  HallNode* to = nullptr;
  for (const auto& node : nodes_)
    if (node->endpoint == dial.to && node->alive) to = node.get();
  if (!to || to->id != dial.expected || &from == to || (may_dial && !may_dial(from, *to))) {
    call_at(now_ + kLatency, [this, &from, core = from.core.get(), conn = dial.conn] {
      if (!from.alive || from.core.get() != core) return;
      core->on_closed(conn, "connection refused", now_);
      perform(from);
    });
    return;
  }
  auto link = std::make_shared<Link>();
  link->service = dial.service;
  link->ends[0].node = &from;
  link->ends[0].conn = dial.conn;
  link->ends[1].node = to;
  link->ends[1].conn = ConnId{to->next_accepted};
  to->next_accepted += 2;
  for (const int side : {0, 1}) {
    End& end = link->ends[side];
    end.open = true;
    links_[{end.node, end.conn}] = {link, side};
  }
  call_at(now_ + kLatency, [this, link] {
    for (const int side : {1, 0}) {
      End& end = link->ends[side];
      if (!end.open || !end.node->alive) continue;
      const bool is_anonymous = link->service == act::Service::kEnrol;
      if (side == 1)
        end.node->core->on_accepted(
            end.conn,
            {link->ends[0].node->endpoint.host, is_anonymous ? trust::PeerIdentity{} : link->ends[0].node->identity},
            now_);
      else
        end.node->core->on_connected(end.conn, now_);
      perform(*end.node);
    }
  });
}

std::pair<std::shared_ptr<Hall::Link>, int> Hall::find(HallNode& node, ConnId conn) {
  const auto it = links_.find({&node, conn});
  if (it == links_.end()) return {nullptr, 0};
  return it->second;
}

void Hall::send(HallNode& from, const act::Send& send) {
  const auto [link, side] = find(from, send.conn);
  if (!link) return;
  call_at(now_ + kLatency, [this, link = link, side = side, send] {
    End& sender = link->ends[side];
    End& receiver = link->ends[1 - side];
    if (sender.open && sender.node->alive) {
      sender.node->core->on_sent(sender.conn, send.head.size() + send.tail.size(), now_);
      perform(*sender.node);
    }
    if (!receiver.open || !receiver.node->alive) return;
    for (const Slice& part : {send.head, send.tail})
      if (!part.empty()) receiver.inbox.push_back(part);
    read(link, 1 - side);
  });
}

void Hall::read(const std::shared_ptr<Link>& link, int side) {
  End& end = link->ends[side];
  while (end.open && end.node->alive && end.node->reading && !end.paused && !end.inbox.empty()) {
    const Slice part = end.inbox.front();
    end.inbox.pop_front();
    end.node->core->on_received(part.size(), now_);
    for (auto bytes = part.bytes(); !bytes.empty();) {
      const auto room = end.decoder.room();
      const std::size_t n = std::min(room.size(), bytes.size());
      std::memcpy(room.data(), bytes.data(), n);
      bytes = bytes.subspan(n);
      if (const Status advanced = end.decoder.advance(n); !advanced) {
        close(link, side, "closed by the peer");
        end.node->core->on_closed(end.conn, advanced.error().message(), now_);
        return perform(*end.node);
      }
      auto frame = end.decoder.take();
      if (!frame) continue;
      HallNode& from = *link->ends[1 - side].node;
      if (tamper && !tamper(from, *end.node, *frame)) continue;
      if (frame->type == FrameType::kChunk) chunk_bytes_[{&from, end.node}] += frame->body.size();
      end.node->core->on_frame(end.conn, std::move(*frame), now_);
      perform(*end.node);
      if (!end.open) return;
    }
  }
}

// The other end gets the close after all data sent before.
void Hall::close(const std::shared_ptr<Link>& link, int side, const std::string& reason) {
  End& end = link->ends[side];
  if (!end.open) return;
  end.open = false;
  links_.erase({end.node, end.conn});
  call_at(now_ + kLatency, [this, link, side, reason] {
    End& other = link->ends[1 - side];
    if (!other.open) return;
    other.paused = false;
    read(link, 1 - side);
    if (!other.open) return;
    other.open = false;
    links_.erase({other.node, other.conn});
    if (!other.node->alive) return;
    other.node->core->on_closed(other.conn, reason, now_);
    perform(*other.node);
  });
}

// ---- state of the hall ----

HallNode* Hall::node_of(WorkerId id) {
  for (const auto& node : nodes_)
    if (node->id == id && (id == kLearnerId ? node == nodes_.front() : true)) return node.get();
  return nullptr;
}
HallNode& Hall::parent_of(HallNode& worker) { return *node_of(worker.member().stats().parents.at(0)); }

std::vector<HallNode*> Hall::chain() {
  std::vector<HallNode*> all;
  ECHO_CHECK(core().topology().chains.size() == 1);
  for (const WorkerId id : core().topology().chains.at(0)) all.push_back(node_of(id));
  return all;
}

std::uint64_t Hall::chunk_bytes(const HallNode& from, const HallNode& to) const {
  const auto it = chunk_bytes_.find({&from, &to});
  return it == chunk_bytes_.end() ? 0 : it->second;
}

}  // namespace echoline::overlay

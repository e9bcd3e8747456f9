// The relay's sockets on libuv. Called by the CLI.
#include "overlay/relay/relay.hpp"

#include "base/log.hpp"
#include "overlay/connection_limits.hpp"
#include "overlay/relay/client_hello.hpp"
#include "overlay/relay/runs.hpp"
#include "overlay/trust/authority.hpp"
#include "overlay/uv/address.hpp"
#include "overlay/uv/file_limit.hpp"
#include "overlay/uv/hosts.hpp"
#include "overlay/uv/listener.hpp"
#include "overlay/uv/loop_thread.hpp"
#include "overlay/uv/socket.hpp"
#include "overlay/wire/bytes.hpp"

namespace echoline::overlay::relay {
namespace {

constexpr Duration kSummaryEvery = std::chrono::minutes(1);  // of refused connections, in the log
constexpr std::size_t kSpareBlocksMax = 16;
constexpr char kClientFirstByte = 22;  // of a TLS handshake record

using Block = std::unique_ptr<char[]>;  // Runs::kReadBytesMax bytes

uv_stream_t* stream(uv_tcp_t& tcp) { return reinterpret_cast<uv_stream_t*>(&tcp); }

}  // namespace

class Relay::Server {
 public:
  explicit Server(RelayOptions options);
  ~Server() { stop(); }

  Status open(const Endpoint& bind);
  Endpoint endpoint() const { return listener_.endpoint(); }
  RelayStats stats();
  void stop();

 private:
  // One connection, of a client or of a learner.
  struct Peer {
    enum class Stage : std::uint8_t {
      kGreeting,   // has not said what it is for
      kAnswering,  // a learner that has not proven its keys
      kControl,    // a learner's control connection
      kWaiting,    // a client whose learner has not answered
      kJoined,
      kClosing,
    };
    ConnId id{};
    Server* server = nullptr;
    uv_tcp_t tcp{};
    Stage stage = Stage::kGreeting;
    std::string host, network;
    bool is_unproven = false;
    TimePoint deadline = kNever;
    std::string received;  // first bytes: a greeting, an answer, or what goes to the learner when it comes
    Nonce learner_nonce{}, relay_nonce{};
    std::optional<ControlFrames> frames;
    RelayRun* run = nullptr;  // of a client, and of the learner's connection to it
    Peer* other = nullptr;    // joined with it
    TimePoint active_at{};
    std::uint64_t round = 0;    // Runs::read_bytes_max()
    bool has_ended = false;     // it sends no more
    bool is_shut_down = false;  // everything has been passed to it, and nothing more comes
  };
  struct Write;

  TimePoint now() const { return loop_.now(); }
  // Idle connections are looked for so often.
  Duration sweep_every() const { return std::min<Duration>(runs_.limits().idle_timeout / 4, std::chrono::seconds(5)); }
  void accept(int status);
  bool make_room();
  void start_reading(Peer& peer);
  std::size_t room_for(Peer& peer);
  void wait_for_rate(Peer& peer);
  void on_read(Peer& peer, ssize_t size, const char* bytes);
  void on_first_bytes(Peer& peer);
  void on_client(Peer& client);
  void on_learner(Peer& learner);
  void on_answer(Peer& learner);
  void on_control(Peer& learner, std::string_view bytes);
  void on_ticket(Peer& learner, const Greeting& greeting);
  void pass(Peer& from, const char* bytes, std::size_t size);
  void on_end(Peer& peer);
  void send(Peer& peer, std::string_view bytes);
  void refuse(Peer& peer, const std::string& why);
  void close(Peer& peer);
  void close_run(RelayRun& run, const std::string& why);
  void set_proven(Peer& peer);
  void set_deadline(Peer& peer, TimePoint at) { deadlines_.set(peer.id, peer.deadline, at); }
  Peer* find(ConnId id);
  Block take_block();
  void give_back(Block block);
  void on_timer(TimePoint fired_at);
  void arm();
  RelayStats count() const;

  LoopThread loop_;  // outlives the handles of the others
  const trust::Secret key_;
  const ConnectionLimits connection_limits_;
  Runs runs_;
  Listener listener_;
  uv_prepare_t* prepare_;  // freed by its close callback
  std::map<ConnId, std::unique_ptr<Peer>> peers_;
  UnprovenConnections unproven_;
  Deadlines deadlines_;
  std::vector<ConnId> paced_;  // wait for their run's rate
  std::vector<Block> spare_blocks_;
  Block block_;  // for the next read
  std::uint64_t next_id_ = 1, bytes_ = 0, refused_ = 0, refused_at_summary_ = 0;
  std::string last_refusal_;
  TimePoint sweep_at_{}, summary_at_{};
  bool is_stopping_ = false;
  RelayStats last_stats_;
};

// Bytes that a peer's socket did not take at once.
struct Relay::Server::Write {
  uv_write_t request{};
  Block block;
  ConnId from{};  // is read again afterwards
};

Relay::Server::Server(RelayOptions options)
    : loop_(LoopThread::Events{.timer = [this](TimePoint fired_at) { on_timer(fired_at); },
                               .paused = [](Duration) {},
                               .after_work = [] {},
                               .idle = [] {}}),
      key_(std::move(options.key)),
      connection_limits_(ConnectionLimits::of(raise_file_limit())),
      runs_(std::move(options.limits)),
      listener_(loop_.loop(), [this](int status) { accept(status); }),
      prepare_(new uv_prepare_t),
      block_(take_block()) {
  uv_prepare_init(&loop_.loop(), prepare_);
  prepare_->data = this;
}

Status Relay::Server::open(const Endpoint& bind) {
  ECHO_TRY(listener_.open(bind, /*preferred_port=*/0));
  uv_prepare_start(prepare_, [](uv_prepare_t* handle) { static_cast<Server*>(handle->data)->runs_.begin_turn(); });
  loop_.start([this](TimePoint started_at) {
    sweep_at_ = started_at + sweep_every();
    summary_at_ = started_at + kSummaryEvery;
    arm();
  });
  return ok();
}

void Relay::Server::stop() {
  if (prepare_ == nullptr) return;
  const auto close_all = [this](TimePoint) {
    last_stats_ = count();
    is_stopping_ = true;
    listener_.stop();
    while (!peers_.empty()) close(*peers_.begin()->second);
    uv_close(reinterpret_cast<uv_handle_t*>(std::exchange(prepare_, nullptr)),
             [](uv_handle_t* handle) { delete reinterpret_cast<uv_prepare_t*>(handle); });
    ECHO_CHECK(loop_.close(), "work waits for a relay that stops");
  };
  if (!loop_.is_running()) {  // it has not opened
    uv_close(reinterpret_cast<uv_handle_t*>(std::exchange(prepare_, nullptr)),
             [](uv_handle_t* handle) { delete reinterpret_cast<uv_prepare_t*>(handle); });
    return;
  }
  loop_.post(close_all);
  loop_.join();
}

RelayStats Relay::Server::stats() {
  if (prepare_ == nullptr) return last_stats_;
  RelayStats stats;
  loop_.post_and_wait([&](TimePoint) {
    runs_.check();
    stats = count();
  });
  return stats;
}

RelayStats Relay::Server::count() const {
  RelayStats stats{.runs = runs_.registered(), .connections = peers_.size(), .bytes = bytes_, .refused = refused_};
  for (const auto& [id, peer] : peers_) {
    stats.waiting += peer->stage == Peer::Stage::kWaiting;
    stats.joined += peer->stage == Peer::Stage::kJoined;
  }
  stats.joined /= 2;
  return stats;
}

// ---- connections ----

Relay::Server::Peer* Relay::Server::find(ConnId id) {
  const auto it = peers_.find(id);
  return it == peers_.end() ? nullptr : it->second.get();
}

void Relay::Server::accept(int status) {
  if (status != 0) {
    if ((status == UV_EMFILE || status == UV_ENFILE) && make_room()) return;
    log::warn("no connection is accepted for {}: {}", echoline::to_text(Listener::kPause), uv_strerror(status));
    listener_.pause(now());
    return arm();
  }
  const bool is_full = peers_.size() >= connection_limits_.total && !make_room();
  const ConnId id{next_id_++};
  Peer& peer = *(peers_[id] = std::make_unique<Peer>());
  peer.id = id;
  peer.server = this;
  uv_tcp_init(&loop_.loop(), &peer.tcp);
  peer.tcp.data = &peer;
  sockaddr_storage address{};
  int length = sizeof address;
  if (uv_accept(listener_.stream(), stream(peer.tcp)) != 0 || is_full ||
      uv_tcp_getpeername(&peer.tcp, reinterpret_cast<sockaddr*>(&address), &length) != 0)
    return refuse(peer, "too many connections");
  peer.host = to_endpoint(address).host;
  peer.network = network_of(peer.host);
  peer.is_unproven = true;
  unproven_.add(id, peer.network);
  if (unproven_.size() > connection_limits_.unproven) make_room();
  tune(peer.tcp, /*bulk=*/true);
  set_deadline(peer, now() + runs_.limits().greeting_timeout);
  start_reading(peer);
  arm();
}

bool Relay::Server::make_room() {
  const auto oldest = unproven_.oldest_of_largest_network();
  if (oldest) refuse(*find(*oldest), "too many connections from its network have not said what they are for");
  return oldest.has_value();
}

void Relay::Server::set_proven(Peer& peer) {
  if (std::exchange(peer.is_unproven, false)) unproven_.remove(peer.id, peer.network);
}

void Relay::Server::refuse(Peer& peer, const std::string& why) {
  ++refused_;
  last_refusal_ = fmt::format("{}: {}", peer.host, why);
  log::debug("refused {}", last_refusal_);
  close(peer);
}

void Relay::Server::close(Peer& peer) {
  if (peer.stage == Peer::Stage::kClosing) return;
  if (peer.stage == Peer::Stage::kControl) {
    runs_.remove_control(peer.id);
    log::info("the learner of {} at {} is gone", peer.run->name, peer.host);
  }
  const bool is_client = peer.run && peer.stage != Peer::Stage::kControl && peer.run->clients.contains(peer.id);
  if (is_client) runs_.remove_client(*peer.run, peer.id);
  peer.stage = Peer::Stage::kClosing;
  set_proven(peer);
  set_deadline(peer, kNever);
  if (Peer* const other = std::exchange(peer.other, nullptr)) {
    other->other = nullptr;
    close(*other);
  }
  (void)peers_.at(peer.id).release();
  peers_.erase(peer.id);
  uv_close(reinterpret_cast<uv_handle_t*>(&peer.tcp),
           [](uv_handle_t* handle) { delete static_cast<Peer*>(handle->data); });
}

// The run may pass no more bytes.
void Relay::Server::close_run(RelayRun& run, const std::string& why) {
  log::warn("{}: {}", run.name, why);
  while (!run.clients.empty()) refuse(*find(*run.clients.begin()), why);
  if (!run.control) return;
  Peer& control = *find(*run.control);
  send(control, control.frames->seal(ControlFrame::Type::kRefused, why));
  close(control);
}

// ---- reading ----

void Relay::Server::start_reading(Peer& peer) {
  uv_read_start(  // idempotent
      stream(peer.tcp),
      [](uv_handle_t* handle, std::size_t, uv_buf_t* buffer) {
        Peer& reader = *static_cast<Peer*>(handle->data);
        *buffer = uv_buf_init(reader.server->block_.get(), static_cast<unsigned>(reader.server->room_for(reader)));
        if (buffer->len == 0) buffer->base = nullptr;
      },
      [](uv_stream_t* handle, ssize_t size, const uv_buf_t* buffer) {
        Peer& reader = *static_cast<Peer*>(handle->data);
        if (size == UV_ENOBUFS && reader.stage == Peer::Stage::kJoined && reader.run->is_paced_now)
          return reader.server->wait_for_rate(reader);
        if (size == 0 || size == UV_ENOBUFS) return;  // no data, or another connection's turn
        reader.server->on_read(reader, size, buffer->base);
      });
}

// How many bytes to read from the peer now. 0: none in this turn of the loop, which reads at most one block per turn.
std::size_t Relay::Server::room_for(Peer& peer) {
  if (peer.stage != Peer::Stage::kJoined) return kClientHelloBytesMax;
  return runs_.read_bytes_max(*peer.run, peer.round, now());
}

void Relay::Server::wait_for_rate(Peer& peer) {
  uv_read_stop(stream(peer.tcp));
  paced_.push_back(peer.id);
  arm();
}

void Relay::Server::on_read(Peer& peer, ssize_t size, const char* bytes) {
  if (size < 0) return size == UV_EOF && peer.other ? on_end(peer) : close(peer);
  const auto count = static_cast<std::size_t>(size);
  switch (peer.stage) {
    case Peer::Stage::kJoined:
      return pass(peer, bytes, count);
    case Peer::Stage::kControl:
      return on_control(peer, {bytes, count});
    case Peer::Stage::kGreeting:
    case Peer::Stage::kAnswering:
      peer.received.append(bytes, count);
      return peer.stage == Peer::Stage::kGreeting ? on_first_bytes(peer) : on_answer(peer);
    case Peer::Stage::kWaiting:
    case Peer::Stage::kClosing:
      return;
  }
}

void Relay::Server::on_first_bytes(Peer& peer) {
  if (peer.received.front() == kClientFirstByte)
    on_client(peer);
  else
    on_learner(peer);
}

void Relay::Server::on_client(Peer& client) {
  const auto hello = read_client_hello(std::as_bytes(std::span(client.received)));
  if (!hello) return refuse(client, hello.error().detail);
  if (!hello->is_complete) return;
  const auto invited = runs_.invite(hello->server_name, client.id, client.network);
  if (!invited) return refuse(client, invited.error().detail);
  client.run = invited->run;
  client.stage = Peer::Stage::kWaiting;
  uv_read_stop(stream(client.tcp));
  set_deadline(client, now() + runs_.limits().waiting_timeout);
  const std::string body = bytes_as_string(invited->ticket) + client.host;
  Peer& control = *find(*invited->run->control);
  if (invited->to_close) refuse(*find(*invited->to_close), "too many clients wait for this learner");
  send(control, control.frames->seal(ControlFrame::Type::kOpen, body));
  arm();
}

void Relay::Server::on_learner(Peer& learner) {
  const auto greeting = read_greeting(learner.received);
  if (!greeting) return refuse(learner, greeting.error().detail);
  if (greeting->kind == Greeting::Kind::kIncomplete) return;
  learner.received.clear();
  if (greeting->kind == Greeting::Kind::kTicket) return on_ticket(learner, *greeting);
  learner.stage = Peer::Stage::kAnswering;
  learner.learner_nonce = greeting->nonce;
  learner.relay_nonce = random_nonce();
  send(learner, bytes_as_string(learner.relay_nonce));
}

void Relay::Server::on_answer(Peer& learner) {
  if (learner.received.size() < kAnswerBytes) return;
  const auto key = check_answer(learner.received, key_, learner.learner_nonce, learner.relay_nonce);
  if (!key) {
    log::warn("refused the learner at {}: {}", learner.host, key.error().detail);
    return refuse(learner, key.error().detail);
  }
  learner.received.clear();
  learner.frames.emplace(session_key(key_, learner.learner_nonce, learner.relay_nonce, *key),
                         ControlFrames::End::kRelay);
  const std::string name = run_name(trust::fingerprint(*key));
  const auto earlier = runs_.add(name, learner.id, learner.frames->session());
  if (!earlier) {
    log::warn("refused {} of {}: {}", name, learner.host, earlier.error().detail);
    send(learner, learner.frames->seal(ControlFrame::Type::kRefused, earlier.error().detail));
    return refuse(learner, earlier.error().detail);
  }
  learner.stage = Peer::Stage::kControl;
  learner.run = runs_.all().at(name).get();
  set_proven(learner);
  set_deadline(learner, now() + kSilenceMax);
  log::info("the learner of {} is connected from {}", name, learner.host);
  if (*earlier) close(*find(**earlier));
  send(learner, learner.frames->seal(ControlFrame::Type::kAccepted));
}

void Relay::Server::on_control(Peer& learner, std::string_view bytes) {
  learner.frames->feed(bytes);
  for (;;) {
    const auto frame = learner.frames->take();
    if (!frame || (*frame && (*frame)->type != ControlFrame::Type::kPing))
      return refuse(learner, frame ? "expected a ping" : frame.error().detail);
    if (!*frame) return;
    set_deadline(learner, now() + kSilenceMax);
    send(learner, learner.frames->seal(ControlFrame::Type::kPong));
    if (learner.stage == Peer::Stage::kClosing) return;
  }
}

void Relay::Server::on_ticket(Peer& learner, const Greeting& greeting) {
  const auto redeemed = runs_.redeem(greeting.ticket, greeting.proof);
  if (!redeemed) return refuse(learner, redeemed.error().detail);
  Peer& client = *find(redeemed->client);
  learner.run = redeemed->run;
  learner.other = &client;
  client.other = &learner;
  for (Peer* const peer : {&client, &learner}) {
    peer->stage = Peer::Stage::kJoined;
    peer->active_at = now();
    set_proven(*peer);
    set_deadline(*peer, kNever);
  }
  const std::string first_bytes = std::exchange(client.received, {});
  start_reading(learner);
  start_reading(client);
  std::copy(first_bytes.begin(), first_bytes.end(), block_.get());
  pass(client, block_.get(), first_bytes.size());
}

// ---- writing ----

Block Relay::Server::take_block() {
  if (spare_blocks_.empty()) return Block(new char[Runs::kReadBytesMax]);
  Block block = std::move(spare_blocks_.back());
  spare_blocks_.pop_back();
  return block;
}

void Relay::Server::give_back(Block block) {
  if (spare_blocks_.size() < kSpareBlocksMax) spare_blocks_.push_back(std::move(block));
}

// Passes bytes, which lie in block_, to the other end. If its socket does not take all of them, the block waits, and
// nothing more is read from this end until the rest is written. So each direction holds at most one block.
void Relay::Server::pass(Peer& from, const char* bytes, std::size_t size) {
  Peer& to = *from.other;
  bytes_ += size;
  from.active_at = to.active_at = now();
  if (!runs_.on_passed(*from.run, size, now())) return close_run(*from.run, "its bytes (--run-bytes) are used up");
  uv_buf_t buffer = uv_buf_init(const_cast<char*>(bytes), static_cast<unsigned>(size));
  const int result = uv_try_write(stream(to.tcp), &buffer, 1);
  const std::size_t written = result > 0 ? static_cast<std::size_t>(result) : 0;
  if (written == size) return;
  if (result < 0 && result != UV_EAGAIN) return close(from);
  uv_read_stop(stream(from.tcp));
  auto write = std::make_unique<Write>();
  write->from = from.id;
  write->block = std::exchange(block_, take_block());
  write->request.data = write.get();
  buffer = uv_buf_init(const_cast<char*>(bytes) + written, static_cast<unsigned>(size - written));
  const int error = uv_write(&write->request, stream(to.tcp), &buffer, 1, [](uv_write_t* request, int status) {
    const std::unique_ptr<Write> done(static_cast<Write*>(request->data));
    Peer& receiver = *static_cast<Peer*>(request->handle->data);
    Server& server = *receiver.server;
    server.give_back(std::move(done->block));
    if (receiver.stage == Peer::Stage::kClosing) return;
    if (status != 0) return server.close(receiver);
    receiver.active_at = server.now();
    if (Peer* const sender = server.find(done->from); sender && !sender->has_ended) server.start_reading(*sender);
  });
  if (error != 0) return close(from);
  (void)write.release();
}

// The peer sends no more: ends the output to the other end, behind what still waits for it.
void Relay::Server::on_end(Peer& peer) {
  peer.has_ended = true;
  uv_read_stop(stream(peer.tcp));
  auto* const request = new uv_shutdown_t;
  const int error = uv_shutdown(request, stream(peer.other->tcp), [](uv_shutdown_t* done, int status) {
    const std::unique_ptr<uv_shutdown_t> owner(done);
    Peer& ended = *static_cast<Peer*>(done->handle->data);
    if (ended.stage == Peer::Stage::kClosing) return;
    ended.is_shut_down = true;
    if (status != 0 || ended.other->is_shut_down) ended.server->close(ended);
  });
  if (error == 0) return;
  delete request;
  close(peer);
}

// Sends a short message on a connection of a learner. A learner that does not read loses its connection.
void Relay::Server::send(Peer& peer, std::string_view bytes) {
  uv_buf_t buffer = uv_buf_init(const_cast<char*>(bytes.data()), static_cast<unsigned>(bytes.size()));
  if (uv_try_write(stream(peer.tcp), &buffer, 1) != static_cast<int>(bytes.size())) close(peer);
}

// ---- time ----

void Relay::Server::on_timer(TimePoint fired_at) {
  listener_.resume(fired_at);
  while (deadlines_.first() <= fired_at) {
    Peer& peer = *find(deadlines_.all().begin()->second);
    refuse(peer, peer.stage == Peer::Stage::kWaiting   ? "its learner did not answer in time"
                 : peer.stage == Peer::Stage::kControl ? "the learner is silent"
                                                       : "it did not say in time what it is for");
  }
  for (const ConnId id : std::exchange(paced_, {}))
    if (Peer* const peer = find(id); peer && peer->other && !peer->has_ended) start_reading(*peer);
  if (sweep_at_ <= fired_at) {
    sweep_at_ = fired_at + sweep_every();
    std::vector<ConnId> idle;
    for (const auto& [id, peer] : peers_)
      if (peer->stage == Peer::Stage::kJoined && peer->active_at + runs_.limits().idle_timeout <= fired_at)
        idle.push_back(id);
    for (const ConnId id : idle)
      if (Peer* const peer = find(id)) refuse(*peer, "it was idle for too long");
  }
  if (summary_at_ <= fired_at) {
    summary_at_ = fired_at + kSummaryEvery;
    if (refused_ > refused_at_summary_)
      log::info("{} connections refused or ended in the last minute; the last: {}", refused_ - refused_at_summary_,
                last_refusal_);
    refused_at_summary_ = refused_;
  }
  arm();
}

void Relay::Server::arm() {
  if (is_stopping_) return;
  TimePoint at = std::min({deadlines_.first(), listener_.resumes_at(), sweep_at_, summary_at_});
  for (const ConnId id : paced_)
    if (const Peer* const peer = find(id); peer && peer->run) at = std::min(at, Runs::paced_until(*peer->run));
  loop_.arm(at);
}

// ---- the interface ----

Relay::Relay(std::unique_ptr<Server> server) : server_(std::move(server)) {}
Relay::~Relay() = default;

Result<std::unique_ptr<Relay>> Relay::start(RelayOptions options) {
  ECHO_TRY(check_key(options.key));
  const Endpoint bind = options.bind;
  auto server = std::make_unique<Server>(std::move(options));
  ECHO_TRY(server->open(bind));
  return std::unique_ptr<Relay>(new Relay(std::move(server)));
}

Endpoint Relay::endpoint() const { return server_->endpoint(); }
RelayStats Relay::stats() const { return server_->stats(); }
void Relay::stop() { server_->stop(); }

}  // namespace echoline::overlay::relay

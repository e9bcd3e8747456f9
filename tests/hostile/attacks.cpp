#include "tests/hostile/attacks.hpp"

#include <sys/resource.h>
#include <unistd.h>

#include <cmath>
#include <condition_variable>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <thread>

#include "base/clock.hpp"
#include "base/random.hpp"
#include "data_plane/adapters/adapter.hpp"
#include "data_plane/run_spec.hpp"
#include "data_plane/trajectory.hpp"
#include "model/phrasing.hpp"
#include "overlay/uv/node.hpp"
#include "overlay/wire/control.hpp"
#include "overlay/wire/proof.hpp"
#include "tests/hostile/peer.hpp"

namespace echoline::hostile {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;

const SystemClock kClock;

struct Outcome {
  std::uint64_t worker = 0, messages = 0, bytes = 0, chunk_bytes = 0;
  std::string goodbye;
  bool barred = false;                  // it was not let in again
  TimePoint in = kNever, out = kNever;  // when it was in, and when it had to go
};

std::string random_bytes(Random& random, std::size_t size) {
  std::string bytes(size, ' ');
  for (char& c : bytes) c = static_cast<char>(random.below(256));
  return bytes;
}

// ---- arbitrary control messages ----

// A member that sends arbitrary messages on its control connection.
class Raw {
 public:
  explicit Raw(const AttackOptions& options) : options_(options), end_(kClock.now() + options.length) {}

  Status begin(std::size_t token = 0) {
    ECHO_ASSIGN(identity_,
                enrol(options_.learner, options_.tokens.at(token), fmt::format("{}-{}", options_.name, token)));
    outcome.worker = identity_.worker.value;
    ECHO_TRY(join());
    outcome.in = kClock.now();
    return ok();
  }

  Status join() {
    ECHO_ASSIGN(peer_, Peer::connect(options_.learner, identity_.credentials, kLearnerId));
    wire::ControlMessage hello;
    wire::Hello& h = *hello.mutable_hello();
    h.set_protocol(overlay::kProtocol);
    h.set_run_id(identity_.credentials.run_id);
    h.set_name("hostile\x1b[2J\n");
    h.mutable_data()->set_host(data_.host);
    h.mutable_data()->set_port(data_.port);
    peer_->send(hello);
    const auto answer = peer_->receive(std::chrono::seconds(5));
    if (!answer || !answer->has_welcome())
      return fail(Code::kUnavailable, "join", "{}", peer_->goodbye().empty() ? "no welcome" : peer_->goodbye());
    return ok();
  }

  // Sends the messages of `make`, `per_second` of them (0: as many as the connection takes), with the heartbeats of a
  // member, until the learner ends the connection or the time is over. Reconnects after every `reconnect_every`.
  void flood(double per_second, const std::function<void(wire::ControlMessage&)>& make,
             Duration reconnect_every = std::chrono::hours(1)) {
    TimePoint began = kClock.now(), beat = began;
    double due = 0;
    while (peer_->open() && peer_->goodbye().empty() && kClock.now() < end_) {
      const TimePoint now = kClock.now();
      if (now >= beat) {
        wire::ControlMessage heartbeat;
        heartbeat.mutable_heartbeat();
        peer_->send(heartbeat);
        beat = now + milliseconds(200);
      }
      if (now - began >= reconnect_every) {
        peer_.reset();
        if (!join()) return;
        began = now;
        due = 0;
      }
      const double allowed = per_second > 0 ? per_second * seconds(now - began) - due : 200;
      for (double n = 0; n < std::min(allowed, 200.0) && peer_->open(); ++n) {
        wire::ControlMessage message;
        make(message);
        outcome.bytes += message.ByteSizeLong();
        outcome.messages += peer_->send(message) ? 1 : 0;
        ++due;
      }
      peer_->drain(per_second > 0 ? milliseconds(5) : milliseconds(0));
    }
  }

  void end() {
    outcome.out = kClock.now();
    if (peer_) {
      peer_->drain(milliseconds(200));
      outcome.goodbye = peer_->goodbye();
    }
    peer_.reset();
    if (const Status again = join(); !again) {
      outcome.barred = true;
      if (outcome.goodbye.empty()) outcome.goodbye = again.error().detail;
    }
    peer_.reset();
  }

  Outcome outcome;
  Random random{7};
  const AttackOptions& options_;
  const TimePoint end_;
  overlay::Endpoint data_{"127.0.0.1", 9};
  Identity identity_;
  std::unique_ptr<Peer> peer_;
};

// A member with parents, from which it learns the policies' digests. It claims to have installed every version, but
// keeps and forwards nothing.
class Child : public Raw {
 public:
  using Raw::Raw;

  // Handles messages from the learner and the parents, and sends a heartbeat when it is due.
  void live() {
    if (kClock.now() >= beat_) {
      wire::ControlMessage heartbeat;
      heartbeat.mutable_heartbeat();
      peer_->send(heartbeat);
      beat_ = kClock.now() + milliseconds(200);
    }
    while (const auto message = peer_->receive(milliseconds(0))) {
      if (message->has_assign()) assign_ = message->assign();
      wire::BeaconBody beacon;
      if (!message->has_beacon() || !beacon.ParseFromString(message->beacon().body()) || !beacon.has_newest()) continue;
      if (!acknowledged_) acknowledged_ = beacon.newest();  // so that what comes next leads on
      newest_ = beacon.newest();
      epoch_ = beacon.epoch();
    }
    if (kClock.now() >= redial_) {
      redial_ = kClock.now() + milliseconds(200);
      for (const wire::Parent& parent : assign_.parents()) {
        auto& edge = edges_[parent.worker()];
        if (edge && edge->open()) continue;
        if (auto opened = edge_to(parent)) edge = std::move(*opened);
      }
    }
    for (const auto& [parent, edge] : edges_)
      if (edge) hear(*edge);
    const auto digest = digests_.find(newest_);
    if (!acknowledged_ || newest_ <= *acknowledged_ || digest == digests_.end()) return;
    wire::ControlMessage ack;
    ack.mutable_ack()->set_version(newest_);
    ack.mutable_ack()->set_epoch(epoch_);
    ack.mutable_ack()->set_policy_digest(digest->second);
    peer_->send(ack);
    acknowledged_ = newest_;
  }
  bool going_on() const { return peer_->open() && peer_->goodbye().empty() && kClock.now() < end_; }
  void wait_for_parents() {
    while (going_on() && assign_.parents_size() == 0) {
      live();
      std::this_thread::sleep_for(milliseconds(5));
    }
  }
  const wire::Assign& assign() const { return assign_; }
  // The edge to a parent, if it is open.
  Peer* edge(std::uint64_t parent) {
    const auto it = edges_.find(parent);
    return it != edges_.end() && it->second && it->second->open() ? it->second.get() : nullptr;
  }

  // Opens a data connection to a parent that the learner has named.
  Result<std::unique_ptr<Peer>> edge_to(const wire::Parent& parent) { return edge_to(parent, identity_, true); }
  Result<std::unique_ptr<Peer>> edge_to(const wire::Parent& parent, const Identity& as, bool with_grant) {
    const overlay::Endpoint to =
        parent.worker() == kLearnerId.value
            ? options_.learner
            : overlay::Endpoint{parent.endpoint().host(), static_cast<std::uint16_t>(parent.endpoint().port())};
    ECHO_ASSIGN(auto peer, Peer::connect(to, as.credentials, WorkerId{parent.worker()}));
    wire::ControlMessage hello;
    wire::PeerHello& h = *hello.mutable_peer_hello();
    h.set_protocol(overlay::kProtocol);
    h.set_run_id(as.credentials.run_id);
    if (with_grant) *h.mutable_grant() = assign_.grant();
    h.mutable_have()->set_stripes(assign_.stripes());
    h.mutable_have()->set_wanted(parent.stripes());
    if (acknowledged_) h.mutable_have()->set_position(*acknowledged_);
    peer->send(hello);
    return peer;
  }

 private:
  void hear(Peer& edge) {
    while (const auto message = edge.receive(milliseconds(0))) {
      wire::AnnouncementBody announced;
      wire::ManifestBody closed;
      if (message->has_announcement() && announced.ParseFromString(message->announcement().body())) {
        const auto id = overlay::id_of(overlay::SignedAnnouncement{{message->announcement().body(), {}}});
        versions_[std::string(reinterpret_cast<const char*>(id.data()), id.size())] = announced.version();
      }
      if (message->has_manifest() && closed.ParseFromString(message->manifest().body()))
        if (const auto of = versions_.find(closed.publication()); of != versions_.end())
          digests_[of->second] = closed.policy_digest();
    }
  }

  wire::Assign assign_;
  TimePoint beat_{}, redial_{};
  std::map<std::uint64_t, std::unique_ptr<Peer>> edges_;
  std::map<std::string, std::uint64_t> versions_;  // of publications
  std::map<std::uint64_t, std::string> digests_;   // of versions
  std::optional<std::uint64_t> acknowledged_;
  std::uint64_t newest_ = 0, epoch_ = 0;
};

Result<Outcome> bad_goodbye(const AttackOptions& options) {
  Raw raw(options);
  ECHO_TRY(raw.begin());
  for (int i = 0; i < 3; ++i) {
    wire::ControlMessage trouble, goodbye;
    trouble.mutable_trouble()->set_text("\xff\xfe\x1b]0;owned\a\n12:00:00 all is well");
    goodbye.mutable_goodbye()->set_reason("\xff\xfe\xed\xa0\x80\x1b[2J\n{\"worker\":1}");
    raw.outcome.messages += raw.peer_->send(trouble) + raw.peer_->send(goodbye);
    raw.peer_->drain(milliseconds(300));
    raw.peer_.reset();
    if (!raw.join()) break;
  }
  raw.end();
  return raw.outcome;
}

Result<Outcome> bad_heartbeat(const AttackOptions& options) {
  Raw raw(options);
  ECHO_TRY(raw.begin());
  int n = 0;
  raw.flood(20, [&](wire::ControlMessage& m) {
    const std::string said[] = {R"({"rollouts":"x"})", R"({"rollouts":1e999,"busy_s":null})", "\xff\xfe",
                                std::string(60'000, '[')};
    m.mutable_heartbeat()->set_application(said[n++ / 40 % 4]);
  });
  raw.end();
  return raw.outcome;
}

// Accuses all workers of every fault, and reconnects to go on.
Result<Outcome> slander(const AttackOptions& options) {
  Raw raw(options);
  ECHO_TRY(raw.begin());
  int n = 0;
  raw.flood(
      200,
      [&](wire::ControlMessage& m) {
        const std::uint64_t victim = 1 + static_cast<std::uint64_t>(n++) % 12;
        if (n % 2) {
          m.mutable_poisoned()->set_parent(victim);
          m.mutable_poisoned()->set_publication(random_bytes(raw.random, 16));
          m.mutable_poisoned()->set_index(static_cast<std::uint32_t>(n));
        } else {
          m.mutable_edge_failed()->set_parent(victim);
          m.mutable_edge_failed()->set_kind(static_cast<std::uint32_t>(n / 2 % 4));
          m.mutable_edge_failed()->set_reason("silent");
        }
      },
      milliseconds(700));
  raw.end();
  return raw.outcome;
}

Result<Outcome> renew_flood(const AttackOptions& options) {
  Raw raw(options);
  ECHO_TRY(raw.begin());
  raw.flood(0, [&](wire::ControlMessage& m) { m.mutable_renew()->set_public_key(random_bytes(raw.random, 32)); });
  raw.end();
  return raw.outcome;
}

// A child that the learner has assigned to its parents claims to hold publications that do not exist.
Result<Outcome> have_flood(const AttackOptions& options) {
  Child child(options);
  ECHO_TRY(child.begin());
  child.wait_for_parents();
  wire::ControlMessage m;  // a list as long as one may be, of other publications every time
  for (int i = 0; i < 250; ++i) {
    wire::HaveItem& item = *m.mutable_have()->add_items();
    item.set_chunks(4096);
    item.set_bitmap(random_bytes(child.random, 512));
  }
  while (child.going_on()) {
    child.live();
    const std::uint64_t before = child.outcome.messages;
    for (const wire::Parent& parent : child.assign().parents()) {
      Peer* const edge = child.edge(parent.worker());
      if (!edge) continue;
      m.mutable_have()->set_stripes(child.assign().stripes());
      m.mutable_have()->set_wanted(parent.stripes());
      for (wire::HaveItem& item : *m.mutable_have()->mutable_items()) {
        item.set_publication(random_bytes(child.random, 16));
        item.set_version(1'000'000 + child.random.below(1'000'000));
      }
      if (!edge->send(m)) continue;
      ++child.outcome.messages;
      child.outcome.bytes += m.ByteSizeLong();
    }
    // No parent took a message. Do not spin: the victims share these cores.
    if (child.outcome.messages == before) std::this_thread::sleep_for(milliseconds(1));
  }
  child.end();
  return child.outcome;
}

// A child that complains of its parents: their edges fail, they are silent or unreachable, their chunks are bad. It
// stays below every budget, and reconnects now and then.
Result<Outcome> bad_child(const AttackOptions& options) {
  Child child(options);
  ECHO_TRY(child.begin());
  TimePoint joined = kClock.now();
  for (std::uint32_t n = 0; child.going_on(); ++n) {
    child.live();
    for (const wire::Parent& parent : child.assign().parents()) {
      if (parent.worker() == kLearnerId.value) continue;
      wire::ControlMessage m;
      if (n % 4 == 3) {
        m.mutable_poisoned()->set_parent(parent.worker());
        m.mutable_poisoned()->set_publication(random_bytes(child.random, 16));
        m.mutable_poisoned()->set_index(n);
      } else {
        m.mutable_edge_failed()->set_parent(parent.worker());
        m.mutable_edge_failed()->set_kind(n % 4);
        m.mutable_edge_failed()->set_reason("silent");
      }
      child.outcome.messages += child.peer_->send(m) ? 1 : 0;
    }
    std::this_thread::sleep_for(milliseconds(300));
    if (kClock.now() < joined + std::chrono::seconds(2)) continue;
    child.peer_.reset();
    if (!child.join()) break;
    joined = kClock.now();
  }
  child.end();
  return child.outcome;
}

// Announces an arbitrary address for other workers to dial: another machine and port with every connection.
Result<Outcome> dial_anywhere(const AttackOptions& options) {
  Child child(options);
  ECHO_TRY(child.begin());
  while (child.going_on()) {
    child.live();
    std::this_thread::sleep_for(milliseconds(100));
    child.peer_.reset();
    child.data_ = {"192.0.2.1", static_cast<std::uint16_t>(1 + child.random.below(1000))};
    if (!child.join()) break;
    ++child.outcome.messages;
  }
  child.end();
  return child.outcome;
}

// Silent connections, with and without a certificate.
Result<Outcome> idle_connections(const AttackOptions& options) {
  rlimit files{};
  ::getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &files);
  Raw raw(options);
  ECHO_TRY(raw.begin());
  raw.peer_.reset();
  std::vector<int> plain;
  std::vector<std::unique_ptr<Peer>> certified;
  while (kClock.now() < raw.end_) {
    if (plain.size() < 1300) {
      if (const int fd = dial(options.learner); fd >= 0) plain.push_back(fd), ++raw.outcome.messages;
    }
    if (certified.size() < 900 && plain.size() % 2 == 0)
      if (auto peer = Peer::connect(options.learner, raw.identity_.credentials, kLearnerId))
        certified.push_back(std::move(*peer)), ++raw.outcome.messages;
    if (plain.size() >= 1300) std::this_thread::sleep_for(milliseconds(20));
  }
  for (const int fd : plain) ::close(fd);
  certified.clear();
  raw.end();
  return raw.outcome;
}

// A holder of the run's certificate without a place in the topology asks another worker's parents for publications.
Result<Outcome> unassigned_child(const AttackOptions& options) {
  Child child(options);
  ECHO_ASSIGN(const Identity never_joined, enrol(options.learner, options.tokens.at(1), options.name + "-1"));
  ECHO_TRY(child.begin());
  while (child.going_on()) {
    child.live();
    for (const wire::Parent& parent : child.assign().parents()) {
      for (const bool with_grant : {false, true}) {  // the grant is another worker's
        auto edge = child.edge_to(parent, never_joined, with_grant);
        if (!edge) continue;
        ++child.outcome.messages;
        (*edge)->drain(milliseconds(100));
        child.outcome.chunk_bytes += (*edge)->chunk_bytes();
      }
    }
    std::this_thread::sleep_for(milliseconds(20));
  }
  child.end();
  return child.outcome;
}

// Frames with lengths beyond the limits, invalid control messages, and messages without end.
Result<Outcome> oversized(const AttackOptions& options) {
  Raw raw(options);
  ECHO_TRY(raw.begin());
  for (int i = 0; kClock.now() < raw.end_; ++i) {
    if (i % 3 == 0) {
      raw.peer_->send_bytes(std::as_bytes(std::span("\x01\x00\x00\x00\xff\xff\xff\x7f", 8)));
    } else if (i % 3 == 1) {
      const std::string garbage = random_bytes(raw.random, 200'000);
      raw.peer_->send_bytes(overlay::encode_frame(overlay::FrameType::kControl, std::as_bytes(std::span(garbage))));
    } else {
      const std::string part(60'000, 'x');
      while (raw.peer_->open() && raw.outcome.bytes < 200'000'000) {
        raw.outcome.bytes += part.size();
        raw.peer_->send_bytes(overlay::application_header(part.size(), true));
        raw.peer_->send_bytes(std::as_bytes(std::span(part)));
        raw.peer_->drain();
      }
    }
    ++raw.outcome.messages;
    raw.peer_->drain(milliseconds(300));
    raw.outcome.goodbye = raw.peer_->goodbye();
    raw.peer_.reset();
    if (!raw.join()) break;
  }
  raw.end();
  return raw.outcome;
}

// ---- workers that follow the protocol and cheat in their work ----

class Insider {
 public:
  explicit Insider(const AttackOptions& options) : options_(options), end_(kClock.now() + options.length) {}
  ~Insider() {
    if (node_) node_->stop();
  }

  Status begin() {
    overlay::WorkerOptions o;
    o.learner = options_.learner;
    o.name = options_.name + "-0";
    o.token = overlay::trust::Secret(std::string(options_.tokens.at(0)));
    o.away_max = std::chrono::seconds(3);
    overlay::WorkerEvents events;
    events.joined = [this](WorkerId id, const std::string&) {
      tell([&] { outcome.worker = id.value, outcome.in = std::min(outcome.in, kClock.now()); });
    };
    events.publication = [this](const overlay::Publication& p) {
      tell([&] { version_ = p.version, digest_ = p.policy_digest; });
      node()->installed(p.version, p.policy_digest);
    };
    events.message = [this](std::string bytes) { tell([&] { inbox_.push_back(std::move(bytes)); }); };
    events.disconnected = [this](const std::string& reason, bool) {
      tell([&] { outcome.goodbye = reason, outcome.barred = true, gone_ = true, outcome.out = kClock.now(); });
    };
    const std::lock_guard starting(node_mutex_);
    ECHO_ASSIGN(node_, overlay::WorkerNode::start(std::move(o), std::move(events)));
    return ok();
  }

  bool going_on() {
    const std::lock_guard lock(mutex_);
    return !gone_ && kClock.now() < end_;
  }

  void say(const schema::WorkerMessage& message) {
    const std::string bytes = message.SerializeAsString();
    outcome.bytes += bytes.size();
    outcome.messages += node_->send(bytes) ? 1 : 0;
  }
  void ask(std::uint32_t groups) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, milliseconds(500), [&] { return version_.has_value() || gone_; });
    if (!version_ || gone_) return;
    schema::WorkerMessage message;
    message.mutable_request()->set_version(version_->value);
    message.mutable_request()->set_policy_digest(digest_.data(), digest_.size());
    message.mutable_request()->set_groups_max(groups);
    lock.unlock();
    say(message);
  }
  // Leases that came within `wait`.
  std::vector<schema::Lease> leases(Duration wait) {
    std::vector<schema::Lease> found;
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, wait, [&] { return !inbox_.empty() || gone_; });
    while (!inbox_.empty()) {
      const auto message = data_plane::parse_learner_message(inbox_.front());
      inbox_.pop_front();
      if (!message) continue;
      if (message->has_run_spec())
        if (auto spec = data_plane::unpack_run_spec(message->run_spec())) spec_ = std::move(*spec);
      for (const schema::Lease& lease : message->grant().leases()) found.push_back(lease);
    }
    return found;
  }

  // A submission that SubmissionChecker accepts, made without a model.
  Result<schema::Submission> made_up(const schema::Lease& lease) {
    if (!phrasing_) {
      ECHO_ASSIGN(model::Tokenizer tokenizer, model::Tokenizer::from_json(spec_.tokenizer_json()));
      ECHO_ASSIGN(phrasing_, model::Phrasing::from_parts(std::move(tokenizer), {spec_.eos().begin(), spec_.eos().end()},
                                                         spec_.prompt_json()));
      ECHO_ASSIGN(adapter_, data_plane::make_adapter(spec_.adapter_name(), spec_.adapter_config_json(), spec_.seed(),
                                                     data_plane::AdapterUse::kScoring));
    }
    schema::Submission submission;
    submission.set_lease(lease.id());
    ECHO_ASSIGN(const auto prompt, phrasing_->prompt(lease.problem().prompt()));
    const std::vector<model::Token> response{phrasing_->eos().front()};
    const std::string text = phrasing_->answer(response);
    ECHO_ASSIGN(const auto episode, adapter_->begin(lease.problem(), 0));
    ECHO_ASSIGN(const data_plane::Step step, data_plane::step_and_wait(*episode, text));
    const data_plane::Score& score = step.score;
    for (std::uint32_t member = 0; member < lease.rollouts(); ++member) {
      schema::Trajectory& t = *submission.add_trajectories();
      t.set_id(fmt::format("{}/{}", lease.id(), member));
      t.set_problem_id(lease.problem().id());
      t.set_group(lease.group());
      t.set_member(member);
      for (const model::Token token : prompt) t.add_prompt_tokens(static_cast<std::uint32_t>(token));
      t.add_response_tokens(static_cast<std::uint32_t>(response.front()));
      t.add_logprobs(-0.5f);
      t.add_spans()->set_end(1);
      t.mutable_spans(0)->set_version(lease.version());
      t.set_reward(score.reward);
      t.set_correct(score.correct);
      for (const auto& [name, value] : score.components) (*t.mutable_components())[name] = value;
      t.set_text(text);
      t.set_finished(true);
      t.set_policy_digest(lease.policy_digest());
      t.set_lease(lease.id());
      t.set_worker(outcome.worker);
    }
    return submission;
  }

  void set_heartbeat(std::string bytes) { node_->set_heartbeat_payload(std::move(bytes)); }

  Outcome outcome;

 private:
  overlay::WorkerNode* node() {
    const std::lock_guard starting(node_mutex_);
    return node_.get();
  }
  void tell(const std::function<void()>& change) {
    const std::lock_guard lock(mutex_);
    change();
    changed_.notify_all();
  }

  const AttackOptions& options_;
  const TimePoint end_;
  std::mutex mutex_, node_mutex_;
  std::condition_variable changed_;
  std::deque<std::string> inbox_;
  std::optional<Version> version_;
  overlay::Digest digest_{};
  bool gone_ = false;
  schema::RunSpec spec_;
  std::optional<model::Phrasing> phrasing_;
  std::unique_ptr<data_plane::Adapter> adapter_;
  std::unique_ptr<overlay::WorkerNode> node_;
};

// The baseline: a member that holds a place, forwards, and acknowledges each version at once. It computes nothing.
Result<Outcome> no_attack(const AttackOptions& options) {
  Insider insider(options);
  ECHO_TRY(insider.begin());
  while (insider.going_on()) std::this_thread::sleep_for(milliseconds(20));
  return insider.outcome;
}

// Asks for as many leases as possible, reports progress, and returns nothing.
Result<Outcome> hoard(const AttackOptions& options) {
  Insider insider(options);
  ECHO_TRY(insider.begin());
  schema::WorkerMessage progress;
  while (insider.going_on()) {
    insider.ask(1'000'000);
    for (const schema::Lease& lease : insider.leases(milliseconds(100)))
      if (progress.progress().leases_size() < 1000) progress.mutable_progress()->add_leases(lease.id());
    progress.mutable_progress()->set_progress(progress.progress().progress() + 1);
    insider.say(progress);
    std::this_thread::sleep_for(milliseconds(300));
  }
  return insider.outcome;
}

// Submits sound trajectories changed by `spoil`.
Result<Outcome> submit(const AttackOptions& options, const std::function<void(schema::Trajectory&)>& spoil) {
  Insider insider(options);
  ECHO_TRY(insider.begin());
  while (insider.going_on()) {
    insider.ask(4);
    for (const schema::Lease& lease : insider.leases(milliseconds(200))) {
      ECHO_ASSIGN(schema::Submission submission, insider.made_up(lease));
      for (schema::Trajectory& t : *submission.mutable_trajectories()) spoil(t);
      schema::WorkerMessage message;
      *message.mutable_submission() = std::move(submission);
      insider.say(message);
    }
  }
  return insider.outcome;
}

Result<Outcome> nan(const AttackOptions& options) {
  return submit(options, [](schema::Trajectory& t) { t.set_logprobs(0, std::numeric_limits<float>::quiet_NaN()); });
}

Result<Outcome> wrong_rewards(const AttackOptions& options) {
  return submit(options, [](schema::Trajectory& t) { t.set_reward(1), t.set_correct(true); });
}

// Submits sound but worthless trajectories fast, and claims to be a thousand times faster.
Result<Outcome> braggart(const AttackOptions& options) {
  Insider insider(options);
  ECHO_TRY(insider.begin());
  schema::Vitals vitals;
  while (insider.going_on()) {
    vitals.set_rollouts(vitals.rollouts() + 1'000'000'000'000);
    vitals.set_busy_s(vitals.busy_s() + 1e-9);
    insider.set_heartbeat(vitals.SerializeAsString());
    insider.ask(1'000'000);
    for (const schema::Lease& lease : insider.leases(milliseconds(200))) {
      schema::WorkerMessage message;
      ECHO_ASSIGN(*message.mutable_submission(), insider.made_up(lease));
      insider.say(message);
    }
    std::this_thread::sleep_for(milliseconds(40));
  }
  return insider.outcome;
}

Result<Outcome> talk(const AttackOptions& options) {
  Insider insider(options);
  ECHO_TRY(insider.begin());
  while (insider.going_on()) {
    for (int i = 0; i < 50; ++i) insider.ask(1);
    std::this_thread::sleep_for(milliseconds(5));
  }
  return insider.outcome;
}

using Attack = Result<Outcome> (*)(const AttackOptions&);
constexpr std::pair<std::string_view, Attack> kAttacks[] = {{kNoAttack, no_attack},
                                                            {"bad-goodbye", bad_goodbye},
                                                            {"bad-heartbeat", bad_heartbeat},
                                                            {"hoard", hoard},
                                                            {"slander", slander},
                                                            {"renew-flood", renew_flood},
                                                            {"have-flood", have_flood},
                                                            {"talk", talk},
                                                            {"idle-connections", idle_connections},
                                                            {"unassigned-child", unassigned_child},
                                                            {"bad-child", bad_child},
                                                            {"dial-anywhere", dial_anywhere},
                                                            {"wrong-rewards", wrong_rewards},
                                                            {"braggart", braggart},
                                                            {"oversized", oversized},
                                                            {"nan", nan}};

}  // namespace

std::vector<std::string> attack_names() {
  std::vector<std::string> names;
  for (const auto& [name, run] : kAttacks)
    if (name != kNoAttack) names.emplace_back(name);
  return names;
}

Result<json> attack(const std::string& name, const AttackOptions& options) {
  for (const auto& [known, run] : kAttacks) {
    if (known != name) continue;
    const TimePoint began = kClock.now();
    ECHO_ASSIGN(const Outcome outcome, run(options));
    return json{
        {"attack", name},
        {"worker", outcome.worker},
        {"messages", outcome.messages},
        {"bytes", outcome.bytes},
        {"chunk_bytes", outcome.chunk_bytes},
        {"goodbye", outcome.goodbye},
        {"barred", outcome.barred},
        {"seconds", seconds(outcome.barred && outcome.in != kNever && outcome.out != kNever ? outcome.out - outcome.in
                                                                                            : kClock.now() - began)}};
  }
  return fail(Code::kInvalid, "attack", "'{}' is none of {}", name, fmt::join(attack_names(), ", "));
}

}  // namespace echoline::hostile

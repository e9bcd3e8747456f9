// Joins core, driver and disk into the nodes that applications use (learner/, worker/).
#include "overlay/uv/node.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cstring>
#include <future>
#include <mutex>

#include "base/file_memory.hpp"
#include "base/files.hpp"
#include "base/log.hpp"
#include "base/overloaded.hpp"
#include "overlay/learner/learner_core.hpp"
#include "overlay/member/enrol_core.hpp"
#include "overlay/member/member_core.hpp"
#include "overlay/relay/protocol.hpp"
#include "overlay/sizes.hpp"
#include "overlay/uv/driver.hpp"
#include "overlay/uv/file_limit.hpp"
#include "overlay/uv/hosts.hpp"
#include "overlay/wire/chunk_memory.hpp"

namespace echoline::overlay {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kKeyFileBytesMax = 64;

template <class Event, class... Args>
void call_if_set(const Event& event, Args&&... args) {
  if (event) event(std::forward<Args>(args)...);
}

Slice slice_of(std::shared_ptr<const std::string> bytes) {
  const auto* data = reinterpret_cast<const std::byte*>(bytes->data());
  const std::size_t size = bytes->size();
  return Slice({std::move(bytes), data}, size);
}

// Memory for the chunks of one publication, with the bytes of each directly behind those of the one before. Those of a
// large policy are in a file: together, the stored publications may be larger than the machine's memory.
class PublicationMemory {
 public:
  explicit PublicationMemory(std::shared_ptr<FileMemory> file) : file_(std::move(file)) {}
  ~PublicationMemory() { file_->close(); }
  PublicationMemory(const PublicationMemory&) = delete;
  PublicationMemory& operator=(const PublicationMemory&) = delete;

  // Ordinary memory once the file cannot grow.
  std::shared_ptr<std::byte> allocate(std::size_t bytes) {
    const auto next = has_failed_ ? Result<std::span<std::byte>>(std::span<std::byte>()) : file_->extend(bytes);
    if (!next) log::warn("a publication goes on in memory: {}", next.error().message());
    has_failed_ = has_failed_ || !next;
    return has_failed_ ? chunk_memory(bytes) : std::shared_ptr<std::byte>(file_, next->data());
  }

 private:
  const std::shared_ptr<FileMemory> file_;
  bool has_failed_ = false;
};

Sealer::AllocateChunk chunk_allocator(const LearnerOptions& options) {
  if (options.folder.empty() || options.policy_bytes.count < kFileMemoryMin) return chunk_memory;
  // A later policy may have more tensors than the first.
  auto file = FileMemory::make(options.folder, 2 * publication_bytes_max(options.policy_bytes).count);
  if (!file) {
    log::warn("a publication is held in memory: {}", file.error().message());
    return chunk_memory;
  }
  return [memory = std::make_shared<PublicationMemory>(*std::move(file))](std::size_t bytes) {
    return memory->allocate(bytes);
  };
}

// Hands a message to the core on the loop thread.
template <class Send>
Status post_message(Driver& driver, std::shared_ptr<const std::string> bytes, Send send) {
  if (bytes->size() > kMessageBytesMax)
    return fail(Code::kExhausted, "send message", "it has {} bytes, at most {} are allowed", bytes->size(),
                kMessageBytesMax);
  const bool is_posted = driver.post(
      [send = std::move(send), message = slice_of(std::move(bytes))](TimePoint now) { send(message, now); });
  if (!is_posted) return fail(Code::kCancelled, "send message", "the node has stopped");
  return ok();
}

Status check(const LinkLimits& limits) {
  for (const auto& [rate, what] : {std::pair(limits.up, "up"), std::pair(limits.down, "down")})
    if (rate && !(rate->bits_per_s > 0))
      return fail(Code::kInvalid, "start node", "the {} limit must be positive, found {} (leave it out for no limit)",
                  what, to_text(*rate));
  return ok();
}

Status check(const LearnerOptions& options) {
  constexpr std::string_view kOperation = "start learner";
  ECHO_TRY(check(LinkLimits{.up = options.network.uplink, .down = {}}));
  if (!(options.chain_rate.bits_per_s > 0))
    return fail(Code::kInvalid, kOperation, "chain_rate must be positive, found {}", to_text(options.chain_rate));
  if (options.network.chunk &&
      (options.network.chunk->count < kChunkBytesMin || options.network.chunk->count > kChunkBytesMax))
    return fail(Code::kInvalid, kOperation, "chunk must be {} to {} bytes, found {}", kChunkBytesMin, kChunkBytesMax,
                options.network.chunk->count);
  const Bytes chunk_min = chunk_bytes_min(options.policy_bytes);
  const Bytes store_min = publication_bytes_max(options.policy_bytes);
  if (options.network.chunk && options.network.chunk->count < chunk_min.count)
    return fail(Code::kInvalid, kOperation, "chunk must be at least {} bytes for a policy of {}, found {}",
                chunk_min.count, echoline::to_text(options.policy_bytes), options.network.chunk->count);
  if (options.network.store && options.policy_bytes.count > 0 && options.network.store->count < store_min.count)
    return fail(Code::kInvalid, kOperation,
                "the store must have room for a snapshot of the policy, which may have {}; found {}",
                echoline::to_text(store_min), echoline::to_text(*options.network.store));
  if (options.away_max < Duration{} || options.away_max > std::chrono::hours(24))
    return fail(Code::kInvalid, kOperation, "away_max must be at most a day, found {}",
                echoline::to_text(options.away_max));
  if (!(options.network.quorum > 0 && options.network.quorum <= 1))
    return fail(Code::kInvalid, kOperation, "quorum must be above 0 and at most 1, found {}", options.network.quorum);
  if (options.uplink_expected && !(options.uplink_expected->bits_per_s > 0))
    return fail(Code::kInvalid, kOperation, "uplink_expected must be positive, found {}",
                to_text(*options.uplink_expected));
  if (options.heartbeat < std::chrono::milliseconds(1) || options.network.heartbeat_timeout < 2 * options.heartbeat)
    return fail(Code::kInvalid, kOperation, "heartbeat_timeout ({}) must be at least twice the heartbeat ({})",
                echoline::to_text(options.network.heartbeat_timeout), echoline::to_text(options.heartbeat));
  return ok();
}

// A worker's key: 32 bytes in a file that only the owner may read, created at the first start.
Result<trust::SigningKey> open_key(const fs::path& folder) {
  if (folder.empty()) return trust::SigningKey::generate();
  const fs::path path = folder / "key";
  if (fs::exists(path)) {
    ECHO_ASSIGN(std::string bytes, read_file(path, kKeyFileBytesMax));
    trust::SigningKey::Seed seed;
    if (bytes.size() != seed.size())
      return fail(Code::kCorrupt, "open key", "{}: expected {} bytes, found {}; remove the file to enrol again",
                  path.string(), seed.size(), bytes.size());
    std::memcpy(seed.data(), bytes.data(), seed.size());
    trust::wipe(bytes);
    trust::SigningKey key(seed);
    std::fill(seed.begin(), seed.end(), std::byte{});
    return key;
  }
  trust::SigningKey key = trust::SigningKey::generate();
  const Descriptor file(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  const trust::SigningKey::Seed seed = key.seed();
  if (file.get() < 0 || ::write(file.get(), seed.data(), seed.size()) != static_cast<ssize_t>(seed.size()) ||
      ::fsync(file.get()) != 0)
    return os_error("write key", path);
  return key;
}

// Runs an EnrolCore until it has an answer.
Result<WorkerState> enrol(const WorkerOptions& options, const trust::SigningKey& key,
                          const WorkerState* earlier_state) {
  std::variant<trust::Hash, std::vector<std::byte>> authority;
  EnrolConfig config{.core = {},
                     .learner = options.learner,
                     .key = key,
                     .token = options.token,
                     .instance = options.name,
                     .timeout = options.join_timeout,
                     .authority = {}};
  if (earlier_state) {
    authority = config.authority = earlier_state->authority;
  } else if (options.token.empty()) {
    return fail(Code::kInvalid, "enrol",
                "a join token is needed: `echoline token --instance {}` on the learner's machine issues one",
                options.name);
  } else {
    ECHO_ASSIGN(const trust::JoinToken token, trust::read_token(options.token));
    authority = token.authority;
  }
  DriverOptions driver_options{.bind = {},
                               .key = key,
                               .authority = std::move(authority),
                               .run_id = "",
                               .admit_anonymous = false,
                               .disk = nullptr,
                               .preferred_port = 0};
  ECHO_ASSIGN(const auto driver, Driver::open(std::move(driver_options)));
  config.core.unix_origin_s = driver->unix_origin_s();
  EnrolCore core(std::move(config));
  std::promise<void> answered;
  driver->run(
      core,
      [&](const Action& action) {
        if (std::holds_alternative<act::ReportEnd>(action)) answered.set_value();
      },
      [&](TimePoint now) { core.start(now); });
  answered.get_future().wait();
  driver->stop([](TimePoint) {});
  return core.result();
}

}  // namespace

// ---- learner ----

struct LearnerNode::Impl {
  LearnerOptions options;
  LearnerEvents events;
  std::shared_ptr<const trust::Authority> authority;
  std::optional<BundleTerms> bundle;
  std::optional<Endpoint> relay;
  std::unique_ptr<LearnerCore> core;
  std::unique_ptr<Driver> driver;

  void on_action(const Action& action) {
    std::visit(
        Overloaded{
            [&](const act::ReportWorkerJoined& event) { call_if_set(events.joined, event.member); },
            [&](const act::ReportWorkerAway& event) { call_if_set(events.away, event.worker, event.reason); },
            [&](const act::ReportWorkerLost& event) { call_if_set(events.lost, event.worker, event.reason); },
            [&](const act::ReportWorkerTrouble& event) { call_if_set(events.trouble, event.worker, event.text); },
            [&](const act::ReportHeartbeat& event) { call_if_set(events.heartbeat, event.heartbeat); },
            [&](const act::ReportInstalled& event) {
              call_if_set(events.installed, event.worker, event.version, event.policy_digest);
            },
            [&](const act::DeliverWorkerMessage& event) { call_if_set(events.message, event.worker, event.bytes); },
            [&](const act::ReportBroadcast& event) { call_if_set(events.broadcast_done, event.report); },
            [&](const act::ReportTopology& event) { call_if_set(events.topology_changed, event.topology); },
            [&](const act::ReportTopologyChoice& event) { call_if_set(events.chose_topology, event.text); },
            [&](const act::ReportSlowHop& event) { call_if_set(events.slow_hop, event.hop); },
            [&](const act::RequestCatchUp& event) { call_if_set(events.need_catch_up, event.current, event.from); },
            [](const auto&) {},
        },
        action);
  }
};

struct PublicationWriter::Impl {
  // The store's reason for refusing a write; set on the loop thread.
  struct Refusal {
    std::mutex mutex;
    std::optional<Error> error;  // guarded by mutex
  };
  LearnerNode::Impl* node;
  Sealer sealer;
  bool finished = false;
  Duration sealing{};  // time that the writer's thread has spent sealing
  std::shared_ptr<Refusal> refusal = std::make_shared<Refusal>();

  Status refused() const {
    const std::lock_guard lock(refusal->mutex);
    return refusal->error ? Status(*refusal->error) : ok();
  }
  Status post(std::vector<SealedChunk> chunks) {
    ECHO_TRY(refused());
    if (chunks.empty()) return ok();
    const bool is_posted = node->driver->post([core = node->core.get(), id = sealer.id(), refusal = refusal,
                                               chunks = std::move(chunks)](TimePoint now) mutable {
      const Status added = core->add(id, std::move(chunks), now);
      const std::lock_guard lock(refusal->mutex);
      if (!added && !refusal->error) refusal->error = added.error();
    });
    if (!is_posted) return fail(Code::kCancelled, "publish", "the node has stopped");
    return ok();
  }
};

PublicationWriter::PublicationWriter(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

PublicationWriter::~PublicationWriter() {
  if (!impl_->finished)
    impl_->node->driver->post(
        [core = impl_->node->core.get(), id = impl_->sealer.id()](TimePoint now) { core->abandon(id, now); });
}

Status PublicationWriter::write(std::span<const std::byte> bytes) {
  const SystemClock clock;
  const TimePoint sealing_began = clock.now();
  ECHO_ASSIGN(auto chunks, impl_->sealer.write(bytes));
  impl_->sealing += clock.now() - sealing_began;
  return impl_->post(std::move(chunks));
}

Status PublicationWriter::finish(const Digest& policy_digest, const std::string& note) {
  if (note.size() > kNoteBytesMax)
    return fail(Code::kInvalid, "publish", "a note of {} bytes, at most {} are allowed", note.size(), kNoteBytesMax);
  auto closing = impl_->sealer.finish(policy_digest, note);
  ECHO_TRY(impl_->post(std::move(closing.first)));
  const SignedManifest& manifest = closing.second;
  Status closed = fail(Code::kCancelled, "publish", "the node has stopped");
  impl_->node->driver->post_and_wait([&](TimePoint now) {
    const auto opened = impl_->node->core->checker().open(manifest);
    closed = impl_->refused();
    if (closed)
      closed = opened ? impl_->node->core->finish(*opened, manifest, now, impl_->sealing) : Status(opened.error());
  });
  impl_->finished = closed.has_value();
  return closed;
}

LearnerNode::LearnerNode(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
LearnerNode::~LearnerNode() { stop(); }

Result<std::unique_ptr<LearnerNode>> LearnerNode::start(LearnerOptions options, LearnerEvents events) {
  ECHO_TRY(check(options));
  auto impl = std::make_unique<Impl>();
  std::unique_ptr<Disk> disk;
  std::optional<LearnerState> state;
  if (options.folder.empty()) {
    ECHO_ASSIGN(auto authority, trust::Authority::create(options.run_id, trust::SigningKey::generate()));
    impl->authority = std::make_shared<trust::Authority>(std::move(authority));
  } else {
    ECHO_ASSIGN(disk, Disk::open(options.folder));
    ECHO_ASSIGN(auto authority, trust::Authority::open_or_create(options.folder, options.run_id));
    impl->authority = std::make_shared<trust::Authority>(std::move(authority));
    auto bytes = disk->read_state();
    if (bytes) {
      ECHO_ASSIGN(state, decode_learner_state(*bytes));
    } else if (bytes.error().code != Code::kNotFound) {
      return bytes.error();
    }
  }
  const bool durable = disk != nullptr;
  DriverOptions driver_options{.bind = Endpoint{options.network.bind, options.network.port},
                               .key = impl->authority->key(),
                               .authority = impl->authority->certificate(),
                               .run_id = options.run_id,
                               .admit_anonymous = true,
                               .disk = std::move(disk),
                               .preferred_port = 0};
  // Workers of an earlier process dial the learner at its previous port.
  if (state) driver_options.preferred_port = state->port;
  driver_options.limits = ConnectionLimits::of(raise_file_limit());
  const ConnectionLimits limits = driver_options.limits;
  if (!options.network.relay.empty()) {
    ECHO_ASSIGN(impl->relay, parse_endpoint("network.relay", options.network.relay));
    ECHO_TRY(relay::check_key(options.relay_key));
    driver_options.relay = relay::LinkOptions{
        .relay = *impl->relay, .key = std::move(options.relay_key), .run_key = impl->authority->key()};
  }
  if (!options.bundle.empty()) {
    ECHO_ASSIGN(driver_options.bundle, open_bundle(options.bundle));
    driver_options.gate.emplace(impl->authority, driver_options.bundle->size, options.network.uplink);
    impl->bundle = terms_of(*driver_options.bundle, *impl->authority);
  }
  ECHO_ASSIGN(impl->driver, Driver::open(std::move(driver_options)));
  impl->options = std::move(options);
  impl->events = std::move(events);
  const LearnerOptions& learner_options = impl->options;
  LearnerConfig config;
  static_cast<LearnerRules&>(config) = learner_options;
  config.core.limits.up = learner_options.network.uplink;
  config.core.connections = limits;
  config.core.wire_overhead = kWireOverhead;
  config.core.unix_origin_s = impl->driver->unix_origin_s();
  config.self = impl->driver->endpoint();
  config.authority = impl->authority;
  config.checker = std::make_shared<SignatureChecker>(learner_options.run_id, impl->authority->public_key());
  config.state = std::move(state);
  config.resumed_at = learner_options.resumed_at;
  config.durable = durable;
  config.store_bytes_max = learner_options.network.store.value_or(learner_store_bytes(learner_options.policy_bytes));
  config.policy_bytes = learner_options.policy_bytes;
  config.catch_ups_on_demand = static_cast<bool>(impl->events.need_catch_up);
  config.welcome = impl->events.welcome;
  config.region_of = impl->events.region_of;
  config.links_of = impl->events.links_of;
  config.check_heartbeat = impl->events.check_heartbeat;
  config.reports_heartbeats = static_cast<bool>(impl->events.heartbeat);
  config.message_bytes_max = std::min<std::uint64_t>(learner_options.message_max.count, kMessageBytesMax);
  // Room for the messages of many workers at a time, which all arrive in parts.
  config.assembling_bytes_max =
      std::clamp<std::size_t>(64 * config.message_bytes_max, kMessageBytesMax, 16 * kMessageBytesMax);
  impl->core = std::make_unique<LearnerCore>(std::move(config));
  Impl* self = impl.get();
  impl->driver->run(
      *impl->core, [self](const Action& action) { self->on_action(action); },
      [self](TimePoint now) { self->core->start(now); });
  return std::unique_ptr<LearnerNode>(new LearnerNode(std::move(impl)));
}

Endpoint LearnerNode::endpoint() const { return impl_->driver->endpoint(); }

std::vector<Endpoint> LearnerNode::remote_endpoints() const {
  if (!impl_->relay) return remote_endpoints_of(endpoint());
  std::vector<Endpoint> all{*impl_->relay};
  if (is_loopback(endpoint().host)) return all;
  const std::vector<Endpoint> own = remote_endpoints_of(endpoint());
  all.insert(all.end(), own.begin(), own.end());
  return all;
}

std::string LearnerNode::relay_name() const { return relay::run_name(impl_->authority->fingerprint()); }

Result<trust::Secret> LearnerNode::issue_token(std::string_view instance, Duration lifetime) const {
  return trust::issue_token(*impl_->authority, instance, trust::random_nonce(), SystemClock().unix_seconds(), lifetime);
}

const std::optional<BundleTerms>& LearnerNode::bundle() const { return impl_->bundle; }

Result<std::unique_ptr<PublicationWriter>> LearnerNode::begin(const PublicationHead& head) {
  Announcement announcement;
  announcement.run_id = impl_->options.run_id;
  announcement.epoch = impl_->core->epoch();
  announcement.key = {head.version, head.base};
  announcement.base_digest = head.base ? head.base_digest : Digest{};
  announcement.expires_unix_ms =
      static_cast<std::uint64_t>((SystemClock().unix_seconds() + seconds(impl_->options.publication_lifetime)) * 1e3);
  if (head.base && *head.base >= head.version)
    return fail(Code::kInvalid, "publish", "{}: the base must be older", to_text(announcement.key));
  Sealer::AllocateChunk allocate_chunk = chunk_allocator(impl_->options);
  std::unique_ptr<PublicationWriter::Impl> writer;
  Status begin_status = fail(Code::kCancelled, "publish", "the node has stopped");
  impl_->driver->post_and_wait([&](TimePoint now) {
    announcement.issued = impl_->core->issue_time(now);
    const std::optional<Bytes>& chunk = impl_->options.network.chunk;
    announcement.chunk_bytes =
        static_cast<std::uint32_t>((chunk ? *chunk : impl_->core->chunk_size_for(announcement.key, now)).count);
    writer = std::make_unique<PublicationWriter::Impl>(
        PublicationWriter::Impl{impl_.get(), Sealer(announcement, impl_->authority->key(), std::move(allocate_chunk))});
    begin_status = impl_->core->begin(announcement, writer->sealer.signed_announcement(), head.catch_up, now);
  });
  if (!begin_status) return begin_status.error();
  return std::unique_ptr<PublicationWriter>(new PublicationWriter(std::move(writer)));
}

Status LearnerNode::publish(const PublicationHead& head, std::span<const std::byte> payload,
                            const Digest& policy_digest) {
  ECHO_ASSIGN(const auto writer, begin(head));
  ECHO_TRY(writer->write(payload));
  return writer->finish(policy_digest);
}

Result<StoredDeltas> LearnerNode::deltas_from(Version from) const {
  Result<StoredDeltas> deltas = fail(Code::kCancelled, "find deltas", "the node has stopped");
  impl_->driver->post_and_wait([&](TimePoint) { deltas = impl_->core->deltas_from(from); });
  return deltas;
}

Status LearnerNode::send(WorkerId worker, std::string bytes) {
  return send(worker, std::make_shared<const std::string>(std::move(bytes)));
}
Status LearnerNode::send(WorkerId worker, std::shared_ptr<const std::string> bytes) {
  return post_message(*impl_->driver, std::move(bytes),
                      [core = impl_->core.get(), worker](const Slice& message, TimePoint now) {
                        core->send_message(worker, message, now);
                      });
}
void LearnerNode::expel(WorkerId worker, std::string reason) {
  impl_->driver->post([core = impl_->core.get(), worker, reason = std::move(reason)](TimePoint now) {
    core->expel(worker, reason, now);
  });
}
void LearnerNode::give_up(WorkerId worker, std::string reason) {
  impl_->driver->post([core = impl_->core.get(), worker, reason = std::move(reason)](TimePoint now) {
    core->give_up(worker, reason, now);
  });
}
LearnerStats LearnerNode::stats() const {
  LearnerStats stats;
  // After the end of the loop, no other thread uses the core.
  if (!impl_->driver->post_and_wait([&](TimePoint) { stats = impl_->core->stats(); })) stats = impl_->core->stats();
  return stats;
}
void LearnerNode::stop() {
  impl_->driver->stop([core = impl_->core.get()](TimePoint now) { core->leave(now); });
}

// ---- worker ----

struct WorkerNode::Impl {
  WorkerEvents events;
  std::unique_ptr<MemberCore> core;
  std::unique_ptr<Driver> driver;

  void on_action(const Action& action) {
    std::visit(Overloaded{
                   [&](const act::ReportWelcome& event) { call_if_set(events.joined, event.self, event.welcome); },
                   [&](const act::DeliverPublication& event) { call_if_set(events.publication, event.publication); },
                   [&](const act::DeliverPart& event) { call_if_set(events.part, event.part); },
                   [&](const act::DeliverLearnerMessage& event) { call_if_set(events.message, event.bytes); },
                   [&](const act::ReportLearnerAway& event) { call_if_set(events.away, event.reason); },
                   [&](const act::ReportEnd& event) { call_if_set(events.disconnected, event.reason, event.in_order); },
                   [](const auto&) {},
               },
               action);
  }
};

WorkerNode::WorkerNode(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
WorkerNode::~WorkerNode() { stop(); }

Result<std::unique_ptr<WorkerNode>> WorkerNode::start(WorkerOptions options, WorkerEvents events) {
  ECHO_TRY(check(options.limits));
  auto impl = std::make_unique<Impl>();
  std::unique_ptr<Disk> disk;
  std::optional<WorkerState> state;
  if (!options.folder.empty()) {
    ECHO_ASSIGN(disk, Disk::open(options.folder));
    auto bytes = disk->read_state();
    if (bytes) {
      ECHO_ASSIGN(state, decode_worker_state(*bytes));
    } else if (bytes.error().code != Code::kNotFound) {
      return bytes.error();
    }
  }
  ECHO_ASSIGN(const trust::SigningKey key, open_key(options.folder));
  std::optional<trust::AuthorityInfo> authority;
  // The folder may hold the identity of another run: the token names the run to join now.
  if (const auto token = trust::read_token(options.token); state && token) {
    ECHO_ASSIGN(const trust::AuthorityInfo earlier_authority, trust::read_authority(state->authority));
    if (trust::fingerprint(earlier_authority.key) != token->authority) state.reset();
  }
  if (state) {
    ECHO_ASSIGN(authority, trust::read_authority(state->authority));
    const double learner_unix_s = SystemClock().unix_seconds() + static_cast<double>(state->clock_offset_ms) / 1e3;
    const auto identity = trust::check_certificate(state->certificate, authority->key, state->run_id, std::nullopt);
    const bool is_own_certificate = identity && identity->key == key.public_key();
    const bool is_expired = is_own_certificate && identity->expires_unix_s <= learner_unix_s;
    // Enrols again. If the certificate is this key's own, the worker is known to its authority, and needs no token.
    if (!is_own_certificate || is_expired) {
      ECHO_ASSIGN(WorkerState enrolled, enrol(options, key, is_own_certificate ? &*state : nullptr));
      if (enrolled.authority == state->authority) {
        enrolled.floor = state->floor;
        enrolled.beacon_sequence = state->beacon_sequence;
      }
      state = std::move(enrolled);
    }
  } else {
    ECHO_ASSIGN(state, enrol(options, key, /*earlier_state=*/nullptr));
  }
  ECHO_ASSIGN(authority, trust::read_authority(state->authority));
  Disk* const disk_view = disk.get();  // the driver owns the disk from here on
  DriverOptions driver_options{.bind = Endpoint{options.bind_host, options.port},
                               .key = key,
                               .authority = state->authority,
                               .run_id = state->run_id,
                               .admit_anonymous = false,
                               .disk = std::move(disk),
                               .preferred_port = 0};
  driver_options.limits = ConnectionLimits::of(raise_file_limit());
  const ConnectionLimits limits = driver_options.limits;
  ECHO_ASSIGN(impl->driver, Driver::open(std::move(driver_options)));
  impl->events = std::move(events);
  MemberConfig config{.core = {},
                      .learner = options.learner,
                      .data = options.advertise.value_or(impl->driver->endpoint()),
                      .name = options.name,
                      .key = key,
                      .state = *state,
                      .checker = std::make_shared<SignatureChecker>(state->run_id, authority->key),
                      .store = {},
                      .durable = disk_view != nullptr,
                      .join_timeout = options.join_timeout,
                      .away_max = options.away_max,
                      .parts_unread_max = {},
                      .place = options.place};
  config.core.limits = options.limits;
  config.core.connections = limits;
  config.core.wire_overhead = kWireOverhead;
  config.core.unix_origin_s = impl->driver->unix_origin_s();
  constexpr Bytes kPolicyUnknown{0};  // the welcome states the policy's size, and sets these limits again
  config.store.memory_max = options.memory_max.value_or(worker_memory_bytes(kPolicyUnknown, /*has_disk=*/true));
  config.store.disk_max = options.disk_max.value_or(worker_disk_bytes(kPolicyUnknown));
  config.store.disk = disk_view != nullptr;
  config.store.memory_is_fixed = options.memory_max.has_value();
  config.store.disk_is_fixed = options.disk_max.has_value();
  if (impl->events.part) config.parts_unread_max = kPartsUnreadMax;
  impl->core = std::make_unique<MemberCore>(std::move(config));
  if (disk_view) {
    const TimePoint now = SystemClock().now();
    disk_view->recover([&](Frame frame) { return impl->core->recover(std::move(frame), now); });
  }
  Impl* self = impl.get();
  impl->driver->run(
      *impl->core, [self](const Action& action) { self->on_action(action); },
      [self](TimePoint now) { self->core->start(now); });
  return std::unique_ptr<WorkerNode>(new WorkerNode(std::move(impl)));
}

Endpoint WorkerNode::endpoint() const { return impl_->driver->endpoint(); }
void WorkerNode::installed(Version version, const Digest& policy_digest) {
  impl_->driver->post([core = impl_->core.get(), version, policy_digest](TimePoint now) {
    core->installed(version, policy_digest, now);
  });
}
void WorkerNode::install_failed(Version version, std::string why) {
  impl_->driver->post([core = impl_->core.get(), version, why = std::move(why)](TimePoint now) {
    core->install_failed(version, why, now);
  });
}
Status WorkerNode::send(std::string bytes) {
  return post_message(
      *impl_->driver, std::make_shared<const std::string>(std::move(bytes)),
      [core = impl_->core.get()](const Slice& message, TimePoint now) { core->send_message(message, now); });
}
void WorkerNode::on_parts_consumed(std::uint64_t bytes) {
  impl_->driver->post([core = impl_->core.get(), bytes](TimePoint) { core->on_parts_consumed(bytes); });
}
void WorkerNode::set_heartbeat_payload(std::string application_bytes) {
  if (application_bytes.size() > kHeartbeatApplicationBytesMax)
    return log::error("a heartbeat of {} bytes is not sent: the limit is {}", application_bytes.size(),
                      kHeartbeatApplicationBytesMax);
  impl_->driver->post([core = impl_->core.get(), bytes = std::move(application_bytes)](TimePoint) {
    core->set_heartbeat_payload(bytes);
  });
}
void WorkerNode::drain() {
  impl_->driver->post([core = impl_->core.get()](TimePoint now) { core->drain(now); });
}
WorkerStats WorkerNode::stats() const {
  WorkerStats stats;
  // After the end of the loop, no other thread uses the core.
  if (!impl_->driver->post_and_wait([&](TimePoint) { stats = impl_->core->stats(); })) stats = impl_->core->stats();
  return stats;
}
void WorkerNode::stop() {
  impl_->driver->stop([core = impl_->core.get()](TimePoint now) { core->leave("it was stopped", now); });
}

}  // namespace echoline::overlay

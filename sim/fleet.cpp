// The learner of a simulated fleet: its process, policies and publications. fleet_workers.cpp has the workers.
#include "sim/fleet.hpp"

#include <algorithm>
#include <cstring>

#include "sim/fleet_parts.hpp"

namespace echoline::sim {

using namespace overlay;

namespace {

constexpr std::uint64_t kFleetRandomStream = 3;  // differs from the streams of the world's other generators
constexpr Duration kCatchUpRetry = std::chrono::milliseconds(500);  // until a refused catch-up is tried again

}  // namespace

// A publication in progress, encoded piece by piece.
struct Fleet::PendingPublication {
  PublishSpec spec;
  std::optional<Sealer> sealer;
  Digest digest{};
  std::uint64_t learner_start = 0;  // the learner process that began it
  std::size_t pieces_done = 0;
  bool catch_up = false;  // brings workers that are behind to an existing version
};

Fleet::Fleet(World& world, const FleetOptions& options)
    : world_(world),
      options_(options),
      random_(options.seed, kFleetRandomStream),
      identities_(kRunId, new_key(), published_content_),
      faults_(std::make_unique<FaultSites>(options.seed)) {
  accomplice_state_->checker = identities_.checker();
  world_.set_authority({kRunId, authority().public_key()});
  const LearnerOptions& learner = options_.learner;
  learner_machine_.host = world_.add_host(learner.link, learner.clock_skew, learner.regions.learner_region);
  learner_machine_.unix_origin_s = world_.unix_origin_s(learner_machine_.host);
}

Fleet::~Fleet() = default;

trust::SigningKey Fleet::new_key() {
  trust::SigningKey::Seed seed;
  for (std::byte& byte : seed) byte = static_cast<std::byte>(random_.next());
  return trust::SigningKey(seed);
}

// Stands for the digest of a policy. Workers only compare digests, so any unique value will do.
Digest Fleet::new_digest(Version version) {
  Digest digest;
  const std::uint64_t words[2] = {version.value, random_.next()};
  std::memcpy(digest.data(), words, sizeof words);
  return digest;
}

std::vector<std::byte> Fleet::random_bytes(std::uint64_t count) {
  std::vector<std::byte> bytes(count + 8);  // the last word may reach beyond `count`
  for (std::size_t i = 0; i < count; i += 8) {
    const std::uint64_t random_bits = random_.next();
    std::memcpy(bytes.data() + i, &random_bits, 8);
  }
  bytes.resize(count);
  return bytes;
}

double Fleet::learner_unix_s() const {
  return learner_machine_.unix_origin_s + seconds(world_.now().time_since_epoch());
}

CoreOptions Fleet::core_options(HostId host, const LinkLimits& limits, std::size_t open_files_max) {
  CoreOptions options;
  options.limits = limits;
  options.connections = ConnectionLimits::of(open_files_max);
  options.unix_origin_s = world_.unix_origin_s(host);
  if (options_.fault_points) options.faults = faults_.get();
  return options;
}

void Fleet::stop_random_faults() { faults_->stopped = true; }

void Fleet::check() const {
  workers_.check();
  policies_.check();
  identities_.check();
}

// ---- learner process ----

LearnerCore* Fleet::learner() { return core_on<LearnerCore>(world_, learner_machine_.host); }

void Fleet::start_learner(std::uint64_t versions_lost) {
  if (world_.is_alive(learner_machine_.host) || !learner_machine_.should_run || starts_are_blocked_) return;
  const LearnerOptions& options = options_.learner;
  learner_machine_.unix_origin_s = world_.unix_origin_s(learner_machine_.host);
  LearnerConfig config;
  static_cast<overlay::LearnerRules&>(config) = options;  // the options that real learners have too
  config.core = core_options(learner_machine_.host, options.limits);
  config.self = world_.endpoint_of(learner_machine_.host);
  config.authority = identities_.authority();
  config.checker = identities_.checker();
  config.durable = options.durable;
  // In the simulation, a member's place is the number of its region.
  if (options.regions.several())
    config.region_of = [](const MemberInfo& info) { return static_cast<std::uint32_t>(std::stoul(info.place)); };
  config.links_of = options_.links_of;
  config.store_bytes_max = options.store;
  config.folded_deltas_max = options.folded_deltas_max;
  if (const auto& bytes = world_.disk(learner_machine_.host).state()) {
    auto state = decode_learner_state(*bytes);
    if (state)
      config.state = std::move(*state);
    else
      application_error_ = "the learner's state file cannot be read: " + state.error().message();
  }
  if (!config.state) {
    // Ids below RunIdentities::kFirstEnrolled are for workers that do not enrol and for the intruder (RunIdentities).
    config.state.emplace();
    config.state->run_id = kRunId;
    config.state->next_worker = config.state->next_serial = RunIdentities::kFirstEnrolled;
  }
  // A durable learner resumes with the complete versions in its state, without the newest `versions_lost` of them: it
  // lost their files and publishes them again. One version always stays.
  if (options.durable) {
    policies_.restore(config.state->published, versions_lost);
    config.resumed_at = policies_.newest();
  }
  ++learner_machine_.starts;
  policies_.start_process();
  world_.start(learner_machine_.host,
               std::make_unique<FleetProcess<LearnerCore>>(
                   std::move(config), [this](LearnerCore&, Action&& action) { on_learner_action(std::move(action)); }));
  world_.call(learner_machine_.host, [&](TimePoint now) { learner()->start(now); });
}

void Fleet::on_learner_action(Action&& action) {
  if (auto* done = std::get_if<act::ReportBroadcast>(&action)) {
    learner_machine_.reports.push_back(std::move(done->report));
  } else if (const auto* acked = std::get_if<act::ReportInstalled>(&action)) {
    const Digest* digest = policies_.find(acked->version);
    const auto worker = worker_with_id(acked->worker);
    if (worker && !workers_[*worker].options.malice.any() && (!digest || *digest != acked->policy_digest))
      application_error_ =
          fmt::format("worker {} acknowledged version {} with a wrong digest", acked->worker, acked->version);
  } else if (const auto* need = std::get_if<act::RequestCatchUp>(&action)) {
    ++(need->from ? learner_machine_.deltas_requested : learner_machine_.snapshots_requested);
    world_.run_at(world_.now() + options_.learner.snapshot_encode_time,
                  [this, need = *need, start = learner_machine_.starts] { provide_catch_up(need, start); });
  } else if (const auto* message = std::get_if<act::DeliverWorkerMessage>(&action)) {
    on_message(message->worker, message->bytes);
  } else if (const auto* changed = std::get_if<act::ReportTopology>(&action)) {
    if (observer_) observer_->on_topology(changed->topology);
  } else if (const auto* joined = std::get_if<act::ReportWorkerJoined>(&action)) {
    if (observer_) observer_->on_joined(joined->member.id);
  } else if (const auto* away = std::get_if<act::ReportWorkerAway>(&action)) {
    if (observer_) observer_->on_away(away->worker, away->reason);
  } else if (const auto* lost = std::get_if<act::ReportWorkerLost>(&action)) {
    const auto worker = worker_with_id(lost->worker);
    workers_.mark_lost(lost->worker);
    if (worker && is_expelled_for_messages(lost->reason)) workers_[*worker].expelled = true;
    if (observer_) observer_->on_lost(lost->worker, lost->reason);
  }
}

// The texts are reasons that overlay/learner gives.
bool Fleet::is_expelled_for_messages(const std::string& reason) {
  return reason.find("it says too much") != std::string::npos || reason.find("it accuses") != std::string::npos ||
         reason.find("never happens by chance") != std::string::npos;
}

void Fleet::expel(std::size_t i) {
  const WorkerId id = workers_[i].id();
  if (!learner() || id == kLearnerId) return;
  workers_[i].expelled = true;
  world_.call(learner_machine_.host, [&](TimePoint now) { learner()->expel(id, "expelled by the script", now); });
}

void Fleet::end_run() {
  learner_machine_.should_run = false;
  for (FleetWorker& worker : workers_) worker.should_run = false;
  if (learner()) world_.call(learner_machine_.host, [&](TimePoint now) { learner()->leave(now); });
  world_.stop(learner_machine_.host);
}

// The base in `key` must be published.
Announcement Fleet::announcement_of(const PublicationKey& key) {
  Announcement announcement;
  announcement.run_id = kRunId;
  announcement.epoch = learner()->epoch();
  announcement.key = key;
  if (key.base) announcement.base_digest = *policies_.find(*key.base);
  announcement.chunk_bytes = options_.learner.chunk_bytes;
  world_.call(learner_machine_.host, [&](TimePoint now) { announcement.issued = learner()->issue_time(now); });
  announcement.expires_unix_ms = static_cast<std::uint64_t>(learner_unix_s() * 1e3) +
                                 static_cast<std::uint64_t>(seconds(options_.learner.publication_lifetime) * 1e3);
  return announcement;
}

void Fleet::publish(const PublishSpec& spec) {
  if (!learner() || policies_.is_publishing()) return;
  auto pending = std::make_shared<PendingPublication>();
  pending->spec = spec;
  pending->learner_start = learner_machine_.starts;
  const auto newest = policies_.newest();
  const Announcement announcement =
      announcement_of({.version = Version{newest ? newest->value + 1 : 0},
                       .base = spec.base && policies_.find(*spec.base) ? spec.base : std::nullopt});
  pending->digest = new_digest(announcement.key.version);
  pending->sealer.emplace(announcement, authority().key());
  published_content_.begin(pending->sealer->id(), announcement);
  policies_.begin();
  world_.note(fmt::format("the learner publishes {}, {} bytes", to_text(announcement.key), spec.bytes));
  world_.call(learner_machine_.host, [&](TimePoint now) {
    const Status begun =
        learner()->begin(announcement, pending->sealer->signed_announcement(), /*catch_up=*/false, now);
    if (!begun) {  // a defect: the error ends the simulation
      application_error_ = begun.error().message();
      policies_.abandon();
    }
  });
  encode(pending);
}

// Adds the next piece of the publication, and closes the publication after the last piece.
void Fleet::encode(const std::shared_ptr<PendingPublication>& pending) {
  PendingPublication& publication = *pending;
  if (!learner() || learner_machine_.starts != publication.learner_start) return;
  if (publication.spec.abandon_after_pieces == publication.pieces_done) {
    policies_.abandon();
    return world_.call(learner_machine_.host,
                       [&](TimePoint now) { learner()->abandon(publication.sealer->id(), now); });
  }
  const std::uint64_t begin_byte = publication.spec.bytes * publication.pieces_done / publication.spec.pieces;
  const std::uint64_t end_byte = publication.spec.bytes * (publication.pieces_done + 1) / publication.spec.pieces;
  ++publication.pieces_done;
  auto sealed = publication.sealer->write(random_bytes(end_byte - begin_byte));
  ECHO_CHECK(sealed.has_value(), "{}", sealed ? "" : sealed.error().message());
  const PublicationId id = publication.sealer->id();
  const auto add_chunks = [&](std::vector<SealedChunk> chunks) {
    published_content_.add(id, chunks);
    if (chunks.empty()) return;
    world_.call(learner_machine_.host, [&](TimePoint now) {
      const Status added = learner()->add(id, std::move(chunks), now);
      // If its store has no room, the learner drops a publication (kNotFound), or a catch-up (with any error).
      const bool was_dropped = !added && (added.error().code == Code::kNotFound || publication.catch_up);
      if (!added && !was_dropped) application_error_ = added.error().message();
    });
  };
  add_chunks(std::move(*sealed));
  if (publication.pieces_done < publication.spec.pieces) {
    world_.run_at(world_.now() + publication.spec.encode_time / static_cast<std::int64_t>(publication.spec.pieces),
                  [this, pending] { encode(pending); });
    return;
  }
  auto finished = publication.sealer->finish(publication.digest);
  add_chunks(std::move(finished.first));
  const SignedManifest& signed_manifest = finished.second;
  const auto manifest = checker().open(signed_manifest);
  ECHO_CHECK(manifest.has_value());
  published_content_.close(id, publication.digest);
  const Version version = publication.sealer->announcement().key.version;
  // One publication more than a fold has deltas: it may finish between the request for the fold and its encoding.
  const std::size_t recent_max = options_.learner.folded_deltas_max + 1;
  if (!publication.catch_up) policies_.finish(version, publication.digest, publication.spec.bytes, recent_max);
  world_.call(learner_machine_.host, [&](TimePoint now) {
    // kNotFound: the learner has dropped the publication, because its store has no room.
    const Status finish_status = learner()->finish(*manifest, signed_manifest, now);
    if (!finish_status && finish_status.error().code != Code::kNotFound)
      application_error_ = finish_status.error().message();
  });
}

// Size of the snapshot, or of the fold (several deltas combined into one), that a worker needs to catch up. A fold is
// as large as its deltas together.
std::uint64_t Fleet::catch_up_bytes(const act::RequestCatchUp& need) const {
  if (!need.from) return options_.learner.snapshot_bytes;
  return std::max<std::uint64_t>(1, policies_.bytes_between(*need.from, need.current));
}

void Fleet::provide_catch_up(const act::RequestCatchUp& need, std::uint64_t learner_start) {
  if (!learner() || learner_start != learner_machine_.starts) return;
  const Digest* policy = policies_.find(need.current);
  auto pending = std::make_shared<PendingPublication>();
  pending->spec.bytes = catch_up_bytes(need);
  pending->learner_start = learner_start;
  pending->catch_up = true;
  Status begun = fail(Code::kInvalid, "catch up", "version {} is not closed yet", need.current);
  if (policy) {
    pending->digest = *policy;
    const Announcement announcement = announcement_of({need.current, need.from});
    pending->sealer.emplace(announcement, authority().key());
    world_.note(fmt::format("the learner provides {} to catch up with", to_text(announcement.key)));
    world_.call(learner_machine_.host, [&](TimePoint now) {
      begun = learner()->begin(announcement, pending->sealer->signed_announcement(), /*catch_up=*/true, now);
    });
    if (begun) published_content_.begin(pending->sealer->id(), announcement);
  }
  if (begun) return encode(pending);
  if (begun.error().code == Code::kStale) return;  // the learner already has this publication
  world_.run_at(world_.now() + kCatchUpRetry, [this, need, learner_start] { provide_catch_up(need, learner_start); });
}

}  // namespace echoline::sim

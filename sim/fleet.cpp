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
      faults_(std::make_unique<FaultSites>(options.seed)) {
  auto authority = trust::Authority::create(kRunId, new_key());
  ECHO_CHECK(authority.has_value());
  authority_ = std::make_shared<const trust::Authority>(std::move(*authority));
  checker_ = std::make_shared<const CachingChecker>(kRunId, authority_->key(), published_content_);
  accomplice_state_->checker = checker_;
  world_.set_authority({kRunId, authority_->public_key()});
  learner_host_ = world_.add_host(options_.learner.link, options_.learner.clock_skew, options_.learner.regions.learner);
  learner_origin_unix_s_ = world_.unix_origin_s(learner_host_);
}

Fleet::~Fleet() = default;

trust::SigningKey Fleet::new_key() {
  trust::SigningKey::Seed seed;
  for (std::byte& byte : seed) byte = static_cast<std::byte>(random_.next());
  return trust::SigningKey(seed);
}

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

double Fleet::learner_unix_s() const { return learner_origin_unix_s_ + seconds(world_.now().time_since_epoch()); }

CoreOptions Fleet::core_options(HostId host, const LinkLimits& limits, std::size_t open_files_max) {
  CoreOptions options;
  options.limits = limits;
  options.connections = ConnectionLimits::of(open_files_max);
  options.unix_origin_s = world_.unix_origin_s(host);
  if (options_.fault_points) options.faults = faults_.get();
  return options;
}

void Fleet::stop_random_faults() {
  random_faults_stopped_ = true;
  faults_->stopped = true;
}

// ---- learner process ----

LearnerCore* Fleet::learner() {
  auto* process = dynamic_cast<LearnerProcess*>(world_.process(learner_host_));
  return process ? &process->core() : nullptr;
}

void Fleet::start_learner(std::uint64_t versions_lost) {
  if (world_.is_alive(learner_host_) || run_has_ended_ || starts_are_blocked_) return;
  const LearnerOptions& options = options_.learner;
  learner_origin_unix_s_ = world_.unix_origin_s(learner_host_);
  LearnerConfig config;
  static_cast<overlay::LearnerRules&>(config) = options;
  config.core = core_options(learner_host_, options.limits);
  config.self = world_.endpoint_of(learner_host_);
  config.authority = authority_;
  config.checker = checker_;
  config.durable = options.durable;
  // In the simulation, a member's place is the number of its region.
  if (options.regions.several())
    config.region_of = [](const MemberInfo& info) { return static_cast<std::uint32_t>(std::stoul(info.place)); };
  config.store_bytes_max = options.store;
  config.folded_deltas_max = options.folded_deltas_max;
  if (const auto& bytes = world_.disk(learner_host_).state()) {
    auto state = decode_learner_state(*bytes);
    if (state)
      config.state = std::move(*state);
    else
      application_error_ = "the learner's state file cannot be read: " + state.error().message();
  }
  if (!config.state) {
    // Ids below kFirstEnrolledId are for workers that do not enrol and for the intruder (next_id_).
    config.state.emplace();
    config.state->run_id = kRunId;
    config.state->next_worker = config.state->next_serial = kFirstEnrolledId;
  }
  // A durable learner resumes with the complete versions in its state, without the newest `versions_lost` of them: it
  // lost their files and publishes them again. One version always stays.
  if (options.durable) {
    policies_.clear();
    for (const auto& [version, digest] : config.state->published) policies_[version] = digest;
    for (; versions_lost > 0 && policies_.size() > 1; --versions_lost) policies_.erase(std::prev(policies_.end()));
    newest_.reset();
    if (!policies_.empty()) newest_ = policies_.rbegin()->first;
    config.resumed_at = newest_;
  }
  ++learner_starts_;
  publications_in_progress_ = 0;
  recent_publications_.clear();
  world_.start(learner_host_, std::make_unique<LearnerProcess>(*this, std::move(config)));
  world_.call(learner_host_, [&](TimePoint now) { learner()->start(now); });
}

void Fleet::on_learner_action(Action&& action) {
  if (auto* done = std::get_if<act::BroadcastDone>(&action)) {
    reports_.push_back(std::move(done->report));
  } else if (const auto* acked = std::get_if<act::Acked>(&action)) {
    const auto policy = policies_.find(acked->version);
    const auto worker = worker_with_id(acked->worker);
    if (worker && !workers_[*worker]->options.malice.any() &&
        (policy == policies_.end() || policy->second != acked->policy_digest))
      application_error_ =
          fmt::format("worker {} acknowledged version {} with a wrong digest", acked->worker, acked->version);
  } else if (const auto* need = std::get_if<act::NeedCatchUp>(&action)) {
    ++(need->from ? deltas_requested_ : snapshots_requested_);
    world_.run_at(world_.now() + options_.learner.snapshot_encode_time,
                  [this, need = *need, start = learner_starts_] { provide_catch_up(need, start); });
  } else if (const auto* message = std::get_if<act::MessageFrom>(&action)) {
    on_message(message->worker, message->bytes);
  } else if (const auto* changed = std::get_if<act::TopologyChanged>(&action)) {
    if (observer_) observer_->on_topology(changed->topology);
  } else if (const auto* joined = std::get_if<act::Joined>(&action)) {
    if (observer_) observer_->on_joined(joined->member.id);
  } else if (const auto* away = std::get_if<act::WorkerAway>(&action)) {
    if (observer_) observer_->on_away(away->worker, away->reason);
  } else if (const auto* lost = std::get_if<act::Lost>(&action)) {
    const auto worker = worker_with_id(lost->worker);
    lost_workers_.insert(lost->worker);
    if (worker && is_expelled_for_messages(lost->reason)) workers_[*worker]->expelled = true;
    if (observer_) observer_->on_lost(lost->worker, lost->reason);
  }
}

// The texts are reasons that overlay/learner gives.
bool Fleet::is_expelled_for_messages(const std::string& reason) {
  return reason.find("it says too much") != std::string::npos || reason.find("it accuses") != std::string::npos ||
         reason.find("never happens by chance") != std::string::npos;
}

void Fleet::expel(std::size_t i) {
  const WorkerId id = workers_[i]->id();
  if (!learner() || id == kLearnerId) return;
  workers_[i]->expelled = true;
  world_.call(learner_host_, [&](TimePoint now) { learner()->expel(id, "expelled by the script", now); });
}

void Fleet::end_run() {
  run_has_ended_ = true;
  for (const auto& worker : workers_) worker->should_run = false;
  if (learner()) world_.call(learner_host_, [&](TimePoint now) { learner()->leave(now); });
  world_.stop(learner_host_);
}

void Fleet::publish(const PublishSpec& spec) {
  if (!learner() || publications_in_progress_ > 0) return;
  auto pending = std::make_shared<PendingPublication>();
  pending->spec = spec;
  pending->learner_start = learner_starts_;
  Announcement announcement;
  announcement.run_id = kRunId;
  announcement.epoch = learner()->epoch();
  announcement.key.version = Version{newest_ ? newest_->value + 1 : 0};
  if (spec.base && policies_.contains(*spec.base)) {
    announcement.key.base = spec.base;
    announcement.base_digest = policies_.at(*spec.base);
  }
  announcement.chunk_bytes = options_.learner.chunk_bytes;
  world_.call(learner_host_, [&](TimePoint now) { announcement.issued = learner()->issue_time(now); });
  announcement.expires_unix_ms = static_cast<std::uint64_t>(learner_unix_s() * 1e3) +
                                 static_cast<std::uint64_t>(seconds(options_.learner.publication_lifetime) * 1e3);
  pending->digest = new_digest(announcement.key.version);
  pending->sealer.emplace(announcement, authority_->key());
  published_content_.begin(pending->sealer->id(), announcement);
  ++publications_in_progress_;
  world_.note(fmt::format("the learner publishes {}, {} bytes", to_text(announcement.key), spec.bytes));
  world_.call(learner_host_, [&](TimePoint now) {
    const Status begun =
        learner()->begin(announcement, pending->sealer->signed_announcement(), /*catch_up=*/false, now);
    if (!begun) {  // a defect: the error ends the simulation
      application_error_ = begun.error().message();
      --publications_in_progress_;
    }
  });
  encode(pending);
}

// Adds the next piece; closes the publication after the last one.
void Fleet::encode(const std::shared_ptr<PendingPublication>& pending) {
  PendingPublication& publication = *pending;
  if (!learner() || learner_starts_ != publication.learner_start) return;
  if (publication.spec.abandon_after_pieces == publication.pieces_done) {
    --publications_in_progress_;
    return world_.call(learner_host_, [&](TimePoint now) { learner()->abandon(publication.sealer->id(), now); });
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
    world_.call(learner_host_, [&](TimePoint now) {
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
  const auto manifest = checker_->open(signed_manifest);
  ECHO_CHECK(manifest.has_value());
  published_content_.close(id, publication.digest);
  const Version version = publication.sealer->announcement().key.version;
  if (!publication.catch_up) {
    --publications_in_progress_;
    policies_[version] = publication.digest;
    newest_ = version;
    recent_publications_.emplace_back(version, publication.spec.bytes);
    if (recent_publications_.size() > options_.learner.folded_deltas_max + 1) recent_publications_.pop_front();
  }
  world_.call(learner_host_, [&](TimePoint now) {
    const Status finish_status = learner()->finish(*manifest, signed_manifest, now);
    if (!finish_status && finish_status.error().code != Code::kNotFound)
      application_error_ = finish_status.error().message();
  });
}

// Size of the snapshot, or of the fold (several deltas combined into one), that a worker needs to catch up. A fold is
// as large as its deltas together.
std::uint64_t Fleet::catch_up_bytes(const act::NeedCatchUp& need) const {
  if (!need.from) return options_.learner.snapshot_bytes;
  std::uint64_t sum = 0;
  for (const auto& [version, bytes] : recent_publications_)
    if (version > *need.from && version <= need.current) sum += bytes;
  return std::max<std::uint64_t>(1, sum);
}

void Fleet::provide_catch_up(const act::NeedCatchUp& need, std::uint64_t learner_start) {
  if (!learner() || learner_start != learner_starts_) return;
  const auto policy = policies_.find(need.current);
  auto pending = std::make_shared<PendingPublication>();
  pending->spec.bytes = catch_up_bytes(need);
  pending->learner_start = learner_start;
  pending->catch_up = true;
  Status begun = fail(Code::kInvalid, "catch up", "version {} is not closed yet", need.current);
  if (policy != policies_.end()) {
    pending->digest = policy->second;
    Announcement announcement;
    announcement.run_id = kRunId;
    announcement.epoch = learner()->epoch();
    announcement.key = {need.current, need.from};
    if (need.from) announcement.base_digest = policies_.at(*need.from);
    announcement.chunk_bytes = options_.learner.chunk_bytes;
    world_.call(learner_host_, [&](TimePoint now) { announcement.issued = learner()->issue_time(now); });
    announcement.expires_unix_ms = static_cast<std::uint64_t>(learner_unix_s() * 1e3) +
                                   static_cast<std::uint64_t>(seconds(options_.learner.publication_lifetime) * 1e3);
    pending->sealer.emplace(announcement, authority_->key());
    world_.note(fmt::format("the learner provides {} to catch up with", to_text(announcement.key)));
    world_.call(learner_host_, [&](TimePoint now) {
      begun = learner()->begin(announcement, pending->sealer->signed_announcement(), /*catch_up=*/true, now);
    });
    if (begun) published_content_.begin(pending->sealer->id(), announcement);
  }
  if (begun) return encode(pending);
  if (begun.error().code == Code::kStale) return;  // the learner already has this publication
  world_.run_at(world_.now() + kCatchUpRetry, [this, need, learner_start] { provide_catch_up(need, learner_start); });
}

}  // namespace echoline::sim

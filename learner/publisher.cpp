// Publishes policies. The training loop calls it after a step, the overlay for late workers.
#include "learner/publisher.hpp"

#include <future>
#include <vector>

#include "base/log.hpp"

namespace echoline::learner {

Publisher::Publisher(delta::EncodeOptions options, PublisherEvents events)
    : options_(std::move(options)), events_(std::move(events)), thread_([this] { publish_until_stopped(); }) {}

Publisher::~Publisher() { stop(); }

void Publisher::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  publication_ended_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Publisher::publish(Version version, delta::SharedState policy) {
  {
    const std::lock_guard lock(mutex_);
    ECHO_CHECK(node_ != nullptr && !next_, "version {} comes before the previous one is published", version);
    next_ = Policy{.version = version, .digest = {}, .note = {}, .state = std::move(policy)};
  }
  wake_.notify_all();
}

Result<bool> Publisher::wait_until_published(Duration patience) {
  std::unique_lock lock(mutex_);
  publication_ended_.wait_for(lock, patience, [this] { return !next_ || failure_ || stopping_; });
  if (failure_) return *failure_;
  return !next_;
}

void Publisher::request_catch_up(std::optional<Version> from) {
  {
    const std::lock_guard lock(mutex_);
    catch_up_requests_.insert(from);
  }
  wake_.notify_all();
}

// Publishes a waiting policy before it answers requests of late workers.
void Publisher::publish_until_stopped() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stopping_ || (next_ && !failure_) || (newest_ && !catch_up_requests_.empty()); });
    if (stopping_) return;
    if (next_ && !failure_) {
      Policy next = *next_;  // a copy of the pointer; next_ stays set until the policy is published
      lock.unlock();
      const Result<PublishReport> published = encode_and_send(next);
      if (published) {
        next.digest = published->stats.result;
        newest_ = std::move(next);  // releases the previous policy
        if (events_.published) events_.published(*published);
      }
      lock.lock();
      if (published)
        next_.reset();
      else if (!stopping_)
        failure_ = published.error();
      publication_ended_.notify_all();
      lock.unlock();
      if (published) store_anchor();
      lock.lock();
      continue;
    }
    const std::optional<Version> from = catch_up_requests_.extract(catch_up_requests_.begin()).value();
    lock.unlock();
    if (const Status caught_up = publish_catch_up(from); !caught_up)
      log::warn("catching up to version {}: {}", newest_->version, caught_up.error().message());
    lock.lock();
  }
}

Result<PublishReport> Publisher::encode_and_send(Policy& next) {
  ECHO_CHECK(!newest_ || newest_->version < next.version, "version {} after version {}", next.version,
             newest_->version);
  const SystemClock clock;
  const TimePoint began_at = clock.now();
  if (events_.begins) events_.begins(next.version);
  PublishReport report;
  report.version = next.version;
  if (newest_)
    if (const Status same_tensors = delta::check_same_tensors(newest_->state->view(), next.state->view());
        !same_tensors) {
      log::warn("version {} has other tensors than version {}: {}. All workers get a whole snapshot", next.version,
                newest_->version, same_tensors.error().detail);
      newest_.reset();
    }
  report.snapshot = !newest_;
  delta::EncodeOptions options = options_;
  options.leaves = &leaves_;  // has the digests of newest_, and gets those of `next`
  overlay::PublicationHead head;
  head.version = next.version;
  if (newest_) {
    options.base = newest_->digest;
    head.base = newest_->version;
    head.base_digest = newest_->digest.bytes;
  }
  std::future<std::string> note;
  if (events_.note) note = std::async(std::launch::async, [this, &next] { return events_.note(next.state->view()); });
  // The writer sends chunks while later tensors are still being compared.
  ECHO_ASSIGN(const auto writer, node_->begin(head));
  const auto outgoing = outbox_ ? outbox_->begin(next.version, head.base) : nullptr;
  const delta::PatchSink sink = sink_of(*writer, outgoing.get());
  ECHO_ASSIGN(report.stats, newest_ ? delta::write_delta(newest_->state->view(), next.state->view(), sink, options)
                                    : delta::write_snapshot(next.state->view(), sink, options));
  report.digest = report.stats.result.bytes;
  if (note.valid()) next.note = note.get();
  report.encode_seconds = seconds(clock.now() - began_at);
  ECHO_TRY(writer->finish(report.digest, next.note));
  if (outgoing) outgoing->finish();
  return report;
}

// The trainer goes on meanwhile, because the overlay has the policy.
void Publisher::store_anchor() {
  if (!outbox_ || !outbox_->wants_anchor(newest_->version)) return;
  const auto outgoing = outbox_->begin(newest_->version, std::nullopt);
  if (!outgoing) return;
  const auto write = [&](std::span<const std::byte> bytes) -> Status {
    if (stopping_) return fail(Code::kCancelled, "publish", "the run ends");
    outgoing->write(bytes);
    return ok();
  };
  if (delta::write_snapshot(newest_->state->view(), write, options_)) outgoing->finish();
}

Status Publisher::publish_catch_up(std::optional<Version> from) {
  if (!from) return publish_snapshot();
  const Status folded = fold_deltas(*from);
  if (folded || stopping_) return folded;
  log::warn("the deltas from version {} on cannot be folded ({}): a snapshot is made instead", *from,
            folded.error().message());
  return publish_snapshot();
}

Status Publisher::fold_deltas(Version from) {
  ECHO_ASSIGN(const overlay::StoredDeltas stored, node_->deltas_from(from));
  std::vector<overlay::Slice> slices;  // own the bytes of `patches`
  std::vector<std::span<const std::byte>> patches;
  for (const overlay::Payload& delta : stored.deltas) {
    ECHO_ASSIGN(overlay::Slice patch, delta.bytes());
    patches.push_back(slices.emplace_back(std::move(patch)).bytes());
  }
  overlay::PublicationHead head;
  head.version = stored.to;
  head.base = from;
  head.base_digest = stored.base_digest;
  head.catch_up = true;
  ECHO_ASSIGN(const auto writer, node_->begin(head));
  ECHO_ASSIGN(const delta::PatchStats stats, delta::fold_deltas(patches, sink_of(*writer), /*base=*/nullptr, options_));
  log::info("{} deltas are folded into one of {} from version {} to {}", patches.size(),
            to_text(Bytes{stats.patch_bytes}), from, stored.to);
  return writer->finish(stored.digest, stored.note);
}

Status Publisher::publish_snapshot() {
  overlay::PublicationHead head;
  head.version = newest_->version;
  head.catch_up = true;
  ECHO_ASSIGN(const auto writer, node_->begin(head));
  ECHO_TRY(delta::write_snapshot(newest_->state->view(), sink_of(*writer), options_));
  return writer->finish(newest_->digest.bytes, newest_->note);
}

delta::PatchSink Publisher::sink_of(overlay::PublicationWriter& writer, store::OutgoingPatch* outgoing) const {
  return [this, &writer, outgoing](std::span<const std::byte> bytes) {
    if (outgoing) outgoing->write(bytes);
    return stopping_ ? Status(fail(Code::kCancelled, "publish", "the run ends")) : writer.write(bytes);
  };
}

}  // namespace echoline::learner

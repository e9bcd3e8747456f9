#include "learner/publisher.hpp"

#include "base/clock.hpp"
#include "base/log.hpp"

namespace echoline::learner {

Publisher::Publisher(delta::EncodeOptions options)
    : options_(options), way_back_(options), thread_([this] { work(); }) {}

Publisher::~Publisher() { stop(); }

void Publisher::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

Result<PublishReport> Publisher::publish(Version version, delta::SharedState policy) {
  const SystemClock clock;
  const TimePoint start = clock.now();
  std::shared_ptr<const Policy> previous;
  {
    const std::lock_guard lock(mutex_);
    previous = newest_;
  }
  ECHO_CHECK(node_ != nullptr && (!previous || previous->version < version));
  PublishReport report;
  report.version = version;
  report.snapshot = previous == nullptr;
  delta::EncodeOptions options = options_;
  if (previous) options.base = previous->digest;
  overlay::PublicationHead head;
  head.version = version;
  if (previous) {
    head.base = previous->version;
    head.base_digest = previous->digest.bytes;
  }
  // Chunks leave while later tensors are still being compared.
  ECHO_ASSIGN(const auto writer, node_->begin(head));
  const delta::PatchSink sink = [&](std::span<const std::byte> bytes) { return writer->write(bytes); };
  ECHO_ASSIGN(report.stats, previous ? delta::write_delta(previous->state->view(), policy->view(), sink, options)
                                     : delta::write_snapshot(policy->view(), sink, options_));
  report.digest = report.stats.result.bytes;
  report.encode_seconds = seconds(clock.now() - start);
  ECHO_TRY(writer->finish(report.digest));
  auto next = std::make_shared<Policy>();
  next->version = version;
  next->digest = report.stats.result;
  next->state = std::move(policy);
  {
    const std::lock_guard lock(mutex_);
    auto before = std::exchange(newest_, std::move(next));
    if (!before_) before_ = std::move(before);  // else a longer step leads back, past a version that cannot be restored
  }
  wake_.notify_all();
  return report;
}

void Publisher::request_catch_up(std::optional<Version> from) {
  {
    const std::lock_guard lock(mutex_);
    wanted_.insert(from);
  }
  wake_.notify_all();
}

void Publisher::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stopping_ || (newest_ && (before_ || !wanted_.empty())); });
    if (stopping_) return;
    const std::shared_ptr<const Policy> source = newest_;
    if (const std::shared_ptr<const Policy> before = std::exchange(before_, nullptr)) {
      lock.unlock();
      remember(*before, *source);
      lock.lock();
      continue;
    }
    const std::optional<Version> from = wanted_.extract(wanted_.begin()).value();
    lock.unlock();
    if (const Status provided = provide(from, *source); !provided)
      log::warn("catching up to version {}: {}", source->version, provided.error().message());
    lock.lock();
    if (!from && source != newest_) wanted_.insert(from);  // overtaken by a publication: that one is needed as well
  }
}

void Publisher::remember(const Policy& older, const Policy& newer) {
  const auto bytes_max = static_cast<std::uint64_t>(kWayBackShare * static_cast<double>(newer.state->total_bytes()));
  if (const Status added = way_back_.add(older, newer, bytes_max); !added) {
    log::debug("version {}: {}", older.version, added.error().message());
    way_back_.clear();
  }
  node_->restorable_from(way_back_.oldest());
}

Status Publisher::provide(std::optional<Version> from, const Policy& source) {
  if (!from) return provide_snapshot(source);
  const Status provided = provide_delta(*from, source);
  if (provided || stopping_) return provided;
  log::warn("version {} cannot be restored ({}): a snapshot is made instead", *from, provided.error().message());
  return provide_snapshot(source);
}

Status Publisher::provide_delta(Version from, const Policy& source) {
  ECHO_ASSIGN(const Policy old, way_back_.restore(from, source));
  delta::EncodeOptions options = options_;
  options.base = old.digest;
  overlay::PublicationHead head;
  head.version = source.version;
  head.base = from;
  head.base_digest = old.digest.bytes;
  head.catch_up = true;
  ECHO_ASSIGN(const auto writer, node_->begin(head));
  ECHO_ASSIGN(const delta::PatchStats stats,
              delta::write_delta(old.state->view(), source.state->view(), sink_of(*writer), options));
  log::info("one delta of {} leads from version {} to {}", to_text(Bytes{stats.patch_bytes}), from, source.version);
  return writer->finish(source.digest.bytes);
}

Status Publisher::provide_snapshot(const Policy& source) {
  overlay::PublicationHead head;
  head.version = source.version;
  head.catch_up = true;
  ECHO_ASSIGN(const auto writer, node_->begin(head));
  ECHO_TRY(delta::write_snapshot(source.state->view(), sink_of(*writer), options_));
  return writer->finish(source.digest.bytes);
}

delta::PatchSink Publisher::sink_of(overlay::PublicationWriter& writer) const {
  return [this, &writer](std::span<const std::byte> bytes) {
    return stopping_ ? Status(fail(Code::kCancelled, "catch up", "the run ends")) : writer.write(bytes);
  };
}

}  // namespace echoline::learner

#include "learner/publisher.hpp"

#include "base/clock.hpp"
#include "base/log.hpp"

namespace echoline::learner {
Publisher::Publisher(delta::EncodeOptions options) : options_(options), thread_([this] { snapshot_loop(); }) {}

Publisher::~Publisher() { stop(); }

void Publisher::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

Result<PublishReport> Publisher::publish(Version version, delta::OwnedState policy) {
  const SystemClock clock;
  const TimePoint start = clock.now();
  std::shared_ptr<const Published> previous;
  {
    const std::lock_guard lock(mutex_);
    previous = newest_;
  }
  ECHO_CHECK(node_ != nullptr && (!previous || previous->version < version));
  PublishReport report;
  report.version = version;
  report.snapshot = previous == nullptr;
  delta::EncodeOptions options = options_;
  if (previous) options.base = delta::Digest{previous->digest};
  overlay::PublicationHead head;
  head.version = version;
  if (previous) {
    head.base = previous->version;
    head.base_digest = previous->digest;
  }
  // Chunks leave while later tensors are still being compared.
  ECHO_ASSIGN(const auto writer, node_->begin(head));
  const delta::PatchSink sink = [&](std::span<const std::byte> bytes) { return writer->write(bytes); };
  ECHO_ASSIGN(report.stats, previous ? delta::write_delta(previous->state.view(), policy.view(), sink, options)
                                     : delta::write_snapshot(policy.view(), sink, options_));
  report.digest = report.stats.result.bytes;
  report.encode_seconds = seconds(clock.now() - start);
  ECHO_TRY(writer->finish(report.digest));
  auto next = std::make_shared<Published>();
  next->version = version;
  next->digest = report.digest;
  next->state = std::move(policy);
  {
    const std::lock_guard lock(mutex_);
    newest_ = std::move(next);
  }
  return report;
}

void Publisher::request_snapshot() {
  {
    const std::lock_guard lock(mutex_);
    wanted_ = true;
  }
  wake_.notify_all();
}

void Publisher::snapshot_loop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stopping_ || (wanted_ && newest_); });
    if (stopping_) return;
    wanted_ = false;
    const std::shared_ptr<const Published> source = newest_;
    lock.unlock();
    if (const Status provided = provide_snapshot(*source); !provided)
      log::warn("snapshot of version {}: {}", source->version, provided.error().message());
    lock.lock();
    if (source != newest_) wanted_ = true;  // overtaken by a publication: that one is needed as well
  }
}

Status Publisher::provide_snapshot(const Published& source) {
  overlay::PublicationHead head;
  head.version = source.version;
  head.catch_up = true;
  ECHO_ASSIGN(const auto writer, node_->begin(head));
  const delta::PatchSink sink = [&](std::span<const std::byte> bytes) {
    return stopping_ ? Status(fail(Code::kCancelled, "encode snapshot", "the run ends")) : writer->write(bytes);
  };
  ECHO_TRY(delta::write_snapshot(source.state.view(), sink, options_));
  return writer->finish(source.digest);
}

}  // namespace echoline::learner

#include "learner/publisher.hpp"

#include "base/clock.hpp"
#include "base/log.hpp"

namespace echoline::learner {
namespace {

overlay::SharedBytes share(std::vector<std::byte> bytes) {
  return std::make_shared<const std::vector<std::byte>>(std::move(bytes));
}

}  // namespace

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
  ECHO_ASSIGN(std::vector<std::byte> patch,
              previous ? delta::encode_delta(previous->state.view(), policy.view(), options, &report.stats)
                       : delta::encode_snapshot(policy.view(), options_, &report.stats));
  report.digest = report.stats.result.bytes;
  report.encode_seconds = seconds(clock.now() - start);

  overlay::Publication publication;
  publication.version = version;
  if (previous) publication.base = previous->version;
  publication.policy_digest = report.digest;
  publication.payload = share(std::move(patch));
  auto next = std::make_shared<Published>();
  next->version = version;
  next->digest = report.digest;
  next->state = std::move(policy);
  {
    const std::lock_guard lock(mutex_);
    newest_ = std::move(next);
    snapshot_.reset();
    if (report.snapshot) snapshot_ = publication;
  }
  node_->publish(std::move(publication));
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
    if (!snapshot_) {
      const std::shared_ptr<const Published> source = newest_;
      lock.unlock();
      auto patch = delta::encode_snapshot(source->state.view(), options_);
      lock.lock();
      if (!patch) {
        log::error("snapshot of version {}: {}", source->version, patch.error().message());
        continue;
      }
      if (source != newest_) {  // overtaken by a publication: encode that one instead
        wanted_ = true;
        continue;
      }
      overlay::Publication full;
      full.version = source->version;
      full.policy_digest = source->digest;
      full.payload = share(std::move(*patch));
      snapshot_ = std::move(full);
    }
    if (!stopping_) node_->provide_snapshot(*snapshot_);
  }
}

}  // namespace echoline::learner

// Turns trained policies into publications: the first as a snapshot, every later one as a delta on the one before.
#pragma once
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "delta/patch.hpp"
#include "learner/way_back.hpp"
#include "overlay/uv/node.hpp"

namespace echoline::learner {

struct PublishReport {
  Version version;
  bool snapshot = false;
  delta::PatchStats stats;
  overlay::Digest digest{};
  double encode_seconds = 0;
};

// publish() belongs to the training thread; request_catch_up() may be called from any. What those who missed some
// versions need is encoded on a thread of the publisher's own, so that neither training nor the event loop waits for it.
class Publisher {
 public:
  // Of the policy's size, that the way back may take in memory.
  static constexpr double kWayBackShare = 0.25;

  explicit Publisher(delta::EncodeOptions options);
  ~Publisher();  // joins the thread
  Publisher(const Publisher&) = delete;
  Publisher& operator=(const Publisher&) = delete;

  // Where publications go; before the first publish().
  void attach(overlay::LearnerNode* node) { node_ = node; }
  // Encodes and hands over to the overlay, chunk by chunk; versions must grow.
  Result<PublishReport> publish(Version version, delta::SharedState policy);
  // A delta from `from` to the newest publication will be handed to the overlay soon, or a full snapshot of it where
  // `from` is absent or cannot be restored; equal requests are merged.
  void request_catch_up(std::optional<Version> from);
  // Stops the thread; afterwards the overlay is not touched any more.
  void stop();

 private:
  void work();
  void remember(const Policy& older, const Policy& newer);
  Status provide(std::optional<Version> from, const Policy& source);
  Status provide_delta(Version from, const Policy& source);
  Status provide_snapshot(const Policy& source);
  delta::PatchSink sink_of(overlay::PublicationWriter& writer) const;

  const delta::EncodeOptions options_;
  overlay::LearnerNode* node_ = nullptr;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::shared_ptr<const Policy> newest_, before_;  // before_: the oldest that no step leads back to yet; guarded by mutex_
  std::set<std::optional<Version>> wanted_;           // guarded by mutex_
  std::atomic<bool> stopping_ = false;                // written under mutex_
  WayBack way_back_;                                  // of the thread
  std::thread thread_;
};

}  // namespace echoline::learner

// Turns trained policies into publications: the first as a snapshot, every later one as a delta on the one before.
#pragma once
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "delta/patch.hpp"
#include "overlay/uv/node.hpp"

namespace echoline::learner {

struct PublishReport {
  Version version;
  bool snapshot = false;
  delta::PatchStats stats;
  overlay::Digest digest{};
  double encode_seconds = 0;
};

// publish() belongs to the training thread; request_snapshot() may be called from any. Snapshots for late joiners are
// encoded on a thread of the publisher's own, so that neither training nor the event loop waits for them.
class Publisher {
 public:
  explicit Publisher(delta::EncodeOptions options);
  ~Publisher();  // joins the snapshot thread
  Publisher(const Publisher&) = delete;
  Publisher& operator=(const Publisher&) = delete;

  // Where publications go; before the first publish().
  void attach(overlay::LearnerNode* node) { node_ = node; }
  // Encodes and hands over to the overlay, chunk by chunk; versions must grow.
  Result<PublishReport> publish(Version version, delta::OwnedState policy);
  // A full snapshot of the newest publication will be handed to the overlay soon; repeated requests are merged.
  void request_snapshot();
  // Stops the snapshot thread; afterwards the overlay is not touched any more.
  void stop();

 private:
  struct Published {
    Version version;
    overlay::Digest digest{};
    delta::OwnedState state;
  };
  void snapshot_loop();
  Status provide_snapshot(const Published& source);

  const delta::EncodeOptions options_;
  overlay::LearnerNode* node_ = nullptr;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::shared_ptr<const Published> newest_;  // guarded by mutex_
  bool wanted_ = false;                      // guarded by mutex_
  std::atomic<bool> stopping_ = false;       // written under mutex_
  std::thread thread_;
};

}  // namespace echoline::learner

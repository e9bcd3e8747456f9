// Turns trained policies into publications on a thread of its own, so that training goes on meanwhile: the first as a
// snapshot, every later one as a delta on the one before. Each policy is encoded once.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>

#include "base/clock.hpp"
#include "base/ids.hpp"
#include "base/result.hpp"
#include "delta/patch.hpp"
#include "overlay/sizes.hpp"
#include "overlay/uv/node.hpp"

namespace echoline::learner {

struct PublishReport {
  Version version;
  bool snapshot = false;
  delta::PatchStats stats;
  overlay::Digest digest{};
  double encode_seconds = 0;
};

// Called on the publisher's thread; each may be empty.
struct PublisherEvents {
  std::function<void(Version)> begins;                  // before its first byte leaves
  std::function<void(const PublishReport&)> published;  // all of it is encoded, and the overlay has it
  // Returns the note that workers get beside a policy's bytes, at most overlay::kNoteBytesMax. Called on its own thread
  // while the policy is encoded.
  std::function<std::string(const delta::StateView&)> note = {};
};

// publish() and wait_until_published() belong to the training thread; request_catch_up() may be called from any.
//
// Two policies are in memory at most, the newest published and the next: the trainer makes a third only once
// wait_until_published() has returned true.
class Publisher {
 public:
  // Memory in policies: the two, and copies of the stored deltas that are folded into one for a late worker.
  static constexpr double kPoliciesHeld = 2 + 1.0 / overlay::kFoldShare;

  explicit Publisher(delta::EncodeOptions options, PublisherEvents events = {});
  ~Publisher();  // stop()
  Publisher(const Publisher&) = delete;
  Publisher& operator=(const Publisher&) = delete;

  // Where publications go; before the first publish().
  void attach(overlay::LearnerNode* node) { node_ = node; }
  // Hands the policy to the thread and returns. Versions must grow, and the policy before must be published (both
  // checked).
  void publish(Version version, delta::SharedState policy);
  // Waits until the policy that publish() was given last is published; false: `patience` was over first. The error, if
  // it could not be published.
  Result<bool> wait_until_published(Duration patience);
  // The stored deltas from `from` to the newest publication will be handed to the overlay soon, folded into one, or a
  // full snapshot if `from` is absent or they cannot be folded. Equal requests are merged.
  void request_catch_up(std::optional<Version> from);
  // Stops the thread in the middle of what it encodes; afterwards it does not touch the overlay any more.
  void stop();

 private:
  struct Policy {
    Version version;
    delta::Digest digest{};  // of `state`, once it is published
    std::string note;
    delta::SharedState state;
  };

  void work();
  Result<PublishReport> encode(Policy& next);
  Status provide(std::optional<Version> from);
  Status fold_deltas(Version from);
  Status provide_snapshot();
  delta::PatchSink sink_of(overlay::PublicationWriter& writer) const;

  const delta::EncodeOptions options_;
  const PublisherEvents events_;
  overlay::LearnerNode* node_ = nullptr;
  std::optional<Policy> newest_;  // published; the thread's
  std::mutex mutex_;
  std::condition_variable wake_, settled_;
  std::optional<Policy> next_;               // to be published, or being published; guarded by mutex_
  std::optional<Error> failure_;             // of a publication; guarded by mutex_
  std::set<std::optional<Version>> wanted_;  // guarded by mutex_
  std::atomic<bool> stopping_ = false;       // written under mutex_
  std::thread thread_;
};

}  // namespace echoline::learner

// Publishes trained policies to the workers on its own thread, so that training continues meanwhile. The first policy
// is sent as a snapshot, every later one as a delta on the previous one. Each policy is encoded once.
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
#include "store/outbox.hpp"

namespace echoline::learner {

// The outcome of the publication of a version.
struct PublishReport {
  Version version;
  bool snapshot = false;  // false: a delta
  delta::PatchStats stats;
  overlay::Digest digest{};
  double encode_seconds = 0;
};

// Called on the publisher's thread; each may be empty.
struct PublisherEvents {
  std::function<void(Version)> begins;                  // before the version's first byte is sent
  std::function<void(const PublishReport&)> published;  // the overlay has the whole encoded policy
  // Returns the note that workers get with a policy, at most overlay::kNoteBytesMax. Called on its own thread while the
  // policy is encoded.
  std::function<std::string(const delta::StateView&)> note = {};
};

// publish() and wait_until_published() belong to the training thread; request_catch_up() may be called from any.
//
// At most two policies are in memory, the newest published and the next. The trainer makes a third only once
// wait_until_published() has returned true.
class Publisher {
 public:
  // Memory, in policies: the newest published one and the next, and copies of the stored deltas (together at most one
  // policy / kFoldShare) while they are folded into one for a late worker.
  static constexpr double kPoliciesHeld = 2 + 1.0 / overlay::kFoldShare;

  explicit Publisher(delta::EncodeOptions options, PublisherEvents events = {});
  ~Publisher();  // stop()
  Publisher(const Publisher&) = delete;
  Publisher& operator=(const Publisher&) = delete;

  // Sets the overlay node; call it before the first publish().
  void attach(overlay::LearnerNode* node) { node_ = node; }
  // Sets where each policy is stored as well; call it before the first publish(), or not at all.
  void attach(store::Outbox* outbox) { outbox_ = outbox; }
  // Passes the policy to the thread and returns. Versions must grow, and the previous policy must be published (both
  // checked).
  void publish(Version version, delta::SharedState policy);
  // Waits until the last policy of publish() is published; false after `patience`. Returns its error if publication
  // failed.
  Result<bool> wait_until_published(Duration patience);
  // Requests a publication for late workers: the stored deltas from `from` to the newest version, folded into one. It
  // is a full snapshot if `from` is absent or the deltas cannot be folded. Equal requests are merged.
  void request_catch_up(std::optional<Version> from);
  // Stops the thread, even while it encodes. Afterwards it does not use the overlay.
  void stop();

 private:
  struct Policy {
    Version version;
    delta::Digest digest{};  // of `state`, once it is published
    std::string note;
    delta::SharedState state;
  };

  void publish_until_stopped();
  // Encodes the policy and sends it during the encoding. Sets `next.note`.
  Result<PublishReport> encode_and_send(Policy& next);
  Status publish_catch_up(std::optional<Version> from);  // see request_catch_up()
  Status fold_deltas(Version from);
  Status publish_snapshot();
  // Stores a snapshot of the newest policy if the store wants one.
  void store_anchor();
  // `outgoing`, which may be null, gets the same bytes.
  delta::PatchSink sink_of(overlay::PublicationWriter& writer, store::OutgoingPatch* outgoing = nullptr) const;

  const delta::EncodeOptions options_;
  const PublisherEvents events_;
  overlay::LearnerNode* node_ = nullptr;
  store::Outbox* outbox_ = nullptr;  // null: the run has no store
  std::optional<Policy> newest_;     // the newest published policy; used only by the thread, like the next member
  delta::LeafDigests leaves_;        // of the tensors of `newest_`, so that the next delta need not compute them again
  std::mutex mutex_;
  std::condition_variable wake_, publication_ended_;
  std::optional<Policy> next_;    // the policy that waits for publication or is being published; guarded by mutex_
  std::optional<Error> failure_;  // of a publication; guarded by mutex_; ends further publications
  std::set<std::optional<Version>> catch_up_requests_;  // guarded by mutex_
  std::atomic<bool> stopping_ = false;                  // written under mutex_
  std::thread thread_;
};

}  // namespace echoline::learner

// The learner's policies on their way to a store: first into files of the run's folder, from there by a thread of its
// own. So a slow or absent store delays neither training nor the overlay, and a crash loses nothing.
#pragma once
#include <condition_variable>
#include <deque>
#include <filesystem>
#include <map>
#include <mutex>
#include <thread>

#include "store/policy_writer.hpp"

namespace echoline::delta {
class PendingFile;
}

namespace echoline::store {

// A version that is in the store.
struct StoredVersion {
  Version version;
  bool snapshot = false;
  std::uint64_t patch_bytes = 0;
  std::uint64_t requests = 0;  // all since the version before, the lease's included
  double seconds = 0;          // from the end of its encoding until it was ready
};

struct OutboxOptions {
  StoreSettings settings;
  std::filesystem::path folder;  // for the files; kept from one start of the run to the next
  std::string run_id;
  Version resumed_at;  // the version that the run goes on from; later ones in the folder are void
  std::map<std::string, std::string> model_files;
  std::function<void(const StoredVersion&)> stored;  // called on the outbox's thread
};

class Outbox;

// A patch that is being written to a file. An error of the file leaves the version out of the store, and is no error of
// the publication.
class OutgoingPatch {
 public:
  OutgoingPatch(Outbox& outbox, Version version, std::optional<Version> base, const std::filesystem::path& path);
  ~OutgoingPatch();
  void write(std::span<const std::byte> bytes);
  // The patch is complete: queues it. Without this call, the version is left out.
  void finish();

 private:
  Outbox& outbox_;
  const Version version_;
  const std::optional<Version> base_;
  const std::filesystem::path path_;
  std::unique_ptr<delta::PendingFile> file_;
  std::uint64_t bytes_ = 0;
  std::optional<Error> error_;
};

// begin() and wants_anchor() belong to one thread, the publisher's; the others may be called from any.
class Outbox {
 public:
  // Starts the threads. kInvalid: the address, or no credentials. kIo: the folder.
  static Result<std::unique_ptr<Outbox>> open(const overlay::trust::SigningKey& key, OutboxOptions options);
  ~Outbox();  // stop()
  Outbox(const Outbox&) = delete;
  Outbox& operator=(const Outbox&) = delete;

  // For a version's delta, or for a snapshot (without `base`). Null if the version is left out: the folder is full, or
  // the base was left out.
  std::unique_ptr<OutgoingPatch> begin(Version version, std::optional<Version> base);
  // Whether a snapshot of this version, the newest, should follow: there were enough deltas, or it was left out.
  bool wants_anchor(Version version) const;
  // Waits until everything is stored, or nothing more will be (another learner publishes there, or stop() was called).
  // False after `patience`.
  bool wait_until_stored(Duration patience);
  // Ends the threads. Versions that are not stored stay in the folder.
  void stop();
  std::size_t waiting() const;

 private:
  friend class OutgoingPatch;
  struct Item {
    std::filesystem::path path;
    Version version;
    std::optional<Version> base;
    std::uint64_t bytes = 0;
    TimePoint queued_at{};
  };
  Outbox(const overlay::trust::SigningKey& key, OutboxOptions options) : key_(key), options_(std::move(options)) {}
  Status read_folder();
  Result<std::string> read_holder() const;
  void queue(Item item);
  void leave_out(Version version, std::string_view why);
  void upload_until_stopped();
  void renew_until_stopped();
  Status open_writer();
  Status upload(const Item& item);
  // Waits for `pause` or the stop.
  void pause(std::unique_lock<std::mutex>& lock, Duration pause);

  const overlay::trust::SigningKey key_;
  const OutboxOptions options_;
  const SystemClock clock_;
  std::string holder_;
  std::atomic<bool> stopping_ = false;  // also ends requests
  std::unique_ptr<ObjectStore> store_;
  std::uint64_t requests_before_ = 0;  // of the versions before

  mutable std::mutex mutex_;
  std::condition_variable wake_, stored_;
  std::unique_ptr<PolicyWriter> writer_;  // set once, by the uploading thread
  std::deque<Item> items_;
  std::uint64_t bytes_ = 0, last_number_ = 0;
  std::optional<Version> last_;  // the newest version that was queued; none: the next must be a snapshot
  std::uint32_t deltas_since_anchor_ = 0;
  bool is_lost_ = false;  // another learner publishes to the prefix
  std::thread uploader_, renewer_;
};

}  // namespace echoline::store

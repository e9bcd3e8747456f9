// Applies deltas (the changes from one policy version to another) to checkpoints on disk atomically. A new checkpoint
// appears under its name only when complete. A checkpoint changed in place is the old or the new one after a crash at
// any moment, once recover() has run.
//
// In place, the replacements are first written to a journal beside the files (FORMAT.md, "Journals"), under a temporary
// name; a crash then leaves the files unchanged. After the result is verified, the journal is committed: it is made
// durable and renamed to its final name. From then on recover() completes the application after a crash.
#pragma once
#include <atomic>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string_view>

#include "delta/checkpoint.hpp"
#include "delta/patch.hpp"

namespace echoline::delta {

enum class ApplyStage {
  kRecordWritten,   // a record was written to the journal
  kCommitted,       // the journal is durable: the application will happen
  kRangeWritten,    // pages were written to a file of the checkpoint
  kVerified,        // the files have the digest of the result
  kJournalRemoved,  // the application is complete
};

struct ApplyOptions {
  unsigned threads = 1;
  Progress progress = nullptr;                         // of resolving the delta, then of writing
  std::function<void(ApplyStage)> observer = nullptr;  // called from one thread at a time
  const std::atomic<bool>* stop = nullptr;             // kCancelled if it becomes true before the commit
};

// The outcome of recover(), which discards an uncommitted journal and completes a committed one. In ascending order of
// importance: if it did both, the outcome is kCompleted.
enum class Recovery { kNothing, kDiscarded, kCompleted };

// Completes an application that was interrupted after its commit. Removes the journal of an application that was
// interrupted earlier. If `path` is a folder, covers all its files. If `path` is a shard, also covers the checkpoint
// that contains it. kCorrupt, without touching the files, if the journal is damaged or belongs to other files.
// kUnavailable while another process uses the files.
Result<Recovery> recover(const std::filesystem::path& path, const ApplyOptions& options = {});

struct InPlaceReport {
  PatchInfo patch;
  bool already_applied = false;            // the checkpoint was the result already; nothing was written
  Recovery recovery = Recovery::kNothing;  // what recover() did first
  std::uint64_t journal_bytes = 0;         // disk space used besides the checkpoint
  std::uint64_t written_bytes = 0;         // in whole pages of the checkpoint's files
};

// Turns the checkpoint at `path` from the delta's base into its result. Calls recover() first. An error before the
// commit changes nothing: kStale (neither base nor result), kInvalid (another model, a snapshot, files that are links),
// kCorrupt, kIo, kUnavailable (another process uses the files). An error after the commit says that the journal still
// exists; the next recover() continues.
Result<InPlaceReport> apply_in_place(const std::filesystem::path& path, std::span<const std::byte> patch,
                                     const ApplyOptions& options = {});

// Whether a file is the journal of an application in place, finished or not. Such files belong to no checkpoint.
bool is_journal_name(std::string_view file_name);

// A checkpoint that no application in place changes while this object lives. open() calls recover() first.
class LockedCheckpoint {
 public:
  // Errors as those of Checkpoint::open() and recover().
  static Result<LockedCheckpoint> open(const std::filesystem::path& path, const ApplyOptions& options = {});
  const Checkpoint& operator*() const { return checkpoint_; }
  const Checkpoint* operator->() const { return &checkpoint_; }
  Recovery recovery() const { return recovery_; }  // what open() recovered

 private:
  explicit LockedCheckpoint(Checkpoint checkpoint) : checkpoint_(std::move(checkpoint)) {}
  Checkpoint checkpoint_;
  std::shared_ptr<const void> locks_;  // released by the last owner
  Recovery recovery_ = Recovery::kNothing;
};

}  // namespace echoline::delta

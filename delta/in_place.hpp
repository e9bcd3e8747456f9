// Deltas applied to checkpoints on disk, whole or not at all: a new checkpoint appears complete under its name, and one
// that is changed in place is the old or the new one after a crash at any moment, once recover() has been there.
//
// In place, the replacements first go into a journal beside the files (FORMAT.md, "Journals"). While it is written it
// has a name of its own, and a crash leaves the files as they were. When the result is proven, the journal is made
// durable and takes its final name, and from then on a crash leaves a journal that recover() completes.
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
  kRecordWritten,   // to the journal
  kCommitted,       // the journal is durable: the application happens, whatever comes
  kRangeWritten,    // of pages, to a file of the checkpoint
  kVerified,        // the files have the digest of the result
  kJournalRemoved,  // the end
};

struct ApplyOptions {
  unsigned threads = 1;
  Progress progress = nullptr;                         // of resolving the delta, then of writing
  std::function<void(ApplyStage)> observer = nullptr;  // called by one thread at a time
  const std::atomic<bool>* stop = nullptr;             // kCancelled when it becomes true before anything is decided
};

enum class Recovery { kNothing, kDiscarded, kCompleted };

// Completes an application in place that was interrupted after its decision, and removes what one left that was
// interrupted before. For a folder, of any of its files; for a file, also of the checkpoint it is a shard of. kCorrupt
// when the journal is damaged or was written for other files (they are not touched then), kUnavailable while another
// process works on them.
Result<Recovery> recover(const std::filesystem::path& path, const ApplyOptions& options = {});

struct InPlaceReport {
  PatchInfo patch;
  bool already_applied = false;     // the checkpoint was the result before; nothing was written
  Recovery recovery{};              // what was found and done first
  std::uint64_t journal_bytes = 0;  // disk space it took besides the checkpoint
  std::uint64_t written_bytes = 0;  // of whole pages in the checkpoint's files
};

// Turns the checkpoint at `path` from the delta's base into its result. recover() is called first. On any error before
// the decision nothing has changed: kStale (neither base nor result), kInvalid (another model, a snapshot, files that
// are links), kCorrupt, kIo, kUnavailable (another process reads or changes the files). An error after it says that the
// journal is still there; the next recover() goes on.
Result<InPlaceReport> apply_in_place(const std::filesystem::path& path, std::span<const std::byte> patch,
                                     const ApplyOptions& options = {});

// Whether a file is a journal of an application in place, finished or not; such files belong to no checkpoint.
bool is_journal_name(std::string_view file_name);

// A checkpoint that no application in place changes while this object lives. recover() is called first.
class SettledCheckpoint {
 public:
  // Errors are those of Checkpoint::open() and recover().
  static Result<SettledCheckpoint> open(const std::filesystem::path& path, const ApplyOptions& options = {});
  const Checkpoint& operator*() const { return checkpoint_; }
  const Checkpoint* operator->() const { return &checkpoint_; }
  Recovery recovery() const { return recovery_; }  // what open() found and did

 private:
  explicit SettledCheckpoint(Checkpoint checkpoint) : checkpoint_(std::move(checkpoint)) {}
  Checkpoint checkpoint_;
  std::shared_ptr<const void> locks_;  // let go by the last owner
  Recovery recovery_{};
};

}  // namespace echoline::delta

// Applies a journal (journal.hpp: the bytes to write to the files of a checkpoint) to its files. Internal to this
// folder.
#pragma once
#include <filesystem>
#include <mutex>
#include <optional>
#include <vector>

#include "delta/checkpoint.hpp"
#include "delta/in_place.hpp"
#include "delta/journal.hpp"
#include "delta/locked_files.hpp"

namespace echoline::delta {

// Computes the digest that the checkpoint will have after the journal is applied; its files are the journal's. Writes
// nothing. The result does not depend on which part was applied before. Absent if a record concerns bytes outside
// tensors.
std::optional<Digest> digest_after(const Checkpoint& checkpoint, const Journal& journal, unsigned threads);

// Writes the pages that a journal changes to its files and makes them durable. Idempotent.
class Redo {
 public:
  // `paths` and `files`: those of journal.files.
  Redo(const Journal& journal, const std::vector<std::filesystem::path>& paths, const LockedFiles& files,
       const ApplyOptions& options);
  Status run();
  std::uint64_t written_bytes() const { return written_bytes_; }

 private:
  Status write(const JournalRecord& record);
  const Journal& journal_;
  const std::vector<std::filesystem::path>& paths_;
  const LockedFiles& files_;
  const ApplyOptions& options_;
  std::mutex mutex_;
  std::optional<Error> error_;
  std::uint64_t done_bytes_ = 0, total_bytes_ = 0, written_bytes_ = 0;
};

}  // namespace echoline::delta

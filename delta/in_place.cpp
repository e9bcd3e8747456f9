// Applies a delta to a checkpoint's files in place. First writes the new values to a journal, then to the files, so
// that recover() can complete an interrupted application. `echoline delta` calls it.
#include "delta/in_place.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "delta/digest.hpp"
#include "delta/journal.hpp"
#include "delta/locked_files.hpp"
#include "delta/mapped_file.hpp"
#include "delta/patch_format.hpp"
#include "delta/pending_file.hpp"
#include "delta/redo.hpp"

namespace echoline::delta {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kOperation = "apply in place";
constexpr std::string_view kRecoverOperation = "recover checkpoint";
constexpr std::string_view kJournalSuffix = ".echoline-journal";
constexpr std::string_view kPartSuffix = ".part";  // after the name of a journal that is being written

// ---- names ----

fs::path journal_of(const fs::path& folder, const std::string& file_name) {
  return folder / fmt::format(".{}{}", file_name, kJournalSuffix);
}

// The name of the file or index to which a journal belongs; the inverse of journal_of().
std::string journalled_name(const fs::path& journal) {
  std::string name = journal.filename().string().substr(1);  // without the dot
  name.resize(name.size() - kJournalSuffix.size());
  return name;
}

// The temporary name of a journal that is being written; a rename makes it the journal.
fs::path temporary_path_of(const fs::path& journal) { return journal.string() + std::string(kPartSuffix); }

// The path without symbolic links, or the path itself if it cannot be resolved.
fs::path real_path(const fs::path& path) {
  std::error_code ec;
  fs::path canonical_path = fs::canonical(path, ec);
  return ec ? path : canonical_path;
}

// The journal is named after the checkpoint's file, or after the index if there are several files (shards).
fs::path journal_path_of(const Checkpoint& checkpoint) {
  if (checkpoint.is_sharded()) return journal_of(real_path(checkpoint.path()), kCheckpointIndexName);
  const fs::path file = real_path(checkpoint.file_path(0));
  return journal_of(file.parent_path(), file.filename());
}

// The checkpoint's journal, and those of its files, because each file can also be opened as a checkpoint.
std::set<fs::path> file_journals(const Checkpoint& checkpoint) {
  std::set<fs::path> journals{journal_path_of(checkpoint)};
  for (std::size_t i = 0; i < checkpoint.file_count(); ++i) {
    const fs::path file = real_path(checkpoint.file_path(i));
    journals.insert(journal_of(file.parent_path(), file.filename()));
  }
  return journals;
}

// Journals of the sharded checkpoints that may contain this checkpoint's files.
std::set<fs::path> index_journals(const Checkpoint& checkpoint) {
  std::set<fs::path> journals;
  for (std::size_t i = 0; i < checkpoint.file_count(); ++i)
    journals.insert(journal_of(real_path(checkpoint.file_path(i)).parent_path(), kCheckpointIndexName));
  journals.erase(journal_path_of(checkpoint));
  return journals;
}

std::vector<fs::path> files_of(const Checkpoint& checkpoint) {
  std::vector<fs::path> files;
  for (std::size_t i = 0; i < checkpoint.file_count(); ++i) files.push_back(checkpoint.file_path(i));
  return files;
}

// The files' real paths.
std::set<fs::path> resolved_files(const Checkpoint& checkpoint) {
  std::set<fs::path> files;
  for (const fs::path& file : files_of(checkpoint)) files.insert(real_path(file));
  return files;
}

// Also of a symbolic link without a target.
bool name_exists(const fs::path& path) {
  std::error_code ec;
  return fs::exists(fs::symlink_status(path, ec));
}

void notify_observer(const ApplyOptions& options, ApplyStage stage) {
  if (options.observer) options.observer(stage);
}

// Checks that the checkpoint now has the digest of the result.
Status verify(const fs::path& path, const Digest& result, const ApplyOptions& options) {
  ECHO_ASSIGN(const Checkpoint checkpoint, Checkpoint::open(path));
  ECHO_ASSIGN(const Digest actual, digest_state(checkpoint.view(), options.threads));
  if (actual != result)
    return fail(Code::kCorrupt, kOperation,
                "{}: after writing, the digest is {}, expected {}: another program wrote to the files, or the disk or "
                "memory of this machine corrupts data",
                path.string(), actual.hex(), result.hex());
  notify_observer(options, ApplyStage::kVerified);
  return ok();
}

// ---- recovery ----

Error damaged(const fs::path& journal, std::string_view defect) {
  return fail(
      Code::kCorrupt, kRecoverOperation,
      "{}: {}. This journal holds the rest of an interrupted application of a delta, so that the files beside it "
      "may be neither the old nor the new version; nothing was changed. Restore them from a copy unless they are "
      "known to be right, then remove the journal",
      journal.string(), defect);
}

struct OpenJournal {
  MappedFile file;
  Journal journal;
};

Result<OpenJournal> open_journal(const fs::path& path) {
  OpenJournal opened;
  ECHO_ASSIGN(opened.file, MappedFile::open(path, kRecoverOperation));
  auto journal = parse_journal(opened.file.bytes());
  if (!journal) return damaged(path, journal.error().detail);
  opened.journal = std::move(journal).value();
  return opened;
}

// Checks that the files have the sizes for which the journal was written; otherwise it belongs to other files.
Status check_sizes(const Journal& journal, const fs::path& journal_path, const std::vector<fs::path>& paths,
                   const LockedFiles& files) {
  for (std::size_t i = 0; i < paths.size(); ++i) {
    struct stat info {};
    if (::fstat(files.fd(i), &info) != 0) return os_error(kRecoverOperation, paths[i]);
    if (static_cast<std::uint64_t>(info.st_size) != journal.files[i].bytes)
      return damaged(journal_path, fmt::format("{} has {} bytes, but was written for a file of {}", paths[i].string(),
                                               info.st_size, journal.files[i].bytes));
  }
  return ok();
}

Status remove_journal(const fs::path& journal, const ApplyOptions& options) {
  if (::unlink(journal.c_str()) != 0) return os_error(kOperation, journal);
  ECHO_TRY(sync_folder(journal.parent_path()));
  notify_observer(options, ApplyStage::kJournalRemoved);
  return ok();
}

// Whether the journal belongs to any of these files.
bool concerns_any(const Journal& journal, const fs::path& folder, const std::set<fs::path>& files) {
  return std::ranges::any_of(journal.files,
                             [&](const JournalFile& file) { return files.contains(folder / file.name); });
}

// Completes a journal if it concerns any of the checkpoint's files.
Result<Recovery> complete_journal(const fs::path& path, const std::set<fs::path>& checkpoint_files,
                                  const ApplyOptions& options) {
  if (!name_exists(path)) return Recovery::kNothing;
  auto opened = open_journal(path);
  // If the journal is gone now, another process has just completed it.
  if (!opened && opened.error().code == Code::kNotFound) return Recovery::kNothing;
  if (!opened) return std::move(opened).error();
  const Journal& journal = opened->journal;
  const fs::path folder = path.parent_path();
  if (!concerns_any(journal, folder, checkpoint_files)) return Recovery::kNothing;
  std::vector<fs::path> paths;
  for (const JournalFile& file : journal.files) paths.push_back(folder / file.name);

  auto locked = LockedFiles::lock(paths, LockMode::kExclusive, kRecoverOperation);
  if (!locked) {
    Error error = std::move(locked).error();
    error.detail += fmt::format(". An interrupted application of a delta must be completed from {}", path.string());
    return error;
  }
  const auto files = std::move(locked).value();
  // Another process may have completed the journal before this one had the locks.
  if (!name_exists(path)) return Recovery::kNothing;
  ECHO_TRY(check_sizes(journal, path, paths, *files));
  const std::string name = journalled_name(path);
  const fs::path target = name == kCheckpointIndexName ? folder : folder / name;
  ECHO_ASSIGN(const Checkpoint checkpoint, Checkpoint::open(target));
  if (files_of(checkpoint) != paths)
    return damaged(path, "it was written for other files than those of the checkpoint");
  if (digest_after(checkpoint, journal, options.threads) != journal.result)
    return damaged(path, "another program has changed the files since it was written");
  ECHO_TRY(Redo(journal, paths, *files, options).run());
  ECHO_TRY(verify(target, journal.result, options));
  ECHO_TRY(remove_journal(path, options));
  return Recovery::kCompleted;
}

// Removes unfinished journals. A process that writes one holds the lock, so a free lock shows that its writer has
// ended. Errors are ignored, because an unfinished journal does no harm.
Recovery discard_unfinished_journals(const Checkpoint& checkpoint) {
  std::vector<fs::path> temporary_paths;
  for (const fs::path& journal : file_journals(checkpoint))
    if (name_exists(temporary_path_of(journal))) temporary_paths.push_back(temporary_path_of(journal));
  if (temporary_paths.empty()) return Recovery::kNothing;
  const auto locks = LockedFiles::lock(files_of(checkpoint), LockMode::kExclusive, kRecoverOperation);  // until the end
  if (!locks) return Recovery::kNothing;
  bool any_discarded = false;
  for (const fs::path& path : temporary_paths) any_discarded = ::unlink(path.c_str()) == 0 || any_discarded;
  return any_discarded ? Recovery::kDiscarded : Recovery::kNothing;
}

// Fails if a journal appeared before the caller had the locks of the files.
Status check_nothing_to_recover(const Checkpoint& checkpoint, std::string_view operation) {
  const std::set<fs::path> files = resolved_files(checkpoint);
  const auto must_be_completed = [&](const fs::path& journal) {
    if (!name_exists(journal)) return false;
    const auto opened = open_journal(journal);
    // A journal that cannot be read may concern these files.
    return !opened || concerns_any(opened->journal, journal.parent_path(), files);
  };
  if (std::ranges::any_of(file_journals(checkpoint), name_exists) ||
      std::ranges::any_of(index_journals(checkpoint), must_be_completed))
    return fail(Code::kUnavailable, operation, "{}: another process has just changed it; try again",
                checkpoint.path().string());
  return ok();
}

// ---- application ----

// A journal being written; removed unless it is committed.
class PendingJournal {
 public:
  explicit PendingJournal(fs::path path) : path_(std::move(path)), temporary_path_(temporary_path_of(path_)) {
    ::unlink(temporary_path_.c_str());  // may exist after a crash
    fd_.emplace(::open(temporary_path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644));
    if (fd_->get() < 0) error_ = os_error(kOperation, temporary_path_);
  }
  PendingJournal(const PendingJournal&) = delete;
  PendingJournal& operator=(const PendingJournal&) = delete;
  ~PendingJournal() {
    if (!committed_) ::unlink(temporary_path_.c_str());
  }
  Status write(ByteSpan bytes) {
    if (error_) return *error_;
    Status status = write_all(fd_->get(), bytes, kOperation, temporary_path_);
    if (!status) error_ = status.error();
    return status;
  }
  // After success, the journal survives a crash.
  Status commit() {
    if (error_) return *error_;
    if (::fsync(fd_->get()) != 0 || ::rename(temporary_path_.c_str(), path_.c_str()) != 0)
      return os_error(kOperation, temporary_path_);
    committed_ = true;
    if (Status status = sync_folder(path_.parent_path()); !status) {
      ::unlink(path_.c_str());  // it may not be durable, and the checkpoint is unchanged
      return status;
    }
    return ok();
  }

 private:
  fs::path path_, temporary_path_;
  std::optional<Descriptor> fd_;
  std::optional<Error> error_;
  bool committed_ = false;
};

// Refuses links: the change would show under the file's other names too.
Status check_changeable(const std::vector<fs::path>& files) {
  for (const fs::path& file : files) {
    struct stat info {};
    if (::lstat(file.c_str(), &info) != 0) return os_error(kOperation, file);
    if (S_ISLNK(info.st_mode) || info.st_nlink > 1)
      return fail(Code::kInvalid, kOperation,
                  "{}: this is {}, so the same bytes have another name that would change too (model caches work that "
                  "way). Write a new checkpoint instead, or change a copy",
                  file.string(), S_ISLNK(info.st_mode) ? "a symbolic link" : "one of several hard links");
  }
  return ok();
}

// Resolves the patch against the checkpoint, writes the new values to the journal and commits it.
Result<PatchInfo> write_journal(const Checkpoint& checkpoint, ByteSpan patch, const PatchInfo& info,
                                PendingJournal& pending, InPlaceReport& report, const ApplyOptions& options) {
  const auto check_not_stopped = [&]() -> Status {
    if (options.stop && *options.stop) return fail(Code::kCancelled, kOperation, "stopped; nothing was changed");
    return ok();
  };
  JournalWriter writer([&](ByteSpan bytes) { return pending.write(bytes); });
  std::vector<JournalFile> files;
  for (std::size_t i = 0; i < checkpoint.file_count(); ++i)
    files.push_back({.name = checkpoint.file_path(i).filename().string(), .bytes = checkpoint.file_bytes(i).size()});
  ECHO_TRY(writer.begin(*info.base, info.result, files));
  const auto sink = [&](TensorWrite&& write) -> Status {
    ECHO_TRY(check_not_stopped());
    const Checkpoint::Place place = checkpoint.place(write.tensor);
    ECHO_TRY(writer.add(place.file, place.first_byte + write.first_byte, write));
    notify_observer(options, ApplyStage::kRecordWritten);
    return ok();
  };
  ECHO_ASSIGN(PatchInfo resolved, resolve_delta(patch, checkpoint.view(), sink,
                                                {.threads = options.threads, .progress = options.progress}));
  ECHO_TRY(check_not_stopped());
  ECHO_TRY(writer.finish());
  ECHO_TRY(pending.commit());
  report.journal_bytes = writer.bytes();
  notify_observer(options, ApplyStage::kCommitted);
  return resolved;
}

}  // namespace

bool is_journal_name(std::string_view file_name) {
  if (file_name.ends_with(kPartSuffix)) file_name.remove_suffix(kPartSuffix.size());
  return file_name.starts_with('.') && file_name.ends_with(kJournalSuffix);
}

Result<Recovery> recover(const fs::path& path, const ApplyOptions& options) {
  ECHO_ASSIGN(const Checkpoint checkpoint, Checkpoint::open(path));
  std::set<fs::path> journals = file_journals(checkpoint);
  journals.merge(index_journals(checkpoint));
  const std::set<fs::path> files = resolved_files(checkpoint);
  Recovery outcome = discard_unfinished_journals(checkpoint);
  for (const fs::path& journal : journals) {
    ECHO_ASSIGN(const Recovery recovery,
                catch_out_of_memory(kRecoverOperation, [&] { return complete_journal(journal, files, options); }));
    outcome = std::max(outcome, recovery);
  }
  return outcome;
}

Result<LockedCheckpoint> LockedCheckpoint::open(const fs::path& path, const ApplyOptions& options) {
  ECHO_ASSIGN(const Recovery recovery, recover(path, options));
  ECHO_ASSIGN(Checkpoint opened, Checkpoint::open(path));
  LockedCheckpoint locked(std::move(opened));
  locked.recovery_ = recovery;
  ECHO_ASSIGN(locked.locks_, LockedFiles::lock(files_of(locked.checkpoint_), LockMode::kShared, "open checkpoint"));
  ECHO_TRY(check_nothing_to_recover(locked.checkpoint_, "open checkpoint"));
  return locked;
}

Result<InPlaceReport> apply_in_place(const fs::path& path, std::span<const std::byte> patch,
                                     const ApplyOptions& options) {
  InPlaceReport report;
  ECHO_ASSIGN(report.recovery, recover(path, options));
  ECHO_ASSIGN(report.patch, inspect(patch));
  if (report.patch.kind != PatchKind::kDelta)
    return fail(Code::kInvalid, kOperation,
                "the patch is a snapshot, which replaces a checkpoint as a whole; write it as a new one");
  ECHO_ASSIGN(const Checkpoint checkpoint, Checkpoint::open(path));
  const std::vector<fs::path> paths = files_of(checkpoint);
  ECHO_TRY(check_changeable(paths));
  ECHO_ASSIGN(const auto files, LockedFiles::lock(paths, LockMode::kExclusive, kOperation));
  ECHO_TRY(check_nothing_to_recover(checkpoint, kOperation));

  const fs::path journal_path = journal_path_of(checkpoint);
  {  // on an error, the destructor removes the uncommitted journal
    PendingJournal pending(journal_path);
    auto resolved = write_journal(checkpoint, patch, report.patch, pending, report, options);
    if (!resolved) {
      // The checkpoint is not the delta's base; it may be its result already.
      if (resolved.error().code != Code::kStale) return std::move(resolved).error();
      ECHO_ASSIGN(const Digest actual, digest_state(checkpoint.view(), options.threads));
      if (actual != report.patch.result) return std::move(resolved).error();
      report.already_applied = true;
      return report;
    }
  }
  const auto write_files = [&]() -> Status {
    ECHO_ASSIGN(const OpenJournal opened, open_journal(journal_path));
    Redo redo(opened.journal, paths, *files, options);
    ECHO_TRY(redo.run());
    report.written_bytes = redo.written_bytes();
    ECHO_TRY(verify(path, report.patch.result, options));
    return remove_journal(journal_path, options);
  };
  if (Status status = catch_out_of_memory(kOperation, write_files); !status) {
    Error error = std::move(status).error();
    error.detail += fmt::format(". The journal {} keeps the changes: fix the cause, then repeat the command",
                                journal_path.string());
    return error;
  }
  return report;
}

}  // namespace echoline::delta

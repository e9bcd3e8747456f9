// Writes a new checkpoint under a temporary name, verifies it, and renames it. `echoline delta` calls it.
#include "delta/new_checkpoint.hpp"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "delta/digest.hpp"
#include "delta/patch_format.hpp"
#include "delta/pending_file.hpp"

namespace echoline::delta {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kOperation = "write checkpoint";
constexpr std::string_view kSuffix = ".safetensors";

// Files with these extensions hold weights. They are not copied from the old checkpoint, because their weights are of
// its version.
constexpr std::array<std::string_view, 10> kWeightExtensions = {".safetensors", ".bin", ".pt",  ".pth",     ".ckpt",
                                                                ".gguf",        ".h5",  ".npz", ".msgpack", ".onnx"};

// Removes trailing slashes, so that filename() is not empty.
fs::path normalized(const fs::path& path) {
  fs::path normal = path.lexically_normal();
  return normal.has_filename() ? normal : normal.parent_path();
}

Error exists_error(const fs::path& target) {
  return fail(Code::kInvalid, kOperation, "{} exists and is not overwritten; choose another name or remove it",
              target.string());
}

// Copies the bytes [offset, end) from one file to another, by the file system itself if it can. Errors name the source,
// because the target still has a temporary name.
Status copy_range(int from, int to, std::uint64_t offset, std::uint64_t end, const fs::path& from_path) {
  while (offset < end) {
    auto from_offset = static_cast<off_t>(offset), to_offset = from_offset;
    const auto bytes_left = static_cast<std::size_t>(end - offset);
    const ssize_t copied_bytes = ::copy_file_range(from, &from_offset, to, &to_offset, bytes_left, /*flags=*/0);
    if (copied_bytes < 0 && errno == EINTR) continue;
    if (copied_bytes <= 0) break;
    offset += static_cast<std::uint64_t>(copied_bytes);
  }
  // Reads and writes the bytes that copy_file_range() left, for instance because the file systems differ.
  constexpr std::size_t kBufferBytes = 1u << 20;
  std::vector<std::byte> buffer(offset < end ? kBufferBytes : 0);
  while (offset < end) {
    const auto bytes_wanted = static_cast<std::size_t>(std::min<std::uint64_t>(end - offset, buffer.size()));
    const ssize_t copied_bytes = ::pread(from, buffer.data(), bytes_wanted, static_cast<off_t>(offset));
    if (copied_bytes < 0 && errno == EINTR) continue;
    if (copied_bytes < 0) return os_error(kOperation, from_path);
    if (copied_bytes == 0) return fail(Code::kIo, kOperation, "{}: the file became shorter", from_path.string());
    ECHO_TRY(write_all_at(to, std::span(buffer).first(static_cast<std::size_t>(copied_bytes)), offset, kOperation,
                          from_path));
    offset += static_cast<std::uint64_t>(copied_bytes);
  }
  return ok();
}

// A file or folder under a temporary name beside `target`; removed unless it is published.
class PendingOutput {
 public:
  static Result<PendingOutput> make(const fs::path& target, bool is_folder) {
    std::error_code ec;
    if (fs::exists(fs::symlink_status(target, ec))) return exists_error(target);
    PendingOutput pending;
    pending.target_ = target;
    std::string name = (folder_of(target) / ("." + target.filename().string() + ".XXXXXX")).string();
    // mkdtemp() and mkostemp() let only the owner read what they make.
    if (is_folder) {
      if (::mkdtemp(name.data()) == nullptr) return os_error(kOperation, target);
      pending.path_ = name;
      if (::chmod(name.c_str(), 0755) != 0) return os_error(kOperation, target);
    } else {
      const Descriptor fd(::mkostemp(name.data(), O_CLOEXEC));
      if (fd.get() < 0) return os_error(kOperation, target);
      pending.path_ = name;
      if (::fchmod(fd.get(), 0644) != 0) return os_error(kOperation, target);
    }
    return pending;
  }
  PendingOutput(PendingOutput&& other) noexcept
      : target_(std::move(other.target_)), path_(std::exchange(other.path_, {})) {}
  PendingOutput& operator=(PendingOutput&&) = delete;
  ~PendingOutput() {
    std::error_code ec;
    if (!path_.empty()) fs::remove_all(path_, ec);
  }
  const fs::path& path() const { return path_; }

  // Renames the output to `target`. Its content must be durable already.
  Status publish() {
    if (::renameat2(AT_FDCWD, path_.c_str(), AT_FDCWD, target_.c_str(), RENAME_NOREPLACE) != 0) {
      if (errno == EEXIST) return exists_error(target_);
      std::error_code ec;
      if (errno != EINVAL && errno != ENOSYS) return os_error(kOperation, target_);
      // The file system does not know RENAME_NOREPLACE.
      if (fs::exists(fs::symlink_status(target_, ec))) return exists_error(target_);
      if (::rename(path_.c_str(), target_.c_str()) != 0) return os_error(kOperation, target_);
    }
    path_.clear();
    return sync_folder(folder_of(target_));
  }

 private:
  PendingOutput() = default;
  fs::path target_, path_;
};

// The files of a new checkpoint. finish() copies from `like` all bytes that were not written.
class NewFiles {
 public:
  static Result<NewFiles> create(const Checkpoint& like, const fs::path& path) {
    NewFiles files(like);
    for (std::size_t i = 0; i < like.file_count(); ++i) {
      files.paths_.push_back(like.is_folder() ? path / like.file_path(i).filename() : path);
      const fs::path& file_path = files.paths_.back();
      // A single file exists already: PendingOutput made it.
      const int fd = ::open(file_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
      if (fd < 0) return os_error(kOperation, file_path);
      files.fds_.push_back(std::make_unique<Descriptor>(fd));
      if (::ftruncate(fd, static_cast<off_t>(like.file_bytes(i).size())) != 0) return os_error(kOperation, file_path);
    }
    return files;
  }
  // Writes a tensor's content from its byte `first_byte` on.
  Status write(std::size_t tensor, std::uint64_t first_byte, std::span<const std::byte> bytes) {
    if (bytes.empty()) return ok();
    const Checkpoint::Place place = like_->place(tensor);
    const std::uint64_t begin = place.first_byte + first_byte;
    written_.push_back({.file = place.file, .begin = begin, .end = begin + bytes.size()});
    return write_all_at(fds_[place.file]->get(), bytes, begin, kOperation, paths_[place.file]);
  }
  Status finish() {
    std::ranges::sort(
        written_, [](const Range& a, const Range& b) { return std::tie(a.file, a.begin) < std::tie(b.file, b.begin); });
    auto next_written = written_.begin();
    for (std::size_t i = 0; i < fds_.size(); ++i) {
      const fs::path& source = like_->file_path(i);
      const Descriptor from(::open(source.c_str(), O_RDONLY | O_CLOEXEC));
      if (from.get() < 0) return os_error(kOperation, source);
      std::uint64_t complete_bytes = 0;  // of the new file, from its start
      for (; next_written != written_.end() && next_written->file == i; ++next_written) {
        ECHO_TRY(copy_range(from.get(), fds_[i]->get(), complete_bytes, next_written->begin, source));
        complete_bytes = next_written->end;
      }
      ECHO_TRY(copy_range(from.get(), fds_[i]->get(), complete_bytes, like_->file_bytes(i).size(), source));
      if (::fsync(fds_[i]->get()) != 0) return os_error(kOperation, paths_[i]);
    }
    return ok();
  }

 private:
  struct Range {
    std::size_t file;
    std::uint64_t begin, end;
  };
  explicit NewFiles(const Checkpoint& like) : like_(&like) {}
  const Checkpoint* like_;
  std::vector<fs::path> paths_;
  std::vector<std::unique_ptr<Descriptor>> fds_;
  std::vector<Range> written_;
};

Status copy_whole_file(const fs::path& from, const fs::path& to) {
  const Descriptor in(::open(from.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat info {};
  if (in.get() < 0 || ::fstat(in.get(), &info) != 0) return os_error(kOperation, from);
  const Descriptor out(::open(to.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, info.st_mode & 0777));
  if (out.get() < 0) return os_error(kOperation, to);
  ECHO_TRY(copy_range(in.get(), out.get(), /*offset=*/0, static_cast<std::uint64_t>(info.st_size), from));
  if (::fsync(out.get()) != 0) return os_error(kOperation, to);
  return ok();
}

// Copies a folder's files other than weights.
Status copy_other_files(const Checkpoint& like, const fs::path& to) {
  std::error_code ec;
  fs::directory_iterator entries(like.path(), ec);
  for (; !ec && entries != fs::directory_iterator(); entries.increment(ec)) {
    const fs::path name = entries->path().filename();
    std::error_code status_error;  // ignored: the entry then is not a regular file
    if (!entries->is_regular_file(status_error) || is_journal_name(name.string())) continue;
    if (std::ranges::find(kWeightExtensions, name.extension().string()) != kWeightExtensions.end()) continue;
    // Beside model.safetensors, an index lists shards that do not belong to the checkpoint.
    if (name == kCheckpointIndexName && !like.is_sharded()) continue;
    ECHO_TRY(copy_whole_file(entries->path(), to / name));
  }
  if (ec) return fail(Code::kIo, kOperation, "{}: {}", like.path().string(), ec.message());
  return ok();
}

Status check_not_stopped(const ApplyOptions& options) {
  if (options.stop && *options.stop) return fail(Code::kCancelled, kOperation, "stopped; nothing was written");
  return ok();
}

Status verify_and_publish(PendingOutput& pending, const Digest& result, const ApplyOptions& options) {
  {
    ECHO_ASSIGN(const Checkpoint written, Checkpoint::open(pending.path()));
    ECHO_ASSIGN(const Digest actual, digest_state(written.view(), options.threads));
    if (actual != result)
      return fail(Code::kCorrupt, kOperation,
                  "{}: the written data has digest {}, expected {}: the disk or memory of this machine corrupts data",
                  pending.path().string(), actual.hex(), result.hex());
  }
  ECHO_TRY(check_not_stopped(options));
  return pending.publish();
}

// Writes a checkpoint with the files of `like`. `fill` writes tensors into it; all other bytes are those of `like`.
template <class Fill>
Status write_like(const Checkpoint& like, const fs::path& target, const Digest& result, const ApplyOptions& options,
                  Fill&& fill) {
  ECHO_ASSIGN(PendingOutput pending, PendingOutput::make(normalized(target), like.is_folder()));
  if (like.is_folder()) ECHO_TRY(copy_other_files(like, pending.path()));
  ECHO_ASSIGN(NewFiles files, NewFiles::create(like, pending.path()));
  ECHO_TRY(fill(files));
  ECHO_TRY(files.finish());
  if (like.is_folder()) ECHO_TRY(sync_folder(pending.path()));
  return verify_and_publish(pending, result, options);
}

Status write_standalone(const OwnedState& state, const fs::path& target, const Digest& result,
                        const ApplyOptions& options) {
  const bool is_file = target.extension() == kSuffix;
  ECHO_ASSIGN(PendingOutput pending, PendingOutput::make(target, !is_file));
  if (is_file) {
    // The format "pt" (PyTorch), as in the files of write_checkpoint(): the transformers library asks for it.
    ECHO_TRY(write_safetensors(pending.path(), state.view(), {{"format", "pt"}}));
  } else {
    ECHO_TRY(write_checkpoint(pending.path(), state.view()));
  }
  return verify_and_publish(pending, result, options);
}

}  // namespace

Result<PatchInfo> apply_to_new(const Checkpoint& prev, std::span<const std::byte> patch, const fs::path& target,
                               const ApplyOptions& options) {
  return catch_out_of_memory(kOperation, [&]() -> Result<PatchInfo> {
    ECHO_ASSIGN(PatchInfo info, inspect(patch));
    ECHO_TRY(write_like(prev, target, info.result, options, [&](NewFiles& files) -> Status {
      std::vector<std::byte> part;
      const auto sink = [&](TensorWrite&& write) -> Status {
        ECHO_TRY(check_not_stopped(options));
        if (write.whole) return files.write(write.tensor, write.first_byte, write.values);
        const auto old = prev.view()[write.tensor].bytes.subspan(write.first_byte, write.byte_count);
        part.assign(old.begin(), old.end());
        write.write_to(part);
        return files.write(write.tensor, write.first_byte, part);
      };
      ECHO_TRY(resolve_delta(patch, prev.view(), sink, {.threads = options.threads, .progress = options.progress}));
      return ok();
    }));
    return info;
  });
}

Result<PatchInfo> unpack_snapshot(std::span<const std::byte> patch, const Checkpoint* like, const fs::path& target,
                                  const ApplyOptions& options) {
  return catch_out_of_memory(kOperation, [&]() -> Result<PatchInfo> {
    // Without the limit of state bytes, because the user chose this snapshot. Too large a state is an error all the
    // same.
    ECHO_ASSIGN(PatchInfo info, inspect(patch, {.state_bytes_max = UINT64_MAX}));
    if (like) ECHO_TRY(check_tensors_match(info, like->view()));
    const DecodeOptions decode{.state_bytes_max = UINT64_MAX, .threads = options.threads, .progress = options.progress};
    ECHO_ASSIGN(const OwnedState state, decode_snapshot(patch, decode));
    if (!like) {
      ECHO_TRY(write_standalone(state, normalized(target), info.result, options));
      return info;
    }
    ECHO_TRY(write_like(*like, target, info.result, options, [&](NewFiles& files) -> Status {
      for (std::size_t i = 0; i < state.size(); ++i) {
        ECHO_TRY(check_not_stopped(options));
        ECHO_TRY(files.write(i, /*first_byte=*/0, state.bytes(i)));
      }
      return ok();
    }));
    return info;
  });
}

}  // namespace echoline::delta

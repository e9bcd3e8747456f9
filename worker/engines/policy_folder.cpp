#include "worker/engines/policy_folder.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "base/log.hpp"
#include "delta/patch.hpp"

namespace echoline::worker {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kOperation = "policy folder";
constexpr const char *kLock = ".echoline-worker", *kMaking = "echoline-making-", *kPrefix = "echoline-engine-";
constexpr int kFoldersMax = 1000;
constexpr std::uint64_t kOtherBytes = 16 << 20;  // for headers and other files

// An exclusive lock, held by this process while the descriptor is open.
std::unique_ptr<Descriptor> take_lock(const fs::path& folder, bool create) {
  auto lock =
      std::make_unique<Descriptor>(::open((folder / kLock).c_str(), O_RDWR | O_CLOEXEC | (create ? O_CREAT : 0), 0600));
  if (lock->get() < 0 || ::flock(lock->get(), LOCK_EX | LOCK_NB) != 0) return nullptr;
  return lock;
}

void empty(const fs::path& folder) {
  std::error_code ec;
  for (fs::directory_iterator it(folder, ec), end; !ec && it != end; it.increment(ec)) {
    std::error_code ignored;
    if (it->path().filename() != kLock) fs::remove_all(it->path(), ignored);
  }
}

// Removes the folders of killed workers, which nothing locks any more.
void sweep(const fs::path& memory) {
  std::error_code ec;
  for (fs::directory_iterator it(memory, ec), end; !ec && it != end; it.increment(ec)) {
    if (!it->path().filename().string().starts_with(kPrefix)) continue;
    const auto lock = take_lock(it->path(), false);
    if (!lock) continue;
    std::error_code ignored;
    fs::remove_all(it->path(), ignored);
    log::info("removed {}, left by a worker that has ended", it->path().string());
  }
}

}  // namespace

Result<std::unique_ptr<PolicyFolder>> PolicyFolder::make(const std::map<std::string, std::string>& files,
                                                         const fs::path& where, const fs::path& memory,
                                                         unsigned threads, std::optional<RepeatedTensor> repeated) {
  std::unique_ptr<PolicyFolder> made(new PolicyFolder(threads, std::move(repeated)));
  std::error_code ec;
  if (where.empty()) {
    sweep(memory);
    std::string making = fmt::format("{}/{}XXXXXX", memory.string(), kMaking);
    if (::mkdtemp(making.data()) == nullptr) return os_error(kOperation, memory);
    made->lock_ = take_lock(making, true);
    if (!made->lock_) {
      fs::remove_all(making, ec);
      return fail(Code::kIo, kOperation, "{}: a folder cannot be made there", memory.string());
    }
    // The lowest free number: a restarted worker then gives its server the same path, and vLLM finds its compiled code
    // by the path. The folder is locked before it gets its name, because other workers remove unlocked folders of such
    // names. The rename fails if that name exists, because that folder contains at least its lock.
    for (int number = 1;; ++number) {
      made->path_ = memory / fmt::format("{}{}", kPrefix, number);
      fs::rename(making, made->path_, ec);
      if (!ec) break;
      if (number == kFoldersMax) {
        fs::remove_all(making, ec);
        return fail(Code::kIo, kOperation, "{}: all {} folder names are taken", memory.string(), kFoldersMax);
      }
    }
    made->is_new_ = true;
  } else {
    made->path_ = fs::absolute(where);
    ECHO_TRY(make_folders(made->path_));
    if (!fs::is_empty(made->path_, ec) && !fs::exists(made->path_ / kLock, ec)) {
      const fs::path taken = std::exchange(made->path_, {});  // the destructor must not empty the folder
      return fail(Code::kInvalid, kOperation,
                  "{}: expected an empty folder, found files that no worker has put there; choose another",
                  taken.string());
    }
    made->lock_ = take_lock(made->path_, true);
    if (!made->lock_) {
      const fs::path taken = std::exchange(made->path_, {});
      return fail(Code::kUnavailable, kOperation, "{}: another worker has it; each needs a folder of its own",
                  taken.string());
    }
    empty(made->path_);
  }
  for (const auto& [name, text] : files) ECHO_TRY(write_file_atomic(made->path_ / name, text));
  return made;
}

PolicyFolder::~PolicyFolder() {
  if (path_.empty()) return;
  empty(path_);
  std::error_code ec;
  fs::remove(path_ / kLock, ec);
  fs::remove(path_, ec);  // fails for a mount point, which stays
}

void PolicyFolder::arriving(const overlay::PublicationPart& part) { arriving_.add(part, version_); }

Status PolicyFolder::install(const overlay::Publication& publication) {
  if (!publication.base) {
    ECHO_TRY(install_snapshot(publication));
  } else {
    ECHO_ASSIGN(const auto written, arriving_.apply_delta(publication, version_));
    version_.reset();
    for (const delta::TensorWrite& one : written) write(one);
  }
  version_ = publication.version;
  digest_ = publication.policy_digest;
  return ok();
}

// Overwrites the existing tensors if names, types and shapes are the same, and otherwise writes new files. Nothing is
// written before the digest of the whole policy is proven. A crash in between leaves a folder that the next worker
// removes.
Status PolicyFolder::install_snapshot(const overlay::Publication& publication) {
  ECHO_ASSIGN(const delta::OwnedState state, arriving_.snapshot(publication));
  const delta::StateView tensors = state.view();
  if (!policy_.empty() && !delta::check_same_tensors(policy_, tensors)) {
    version_.reset();
    remove_weights();
  }
  if (policy_.empty()) {
    const delta::StateView stored = as_stored(tensors);
    std::uint64_t bytes = 0;
    for (const delta::TensorView& tensor : stored) bytes += tensor.bytes.size();
    ECHO_TRY(check_room(bytes));
    ECHO_TRY(delta::write_checkpoint(path_, stored));
    return map_files();
  }
  version_.reset();
  for (std::size_t i = 0; i < tensors.size(); ++i)
    write({i, 0, tensors[i].bytes.size(), 1, true, {}, tensors[i].bytes, {}});
  return ok();
}

void PolicyFolder::remove_weights() {
  policy_.clear();
  memory_.clear();
  repeated_of_.reset();
  repetition_ = {};
  files_.clear();
  std::error_code ec;
  for (fs::directory_iterator it(path_, ec), end; !ec && it != end; it.increment(ec)) {
    std::error_code ignored;
    if (it->path().extension() == ".safetensors") fs::remove(it->path(), ignored);
  }
  fs::remove(path_ / delta::kCheckpointIndexName, ec);
}

// The policy as the files contain it: with a copy of the tied tensor, if the server needs one.
delta::StateView PolicyFolder::as_stored(const delta::StateView& policy) const {
  delta::StateView stored = policy;
  if (!repeated_) return stored;
  for (const delta::TensorView& tensor : policy)
    if (tensor.name == repeated_->of) {
      stored.push_back(tensor);
      stored.back().name = repeated_->name;
    }
  return stored;
}

Status PolicyFolder::map_files() {
  ECHO_ASSIGN(const delta::Checkpoint checkpoint, delta::Checkpoint::open(path_));
  for (std::size_t i = 0; i < checkpoint.file_count(); ++i) {
    ECHO_ASSIGN(delta::MappedFile file, delta::MappedFile::open_to_write(checkpoint.file_path(i), "install policy"));
    files_.push_back(std::move(file));
  }
  for (std::size_t i = 0; i < checkpoint.view().size(); ++i) {
    delta::TensorView tensor = checkpoint.view()[i];
    const auto [file, first_byte] = checkpoint.place(i);
    const std::span<std::byte> memory = files_[file].mutable_bytes().subspan(first_byte, tensor.bytes.size());
    if (repeated_ && tensor.name == repeated_->name) {
      repetition_ = memory;
      continue;
    }
    if (repeated_ && tensor.name == repeated_->of) repeated_of_ = policy_.size();
    tensor.bytes = memory;
    policy_.push_back(std::move(tensor));
    memory_.push_back(memory);
  }
  changed_.assign(policy_.size(), true);
  return ok();
}

std::vector<std::string> PolicyFolder::changed() const {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < policy_.size(); ++i) {
    if (!changed_[i]) continue;
    names.push_back(policy_[i].name);
    if (repeated_of_ == i) names.push_back(repeated_->name);
  }
  return names;
}

void PolicyFolder::write(const delta::TensorWrite& write) {
  if (write.whole || !write.positions.empty()) changed_[write.tensor] = true;
  write.write_to(memory_[write.tensor].subspan(write.first_byte, write.byte_count));
  if (write.tensor == repeated_of_) write.write_to(repetition_.subspan(write.first_byte, write.byte_count));
}

Status PolicyFolder::check_room(std::uint64_t bytes) const {
  struct statvfs room {};
  if (::statvfs(path_.c_str(), &room) != 0) return os_error(kOperation, path_);
  const std::uint64_t free_bytes = static_cast<std::uint64_t>(room.f_bavail) * room.f_frsize;
  if (free_bytes >= bytes + kOtherBytes) return ok();
  return fail(Code::kExhausted, "install policy",
              "the policy has {} and {} has room for {}: give it more (`--shm-size` of a container, `mount -o "
              "remount,size=...`), or name a folder elsewhere with --engine-folder",
              to_text(Bytes{bytes}), path_.string(), to_text(Bytes{free_bytes}));
}

}  // namespace echoline::worker

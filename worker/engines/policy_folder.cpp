// Writes policies to the files that an inference server reads. The remote engine calls it.
#include "worker/engines/policy_folder.hpp"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <set>
#include <utility>

#include "base/log.hpp"
#include "delta/patch.hpp"
#include "model/adapter.hpp"

namespace echoline::worker {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kOperation = "policy folder";
constexpr const char* kLockFile = ".echoline-worker";  // file in the folder, locked while a worker uses it
// Prefixes of a folder's name: before the folder is locked, and after that.
constexpr const char *kUnfinishedPrefix = "echoline-making-", *kPrefix = "echoline-engine-";
// Subfolders of an arriving snapshot and of an adapter that is being written.
constexpr const char *kArrivingFolder = ".arriving", *kArrivingAdapterFolder = ".arriving-adapter";
constexpr std::string_view kAdapterOutput = ".lora_B.weight";  // end of the names of an adapter's B matrices
constexpr int kFoldersMax = 1000;                              // most numbers that are tried for a folder's name
constexpr std::uint64_t kReservedBytes = 16 << 20;             // space for headers and other files

// Takes an exclusive lock on the folder, held while the descriptor is open. Null if another process holds the lock, or
// if there is no lock file.
std::unique_ptr<Descriptor> take_lock(const fs::path& folder, bool create_file) {
  auto lock = std::make_unique<Descriptor>(
      ::open((folder / kLockFile).c_str(), O_RDWR | O_CLOEXEC | (create_file ? O_CREAT : 0), 0600));
  if (lock->get() < 0 || ::flock(lock->get(), LOCK_EX | LOCK_NB) != 0) return nullptr;
  return lock;
}

void remove_content(const fs::path& folder) {
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    std::error_code ignored;
    if (it->path().filename() != kLockFile) fs::remove_all(it->path(), ignored);
  }
}

// Removes the folders that killed workers have left: those with this class's name whose lock no process holds.
void remove_unlocked_folders(const fs::path& memory_folder) {
  std::error_code error;
  for (fs::directory_iterator it(memory_folder, error), end; !error && it != end; it.increment(error)) {
    if (!it->path().filename().string().starts_with(kPrefix)) continue;
    const auto lock = take_lock(it->path(), /*create_file=*/false);
    if (!lock) continue;  // its worker still runs
    std::error_code ignored;
    fs::remove_all(it->path(), ignored);
    log::info("removed {}, left by a worker that has ended", it->path().string());
  }
}

// Renames a locked folder to the first free name in `parent`, and returns its new path. A restarted worker then gives
// its server the same path, by which vLLM finds its compiled code. After a failure, the folder is removed.
Result<fs::path> take_numbered_name(const fs::path& unfinished, const fs::path& parent) {
  std::error_code error;
  for (int number = 1; number <= kFoldersMax; ++number) {
    const fs::path path = parent / fmt::format("{}{}", kPrefix, number);
    // Fails if a folder has that name already: it is not empty, because it contains at least its lock file.
    fs::rename(unfinished, path, error);
    if (!error) return path;
  }
  fs::remove_all(unfinished, error);
  return fail(Code::kIo, kOperation, "{}: all {} folder names are taken", parent.string(), kFoldersMax);
}

// Writes a checkpoint with these tensors into `folder`, with zeros as their values. Replaces what an interrupted
// installation has left there.
Status write_zeros(const fs::path& folder, delta::StateView tensors) {
  std::vector<std::uint64_t> sizes;
  std::uint64_t largest_bytes = 1;  // not 0, because mmap() refuses that
  for (const delta::TensorView& tensor : tensors) {
    ECHO_ASSIGN(const std::uint64_t bytes, delta::tensor_bytes(tensor.dtype, tensor.shape));
    sizes.push_back(bytes);
    largest_bytes = std::max(largest_bytes, bytes);
  }
  // All tensors share one range of untouched memory as content, which takes no space.
  void* const zeros = ::mmap(nullptr, largest_bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (zeros == MAP_FAILED) return os_error("install policy", folder);
  const std::unique_ptr<void, std::function<void(void*)>> unmap(zeros, [&](void* at) { ::munmap(at, largest_bytes); });
  for (std::size_t i = 0; i < tensors.size(); ++i)
    tensors[i].bytes = std::span(static_cast<const std::byte*>(zeros), sizes[i]);
  std::error_code ignored;
  fs::remove_all(folder, ignored);
  return delta::write_checkpoint(folder, tensors);
}

// Whether the write changes its tensor. A delta may contain empty writes, for unchanged tensors.
bool changes_values(const delta::TensorWrite& write) { return write.whole || !write.positions.empty(); }

}  // namespace

fs::path disk_folder_of(const fs::path& folder) {
  struct statfs file_system {};
  const bool is_in_memory = ::statfs(folder.c_str(), &file_system) == 0 && file_system.f_type == TMPFS_MAGIC;
  return is_in_memory ? fs::path(kDiskFolder) : folder;
}

fs::path first_large_folder(const std::vector<fs::path>& folders, Bytes bytes) {
  for (const fs::path& folder : folders) {
    struct statvfs file_system {};
    // The whole size, not the free one: see the header.
    if (::statvfs(folder.c_str(), &file_system) == 0 &&
        static_cast<std::uint64_t>(file_system.f_blocks) * file_system.f_frsize >= bytes.count + kReservedBytes)
      return folder;
  }
  return folders.front();  // PolicyFolder::install() then reports the missing space
}

Result<std::unique_ptr<PolicyFolder>> PolicyFolder::make(const std::map<std::string, std::string>& files,
                                                         const fs::path& chosen_path, const fs::path& memory_folder,
                                                         unsigned threads, std::optional<RepeatedTensor> repeated,
                                                         std::string adapter_config) {
  std::unique_ptr<PolicyFolder> policy_folder(
      new PolicyFolder(threads, std::move(repeated), std::move(adapter_config)));
  std::error_code error;
  if (chosen_path.empty()) {  // the user has chosen no folder
    remove_unlocked_folders(memory_folder);
    std::string unfinished_path = fmt::format("{}/{}XXXXXX", memory_folder.string(), kUnfinishedPrefix);
    if (::mkdtemp(unfinished_path.data()) == nullptr) return os_error(kOperation, memory_folder);
    policy_folder->lock_ = take_lock(unfinished_path, /*create_file=*/true);
    if (!policy_folder->lock_) {
      fs::remove_all(unfinished_path, error);
      return fail(Code::kIo, kOperation, "{}: a folder cannot be made there", memory_folder.string());
    }
    // Locked before it has a name with kPrefix, because other workers remove unlocked folders with such a name.
    ECHO_ASSIGN(policy_folder->path_, take_numbered_name(unfinished_path, memory_folder));
    policy_folder->is_new_ = true;
  } else {
    const fs::path path = fs::absolute(chosen_path);
    ECHO_TRY(make_folders(path));
    const bool was_left_by_worker = fs::exists(path / kLockFile, error);
    if (!was_left_by_worker && !fs::is_empty(path, error))
      return fail(Code::kInvalid, kOperation,
                  "{}: expected an empty folder, found files that no worker has put there; choose another",
                  path.string());
    policy_folder->lock_ = take_lock(path, /*create_file=*/true);
    if (!policy_folder->lock_)
      return fail(Code::kUnavailable, kOperation, "{}: another worker has it; each needs a folder of its own",
                  path.string());
    policy_folder->path_ = path;
    remove_content(path);
  }
  for (const auto& [name, text] : files) ECHO_TRY(write_file_atomic(policy_folder->path_ / name, text));
  return policy_folder;
}

PolicyFolder::~PolicyFolder() {
  if (path_.empty()) return;  // make() failed before it locked a folder, whose content may be another worker's
  remove_content(path_);
  std::error_code ignored;
  fs::remove(path_ / kLockFile, ignored);
  fs::remove(path_, ignored);  // a mount point cannot be removed and stays
}

void PolicyFolder::decode_part(const overlay::PublicationPart& part) { arriving_.add(part, version_); }

Status PolicyFolder::install(const overlay::Publication& publication) {
  ++revision_;
  if (!publication.base) {
    ECHO_TRY(install_snapshot(publication));
  } else {
    ECHO_ASSIGN(const auto writes, arriving_.finish_delta(publication, version_));
    ECHO_TRY(check_only_adapter_changes(writes));
    version_.reset();  // the files hold no version until all is written
    for (const delta::TensorWrite& tensor_write : writes) apply_write(tensor_write);
  }
  version_ = publication.version;
  digest_ = publication.policy_digest;
  return ok();
}

// Overwrites the existing tensors if names, types and shapes are the same, and otherwise replaces the files. Nothing
// takes effect before the digest of the whole policy is proven. A crash in between leaves a folder that the next worker
// removes.
Status PolicyFolder::install_snapshot(const overlay::Publication& publication) {
  auto state = arriving_.finish_snapshot(publication);
  if (!state) {  // the installed policy's files are unchanged
    arriving_weights_.reset();
    std::error_code ignored;
    fs::remove_all(path_ / kArrivingFolder, ignored);
    return std::move(state).error();
  }
  const delta::StateView tensors = state->view();
  const bool is_in_new_files =  // make_state() has created files, into which this snapshot was decoded
      arriving_weights_ && tensors.front().bytes.data() == arriving_weights_->memory.front().data();
  if (is_in_new_files) {
    version_.reset();
    return publish_files();
  }
  if (!delta::check_same_tensors(weights_->policy, tensors)) {
    // When the snapshot began to arrive, the installed policy had the same tensors, so it was not decoded into files of
    // its own. A policy with other tensors has been installed meanwhile.
    ECHO_ASSIGN(arriving_weights_, create_files(tensors));
    for (std::size_t i = 0; i < tensors.size(); ++i)
      std::copy(tensors[i].bytes.begin(), tensors[i].bytes.end(), arriving_weights_->memory[i].begin());
    version_.reset();
    return publish_files();
  }
  // With an adapter, unchanged tensors are left out: check_only_adapter_changes() takes every whole write as a change.
  std::vector<delta::TensorWrite> writes;
  for (std::size_t i = 0; i < tensors.size(); ++i)
    if (!has_adapter() || !std::ranges::equal(tensors[i].bytes, weights_->memory[i]))
      writes.push_back({.tensor = i,
                        .first_byte = 0,
                        .byte_count = tensors[i].bytes.size(),
                        .element_bytes = 1,
                        .whole = true,
                        .positions = {},
                        .values = tensors[i].bytes,
                        .memory = {}});
  ECHO_TRY(check_only_adapter_changes(writes));
  version_.reset();
  for (const delta::TensorWrite& write : writes) apply_write(write);
  return ok();
}

Result<delta::OwnedState> PolicyFolder::make_state(const delta::StateView& layout) {
  arriving_weights_.reset();
  if (layout.empty()) return fail(Code::kInvalid, "install policy", "expected tensors, found none");
  const Status same_tensors = delta::check_same_tensors(weights_->policy, layout);
  // install_snapshot() copies the values to the files, which the server may still read now.
  if (same_tensors) {
    auto state = delta::OwnedState::empty_like(layout, delta::allocate_in(disk_folder_of(path_)));
    return state ? std::move(state) : delta::OwnedState::empty_like(layout);  // a full disk need not end the worker
  }
  const bool is_first = weights_->policy.empty();
  if (has_adapter() && !is_first) return same_tensors.error();  // the files of an adapter's base are never replaced
  ECHO_ASSIGN(arriving_weights_, create_files(layout));
  return delta::OwnedState::over(layout, arriving_weights_->memory, arriving_weights_);
}

Result<std::shared_ptr<PolicyFolder::Weights>> PolicyFolder::create_files(const delta::StateView& layout) const {
  // The files hold the policy's tensors and the repeated one. An adapter's tensors stay in memory instead.
  delta::StateView file_tensors, adapter_tensors;
  std::ranges::partition_copy(layout, std::back_inserter(adapter_tensors), std::back_inserter(file_tensors),
                              [this](const delta::TensorView& tensor) { return is_of_adapter(tensor); });
  const bool found_adapter = !adapter_tensors.empty();
  if (found_adapter != has_adapter())
    return fail(Code::kInvalid, "install policy", "{} tensors of an adapter, expected {}", adapter_tensors.size(),
                has_adapter() ? "some" : "none");
  for (const delta::TensorView& tensor : layout)
    if (repeated_ && tensor.name == repeated_->source_name) {
      file_tensors.push_back(tensor);  // the second copy
      file_tensors.back().name = repeated_->copy_name;
    }
  std::uint64_t total_bytes = 0;
  for (const delta::TensorView& tensor : file_tensors) {
    ECHO_ASSIGN(const std::uint64_t bytes, delta::tensor_bytes(tensor.dtype, tensor.shape));
    total_bytes += bytes;
  }
  ECHO_TRY(check_free_space(total_bytes));
  const fs::path folder = path_ / kArrivingFolder;
  ECHO_TRY(write_zeros(folder, std::move(file_tensors)));

  auto weights = std::make_shared<Weights>();
  ECHO_ASSIGN(const delta::Checkpoint checkpoint, delta::Checkpoint::open(folder));
  for (std::size_t i = 0; i < checkpoint.file_count(); ++i) {
    ECHO_ASSIGN(delta::MappedFile file, delta::MappedFile::open_to_write(checkpoint.file_path(i), "install policy"));
    weights->files.push_back(std::move(file));
  }
  std::map<std::string, std::span<std::byte>> memory_by_name;
  for (std::size_t i = 0; i < checkpoint.view().size(); ++i) {
    const delta::TensorView& tensor = checkpoint.view()[i];
    const auto [file, first_byte] = checkpoint.place(i);
    memory_by_name[tensor.name] = weights->files[file].mutable_bytes().subspan(first_byte, tensor.bytes.size());
  }
  if (repeated_) weights->repeated_memory = memory_by_name[repeated_->copy_name];
  ECHO_ASSIGN(weights->adapter, delta::OwnedState::empty_like(adapter_tensors));
  for (std::size_t i = 0; i < weights->adapter.size(); ++i)
    memory_by_name[weights->adapter.name(i)] = weights->adapter.mutable_bytes(i);
  for (delta::TensorView tensor : layout) {
    if (repeated_ && tensor.name == repeated_->source_name) weights->repeated_index = weights->policy.size();
    tensor.bytes = memory_by_name.at(tensor.name);
    weights->memory.push_back(memory_by_name.at(tensor.name));
    weights->policy.push_back(std::move(tensor));
  }
  return weights;
}

Status PolicyFolder::publish_files() {
  Weights& weights = *arriving_weights_;
  if (weights.repeated_index) {
    const std::span<const std::byte> original = weights.memory[*weights.repeated_index];
    std::copy(original.begin(), original.end(), weights.repeated_memory.begin());
  }
  std::error_code error;
  std::vector<fs::path> old_files;  // collected first, because removals during the iteration may disturb it
  for (fs::directory_iterator it(path_, error), end; !error && it != end; it.increment(error))
    if (it->path().extension() == ".safetensors" || it->path().filename() == delta::kCheckpointIndexName)
      old_files.push_back(it->path());
  for (const fs::path& file : old_files) {
    std::error_code ignored;
    fs::remove(file, ignored);
  }
  // Moved in the order of names. Those of the files are such that the index, which names the others, comes last.
  std::set<fs::path> new_files;
  for (fs::directory_iterator it(path_ / kArrivingFolder, error), end; !error && it != end; it.increment(error))
    new_files.insert(it->path());
  if (error) return fail(Code::kIo, "install policy", "{}: {}", (path_ / kArrivingFolder).string(), error.message());
  for (const fs::path& file : new_files) {
    fs::rename(file, path_ / file.filename(), error);
    if (error) return fail(Code::kIo, "install policy", "{}: {}", file.string(), error.message());
  }
  fs::remove(path_ / kArrivingFolder, error);
  weights_ = std::exchange(arriving_weights_, nullptr);
  last_change_.assign(weights_->policy.size(), revision_);
  return ok();
}

std::vector<std::string> PolicyFolder::changed_tensors(std::uint64_t since) const {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < weights_->policy.size(); ++i) {
    if (last_change_[i] <= since) continue;  // unchanged
    names.push_back(weights_->policy[i].name);
    if (weights_->repeated_index == i) names.push_back(repeated_->copy_name);
  }
  return names;
}

void PolicyFolder::apply_write(const delta::TensorWrite& write) {
  if (changes_values(write)) last_change_[write.tensor] = revision_;
  write.write_to(weights_->memory[write.tensor].subspan(write.first_byte, write.byte_count));
  if (write.tensor == weights_->repeated_index)
    write.write_to(weights_->repeated_memory.subspan(write.first_byte, write.byte_count));
}

bool PolicyFolder::is_of_adapter(const delta::TensorView& tensor) const {
  return has_adapter() && model::is_adapter_tensor(tensor.name);
}

Status PolicyFolder::check_only_adapter_changes(const std::vector<delta::TensorWrite>& writes) const {
  if (!has_adapter()) return ok();
  for (const delta::TensorWrite& write : writes)
    if (const delta::TensorView& tensor = weights_->policy[write.tensor];
        !is_of_adapter(tensor) && changes_values(write))
      return fail(Code::kInvalid, "install policy",
                  "'{}' of the base differs from the first version: only an adapter's tensors may change", tensor.name);
  return ok();
}

bool PolicyFolder::adapter_is_zero() const {
  const auto is_zero = [](const delta::TensorView& tensor) {
    const std::size_t element_bytes = delta::dtype_bytes(tensor.dtype);
    for (std::size_t i = 0; i < tensor.bytes.size(); ++i) {
      // The sign bit, in an element's last byte, does not count, because -0 is 0 as well.
      const bool has_sign = i % element_bytes == element_bytes - 1;
      const std::byte value_bits{has_sign ? std::uint8_t{0x7f} : std::uint8_t{0xff}};
      if ((tensor.bytes[i] & value_bits) != std::byte{0}) return false;
    }
    return true;
  };
  for (const delta::TensorView& tensor : weights_->adapter.view())
    if (tensor.name.ends_with(kAdapterOutput) && !is_zero(tensor)) return false;
  return true;
}

Result<fs::path> PolicyFolder::write_adapter(const std::string& name, const void* user) {
  adapter_users_[name].insert(user);
  const fs::path folder = path_ / name, arriving = path_ / kArrivingAdapterFolder;
  std::error_code error;
  if (fs::exists(folder, error)) return folder;  // another engine has written it
  fs::remove_all(arriving, error);               // what a failed call has left
  ECHO_TRY(check_free_space(weights_->adapter.total_bytes()));
  ECHO_TRY(make_folders(arriving));
  ECHO_TRY(delta::write_safetensors(arriving / delta::kAdapterFileName, weights_->adapter.view(), {{"format", "pt"}}));
  ECHO_TRY(write_file_atomic(arriving / model::kAdapterConfigFile, adapter_config_));
  fs::rename(arriving, folder, error);
  if (error) return fail(Code::kIo, "install policy", "{}: {}", folder.string(), error.message());
  return folder;
}

void PolicyFolder::remove_adapter(const std::string& name, const void* user) {
  std::set<const void*>& users = adapter_users_[name];
  users.erase(user);
  if (!users.empty()) return;  // other engines may still read it
  adapter_users_.erase(name);
  std::error_code ignored;
  fs::remove_all(path_ / name, ignored);
}

Status PolicyFolder::check_free_space(std::uint64_t bytes) const {
  struct statvfs file_system {};
  if (::statvfs(path_.c_str(), &file_system) != 0) return os_error(kOperation, path_);
  const std::uint64_t free_bytes = static_cast<std::uint64_t>(file_system.f_bavail) * file_system.f_frsize;
  if (free_bytes >= bytes + kReservedBytes) return ok();
  return fail(Code::kExhausted, "install policy",
              "the policy has {} and {} has room for {}: give it more (`--shm-size` of a container, `mount -o "
              "remount,size=...`), or name a folder elsewhere with --engine-folder",
              to_text(Bytes{bytes}), path_.string(), to_text(Bytes{free_bytes}));
}

}  // namespace echoline::worker

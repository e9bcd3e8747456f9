// The installed policy as a Hugging Face directory in memory, for an engine that reads it. Private to worker/.
#pragma once
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/files.hpp"
#include "base/ids.hpp"
#include "base/result.hpp"
#include "delta/checkpoint.hpp"
#include "delta/mapped_file.hpp"
#include "overlay/types.hpp"
#include "worker/engines/arriving_policy.hpp"

namespace echoline::worker {

// Folders are made here if the user has not chosen one.
inline constexpr const char* kMemoryFolder = "/dev/shm";

// Used if kMemoryFolder is smaller than the policy: in a container it may have 64 MB, and some services do not let
// users change that.
inline constexpr const char* kDiskFolder = "/var/tmp";

// The folder itself if it is on a disk. For one in memory, kDiskFolder.
std::filesystem::path disk_folder_of(const std::filesystem::path& folder);

// Returns the first of the folders whose file system can hold `bytes`; the first folder if none can. Used space counts
// as well, because it may belong to folders of killed workers, which PolicyFolder::make() removes.
std::filesystem::path first_large_folder(const std::vector<std::filesystem::path>& folders, Bytes bytes);

// A tensor that the files contain twice: the policy's tensor `source_name` and its copy `copy_name`. Some servers need
// a separate tensor for the output head even if the model ties it to the embedding.
struct RepeatedTensor {
  std::string copy_name, source_name;
};

// If policies have an adapter (LoRA), the files contain the base, and are not written again after the first snapshot.
// Each version's adapter has a subfolder of its own in PEFT's format, because a server may read it later, and several
// times.
//
// Several engines may read one folder. Use from one thread. The folder belongs to this object and is removed with it.
// If a process is killed, the next process removes its folder. The folder has the policy's size. The first snapshot is
// decoded into the files. A later snapshot takes the same amount again until it is installed, and a delta 6 bytes per
// changed value. Above 64 MiB both are in a file on a disk (base/file_memory.hpp).
class PolicyFolder {
 public:
  // `files`: configuration and tokenizer, by name. `chosen_path`: a folder that is absent, empty, or made by this
  // class; if the path is empty, a new folder is made in `memory_folder`. `threads`: for decoding. `adapter_config`:
  // PEFT's adapter_config.json; empty: the policies have no adapter. kInvalid: the folder holds other files.
  // kUnavailable: another worker uses it.
  static Result<std::unique_ptr<PolicyFolder>> make(const std::map<std::string, std::string>& files,
                                                    const std::filesystem::path& chosen_path = {},
                                                    const std::filesystem::path& memory_folder = kMemoryFolder,
                                                    unsigned threads = 1,
                                                    std::optional<RepeatedTensor> repeated = std::nullopt,
                                                    std::string adapter_config = {});
  ~PolicyFolder();
  PolicyFolder(const PolicyFolder&) = delete;
  PolicyFolder& operator=(const PolicyFolder&) = delete;

  // Decodes bytes of a snapshot, or of a delta on the installed version. Does not change the installed policy's files.
  void decode_part(const overlay::PublicationPart& part);
  // Writes the publication's weights into the files; its version is then the installed one. Returns the errors of
  // Engine::install(), kExhausted if the files do not fit the file system, and kInvalid if the base of an adapter has
  // changed. The engine must not read the files meanwhile.
  Status install(const overlay::Publication& publication);
  std::optional<Version> version() const { return version_; }
  const overlay::Digest& digest() const { return digest_; }
  // Number of calls of install().
  std::uint64_t revision() const { return revision_; }
  // Names of the tensors that were written after revision `since`, in the order of the files.
  std::vector<std::string> changed_tensors(std::uint64_t since) const;

  bool has_adapter() const { return !adapter_config_.empty(); }
  // Whether the adapter changes nothing: all its lora_B are 0, as before the first step.
  bool adapter_is_zero() const;
  // Writes the installed policy's adapter into the subfolder `name`, unless that exists, and returns its path. The
  // subfolder stays until all its users have called remove_adapter(). `user`: the address of an engine, which only
  // identifies it.
  Result<std::filesystem::path> write_adapter(const std::string& name, const void* user);
  void remove_adapter(const std::string& name, const void* user);

  const std::filesystem::path& path() const { return path_; }
  bool is_new() const { return is_new_; }  // this process has created the folder

 private:
  PolicyFolder(unsigned threads, std::optional<RepeatedTensor> repeated, std::string adapter_config)
      : threads_(threads), repeated_(std::move(repeated)), adapter_config_(std::move(adapter_config)) {}

  // The tensors of a policy: those of the adapter in ordinary memory, all others in mapped files.
  struct Weights {
    std::vector<delta::MappedFile> files;
    delta::OwnedState adapter;
    delta::StateView policy;                   // all tensors, in canonical order (delta/tensor.hpp)
    std::vector<std::span<std::byte>> memory;  // writable memory of each tensor of `policy`
    // Index in `policy` of the tensor that is repeated; absent if the policy lacks it.
    std::optional<std::size_t> repeated_index;
    std::span<std::byte> repeated_memory;  // memory of the second copy
  };

  Status install_snapshot(const overlay::Publication& publication);
  // Makes the memory into which an arriving snapshot is decoded: new files if the snapshot has other tensors than the
  // installed policy, whose files the new ones then replace; otherwise memory that is copied into the files.
  Result<delta::OwnedState> make_state(const delta::StateView& layout);
  Result<std::shared_ptr<Weights>> create_files(const delta::StateView& layout) const;
  // Moves the arriving files to the place of the policy's files.
  Status publish_files();
  // Whether the tensor belongs to the adapter; false if the policies have none.
  bool is_of_adapter(const delta::TensorView& tensor) const;
  Status check_only_adapter_changes(const std::vector<delta::TensorWrite>& writes) const;
  void apply_write(const delta::TensorWrite& write);
  Status check_free_space(std::uint64_t bytes) const;

  std::filesystem::path path_;
  bool is_new_ = false;
  std::unique_ptr<Descriptor> lock_;
  std::shared_ptr<Weights> weights_ = std::make_shared<Weights>();  // of the installed policy
  std::shared_ptr<Weights> arriving_weights_;                       // of a snapshot that replaces the files, or null
  std::vector<std::uint64_t> last_change_;                          // by tensor: the revision that wrote it last
  std::uint64_t revision_ = 0;
  std::map<std::string, std::set<const void*>> adapter_users_;  // by name of the subfolder
  std::optional<Version> version_;
  overlay::Digest digest_{};
  const unsigned threads_;
  const std::optional<RepeatedTensor> repeated_;
  const std::string adapter_config_;
  ArrivingPolicy arriving_{
      [this] { return delta::IncomingDelta(weights_->policy, {.threads = threads_, .folder = disk_folder_of(path_)}); },
      {.threads = threads_, .make_state = [this](const delta::StateView& layout) { return make_state(layout); }}};
};

}  // namespace echoline::worker

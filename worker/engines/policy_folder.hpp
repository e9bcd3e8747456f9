// The installed policy as a Hugging Face directory in memory, for an engine that reads it. Private to worker/.
#pragma once
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
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

// The files contain the policy's tensor `of` a second time, under `name`, because the server needs a tied output head
// as a tensor of its own.
struct RepeatedTensor {
  std::string name, of;
};

// Use from one thread. The folder belongs to this object and is removed with it. If a process is killed, the next one
// removes its folder. The folder has the policy's size. The first snapshot is decoded into its files. Later ones take
// the same memory again, and a delta 6 bytes per changed value.
class PolicyFolder {
 public:
  // `files`: configuration and tokenizer, by name. `chosen_path`: a folder that is absent, empty, or made by this
  // class; if the path is empty, a new folder is made in `memory_folder`. `threads`: for decoding. kInvalid: the folder
  // holds other files. kUnavailable: another worker uses it.
  static Result<std::unique_ptr<PolicyFolder>> make(const std::map<std::string, std::string>& files,
                                                    const std::filesystem::path& chosen_path = {},
                                                    const std::filesystem::path& memory_folder = kMemoryFolder,
                                                    unsigned threads = 1,
                                                    std::optional<RepeatedTensor> repeated = std::nullopt);
  ~PolicyFolder();
  PolicyFolder(const PolicyFolder&) = delete;
  PolicyFolder& operator=(const PolicyFolder&) = delete;

  // Decodes bytes of a snapshot, or of a delta on the installed version. Writes nothing.
  void decode_part(const overlay::PublicationPart& part);
  // Like Engine::install(), on the files. kExhausted: they do not fit. The engine must not read the files meanwhile.
  Status install(const overlay::Publication& publication);
  std::optional<Version> version() const { return version_; }
  const overlay::Digest& digest() const { return digest_; }
  // Names of the tensors written since forget_changes(), in the order of the files.
  std::vector<std::string> changed_tensors() const;
  void forget_changes() { changed_.assign(weights_->policy.size(), false); }

  const std::filesystem::path& path() const { return path_; }
  bool is_new() const { return is_new_; }  // this process has created it

 private:
  PolicyFolder(unsigned threads, std::optional<RepeatedTensor> repeated)
      : threads_(threads), repeated_(std::move(repeated)) {}

  // The tensors of a policy in mapped files.
  struct Weights {
    std::vector<delta::MappedFile> files;
    delta::StateView policy;                    // in the files' memory; canonical
    std::vector<std::span<std::byte>> memory;   // writable memory of each tensor
    std::optional<std::size_t> repeated_index;  // of the tensor repeated_->of, if the policy has it
    std::span<std::byte> repeated_memory;       // memory of the second copy
  };

  Status install_snapshot(const overlay::Publication& publication);
  // Where an arriving snapshot is decoded: in new files if they will replace those of the policy, otherwise in memory.
  Result<delta::OwnedState> make_state(const delta::StateView& layout);
  Result<std::shared_ptr<Weights>> create_files(const delta::StateView& layout) const;
  // Gives the arriving files their names, in place of those of the policy.
  Status publish_files();
  void apply_write(const delta::TensorWrite& write);
  Status check_room(std::uint64_t bytes) const;

  std::filesystem::path path_;
  bool is_new_ = false;
  std::unique_ptr<Descriptor> lock_;
  std::shared_ptr<Weights> weights_ = std::make_shared<Weights>();  // of the installed policy
  std::shared_ptr<Weights> arriving_weights_;                       // of a snapshot that replaces them; may be null
  std::vector<bool> changed_;                                       // by tensor
  std::optional<Version> version_;
  overlay::Digest digest_{};
  const unsigned threads_;
  const std::optional<RepeatedTensor> repeated_;
  ArrivingPolicy arriving_{
      [this] { return delta::IncomingDelta(weights_->policy, {.threads = threads_}); },
      {.threads = threads_, .make_state = [this](const delta::StateView& layout) { return make_state(layout); }}};
};

}  // namespace echoline::worker

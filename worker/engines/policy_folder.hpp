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

// The files contain the policy's tensor `of` a second time, under `name`.
struct RepeatedTensor {
  std::string name, of;
};

// One thread. The folder belongs to this object and is removed with it. If a process is killed, the next one removes
// its folder. The folder has the policy's size. Decoding takes the same memory again for a snapshot, and 6 bytes per
// changed value for a delta.
class PolicyFolder {
 public:
  // `files`: configuration and tokenizer, by name. `where`: a folder that is absent, empty, or made by this class; if
  // the path is empty, a new folder is made in `memory`. `threads`: for decoding. kInvalid: the folder holds other
  // files. kUnavailable: another worker uses it.
  static Result<std::unique_ptr<PolicyFolder>> make(const std::map<std::string, std::string>& files,
                                                    const std::filesystem::path& where = {},
                                                    const std::filesystem::path& memory = kMemoryFolder,
                                                    unsigned threads = 1,
                                                    std::optional<RepeatedTensor> repeated = std::nullopt);
  ~PolicyFolder();
  PolicyFolder(const PolicyFolder&) = delete;
  PolicyFolder& operator=(const PolicyFolder&) = delete;

  // Decodes bytes of a snapshot, or of a delta on the installed version. Writes nothing.
  void arriving(const overlay::PublicationPart& part);
  // Like Engine::install(), on the files. kExhausted: they do not fit. The engine must not read the files meanwhile.
  Status install(const overlay::Publication& publication);
  std::optional<Version> version() const { return version_; }
  const overlay::Digest& digest() const { return digest_; }
  // Names of the tensors written since forget_changes(), in the order of the files.
  std::vector<std::string> changed() const;
  void forget_changes() { changed_.assign(policy_.size(), false); }

  const std::filesystem::path& path() const { return path_; }
  bool is_new() const { return is_new_; }  // this process has created it

 private:
  PolicyFolder(unsigned threads, std::optional<RepeatedTensor> repeated)
      : threads_(threads), repeated_(std::move(repeated)) {}
  Status install_snapshot(const overlay::Publication& publication);
  delta::StateView as_stored(const delta::StateView& policy) const;
  Status map_files();
  void remove_weights();
  void write(const delta::TensorWrite& write);
  Status check_room(std::uint64_t bytes) const;

  std::filesystem::path path_;
  bool is_new_ = false;
  std::unique_ptr<Descriptor> lock_;
  std::vector<delta::MappedFile> files_;
  delta::StateView policy_;                   // in the files' memory; empty until a policy is installed
  std::vector<std::span<std::byte>> memory_;  // writable memory of each tensor
  std::vector<bool> changed_;                 // by tensor
  std::optional<Version> version_;
  overlay::Digest digest_{};
  const unsigned threads_;
  const std::optional<RepeatedTensor> repeated_;
  std::optional<std::size_t> repeated_of_;  // index of that tensor in the policy, if it has it
  std::span<std::byte> repetition_;         // memory of the second copy
  ArrivingPolicy arriving_{[this] { return delta::IncomingDelta(policy_, {.threads = threads_}); },
                           {.threads = threads_}};
};

}  // namespace echoline::worker

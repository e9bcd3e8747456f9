// The installed policy as a Hugging Face directory in memory, for an engine that reads it from there. Private to
// worker/.
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

// Where folders are made that nobody has chosen.
inline constexpr const char* kMemoryFolder = "/dev/shm";

// A tensor of the policy that the files have a second time, under `name`.
struct RepeatedTensor {
  std::string name, of;
};

// One thread. The folder is this object's alone, and goes with it; what a process left that was killed, the next one
// removes. Its size is that of the policy. A snapshot takes as much memory again while it is decoded, a delta 6 bytes
// for every value that changes.
class PolicyFolder {
 public:
  // `files`: configuration and tokenizer, by name. `where`: a folder that is empty, absent or one of these; empty: a
  // new one in `memory`. `threads` decode. kInvalid: it holds other files; kUnavailable: another worker has it.
  static Result<std::unique_ptr<PolicyFolder>> make(const std::map<std::string, std::string>& files,
                                                    const std::filesystem::path& where = {},
                                                    const std::filesystem::path& memory = kMemoryFolder,
                                                    unsigned threads = 1,
                                                    std::optional<RepeatedTensor> repeated = std::nullopt);
  ~PolicyFolder();
  PolicyFolder(const PolicyFolder&) = delete;
  PolicyFolder& operator=(const PolicyFolder&) = delete;

  // Decodes what has come of a snapshot, or of a delta on the installed version; nothing is written.
  void arriving(const overlay::PublicationPart& part);
  // As Engine::install(), on the files; kExhausted: they do not fit. Whoever reads them must not be at it.
  Status install(const overlay::Publication& publication);
  std::optional<Version> version() const { return version_; }
  const overlay::Digest& digest() const { return digest_; }

  const std::filesystem::path& path() const { return path_; }
  bool is_new() const { return is_new_; }  // made by this process, of this name

 private:
  PolicyFolder(unsigned threads, std::optional<RepeatedTensor> repeated)
      : threads_(threads), repeated_(std::move(repeated)) {}
  Status install_snapshot(const overlay::Publication& publication);
  delta::StateView as_stored(const delta::StateView& policy) const;
  Status map_files();
  void write(const delta::TensorWrite& write);
  Status check_room(std::uint64_t bytes) const;

  std::filesystem::path path_;
  bool is_new_ = false;
  std::unique_ptr<Descriptor> lock_;
  std::vector<delta::MappedFile> files_;
  delta::StateView policy_;                   // in the files' memory; empty until there is a policy
  std::vector<std::span<std::byte>> memory_;  // of each of its tensors
  std::optional<Version> version_;
  overlay::Digest digest_{};
  const unsigned threads_;
  const std::optional<RepeatedTensor> repeated_;
  std::optional<std::size_t> repeated_of_;  // the number of the tensor in the policy, where it has it
  std::span<std::byte> repetition_;         // the second memory of that tensor
  ArrivingPolicy arriving_{[this] { return delta::IncomingDelta(policy_, {.threads = threads_}); },
                           {.threads = threads_}};
};

}  // namespace echoline::worker

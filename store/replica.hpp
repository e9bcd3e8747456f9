// A folder with a policy from a store, which follows the newest version.
#pragma once
#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include "store/policy_reader.hpp"

namespace echoline::store {

struct ReplicaOptions {
  unsigned threads = 1;
  const std::atomic<bool>* stop = nullptr;  // kCancelled once it is set; may be null
};

struct ReplicaStep {
  VersionName name;
  delta::Digest digest;
  std::uint32_t snapshots = 0, deltas = 0;  // that were applied; none: the folder was current
  std::uint64_t patch_bytes = 0;            // of them
};

// The folder is a Hugging Face directory: the model's files, and weights as model.safetensors (in shards above 5 GB).
// Its state is in FOLDER/.echoline: `version` (the installed one) and `patches/` (what is being fetched). A delta is
// applied in place through a journal, a snapshot beside the old weights. So after a crash at any point, the next call
// goes on, and `version` is only there while the weights are that version's.
class Replica {
 public:
  // Makes the folder if it does not exist. kInvalid: it has files, but no replica of this run's.
  static Result<Replica> open(std::filesystem::path folder, PolicyReader& reader, ReplicaOptions options = {});
  // Installs the newest version, by the cheapest way. Never goes back to an earlier version.
  Result<ReplicaStep> follow();
  // Installs one version, which may be an earlier one.
  Result<ReplicaStep> install(const Manifest& target, const std::optional<Manifest>& anchor = std::nullopt);
  const std::optional<HeldVersion>& held() const { return held_; }

 private:
  Replica(std::filesystem::path folder, PolicyReader& reader, ReplicaOptions options)
      : folder_(std::move(folder)), reader_(reader), options_(options) {}
  Status apply(const Manifest& manifest);
  Status apply_snapshot(const std::filesystem::path& patch);
  Status write_files();
  Status hold(std::optional<HeldVersion> version);
  std::filesystem::path state_folder() const { return folder_ / ".echoline"; }

  std::filesystem::path folder_;
  PolicyReader& reader_;
  ReplicaOptions options_;
  std::optional<HeldVersion> held_;
};

}  // namespace echoline::store

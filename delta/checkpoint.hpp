// Model checkpoints on disk: one .safetensors file, or a Hugging Face folder with one file or indexed shards.
#pragma once
#include <cstdint>
#include <filesystem>
#include <vector>

#include "base/units.hpp"
#include "delta/safetensors.hpp"

namespace echoline::delta {

// An opened checkpoint, mapped read-only; views are valid while this object (or what it was moved into) lives.
class Checkpoint {
 public:
  // `path` is a .safetensors file, or a folder that holds model.safetensors or, without it,
  // model.safetensors.index.json and the shards it names. kInvalid for whatever is wrong with them, naming the file,
  // shard or tensor: the path is the user's.
  static Result<Checkpoint> open(const std::filesystem::path& path);

  const StateView& view() const { return view_; }  // canonical
  const Metadata& metadata() const { return files_.front().metadata(); }
  Bytes total_bytes() const { return total_bytes_; }  // of tensor data
  std::size_t file_count() const { return files_.size(); }

 private:
  Checkpoint() = default;
  std::vector<SafetensorsFile> files_;
  StateView view_;
  Bytes total_bytes_;
};

// Writes `state` into the folder (made when absent): model.safetensors when it fits in `shard_bytes_max` of tensor
// data, otherwise model-00001-of-0000N.safetensors and their index. A tensor is never split, so one that is larger
// than the limit gets a shard of its own. Every file is replaced atomically and the index comes last; for a sharded
// checkpoint that must survive a crash as a whole, write into a new folder.
Status write_checkpoint(const std::filesystem::path& folder, const StateView& state,
                        Bytes shard_bytes_max = {5'000'000'000}, const Metadata& metadata = {{"format", "pt"}});

}  // namespace echoline::delta

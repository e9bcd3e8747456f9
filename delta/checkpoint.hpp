// Model checkpoints on disk: one .safetensors file, or a Hugging Face folder with one file or indexed shards.
#pragma once
#include <cstdint>
#include <filesystem>
#include <vector>

#include "base/units.hpp"
#include "delta/safetensors.hpp"

namespace echoline::delta {

// The file that lists the shards of a sharded folder.
inline constexpr const char* kCheckpointIndexName = "model.safetensors.index.json";
// The file of an adapter (LoRA), as PEFT names it.
inline constexpr const char* kAdapterFileName = "adapter_model.safetensors";

// An opened checkpoint, mapped read-only. A sharded one spreads its tensors over several files (shards), which an index
// lists. Views are valid while this object (or the one it was moved into) lives.
class Checkpoint {
 public:
  // `path` is a .safetensors file or a folder. The folder holds model.safetensors or otherwise
  // model.safetensors.index.json and the shards named there. The tensors of adapter_model.safetensors are added to
  // them; it may also be the only file. Every defect is kInvalid, not kCorrupt as for patches, because the user chose
  // the path; the message names the file, shard or tensor.
  static Result<Checkpoint> open(const std::filesystem::path& path);

  const StateView& view() const { return view_; }  // all tensors in canonical order (sorted by name)
  const Metadata& metadata() const { return files_.front().metadata(); }
  Bytes total_bytes() const { return total_bytes_; }  // of tensor data
  std::size_t file_count() const { return files_.size(); }

  // The file and offset of a tensor's bytes. An empty tensor is in file 0, at byte 0.
  struct Place {
    std::size_t file = 0;
    std::uint64_t first_byte = 0;
  };
  Place place(std::size_t tensor) const { return places_.at(tensor); }
  // As passed to open().
  const std::filesystem::path& path() const { return path_; }
  bool is_folder() const { return is_folder_; }
  bool is_sharded() const { return is_sharded_; }  // a folder with an index
  const std::filesystem::path& file_path(std::size_t file) const { return files_.at(file).path(); }
  std::span<const std::byte> file_bytes(std::size_t file) const { return files_.at(file).bytes(); }

 private:
  Checkpoint() = default;
  Status open_folder();
  void find_places();
  std::filesystem::path path_;
  bool is_folder_ = false;
  bool is_sharded_ = false;
  std::vector<Place> places_;
  std::vector<SafetensorsFile> files_;
  StateView view_;
  Bytes total_bytes_;
};

// Writes `state` into the folder, which is created if missing: as model.safetensors if its tensor data fits in
// `shard_bytes_max`, otherwise as model-00001-of-0000N.safetensors and their index. Tensors are not split, so a larger
// tensor gets its own shard. Every file is replaced atomically, the index last. If a sharded checkpoint must survive a
// crash as a whole, write it into a new folder.
Status write_checkpoint(const std::filesystem::path& folder, const StateView& state,
                        Bytes shard_bytes_max = {5'000'000'000}, const Metadata& metadata = {{"format", "pt"}});

}  // namespace echoline::delta

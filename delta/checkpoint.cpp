// Opens and writes checkpoints: finds the files of a folder, reads the index and checks both.
#include "delta/checkpoint.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "base/files.hpp"

namespace echoline::delta {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kSingleFileName = "model.safetensors";  // of a folder without shards
constexpr std::uint64_t kIndexBytesMax = 100'000'000;         // as of a safetensors header

template <class... Args>
Error invalid(fmt::format_string<Args...> format, Args&&... args) {
  return fail(Code::kInvalid, "open checkpoint", format, std::forward<Args>(args)...);
}

// Tensor name to shard file name.
using WeightMap = std::map<std::string, std::string>;

// Parses JSON and refuses duplicate keys, which the library would silently overwrite.
Result<json> parse_unique(const std::string& text, const std::string& what) {
  std::vector<std::set<std::string>> open_objects;
  std::optional<std::string> duplicate;
  const auto find_duplicate = [&](int, json::parse_event_t event, json& value) {
    if (event == json::parse_event_t::object_start) open_objects.emplace_back();
    if (event == json::parse_event_t::object_end) open_objects.pop_back();
    if (event == json::parse_event_t::key && !open_objects.back().insert(value.get<std::string>()).second)
      duplicate = value.get<std::string>();
    return true;
  };
  try {
    json parsed = json::parse(text, find_duplicate);
    if (duplicate) return invalid("{}: '{}' occurs twice", what, *duplicate);
    return parsed;
  } catch (const json::exception& e) {
    return invalid("{}: it is not valid JSON: {}", what, e.what());
  }
}

Result<WeightMap> read_index(const fs::path& path) {
  auto text = read_file(path, kIndexBytesMax);
  if (!text) return invalid("{}", text.error().message());
  ECHO_ASSIGN(const json index, parse_unique(*text, path.string()));
  const auto map = index.is_object() ? index.find("weight_map") : index.end();
  if (map == index.end() || !map->is_object())
    return invalid("{}: expected an object with a 'weight_map' from tensor to shard", path.string());
  // slime, a trainer, writes folders of changed values that have such an index. Their tensors are not weights.
  if (const auto metadata = index.find("metadata"); metadata != index.end() && metadata->contains("delta_encoding"))
    return invalid("{}: its tensors are changes ('delta_encoding' is {}), expected whole weights", path.string(),
                   (*metadata)["delta_encoding"].dump());
  WeightMap shards;
  for (const auto& [tensor, shard] : map->items()) {
    const std::string name = shard.is_string() ? shard.get<std::string>() : "";
    if (name.empty() || name == "." || name == ".." || name.find('/') != name.npos || name.find('\0') != name.npos)
      return invalid("{}: tensor '{}' needs the name of a shard in the same folder, found {}", path.string(), tensor,
                     shard.dump());
    shards.emplace(tensor, name);
  }
  return shards;
}

// Opens a file that the user named: if it is missing, the user's input is invalid.
Result<SafetensorsFile> open_as_input(const fs::path& path) {
  auto file = SafetensorsFile::open(path);
  if (file) return file;
  Error error = std::move(file).error();
  if (error.code == Code::kNotFound) error.code = Code::kInvalid;
  return error;
}

// Opens every shard of the index once, by name.
Result<std::vector<SafetensorsFile>> open_shards(const fs::path& folder, const WeightMap& map) {
  std::map<std::string, std::vector<std::string>> tensors_of;
  for (const auto& [tensor, shard] : map) tensors_of[shard].push_back(tensor);
  std::map<std::string, std::string> shard_of;
  std::vector<SafetensorsFile> files;
  for (const auto& [shard, tensor_names] : tensors_of) {
    std::error_code ec;
    if (!fs::exists(folder / shard, ec))
      return invalid("{}: the shard {} is missing; tensor '{}'{} should be in it. Fetch it again", folder.string(),
                     shard, tensor_names.front(),
                     tensor_names.size() > 1 ? fmt::format(" and {} more", tensor_names.size() - 1) : "");
    ECHO_ASSIGN(SafetensorsFile file, open_as_input(folder / shard));
    for (const TensorView& tensor : file.view())
      if (const auto [entry, is_new] = shard_of.emplace(tensor.name, shard); !is_new)
        return invalid("{}: tensor '{}' is in two shards, {} and {}", folder.string(), tensor.name, entry->second,
                       shard);
    for (const std::string& tensor : tensor_names)
      if (const auto entry = shard_of.find(tensor); entry == shard_of.end() || entry->second != shard)
        return invalid("{}: tensor '{}' is missing from {}, where {} puts it", folder.string(), tensor, shard,
                       kCheckpointIndexName);
    files.push_back(std::move(file));
  }
  return files;
}

Status remove_file(const fs::path& path) {
  std::error_code ec;
  fs::remove(path, ec);
  if (ec) return fail(Code::kIo, "remove file", "{}: {}", path.string(), ec.message());
  return ok();
}

// Groups consecutive tensors with at most `bytes_max` together.
std::vector<StateView> split_into_shards(const StateView& state, std::uint64_t bytes_max) {
  std::vector<StateView> shards(1);
  std::uint64_t shard_bytes = 0;
  for (const TensorView& tensor : state) {
    // A tensor above the limit makes its shard larger than `bytes_max`.
    const std::uint64_t room_bytes = bytes_max - std::min(shard_bytes, bytes_max);
    if (!shards.back().empty() && tensor.bytes.size() > room_bytes) {
      shards.emplace_back();
      shard_bytes = 0;
    }
    shards.back().push_back(tensor);
    shard_bytes += tensor.bytes.size();
  }
  return shards;
}

}  // namespace

Result<Checkpoint> Checkpoint::open(const fs::path& path) {
  Checkpoint checkpoint;
  checkpoint.path_ = path;
  std::error_code ec;
  const fs::file_status status = fs::status(path, ec);
  if (!fs::exists(status)) return invalid("{}: no such file or folder", path.string());
  checkpoint.is_folder_ = fs::is_directory(status);
  if (checkpoint.is_folder_) {
    ECHO_TRY(checkpoint.open_folder());
    if (fs::exists(path / kAdapterFileName, ec)) {
      ECHO_ASSIGN(SafetensorsFile adapter, open_as_input(path / kAdapterFileName));
      checkpoint.files_.push_back(std::move(adapter));
    }
  } else {
    ECHO_ASSIGN(SafetensorsFile file, open_as_input(path));
    checkpoint.files_.push_back(std::move(file));
  }
  for (const SafetensorsFile& file : checkpoint.files_)
    checkpoint.view_.insert(checkpoint.view_.end(), file.view().begin(), file.view().end());
  ECHO_ASSIGN(checkpoint.view_, canonical(std::move(checkpoint.view_)));
  for (const TensorView& tensor : checkpoint.view_) checkpoint.total_bytes_ += Bytes{tensor.bytes.size()};
  checkpoint.find_places();
  return checkpoint;
}

Status Checkpoint::open_folder() {
  std::error_code ec;
  if (fs::exists(path_ / kSingleFileName, ec)) {
    ECHO_ASSIGN(SafetensorsFile file, open_as_input(path_ / kSingleFileName));
    files_.push_back(std::move(file));
    return ok();
  }
  if (!fs::exists(path_ / kCheckpointIndexName, ec)) {
    if (fs::exists(path_ / kAdapterFileName, ec)) return ok();  // the only file; open() adds it
    return invalid("{}: expected {} or {} in this folder, found neither", path_.string(), kSingleFileName,
                   kCheckpointIndexName);
  }
  ECHO_ASSIGN(const WeightMap map, read_index(path_ / kCheckpointIndexName));
  if (map.empty()) return invalid("{}: its weight_map names no tensor", (path_ / kCheckpointIndexName).string());
  is_sharded_ = true;
  ECHO_ASSIGN(files_, open_shards(path_, map));
  return ok();
}

void Checkpoint::find_places() {
  std::map<const std::byte*, std::size_t> file_by_address;  // of its first byte in memory
  for (std::size_t i = 0; i < files_.size(); ++i) file_by_address.emplace(files_[i].bytes().data(), i);
  for (const TensorView& tensor : view_) {
    if (tensor.bytes.empty()) {
      places_.push_back({});
      continue;
    }
    // The file with the greatest address up to the tensor's contains it.
    const auto file = std::prev(file_by_address.upper_bound(tensor.bytes.data()));
    places_.push_back(
        {.file = file->second, .first_byte = static_cast<std::uint64_t>(tensor.bytes.data() - file->first)});
  }
}

Status write_checkpoint(const fs::path& folder, const StateView& state, Bytes shard_bytes_max,
                        const Metadata& metadata) {
  ECHO_ASSIGN(const StateView tensors, canonical(state));
  ECHO_TRY(make_folders(folder));
  const std::vector<StateView> shards = split_into_shards(tensors, shard_bytes_max.count);
  if (shards.size() == 1) {
    ECHO_TRY(write_safetensors(folder / kSingleFileName, tensors, metadata));
    return remove_file(folder / kCheckpointIndexName);  // of an earlier checkpoint in this folder
  }
  json weight_map = json::object();
  std::uint64_t total_bytes = 0;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const std::string name = fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
    ECHO_TRY(write_safetensors(folder / name, shards[i], metadata));
    for (const TensorView& tensor : shards[i]) {
      weight_map[tensor.name] = name;
      total_bytes += tensor.bytes.size();
    }
  }
  const json index = {{"metadata", {{"total_size", total_bytes}}}, {"weight_map", weight_map}};
  ECHO_TRY(write_file_atomic(folder / kCheckpointIndexName, index.dump(2) + "\n"));
  return remove_file(folder / kSingleFileName);  // Checkpoint::open() would prefer it to the shards
}

}  // namespace echoline::delta

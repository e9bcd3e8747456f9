// Objects as files of a folder, local or on NFS.
#pragma once
#include <filesystem>
#include <string>

#include "store/object_store.hpp"

namespace echoline::store {

// An object is the file `root`/KEY. It is written under a temporary name (".new." and random letters after the key),
// synced, and then renamed, or linked if it must not replace another. So it is whole and durable once it has its name.
// Several processes and machines may use a folder.
class DirectoryStore final : public ObjectStore {
 public:
  explicit DirectoryStore(std::filesystem::path root) : root_(std::move(root)) {}
  Status put(const std::string& key, std::span<const std::byte> bytes) override;
  Status put_if_absent(const std::string& key, std::span<const std::byte> bytes) override;
  Result<std::uint64_t> get(const std::string& key, std::uint64_t first, const ByteSink& sink) override;
  Result<std::vector<ObjectInfo>> list(const std::string& prefix) override;
  Status remove(const std::string& key) override;
  Traffic traffic() const override;

 private:
  Status write(const std::string& key, std::span<const std::byte> bytes, bool replaces);
  Result<std::filesystem::path> path_of(const std::string& key) const;
  const std::filesystem::path root_;
  std::atomic<std::uint64_t> requests_ = 0, bytes_sent_ = 0, bytes_received_ = 0;
};

}  // namespace echoline::store

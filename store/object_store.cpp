// Chooses the kind of a store by its URL. Called by the learner and the verbs.
#include "store/object_store.hpp"

#include <filesystem>

#include "store/directory_store.hpp"
#include "store/s3_store.hpp"

namespace echoline::store {

Result<std::string> ObjectStore::read(const std::string& key, std::size_t bytes_max) {
  std::string content;
  const auto append = [&](std::span<const std::byte> bytes) -> Status {
    if (content.size() + bytes.size() > bytes_max)
      return fail(Code::kExhausted, "read object", "{}: longer than {} bytes, which no object of this kind is", key,
                  bytes_max);
    content.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    return ok();
  };
  ECHO_TRY(get(key, 0, append));
  return content;
}

Result<std::unique_ptr<ObjectStore>> open_object_store(const StoreAddress& address, const std::atomic<bool>* stop) {
  constexpr std::string_view kS3 = "s3://";
  if (address.url.starts_with(kS3)) return open_s3_store(address, stop);
  if (address.url.empty() || address.url.find("://") != std::string::npos)
    return fail(Code::kInvalid, "open store", "expected s3://BUCKET/PREFIX or a folder, found '{}'", address.url);
  return std::unique_ptr<ObjectStore>(std::make_unique<DirectoryStore>(address.url));
}

}  // namespace echoline::store

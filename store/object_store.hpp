// Objects by key, as S3-compatible services and folders keep them. An object appears whole or not at all.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.hpp"

namespace echoline::store {

struct ObjectInfo {
  std::string key;
  std::uint64_t bytes = 0;
  friend bool operator==(const ObjectInfo&, const ObjectInfo&) = default;
};

// Receives the bytes of an object in order; an error ends the request.
using ByteSink = std::function<Status(std::span<const std::byte>)>;

// Requests and bytes of an ObjectStore so far, retries included.
struct Traffic {
  std::uint64_t requests = 0;
  std::uint64_t bytes_sent = 0, bytes_received = 0;  // of objects, without headers
};

// Keys have 1 to kKeyBytesMax letters, digits, '-', '_', '.' and '/'. Calls may come from any thread.
//
// Errors: kNotFound: no such object (or bucket); kInvalid: the credentials, or a key or setting, are refused;
// kUnavailable: no usable answer after all retries; kCancelled: the caller's stop flag is set; kIo, kExhausted: of the
// local disk.
class ObjectStore {
 public:
  static constexpr std::size_t kKeyBytesMax = 900;
  static constexpr std::size_t kListedMax = 1'000'000;  // objects in one list(); kExhausted beyond

  virtual ~ObjectStore() = default;
  // Stores or replaces an object.
  virtual Status put(const std::string& key, std::span<const std::byte> bytes) = 0;
  // Stores the object only if the key has none, in one step; kStale otherwise. After a lost answer the repeated request
  // may find the caller's own object: on kStale, a caller compares the content.
  virtual Status put_if_absent(const std::string& key, std::span<const std::byte> bytes) = 0;
  // Sends the bytes from `first` on to `sink`. Returns the size of the whole object. kStale: the object was replaced
  // during the call.
  virtual Result<std::uint64_t> get(const std::string& key, std::uint64_t first, const ByteSink& sink) = 0;
  // The objects whose keys begin with `prefix`, in ascending order. May lack what was stored, and have what was
  // removed, a short time ago.
  virtual Result<std::vector<ObjectInfo>> list(const std::string& prefix) = 0;
  // Removes an object; no error if there is none.
  virtual Status remove(const std::string& key) = 0;
  virtual Traffic traffic() const = 0;

  // Reads a small object; kExhausted if it is longer than `bytes_max`.
  Result<std::string> read(const std::string& key, std::size_t bytes_max);
};

inline std::span<const std::byte> as_bytes(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

// Where a store is, and how to reach it. The credentials are no part of it: see s3_credentials.hpp.
struct StoreAddress {
  std::string url = {};       // s3://BUCKET/PREFIX, or a folder
  std::string endpoint = {};  // of an S3-compatible service, such as "https://minio.example:9000"; empty: AWS
  std::string region = {};    // empty: by environment or profile, else us-east-1
  std::string profile = {};   // in the profile file; empty: AWS_PROFILE or "default"
};

// Opens the store, without a request. Keys are below the URL's prefix or folder. `stop` ends waits between retries; may
// be null, else it must outlive the store. kInvalid: the URL, the endpoint, or no credentials.
Result<std::unique_ptr<ObjectStore>> open_object_store(const StoreAddress& address,
                                                       const std::atomic<bool>* stop = nullptr);

}  // namespace echoline::store

// Objects of S3-compatible services (AWS, Cloudflare R2, MinIO, Google Cloud Storage) over HTTP.
#pragma once
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "store/object_store.hpp"
#include "store/s3_credentials.hpp"

namespace echoline::store {

struct S3Options {
  std::string url;                       // of the bucket, without '/' at the end
  std::string prefix;                    // of all keys; empty, or ends with '/'
  std::string region;                    // for the signature
  std::uint64_t part_bytes = 32u << 20;  // larger objects are stored in parts of this size; at least 5 MiB on AWS
  int tries_max = 8;                     // consecutive requests without progress
  Duration first_pause = std::chrono::milliseconds(200);  // before the second try; doubles with each further one
  Duration pause_max = std::chrono::seconds(20);
  std::function<Result<S3Credentials>()> credentials;  // called at the start, and when the service refuses old ones
  std::function<Status(Duration)> wait;                // between tries; an error ends the request
  const std::atomic<bool>* stop = nullptr;             // ends a transfer; may be null
};

// Signs each request with signature version 4 (libcurl's CURLOPT_AWS_SIGV4). A temporary failure (no connection, a
// lost or short answer, 408, 409, 429, 5xx, SlowDown) is tried again after growing pauses with jitter, or after the
// pause that the service asks for. An interrupted read goes on by range, with the entity tag of its beginning.
class S3Store final : public ObjectStore {
 public:
  // Errors of `options.credentials`.
  static Result<std::unique_ptr<S3Store>> make(S3Options options);
  ~S3Store() override;
  Status put(const std::string& key, std::span<const std::byte> bytes) override;
  Status put_if_absent(const std::string& key, std::span<const std::byte> bytes) override;
  Result<std::uint64_t> get(const std::string& key, std::uint64_t first, const ByteSink& sink) override;
  Result<std::vector<ObjectInfo>> list(const std::string& prefix) override;
  Status remove(const std::string& key) override;
  Traffic traffic() const override;

 private:
  struct Request;
  struct Answer;
  struct Handles;
  explicit S3Store(S3Options options, S3Credentials credentials);
  // Sends a request until it has an answer other than a temporary failure. `what`: for messages.
  Result<Answer> send(const Request& request, std::string_view what);
  Answer try_once(const Request& request);
  Status put_object(const std::string& key, std::span<const std::byte> bytes, bool only_if_absent);
  Status put_in_parts(const std::string& key, std::span<const std::byte> bytes);
  Result<std::string> path_of(const std::string& key) const;
  Status pause(int tries, Duration asked_for);
  bool renew_credentials();  // whether they have changed

  const S3Options options_;
  std::mutex mutex_;  // guards credentials_ and random_
  S3Credentials credentials_;
  std::uint64_t random_ = 0;
  std::unique_ptr<Handles> handles_;
  std::atomic<std::uint64_t> requests_ = 0, bytes_sent_ = 0, bytes_received_ = 0;
};

// For open_object_store(): an address that begins with s3://.
Result<std::unique_ptr<ObjectStore>> open_s3_store(const StoreAddress& address, const std::atomic<bool>* stop);

}  // namespace echoline::store

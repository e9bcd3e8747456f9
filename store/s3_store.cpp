// S3's requests over libcurl, for open_object_store().
#include "store/s3_store.hpp"

#include <curl/curl.h>

#include <algorithm>
#include <charconv>
#include <mutex>
#include <random>
#include <thread>

#include "base/http.hpp"
#include "base/text.hpp"
#include "overlay/trust/sha256.hpp"
#include "store/keys.hpp"
#include "store/s3_answers.hpp"

namespace echoline::store {
namespace {

constexpr std::size_t kAnswerBytesMax = 16u << 20;  // of an XML body; a page of a list has 1 MB at most
constexpr std::size_t kPartsMax = 10'000;           // S3's limit
constexpr std::size_t kIdleHandlesMax = 8;
constexpr int kUploadsMax = 3;  // attempts at an upload in parts whose completion is refused
constexpr long kConnectTimeoutSeconds = 15;
// A transfer that stays below this rate for this long counts as lost.
constexpr long kSlowBytesPerSecond = 1000, kSlowSeconds = 30;
constexpr Duration kStopPoll = std::chrono::milliseconds(50);
constexpr curl_off_t kRetryAfterMaxSeconds = 300;
constexpr std::size_t kMessageCharactersMax = 300;

struct FreeList {
  void operator()(curl_slist* list) const { curl_slist_free_all(list); }
};

std::string escaped_key(std::string_view key) {
  std::string out;
  for (std::size_t begin = 0; begin <= key.size();) {
    const std::size_t end = std::min(key.find('/', begin), key.size());
    if (begin > 0) out += '/';
    out += url_escaped(key.substr(begin, end - begin));
    begin = end + 1;
  }
  return out;
}

// The number after the last '/' of "bytes 0-3/4".
std::optional<std::uint64_t> total_of_range(std::string_view content_range) {
  const auto slash = content_range.rfind('/');
  if (slash == content_range.npos) return std::nullopt;
  std::uint64_t total = 0;
  const char* const end = content_range.data() + content_range.size();
  const auto parsed = std::from_chars(content_range.data() + slash + 1, end, total);
  if (parsed.ec != std::errc() || parsed.ptr != end) return std::nullopt;
  return total;
}

bool is_temporary(int status) {
  return status == 408 || status == 409 || status == 425 || status == 429 || status >= 500;
}
bool concerns_credentials(std::string_view code) {
  return code == "ExpiredToken" || code == "ExpiredTokenException" || code == "InvalidToken" ||
         code == "TokenRefreshRequired" || code == "InvalidAccessKeyId";
}

}  // namespace

struct S3Store::Request {
  std::string method, path, query;  // encoded; the query sorted by name, because libcurl signs it as it is
  std::span<const std::byte> body{};
  std::vector<std::string> headers{};
  bool wants_absence = false;      // If-None-Match: *
  const ByteSink* sink = nullptr;  // receives the body of a success
  std::uint64_t first = 0;         // byte from which to read
  std::string if_match{};
};

struct S3Store::Answer {
  int status = 0;       // 0: none
  std::string trouble;  // why there is none
  std::string body, etag, content_range, region;
  Duration retry_after{};
  std::uint64_t sunk_bytes = 0;  // given to the sink
  std::optional<Error> sink_error;

  // State of the transfer.
  CURL* handle = nullptr;
  const Request* request = nullptr;
  const std::atomic<bool>* stop = nullptr;
  bool is_too_long = false;
};

struct S3Store::Handles {
  std::mutex mutex;
  std::vector<CURL*> idle;
  ~Handles() {
    for (CURL* handle : idle) curl_easy_cleanup(handle);
  }
  CURL* take() {
    const std::lock_guard lock(mutex);
    if (idle.empty()) {
      CURL* const handle = curl_easy_init();
      ECHO_CHECK(handle != nullptr, "libcurl is out of memory");
      return handle;
    }
    CURL* const handle = idle.back();
    idle.pop_back();
    return handle;
  }
  void give_back(CURL* handle) {
    curl_easy_reset(handle);  // keeps the connection
    const std::lock_guard lock(mutex);
    if (idle.size() < kIdleHandlesMax)
      idle.push_back(handle);
    else
      curl_easy_cleanup(handle);
  }
};

S3Store::S3Store(S3Options options, S3Credentials credentials)
    : options_(std::move(options)),
      credentials_(std::move(credentials)),
      random_(std::random_device()()),
      handles_(std::make_unique<Handles>()) {}
S3Store::~S3Store() = default;

Result<std::unique_ptr<S3Store>> S3Store::make(S3Options options) {
  static std::once_flag once;
  std::call_once(once, [] { curl_global_init(CURL_GLOBAL_DEFAULT); });
  ECHO_ASSIGN(S3Credentials credentials, options.credentials());
  return std::unique_ptr<S3Store>(new S3Store(std::move(options), std::move(credentials)));
}

bool S3Store::renew_credentials() {
  auto found = options_.credentials();
  const std::lock_guard lock(mutex_);
  if (!found || *found == credentials_) return false;
  credentials_ = std::move(*found);
  return true;
}

Status S3Store::pause(int tries, Duration asked_for) {
  double share = 0;
  {
    const std::lock_guard lock(mutex_);
    random_ = random_ * 6364136223846793005u + 1442695040888963407u;
    share = static_cast<double>(random_ >> 40) / static_cast<double>(1u << 24);
  }
  double pause = seconds(options_.first_pause);
  for (int i = 1; i < tries && pause < seconds(options_.pause_max); ++i) pause *= 2;
  pause = std::min(pause, seconds(options_.pause_max)) * (0.5 + share / 2);
  return options_.wait(std::max(from_seconds(pause), asked_for));
}

S3Store::Answer S3Store::try_once(const Request& request) {
  Answer answer;
  CURL* const handle = handles_->take();
  answer.handle = handle;
  answer.request = &request;
  answer.stop = options_.stop;
  const std::string url = options_.url + request.path + (request.query.empty() ? "" : "?" + request.query);
  std::unique_ptr<curl_slist, FreeList> headers;
  const auto add_header = [&](const std::string& line) {
    headers.reset(curl_slist_append(headers.release(), line.c_str()));
  };
  // libcurl signs these headers. Debian 12's (7.88) needs Host with the port, and does not hash the body for S3.
  const auto host_begin = options_.url.find("://") + 3;
  add_header("Host: " + options_.url.substr(host_begin, options_.url.find('/', host_begin) - host_begin));
  add_header("x-amz-content-sha256: " + overlay::trust::sha256_hex(request.body));
  if (!request.body.empty()) add_header("Content-Type: application/octet-stream");
  if (request.wants_absence) add_header("If-None-Match: *");
  if (!request.if_match.empty()) add_header("If-Match: " + request.if_match);
  for (const std::string& line : request.headers) add_header(line);
  {
    const std::lock_guard lock(mutex_);
    if (!credentials_.session_token.empty())
      add_header("x-amz-security-token: " + std::string(credentials_.session_token.reveal()));
    curl_easy_setopt(handle, CURLOPT_USERNAME, credentials_.access_key.c_str());
    curl_easy_setopt(handle, CURLOPT_PASSWORD, std::string(credentials_.secret_key.reveal()).c_str());
  }
  curl_easy_setopt(handle, CURLOPT_AWS_SIGV4, fmt::format("aws:amz:{}:s3", options_.region).c_str());
  curl_easy_setopt(handle, CURLOPT_URL, url.c_str());
  curl_easy_setopt(handle, CURLOPT_CUSTOMREQUEST, request.method.c_str());
  curl_easy_setopt(handle, CURLOPT_HTTPHEADER, headers.get());
  curl_easy_setopt(handle, CURLOPT_PROTOCOLS_STR, "http,https");
  curl_easy_setopt(handle, CURLOPT_USERAGENT, "echoline");
  curl_easy_setopt(handle, CURLOPT_NOSIGNAL, 1L);  // signals would disturb the program's other threads
  curl_easy_setopt(handle, CURLOPT_NETRC, static_cast<long>(CURL_NETRC_IGNORED));
  curl_easy_setopt(handle, CURLOPT_PATH_AS_IS, 1L);
  curl_easy_setopt(handle, CURLOPT_CONNECTTIMEOUT, kConnectTimeoutSeconds);
  curl_easy_setopt(handle, CURLOPT_LOW_SPEED_LIMIT, kSlowBytesPerSecond);
  curl_easy_setopt(handle, CURLOPT_LOW_SPEED_TIME, kSlowSeconds);
  constexpr long kBufferBytes = 512 * 1024;
  curl_easy_setopt(handle, CURLOPT_BUFFERSIZE, kBufferBytes);
  curl_easy_setopt(handle, CURLOPT_UPLOAD_BUFFERSIZE, kBufferBytes);
  if (request.first > 0) curl_easy_setopt(handle, CURLOPT_RANGE, fmt::format("{}-", request.first).c_str());
  if (request.method == "PUT" || request.method == "POST") {  // an empty body states its length, too
    curl_easy_setopt(handle, CURLOPT_POSTFIELDS,
                     request.body.empty() ? "" : reinterpret_cast<const char*>(request.body.data()));
    curl_easy_setopt(handle, CURLOPT_POSTFIELDSIZE_LARGE, static_cast<curl_off_t>(request.body.size()));
  }
  // Returning less than the block's size ends the transfer.
  const auto on_body = +[](char* data, std::size_t size, std::size_t count, void* user_data) -> std::size_t {
    auto& to = *static_cast<Answer*>(user_data);
    const std::size_t bytes = size * count;
    long status = 0;
    curl_easy_getinfo(to.handle, CURLINFO_RESPONSE_CODE, &status);
    const bool is_content = to.request->sink && (status == 206 || (status == 200 && to.request->first == 0));
    if (is_content) {
      const Status taken = (*to.request->sink)(std::as_bytes(std::span(data, bytes)));
      if (!taken) return to.sink_error = taken.error(), 0;
      to.sunk_bytes += bytes;
      return bytes;
    }
    if (to.body.size() + bytes > kAnswerBytesMax) return to.is_too_long = true, 0;
    to.body.append(data, bytes);
    return bytes;
  };
  const auto on_header = +[](char* data, std::size_t size, std::size_t count, void* user_data) -> std::size_t {
    auto& to = *static_cast<Answer*>(user_data);
    const std::string_view line(data, size * count);
    const auto colon = line.find(':');
    if (colon == line.npos) return line.size();
    std::string name(line.substr(0, colon));
    std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
    std::string_view value = line.substr(colon + 1);
    while (!value.empty() && std::isspace(static_cast<unsigned char>(value.front()))) value.remove_prefix(1);
    while (!value.empty() && std::isspace(static_cast<unsigned char>(value.back()))) value.remove_suffix(1);
    if (name == "etag") to.etag = value;
    if (name == "content-range") to.content_range = value;
    if (name == "x-amz-bucket-region") to.region = value;
    return line.size();
  };
  const auto on_progress = +[](void* user_data, curl_off_t, curl_off_t, curl_off_t, curl_off_t) {
    const auto& to = *static_cast<Answer*>(user_data);
    return to.stop && *to.stop ? 1 : 0;
  };
  curl_easy_setopt(handle, CURLOPT_WRITEFUNCTION, on_body);
  curl_easy_setopt(handle, CURLOPT_WRITEDATA, &answer);
  curl_easy_setopt(handle, CURLOPT_HEADERFUNCTION, on_header);
  curl_easy_setopt(handle, CURLOPT_HEADERDATA, &answer);
  curl_easy_setopt(handle, CURLOPT_XFERINFOFUNCTION, on_progress);
  curl_easy_setopt(handle, CURLOPT_XFERINFODATA, &answer);
  curl_easy_setopt(handle, CURLOPT_NOPROGRESS, 0L);
  ++requests_;
  const CURLcode code = curl_easy_perform(handle);
  curl_off_t sent = 0;
  curl_easy_getinfo(handle, CURLINFO_SIZE_UPLOAD_T, &sent);
  bytes_sent_ += static_cast<std::uint64_t>(std::max<curl_off_t>(sent, 0));
  bytes_received_ += answer.sunk_bytes;
  if (code == CURLE_OK) {
    long status = 0;
    curl_easy_getinfo(handle, CURLINFO_RESPONSE_CODE, &status);
    answer.status = static_cast<int>(status);
    curl_off_t wait_s = 0;
    curl_easy_getinfo(handle, CURLINFO_RETRY_AFTER, &wait_s);
    answer.retry_after = std::chrono::seconds(std::clamp<curl_off_t>(wait_s, 0, kRetryAfterMaxSeconds));
  } else {
    answer.trouble = answer.is_too_long ? fmt::format("its answer is longer than {} bytes", kAnswerBytesMax)
                                        : std::string(curl_easy_strerror(code));
  }
  handles_->give_back(handle);
  return answer;
}

Result<S3Store::Answer> S3Store::send(const Request& original, std::string_view what) {
  Request request = original;
  std::string trouble;
  std::uint64_t sunk_bytes = 0;
  for (int tries = 0; tries < options_.tries_max;) {
    if (options_.stop && *options_.stop) return fail(Code::kCancelled, what, "stopped");
    const std::uint64_t first = request.first;
    Answer answer = try_once(request);
    if (answer.sink_error) return *answer.sink_error;
    sunk_bytes += answer.sunk_bytes;
    if (answer.sunk_bytes > 0) {
      tries = 0;  // it got on
      request.first += answer.sunk_bytes;
      request.if_match = answer.etag;
    }
    const int status = answer.status;
    if (status >= 200 && status < 300) {
      answer.sunk_bytes = sunk_bytes;
      if (request.sink && first > 0 && status == 200)
        return fail(Code::kUnavailable, what, "{}: the service ignores ranges of bytes", options_.url);
      return answer;
    }
    const std::string code = xml_text(answer.body, "Code").value_or("");
    const std::string message =
        printable(xml_text(answer.body, "Message").value_or("").substr(0, kMessageCharactersMax));
    const auto refuse = [&](Code kind, std::string_view advice) {
      return fail(kind, what, "{}{}: the service answers {} {} {}{}", options_.url, request.path, status,
                  printable(code), message, advice);
    };
    if (status == 412) return refuse(Code::kStale, "");
    if (status == 404) return refuse(Code::kNotFound, code == "NoSuchBucket" ? ": make the bucket first" : "");
    if (status == 416) {
      // The range begins at the end or beyond it.
      answer.sunk_bytes = sunk_bytes;
      return answer;
    }
    if (status > 0 && !is_temporary(status)) {
      if (concerns_credentials(code) && renew_credentials()) continue;
      if (!answer.region.empty() && answer.region != options_.region)
        return refuse(Code::kInvalid, fmt::format(": the bucket's region is {}, not {}; set store.region",
                                                  printable(answer.region), options_.region));
      return refuse(Code::kInvalid, status == 403 || concerns_credentials(code)
                                        ? ": check the access key in the environment or profile, its rights to this "
                                          "bucket, and the clock"
                                        : ": check the endpoint, the bucket and the region");
    }
    trouble = status > 0 ? fmt::format("it answers {} {} {}", status, printable(code), message) : answer.trouble;
    if (++tries < options_.tries_max) ECHO_TRY(pause(tries, answer.retry_after));
  }
  return fail(Code::kUnavailable, what, "{}{}: no success in {} tries: {}", options_.url, request.path,
              options_.tries_max, trouble);
}

Result<std::string> S3Store::path_of(const std::string& key) const {
  ECHO_TRY(check_key(key));
  return "/" + escaped_key(options_.prefix + key);
}

Status S3Store::put(const std::string& key, std::span<const std::byte> bytes) {
  if (bytes.size() > options_.part_bytes) return put_in_parts(key, bytes);
  return put_object(key, bytes, /*only_if_absent=*/false);
}
Status S3Store::put_if_absent(const std::string& key, std::span<const std::byte> bytes) {
  ECHO_CHECK(bytes.size() <= options_.part_bytes, "a conditional object of {} bytes", bytes.size());
  return put_object(key, bytes, /*only_if_absent=*/true);
}

Status S3Store::put_object(const std::string& key, std::span<const std::byte> bytes, bool only_if_absent) {
  ECHO_ASSIGN(std::string path, path_of(key));
  const Request request{.method = "PUT",
                        .path = std::move(path),
                        .query = {},
                        .body = bytes,
                        .headers = {},
                        .wants_absence = only_if_absent};
  ECHO_TRY(send(request, "store object"));
  return ok();
}

Status S3Store::put_in_parts(const std::string& key, std::span<const std::byte> bytes) {
  constexpr std::string_view kOperation = "store object";
  ECHO_ASSIGN(const std::string path, path_of(key));
  const std::uint64_t part_bytes = std::max(options_.part_bytes, (bytes.size() + kPartsMax - 1) / kPartsMax);
  for (int uploads = 1;; ++uploads) {
    ECHO_ASSIGN(const Answer begun, send({.method = "POST", .path = path, .query = "uploads="}, kOperation));
    const std::string id = xml_text(begun.body, "UploadId").value_or("");
    if (id.empty()) return fail(Code::kUnavailable, kOperation, "{}{}: no <UploadId>", options_.url, path);
    const auto upload = [&]() -> Status {
      std::string parts = "<CompleteMultipartUpload>";
      std::size_t number = 0;
      for (std::size_t begin = 0; begin < bytes.size(); begin += part_bytes) {
        ++number;
        const auto part = bytes.subspan(begin, std::min<std::size_t>(part_bytes, bytes.size() - begin));
        ECHO_ASSIGN(const Answer stored,
                    send({.method = "PUT",
                          .path = path,
                          .query = fmt::format("partNumber={}&uploadId={}", number, url_escaped(id)),
                          .body = part},
                         kOperation));
        parts += fmt::format("<Part><PartNumber>{}</PartNumber><ETag>{}</ETag></Part>", number, stored.etag);
      }
      parts += "</CompleteMultipartUpload>";
      ECHO_ASSIGN(const Answer completed, send({.method = "POST",
                                                .path = path,
                                                .query = fmt::format("uploadId={}", url_escaped(id)),
                                                .body = as_bytes(parts)},
                                               kOperation));
      // An error of the completion may come with status 200.
      if (const auto code = xml_text(completed.body, "Code"))
        return fail(Code::kUnavailable, kOperation, "{}{}: {}", options_.url, path, printable(*code));
      return ok();
    };
    const Status uploaded = upload();
    if (uploaded || uploaded.error().code == Code::kCancelled) return uploaded;
    // The parts would be stored, and paid for, without end.
    const auto removed =
        send({.method = "DELETE", .path = path, .query = fmt::format("uploadId={}", url_escaped(id))}, "abort upload");
    // kInvalid and kNotFound: the service does not know these parts or this upload.
    if (uploaded.error().code == Code::kUnavailable || uploads == kUploadsMax) return uploaded;
  }
}

Result<std::uint64_t> S3Store::get(const std::string& key, std::uint64_t first, const ByteSink& sink) {
  constexpr std::string_view kOperation = "read object";
  ECHO_ASSIGN(std::string path, path_of(key));
  Request request{.method = "GET", .path = std::move(path), .query = {}};
  request.sink = &sink;
  request.first = first;
  ECHO_ASSIGN(const Answer answer, send(request, kOperation));
  const std::uint64_t end = first + answer.sunk_bytes;
  if (answer.status != 416) return end;
  // AWS says the size in the body as well, and moto only there.
  const std::string size = answer.content_range.empty() ? "/" + xml_text(answer.body, "ActualObjectSize").value_or("")
                                                        : answer.content_range;
  const auto total = total_of_range(size);
  if (total && *total <= end) return *total;
  return fail(Code::kUnavailable, kOperation, "{}{}: the service refuses the range from byte {} on", options_.url,
              request.path, end);
}

Result<std::vector<ObjectInfo>> S3Store::list(const std::string& prefix) {
  constexpr std::string_view kOperation = "list objects";
  std::vector<ObjectInfo> objects;
  std::string next;
  do {
    std::string query = next.empty() ? "" : fmt::format("continuation-token={}&", url_escaped(next));
    query += fmt::format("list-type=2&prefix={}", url_escaped(options_.prefix + prefix));
    ECHO_ASSIGN(const Answer answer, send({.method = "GET", .path = "/", .query = std::move(query)}, kOperation));
    ECHO_ASSIGN(S3List page, parse_s3_list(answer.body));
    if (objects.size() + page.objects.size() > kListedMax)
      return fail(Code::kExhausted, kOperation, "{}: more than {} objects below {}", options_.url, kListedMax, prefix);
    for (ObjectInfo& object : page.objects) {
      if (!object.key.starts_with(options_.prefix + prefix)) continue;
      object.key.erase(0, options_.prefix.size());
      objects.push_back(std::move(object));
    }
    next = std::move(page.next);
  } while (!next.empty());
  std::sort(objects.begin(), objects.end(), [](const auto& a, const auto& b) { return a.key < b.key; });
  return objects;
}

Status S3Store::remove(const std::string& key) {
  ECHO_ASSIGN(std::string path, path_of(key));
  const auto removed = send({.method = "DELETE", .path = std::move(path), .query = {}}, "remove object");
  if (!removed && removed.error().code != Code::kNotFound) return removed.error();
  return ok();
}

Traffic S3Store::traffic() const {
  return {.requests = requests_, .bytes_sent = bytes_sent_, .bytes_received = bytes_received_};
}

Result<std::unique_ptr<ObjectStore>> open_s3_store(const StoreAddress& address, const std::atomic<bool>* stop) {
  constexpr std::string_view kOperation = "open store";
  const std::string_view rest = std::string_view(address.url).substr(std::string_view("s3://").size());
  const std::string_view bucket = rest.substr(0, rest.find('/'));
  std::string prefix(bucket.size() < rest.size() ? rest.substr(bucket.size() + 1) : "");
  while (prefix.ends_with('/')) prefix.pop_back();
  if (!prefix.empty()) ECHO_TRY(check_key(prefix));
  constexpr std::size_t kBucketMin = 3, kBucketMax = 63;
  if (bucket.size() < kBucketMin || bucket.size() > kBucketMax || !has_only_name_characters(bucket))
    return fail(Code::kInvalid, kOperation, "expected s3://BUCKET/PREFIX with a bucket of {} to {} letters, found '{}'",
                kBucketMin, kBucketMax, address.url);
  S3Options options;
  if (!prefix.empty()) options.prefix = prefix + "/";
  options.region = address.region;
  if (options.region.empty()) {
    ECHO_ASSIGN(options.region, find_s3_region(address.profile));
  }
  if (!has_only_name_characters(options.region))
    return fail(Code::kInvalid, kOperation, "expected a region such as us-east-1, found '{}'", options.region);
  if (address.endpoint.empty()) {
    options.url = fmt::format("https://{}.s3.{}.amazonaws.com", bucket, options.region);
  } else if (address.endpoint.starts_with("http://") || address.endpoint.starts_with("https://")) {
    options.url = fmt::format("{}/{}", without_trailing_slashes(address.endpoint), bucket);
  } else {
    return fail(Code::kInvalid, kOperation, "expected an endpoint that begins with https:// or http://, found '{}'",
                address.endpoint);
  }
  options.credentials = [profile = address.profile] { return find_s3_credentials(profile); };
  options.stop = stop;
  options.wait = [stop](Duration pause) -> Status {
    for (const auto end = std::chrono::steady_clock::now() + pause; std::chrono::steady_clock::now() < end;) {
      if (stop && *stop) return fail(Code::kCancelled, "request", "stopped");
      std::this_thread::sleep_for(std::min(kStopPoll, pause));
    }
    return ok();
  };
  ECHO_ASSIGN(std::unique_ptr<S3Store> store, S3Store::make(std::move(options)));
  return std::unique_ptr<ObjectStore>(std::move(store));
}

}  // namespace echoline::store

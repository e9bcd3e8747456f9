// The test server, over cpp-httplib. Its signatures follow AWS's description (sig-v4-header-based-auth) and share no
// code with the client.
#include "tests/store/s3_server.hpp"

#include <httplib.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/sha.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "base/result.hpp"

namespace echoline::store {
namespace {

std::string hex(const unsigned char* bytes, std::size_t count) {
  std::string text;
  for (std::size_t i = 0; i < count; ++i) text += fmt::format("{:02x}", bytes[i]);
  return text;
}
std::string sha256(const std::string& text) {
  unsigned char hash[SHA256_DIGEST_LENGTH];
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), hash);
  return hex(hash, sizeof hash);
}
std::string md5(const std::string& text) {
  unsigned char hash[EVP_MAX_MD_SIZE];
  unsigned size = 0;
  EVP_Digest(text.data(), text.size(), hash, &size, EVP_md5(), nullptr);
  return hex(hash, size);
}
std::string hmac(const std::string& key, const std::string& text) {
  unsigned char mac[EVP_MAX_MD_SIZE];
  unsigned size = 0;
  HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()), reinterpret_cast<const unsigned char*>(text.data()),
       text.size(), mac, &size);
  return {reinterpret_cast<char*>(mac), size};
}

std::vector<std::string> split(const std::string& text, char between) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(between, begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

std::string error_xml(const std::string& code) {
  return fmt::format("<?xml version=\"1.0\"?><Error><Code>{}</Code><Message>{} for a test</Message></Error>", code,
                     code);
}

}  // namespace

struct S3Server::Impl {
  Settings settings;
  httplib::Server server;
  std::thread thread;
  int port = 0;
  mutable std::mutex mutex;
  std::function<S3Fault(const std::string&)> fault = [](const std::string&) { return S3Fault::kNone; };
  std::map<std::string, std::shared_ptr<const std::string>> objects;
  std::map<std::string, std::string> etags;
  std::map<std::string, std::uint64_t> frozen;  // what lists show, with sizes
  bool is_frozen = false;
  std::map<std::string, std::map<int, std::pair<std::string, std::string>>> uploads;  // parts: entity tag, content
  std::uint64_t last_upload = 0;
  std::map<std::string, std::uint64_t> requests;
  std::mutex rate_mutex;
  std::chrono::steady_clock::time_point up_free{}, down_free{};  // when the link has sent all so far

  // Takes the time that `bytes` need on the link.
  void take_time(std::chrono::steady_clock::time_point& free_at, std::size_t bytes) {
    if (settings.mbit_per_s <= 0) return;
    std::chrono::steady_clock::time_point until;
    {
      const std::lock_guard lock(rate_mutex);
      const auto cost = std::chrono::duration<double>(static_cast<double>(bytes) * 8 / (settings.mbit_per_s * 1e6));
      free_at = std::max(free_at, std::chrono::steady_clock::now()) +
                std::chrono::duration_cast<std::chrono::steady_clock::duration>(cost);
      until = free_at;
    }
    std::this_thread::sleep_until(until);
  }

  void refuse(httplib::Response& response, int status, const std::string& code) {
    response.status = status;
    response.set_content(error_xml(code), "application/xml");
  }

  // The error code, or nothing if the signature is right.
  std::string check_signature(const httplib::Request& request, const std::string& body) {
    const std::string header = request.get_header_value("Authorization");
    constexpr std::string_view kScheme = "AWS4-HMAC-SHA256 ";
    if (header.rfind(kScheme, 0) != 0) return "AccessDenied";
    std::map<std::string, std::string> fields;
    for (std::string part : split(header.substr(kScheme.size()), ',')) {
      part.erase(0, part.find_first_not_of(' '));
      fields[part.substr(0, part.find('='))] = part.substr(part.find('=') + 1);
    }
    const auto scope = split(fields["Credential"], '/');  // key, date, region, service, aws4_request
    if (scope.size() != 5 || scope[3] != "s3" || scope[4] != "aws4_request") return "AuthorizationHeaderMalformed";
    if (scope[0] != settings.access_key) return "InvalidAccessKeyId";
    if (scope[2] != settings.region) return "AuthorizationHeaderMalformed";
    if (request.get_header_value("x-amz-security-token") != settings.session_token) return "InvalidToken";
    const std::string payload = request.get_header_value("x-amz-content-sha256");
    if (payload != sha256(body)) return "XAmzContentSHA256Mismatch";
    std::string headers;
    bool has_host = false;
    for (const std::string& name : split(fields["SignedHeaders"], ';')) {
      headers += name + ":" + request.get_header_value(name.c_str()) + "\n";
      has_host |= name == "host";
    }
    if (!has_host || request.get_header_value("Host") != fmt::format("127.0.0.1:{}", port)) return "AccessDenied";
    const auto question = request.target.find('?');
    auto query = split(question == std::string::npos ? "" : request.target.substr(question + 1), '&');
    std::sort(query.begin(), query.end());
    std::string sorted;
    for (const std::string& part : query) sorted += (sorted.empty() ? "" : "&") + part;
    const std::string canonical = request.method + "\n" + request.target.substr(0, question) + "\n" + sorted + "\n" +
                                  headers + "\n" + fields["SignedHeaders"] + "\n" + payload;
    const std::string date = request.get_header_value("x-amz-date");
    const std::string to_sign =
        "AWS4-HMAC-SHA256\n" + date + "\n" + scope[1] + "/" + scope[2] + "/s3/aws4_request\n" + sha256(canonical);
    std::string key = hmac("AWS4" + settings.secret_key, scope[1]);
    for (const char* part : {settings.region.c_str(), "s3", "aws4_request"}) key = hmac(key, part);
    const std::string mac = hmac(key, to_sign);
    if (hex(reinterpret_cast<const unsigned char*>(mac.data()), mac.size()) != fields["Signature"])
      return "SignatureDoesNotMatch";
    return "";
  }

  void handle(const httplib::Request& request, httplib::Response& response, const std::string& body) {
    take_time(up_free, body.size());
    const std::string root = "/" + settings.bucket + "/";
    const std::string refused = [&]() -> std::string {
      const std::lock_guard lock(mutex);
      return check_signature(request, body);
    }();
    if (!refused.empty()) {
      const std::lock_guard lock(mutex);
      ++requests["refused"];
      return refuse(response, refused == "InvalidToken" ? 400 : 403, refused);
    }
    if (request.path.rfind(root, 0) != 0) return refuse(response, 404, "NoSuchBucket");
    const std::string key = request.path.substr(root.size());
    const bool is_list = key.empty();
    const std::string name = (is_list ? "LIST " + request.get_param_value("prefix") : request.method + " " + key);
    S3Fault what = S3Fault::kNone;
    {
      const std::lock_guard lock(mutex);
      ++requests[is_list ? "LIST" : request.method];
      what = fault(name);
    }
    switch (what) {
      case S3Fault::kInternalError:
        return refuse(response, 500, "InternalError");
      case S3Fault::kSlowDown:
        response.set_header("Retry-After", "0");
        return refuse(response, 503, "SlowDown");
      case S3Fault::kExpiredCredentials:
        return refuse(response, 400, "ExpiredToken");
      case S3Fault::kWrongRegion:
        response.set_header("x-amz-bucket-region", "us-west-2");
        return refuse(response, 301, "PermanentRedirect");
      default:
        break;
    }
    const std::lock_guard lock(mutex);
    if (is_list)
      list(request, response);
    else if (request.method == "GET")
      get(key, request, response, what);
    else if (request.method == "PUT")
      put(key, request, response, body, what);
    else if (request.method == "POST")
      post(key, request, response, body);
    else
      remove(key, request, response);
    if (what == S3Fault::kLostAnswer) refuse(response, 500, "InternalError");
  }

  void list(const httplib::Request& request, httplib::Response& response) {
    const std::string prefix = request.get_param_value("prefix"), after = request.get_param_value("continuation-token");
    std::map<std::string, std::uint64_t> all = frozen;
    if (!is_frozen) {
      all.clear();
      for (const auto& [key, content] : objects) all[key] = content->size();
    }
    std::string xml, last;
    std::size_t count = 0;
    bool is_truncated = false;
    for (auto object = all.upper_bound(after); object != all.end(); ++object) {
      if (object->first.rfind(prefix, 0) != 0) continue;
      if (count == settings.page_keys) {
        is_truncated = true;
        break;
      }
      ++count;
      last = object->first;
      xml += fmt::format("<Contents><Key>{}</Key><Size>{}</Size></Contents>", object->first, object->second);
    }
    xml = fmt::format("<?xml version=\"1.0\"?><ListBucketResult><IsTruncated>{}</IsTruncated>{}{}</ListBucketResult>",
                      is_truncated ? "true" : "false", xml,
                      is_truncated ? fmt::format("<NextContinuationToken>{}</NextContinuationToken>", last) : "");
    response.set_content(xml, "application/xml");
  }

  void get(const std::string& key, const httplib::Request& request, httplib::Response& response, S3Fault what) {
    const auto found = objects.find(key);
    if (found == objects.end()) return refuse(response, 404, "NoSuchKey");
    const std::shared_ptr<const std::string> content = found->second;
    const std::string etag = etags.at(key);
    if (request.has_header("If-Match") && request.get_header_value("If-Match") != etag)
      return refuse(response, 412, "PreconditionFailed");
    std::size_t first = 0;
    const std::string range = request.get_header_value("Range");
    if (!range.empty() && what != S3Fault::kIgnoredRange) {
      first = std::stoull(range.substr(range.find('=') + 1));
      if (first >= content->size()) {
        response.set_header("Content-Range", fmt::format("bytes */{}", content->size()));
        return refuse(response, 416, "InvalidRange");
      }
      response.status = 206;
      response.set_header("Content-Range", fmt::format("bytes {}-{}/{}", first, content->size() - 1, content->size()));
    }
    response.set_header("ETag", etag);
    const std::size_t size = content->size() - first;
    if (size == 0) return response.set_content("", "application/octet-stream");
    const std::size_t sent_max = what == S3Fault::kTruncatedBody ? size / 2 : size;
    response.set_content_provider(
        size, "application/octet-stream",
        [this, content, first, sent_max](std::size_t offset, std::size_t length, httplib::DataSink& sink) {
          constexpr std::size_t kBlock = 256u << 10;
          if (offset >= sent_max) return false;  // closes the connection
          const std::size_t count = std::min({length, kBlock, sent_max - offset});
          take_time(down_free, count);
          return sink.write(content->data() + first + offset, count);
        });
  }

  void put(const std::string& key, const httplib::Request& request, httplib::Response& response,
           const std::string& body, S3Fault what) {
    std::string etag = "\"" + md5(body) + "\"";
    if (request.has_param("uploadId")) {
      const auto upload = uploads.find(request.get_param_value("uploadId"));
      if (upload == uploads.end()) return refuse(response, 404, "NoSuchUpload");
      upload->second[std::stoi(request.get_param_value("partNumber"))] = {etag, body};
    } else {
      const bool must_be_absent = settings.keeps_conditions && request.get_header_value("If-None-Match") == "*";
      if (must_be_absent && objects.count(key)) return refuse(response, 412, "PreconditionFailed");
      objects[key] = std::make_shared<const std::string>(body);
      etags[key] = etag;
    }
    if (what == S3Fault::kWrongEtag) etag = "\"0123\"";
    response.set_header("ETag", etag);
    response.status = 200;
  }

  void post(const std::string& key, const httplib::Request& request, httplib::Response& response,
            const std::string& body) {
    if (request.has_param("uploads")) {
      const std::string id = fmt::format("upload+{}/", ++last_upload);
      uploads[id];
      return response.set_content(fmt::format("<R><UploadId>{}</UploadId></R>", id), "application/xml");
    }
    const auto upload = uploads.find(request.get_param_value("uploadId"));
    if (upload == uploads.end()) return refuse(response, 404, "NoSuchUpload");
    std::string whole, expected = "<CompleteMultipartUpload>";
    for (const auto& [number, part] : upload->second) {
      expected += fmt::format("<Part><PartNumber>{}</PartNumber><ETag>{}</ETag></Part>", number, part.first);
      const bool is_last = number == upload->second.rbegin()->first;
      if (!is_last && part.second.size() < settings.part_bytes_min) return refuse(response, 400, "EntityTooSmall");
      whole += part.second;
    }
    if (body != expected + "</CompleteMultipartUpload>") return refuse(response, 400, "InvalidPart");
    etags[key] = "\"" + upload->first + "\"";
    objects[key] = std::make_shared<const std::string>(std::move(whole));
    uploads.erase(upload);
    response.set_content("<R><ETag>\"x\"</ETag></R>", "application/xml");
  }

  void remove(const std::string& key, const httplib::Request& request, httplib::Response& response) {
    if (request.has_param("uploadId"))
      uploads.erase(request.get_param_value("uploadId"));
    else
      objects.erase(key);
    response.status = 204;
  }
};

S3Server::S3Server() : S3Server(Settings()) {}

S3Server::S3Server(Settings settings) : impl_(std::make_unique<Impl>()) {
  impl_->settings = std::move(settings);
  const auto with_body = [this](const httplib::Request& request, httplib::Response& response) {
    impl_->handle(request, response, request.body);
  };
  impl_->server.Get(".*", with_body);
  impl_->server.Put(".*", with_body);
  impl_->server.Post(".*", with_body);
  impl_->server.Delete(".*", with_body);
  // Ranges are answered above.
  impl_->server.set_pre_routing_handler([](const httplib::Request& request, httplib::Response&) {
    const_cast<httplib::Request&>(request).ranges.clear();
    return httplib::Server::HandlerResponse::Unhandled;
  });
  impl_->server.set_tcp_nodelay(true);
  impl_->server.set_keep_alive_max_count(100'000);
  impl_->port = impl_->server.bind_to_any_port("127.0.0.1");
  impl_->thread = std::thread([this] { impl_->server.listen_after_bind(); });
  while (!impl_->server.is_running()) std::this_thread::yield();
}
S3Server::~S3Server() {
  impl_->server.stop();
  impl_->thread.join();
}
std::string S3Server::endpoint() const { return fmt::format("http://127.0.0.1:{}", impl_->port); }
const S3Server::Settings& S3Server::settings() const { return impl_->settings; }
void S3Server::set_fault(std::function<S3Fault(const std::string&)> fault) {
  const std::lock_guard lock(impl_->mutex);
  impl_->fault = std::move(fault);
}
void S3Server::set_session_token(const std::string& token) {
  const std::lock_guard lock(impl_->mutex);
  impl_->settings.session_token = token;
}
void S3Server::freeze_lists() {
  const std::lock_guard lock(impl_->mutex);
  impl_->frozen.clear();
  for (const auto& [key, content] : impl_->objects) impl_->frozen[key] = content->size();
  impl_->is_frozen = true;
}
void S3Server::show_all() {
  const std::lock_guard lock(impl_->mutex);
  impl_->is_frozen = false;
}
std::map<std::string, std::string> S3Server::objects() const {
  const std::lock_guard lock(impl_->mutex);
  std::map<std::string, std::string> copies;
  for (const auto& [key, content] : impl_->objects) copies[key] = *content;
  return copies;
}
std::size_t S3Server::uploads_in_parts() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->uploads.size();
}
std::map<std::string, std::uint64_t> S3Server::requests() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->requests;
}

}  // namespace echoline::store

// HTTP without waiting, over libcurl: for services that machines are rented from, and for inference servers.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.hpp"
#include "base/units.hpp"

namespace echoline {

struct HttpRequest {
  std::string method;  // "GET"
  std::string url;
  std::string body;    // JSON; "" for none
  Duration timeout{};  // 0: the client's
  std::optional<std::string> cookies =
      {};  // "name=value; name=value", kept up with by the answer; absent: none are taken
};

struct HttpAnswer {
  std::uint64_t request = 0;
  int status = 0;          // 0: no answer came
  std::string body;        // of any type: a proxy in between answers in its own words
  std::string trouble;     // why no answer came
  bool sent = false;       // the request may have arrived; false: certainly not
  std::string cookies;     // of a request that had some, or none so far, and takes them
  Duration retry_after{};  // that the other side wants to be left alone for; 0: it does not say
};

struct HttpLimits {
  std::size_t answer_max = 16u << 20;
  bool proxies = true;  // of the environment are used
};

// Requests carry the key in a header (none where it is empty), and nothing else ever shows it. Redirects are not
// followed, so it goes to no other host. Use from one thread.
class HttpClient {
 public:
  HttpClient(std::string key, Duration timeout, HttpLimits limits = {});
  ~HttpClient();
  HttpClient(const HttpClient&) = delete;
  HttpClient& operator=(const HttpClient&) = delete;
  std::uint64_t send(const HttpRequest& request);
  // What was answered, or failed, since the last call; where that is nothing, waits about so long for it.
  std::vector<HttpAnswer> poll(Duration wait = {});
  // Nothing comes of it; the other side sees the connection end.
  void cancel(std::uint64_t request);
  // Waits for the answer, or the time-out. Nothing else may be under way.
  HttpAnswer ask(const HttpRequest& request);

 private:
  std::vector<HttpAnswer> arrived();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// A service's address, to which paths that begin with '/' are appended.
std::string service_url(std::string_view url);

// `text` as part of a URL's query.
std::string url_escaped(std::string_view text);

}  // namespace echoline

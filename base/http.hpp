// Asynchronous HTTP over libcurl, for rental services and inference servers.
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
  Duration timeout{};  // 0: the client's default
  // "name=value; name=value", updated by the answer. Absent: cookies are ignored.
  std::optional<std::string> cookies = {};
};

struct HttpAnswer {
  std::uint64_t request = 0;
  int status = 0;          // 0: no answer
  std::string body;        // of any type: a proxy may answer in its own words
  std::string trouble;     // why there is no answer
  bool sent = false;       // the request may have arrived; false: it certainly has not
  std::string cookies;     // updated cookies, if the request had `cookies`
  Duration retry_after{};  // pause requested by the server; 0: none
};

struct HttpLimits {
  std::size_t answer_max = 16u << 20;
  bool proxies = true;  // use the environment's proxies
};

// Sends the key in a header (none if it is empty) and shows it nowhere else. Redirects are not followed, so the key
// goes to no other host. Use from one thread.
class HttpClient {
 public:
  HttpClient(std::string key, Duration timeout, HttpLimits limits = {});
  ~HttpClient();
  HttpClient(const HttpClient&) = delete;
  HttpClient& operator=(const HttpClient&) = delete;
  std::uint64_t send(const HttpRequest& request);
  // Requests answered or failed since the last call; if there are none, waits about this long for one.
  std::vector<HttpAnswer> poll(Duration wait = {});
  // Cancels a request; the server sees the connection close.
  void cancel(std::uint64_t request);
  // Waits for the answer or the time-out. No other request may be in flight.
  HttpAnswer ask(const HttpRequest& request);

 private:
  std::vector<HttpAnswer> arrived();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// A service's base URL, to which paths that begin with '/' are appended.
std::string service_url(std::string_view url);

// `text` as part of a URL's query.
std::string url_escaped(std::string_view text);

}  // namespace echoline

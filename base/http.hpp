// An asynchronous HTTP client over libcurl, for rental services and inference servers.
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
  std::string method;  // such as "GET"
  std::string url;
  std::string body;    // JSON; "" for none
  Duration timeout{};  // 0: the client's default
  // Cookies to send, as "name=value; name=value". HttpAnswer::cookies has them with the server's updates. If absent, no
  // cookies are sent, and those of the answer are dropped.
  std::optional<std::string> cookies = {};
};

struct HttpAnswer {
  std::uint64_t request = 0;  // the number that send() returned
  int status = 0;             // the HTTP status; 0: no answer
  std::string body;           // content of any type, because a proxy may answer instead of the server
  std::string trouble;        // why there is no answer
  bool sent = false;          // the request may have arrived; false: it certainly has not
  std::string cookies;        // updated cookies, if the request had `cookies`
  Duration retry_after{};     // pause requested by the server; 0: none
};

struct HttpLimits {
  std::size_t answer_bytes_max = 16u << 20;  // a longer body counts as no answer
  bool uses_proxies = true;                  // use the environment's proxies
};

// A client of one service. Sends the service's API key as Authorization header with each request, and shows it nowhere
// else; an empty key is not sent. Redirects are not followed, so the key goes to no other host. Use from one thread.
class HttpClient {
 public:
  HttpClient(std::string key, Duration timeout, HttpLimits limits = {});
  ~HttpClient();
  HttpClient(const HttpClient&) = delete;
  HttpClient& operator=(const HttpClient&) = delete;
  // Starts a request. Returns its number, HttpAnswer::request.
  std::uint64_t send(const HttpRequest& request);
  // The answers and failures since the last call. If there are none, waits up to about `wait` for one.
  std::vector<HttpAnswer> poll(Duration wait = {});
  // Cancels a request; the server sees the connection close.
  void cancel(std::uint64_t request);
  // Sends the request and waits for the answer or the time-out. No other request may be in flight.
  HttpAnswer ask(const HttpRequest& request);

 private:
  std::vector<HttpAnswer> take_answers();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The base URL without trailing '/', so that paths that begin with '/' can be appended.
std::string without_trailing_slashes(std::string_view url);

// Percent-encodes `text` for a URL's query.
std::string url_escaped(std::string_view text);

}  // namespace echoline

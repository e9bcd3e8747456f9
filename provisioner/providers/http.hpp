// HTTP without waiting, over libcurl, for providers that are services. Private to provisioner/.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "base/units.hpp"

namespace echoline::provisioner {

struct HttpRequest {
  std::string method;  // "GET"
  std::string url;
  std::string body;  // JSON; "" for none
};

struct HttpAnswer {
  std::uint64_t request = 0;
  int status = 0;       // 0: no answer came
  std::string body;     // of any type: a proxy in between answers in its own words
  std::string trouble;  // why no answer came
  bool sent = false;    // the request may have arrived; false: certainly not
};

// Requests carry the key in a header (none where it is empty), and nothing else ever shows it. Redirects are not followed,
// so it goes to no other host. Use from one thread.
class HttpClient {
 public:
  HttpClient(std::string key, Duration timeout);
  ~HttpClient();
  std::uint64_t send(const HttpRequest& request);
  // What was answered, or failed, since the last call.
  std::vector<HttpAnswer> poll();
  // Waits for the answer, or the time-out. Nothing else may be under way.
  HttpAnswer ask(const HttpRequest& request);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Where vast.ai is.
inline constexpr std::string_view kVastUrl = "https://console.vast.ai";
// A service's address, to which paths that begin with '/' are appended.
std::string service_url(std::string_view url);

// `text` as part of a URL's query.
std::string url_escaped(std::string_view text);

}  // namespace echoline::provisioner

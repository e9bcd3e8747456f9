// The HTTP client over libcurl, for TextServerClient, rental services and inference servers.
#include "base/http.hpp"

#include <curl/curl.h>

#include <algorithm>
#include <map>
#include <mutex>

namespace echoline {
namespace {

constexpr curl_off_t kRetryAfterMaxSeconds = 86'400;
constexpr Duration kPollInterval = std::chrono::milliseconds(100);  // how often ask() checks for its answer

struct FreeList {
  void operator()(curl_slist* list) const { curl_slist_free_all(list); }
};
using Headers = std::unique_ptr<curl_slist, FreeList>;

// A request in flight, with the answer received so far.
struct Exchange {
  std::uint64_t id = 0;
  std::string body, answer;
  std::size_t answer_bytes_max = 0;
  bool too_long = false;
  bool wants_cookies = false;
};

// libcurl calls it for each block of a body. Returning less than the block's size ends the request.
std::size_t append_to_answer(char* data, std::size_t size, std::size_t count, void* user_data) {
  auto* exchange = static_cast<Exchange*>(user_data);
  if (exchange->answer.size() + size * count > exchange->answer_bytes_max) {
    exchange->too_long = true;
    return 0;
  }
  exchange->answer.append(data, size * count);
  return size * count;
}

// Returns the server's cookies as "name=value; name=value", newest last. libcurl gives them as lines of Netscape's
// cookie files. A line has seven fields with tabs between; the last two are name and value.
std::string cookies_of(CURL* handle) {
  constexpr std::size_t kCookiesBytesMax = 16u << 10;
  constexpr int kFieldsBeforeName = 5;
  curl_slist* list = nullptr;
  if (curl_easy_getinfo(handle, CURLINFO_COOKIELIST, &list) != CURLE_OK) return "";
  const Headers owner(list);
  std::string cookies;
  for (; list; list = list->next) {  // the first fields are domain, path, expiry and flags
    std::string_view line = list->data;
    // Without a tab all of the line is removed. For an empty one both numbers are npos, and npos + 1 is 0.
    for (int field = 0; field < kFieldsBeforeName; ++field)
      line.remove_prefix(std::min(line.find('\t'), line.size() - 1) + 1);
    const auto tab = line.find('\t');
    if (tab == std::string_view::npos || cookies.size() + line.size() > kCookiesBytesMax) continue;
    cookies += fmt::format("{}{}={}", cookies.empty() ? "" : "; ", line.substr(0, tab), line.substr(tab + 1));
  }
  return cookies;
}

}  // namespace

struct HttpClient::Impl {
  CURLM* multi = nullptr;
  Headers headers;
  Duration timeout{};
  HttpLimits limits;
  std::map<CURL*, std::unique_ptr<Exchange>> in_flight;
  std::uint64_t last_id = 0;

  void close(std::map<CURL*, std::unique_ptr<Exchange>>::iterator it) {
    curl_multi_remove_handle(multi, it->first);
    curl_easy_cleanup(it->first);
    in_flight.erase(it);
  }
};

HttpClient::HttpClient(std::string key, Duration timeout, HttpLimits limits) : impl_(std::make_unique<Impl>()) {
  static std::once_flag once;
  std::call_once(once, [] { curl_global_init(CURL_GLOBAL_DEFAULT); });
  impl_->multi = curl_multi_init();
  ECHO_CHECK(impl_->multi != nullptr, "libcurl cannot start");
  impl_->timeout = timeout;
  impl_->limits = limits;
  const auto add_header = [&](const std::string& line) {
    impl_->headers.reset(curl_slist_append(impl_->headers.release(), line.c_str()));
  };
  if (!key.empty()) add_header("Authorization: Bearer " + key);
  add_header("Content-Type: application/json");
  add_header("Accept: application/json");
  add_header("Expect:");  // empty, so that libcurl does not wait for the server's consent before it sends a long body
}

HttpClient::~HttpClient() {
  while (!impl_->in_flight.empty()) impl_->close(impl_->in_flight.begin());
  curl_multi_cleanup(impl_->multi);
}

std::uint64_t HttpClient::send(const HttpRequest& request) {
  CURL* const handle = curl_easy_init();
  ECHO_CHECK(handle != nullptr, "libcurl is out of memory");
  auto exchange = std::make_unique<Exchange>();
  exchange->id = ++impl_->last_id;
  exchange->body = request.body;
  exchange->answer_bytes_max = impl_->limits.answer_bytes_max;
  const Duration timeout = request.timeout > Duration{} ? request.timeout : impl_->timeout;
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(timeout).count();
  if (!impl_->limits.uses_proxies) curl_easy_setopt(handle, CURLOPT_PROXY, "");
  curl_easy_setopt(handle, CURLOPT_URL, request.url.c_str());
  curl_easy_setopt(handle, CURLOPT_CUSTOMREQUEST, request.method.c_str());
  curl_easy_setopt(handle, CURLOPT_HTTPHEADER, impl_->headers.get());
  curl_easy_setopt(handle, CURLOPT_PROTOCOLS_STR, "http,https");
  curl_easy_setopt(handle, CURLOPT_USERAGENT, "echoline");
  curl_easy_setopt(handle, CURLOPT_NOSIGNAL, 1L);  // signals would disturb the program's other threads
  curl_easy_setopt(handle, CURLOPT_NETRC, static_cast<long>(CURL_NETRC_IGNORED));
  curl_easy_setopt(handle, CURLOPT_TIMEOUT_MS, static_cast<long>(ms));
  curl_easy_setopt(handle, CURLOPT_WRITEFUNCTION, append_to_answer);
  curl_easy_setopt(handle, CURLOPT_WRITEDATA, exchange.get());
  if (request.cookies) {
    exchange->wants_cookies = true;
    curl_easy_setopt(handle, CURLOPT_COOKIEFILE, "");  // keeps cookies, without a file
    if (!request.cookies->empty()) curl_easy_setopt(handle, CURLOPT_COOKIE, request.cookies->c_str());
  }
  if (!exchange->body.empty() || request.method == "POST") {  // a POST states its length even if it is 0
    curl_easy_setopt(handle, CURLOPT_POSTFIELDS, exchange->body.c_str());
    curl_easy_setopt(handle, CURLOPT_POSTFIELDSIZE_LARGE, static_cast<curl_off_t>(exchange->body.size()));
  }
  curl_multi_add_handle(impl_->multi, handle);
  const std::uint64_t id = exchange->id;
  impl_->in_flight.emplace(handle, std::move(exchange));
  int running = 0;
  curl_multi_perform(impl_->multi, &running);
  return id;
}

std::vector<HttpAnswer> HttpClient::poll(Duration wait) {
  std::vector<HttpAnswer> answers = take_answers();
  if (!answers.empty() || wait <= Duration{}) return answers;
  curl_multi_poll(impl_->multi, nullptr, 0,
                  static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(wait).count()), nullptr);
  return take_answers();
}

void HttpClient::cancel(std::uint64_t request) {
  for (auto it = impl_->in_flight.begin(); it != impl_->in_flight.end(); ++it)
    if (it->second->id == request) return impl_->close(it);
}

std::vector<HttpAnswer> HttpClient::take_answers() {
  std::vector<HttpAnswer> answers;
  int running = 0;
  curl_multi_perform(impl_->multi, &running);
  int messages_left = 0;
  while (CURLMsg* message = curl_multi_info_read(impl_->multi, &messages_left)) {
    if (message->msg != CURLMSG_DONE) continue;
    CURL* const handle = message->easy_handle;
    const CURLcode code = message->data.result;
    const auto it = impl_->in_flight.find(handle);
    HttpAnswer answer;
    answer.request = it->second->id;
    if (code == CURLE_OK) {
      long status = 0;
      curl_easy_getinfo(handle, CURLINFO_RESPONSE_CODE, &status);
      answer.status = static_cast<int>(status);
      curl_off_t wait_s = 0;
      curl_easy_getinfo(handle, CURLINFO_RETRY_AFTER, &wait_s);
      answer.retry_after = std::chrono::seconds(std::clamp<curl_off_t>(wait_s, 0, kRetryAfterMaxSeconds));
      answer.body = std::move(it->second->answer);
      if (it->second->wants_cookies) answer.cookies = cookies_of(handle);
      answer.sent = true;
    } else {
      answer.trouble = it->second->too_long
                           ? fmt::format("its answer is longer than {} bytes", it->second->answer_bytes_max)
                           : std::string(curl_easy_strerror(code));
      // These errors occur before anything is sent.
      answer.sent = code != CURLE_COULDNT_CONNECT && code != CURLE_COULDNT_RESOLVE_HOST &&
                    code != CURLE_COULDNT_RESOLVE_PROXY && code != CURLE_SSL_CONNECT_ERROR &&
                    code != CURLE_PEER_FAILED_VERIFICATION && code != CURLE_UNSUPPORTED_PROTOCOL &&
                    code != CURLE_URL_MALFORMAT;
    }
    impl_->close(it);
    answers.push_back(std::move(answer));
  }
  return answers;
}

HttpAnswer HttpClient::ask(const HttpRequest& request) {
  send(request);
  while (true) {  // the time-out ends the loop
    std::vector<HttpAnswer> answers = poll(kPollInterval);
    if (!answers.empty()) return std::move(answers.front());
  }
}

std::string without_trailing_slashes(std::string_view url) {
  while (url.ends_with('/')) url.remove_suffix(1);
  return std::string(url);
}

std::string url_escaped(std::string_view text) {
  constexpr std::string_view kPlain = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.~";
  std::string out;
  for (const char c : text) {
    if (kPlain.find(c) != std::string_view::npos)
      out += c;
    else
      out += fmt::format("%{:02X}", static_cast<unsigned char>(c));
  }
  return out;
}

}  // namespace echoline

// Answers HTTP requests for the worker's bundle. Called by the driver (uv/driver_bundle.cpp).
#include "overlay/learner/bundle_gate.hpp"

#include <algorithm>

namespace echoline::overlay {
namespace {

constexpr std::size_t kRememberedTokensMax = 100'000;

std::optional<BitRate> share_of(const std::optional<BitRate>& up) {
  if (!up) return std::nullopt;
  return BitRate{up->bits_per_s * BundleGate::kUplinkShare};
}

BundleGate::Answer refusal(std::string_view status, const std::string& why) {
  const std::string text = (status.starts_with("503") ? "later: " : "refused: ") + why + "\n";
  return {.text = fmt::format(
              "HTTP/1.1 {}\r\nContent-Type: text/plain\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{}", status,
              text.size(), text),
          .is_admitted = false};
}

bool equal_ignoring_case(std::string_view a, std::string_view b) {
  const auto lower = [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; };
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [&](char x, char y) { return lower(x) == lower(y); });
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
  return text;
}

// Returns TOKEN of the header line "Authorization: Bearer TOKEN"; empty if there is none.
std::string_view token_in(std::string_view lines) {
  constexpr std::string_view kName = "Authorization", kScheme = "Bearer ";
  while (!lines.empty()) {
    const std::size_t end = lines.find("\r\n");
    const std::string_view line = lines.substr(0, end);
    lines.remove_prefix(end == lines.npos ? lines.size() : end + 2);
    const std::size_t colon = line.find(':');
    if (colon == line.npos || !equal_ignoring_case(line.substr(0, colon), kName)) continue;
    const std::string_view value = trimmed(line.substr(colon + 1));
    if (value.size() > kScheme.size() && equal_ignoring_case(value.substr(0, kScheme.size()), kScheme))
      return trimmed(value.substr(kScheme.size()));
  }
  return {};
}

}  // namespace

BundleGate::BundleGate(std::shared_ptr<const trust::Authority> authority, Bytes size, std::optional<BitRate> up)
    : authority_(std::move(authority)), size_(size), pacer_(share_of(up)) {}

BundleGate::Answer BundleGate::on_request(ConnId conn, std::string_view request, double now_unix_s) {
  const std::size_t end = request.find("\r\n\r\n");
  if (request.size() > kRequestBytesMax || end == request.npos)
    return refusal("400 Bad Request", fmt::format("expected a request of at most {} bytes", kRequestBytesMax));
  const std::string_view head = request.substr(0, end), line = head.substr(0, head.find("\r\n"));
  if (!line.starts_with(fmt::format("GET {} HTTP/1.", kPath)))
    return refusal("404 Not Found", fmt::format("only {} is here, for machines that hold a join token", kPath));
  const std::string_view token_text = token_in(head.substr(line.size()));
  if (token_text.empty()) return refusal("403 Forbidden", "a join token is needed: Authorization: Bearer TOKEN");
  const trust::Secret secret{std::string(token_text)};
  // The bundle is for any instance: the token is checked against the instance that it names itself.
  const auto unchecked = trust::read_token(secret);
  const auto token = unchecked ? trust::check_token(secret, *authority_, now_unix_s, unchecked->instance) : unchecked;
  if (!token) return refusal("403 Forbidden", "the join token is refused: " + token.error().detail);
  std::erase_if(token_uses_, [&](const auto& entry) { return entry.second.expires_unix_s < now_unix_s; });
  if (token_uses_.size() >= kRememberedTokensMax || waiting_.size() >= kWaitingMax)
    return refusal("503 Service Unavailable", "too many machines fetch the bundle just now: try again");
  TokenUse& use = token_uses_[token->nonce];
  use.expires_unix_s = static_cast<double>(token->expires_unix_s);
  if (use.downloads >= kDownloadsPerToken)
    return refusal("429 Too Many Requests",
                   fmt::format("the join token for '{}' has fetched the bundle {} times: issue another one",
                               token->instance, kDownloadsPerToken));
  ++use.downloads;
  if (served_.size() < kServedMax) {
    served_.insert(conn);
    newly_admitted_.push_back(conn);
  } else {
    waiting_.push_back(conn);
  }
  return {.text = fmt::format("HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nContent-Length: {}\r\n"
                              "Connection: close\r\n\r\n",
                              size_.count),
          .is_admitted = true};
}

std::vector<ConnId> BundleGate::take_admitted() { return std::exchange(newly_admitted_, {}); }

void BundleGate::on_done(ConnId conn) {
  std::erase(waiting_, conn);
  std::erase(newly_admitted_, conn);
  if (served_.erase(conn) == 0 || waiting_.empty()) return;
  served_.insert(waiting_.front());
  newly_admitted_.push_back(waiting_.front());
  waiting_.pop_front();
}

}  // namespace echoline::overlay

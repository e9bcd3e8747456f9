// Answers HTTP requests for the worker's bundle. Called by the driver (uv/driver_bundle.cpp).
#include "overlay/learner/bundle_gate.hpp"

#include <algorithm>

namespace echoline::overlay {
namespace {

constexpr std::size_t kTokensMax = 100'000;

std::optional<BitRate> share_of(const std::optional<BitRate>& up) {
  if (!up) return std::nullopt;
  return BitRate{up->bits_per_s * BundleGate::kUplinkShare};
}

BundleGate::Answer refusal(std::string_view status, const std::string& why) {
  const std::string text = (status.starts_with("503") ? "later: " : "refused: ") + why + "\n";
  return {fmt::format("HTTP/1.1 {}\r\nContent-Type: text/plain\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{}",
                      status, text.size(), text),
          false};
}

bool same_word(std::string_view a, std::string_view b) {
  const auto lower = [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; };
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [&](char x, char y) { return lower(x) == lower(y); });
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
  return text;
}

// "Authorization: Bearer TOKEN", wherever it stands.
std::string_view token_in(std::string_view lines) {
  constexpr std::string_view kName = "Authorization", kScheme = "Bearer ";
  while (!lines.empty()) {
    const std::size_t end = lines.find("\r\n");
    const std::string_view line = lines.substr(0, end);
    lines.remove_prefix(end == lines.npos ? lines.size() : end + 2);
    const std::size_t colon = line.find(':');
    if (colon == line.npos || !same_word(line.substr(0, colon), kName)) continue;
    const std::string_view value = trimmed(line.substr(colon + 1));
    if (value.size() > kScheme.size() && same_word(value.substr(0, kScheme.size()), kScheme))
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
  const std::string_view text = token_in(head.substr(line.size()));
  if (text.empty()) return refusal("403 Forbidden", "a join token is needed: Authorization: Bearer TOKEN");
  const trust::Secret secret{std::string(text)};
  const auto read = trust::read_token(secret);
  const auto token = read ? trust::check_token(secret, *authority_, now_unix_s, read->instance) : read;
  if (!token) return refusal("403 Forbidden", "the join token is refused: " + token.error().detail);
  std::erase_if(used_, [&](const auto& entry) { return entry.second.until_unix_s < now_unix_s; });
  if (used_.size() >= kTokensMax || waiting_.size() >= kWaitingMax)
    return refusal("503 Service Unavailable", "too many machines fetch the bundle just now: try again");
  Used& used = used_[token->nonce];
  used.until_unix_s = static_cast<double>(token->expires_unix_s);
  if (used.times >= kDownloadsPerToken)
    return refusal("429 Too Many Requests",
                   fmt::format("the join token for '{}' has fetched the bundle {} times: issue another one",
                               token->instance, kDownloadsPerToken));
  ++used.times;
  if (served_.size() < kServedMax) {
    served_.insert(conn);
    next_.push_back(conn);
  } else {
    waiting_.push_back(conn);
  }
  return {fmt::format("HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nContent-Length: {}\r\n"
                      "Connection: close\r\n\r\n",
                      size_.count),
          true};
}

std::vector<ConnId> BundleGate::take_admitted() { return std::exchange(next_, {}); }

void BundleGate::on_done(ConnId conn) {
  std::erase(waiting_, conn);
  std::erase(next_, conn);
  if (served_.erase(conn) == 0 || waiting_.empty()) return;
  served_.insert(waiting_.front());
  next_.push_back(waiting_.front());
  waiting_.pop_front();
}

}  // namespace echoline::overlay

// Encodes and checks join tokens. Called by learners, and by workers before they enrol.
#include "overlay/trust/token.hpp"

#include <openssl/rand.h>

#include <algorithm>
#include <cmath>

#include "overlay/trust/openssl.hpp"

namespace echoline::overlay::trust {
namespace {

constexpr std::string_view kPrefix = "echo1.";  // the digit is the version of the format
constexpr std::string_view kContext = "join token";
constexpr double kUnixSecondsMax = 1e15;  // far beyond any real time; still exact as an integer
constexpr std::string_view kAlphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

// Bytes: authority 32, nonce 16, expires 8 (little-endian), length of instance 1, instance; if a host is named, its
// length 1 and the host; then the signature, 64.
constexpr std::size_t kFixedBytes = 32 + 16 + 8 + 1;
constexpr std::size_t kSignatureBytes = 64;
constexpr std::size_t kTokenBytesMax = kFixedBytes + 2 * kInstanceBytesMax + 1 + kSignatureBytes;

std::string encode_base64url(std::span<const std::byte> bytes) {
  std::string text;
  unsigned bits = 0, bit_count = 0;  // the last `bit_count` bits of `bits` are not encoded yet
  for (const std::byte byte : bytes) {
    bits = bits << 8 | std::to_integer<unsigned>(byte);
    for (bit_count += 8; bit_count >= 6; bit_count -= 6) text += kAlphabet[bits >> (bit_count - 6) & 63];
  }
  if (bit_count > 0) text += kAlphabet[bits << (6 - bit_count) & 63];
  return text;
}

// Accepts only the output of encode_base64url(), so that a token has one text form.
std::optional<std::vector<std::byte>> decode_base64url(std::string_view text) {
  std::vector<std::byte> bytes;
  unsigned bits = 0, bit_count = 0;
  for (const char c : text) {
    const auto digit = kAlphabet.find(c);
    if (digit == std::string_view::npos) return std::nullopt;
    bits = bits << 6 | static_cast<unsigned>(digit);
    bit_count += 6;
    if (bit_count < 8) continue;
    bit_count -= 8;
    bytes.push_back(static_cast<std::byte>(bits >> bit_count & 255));
  }
  if (bit_count >= 6 || (bits & ((1u << bit_count) - 1)) != 0) return std::nullopt;
  return bytes;
}

bool is_valid_instance(std::string_view text) {
  return !text.empty() && text.size() <= kInstanceBytesMax &&
         std::all_of(text.begin(), text.end(), [](char c) { return c >= ' ' && c <= '~'; });
}

std::vector<std::byte> encode(const JoinToken& token) {
  std::vector<std::byte> bytes(token.authority.begin(), token.authority.end());
  bytes.insert(bytes.end(), token.nonce.begin(), token.nonce.end());
  for (unsigned i = 0; i < 8; ++i) bytes.push_back(static_cast<std::byte>(token.expires_unix_s >> (8 * i) & 255));
  bytes.push_back(static_cast<std::byte>(token.instance.size()));
  const auto instance = std::as_bytes(std::span(token.instance));
  bytes.insert(bytes.end(), instance.begin(), instance.end());
  if (token.host.empty()) return bytes;
  bytes.push_back(static_cast<std::byte>(token.host.size()));
  const auto host = std::as_bytes(std::span(token.host));
  bytes.insert(bytes.end(), host.begin(), host.end());
  return bytes;
}

struct ParsedToken {
  JoinToken token;
  std::vector<std::byte> fields;  // the signed part
  Signature signature;
};

Result<ParsedToken> parse(const Secret& text) {
  const auto refuse = [](std::string_view why) {
    return fail(Code::kCorrupt, "read join token", "expected a token as the learner printed it, found {}", why);
  };
  std::string_view body = text.reveal();
  if (!body.starts_with(kPrefix)) return refuse("text that does not begin like one of this version");
  body.remove_prefix(kPrefix.size());
  if (body.size() > kTokenBytesMax * 4 / 3 + 1) return refuse("one that is too long");
  const auto bytes = decode_base64url(body);
  if (!bytes) return refuse("one with characters that do not belong there, or without its end");
  if (bytes->size() <= kFixedBytes + kSignatureBytes) return refuse("one that is too short");
  ParsedToken parsed;
  const auto fields = std::span(*bytes).first(bytes->size() - kSignatureBytes);
  parsed.fields.assign(fields.begin(), fields.end());
  std::copy(bytes->end() - kSignatureBytes, bytes->end(), parsed.signature.bytes.begin());
  JoinToken& token = parsed.token;
  // The offsets follow from the list of fields above kFixedBytes.
  std::copy_n(fields.begin(), 32, token.authority.begin());
  std::copy_n(fields.begin() + 32, 16, token.nonce.begin());
  for (unsigned i = 0; i < 8; ++i) token.expires_unix_s |= std::to_integer<std::uint64_t>(fields[48 + i]) << (8 * i);
  // Reads a text whose length byte stands before `begin`.
  const auto read_text = [&](std::size_t begin, std::string& to) {
    const std::size_t size = begin <= fields.size() ? std::to_integer<std::size_t>(fields[begin - 1]) : 0;
    if (begin + size > fields.size()) return false;
    to.assign(reinterpret_cast<const char*>(fields.data()) + begin, size);
    return is_valid_instance(to);
  };
  if (!read_text(kFixedBytes, token.instance)) return refuse("one with a damaged instance");
  if (const std::size_t end = kFixedBytes + token.instance.size();
      end != fields.size() && (!read_text(end + 1, token.host) || end + 1 + token.host.size() != fields.size()))
    return refuse("one with a damaged host");
  return parsed;
}

}  // namespace

Nonce random_nonce() {
  Nonce nonce;
  ECHO_CHECK(RAND_bytes(reinterpret_cast<unsigned char*>(nonce.data()), static_cast<int>(nonce.size())) == 1, "{}",
             openssl_error());
  return nonce;
}

Result<Secret> issue_token(const Authority& authority, std::string_view instance, const Nonce& nonce, double now_unix_s,
                           Duration lifetime, std::string_view host) {
  constexpr std::string_view kOperation = "issue join token";
  if (!host.empty() && !is_valid_instance(host))
    return fail(Code::kInvalid, kOperation, "expected a host of at most {} printable ASCII characters, found {} bytes",
                kInstanceBytesMax, host.size());
  if (!is_valid_instance(instance))
    return fail(Code::kInvalid, kOperation,
                "expected an instance of 1 to {} printable ASCII characters, found {} bytes", kInstanceBytesMax,
                instance.size());
  if (!(now_unix_s >= 0 && now_unix_s < kUnixSecondsMax) || lifetime <= Duration{})
    return fail(Code::kInvalid, kOperation, "expected a time since 1970 and a lifetime, found {} s and {}", now_unix_s,
                echoline::to_text(lifetime));
  const auto expires = static_cast<std::uint64_t>(std::ceil(now_unix_s + seconds(lifetime)));
  std::vector<std::byte> bytes = encode({.authority = authority.fingerprint(),
                                         .nonce = nonce,
                                         .expires_unix_s = expires,
                                         .instance = std::string(instance),
                                         .host = std::string(host)});
  const Signature signature = authority.key().sign(kContext, bytes);
  bytes.insert(bytes.end(), signature.bytes.begin(), signature.bytes.end());
  return Secret(std::string(kPrefix) + encode_base64url(bytes));
}

Result<JoinToken> read_token(const Secret& text) {
  ECHO_ASSIGN(ParsedToken parsed, parse(text));
  return std::move(parsed.token);
}

Result<JoinToken> check_token(const Secret& text, const Authority& authority, double now_unix_s,
                              std::string_view instance) {
  constexpr std::string_view kOperation = "check join token";
  ECHO_ASSIGN(ParsedToken parsed, parse(text));
  const JoinToken& token = parsed.token;
  if (token.authority != authority.fingerprint() ||
      !verify(authority.public_key(), kContext, parsed.fields, parsed.signature))
    return fail(Code::kCorrupt, kOperation, "expected a token of run '{}', found one that its learner has not issued",
                authority.run_id());
  if (token.instance != instance) return fail(Code::kInvalid, kOperation, "the token was issued for another instance");
  if (!(now_unix_s < static_cast<double>(token.expires_unix_s)))
    return fail(Code::kStale, kOperation, "the token expired {:.0f} s ago: ask for a new one",
                now_unix_s - static_cast<double>(token.expires_unix_s));
  return std::move(parsed.token);
}

}  // namespace echoline::overlay::trust

// Reads and writes signed texts, for manifests and the other small objects of a store.
#include "store/signed_text.hpp"

#include <algorithm>
#include <charconv>

#include "base/text.hpp"

namespace echoline::store {
namespace {

constexpr std::string_view kOperation = "read store";
constexpr std::string_view kSignature = "signature ";
constexpr std::size_t kSignatureDigits = 128, kKeyDigits = 64;

unsigned digit(char c) { return static_cast<unsigned>(c <= '9' ? c - '0' : c - 'a' + 10); }

template <std::size_t kBytes>
void unhex(std::string_view hex, std::array<std::byte, kBytes>& bytes) {
  for (std::size_t i = 0; i < kBytes; ++i)
    bytes[i] = static_cast<std::byte>(digit(hex[2 * i]) << 4 | digit(hex[2 * i + 1]));
}

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

}  // namespace

bool is_hex(std::string_view text, std::size_t digits) {
  return text.size() == digits &&
         std::all_of(text.begin(), text.end(), [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

Result<std::uint64_t> parse_number(std::string_view text, std::string_view what) {
  std::uint64_t number = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  if (text.empty() || error != std::errc() || stop != end || (text.size() > 1 && text.front() == '0'))
    return fail(Code::kCorrupt, kOperation, "{}: expected a number, found '{}'", what, printable(text, 40));
  return number;
}

Result<overlay::trust::PublicKey> parse_public_key(std::string_view hex) {
  if (!is_hex(hex, kKeyDigits))
    return fail(Code::kInvalid, "run key", "expected {} lower-case hexadecimal digits, found '{}'", kKeyDigits,
                printable(hex, kKeyDigits + 1));
  overlay::trust::PublicKey key;
  unhex(hex, key.bytes);
  return key;
}

std::string sign_text(std::string_view context, std::string_view body, const overlay::trust::SigningKey& key) {
  std::string text(body);
  text += kSignature;
  for (const std::byte byte : key.sign(context, bytes_of(body)).bytes) text += fmt::format("{:02x}", byte);
  return text + "\n";
}

Result<std::string> check_signed_text(std::string_view context, std::string_view text,
                                      const overlay::trust::Verifier& verifier, std::string_view what) {
  const std::size_t line_bytes = kSignature.size() + kSignatureDigits + 1;
  const std::size_t body_bytes = text.size() - std::min(text.size(), line_bytes);
  const std::string_view body = text.substr(0, body_bytes), line = text.substr(body_bytes);
  if (line.size() != line_bytes || !line.starts_with(kSignature) || line.back() != '\n' ||
      !is_hex(line.substr(kSignature.size(), kSignatureDigits), kSignatureDigits))
    return fail(Code::kCorrupt, kOperation,
                "{}: expected a text that ends with a signature, found {} bytes that do not", what, text.size());
  overlay::trust::Signature signature;
  unhex(line.substr(kSignature.size()), signature.bytes);
  if (!verifier.verify(context, bytes_of(body), signature))
    return fail(Code::kCorrupt, kOperation, "{}: not signed by the run's key {}", what,
                overlay::trust::to_hex(verifier.public_key()));
  return std::string(body);
}

Error LineReader::corrupt(std::string_view expected) const {
  return fail(Code::kCorrupt, kOperation, "{}: line {}: expected {}", what_, line_, expected);
}

Result<std::string_view> LineReader::value(std::string_view word) {
  ++line_;
  const auto end = rest_.find('\n');
  const std::string_view line = rest_.substr(0, end);
  if (end == rest_.npos || line.size() <= word.size() || !line.starts_with(word) || line[word.size()] != ' ')
    return corrupt(fmt::format("'{} ' and a value", word));
  rest_.remove_prefix(end + 1);
  return line.substr(word.size() + 1);
}

Result<std::uint64_t> LineReader::number(std::string_view word) {
  ECHO_ASSIGN(const std::string_view text, value(word));
  return parse_number(text, fmt::format("{}: {}", what_, word));
}

Result<std::string> LineReader::hex(std::string_view word, std::size_t digits) {
  ECHO_ASSIGN(const std::string_view text, value(word));
  if (!is_hex(text, digits)) return corrupt(fmt::format("{} hexadecimal digits after '{}'", digits, word));
  return std::string(text);
}

}  // namespace echoline::store

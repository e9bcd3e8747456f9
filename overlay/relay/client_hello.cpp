// Parses the records and extensions of a ClientHello (RFC 8446, RFC 6066). Called by the relay for each new connection.
#include "overlay/relay/client_hello.hpp"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace echoline::overlay::relay {
namespace {

constexpr std::string_view kOperation = "read ClientHello";
constexpr std::size_t kRecordHeaderBytes = 5, kRecordBytesMax = 16384, kMessageHeaderBytes = 4;
constexpr std::byte kHandshakeRecord{22}, kMajorVersion{3}, kClientHelloMessage{1}, kHostName{0};
constexpr std::size_t kServerNameExtension = 0, kNameBytesMax = 255;

// Takes integers and vectors from the front of some bytes. After a read beyond the end, every read is empty.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  std::span<const std::byte> take(std::size_t size) {
    if (size > bytes_.size()) {
      failed_ = true;
      bytes_ = {};
      return {};
    }
    const auto taken = bytes_.first(size);
    bytes_ = bytes_.subspan(size);
    return taken;
  }
  // A big-endian integer.
  std::size_t number(std::size_t size) {
    std::size_t value = 0;
    for (const std::byte byte : take(size)) value = value << 8 | std::to_integer<std::size_t>(byte);
    return value;
  }
  // Bytes behind their own length, which has `length_size` bytes.
  Reader vector(std::size_t length_size) { return Reader(take(number(length_size))); }
  bool empty() const { return bytes_.empty(); }
  bool failed() const { return failed_; }

 private:
  std::span<const std::byte> bytes_;
  bool failed_ = false;
};

Error damaged(std::string_view what) {
  return fail(Code::kCorrupt, kOperation, "expected the first message of a TLS client, found {}", what);
}

// Returns the name in the extension's bytes; empty if there is none of type host_name.
Result<std::string> read_server_name(Reader extension) {
  Reader names = extension.vector(2);
  std::string name;
  while (!names.empty()) {
    const std::span<const std::byte> type = names.take(1);
    const std::size_t size = names.number(2);
    const std::span<const std::byte> text = names.take(size);
    if (names.failed()) break;
    if (type.front() != kHostName || !name.empty()) continue;
    if (text.empty() || text.size() > kNameBytesMax) return damaged("a server name of no valid length");
    for (const std::byte byte : text) {
      const auto c = std::to_integer<unsigned char>(byte);
      if (c <= ' ' || c >= 127) return damaged("a server name with characters that no name has");
      name.push_back(c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : static_cast<char>(c));
    }
  }
  if (extension.failed() || names.failed()) return damaged("a server name that ends too early");
  return name;
}

Result<ClientHello> read_message(Reader body) {
  constexpr std::size_t kVersionAndRandomBytes = 2 + 32;
  body.take(kVersionAndRandomBytes);
  body.vector(1);  // session
  body.vector(2);  // cipher suites
  body.vector(1);  // compression methods
  ClientHello hello{.is_complete = true, .server_name = {}};
  if (!body.failed() && body.empty()) return hello;
  Reader extensions = body.vector(2);
  while (!extensions.empty()) {
    const std::size_t type = extensions.number(2);
    const Reader extension = extensions.vector(2);
    if (extensions.failed()) break;
    if (type == kServerNameExtension && hello.server_name.empty()) {
      ECHO_ASSIGN(hello.server_name, read_server_name(extension));
    }
  }
  if (body.failed() || extensions.failed()) return damaged("one that ends too early");
  return hello;
}

}  // namespace

Result<ClientHello> read_client_hello(std::span<const std::byte> bytes) {
  const ClientHello incomplete;
  std::vector<std::byte> message;  // of one or several records
  std::size_t message_bytes = kMessageHeaderBytes;
  for (std::span<const std::byte> rest = bytes; message.size() < message_bytes;) {
    if (!rest.empty() && rest[0] != kHandshakeRecord) return damaged("no handshake record");
    if (rest.size() > 1 && rest[1] != kMajorVersion) return damaged("an unknown version of TLS");
    if (rest.size() < kRecordHeaderBytes) return incomplete;
    Reader header(rest.subspan(3, 2));
    const std::size_t record_bytes = header.number(2);
    if (record_bytes == 0 || record_bytes > kRecordBytesMax) return damaged("a record of no valid length");
    rest = rest.subspan(kRecordHeaderBytes);
    const auto fragment = rest.first(std::min(rest.size(), record_bytes));
    message.insert(message.end(), fragment.begin(), fragment.end());
    rest = rest.subspan(fragment.size());
    if (!message.empty() && message[0] != kClientHelloMessage) return damaged("another handshake message");
    if (message.size() >= kMessageHeaderBytes) {
      Reader length{std::span<const std::byte>(message).subspan(1, 3)};
      message_bytes = kMessageHeaderBytes + length.number(3);
    }
    if (message_bytes > kClientHelloBytesMax || bytes.size() - rest.size() > kClientHelloBytesMax)
      return fail(Code::kExhausted, kOperation, "expected at most {} bytes", kClientHelloBytesMax);
    if (fragment.size() < record_bytes && message.size() < message_bytes) return incomplete;
  }
  return read_message(
      Reader{std::span<const std::byte>(message).subspan(kMessageHeaderBytes, message_bytes - kMessageHeaderBytes)});
}

}  // namespace echoline::overlay::relay

// Text of endpoints and digests, and reading of payloads. Called throughout the overlay and by applications.
#include "overlay/types.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace echoline::overlay {

std::string to_text(const Endpoint& endpoint) {
  const bool is_ipv6 = endpoint.host.find(':') != std::string::npos;
  return is_ipv6 ? fmt::format("[{}]:{}", endpoint.host, endpoint.port)
                 : fmt::format("{}:{}", endpoint.host, endpoint.port);
}

std::string to_hex(const Digest& digest) {
  std::string text;
  for (const std::byte byte : digest) text += fmt::format("{:02x}", static_cast<unsigned>(byte));
  return text;
}

Payload::Payload(std::vector<Slice> pieces) : pieces_(std::move(pieces)) {
  for (const Slice& piece : pieces_) size_ += piece.size();
}

Status Payload::visit(const std::function<Status(std::span<const std::byte>)>& use) const {
  if (!file_) {
    for (const Slice& piece : pieces_) ECHO_TRY(use(piece.bytes()));
    return ok();
  }
  constexpr std::size_t kPieceBytes = 1u << 20;
  std::vector<std::byte> buffer(std::min<std::uint64_t>(size_, kPieceBytes));
  for (std::uint64_t offset = 0; offset < size_;) {
    const std::size_t piece_bytes = std::min<std::uint64_t>(buffer.size(), size_ - offset);
    const ssize_t bytes_read = ::pread(*file_, buffer.data(), piece_bytes, static_cast<off_t>(offset));
    if (bytes_read < 0 && errno == EINTR) continue;
    if (bytes_read <= 0)
      return fail(Code::kIo, "read publication", "{} bytes at {}: {}", piece_bytes, offset,
                  bytes_read < 0 ? std::strerror(errno) : "the file ends");
    ECHO_TRY(use(std::span(buffer).first(static_cast<std::size_t>(bytes_read))));
    offset += static_cast<std::uint64_t>(bytes_read);
  }
  return ok();
}

Result<Slice> Payload::bytes() const {
  if (size_ == 0) return Slice();
  if (file_) {
    void* memory = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, *file_, 0);
    if (memory == MAP_FAILED)
      return fail(Code::kIo, "read publication", "mapping {} bytes: {}", size_, std::strerror(errno));
    const auto* first = static_cast<const std::byte*>(memory);
    return Slice({first, [mapped_bytes = size_](
                             const std::byte* mapped) { ::munmap(const_cast<std::byte*>(mapped), mapped_bytes); }},
                 size_);
  }
  // Chunks that a learner has sealed in one file follow each other in memory.
  Slice joined = pieces_.front();
  std::size_t joined_count = 1;
  while (joined_count < pieces_.size() && joined.is_continued_by(pieces_[joined_count]))
    joined = joined.joined_with(pieces_[joined_count++]);
  if (joined_count == pieces_.size()) return joined;
  auto gathered = std::make_shared_for_overwrite<std::byte[]>(size_);
  std::byte* to = gathered.get();
  for (const Slice& piece : pieces_) {
    std::memcpy(to, piece.data(), piece.size());
    to += piece.size();
  }
  return Slice({gathered, gathered.get()}, size_);
}

}  // namespace echoline::overlay

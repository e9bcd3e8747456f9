// Opens the bundle that a learner serves. Called by LearnerNode::start() and the CLI.
#include "overlay/uv/bundle.hpp"

#include <fcntl.h>
#include <openssl/evp.h>
#include <sys/stat.h>
#include <unistd.h>

#include <vector>

#include "overlay/trust/openssl.hpp"
#include "overlay/trust/sha256.hpp"

namespace echoline::overlay {
namespace {

std::string base64(std::span<const unsigned char> bytes) {
  std::string text((bytes.size() + 2) / 3 * 4 + 1, '\0');
  text.resize(static_cast<std::size_t>(
      EVP_EncodeBlock(reinterpret_cast<unsigned char*>(text.data()), bytes.data(), static_cast<int>(bytes.size()))));
  return text;
}

}  // namespace

BundleTerms terms_of(const BundleFile& bundle, const trust::Authority& authority) {
  const std::vector<std::byte>& certificate = authority.certificate();
  unsigned char* der = nullptr;
  const int der_bytes = i2d_PUBKEY(authority.key().parsed().key.get(), &der);
  ECHO_CHECK(der_bytes > 0, "{}", trust::openssl_error());
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned int digest_bytes = 0;
  EVP_Digest(der, static_cast<std::size_t>(der_bytes), digest, &digest_bytes, EVP_sha256(), nullptr);
  OPENSSL_free(der);
  return {.sha256 = bundle.sha256,
          .key_pin = "sha256//" + base64({digest, digest_bytes}),
          .authority = base64({trust::octets(certificate), certificate.size()})};
}

Result<BundleFile> open_bundle(const std::filesystem::path& path) {
  constexpr std::string_view kOperation = "read bundle";
  BundleFile bundle;
  bundle.file = std::make_shared<Descriptor>(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  const int fd = bundle.file->get();
  struct stat info {};
  if (fd < 0 || ::fstat(fd, &info) != 0) return os_error(kOperation, path);
  if (!S_ISREG(info.st_mode) || info.st_size == 0)
    return fail(Code::kInvalid, kOperation, "{}: expected a file that `echoline bundle` has made", path.string());
  bundle.size = Bytes{static_cast<std::uint64_t>(info.st_size)};
  trust::Sha256 hash;
  std::vector<std::byte> buffer(1 << 20);
  for (std::uint64_t offset = 0; offset < bundle.size.count;) {
    const ssize_t bytes_read = ::pread(fd, buffer.data(), buffer.size(), static_cast<off_t>(offset));
    if (bytes_read <= 0)
      return bytes_read < 0 ? os_error(kOperation, path)
                            : fail(Code::kIo, kOperation, "{}: it has become shorter", path.string());
    hash.update(std::span(buffer).first(static_cast<std::size_t>(bytes_read)));
    offset += static_cast<std::uint64_t>(bytes_read);
  }
  bundle.sha256 = hash.hex();
  return bundle;
}

}  // namespace echoline::overlay

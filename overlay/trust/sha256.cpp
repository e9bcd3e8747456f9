// SHA-256 by OpenSSL, which uses the processor's instructions for it.
#include "overlay/trust/sha256.hpp"

#include <openssl/evp.h>

#include <array>

#include "base/result.hpp"

namespace echoline::overlay::trust {

struct Sha256::Impl {
  EVP_MD_CTX* context = EVP_MD_CTX_new();
  ~Impl() { EVP_MD_CTX_free(context); }
};

Sha256::Sha256() : impl_(std::make_unique<Impl>()) {
  ECHO_CHECK(impl_->context && EVP_DigestInit_ex(impl_->context, EVP_sha256(), nullptr) == 1, "OpenSSL has no SHA-256");
}
Sha256::~Sha256() = default;

void Sha256::update(std::span<const std::byte> bytes) {
  ECHO_CHECK(EVP_DigestUpdate(impl_->context, bytes.data(), bytes.size()) == 1, "SHA-256");
}

std::string Sha256::hex() {
  std::array<unsigned char, EVP_MAX_MD_SIZE> hash{};
  unsigned size = 0;
  ECHO_CHECK(EVP_DigestFinal_ex(impl_->context, hash.data(), &size) == 1, "SHA-256");
  std::string text;
  for (unsigned i = 0; i < size; ++i) text += fmt::format("{:02x}", hash[i]);
  return text;
}

std::string sha256_hex(std::span<const std::byte> bytes) {
  Sha256 hash;
  hash.update(bytes);
  return hash.hex();
}

}  // namespace echoline::overlay::trust

// Ed25519 by OpenSSL. Called by authority, tokens, proofs and grants.
#include "overlay/trust/signature.hpp"

#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/rand.h>

#include "overlay/trust/openssl.hpp"

namespace echoline::overlay::trust {
namespace {

using DigestPtr = std::unique_ptr<EVP_MD_CTX, FreeWith<EVP_MD_CTX_free>>;

// Returns the bytes to sign, in one piece as Ed25519 needs them: prefix, context, a zero byte, `bytes`.
std::vector<std::byte> bytes_to_sign(std::string_view context, std::span<const std::byte> bytes) {
  constexpr std::string_view kPrefix = "echoline/";
  ECHO_CHECK(!context.empty() && context.find('\0') == std::string_view::npos, "context of a signature");
  std::vector<std::byte> signed_bytes;
  signed_bytes.reserve(kPrefix.size() + context.size() + 1 + bytes.size());
  for (const std::string_view part : {kPrefix, context, std::string_view("\0", 1)}) {
    const auto raw = std::as_bytes(std::span(part));
    signed_bytes.insert(signed_bytes.end(), raw.begin(), raw.end());
  }
  signed_bytes.insert(signed_bytes.end(), bytes.begin(), bytes.end());
  return signed_bytes;
}

}  // namespace

SigningKey::SigningKey(const Seed& seed) {
  auto parsed = std::make_shared<Parsed>();
  parsed->key.reset(EVP_PKEY_new_raw_private_key(EVP_PKEY_ED25519, nullptr, octets(seed), seed.size()));
  ECHO_CHECK(parsed->key != nullptr, "{}", openssl_error());
  std::size_t size = parsed->public_key.bytes.size();
  auto* to = reinterpret_cast<unsigned char*>(parsed->public_key.bytes.data());
  ECHO_CHECK(EVP_PKEY_get_raw_public_key(parsed->key.get(), to, &size) == 1, "{}", openssl_error());
  parsed_ = std::move(parsed);
}

SigningKey SigningKey::generate() {
  Seed seed;
  ECHO_CHECK(RAND_priv_bytes(reinterpret_cast<unsigned char*>(seed.data()), seed.size()) == 1, "{}", openssl_error());
  SigningKey key(seed);
  OPENSSL_cleanse(seed.data(), seed.size());
  return key;
}

const PublicKey& SigningKey::public_key() const { return parsed_->public_key; }

SigningKey::Seed SigningKey::seed() const {
  Seed seed;
  std::size_t size = seed.size();
  auto* to = reinterpret_cast<unsigned char*>(seed.data());
  ECHO_CHECK(EVP_PKEY_get_raw_private_key(parsed_->key.get(), to, &size) == 1, "{}", openssl_error());
  return seed;
}

Signature SigningKey::sign(std::string_view context, std::span<const std::byte> bytes) const {
  const auto signed_bytes = bytes_to_sign(context, bytes);
  const DigestPtr digest(EVP_MD_CTX_new());
  Signature signature;
  std::size_t size = signature.bytes.size();
  auto* to = reinterpret_cast<unsigned char*>(signature.bytes.data());
  ECHO_CHECK(digest && EVP_DigestSignInit(digest.get(), nullptr, nullptr, nullptr, parsed_->key.get()) == 1 &&
                 EVP_DigestSign(digest.get(), to, &size, octets(signed_bytes), signed_bytes.size()) == 1,
             "{}", openssl_error());
  return signature;
}

Verifier::Verifier(const PublicKey& key) {
  auto parsed = std::make_shared<Parsed>();
  parsed->public_key = key;
  parsed->key.reset(EVP_PKEY_new_raw_public_key(EVP_PKEY_ED25519, nullptr, octets(key.bytes), key.bytes.size()));
  ECHO_CHECK(parsed->key != nullptr, "{}", openssl_error());
  parsed_ = std::move(parsed);
}

const PublicKey& Verifier::public_key() const { return parsed_->public_key; }

bool Verifier::verify(std::string_view context, std::span<const std::byte> bytes, const Signature& signature) const {
  const auto signed_bytes = bytes_to_sign(context, bytes);
  const DigestPtr digest(EVP_MD_CTX_new());
  ECHO_CHECK(digest && EVP_DigestVerifyInit(digest.get(), nullptr, nullptr, nullptr, parsed_->key.get()) == 1, "{}",
             openssl_error());
  const bool is_valid = EVP_DigestVerify(digest.get(), octets(signature.bytes), signature.bytes.size(),
                                         octets(signed_bytes), signed_bytes.size()) == 1;
  ERR_clear_error();
  return is_valid;
}

bool verify(const PublicKey& key, std::string_view context, std::span<const std::byte> bytes,
            const Signature& signature) {
  return Verifier(key).verify(context, bytes, signature);
}

std::string to_hex(const PublicKey& key) { return to_hex(Hash(key.bytes)); }

std::string openssl_error() {
  const unsigned long code = ERR_peek_last_error();
  ERR_clear_error();
  const char* reason = code ? ERR_reason_error_string(code) : nullptr;
  return reason ? reason : fmt::format("OpenSSL error {:#x}", code);
}

}  // namespace echoline::overlay::trust

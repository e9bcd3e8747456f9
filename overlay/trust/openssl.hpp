// OpenSSL inside overlay/: owning pointers, parsed keys, errors as text. Internal.
#pragma once
#include <openssl/evp.h>
#include <openssl/x509.h>

#include "overlay/trust/authority.hpp"

namespace echoline::overlay::trust {

// Deleter that calls an OpenSSL function.
template <auto kFree>
struct FreeWith {
  template <class T>
  void operator()(T* object) const {
    kFree(object);
  }
};
using KeyPtr = std::unique_ptr<EVP_PKEY, FreeWith<EVP_PKEY_free>>;
using CertificatePtr = std::unique_ptr<X509, FreeWith<X509_free>>;
using BioPtr = std::unique_ptr<BIO, FreeWith<BIO_free_all>>;

struct SigningKey::Parsed {
  KeyPtr key;
  PublicKey public_key;
};
struct Verifier::Parsed {
  KeyPtr key;
  PublicKey public_key;
};

// Returns the last error of this thread's OpenSSL queue as a phrase, and empties the queue.
std::string openssl_error();

inline const unsigned char* octets(std::span<const std::byte> bytes) {
  return reinterpret_cast<const unsigned char*>(bytes.data());
}

// Null unless all of `bytes` is one certificate of at most kCertificateBytesMax.
CertificatePtr parse_certificate(std::span<const std::byte> bytes);
std::vector<std::byte> to_der(const X509& certificate);
// The same checks as for bytes.
Result<AuthorityInfo> read_authority(X509& certificate);
Result<PeerIdentity> check_certificate(X509& certificate, const PublicKey& run_key, std::string_view run_id,
                                       std::optional<double> now_unix_s);

}  // namespace echoline::overlay::trust

// Ed25519 signatures, each bound to a purpose.
//
// The signed bytes are "echoline/", the context, a zero byte, and the message, so a signature for one purpose is
// invalid for another. Signatures are deterministic. Keys are parsed once and shared by copies; any thread may use
// them.
#pragma once
#include <array>
#include <compare>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace echoline::overlay::trust {

struct PublicKey {
  std::array<std::byte, 32> bytes{};
  friend auto operator<=>(const PublicKey&, const PublicKey&) = default;
};
// Lowercase hexadecimal, 64 characters.
std::string to_hex(const PublicKey& key);

struct Signature {
  std::array<std::byte, 64> bytes{};
  friend auto operator<=>(const Signature&, const Signature&) = default;
};

class SigningKey {
 public:
  using Seed = std::array<std::byte, 32>;
  struct Parsed;  // defined in overlay/trust/, used only inside overlay/

  // Every seed is a valid private key.
  explicit SigningKey(const Seed& seed);
  // Makes a key from the system's random source.
  static SigningKey generate();

  const PublicKey& public_key() const;
  // For storing the key. The caller wipes its copy.
  Seed seed() const;
  // `context` names the purpose, such as "manifest". It must not contain a zero byte (checked).
  Signature sign(std::string_view context, std::span<const std::byte> bytes) const;

  const Parsed& parsed() const { return *parsed_; }

 private:
  std::shared_ptr<const Parsed> parsed_;
};

// A parsed public key, for repeated use.
class Verifier {
 public:
  struct Parsed;  // defined in overlay/trust/, used only inside overlay/

  // Accepts any 32 bytes. If they are not a point of the curve, every verification fails.
  explicit Verifier(const PublicKey& key);

  const PublicKey& public_key() const;
  bool verify(std::string_view context, std::span<const std::byte> bytes, const Signature& signature) const;

  const Parsed& parsed() const { return *parsed_; }

 private:
  std::shared_ptr<const Parsed> parsed_;
};

// Verifier(key).verify(...).
bool verify(const PublicKey& key, std::string_view context, std::span<const std::byte> bytes,
            const Signature& signature);

}  // namespace echoline::overlay::trust

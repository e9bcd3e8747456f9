// SHA-256, which every language and every host has at hand: of bundles and of the objects of a store.
#pragma once
#include <cstddef>
#include <memory>
#include <span>
#include <string>

namespace echoline::overlay::trust {

class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;
  void update(std::span<const std::byte> bytes);
  // 64 lower-case hexadecimal digits. Call it once, after all bytes.
  std::string hex();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

std::string sha256_hex(std::span<const std::byte> bytes);

}  // namespace echoline::overlay::trust

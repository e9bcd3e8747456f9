// Small signed texts: lines "WORD VALUE", the last of them "signature" with 128 hexadecimal digits.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "base/result.hpp"
#include "overlay/trust/signature.hpp"

namespace echoline::store {

// Returns `body`, which ends with a line break, with the line of its signature.
std::string sign_text(std::string_view context, std::string_view body, const overlay::trust::SigningKey& key);
// Returns the body. kCorrupt, with `what` in the message: no such text, or not signed by this key for this context.
Result<std::string> check_signed_text(std::string_view context, std::string_view text,
                                      const overlay::trust::Verifier& verifier, std::string_view what);

// Reads lines "WORD VALUE" in a fixed order. A line of another form, or another word, is kCorrupt.
class LineReader {
 public:
  LineReader(std::string_view text, std::string_view what) : rest_(text), what_(what) {}
  // The value of the next line, which must begin with `word` and a space.
  Result<std::string_view> value(std::string_view word);
  // The same for a decimal number.
  Result<std::uint64_t> number(std::string_view word);
  // The same for lower-case hexadecimal digits.
  Result<std::string> hex(std::string_view word, std::size_t digits);
  bool at_end() const { return rest_.empty(); }
  Error corrupt(std::string_view expected) const;

 private:
  std::string_view rest_;
  std::string what_;
  std::size_t line_ = 0;
};

bool is_hex(std::string_view text, std::size_t digits);
// A decimal number without sign or leading zeros.
Result<std::uint64_t> parse_number(std::string_view text, std::string_view what);
// The inverse of overlay::trust::to_hex(). kInvalid for another text.
Result<overlay::trust::PublicKey> parse_public_key(std::string_view hex);

}  // namespace echoline::store

// Searches for a fixed text or a regular expression of tokenizer.json, with the results of Hugging Face's tokenizers.
// Internal to model.
#pragma once
#include <memory>
#include <string>
#include <string_view>

#include "base/result.hpp"

struct pcre2_real_code_8;

namespace echoline::model {

// Immutable and cheap to copy. Thread-safe.
class TextPattern {
 public:
  static TextPattern literal(std::string text) { return TextPattern(std::move(text), nullptr); }
  // A regular expression in the syntax of Oniguruma, the library of Hugging Face's tokenizers. PCRE2 matches it.
  // kInvalid if it is malformed, or PCRE2 would match other texts than Oniguruma.
  static Result<TextPattern> regex(const std::string& expression);

  struct Match {
    std::size_t begin = 0, end = 0;
  };
  // Sets `match` to the first match in `text` from byte `from` on that is not empty. `match.begin` is text.size() if
  // there is none. kExhausted if the search takes too long. `text` must be UTF-8.
  Status find(std::string_view text, std::size_t from, Match& match) const;
  // `text` with every match replaced by `replacement`. kExhausted if the result has more than `bytes_max` bytes.
  Result<std::string> replace_all(std::string_view text, std::string_view replacement, std::size_t bytes_max) const;

 private:
  TextPattern(std::string literal, std::shared_ptr<pcre2_real_code_8> code)
      : literal_(std::move(literal)), code_(std::move(code)) {}
  std::string literal_;                      // the fixed text, used if code_ is null; never found if empty
  std::shared_ptr<pcre2_real_code_8> code_;  // the compiled regular expression, or null
};

}  // namespace echoline::model

// A fixed text or a regular expression of tokenizer.json, found in a text as Hugging Face's tokenizers finds it.
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
  // An expression of Oniguruma's syntax, which PCRE2 matches. kInvalid if it is malformed, or PCRE2 would match another
  // text than Oniguruma.
  static Result<TextPattern> regex(const std::string& expression);

  struct Match {
    std::size_t begin = 0, end = 0;
  };
  // Sets `match` to the first match in `text` from byte `from` on that is not empty. `match.begin` is text.size() if
  // there is none. kExhausted if the search takes too long. `text` must be UTF-8.
  Status find(std::string_view text, std::size_t from, Match& match) const;
  // Every match replaced by `replacement`. kExhausted if the result has more than `bytes_max`.
  Result<std::string> replace_all(std::string_view text, std::string_view replacement, std::size_t bytes_max) const;

 private:
  TextPattern(std::string literal, std::shared_ptr<pcre2_real_code_8> code)
      : literal_(std::move(literal)), code_(std::move(code)) {}
  std::string literal_;                      // if there is no code_; an empty text never matches
  std::shared_ptr<pcre2_real_code_8> code_;  // the compiled expression
};

}  // namespace echoline::model

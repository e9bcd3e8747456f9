// The decoder of a tokenizer.json, which turns tokens into text. Internal to model.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.hpp"

namespace echoline::model {

// Immutable. Thread-safe.
class TokenDecoder {
 public:
  // Reads 'decoder' of tokenizer.json: ByteLevel, Metaspace, or a Sequence of Replace, ByteFallback, Fuse and Strip. A
  // missing decoder means ByteLevel if `is_byte_level`, and is an error otherwise.
  static Result<TokenDecoder> read(const nlohmann::json& root, bool is_byte_level);

  // The bytes of a token in the middle of a text. `written` is the token as tokenizer.json writes it.
  std::string bytes(std::string_view written) const;
  // The byte of a token such as <0x0A>, if the decoder has ByteFallback.
  std::optional<unsigned char> fallback_byte(std::string_view written) const;

  // The bytes of one token of a whole text.
  struct Piece {
    std::string_view bytes;
    bool is_fallback_byte = false;  // a single byte, written as <0x0A>
  };
  // The text of all its tokens, as Hugging Face's tokenizers decode it: without the space that encoding put before the
  // text, and with U+FFFD in the place of bytes that are not UTF-8.
  std::string text(const std::vector<Piece>& pieces) const;

 private:
  Status read_step(const nlohmann::json& step, bool is_last);

  bool is_byte_level_ = false;
  bool has_byte_fallback_ = false, has_fuse_ = false;
  std::vector<std::pair<std::string, std::string>> replacements_;
  // Strip: the character that is removed from a text, up to strip_begin_ times at its begin, strip_end_ times at its
  // end.
  std::string strip_content_;
  std::size_t strip_begin_ = 0, strip_end_ = 0;
  bool strips_first_token_ = false;  // Metaspace: spaces in the first token of a text are removed
};

}  // namespace echoline::model

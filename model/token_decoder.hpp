// The decoder of a tokenizer.json: what a token stands for in a text. Internal to model.
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
  // Reads 'decoder' of the file: ByteLevel, Metaspace, or a Sequence of Replace, ByteFallback, Fuse and Strip.
  // `is_byte_level`: what a missing decoder means.
  static Result<TokenDecoder> read(const nlohmann::json& root, bool is_byte_level);

  // The bytes of a token that stands in the middle of a text. `written`: what the file writes for it.
  std::string bytes(std::string_view written) const;
  // The byte of a token such as <0x0A>, if the decoder has ByteFallback.
  std::optional<unsigned char> fallback_byte(std::string_view written) const;

  // One token of a whole text.
  struct Piece {
    std::string_view bytes;
    bool is_fallback_byte = false;
  };
  // A whole text as Hugging Face's tokenizers decode it: without the space that encoding put before it, and with U+FFFD
  // for what is not UTF-8.
  std::string text(const std::vector<Piece>& pieces) const;

 private:
  Status read_step(const nlohmann::json& step, bool is_last);

  bool is_byte_level_ = false;
  bool has_byte_fallback_ = false, has_fuse_ = false;
  std::vector<std::pair<std::string, std::string>> replacements_;
  std::string strip_content_;  // a character that is removed up to so often at the begin and at the end
  std::size_t strip_begin_ = 0, strip_end_ = 0;
  bool strips_first_token_ = false;  // Metaspace: the first token of a text has no spaces
};

}  // namespace echoline::model

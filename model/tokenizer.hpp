// Byte-level BPE as described by a Hugging Face tokenizer.json (Qwen, Llama 3, SmolLM), without Python.
#pragma once
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.hpp"
#include "model/config.hpp"

namespace echoline::model {

// Alphabet of the tiny presets: newline and printable ASCII.
inline constexpr std::string_view kCharacterAlphabet =
    "\n !\"#$%&'()*+,-./0123456789:;<=>?@ABCDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_`abcdefghijklmnopqrstuvwxyz{|}~";
// The token that ends a text, in every Qwen tokenizer, in characters() and in bytes().
inline constexpr std::string_view kEndOfText = "<|endoftext|>";
inline constexpr std::string_view kChatStart = "<|im_start|>";
inline constexpr std::string_view kChatEnd = "<|im_end|>";

// Immutable and cheap to copy; all members may be called from several threads at once.
class Tokenizer {
 public:
  // Parses tokenizer.json: model BPE; normalizer NFC or none; pre-tokenizer ByteLevel, optionally after Split by
  // regexes and Digits; post-processor ByteLevel or TemplateProcessing; decoder ByteLevel. kInvalid names the field
  // that is missing, malformed or not implemented.
  static Result<Tokenizer> from_json(std::string text);
  static Result<Tokenizer> from_file(const std::filesystem::path& path);
  // One token per byte of `alphabet` (distinct ASCII bytes) in its order, no merges, then the added tokens
  // <|endoftext|>, <|im_start|> and <|im_end|>. Every digit is one token.
  static Result<Tokenizer> characters(std::string_view alphabet);
  // The same for all 256 bytes, in their order: any text can be written.
  static Result<Tokenizer> bytes();

  // Added tokens are recognised inside `text`. A byte without a token becomes the unknown token, or is left out where
  // there is none, as Hugging Face's tokenizers do; a vocabulary without merges is an alphabet, and refuses it.
  // kInvalid then, and when `text` is not UTF-8.
  Result<std::vector<Token>> encode(std::string_view text) const;
  // The bytes the tokens stand for; special tokens are written out unless `skip_special`. Ids outside the
  // vocabulary (padding rows of the embedding) stand for nothing.
  std::string decode(std::span<const Token> tokens, bool skip_special = false) const;

  // The token that stands for exactly `text`, added tokens first.
  std::optional<Token> id(std::string_view text) const;
  // The tokens that a post-processor puts before a text, such as <|begin_of_text|>. encode() does not: chat templates
  // write them out.
  const std::vector<Token>& prompt_prefix() const;
  bool is_special(Token token) const;
  std::optional<Token> end_of_text() const { return id(kEndOfText); }
  // One more than the largest id; at most ModelConfig::vocab_size of a matching model.
  std::int64_t size() const;
  // The tokenizer.json this was made from.
  const std::string& to_json() const;

 private:
  struct State;
  explicit Tokenizer(std::shared_ptr<const State> state) : state_(std::move(state)) {}
  std::shared_ptr<const State> state_;
};

}  // namespace echoline::model

// Byte pair encoding from a Hugging Face tokenizer.json (Qwen, Llama, SmolLM, Mistral, Gemma, Phi, DeepSeek, GPT-OSS,
// GLM), without Python.
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

// The alphabet of the tiny presets: newline and printable ASCII.
inline constexpr std::string_view kCharacterAlphabet =
    "\n !\"#$%&'()*+,-./0123456789:;<=>?@ABCDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_`abcdefghijklmnopqrstuvwxyz{|}~";
// The token that ends a text, in every Qwen tokenizer, in characters() and in bytes().
inline constexpr std::string_view kEndOfText = "<|endoftext|>";
inline constexpr std::string_view kChatStart = "<|im_start|>";
inline constexpr std::string_view kChatEnd = "<|im_end|>";

// Immutable and cheap to copy. Thread-safe.
class Tokenizer {
 public:
  // Parses a tokenizer.json with a model of type BPE, byte-level or with characters and byte_fallback. Its other steps
  // must be among those listed in normalizer.hpp, pre_tokenizer.hpp and token_decoder.hpp; its post-processor must be
  // ByteLevel or TemplateProcessing. kInvalid names the field that is missing, malformed or not implemented.
  static Result<Tokenizer> from_json(std::string text);
  static Result<Tokenizer> from_file(const std::filesystem::path& path);
  // One token per byte of `alphabet` (distinct ASCII bytes), in order, without merges, then the added tokens
  // kEndOfText, kChatStart and kChatEnd. Every digit is one token.
  static Result<Tokenizer> characters(std::string_view alphabet);
  // Like characters(), for all 256 bytes in order, so that the tokenizer can encode any text.
  static Result<Tokenizer> bytes();

  // Recognises added tokens inside `text`. A byte or character without a token becomes the unknown token, or is left
  // out if there is none, as in Hugging Face's tokenizers. In a vocabulary without merges it is an error (kInvalid).
  // Also kInvalid if `text` is not UTF-8.
  // `previous` is the token before `text`, if `text` continues other tokens. Then no space is put before `text`, unless
  // the tokenizer puts one after every added token and `previous` is an added token.
  Result<std::vector<Token>> encode(std::string_view text, std::optional<Token> previous = std::nullopt) const;
  // The bytes of the tokens in the middle of a text, so that the results for parts of a response can be joined. Special
  // tokens are written out unless `skip_special`. Ids outside the vocabulary (padding rows of the embedding) have no
  // bytes.
  std::string decode(std::span<const Token> tokens, bool skip_special = false) const;
  // The tokens as a whole text, as Hugging Face's decode() returns it: without the space that encode() puts before a
  // text for some models, and with U+FFFD in the place of bytes that are not UTF-8.
  std::string decode_text(std::span<const Token> tokens, bool skip_special = false) const;

  // The token for exactly `text`: an added token or, if none has this text, one of the vocabulary. Unless the tokenizer
  // is byte-level, `text` must be written as in tokenizer.json (U+2581 for a space).
  std::optional<Token> id(std::string_view text) const;
  // The tokens that the post-processor puts before a text, such as Llama 3's begin_of_text. encode() does not add them,
  // because chat templates contain them.
  const std::vector<Token>& prompt_prefix() const;
  bool is_special(Token token) const;
  std::optional<Token> end_of_text() const { return id(kEndOfText); }
  // One more than the largest id; at most ModelConfig::vocab_size of a matching model.
  std::int64_t size() const;
  // The tokenizer.json of this tokenizer.
  const std::string& to_json() const;

 private:
  struct State;
  explicit Tokenizer(std::shared_ptr<const State> state) : state_(std::move(state)) {}
  std::shared_ptr<const State> state_;
};

}  // namespace echoline::model

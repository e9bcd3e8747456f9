// Byte pair encoding with the vocabulary and the merges of a tokenizer.json. Internal to model.
#pragma once
#include <array>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/result.hpp"
#include "model/config.hpp"
#include "model/pair_table.hpp"

namespace echoline::model {

inline constexpr Token kIdMax = 1 << 22;  // bounds the memory of tables by id

// Immutable. Thread-safe.
class BytePairs {
 public:
  // Reads the object 'model' of a tokenizer.json. With `is_byte_level`, its tokens are written in the alphabet of
  // byte_level.hpp.
  static Result<BytePairs> read(const nlohmann::json& model, bool is_byte_level);
  // Sets the token for characters without a token of their own. Without it, encode() leaves such characters out.
  void set_unknown(Token token) { unknown_ = token; }

  // Appends the tokens of a piece. kInvalid if the piece has a character without a token, and the vocabulary has no
  // merges and no unknown token.
  Status encode(std::string_view piece, std::vector<Token>& out) const;
  // The token for `text`: its bytes if the vocabulary is byte-level, otherwise as the file writes it.
  std::optional<Token> find(std::string_view text) const;
  // The tokens as the file writes them, by id; empty where there is none.
  const std::vector<std::string>& spellings() const { return spellings_; }

 private:
  // A token in the linked list of merge_many(); previous and next are indices.
  struct Symbol {
    Token id;
    std::ptrdiff_t previous, next;  // -1: none
  };
  struct TextHash : std::hash<std::string_view> {
    using is_transparent = void;
  };

  Status read_vocabulary(const nlohmann::json& model);
  Status read_merges(const nlohmann::json& model);
  // The text of a token that tokenizer.json writes as `written`; absent if it is not in the byte-level alphabet.
  std::optional<std::string> text_of(const std::string& written) const;
  // The merge of this pair: its rank as `first`, the merged token as `second`. Null if the pair has none.
  const PairTable::Value* merge_of(Token left, Token right) const {
    return merges_.find(PairTable::key(static_cast<std::uint32_t>(left), static_cast<std::uint32_t>(right)));
  }
  // Appends the tokens of the piece's single characters or, if byte-level, single bytes, before any merge.
  Status append_unmerged_tokens(std::string_view piece, std::vector<Token>& tokens) const;
  std::optional<Token> character_token(std::string_view character, char32_t code) const;
  bool append_byte_tokens(std::string_view character, std::vector<Token>& tokens) const;
  void merge_few(std::span<Token> tokens, std::vector<Token>& out) const;
  void merge_many(std::span<const Token> tokens, std::vector<Token>& out) const;

  bool is_byte_level_ = false;
  bool falls_back_to_bytes_ = false;  // a character without a token becomes one token for each of its bytes
  bool fuses_unknown_ = false;        // one unknown token for consecutive unknown characters
  bool ignores_merges_ = false;       // a piece in the vocabulary is that token, without merging
  std::optional<Token> unknown_;
  std::vector<std::string> spellings_;  // by id
  std::unordered_map<std::string, Token, TextHash, std::equal_to<>> vocabulary_;
  std::array<std::optional<Token>, 256> byte_token_;      // by byte; unless byte-level, only for ASCII
  std::array<std::optional<Token>, 256> fallback_token_;  // by byte: the tokens <0x00> to <0xFF>
  PairTable character_tokens_;                            // by character: the token as `first`; unused if byte-level
  PairTable merges_;                                      // by pair of tokens, with the values that merge_of() returns
};

}  // namespace echoline::model

// The added tokens of a tokenizer.json: each is a text that becomes one token wherever it occurs. Internal to model.
#pragma once
#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "model/config.hpp"
#include "model/pair_table.hpp"

namespace echoline::model {

struct AddedToken {
  std::string content;
  Token id = 0;
  bool is_special = false;
  bool is_single_word = false;                               // found only where no word character is beside it
  bool takes_left_space = false, takes_right_space = false;  // white space on this side becomes part of the token
  bool is_normalized = false;  // found in the normalized text; otherwise in the text before normalization
};

// Finds added tokens in a text: the leftmost, and of those the longest. Thread-safe once filled.
class AddedTokenFinder {
 public:
  // Makes find() report `pattern` as `token`. A pattern that was added before keeps its first token.
  void add(std::string_view pattern, const AddedToken& token);

  // A part of a text: an added token, or the text between two.
  struct Section {
    std::size_t begin = 0, end = 0;
    std::optional<Token> token;
  };
  // Appends the sections of `text`, which must be UTF-8, in order.
  void find(std::string_view text, std::vector<Section>& sections) const;

 private:
  // Index in tokens_ of the longest token that begins at byte `begin`; absent if there is none. Sets `end` to the end
  // of the token.
  std::optional<std::size_t> longest_at(std::string_view text, std::size_t begin, std::size_t& end) const;

  std::vector<AddedToken> tokens_;
  // A trie of the patterns. A node is a number; the root is 0.
  PairTable children_;                                     // child node as `first`, by node and byte
  std::vector<std::optional<std::size_t>> token_at_node_;  // by node: index of the token that ends there
  std::array<bool, 256> begins_pattern_{};                 // by byte: whether a pattern begins with it
};

}  // namespace echoline::model

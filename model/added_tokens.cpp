// Finds added tokens with a trie.
#include "model/added_tokens.hpp"

#include <algorithm>

#include "model/unicode.hpp"

namespace echoline::model {
namespace {

// Index of the first byte of the last character of `text`, which must not be empty.
std::size_t last_character_begin(std::string_view text) {
  std::size_t begin = text.size() - 1;
  const auto is_continuation = [](char c) { return (static_cast<unsigned char>(c) & 0xc0) == 0x80; };  // of UTF-8
  while (begin > 0 && is_continuation(text[begin])) --begin;
  return begin;
}

bool starts_with_word_character(std::string_view text) {
  const auto character = text.empty() ? std::nullopt : first_character(text);
  return character && is_word_character(character->code);
}
bool ends_with_word_character(std::string_view text) {
  return !text.empty() && starts_with_word_character(text.substr(last_character_begin(text)));
}

// Index at which the white space at the end of `text` begins; text.size() without such white space.
std::size_t trailing_space_begin(std::string_view text) {
  while (!text.empty()) {
    const std::size_t begin = last_character_begin(text);
    const auto character = first_character(text.substr(begin));
    if (!character || !is_white_space(character->code)) break;
    text = text.substr(0, begin);
  }
  return text.size();
}
std::size_t leading_space_bytes(std::string_view text) {
  std::size_t bytes = 0;
  while (bytes < text.size()) {
    const auto character = first_character(text.substr(bytes));
    if (!character || !is_white_space(character->code)) break;
    bytes += character->bytes;
  }
  return bytes;
}

}  // namespace

void AddedTokenFinder::add(std::string_view pattern, const AddedToken& token) {
  if (pattern.empty()) return;
  if (token_at_node_.empty()) token_at_node_.emplace_back();
  begins_pattern_[static_cast<unsigned char>(pattern.front())] = true;
  std::uint32_t node = 0;
  for (const char c : pattern) {
    const std::uint64_t key = PairTable::key(node, static_cast<unsigned char>(c));
    if (const PairTable::Value* child = children_.find(key)) {
      node = child->first;
    } else {
      const auto new_node = static_cast<std::uint32_t>(token_at_node_.size());
      token_at_node_.emplace_back();
      children_.set(key, {new_node, 0});
      node = new_node;
    }
  }
  if (token_at_node_[node]) return;
  token_at_node_[node] = tokens_.size();
  tokens_.push_back(token);
}

std::optional<std::size_t> AddedTokenFinder::longest_at(std::string_view text, std::size_t begin,
                                                        std::size_t& end) const {
  std::optional<std::size_t> longest;
  std::uint32_t node = 0;
  for (std::size_t i = begin; i < text.size(); ++i) {
    const PairTable::Value* child = children_.find(PairTable::key(node, static_cast<unsigned char>(text[i])));
    if (!child) break;
    node = child->first;
    if (token_at_node_[node]) {
      longest = token_at_node_[node];
      end = i + 1;
    }
  }
  return longest;
}

void AddedTokenFinder::find(std::string_view text, std::vector<Section>& sections) const {
  std::size_t sections_end = 0;  // end of the text that `sections` covers
  for (std::size_t i = 0; i < text.size();) {
    std::size_t match_end = 0;
    const std::optional<std::size_t> match =
        begins_pattern_[static_cast<unsigned char>(text[i])] ? longest_at(text, i, match_end) : std::nullopt;
    if (!match) {
      ++i;
      continue;
    }
    const AddedToken& token = tokens_[*match];
    std::size_t begin = i, end = match_end;
    i = match_end;  // the search goes on after a match, even after one that is not a single word
    if (token.is_single_word &&
        (ends_with_word_character(text.substr(0, begin)) || starts_with_word_character(text.substr(end))))
      continue;
    if (token.takes_left_space) begin = std::max(trailing_space_begin(text.substr(0, begin)), sections_end);
    if (token.takes_right_space) end += leading_space_bytes(text.substr(end));
    if (sections_end < begin) sections.push_back({sections_end, begin, std::nullopt});
    sections.push_back({begin, end, token.id});
    // An added token of white space may lie within white space that became part of the previous token. Then
    // sections_end moves back, and the text after it is in two sections, as in Hugging Face's tokenizers.
    sections_end = end;
  }
  if (sections_end != text.size()) sections.push_back({sections_end, text.size(), std::nullopt});
}

}  // namespace echoline::model

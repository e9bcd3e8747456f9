// Reads the vocabulary and the merges of a tokenizer.json, and encodes pieces of text with them.
#include "model/byte_pairs.hpp"

#include <algorithm>
#include <limits>
#include <queue>

#include "model/byte_level.hpp"
#include "model/tokenizer_json.hpp"
#include "model/unicode.hpp"

namespace echoline::model {
namespace {

using tokenizer_json::invalid;
using tokenizer_json::Json;
using tokenizer_json::member;
using tokenizer_json::short_dump;
// Up to this number of tokens in a piece, a search through all pairs is faster than a queue.
constexpr std::size_t kFewTokensMax = 48;

}  // namespace

std::optional<std::string> BytePairs::text_of(const std::string& written) const {
  return is_byte_level_ ? from_byte_level(written) : std::optional(written);
}

Status BytePairs::read_vocabulary(const Json& model) {
  const Json* vocab = member(model, "vocab");
  if (!vocab || !vocab->is_object()) return invalid("'model.vocab' is missing, expected an object from token to id");
  vocabulary_.reserve(vocab->size());
  for (const auto& [written, id] : vocab->items()) {
    if (!id.is_number_integer() || id < 0 || id > kIdMax) {
      return invalid("'model.vocab' gives {} the id {}, expected an integer from 0 to {}", short_dump(written),
                     short_dump(id), kIdMax);
    }
    if (written.empty()) continue;  // an empty token is never found
    const auto token = id.get<Token>();
    const auto index = static_cast<std::size_t>(token);
    if (spellings_.size() <= index) spellings_.resize(index + 1);
    if (!spellings_[index].empty()) {
      return invalid("'model.vocab': id {} is used by two tokens, {} and {}", token, short_dump(spellings_[index]),
                     short_dump(written));
    }
    spellings_[index] = written;
    const std::optional<std::string> text = text_of(written);
    if (!text) continue;  // has a character outside of the byte-level alphabet: an added token, as in DeepSeek's file
    vocabulary_.emplace(*text, token);
    if (text->size() == 1) byte_token_[static_cast<unsigned char>(text->front())] = token;
    if (is_byte_level_) continue;
    if (const auto character = first_character(*text); character && character->bytes == text->size())
      character_tokens_.set(character->code, {static_cast<std::uint32_t>(token), 0});
  }
  for (unsigned byte = 0; byte < 256 && falls_back_to_bytes_; ++byte)
    fallback_token_[byte] = find(fmt::format("<0x{:02X}>", byte));
  return ok();
}

Status BytePairs::read_merges(const Json& model) {
  const Json* merge_list = member(model, "merges");
  if (!merge_list || !merge_list->is_array()) return invalid("'model.merges' is missing, expected a list");
  std::uint32_t rank = 0;
  for (const Json& merge : *merge_list) {
    std::string left, right;
    if (merge.is_string()) {
      const auto& text = merge.get_ref<const std::string&>();
      const auto space = text.find(' ');
      if (space != std::string::npos) {
        left = text.substr(0, space);
        right = text.substr(space + 1);
      }
    } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
      left = merge[0].get<std::string>();
      right = merge[1].get<std::string>();
    }
    const auto left_text = text_of(left), right_text = text_of(right);
    if (!left_text || !right_text || left_text->empty() || right_text->empty()) {
      return invalid("'model.merges' entry {} is {}, expected \"a b\" or [\"a\", \"b\"]", rank, short_dump(merge));
    }
    const auto left_token = find(*left_text), right_token = find(*right_text), merged = find(*left_text + *right_text);
    if (!left_token || !right_token || !merged) {
      return invalid("'model.merges' entry {} is {}, whose parts and result must be in 'model.vocab'", rank,
                     short_dump(merge));
    }
    merges_.set(PairTable::key(static_cast<std::uint32_t>(*left_token), static_cast<std::uint32_t>(*right_token)),
                {rank, static_cast<std::uint32_t>(*merged)});  // overwrites an earlier entry of the same pair
    ++rank;
  }
  return ok();
}

Result<BytePairs> BytePairs::read(const Json& model, bool is_byte_level) {
  using tokenizer_json::is_true;
  // The type is optional, because old files have none.
  if (const Json* type = member(model, "type"); type && *type != "BPE")
    return invalid("'model.type' is {}, expected \"BPE\"", short_dump(*type));
  if (is_byte_level && is_true(model, "byte_fallback"))
    return invalid("'model.byte_fallback' is set beside a ByteLevel pre-tokenizer, expected one of them");
  if (const Json* dropout = member(model, "dropout"); dropout && *dropout != 0)
    return invalid("'model.dropout' is {}, expected null: encoding would be random", short_dump(*dropout));
  for (const char* affix : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (const Json* value = member(model, affix); value && *value != "")
      return invalid("'model.{}' is {}, expected none", affix, short_dump(*value));
  }
  BytePairs pairs;
  pairs.is_byte_level_ = is_byte_level;
  pairs.falls_back_to_bytes_ = is_true(model, "byte_fallback");
  pairs.fuses_unknown_ = is_true(model, "fuse_unk");
  pairs.ignores_merges_ = is_true(model, "ignore_merges");
  ECHO_TRY(pairs.read_vocabulary(model));
  ECHO_TRY(pairs.read_merges(model));
  return pairs;
}

std::optional<Token> BytePairs::find(std::string_view text) const {
  const auto it = vocabulary_.find(text);
  return it == vocabulary_.end() ? std::nullopt : std::optional(it->second);
}

std::optional<Token> BytePairs::character_token(std::string_view character, char32_t code) const {
  if (character.size() == 1) return byte_token_[static_cast<unsigned char>(character.front())];
  const PairTable::Value* value = character_tokens_.find(code);
  return value ? std::optional(static_cast<Token>(value->first)) : std::nullopt;
}

// Appends the fallback tokens of the character's bytes. Returns false, and appends none, if a byte has no token.
bool BytePairs::append_byte_tokens(std::string_view character, std::vector<Token>& tokens) const {
  const auto token_of = [&](char c) { return fallback_token_[static_cast<unsigned char>(c)]; };
  if (!std::all_of(character.begin(), character.end(), [&](char c) { return token_of(c).has_value(); })) return false;
  for (const char c : character) tokens.push_back(*token_of(c));
  return true;
}

Status BytePairs::append_unmerged_tokens(std::string_view piece, std::vector<Token>& tokens) const {
  // The unknown token is appended only before the next known token. So the fallback bytes of characters between them
  // are before it, as in Hugging Face's tokenizers.
  bool unknown_is_pending = false;
  for (std::size_t i = 0, bytes = 1; i < piece.size(); i += bytes) {
    char32_t code = static_cast<unsigned char>(piece[i]);
    if (!is_byte_level_ && code >= 0x80) {
      const auto character = first_character(piece.substr(i));
      // A byte that is not UTF-8 counts as a character of its own, which character_token() finds by the byte.
      code = character ? character->code : 0;
      bytes = character ? character->bytes : 1;
    } else {
      bytes = 1;
    }
    const std::string_view character = piece.substr(i, bytes);
    if (const std::optional<Token> token = character_token(character, code)) {
      if (std::exchange(unknown_is_pending, false)) tokens.push_back(*unknown_);
      tokens.push_back(*token);
    } else if (falls_back_to_bytes_ && append_byte_tokens(character, tokens)) {
      continue;
    } else if (unknown_) {
      if (std::exchange(unknown_is_pending, true) && !fuses_unknown_) tokens.push_back(*unknown_);
    } else if (merges_.size() == 0) {  // an alphabet must cover its texts; with merges, the character is left out
      return fail(Code::kInvalid, "tokenize", "the vocabulary has no token for byte 0x{:02x} in {}",
                  static_cast<unsigned char>(piece[i]), short_dump(std::string(piece)));
    }
  }
  if (unknown_is_pending) tokens.push_back(*unknown_);
  return ok();
}

Status BytePairs::encode(std::string_view piece, std::vector<Token>& out) const {
  if (ignores_merges_)
    if (const std::optional<Token> token = find(piece)) {
      out.push_back(*token);
      return ok();
    }
  thread_local std::vector<Token> tokens;  // its memory is used again by the next call
  tokens.clear();
  ECHO_TRY(append_unmerged_tokens(piece, tokens));
  if (tokens.size() < 2 || merges_.size() == 0)
    out.insert(out.end(), tokens.begin(), tokens.end());
  else if (tokens.size() <= kFewTokensMax)
    merge_few(tokens, out);
  else
    merge_many(tokens, out);
  return ok();
}

// Merges the pair of lowest rank, leftmost first, until no pair can be merged.
void BytePairs::merge_few(std::span<Token> tokens, std::vector<Token>& out) const {
  // In a merge, `first` is the rank and `second` the merged token.
  constexpr PairTable::Value kNoMerge = {std::numeric_limits<std::uint32_t>::max(), 0};
  std::array<PairTable::Value, kFewTokensMax> merges;  // merges[i] is the merge of tokens[i] and tokens[i + 1]
  std::size_t size = tokens.size();
  const auto update_merge_at = [&](std::size_t i) {
    const PairTable::Value* merge = merge_of(tokens[i], tokens[i + 1]);
    merges[i] = merge ? *merge : kNoMerge;
  };
  for (std::size_t i = 0; i + 1 < size; ++i) update_merge_at(i);
  while (size > 1) {
    std::size_t best = 0;
    for (std::size_t i = 1; i + 1 < size; ++i)
      if (merges[i].first < merges[best].first) best = i;
    if (merges[best].first == kNoMerge.first) break;
    tokens[best] = static_cast<Token>(merges[best].second);
    for (std::size_t i = best + 1; i + 1 < size; ++i) {
      tokens[i] = tokens[i + 1];
      merges[i] = merges[i + 1];
    }
    --size;
    if (best > 0) update_merge_at(best - 1);
    if (best + 1 < size) update_merge_at(best);
  }
  out.insert(out.end(), tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(size));
}

// Merges as merge_few() does, but finds the next pair with a queue: n log n steps for n tokens.
void BytePairs::merge_many(std::span<const Token> tokens, std::vector<Token>& out) const {
  std::vector<Symbol> symbols;
  symbols.reserve(tokens.size());
  for (std::ptrdiff_t i = 0; i < std::ssize(tokens); ++i)
    symbols.push_back({.id = tokens[static_cast<std::size_t>(i)], .previous = i - 1, .next = i + 1});
  symbols.back().next = -1;
  const auto symbol_at = [&](std::ptrdiff_t i) -> Symbol& { return symbols[static_cast<std::size_t>(i)]; };

  // A merge of the symbols `left` and its next, as they were when it was queued. The queue begins with the lowest rank,
  // then the leftmost.
  struct Candidate {
    std::uint32_t rank;
    std::ptrdiff_t left;
    Token left_id, right_id, merged;
    bool operator>(const Candidate& other) const { return rank != other.rank ? rank > other.rank : left > other.left; }
  };
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> queue;
  const auto queue_merge = [&](std::ptrdiff_t left) {
    if (left < 0 || symbol_at(left).next < 0) return;
    const Token a = symbol_at(left).id, b = symbol_at(symbol_at(left).next).id;
    if (const PairTable::Value* merge = merge_of(a, b))
      queue.push({merge->first, left, a, b, static_cast<Token>(merge->second)});
  };
  for (std::ptrdiff_t i = 0; i + 1 < std::ssize(symbols); ++i) queue_merge(i);
  constexpr Token kGone = -1;  // id of a symbol that was merged into its left neighbour
  while (!queue.empty()) {
    const Candidate best = queue.top();
    queue.pop();
    const std::ptrdiff_t left = best.left, right = symbol_at(left).next;
    if (symbol_at(left).id != best.left_id || right < 0 || symbol_at(right).id != best.right_id)
      continue;  // an earlier merge has changed one of them
    symbol_at(left).id = best.merged;
    symbol_at(right).id = kGone;
    symbol_at(left).next = symbol_at(right).next;
    if (symbol_at(left).next >= 0) symbol_at(symbol_at(left).next).previous = left;
    queue_merge(symbol_at(left).previous);
    queue_merge(left);
  }
  for (std::ptrdiff_t i = 0; i >= 0; i = symbol_at(i).next) out.push_back(symbol_at(i).id);
}

}  // namespace echoline::model

// Reads tokenizer.json, and encodes and decodes texts with its steps.
#include "model/tokenizer.hpp"

#include <algorithm>

#include "base/files.hpp"
#include "model/added_tokens.hpp"
#include "model/byte_level.hpp"
#include "model/byte_pairs.hpp"
#include "model/normalizer.hpp"
#include "model/pre_tokenizer.hpp"
#include "model/token_decoder.hpp"
#include "model/tokenizer_json.hpp"
#include "model/unicode.hpp"

namespace echoline::model {
namespace {

using tokenizer_json::invalid;
using tokenizer_json::is_true;
using tokenizer_json::is_type;
using tokenizer_json::Json;
using tokenizer_json::member;
using tokenizer_json::short_dump;
constexpr std::size_t kTextBytesMax = 1u << 30;
constexpr std::size_t kFileBytesMax = 256u << 20;  // of a tokenizer.json

Result<std::vector<AddedToken>> read_added(const Json& root) {
  std::vector<AddedToken> tokens;
  const Json* list = member(root, "added_tokens");
  if (!list) return tokens;
  if (!list->is_array()) return invalid("'added_tokens' is {}, expected a list", short_dump(*list));
  for (const Json& entry : *list) {
    const std::string* content = tokenizer_json::text_member(entry, "content");
    const Json* id = member(entry, "id");
    if (!id || !content || content->empty() || !id->is_number_integer() || *id < 0 || *id > kIdMax)
      return invalid("'added_tokens' has {}, expected an object with 'id' and 'content'", short_dump(entry));
    tokens.push_back({.content = *content,
                      .id = id->get<Token>(),
                      .is_special = is_true(entry, "special"),
                      .is_single_word = is_true(entry, "single_word"),
                      .takes_left_space = is_true(entry, "lstrip"),
                      .takes_right_space = is_true(entry, "rstrip"),
                      .is_normalized = is_true(entry, "normalized")});
  }
  return tokens;
}

}  // namespace

struct Tokenizer::State {
  std::string source;  // the tokenizer.json
  Normalizer normalizer;
  PreTokenizer pre_tokenizer;
  BytePairs pairs;
  TokenDecoder decoder;
  // `added` is searched for before a text is normalized, `normalized_added` after.
  AddedTokenFinder added, normalized_added;
  std::unordered_map<std::string, Token> added_ids;
  std::vector<std::string> bytes;                            // by id; empty where there is no token
  std::vector<bool> is_special, is_added, is_fallback_byte;  // by id
  std::vector<Token> prefix;                                 // tokens before a prompt, unless it continues another text

  Status read(const Json& root);
  // Sets the bytes of a token. `spelling` is the token as tokenizer.json writes it.
  void set_bytes(Token id, std::string_view spelling);
  Status set_tokens(const std::vector<AddedToken>& added_tokens);
  Status read_post_processor(const Json& step, bool in_sequence);

  std::optional<Token> id_of(std::string_view text) const;
  bool has(Token token) const { return token >= 0 && token < std::ssize(bytes); }
  // Encodes a section of a text: the part between two added tokens that were found before normalizing. The parameters
  // are those of PreTokenizer::split().
  Status encode_section(std::string_view text, bool begins_text, bool continues, std::vector<Token>& out) const;
};

void Tokenizer::State::set_bytes(Token id, std::string_view spelling) {
  const auto index = static_cast<std::size_t>(id);
  bytes[index] = decoder.bytes(spelling);
  is_fallback_byte[index] = decoder.fallback_byte(spelling).has_value();
}

Status Tokenizer::State::set_tokens(const std::vector<AddedToken>& added_tokens) {
  const std::vector<std::string>& spellings = pairs.spellings();
  std::size_t size = spellings.size();
  for (const AddedToken& token : added_tokens) size = std::max(size, static_cast<std::size_t>(token.id) + 1);
  bytes.resize(size);
  is_special.resize(size);
  is_added.resize(size);
  is_fallback_byte.resize(size);
  for (std::size_t id = 0; id < spellings.size(); ++id)
    if (!spellings[id].empty()) set_bytes(static_cast<Token>(id), spellings[id]);
  for (const AddedToken& token : added_tokens) {
    const auto index = static_cast<std::size_t>(token.id);
    const std::string_view ordinary = index < spellings.size() ? std::string_view(spellings[index]) : "";
    if ((is_added[index] && bytes[index] != decoder.bytes(token.content)) ||
        (!ordinary.empty() && ordinary != token.content))
      return invalid("'added_tokens': id {} is used by two tokens, {} and {}", token.id,
                     short_dump(ordinary.empty() ? bytes[index] : std::string(ordinary)), short_dump(token.content));
    std::string pattern = token.content;
    if (token.is_normalized) {
      ECHO_ASSIGN(pattern, normalizer.apply(token.content, /*prepends=*/true));
    }
    (token.is_normalized ? normalized_added : added).add(pattern, token);
    set_bytes(token.id, pattern);
    is_special[index] = token.is_special;
    is_added[index] = true;
    added_ids.emplace(token.content, token.id);
  }
  return ok();
}

// Sets `prefix`. As a post-processor, ByteLevel only affects offsets, which are not used. TemplateProcessing lists the
// tokens before and after a text.
Status Tokenizer::State::read_post_processor(const Json& step, bool in_sequence) {
  if (is_type(step, "ByteLevel")) return ok();
  if (const Json* list = is_type(step, "Sequence") && !in_sequence ? member(step, "processors") : nullptr;
      list && list->is_array()) {
    for (const Json& processor : *list) ECHO_TRY(read_post_processor(processor, /*in_sequence=*/true));
    return ok();
  }
  if (!is_type(step, "TemplateProcessing"))
    return invalid("'post_processor' is {}, expected ByteLevel or TemplateProcessing", short_dump(step));
  const Json* single = member(step, "single");
  if (!single || !single->is_array()) return invalid("'post_processor' TemplateProcessing has no list 'single'");
  for (const Json& part : *single) {
    // "Sequence" is the place of the text. Tokens after it are ignored, because they would end the text, and a prompt
    // must go on.
    if (part.is_object() && part.contains("Sequence")) return ok();
    const Json* special = member(part, "SpecialToken");
    const std::string* name = special ? tokenizer_json::text_member(*special, "id") : nullptr;
    const std::optional<Token> token = name ? id_of(*name) : std::nullopt;
    if (!token)
      return invalid("'post_processor' TemplateProcessing names {}, expected a token or a Sequence", short_dump(part));
    prefix.push_back(*token);
  }
  return ok();
}

Status Tokenizer::State::read(const Json& root) {
  const Json* model = member(root, "model");
  if (!model || !model->is_object()) return invalid("'model' is missing, expected an object of type BPE");
  ECHO_ASSIGN(normalizer, Normalizer::read(root));
  ECHO_ASSIGN(pre_tokenizer, PreTokenizer::read(root));
  ECHO_ASSIGN(pairs, BytePairs::read(*model, pre_tokenizer.is_byte_level()));
  ECHO_ASSIGN(decoder, TokenDecoder::read(root, pre_tokenizer.is_byte_level()));
  ECHO_ASSIGN(const std::vector<AddedToken> added_tokens, read_added(root));
  ECHO_TRY(set_tokens(added_tokens));
  if (const Json* post = member(root, "post_processor")) ECHO_TRY(read_post_processor(*post, /*in_sequence=*/false));
  if (const Json* unknown = member(*model, "unk_token")) {
    const std::optional<Token> token =
        unknown->is_string() ? id_of(unknown->get_ref<const std::string&>()) : std::nullopt;
    if (!token) return invalid("'model.unk_token' is {}, expected a token of the vocabulary", short_dump(*unknown));
    pairs.set_unknown(*token);
  }
  if (bytes.empty()) return invalid("there are no tokens");
  return ok();
}

Status Tokenizer::State::encode_section(std::string_view text, bool begins_text, bool continues,
                                        std::vector<Token>& out) const {
  if (text.empty()) return ok();
  std::string normalized;
  if (!normalizer.keeps(text)) {
    ECHO_ASSIGN(normalized, normalizer.apply(text, /*prepends=*/!continues));
    text = normalized;
  }
  std::vector<AddedTokenFinder::Section> sections;
  normalized_added.find(text, sections);
  const PreTokenizer::OnPiece encode_piece = [&](std::string_view piece) { return pairs.encode(piece, out); };
  for (const auto& [begin, end, token] : sections) {
    if (token)
      out.push_back(*token);
    else
      ECHO_TRY(pre_tokenizer.split(text.substr(begin, end - begin), begins_text && begin == 0, continues && begin == 0,
                                   encode_piece));
  }
  return ok();
}

Result<Tokenizer> Tokenizer::from_json(std::string text) try {
  const Json root = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!root.is_object())
    return invalid("expected a JSON object, found {}", root.is_discarded() ? "malformed JSON" : root.type_name());
  auto state = std::make_shared<State>();
  ECHO_TRY(state->read(root));
  state->source = std::move(text);
  return Tokenizer(std::move(state));
} catch (const std::exception& e) {
  return invalid("{}", e.what());
}

Result<Tokenizer> Tokenizer::from_file(const std::filesystem::path& path) {
  ECHO_ASSIGN(std::string text, read_file(path, kFileBytesMax));
  auto tokenizer = from_json(std::move(text));
  if (!tokenizer) return fail(tokenizer.error().code, path.string(), "{}", tokenizer.error().detail);
  return tokenizer;
}

namespace {

// The tokenizer.json of a vocabulary without merges, followed by the added tokens.
std::string tokenizer_json_without_merges(const nlohmann::ordered_json& vocab) {
  nlohmann::ordered_json added = nlohmann::ordered_json::array();
  for (const std::string_view content : {kEndOfText, kChatStart, kChatEnd}) {
    added.push_back({{"id", vocab.size() + added.size()},
                     {"content", content},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", true}});
  }
  const nlohmann::ordered_json byte_level = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", false}, {"use_regex", false}};
  const nlohmann::ordered_json root = {{"version", "1.0"},
                                       {"truncation", nullptr},
                                       {"padding", nullptr},
                                       {"added_tokens", added},
                                       {"normalizer", nullptr},
                                       {"pre_tokenizer", byte_level},
                                       {"post_processor", nullptr},
                                       {"decoder", byte_level},
                                       {"model",
                                        {{"type", "BPE"},
                                         {"dropout", nullptr},
                                         {"unk_token", nullptr},
                                         {"continuing_subword_prefix", nullptr},
                                         {"end_of_word_suffix", nullptr},
                                         {"fuse_unk", false},
                                         {"byte_fallback", false},
                                         {"vocab", vocab},
                                         {"merges", nlohmann::ordered_json::array()}}}};
  return root.dump(2) + "\n";
}

}  // namespace

Result<Tokenizer> Tokenizer::characters(std::string_view alphabet) {
  nlohmann::ordered_json vocab = nlohmann::ordered_json::object();
  for (const char c : alphabet) {
    const auto byte = static_cast<unsigned char>(c);
    std::string written;
    append_byte_level(written, byte);
    if (byte >= 0x80 || vocab.contains(written)) {
      return fail(Code::kInvalid, "character tokenizer", "the alphabet has byte 0x{:02x} {}, expected distinct ASCII",
                  byte, byte >= 0x80 ? "outside ASCII" : "twice");
    }
    vocab[written] = vocab.size();
  }
  return from_json(tokenizer_json_without_merges(vocab));
}

Result<Tokenizer> Tokenizer::bytes() {
  nlohmann::ordered_json vocab = nlohmann::ordered_json::object();
  for (unsigned byte = 0; byte < 256; ++byte) {
    std::string written;
    append_byte_level(written, static_cast<unsigned char>(byte));
    vocab[written] = vocab.size();
  }
  return from_json(tokenizer_json_without_merges(vocab));
}

Result<std::vector<Token>> Tokenizer::encode(std::string_view text, std::optional<Token> previous) const try {
  if (text.size() > kTextBytesMax) {
    return fail(Code::kExhausted, "tokenize", "the text has {} bytes, expected at most {}", text.size(), kTextBytesMax);
  }
  if (const auto offset = utf8_error(text)) {
    return fail(Code::kInvalid, "tokenize", "byte {} of the text (0x{:02x}) is not UTF-8", *offset,
                static_cast<unsigned char>(text[*offset]));
  }
  std::vector<AddedTokenFinder::Section> sections;
  state_->added.find(text, sections);
  const bool follows_ordinary_token =
      previous && !(state_->has(*previous) && state_->is_added[static_cast<std::size_t>(*previous)]);
  std::vector<Token> out;
  for (const auto& [begin, end, token] : sections) {
    if (token)
      out.push_back(*token);
    else
      ECHO_TRY(state_->encode_section(text.substr(begin, end - begin), begin == 0 && !previous,
                                      begin == 0 && follows_ordinary_token, out));
  }
  return out;
} catch (const std::exception& e) {
  return fail(Code::kExhausted, "tokenize", "{}", e.what());
}

std::string Tokenizer::decode(std::span<const Token> tokens, bool skip_special) const {
  std::string out;
  for (const Token token : tokens) {
    if (!state_->has(token) || (skip_special && is_special(token))) continue;
    out += state_->bytes[static_cast<std::size_t>(token)];
  }
  return out;
}

std::string Tokenizer::decode_text(std::span<const Token> tokens, bool skip_special) const {
  std::vector<TokenDecoder::Piece> pieces;
  for (const Token token : tokens) {
    if (!state_->has(token) || (skip_special && is_special(token))) continue;
    const auto index = static_cast<std::size_t>(token);
    pieces.push_back({.bytes = state_->bytes[index], .is_fallback_byte = state_->is_fallback_byte[index]});
  }
  return state_->decoder.text(pieces);
}

std::optional<Token> Tokenizer::State::id_of(std::string_view text) const {
  if (text.empty()) return std::nullopt;
  const auto it = added_ids.find(std::string(text));
  return it != added_ids.end() ? std::optional(it->second) : pairs.find(text);
}

std::optional<Token> Tokenizer::id(std::string_view text) const { return state_->id_of(text); }
const std::vector<Token>& Tokenizer::prompt_prefix() const { return state_->prefix; }

bool Tokenizer::is_special(Token token) const {
  return state_->has(token) && state_->is_special[static_cast<std::size_t>(token)];
}
std::int64_t Tokenizer::size() const { return std::ssize(state_->bytes); }
const std::string& Tokenizer::to_json() const { return state_->source; }

}  // namespace echoline::model

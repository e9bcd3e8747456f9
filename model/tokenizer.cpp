// Reads tokenizer.json, and encodes by splitting a text with regexes and merging bytes within each piece.
#include "model/tokenizer.hpp"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <queue>
#include <tuple>
#include <unordered_map>

#include "base/files.hpp"
#include "model/unicode.hpp"

namespace echoline::model {
namespace {

using nlohmann::json;
constexpr std::string_view kErrorSource = "tokenizer.json";
constexpr Token kIdMax = 1 << 24;
constexpr std::size_t kTextBytesMax = 1u << 30;
constexpr std::size_t kSplitsMax = 16;
// The default split of ByteLevel: GPT-2's rule.
constexpr const char* kByteLevelRegex = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

template <class... Args>
Error bad(fmt::format_string<Args...> format, Args&&... args) {
  return fail(Code::kInvalid, kErrorSource, format, std::forward<Args>(args)...);
}

// A short dump of a JSON value for messages; never throws, even for invalid UTF-8.
std::string shown(const json& value) {
  std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  if (text.size() > 80) text = text.substr(0, 80) + "...";
  return text;
}

const json* member(const json& object, const char* name) {
  const auto it = object.find(name);
  return it == object.end() || it->is_null() ? nullptr : &*it;
}
bool is_type(const json& object, std::string_view type) {
  const json* t = object.is_object() ? member(object, "type") : nullptr;
  return t && t->is_string() && t->get_ref<const std::string&>() == type;
}
bool is_true(const json& object, const char* name, bool if_absent = false) {
  const json* value = member(object, name);
  return value ? *value != false : if_absent;
}

// Byte-level BPE writes every byte as one printable character: bytes that are printable in Latin-1 as themselves, the
// others, in order, from U+0100 on.
struct ByteMap {
  std::array<char32_t, 256> character{};
  std::unordered_map<char32_t, unsigned char> byte;
  ByteMap() {
    char32_t next = 256;
    for (unsigned b = 0; b < 256; ++b) {
      const bool printable = (b >= 33 && b <= 126) || (b >= 161 && b != 173);
      character[b] = printable ? b : next++;
      byte[character[b]] = static_cast<unsigned char>(b);
    }
  }
};
const ByteMap& byte_map() {
  static const ByteMap map;
  return map;
}

void append_utf8(std::string& out, char32_t c) {
  if (c < 0x80) {
    out += static_cast<char>(c);
  } else {  // the byte map ends below U+0800
    out += static_cast<char>(0xc0 | c >> 6);
    out += static_cast<char>(0x80 | (c & 0x3f));
  }
}

// The bytes of a vocabulary entry; absent if it has a character outside the byte map.
std::optional<std::string> to_bytes(std::string_view written) {
  std::string out;
  while (!written.empty()) {
    const auto character = first_character(written);
    const auto it = character ? byte_map().byte.find(character->code) : byte_map().byte.end();
    if (it == byte_map().byte.end()) return std::nullopt;
    out += static_cast<char>(it->second);
    written.remove_prefix(character->bytes);
  }
  return out;
}

struct FreeCode {
  void operator()(pcre2_code* code) const { pcre2_code_free(code); }
};
struct FreeMatch {
  void operator()(pcre2_match_data* data) const { pcre2_match_data_free(data); }
};

struct StringHash : std::hash<std::string_view> {
  using is_transparent = void;
};

struct AddedToken {
  std::string content;
  Token id;
  bool special;
};

}  // namespace

struct Tokenizer::State {
  std::string source;
  std::vector<std::string> bytes;  // by id; empty where there is no token
  std::vector<bool> special;       // by id
  std::unordered_map<std::string, Token, StringHash, std::equal_to<>> vocabulary;  // by bytes
  std::array<std::optional<Token>, 256> byte_token;  // tokens of a single byte, by that byte
  struct Merge {
    std::uint32_t rank;
    Token merged;
  };
  std::unordered_map<std::uint64_t, Merge> merges;  // by pair()
  std::array<std::vector<AddedToken>, 256> added;   // by first byte, longest first
  // Applied in turn: each splits the pieces of the previous one.
  std::vector<std::unique_ptr<pcre2_code, FreeCode>> splits;
  std::vector<Token> prefix;     // tokens before every text that is a prompt by itself
  std::optional<Token> unknown;  // for a byte without a token; absent: such a byte is left out
  bool fuse_unknown = false;     // one unknown token for consecutive unknown bytes
  bool whole_words = false;      // a piece in the vocabulary is that token, without merging
  bool nfc = false;

  static std::uint64_t pair(Token left, Token right) {
    return std::uint64_t(std::uint32_t(left)) << 32 | std::uint32_t(right);
  }

  Status put(Token id, std::string token);
  Status read_vocabulary(const json& model);
  Status read_merges(const json& model);
  Status read_added(const json& root);
  Status read_normalizer(const json& root);
  Status read_pre_tokenizer(const json& root);
  Status read_post_processor(const json& step, bool in_sequence);
  Status compile(const std::string& regex);

  std::optional<Token> id_of(std::string_view text) const;
  const AddedToken* added_at(std::string_view text) const;
  Status encode_ordinary(std::string_view text, pcre2_match_data* match, std::vector<Token>& out) const;
  // A piece made by the first `splits_done` splits.
  Status encode_split(std::string_view piece, std::size_t splits_done, pcre2_match_data* match,
                      std::vector<Token>& out) const;
  Status encode_piece(std::string_view piece, std::vector<Token>& out) const;
};

Status Tokenizer::State::put(Token id, std::string token) {
  const auto index = static_cast<std::size_t>(id);
  if (bytes.size() <= index) {
    bytes.resize(index + 1);
    special.resize(index + 1);
  }
  if (!bytes[index].empty() && bytes[index] != token) {
    return bad("id {} is used by two tokens, {} and {}", id, shown(bytes[index]), shown(token));
  }
  bytes[index] = std::move(token);
  return ok();
}

Status Tokenizer::State::read_vocabulary(const json& model) {
  const json* vocab = member(model, "vocab");
  if (!vocab || !vocab->is_object()) return bad("'model.vocab' is missing, expected an object from token to id");
  for (const auto& [written, id] : vocab->items()) {
    if (!id.is_number_integer() || id < 0 || id > kIdMax) {
      return bad("'model.vocab' gives {} the id {}, expected an integer from 0 to {}", shown(written), shown(id),
                 kIdMax);
    }
    auto token = to_bytes(written);
    if (!token || token->empty()) {
      return bad("'model.vocab' has the entry {}, expected characters of the byte-level alphabet", shown(written));
    }
    const auto value = id.get<Token>();
    if (token->size() == 1) byte_token[static_cast<unsigned char>(token->front())] = value;
    vocabulary.emplace(*token, value);
    ECHO_TRY(put(value, *std::move(token)));
  }
  return ok();
}

Status Tokenizer::State::read_merges(const json& model) {
  const json* list = member(model, "merges");
  if (!list || !list->is_array()) return bad("'model.merges' is missing, expected a list");
  std::uint32_t rank = 0;
  for (const json& merge : *list) {
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
    const auto left_bytes = to_bytes(left), right_bytes = to_bytes(right);
    if (!left_bytes || !right_bytes || left_bytes->empty() || right_bytes->empty()) {
      return bad("'model.merges' entry {} is {}, expected \"a b\" or [\"a\", \"b\"]", rank, shown(merge));
    }
    const auto left_token = vocabulary.find(*left_bytes), right_token = vocabulary.find(*right_bytes),
               merged_token = vocabulary.find(*left_bytes + *right_bytes);
    if (left_token == vocabulary.end() || right_token == vocabulary.end() || merged_token == vocabulary.end()) {
      return bad("'model.merges' entry {} is {}, whose parts and result must be in 'model.vocab'", rank, shown(merge));
    }
    merges.emplace(pair(left_token->second, right_token->second),
                   Merge{rank, merged_token->second});  // the first of equal pairs counts
    ++rank;
  }
  return ok();
}

Status Tokenizer::State::read_added(const json& root) {
  const json* list = member(root, "added_tokens");
  if (!list) return ok();
  if (!list->is_array()) return bad("'added_tokens' is {}, expected a list", shown(*list));
  for (const json& entry : *list) {
    const json* content = entry.is_object() ? member(entry, "content") : nullptr;
    const json* id = content ? member(entry, "id") : nullptr;
    if (!id || !content->is_string() || content->get_ref<const std::string&>().empty() || !id->is_number_integer() ||
        *id < 0 || *id > kIdMax) {
      return bad("'added_tokens' has {}, expected an object with 'id' and 'content'", shown(entry));
    }
    for (const char* flag : {"single_word", "lstrip", "rstrip"}) {
      if (is_true(entry, flag)) return bad("added token {} sets '{}', which is not implemented", shown(*content), flag);
    }
    AddedToken token{content->get<std::string>(), id->get<Token>(), is_true(entry, "special")};
    ECHO_TRY(put(token.id, token.content));
    special[static_cast<std::size_t>(token.id)] = token.special;
    added[static_cast<unsigned char>(token.content.front())].push_back(std::move(token));
  }
  for (auto& bucket : added) {
    std::stable_sort(bucket.begin(), bucket.end(),
                     [](const AddedToken& a, const AddedToken& b) { return a.content.size() > b.content.size(); });
  }
  return ok();
}

Status Tokenizer::State::read_normalizer(const json& root) {
  const json* normalizer = member(root, "normalizer");
  if (!normalizer) return ok();
  if (!is_type(*normalizer, "NFC")) return bad("'normalizer' is {}, expected NFC or null", shown(*normalizer));
  nfc = true;
  return ok();
}

Status Tokenizer::State::read_pre_tokenizer(const json& root) {
  constexpr std::string_view kExpected = "ByteLevel, optionally after Split and Digits";
  const json* pre = member(root, "pre_tokenizer");
  if (!pre || !pre->is_object()) return bad("'pre_tokenizer' is missing, expected {}", kExpected);
  const json* list = is_type(*pre, "Sequence") ? member(*pre, "pretokenizers") : nullptr;
  const json steps = list ? *list : json::array({*pre});
  bool byte_level = false;
  for (const json& step : steps.is_array() ? steps : json::array()) {
    if (byte_level) return bad("'pre_tokenizer' continues after ByteLevel with {}", shown(step));
    if (is_type(step, "Split")) {
      const json* pattern = member(step, "pattern");
      const json* regex = pattern && pattern->is_object() ? member(*pattern, "Regex") : nullptr;
      if (!regex || !regex->is_string()) return bad("'pre_tokenizer' Split has no pattern.Regex: {}", shown(step));
      const json* behavior = member(step, "behavior");
      if (!behavior || *behavior != "Isolated" || is_true(step, "invert")) {
        return bad("'pre_tokenizer' Split is {}, expected behavior Isolated, not inverted", shown(step));
      }
      ECHO_TRY(compile(regex->get<std::string>()));
    } else if (is_type(step, "Digits")) {
      ECHO_TRY(compile(is_true(step, "individual_digits") ? R"(\p{N})" : R"(\p{N}+)"));
    } else if (is_type(step, "ByteLevel")) {
      byte_level = true;
      if (is_true(step, "add_prefix_space", true))
        return bad("'pre_tokenizer' ByteLevel sets 'add_prefix_space', which is not implemented");
      if (is_true(step, "use_regex", true)) ECHO_TRY(compile(kByteLevelRegex));
    } else {
      return bad("'pre_tokenizer' has {}, expected Split, Digits or ByteLevel", shown(step));
    }
    if (splits.size() > kSplitsMax) return bad("'pre_tokenizer' has more than {} steps", kSplitsMax);
  }
  if (!byte_level) return bad("'pre_tokenizer' is {}, expected {}", shown(*pre), kExpected);
  return ok();
}

// Here ByteLevel only affects offsets, which are not used. TemplateProcessing defines the tokens before a text.
Status Tokenizer::State::read_post_processor(const json& step, bool in_sequence) {
  if (is_type(step, "ByteLevel")) return ok();
  if (const json* list = is_type(step, "Sequence") && !in_sequence ? member(step, "processors") : nullptr;
      list && list->is_array()) {
    for (const json& processor : *list) ECHO_TRY(read_post_processor(processor, true));
    return ok();
  }
  if (!is_type(step, "TemplateProcessing"))
    return bad("'post_processor' is {}, expected ByteLevel or TemplateProcessing", shown(step));
  const json* single = member(step, "single");
  if (!single || !single->is_array()) return bad("'post_processor' TemplateProcessing has no list 'single'");
  for (const json& part : *single) {
    if (part.is_object() && part.contains("Sequence")) return ok();  // later tokens end a text, but a prompt continues
    const json* special = part.is_object() ? member(part, "SpecialToken") : nullptr;
    const json* name = special && special->is_object() ? member(*special, "id") : nullptr;
    const std::optional<Token> token =
        name && name->is_string() ? id_of(name->get_ref<const std::string&>()) : std::nullopt;
    if (!token) return bad("'post_processor' TemplateProcessing names {}, expected a token or a Sequence", shown(part));
    prefix.push_back(*token);
  }
  return ok();
}

namespace {

// PCRE2 counts U+180E as white space, which it was until Unicode 6.3; Hugging Face's regex engine does not. So \s and
// \S are replaced by the property White_Space.
std::string with_white_space(std::string_view regex) {
  constexpr std::string_view kSpaces = R"(\x09-\x0d\x{85}\p{Z})";
  std::string out;
  bool in_class = false;
  for (std::size_t i = 0; i < regex.size(); ++i) {
    const char c = regex[i], next = i + 1 < regex.size() ? regex[i + 1] : '\0';
    if (c == '\\') {
      ++i;
      if (next == 's')
        out += in_class ? std::string(kSpaces) : fmt::format("[{}]", kSpaces);
      else if (next == 'S')
        out += in_class ? R"(\S\x{180e})" : fmt::format("[^{}]", kSpaces);
      else
        out += regex.substr(i - 1, 2);
      continue;
    }
    out += c;
    if (c == ']') in_class = false;
    if (c != '[' || in_class) continue;
    in_class = true;
    if (next == '^') out += regex[++i];
    if (i + 1 < regex.size() && regex[i + 1] == ']') out += regex[++i];  // a literal ]
  }
  return out;
}

}  // namespace

Status Tokenizer::State::compile(const std::string& published) {
  const std::string regex = with_white_space(published);
  int code = 0;
  PCRE2_SIZE offset = 0;
  splits.emplace_back(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(regex.data()), regex.size(), PCRE2_UTF | PCRE2_UCP,
                                    &code, &offset, nullptr));
  if (!splits.back()) {
    std::array<PCRE2_UCHAR, 256> text{};
    pcre2_get_error_message(code, text.data(), text.size());
    return bad("'pre_tokenizer' regex is wrong at offset {}: {}", offset, reinterpret_cast<const char*>(text.data()));
  }
  pcre2_jit_compile(splits.back().get(), PCRE2_JIT_COMPLETE);  // without JIT, the interpreter matches
  return ok();
}

const AddedToken* Tokenizer::State::added_at(std::string_view text) const {
  for (const AddedToken& token : added[static_cast<unsigned char>(text.front())]) {
    if (text.starts_with(token.content)) return &token;
  }
  return nullptr;
}

Status Tokenizer::State::encode_ordinary(std::string_view text, pcre2_match_data* match,
                                         std::vector<Token>& out) const {
  if (text.empty()) return ok();
  std::string normalized;
  if (nfc && std::any_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) >= 0x80; })) {
    normalized = to_nfc(text);
    text = normalized;
  }
  return encode_split(text, 0, match, out);
}

Status Tokenizer::State::encode_split(std::string_view text, std::size_t splits_done, pcre2_match_data* match,
                                      std::vector<Token>& out) const {
  if (splits_done == splits.size()) return encode_piece(text, out);
  const pcre2_code* const split = splits[splits_done].get();
  std::size_t begin = 0;
  while (begin < text.size()) {
    const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data());
    const std::uint32_t options = PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY;
    int result = pcre2_match(split, subject, text.size(), begin, options, match, nullptr);
    if (result == PCRE2_ERROR_JIT_STACKLIMIT) {
      result = pcre2_match(split, subject, text.size(), begin, options | PCRE2_NO_JIT, match, nullptr);
    }
    if (result == PCRE2_ERROR_NOMATCH) return encode_split(text.substr(begin), splits_done + 1, match, out);
    if (result < 0) {
      return fail(Code::kExhausted, "tokenize", "the split regex gives up after byte {} (PCRE2 error {})", begin,
                  result);
    }
    const PCRE2_SIZE* const range = pcre2_get_ovector_pointer(match);
    const std::size_t first = range[0], end = range[1];  // copied, because encoding the pieces reuses `match`
    if (end <= begin || first < begin || end < first) {  // a regex that moves the match start
      return fail(Code::kInvalid, "tokenize", "the split regex of tokenizer.json matches backwards at byte {}", begin);
    }
    if (first > begin) ECHO_TRY(encode_split(text.substr(begin, first - begin), splits_done + 1, match, out));
    ECHO_TRY(encode_split(text.substr(first, end - first), splits_done + 1, match, out));
    begin = end;
  }
  return ok();
}

// Joins the pair of lowest rank, leftmost first, until no pair can be joined.
Status Tokenizer::State::encode_piece(std::string_view piece, std::vector<Token>& out) const {
  if (whole_words) {
    if (const auto word = vocabulary.find(piece); word != vocabulary.end()) {
      out.push_back(word->second);
      return ok();
    }
  }
  struct Symbol {
    Token id;
    std::ptrdiff_t previous, next;  // -1: none
  };
  std::vector<Symbol> symbols;
  symbols.reserve(piece.size());
  bool after_unknown = false;
  for (const char c : piece) {
    const std::optional<Token> known = byte_token[static_cast<unsigned char>(c)], token = known ? known : unknown;
    if (!token && merges.empty()) {  // an alphabet does not fit this text; a vocabulary made from texts drops the byte
      return fail(Code::kInvalid, "tokenize", "the vocabulary has no token for byte 0x{:02x} in {}",
                  static_cast<unsigned char>(c), shown(std::string(piece)));
    }
    const bool fused = fuse_unknown && !known && after_unknown;
    after_unknown = !known;
    if (!token || fused) continue;
    const std::ptrdiff_t at = std::ssize(symbols);
    symbols.push_back({*token, at - 1, at + 1});
  }
  if (symbols.empty()) return ok();
  symbols.back().next = -1;
  const auto at = [&](std::ptrdiff_t i) -> Symbol& { return symbols[static_cast<std::size_t>(i)]; };

  using Candidate = std::tuple<std::uint32_t, std::ptrdiff_t, Token, Token, Token>;  // rank, left, ids, merged
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> queue;
  const auto queue_merge = [&](std::ptrdiff_t left) {
    if (left < 0 || at(left).next < 0) return;
    const Token a = at(left).id, b = at(at(left).next).id;
    if (const auto it = merges.find(pair(a, b)); it != merges.end()) {
      queue.emplace(it->second.rank, left, a, b, it->second.merged);
    }
  };
  if (!merges.empty()) {
    for (std::ptrdiff_t i = 0; i + 1 < std::ssize(symbols); ++i) queue_merge(i);
  }
  constexpr Token kGone = -1;
  while (!queue.empty()) {
    const auto [rank, left, a, b, merged] = queue.top();
    queue.pop();
    const std::ptrdiff_t right = at(left).next;
    if (at(left).id != a || right < 0 || at(right).id != b) continue;  // overtaken by an earlier merge
    at(left).id = merged;
    at(right).id = kGone;
    at(left).next = at(right).next;
    if (at(left).next >= 0) at(at(left).next).previous = left;
    queue_merge(at(left).previous);
    queue_merge(left);
  }
  for (std::ptrdiff_t i = 0; i >= 0; i = at(i).next) out.push_back(at(i).id);
  return ok();
}

Result<Tokenizer> Tokenizer::from_json(std::string text) try {
  const json root = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!root.is_object()) {
    return bad("expected a JSON object, found {}", root.is_discarded() ? "malformed JSON" : root.type_name());
  }
  const json* model = member(root, "model");
  if (!model || !model->is_object()) return bad("'model' is missing, expected an object of type BPE");
  const json* type = member(*model, "type");
  if (type && *type != "BPE") return bad("'model.type' is {}, expected \"BPE\"", shown(*type));
  if (is_true(*model, "byte_fallback")) return bad("'model.byte_fallback' is set, which is not implemented");
  for (const char* affix : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (const json* value = member(*model, affix); value && *value != "") {
      return bad("'model.{}' is {}, expected none", affix, shown(*value));
    }
  }
  if (const json* decoder = member(root, "decoder"); decoder && !is_type(*decoder, "ByteLevel"))
    return bad("'decoder' is {}, expected ByteLevel", shown(*decoder));
  auto state = std::make_shared<State>();
  ECHO_TRY(state->read_vocabulary(*model));
  ECHO_TRY(state->read_merges(*model));
  ECHO_TRY(state->read_added(root));
  ECHO_TRY(state->read_normalizer(root));
  ECHO_TRY(state->read_pre_tokenizer(root));
  if (const json* post = member(root, "post_processor")) ECHO_TRY(state->read_post_processor(*post, false));
  state->whole_words = is_true(*model, "ignore_merges");
  state->fuse_unknown = is_true(*model, "fuse_unk");
  if (const json* unknown = member(*model, "unk_token")) {
    state->unknown = unknown->is_string() ? state->id_of(unknown->get_ref<const std::string&>()) : std::nullopt;
    if (!state->unknown) return bad("'model.unk_token' is {}, expected a token of the vocabulary", shown(*unknown));
  }
  if (state->bytes.empty()) return bad("there are no tokens");
  state->source = std::move(text);
  return Tokenizer(std::move(state));
} catch (const std::exception& e) {
  return bad("{}", e.what());
}

Result<Tokenizer> Tokenizer::from_file(const std::filesystem::path& path) {
  ECHO_ASSIGN(std::string text, read_file(path, 256 << 20));
  auto tokenizer = from_json(std::move(text));
  if (!tokenizer) return fail(tokenizer.error().code, path.string(), "{}", tokenizer.error().detail);
  return tokenizer;
}

namespace {

// The tokenizer.json of a vocabulary without merges, followed by the added tokens.
std::string without_merges(const nlohmann::ordered_json& vocab) {
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
    append_utf8(written, byte_map().character[byte]);
    if (byte >= 0x80 || vocab.contains(written)) {
      return fail(Code::kInvalid, "character tokenizer", "the alphabet has byte 0x{:02x} {}, expected distinct ASCII",
                  byte, byte >= 0x80 ? "outside ASCII" : "twice");
    }
    vocab[written] = vocab.size();
  }
  return from_json(without_merges(vocab));
}

Result<Tokenizer> Tokenizer::bytes() {
  nlohmann::ordered_json vocab = nlohmann::ordered_json::object();
  for (const char32_t character : byte_map().character) {
    std::string written;
    append_utf8(written, character);
    vocab[written] = vocab.size();
  }
  return from_json(without_merges(vocab));
}

Result<std::vector<Token>> Tokenizer::encode(std::string_view text) const try {
  if (text.size() > kTextBytesMax) {
    return fail(Code::kExhausted, "tokenize", "the text has {} bytes, expected at most {}", text.size(), kTextBytesMax);
  }
  if (const auto offset = utf8_error(text)) {
    return fail(Code::kInvalid, "tokenize", "byte {} of the text (0x{:02x}) is not UTF-8", *offset,
                static_cast<unsigned char>(text[*offset]));
  }
  // One match object suffices for all splits, because only the whole match is used.
  const std::unique_ptr<pcre2_match_data, FreeMatch> match(pcre2_match_data_create(1, nullptr));
  if (!match) return fail(Code::kExhausted, "tokenize", "out of memory");
  std::vector<Token> out;
  std::size_t begin = 0;
  for (std::size_t i = 0; i < text.size();) {
    const AddedToken* token = state_->added_at(text.substr(i));
    if (!token) {
      ++i;
      continue;
    }
    ECHO_TRY(state_->encode_ordinary(text.substr(begin, i - begin), match.get(), out));
    out.push_back(token->id);
    begin = i += token->content.size();
  }
  ECHO_TRY(state_->encode_ordinary(text.substr(begin), match.get(), out));
  return out;
} catch (const std::exception& e) {
  return fail(Code::kExhausted, "tokenize", "{}", e.what());
}

std::string Tokenizer::decode(std::span<const Token> tokens, bool skip_special) const {
  std::string out;
  for (const Token token : tokens) {
    if (token < 0 || token >= size() || (skip_special && is_special(token))) continue;
    out += state_->bytes[static_cast<std::size_t>(token)];
  }
  return out;
}

std::optional<Token> Tokenizer::State::id_of(std::string_view text) const {
  if (text.empty()) return std::nullopt;
  for (const AddedToken& token : added[static_cast<unsigned char>(text.front())]) {
    if (token.content == text) return token.id;
  }
  const auto it = vocabulary.find(text);
  return it == vocabulary.end() ? std::nullopt : std::optional(it->second);
}

std::optional<Token> Tokenizer::id(std::string_view text) const { return state_->id_of(text); }
const std::vector<Token>& Tokenizer::prompt_prefix() const { return state_->prefix; }

bool Tokenizer::is_special(Token token) const {
  return token >= 0 && token < size() && state_->special[static_cast<std::size_t>(token)];
}
std::int64_t Tokenizer::size() const { return std::ssize(state_->bytes); }
const std::string& Tokenizer::to_json() const { return state_->source; }

}  // namespace echoline::model

// Translates regular expressions from Oniguruma's syntax to that of PCRE2, and searches with them.
#include "model/text_pattern.hpp"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <array>

#include "model/tokenizer_json.hpp"

namespace echoline::model {
namespace {

using tokenizer_json::invalid;

// Members of a character class for the property White_Space. PCRE2's \s also matches U+180E, which was white space
// until Unicode 6.3.
constexpr std::string_view kSpaces = R"(\x09-\x0d\x{85}\p{Z})";
constexpr std::string_view kMongolianSeparator = R"(\x{180e})";
// The characters of a general category that Unicode 15 and 16 have added. Oniguruma knows them, PCRE2 10.42 does not.
struct NewCharacters {
  std::string_view category;
  std::uint32_t first, last;
};
constexpr NewCharacters kNewCharacters[] = {
    {"Cf", 0x13439, 0x1343f}, {"Ll", 0x1c8a, 0x1c8a},   {"Ll", 0xa7cd, 0xa7cd},   {"Ll", 0xa7db, 0xa7db},
    {"Ll", 0x10d70, 0x10d85}, {"Ll", 0x1df25, 0x1df2a}, {"Lm", 0x10d4e, 0x10d4e}, {"Lm", 0x10d6f, 0x10d6f},
    {"Lm", 0x16d40, 0x16d42}, {"Lm", 0x16d6b, 0x16d6c}, {"Lm", 0x1e030, 0x1e06d}, {"Lm", 0x1e4eb, 0x1e4eb},
    {"Lo", 0x105c0, 0x105f3}, {"Lo", 0x10d4a, 0x10d4d}, {"Lo", 0x10d4f, 0x10d4f}, {"Lo", 0x10ec2, 0x10ec4},
    {"Lo", 0x1123f, 0x11240}, {"Lo", 0x11380, 0x11389}, {"Lo", 0x1138b, 0x1138b}, {"Lo", 0x1138e, 0x1138e},
    {"Lo", 0x11390, 0x113b5}, {"Lo", 0x113b7, 0x113b7}, {"Lo", 0x113d1, 0x113d1}, {"Lo", 0x113d3, 0x113d3},
    {"Lo", 0x11bc0, 0x11be0}, {"Lo", 0x11f02, 0x11f02}, {"Lo", 0x11f04, 0x11f10}, {"Lo", 0x11f12, 0x11f33},
    {"Lo", 0x1342f, 0x1342f}, {"Lo", 0x13441, 0x13446}, {"Lo", 0x13460, 0x143fa}, {"Lo", 0x16100, 0x1611d},
    {"Lo", 0x16d43, 0x16d6a}, {"Lo", 0x18cff, 0x18cff}, {"Lo", 0x1b132, 0x1b132}, {"Lo", 0x1b155, 0x1b155},
    {"Lo", 0x1e4d0, 0x1e4ea}, {"Lo", 0x1e5d0, 0x1e5ed}, {"Lo", 0x1e5f0, 0x1e5f0}, {"Lo", 0x2b739, 0x2b739},
    {"Lo", 0x2ebf0, 0x2ee5d}, {"Lo", 0x31350, 0x323af}, {"Lu", 0x1c89, 0x1c89},   {"Lu", 0xa7cb, 0xa7cc},
    {"Lu", 0xa7da, 0xa7da},   {"Lu", 0xa7dc, 0xa7dc},   {"Lu", 0x10d50, 0x10d65}, {"Mc", 0xcf3, 0xcf3},
    {"Mc", 0x113b8, 0x113ba}, {"Mc", 0x113c2, 0x113c2}, {"Mc", 0x113c5, 0x113c5}, {"Mc", 0x113c7, 0x113ca},
    {"Mc", 0x113cc, 0x113cd}, {"Mc", 0x113cf, 0x113cf}, {"Mc", 0x11f03, 0x11f03}, {"Mc", 0x11f34, 0x11f35},
    {"Mc", 0x11f3e, 0x11f3f}, {"Mc", 0x11f41, 0x11f41}, {"Mc", 0x1612a, 0x1612c}, {"Mn", 0x897, 0x897},
    {"Mn", 0xece, 0xece},     {"Mn", 0x10d69, 0x10d6d}, {"Mn", 0x10efc, 0x10eff}, {"Mn", 0x11241, 0x11241},
    {"Mn", 0x113bb, 0x113c0}, {"Mn", 0x113ce, 0x113ce}, {"Mn", 0x113d0, 0x113d0}, {"Mn", 0x113d2, 0x113d2},
    {"Mn", 0x113e1, 0x113e2}, {"Mn", 0x11f00, 0x11f01}, {"Mn", 0x11f36, 0x11f3a}, {"Mn", 0x11f40, 0x11f40},
    {"Mn", 0x11f42, 0x11f42}, {"Mn", 0x11f5a, 0x11f5a}, {"Mn", 0x13440, 0x13440}, {"Mn", 0x13447, 0x13455},
    {"Mn", 0x1611e, 0x16129}, {"Mn", 0x1612d, 0x1612f}, {"Mn", 0x1e08f, 0x1e08f}, {"Mn", 0x1e4ec, 0x1e4ef},
    {"Mn", 0x1e5ee, 0x1e5ef}, {"Nd", 0x10d40, 0x10d49}, {"Nd", 0x116d0, 0x116e3}, {"Nd", 0x11bf0, 0x11bf9},
    {"Nd", 0x11f50, 0x11f59}, {"Nd", 0x16130, 0x16139}, {"Nd", 0x16d70, 0x16d79}, {"Nd", 0x1ccf0, 0x1ccf9},
    {"Nd", 0x1e4f0, 0x1e4f9}, {"Nd", 0x1e5f1, 0x1e5fa}, {"No", 0x1d2c0, 0x1d2d3}, {"Pd", 0x10d6e, 0x10d6e},
    {"Po", 0x1b4e, 0x1b4f},   {"Po", 0x1b7f, 0x1b7f},   {"Po", 0x113d4, 0x113d5}, {"Po", 0x113d7, 0x113d8},
    {"Po", 0x11b00, 0x11b09}, {"Po", 0x11be1, 0x11be1}, {"Po", 0x11f43, 0x11f4f}, {"Po", 0x16d6d, 0x16d6f},
    {"Po", 0x1e5ff, 0x1e5ff}, {"Sm", 0x10d8e, 0x10d8f}, {"So", 0x2427, 0x2429},   {"So", 0x2ffc, 0x2fff},
    {"So", 0x31e4, 0x31e5},   {"So", 0x31ef, 0x31ef},   {"So", 0x1cc00, 0x1ccef}, {"So", 0x1cd00, 0x1ceb3},
    {"So", 0x1f6dc, 0x1f6dc}, {"So", 0x1f774, 0x1f776}, {"So", 0x1f77b, 0x1f77f}, {"So", 0x1f7d9, 0x1f7d9},
    {"So", 0x1f8b2, 0x1f8bb}, {"So", 0x1f8c0, 0x1f8c1}, {"So", 0x1fa75, 0x1fa77}, {"So", 0x1fa87, 0x1fa89},
    {"So", 0x1fa8f, 0x1fa8f}, {"So", 0x1faad, 0x1faaf}, {"So", 0x1fabb, 0x1fabf}, {"So", 0x1fac6, 0x1fac6},
    {"So", 0x1face, 0x1facf}, {"So", 0x1fada, 0x1fadc}, {"So", 0x1fadf, 0x1fadf}, {"So", 0x1fae8, 0x1fae9},
    {"So", 0x1faf7, 0x1faf8}, {"So", 0x1fbcb, 0x1fbef}};

// Members of a character class: the new characters of the general category `name`, such as Lu, or L for all letters.
std::string new_characters(std::string_view name) {
  std::string ranges;
  for (const auto& [category, first, last] : kNewCharacters)
    if (category.starts_with(name)) ranges += fmt::format(R"(\x{{{:x}}}-\x{{{:x}}})", first, last);
  return ranges;
}

// Members of a character class: the whole general category, as Oniguruma knows it.
std::string with_new_characters(std::string_view name) {
  return fmt::format(R"(\p{{{}}}{})", name, new_characters(name));
}

// Members of a character class for Oniguruma's \w: alphabetic characters, marks, decimal digits and connectors. PCRE2's
// \w also matches other numbers, but no marks.
std::string word_characters() {
  // These ranges are the letters in circles and squares, symbols that count as alphabetic.
  std::string out = R"(\x{24b6}-\x{24e9}\x{1f130}-\x{1f149}\x{1f150}-\x{1f169}\x{1f170}-\x{1f189})";
  for (const char* name : {"L", "M", "Nl", "Nd", "Pc"}) out += with_new_characters(name);
  return out;
}

struct FreePcreMatch {
  void operator()(pcre2_match_data* data) const { pcre2_match_data_free(data); }
};

// Translates one expression. In its comments, the position is that of the next character of the source.
class Translator {
 public:
  explicit Translator(std::string_view source) : source_(source) {}

  Result<std::string> translate() {
    while (position_ < source_.size()) {
      const char c = source_[position_];
      if (c == '\\') {
        translate_escape(translated_);
      } else if (c == '[') {
        ECHO_ASSIGN(const std::string character_class, read_class());
        translated_ += character_class;
      } else {
        // In Oniguruma's syntax the plus of a{1,2}+ repeats the repetition; in that of PCRE2 it forbids backtracking.
        if (c == '+' && position_ > 0 && source_[position_ - 1] == '}' && ends_with_interval())
          return invalid("'Regex' has '}}+' at offset {}, which is not implemented", position_);
        translated_ += c;
        ++position_;
      }
    }
    return std::move(translated_);
  }

 private:
  // The name in \p{name} at the position, if it is a general category; otherwise empty.
  std::string_view category_name() const {
    const std::string_view rest = source_.substr(position_);
    const std::size_t close = rest.find('}');
    if (!rest.starts_with("\\p{") && !rest.starts_with("\\P{")) return {};
    return close == 4 || close == 5 ? rest.substr(3, close - 3) : std::string_view();  // names of one or two letters
  }

  // The members of a character class for the escapes \s, \w and \d; empty for other letters.
  static std::string class_members(char letter) {
    switch (letter) {
      case 's':
        return std::string(kSpaces);
      case 'w':
        return word_characters();
      case 'd':
        return with_new_characters("Nd");
      default:
        return {};
    }
  }

  // Appends to `out` the translation of the escape at the position, outside of classes.
  void translate_escape(std::string& out) {
    const char next = position_ + 1 < source_.size() ? source_[position_ + 1] : '\0';
    if (const std::string_view name = category_name(); !name.empty()) {
      out += fmt::format("[{}{}]", next == 'P' ? "^" : "", with_new_characters(name));
      position_ += 4 + name.size();  // 4: \p{ and }
      return;
    }
    if (const std::string members = class_members(next); !members.empty())
      out += fmt::format("[{}]", members);
    else if (const std::string others = class_members(static_cast<char>(next | 0x20)); !others.empty())  // \S, \W, \D
      out += fmt::format("[^{}]", others);
    else
      out += source_.substr(position_, 2);
    position_ += 2;
  }

  // Whether the text before the position ends with {digits,digits}.
  bool ends_with_interval() const {
    const std::size_t open = source_.substr(0, position_).rfind('{');
    return open != std::string_view::npos && open + 2 < position_ &&
           source_.substr(open + 1, position_ - open - 2).find_first_not_of("0123456789,") == std::string_view::npos;
  }

  // Translates the class [...] at the position. PCRE2 has no intersections, so [a&&[b]] becomes (?:(?=[b])[a]).
  Result<std::string> read_class() {
    std::string out(1, source_[position_++]), condition;
    if (position_ < source_.size() && source_[position_] == '^') out += source_[position_++];
    if (position_ < source_.size() && source_[position_] == ']') out += source_[position_++];  // a literal ]
    for (; position_ < source_.size() && source_[position_] != ']';) {
      const std::string_view rest = source_.substr(position_);
      if (rest.starts_with("[:")) {
        const std::size_t end = rest.find(":]");
        if (end == std::string_view::npos) break;
        out += rest.substr(0, end + 2);
        position_ += end + 2;
      } else if (rest.starts_with("&&[") && !out.starts_with("[^")) {
        position_ += 2;
        if (std::exchange(in_intersection_, true))
          return invalid("'Regex' has an intersection inside another at offset {}, which is not implemented",
                         position_);
        ECHO_ASSIGN(const std::string other, read_class());
        in_intersection_ = false;
        const std::string_view after = source_.substr(std::min(position_, source_.size()));
        if (!after.starts_with("]") && !after.starts_with("&&["))
          return invalid("'Regex' has more after an intersection inside [] at offset {}, which is not implemented",
                         position_);
        condition += fmt::format("(?={})", other);
      } else if (rest.front() == '[' || rest.starts_with("&&")) {
        return invalid("'Regex' has '{}' inside [] at offset {}, expected \\[ or \\& or an intersection such as a&&[b]",
                       rest.substr(0, rest.front() == '[' ? 1 : 2), position_);
      } else if (rest.front() == '\\') {
        const char next = rest.size() > 1 ? rest[1] : '\0';
        if (const std::string_view name = category_name(); next == 'p' && !name.empty()) {
          out += with_new_characters(name);
          position_ += 4 + name.size();
          continue;
        }
        if (next == 'W') return invalid("'Regex' has \\W inside [] at offset {}, which is not implemented", position_);
        if (const std::string members = class_members(next); !members.empty())
          out += members;
        else if (next == 'S')
          out += fmt::format(R"(\S{})", kMongolianSeparator);
        else
          out += rest.substr(0, 2);
        position_ += 2;
      } else {
        out += rest.front();
        ++position_;
      }
    }
    if (position_ < source_.size()) out += source_[position_++];
    return condition.empty() ? out : fmt::format("(?:{}{})", condition, out);
  }

  std::string_view source_;
  std::size_t position_ = 0;
  bool in_intersection_ = false;
  std::string translated_;
};

}  // namespace

Result<TextPattern> TextPattern::regex(const std::string& expression) {
  ECHO_ASSIGN(const std::string translated, Translator(expression).translate());
  int error_code = 0;
  PCRE2_SIZE error_offset = 0;
  // PCRE2_MULTILINE: ^ and $ match at every line, as in Oniguruma's syntax.
  const std::shared_ptr<pcre2_code> compiled(
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                    PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE, &error_code, &error_offset, nullptr),
      [](pcre2_code* owned) { pcre2_code_free(owned); });
  if (!compiled) {
    std::array<PCRE2_UCHAR, 256> text{};
    pcre2_get_error_message(error_code, text.data(), text.size());
    return invalid("'Regex' is {}, a regex that is wrong: {}", tokenizer_json::short_dump(expression),
                   reinterpret_cast<const char*>(text.data()));
  }
  pcre2_jit_compile(compiled.get(), PCRE2_JIT_COMPLETE);  // if this fails, PCRE2's interpreter matches
  return TextPattern({}, compiled);
}

Status TextPattern::find(std::string_view text, std::size_t from, Match& match) const {
  match = {text.size(), text.size()};
  if (!code_) {
    const std::size_t begin = literal_.empty() ? std::string_view::npos : text.find(literal_, from);
    if (begin != std::string_view::npos) match = {begin, begin + literal_.size()};
    return ok();
  }
  // Has room for the range of the whole match, but not for those of groups, which are not used.
  thread_local const std::unique_ptr<pcre2_match_data, FreePcreMatch> match_data(pcre2_match_data_create(1, nullptr));
  if (!match_data) return fail(Code::kExhausted, "tokenize", "out of memory");
  const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  // Texts are UTF-8: Tokenizer::encode() has checked it. An empty match would not advance.
  const std::uint32_t options = PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY;
  int result = pcre2_match(code_.get(), subject, text.size(), from, options, match_data.get(), nullptr);
  if (result == PCRE2_ERROR_JIT_STACKLIMIT)
    result = pcre2_match(code_.get(), subject, text.size(), from, options | PCRE2_NO_JIT, match_data.get(), nullptr);
  if (result == PCRE2_ERROR_NOMATCH) return ok();
  if (result < 0)
    return fail(Code::kExhausted, "tokenize", "a regex of tokenizer.json gives up after byte {} (PCRE2 error {})", from,
                result);
  const PCRE2_SIZE* const range = pcre2_get_ovector_pointer(match_data.get());
  if (range[1] <= range[0] || range[0] < from)  // \K in an expression moves the begin of its match
    return fail(Code::kInvalid, "tokenize", "a regex of tokenizer.json matches backwards at byte {}", from);
  match = {range[0], range[1]};
  return ok();
}

Result<std::string> TextPattern::replace_all(std::string_view text, std::string_view replacement,
                                             std::size_t bytes_max) const {
  std::string out;
  Match match;
  for (std::size_t begin = 0; begin < text.size(); begin = match.end) {
    ECHO_TRY(find(text, begin, match));
    out += text.substr(begin, match.begin - begin);
    if (match.begin < text.size()) out += replacement;
    if (out.size() > bytes_max)
      return fail(Code::kExhausted, "tokenize", "a replacement of tokenizer.json makes a text of more than {} bytes",
                  bytes_max);
  }
  return out;
}

}  // namespace echoline::model

// NFC and UTF-8 against utf8proc's own results for whole texts.
#include "model/unicode.hpp"

#include <gtest/gtest.h>
#include <utf8proc.h>

#include <cstdlib>
#include <vector>

#include "base/random.hpp"

namespace echoline::model {
namespace {

constexpr char32_t kEnd = 0x110000;  // of the characters

bool is_surrogate(char32_t c) { return c >= 0xd800 && c < 0xe000; }

void append(std::string& text, char32_t c) {
  utf8proc_uint8_t bytes[4];
  const auto size = utf8proc_encode_char(static_cast<utf8proc_int32_t>(c), bytes);
  text.append(reinterpret_cast<const char*>(bytes), static_cast<std::size_t>(size));
}

std::string text_of(char32_t c) {
  std::string text;
  append(text, c);
  return text;
}

// The library's normalisation of the whole text.
std::string composed_whole(const std::string& text) {
  utf8proc_uint8_t* composed = nullptr;
  const auto size =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()), static_cast<utf8proc_ssize_t>(text.size()),
                   &composed, static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  EXPECT_GE(size, 0);
  std::string out(reinterpret_cast<const char*>(composed), static_cast<std::size_t>(size));
  std::free(composed);
  return out;
}

TEST(Unicode, NfcComposesOrdersAndDecomposes) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", ""},
      {"plain", "plain"},
      {"e\u0301", "\u00e9"},
      {"\u0301", "\u0301"},  // nothing that it could join
      {"\u0301e\u0301x", "\u0301\u00e9x"},
      {"q\u0307\u0323", "q\u0323\u0307"},       // marks by their class
      {"\u1e0a\u0323", "\u1e0c\u0307"},         // the other mark joins
      {"s\u0323\u0307", "\u1e69"},              // both do
      {"e\u0301\u0302", "\u00e9\u0302"},        // of two of a class the first
      {"\u212b\u2126\u212a", "\u00c5\u03a9K"},  // other names of characters
      {"\u0958", "\u0915\u093c"},               // excluded from composition
      {"\u0915\u093c", "\u0915\u093c"},
      {"\U0001d15e", "\U0001d157\U0001d165"},
      {"\u0344", "\u0308\u0301"},
      {"\u304b\u3099", "\u304c"},
      {"\u1112\u1161\u11ab", "\ud55c"},
      {"\ud558\u11ab", "\ud55c"},
      {"\ud55c\u11ab", "\ud55c\u11ab"},  // that syllable has an end
      {"\uac00\u11a7", "\uac00\u11a7"},  // not the end of a syllable, though it stands before all ends
      {"\u1100\u1161\u11a7", "\uac00\u11a7"},
      {"\u4f60\u597d\u3002e\u0301\U0001f600", "\u4f60\u597d\u3002\u00e9\U0001f600"},
      {"\ufb01\uff21", "\ufb01\uff21"}};  // alike, and not the same
  for (const auto& [text, nfc] : cases) {
    EXPECT_EQ(to_nfc(text), nfc) << text;
    EXPECT_EQ(to_nfc(nfc), nfc) << text;
  }
}

TEST(Unicode, PlainCharactersStayAndJoinNothingBefore) {
  std::vector<char32_t> firsts;  // something joins them
  for (char32_t c = 0; c < kEnd; ++c)
    if (!is_surrogate(c) && utf8proc_get_property(static_cast<utf8proc_int32_t>(c))->combining_class == 0) {
      const std::string text = text_of(c);
      for (const char* mark : {"\u0301", "\u0308", "\u0338", "\u3099", "\u0327", "\u09be", "\u1161", "\u11a8"})
        if (composed_whole(text + mark) != text + mark) {
          firsts.push_back(c);
          break;
        }
    }
  EXPECT_GT(firsts.size(), 500u);
  Random random(3);
  int plain = 0;
  for (char32_t c = 0; c < kEnd; ++c) {
    if (!nfc_keeps(c)) continue;
    ++plain;
    ASSERT_FALSE(is_surrogate(c));
    const std::string text = text_of(c);
    EXPECT_EQ(composed_whole(text), text) << std::hex << static_cast<unsigned>(c);
    EXPECT_EQ(utf8proc_get_property(static_cast<utf8proc_int32_t>(c))->combining_class, 0);
    if (c == 0x11a7) continue;  // which some versions of the library join to a syllable
    for (int i = 0; i < 8; ++i) {
      const std::string before = text_of(firsts[random.below(firsts.size())]);
      EXPECT_EQ(composed_whole(before + text), composed_whole(before) + text) << std::hex << static_cast<unsigned>(c);
    }
  }
  EXPECT_GT(plain, 40'000);
}

TEST(Unicode, NfcInPiecesEqualsNfcOfTheWhole) {
  std::vector<char32_t> marks;
  for (char32_t c = 0; c < kEnd; ++c)
    if (utf8proc_get_property(static_cast<utf8proc_int32_t>(c))->combining_class != 0) marks.push_back(c);
  Random random(4);
  for (int i = 0; i < 100'000; ++i) {
    std::string text;
    for (std::uint64_t k = random.below(14); k > 0; --k) {
      char32_t c = 0;
      switch (random.below(6)) {
        case 0:
          c = static_cast<char32_t>(random.below(0x80));
          break;
        case 1:
          c = marks[random.below(marks.size())];
          break;
        case 2:
          c = 0x300 + static_cast<char32_t>(random.below(0x70));
          break;
        case 3:
          c = 0x1100 + static_cast<char32_t>(random.below(0x100));
          break;
        case 4:
          c = 0xac00 + static_cast<char32_t>(random.below(11172));
          break;
        default:
          c = static_cast<char32_t>(random.below(kEnd));
      }
      append(text, is_surrogate(c) || c == 0x11a7 || is_newer_than_unicode9(c) ? U'x' : c);
    }
    ASSERT_EQ(to_nfc(text), composed_whole(text)) << "text " << i << ": " << text;
  }
}

// U+1E2EC is a mark of class 230 since Unicode 12, U+0334 one of class 1. U+11938 decomposes since Unicode 13.
TEST(Unicode, CharactersNewerThanUnicode9Stay) {
  const std::string newer = "\U0001e2ec", text = "e" + newer + "\u0334\u0301\U00011938";
  for (const NormalForm form : {NormalForm::kNfc, NormalForm::kNfd, NormalForm::kNfkc, NormalForm::kNfkd})
    EXPECT_EQ(to_normal_form(text, form), text);
  EXPECT_EQ(to_nfc("e\u0301" + newer + "e\u0301"), "\u00e9" + newer + "\u00e9");
  EXPECT_EQ(to_nfc(newer + newer), newer + newer);
}

TEST(Unicode, NormalForms) {
  const std::string text = "\u00e9\ufb01\ud55c\uff21";
  EXPECT_EQ(to_normal_form(text, NormalForm::kNfc), text);
  EXPECT_EQ(to_normal_form(text, NormalForm::kNfd), "e\u0301\ufb01\u1112\u1161\u11ab\uff21");
  EXPECT_EQ(to_normal_form(text, NormalForm::kNfkc), "\u00e9fi\ud55cA");
  EXPECT_EQ(to_normal_form(text, NormalForm::kNfkd), "e\u0301fi\u1112\u1161\u11abA");
}

TEST(Unicode, MaximalInvalidPartsAreReplaced) {
  const std::string mark = "\ufffd";
  const std::pair<std::string, std::string> cases[] = {{"", ""},
                                                       {"a\u00e9\u20ac\U0010ffff", "a\u00e9\u20ac\U0010ffff"},
                                                       {"\xff", mark},
                                                       {"a\xe2\x82", "a" + mark},
                                                       {"\xe2\x82(", mark + "("},
                                                       {"\xe2\x28\xa1", mark + "(" + mark},
                                                       {"\xed\xa0\x80", mark + mark + mark},
                                                       {"\xf0\x9f\x98\xf0\x9f\x98\x80", mark + "\U0001f600"},
                                                       {"\xf0\x80\x80", mark + mark + mark},
                                                       {"\xf4\x90\x80\x80", mark + mark + mark + mark},
                                                       {"\xc0\xaf", mark + mark}};
  for (const auto& [bytes, valid] : cases) EXPECT_EQ(to_valid_utf8(bytes), valid);
}

TEST(Unicode, SpacesAndWords) {
  for (const char32_t c : {U' ', U'\n', U'\u0085', U'\u00a0', U'\u2028', U'\u3000'}) EXPECT_TRUE(is_white_space(c));
  for (const char32_t c : {U'a', U'_', U'\u180e', U'\u200b'}) EXPECT_FALSE(is_white_space(c));
  for (const char32_t c : {U'a', U'_', U'7', U'\u0301', U'\u4f60', U'\u24b6', U'\u200d'})
    EXPECT_TRUE(is_word_character(c));
  for (const char32_t c : {U' ', U'-', U'\u00bd', U'\U0001f600'}) EXPECT_FALSE(is_word_character(c));
}

TEST(Unicode, InvalidUtf8IsFound) {
  EXPECT_EQ(utf8_error(""), std::nullopt);
  EXPECT_EQ(utf8_error("a\u00e9\u20ac\U0010ffff"), std::nullopt);
  const std::pair<std::string, std::size_t> wrong[] = {
      {"\x80", 0},         {"a\xff", 1},        {"\u00e9\xc3", 2},        {"ab\xe2\x82", 2},       {"\xc0\x80", 0},
      {"\xe0\x80\x80", 0}, {"\xed\xa0\x80", 0}, {"a\xf4\x90\x80\x80", 1}, {"\xf0\x80\x80\x80", 0}, {"x\xc3z", 1}};
  for (const auto& [text, offset] : wrong) EXPECT_EQ(utf8_error(text), offset) << text;
}

}  // namespace
}  // namespace echoline::model

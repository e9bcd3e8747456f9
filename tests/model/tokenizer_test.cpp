// The tokenizer against cases computed by hand from the published splitting rule and merge order.
#include "model/tokenizer.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/random.hpp"

namespace echoline::model {
namespace {

using nlohmann::json;

// The splitting rule of the Qwen family.
const char* kQwenRegex =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

// Byte-level BPE's form of bytes, by definition: 188 bytes as themselves, the other 68 from U+0100.
std::string written(std::string_view bytes) {
  std::string out;
  for (const char c : bytes) {
    int shifted = 0;
    const int byte = static_cast<unsigned char>(c);
    const auto itself = [](int b) {
      return (b >= '!' && b <= '~') || (b >= 0xa1 && b <= 0xac) || (b >= 0xae && b <= 0xff);
    };
    for (int b = 0; b < byte; ++b) shifted += !itself(b);
    const int code = itself(byte) ? byte : 256 + shifted;
    if (code < 0x80) {
      out += static_cast<char>(code);
    } else {
      out += static_cast<char>(0xc0 | code >> 6);
      out += static_cast<char>(0x80 | (code & 63));
    }
  }
  return out;
}

using Merges = std::vector<std::pair<std::string, std::string>>;

// Bytes are tokens 0 to 255; merge i makes token 256 + i (unless an earlier one made it); then the added tokens.
json qwen_json(const Merges& merges, bool as_pairs = true) {
  json vocab, list = json::array(), added = json::array();
  for (int b = 0; b < 256; ++b) vocab[written(std::string(1, char(b)))] = b;
  int next = 256;
  for (const auto& [a, b] : merges) {
    if (!vocab.contains(written(a + b))) vocab[written(a + b)] = next;
    ++next;
    if (as_pairs)
      list.push_back({written(a), written(b)});
    else
      list.push_back(written(a) + " " + written(b));
  }
  for (const char* content : {"<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>", "<tool>x"}) {
    added.push_back({{"id", 1000 + added.size()},
                     {"content", content},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", std::string_view(content)[1] == '|'}});
  }
  return {{"version", "1.0"},
          {"added_tokens", added},
          {"normalizer", {{"type", "NFC"}}},
          {"pre_tokenizer",
           {{"type", "Sequence"},
            {"pretokenizers",
             {{{"type", "Split"}, {"pattern", {{"Regex", kQwenRegex}}}, {"behavior", "Isolated"}, {"invert", false}},
              {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", false}, {"use_regex", false}}}}}},
          {"post_processor", {{"type", "ByteLevel"}}},
          {"decoder", {{"type", "ByteLevel"}}},
          {"model",
           {{"type", "BPE"},
            {"dropout", nullptr},
            {"unk_token", nullptr},
            {"continuing_subword_prefix", ""},
            {"end_of_word_suffix", ""},
            {"byte_fallback", false},
            {"vocab", vocab},
            {"merges", list}}}};
}

const Merges kMerges = {
    {"n", "'"},  {"1", "2"},  {"h", "e"},  {"l", "l"},       {"he", "ll"},     {"hell", "o"},        {" ", "hello"},
    {"'", "t"},  {"'", "T"},  {"c", "a"},  {"ca", "n"},      {" ", " "},       {" ", "b"},           {"\n", "\n"},
    {" ", "\n"}, {",", "\n"}, {" ", ","},  {"\xc3", "\xa9"}, {"\xe4", "\xbd"}, {"\xe4\xbd", "\xa0"}, {"\xa0", "\xe5"},
    {"!", "!"},  {"(", "a"},  {"\t", "a"}, {"b", "c"},       {"a", "b"},       {"a", "a"},           {"x", "\n"}};

Tokenizer qwen(bool as_pairs = true) {
  auto t = Tokenizer::from_json(qwen_json(kMerges, as_pairs).dump());
  EXPECT_TRUE(t) << (t ? "" : t.error().message());
  return std::move(t).value();
}

struct Case {
  std::string text;
  std::vector<std::string> tokens;
};

TEST(Tokenizer, CasesByHandInBothMergeSyntaxes) {
  const std::vector<Case> cases = {
      {"", {}},
      {"hello hello", {"hello", " hello"}},
      {"can't", {"can", "'t"}},      // never "n'", though its rank is lowest
      {"caN'T", {"ca", "N", "'T"}},  // contractions ignore case
      {"'x", {"'", "x"}},            // not a contraction
      {"12", {"1", "2"}},            // every digit is a piece of its own
      {"a1", {"a", "1"}},
      {"a b", {"a", " b"}},
      {"a  b", {"a", " ", " b"}},  // the last space goes with the word
      {"a   b", {"a", "  ", " b"}},
      {"hi  ", {"h", "i", "  "}},      // nothing follows: one piece
      {"a \n b", {"a", " \n", " b"}},  // spaces and line ends together
      {"x\n\ny", {"x", "\n\n", "y"}},  // never "x\n"
      {",\n", {",\n"}},                // a line end after punctuation belongs to it
      {" ,", {" ,"}},
      {"!!!", {"!!", "!"}},
      {"(a", {"(a"}},  // one leading symbol goes with letters
      {"\ta", {"\ta"}},
      {"\u4f60\u597d", {"\u4f60", "\xe5", "\xa5", "\xbd"}},
      {"\U0001f600", {"\xf0", "\x9f", "\x98", "\x80"}},
      {"e\u0301", {"\u00e9"}},  // NFC composes
      {"\u00e9", {"\u00e9"}},
      {"abc", {"a", "bc"}},  // lower rank first
      {"aaa", {"aa", "a"}},  // leftmost first
      {"aaaa", {"aa", "aa"}},
      {"hello<|im_end|>hello", {"hello", "<|im_end|>", "hello"}},
      {"<|im_end|><|im_end|>", {"<|im_end|>", "<|im_end|>"}},
      {"<tool>xx", {"<tool>x", "x"}},  // the longest added token
      {"<tool>y", {"<tool>", "y"}},
      {"<|im", {"<", "|", "i", "m"}},  // not an added token
      {" <tool> b", {" ", "<tool>", " b"}},
  };
  for (const bool as_pairs : {true, false}) {
    const Tokenizer tokenizer = qwen(as_pairs);
    for (const Case& c : cases) {
      std::vector<Token> want;
      for (const std::string& token : c.tokens) {
        ASSERT_TRUE(tokenizer.id(token)) << token;
        want.push_back(*tokenizer.id(token));
      }
      const auto got = tokenizer.encode(c.text);
      ASSERT_TRUE(got) << got.error().message();
      EXPECT_EQ(*got, want) << c.text;
    }
  }
}

// U+180E, the Mongolian vowel separator, is no White_Space since Unicode 6.3. It is split like punctuation: it neither
// ends a piece nor is a piece of spaces.
TEST(Tokenizer, TheMongolianVowelSeparatorIsNoSpace) {
  const std::string separator = "\u180e";
  // Each merge can happen only where both sides lie in one piece.
  const Tokenizer tokenizer = Tokenizer::from_json(qwen_json({{separator.substr(0, 1), separator.substr(1, 1)},
                                                              {separator.substr(0, 2), separator.substr(2, 1)},
                                                              {separator, "!"},
                                                              {" ", separator},
                                                              {" ", " "}})
                                                       .dump())
                                  .value();
  const auto pieces = [&](const std::string& text) {
    std::vector<std::string> out;
    for (const Token token : tokenizer.encode(text).value()) out.push_back(tokenizer.decode({&token, 1}));
    return out;
  };
  EXPECT_EQ(pieces(separator + "!"), (std::vector<std::string>{separator + "!"}));        // [^\s\p{L}\p{N}]+
  EXPECT_EQ(pieces("  " + separator), (std::vector<std::string>{" ", " " + separator}));  // \s+(?!\S), then the rest
  EXPECT_EQ(pieces("\u3000!").front(), "\xe3") << "an ideographic space is one";
}

TEST(Tokenizer, IdsAreThoseOfTheFile) {
  const Tokenizer tokenizer = qwen();
  EXPECT_EQ(tokenizer.encode("hello 1").value(), (std::vector<Token>{256 + 5, ' ', '1'}));
  EXPECT_EQ(tokenizer.encode("<|im_start|>a<tool>").value(), (std::vector<Token>{1001, 'a', 1003}));
  EXPECT_EQ(tokenizer.id("<|endoftext|>"), 1000);
  EXPECT_EQ(tokenizer.end_of_text(), 1000);
  EXPECT_EQ(tokenizer.id(""), std::nullopt);
  EXPECT_EQ(tokenizer.id("absent"), std::nullopt);
  EXPECT_EQ(tokenizer.size(), 1005);
  EXPECT_TRUE(tokenizer.is_special(1002));
  EXPECT_FALSE(tokenizer.is_special(1003));  // added, not special
  EXPECT_FALSE(tokenizer.is_special(-1));
  EXPECT_FALSE(tokenizer.is_special(1005));
}

TEST(Tokenizer, DecodesBytesAndAddedTokensOnly) {
  const Tokenizer tokenizer = qwen();
  const std::vector<Token> tokens = {1001, 261, -7, 0xe4, 999, 1 << 30, 1003, 1002};
  EXPECT_EQ(tokenizer.decode(tokens), "<|im_start|>hello\xe4<tool><|im_end|>");
  EXPECT_EQ(tokenizer.decode(tokens, true), "hello\xe4<tool>");
}

// A random code point, with letters and spaces more often than by chance.
std::string random_text(Random& random) {
  std::string out;
  const auto length = random.below(60);
  for (std::uint64_t i = 0; i < length; ++i) {
    std::uint64_t c = 0;
    switch (random.below(5)) {
      case 0:
        c = 32 + random.below(95);
        break;
      case 1:
        c = std::string_view(" \n\r\t'e")[random.below(6)];
        break;
      case 2:
        c = random.below(0x800);
        break;
      case 3:
        c = random.below(0xd800);
        break;
      default:
        c = 0xe000 + random.below(0x110000 - 0xe000);
    }
    if (c < 0x80) {
      out += char(c);
    } else if (c < 0x800) {
      out += {char(0xc0 | c >> 6), char(0x80 | (c & 63))};
    } else if (c < 0x10000) {
      out += {char(0xe0 | c >> 12), char(0x80 | (c >> 6 & 63)), char(0x80 | (c & 63))};
    } else {
      out += {char(0xf0 | c >> 18), char(0x80 | (c >> 12 & 63)), char(0x80 | (c >> 6 & 63)), char(0x80 | (c & 63))};
    }
  }
  return out;
}

TEST(Tokenizer, RandomTextComesBack) {
  json j = qwen_json(kMerges);
  j["normalizer"] = nullptr;
  const Tokenizer exact = Tokenizer::from_json(j.dump()).value(), composing = qwen();
  Random random(1);
  for (int i = 0; i < 3000; ++i) {
    const std::string text = random_text(random);
    const auto tokens = exact.encode(text);
    ASSERT_TRUE(tokens) << tokens.error().message();
    EXPECT_EQ(exact.decode(*tokens), text);
    // Encoding composed text again changes nothing.
    const std::string composed = composing.decode(composing.encode(text).value());
    EXPECT_EQ(composing.decode(composing.encode(composed).value()), composed);
  }
}

TEST(Tokenizer, RandomBytesAreEitherTextOrRefused) {
  json j = qwen_json(kMerges);
  j["normalizer"] = nullptr;
  const Tokenizer tokenizer = Tokenizer::from_json(j.dump()).value();
  Random random(2);
  int refused = 0, accepted = 0;
  for (int i = 0; i < 3000; ++i) {
    std::string bytes(random.below(6), '\0');
    for (char& c : bytes) c = char(random.below(4) ? random.below(128) : random.below(256));
    if (const auto tokens = tokenizer.encode(bytes)) {
      ++accepted;
      EXPECT_EQ(tokenizer.decode(*tokens), bytes);
    } else {
      ++refused;
      EXPECT_EQ(tokens.error().code, Code::kInvalid);
    }
  }
  EXPECT_GT(refused, 300);
  EXPECT_GT(accepted, 300);
  for (const char* bad : {"\xff", "a\xc3", "\xed\xa0\x80", "\xc0\x80", "\xf4\x90\x80\x80"}) {
    EXPECT_FALSE(tokenizer.encode(bad));
  }
  EXPECT_NE(tokenizer.encode("ab\xff").error().detail.find("byte 2"), std::string::npos);
}

TEST(Tokenizer, LongPiecesTakeLogLinearTime) {
  const Tokenizer tokenizer = qwen();
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(tokenizer.encode(std::string(400'000, 'a'))->size(), 200'000u);
  EXPECT_EQ(tokenizer.encode(std::string(400'000, ' '))->size(), 200'000u);
  EXPECT_EQ(tokenizer.encode(std::string(400'000, '<'))->size(), 400'000u);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));  // quadratic would take hours
}

TEST(Tokenizer, IsSharedBetweenThreads) {
  const Tokenizer tokenizer = qwen();
  const std::string text = "hello can't 12 \u4f60\u597d e\u0301<|im_end|>\n\n";
  const auto want = tokenizer.encode(text).value();
  std::vector<std::thread> threads;
  std::array<int, 4> wrong{};
  for (std::size_t i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      for (int n = 0; n < 200; ++n) wrong[i] += tokenizer.encode(text).value() != want;
    });
  }
  for (auto& t : threads) t.join();
  EXPECT_EQ(wrong, (std::array<int, 4>{}));
}

void refused(const json& j, const std::string& named) {
  const auto t = Tokenizer::from_json(j.dump());
  ASSERT_FALSE(t) << named;
  EXPECT_EQ(t.error().code, Code::kInvalid);
  EXPECT_NE(t.error().detail.find(named), std::string::npos) << t.error().detail;
}

TEST(Tokenizer, MalformedFilesAreRefusedByName) {
  const json good = qwen_json(kMerges);
  const auto with = [&](const char* pointer, json value) {
    json j = good;
    j[json::json_pointer(pointer)] = std::move(value);
    return j;
  };
  for (const char* text : {"", "{", "[]", "1", "\xff\xfe"}) EXPECT_FALSE(Tokenizer::from_json(text)) << text;
  refused(json::object(), "model");
  refused(with("/model", 1), "model");
  refused(with("/model/type", "Unigram"), "model.type");
  refused(with("/model/byte_fallback", true), "byte_fallback");
  refused(with("/model/unk_token", "<none>"), "unk_token");
  refused(with("/model/end_of_word_suffix", "</w>"), "end_of_word_suffix");
  refused(with("/model/vocab", json::array()), "model.vocab");
  refused(with("/model/vocab/a", -1), "model.vocab");
  refused(with("/model/vocab/a", "x"), "model.vocab");
  refused(with("/model/vocab/a", 1ll << 40), "model.vocab");
  refused(with("/model/vocab/a", 98), "id 98");
  refused(with("/model/merges", nullptr), "model.merges");
  refused(with("/model/merges/0", "nospace"), "entry 0");
  refused(with("/model/merges/3", json::array({"a"})), "entry 3");
  refused(with("/model/merges/3", 7), "entry 3");
  refused(with("/model/merges/3", "q zz"), "entry 3");
  refused(with("/model/merges/3", "q z"), "entry 3");
  refused(with("/added_tokens", 3), "added_tokens");
  refused(with("/added_tokens/0/content", ""), "added_tokens");
  refused(with("/added_tokens/0/id", nullptr), "added_tokens");
  refused(with("/added_tokens/0/id", 65), "id 65");
  refused(with("/normalizer/type", "Lowercase"), "normalizer");
  refused(with("/pre_tokenizer/pretokenizers/0/pattern/Regex", "(unclosed"), "regex");
  refused(with("/pre_tokenizer/pretokenizers/0/pattern", json::object()), "Regex");
  refused(with("/pre_tokenizer/pretokenizers/0/behavior", "Elsewhere"), "Isolated");
  refused(with("/pre_tokenizer/pretokenizers/0/type", "Punctuation"), "expected Split, Digits, Metaspace");
  refused(with("/pre_tokenizer/pretokenizers/0/type", "Metaspace"), "replacement");
  for (const char* regex : {"[a-z&&b]", "[a&&[b]c]", "[a&&[b&&[c]]]", "[a[b]]", "a{1,2}+", R"([\W])"})
    refused(with("/pre_tokenizer/pretokenizers/0/pattern/Regex", regex), "'Regex' has");
  refused(with("/model/dropout", 0.1), "dropout");
  refused(with("/normalizer", {{"type", "Replace"}, {"pattern", "a"}}), "Replace");
  refused(with("/normalizer", {{"type", "Sequence"}, {"normalizers", 1}}), "normalizers");
  refused(with("/normalizer", {{"type", "Prepend"}, {"prepend", std::string(65, 'a')}}), "Prepend");
  refused(with("/decoder", {{"type", "Sequence"}, {"decoders", {{{"type", "Strip"}}}}}), "in this order");
  refused(with("/decoder", {{"type", "Replace"}, {"pattern", {{"Regex", "a"}}}, {"content", ""}}), "String");
  refused(with("/decoder", {{"type", "WordPiece"}}), "expected ByteLevel, Metaspace");
  refused(with("/pre_tokenizer/pretokenizers", json(20, {{"type", "Digits"}, {"individual_digits", true}})), "16");
  refused(with("/decoder/type", "Metaspace"), "decoder");
  refused(with("/post_processor", {{"type", "TemplateProcessing"}}), "post_processor");
  refused(with("/post_processor", {{"type", "RobertaProcessing"}}), "post_processor");
  const json unknown = {{"type", "TemplateProcessing"}, {"single", {{{"SpecialToken", {{"id", "<bos>"}}}}}}};
  refused(with("/post_processor", unknown), "<bos>");
  EXPECT_TRUE(Tokenizer::from_json(good.dump()));
  EXPECT_EQ(Tokenizer::from_file("/nonexistent/tokenizer.json").error().code, Code::kNotFound);
  // Every prefix of a good file is an error, not a crash.
  const std::string text = Tokenizer::characters("01")->to_json();
  for (std::size_t n = 0; n + 3 < text.size(); ++n) EXPECT_FALSE(Tokenizer::from_json(text.substr(0, n))) << n;
}

// The pieces of `text` behind a Split, with "|" between them.
std::string split_by(const std::string& regex, const std::string& behavior, const std::string& text) {
  json j = qwen_json({});
  j["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = regex;
  j["pre_tokenizer"]["pretokenizers"][0]["behavior"] = behavior;
  j["model"]["ignore_merges"] = true;
  for (std::size_t i = 0; i < text.size(); ++i)  // every part of the text is a token
    for (std::size_t n = 2; i + n <= text.size(); ++n)
      j["model"]["vocab"][written(text.substr(i, n))] = 2000 + 100 * i + n;
  const Tokenizer tokenizer = Tokenizer::from_json(j.dump()).value();
  std::string out;
  for (const Token& token : tokenizer.encode(text).value())
    out += (out.empty() ? "" : "|") + tokenizer.decode({&token, 1});
  return out;
}

TEST(Tokenizer, SplitBehaviors) {
  EXPECT_EQ(split_by("[0-9]", "Isolated", "a12b3"), "a|1|2|b|3");
  EXPECT_EQ(split_by("[0-9]", "Removed", "a12b3"), "a|b");
  EXPECT_EQ(split_by("[0-9]", "MergedWithPrevious", "a12b3"), "a1|2|b3");
  EXPECT_EQ(split_by("[0-9]", "MergedWithNext", "a12b3"), "a|1|2b|3");
  EXPECT_EQ(split_by("[0-9]", "Contiguous", "a12b3"), "a|12|b|3");
}

TEST(Tokenizer, RegexesMeanWhatOnigurumaMakesOfThem) {
  EXPECT_EQ(split_by("[a-z&&[^b]]+", "Isolated", "aabcb"), "aa|b|c|b");
  EXPECT_EQ(split_by("[a-z&&[bc]]+", "Isolated", "aabca"), "aa|bc|a");
  EXPECT_EQ(split_by(R"(\w+)", "Isolated", "a_1-b"), "a_1|-|b");
  EXPECT_EQ(split_by(R"([^\w-]+)", "Isolated", "a. b"), "a|. |b");
  EXPECT_EQ(split_by(R"(\D)", "Isolated", "12a3"), "12|a|3");
  EXPECT_EQ(split_by("(?m)^b", "Isolated", "a\nbb"), "a\n|b|b");
  EXPECT_EQ(split_by(R"(\p{Lo}+)", "Isolated", "\U0002ebf0\U0002ebf0!"), "\U0002ebf0\U0002ebf0|!");  // of Unicode 15.1
}

TEST(Tokenizer, FlagsOfAddedTokens) {
  json j = qwen_json({});
  const auto encoded = [&](const char* flag, const std::string& text) {
    json flagged = j;
    flagged["added_tokens"][0][flag] = true;
    const Tokenizer tokenizer = Tokenizer::from_json(flagged.dump()).value();
    return tokenizer.decode(tokenizer.encode(text).value());
  };
  EXPECT_EQ(encoded("lstrip", "a \n<|endoftext|> b"), "a<|endoftext|> b");
  EXPECT_EQ(encoded("rstrip", "a <|endoftext|> \u3000b"), "a <|endoftext|>b");
  j["added_tokens"][0]["content"] = "cat";
  const auto count = [&](const std::string& text) {
    json flagged = j;
    flagged["added_tokens"][0]["single_word"] = true;
    const auto tokens = Tokenizer::from_json(flagged.dump())->encode(text).value();
    return std::count(tokens.begin(), tokens.end(), 1000);
  };
  EXPECT_EQ(count("cat, cat"), 2);
  EXPECT_EQ(count("cats \u00e9cat concat"), 0);
}

TEST(Tokenizer, ByteLevelAloneSplitsLikeGpt2) {
  json j = qwen_json(kMerges);
  j["pre_tokenizer"] = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}};
  const Tokenizer tokenizer = Tokenizer::from_json(j.dump()).value();
  EXPECT_EQ(tokenizer.encode("12").value(), (std::vector<Token>{257}));  // digits stay together
  EXPECT_EQ(tokenizer.encode("can't").value(), (std::vector<Token>{266, 263}));
}

// SmolLM's rule: single digits, then GPT-2's rule between them.
TEST(Tokenizer, DigitsBeforeByteLevel) {
  json j = qwen_json(kMerges);
  const json byte_level = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}};
  const auto with_digits = [&](bool one_by_one) {
    j["pre_tokenizer"] = {{"type", "Sequence"},
                          {"pretokenizers", {{{"type", "Digits"}, {"individual_digits", one_by_one}}, byte_level}}};
    return Tokenizer::from_json(j.dump()).value();
  };
  EXPECT_EQ(with_digits(true).encode("can't 12").value(), (std::vector<Token>{266, 263, ' ', '1', '2'}));
  EXPECT_EQ(with_digits(false).encode("can't 12").value(), (std::vector<Token>{266, 263, ' ', 257}));
  EXPECT_EQ(with_digits(true).encode("\u00b2").value(), (std::vector<Token>{0xc2, 0xb2}));  // numeric, but no digit
}

// Llama 3's rule: a piece that is a token stays whole, and every text begins with a fixed token.
TEST(Tokenizer, WholePiecesAndATokenBeforeEveryPrompt) {
  json j = qwen_json(kMerges);
  j["model"]["vocab"][written("hey")] = 900;  // which no merge makes
  EXPECT_EQ(Tokenizer::from_json(j.dump())->encode("hey").value(), (std::vector<Token>{258, 'y'}));
  j["model"]["ignore_merges"] = true;
  const json begin = {{"SpecialToken", {{"id", "<|im_start|>"}, {"type_id", 0}}}};
  const json end = {{"SpecialToken", {{"id", "<|im_end|>"}, {"type_id", 0}}}};
  const json text = {{"Sequence", {{"id", "A"}, {"type_id", 0}}}};
  const json processor = {{"type", "TemplateProcessing"}, {"single", {begin, text, end}}};
  j["post_processor"] = {{"type", "Sequence"}, {"processors", {{{"type", "ByteLevel"}}, processor}}};
  const Tokenizer tokenizer = Tokenizer::from_json(j.dump()).value();
  EXPECT_EQ(tokenizer.encode("hey hello").value(), (std::vector<Token>{900, 262}));
  EXPECT_EQ(tokenizer.prompt_prefix(), (std::vector<Token>{1001}));
  j["post_processor"] = {{"type", "TemplateProcessing"}, {"single", {text}}};
  EXPECT_TRUE(Tokenizer::from_json(j.dump())->prompt_prefix().empty());
}

TEST(Tokenizer, BytesWithoutATokenAreLeftOutOrUnknown) {
  json j = qwen_json(kMerges);
  j["model"]["vocab"].erase(written("\x04"));
  j["model"]["vocab"].erase(written("\x06"));
  EXPECT_EQ(Tokenizer::from_json(j.dump())
                ->encode("h\x04\x06"
                         "e")
                .value(),
            (std::vector<Token>{'h', 'e'}));
  j["model"]["unk_token"] = "<tool>";
  EXPECT_EQ(Tokenizer::from_json(j.dump())->encode("h\x04\x06").value(), (std::vector<Token>{'h', 1003, 1003}));
  j["model"]["fuse_unk"] = true;
  EXPECT_EQ(Tokenizer::from_json(j.dump())->encode("h\x04\x06").value(), (std::vector<Token>{'h', 1003}));
}

TEST(CharacterTokenizer, EveryCharacterIsOneToken) {
  const Tokenizer tokenizer = Tokenizer::characters(kCharacterAlphabet).value();
  EXPECT_EQ(tokenizer.size(), 99);
  EXPECT_EQ(kCharacterAlphabet.size(), 96u);
  for (std::size_t i = 0; i < kCharacterAlphabet.size(); ++i) {
    EXPECT_EQ(tokenizer.encode(kCharacterAlphabet.substr(i, 1)).value(), std::vector<Token>{Token(i)});
  }
  EXPECT_EQ(tokenizer.encode("12+3 =\n").value(), (std::vector<Token>{18, 19, 12, 20, 1, 30, 0}));
  EXPECT_EQ(tokenizer.encode("1<|endoftext|>").value(), (std::vector<Token>{18, 95 + 1}));
  EXPECT_EQ(tokenizer.end_of_text(), 96);
  EXPECT_TRUE(tokenizer.is_special(96));
  EXPECT_EQ(tokenizer.decode(tokenizer.encode(kCharacterAlphabet).value()), kCharacterAlphabet);
  const auto missing = tokenizer.encode("caf\u00e9");
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, Code::kInvalid);
  EXPECT_NE(missing.error().detail.find("0xc3"), std::string::npos);
  const Tokenizer again = Tokenizer::from_json(tokenizer.to_json()).value();
  EXPECT_EQ(again.encode("a=1 b").value(), tokenizer.encode("a=1 b").value());
  EXPECT_FALSE(Tokenizer::characters("aa"));
  EXPECT_FALSE(Tokenizer::characters("a\x80"));
}

}  // namespace
}  // namespace echoline::model

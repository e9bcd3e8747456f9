// Small tokenizer.json files of today's model families, with the tokens and texts that Hugging Face's tokenizers give
// for them. tests/real/tokenizers --vectors writes them.
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "base/random.hpp"
#include "model/tokenizer.hpp"
#include "model/unicode.hpp"
#include "tests/fuzz/input.hpp"
#include "tests/fuzz/mutated_json.hpp"

namespace echoline::model {
namespace {

using nlohmann::json;

std::vector<std::pair<std::string, json>> families() {
  std::vector<std::pair<std::string, json>> found;
  for (const auto& entry : std::filesystem::directory_iterator("tests/model/tokenizers"))
    found.emplace_back(entry.path().stem().string(), json::parse(read_file(entry.path()).value()));
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  return found;
}

Tokenizer tokenizer_of(const json& family) {
  auto tokenizer = Tokenizer::from_json(family["tokenizer"].dump());
  EXPECT_TRUE(tokenizer) << (tokenizer ? "" : tokenizer.error().message());
  return std::move(tokenizer).value();
}

TEST(TokenizerFamilies, EncodeAndDecodeAsTheirOwnProgram) {
  const auto all = families();
  EXPECT_GE(all.size(), 12u);
  for (const auto& [name, family] : all) {
    const Tokenizer read = tokenizer_of(family), tokenizer = Tokenizer::from_json(read.to_json()).value();
    EXPECT_GT(family["encodings"].size(), 20u) << name;
    for (const json& encoding : family["encodings"]) {
      const auto text = encoding[0].get<std::string>();
      const auto tokens = tokenizer.encode(text);
      ASSERT_TRUE(tokens) << name << ": " << tokens.error().message();
      EXPECT_EQ(*tokens, encoding[1].get<std::vector<Token>>()) << name << ": " << text;
    }
    EXPECT_GT(family["decodings"].size(), 20u) << name;
    for (const json& decoding : family["decodings"]) {
      const auto tokens = decoding[0].get<std::vector<Token>>();
      EXPECT_EQ(tokenizer.decode_text(tokens), decoding[1].get<std::string>()) << name << ": " << decoding[0];
      EXPECT_EQ(tokenizer.decode_text(tokens, true), decoding[2].get<std::string>()) << name << ": " << decoding[0];
    }
  }
}

// A response is decoded token by token: characters may be cut, spaces stay.
TEST(TokenizerFamilies, PartsOfAResponseJoin) {
  for (const auto& [name, family] : families()) {
    const Tokenizer tokenizer = tokenizer_of(family);
    for (const json& decoding : family["decodings"]) {
      const auto tokens = decoding[0].get<std::vector<Token>>();
      std::string joined;
      for (const Token& token : tokens) joined += tokenizer.decode({&token, 1});
      EXPECT_EQ(joined, tokenizer.decode(tokens)) << name;
      const auto whole = decoding[1].get<std::string>();
      if (whole.find("\xef\xbf\xbd") != std::string::npos || name == "metaspace-split") continue;
      EXPECT_TRUE(joined == whole || joined == " " + whole) << name << ": " << joined;
    }
  }
}

json family_of(const std::string& name) {
  for (const auto& [known, family] : families())
    if (known == name) return family;
  ADD_FAILURE() << name;
  return {};
}

// A text that continues others gets no space before it, which the first text gets.
TEST(TokenizerFamilies, AContinuationHasNoSpaceBeforeIt) {
  for (const std::string name : {"mistral", "mistral-metaspace", "metaspace-split"}) {
    const Tokenizer tokenizer = tokenizer_of(family_of(name));
    const auto first = tokenizer.encode("a").value();
    const Token ordinary = tokenizer.id("a").value(), added = tokenizer.id("</s>").value();
    EXPECT_EQ(tokenizer.decode(first), " a") << name;
    EXPECT_EQ(tokenizer.decode(tokenizer.encode("a", ordinary).value()), "a") << name;
    EXPECT_EQ(tokenizer.decode(tokenizer.encode("a", added).value()), name == "mistral-metaspace" ? "a" : " a") << name;
    EXPECT_EQ(tokenizer.decode(tokenizer.encode("a</s>a", ordinary).value()),
              name == "mistral-metaspace" ? "a</s>a" : "a</s> a");
  }
}

TEST(TokenizerFamilies, BytesOfACharacterComeOneByOne) {
  const Tokenizer tokenizer = tokenizer_of(family_of("gemma3"));
  const auto tokens = tokenizer.encode("\U0001f9ff").value();
  ASSERT_EQ(tokens.size(), 4u);
  EXPECT_EQ(tokenizer.decode(tokens), "\U0001f9ff");
  const std::span<const Token> cut = std::span(tokens).first(3);
  EXPECT_EQ(tokenizer.decode(cut), "\xf0\x9f\xa7");
  EXPECT_EQ(tokenizer.decode_text(cut), "\ufffd\ufffd\ufffd");  // one for each byte, as tokenizers
}

TEST(TokenizerFiles, MutatedFilesAreReadOrRefused) {
  Random random(5);
  for (const auto& [name, family] : families()) {
    // Steps and flags matter here, so most of the vocabulary is left out.
    json file = family["tokenizer"];
    json vocab = json::object();
    for (const auto& [token, id] : file["model"]["vocab"].items())
      if (vocab.size() < 40) vocab[token] = vocab.size();
    file["model"]["vocab"] = vocab;
    file["model"]["merges"] = json::array();
    if (file["added_tokens"].size() > 6)
      file["added_tokens"].erase(file["added_tokens"].begin() + 6, file["added_tokens"].end());
    const std::string whole = file.dump();
    for (const json& encoding : family["encodings"]) {
      const auto text = encoding[0].get<std::string>();
      test::fuzz_input(whole + '\0' + text);
      test::fuzz_input(test::mutated_json(whole, random) + '\0' + text);
    }
  }
}

}  // namespace
}  // namespace echoline::model

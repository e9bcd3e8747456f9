// Reads any bytes up to the first NUL as a tokenizer.json, and tokenizes the bytes after it. libFuzzer calls it when
// ECHOLINE_FUZZ is on; tokenizer_files_test calls it on mutated files in every ordinary test run.
#include <cstdint>
#include <string>
#include <string_view>

#include "model/tokenizer.hpp"
#include "model/unicode.hpp"

using namespace echoline;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const std::string file(input.substr(0, input.find('\0')));
  const std::string_view text = file.size() < input.size() ? input.substr(file.size() + 1) : "";
  const auto tokenizer = model::Tokenizer::from_json(file);
  if (!tokenizer) {
    const Code code = tokenizer.error().code;
    ECHO_CHECK(code == Code::kInvalid || code == Code::kExhausted, "{}", tokenizer.error().message());
    return 0;
  }
  ECHO_CHECK(tokenizer->to_json() == file, "the file has changed");
  const auto tokens = tokenizer->encode(text), again = tokenizer->encode(text);
  ECHO_CHECK(tokens.has_value() == again.has_value() && (!tokens || *tokens == *again), "two encodings differ");
  if (!tokens) {
    ECHO_CHECK(tokens.error().code != Code::kInternal, "{}", tokens.error().message());
    return 0;
  }
  std::string joined;
  for (const model::Token& token : *tokens) {
    ECHO_CHECK(token >= 0 && token < tokenizer->size(), "token {} of {}", token, tokenizer->size());
    joined += tokenizer->decode({&token, 1});
  }
  ECHO_CHECK(joined == tokenizer->decode(*tokens), "a text differs from its parts");
  ECHO_CHECK(!model::utf8_error(tokenizer->decode_text(*tokens)), "a whole text is not UTF-8");
  return 0;
}

// Tokenises the lines of its input, for tests/real/tokenizers.
//
//   tokenize_lines tokenizer.json < lines > results
//
// A line is a JSON text to encode, or a JSON list of tokens to decode. The line of the result is the list of tokens, or
// the text with and without special tokens. The program stops if decode() and decode_text() differ in more than the
// begin of a text and bytes that are not UTF-8. Standard error gets the tokens and the seconds of encoding alone.
#include <cstdio>
#include <ctime>
#include <iostream>
#include <nlohmann/json.hpp>

#include "model/tokenizer.hpp"

using echoline::model::Token;
using echoline::model::Tokenizer;
using nlohmann::json;

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fputs("usage: tokenize_lines tokenizer.json < lines > results\n", stderr);
    return 2;
  }
  const auto read = Tokenizer::from_file(argv[1]);
  if (!read) {
    std::fprintf(stderr, "%s\n", read.error().message().c_str());
    return 1;
  }
  // The file as the learner sends it to workers.
  const Tokenizer tokenizer = Tokenizer::from_json(read->to_json()).value();
  std::int64_t token_count = 0;
  std::clock_t time = 0;  // of the processor: other programs may run beside this one
  std::string line, out;
  while (std::getline(std::cin, line)) {
    const json input = json::parse(line);
    if (input.is_string()) {
      const auto& text = input.get_ref<const std::string&>();
      const std::clock_t start = std::clock();
      const auto tokens = tokenizer.encode(text);
      time += std::clock() - start;
      if (!tokens) {
        std::fprintf(stderr, "%s\n", tokens.error().message().c_str());
        return 1;
      }
      token_count += std::ssize(*tokens);
      const std::string decoded = tokenizer.decode_text(*tokens);
      if (decoded.find("\xef\xbf\xbd") == std::string::npos && !tokenizer.decode(*tokens).ends_with(decoded)) {
        std::fprintf(stderr, "two decodings differ: %s\n", line.c_str());
        return 1;
      }
      out = json(*tokens).dump();
    } else {
      const auto tokens = input.get<std::vector<Token>>();
      out = json({tokenizer.decode_text(tokens), tokenizer.decode_text(tokens, true)}).dump();
    }
    out += '\n';
    std::fwrite(out.data(), 1, out.size(), stdout);
  }
  std::fprintf(stderr, "%lld %.6f\n", static_cast<long long>(token_count), static_cast<double>(time) / CLOCKS_PER_SEC);
  return 0;
}

// Finds where a response ends. Without libtorch.
#pragma once
#include <optional>
#include <span>
#include <string>

#include "model/tokenizer.hpp"

namespace echoline::model {

// The number of tokens up to the end of a response, which is one of the tokens `ends` or the token that completes one
// of the strings `stops`. Absent if the response has neither. Only looks for an end after the first `tokens_checked`
// tokens.
std::optional<std::size_t> response_end(const Tokenizer& tokenizer, std::span<const Token> response,
                                        std::span<const Token> ends, std::span<const std::string> stops,
                                        std::size_t tokens_checked = 0);

}  // namespace echoline::model

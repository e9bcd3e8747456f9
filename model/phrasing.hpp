// Forms a model's prompts, and extracts the graded text of responses. Workers, evaluation, warm start and the checks
// before a run use it.
#pragma once
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "model/chat_template.hpp"
#include "model/model_files.hpp"

namespace echoline::model {

inline constexpr std::string_view kPromptPlace = "{prompt}";
inline constexpr std::string_view kObservationPlace = "{observation}";

// The run's settings for prompts.
struct PromptStyle {
  std::string text{kPromptPlace};        // the problem's prompt replaces {prompt}
  bool chat = false;                     // uses the model's chat template, with the prompt as a user's message
  std::string system;                    // system message before the prompt; requires `chat`
  std::string chat_options_json = "{}";  // further variables for the template, such as enable_thinking
  std::vector<std::string> stop = {};    // a response ends when its text contains one of these
  // Without `chat`: the text between two responses. The observation replaces {observation}.
  std::string turn = "\n{observation}\n";
};

// A prompt as a conversation. If its last message is the user's, that becomes `user_format` with {prompt} replaced by
// the message. `system` is put first, unless it is empty or the prompt begins with a system message.
std::vector<ChatMessage> conversation(const PolicyInput& prompt, std::string_view user_format, std::string_view system);

inline constexpr std::size_t kStopsMax = 16, kStopBytesMax = 64;

// Immutable and cheap to copy. Thread-safe.
class Phrasing {
 public:
  // kInvalid: the style's text has no {prompt}, `chat` is set for a model without a chat template, there is a system
  // message without `chat`, or the template is malformed or cannot render a first prompt.
  static Result<Phrasing> make(const ModelFiles& files, const PromptStyle& style);
  // Makes a copy of another process's Phrasing, from its tokenizer, its ending tokens and its prompt_json().
  static Result<Phrasing> from_parts(Tokenizer tokenizer, std::vector<Token> eos, std::string_view prompt_json);
  std::string prompt_json() const;

  // The prompt as text and as tokens. kInvalid if the template or the tokenizer refuses the problem.
  Result<std::string> prompt_text(const PolicyInput& problem) const;
  Result<std::vector<Token>> prompt(const PolicyInput& problem) const;
  // The tokens between a response and the next one: the observation, in a chat as its messages or as a user's message
  // with its text. The earlier tokens do not change. `response` is the previous response with its ending token.
  // kInvalid if the template or the tokenizer refuses the observation.
  Result<std::vector<Token>> follow_up(std::span<const Token> response, const PolicyInput& observation) const;
  // The number of tokens of a response up to its end, which is an ending token or the token that completes a stop
  // string. Absent if it has neither. Only looks for an end after the first `tokens_checked` tokens.
  std::optional<std::size_t> response_end(std::span<const Token> response, std::size_t tokens_checked = 0) const;
  // The part of a response that is graded, as text: up to its end, without the ending token, with the stop string.
  std::string answer(std::span<const Token> response) const;

  const Tokenizer& tokenizer() const { return tokenizer_; }
  const std::vector<Token>& eos() const { return eos_; }
  const std::vector<std::string>& stop() const { return stop_; }

 private:
  Phrasing(Tokenizer tokenizer, std::vector<Token> eos) : tokenizer_(std::move(tokenizer)), eos_(std::move(eos)) {}
  Tokenizer tokenizer_;
  std::vector<Token> eos_;
  std::vector<std::string> stop_;
  std::string prompt_format_, observation_format_ = PromptStyle().turn, system_, variables_json_;
  std::string template_text_;
  std::optional<ChatTemplate> template_;  // absent: prompts are formed by prompt_format_ alone
};

}  // namespace echoline::model

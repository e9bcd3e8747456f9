// Renders the chat template of a Hugging Face tokenizer: the part of Jinja that such templates use.
//
// Implemented:
// - tags: if, elif, else; for with else, if, break, continue and loop; set; macro; generation, which prints its body;
// - white-space control and comments;
// - literals, attributes, indices, slices, arithmetic, comparisons, in, and, or, not, a if b else c, ~;
// - namespace(), range(), raise_exception(), whose call is an error, and the tests, filters and methods named in
//   chat_template.cpp;
// - strftime_now(), which formats the date in the variable strftime_now ("YYYY-MM-DD"), and is an error without it. The
//   present date is not used, because a prompt must be the same everywhere and at any time.
// Any other construct is an error that names it and its line: a tag when the template is parsed, the rest when it is
// evaluated.
#pragma once
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/policy_input.hpp"
#include "base/result.hpp"

namespace echoline::model {

// Immutable and cheap to copy. Thread-safe.
class ChatTemplate {
 public:
  static Result<ChatTemplate> parse(std::string_view text);

  // The text of a conversation, with the start of the answer if `add_generation_prompt`. `variables_json` is an object
  // of further variables, such as bos_token or enable_thinking, or "" for none. kInvalid for a mistake in the template,
  // kExhausted if it takes too many steps or too much memory.
  Result<std::string> render(const std::vector<ChatMessage>& messages, bool add_generation_prompt,
                             std::string_view variables_json) const;

 private:
  struct Tree;
  explicit ChatTemplate(std::shared_ptr<const Tree> tree) : tree_(std::move(tree)) {}
  std::shared_ptr<const Tree> tree_;
};

}  // namespace echoline::model

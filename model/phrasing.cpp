#include "model/phrasing.hpp"

#include <nlohmann/json.hpp>

#include "model/response.hpp"

namespace echoline::model {
namespace {

using nlohmann::ordered_json;

template <class... Args>
Error bad(fmt::format_string<Args...> format, Args&&... args) {
  return fail(Code::kInvalid, "prompt", format, std::forward<Args>(args)...);
}

}  // namespace

Result<Phrasing> Phrasing::make(const ModelFiles& files, const PromptStyle& style) {
  if (style.chat && !files.chat_template)
    return bad("task.chat is set, but the model has no chat template: neither chat_template.jinja nor 'chat_template' in "
               "tokenizer_config.json");
  if (!style.system.empty() && !style.chat) return bad("task.system needs task.chat: only a chat has a system message");
  ordered_json variables = ordered_json::parse(files.special_tokens_json, nullptr, false);
  const ordered_json options = ordered_json::parse(style.chat_options_json, nullptr, false);
  if (!options.is_object()) return bad("task.chat_options is {}, expected names and values", options.dump());
  if (!options.empty() && !style.chat) return bad("task.chat_options needs task.chat");
  variables.update(options);
  ordered_json parts = {{"text", style.text}};
  if (style.chat) {
    parts["chat_template"] = *files.chat_template;
    parts["system"] = style.system;
    parts["variables"] = variables;
  }
  ECHO_ASSIGN(Phrasing phrasing, from_parts(files.tokenizer, files.eos,
                                            parts.dump(-1, ' ', false, ordered_json::error_handler_t::replace)));
  ECHO_TRY(phrasing.prompt_text("1+1="));  // a template that cannot work is found before a run begins
  return phrasing;
}

Result<Phrasing> Phrasing::from_parts(Tokenizer tokenizer, std::vector<Token> eos, std::string_view prompt_json) {
  if (eos.empty()) return bad("no token ends a text: neither config.json, generation_config.json nor the tokenizer names one");
  Phrasing phrasing(std::move(tokenizer), std::move(eos));
  const ordered_json parts = ordered_json::parse(prompt_json, nullptr, false);
  const auto text = [&](const char* key, std::string& into) {
    const bool found = parts.is_object() && parts.contains(key) && parts[key].is_string();
    if (found) into = parts[key].get<std::string>();
    return found;
  };
  if (!text("text", phrasing.text_)) return bad("expected an object with 'text', found {}", prompt_json.substr(0, 80));
  if (phrasing.text_.find(kPromptPlace) == std::string::npos)
    return bad("task.prompt is '{}', expected a text with {} where the problem goes", phrasing.text_.substr(0, 200),
               kPromptPlace);
  if (!text("chat_template", phrasing.template_text_)) return phrasing;
  text("system", phrasing.system_);
  if (parts.contains("variables") && parts["variables"].is_object())
    phrasing.variables_json_ = parts["variables"].dump(-1, ' ', false, ordered_json::error_handler_t::replace);
  ECHO_ASSIGN(phrasing.template_, ChatTemplate::parse(phrasing.template_text_));
  return phrasing;
}

std::string Phrasing::prompt_json() const {
  ordered_json parts = {{"text", text_}};
  if (template_) {
    parts["chat_template"] = template_text_;
    parts["system"] = system_;
    parts["variables"] = ordered_json::parse(variables_json_, nullptr, false);
  }
  return parts.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
}

Result<std::string> Phrasing::prompt_text(std::string_view problem) const {
  std::string text;
  std::size_t begin = 0;
  for (std::size_t at; (at = text_.find(kPromptPlace, begin)) != std::string::npos; begin = at + kPromptPlace.size())
    text += text_.substr(begin, at - begin) + std::string(problem);
  text += text_.substr(begin);
  if (!template_) return text;
  std::vector<ChatMessage> messages;
  if (!system_.empty()) messages.push_back({"system", system_});
  messages.push_back({"user", std::move(text)});
  return template_->render(messages, /*add_generation_prompt=*/true, variables_json_);
}

Result<std::vector<Token>> Phrasing::prompt(std::string_view problem) const {
  ECHO_ASSIGN(const std::string text, prompt_text(problem));
  return tokenizer_.encode(text);
}

std::string Phrasing::answer(std::span<const Token> response) const {
  return response_text(tokenizer_, response, eos_);
}

}  // namespace echoline::model

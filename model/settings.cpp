#include "model/settings.hpp"

#include "base/config.hpp"

namespace echoline::model {

void read(ConfigSection s, ModelSettings& c) {
  s.read("preset", c.preset, "a new model, initialised from the seed; `echoline model init --help` lists the presets");
  s.read("path", c.path, "a Hugging Face directory: config.json, safetensors and tokenizer.json");
  if (c.preset.has_value() == c.path.has_value())
    s.error("", "expected exactly one of 'preset' (a new model) and 'path' (a Hugging Face directory)");
}

void read_prompts(ConfigSection s, PromptStyle& c) {
  s.read("prompt", c.text, "text around a problem; {prompt} is the place of the problem");
  if (c.text.find("{prompt}") == std::string::npos)
    s.error("prompt", fmt::format("expected a text with {{prompt}} in the place of the problem, found '{}'", c.text));
  s.read("turn", c.turn, "without `chat`: text around the observation between two turns; {observation} is its place");
  if (c.turn.find("{observation}") == std::string::npos)
    s.error("turn", fmt::format("expected a text with {{observation}} in its place, found '{}'", c.turn));
  s.read("chat", c.chat,
         "use the model's chat template: the prompt becomes a user's message, followed by the start of an answer");
  s.read("system", c.system, "a message before the prompt; requires `chat`");
  c.chat_options_json = s.json("chat_options", "further names for the chat template, such as {enable_thinking: false}");
  if (!c.system.empty() && !c.chat) s.error("system", "is a message of a chat: set task.chat as well");
  if (c.chat_options_json != "{}" && !c.chat) s.error("chat_options", "are for a chat: set task.chat as well");
}

void read_stop(ConfigSection s, PromptStyle& c) {
  s.read("stop", c.stop,
         {"a response ends when its text contains one of these, such as [\"</answer>\"]; it stays part of the text",
          "none"});
  for (const std::string& stop : c.stop)
    if (stop.empty() || stop.size() > kStopBytesMax || c.stop.size() > kStopsMax)
      s.error("stop", fmt::format("expected at most {} texts of 1 to {} bytes, found {} of them, one '{}'", kStopsMax,
                                  kStopBytesMax, c.stop.size(), stop));
}

}  // namespace echoline::model

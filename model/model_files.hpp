// What a Hugging Face directory holds beside the weights: the shape, the tokenizer, how to generate. Free of libtorch.
#pragma once
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "model/config.hpp"
#include "model/tokenizer.hpp"

namespace echoline::model {

struct ModelFiles {
  ModelConfig config;
  Tokenizer tokenizer;
  // Whatever ends a text: the ids of generation_config.json and of config.json, else the tokenizer's end of text. The
  // first is what a demonstration is ended with.
  std::vector<Token> eos;
  std::optional<std::string> chat_template;    // Jinja
  std::string special_tokens_json = "{}";      // bos_token, eos_token, ... by name, as a chat template sees them
  std::map<std::string, std::string> content;  // of every file, by name; what write() writes

  // Those of an existing directory. kNotFound or kInvalid name the file and the field.
  static Result<ModelFiles> read(const std::filesystem::path& folder);
  // Those of a new model, as transformers and vLLM load them.
  static Result<ModelFiles> make(const ModelConfig& config, const Tokenizer& tokenizer);
  // The preset of that name with the tokenizer that belongs to it.
  static Result<ModelFiles> of_preset(std::string_view name);

  // config.json comes last: a directory that has it is complete.
  Status write(const std::filesystem::path& folder) const;
};

// Makes `to` a directory with the files of `from`, all at once: as hard links where `link` and the file system allow
// it, otherwise as copies. What `to` was before is replaced when `link`; without it an existing `to` is kInvalid.
Status place_directory(const std::filesystem::path& from, const std::filesystem::path& to, bool link);

}  // namespace echoline::model

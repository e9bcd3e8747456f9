// The files of a Hugging Face directory other than weights: shape, tokenizer, generation settings. Without libtorch.
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
  // All tokens that end a text: the ids of generation_config.json and config.json or, if they have none, the
  // tokenizer's end of text. The first one is appended to demonstrations.
  std::vector<Token> eos;
  std::optional<std::string> chat_template;    // Jinja
  std::string special_tokens_json = "{}";      // bos_token, eos_token, ... by name, for chat templates
  std::map<std::string, std::string> content;  // all files by name, as written by write()

  // Reads an existing directory. kNotFound or kInvalid name the file and the field.
  static Result<ModelFiles> read(const std::filesystem::path& folder, ModelUse use = ModelUse::kCompute);
  // Makes the files of a new model in the form that transformers and vLLM load.
  static Result<ModelFiles> make(const ModelConfig& config, const Tokenizer& tokenizer);
  // The files of a preset (model/config.hpp) with its tokenizer.
  static Result<ModelFiles> of_preset(std::string_view name);

  // The files except config.json and tokenizer.json.
  std::map<std::string, std::string> side_files() const;

  // Writes config.json last: a directory that has it is complete.
  Status write(const std::filesystem::path& folder) const;
};

// Atomically makes `to` a directory with the files of `from`. With `link`, the files are hard links if the file system
// allows it, and an existing `to` is replaced. Otherwise they are copies, and an existing `to` is kInvalid.
Status place_directory(const std::filesystem::path& from, const std::filesystem::path& to, bool link);

}  // namespace echoline::model

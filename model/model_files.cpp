// Reads, completes and writes the files of a model directory, and puts directories in place atomically.
#include "model/model_files.hpp"

#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "base/os_code.hpp"

namespace echoline::model {
namespace {

using nlohmann::ordered_json;
namespace fs = std::filesystem;

constexpr const char *kConfig = "config.json", *kGeneration = "generation_config.json", *kTokenizer = "tokenizer.json",
                     *kTokenizerConfig = "tokenizer_config.json", *kChatTemplate = "chat_template.jinja";
// Tokenizer files that are copied unchanged.
constexpr const char* kCopiedFiles[] = {kTokenizerConfig, kChatTemplate, "special_tokens_map.json",
                                        "added_tokens.json"};
constexpr std::uint64_t kFileBytesMax = 16 << 20;

// ChatML, the Qwen family's convention, for models without a template whose tokenizer has its marks.
constexpr const char* kChatMlTemplate =
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

// The JSON object in the file `name`; an empty object if there is no such file.
Result<ordered_json> parse_object(const std::map<std::string, std::string>& content, const char* name) {
  const auto it = content.find(name);
  if (it == content.end()) return ordered_json::object();
  ordered_json root = ordered_json::parse(it->second, nullptr, /*allow_exceptions=*/false);
  if (!root.is_object()) return fail(Code::kInvalid, name, "expected a JSON object");
  return root;
}

// Adds the ids of eos_token_id (an integer or a list) to `eos`, each once.
Status add_eos(const ordered_json& root, const char* file, const ModelConfig& config, std::vector<Token>& eos) {
  const auto it = root.find("eos_token_id");
  if (it == root.end() || it->is_null()) return ok();
  for (const auto& value : it->is_array() ? *it : ordered_json::array({*it})) {
    if (!value.is_number_integer() || value < 0 || value >= config.vocab_size)
      return fail(Code::kInvalid, file, "'eos_token_id' contains {}, expected token ids below 'vocab_size' {}",
                  value.dump(), config.vocab_size);
    const auto token = value.get<Token>();
    if (std::find(eos.begin(), eos.end(), token) == eos.end()) eos.push_back(token);
  }
  return ok();
}

// Reads the chat settings of tokenizer_config.json and chat_template.jinja.
Status read_chat(ModelFiles& files) {
  ECHO_ASSIGN(const ordered_json root, parse_object(files.content, kTokenizerConfig));
  ordered_json special_tokens = ordered_json::object();
  for (const char* name :
       {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"}) {
    const auto it = root.find(name);
    if (it == root.end()) continue;
    if (it->is_string()) special_tokens[name] = *it;
    if (it->is_object() && it->contains("content") && it->at("content").is_string())
      special_tokens[name] = it->at("content");
  }
  files.special_tokens_json =
      special_tokens.dump(-1, ' ', /*ensure_ascii=*/false, ordered_json::error_handler_t::replace);
  if (const auto file = files.content.find(kChatTemplate); file != files.content.end()) {
    files.chat_template = file->second;
    return ok();
  }
  const auto it = root.find("chat_template");
  if (it == root.end() || it->is_null()) return ok();
  if (it->is_string()) files.chat_template = it->get<std::string>();
  for (const auto& named : it->is_array() ? *it : ordered_json::array()) {  // several templates, by name
    const bool is_default = named.is_object() && named.value("name", ordered_json()) == "default";
    if (is_default && named.contains("template") && named["template"].is_string())
      files.chat_template = named["template"].get<std::string>();
  }
  if (!files.chat_template)
    return fail(Code::kInvalid, kTokenizerConfig,
                "'chat_template' is neither a text nor a list with one named 'default'");
  return ok();
}

// Changes config.json to bf16, the type of the weights that this program writes, unless the model is only carried. Adds
// all tokens that end a text to generation_config.json.
Status complete_files(ModelFiles& files) {
  if (files.config.family != Family::kCarried) {
    ECHO_ASSIGN(ordered_json config, parse_object(files.content, kConfig));
    config[config.contains("dtype") ? "dtype" : "torch_dtype"] = "bfloat16";  // newer files have the first name
    files.content[kConfig] = config.dump(2) + "\n";
  }
  ECHO_ASSIGN(ordered_json generation, parse_object(files.content, kGeneration));
  if (generation.empty()) generation["do_sample"] = true;  // Hugging Face's default is greedy decoding
  if (files.eos.size() == 1) generation["eos_token_id"] = files.eos.front();
  if (files.eos.size() > 1) generation["eos_token_id"] = files.eos;
  files.content[kGeneration] = generation.dump(2) + "\n";
  return ok();
}

// A tokenizer_config.json for a model without one.
std::string tokenizer_config(const ModelConfig& config, const Tokenizer& tokenizer) {
  ordered_json root = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                       {"model_max_length", config.positions_max},
                       {"clean_up_tokenization_spaces", false}};
  if (tokenizer.end_of_text()) root["eos_token"] = root["pad_token"] = kEndOfText;
  if (tokenizer.id(kChatStart) && tokenizer.id(kChatEnd)) root["chat_template"] = kChatMlTemplate;
  return root.dump(2) + "\n";
}

}  // namespace

Result<ModelFiles> ModelFiles::read(const fs::path& folder, ModelUse use) {
  ECHO_ASSIGN(ModelConfig config, ModelConfig::from_folder(folder, use));
  ECHO_ASSIGN(Tokenizer tokenizer, Tokenizer::from_file(folder / kTokenizer));
  if (tokenizer.size() > config.vocab_size)
    return fail(Code::kInvalid, folder.string(), "tokenizer.json has ids up to {}, but config.json's vocab_size is {}",
                tokenizer.size() - 1, config.vocab_size);
  ModelFiles files{.config = std::move(config),
                   .tokenizer = std::move(tokenizer),
                   .eos = {},
                   .chat_template = {},
                   .special_tokens_json = "{}",
                   .content = {}};
  files.content[kTokenizer] = files.tokenizer.to_json();
  ECHO_ASSIGN(files.content[kConfig], read_file(folder / kConfig, kFileBytesMax));
  std::vector<const char*> optional_files(std::begin(kCopiedFiles), std::end(kCopiedFiles));
  optional_files.push_back(kGeneration);
  for (const char* name : optional_files) {
    if (!fs::exists(folder / name)) continue;
    ECHO_ASSIGN(files.content[name], read_file(folder / name, kFileBytesMax));
  }
  // An error whose operation is a file name becomes one that names the whole path.
  const auto in_folder = [&](const Error& error) {
    return fail(error.code, (folder / error.operation).string(), "{}", error.detail);
  };
  for (const char* name : {kGeneration, kConfig}) {
    const auto root = parse_object(files.content, name);
    if (!root) return in_folder(root.error());
    if (const Status added = add_eos(*root, name, files.config, files.eos); !added) return in_folder(added.error());
  }
  if (files.eos.empty() && files.tokenizer.end_of_text()) files.eos = {*files.tokenizer.end_of_text()};
  if (const Status chat = read_chat(files); !chat) return in_folder(chat.error());
  ECHO_TRY(complete_files(files));
  if (!files.content.contains(kTokenizerConfig))
    files.content[kTokenizerConfig] = tokenizer_config(files.config, files.tokenizer);
  return files;
}

Result<ModelFiles> ModelFiles::make(const ModelConfig& config, const Tokenizer& tokenizer) {
  ModelFiles files{.config = config,
                   .tokenizer = tokenizer,
                   .eos = config.eos,
                   .chat_template = {},
                   .special_tokens_json = "{}",
                   .content = {}};
  if (files.eos.empty() && tokenizer.end_of_text()) files.eos = {*tokenizer.end_of_text()};
  files.content[kConfig] = config.to_json();
  files.content[kTokenizer] = tokenizer.to_json();
  files.content[kTokenizerConfig] = tokenizer_config(config, tokenizer);
  ECHO_TRY(read_chat(files));
  ECHO_TRY(complete_files(files));
  return files;
}

Result<ModelFiles> ModelFiles::of_preset(std::string_view name) {
  ECHO_ASSIGN(ModelConfig config, preset(name));
  const bool has_byte_tokens = !name.starts_with("tiny-");
  ECHO_ASSIGN(const Tokenizer tokenizer,
              has_byte_tokens ? Tokenizer::bytes() : Tokenizer::characters(kCharacterAlphabet));
  // A preset of a published shape has the ids of the published tokenizer, which is not used here.
  config.eos = {*tokenizer.end_of_text()};
  return make(config, tokenizer);
}

namespace {

Status sync_to_disk(const fs::path& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0 || ::fsync(file.get()) != 0) return os_error("sync", path);
  return ok();
}

}  // namespace

Status place_directory(const fs::path& from, const fs::path& target, bool link) {
  constexpr auto kOperation = "write model directory";
  const fs::path to = target.has_filename() ? target : target.parent_path();  // removes a trailing slash
  if (!link && fs::exists(to))
    return fail(Code::kInvalid, kOperation, "{} exists already; choose another folder", to.string());
  fs::path temporary = to;
  temporary += ".writing";
  std::error_code error;
  fs::remove_all(temporary, error);
  ECHO_TRY(make_folders(temporary));
  for (fs::directory_iterator it(from, error), end; !error && it != end; it.increment(error)) {
    const fs::path file = temporary / it->path().filename();
    if (link) {
      fs::create_hard_link(it->path(), file, error);
      if (!error) continue;  // otherwise a copy, for example if the folders are on two file systems
    }
    if (!fs::copy_file(it->path(), file, error)) break;
    ECHO_TRY(sync_to_disk(file));
  }
  if (error) {
    const std::error_code copy_error = error;
    fs::remove_all(temporary, error);
    return fail(os_code(copy_error.value()), kOperation, "{} from {}: {}", to.string(), from.string(),
                copy_error.message());
  }
  ECHO_TRY(sync_to_disk(temporary));
  const bool is_exchanged = ::renameat2(AT_FDCWD, temporary.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) == 0;
  if (!is_exchanged) {                    // `to` does not exist, or the file system cannot exchange directories
    if (link) fs::remove_all(to, error);  // without `link`, it does not exist
    fs::rename(temporary, to, error);
    if (error) return fail(Code::kIo, kOperation, "{}: {}", to.string(), error.message());
  }
  fs::remove_all(temporary, error);  // after an exchange, it is the directory that was replaced
  return sync_to_disk(fs::absolute(to).parent_path());
}

std::map<std::string, std::string> ModelFiles::side_files() const {
  std::map<std::string, std::string> files = content;
  files.erase(kConfig);
  files.erase(kTokenizer);
  return files;
}

Status ModelFiles::write(const fs::path& folder) const {
  for (const auto& [name, text] : content)
    if (name != kConfig) ECHO_TRY(write_file_atomic(folder / name, text));
  return write_file_atomic(folder / kConfig, content.at(kConfig));
}

}  // namespace echoline::model

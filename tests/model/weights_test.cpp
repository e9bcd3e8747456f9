// Policies in and out of a transformer, and Hugging Face directories on disk.
#include "model/weights.hpp"

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "delta/checkpoint.hpp"
#include "delta/digest.hpp"
#include "helpers.hpp"
#include "model/generate.hpp"
#include "tests/delta/in_memory.hpp"

namespace echoline::model {
namespace {

namespace fs = std::filesystem;
using torch::Tensor;

class Folder : public testing::Test {
 protected:
  void SetUp() override {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    folder_ = fs::temp_directory_path() / fmt::format("echoline-model-{}-{}", ::getpid(), test->name());
    fs::remove_all(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  fs::path folder_;
};

bool same_weights(const Transformer& a, const Transformer& b) {
  const auto theirs = b.named_parameters();
  for (const auto& item : a.named_parameters()) {
    if (!torch::equal(item.value(), theirs[item.key()])) return false;
  }
  return true;
}

ModelConfig character_config(bool tied) {
  ModelConfig c = small_config(tied);
  c.vocab_size = 99;  // the character tokenizer
  c.eos = {96};
  return c;
}
Tokenizer characters() { return Tokenizer::characters(kCharacterAlphabet).value(); }

// Saves a random model and returns it.
std::shared_ptr<Transformer> saved(const fs::path& folder, bool tied, Bytes shard = {5'000'000'000}) {
  const auto model = random_model(character_config(tied), 31);
  const auto policy = export_policy(*model).value();
  auto files = ModelFiles::make(model->config(), characters()).value();
  files.content["generation_config.json"] = R"({"eos_token_id": [98, 96], "top_p": 0.9})";
  const Status status = save_model(folder, files, policy.view(), shard);
  EXPECT_TRUE(status) << (status ? "" : status.error().message());
  return model;
}

std::string failure(const fs::path& folder, Code code) {
  const auto loaded = load_model(folder);
  if (loaded) return "loaded";
  EXPECT_EQ(loaded.error().code, code) << loaded.error().message();
  return loaded.error().message();
}

TEST(Policy, RoundsToNearestEvenInCanonicalOrder) {
  const auto model = random_model(small_config(true), 30);
  Tensor weight;
  {
    torch::NoGradGuard no_grad;
    weight = model->named_parameters()["model.norm.weight"];
    // 1 + k * 2^-9: exact, ties down and up to even, just above a tie, negative.
    const std::vector<float> values = {1.0f, 1.00390625f, 1.01171875f, 1.00390637f, -1.00390625f};
    for (std::size_t i = 0; i < values.size(); ++i) weight[std::int64_t(i)] = values[i];
  }
  auto policy = export_policy(*model).value();
  const auto view = policy.view();
  EXPECT_TRUE(std::is_sorted(view.begin(), view.end(), [](const auto& a, const auto& b) { return a.name < b.name; }));
  const auto layout = policy_layout(model->config()).value();
  ASSERT_EQ(view.size(), layout.size());
  for (std::size_t i = 0; i < view.size(); ++i) {
    EXPECT_EQ(view[i].name, layout[i].name);
    EXPECT_EQ(view[i].shape, layout[i].shape);
    EXPECT_EQ(view[i].dtype, delta::DType::kBF16);
  }
  const auto bytes = policy.bytes(*policy.find("model.norm.weight"));
  const std::uint16_t want[] = {0x3f80, 0x3f80, 0x3f82, 0x3f81, 0xbf80};
  for (std::size_t i = 0; i < std::size(want); ++i) {
    EXPECT_EQ(std::to_integer<int>(bytes[2 * i]) | std::to_integer<int>(bytes[2 * i + 1]) << 8, want[i]) << i;
  }
  EXPECT_EQ(policy.total_bytes(), 2 * model->config().parameters());
  // Applied in place: the same bytes and digest. A state of another shape is refused.
  auto again = delta::OwnedState::empty_like(layout).value();
  ASSERT_TRUE(export_policy(*model, again));
  EXPECT_EQ(again.digest(), policy.digest());
  auto other = delta::OwnedState::empty_like(policy_layout(small_config(false)).value()).value();
  EXPECT_FALSE(export_policy(*model, other));
}

TEST(Policy, LoadsExactlyAndInPlace) {
  const auto source = random_model(small_config(false), 31), target = random_model(small_config(false), 32);
  const Tensor held = target->named_parameters()["model.layers.0.self_attn.k_proj.weight"];
  const auto policy = export_policy(*source).value();
  ASSERT_FALSE(same_weights(*source, *target));
  ASSERT_TRUE(load_policy(*target, policy.view()));
  EXPECT_TRUE(same_weights(*source, *target));
  EXPECT_TRUE(torch::equal(held, source->named_parameters()["model.layers.0.self_attn.k_proj.weight"]));
  torch::NoGradGuard no_grad;
  const Tensor ids = torch::randint(0, 19, {2, 6}, torch::kLong);
  EXPECT_TRUE(torch::equal(source->forward(ids), target->forward(ids)));
}

TEST(Policy, LoadsChangedTensorsOnly) {
  for (const auto type : {torch::kFloat, torch::kBFloat16}) {
    const auto from = random_model(small_config(true), 31), to = random_model(small_config(true), 32);
    const auto old = export_policy(*from).value();
    const auto target = export_policy(*to).value();
    auto next = *delta::copy_of(old.view());
    for (std::size_t i = 0; i < next.size(); ++i) {  // one tensor as a whole, of the others every twentieth value
      const std::span<std::byte> bytes = next.mutable_bytes(i);
      const std::span<const std::byte> other = target.view()[i].bytes;
      for (std::size_t at = 0; at < bytes.size(); at += i == 1 ? 2 : 40)
        std::memcpy(bytes.data() + at, other.data() + at, 2);
    }
    next.seal();
    const auto patch = *delta::encode_delta(old.view(), next.view());
    auto state = *delta::copy_of(old.view());
    delta::IncomingDelta incoming(state);
    ASSERT_TRUE(incoming.add(patch));
    const auto written = incoming.apply();
    ASSERT_TRUE(written) << written.error().message();
    EXPECT_EQ(state.digest(), next.digest());

    Transformer model(small_config(true), torch::kCPU, type);
    ASSERT_TRUE(load_policy(model, old.view()));
    torch::NoGradGuard no_grad;
    const Tensor embedding = model.named_parameters()["model.embed_tokens.weight"].view(-1);
    const Tensor before = embedding[1].clone();
    embedding[1].fill_(3);  // not of the delta
    ASSERT_TRUE(load_changes(model, state.view(), *written));
    EXPECT_EQ(embedding[1].item<float>(), 3);
    embedding[1].copy_(before);
    EXPECT_EQ(export_policy(model)->digest(), next.digest());
  }
}

TEST(Policy, LoadsFp32AndUnalignedBytes) {
  const auto source = random_model(small_config(true), 33), target = random_model(small_config(true), 34);
  std::vector<std::vector<std::byte>> memory;
  delta::StateView state;
  for (const auto& item : source->named_parameters()) {
    const Tensor t = item.value().detach().contiguous();
    memory.emplace_back(1 + static_cast<std::size_t>(t.numel()) * 4);
    std::memcpy(memory.back().data() + 1, t.data_ptr(), memory.back().size() - 1);
    state.push_back({item.key(), delta::DType::kF32, t.sizes().vec(), std::span(memory.back()).subspan(1)});
  }
  ASSERT_TRUE(load_policy(*target, state));
  EXPECT_TRUE(same_weights(*source, *target));
}

TEST(Policy, RefusesAnotherStateAndStaysUnchanged) {
  const auto model = random_model(small_config(true), 35), unchanged = random_model(small_config(true), 35);
  const auto other = export_policy(*random_model(small_config(true), 36)).value();
  const auto refused = [&](delta::StateView state, const std::string& name) {
    const Status status = load_policy(*model, state);
    ASSERT_FALSE(status);
    EXPECT_EQ(status.error().code, Code::kInvalid);
    EXPECT_NE(status.error().detail.find(name), std::string::npos) << status.error().detail;
    EXPECT_TRUE(same_weights(*model, *unchanged));
  };
  auto state = other.view();
  state.pop_back();
  refused(state, other.view().back().name);
  state = other.view();
  state[3].name += ".bias";
  refused(state, state[3].name);
  state = other.view();
  std::swap(state[2].shape[0], state[2].shape.back());
  state[2].shape.push_back(1);
  refused(state, state[2].name);
  state = other.view();
  state[4].dtype = delta::DType::kF16;
  refused(state, state[4].name);
  state = other.view();
  state[5].bytes = state[5].bytes.first(2);
  refused(state, state[5].name);
  state = other.view();
  state.push_back(state[1]);
  refused(state, state[1].name);
  refused({}, "model");
}

TEST(Policy, ATiedModelAcceptsARepeatedHeadOnly) {
  const auto from = random_model(small_config(true), 37), to = random_model(small_config(true), 38);
  const auto policy = export_policy(*from).value();
  auto state = policy.view();
  auto head = state[*policy.find("model.embed_tokens.weight")];
  head.name = "lm_head.weight";
  state.insert(state.begin(), head);
  ASSERT_TRUE(load_policy(*to, state));
  EXPECT_TRUE(same_weights(*from, *to));
  std::vector<std::byte> changed(head.bytes.begin(), head.bytes.end());
  changed[7] ^= std::byte{1};
  state.front().bytes = changed;
  EXPECT_FALSE(load_policy(*to, state));
}

TEST_F(Folder, RoundTripIsExact) {
  for (const bool tied : {true, false}) {
    for (const std::uint64_t shard : {5'000'000'000ull, 4096ull}) {
      const auto model = saved(folder_, tied, {shard});
      EXPECT_EQ(fs::exists(folder_ / "model.safetensors.index.json"), shard == 4096);
      const auto loaded = load_model(folder_);
      ASSERT_TRUE(loaded) << loaded.error().message();
      EXPECT_EQ(loaded->transformer->config(), model->config());
      EXPECT_TRUE(same_weights(*loaded->transformer, *model));
      EXPECT_EQ(loaded->files.tokenizer.to_json(), characters().to_json());
      EXPECT_EQ(loaded->files.eos, (std::vector<Token>{98, 96}));
      fs::remove_all(folder_);
    }
  }
}

TEST_F(Folder, EveryFamilyComesBackFromShards) {
  for (const Family family : {Family::kQwen2, Family::kLlama, Family::kGemma3}) {
    ModelConfig config = character_config(family != Family::kQwen2);
    config.family = family;
    if (family == Family::kGemma3) config.sliding_window = SlidingWindow{.tokens = 7, .full_layers = {1}};
    if (family == Family::kLlama) config.rope_scaling = RopeScaling{};
    const auto model = random_model(config, 40);
    const fs::path folder = folder_ / family_name(family);
    ASSERT_TRUE(
        save_model(folder, ModelFiles::make(config, characters()).value(), export_policy(*model)->view(), {4000}));
    EXPECT_TRUE(fs::exists(folder / "model.safetensors.index.json"));
    const auto loaded = load_model(folder);
    ASSERT_TRUE(loaded) << loaded.error().message();
    EXPECT_EQ(loaded->transformer->config(), config);
    EXPECT_TRUE(same_weights(*model, *loaded->transformer));
    const auto parameters = model->named_parameters();
    EXPECT_EQ(parameters.contains("model.layers.1.self_attn.k_proj.bias"), family == Family::kQwen2);
    EXPECT_EQ(parameters.contains("model.layers.1.self_attn.k_norm.weight"), family == Family::kGemma3);
    EXPECT_EQ(parameters.contains("model.layers.1.pre_feedforward_layernorm.weight"), family == Family::kGemma3);
  }
}

TEST_F(Folder, EveryIdOfBothConfigsEndsAText) {
  const auto eos = [&] { return load_model(folder_)->files.eos; };
  saved(folder_, true);
  ASSERT_TRUE(write_file_atomic(folder_ / "generation_config.json", R"({"eos_token_id": [97, 98]})"));
  EXPECT_EQ(eos(), (std::vector<Token>{97, 98, 96}));
  ASSERT_TRUE(write_file_atomic(folder_ / "generation_config.json", R"({"eos_token_id": 97})"));
  EXPECT_EQ(eos(), (std::vector<Token>{97, 96}));
  fs::remove(folder_ / "generation_config.json");
  EXPECT_EQ(eos(), (std::vector<Token>{96}));
  ModelConfig config = character_config(true);
  config.eos.clear();
  ASSERT_TRUE(write_file_atomic(folder_ / "config.json", config.to_json()));
  EXPECT_EQ(eos(), (std::vector<Token>{96})) << "the tokenizer's end of text";
  for (const char* wrong :
       {R"({"eos_token_id": "96"})", R"({"eos_token_id": [99]})", R"({"eos_token_id": -1})", "[]"}) {
    ASSERT_TRUE(write_file_atomic(folder_ / "generation_config.json", wrong));
    EXPECT_NE(failure(folder_, Code::kInvalid).find("generation_config.json"), std::string::npos) << wrong;
  }
}

// Reads the published format with code of its own.
TEST_F(Folder, AnIndependentReaderFindsTheWeights) {
  const auto model = saved(folder_, true);
  const std::string file = read_file(folder_ / "model.safetensors").value();
  std::uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | static_cast<unsigned char>(file.at(static_cast<std::size_t>(i)));
  const auto header = nlohmann::json::parse(file.substr(8, length));
  EXPECT_EQ(header.at("__metadata__").at("format"), "pt");
  const std::string data = file.substr(8 + length);
  std::size_t bytes = 0, tensors = 0;
  for (const auto& item : model->named_parameters()) {
    const auto& entry = header.at(item.key());
    EXPECT_EQ(entry.at("dtype"), "BF16");
    const Tensor weight = item.value().detach().to(torch::kFloat).contiguous();
    EXPECT_EQ(entry.at("shape"), nlohmann::json(weight.sizes().vec()));
    const std::size_t begin = entry.at("data_offsets")[0], end = entry.at("data_offsets")[1];
    ASSERT_EQ(end - begin, 2 * static_cast<std::size_t>(weight.numel()));
    for (std::size_t i = 0; i < end - begin; i += 2) {
      const std::uint32_t bits = static_cast<std::uint32_t>(static_cast<unsigned char>(data[begin + i])) << 16 |
                                 static_cast<std::uint32_t>(static_cast<unsigned char>(data[begin + i + 1])) << 24;
      float value = 0;
      std::memcpy(&value, &bits, sizeof value);
      ASSERT_EQ(value, weight.data_ptr<float>()[i / 2]) << item.key();
    }
    bytes += end - begin;
    ++tensors;
  }
  EXPECT_EQ(bytes, data.size());
  EXPECT_EQ(header.size(), tensors + 1);
  const auto config = nlohmann::json::parse(read_file(folder_ / "config.json").value());
  EXPECT_EQ(config.at("architectures"), nlohmann::json({"Qwen3ForCausalLM"}));
  EXPECT_EQ(config.at("torch_dtype"), "bfloat16");
  const auto tokenizer = nlohmann::json::parse(read_file(folder_ / "tokenizer_config.json").value());
  EXPECT_EQ(tokenizer.at("tokenizer_class"), "PreTrainedTokenizerFast");
  EXPECT_EQ(tokenizer.at("eos_token"), "<|endoftext|>");
}

TEST_F(Folder, OtherFilesOfAModelAreCopied) {
  saved(folder_, true);
  ASSERT_TRUE(write_file_atomic(folder_ / "tokenizer_config.json", R"({"added": 1, "chat_template": "T"})"));
  ASSERT_TRUE(write_file_atomic(folder_ / "special_tokens_map.json", R"({"kept": true})"));
  auto loaded = load_model(folder_).value();
  EXPECT_EQ(loaded.files.chat_template, "T");
  const fs::path copy = folder_ / "copy";
  ASSERT_TRUE(save_model(copy, loaded.files, export_policy(*loaded.transformer)->view()));
  EXPECT_EQ(read_file(copy / "tokenizer_config.json").value(), R"({"added": 1, "chat_template": "T"})");
  EXPECT_EQ(read_file(copy / "special_tokens_map.json").value(), R"({"kept": true})");
  const auto generation = nlohmann::json::parse(read_file(copy / "generation_config.json").value());
  EXPECT_EQ(generation.at("top_p"), 0.9);
  EXPECT_EQ(generation.at("eos_token_id"), nlohmann::json({98, 96}));
  // chat_template.jinja comes before the one in tokenizer_config.json, which may be a list.
  ASSERT_TRUE(write_file_atomic(copy / "chat_template.jinja", "J"));
  EXPECT_EQ(load_model(copy)->files.chat_template, "J");
  fs::remove(copy / "chat_template.jinja");
  ASSERT_TRUE(
      write_file_atomic(copy / "tokenizer_config.json",
                        R"({"chat_template": [{"name": "tool", "template": "A"}, {"name": "default", "template": "B"}],
                                    "bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": null})"));
  EXPECT_EQ(load_model(copy)->files.chat_template, "B");
  EXPECT_EQ(load_model(copy)->files.special_tokens_json, R"({"bos_token":"<s>","eos_token":"</s>"})");
}

TEST_F(Folder, IsPlacedAllAtOnceAndNeverOverAnother) {
  saved(folder_ / "from", true);
  ASSERT_TRUE(place_directory(folder_ / "from", folder_ / "to" / "", false));
  EXPECT_TRUE(load_model(folder_ / "to"));
  EXPECT_EQ(fs::hard_link_count(folder_ / "to" / "model.safetensors"), 1u);
  EXPECT_EQ(place_directory(folder_ / "from", folder_ / "to", false).error().code, Code::kInvalid);
  ASSERT_TRUE(write_file_atomic(folder_ / "to" / "old", "x"));
  ASSERT_TRUE(place_directory(folder_ / "from", folder_ / "to", true));
  EXPECT_FALSE(fs::exists(folder_ / "to" / "old"));
  EXPECT_FALSE(fs::exists(folder_ / "to.writing"));
  EXPECT_EQ(fs::hard_link_count(folder_ / "to" / "model.safetensors"), 2u) << "the policy is on disk twice";
  EXPECT_FALSE(place_directory(folder_ / "nowhere", folder_ / "other", false));
  EXPECT_FALSE(fs::exists(folder_ / "other"));
}

TEST_F(Folder, BrokenDirectoriesAreNamed) {
  EXPECT_NE(failure(folder_, Code::kNotFound).find("config.json"), std::string::npos);

  saved(folder_, true, {4096});
  fs::path shard;
  for (const auto& entry : fs::directory_iterator(folder_)) {
    if (entry.path().extension() == ".safetensors") shard = std::max(shard, entry.path());
  }
  const std::string content = read_file(shard).value();
  fs::remove(shard);
  EXPECT_NE(failure(folder_, Code::kInvalid).find(shard.filename().string()), std::string::npos);
  std::ofstream(shard, std::ios::binary) << content.substr(0, content.size() - 3);
  EXPECT_NE(failure(folder_, Code::kInvalid).find(shard.filename().string()), std::string::npos);
  std::ofstream(shard, std::ios::binary) << content;
  ASSERT_TRUE(load_model(folder_));

  ModelConfig config = character_config(true);
  config.layers = 1;
  ASSERT_TRUE(write_file_atomic(folder_ / "config.json", config.to_json()));
  EXPECT_NE(failure(folder_, Code::kInvalid).find("model.layers.1"), std::string::npos);
  config.vocab_size = 98;
  ASSERT_TRUE(write_file_atomic(folder_ / "config.json", config.to_json()));
  EXPECT_NE(failure(folder_, Code::kInvalid).find("vocab_size"), std::string::npos);
  ASSERT_TRUE(write_file_atomic(folder_ / "config.json", character_config(true).to_json()));
  ASSERT_TRUE(write_file_atomic(folder_ / "tokenizer.json", "{}"));
  EXPECT_NE(failure(folder_, Code::kInvalid).find("tokenizer.json"), std::string::npos);
}

TEST_F(Folder, EveryTruncationOfASingleFileIsRefused) {
  saved(folder_, true);
  const fs::path file = folder_ / "model.safetensors";
  const std::string content = read_file(file).value();
  for (const std::size_t size :
       {std::size_t{0}, std::size_t{7}, std::size_t{8}, std::size_t{100}, content.size() / 2, content.size() - 1}) {
    std::ofstream(file, std::ios::binary | std::ios::trunc) << content.substr(0, size);
    EXPECT_NE(failure(folder_, Code::kInvalid).find("model.safetensors"), std::string::npos) << size;
  }
}

TEST_F(Folder, ATinyPresetIsAModelFromTheFirstStep) {
  ModelConfig config = preset("tiny-64").value();
  const auto model = init(config, 1).value();
  const auto policy = export_policy(*model).value();
  ASSERT_TRUE(save_model(folder_, ModelFiles::of_preset("tiny-64").value(), policy.view()));
  const auto loaded = load_model(folder_).value();
  const auto prompt = loaded.files.tokenizer.encode("12+34=").value();
  EXPECT_EQ(prompt.size(), 6u);
  const auto got =
      generate(*loaded.transformer, {prompt}, {.tokens_max = 5, .eos = loaded.files.eos, .seed = 1}).value();
  EXPECT_FALSE(got[0].tokens.empty());
}

}  // namespace
}  // namespace echoline::model

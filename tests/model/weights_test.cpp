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
  const Status status = save_model(folder, model->config(), policy.view(), characters(), {96, 98}, shard);
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
  // In place: the same bytes and digest; into a state of another shape: refused.
  auto again = delta::OwnedState::zeros_like(layout).value();
  ASSERT_TRUE(export_policy(*model, again));
  EXPECT_EQ(again.digest(), policy.digest());
  auto other = delta::OwnedState::zeros_like(policy_layout(small_config(false)).value()).value();
  EXPECT_FALSE(export_policy(*model, other));
}

TEST(Policy, LoadsExactlyAndInPlace) {
  const auto from = random_model(small_config(false), 31), to = random_model(small_config(false), 32);
  const Tensor held = to->named_parameters()["model.layers.0.self_attn.k_proj.weight"];
  const auto policy = export_policy(*from).value();
  ASSERT_FALSE(same_weights(*from, *to));
  ASSERT_TRUE(load_policy(*to, policy.view()));
  EXPECT_TRUE(same_weights(*from, *to));
  EXPECT_TRUE(torch::equal(held, from->named_parameters()["model.layers.0.self_attn.k_proj.weight"]));
  torch::NoGradGuard no_grad;
  const Tensor ids = torch::randint(0, 19, {2, 6}, torch::kLong);
  EXPECT_TRUE(torch::equal(from->forward(ids), to->forward(ids)));
}

TEST(Policy, LoadsFp32AndUnalignedBytes) {
  const auto from = random_model(small_config(true), 33), to = random_model(small_config(true), 34);
  std::vector<std::vector<std::byte>> memory;
  delta::StateView state;
  for (const auto& item : from->named_parameters()) {
    const Tensor t = item.value().detach().contiguous();
    memory.emplace_back(1 + static_cast<std::size_t>(t.numel()) * 4);
    std::memcpy(memory.back().data() + 1, t.data_ptr(), memory.back().size() - 1);
    state.push_back({item.key(), delta::DType::kF32, t.sizes().vec(), std::span(memory.back()).subspan(1)});
  }
  ASSERT_TRUE(load_policy(*to, state));
  EXPECT_TRUE(same_weights(*from, *to));
}

TEST(Policy, RefusesAnotherStateAndStaysUnchanged) {
  const auto model = random_model(small_config(true), 35), kept = random_model(small_config(true), 35);
  const auto other = export_policy(*random_model(small_config(true), 36)).value();
  const auto refused = [&](delta::StateView state, const std::string& name) {
    const Status status = load_policy(*model, state);
    ASSERT_FALSE(status);
    EXPECT_EQ(status.error().code, Code::kInvalid);
    EXPECT_NE(status.error().detail.find(name), std::string::npos) << status.error().detail;
    EXPECT_TRUE(same_weights(*model, *kept));
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
      EXPECT_EQ(loaded->tokenizer.to_json(), characters().to_json());
      EXPECT_EQ(loaded->eos, (std::vector<Token>{96, 98}));
      fs::remove_all(folder_);
    }
  }
}

TEST_F(Folder, EosFallsBackToTheConfigThenTheTokenizer) {
  saved(folder_, true);
  fs::remove(folder_ / "generation_config.json");
  EXPECT_EQ(load_model(folder_)->eos, (std::vector<Token>{96}));
  ModelConfig config = character_config(true);
  config.eos.clear();
  ASSERT_TRUE(write_file_atomic(folder_ / "config.json", config.to_json()));
  EXPECT_EQ(load_model(folder_)->eos, (std::vector<Token>{96}));
  ASSERT_TRUE(write_file_atomic(folder_ / "generation_config.json", R"({"eos_token_id": 97})"));
  EXPECT_EQ(load_model(folder_)->eos, (std::vector<Token>{97}));
  ASSERT_TRUE(write_file_atomic(folder_ / "generation_config.json", R"({"eos_token_id": "96"})"));
  EXPECT_NE(failure(folder_, Code::kInvalid).find("generation_config.json"), std::string::npos);
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
  ASSERT_TRUE(save_model(folder_, config, policy.view(), characters(), config.eos));
  const auto loaded = load_model(folder_).value();
  const auto prompt = loaded.tokenizer.encode("12+34=").value();
  EXPECT_EQ(prompt.size(), 6u);
  const auto got = generate(*loaded.transformer, {prompt}, {.tokens_max = 5, .eos = loaded.eos, .seed = 1}).value();
  EXPECT_FALSE(got[0].tokens.empty());
}

}  // namespace
}  // namespace echoline::model

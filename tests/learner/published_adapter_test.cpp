// Adapters that an external trainer publishes, joined with the run's base.
#include "learner/external/published_adapter.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <map>

#include "model/policy.hpp"

namespace echoline::learner {
namespace {

using ::testing::HasSubstr;

class PublishedAdapterTest : public ::testing::Test {
 protected:
  PublishedAdapterTest() {
    config_.adapter = model::AdapterConfig{.rank = 4, .alpha = 8, .targets = {"q_proj", "v_proj"}, .base_model = {}};
    policy_ = *model::init_policy(config_, 1);
    base_ = delta::share(*delta::copy_of(model::split_adapter(policy_.view()).base));
    for (const delta::TensorView& tensor : model::split_adapter(policy_.view()).adapter) {
      std::vector<float>& values = values_[tensor.name];
      values.assign(tensor.bytes.size() / 2, 0.5F + 1.0F / 4096);  // rounded to 0.5
      published_.push_back({tensor.name, delta::DType::kF32, tensor.shape, std::as_bytes(std::span(values))});
    }
  }
  Result<delta::OwnedState> join(const delta::StateView& published) const {
    return join_published(base_, published, *config_.adapter);
  }
  std::string refusal(const delta::StateView& published) const {
    const auto joined = join(published);
    EXPECT_FALSE(joined);
    return joined ? "" : joined.error().message();
  }

  model::ModelConfig config_ = *model::preset("tiny-64");
  delta::OwnedState policy_;
  delta::SharedState base_;
  std::map<std::string, std::vector<float>> values_;
  delta::StateView published_;
};

TEST_F(PublishedAdapterTest, IsRoundedAndSharesTheBase) {
  auto joined = join(published_);
  ASSERT_TRUE(joined) << joined.error().message();
  EXPECT_TRUE(delta::check_same_tensors(policy_.view(), joined->view()));
  std::size_t adapters = 0;
  for (const delta::TensorView& tensor : joined->view()) {
    if (!model::is_adapter_tensor(tensor.name)) {
      EXPECT_EQ(tensor.bytes.data(), base_->bytes(*base_->find(tensor.name)).data()) << "not a copy";
      continue;
    }
    ++adapters;
    std::uint16_t bits = 0;
    std::memcpy(&bits, tensor.bytes.data(), sizeof bits);
    EXPECT_EQ(bits, 0x3f00) << tensor.name;
  }
  EXPECT_EQ(adapters, published_.size());
  // The names of PEFT's modules, and the trainer's whole policy.
  delta::StateView named = published_;
  for (delta::TensorView& tensor : named) tensor.name.insert(tensor.name.rfind(".weight"), ".default");
  for (const delta::TensorView& tensor : base_->view()) named.push_back(tensor);
  auto whole = join(named);
  ASSERT_TRUE(whole) << whole.error().message();
  EXPECT_EQ(whole->digest(), joined->digest());
}

TEST_F(PublishedAdapterTest, ErrorsNameTheTensor) {
  delta::StateView fewer = published_;
  fewer.pop_back();
  EXPECT_THAT(refusal(fewer), HasSubstr(published_.back().name + "' is missing"));
  delta::StateView other_rank = published_;
  for (delta::TensorView& tensor : other_rank) {
    tensor.shape[tensor.name.find("lora_A") == std::string::npos ? 1 : 0] = 2;
    tensor.bytes = tensor.bytes.first(tensor.bytes.size() / 2);
  }
  EXPECT_THAT(refusal(other_rank), HasSubstr("expected [4, 64]"));
  delta::StateView other_target = published_;
  other_target.push_back({"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight", delta::DType::kF32,
                          published_[0].shape, published_[0].bytes});
  EXPECT_THAT(refusal(other_target), HasSubstr("does not belong to an adapter of rank 4 on q_proj, v_proj"));
  delta::StateView other_type = published_;
  other_type[0].dtype = delta::DType::kF16;
  other_type[0].bytes = other_type[0].bytes.first(other_type[0].bytes.size() / 2);
  EXPECT_THAT(refusal(other_type), HasSubstr("has type F16, expected BF16 or F32"));
  delta::StateView other_base = published_;
  other_base.push_back(policy_.view().back());
  std::vector<std::byte> changed(other_base.back().bytes.begin(), other_base.back().bytes.end());
  changed[0] ^= std::byte{1};
  other_base.back().bytes = changed;
  EXPECT_THAT(refusal(other_base), HasSubstr("only the adapter is trained"));
  values_[published_[0].name][5] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THAT(refusal(published_), HasSubstr("the first at index 5"));
}

TEST_F(PublishedAdapterTest, PeftsConfigurationMustBeTheRuns) {
  EXPECT_TRUE(check_adapter_config(config_.adapter->to_json(), *config_.adapter));
  model::AdapterConfig other = *config_.adapter;
  other.rank = 8;
  const Status rank = check_adapter_config(other.to_json(), *config_.adapter);
  ASSERT_FALSE(rank);
  EXPECT_THAT(rank.error().message(), HasSubstr("rank 8, alpha 8 and targets q_proj, v_proj, expected the run's"));
  const auto refused = [&](const char* field) {
    const Status status = check_adapter_config(
        fmt::format(R"({{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], {}}})",
                    field),
        *config_.adapter);
    return status ? std::string() : status.error().message();
  };
  EXPECT_EQ(refused(R"("use_dora": false, "modules_to_save": null)"), "");
  EXPECT_THAT(refused(R"("use_dora": true)"), HasSubstr("use_dora"));
  EXPECT_THAT(refused(R"("modules_to_save": ["lm_head"])"), HasSubstr("modules_to_save"));
}

}  // namespace
}  // namespace echoline::learner

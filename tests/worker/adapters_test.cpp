// Policies with an adapter (LoRA) in servers that imitate SGLang and vLLM.
#include <fstream>
#include <nlohmann/json.hpp>

#include "delta/checkpoint.hpp"
#include "delta/safetensors.hpp"
#include "remote_fixture.hpp"
#include "worker/engines/policy_folder.hpp"
#include "worker/engines/served_adapters.hpp"

namespace echoline::worker {
namespace {

const model::AdapterConfig kAdapter{.rank = 8, .alpha = 16, .targets = {"q_proj"}, .base_model = {}};

// A base of one tensor and an adapter of two. Version 0 is the base's function.
class AdapterPolicies : public StoredPolicies {
 public:
  explicit AdapterPolicies(std::size_t count) {
    const std::string module = "base_model.model.model.layers.0.self_attn.q_proj.";
    const delta::StateView like{{module + "lora_A.weight", delta::DType::kBF16, {8, 64}, {}},
                                {module + "lora_B.weight", delta::DType::kBF16, {64, 8}, {}},
                                {"model.norm.weight", delta::DType::kBF16, {4096}, {}}};
    for (std::size_t v = 0; v < count; ++v) {
      delta::OwnedState state = *delta::OwnedState::empty_like(like);
      for (std::size_t tensor = 0; tensor < like.size(); ++tensor) {
        const auto bytes = state.mutable_bytes(tensor);
        for (std::size_t i = 0; i < bytes.size(); ++i)
          bytes[i] = static_cast<std::byte>(tensor == 1 ? (i * v) & 0x3f : (i * 37 + tensor) & 0x3f);
      }
      state.seal();
      states_.push_back(std::move(state));
    }
  }
  // A delta on `from` that changes the base.
  overlay::Publication damaged(std::size_t from) {
    delta::OwnedState state = *delta::copy_of(states_[from].view());
    state.mutable_bytes(2)[0] ^= std::byte{1};
    state.seal();
    return publication(from + 1, from, *delta::encode_delta(states_[from].view(), state.view()), state.digest());
  }
  delta::StateView view(std::size_t v) const { return states_[v].view(); }
};

class AdapterTest : public RemoteTest {
 protected:
  AdapterTest() { task_.model.adapter = kAdapter; }
  // A server of another owner that takes adapters, with version 0.
  void start(std::size_t at_once = 4, int rank_max = 16) {
    attach();
    server_->enable_adapters(at_once, rank_max);
    install(policies_.snapshot(0));
  }
  std::string load_path() const { return is_vllm() ? "/v1/load_lora_adapter" : "/load_lora_adapter"; }
  std::string adapter_of_last_draw() const {
    const nlohmann::json asked = nlohmann::json::parse(server_->last(draw_path()));
    return asked.value(is_vllm() ? "model" : "lora_path", "");
  }
  std::set<std::string> folders() const {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(options_.folder))
      if (entry.is_directory()) names.insert(entry.path().filename());
    return names;
  }
  // Draws until all responses have `tokens` tokens and wait.
  void draw_until(std::int64_t tokens) {
    while (hold_->drawn < tokens) engine_->poll(kSlice);
  }
  Status failure_of_install(const overlay::Publication& p) { return engine_->install(p); }

  AdapterPolicies policies_{6};
};
INSTANTIATE_TEST_SUITE_P(Engines, AdapterTest,
                         ::testing::Values(Speaks::kSglang, Speaks::kVllm, Speaks::kVllmCompletions), server_name);

TEST_P(AdapterTest, EveryVersionIsAnAdapterBesideTheSameBase) {
  start();
  submit(1);
  expect_whole(finish().at(1), 0);
  const auto base_written = fs::last_write_time(options_.folder / "model.safetensors");
  const std::string first = adapter_of_last_draw();
  EXPECT_THAT(first, HasSubstr("adapter-0-"));
  install(policies_.delta(0, 1));
  submit(2);
  expect_whole(finish().at(2), 1);
  EXPECT_THAT(adapter_of_last_draw(), HasSubstr("adapter-1-"));
  install(policies_.snapshot(3));
  submit(3);
  expect_whole(finish().at(3), 3);
  for (const char* path : {"/pause", "/pause_generation", "/collective_rpc", "/update_weights_from_disk",
                           "/update_weight_version", "/init_weight_transfer_engine"})
    EXPECT_EQ(server_->count(path), 0) << path;
  EXPECT_EQ(fs::last_write_time(options_.folder / "model.safetensors"), base_written);
  // The newest and the one before, to which requests may be on their way.
  EXPECT_EQ(folders().size(), 2u);
  EXPECT_EQ(server_->adapters().size(), 2u);
  EXPECT_FALSE(folders().contains(first));
  const fs::path newest = options_.folder / adapter_of_last_draw();
  std::ifstream config(newest / "adapter_config.json");
  EXPECT_EQ(nlohmann::json::parse(config), nlohmann::json::parse(kAdapter.to_json()));
  const auto file = delta::SafetensorsFile::open(newest / "adapter_model.safetensors");
  ASSERT_TRUE(file);
  delta::StateView expected = policies_.view(3);
  expected.pop_back();
  EXPECT_EQ(*delta::digest_state(file->view()), *delta::digest_state(expected));
}

TEST_P(AdapterTest, ResponsesFinishUnderTheirVersion) {
  start();
  no_end();
  install(policies_.delta(0, 1));
  hold_->held_at = 10;
  hold_->drawn = 0;
  submit(1, 600);
  draw_until(10);
  install(policies_.delta(1, 2));
  install(policies_.delta(2, 3));
  EXPECT_EQ(server_->adapters().size(), 3u) << "0 is used by no response any more";
  submit(2, 20);
  hold_->held_at = 1000;
  const auto all = finish();
  expect_whole(all.at(1), 1, 600);
  EXPECT_EQ(all.at(1)->spans.size(), 1u) << "its second piece is of the same adapter";
  expect_whole(all.at(2), 3);
}

TEST_P(AdapterTest, IfTheServerHasRoomForOneTheyContinueUnderTheNew) {
  start(1);
  no_end();
  install(policies_.delta(0, 1));
  hold_->held_at = 10;
  hold_->drawn = 0;
  submit(1, 600);
  draw_until(10);
  server_->fault({"draw", "hang", 1, 0, seconds(60)});  // at the second piece
  hold_->held_at = 1000;
  const int before = server_->count(draw_path());
  while (server_->count(draw_path()) == before) engine_->poll(kSlice);
  install(policies_.delta(1, 2));
  const auto all = finish();
  expect_whole(all.at(1), 2, 600);
  ASSERT_EQ(all.at(1)->spans.size(), 2u);
  EXPECT_EQ(all.at(1)->spans[0].version, Version{1});
  EXPECT_EQ(all.at(1)->spans[0].end, 512u);
  EXPECT_EQ(folders().size(), 1u);
}

// The server reports a load and answers without the adapter, as vLLM 0.32 does if its names fit no module.
TEST_P(AdapterTest, AnAdapterThatIsNotAppliedIsSeen) {
  start();
  const int before = server_->count(load_path());
  server_->fault({"load", "ignored", 2});
  install(policies_.delta(0, 1));
  EXPECT_EQ(server_->count(load_path()), before + 3);
  submit(1);
  expect_whole(finish().at(1), 1);
  server_->fault({"load", "ignored", 1000});
  const Status never = failure_of_install(policies_.delta(1, 2));
  ASSERT_FALSE(never);
  EXPECT_THAT(never.error().message(), HasSubstr("without an adapter"));
  EXPECT_THAT(never.error().message(), HasSubstr("is not applied"));
}

TEST_P(AdapterTest, TheAdapterOfAnotherVersionIsSeen) {
  start();
  install(policies_.delta(0, 1));
  server_->fault({"load", "stale"});
  install(policies_.delta(1, 2));
  submit(1);
  expect_whole(finish().at(1), 2);
}

TEST_P(AdapterTest, LoadsThatFailAreRepeated) {
  start();
  server_->fault({"load", "fails"});
  server_->fault({"load", "status", 1, 500});
  install(policies_.delta(0, 1));
  submit(1);
  expect_whole(finish().at(1), 1);
}

TEST_P(AdapterTest, AServerThatTakesNoSuchAdapterIsNamed) {
  using Modules = std::vector<std::string>;
  const auto refusal = [&](const std::function<void()>& prepare) {
    engine_.reset();
    named_ = false;
    attach();
    prepare();
    if (is_vllm()) {
      EXPECT_TRUE(delta_free_first(policies_.snapshot(0)));
    }
    const Status refused = engine_->install(policies_.snapshot(0));
    EXPECT_FALSE(refused);
    EXPECT_FALSE(engine_->status());
    return refused ? std::string() : refused.error().message();
  };
  const std::string without = refusal([] {});
  EXPECT_THAT(without, HasSubstr("without --enable-lora"));
  EXPECT_THAT(without, HasSubstr("--max-lora-rank 8"));
  EXPECT_THAT(refusal([&] { server_->enable_adapters(2, 4); }), HasSubstr("up to rank 4, and this run's has rank 8"));
  if (!is_vllm()) return;
  EXPECT_THAT(refusal([&] { server_->enable_adapters(2, 8, std::nullopt); }), HasSubstr("needs --lora-target-modules"));
  EXPECT_THAT(refusal([&] { server_->enable_adapters(2, 8, Modules{"v_proj"}); }),
              HasSubstr("applies adapters to v_proj, and this run's has q_proj as well"));
}

TEST_P(AdapterTest, ADeltaOnTheBaseIsRefused) {
  start();
  const Status refused = failure_of_install(policies_.damaged(0));
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::kInvalid);
  EXPECT_THAT(refused.error().message(), HasSubstr("model.norm.weight"));
  install(policies_.delta(0, 1));
}

TEST_P(AdapterTest, AServerThatLostItsAdaptersGetsTheNewestAgain) {
  start();
  install(policies_.delta(0, 1));
  server_->forget_adapters();
  submit(1);
  expect_whole(finish().at(1), 1);
}

TEST_P(AdapterTest, TheSamePolicyIsNotLoadedAgain) {
  start();
  const int before = server_->count(load_path());
  overlay::Publication same = policies_.snapshot(0);
  same.version = Version{1};
  install(same);
  EXPECT_EQ(server_->count(load_path()), before);
  submit(1);
  expect_whole(finish().at(1), 1);
}

TEST_P(AdapterTest, AnotherWorkersAdaptersDoNotDisturb) {
  start();
  install(policies_.delta(0, 1));
  engine_.reset();  // without a farewell to the server
  named_ = false;
  while_waiting_ = {};
  make();
  install(policies_.snapshot(1));
  submit(1);
  expect_whole(finish().at(1), 1);
}

TEST(ServedAdapters, AreAsManyAsTheServerComputesAtOnce) {
  using Names = std::vector<std::string>;
  ServedAdapters adapters;
  adapters.set_limit(3);
  EXPECT_EQ(adapters.make_room("a", {}), Names{});
  EXPECT_TRUE(adapters.empty());
  adapters.add({"a", Version{0}});
  EXPECT_EQ(adapters.make_room("b", {"a"}), Names{});
  adapters.add({"b", Version{1}});
  EXPECT_EQ(adapters.make_room("c", {}), Names{"a"}) << "no response uses it; new requests use b until c is loaded";
  EXPECT_EQ(adapters.make_room("c", {}), Names{"c"}) << "the load before failed";
  adapters.add({"c", Version{2}});
  EXPECT_EQ(adapters.make_room("d", {"b", "c"}), Names{});
  adapters.add({"d", Version{3}});
  EXPECT_EQ(adapters.newest().name, "d");
  EXPECT_EQ(adapters.make_room("e", {"b", "c", "d"}), Names{"b"}) << "the oldest, although responses use it";
  EXPECT_EQ(adapters.find("b"), nullptr);
  adapters.abandon_all();
  EXPECT_TRUE(adapters.empty());
  EXPECT_EQ(adapters.make_room("f", {"c"}), (Names{"e", "c", "d"}));
  adapters.set_limit(1);
  adapters.add({"f", Version{5}});
  EXPECT_EQ(adapters.make_room("g", {"f"}), Names{"f"});
  EXPECT_TRUE(adapters.empty());
}

}  // namespace
}  // namespace echoline::worker

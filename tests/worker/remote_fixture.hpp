// The fixture of tests of engines over HTTP: a server that imitates SGLang or vLLM, and policies to install.
#pragma once
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <map>
#include <memory>
#include <vector>

#include "delta/digest.hpp"
#include "delta/patch.hpp"
#include "engine_server.hpp"
#include "tests/delta/in_memory.hpp"
#include "tests/worker/publication.hpp"
#include "worker/engines/remote.hpp"
#include "worker/groups.hpp"

namespace echoline::worker {

namespace fs = std::filesystem;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

inline constexpr Duration kSlice = milliseconds(20);

inline std::string server_name(const ::testing::TestParamInfo<Speaks>& info) {
  switch (info.param) {
    case Speaks::kSglang:
      return "Sglang";
    case Speaks::kVllm:
      return "Vllm";
    case Speaks::kVllmCompletions:
      return "VllmCompletions";
    case Speaks::kVllmReceiver:
      return "VllmReceiver";
  }
  return {};
}

// Versions of a policy, and the deltas between them.
class StoredPolicies {
 public:
  overlay::Publication snapshot(std::size_t v) {
    return publication(v, std::nullopt, *delta::encode_snapshot(states_[v].view()), states_[v].digest());
  }
  overlay::Publication delta(std::size_t from, std::size_t to) {
    return publication(to, from, *delta::encode_delta(states_[from].view(), states_[to].view()), states_[to].digest());
  }

 protected:
  std::vector<delta::OwnedState> states_;
};

// Policies of one tensor. With `fixed` they have another one, which never changes.
class Policies : public StoredPolicies {
 public:
  explicit Policies(std::size_t count, bool fixed = false) {
    for (std::size_t v = 0; v < count; ++v) {
      delta::StateView like{{"model.norm.weight", delta::DType::kBF16, {4096}, {}}};
      if (fixed) like.insert(like.begin(), {"model.fixed.weight", delta::DType::kBF16, {64}, {}});
      delta::OwnedState state = *delta::OwnedState::empty_like(like);
      if (fixed) std::ranges::fill(state.mutable_bytes(0), std::byte{1});
      auto bytes = state.mutable_bytes(fixed ? 1 : 0);
      for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(mix(i, i % 64 == 0 ? v : 0));
      state.seal();
      states_.push_back(std::move(state));
    }
  }
  delta::Digest digest(std::size_t v) { return states_[v].digest(); }

 private:
  static std::size_t mix(std::size_t i, std::size_t v) { return (i * 37 + v * 101) & 0x7f; }
};

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (fs::temp_directory_path() / "echoline-test-XXXXXX").string();
    path_ = ::mkdtemp(name.data());
  }
  ~TemporaryFolder() { fs::remove_all(path_); }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

class RemoteTest : public ::testing::TestWithParam<Speaks> {
 protected:
  RemoteTest() {
    schema::RunSpec spec;
    spec.set_seed(5);
    spec.set_model_config_json(model::preset("tiny-64")->to_json());
    const auto tokenizer = model::Tokenizer::characters(model::kCharacterAlphabet);
    spec.set_tokenizer_json(tokenizer->to_json());
    spec.add_eos(static_cast<std::uint32_t>(*tokenizer->end_of_text()));
    spec.set_prompt_json(R"({"text": "{prompt}"})");
    spec.set_adapter_name("arithmetic");
    spec.set_response_tokens_max(30);
    spec.set_temperature(1);
    spec.set_top_p(1);
    task_ = *make_task(std::move(spec));
    options_.kind = is_vllm() ? EngineKind::kVllm : EngineKind::kSglang;
    options_.folder = folder_.path() / "policy";
    options_.patience = seconds(20);
    options_.first_retry_delay = milliseconds(5);
    host_ = {&stop_, [this] {
               if (while_waiting_) while_waiting_();
             }};
  }
  // A server of another owner, which has read the folder of the first policy.
  void attach() {
    server_ = std::make_unique<EngineServer>(
        GetParam(), hashing_model(static_cast<std::int32_t>(task_.model.vocab_size) - 1, hold_));
    options_.url = server_->url();
    make();
    if (is_vllm()) while_waiting_ = [this] { name_folder(); };
  }
  // vLLM gets its folder when it starts, so the folder must exist before.
  void name_folder() {
    if (named_ || !fs::exists(options_.folder / "model.safetensors")) return;
    server_->replace(options_.folder);
    named_ = true;
  }
  void make() {
    auto engine = make_remote_engine(options_, task_, host_);
    ASSERT_TRUE(engine) << engine.error().message();
    engine_ = std::move(*engine);
  }
  void install(const overlay::Publication& p) {
    if (is_vllm() && server_ && !named_) {
      ASSERT_TRUE(delta_free_first(p));
    }
    const Status installed = engine_->install(p);
    ASSERT_TRUE(installed) << installed.error().message();
    EXPECT_EQ(engine_->version(), p.version);
    EXPECT_EQ(engine_->digest(), p.policy_digest);
  }
  // Imitates a server that starts once the folder is complete.
  bool delta_free_first(const overlay::Publication& p) {
    overlay::Publication first = p;
    first.activate = false;
    if (!engine_->install(first)) return false;
    name_folder();
    return named_;
  }
  void submit(std::uint64_t id, std::int64_t tokens_max = 20) {
    engine_->submit({id, {1, 2, 3}, tokens_max, id * 7 + 1});
  }
  std::map<std::uint64_t, Result<Response>> finish(seconds limit = seconds(30)) {
    std::map<std::uint64_t, Result<Response>> all;
    const auto end = std::chrono::steady_clock::now() + limit;
    while (engine_->sequences_in_progress() > 0 && engine_->status() && std::chrono::steady_clock::now() < end)
      for (Outcome& outcome : engine_->poll(kSlice)) all.emplace(outcome.id, std::move(outcome.response));
    return all;
  }
  // No response ends by itself: this token never comes.
  void no_end() {
    const auto last = static_cast<model::Token>(task_.model.vocab_size - 1);
    task_.phrasing = *model::Phrasing::from_parts(task_.phrasing->tokenizer(), {last}, R"({"text": "{prompt}"})");
  }
  bool is_vllm() const { return GetParam() != Speaks::kSglang; }
  std::string draw_path() const {
    if (!is_vllm()) return "/generate";
    return names_versions() ? "/inference/v1/generate" : "/v1/completions";
  }
  // By its tokens' spans.
  bool names_versions() const { return GetParam() == Speaks::kVllm || GetParam() == Speaks::kVllmReceiver; }
  std::string load_path() const {
    if (GetParam() == Speaks::kVllmReceiver) return "/update_weights";
    return is_vllm() ? "/collective_rpc" : "/update_weights_from_disk";
  }
  static void expect_whole(const Result<Response>& r, std::uint64_t version, std::int64_t tokens_max = 20) {
    ASSERT_TRUE(r) << r.error().message();
    EXPECT_TRUE(r->ended || std::ssize(r->tokens) == tokens_max) << r->tokens.size();
    EXPECT_EQ(r->logprobs.size(), r->tokens.size());
    for (const float logprob : r->logprobs) EXPECT_LE(logprob, 0);
    ASSERT_FALSE(r->spans.empty());
    EXPECT_EQ(r->spans.back().version, Version{version});
    EXPECT_EQ(r->spans.back().end, r->tokens.size());
  }

  TemporaryFolder folder_;
  Policies policies_{6};
  Task task_;
  EngineOptions options_;
  std::atomic<bool> stop_ = false;
  EngineHost host_;
  std::function<void()> while_waiting_;
  bool named_ = false;
  std::shared_ptr<Hold> hold_ = std::make_shared<Hold>();
  std::unique_ptr<EngineServer> server_;
  std::unique_ptr<Engine> engine_;
};

}  // namespace echoline::worker

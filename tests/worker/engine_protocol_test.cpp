// What inference servers answer, read from bytes; and what can be told from the answers about their weights.
#include <gtest/gtest.h>

#include "base/random.hpp"
#include "worker/engines/fingerprints.hpp"
#include "worker/engines/make.hpp"
#include "worker/engines/protocol.hpp"
#include "worker/engines/remote_phase.hpp"

namespace echoline::worker {
namespace {

using Verdict = Fingerprints::Verdict;

overlay::Digest digest(unsigned char n) {
  overlay::Digest d{};
  d[0] = std::byte{n};
  return d;
}

TEST(Fingerprints, TellStaleWeightsFromNewOnes) {
  Fingerprints prints;
  EXPECT_EQ(prints.judge(digest(1), {-1, -2}, 0), Verdict::kNew) << "the first tells nothing";
  prints.keep(digest(1), {-1, -2});
  EXPECT_EQ(prints.judge(digest(2), {-1, -2}, 0), Verdict::kStale);
  EXPECT_EQ(prints.judge(digest(2), {-1, -2.0001}, 0), Verdict::kNew);
  EXPECT_EQ(prints.judge(digest(2), {-1, -2.0001}, 0.001), Verdict::kStale) << "within what the same weights differ by";
  prints.keep(digest(2), {-1, -2.0001});
  prints.keep(digest(3), {-1.5, -2});
  EXPECT_EQ(prints.judge(digest(4), {-1, -2}, 0), Verdict::kStale) << "as two policies before";
  EXPECT_EQ(prints.judge(digest(3), {-1.5, -2}, 0), Verdict::kSame);
  EXPECT_EQ(prints.judge(digest(3), {-1.52, -2}, 0), Verdict::kSame) << "other kernels";
  EXPECT_EQ(prints.judge(digest(3), {-1.02, -2}, 0), Verdict::kOther) << "nearer to another policy";
  EXPECT_EQ(prints.judge(digest(3), {-9, -9}, 0), Verdict::kOther);
  EXPECT_EQ(prints.judge(digest(3), {-1.5}, 0), Verdict::kOther);
}

TEST(EngineMaker, AHostOfAGpuDecodesOnAllItsProcessors) {
  const unsigned all = std::max(1u, std::thread::hardware_concurrency());
  EngineOptions options;
  EXPECT_EQ(threads_of(options), 1u) << "other workers may share a CPU";
  options.device = "cuda";
  EXPECT_EQ(threads_of(options), all);
  options.threads = 5;
  EXPECT_EQ(threads_of(options), 5u);
  options.threads = 0;
  EXPECT_EQ(threads_of(options), all);
  EngineOptions served;
  served.kind = EngineKind::kVllm;
  EXPECT_EQ(threads_of(served), all);
}

TEST(EngineMaker, OptionsThatDoNotGoTogetherAreRefused) {
  const auto refused = [](auto change) {
    EngineOptions options;
    options.builtin = [](const BuiltinOptions&) { return Result<std::unique_ptr<Engine>>(std::unique_ptr<Engine>()); };
    change(options);
    const auto maker = engine_maker(options);
    return maker ? std::string() : maker.error().message();
  };
  EXPECT_EQ(refused([](auto&) {}), "");
  EXPECT_NE(refused([](auto& o) { o.builtin = {}; }).find("ECHOLINE_TORCH=ON"), std::string::npos) << "it is not there";
  EXPECT_NE(refused([](auto& o) { o.url = "http://x"; }), "");
  EXPECT_NE(refused([](auto& o) { o.kind = EngineKind::kVllm; }), "");
  EXPECT_NE(refused([](auto& o) { o.kind = EngineKind::kVllm, o.url = "x"; }), "");
  EXPECT_NE(refused([](auto& o) { o.kind = EngineKind::kVllm, o.command = "vllm serve {model}"; }), "");
  EXPECT_EQ(refused([](auto& o) {
              o.kind = EngineKind::kVllm, o.command = "vllm serve {model} --port {port}", o.builtin = {};
            }),
            "");
  EXPECT_EQ(refused([](auto& o) { o.kind = EngineKind::kSglang, o.url = "http://127.0.0.1:30000"; }), "");
  EXPECT_EQ(refused([](auto& o) { o.device = "cuda"; }), "");
  EXPECT_NE(refused([](auto& o) { o.device = "cuda", o.kind = EngineKind::kSglang, o.url = "http://127.0.0.1:30000"; }),
            "");
}

// As the documentation of both has them.
constexpr const char* kSglang =
    R"({"text":"ab","output_ids":[7,8],"meta_info":{"id":"1","finish_reason":{"type":"stop","matched":8},"prompt_tokens":2,
        "weight_version":"42","output_token_logprobs":[[-0.5,7,null],[-1.25,8,null]],"input_token_logprobs":[[null,1,null],[-3.5,2,null]],
        "output_top_logprobs":[[[-0.5,7,null],[-1,3,null],[-2,4,null],[-3,5,null],[-4.5,6,null]]]}})";
constexpr const char* kVllm =
    R"({"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":"ab","finish_reason":"stop","stop_reason":8,
        "token_ids":[7,8],"prompt_token_ids":[1,2],"logprobs":{"tokens":["a","b"],"token_logprobs":[-0.5,-1.25],
        "top_logprobs":[{"token_id:7":-0.5,"token_id:3":-1,"token_id:4":-2,"token_id:5":-3,"token_id:6":-4.5,"token_id:9":-8}]},
        "prompt_logprobs":[null,{"2":{"logprob":-3.5,"rank":9,"decoded_token":"b"}}]}]})";

TEST(EngineAnswers, AreReadAsDocumented) {
  for (const bool sglang : {true, false}) {
    const auto protocol = sglang ? sglang_protocol() : vllm_protocol();
    const std::string body = sglang ? kSglang : kVllm;
    Draw draw;
    draw.context = {1, 2};
    const auto piece = protocol->drawn(draw, body);
    ASSERT_TRUE(piece) << piece.error().message();
    EXPECT_EQ(piece->tokens, (std::vector<model::Token>{7, 8}));
    EXPECT_EQ(piece->logprobs, (std::vector<double>{-0.5, -1.25}));
    EXPECT_FALSE(piece->aborted);
    EXPECT_EQ(piece->weights, sglang ? std::optional<std::string>("42") : std::nullopt);
    const auto probed = protocol->probed({1, 2}, body);
    ASSERT_TRUE(probed) << probed.error().message();
    EXPECT_EQ(probed->logprobs, std::vector<double>{-3.5});
    EXPECT_EQ(*protocol->spread_of(body), 4);
    EXPECT_FALSE(protocol->probed({1, 3}, body)) << "of another text";
  }
}

// Whatever stands there: an answer or an error.
TEST(EngineAnswers, OfAnyBytesDoNoHarm) {
  Random random(3);
  for (const bool sglang : {true, false}) {
    const auto protocol = sglang ? sglang_protocol() : vllm_protocol();
    const std::string good = sglang ? kSglang : kVllm;
    Draw draw;
    draw.context = {1, 2};
    const auto read = [&](const std::string& body) {
      const auto piece = protocol->drawn(draw, body);
      EXPECT_TRUE(!piece || piece->aborted || piece->tokens.size() == piece->logprobs.size());
      (void)protocol->probed({1, 2}, body);
      (void)protocol->spread_of(body);
      for (const Step& step : protocol->load("/x", Version{1}))
        if (step.accepts) (void)step.accepts(body);
    };
    for (const char* body :
         {"", "{}", "[]", "null", "{\"choices\":[]}", "{\"choices\":[null]}", "{\"meta_info\":[]}", "\xff\xfe"})
      read(body);
    for (int i = 0; i < 20000; ++i) {
      std::string body = good;
      for (std::uint64_t n = 1 + random.below(4); n > 0; --n) {
        const std::size_t at = random.below(body.size());
        if (random.below(2) == 0)
          body[at] = "0123456789[]{},:\"-.en x"[random.below(23)];
        else
          body.erase(at, 1 + random.below(8));
      }
      read(body);
    }
  }
}

TEST(RemotePhase, OnlyPhasesThatFollowAreTaken) {
  using enum RemotePhase::Phase;
  RemotePhase phase;
  EXPECT_DEATH(phase.move(kReady), "an engine that is empty is to be ready");
  for (const auto next : {kDown, kWaking, kLoading, kLoading, kReady, kSuspected, kLoading, kReady, kLoading, kDown})
    phase.move(next);
  EXPECT_DEATH(phase.move(kLoading), "down is to be loading");
  phase.move(kWaking);
  EXPECT_TRUE(phase.looked_at());
  EXPECT_FALSE(phase.error());
  phase.break_down(fail(Code::kIo, "engine", "gone"));
  EXPECT_EQ(phase.error()->detail, "gone");
  for (const auto next : {kEmpty, kDown, kWaking, kSuspected, kLoading, kReady, kBroken})
    EXPECT_DEATH(phase.move(next), "broken is to be");
}

}  // namespace
}  // namespace echoline::worker

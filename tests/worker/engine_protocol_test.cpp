// Parsing of inference servers' answers, and the conclusions about the weights behind them.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/random.hpp"
#include "worker/engines/expert_rows.hpp"
#include "worker/engines/fingerprints.hpp"
#include "worker/engines/learner_comparison.hpp"
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

TEST(Fingerprints, DistinguishStaleWeightsFromNewOnes) {
  Fingerprints prints;
  EXPECT_EQ(prints.judge(digest(1), {-1, -2}, 0), Verdict::kNew) << "the first comparison has no reference";
  prints.keep(digest(1), {-1, -2});
  EXPECT_EQ(prints.judge(digest(2), {-1, -2}, 0), Verdict::kStale);
  EXPECT_EQ(prints.judge(digest(2), {-1, -2.0001}, 0), Verdict::kNew);
  EXPECT_EQ(prints.judge(digest(2), {-1, -2.0001}, 0.001), Verdict::kStale) << "within the noise of equal weights";
  prints.keep(digest(2), {-1, -2.0001});
  prints.keep(digest(3), {-1.5, -2});
  EXPECT_EQ(prints.judge(digest(4), {-1, -2}, 0), Verdict::kStale) << "as two policies before";
  EXPECT_EQ(prints.judge(digest(3), {-1.5, -2}, 0), Verdict::kSame);
  EXPECT_EQ(prints.judge(digest(3), {-1.52, -2}, 0), Verdict::kSame) << "other kernels";
  EXPECT_EQ(prints.judge(digest(3), {-1.02, -2}, 0), Verdict::kOther) << "nearer to another policy";
  EXPECT_EQ(prints.judge(digest(3), {-9, -9}, 0), Verdict::kOther);
  EXPECT_EQ(prints.judge(digest(3), {-1.5}, 0), Verdict::kOther);
}

TEST(ProbeNoise, BoundsWhatOneAnswerCanTell) {
  ProbeNoise noise;
  EXPECT_FALSE(noise.bound(7e-6)) << "nothing has been measured";
  noise.record_distance(0);
  EXPECT_EQ(noise.bound(7e-6), ProbeNoise::kNoiseMin);
  EXPECT_EQ(noise.bound(0.03), 0.03) << "in bf16, one answer rarely suffices";
  noise.record_distance(1e-3);
  noise.record_distance(1e-6);
  EXPECT_EQ(noise.bound(7e-6), 2e-3);
}

// Distances that vLLM 0.32 had to the learner with an output head of the first policy, and without that mistake.
TEST(LearnerComparison, SeesAPartOfTheWeightsThatStaysBehind) {
  LearnerComparison fp32;
  EXPECT_TRUE(fp32.check(7e-6, true));
  EXPECT_TRUE(fp32.check(6.7e-6, false));
  EXPECT_FALSE(fp32.check(1.4e-4, false));
  EXPECT_TRUE(fp32.check(1.4e-4, true)) << "a process that has just read the weights";
  LearnerComparison bf16;
  EXPECT_TRUE(bf16.check(0.029, true));
  EXPECT_TRUE(bf16.check(0.052, false));
  EXPECT_FALSE(bf16.check(0.3, false));
  LearnerComparison other;
  EXPECT_FALSE(other.check(3.1, true)) << "another model";
  EXPECT_FALSE(other.check(std::nan(""), true));
  EXPECT_DOUBLE_EQ(LearnerComparison::distance(std::vector<double>{-1, -2}, std::vector<double>{-1.5, -2.1}), 0.3);
  EXPECT_FALSE(other.check(LearnerComparison::distance(std::vector<double>{-1}, std::vector<double>{-1, -2}), true));
}

TEST(EngineMaker, AHostOfAGpuDecodesOnAllItsProcessors) {
  const unsigned processors = std::max(1u, std::thread::hardware_concurrency());
  EngineOptions options;
  EXPECT_EQ(threads_of(options), 1u) << "other workers may share a CPU";
  options.device = "cuda";
  EXPECT_EQ(threads_of(options), processors);
  options.threads = 5;
  EXPECT_EQ(threads_of(options), 5u);
  options.threads = 0;
  EXPECT_EQ(threads_of(options), processors);
  EngineOptions served;
  served.kind = EngineKind::kVllm;
  EXPECT_EQ(threads_of(served), processors);
}

TEST(EngineMaker, OptionsThatDoNotGoTogetherAreRefused) {
  const auto refused = [](auto change) {
    EngineOptions options;
    options.builtin_maker = [](const BuiltinOptions&) {
      return Result<std::unique_ptr<Engine>>(std::unique_ptr<Engine>());
    };
    change(options);
    const auto maker = engine_maker(options);
    return maker ? std::string() : maker.error().message();
  };
  EXPECT_EQ(refused([](auto&) {}), "");
  EXPECT_NE(refused([](auto& o) { o.builtin_maker = {}; }).find("ECHOLINE_TORCH=ON"), std::string::npos)
      << "the server is unreachable";
  EXPECT_NE(refused([](auto& o) { o.url = "http://x"; }), "");
  EXPECT_NE(refused([](auto& o) { o.kind = EngineKind::kVllm; }), "");
  EXPECT_NE(refused([](auto& o) { o.kind = EngineKind::kVllm, o.url = "x"; }), "");
  EXPECT_NE(refused([](auto& o) { o.kind = EngineKind::kVllm, o.command = "vllm serve {model}"; }), "");
  EXPECT_EQ(refused([](auto& o) {
              o.kind = EngineKind::kVllm, o.command = "vllm serve {model} --port {port}", o.builtin_maker = {};
            }),
            "");
  EXPECT_EQ(refused([](auto& o) { o.kind = EngineKind::kSglang, o.url = "http://127.0.0.1:30000"; }), "");
  EXPECT_NE(refused([](auto& o) { o.kind = EngineKind::kSglang, o.url = "http://127.0.0.1:30000", o.engines = 2; }),
            "");
  EXPECT_NE(refused([](auto& o) { o.gpus_per_engine = 2; }), "");
  const auto refused_with = [&](const std::string& more, std::size_t gpus) {
    return refused([&](auto& o) {
      o.kind = EngineKind::kVllm, o.command = "vllm serve {model} --port {port} " + more, o.gpus_per_engine = gpus;
    });
  };
  EXPECT_NE(refused_with("--tensor-parallel-size 2", 1).find("--gpus-per-engine is 1"), std::string::npos);
  EXPECT_EQ(refused_with("--tensor-parallel-size 2", 2), "");
  EXPECT_EQ(refused_with("--tensor-parallel-size {gpus}", 1), "");
  EXPECT_EQ(refused([](auto& o) { o.device = "cuda"; }), "");
  EXPECT_NE(refused([](auto& o) { o.device = "cuda", o.kind = EngineKind::kSglang, o.url = "http://127.0.0.1:30000"; }),
            "");
}

// Examples from the documentation of both servers.
constexpr const char* kSglang =
    R"({"text":"ab","output_ids":[7,8],"meta_info":{"id":"1","finish_reason":{"type":"stop","matched":8},
        "prompt_tokens":2,"weight_version":"42","output_token_logprobs":[[-0.5,7,null],[-1.25,8,null]],
        "input_token_logprobs":[[null,1,null],[-3.5,2,null]],
        "output_top_logprobs":[[[-0.5,7,null],[-1,3,null],[-2,4,null],[-3,5,null],[-4.5,6,null]]]}})";
constexpr const char* kVllm =
    R"({"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":"ab","finish_reason":"stop",
        "stop_reason":8,"token_ids":[7,8],"prompt_token_ids":[1,2],
        "logprobs":{"tokens":["a","b"],"token_logprobs":[-0.5,-1.25],
        "top_logprobs":[{"token_id:7":-0.5,"token_id:3":-1,"token_id:4":-2,"token_id:5":-3,
        "token_id:6":-4.5,"token_id:9":-8}]},
        "prompt_logprobs":[null,{"2":{"logprob":-3.5,"rank":9,"decoded_token":"b"}}]}]})";

// Answers of vLLM 0.32.
TEST(Receiver, IsAskedForAndSaysWhyItIsNotThere) {
  const auto vllm = vllm_protocol();
  const auto call = vllm->receiver_request("/dev/shm/echoline-engine-1");
  ASSERT_TRUE(call);
  EXPECT_EQ(call->path, "/init_weight_transfer_engine");
  EXPECT_EQ(call->body, R"({"init_info":{"folder":"/dev/shm/echoline-engine-1","interface":1}})");
  EXPECT_TRUE(vllm->on_receiver_response(200, R"({"message":"Weight transfer initialized"})"));
  const auto reason = [&](int status, std::string_view body) {
    return vllm->on_receiver_response(status, body).error().detail;
  };
  EXPECT_EQ(
      reason(500, R"({"error":{"message":"Call to collective_rpc method failed: Worker failed with error 'Weight )"
                  R"(transfer not configured. Please set weight_transfer_config to enable weight transfer.', please )"
                  R"(check the stack trace above for the root cause","type":"InternalServerError","param":null,)"
                  R"("code":500}})"),
      "Weight transfer not configured. Please set weight_transfer_config to enable weight transfer.");
  EXPECT_EQ(reason(400, R"({"error":{"message":"Invalid init_info for NCCLWeightTransferEngine"}})"),
            "Invalid init_info for NCCLWeightTransferEngine");
  EXPECT_EQ(reason(404, R"({"detail":"Not Found"})"), "it knows no weight transfer");
  EXPECT_EQ(reason(500, "<html>"), "status 500");
  EXPECT_FALSE(sglang_protocol()->receiver_request("/x"));
}

TEST(EngineAnswers, AreReadAsDocumented) {
  for (const bool sglang : {true, false}) {
    const auto protocol = sglang ? sglang_protocol() : vllm_protocol();
    const std::string body = sglang ? kSglang : kVllm;
    SampleRequest draw;
    draw.context = {1, 2};
    const auto piece = protocol->parse_sample_response(draw, body);
    ASSERT_TRUE(piece) << piece.error().message();
    EXPECT_EQ(piece->tokens, (std::vector<model::Token>{7, 8}));
    EXPECT_EQ(piece->logprobs, (std::vector<double>{-0.5, -1.25}));
    EXPECT_FALSE(piece->aborted);
    ASSERT_EQ(piece->spans.size(), sglang ? 1u : 0u);
    if (sglang) {
      EXPECT_EQ(piece->spans[0].weights_name, "42");
    }
    const auto probed = protocol->parse_scores({1, 2}, {}, body);
    ASSERT_TRUE(probed) << probed.error().message();
    EXPECT_EQ(probed->logprobs, std::vector<double>{-3.5});
    EXPECT_EQ(*protocol->parse_spread(body), 4);
    EXPECT_FALSE(protocol->parse_scores({1, 3}, {}, body)) << "of another text";
  }
}

// Recorded from vLLM 0.32.0 with SmolLM2-135M (fields that are null left out): a response that was under way while the
// weights were exchanged, and the answer of a server that was started without --enable-scale-out.
constexpr const char* kVllmTokens =
    R"({"request_id":"generate-tokens-99a7d7a66751dedd","model":"/dev/shm/t1","created":1795716815,
        "usage":{"prompt_tokens":4,"total_tokens":8,"completion_tokens":4},"prompt_token_ids":[1,4093,198,1780],
        "output_mode":"tokens","choices":[{"index":0,"finish_reason":"length","stop_reason":null,
        "token_ids":[314,260,3049,2376],"routed_experts":null,"sampling_mask":null,
        "weight_versions":[{"version":"7","start":0,"end":3},{"version":"8","start":3,"end":4}],"logprobs":{"content":[
        {"token_id":314,"logprob":-0.2867429852485657,"rank":1,
         "top_logprobs":[{"token_id":314,"logprob":-0.2867429852485657,"rank":1}]},
        {"token_id":260,"logprob":-0.22507697343826294,"rank":1,
         "top_logprobs":[{"token_id":260,"logprob":-0.22507697343826294,"rank":1}]},
        {"token_id":3049,"logprob":-5.639614105224609,"rank":32,
         "top_logprobs":[{"token_id":3049,"logprob":-5.639614105224609,"rank":32}]},
        {"token_id":2376,"logprob":-6.636347770690918,"rank":56,"top_logprobs":[]}]}}]})";
constexpr const char* kVllmNoScaleOut = R"({"error":{"message":"Scale-out endpoints are disabled. )"
                                        R"(Restart vllm serve with --enable-scale-out to enable them.",
        "type":"PermissionDeniedError","param":null,"code":403}})";

TEST(EngineAnswers, OfVllmSayUnderWhichWeightsEachTokenWasDrawn) {
  const auto protocol = vllm_protocol();
  ASSERT_TRUE(protocol->interface_request());
  ASSERT_TRUE(protocol->on_interface_response(200, kVllmTokens));
  EXPECT_TRUE(protocol->keeps_responses());
  SampleRequest draw;
  draw.context = {1, 4093, 198, 1780};
  const auto piece = protocol->parse_sample_response(draw, kVllmTokens);
  ASSERT_TRUE(piece) << piece.error().message();
  EXPECT_EQ(piece->tokens, (std::vector<model::Token>{314, 260, 3049, 2376}));
  EXPECT_EQ(piece->logprobs.size(), 4u);
  ASSERT_EQ(piece->spans.size(), 2u);
  EXPECT_EQ(piece->spans[1].weights_name, "8");
  EXPECT_EQ(piece->spans[1].end, 4u);
  draw.context = {1};
  EXPECT_FALSE(protocol->parse_sample_response(draw, kVllmTokens)) << "of another prompt";
  EXPECT_EQ(protocol->sample_call(draw).path, "/inference/v1/generate");
  // Without the interface, responses return at a pause.
  ASSERT_TRUE(protocol->on_interface_response(403, kVllmNoScaleOut));
  EXPECT_FALSE(protocol->keeps_responses());
  EXPECT_EQ(protocol->sample_call(draw).path, "/v1/completions");
  EXPECT_TRUE(protocol->name_weights(Version{3}).empty());
  EXPECT_FALSE(protocol->on_interface_response(500, "")) << "asked again";
}

// The file that numpy's save() writes, in base64. `header_end` follows the shape.
std::string numpy_array(std::string_view type, std::string_view shape, std::string_view bytes,
                        std::string_view order = "False") {
  std::string header = fmt::format("{{'descr': '{}', 'fortran_order': {}, 'shape': {}, }}", type, order, shape);
  header.resize((10 + header.size() + 1 + 63) / 64 * 64 - 11, ' ');
  header += "\n";
  std::string file = std::string("\x93NUMPY\1", 7) + '\0' + static_cast<char>(header.size()) + '\0' + header;
  file += bytes;
  constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  for (std::size_t i = 0; i < file.size(); i += 3) {
    std::uint32_t bits = 0;
    for (std::size_t k = 0; k < 3; ++k)
      bits = bits << 8 | (i + k < file.size() ? static_cast<unsigned char>(file[i + k]) : 0u);
    for (std::size_t k = 0; k < 4; ++k) text.push_back(i + k > file.size() ? '=' : kDigits[bits >> (18 - 6 * k) & 63]);
  }
  return text;
}

// numpy.save() of numpy 2.3.5 for numpy.array([[[1, 0], [2, 3]]], dtype="uint8"), as vLLM 0.32 sends it.
constexpr const char* kSavedByNumpy =
    "k05VTVBZAQB2AHsnZGVzY3InOiAnfHUxJywgJ2ZvcnRyYW5fb3JkZXInOiBGYWxzZSwgJ3NoYXBlJzogKDEsIDIsIDIpLCB9ICAgICAgICAgICAg"
    "ICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgIAoBAAID";

TEST(ExpertRows, AreReadFromNumpysArrays) {
  const auto saved = parse_expert_rows(kSavedByNumpy);
  ASSERT_TRUE(saved) << saved.error().message();
  EXPECT_EQ(*saved, (data_plane::RoutedExperts{2, 2, {0, 1, 2, 3}}));
  EXPECT_EQ(numpy_array("|u1", "(1, 2, 2)", std::string("\1\0\2\3", 4)), kSavedByNumpy) << "as the arrays below";
  const std::string two_bytes("\1\0\0\1\xff\xff\xff\xff", 8);
  EXPECT_EQ(parse_expert_rows(numpy_array("<i2", "(1, 2, 2)", two_bytes)).value().values,
            (std::vector<std::int16_t>{1, 256, -1, -1}))
      << "-1 for a token that was not computed";
  EXPECT_EQ(parse_expert_rows(numpy_array("<u2", "(1, 2, 2)", two_bytes)).value().values,
            (std::vector<std::int16_t>{1, 256, -1, -1}));
  EXPECT_EQ(
      parse_expert_rows(numpy_array("<i4", "(2, 1, 1)", std::string("\5\0\0\0\xff\xff\xff\xff", 8))).value().values,
      (std::vector<std::int16_t>{5, -1}));
  EXPECT_EQ(parse_expert_rows(numpy_array("|u1", "(1, 2, 2)", std::string("\0\0\3\4", 4))).value().values,
            (std::vector<std::int16_t>{-1, -1, 3, 4}))
      << "a layer without experts";
  EXPECT_EQ(parse_expert_rows(numpy_array("|u1", "(0, 2, 2)", "")).value().tokens(), 0u);
  for (const std::string& bad :
       {std::string("****"), std::string("AAA"), std::string(), std::string("AAAA"),
        numpy_array("<f4", "(1, 1, 1)", "abcd"), numpy_array("|u1", "(1, 2, 2)", "abc"),
        numpy_array("|u1", "(4,)", "abcd"), numpy_array("|u1", "(1, 2, 2)", "abcd", "True"),
        numpy_array("|u1", "(999999999, 4096, 256)", "abcd"), numpy_array("|u1", "(1, 0, 2)", "")})
    EXPECT_FALSE(parse_expert_rows(bad)) << bad;
}

TEST(ExpertRows, OfLayersWithoutExpertsAreLeftOut) {
  model::ModelConfig model = *model::preset("tiny-moe");  // 3 layers, 2 experts per token
  model.experts->dense_layers = {1};
  const auto kept = [&](data_plane::RoutedExperts experts) {
    keep_mixture_layers(model, experts);
    return experts;
  };
  const data_plane::RoutedExperts want{2, 2, {0, 1, 4, 5, 2, 3, 6, 7}};
  EXPECT_EQ(kept({3, 2, {0, 1, -1, -1, 4, 5, 2, 3, -1, -1, 6, 7}}), want);
  EXPECT_EQ(kept(want), want);
  EXPECT_EQ(kept({4, 2, {0, 1, 2, 3, 4, 5, 6, 7}}), data_plane::RoutedExperts{}) << "of another model";
  model = *model::preset("tiny-64");
  EXPECT_EQ(kept(want), data_plane::RoutedExperts{});
  model.family = model::Family::kCarried;
  EXPECT_EQ(kept(want), want);
}

TEST(EngineAnswers, OfVllmTellTheExperts) {
  const auto protocol = vllm_protocol();
  ASSERT_TRUE(protocol->on_interface_response(200, kVllmTokens));
  SampleRequest draw;
  draw.context = {1, 4093, 198, 1780};
  auto answer = nlohmann::json::parse(kVllmTokens);
  EXPECT_EQ(protocol->parse_sample_response(draw, answer.dump())->experts.tokens(), 0u);
  // 7 of the 8 tokens: the last one is no input of the model.
  const std::string rows("\1\0\2\3\4\5\1\2\1\3\1\4\1\5", 14);
  answer["choices"][0]["routed_experts"] = numpy_array("|u1", "(7, 1, 2)", rows);
  const auto piece = protocol->parse_sample_response(draw, answer.dump());
  ASSERT_TRUE(piece) << piece.error().message();
  EXPECT_EQ(piece->experts.tokens(), 7u);
  EXPECT_EQ(piece->experts.values.front(), 0);
  // Those of the prompt apart.
  answer["prompt_routed_experts"] = numpy_array("|u1", "(4, 1, 2)", rows.substr(0, 8));
  answer["choices"][0]["routed_experts"] = numpy_array("|u1", "(3, 1, 2)", rows.substr(8));
  EXPECT_EQ(protocol->parse_sample_response(draw, answer.dump())->experts, piece->experts);
  answer["choices"][0]["routed_experts"] = numpy_array("|u1", "(7, 1, 2)", rows);
  EXPECT_FALSE(protocol->parse_sample_response(draw, answer.dump())) << "of more tokens than there are";
  answer["choices"][0]["routed_experts"] = 5;
  EXPECT_FALSE(protocol->parse_sample_response(draw, answer.dump()));
}

// Any bytes give an answer or an error.
TEST(EngineAnswers, OfAnyBytesDoNoHarm) {
  Random random(3);
  for (const char* const recorded : {kSglang, kVllm, kVllmTokens}) {
    const auto protocol = recorded == kSglang ? sglang_protocol() : vllm_protocol();
    if (recorded == kVllmTokens) {
      ASSERT_TRUE(protocol->on_interface_response(200, recorded));
    }
    const std::string good = recorded;
    SampleRequest draw;
    draw.context = {1, 2};
    if (recorded == kVllmTokens) draw.context = {1, 4093, 198, 1780};
    const auto read = [&](const std::string& body) {
      const auto piece = protocol->parse_sample_response(draw, body);
      EXPECT_TRUE(!piece || piece->aborted || piece->tokens.size() == piece->logprobs.size());
      (void)protocol->parse_scores({1, 2}, {}, body);
      (void)protocol->parse_spread(body);
      for (const Step& step : protocol->load("/x", Version{1}))
        if (step.check_answer) (void)step.check_answer(body);
    };
    for (const char* body :
         {"", "{}", "[]", "null", "{\"choices\":[]}", "{\"choices\":[null]}", "{\"meta_info\":[]}", "\xff\xfe"})
      read(body);
    for (int i = 0; i < 20000; ++i) {
      std::string body = good;
      for (std::uint64_t n = 1 + random.below(4); n > 0; --n) {
        const std::size_t position = random.below(body.size());
        if (random.below(2) == 0)
          body[position] = "0123456789[]{},:\"-.en x"[random.below(23)];
        else
          body.erase(position, 1 + random.below(8));
      }
      read(body);
    }
  }
}

TEST(RemotePhase, OnlyPhasesThatFollowAreTaken) {
  using enum RemotePhase::Phase;
  RemotePhase phase;
  EXPECT_DEATH(phase.move(kReady), "no transition from phase empty to ready");
  for (const auto next : {kDown, kWaking, kLoading, kLoading, kReady, kSuspected, kLoading, kReady, kLoading, kDown})
    phase.move(next);
  EXPECT_DEATH(phase.move(kLoading), "down to loading");
  phase.move(kWaking);
  EXPECT_TRUE(phase.awaits_health_check());
  EXPECT_FALSE(phase.error());
  phase.mark_broken(fail(Code::kIo, "engine", "gone"));
  EXPECT_EQ(phase.error()->detail, "gone");
  for (const auto next : {kEmpty, kDown, kWaking, kSuspected, kLoading, kReady, kBroken})
    EXPECT_DEATH(phase.move(next), "from phase broken to");
}

}  // namespace
}  // namespace echoline::worker

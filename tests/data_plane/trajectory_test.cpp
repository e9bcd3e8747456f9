// The trajectory checks: a sound trajectory passes, and each broken rule is named.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "base/random.hpp"
#include "tests/data_plane/trajectories.hpp"
#include "tests/fuzz/input.hpp"

namespace echoline::data_plane {
namespace {

TEST(Trajectory, SoundOnePassesAndRoundTrips) {
  Trajectory t = sound_trajectory();
  t.clear_spans();
  for (const auto& [begin, end, version] : {std::tuple{0u, 1u, 4u}, std::tuple{1u, 3u, 6u}}) {
    auto* span = t.add_spans();
    span->set_begin(begin);
    span->set_end(end);
    span->set_version(version);
  }
  t.set_metadata_json(R"({"note":[1,2]})");
  t.set_text("\xff\xfe not UTF-8");
  const auto parsed = parse_trajectory(t.SerializeAsString());
  ASSERT_TRUE(parsed) << parsed.error().message();
  EXPECT_EQ(parsed->SerializeAsString(), t.SerializeAsString());
  EXPECT_EQ(oldest_version(*parsed), Version{4});
}

TEST(Trajectory, EachBrokenRuleIsNamed) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  struct Case {
    std::string expected;
    std::function<void(Trajectory&)> break_rule;
  };
  const std::vector<Case> cases = {
      {"id has 0 bytes", [](Trajectory& t) { t.clear_id(); }},
      {"id has 129 bytes", [](Trajectory& t) { t.set_id(std::string(129, 'x')); }},
      {"problem_id has 0", [](Trajectory& t) { t.clear_problem_id(); }},
      {"policy_digest has 0", [](Trajectory& t) { t.clear_policy_digest(); }},
      {"policy_digest has 65", [](Trajectory& t) { t.set_policy_digest(std::string(65, 'd')); }},
      {"group, lease or worker id", [](Trajectory& t) { t.set_group(~0ull); }},
      {"0 prompt tokens", [](Trajectory& t) { t.clear_prompt_tokens(); }},
      {"0 response tokens", [](Trajectory& t) { t.clear_response_tokens(); }},
      {"token id 4294967295", [](Trajectory& t) { t.set_response_tokens(1, 0xffffffffu); }},
      {"2 log-probabilities for 3", [](Trajectory& t) { t.mutable_logprobs()->Truncate(2); }},
      {"log-probability nan", [&](Trajectory& t) { t.set_logprobs(0, nan); }},
      {"log-probability -inf", [](Trajectory& t) { t.set_logprobs(2, -std::numeric_limits<float>::infinity()); }},
      {"log-probability 0.01 of response token 1", [](Trajectory& t) { t.set_logprobs(1, 0.01f); }},
      {"2 loss_mask entries", [](Trajectory& t) { t.add_loss_mask(1), t.add_loss_mask(1); }},
      {"loss_mask[2] is 2",
       [](Trajectory& t) {
         for (const int m : {0, 1, 2}) t.add_loss_mask(static_cast<std::uint32_t>(m));
       }},
      {"0 version spans", [](Trajectory& t) { t.clear_spans(); }},
      {"begins at 0", [](Trajectory& t) { t.mutable_spans(0)->set_begin(1); }},
      {"expected a non-empty one", [](Trajectory& t) { t.mutable_spans(0)->set_end(0); }},
      {"end at 2, expected 3", [](Trajectory& t) { t.mutable_spans(0)->set_end(2); }},
      {"end at 4, expected 3", [](Trajectory& t) { t.mutable_spans(0)->set_end(4); }},
      {"version 0 after 0",
       [](Trajectory& t) {
         t.mutable_spans(0)->set_end(2);
         auto* span = t.add_spans();
         span->set_begin(2), span->set_end(3);
       }},
      {"out of range", [](Trajectory& t) { t.mutable_spans(0)->set_version(~0ull); }},
      {"reward is inf", [](Trajectory& t) { t.set_reward(std::numeric_limits<double>::infinity()); }},
      {"component 'exact' is nan", [&](Trajectory& t) { (*t.mutable_components())["exact"] = std::nan(""); }},
      {"65 reward components",
       [](Trajectory& t) {
         for (int i = 0; i < 64; ++i) (*t.mutable_components())[std::to_string(i)] = 0;
       }},
      {"text has", [](Trajectory& t) { t.set_text(std::string((4u << 20) + 1, 'x')); }},
      {"metadata_json has 1048578 bytes, at most 1048576 are allowed (rollout.metadata_max)",
       [](Trajectory& t) { t.set_metadata_json('"' + std::string(1u << 20, 'x') + '"'); }},
      {"fields that no Trajectory",
       [](Trajectory& t) {
         t.GetReflection()->MutableUnknownFields(&t)->AddLengthDelimited(99, std::string(1u << 20, 'x'));
       }},
      {"fields that no Trajectory",
       [](Trajectory& t) { t.GetReflection()->MutableUnknownFields(t.mutable_spans(0))->AddVarint(99, 1); }},
      {"not valid JSON", [](Trajectory& t) { t.set_metadata_json("{"); }},
      {"nests deeper", [](Trajectory& t) { t.set_metadata_json(std::string(100, '[') + std::string(100, ']')); }},
  };
  for (const Case& c : cases) {
    Trajectory t = sound_trajectory();
    c.break_rule(t);
    const auto result = validate(t);
    ASSERT_FALSE(result) << c.expected;
    EXPECT_EQ(result.error().code, Code::kInvalid);
    EXPECT_NE(result.error().message().find(c.expected), std::string::npos)
        << "expected '" << c.expected << "' in: " << result.error().message();
  }
}

// Storage serialises the parsed trajectory again, so that unknown fields cannot hide in it.
TEST(Trajectory, NothingUnknownSurvivesBesideItsComponents) {
  const Trajectory sound = sound_trajectory();
  // A component whose entry has a further field: 11 is the map; within it, 1 is the name, 2 the value, and 99 unknown.
  const std::string hidden(100'000, 'x');
  std::string entry = std::string(
                          "\x0a\x05"
                          "bonus"
                          "\x11",
                          8) +
                      std::string(8, '\0') + "\x9a\x06";
  for (std::size_t n = hidden.size(); n > 0; n >>= 7) entry += static_cast<char>((n & 0x7f) | (n > 0x7f ? 0x80 : 0));
  entry += hidden;
  std::string bytes = sound.SerializeAsString() + "\x5a";
  for (std::size_t n = entry.size(); n > 0; n >>= 7) bytes += static_cast<char>((n & 0x7f) | (n > 0x7f ? 0x80 : 0));
  bytes += entry;
  const auto parsed = parse_trajectory(bytes);
  if (parsed) {
    EXPECT_LT(parsed->SerializeAsString().size(), sound.SerializeAsString().size() + 100);
  }
}

TEST(Trajectory, ARunsLimitOfMetadataIsSaidByBothEndsAlike) {
  TrajectoryLimits limits;
  limits.metadata_max = Bytes{100};
  Trajectory t = sound_trajectory();
  t.set_metadata_json('"' + std::string(98, 'x') + '"');
  EXPECT_TRUE(check(t, limits));
  EXPECT_TRUE(check_metadata_size(t, limits.metadata_max));
  t.set_metadata_json('"' + std::string(99, 'x') + '"');
  EXPECT_EQ(check(t, limits).error().detail,
            "trajectory '1/0': metadata_json has 101 bytes, at most 100 are allowed (rollout.metadata_max)");
  EXPECT_EQ(check_metadata_size(t, limits.metadata_max).error().detail, check(t, limits).error().detail);
}

TEST(Trajectory, ToleratesSamplerRoundingAndFullMask) {
  Trajectory t = sound_trajectory();
  t.set_logprobs(0, 5e-5f);
  for (const std::uint32_t m : {1u, 0u, 1u}) t.add_loss_mask(m);
  EXPECT_TRUE(validate(t));
}

TEST(Messages, LimitsAndEmptyBodies) {
  TrajectoryLimits small;
  small.message_max = Bytes{10};
  EXPECT_EQ(parse_worker_message(std::string(11, 'x'), small).error().code, Code::kExhausted);
  EXPECT_EQ(parse_worker_message("").error().code, Code::kInvalid);
  EXPECT_EQ(parse_learner_message("").error().code, Code::kInvalid);
  EXPECT_EQ(parse_worker_message("\xff\xff\xff").error().code, Code::kCorrupt);

  schema::WorkerMessage message;
  *message.mutable_submission()->add_trajectories() = sound_trajectory();
  EXPECT_TRUE(parse_worker_message(message.SerializeAsString()));
  // An invalid trajectory must still parse, because the learner needs its group.
  message.mutable_submission()->mutable_trajectories(0)->clear_logprobs();
  EXPECT_TRUE(parse_worker_message(message.SerializeAsString()));
  message.mutable_failed()->set_detail(std::string(4097, 'x'));
  EXPECT_EQ(parse_worker_message(message.SerializeAsString()).error().code, Code::kInvalid);

  for (int i = 0; i <= 4096; ++i) message.mutable_progress()->add_leases(1);
  EXPECT_EQ(parse_worker_message(message.SerializeAsString()).error().code, Code::kInvalid);

  schema::LearnerMessage grant;
  grant.mutable_grant()->set_retry_after_ms(5);
  const auto parsed = parse_learner_message(grant.SerializeAsString());
  ASSERT_TRUE(parsed);
  EXPECT_EQ(parsed->grant().retry_after_ms(), 5u);
}

// A heartbeat carries two numbers, each valid for reports and for the fleet.
TEST(Messages, VitalsAreSoundNumbers) {
  EXPECT_EQ(parse_vitals("")->rollouts(), 0u);
  schema::Vitals vitals;
  vitals.set_rollouts(40);
  vitals.set_busy_s(2.5);
  const std::string sound = vitals.SerializeAsString();
  EXPECT_EQ(parse_vitals(sound)->rollouts(), 40u);
  EXPECT_EQ(parse_vitals(sound)->busy_s(), 2.5);
  for (const double busy_s : {-1.0, std::nan(""), HUGE_VAL, -HUGE_VAL, 1e11}) {
    vitals.set_busy_s(busy_s);
    EXPECT_EQ(parse_vitals(vitals.SerializeAsString()).error().code, Code::kInvalid) << busy_s;
  }
  vitals.set_busy_s(1);
  vitals.set_rollouts(~std::uint64_t{0});
  EXPECT_EQ(parse_vitals(vitals.SerializeAsString()).error().code, Code::kInvalid);
  vitals.set_rollouts(1);
  vitals.set_policies(~std::uint64_t{0});
  EXPECT_EQ(parse_vitals(vitals.SerializeAsString()).error().code, Code::kInvalid);
  vitals.set_policies(3);
  for (const double install_s : {-1.0, std::nan(""), HUGE_VAL, 1e11}) {
    vitals.set_install_s(install_s);
    EXPECT_EQ(parse_vitals(vitals.SerializeAsString()).error().code, Code::kInvalid) << install_s;
  }
  vitals.set_install_s(0.5);
  EXPECT_EQ(parse_vitals(vitals.SerializeAsString())->policies(), 3u);
  EXPECT_EQ(parse_vitals(R"({"rollouts":"x"})").error().code, Code::kCorrupt);
  EXPECT_EQ(parse_vitals(std::string(300, '\0')).error().code, Code::kExhausted);
  Random random(3);
  for (int i = 0; i < 20'000; ++i) {
    std::string bytes = sound;
    for (std::uint64_t n = 1 + random.below(3); n > 0; --n)
      bytes[random.below(bytes.size())] = static_cast<char>(random.below(256));
    test::fuzz_input(bytes);
  }
}

// Damaged bytes give an error or a trajectory that obeys every rule.
TEST(Trajectory, SurvivesSpoiledBytes) {
  for (const char* response : {"", "-", "#### ", "#### -1,200", "it is -1200.", "-1200", ",.,", "\xff#### 1"})
    test::fuzz_input(response);
  const std::string sound = sound_trajectory().SerializeAsString();
  Random random(7);
  int refused = 0;
  for (int i = 0; i < 20'000; ++i) {
    std::string bytes = sound;
    for (std::uint64_t n = 1 + random.below(4); n > 0; --n)
      bytes[random.below(bytes.size())] = static_cast<char>(random.below(256));
    if (random.below(4) == 0) bytes.resize(random.below(bytes.size()));
    refused += !parse_trajectory(bytes);
    test::fuzz_input(bytes);
  }
  EXPECT_GT(refused, 5'000);
}

}  // namespace
}  // namespace echoline::data_plane

// Requests of a client for samples: leases, results, lost workers, limits.
#include "learner/sample_desk.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

namespace echoline::learner {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr WorkerId kFirst{1}, kSecond{2};
const std::string kDigest = "digest";

class SampleDeskTest : public testing::Test {
 protected:
  static constexpr model::Token kEnd = 9;

  SampleRequest request(const std::string& id, std::uint32_t samples = 1) const {
    SampleRequest request;
    request.id = id;
    request.prompt = {1, 2, 3};
    request.samples = samples;
    request.tokens_max = 2;
    request.end_tokens = {kEnd};
    request.seed = 100;
    request.version = Version{4};
    return request;
  }
  std::vector<schema::Lease> grant(WorkerId worker, std::uint64_t rollouts = 100, Version version = Version{4}) {
    schema::WorkGrant answer;
    desk.grant(worker, version, kDigest, rollouts, now, answer);
    desk.check();
    return {answer.leases().begin(), answer.leases().end()};
  }
  // A result of the lease with these tokens for every member.
  static schema::Submission result(const schema::Lease& lease, std::vector<std::uint32_t> tokens) {
    schema::Submission submission;
    submission.set_lease(lease.id());
    for (std::uint32_t member = 0; member < lease.rollouts(); ++member) {
      schema::Trajectory& trajectory = *submission.add_trajectories();
      trajectory.set_id(fmt::format("{}/{}", lease.id(), member));
      trajectory.set_problem_id(lease.problem().id());
      trajectory.set_group(lease.group());
      trajectory.set_member(member);
      trajectory.mutable_prompt_tokens()->CopyFrom(lease.sampling().prompt_tokens());
      trajectory.mutable_response_tokens()->Add(tokens.begin(), tokens.end());
      for (std::size_t i = 0; i < tokens.size(); ++i) trajectory.add_logprobs(-0.5f - static_cast<float>(member));
      schema::VersionSpan& span = *trajectory.add_spans();
      span.set_end(static_cast<std::uint32_t>(tokens.size()));
      span.set_version(lease.version());
      trajectory.set_policy_digest(lease.policy_digest());
      trajectory.set_lease(lease.id());
      trajectory.set_worker(1);
    }
    return submission;
  }
  SampleDesk::Verdict store(WorkerId worker, const schema::Submission& submission) {
    auto verdict = desk.store(worker, submission, now);
    desk.check();
    return verdict;
  }

  double now = 1000;
  std::map<std::string, Result<std::vector<Sample>>> finished;
  SampleDesk desk{{.vocab_size = 12, .samples_per_lease = 2, .requests_max = 2, .tokens_max = 1000},
                  *model::Tokenizer::characters("0123456789+="),
                  now,
                  [this](const std::string& id, Result<std::vector<Sample>> samples) {
                    EXPECT_TRUE(finished.emplace(id, std::move(samples)).second) << id << " was reported twice";
                  }};
};

TEST_F(SampleDeskTest, GivesTheClientTheWorkersTokensAndLogprobs) {
  ASSERT_TRUE(desk.submit(request("a", 3)));
  const auto leases = grant(kFirst);
  ASSERT_EQ(leases.size(), 2);  // of two samples, and of one
  EXPECT_THAT(leases[0].sampling().prompt_tokens(), ElementsAre(1, 2, 3));
  EXPECT_EQ(leases[0].rollouts(), 2);
  EXPECT_EQ(leases[1].sampling().seed(), 102);  // the third sample draws with a seed of its own
  EXPECT_TRUE(leases[0].unscored());
  EXPECT_TRUE(grant(kSecond).empty());
  EXPECT_TRUE(store(kFirst, result(leases[1], {kEnd})).accepted);
  EXPECT_TRUE(finished.empty());
  EXPECT_TRUE(store(kFirst, result(leases[0], {5, 6})).accepted);
  const auto& samples = finished.at("a");
  ASSERT_TRUE(samples);
  ASSERT_EQ(samples->size(), 3);
  EXPECT_THAT((*samples)[1].tokens, ElementsAre(5, 6));
  EXPECT_THAT((*samples)[1].logprobs, ElementsAre(-1.5f, -1.5f));
  EXPECT_FALSE((*samples)[1].ended);
  EXPECT_THAT((*samples)[2].tokens, ElementsAre(kEnd));
  EXPECT_TRUE((*samples)[2].ended);
}

TEST_F(SampleDeskTest, ALostWorkerCostsARetryOnly) {
  ASSERT_TRUE(desk.submit(request("a")));
  const auto first = grant(kFirst);
  ASSERT_EQ(first.size(), 1);
  desk.release_worker(kFirst);
  desk.check();
  const auto second = grant(kSecond);
  ASSERT_EQ(second.size(), 1);
  EXPECT_EQ(second[0].sampling().seed(), first[0].sampling().seed());
  EXPECT_EQ(store(kFirst, result(first[0], {kEnd})).reason, "expired");
  EXPECT_TRUE(store(kSecond, result(second[0], {kEnd})).accepted);
  EXPECT_TRUE(finished.at("a"));
}

TEST_F(SampleDeskTest, ALeaseEndsUnlessItsWorkerMakesProgress) {
  ASSERT_TRUE(desk.submit(request("a")));
  const std::uint64_t lease = grant(kFirst).at(0).id();
  now += 50;
  desk.renew(kFirst, {lease}, 1, now);
  now += 50;
  desk.expire(now);
  EXPECT_TRUE(grant(kSecond).empty());
  desk.renew(kFirst, {lease}, 1, now);  // no progress since
  now += 20;
  desk.expire(now);
  EXPECT_EQ(grant(kSecond).size(), 1);
}

TEST_F(SampleDeskTest, FailsAfterTheSameRequestHasFailedOnSeveralWorkers) {
  ASSERT_TRUE(desk.submit(request("a")));
  for (int i = 0; i < 5; ++i) {
    const auto leases = grant(kFirst);
    ASSERT_EQ(leases.size(), 1) << i;
    desk.return_lease(kFirst, leases[0].id(), "out of memory");
  }
  ASSERT_FALSE(finished.at("a"));
  EXPECT_THAT(finished.at("a").error().message(),
              HasSubstr("workers failed 5 times to generate it, the last one: out"));
  // A lease that is returned through no fault of the request counts for nothing.
  ASSERT_TRUE(desk.submit(request("b")));
  for (int i = 0; i < 20; ++i) desk.return_lease(kFirst, grant(kFirst).at(0).id(), "");
  EXPECT_FALSE(finished.contains("b"));
}

TEST_F(SampleDeskTest, RefusesResultsThatAreNotTheRequests) {
  ASSERT_TRUE(desk.submit(request("a")));
  const auto refused = [&](const std::function<void(schema::Submission&)>& spoil) {
    const auto leases = grant(kFirst);
    if (leases.empty()) return std::string("no lease");
    schema::Submission submission = result(leases[0], {5, 6});
    spoil(submission);
    const auto verdict = store(kFirst, submission);
    EXPECT_FALSE(verdict.accepted);
    return verdict.detail;
  };
  EXPECT_THAT(refused([](auto& s) { s.mutable_trajectories(0)->set_prompt_tokens(1, 7); }), HasSubstr("its prompt"));
  EXPECT_THAT(refused([](auto& s) { s.mutable_trajectories(0)->set_response_tokens(1, 12); }), HasSubstr("token 12"));
  EXPECT_THAT(refused([](auto& s) { s.mutable_trajectories(0)->mutable_spans(0)->set_version(5); }),
              HasSubstr("tokens of version 5, expected 4"));
  EXPECT_THAT(refused([](auto& s) { s.mutable_trajectories(0)->set_policy_digest("other"); }), HasSubstr("digest"));
  EXPECT_THAT(refused([](auto& s) { s.mutable_trajectories(0)->set_logprobs(0, NAN); }), HasSubstr("finite"));
  EXPECT_EQ(finished.size(), 1);  // five failures: the request has failed too
}

TEST_F(SampleDeskTest, RefusesAResponseThatIsCutOrGoesOn) {
  for (const std::vector<std::uint32_t>& tokens : {std::vector<std::uint32_t>{5}, {kEnd, 5}, {5, 6, 7}}) {
    ASSERT_TRUE(desk.submit(request("a")));
    const auto leases = grant(kFirst);
    ASSERT_EQ(leases.size(), 1);
    EXPECT_EQ(store(kFirst, result(leases[0], tokens)).reason, "malformed") << tokens.size();
    desk.cancel("a");
    finished.clear();
  }
}

TEST_F(SampleDeskTest, EndsAtAStopString) {
  SampleRequest stops = request("a");
  stops.stop = {"56"};
  stops.tokens_max = 5;
  ASSERT_TRUE(desk.submit(stops));
  EXPECT_TRUE(store(kFirst, result(grant(kFirst).at(0), {4, 5, 6})).accepted);
  EXPECT_TRUE(finished.at("a")->at(0).ended);
}

TEST_F(SampleDeskTest, OneVersionIsSampledUntilANewerOneReplacesIt) {
  ASSERT_TRUE(desk.submit(request("a")));
  EXPECT_TRUE(grant(kFirst, 100, Version{5}).empty());
  EXPECT_TRUE(grant(kFirst, 100, Version{3}).empty());
  EXPECT_TRUE(desk.awaits_older(Version{5}));
  EXPECT_FALSE(desk.awaits_older(Version{4}));
  SampleRequest follows = request("b");
  follows.accepts_newer = true;
  ASSERT_TRUE(desk.submit(follows));
  desk.replace_versions_before(Version{5});
  EXPECT_THAT(finished.at("a").error().message(), HasSubstr("version 4 was replaced by version 5"));
  EXPECT_THAT(desk.submit(request("c")).error().message(), HasSubstr("make a new sampling client"));
  const auto leases = grant(kFirst, 100, Version{5});
  ASSERT_EQ(leases.size(), 1);
  EXPECT_TRUE(store(kFirst, result(leases[0], {5, 6})).accepted);
  EXPECT_TRUE(finished.at("b"));
}

TEST_F(SampleDeskTest, SaysWhyARequestWaits) {
  ASSERT_TRUE(desk.submit(request("a")));
  EXPECT_THAT(desk.waiting_reason("a", 0), HasSubstr("no worker has joined the run"));
  EXPECT_THAT(desk.waiting_reason("a", 2), HasSubstr("version 4 is on its way to 2 workers"));
  EXPECT_TRUE(grant(kFirst, 0).empty());  // no capacity
  EXPECT_THAT(desk.waiting_reason("a", 2), HasSubstr("2 workers are busy"));
  EXPECT_EQ(grant(kFirst).size(), 1);
  EXPECT_EQ(desk.waiting_reason("a", 2), "");
  desk.release_worker(kFirst);
  now += 901;
  desk.expire(now);
  EXPECT_THAT(finished.at("a").error().message(), HasSubstr("no worker took it within 900 s"));
}

TEST_F(SampleDeskTest, BoundsRequestsAndTokens) {
  ASSERT_TRUE(desk.submit(request("a")));
  ASSERT_TRUE(desk.submit(request("a")));  // sent again
  ASSERT_TRUE(desk.submit(request("b")));
  EXPECT_EQ(desk.submit(request("c")).error().code, Code::kExhausted);
  desk.cancel("a");
  SampleRequest large = request("c", 400);
  large.tokens_max = 3;
  EXPECT_THAT(desk.submit(large).error().message(), HasSubstr("send it again later"));
  EXPECT_TRUE(desk.submit(request("c")));
  desk.stop("the run has ended");
  EXPECT_EQ(finished.size(), 3);
  EXPECT_EQ(desk.submit(request("d")).error().message(), "sample: the run has ended");
  desk.check();
}

}  // namespace
}  // namespace echoline::learner

// Admission to the bundle's download, and the number of downloads at once.
#include "overlay/learner/bundle_gate.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/overlay/made.hpp"

namespace echoline::overlay {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::StartsWith;

constexpr double kNow = 1.7e9;
const auto kAuthority = std::make_shared<const trust::Authority>(made_authority());

BundleGate gate(std::optional<BitRate> up = std::nullopt) { return {kAuthority, Bytes{1000}, up}; }
std::string token(std::uint8_t nonce, const trust::Authority& authority = *kAuthority) {
  trust::Nonce n{};
  n[0] = std::byte{nonce};
  return std::string(trust::issue_token(authority, "o1", n, kNow)->reveal());
}
std::string request(const std::string& token, const std::string& name = "Authorization") {
  return "GET /bundle HTTP/1.1\r\nHost: x\r\n" + name + ": Bearer " + token + "\r\nAccept: */*\r\n\r\n";
}

TEST(BundleGate, OnlyHoldersOfThisRunsTokensAreServed) {
  BundleGate g = gate();
  const auto admitted = g.on_request(ConnId{2}, request(token(1)), kNow);
  EXPECT_TRUE(admitted.is_admitted);
  EXPECT_THAT(admitted.text, StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(admitted.text, HasSubstr("Content-Length: 1000\r\n"));
  EXPECT_THAT(g.take_admitted(), ElementsAre(ConnId{2}));
  // Some clients write the header's name in lower case.
  EXPECT_TRUE(g.on_request(ConnId{4}, request(token(2), "authorization"), kNow).is_admitted);
  const trust::Authority other = made_authority("run", "another key");
  const std::string complete = request(token(3));
  for (const auto& [bad, status] : {std::pair<std::string, const char*>{"GET /bundle HTTP/1.1\r\n\r\n", "403"},
                                    {request(""), "403"},
                                    {request("echo1.AAAA"), "403"},
                                    {request(token(3, other)), "403"},
                                    {request(token(3) + "A"), "403"},
                                    {request(token(3), "Cookie"), "403"},
                                    {"GET / HTTP/1.1\r\n\r\n", "404"},
                                    {"GET /bundle2 HTTP/1.1\r\n\r\n", "404"},
                                    {"GET /bundle", "400"},
                                    {complete.substr(0, complete.size() - 1), "400"},
                                    {"GET /bundle HTTP/1.1\r\nX: " + std::string(5000, 'x') + "\r\n\r\n", "400"},
                                    {"", "400"}}) {
    const auto answer = g.on_request(ConnId{6}, bad, kNow);
    EXPECT_FALSE(answer.is_admitted) << bad;
    EXPECT_THAT(answer.text, StartsWith(std::string("HTTP/1.1 ") + status)) << bad;
    EXPECT_THAT(answer.text, HasSubstr("\r\n\r\nrefused: "));
  }
  EXPECT_THAT(g.on_request(ConnId{6}, request(token(3)), kNow + 3600).text, HasSubstr("expired"));
  EXPECT_THAT(g.take_admitted(), ElementsAre(ConnId{4}));
}

TEST(BundleGate, ATokenAllowsOnlyAFewDownloads) {
  BundleGate g = gate();
  for (std::uint64_t i = 0; i < BundleGate::kDownloadsPerToken; ++i) {
    EXPECT_TRUE(g.on_request(ConnId{2 * i}, request(token(1)), kNow).is_admitted);
    g.on_done(ConnId{2 * i});
  }
  EXPECT_THAT(g.on_request(ConnId{20}, request(token(1)), kNow).text, StartsWith("HTTP/1.1 429"));
  EXPECT_TRUE(g.on_request(ConnId{20}, request(token(2)), kNow).is_admitted);
}

TEST(BundleGate, ServesAFewAtATimeAndTheOthersInTheirOrder) {
  BundleGate g = gate();
  const std::size_t capacity = BundleGate::kServedMax + BundleGate::kWaitingMax;
  for (std::uint64_t i = 0; i < capacity; ++i)
    ASSERT_TRUE(g.on_request(ConnId{i}, request(token(static_cast<std::uint8_t>(i))), kNow).is_admitted);
  const auto excess = g.on_request(ConnId{999}, request(token(200)), kNow);
  EXPECT_THAT(excess.text, StartsWith("HTTP/1.1 503"));
  EXPECT_THAT(excess.text, HasSubstr("later: "));
  EXPECT_EQ(g.take_admitted().size(), BundleGate::kServedMax);
  EXPECT_THAT(g.take_admitted(), IsEmpty());
  g.on_done(ConnId{5});  // one that waited
  EXPECT_THAT(g.take_admitted(), IsEmpty());
  g.on_done(ConnId{1});
  g.on_done(ConnId{1});
  EXPECT_THAT(g.take_admitted(), ElementsAre(ConnId{4}));
  g.on_done(ConnId{4});
  EXPECT_THAT(g.take_admitted(), ElementsAre(ConnId{6}));
}

TEST(BundleGate, LeavesHalfOfTheUplinkToPolicies) {
  BundleGate limited = gate(BitRate::from_mbit_per_s(8)), unlimited = gate();
  const TimePoint t{std::chrono::hours(1)};
  limited.pace(0, t);
  EXPECT_NEAR(seconds(limited.pace(1'000'000, t) - t), 2, 0.1);
  EXPECT_EQ(unlimited.pace(1'000'000, t), t);
}

}  // namespace
}  // namespace echoline::overlay

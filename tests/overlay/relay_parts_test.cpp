// The relay's parsers and rules, without sockets.
#include <gmock/gmock.h>

#include "overlay/relay/client_hello.hpp"
#include "overlay/relay/runs.hpp"
#include "overlay/trust/authority.hpp"
#include "overlay/wire/bytes.hpp"
#include "tests/overlay/made.hpp"
#include "tests/overlay/relay_peer.hpp"

namespace echoline::overlay::relay {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

trust::Secret relay_key(char c = 'k') { return trust::Secret(std::string(kKeyBytesMin, c)); }

TEST(ClientHello, NamesTheRunThatAWorkerDials) {
  const trust::SigningKey run = made_key("authority");
  const std::string hello = client_hello(run);
  ASSERT_GT(hello.size(), 1700u) << "with its padding, it needs two packets";
  const std::string name = run_name(trust::fingerprint(run.public_key()));
  EXPECT_EQ(name.size(), 32 + kNameEnd.size());
  for (std::size_t size = 0; size < hello.size(); ++size) {
    const auto part = read_client_hello(bytes_of(std::string_view(hello).substr(0, size)));
    ASSERT_TRUE(part.has_value()) << size << part.error().message();
    ASSERT_FALSE(part->is_complete) << size;
  }
  const auto whole = read_client_hello(bytes_of(hello + "what follows"));
  ASSERT_TRUE(whole.has_value()) << whole.error().message();
  EXPECT_TRUE(whole->is_complete);
  EXPECT_EQ(whole->server_name, name);
}

// Splits the message of one record into records of `size` bytes.
std::string in_records(std::string_view hello, std::size_t size) {
  constexpr std::size_t kHeader = 5;
  std::string records;
  for (std::string_view rest = hello.substr(kHeader); !rest.empty();) {
    const std::string_view part = rest.substr(0, size);
    records += hello.substr(0, 3);
    records += {static_cast<char>(part.size() >> 8), static_cast<char>(part.size() & 0xff)};
    records += part;
    rest.remove_prefix(part.size());
  }
  return records;
}

TEST(ClientHello, MayComeInSeveralRecords) {
  const std::string hello = client_hello(made_key("authority"));
  const auto split = read_client_hello(bytes_of(in_records(hello, 100)));
  ASSERT_TRUE(split.has_value()) << split.error().message();
  EXPECT_EQ(split->server_name, read_client_hello(bytes_of(hello))->server_name);
  const auto scattered = read_client_hello(bytes_of(in_records(hello, 1)));
  ASSERT_FALSE(scattered.has_value());
  EXPECT_EQ(scattered.error().code, Code::kExhausted) << "5 bytes of header for each byte";
}

TEST(ClientHello, OtherBytesAreRefused) {
  const std::string hello = client_hello(made_key("authority"));
  const auto refusal = [](std::string bytes) {
    const auto read = read_client_hello(bytes_of(bytes));
    return read ? std::string("accepted") : read.error().message();
  };
  EXPECT_THAT(refusal("GET / HTTP/1.1\r\n"), HasSubstr("no handshake record"));
  EXPECT_THAT(refusal(std::string("\x16\x02\x01\x00\x05", 5)), HasSubstr("version"));
  EXPECT_THAT(refusal(std::string("\x16\x03\x01\x00\x00", 5)), HasSubstr("length"));
  EXPECT_THAT(refusal(std::string("\x16\x03\x01\x00\x04\x02", 6)), HasSubstr("another handshake message"));
  EXPECT_THAT(refusal(std::string("\x16\x03\x01\x40\x00\x01\xff\xff\xff", 9)), HasSubstr("at most 8192"));
  std::string named = hello;
  const std::size_t at = named.find(kNameEnd);
  named[at] = ' ';
  EXPECT_THAT(refusal(named), HasSubstr("characters"));
  std::string short_name = hello;
  short_name[at - 33] = '\x7f';  // the name's length goes beyond its extension
  EXPECT_THAT(refusal(short_name), HasSubstr("ends too early"));
}

TEST(RelayGreeting, IsReadOnceItIsWhole) {
  const Nonce nonce = random_nonce();
  const Ticket ticket = random_ticket();
  const Mac proof = random_nonce();
  for (const std::string& greeting : {control_greeting(nonce), ticket_greeting(ticket, proof)}) {
    for (std::size_t size = 0; size < greeting.size(); ++size)
      ASSERT_EQ(read_greeting(std::string_view(greeting).substr(0, size))->kind, Greeting::Kind::kIncomplete);
    EXPECT_LE(greeting.size(), kGreetingBytesMax);
    EXPECT_FALSE(read_greeting(greeting + "x")) << "a learner waits for the relay's answer";
  }
  EXPECT_EQ(read_greeting(control_greeting(nonce))->nonce, nonce);
  EXPECT_EQ(read_greeting(ticket_greeting(ticket, proof))->ticket, ticket);
  EXPECT_EQ(read_greeting(ticket_greeting(ticket, proof))->proof, proof);
  EXPECT_FALSE(read_greeting("ECHORLY2"));
  EXPECT_FALSE(read_greeting("ECHORLY1X"));
  EXPECT_FALSE(read_greeting("GET /"));
}

TEST(RelayAnswer, ProvesTheRelayKeyAndTheRunKey) {
  const Nonce learner = random_nonce(), relay = random_nonce();
  const trust::SigningKey run = made_key("authority"), other = made_key("another run");
  const std::string bytes = answer(relay_key(), run, learner, relay);
  ASSERT_EQ(bytes.size(), kAnswerBytes);
  EXPECT_EQ(*check_answer(bytes, relay_key(), learner, relay), run.public_key());
  EXPECT_THAT(check_answer(bytes, relay_key('x'), learner, relay).error().message(), HasSubstr("another relay key"));
  EXPECT_FALSE(check_answer(bytes, relay_key(), learner, random_nonce())) << "an answer cannot be repeated";
  EXPECT_FALSE(check_answer(bytes.substr(1), relay_key(), learner, relay));
  // A holder of the relay's key cannot register the run of another.
  std::string stolen = answer(relay_key(), other, learner, relay);
  const std::string honest = answer(relay_key(), run, learner, relay);
  stolen.replace(0, 64, honest, 0, 64);
  EXPECT_THAT(check_answer(stolen, relay_key(), learner, relay).error().message(), HasSubstr("key of the run"));
}

TEST(RelayFrames, AreTakenInOrderAndOnlyWithTheirMac) {
  const Mac session = random_nonce();
  using Type = ControlFrame::Type;
  using End = ControlFrames::End;
  ControlFrames relay(session, End::kRelay), learner(session, End::kLearner);
  const std::string first = relay.seal(Type::kAccepted), second = relay.seal(Type::kOpen, "ticket");
  learner.feed(first.substr(0, 5));
  EXPECT_FALSE(learner.take()->has_value());
  learner.feed(first.substr(5) + second);
  EXPECT_EQ((*learner.take())->type, Type::kAccepted);
  EXPECT_EQ((*learner.take())->body, "ticket");
  EXPECT_FALSE(learner.take()->has_value());
  learner.feed(second);
  EXPECT_THAT(learner.take().error().message(), HasSubstr("MAC is wrong")) << "a repeated frame";

  ControlFrames reflected(session, End::kRelay), stranger(random_nonce(), End::kLearner);
  reflected.feed(relay.seal(Type::kPong));
  EXPECT_FALSE(reflected.take()) << "its own frame comes back";
  stranger.feed(first);
  EXPECT_FALSE(stranger.take()) << "another key";
  ControlFrames limited(session, End::kLearner);
  limited.feed(std::string("\xff\xff\x03", 3));
  EXPECT_THAT(limited.take().error().message(), HasSubstr("at most 512"));
  EXPECT_FALSE(check_key(trust::Secret("short")));
}

class RunsTest : public testing::Test {
 protected:
  void TearDown() override { runs.check(); }
  static RelayLimits limits() {
    RelayLimits limits;
    limits.runs = 2;
    limits.connections_per_run = 4;
    limits.waiting_per_run = 3;
    limits.bytes_per_run = Bytes{1'000'000};
    return limits;
  }
  static std::string name(char c) { return std::string(32, c) + std::string(kNameEnd); }
  const Mac session = random_nonce();
  const TimePoint now{std::chrono::seconds(1)};
  Runs runs{limits()};
};

TEST_F(RunsTest, AClientMeetsTheLearnerOfItsRunOnce) {
  ASSERT_FALSE(runs.add(name('a'), ConnId{1}, session)->has_value());
  const auto invited = runs.invite(name('a'), ConnId{10}, "net");
  ASSERT_TRUE(invited.has_value());
  EXPECT_EQ(runs.redeem(invited->ticket, random_nonce()).error().code, Code::kInvalid) << "a guessed proof";
  const auto met = runs.redeem(invited->ticket, ticket_proof(session, invited->ticket));
  ASSERT_TRUE(met.has_value());
  EXPECT_EQ(met->client, ConnId{10});
  EXPECT_EQ(runs.redeem(invited->ticket, ticket_proof(session, invited->ticket)).error().code, Code::kNotFound);
  EXPECT_EQ(runs.invite(name('b'), ConnId{11}, "net").error().code, Code::kNotFound);
  EXPECT_EQ(runs.invite("", ConnId{12}, "net")->run, met->run) << "without a name, it is the only run";
  ASSERT_TRUE(runs.add(name('b'), ConnId{2}, session));
  EXPECT_EQ(runs.invite("", ConnId{13}, "net").error().code, Code::kNotFound) << "there are two";
}

TEST_F(RunsTest, ALearnerThatComesBackTakesItsRunOver) {
  ASSERT_TRUE(runs.add(name('a'), ConnId{1}, session));
  EXPECT_EQ(*runs.add(name('a'), ConnId{2}, session), ConnId{1});
  runs.remove_control(ConnId{1});
  EXPECT_EQ(runs.registered(), 1u) << "the earlier connection's end changes nothing";
  runs.remove_control(ConnId{2});
  EXPECT_EQ(runs.invite(name('a'), ConnId{10}, "net").error().code, Code::kUnavailable);
  ASSERT_TRUE(runs.add(name('b'), ConnId{3}, session));
  ASSERT_TRUE(runs.add(name('c'), ConnId{4}, session));
  EXPECT_EQ(runs.add(name('a'), ConnId{5}, session).error().code, Code::kExhausted) << "two runs at a time";
}

TEST_F(RunsTest, AFloodFromOneNetworkDisplacesItsOwnClients) {
  ASSERT_TRUE(runs.add(name('a'), ConnId{1}, session));
  EXPECT_FALSE(runs.invite(name('a'), ConnId{10}, "honest")->to_close);
  EXPECT_FALSE(runs.invite(name('a'), ConnId{11}, "flood")->to_close);
  EXPECT_FALSE(runs.invite(name('a'), ConnId{12}, "flood")->to_close);
  const auto fourth = runs.invite(name('a'), ConnId{13}, "flood");
  EXPECT_EQ(fourth->to_close, ConnId{11});
  EXPECT_EQ(runs.invite(name('a'), ConnId{14}, "flood").error().code, Code::kExhausted) << "four connections";
  runs.remove_client(*fourth->run, ConnId{11});
  EXPECT_TRUE(runs.invite(name('a'), ConnId{14}, "flood"));
}

TEST_F(RunsTest, ARunEndsWithItsBytes) {
  ASSERT_TRUE(runs.add(name('a'), ConnId{1}, session));
  RelayRun& run = *runs.invite(name('a'), ConnId{10}, "net")->run;
  EXPECT_TRUE(runs.on_passed(run, 999'999, now));
  EXPECT_FALSE(runs.on_passed(run, 1, now));
  EXPECT_EQ(runs.invite(name('a'), ConnId{11}, "net").error().code, Code::kExhausted);
  runs.remove_control(ConnId{1});
  EXPECT_THAT(runs.add(name('a'), ConnId{2}, session).error().message(), HasSubstr("--run-bytes"))
      << "a new registration does not begin a new count";
}

TEST_F(RunsTest, ARunWithManyConnectionsGetsTheTurnOfOne) {
  Runs fair{RelayLimits{}};
  ASSERT_TRUE(fair.add(name('a'), ConnId{1}, session));
  ASSERT_TRUE(fair.add(name('b'), ConnId{2}, session));
  RelayRun& crowd = *fair.invite(name('a'), ConnId{10}, "net")->run;
  RelayRun& single = *fair.invite(name('b'), ConnId{11}, "net")->run;
  constexpr std::size_t kCrowd = 40;
  constexpr int kTurns = 4 * kCrowd;
  std::vector<std::size_t> passed(kCrowd);
  std::vector<std::uint64_t> rounds(kCrowd);
  std::uint64_t round_of_single = 0;
  const auto read_twice = [&](RelayRun& run,
                              std::uint64_t& round) {  // as long as a connection has bytes, it is asked again
    std::size_t passed_now = 0;
    for (int again = 0; again < 2; ++again)
      if (const std::size_t size = fair.read_bytes_max(run, round, now); size > 0) {
        fair.on_passed(run, size, now);
        passed_now += size;
      }
    return passed_now;
  };
  for (int turn = 0; turn < kTurns; ++turn) {
    fair.begin_turn();
    for (std::size_t i = 0; i < kCrowd; ++i) passed[i] += read_twice(crowd, rounds[i]);
    read_twice(single, round_of_single);
  }
  EXPECT_EQ(single.bytes, kTurns * Runs::kReadBytesMax);
  EXPECT_NEAR(static_cast<double>(crowd.bytes), static_cast<double>(single.bytes),
              0.2 * static_cast<double>(single.bytes));
  EXPECT_GE(*std::min_element(passed.begin(), passed.end()), 2 * Runs::kReadBytesMax) << "no connection starves";
}

TEST_F(RunsTest, ARunAloneIsReadInLongTurns) {
  Runs fast{RelayLimits{}};
  ASSERT_TRUE(fast.add(name('a'), ConnId{1}, session));
  RelayRun& run = *fast.invite(name('a'), ConnId{10}, "net")->run;
  std::vector<std::uint64_t> rounds(100);
  fast.begin_turn();
  std::size_t reads = 0;
  for (std::uint64_t& round : rounds)
    for (int again = 0; again < 2; ++again)
      if (const std::size_t size = fast.read_bytes_max(run, round, now); size > 0) {
        fast.on_passed(run, size, now);
        ++reads;
      }
  EXPECT_EQ(reads, Runs::kTurnBytesAlone / Runs::kReadBytesMax) << "each connection once, up to the turn's bytes";
}

TEST_F(RunsTest, ARateHoldsOverTime) {
  RelayLimits limits;
  limits.rate_per_run = BitRate{80e6};  // 10 MB/s
  Runs paced(limits);
  ASSERT_TRUE(paced.add(name('a'), ConnId{1}, session));
  RelayRun& run = *paced.invite(name('a'), ConnId{10}, "net")->run;
  TimePoint at = now;
  const TimePoint end = now + std::chrono::seconds(2);
  std::uint64_t round = 0;
  while (at < end) {
    paced.begin_turn();
    const std::size_t size = paced.read_bytes_max(run, round, at);
    if (size > 0)
      paced.on_passed(run, size, at);
    else
      at = std::max(at + std::chrono::microseconds(1), Runs::paced_until(run));
  }
  EXPECT_NEAR(static_cast<double>(run.bytes), 20e6, 0.3e6);
}

}  // namespace
}  // namespace echoline::overlay::relay

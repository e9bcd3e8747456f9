// TLS sessions of two nodes of a run. The test carries the bytes between them.
#include "overlay/uv/tls.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/random.hpp"
#include "tests/overlay/tls_pair.hpp"

namespace echoline::overlay {
namespace {

using testing::HasSubstr;
using Kind = trust::PeerIdentity::Kind;
using Policy = TlsSession::PeerCertificate;

const WorkerId kThree{3}, kFour{4};

std::vector<std::byte> some_bytes(std::size_t size, std::uint64_t seed = 1) {
  Random random(seed);
  std::vector<std::byte> bytes(size);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random.next());
  return bytes;
}

void expect_error(const std::optional<Error>& error, Code code, const std::string& text) {
  ASSERT_TRUE(error.has_value()) << "no error; expected: " << text;
  EXPECT_EQ(error->code, code) << error->message();
  EXPECT_THAT(error->message(), HasSubstr(text));
}

// Two nodes with certificates of one authority: worker 3 has dialled worker 4.
TlsPair established(std::uint64_t records_per_key = TlsContext::kRecordsPerKey) {
  const trust::Authority authority = tls_authority();
  TlsPair pair =
      tls_pair(tls_node(authority, kThree), kFour, tls_node(authority, kFour), Policy::kRequired, records_per_key);
  pair.settle();
  return pair;
}

TEST(Tls, BothEndsKnowEachOther) {
  for (const std::size_t piece : {std::size_t{1}, std::size_t{7}, SIZE_MAX}) {
    const trust::Authority authority = tls_authority();
    TlsPair pair = tls_pair(tls_node(authority, kThree), kFour, tls_node(authority, kFour));
    EXPECT_TRUE(pair.client.has_output());
    EXPECT_FALSE(pair.client.established() || pair.server.established());
    EXPECT_EQ(pair.server.identity().kind, Kind::kAnonymous);
    pair.settle(piece);
    ASSERT_FALSE(pair.client_reading.error || pair.server_reading.error);
    ASSERT_TRUE(pair.client.established() && pair.server.established());
    const trust::PeerIdentity three{Kind::kWorker, kThree, 103, kTlsNow + 3600, tls_key("node 3").public_key()};
    const trust::PeerIdentity four{Kind::kWorker, kFour, 104, kTlsNow + 3600, tls_key("node 4").public_key()};
    EXPECT_EQ(pair.client.identity(), four);
    EXPECT_EQ(pair.server.identity(), three);
    EXPECT_EQ(pair.client.authority(), authority.certificate());
  }
}

// Detects a path that swallows large packets: the first flight of each end fills one packet, and a smaller one follows
// that passes.
TEST(Tls, TheFirstFlightsFillAPacketAndALittleMore) {
  const trust::Authority authority = tls_authority();
  TlsPair pair = tls_pair(tls_node(authority, kThree), kFour, tls_node(authority, kFour));
  const std::vector<std::byte> hello = pair.client.take_output();
  tls_deliver(hello, pair.server, pair.server_reading);
  const std::vector<std::byte> answer = pair.server.take_output();
  for (const std::size_t flight : {hello.size(), answer.size()}) {
    EXPECT_GE(flight, 1460u + 250) << "a segment without TCP options";
    EXPECT_LE(flight, 1380u + 1180) << "a segment in a tunnel";
  }
  tls_deliver(answer, pair.client, pair.client_reading);
  pair.settle();
  EXPECT_TRUE(pair.client.established() && pair.server.established());
}

TEST(Tls, BytesArriveUnchanged) {
  TlsPair pair = established();
  std::vector<std::byte> sent, wire;
  for (const std::size_t size : {1u, 100u, 16384u, 16385u, 65536u, 0u, 1'000'000u}) {
    const auto bytes = some_bytes(size, size);
    ASSERT_TRUE(pair.client.write(bytes, wire));
    sent.insert(sent.end(), bytes.begin(), bytes.end());
  }
  for (const std::size_t piece : {std::size_t{999}, SIZE_MAX}) {
    TlsPair other = established();
    wire.clear();
    ASSERT_TRUE(other.server.write(sent, wire));
    tls_deliver(wire, other.client, other.client_reading, piece);
    EXPECT_FALSE(other.client_reading.error);
    EXPECT_EQ(other.client_reading.bytes, sent);
  }
}

TEST(Tls, ABlockIsAppendedToAndGrowsOnce) {
  TlsPair pair = established();
  for (const std::size_t size : {1u, 16383u, 16384u, 16385u, 65536u, 1'000'000u}) {
    std::vector<std::byte> block(3, std::byte{7});
    block.reserve(3 + TlsSession::sealed_bytes_max(size));
    const std::byte* const memory = block.data();
    ASSERT_TRUE(pair.client.write(some_bytes(size), block));
    EXPECT_EQ(block.data(), memory) << size;
    EXPECT_EQ(block[2], std::byte{7});
    tls_deliver(std::span(block).subspan(3), pair.server, pair.server_reading);
    EXPECT_EQ(std::exchange(pair.server_reading.bytes, {}), some_bytes(size));
  }
}

TEST(Tls, ReadsFillTheCallersBuffer) {
  TlsPair pair = established();
  std::vector<std::byte> wire;
  const auto sent = some_bytes(100'000);
  ASSERT_TRUE(pair.client.write(sent, wire));
  pair.server.feed(wire);
  std::vector<std::byte> got(70'000);
  EXPECT_EQ(*pair.server.read(got), 70'000u) << "across records";
  std::vector<std::byte> rest(70'000);
  EXPECT_EQ(*pair.server.read(rest), 30'000u);
  EXPECT_EQ(*pair.server.read(rest), 0u);
  got.insert(got.end(), rest.begin(), rest.begin() + 30'000);
  EXPECT_EQ(got, sent);
}

TEST(Tls, KeysAreChangedDuringAConnection) {
  TlsPair pair = established(/*records_per_key=*/4);
  for (std::uint64_t i = 0; i < 50; ++i) {
    std::vector<std::byte> there, back;
    ASSERT_TRUE(pair.client.write(some_bytes(20'000, i), there));
    EXPECT_LE(there.size(), TlsSession::sealed_bytes_max(20'000));
    tls_deliver(there, pair.server, pair.server_reading);
    ASSERT_TRUE(pair.server.write(some_bytes(300, i), back));
    tls_deliver(back, pair.client, pair.client_reading);
    ASSERT_FALSE(pair.client_reading.error || pair.server_reading.error);
    EXPECT_EQ(std::exchange(pair.server_reading.bytes, {}), some_bytes(20'000, i));
    EXPECT_EQ(std::exchange(pair.client_reading.bytes, {}), some_bytes(300, i));
  }
}

TEST(Tls, ASessionMayMove) {
  TlsPair first = established();
  TlsPair pair = std::move(first);
  std::vector<std::byte> wire;
  ASSERT_TRUE(pair.client.write(some_bytes(50), wire));
  tls_deliver(wire, pair.server, pair.server_reading);
  EXPECT_EQ(pair.server_reading.bytes, some_bytes(50));
}

// ---- enrolment ----

TEST(Tls, AnEnrollingMachineKnowsOnlyTheFingerprint) {
  const trust::Authority authority = tls_authority();
  TlsPair pair =
      tls_pair({.authority = authority.fingerprint()}, kLearnerId, tls_node(authority, kLearnerId), Policy::kOptional);
  pair.settle();
  ASSERT_TRUE(pair.client.established() && pair.server.established());
  EXPECT_EQ(pair.client.identity().kind, Kind::kLearner);
  EXPECT_EQ(pair.server.identity(), trust::PeerIdentity{});
  EXPECT_EQ(pair.client.authority(), authority.certificate());
  std::vector<std::byte> wire;
  ASSERT_TRUE(pair.client.write(some_bytes(50), wire));
  tls_deliver(wire, pair.server, pair.server_reading);
  EXPECT_EQ(pair.server_reading.bytes, some_bytes(50));
}

TEST(Tls, AnEnrollingMachineRefusesImpostors) {
  const trust::Authority authority = tls_authority(), other = tls_authority("another key");
  // It refuses the learner of another authority, even with the same run id.
  TlsPair pair =
      tls_pair({.authority = authority.fingerprint()}, kLearnerId, tls_node(other, kLearnerId), Policy::kOptional);
  pair.settle();
  expect_error(pair.client_reading.error, Code::kInvalid, "found one of another");
  expect_error(pair.server_reading.error, Code::kInvalid, "the peer refused our certificate: it is of another run");
  // It refuses a peer that shows the right authority's certificate with a leaf of its own.
  Credentials mixed = tls_node(authority, kLearnerId);
  mixed.own->key = tls_key("another key");
  mixed.own->certificate = tls_node(other, kLearnerId).own->certificate;
  mixed.own->key = tls_node(other, kLearnerId).own->key;
  EXPECT_FALSE(TlsContext::create(mixed)) << "such credentials cannot be used by accident either";
  // It refuses a worker of its run that pretends to be the learner.
  TlsPair played =
      tls_pair({.authority = authority.fingerprint()}, kLearnerId, tls_node(authority, kThree), Policy::kOptional);
  played.settle();
  expect_error(played.client_reading.error, Code::kInvalid, "expected the learner, found worker 3");
  expect_error(played.server_reading.error, Code::kInvalid, "the peer expected another node");
  EXPECT_EQ(played.client.identity(), trust::PeerIdentity{});
}

TEST(Tls, ANodeThatRequiresCertificatesRefusesAPeerWithoutOne) {
  const trust::Authority authority = tls_authority();
  TlsPair pair = tls_pair({.authority = authority.fingerprint()}, kThree, tls_node(authority, kThree));
  pair.settle();
  expect_error(pair.server_reading.error, Code::kInvalid, "has shown no certificate");
  expect_error(pair.client_reading.error, Code::kInvalid, "enrol first");
  EXPECT_FALSE(pair.server.established() || pair.client.established());
}

// ---- invalid certificates ----

TEST(Tls, AnotherAuthoritysNodesAreRefused) {
  const trust::Authority authority = tls_authority(), other = tls_authority("another key");
  TlsPair pair = tls_pair(tls_node(authority, kThree), kFour, tls_node(other, kFour));
  pair.settle();
  expect_error(pair.client_reading.error, Code::kInvalid, "found one of another");
  expect_error(pair.server_reading.error, Code::kInvalid, "it is of another run");
  // The client trusts the server's authority, but its certificate is of another one.
  Credentials stranger = tls_node(other, kThree);
  stranger.authority = authority.fingerprint();
  for (const Policy policy : {Policy::kRequired, Policy::kOptional}) {
    TlsPair second = tls_pair(stranger, kFour, tls_node(authority, kFour), policy);
    second.settle();
    expect_error(second.server_reading.error, Code::kInvalid, "found one of another");
    expect_error(second.client_reading.error, Code::kInvalid, "it is of another run");
    EXPECT_EQ(second.server.identity(), trust::PeerIdentity{});
  }
}

TEST(Tls, AnotherRunOfTheSameKeyIsRefused) {
  TlsPair pair =
      tls_pair(tls_node(tls_authority("k", "run a"), kThree), kFour, tls_node(tls_authority("k", "run b"), kFour));
  pair.settle();
  expect_error(pair.client_reading.error, Code::kInvalid,
               "expected a certificate of run 'run a', found one of run 'run b'");
}

TEST(Tls, ExpiredCertificatesAreRefused) {
  const trust::Authority authority = tls_authority();
  TlsPair pair = tls_pair(tls_node(authority, kThree, kTlsNow - 3601), kFour, tls_node(authority, kFour));
  pair.settle();
  expect_error(pair.server_reading.error, Code::kStale, "worker 3 expired 1 s ago");
  expect_error(pair.client_reading.error, Code::kStale, "refused our certificate as expired");
  TlsPair other = tls_pair(tls_node(authority, kThree), kFour, tls_node(authority, kFour, kTlsNow + 400));
  other.settle();
  expect_error(other.client_reading.error, Code::kStale, "worker 4 becomes valid in 100 s");
  // Without a time, no certificate expires.
  const TlsContext old = *TlsContext::create(tls_node(authority, kFour, kTlsNow - 9999));
  TlsPair timeless{TlsSession::client(*TlsContext::create(tls_node(authority, kThree)), kFour, std::nullopt),
                   *TlsSession::server(old, Policy::kRequired, kTlsNow)};
  timeless.settle();
  EXPECT_TRUE(timeless.client.established());
}

TEST(Tls, AnUnexpectedWorkerIsRefused) {
  const trust::Authority authority = tls_authority();
  TlsPair pair = tls_pair(tls_node(authority, kThree), WorkerId{5}, tls_node(authority, kFour));
  pair.settle();
  expect_error(pair.client_reading.error, Code::kInvalid, "expected worker 5, found worker 4");
  expect_error(pair.server_reading.error, Code::kInvalid, "the peer expected another node");
}

TEST(Tls, ContextsRefuseInvalidCredentials) {
  const trust::Authority authority = tls_authority();
  const auto error = [](const Credentials& credentials) -> std::optional<Error> {
    const auto context = TlsContext::create(credentials);
    return context ? std::nullopt : std::optional(context.error());
  };
  Credentials wrong_key = tls_node(authority, kThree);
  wrong_key.own->key = tls_key("another key");
  expect_error(error(wrong_key), Code::kInvalid, "do not belong together");
  Credentials wrong_authority = tls_node(authority, kThree);
  wrong_authority.authority = tls_authority("another key").certificate();
  expect_error(error(wrong_authority), Code::kInvalid, "found one of another");
  Credentials wrong_run = tls_node(authority, kThree);
  wrong_run.run_id = "other";
  expect_error(error(wrong_run), Code::kInvalid, "expected the authority of run 'other', found that of run 'run'");
  Credentials damaged = tls_node(authority, kThree);
  damaged.own->certificate.pop_back();
  expect_error(error(damaged), Code::kCorrupt, "our own certificate");
  damaged.authority = std::vector<std::byte>(10);
  expect_error(error(damaged), Code::kCorrupt, "expected an X.509 certificate");
  for (const Credentials& no_server :
       {Credentials{.authority = authority.certificate()}, Credentials{.authority = authority.fingerprint()}})
    EXPECT_FALSE(TlsSession::server(*TlsContext::create(no_server), Policy::kRequired, kTlsNow));
}

// ---- peers of another protocol ----

std::optional<Error> answer_of(TlsSession& session, std::span<const std::byte> bytes) {
  TlsReading reading;
  tls_deliver(bytes, session, reading);
  return reading.error;
}
std::optional<Error> answer_of(TlsSession& session, std::string_view text) {
  return answer_of(session, std::as_bytes(std::span(text)));
}

TEST(Tls, TheErrorNamesOtherProtocols) {
  const trust::Authority authority = tls_authority();
  const TlsContext context = *TlsContext::create(tls_node(authority, kThree));
  const auto server = [&] { return *TlsSession::server(context, Policy::kRequired, kTlsNow); };
  const auto client = [&] { return TlsSession::client(context, kFour, kTlsNow); };
  for (const char* request : {"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "CONNECT x:1 HTTP/1.1\r\n\r\n"}) {
    TlsSession session = server();
    expect_error(answer_of(session, request), Code::kCorrupt, "found an HTTP request");
  }
  using namespace std::string_view_literals;
  for (const std::string_view bytes :
       {"\x01\xec\x01\x00\x10\x00\x00\x00 a plain frame of old"sv, "SSH-2.0-OpenSSH_9.2\r\n"sv,
        "\x16\x03\x01\xff\xff............"sv, "\x17\x03\x03\x00\x20................................"sv}) {
    TlsSession session = server();
    expect_error(answer_of(session, bytes), Code::kCorrupt, "expected a TLS 1.3 handshake");
    EXPECT_FALSE(session.established());
    TlsSession other = client();
    expect_error(answer_of(other, bytes), Code::kCorrupt, "expected a TLS 1.3 handshake");
  }
  TlsSession session = client();
  expect_error(answer_of(session, "HTTP/1.1 400 Bad Request\r\n\r\n"), Code::kCorrupt, "expected a TLS 1.3 handshake");
  // Two clients that dialled each other.
  TlsSession first = client(), second = client();
  expect_error(answer_of(first, second.take_output()), Code::kCorrupt, "expected a TLS 1.3 handshake");
}

TEST(Tls, AHandshakeThatDoesNotEndIsRefused) {
  // A first message that announces 128 KiB, in small records.
  std::vector<std::byte> record{std::byte{0x16}, std::byte{3}, std::byte{1}, std::byte{1}, std::byte{0}};
  record.resize(5 + 256);
  record[5] = std::byte{1};
  record[6] = std::byte{1};
  TlsSession session =
      *TlsSession::server(*TlsContext::create(tls_node(tls_authority(), kThree)), Policy::kRequired, kTlsNow);
  std::optional<Error> error;
  std::size_t fed = 0;
  for (; !error && fed < 1'000'000; fed += record.size()) {
    error = answer_of(session, record);
    std::fill(record.begin() + 5, record.end(), std::byte{0});
  }
  expect_error(error, Code::kExhausted, "more than 8192 bytes without finishing the handshake");
  EXPECT_LE(fed, TlsSession::kHandshakeBytesMax + 300);
  expect_error(answer_of(session, record), Code::kExhausted, "more than 8192 bytes");
}

// ---- the end ----

TEST(Tls, ForgedBytesEndTheSessionAfterTheValidOnes) {
  TlsPair pair = established();
  std::vector<std::byte> wire;
  ASSERT_TRUE(pair.client.write(some_bytes(1000), wire));
  const std::size_t good = wire.size();
  ASSERT_TRUE(pair.client.write(some_bytes(1000), wire));
  wire[good + 100] ^= std::byte{1};
  std::vector<std::byte> out(5000);
  pair.server.feed(wire);
  EXPECT_EQ(*pair.server.read(out), 1000u);
  for (int again = 0; again < 2; ++again) {
    const auto result = pair.server.read(out);
    ASSERT_FALSE(result);
    expect_error(result.error(), Code::kCorrupt, "forged or damaged bytes");
  }
  EXPECT_FALSE(pair.server.established());
  pair.settle();
  expect_error(pair.client_reading.error, Code::kCorrupt, "bad record mac");
  std::vector<std::byte> block;
  EXPECT_FALSE(pair.server.write(out, block));
}

TEST(Tls, NothingIsReplayedOrReordered) {
  std::vector<std::byte> first, second;
  for (const bool replay : {true, false}) {
    TlsPair pair = established();
    first.clear();
    second.clear();
    ASSERT_TRUE(pair.client.write(some_bytes(10), first));
    ASSERT_TRUE(pair.client.write(some_bytes(20), second));
    if (replay) tls_deliver(first, pair.server, pair.server_reading);
    EXPECT_FALSE(pair.server_reading.error);
    tls_deliver(replay ? first : second, pair.server, pair.server_reading);
    expect_error(pair.server_reading.error, Code::kCorrupt, "forged or damaged bytes");
  }
}

TEST(Tls, AWriteWaitsForTheHandshake) {
  const trust::Authority authority = tls_authority();
  TlsPair pair = tls_pair(tls_node(authority, kThree), kFour, tls_node(authority, kFour));
  std::vector<std::byte> block;
  for (TlsSession* session : {&pair.client, &pair.server}) {
    const Status status = session->write(some_bytes(5), block);
    ASSERT_FALSE(status);
    EXPECT_EQ(status.error().code, Code::kUnavailable);
  }
  EXPECT_TRUE(block.empty());
}

TEST(Tls, ASessionsOwnOutputGoesFirst) {
  const trust::Authority authority = tls_authority();
  TlsPair pair = tls_pair(tls_node(authority, kThree), kFour, tls_node(authority, kFour));
  tls_deliver(pair.client.take_output(), pair.server, pair.server_reading);
  tls_deliver(pair.server.take_output(), pair.client, pair.client_reading);
  ASSERT_TRUE(pair.client.established() && pair.client.has_output());
  EXPECT_FALSE(pair.server.established()) << "the client has proven nothing yet";
  std::vector<std::byte> block;
  ASSERT_TRUE(pair.client.write(some_bytes(500), block));
  EXPECT_FALSE(pair.client.has_output());
  tls_deliver(block, pair.server, pair.server_reading);
  EXPECT_TRUE(pair.server.established());
  EXPECT_EQ(pair.server_reading.bytes, some_bytes(500));
}

TEST(Tls, EitherEndMayClose) {
  TlsPair pair = established();
  std::vector<std::byte> wire, late;
  ASSERT_TRUE(pair.client.write(some_bytes(10), wire));
  pair.client.close_notify();
  pair.client.close_notify();
  EXPECT_FALSE(pair.client.write(some_bytes(10), late));
  EXPECT_TRUE(late.empty());
  tls_deliver(wire, pair.server, pair.server_reading);
  EXPECT_FALSE(pair.server.peer_closed());
  // Data that the other end still sends arrives.
  ASSERT_TRUE(pair.server.write(some_bytes(30), late));
  tls_deliver(late, pair.client, pair.client_reading);
  EXPECT_EQ(pair.client_reading.bytes, some_bytes(30));
  pair.settle();
  EXPECT_TRUE(pair.server.peer_closed());
  EXPECT_EQ(pair.server_reading.bytes, some_bytes(10));
  EXPECT_FALSE(pair.server_reading.error || pair.client_reading.error);
  pair.server.close_notify();
  pair.settle();
  EXPECT_TRUE(pair.client.peer_closed());
}

TEST(Tls, SessionsOutliveTheirContext) {
  const trust::Authority authority = tls_authority();
  std::optional<TlsContext> context = *TlsContext::create(tls_node(authority, kThree));
  TlsPair pair{TlsSession::client(*context, kFour, kTlsNow),
               *TlsSession::server(*TlsContext::create(tls_node(authority, kFour)), Policy::kRequired, kTlsNow)};
  context.reset();
  pair.settle();
  EXPECT_TRUE(pair.client.established() && pair.server.established());
}

}  // namespace
}  // namespace echoline::overlay

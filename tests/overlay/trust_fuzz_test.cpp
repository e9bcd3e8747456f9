// The fuzz target of overlay/trust on a mutated corpus, and mutations in the middle of real connections.
#include <gtest/gtest.h>

#include "overlay/trust/token.hpp"
#include "tests/fuzz/input.hpp"
#include "tests/overlay/fixed_random.hpp"
#include "tests/overlay/tls_pair.hpp"

namespace echoline::overlay {
namespace {

using Bytes = std::vector<std::byte>;

void mutate(Bytes& bytes, Random& random) {
  for (std::uint64_t i = 1 + random.below(5); i > 0 && !bytes.empty(); --i) {
    const std::size_t at = random.below(bytes.size());
    switch (random.below(5)) {
      case 0:
        bytes[at] = static_cast<std::byte>(random.next());
        break;
      case 1:
        bytes[at] ^= static_cast<std::byte>(1u << random.below(8));
        break;
      case 2:
        bytes.resize(at + 1);
        break;
      case 3:
        bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(at), 1 + random.below(40),
                     static_cast<std::byte>(random.next()));
        break;
      case 4: {  // repeat a piece at the end
        const Bytes piece(bytes.begin() + static_cast<std::ptrdiff_t>(at),
                          bytes.begin() + static_cast<std::ptrdiff_t>(at + 1 + random.below(bytes.size() - at)));
        bytes.insert(bytes.end(), piece.begin(), piece.end());
        break;
      }
    }
  }
}

Bytes tagged(unsigned char kind, std::span<const std::byte> bytes) {
  Bytes input_bytes{static_cast<std::byte>(kind)};
  if (kind < 3) input_bytes.push_back(std::byte{250});  // the size of pieces
  input_bytes.insert(input_bytes.end(), bytes.begin(), bytes.end());
  return input_bytes;
}

std::vector<Bytes> corpus() {
  const FixedRandom random(1);
  const trust::Authority authority = tls_authority();
  TlsPair pair = tls_pair(tls_node(authority, WorkerId{1}), WorkerId{2}, tls_node(authority, WorkerId{2}));
  const Bytes hello = pair.client.take_output();
  tls_deliver(hello, pair.server, pair.server_reading);
  const Bytes server_flight = pair.server.take_output();
  const trust::Secret token = *trust::issue_token(authority, "vast-7", trust::Nonce{}, kTlsNow);
  return {tagged(0, hello),
          tagged(1, server_flight),
          tagged(2, server_flight),
          tagged(3, tls_node(authority, WorkerId{1}).own->certificate),
          tagged(3, authority.certificate()),
          tagged(4, std::as_bytes(std::span(token.reveal())))};
}

void run_fuzz_target(const Bytes& input) { test::fuzz_input(input); }

TEST(TrustFuzz, MutatedCorpus) {
  const std::vector<Bytes> inputs = corpus();
  EXPECT_EQ(inputs, corpus()) << "the corpus is the same each time";
  for (const Bytes& input : inputs) run_fuzz_target(input);
  for (std::uint64_t round = 0; round < 12'000; ++round) {
    SCOPED_TRACE(round);
    Random random(round);
    Bytes input = inputs[random.below(inputs.size())];
    const std::byte kind = input[0];
    mutate(input, random);
    if (!input.empty()) input[0] = kind;
    run_fuzz_target(input);
  }
}

// Carries the data of both ends, and changes some of it now and then.
void carry(TlsPair& pair, Random& random, bool& changed) {
  for (int flight = 0; flight < 8; ++flight) {
    for (const bool from_client : {true, false}) {
      Bytes wire = (from_client ? pair.client : pair.server).take_output();
      const Bytes unchanged_wire = wire;
      if (random.below(3) == 0) mutate(wire, random);
      changed = changed || wire != unchanged_wire;
      const std::size_t piece = random.below(2) ? SIZE_MAX : 1 + random.below(100);
      tls_deliver(wire, from_client ? pair.server : pair.client,
                  from_client ? pair.server_reading : pair.client_reading, piece);
    }
  }
}

TEST(TrustFuzz, MutatedHandshakes) {
  const trust::Authority authority = tls_authority();
  const Credentials client = tls_node(authority, WorkerId{1}), server = tls_node(authority, WorkerId{2});
  int unchanged = 0;
  for (std::uint64_t round = 0; round < 2'000; ++round) {
    SCOPED_TRACE(round);
    const FixedRandom fixed(round);
    Random random(round, 1);
    TlsPair pair = tls_pair(client, WorkerId{2}, server);
    bool changed = false;
    carry(pair, random, changed);
    EXPECT_TRUE(pair.client_reading.bytes.empty() && pair.server_reading.bytes.empty());
    // An established end has received exactly the bytes that the other end sent.
    if (pair.server.established()) {
      EXPECT_EQ(pair.server.identity().worker, WorkerId{1});
    }
    if (pair.client.established()) {
      EXPECT_EQ(pair.client.identity().worker, WorkerId{2});
    }
    if (!changed) {
      ++unchanged;
      EXPECT_TRUE(pair.client.established() && pair.server.established());
    }
    if (HasFailure()) FAIL();
  }
  EXPECT_GT(unchanged, 100);
}

TEST(TrustFuzz, MutatedConnections) {
  const trust::Authority authority = tls_authority();
  const Credentials client = tls_node(authority, WorkerId{1}), server = tls_node(authority, WorkerId{2});
  for (std::uint64_t round = 0; round < 1'000; ++round) {
    SCOPED_TRACE(round);
    const FixedRandom fixed(round);
    Random random(round, 2);
    TlsPair pair = tls_pair(client, WorkerId{2}, server, TlsSession::PeerCertificate::kRequired, 3);
    pair.settle();
    Bytes sent, wire;
    for (std::uint64_t i = 1 + random.below(4); i > 0; --i) {
      const Bytes data(random.below(i == 1 ? 40'000 : 400), static_cast<std::byte>(random.next()));
      ASSERT_TRUE(pair.client.write(data, wire));
      sent.insert(sent.end(), data.begin(), data.end());
    }
    mutate(wire, random);
    tls_deliver(wire, pair.server, pair.server_reading, 1 + random.below(20'000));
    const Bytes& received = pair.server_reading.bytes;
    ASSERT_LE(received.size(), sent.size());
    EXPECT_TRUE(std::equal(received.begin(), received.end(), sent.begin())) << "the received bytes were sent";
    if (HasFailure()) FAIL();
  }
}

}  // namespace
}  // namespace echoline::overlay

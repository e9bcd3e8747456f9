// A run's authority, its nodes, and both ends of a TLS connection without a network between them.
#pragma once
#include <optional>
#include <string_view>
#include <vector>

#include "overlay/uv/tls.hpp"

namespace echoline::overlay {

inline constexpr double kTlsNow = 1.7e9;

inline trust::SigningKey tls_key(std::string_view name) {
  return trust::SigningKey(trust::blake3(std::as_bytes(std::span(name))));
}

inline trust::Authority tls_authority(std::string_view key = "authority", std::string run_id = "run") {
  return *trust::Authority::create(std::move(run_id), tls_key(key));
}

// A node of the authority's run: the learner (worker 0) or a worker, with a certificate issued at `now_unix_s`.
inline Credentials tls_node(const trust::Authority& authority, WorkerId worker, double now_unix_s = kTlsNow) {
  const trust::SigningKey key = tls_key(fmt::format("node {}", worker));
  const auto kind = worker == kLearnerId ? trust::PeerIdentity::Kind::kLearner : trust::PeerIdentity::Kind::kWorker;
  return {.own = Credentials::Own{*authority.issue({.subject = key.public_key(),
                                                    .kind = kind,
                                                    .worker = worker,
                                                    .serial = 100 + worker.value,
                                                    .now_unix_s = now_unix_s}),
                                  key},
          .authority = authority.certificate(),
          .run_id = authority.run_id()};
}

// The bytes that one end has read so far, and the error that ended it.
struct TlsReading {
  std::vector<std::byte> bytes;
  std::optional<Error> error;
};

// Feeds `wire` to `to`, at most `piece_bytes` at a time, and reads everything that comes out.
inline void tls_deliver(std::span<const std::byte> wire, TlsSession& to, TlsReading& reading,
                        std::size_t piece_bytes = SIZE_MAX) {
  std::vector<std::byte> plaintext(40'000);
  while (!wire.empty() && !reading.error) {
    const std::size_t fed_bytes = std::min(piece_bytes, wire.size());
    to.feed(wire.first(fed_bytes));
    wire = wire.subspan(fed_bytes);
    for (;;) {
      const auto bytes_read = to.read(plaintext);
      if (!bytes_read) reading.error = bytes_read.error();
      if (!bytes_read || *bytes_read == 0) break;
      const auto end = plaintext.begin() + static_cast<std::ptrdiff_t>(*bytes_read);
      reading.bytes.insert(reading.bytes.end(), plaintext.begin(), end);
    }
  }
}

struct TlsPair {
  TlsSession client, server;
  TlsReading client_reading{}, server_reading{};

  // Carries the sessions' own output until both have none.
  void settle(std::size_t piece = SIZE_MAX) {
    while (client.has_output() || server.has_output()) {
      tls_deliver(client.take_output(), server, server_reading, piece);
      tls_deliver(server.take_output(), client, client_reading, piece);
    }
  }
};

inline TlsPair tls_pair(const Credentials& client, WorkerId expected, const Credentials& server,
                        TlsSession::PeerCertificate policy = TlsSession::PeerCertificate::kRequired,
                        std::uint64_t records_per_key = TlsContext::kRecordsPerKey) {
  return {TlsSession::client(*TlsContext::create(client, records_per_key), expected, kTlsNow),
          *TlsSession::server(*TlsContext::create(server, records_per_key), policy, kTlsNow)};
}

}  // namespace echoline::overlay

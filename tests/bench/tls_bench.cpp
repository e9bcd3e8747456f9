// Measures the CPU cost of an encrypted connection: TLS sessions against memcpy and bare AES-128-GCM on the same pieces
// in the same process, and the other primitives of overlay/trust. Everything runs on one thread.
#include <fmt/format.h>
#include <openssl/evp.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "base/random.hpp"
#include "tests/bench/measure.hpp"
#include "tests/overlay/tls_pair.hpp"

namespace echoline::bench {
namespace {

using overlay::TlsSession;
namespace trust = overlay::trust;

struct Settings {
  std::size_t piece_kib = 64;
  std::size_t mib = 64;
  int repeats = 9;
  int handshakes = 200;
};

// Only AES-128-GCM as in TLS 1.3's records: a nonce and a tag for each 16 KiB.
class BareGcm {
 public:
  explicit BareGcm(bool seal) : context_(EVP_CIPHER_CTX_new()), seal_(seal) {
    const unsigned char key[16] = {1};
    check(EVP_CipherInit_ex(context_, EVP_aes_128_gcm(), nullptr, key, nullptr, seal));
  }
  ~BareGcm() { EVP_CIPHER_CTX_free(context_); }
  BareGcm(const BareGcm&) = delete;
  BareGcm& operator=(const BareGcm&) = delete;

  // Encrypts or decrypts `size` bytes of plaintext; `sealed` has a tag after each record.
  void run(const std::byte* from, std::byte* to, std::size_t size) {
    const auto* in = reinterpret_cast<const unsigned char*>(from);
    auto* out = reinterpret_cast<unsigned char*>(to);
    for (std::size_t n = 0; size > 0; size -= n) {
      n = std::min(size, TlsSession::kRecordBytesMax);
      unsigned char nonce[12] = {};
      std::memcpy(nonce, &records_, sizeof records_);
      ++records_;
      check(EVP_CipherInit_ex(context_, nullptr, nullptr, nullptr, nonce, -1));
      int written = 0;
      check(EVP_CipherUpdate(context_, out, &written, in, static_cast<int>(n)));
      in += n;
      out += n;
      if (!seal_) check(EVP_CIPHER_CTX_ctrl(context_, EVP_CTRL_AEAD_SET_TAG, kTag, const_cast<unsigned char*>(in)));
      check(EVP_CipherFinal_ex(context_, out, &written));
      if (seal_) check(EVP_CIPHER_CTX_ctrl(context_, EVP_CTRL_AEAD_GET_TAG, kTag, out));
      (seal_ ? out += kTag : in += kTag);
    }
  }

 private:
  static constexpr int kTag = 16;
  static void check(int result) { ECHO_CHECK(result == 1, "bare AES-GCM"); }
  EVP_CIPHER_CTX* context_;
  bool seal_;
  std::uint64_t records_ = 0;
};

// One way to treat the piece at an offset, and the GB/s of each repeat.
struct Way {
  std::string name;
  std::function<void(std::size_t at)> treat;
  double seconds = 0;
  std::vector<double> speeds{};
};

overlay::TlsPair connect(const trust::Authority& authority) {
  overlay::TlsPair pair = overlay::tls_pair(overlay::tls_node(authority, WorkerId{1}), WorkerId{2},
                                            overlay::tls_node(authority, WorkerId{2}));
  pair.settle();
  ECHO_CHECK(pair.client.established() && pair.server.established());
  return pair;
}

void measure_pieces(const Settings& settings) {
  const std::size_t piece = settings.piece_kib * 1024;
  const std::size_t whole = std::max<std::size_t>(1, settings.mib * 1024 * 1024 / piece) * piece;
  std::vector<std::byte> from(whole), to(whole), bare(TlsSession::sealed_bytes_max(piece)), block, rest(1024);
  Random random(1);
  for (std::size_t at = 0; at + 8 <= whole; at += 8) {
    const std::uint64_t word = random.next();
    std::memcpy(from.data() + at, &word, sizeof word);
  }
  overlay::TlsPair tls = connect(overlay::tls_authority());
  BareGcm seal(true), open(false);
  trust::Hash hash{};
  std::vector<Way> ways;
  // A decryption follows the encryption that made its input.
  ways.push_back({"memcpy", [&](std::size_t at) { std::memcpy(to.data() + at, from.data() + at, piece); }});
  ways.push_back({"AES-128-GCM, encrypt", [&](std::size_t at) { seal.run(from.data() + at, bare.data(), piece); }});
  ways.push_back({"AES-128-GCM, decrypt", [&](std::size_t at) { open.run(bare.data(), to.data() + at, piece); }});
  ways.push_back({"TLS session, write", [&](std::size_t at) {
                    block.clear();
                    ECHO_CHECK(tls.client.write({from.data() + at, piece}, block).has_value());
                  }});
  ways.push_back({"TLS session, feed and read", [&](std::size_t at) {
                    tls.server.feed(block);
                    ECHO_CHECK(*tls.server.read({to.data() + at, piece}) == piece && *tls.server.read(rest) == 0);
                  }});
  ways.push_back({"BLAKE3", [&](std::size_t at) { hash = trust::blake3({from.data() + at, piece}); }});
  for (int repeat = -1; repeat < settings.repeats; ++repeat) {  // the first only warms up
    for (Way& way : ways) way.seconds = 0;
    // All variants take turns on each piece, so that they see the same machine. The pieces are far apart, so that none
    // is in the cache.
    for (std::size_t at = 0; at < whole; at += piece)
      for (std::size_t i = 0; i < ways.size(); ++i) {
        const std::size_t own = (at + i * (whole / piece / ways.size()) * piece) % whole;
        ways[i].seconds += seconds_of([&] { ways[i].treat(own); });
      }
    for (Way& way : ways)
      if (repeat >= 0) way.speeds.push_back(static_cast<double>(whole) / way.seconds / 1e9);
  }
  for (const auto& [encrypt, decrypt] : {std::pair{1u, 2u}, std::pair{3u, 4u}}) {
    ways[encrypt].treat(0);
    ways[decrypt].treat(0);
    ECHO_CHECK(std::equal(from.begin(), from.begin() + static_cast<std::ptrdiff_t>(piece), to.begin()));
    std::fill(to.begin(), to.end(), std::byte{0});
  }

  fmt::print("pieces of {} KiB, {} MiB in all, medians of {} runs\n", settings.piece_kib, whole >> 20,
             settings.repeats);
  fmt::print("  {:<30} {:>8} {:>12} {:>18}\n", "", "GB/s", "of memcpy", "of bare AES-GCM");
  const auto both = [](double a, double b) { return 1 / (1 / a + 1 / b); };
  std::vector<double> speed;
  for (const Way& way : ways) speed.push_back(median(way.speeds));
  const auto print = [&](std::string_view name, double gb_per_s, double bare_gb_per_s) {
    const std::string of_bare = bare_gb_per_s > 0 ? fmt::format("{:.2f}", gb_per_s / bare_gb_per_s) : "-";
    fmt::print("  {:<30} {:>8.2f} {:>12.2f} {:>18}\n", name, gb_per_s, gb_per_s / speed[0], of_bare);
  };
  for (std::size_t i = 0; i < ways.size(); ++i)
    print(ways[i].name, speed[i], i == 1 || i == 3 ? speed[1] : i == 2 || i == 4 ? speed[2] : 0);
  print("AES-128-GCM, both", both(speed[1], speed[2]), both(speed[1], speed[2]));
  print("TLS session, both", both(speed[3], speed[4]), both(speed[1], speed[2]));
}

void measure_small(const Settings& settings) {
  const trust::Authority authority = overlay::tls_authority();
  const trust::SigningKey key = overlay::tls_key("key");
  const trust::Verifier verifier(key.public_key());
  const std::vector<std::byte> message(100);
  const trust::Signature signature = key.sign("bench", message);
  const auto client = *overlay::TlsContext::create(overlay::tls_node(authority, WorkerId{1}));
  const auto server = *overlay::TlsContext::create(overlay::tls_node(authority, WorkerId{2}));
  const auto print = [&](std::string_view name, const std::function<void()>& work) {
    const double s = seconds_of([&] {
      for (int i = 0; i < settings.handshakes; ++i) work();
    });
    fmt::print("  {:<30} {:>8.1f} us\n", name, s / settings.handshakes * 1e6);
  };
  fmt::print("one at a time, mean of {}\n", settings.handshakes);
  print("Ed25519 signature", [&] { (void)key.sign("bench", message); });
  print("Ed25519 verification", [&] { ECHO_CHECK(verifier.verify("bench", message, signature)); });
  print("certificate issued", [&] { (void)overlay::tls_node(authority, WorkerId{1}); });
  print("TLS handshake, both ends", [&] {
    overlay::TlsPair pair{overlay::TlsSession::client(client, WorkerId{2}, overlay::kTlsNow),
                          *TlsSession::server(server, TlsSession::PeerCertificate::kRequired, overlay::kTlsNow)};
    pair.settle();
    ECHO_CHECK(pair.server.established());
  });
}

int run(int argc, char** argv) {
  Settings settings;
  bool smoke = false;
  CLI::App app{"Benchmark of the overlay's TLS sessions and signatures"};
  app.add_option("--piece-kib", settings.piece_kib, "bytes encrypted at a time")->check(CLI::Range(1, 65536));
  app.add_option("--mib", settings.mib, "bytes of a measurement")->check(CLI::Range(1, 65536));
  app.add_option("--repeats", settings.repeats, "measurements of which the median is taken")
      ->check(CLI::Range(1, 1000));
  app.add_option("--handshakes", settings.handshakes, "handshakes and signatures")->check(CLI::Range(1, 1'000'000));
  app.add_flag("--smoke", smoke, "few bytes, once: does it work at all?");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : 2;
  }
  if (smoke) {
    settings.mib = 1;
    settings.repeats = 1;
    settings.handshakes = 2;
  }
  measure_pieces(settings);
  measure_small(settings);
  return 0;
}

}  // namespace
}  // namespace echoline::bench

int main(int argc, char** argv) { return echoline::bench::run(argc, argv); }

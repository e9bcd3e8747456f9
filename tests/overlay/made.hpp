// A run's authority and the publications it makes, for tests.
#pragma once
#include <optional>
#include <vector>

#include "base/random.hpp"
#include "overlay/wire/grant.hpp"
#include "overlay/wire/sealer.hpp"

namespace echoline::overlay {

inline constexpr double kMadeUnix_s = 1.7e9;  // when the tests' publications are issued

inline trust::SigningKey made_key(std::string_view name) {
  return trust::SigningKey(trust::blake3(std::as_bytes(std::span(name))));
}

inline trust::Authority made_authority(std::string run_id = "run", std::string_view key = "authority") {
  return *trust::Authority::create(std::move(run_id), made_key(key));
}

inline std::vector<std::byte> random_bytes(std::uint64_t seed, std::size_t count) {
  Random random(seed);
  std::vector<std::byte> bytes(count);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random.next());
  return bytes;
}

// The policy digest of a version in these tests.
inline Digest digest_of(std::uint64_t version) {
  Digest digest{};
  for (std::size_t i = 0; i < digest.size(); ++i) digest[i] = static_cast<std::byte>(mix64(version) >> (i % 8 * 8));
  return digest;
}
inline PublicationKey full(std::uint64_t version) { return {Version{version}, {}}; }
inline PublicationKey delta(std::uint64_t version, std::uint64_t base) { return {Version{version}, Version{base}}; }

// Differences from an ordinary publication.
struct MadeOptions {
  std::uint32_t chunk_bytes = 1024;
  std::string run_id = "run";
  std::string_view key = "authority";
  std::uint64_t epoch = 0;
  double issued_unix_s = kMadeUnix_s, lifetime_s = 86'400;
  std::optional<Digest> base_digest{}, policy_digest{};
  std::size_t write_bytes = SIZE_MAX;  // passed to the sealer at a time
  std::uint64_t seed = 0;              // another payload
};

// A publication as the learner sends it.
struct Made {
  Announcement announcement;
  SignedAnnouncement opening;
  PublicationId id{};
  std::vector<SealedChunk> chunks;
  Manifest manifest;
  SignedManifest closing;
  std::vector<std::byte> payload;

  const PublicationKey& key() const { return announcement.key; }
  Frame chunk(std::size_t i) const {
    return {FrameType::kChunk, chunks[i].data, Slice(encode_chunk_head(chunks[i].head)), chunks[i].head};
  }
};

inline Announcement made_announcement(const PublicationKey& key, const MadeOptions& options = {}) {
  Announcement a;
  a.run_id = options.run_id;
  a.epoch = options.epoch;
  a.key = key;
  if (key.base) a.base_digest = options.base_digest.value_or(digest_of(key.base->value));
  a.chunk_bytes = options.chunk_bytes;
  a.issued = static_cast<std::uint64_t>(options.issued_unix_s * 1e3);
  a.expires_unix_ms = static_cast<std::uint64_t>((options.issued_unix_s + options.lifetime_s) * 1e3);
  return a;
}

inline Made make(const PublicationKey& key, std::size_t bytes, const MadeOptions& options = {}) {
  const trust::SigningKey signer = made_key(options.key);
  Made made;
  made.announcement = made_announcement(key, options);
  made.payload = random_bytes(key.version.value * 4 + key.base.has_value() * 2 + options.seed * 1000, bytes);
  Sealer sealer(made.announcement, signer);
  made.opening = sealer.signed_announcement();
  made.id = sealer.id();
  for (std::span<const std::byte> bytes_left(made.payload); !bytes_left.empty();) {
    const std::size_t part_bytes = std::min(options.write_bytes, bytes_left.size());
    for (SealedChunk& chunk : *sealer.write(bytes_left.first(part_bytes))) made.chunks.push_back(std::move(chunk));
    bytes_left = bytes_left.subspan(part_bytes);
  }
  auto [last_chunks, closing] = sealer.finish(options.policy_digest.value_or(digest_of(key.version.value)));
  for (SealedChunk& chunk : last_chunks) made.chunks.push_back(std::move(chunk));
  made.closing = closing;
  made.manifest = *SignatureChecker(options.run_id, signer.public_key()).open(closing);
  return made;
}

// Contents of a grant that the learner gives a child for a parent.
struct GrantOptions {
  std::uint32_t stripes = 1;
  std::uint64_t mask = 1;
  std::optional<Version> catch_up_to{};
  bool full_only = false;
  double issued_unix_s = kMadeUnix_s, lifetime_s = 600;
  std::string_view key = "authority";
};
inline SignedGrant made_grant(std::uint64_t child, std::uint64_t parent, const GrantOptions& options = {}) {
  const auto ms = [](double s) { return static_cast<std::uint64_t>(s * 1e3); };
  return sign(Grant{.run_id = "run",
                    .child = WorkerId{child},
                    .issued = ms(options.issued_unix_s),
                    .expires_unix_ms = ms(options.issued_unix_s + options.lifetime_s),
                    .stripe_count = options.stripes,
                    .from = {{.parent = WorkerId{parent}, .stripe_mask = options.mask}},
                    .catch_up_to = options.catch_up_to,
                    .full_only = options.full_only},
              made_key(options.key));
}

// A copy of the frame with one bit of its body changed, and an unchanged head.
inline Frame with_flipped_bit(const Frame& chunk, std::size_t byte) {
  std::vector<std::byte> bytes(chunk.body.bytes().begin(), chunk.body.bytes().end());
  bytes[byte % bytes.size()] ^= std::byte{4};
  Frame flipped = chunk;
  flipped.body = Slice(std::move(bytes));
  return flipped;
}

}  // namespace echoline::overlay

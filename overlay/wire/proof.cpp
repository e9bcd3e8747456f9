// Signs and checks announcements, seals, manifests and beacons. Called by Sealer, the cores and their stores.
#include "overlay/wire/proof.hpp"

#include <algorithm>
#include <cstring>
#include <set>

#include "overlay/wire/bytes.hpp"
#include "overlay/wire/control.pb.h"

namespace echoline::overlay {
namespace {

// In this file, `proto` is the protobuf form of a message.

// Contexts of signatures: a signature for one of these purposes is invalid for the others.
constexpr std::string_view kAnnouncement = "announcement 2";
constexpr std::string_view kManifest = "manifest 2";
constexpr std::string_view kBeacon = "beacon 2";
constexpr std::string_view kSeal = "seal 2";

// The error of a message that breaks a rule.
template <class... Args>
Error bad(fmt::format_string<Args...> format, Args&&... args) {
  return fail(Code::kCorrupt, "check the learner's signature", format, std::forward<Args>(args)...);
}

std::span<const std::byte> byte_view(const std::string& text) { return std::as_bytes(std::span(text)); }

template <class SignedMessage, class Body>
SignedMessage sign_body(const Body& body, std::string_view context, const trust::SigningKey& key) {
  SignedMessage signed_message;
  ECHO_CHECK(body.SerializeToString(&signed_message.body) && signed_message.body.size() <= kSignedBytesMax);
  signed_message.signature = key.sign(context, byte_view(signed_message.body));
  return signed_message;
}

// The hash of an inner node of the Merkle tree.
trust::Hash parent_of(const trust::Hash& left, const trust::Hash& right) {
  std::array<std::byte, 1 + 32 + 32> both;
  both[0] = std::byte{1};  // marks an inner node
  std::memcpy(both.data() + 1, left.data(), 32);
  std::memcpy(both.data() + 33, right.data(), 32);
  return trust::blake3(both);
}

// The bytes that a seal signs: publication 16, first chunk 4, number of chunks 2, Merkle root 32.
constexpr std::size_t kSealedBytes = 16 + 4 + 2 + 32;

std::array<std::byte, kSealedBytes> sealed_bytes(const PublicationId& id, std::uint32_t first, std::uint16_t count,
                                                 const trust::Hash& root) {
  std::array<std::byte, kSealedBytes> bytes;
  std::memcpy(bytes.data(), id.data(), 16);
  put_le<std::uint32_t>(bytes.data() + 16, first);
  put_le<std::uint16_t>(bytes.data() + 20, count);
  std::memcpy(bytes.data() + 22, root.data(), 32);
  return bytes;
}

}  // namespace

void WorkerSet::append(std::uint64_t first, std::uint64_t last) {
  ECHO_CHECK(first <= last && (ranges_.empty() || first > ranges_.back().last), "{} to {}", first, last);
  if (!ranges_.empty() && first == ranges_.back().last + 1)
    ranges_.back().last = last;
  else
    ranges_.push_back({first, last});
}

bool WorkerSet::contains(WorkerId id) const {
  const auto after = std::upper_bound(ranges_.begin(), ranges_.end(), id.value,
                                      [](std::uint64_t value, const Range& range) { return value < range.first; });
  return after != ranges_.begin() && id.value <= std::prev(after)->last;
}

void WorkerSet::widen(std::size_t ranges_max, const std::vector<WorkerId>& excluded) {
  if (ranges_.size() <= ranges_max) return;
  struct Gap {
    std::uint64_t width;
    std::size_t range_after;  // index of the range after it
    auto operator<=>(const Gap&) const = default;
  };
  std::vector<Gap> gaps;
  for (std::size_t i = 1; i < ranges_.size(); ++i) {
    const std::uint64_t first = ranges_[i - 1].last + 1, last = ranges_[i].first - 1;
    const auto next_excluded = std::lower_bound(excluded.begin(), excluded.end(), WorkerId{first});
    if (next_excluded == excluded.end() || next_excluded->value > last)
      gaps.push_back({.width = last - first + 1, .range_after = i});
  }
  const std::size_t fill_count = std::min(gaps.size(), ranges_.size() - ranges_max);
  std::partial_sort(gaps.begin(), gaps.begin() + static_cast<std::ptrdiff_t>(fill_count), gaps.end());
  std::set<std::size_t> joined;  // ranges that are joined with the one before them
  for (std::size_t i = 0; i < fill_count; ++i) joined.insert(gaps[i].range_after);
  std::vector<Range> fewer_ranges;
  for (std::size_t i = 0; i < ranges_.size(); ++i)
    if (joined.contains(i))
      fewer_ranges.back().last = ranges_[i].last;
    else
      fewer_ranges.push_back(ranges_[i]);
  ranges_ = std::move(fewer_ranges);
}

PublicationId id_of(const SignedAnnouncement& announcement) {
  const trust::Hash hash = trust::blake3(byte_view(announcement.body));
  PublicationId id;
  std::memcpy(id.data(), hash.data(), id.size());
  return id;
}

std::uint32_t announced_chunk_bytes(const SignedAnnouncement& announcement) {
  wire::AnnouncementBody proto;
  return proto.ParseFromString(announcement.body) ? proto.chunk_bytes() : 0;
}

SignedAnnouncement sign(const Announcement& announcement, const trust::SigningKey& key) {
  wire::AnnouncementBody proto;
  proto.set_run_id(announcement.run_id);
  proto.set_version(announcement.key.version.value);
  if (announcement.key.base) proto.set_base(announcement.key.base->value);
  proto.set_base_digest(bytes_as_string(announcement.base_digest));
  proto.set_chunk_bytes(announcement.chunk_bytes);
  proto.set_issued(announcement.issued);
  proto.set_expires_unix_ms(announcement.expires_unix_ms);
  proto.set_epoch(announcement.epoch);
  return sign_body<SignedAnnouncement>(proto, kAnnouncement, key);
}

SignedManifest sign(const Manifest& manifest, const trust::SigningKey& key) {
  wire::ManifestBody proto;
  proto.set_publication(bytes_as_string(manifest.publication));
  proto.set_payload_bytes(manifest.payload_bytes);
  proto.set_content(bytes_as_string(manifest.content));
  proto.set_policy_digest(bytes_as_string(manifest.policy_digest));
  proto.set_note(manifest.note);
  return sign_body<SignedManifest>(proto, kManifest, key);
}

SignedBeacon sign(const Beacon& beacon, const trust::SigningKey& key) {
  wire::BeaconBody proto;
  proto.set_run_id(beacon.run_id);
  proto.set_sequence(beacon.sequence);
  proto.set_issued_unix_ms(beacon.issued_unix_ms);
  proto.set_expires_unix_ms(beacon.expires_unix_ms);
  if (beacon.newest) proto.set_newest(beacon.newest->value);
  std::uint64_t last_before = 0;  // the last id of the previous range
  for (const WorkerSet::Range& range : beacon.revoked.ranges()) {
    proto.add_revoked(range.first - last_before);
    proto.add_revoked(range.last - range.first);
    last_before = range.last;
  }
  proto.set_epoch(beacon.epoch);
  return sign_body<SignedBeacon>(proto, kBeacon, key);
}

// Builds the Merkle tree over the pieces' hashes level by level. A level with an odd number of nodes gets one more, of
// zeros, except at the root.
std::vector<ChunkHead> seal(const PublicationId& publication, std::uint32_t first,
                            std::span<const std::span<const std::byte>> pieces, const trust::SigningKey& key,
                            std::vector<trust::Hash>& hashes) {
  ECHO_CHECK(!pieces.empty() && pieces.size() <= kSealChunksMax);
  std::vector<std::vector<trust::Hash>> levels(1);
  for (const auto piece : pieces) levels[0].push_back(trust::blake3(piece));
  hashes = levels[0];
  while (levels.back().size() > 1) {
    std::vector<trust::Hash>& below = levels.back();
    if (below.size() % 2) below.push_back({});
    std::vector<trust::Hash> above;
    for (std::size_t i = 0; i < below.size(); i += 2) above.push_back(parent_of(below[i], below[i + 1]));
    levels.push_back(std::move(above));
  }
  const auto count = static_cast<std::uint16_t>(pieces.size());
  const trust::Signature signature = key.sign(kSeal, sealed_bytes(publication, first, count, levels.back()[0]));
  std::vector<ChunkHead> heads;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    ChunkHead& head = heads.emplace_back();
    head.publication = publication;
    head.index = first + static_cast<std::uint32_t>(i);
    head.length = static_cast<std::uint32_t>(pieces[i].size());
    head.seal_first = first;
    head.seal_count = count;
    head.signature = signature;
    // (i >> level) ^ 1 is the sibling, on this level, of the node above piece i.
    for (std::size_t level = 0; level + 1 < levels.size(); ++level)
      head.path.push_back(levels[level][(i >> level) ^ 1]);
  }
  return heads;
}

Status SignatureChecker::check(std::string_view context, const Signed& message) const {
  if (!verify(context, byte_view(message.body), message.signature))
    return bad("the signature of this {} is not the learner's", context.substr(0, context.find(' ')));
  return ok();
}

Result<Announcement> SignatureChecker::open(const SignedAnnouncement& message) const {
  ECHO_TRY(check(kAnnouncement, message));
  wire::AnnouncementBody proto;
  if (!proto.ParseFromString(message.body))
    return bad("an announcement of {} bytes is not readable", message.body.size());
  Announcement announcement;
  announcement.run_id = proto.run_id();
  if (announcement.run_id != run_id_)
    return bad("expected an announcement of run '{}', found one of '{}'", run_id_, announcement.run_id);
  announcement.key.version = Version{proto.version()};
  if (proto.has_base()) {
    if (proto.base() >= proto.version())
      return bad("expected a base below version {}, found {}", proto.version(), proto.base());
    announcement.key.base = Version{proto.base()};
  }
  if (!copy_exact(proto.base_digest(), announcement.base_digest))
    return bad("a base digest of {} bytes", proto.base_digest().size());
  announcement.chunk_bytes = proto.chunk_bytes();
  if (announcement.chunk_bytes < kChunkBytesMin || announcement.chunk_bytes > kChunkBytesMax)
    return bad("expected a chunk of {} to {} bytes, found {}", kChunkBytesMin, kChunkBytesMax,
               announcement.chunk_bytes);
  announcement.issued = proto.issued();
  announcement.expires_unix_ms = proto.expires_unix_ms();
  announcement.epoch = proto.epoch();
  return announcement;
}

Result<Manifest> SignatureChecker::open(const SignedManifest& message) const {
  ECHO_TRY(check(kManifest, message));
  wire::ManifestBody proto;
  if (!proto.ParseFromString(message.body)) return bad("a manifest of {} bytes is not readable", message.body.size());
  Manifest manifest;
  if (!copy_exact(proto.publication(), manifest.publication) || !copy_exact(proto.content(), manifest.content) ||
      !copy_exact(proto.policy_digest(), manifest.policy_digest))
    return bad("a manifest with digests of another length");
  if (proto.note().size() > kNoteBytesMax)
    return bad("a manifest with a note of {} bytes, at most {} are allowed", proto.note().size(), kNoteBytesMax);
  manifest.note = proto.note();
  manifest.payload_bytes = proto.payload_bytes();
  if (manifest.payload_bytes > std::uint64_t{kChunksMax} * kChunkBytesMax)
    return bad("a payload of {} bytes has more than {} chunks", manifest.payload_bytes, kChunksMax);
  return manifest;
}

Result<Beacon> SignatureChecker::open(const Signed& message) const {
  ECHO_TRY(check(kBeacon, message));
  wire::BeaconBody proto;
  if (!proto.ParseFromString(message.body)) return bad("a beacon of {} bytes is not readable", message.body.size());
  Beacon beacon;
  beacon.run_id = proto.run_id();
  if (beacon.run_id != run_id_) return bad("expected a beacon of run '{}', found one of '{}'", run_id_, beacon.run_id);
  beacon.sequence = proto.sequence();
  beacon.issued_unix_ms = proto.issued_unix_ms();
  beacon.expires_unix_ms = proto.expires_unix_ms();
  beacon.epoch = proto.epoch();
  if (proto.has_newest()) beacon.newest = Version{proto.newest()};
  if (static_cast<std::size_t>(proto.revoked_size()) > 2 * kRevokedMax || proto.revoked_size() % 2 != 0)
    return bad("expected pairs of numbers for at most {} ranges of revoked workers, found {} numbers", kRevokedMax,
               proto.revoked_size());
  std::uint64_t last_before = 0;  // the last id of the previous range
  for (int i = 0; i < proto.revoked_size(); i += 2) {
    const std::uint64_t gap = proto.revoked(i), length = proto.revoked(i + 1), first = last_before + gap,
                        last = first + length;
    if (gap == 0 || first < last_before || last < first) return bad("revoked workers that are not in order");
    beacon.revoked.append(first, last);
    last_before = last;
  }
  return beacon;
}

trust::Hash SignatureChecker::root_of(const ChunkHead& head, const trust::Hash& hash) {
  trust::Hash node = hash;
  std::uint32_t position = head.index - head.seal_first;  // of `node` on its level; odd: it is a right child
  for (const trust::Hash& sibling : head.path) {
    node = position & 1 ? parent_of(sibling, node) : parent_of(node, sibling);
    position >>= 1;
  }
  return node;
}

bool SignatureChecker::seal_holds(const ChunkHead& head, const trust::Hash& root) const {
  return verify(kSeal, sealed_bytes(head.publication, head.seal_first, head.seal_count, root), head.signature);
}

}  // namespace echoline::overlay

// Decodes arriving publications for Installer and PolicyFolder.
#include "worker/engines/arriving_policy.hpp"

#include <algorithm>
#include <utility>

namespace echoline::worker {
namespace {

constexpr std::string_view kOperation = "install policy";

// Returns a function that makes a decoder for a snapshot (a whole policy), for the parameter `make_decoder` of the
// functions below. `options` must outlive it.
auto snapshot_decoder_maker(const delta::DecodeOptions& options) {
  return [&options] { return delta::IncomingSnapshot(options); };
}

// Decodes `part` if it is the first part of a publication, or the next part of the one that `incoming` decodes.
template <class Incoming>
void add_part(std::optional<Incoming>& incoming, const overlay::PublicationPart& part, const auto& make_decoder) {
  if (part.offset == 0) incoming = Incoming{part.id, part.version, make_decoder()};
  const bool continues = incoming && incoming->id == part.id && incoming->decoder.bytes() == part.offset;
  if (!continues) return;  // decode_all() decodes what is missing
  // After an error, decode_all() decodes the publication again from its start, and reports the error.
  if (!incoming->decoder.add(part.bytes.bytes())) incoming.reset();
}

// Continues `incoming` if it is an unfinished decode of `publication`; otherwise decodes `publication` from its start.
// Then checks the digest of the resulting policy.
template <class Decoder>
Result<Decoder> decode_all(auto incoming, const overlay::Publication& publication, const auto& make_decoder) {
  Decoder decoder = incoming && incoming->id == publication.id ? std::move(incoming->decoder) : make_decoder();
  std::uint64_t bytes_to_skip = decoder.bytes();  // these were decoded when they arrived
  ECHO_TRY(publication.payload.visit([&](std::span<const std::byte> piece) -> Status {
    const std::size_t skipped_bytes = std::min<std::uint64_t>(bytes_to_skip, piece.size());
    bytes_to_skip -= skipped_bytes;
    return skipped_bytes == piece.size() ? ok() : decoder.add(piece.subspan(skipped_bytes));
  }));
  // Without a result, the publication is incomplete: finish() and apply() report that.
  if (const auto digest = decoder.result(); digest && digest->bytes != publication.policy_digest)
    return fail(Code::kCorrupt, kOperation, "version {}: expected digest {}, found {}", publication.version,
                overlay::to_hex(publication.policy_digest), digest->hex());
  return decoder;
}

}  // namespace

void ArrivingPolicy::add(const overlay::PublicationPart& part, std::optional<Version> installed) {
  const bool is_of_snapshot = !part.base;
  if (is_of_snapshot) {
    const bool is_newer = !installed || part.version > *installed;
    if (is_newer) add_part(snapshot_, part, snapshot_decoder_maker(options_));
  } else if (installed == part.base) {  // a delta on another version could not be applied
    add_part(delta_, part, make_delta_decoder_);
  }
}

Result<delta::OwnedState> ArrivingPolicy::finish_snapshot(const overlay::Publication& publication) {
  delta_.reset();  // the snapshot replaces the version that the delta is based on
  ECHO_ASSIGN(auto decoder, decode_all<delta::IncomingSnapshot>(std::exchange(snapshot_, std::nullopt), publication,
                                                                snapshot_decoder_maker(options_)));
  return decoder.finish();
}

Result<std::vector<delta::TensorWrite>> ArrivingPolicy::finish_delta(const overlay::Publication& publication,
                                                                     std::optional<Version> installed) {
  // A snapshot that is not newer than the delta is of no use any more.
  if (snapshot_ && snapshot_->version <= publication.version) snapshot_.reset();
  auto incoming = std::exchange(delta_, std::nullopt);
  if (installed != publication.base)
    return fail(Code::kStale, kOperation, "version {} is a delta on version {}, but {} is installed",
                publication.version, *publication.base,
                installed ? fmt::format("version {}", *installed) : std::string("nothing"));
  ECHO_ASSIGN(auto decoder, decode_all<delta::IncomingDelta>(std::move(incoming), publication, make_delta_decoder_));
  return decoder.apply();
}

}  // namespace echoline::worker

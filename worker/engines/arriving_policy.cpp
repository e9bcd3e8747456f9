// Decodes arriving publications for Installer and PolicyFolder.
#include "worker/engines/arriving_policy.hpp"

#include <algorithm>
#include <utility>

namespace echoline::worker {
namespace {

constexpr std::string_view kOperation = "install policy";

auto begin_snapshot(const delta::DecodeOptions& options) {
  return [&options] { return delta::IncomingSnapshot(options); };
}

template <class Incoming>
void add_part(std::optional<Incoming>& incoming, const overlay::PublicationPart& part, const auto& begin) {
  if (part.offset == 0) incoming = Incoming{part.id, part.version, begin()};
  if (!incoming || incoming->id != part.id || incoming->patch.bytes() != part.offset) return;
  if (!incoming->patch.add(part.bytes.bytes())) incoming.reset();  // whole() will report the error
}

// Decodes all of `publication`, with or without earlier parts, and checks the resulting policy's digest.
template <class Patch>
Result<Patch> whole(auto incoming, const overlay::Publication& publication, const auto& begin) {
  Patch patch = incoming && incoming->id == publication.id ? std::move(incoming->patch) : begin();
  std::uint64_t decoded = patch.bytes();  // of the bytes from here on; the rest is decoded now
  ECHO_TRY(publication.payload.visit([&](std::span<const std::byte> piece) -> Status {
    const std::size_t known = std::min<std::uint64_t>(decoded, piece.size());
    decoded -= known;
    return known == piece.size() ? ok() : patch.add(piece.subspan(known));
  }));
  if (const auto result = patch.result(); result && result->bytes != publication.policy_digest)
    return fail(Code::kCorrupt, kOperation, "version {}: expected digest {}, found {}", publication.version,
                overlay::to_hex(publication.policy_digest), result->hex());
  return patch;
}

}  // namespace

void ArrivingPolicy::add(const overlay::PublicationPart& part, std::optional<Version> installed) {
  if (!part.base && (!installed || part.version > *installed))
    add_part(snapshot_, part, begin_snapshot(options_));
  else if (part.base && installed == part.base)
    add_part(delta_, part, begin_delta_);
}

Result<delta::OwnedState> ArrivingPolicy::snapshot(const overlay::Publication& publication) {
  delta_.reset();
  ECHO_ASSIGN(auto patch, whole<delta::IncomingSnapshot>(std::exchange(snapshot_, std::nullopt), publication,
                                                         begin_snapshot(options_)));
  return patch.finish();
}

Result<std::vector<delta::TensorWrite>> ArrivingPolicy::apply_delta(const overlay::Publication& publication,
                                                                    std::optional<Version> installed) {
  if (snapshot_ && snapshot_->version <= publication.version) snapshot_.reset();
  auto incoming = std::exchange(delta_, std::nullopt);
  if (installed != publication.base)
    return fail(Code::kStale, kOperation, "version {} is a delta on version {}, but {} is installed",
                publication.version, *publication.base,
                installed ? fmt::format("version {}", *installed) : std::string("nothing"));
  ECHO_ASSIGN(auto patch, whole<delta::IncomingDelta>(std::move(incoming), publication, begin_delta_));
  return patch.apply();
}

}  // namespace echoline::worker

#include "worker/engines/arriving_delta.hpp"

#include <algorithm>
#include <utility>

namespace echoline::worker {

void ArrivingDelta::add(const overlay::PublicationPart& part, std::optional<Version> installed, const Begin& begin) {
  if (installed != part.base) return;
  if (part.offset == 0) incoming_.emplace(Incoming{part.id, begin()});
  if (!incoming_ || incoming_->id != part.id || incoming_->delta.bytes() != part.offset) return;
  if (!incoming_->delta.add(part.bytes.bytes())) incoming_.reset();  // finish() will say what is wrong
}

Result<std::vector<delta::TensorWrite>> ArrivingDelta::finish(const overlay::Publication& publication,
                                                              std::optional<Version> installed, const Begin& begin) {
  constexpr std::string_view kOperation = "install policy";
  std::optional<Incoming> incoming = std::exchange(incoming_, std::nullopt);
  if (installed != publication.base)
    return fail(Code::kStale, kOperation, "version {} is a delta on version {}, but {} is installed",
                publication.version, *publication.base,
                installed ? fmt::format("version {}", *installed) : std::string("nothing"));
  if (!incoming || incoming->id != publication.id) incoming.emplace(Incoming{publication.id, begin()});
  std::uint64_t here = incoming->delta.bytes();  // of it: the rest follows
  ECHO_TRY(publication.payload.visit([&](std::span<const std::byte> piece) -> Status {
    const std::size_t known = std::min<std::uint64_t>(here, piece.size());
    here -= known;
    return known == piece.size() ? ok() : incoming->delta.add(piece.subspan(known));
  }));
  if (const auto result = incoming->delta.result(); result && result->bytes != publication.policy_digest)
    return fail(Code::kCorrupt, kOperation, "version {}: expected digest {}, found {}", publication.version,
                overlay::to_hex(publication.policy_digest), result->hex());
  return incoming->delta.apply();
}

}  // namespace echoline::worker

// Reads and joins the parts of a sharded policy. The trainer's API calls it on its threads.
#include "learner/external/shards.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/log.hpp"
#include "delta/safetensors.hpp"

namespace echoline::learner {
namespace {

using nlohmann::json;
constexpr std::string_view kOperation = "publish shards";
constexpr const char* kMetadataKey = "echoline_shards";
constexpr std::size_t kAttemptBytesMax = 256;

// An array of whole numbers that are not negative.
std::optional<std::vector<std::int64_t>> whole_numbers(const json& object, const char* name) {
  const auto it = object.find(name);
  if (it == object.end() || !it->is_array() || it->size() > delta::kRankMax) return std::nullopt;
  std::vector<std::int64_t> numbers;
  for (const json& value : *it) {
    if (!value.is_number_unsigned() || value.get<std::uint64_t>() > INT64_MAX) return std::nullopt;
    numbers.push_back(value.get<std::int64_t>());
  }
  return numbers;
}

// A box of elements within a tensor: first index and length in each dimension.
struct Box {
  std::vector<std::int64_t> begin, length;
  friend bool operator==(const Box&, const Box&) = default;

  bool intersects(const Box& other) const {
    for (std::size_t dimension = 0; dimension < begin.size(); ++dimension)
      if (begin[dimension] >= other.begin[dimension] + other.length[dimension] ||
          other.begin[dimension] >= begin[dimension] + length[dimension])
        return false;
    return true;
  }
  bool is_empty() const { return std::find(length.begin(), length.end(), 0) != length.end(); }
  std::int64_t elements() const {
    std::int64_t product = 1;
    for (const std::int64_t dimension_length : length) product *= dimension_length;
    return product;
  }
  std::string text() const { return fmt::format("[{}] from [{}]", fmt::join(length, ", "), fmt::join(begin, ", ")); }
};

// Copies a box from its own row-major memory into the whole tensor's. Dimensions that the box covers whole are copied
// together with the one before them.
void copy_box(std::span<const std::byte> from, std::span<std::byte> to, const Box& box,
              const std::vector<std::int64_t>& shape, std::size_t element_bytes) {
  // Copies runs of elements that are contiguous in both. A run has one index in the dimensions before `run_dimension`.
  std::size_t run_dimension = shape.size();
  std::int64_t run_elements = 1;
  while (run_dimension > 0) {
    --run_dimension;
    run_elements *= box.length[run_dimension];
    if (box.length[run_dimension] != shape[run_dimension]) break;
  }
  const std::size_t run_bytes = static_cast<std::size_t>(run_elements) * element_bytes;
  std::vector<std::int64_t> index(run_dimension, 0);  // of the current run within the box
  for (std::size_t from_byte = 0; from_byte < from.size(); from_byte += run_bytes) {
    std::int64_t to_element = 0;
    for (std::size_t dimension = 0; dimension < shape.size(); ++dimension)
      to_element =
          to_element * shape[dimension] + box.begin[dimension] + (dimension < run_dimension ? index[dimension] : 0);
    std::memcpy(to.data() + static_cast<std::size_t>(to_element) * element_bytes, from.data() + from_byte, run_bytes);
    // The next index, with the last dimension counting fastest.
    for (std::size_t dimension = run_dimension; dimension-- > 0;) {
      if (++index[dimension] < box.length[dimension]) break;
      index[dimension] = 0;
    }
  }
}

}  // namespace

Result<ShardCollector::Header> ShardCollector::read(Part& part) {
  ECHO_ASSIGN(const auto file, delta::parse_safetensors(part.bytes.bytes(), "the shards of a rank"));
  const auto metadata = file.metadata.find(kMetadataKey);
  const json root =
      metadata == file.metadata.end() ? json() : json::parse(metadata->second, nullptr, /*allow_exceptions=*/false);
  const auto number = [&](const char* name) -> std::optional<std::uint64_t> {
    const auto it = root.find(name);
    return it != root.end() && it->is_number_unsigned() ? std::optional(it->get<std::uint64_t>()) : std::nullopt;
  };
  const auto rank = root.is_object() ? number("rank") : std::nullopt;
  const auto ranks = root.is_object() ? number("ranks") : std::nullopt;
  const bool has_attempt = root.is_object() && root.contains("attempt") && root["attempt"].is_string() &&
                           root["attempt"].get_ref<const std::string&>().size() <= kAttemptBytesMax;
  if (!rank || !ranks || *ranks == 0 || *ranks > kRanksMax || *rank >= *ranks || !has_attempt ||
      !root.contains("tensors") || !root["tensors"].is_object())
    return fail(Code::kInvalid, kOperation,
                "expected the metadata '{}' with rank, ranks (at most {}), attempt and tensors", kMetadataKey,
                kRanksMax);
  for (const delta::TensorView& piece : file.tensors) {
    const auto refuse = [&](std::string_view why) {
      return fail(Code::kInvalid, kOperation, "rank {}, piece '{}': {}", *rank, piece.name, why);
    };
    const auto it = root["tensors"].find(piece.name);
    if (it == root["tensors"].end() || !it->is_object() || !it->contains("name") || !(*it)["name"].is_string())
      return refuse("the metadata does not say of which tensor it is");
    auto shape = whole_numbers(*it, "shape"), offset = whole_numbers(*it, "offset");
    if (!shape || !offset || shape->size() != piece.shape.size() || offset->size() != piece.shape.size())
      return refuse(fmt::format("expected a 'shape' and an 'offset' of {} whole numbers", piece.shape.size()));
    if (delta::dtype_bits(piece.dtype) < 8) return refuse("packed elements cannot be cut into pieces");
    for (std::size_t dimension = 0; dimension < shape->size(); ++dimension)
      if ((*offset)[dimension] > (*shape)[dimension] ||
          piece.shape[dimension] > (*shape)[dimension] - (*offset)[dimension])
        return refuse(fmt::format("[{}] from [{}] is not within the tensor's shape [{}]", fmt::join(piece.shape, ", "),
                                  fmt::join(*offset, ", "), fmt::join(*shape, ", ")));
    part.pieces.push_back({(*it)["name"].get<std::string>(), std::move(*shape), std::move(*offset), piece});
  }
  return Header{static_cast<std::uint32_t>(*rank), static_cast<std::uint32_t>(*ranks),
                root["attempt"].get<std::string>()};
}

Result<std::optional<delta::OwnedState>> ShardCollector::add(Version version, overlay::Slice bytes) {
  Part part{std::move(bytes), {}};
  ECHO_ASSIGN(const Header header, read(part));
  std::map<std::uint32_t, Part> complete_parts;
  {
    const std::lock_guard lock(mutex_);
    if (complete_ == std::pair(version, header.attempt)) return std::optional<delta::OwnedState>();
    if (!parts_.empty() && version < version_)
      return fail(Code::kStale, kOperation, "version {} is complete or given up: shards of version {} have arrived",
                  version, version_);
    if (!parts_.empty() && (version != version_ || header.attempt != newest_header_.attempt)) {
      log::warn("shards of {} of {} ranks for version {} are dropped: rank {} has begun {}", parts_.size(),
                newest_header_.ranks, version_, header.rank,
                version != version_ ? fmt::format("version {}", version) : "another attempt");
      parts_.clear();
    }
    if (!parts_.empty() && header.ranks != newest_header_.ranks)
      return fail(Code::kInvalid, kOperation, "rank {} is of {} ranks, the ranks before were of {}", header.rank,
                  header.ranks, newest_header_.ranks);
    if (const auto earlier = parts_.find(header.rank); earlier != parts_.end()) {
      if (std::ranges::equal(earlier->second.bytes.bytes(), part.bytes.bytes()))
        return std::optional<delta::OwnedState>();
      return fail(Code::kInvalid, kOperation,
                  "rank {} hands in other shards for version {} than before: a trainer that starts again needs another "
                  "'attempt', the same on all ranks",
                  header.rank, version);
    }
    std::uint64_t total = part.bytes.size();
    for (const auto& [rank, stored] : parts_) total += stored.bytes.size();
    if (total > bytes_max_.count)
      return fail(Code::kExhausted, kOperation, "the shards of version {} have {}, at most {} are expected", version,
                  to_text(Bytes{total}), to_text(bytes_max_));
    version_ = version;
    newest_header_ = header;
    parts_.emplace(header.rank, std::move(part));
    if (parts_.size() < header.ranks) return std::optional<delta::OwnedState>();
    complete_parts = std::exchange(parts_, {});
    complete_ = {version, header.attempt};
  }
  auto joined = join(std::move(complete_parts));
  if (!joined) {
    const std::lock_guard lock(mutex_);
    complete_.reset();  // the ranks may hand in their parts again
    return std::move(joined).error();
  }
  return std::optional(std::move(*joined));
}

Result<delta::OwnedState> ShardCollector::join(std::map<std::uint32_t, Part> parts) const {
  struct PlacedPiece {
    std::uint32_t rank;
    Box box;
    const Piece* piece;
  };
  std::map<std::string, std::vector<PlacedPiece>> by_tensor;
  for (const auto& [rank, part] : parts)
    for (const Piece& piece : part.pieces)
      by_tensor[piece.name].push_back({rank, {piece.offset, piece.content.shape}, &piece});

  delta::StateView layout;
  for (auto& [name, placed] : by_tensor) {
    const Piece& first = *placed.front().piece;
    const auto refuse = [&, &tensor = name](const PlacedPiece& placed_piece, const PlacedPiece& other,
                                            std::string_view why) {
      return fail(Code::kInvalid, kOperation, "tensor '{}': {} of rank {} and {} of rank {} {}", tensor,
                  placed_piece.box.text(), placed_piece.rank, other.box.text(), other.rank, why);
    };
    std::vector<PlacedPiece> distinct;
    std::int64_t covered_elements = 0;
    for (const PlacedPiece& placed_piece : placed) {
      if (placed_piece.piece->shape != first.shape || placed_piece.piece->content.dtype != first.content.dtype)
        return refuse(placed.front(), placed_piece, "are not of one tensor: their shapes or types differ");
      if (placed_piece.box.is_empty()) continue;
      // Ranks may hold equal pieces, which count once. Any other overlap is an error.
      const auto overlapping = std::find_if(distinct.begin(), distinct.end(), [&](const PlacedPiece& other) {
        return placed_piece.box.intersects(other.box);
      });
      if (overlapping == distinct.end()) {
        covered_elements += placed_piece.box.elements();
        distinct.push_back(placed_piece);
        continue;
      }
      if (placed_piece.box != overlapping->box) return refuse(*overlapping, placed_piece, "overlap");
      const auto values = placed_piece.piece->content.bytes, other_values = overlapping->piece->content.bytes;
      if (!std::equal(values.begin(), values.end(), other_values.begin(), other_values.end()))
        return refuse(*overlapping, placed_piece, "are one part with different values");
    }
    ECHO_ASSIGN(const std::int64_t elements, delta::element_count(first.shape));
    if (covered_elements != elements)
      return fail(Code::kInvalid, kOperation, "tensor '{}': the shards of {} ranks have {} of its {} elements", name,
                  parts.size(), covered_elements, elements);
    placed = std::move(distinct);
    layout.push_back({name, first.content.dtype, first.shape, {}});
  }
  ECHO_ASSIGN(delta::OwnedState policy,
              delta::OwnedState::empty_like(layout, folder_.empty() ? nullptr : delta::allocate_in(folder_)));
  for (std::size_t i = 0; i < policy.size(); ++i) {
    const std::span<std::byte> memory = policy.mutable_bytes(i);
    for (const PlacedPiece& placed_piece : by_tensor.at(policy.name(i)))
      copy_box(placed_piece.piece->content.bytes, memory, placed_piece.box, placed_piece.piece->shape,
               delta::dtype_bytes(placed_piece.piece->content.dtype));
  }
  policy.seal();
  return policy;
}

json ShardCollector::status() const {
  const std::lock_guard lock(mutex_);
  if (parts_.empty()) return nullptr;
  json missing = json::array();
  for (std::uint32_t rank = 0; rank < newest_header_.ranks; ++rank)
    if (!parts_.contains(rank)) missing.push_back(rank);
  return {{"version", version_.value},
          {"attempt", newest_header_.attempt},
          {"ranks", newest_header_.ranks},
          {"missing", std::move(missing)}};
}

}  // namespace echoline::learner

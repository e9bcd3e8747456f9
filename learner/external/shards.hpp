// Joins the shards that the ranks (processes) of a trainer hand in, so that no rank needs the whole policy.
// Thread-safe.
#pragma once
#include <cstdint>
#include <filesystem>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "base/units.hpp"
#include "delta/tensor.hpp"
#include "overlay/slice.hpp"

namespace echoline::learner {

// The shards of one version. A version exists once every rank has handed in its part and the parts cover every element
// of every tensor. Parts of another attempt, as after a restart of the trainer, replace those of the attempt before.
class ShardCollector {
 public:
  static constexpr std::uint32_t kRanksMax = 65'536;

  // `bytes_max`: of all parts of a version together. A large policy is joined in a file below `folder`, if that is not
  // empty (base/file_memory.hpp).
  explicit ShardCollector(Bytes bytes_max, std::filesystem::path folder = {})
      : bytes_max_(bytes_max), folder_(std::move(folder)) {}

  // Adds a rank's part: the bytes of a safetensors file, whose metadata has, as JSON under "echoline_shards",
  //   {"rank": 2, "ranks": 4, "attempt": TEXT, "tensors": {PIECE: {"name": TENSOR, "shape": [...], "offset": [...]}}}.
  // Every tensor of the file is a piece: a box within the whole tensor `name` of that shape, from index `offset` on.
  // Equal pieces of several ranks must have equal bytes. Returns the policy if this was the last part.
  // A part of a version that is complete is accepted without effect. kInvalid names rank and tensor: the part is
  // malformed, or has other bytes than this rank's part before. If the last part shows that pieces overlap or differ,
  // or that no piece has an element, it is kInvalid as well, and all parts of the version are dropped. kStale: a later
  // version has parts. kExhausted: the parts exceed bytes_max.
  Result<std::optional<delta::OwnedState>> add(Version version, overlay::Slice bytes);

  // {"version", "attempt", "ranks", "missing": [ranks]} of the version that is being collected; null if none.
  nlohmann::json status() const;

 private:
  struct Piece {
    std::string name;
    std::vector<std::int64_t> shape, offset;  // of the whole tensor; of the piece within it
    delta::TensorView content;                // in the memory of its part
  };
  struct Part {
    overlay::Slice bytes;  // of the file; the pieces refer to it
    std::vector<Piece> pieces;
  };
  struct Header {
    std::uint32_t rank = 0, ranks = 0;
    std::string attempt;
  };

  // Reads part.bytes, and adds the pieces to part.pieces.
  static Result<Header> read(Part& part);
  // Checks that the pieces cover every tensor without conflict, and copies them into one policy.
  Result<delta::OwnedState> join(std::map<std::uint32_t, Part> parts) const;

  const Bytes bytes_max_;
  const std::filesystem::path folder_;
  mutable std::mutex mutex_;
  // Guarded by mutex_:
  Version version_;
  Header newest_header_;                 // header of the last part; all parts have its `ranks` and `attempt`
  std::map<std::uint32_t, Part> parts_;  // by rank
  std::optional<std::pair<Version, std::string>> complete_;  // the last version with all parts, and its attempt
};

}  // namespace echoline::learner

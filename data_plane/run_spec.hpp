// The run specification on its way to a worker: compressed and cut into parts that fit application messages, because
// a real tokenizer.json has ten megabytes and more.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "data_plane/schema.pb.h"

namespace echoline::data_plane {

inline constexpr std::size_t kRunSpecPartBytes = 1u << 20;
inline constexpr std::size_t kRunSpecBytesMax = 128u << 20;  // uncompressed

// Parts in sending order. kExhausted when the specification is larger than kRunSpecBytesMax.
Result<std::vector<schema::RunSpecPart>> cut_run_spec(const schema::RunSpec& spec);

// Puts the parts together again. One thread.
class RunSpecAssembler {
 public:
  // The whole specification after the last part, nothing before. kCorrupt for parts out of order, too many bytes, or
  // bytes that do not decode.
  Result<std::optional<schema::RunSpec>> add(const schema::RunSpecPart& part);

 private:
  std::uint32_t next_ = 0;
  std::string bytes_;
};

}  // namespace echoline::data_plane

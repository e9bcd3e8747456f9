// Packs the run specification, which the learner sends to each worker: model, tokenizer, task and sampling settings. It
// is serialised and compressed once per run, because a real tokenizer.json has ten megabytes or more.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "base/result.hpp"
#include "data_plane/schema.pb.h"

namespace echoline::data_plane {

inline constexpr std::size_t kRunSpecBytesMax = 128u << 20;  // uncompressed

// For LearnerMessage.run_spec. kExhausted when the specification is larger than kRunSpecBytesMax.
Result<std::string> pack_run_spec(const schema::RunSpec& spec);
// kCorrupt if the bytes do not decode, or unpack to more than kRunSpecBytesMax.
Result<schema::RunSpec> unpack_run_spec(std::string_view packed);

}  // namespace echoline::data_plane

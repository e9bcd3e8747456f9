// The longest texts of a problem, in bytes; schema.proto states the same limits.
#pragma once
#include <cstddef>

namespace echoline::data_plane {

inline constexpr std::size_t kProblemIdBytesMax = 128, kPromptBytesMax = 256u << 10;
inline constexpr std::size_t kReferenceBytesMax = 64u << 10, kMetadataBytesMax = 64u << 10;

}  // namespace echoline::data_plane

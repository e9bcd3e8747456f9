// The experts that a mixture of experts chose for the tokens of a trajectory. They travel with it, so that the trainer
// can route its tokens in the same way (router replay). A compressed form, and its parser.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.hpp"

namespace echoline::data_plane {

struct RoutedExperts {
  std::uint32_t layers = 0;     // mixture layers; 0: no experts are known
  std::uint32_t per_token = 0;  // experts of a token in one layer
  // [tokens, layers, per_token]: prompt, then response. The experts of a token in one layer ascend, or are all -1: not
  // known, because the engine did not compute the token, or did so without telling.
  std::vector<std::int16_t> values;

  std::size_t choices() const { return std::size_t{layers} * per_token; }  // of one token
  std::size_t tokens() const { return choices() == 0 ? 0 : values.size() / choices(); }
  friend bool operator==(const RoutedExperts&, const RoutedExperts&) = default;
};

inline constexpr std::size_t kExpertChoicesMax = std::size_t{1} << 26;        // values of one trajectory
inline constexpr std::size_t kRoutedExpertsBytesMax = std::size_t{16} << 20;  // of one trajectory, packed

inline constexpr std::uint32_t kExpertLayersMax = 4096, kExpertsPerTokenMax = 256;

// Sorts the experts of one token in one layer. Whether they are known: different numbers from 0.
bool sort_experts(std::span<std::int16_t> experts);
// sort_experts() for each token and layer. kInvalid if they are neither all -1 nor different numbers from 0, or if the
// number of values does not fit the shape.
Status make_canonical(RoutedExperts& experts);

// Adds the experts of a longer part of the same text, which begins with the part that `known` is about. Known experts
// stay, because the log-probabilities of their tokens were computed with them. A part of another shape is left out.
void extend(RoutedExperts& known, const RoutedExperts& longer);

// Packs canonical experts: Trajectory.routed_experts. Returns an empty text if there are none, or if they exceed one of
// the limits above. The trainer then routes the trajectory's tokens itself.
std::string pack_experts(const RoutedExperts& experts);
// kCorrupt or kInvalid, saying what was expected and found, unless pack_experts() makes such a text for experts of
// `tokens` tokens. An empty text has no experts.
Result<RoutedExperts> unpack_experts(std::string_view packed, std::size_t tokens);

}  // namespace echoline::data_plane

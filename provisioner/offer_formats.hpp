// What readers of offers share. Private to provisioner/.
#pragma once
#include <string>
#include <string_view>

#include "provisioner/provider.hpp"

namespace echoline::provisioner {

// Collects what is wrong with a file, so that it is said at once, and not a hundred thousand times.
class OfferProblems {
 public:
  explicit OfferProblems(std::string_view name) : name_(name) {}
  // `where`: "offers[3] (id 12)", "line 4".
  void add(std::string_view where, std::string_view what);
  bool none() const { return count_ == 0; }
  Error error() const;

 private:
  std::string name_, text_;
  std::size_t count_ = 0;
};

// The beginning of a value for a message, on one line.
std::string shown(std::string_view value);

inline constexpr double kMbitMax = 1e6;  // 1 Tbit/s
inline constexpr double kUsdMax = 1e6;
inline constexpr int kGpusMax = 1024;
inline constexpr std::size_t kOfferTextMax = 512;

// Catalogues of SkyPilot (providers/exec_skypilot.cpp): commands start their machines.
OfferFormat skypilot_format();

}  // namespace echoline::provisioner

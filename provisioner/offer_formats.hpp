// Helpers of the readers of offers. Private to provisioner/.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "provisioner/provider.hpp"

namespace echoline::provisioner {

// Collects the problems of a file for one error, with a limit on their number.
class OfferProblems {
 public:
  explicit OfferProblems(std::string_view name) : name_(name) {}
  // Adds a problem. `where`: "offers[3] (id 12)" or "line 4".
  void add(std::string_view where, std::string_view what);
  bool none() const { return count_ == 0; }
  Error error() const;
  // One line for each problem, as error() lists them; for a file that is used in spite of them.
  std::vector<std::string> lines() const;

 private:
  std::string name_, text_;
  std::size_t count_ = 0;
};

// The start of a value, on one line, for a message.
std::string excerpt(std::string_view value);

// Bounds of values in files of offers.
inline constexpr double kMbitMax = 1e6;            // per second
inline constexpr double kUsdMax = 1e6;             // of each price
inline constexpr int kGpusMax = 1024;              // of one machine
inline constexpr std::size_t kOfferTextMax = 512;  // bytes

// The format of SkyPilot's catalogues (providers/exec_skypilot.cpp). The provider "exec" rents their machines.
OfferFormat skypilot_format();

}  // namespace echoline::provisioner

// What vast.ai itself says that it charged, and what is left on the account.
#pragma once
#include <chrono>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "base/units.hpp"
#include "provisioner/providers/vast.hpp"

namespace echoline::provisioner {

struct VastBillQuestion {
  std::string url = kVastUrl;
  std::string key;
  double from_unix_s = 0, to_unix_s = 0;  // whole days (UTC) are asked for
  Duration timeout = std::chrono::seconds(30);
  Duration pause = std::chrono::seconds(2);  // between requests; where it fails twice as long each time
  int tries = 5;                             // of each request
};

// Waits. kUnavailable with the service's words; kCorrupt where what it says cannot be added up: a page that fails or is
// cut makes all of it worthless, since a sum would be too small.
Result<Bill> ask_vast_bill(const VastBillQuestion& question);

// One page of charges, as it came: appends what is of instances and returns the token of the next page, "" for none.
Result<std::string> read_vast_charges(const std::string& body, std::vector<Charge>& charges);

}  // namespace echoline::provisioner

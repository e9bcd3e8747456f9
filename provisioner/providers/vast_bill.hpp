// Reads vast.ai's own charges and the account's credit.
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
  double from_unix_s = 0, to_unix_s = 0;  // widened to whole days (UTC)
  Duration timeout = std::chrono::seconds(30);
  Duration pause = std::chrono::seconds(2);  // between requests; doubles after a failure
  int tries = 5;                             // per request
};

// Blocks. kUnavailable with the service's words; kCorrupt if the charges cannot be summed. A failed or truncated page
// makes the whole bill an error, because a partial sum would be too small.
Result<Bill> ask_vast_bill(const VastBillQuestion& question);

// Asks whether the service accepts the key, and for the credit. Blocks. kInvalid if it refuses the key.
Result<Account> ask_vast_account(const VastBillQuestion& question);

// Parses one page of charges: appends those of instances and returns the next page's token, "" at the end.
Result<std::string> read_vast_charges(const std::string& body, std::vector<Charge>& charges);

}  // namespace echoline::provisioner

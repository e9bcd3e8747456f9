// Records providers' bills in the ledger, beside the costs that the ledger computes itself.
#pragma once
#include "base/result.hpp"
#include "provisioner/ledger.hpp"
#include "provisioner/provider.hpp"

namespace echoline::provisioner {

// Reads the bills of all providers from which this run has rented. Records this run's charges and the credit left on
// the accounts. Blocks. kNotFound if none of these providers has bills; else errors of ProviderKind::bill and the
// ledger.
Status book_bills(Ledger& ledger, const ProviderOptions& options, double now_unix_s);

}  // namespace echoline::provisioner

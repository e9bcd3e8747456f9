// Records providers' bills in the ledger. They stand beside the costs that the ledger computes itself.
#pragma once
#include "base/result.hpp"
#include "provisioner/ledger.hpp"
#include "provisioner/provider.hpp"

namespace echoline::provisioner {

// Reads the bills of all providers from which this run has rented. Records this run's charges and the credit left on
// the accounts. Blocks. kNotFound if no such provider has a bill; errors of ProviderKind::bill and of the ledger.
Status book_bills(Ledger& ledger, const ProviderOptions& options, double now_unix_s);

}  // namespace echoline::provisioner

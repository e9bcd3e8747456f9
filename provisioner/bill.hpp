// What providers themselves say that they charged, beside what the ledger counts.
#pragma once
#include "base/result.hpp"
#include "provisioner/ledger.hpp"
#include "provisioner/provider.hpp"

namespace echoline::provisioner {

// Asks every provider that has rented to this run and can tell what it charged, and books that and what is left on the
// account. Waits. kNotFound where there is no such provider; otherwise errors of ProviderKind::bill and of the ledger.
Status book_bills(Ledger& ledger, const ProviderOptions& options, double now_unix_s);

}  // namespace echoline::provisioner

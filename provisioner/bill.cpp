// Books providers' bills; `echoline ledger` calls it.
#include "provisioner/bill.hpp"

#include <algorithm>
#include <map>

#include "provisioner/providers/registry.hpp"

namespace echoline::provisioner {

Status book_bills(Ledger& ledger, const ProviderOptions& options, double now_unix_s) {
  ECHO_ASSIGN(const auto rows, ledger.rows());
  std::vector<std::string> titles;  // of providers that have bills
  bool asked = false;
  for (const ProviderKind* kind : provider_kinds()) {
    if (!kind->bill) continue;
    titles.push_back(kind->title);
    std::map<std::string, std::int64_t> row_of;
    double from = now_unix_s;
    for (const LedgerRow& row : rows) {
      if (row.provider != kind->name || row.instance.empty()) continue;
      row_of[row.instance] = row.id;
      from = std::min(from, row.intended_unix_s);
    }
    if (row_of.empty()) continue;
    asked = true;
    ECHO_ASSIGN(const Bill bill, kind->bill(options, from, now_unix_s));
    std::vector<LedgerCharge> charges;
    for (const Charge& c : bill.charges)
      if (const auto row = row_of.find(c.instance.text); row != row_of.end())  // the others belong to other runs
        charges.push_back({row->second, c.day_unix_s, c.usd, c.usd_rent, c.usd_traffic});
    std::optional<LedgerCredit> credit;
    if (bill.credit_usd) credit = {kind->name, *bill.credit_usd, now_unix_s};
    ECHO_TRY(ledger.record_charges(charges, credit, now_unix_s));
  }
  if (asked) return ok();
  return fail(Code::kNotFound, "ledger", "this run has rented nothing from {}, and no other provider has bills",
              fmt::join(titles, " or "));
}

}  // namespace echoline::provisioner

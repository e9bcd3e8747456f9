// Records providers' bills in the ledger; `echoline ledger` calls it.
#include "provisioner/bill.hpp"

#include <algorithm>
#include <map>

#include "provisioner/providers/registry.hpp"

namespace echoline::provisioner {

Status book_bills(Ledger& ledger, const ProviderOptions& options, double now_unix_s) {
  ECHO_ASSIGN(const auto rows, ledger.rows());
  std::vector<std::string> billing_titles;  // names of the kinds of providers that have bills
  bool rented_from_billing_provider = false;
  for (const ProviderKind* kind : provider_kinds()) {
    if (!kind->bill) continue;
    billing_titles.push_back(kind->title);
    std::map<std::string, std::int64_t> row_by_instance;
    double first_unix_s = now_unix_s;
    for (const LedgerRow& row : rows) {
      if (row.provider != kind->name || row.instance.empty()) continue;
      row_by_instance[row.instance] = row.id;
      first_unix_s = std::min(first_unix_s, row.intended_unix_s);
    }
    if (row_by_instance.empty()) continue;
    rented_from_billing_provider = true;
    ECHO_ASSIGN(const Bill bill, kind->bill(options, first_unix_s, now_unix_s));
    std::vector<LedgerCharge> charges;
    for (const Charge& charge : bill.charges) {
      const auto it = row_by_instance.find(charge.instance.text);
      if (it == row_by_instance.end()) continue;  // an instance of another run
      charges.push_back({.row = it->second,
                         .day_unix_s = charge.day_unix_s,
                         .usd = charge.usd,
                         .usd_rent = charge.usd_rent,
                         .usd_traffic = charge.usd_traffic});
    }
    std::optional<LedgerCredit> credit;
    if (bill.credit_usd) credit = LedgerCredit{.provider = kind->name, .usd = *bill.credit_usd, .unix_s = now_unix_s};
    ECHO_TRY(ledger.record_charges(charges, credit, now_unix_s));
  }
  if (rented_from_billing_provider) return ok();
  return fail(Code::kNotFound, "ledger", "this run has rented nothing from {}, and no other provider has bills",
              fmt::join(billing_titles, " or "));
}

}  // namespace echoline::provisioner

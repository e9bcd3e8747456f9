// Implements Findings for the checks of this folder.
#include "data_plane/adapters/check/findings.hpp"

#include <algorithm>

#include "base/text.hpp"

namespace echoline::data_plane {
namespace {

using nlohmann::json;

constexpr std::size_t kResponseShownBytes = 96, kFindingTextBytesMax = 600, kFindingsPerKind = 3;

}  // namespace

bool is_utf8(const std::string& text) {
  // The two handlers treat only invalid bytes differently: one leaves them out, the other replaces them.
  return json(text).dump(-1, ' ', /*ensure_ascii=*/false, json::error_handler_t::ignore) ==
         json(text).dump(-1, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace);
}

void Findings::add_error(const char* check, const std::string& what, const std::string& problem,
                         const std::string& response) {
  add({.check = check,
       .wrong = true,
       .what = printable(what, kFindingTextBytesMax),
       .problem = printable(problem, kProblemIdBytesMax),
       .response = printable_response(response)});
}

void Findings::add_note(const char* check, const std::string& what, const std::string& problem,
                        const std::string& response) {
  add({.check = check,
       .wrong = false,
       .what = printable(what, kFindingTextBytesMax),
       .problem = printable(problem, kProblemIdBytesMax),
       .response = printable_response(response)});
}

void Findings::add(Finding finding) {
  if (++count_by_kind_[finding.check + (finding.wrong ? "!" : "")] > kFindingsPerKind)
    ++report.further[finding.check];
  else
    report.findings.push_back(std::move(finding));
}

std::string Findings::printable_response(const std::string& response) {
  return response.size() > kResponseShownBytes
             ? fmt::format("{} ({} bytes)", printable(response, kResponseShownBytes), response.size())
             : printable(response, kResponseShownBytes);
}

bool CheckReport::is_sound() const {
  return std::ranges::none_of(findings, [](const Finding& finding) { return finding.wrong; });
}

}  // namespace echoline::data_plane

#include "data_plane/adapters/check/findings.hpp"

#include <algorithm>

#include "base/text.hpp"

namespace echoline::data_plane {
namespace {

using nlohmann::json;

constexpr std::size_t kShown = 96, kWordsMax = 600, kOfAKind = 3;

}  // namespace

bool utf8(const std::string& text) {
  return json(text).dump(-1, ' ', false, json::error_handler_t::ignore) ==
         json(text).dump(-1, ' ', false, json::error_handler_t::replace);
}

void Findings::wrong(const char* check, const std::string& what, const std::string& problem,
                     const std::string& response) {
  add({check, true, printable(what, kWordsMax), printable(problem, kIdBytes), shown(response)});
}

void Findings::note(const char* check, const std::string& what, const std::string& problem,
                    const std::string& response) {
  add({check, false, printable(what, kWordsMax), printable(problem, kIdBytes), shown(response)});
}

void Findings::add(Finding finding) {
  if (++by_kind_[finding.check + (finding.wrong ? "!" : "")] > kOfAKind)
    ++report.further[finding.check];
  else
    report.findings.push_back(std::move(finding));
}

std::string Findings::shown(const std::string& response) {
  return response.size() > kShown ? fmt::format("{} ({} bytes)", printable(response, kShown), response.size())
                                  : printable(response, kShown);
}

bool CheckReport::sound() const {
  return std::ranges::none_of(findings, [](const Finding& finding) { return finding.wrong; });
}

}  // namespace echoline::data_plane

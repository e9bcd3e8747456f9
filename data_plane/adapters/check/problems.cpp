// Implements the checks of problems and held-out problems for check_adapter().
#include "data_plane/adapters/check/problems.hpp"

#include <set>

#include "base/text.hpp"

namespace echoline::data_plane {
namespace {

using nlohmann::json;

constexpr std::uint64_t kCompared = 4096;  // training problems that held-out ones are compared with
constexpr std::string_view kSecondTime = "asked a second time",
                           kSecondStart = "after a second start with the same seed";

void well_formed(Findings& found, const Problem& p, const char* check) {
  const auto bad = [&](const std::string& what) { found.add_error(check, what, p.id()); };
  const auto too_large = [&](const char* what, const std::string& text, std::size_t most) {
    if (text.size() > most) bad(fmt::format("its {} has {} bytes, at most {} are allowed", what, text.size(), most));
  };
  if (p.id().empty() || p.id().size() > kIdBytes)
    bad(fmt::format("its id has {} bytes, expected 1 to {}", p.id().size(), kIdBytes));
  if (p.prompt().empty()) bad("it has no prompt");
  too_large("prompt", p.prompt(), kPromptBytes);
  too_large("reference", p.reference(), kOtherBytes);
  too_large("metadata", p.metadata_json(), kOtherBytes);
  if (!p.metadata_json().empty() && json::parse(p.metadata_json(), nullptr, false).is_discarded())
    bad("its metadata is no JSON");
  if (!is_utf8(p.prompt()) || !is_utf8(p.id()) || !is_utf8(p.reference())) bad("it is no UTF-8");
}

void asked_again(Findings& found, const Adapter& adapter, std::uint64_t index, const Problem& first,
                 std::string_view when) {
  found.doing(fmt::format("requesting problem {} {}", index, when));
  const auto again = adapter.problem(index);
  if (!again) {
    found.add_error("problems", fmt::format("problem {} {}: {}", index, when, again.error().message()), first.id());
  } else if (again->id() != first.id()) {
    found.add_error("problems", fmt::format("problem {} is '{}' {}", index, printable(again->id(), 60), when),
                    first.id());
  } else if (again->SerializeAsString() != first.SerializeAsString()) {
    found.add_error("problems", fmt::format("problem {} has other content {}", index, when), first.id());
  }
}

void as_before(Findings& found, const Adapter& adapter, const std::vector<Problem>& first, std::string_view when) {
  const std::vector<Problem> again = adapter.evaluation();
  if (again.size() != first.size())
    return found.add_error("held out", fmt::format("{} problems {}, {} before", again.size(), when, first.size()));
  for (std::size_t i = 0; i < first.size(); ++i)
    if (again[i].SerializeAsString() != first[i].SerializeAsString())
      return found.add_error("held out", fmt::format("problem {} is a different one {}", i, when), first[i].id());
}

}  // namespace

std::vector<Problem> check_problems(Findings& found, const CheckOptions& options, const Adapter& adapter,
                                    const Adapter* again) {
  std::vector<std::uint64_t> indices;
  for (std::uint64_t i = 0; i < options.problems; ++i) indices.push_back(i);
  indices.push_back(1'000'003);
  indices.push_back(std::uint64_t{1} << 40);  // indices never end
  std::map<std::string, std::string> by_id;
  std::vector<std::pair<std::uint64_t, Problem>> problems;
  for (const std::uint64_t index : indices) {
    found.doing(fmt::format("requesting problem {}", index));
    auto problem = adapter.problem(index);
    if (!problem) {
      found.add_error("problems", fmt::format("problem {} failed: {}", index, problem.error().message()));
      continue;
    }
    well_formed(found, *problem, "problems");
    const auto [known, fresh] = by_id.emplace(problem->id(), problem->SerializeAsString());
    if (!fresh && known->second != problem->SerializeAsString())
      found.add_error("problems", "two different problems have this id", problem->id());
    problems.emplace_back(index, *std::move(problem));
  }
  found.report.facts["problems"] = indices.size();
  found.report.facts["problems_different"] = by_id.size();
  std::vector<Problem> near;
  for (std::size_t i = problems.size(); i-- > 0;) {  // in reverse order, and from the second instance
    const auto& [index, problem] = problems[i];
    asked_again(found, adapter, index, problem, kSecondTime);
    if (again) asked_again(found, *again, index, problem, kSecondStart);
    if (index < options.problems) near.insert(near.begin(), problem);
  }
  return near;
}

void check_held_out(Findings& found, const CheckOptions& options, const Clock& clock, const Adapter& adapter,
                    const Adapter* again) {
  found.doing("requesting the held-out problems");
  const std::vector<Problem> first = adapter.evaluation();
  found.report.facts["held_out"] = first.size();
  if (first.empty()) return found.add_note("held out", "there are no held-out problems: nothing can be evaluated");
  as_before(found, adapter, first, kSecondTime);
  if (again) as_before(found, *again, first, kSecondStart);
  std::set<std::string> ids, texts;
  const auto text = [](const Problem& p) { return p.prompt() + '\0' + p.reference() + '\0' + p.metadata_json(); };
  for (const Problem& p : first) {
    well_formed(found, p, "held out");
    if (!ids.insert(p.id()).second) found.add_error("held out", "its id occurs twice", p.id());
    texts.insert(text(p));
  }
  std::uint64_t compared = 0;
  const TimePoint until = clock.now() + options.time / 6;
  for (; compared < kCompared && (compared < options.problems || clock.now() < until); ++compared) {
    found.doing(fmt::format("requesting problem {}", compared));
    const auto p = adapter.problem(compared);
    if (!p) break;
    if (ids.contains(p->id()))
      found.add_error("held out", fmt::format("it is both held out and training problem {}", compared), p->id());
    else if (texts.contains(text(*p)))
      found.add_error("held out", fmt::format("training problem {} is a held-out one under another id", compared),
                      p->id());
  }
  found.report.facts["compared_with_held_out"] = compared;
}

}  // namespace echoline::data_plane

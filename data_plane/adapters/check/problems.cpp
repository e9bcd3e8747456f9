// Implements the checks of problems and held-out problems for check_adapter().
#include "data_plane/adapters/check/problems.hpp"

#include <set>

#include "base/text.hpp"

namespace echoline::data_plane {
namespace {

using nlohmann::json;

constexpr std::uint64_t kComparedMax = 4096;  // training problems that held-out ones are compared with
constexpr int kHeldOutTimeDivisor = 6;        // the comparison takes at most the time for all checks divided by this
constexpr std::size_t kProblemIdBytesShown = 60;
constexpr std::string_view kSecondTime = "asked a second time",
                           kSecondStart = "after a second start with the same seed";

void check_form(Findings& findings, const Problem& problem, const char* check) {
  const auto report = [&](const std::string& what) { findings.add_error(check, what, problem.id()); };
  const auto check_size = [&](const char* what, const std::string& text, std::size_t bytes_max) {
    if (text.size() > bytes_max)
      report(fmt::format("its {} has {} bytes, at most {} are allowed", what, text.size(), bytes_max));
  };
  if (problem.id().empty() || problem.id().size() > kProblemIdBytesMax)
    report(fmt::format("its id has {} bytes, expected 1 to {}", problem.id().size(), kProblemIdBytesMax));
  if (problem.prompt().empty()) report("it has no prompt");
  check_size("prompt", problem.prompt(), kPromptBytesMax);
  check_size("reference", problem.reference(), kReferenceBytesMax);
  check_size("metadata", problem.metadata_json(), kMetadataBytesMax);
  if (!problem.metadata_json().empty() &&
      json::parse(problem.metadata_json(), nullptr, /*allow_exceptions=*/false).is_discarded())
    report("its metadata is not valid JSON");
  if (!is_utf8(problem.prompt()) || !is_utf8(problem.id()) || !is_utf8(problem.reference()))
    report("it is not valid UTF-8");
}

void check_repeated_problem(Findings& findings, const Adapter& adapter, std::uint64_t index, const Problem& first,
                            std::string_view when) {
  findings.announce_call(fmt::format("requesting problem {} {}", index, when));
  const auto again = adapter.problem(index);
  if (!again) {
    findings.add_error("problems", fmt::format("problem {} {}: {}", index, when, again.error().message()), first.id());
  } else if (again->id() != first.id()) {
    findings.add_error("problems",
                       fmt::format("problem {} is '{}' {}", index, printable(again->id(), kProblemIdBytesShown), when),
                       first.id());
  } else if (again->SerializeAsString() != first.SerializeAsString()) {
    findings.add_error("problems", fmt::format("problem {} has other content {}", index, when), first.id());
  }
}

void check_repeated_held_out(Findings& findings, const Adapter& adapter, const std::vector<Problem>& first,
                             std::string_view when) {
  const std::vector<Problem> again = adapter.evaluation();
  if (again.size() != first.size())
    return findings.add_error("held out", fmt::format("{} problems {}, {} before", again.size(), when, first.size()));
  for (std::size_t i = 0; i < first.size(); ++i)
    if (again[i].SerializeAsString() != first[i].SerializeAsString())
      return findings.add_error("held out", fmt::format("problem {} is a different one {}", i, when), first[i].id());
}

}  // namespace

std::vector<Problem> check_problems(Findings& findings, const CheckOptions& options, const Adapter& adapter,
                                    const Adapter* second_instance) {
  std::vector<std::uint64_t> indices;
  for (std::uint64_t i = 0; i < options.problems; ++i) indices.push_back(i);
  // Indices never end, so two distant ones are checked too: a large one, and one that does not fit in 32 bits.
  indices.push_back(1'000'003);
  indices.push_back(std::uint64_t{1} << 40);
  std::map<std::string, std::string> content_by_id;
  std::vector<std::pair<std::uint64_t, Problem>> problems;
  for (const std::uint64_t index : indices) {
    findings.announce_call(fmt::format("requesting problem {}", index));
    auto problem = adapter.problem(index);
    if (!problem) {
      findings.add_error("problems", fmt::format("problem {} failed: {}", index, problem.error().message()));
      continue;
    }
    check_form(findings, *problem, "problems");
    const auto [known, is_new] = content_by_id.emplace(problem->id(), problem->SerializeAsString());
    if (!is_new && known->second != problem->SerializeAsString())
      findings.add_error("problems", "two different problems have this id", problem->id());
    problems.emplace_back(index, *std::move(problem));
  }
  findings.report.facts["problems"] = indices.size();
  findings.report.facts["problems_different"] = content_by_id.size();
  std::vector<Problem> first_problems;               // without the two at distant indices
  for (std::size_t i = problems.size(); i-- > 0;) {  // in reverse order, and from the second instance
    const auto& [index, problem] = problems[i];
    check_repeated_problem(findings, adapter, index, problem, kSecondTime);
    if (second_instance) check_repeated_problem(findings, *second_instance, index, problem, kSecondStart);
    if (index < options.problems) first_problems.insert(first_problems.begin(), problem);
  }
  return first_problems;
}

void check_held_out(Findings& findings, const CheckOptions& options, const Clock& clock, const Adapter& adapter,
                    const Adapter* second_instance) {
  findings.announce_call("requesting the held-out problems");
  const std::vector<Problem> first = adapter.evaluation();
  findings.report.facts["held_out"] = first.size();
  if (first.empty()) return findings.add_note("held out", "there are no held-out problems: nothing can be evaluated");
  check_repeated_held_out(findings, adapter, first, kSecondTime);
  if (second_instance) check_repeated_held_out(findings, *second_instance, first, kSecondStart);
  std::set<std::string> ids, contents;
  // A problem's content without its id.
  const auto content = [](const Problem& problem) {
    return problem.prompt() + '\0' + problem.reference() + '\0' + problem.metadata_json();
  };
  for (const Problem& problem : first) {
    check_form(findings, problem, "held out");
    if (!ids.insert(problem.id()).second) findings.add_error("held out", "its id occurs twice", problem.id());
    contents.insert(content(problem));
  }
  std::uint64_t compared = 0;
  const TimePoint deadline = clock.now() + options.time / kHeldOutTimeDivisor;
  for (; compared < kComparedMax && (compared < options.problems || clock.now() < deadline); ++compared) {
    findings.announce_call(fmt::format("requesting problem {}", compared));
    const auto problem = adapter.problem(compared);
    if (!problem) break;
    if (ids.contains(problem->id()))
      findings.add_error("held out", fmt::format("it is both held out and training problem {}", compared),
                         problem->id());
    else if (contents.contains(content(*problem)))
      findings.add_error("held out", fmt::format("training problem {} is a held-out one under another id", compared),
                         problem->id());
  }
  findings.report.facts["compared_with_held_out"] = compared;
}

}  // namespace echoline::data_plane

// Reads any bytes as the values of --over, and checks properties of every input. libFuzzer calls it when ECHOLINE_FUZZ
// is on; sweep_test calls it on mutated texts in every ordinary test run.
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>

#include "study/sweep_expression.hpp"
#include "study/sweep_grid.hpp"

using namespace echoline;
using namespace echoline::study;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto expect = [&](bool holds, const char* what, std::string_view more = "") {
    ECHO_CHECK(holds, "{}\n--- input\n{}\n--- {}", what, text, more);
  };
  const auto number_in_run_file = [](const std::string& key) {
    return key == "run.steps" ? std::optional(40.0) : std::nullopt;
  };
  if (const auto expression = Expression::parse(text)) {
    expect(expression->names().size() <= text.size(), "names are of the text");
    const auto value = expression->value([](const std::string&) { return 3.0; });
    if (value) {
      expect(std::isfinite(*value), "a finite number");
      const auto again = Expression::parse(number_text(*value));
      const auto back =
          again ? again->value([](const std::string&) { return std::nullopt; }) : Result<double>(again.error());
      expect(back.has_value() && *back == *value, "a number reads back", number_text(*value));
    }
  } else {
    expect(!expression.error().detail.empty(), "a reason");
  }
  // Options are separated by line ends here.
  std::vector<SweepAxis> axes;
  for (std::size_t start = 0; start <= text.size() && axes.size() < 4;) {
    const std::size_t end = std::min(text.find('\n', start), text.size());
    auto axis = parse_over(text.substr(start, end - start));
    start = end + 1;
    if (axis && axis->points.size() <= 20)
      axes.push_back(std::move(*axis));
    else if (!axis)
      expect(axis.error().detail.starts_with("--over "), "an error says where", axis.error().detail);
  }
  const auto cells = expand(axes, number_in_run_file);
  if (!cells) {
    expect(!cells.error().message().empty(), "a reason");
    return 0;
  }
  expect(!cells->empty() && cells->size() <= kSweepCellsMax, "a bounded number of cells");
  for (const GridCell& cell : *cells)
    expect(cell.values.size() <= swept_keys(axes).size() && !cell.written.empty(),
           "keys of the axes alone, and how they were given");
  return 0;
}

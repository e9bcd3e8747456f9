// A sweep as a page: every measure against the first swept key, what costs least for its time, and all cells.
#pragma once
#include <string>

#include "cli/html_page.hpp"
#include "cli/sweep_results.hpp"

namespace echoline::cli {

// Links are relative to the sweep's folder.
std::string sweep_page(const SweepResults& results, const ChartLibrary& charts);

}  // namespace echoline::cli

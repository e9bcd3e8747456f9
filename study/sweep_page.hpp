// A sweep as an HTML page: every measure against the first swept key, the cells that are cheapest for their time, and a
// table of all cells.
#pragma once
#include <string>

#include "pages/html_page.hpp"
#include "study/sweep_results.hpp"

namespace echoline::study {

// Links are relative to the sweep's folder.
std::string sweep_page(const SweepResults& results, const pages::ChartLibrary& charts);

}  // namespace echoline::study

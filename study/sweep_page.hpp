// A sweep as a page: every measure against the first swept key, what costs least for its time, and all cells.
#pragma once
#include <string>

#include "pages/html_page.hpp"
#include "study/sweep_results.hpp"

namespace echoline::study {

// Links are relative to the sweep's folder.
std::string sweep_page(const SweepResults& results, const pages::ChartLibrary& charts);

}  // namespace echoline::study

// The fixed parts of a page: its style and the script that hands its plots to Chart.js. Private to cli/.
#pragma once
#include <string_view>

namespace echoline::pages {

std::string_view page_style();
std::string_view page_script();

}  // namespace echoline::pages

// The fixed parts of a page: its style sheet, and the script that passes its plots to Chart.js. Private to pages/.
#pragma once
#include <string_view>

namespace echoline::pages {

std::string_view page_style();
std::string_view page_script();

}  // namespace echoline::pages

// SIGINT and SIGTERM as a flag that work loops look at.
#pragma once
#include <atomic>

namespace echoline::cli {

// Installs the handlers (SIGPIPE is ignored too) and returns the flag they set; a second SIGINT ends the process at
// once.
const std::atomic<bool>& stop_on_signals();

}  // namespace echoline::cli

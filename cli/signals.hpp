// Turns SIGINT and SIGTERM into a flag that long loops check.
#pragma once
#include <atomic>

namespace echoline::cli {

// Installs the handlers, ignores SIGPIPE and returns the flag they set. A second SIGINT ends the process at once.
const std::atomic<bool>& stop_on_signals();

}  // namespace echoline::cli

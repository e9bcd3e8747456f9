// Unix time as text.
#pragma once
#include <ctime>
#include <string>

namespace echoline {

// In UTC, whole seconds. `format`: as for strftime(), for a text of at most 63 bytes.
inline std::string utc_text(double unix_s, const char* format = "%Y-%m-%d %H:%M:%S") {
  const auto whole_seconds = static_cast<std::time_t>(unix_s);
  std::tm utc{};
  ::gmtime_r(&whole_seconds, &utc);
  char text[64];
  return {text, std::strftime(text, sizeof text, format, &utc)};
}

}  // namespace echoline

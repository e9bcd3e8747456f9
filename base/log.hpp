// Logging to stderr: one line per event, level and role first. Program output never goes here.
#pragma once
#include <fmt/format.h>

#include <string>
#include <string_view>

namespace echoline::log {

enum class Level { kDebug, kInfo, kWarn, kError, kOff };

// Sets the minimum level, and the role in each line ("learner", "worker 3"). Call before threads start.
void configure(Level level, std::string_view role);
void write(Level level, std::string_view line);
bool enabled(Level level);

template <class... Args>
void debug(fmt::format_string<Args...> format, Args&&... args) {
  if (enabled(Level::kDebug)) write(Level::kDebug, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
void info(fmt::format_string<Args...> format, Args&&... args) {
  if (enabled(Level::kInfo)) write(Level::kInfo, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
void warn(fmt::format_string<Args...> format, Args&&... args) {
  if (enabled(Level::kWarn)) write(Level::kWarn, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
void error(fmt::format_string<Args...> format, Args&&... args) {
  if (enabled(Level::kError)) write(Level::kError, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace echoline::log

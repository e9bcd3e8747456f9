// Implements the log with spdlog.
#include "base/log.hpp"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <cstdlib>
#include <memory>

#include "base/text.hpp"

namespace echoline::log {
namespace {

spdlog::level::level_enum spdlog_level(Level level) {
  switch (level) {
    case Level::kDebug:
      return spdlog::level::debug;
    case Level::kInfo:
      return spdlog::level::info;
    case Level::kWarn:
      return spdlog::level::warn;
    case Level::kError:
      return spdlog::level::err;
    case Level::kOff:
      return spdlog::level::off;
  }
  return spdlog::level::info;
}

std::shared_ptr<spdlog::logger> make_logger(Level level, std::string_view role) {
  const auto colour = std::getenv("NO_COLOR") ? spdlog::color_mode::never : spdlog::color_mode::automatic;
  auto logger = std::make_shared<spdlog::logger>(std::string(role),
                                                 std::make_shared<spdlog::sinks::stderr_color_sink_mt>(colour));
  logger->set_level(spdlog_level(level));
  logger->set_pattern("%H:%M:%S.%e %^%-5l%$ %n  %v");
  return logger;
}

std::shared_ptr<spdlog::logger>& logger() {
  static std::shared_ptr<spdlog::logger> instance = make_logger(Level::kInfo, "echoline");
  return instance;
}

}  // namespace

void configure(Level level, std::string_view role) { logger() = make_logger(level, role); }

// Ensures that every entry is one printable line.
void write(Level level, std::string_view line) {
  constexpr std::size_t kLineBytesMax = 64 * 1024;
  if (line.size() <= kLineBytesMax && is_printable(line))
    logger()->log(spdlog_level(level), "{}", line);
  else
    logger()->log(spdlog_level(level), "{}", printable(line, kLineBytesMax));
}

bool enabled(Level level) { return logger()->should_log(spdlog_level(level)); }

}  // namespace echoline::log

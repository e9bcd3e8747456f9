#include "cli/live_table.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "base/units.hpp"

namespace echoline::cli {
namespace {

using nlohmann::json;

constexpr Duration kLineEvery = std::chrono::seconds(5);
constexpr int kBarCells = 30;

std::string bar(double fraction) {
  const int full = static_cast<int>(std::clamp(fraction, 0.0, 1.0) * kBarCells + 0.5);
  return "[" + std::string(static_cast<std::size_t>(full), '#') +
         std::string(static_cast<std::size_t>(kBarCells - full), '.') + "]";
}

std::string bytes(const json& value) { return to_text(Bytes{value.get<std::uint64_t>()}); }

}  // namespace

std::vector<std::string> status_lines(const json& s) {
  const double step = s.value("step", 0.0), steps = std::max(1.0, s.value("steps", 1.0));
  std::vector<std::string> lines;
  lines.push_back(fmt::format("{}  {}  step {} of {}  {:.0f} s  {}", s.value("run", ""), bar(step / steps), step, steps,
                              s.value("wall_seconds", 0.0), s.value("phase", "")));
  std::string accuracy;
  const json measured = s.value("accuracy", json::object());
  for (const auto& [when, value] : measured.items())
    accuracy += fmt::format("  accuracy {} {:.3f}", when, value.get<double>());
  lines.push_back(fmt::format("reward {:.3f}{}  learner idle {:.1f} %  delta {}  T_b {:.2f} s  ${:.4f} (${:.2f}/h)",
                              s.value("reward", 0.0), accuracy, 100 * s.value("idle_fraction", 0.0),
                              to_text(Bytes{s.value("delta_bytes", std::uint64_t{0})}), s.value("t_b_seconds", 0.0),
                              s.value("usd", 0.0), s.value("usd_per_hour", 0.0)));
  const json workers = s.value("workers", json::array());
  if (workers.empty()) return lines;
  lines.push_back(
      fmt::format("{:>6}  {:<24}{:>9}{:>9}{:>12}{:>12}", "worker", "offer", "version", "rollouts", "in", "forwarded"));
  for (const json& w : workers)
    lines.push_back(fmt::format("{:>6}  {:<24}{:>9}{:>9}{:>12}{:>12}{}", w.at("id").get<std::uint64_t>(),
                                w.at("offer").get<std::string>(),
                                w.at("version").is_null() ? "-" : std::to_string(w.at("version").get<std::uint64_t>()),
                                w.at("rollouts").get<std::uint64_t>(), bytes(w.at("bytes_in")),
                                bytes(w.at("bytes_forwarded")), w.at("lost").get<bool>() ? "  lost" : ""));
  lines.push_back(s.value("topology", ""));
  return lines;
}

std::string status_line(const json& s) {
  return fmt::format("step {}/{}  reward {:.3f}  idle {:.1f} %  T_b {:.2f} s  ${:.4f}  {}", s.value("step", 0),
                     s.value("steps", 0), s.value("reward", 0.0), 100 * s.value("idle_fraction", 0.0),
                     s.value("t_b_seconds", 0.0), s.value("usd", 0.0), s.value("phase", ""));
}

LiveTable::LiveTable() {
  const char* term = std::getenv("TERM");
  terminal_ = ::isatty(STDERR_FILENO) == 1 && term != nullptr && std::string_view(term) != "dumb";
}

void LiveTable::erase() {
  if (drawn_ > 0) fmt::print(stderr, "\x1b[{}A\x1b[J", drawn_);
  drawn_ = 0;
}

void LiveTable::draw() {
  for (const std::string& line : lines_) fmt::print(stderr, "{}\n", line.substr(0, 110));
  drawn_ = lines_.size();
  std::fflush(stderr);
}

void LiveTable::show(const json& status, TimePoint now) {
  if (terminal_) {
    erase();
    lines_ = status_lines(status);
    draw();
  } else if (now >= line_due_) {
    const std::string line = status_line(status);
    if (line != last_line_) fmt::print(stderr, "{}\n", line);
    last_line_ = line;
    line_due_ = now + kLineEvery;
  }
}

void LiveTable::print(const std::string& line) {
  if (!terminal_) {
    fmt::print(stderr, "{}\n", line);
    return;
  }
  erase();
  fmt::print(stderr, "{}\n", line);
  draw();
}

}  // namespace echoline::cli

// Draws the progress of `echoline delta`.
#include "cli/progress_bar.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "base/units.hpp"
#include "cli/output.hpp"

namespace echoline::cli {
namespace {

constexpr std::size_t kCells = 30;  // characters of the bar
constexpr auto kRedrawInterval = std::chrono::milliseconds(100);

bool stderr_is_terminal() {
  const char* term = std::getenv("TERM");
  return ::isatty(STDERR_FILENO) == 1 && term != nullptr && std::string_view(term) != "dumb";
}

}  // namespace

ProgressBar::ProgressBar() : is_terminal_(stderr_is_terminal()) {}

void ProgressBar::begin(std::string label) {
  const std::lock_guard lock(mutex_);
  label_ = std::move(label);
  next_redraw_at_ = {};
}

void ProgressBar::show(std::uint64_t done, std::uint64_t total) {
  if (!is_terminal_) return;
  const std::lock_guard lock(mutex_);
  const auto now = std::chrono::steady_clock::now();
  if (now < next_redraw_at_) return;
  next_redraw_at_ = now + kRedrawInterval;
  const double fraction = total ? std::min(1.0, static_cast<double>(done) / static_cast<double>(total)) : 1.0;
  const auto full_cells = static_cast<std::size_t>(fraction * kCells + 0.5);
  print_stderr("\r\x1b[K{:<10} [{}{}] {:>3.0f} %  {} of {}", label_, std::string(full_cells, '#'),
               std::string(kCells - full_cells, '.'), 100 * fraction, to_text(Bytes{done}), to_text(Bytes{total}));
  is_drawn_ = true;
}

std::function<void(std::uint64_t, std::uint64_t)> ProgressBar::callback() {
  if (!is_terminal_) return nullptr;
  return [this](std::uint64_t done, std::uint64_t total) { show(done, total); };
}

void ProgressBar::clear() {
  const std::lock_guard lock(mutex_);
  if (!is_drawn_) return;
  print_stderr("\r\x1b[K");
  is_drawn_ = false;
}

}  // namespace echoline::cli

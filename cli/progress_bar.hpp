// A progress bar on stderr; draws nothing when stderr is not a terminal.
#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>

namespace echoline::cli {

// Members may be called from any thread. The bar disappears with clear() or the object.
class ProgressBar {
 public:
  ProgressBar();
  ~ProgressBar() { clear(); }
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  // Names the work that begins, such as "encoding".
  void begin(std::string label);
  void show(std::uint64_t done, std::uint64_t total);  // in bytes
  // show() as a function, valid while this object exists. Null without a terminal.
  std::function<void(std::uint64_t, std::uint64_t)> callback();
  void clear();

 private:
  const bool is_terminal_;
  std::mutex mutex_;
  std::string label_;
  std::chrono::steady_clock::time_point next_redraw_at_{};
  bool is_drawn_ = false;
};

}  // namespace echoline::cli

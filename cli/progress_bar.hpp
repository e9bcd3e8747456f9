// A bar on stderr for work that takes a while; nothing at all where stderr is no terminal.
#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>

namespace echoline::cli {

// Any thread may call any member. The bar is gone when clear() returns or the object goes away.
class ProgressBar {
 public:
  ProgressBar();
  ~ProgressBar() { clear(); }
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  // What is being done from now on.
  void begin(std::string label);
  void show(std::uint64_t done, std::uint64_t total);  // in bytes
  // show() as a function; valid while this object lives.
  std::function<void(std::uint64_t, std::uint64_t)> callback();
  void clear();

 private:
  const bool terminal_;
  std::mutex mutex_;
  std::string label_;
  std::chrono::steady_clock::time_point due_{};
  bool drawn_ = false;
};

}  // namespace echoline::cli

// Collects the findings about a task. Private to data_plane/.
#pragma once
#include <functional>
#include <map>
#include <string>
#include <string_view>

#include "data_plane/adapters/check/check.hpp"
#include "data_plane/limits.hpp"

namespace echoline::data_plane {

bool is_utf8(const std::string& text);

class Findings {
 public:
  explicit Findings(std::function<void(std::string_view, std::string_view, std::string_view)> before_call)
      : before_call_(std::move(before_call)) {}

  void add_error(const char* check, const std::string& what, const std::string& problem = {},
                 const std::string& response = {});
  void add_note(const char* check, const std::string& what, const std::string& problem = {},
                const std::string& response = {});
  void add(Finding finding);
  // Reports a call that may never return, before it is made.
  void announce_call(std::string_view what, std::string_view problem = {}, std::string_view response = {}) const {
    if (before_call_) before_call_(what, problem, response);
  }
  static std::string printable_response(const std::string& response);  // printable, shortened

  CheckReport report;

 private:
  std::function<void(std::string_view, std::string_view, std::string_view)> before_call_;
  std::map<std::string, std::uint64_t> count_by_kind_;  // by check, such as "speed"; "speed!" counts those with `wrong`
};

}  // namespace echoline::data_plane

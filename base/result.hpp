// Errors as values: Result<T> is either a T or an Error; Status is Result<void>.
#pragma once
#include <fmt/format.h>

#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace echoline {

// The kind of failure, which determines the program's exit code (exit_code()).
enum class Code {
  kInvalid,      // the user's input or configuration is wrong                     -> exit 2
  kInfeasible,   // a plan that no choice can satisfy                              -> exit 3
  kNotFound,     // a file, id or version that should exist does not               -> exit 1
  kCorrupt,      // bytes that do not have the promised form or digest             -> exit 1
  kIo,           // the operating system refused                                   -> exit 1
  kUnavailable,  // a peer or service is gone, or not ready yet                    -> exit 1
  kExhausted,    // a limit was reached (queue, memory, retries, money)            -> exit 1
  kStale,        // too old: lease, version or trajectory                          -> exit 1
  kCancelled,    // asked to stop                                                  -> exit 1
  kInternal,     // a bug                                                          -> exit 1
};

std::string_view to_string(Code code);
int exit_code(Code code);

// A failure: its kind, the operation that failed, and a detail that says what was expected, what was found, where, and
// what to do.
struct Error {
  Code code = Code::kInternal;
  std::string operation;
  std::string detail;

  // "operation: detail"
  std::string message() const;
};

// Builds an Error with a formatted detail: fail(Code::kIo, "open file", "{}: {}", path, why).
template <class... Args>
Error fail(Code code, std::string_view operation, fmt::format_string<Args...> format, Args&&... args) {
  return Error{code, std::string(operation), fmt::format(format, std::forward<Args>(args)...)};
}

// Returns the error, with kInvalid in place of kNotFound: a missing file that a run file or command line names is the
// user's mistake.
Error as_user_error(Error error);

// Ends the process with a message. Assertions are for bugs only and are active in releases.
[[noreturn]] void assertion_failed(const char* expression, const char* file, int line, const std::string& why);

template <class T>
class [[nodiscard]] Result {
 public:
  using value_type = T;
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}      // NOLINT(google-explicit-constructor)
  Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}  // NOLINT(google-explicit-constructor)

  bool has_value() const { return state_.index() == 0; }
  explicit operator bool() const { return has_value(); }
  T& value() & {
    check();
    return std::get<0>(state_);
  }
  const T& value() const& {
    check();
    return std::get<0>(state_);
  }
  T value() && {
    check();
    return std::get<0>(std::move(state_));
  }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T operator*() && { return std::move(*this).value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }
  const Error& error() const& { return std::get<1>(state_); }
  Error&& error() && { return std::get<1>(std::move(state_)); }

 private:
  void check() const {
    if (!has_value()) assertion_failed("Result::value()", __FILE__, __LINE__, std::get<1>(state_).message());
  }
  std::variant<T, Error> state_;
};

template <>
class [[nodiscard]] Result<void> {
 public:
  Result() = default;
  Result(Error error) : error_(std::move(error)) {}  // NOLINT(google-explicit-constructor)
  bool has_value() const { return !error_.has_value(); }
  explicit operator bool() const { return has_value(); }
  const Error& error() const& { return *error_; }
  Error&& error() && { return *std::move(error_); }

 private:
  std::optional<Error> error_;
};

using Status = Result<void>;
inline Status ok() { return {}; }

}  // namespace echoline

// Ends the process if `condition` is false, which only a bug can cause. A format and its arguments may follow.
#define ECHO_CHECK(condition, ...)                                                                                 \
  do {                                                                                                             \
    if (!(condition)) ::echoline::assertion_failed(#condition, __FILE__, __LINE__, ::fmt::format("" __VA_ARGS__)); \
  } while (false)

// ECHO_TRY(expr): returns the error of a failed Status or Result from the enclosing function.
#define ECHO_TRY(expr)                                         \
  do {                                                         \
    auto echo_status_ = (expr);                                \
    if (!echo_status_) return std::move(echo_status_).error(); \
  } while (false)

// ECHO_ASSIGN(auto x, expr): x = value of the Result, or returns its error.
#define ECHO_CONCAT_(a, b) a##b
#define ECHO_CONCAT(a, b) ECHO_CONCAT_(a, b)
#define ECHO_ASSIGN(target, expr) ECHO_ASSIGN_IMPL(ECHO_CONCAT(echo_result_, __LINE__), target, expr)
#define ECHO_ASSIGN_IMPL(temp, target, expr) \
  auto temp = (expr);                        \
  if (!temp) return std::move(temp).error(); \
  target = std::move(temp).value()

// Runs a response's program against a problem's tests. Private to data_plane/.
//
// The program runs in one sandbox, the tests in another. The examiner, which runs the tests, asks the program through
// this process, line by line, for the return values of its functions, and compares them itself. A program gains nothing
// by printing the output of a passed test, exiting early, redefining assert or reading its interpreter's memory: its
// sandbox holds nothing of the tests, and its answers are read as data only.
#pragma once
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

#include "data_plane/sandbox/sandbox.hpp"

namespace echoline::data_plane {

struct GraderOptions {
  std::filesystem::path python = "/usr/bin/python3";
  Duration test_time = std::chrono::seconds(5);  // limit of each test, and of loading the program
  Duration time = std::chrono::seconds(30);      // limit of all tests together
  Bytes memory{512u << 20};                      // limit of a program
  std::size_t parallel = 4;                      // programs graded at the same time; others wait
  bool cache_grades = false;                     // reuse the grade of the same program and task
};

struct Grade {
  bool compiles = false;
  std::size_t passed = 0, tests = 0;  // numbers of tests; `tests` is 0 if the program did not load
  bool late = false;                  // a time limit was reached: a faster machine might pass more tests
  bool may_change = false;            // the program was killed or late: the grade may differ next time
  std::string first_failure;          // the first failure, for users: "syntax error", "test 3: took longer than 5 s"
};

// Thread-safe.
class Grader {
 public:
  // kUnavailable if sandboxes are unavailable (sandbox.hpp) or the interpreter does not start in one.
  static Result<std::unique_ptr<Grader>> start(GraderOptions options);
  ~Grader();

  // `task`: a JSON object in one of two forms. HumanEval's {prompt, test, entry_point}: the function's head, the source
  // of check(function), the function's name. MBPP's {tests, imports, setup, code}: a list of assertions, import lines
  // and source that run before them, the reference solution, which shows the names that the program must define.
  // A program that fails or is killed gets a grade too; an error means that it could not be graded. kInvalid: malformed
  // tests. kUnavailable: a sandbox or its interpreter failed, or was ended by stop(). kCancelled: stop() was called.
  // With `cache_grades`, the same program for the same task is not run again while its grade is cached (32 MiB of
  // grades), unless it was killed or late.
  Result<Grade> grade(std::string_view task, std::string_view program);
  // Ends all grading. Calls in progress soon return kCancelled, kUnavailable or a grade that may change, because their
  // programs are killed. Later calls return kCancelled, or a cached grade.
  void stop();

 private:
  struct Impl;
  explicit Grader(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace echoline::data_plane

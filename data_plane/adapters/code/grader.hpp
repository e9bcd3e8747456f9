// Runs a response's program against a problem's tests. Private to data_plane/.
//
// The program runs in one sandbox, the tests in another: the examiner there asks it, line by line through this process,
// for what its functions return, and compares the answers itself. A program that prints what a passed test prints,
// leaves early, redefines assert or reads its own interpreter's memory gains nothing: there is nothing of the tests
// where it is, and what it can say is data.
#pragma once
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

#include "data_plane/sandbox/sandbox.hpp"

namespace echoline::data_plane {

struct GraderOptions {
  std::filesystem::path python = "/usr/bin/python3";
  Duration test_time = std::chrono::seconds(5);  // of one test; and of what the program does before the first
  Duration time = std::chrono::seconds(30);      // of all
  Bytes memory{512u << 20};                      // of a program
  std::size_t parallel = 4;                      // programs that are graded at a time; others wait
  bool remember = false;                         // what came of a program is not found out again for the same task
};

struct Grade {
  bool compiles = false;
  std::size_t passed = 0, tests = 0;  // no tests where the program did not even load
  bool late = false;                  // something took too long: a faster machine might find more passed
  bool again = false;                 // it was ended, or late: another time it might not be
  std::string trouble;  // what went wrong first, for people: "syntax error", "test 3: took longer than 5 s"
};

// Safe to use from several threads.
class Grader {
 public:
  // kUnavailable where programs cannot be locked up (sandbox.hpp), or the interpreter does not run there.
  static Result<std::unique_ptr<Grader>> start(GraderOptions options);
  ~Grader();

  // `task`: a JSON object of {prompt, test, entry_point} or {tests, imports, setup, code}. An error means that the
  // program could not be graded; whatever the program itself does is a grade. kInvalid for tests that are none,
  // kCancelled when the grader ends. With `remember` the same program for the same task is not run again while its
  // grade is known (32 MiB of them), unless it was ended or late.
  Result<Grade> grade(std::string_view task, std::string_view program);
  // Ends what is under way: whoever waits gets kCancelled or kUnavailable soon, now and later.
  void stop();

 private:
  struct Impl;
  explicit Grader(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace echoline::data_plane

// Grading of programs written by a policy: the program in a response, the results of its tests, and that a program
// passes a test with right answers only.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "data_plane/adapters/code/extract.hpp"
#include "data_plane/adapters/code/grader.hpp"

namespace echoline::data_plane {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;
using std::chrono::seconds;

TEST(Extract, TheRule) {
  struct Case {
    std::string response, code;
    bool fenced, thinking;
  };
  const std::string fence = "```";
  for (const Case& c : std::vector<Case>{
           {"x = 1", "x = 1", false, false},
           {"", "", false, false},
           {" \n\t", "", false, false},
           {"Here:\n" + fence + "python\nx = 1\n" + fence + "\nDone.", "x = 1\n", true, false},
           {fence + "\nx = 1\n" + fence, "x = 1\n", true, false},
           {fence + "py\r\nx = 1\r\n" + fence + "\r\n", "x = 1\r\n", true, false},
           {fence + "python\nx = 1\ny = 2", "x = 1\ny = 2", false, false},
           // Code that is not Python is skipped, and so is an example that calls the answer.
           {fence + "bash\npip install x\n" + fence + "\n" + fence + "python\ndef f(): pass\n" + fence + "\n" + fence +
                "python\nprint(f())\n" + fence,
            "def f(): pass\n", true, false},
           {fence + "python\nx = 1\n" + fence + "\n" + fence + "python\nx = 2\n" + fence, "x = 2\n", true, false},
           {fence + "python\ndef f(): 1\n" + fence + "\n" + fence + "python\ndef f(): 2\n" + fence, "def f(): 2\n",
            true, false},
           {fence + "text\nx\n" + fence, fence + "text\nx\n" + fence, false, false},
           // A longer fence contains shorter ones. Backticks inside a line are no fence.
           {"````python\ns = '''\n" + fence + "\n'''\n````", "s = '''\n" + fence + "\n'''\n", true, false},
           {fence + "python\ns = '" + fence + "'\n" + fence, "s = '" + fence + "'\n", true, false},
           {"<think>a plan</think>\n" + fence + "\nx = 1\n" + fence, "x = 1\n", true, true},
           {"<think>\n" + fence + "\nwrong\n" + fence + "\n</think>x = 1", "x = 1", false, true},
           {"<think> </think>x = 1", "x = 1", false, false},
           {"</think>x = 1", "x = 1", false, false},
           {"</think><think>x = 1", "<think>x = 1", false, false},
           {"<think>x = 1", "<think>x = 1", false, false},
           {"<think>a</think>b</think>x", "x", false, true},
       }) {
    const ExtractedProgram extracted = extract_code(c.response);
    EXPECT_EQ(extracted.code, c.code) << c.response;
    EXPECT_EQ(extracted.fenced, c.fenced) << c.response;
    EXPECT_EQ(extracted.thinking, c.thinking) << c.response;
  }
}

TEST(Extract, DefinitionsStandAtTheMargin) {
  for (const char* code :
       {"def f(x):", "async def f():", "class f:", "f = lambda: 1", "f: int = 1", "x\ndef  f(a)", "f=1"})
    EXPECT_TRUE(defines(code, "f")) << code;
  for (const char* code :
       {"", " def f(x):", "def ff(x):", "def g(f):", "f == 1", "# f = 1", "print(f)", "f", "defx f(", "return f(1)"})
    EXPECT_FALSE(defines(code, "f")) << code;
}

class Grading : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    auto grader = Grader::start(
        {.test_time = seconds(20), .time = seconds(60), .memory = {256u << 20}, .parallel = 2, .cache_grades = true});
    if (grader)
      grader_ = std::move(*grader);
    else
      start_error_ = grader.error();
  }
  static void TearDownTestSuite() { grader_.reset(); }
  void SetUp() override {
    if (grader_) return;
    // sandbox_test distinguishes a kernel that allows no sandbox from a broken sandbox.
    ASSERT_EQ(start_error_.code, Code::kUnavailable) << start_error_.message();
    GTEST_SKIP() << start_error_.message();
  }

  static Grade grade(const json& task, const std::string& program) {
    const auto grade = grader_->grade(task.dump(), program);
    EXPECT_TRUE(grade) << grade.error().message();
    return grade ? *grade : Grade{};
  }
  // A task in MBPP's form.
  static json mbpp_task(std::vector<std::string> tests, const std::string& code = "", const std::string& setup = "",
                        std::vector<std::string> imports = {}) {
    return {{"tests", tests}, {"code", code}, {"setup", setup}, {"imports", imports}};
  }
  static std::string passed_of_all(const Grade& grade) { return fmt::format("{}/{}", grade.passed, grade.tests); }

  static inline std::unique_ptr<Grader> grader_;
  static inline Error start_error_;
};

TEST_F(Grading, CountsTestsOneByOne) {
  const json task = mbpp_task({"assert f(1) == 2", "assert f(2) == 3", "assert f(3) == 4"});
  EXPECT_EQ(passed_of_all(grade(task, "def f(x): return x + 1")), "3/3");
  Grade partial = grade(task, "def f(x):\n  if x == 2: raise ValueError()\n  return x + 1");
  EXPECT_EQ(passed_of_all(partial), "2/3");
  EXPECT_EQ(partial.first_failure, "test 2: failed");
  EXPECT_TRUE(partial.compiles);
  partial = grade(task, "def f(x): return");
  EXPECT_EQ(passed_of_all(partial), "0/3");
  for (const char* broken : {"def f(x) return", "f(", "'''", "x = 0777"})
    EXPECT_FALSE(grade(task, broken).compiles) << broken;
  for (const char* useless : {"x = 1 / 0", "raise SystemExit", "import os; os._exit(0)", "import no_such_module"}) {
    const Grade grade_of = grade(task, useless);
    EXPECT_TRUE(grade_of.compiles) << useless;
    EXPECT_EQ(grade_of.passed, 0u);
    EXPECT_NE(grade_of.first_failure.find("before the first test"), std::string::npos) << grade_of.first_failure;
  }
  EXPECT_EQ(passed_of_all(grade(task, "")), "0/3");
  EXPECT_EQ(passed_of_all(grade(task, "if __name__ == '__main__':\n  input()\ndef f(x): return x + 1")), "3/3");
}

TEST_F(Grading, DataGoesThereAndBack) {
  const std::vector<std::string> values = {"None",
                                           "True",
                                           "-7",
                                           "10 ** 400",
                                           "0.1",
                                           "float('inf')",
                                           "1e-320",
                                           "'text \\u00e9 \\ud800 \\n'",
                                           "b'\\x00\\xff'",
                                           "bytearray(b'x')",
                                           "[1, [2, ()]]",
                                           "(1,)",
                                           "{1, 2}",
                                           "frozenset({(1, 'a')})",
                                           "{'a': [1], (1, 2): {3: None}}",
                                           "3+4j",
                                           "range(1, 9, 2)",
                                           "int",
                                           "[int, str, list]",
                                           "__import__('decimal').Decimal('1.10')",
                                           "__import__('fractions').Fraction(1, 3)",
                                           "__import__('datetime').date(2020, 1, 2)",
                                           "__import__('datetime').datetime(2020, 1, 2, 3, 4, 5, 6)",
                                           "__import__('datetime').timedelta(days=-1, seconds=1)"};
  std::vector<std::string> tests;
  for (const std::string& value : values) {
    tests.push_back("assert f(" + value + ") == " + value);
    tests.push_back("assert type(f(x=" + value + ")) is type(" + value + ")");
  }
  tests.push_back("assert f(float('nan')) != f(float('nan'))");
  const Grade identity_grade = grade(mbpp_task(tests), "def f(x): return x");
  EXPECT_EQ(identity_grade.passed, tests.size())
      << identity_grade.first_failure << ": " << tests[std::min(identity_grade.passed, tests.size() - 1)];
  // A program's own types arrive as their base types, and its changes to a list are visible.
  EXPECT_EQ(passed_of_all(
                grade(mbpp_task({"assert f() == {'a': 2}", "assert g() == (1, 2)", "assert h() == 3",
                                 "assert dict(f()) == {'a': 2}"}),
                      "from collections import Counter, namedtuple\nfrom enum import IntEnum\nP = namedtuple('P', 'x "
                      "y')\nE = IntEnum('E', 'a b c')\n"
                      "def f(): return Counter('aa')\ndef g(): return P(1, 2)\ndef h(): return E.c")),
            "4/4");
  EXPECT_EQ(passed_of_all(grade(mbpp_task({"l = [3, 1]; f(l); assert l == [1, 3]", "d = {}; g(d); assert d == {1: 2}",
                                           "s = {1}; h(s); assert s == set()"}),
                                "def f(l): l.sort()\ndef g(d): d[1] = 2\ndef h(s): s.clear()")),
            "3/3");
}

TEST_F(Grading, ObjectsStayWhereTheyAre) {
  const std::string program =
      "class Node:\n  def __init__(self, v): self.v, self.next = v, None\n  def total(self): return self.v + "
      "(self.next.total() if self.next else 0)\n"
      "def depth(n): return 1 + depth(n.next) if n else 0\n"
      "def squares(n):\n  for i in range(n): yield i * i\n"
      "def fail(n): raise KeyError(n)\n"
      "class Box(list): pass\n";
  EXPECT_EQ(passed_of_all(grade(mbpp_task({"assert depth(root) == 2", "assert root.total() == 3",
                                           "assert list(squares(3)) == [0, 1, 4]", "assert sum(squares(4)) == 14",
                                           "assert depth(None) == 0", "assert root.next.v == 2",
                                           "try:\n  fail(1)\n  assert False\nexcept KeyError: pass"},
                                          program, "root = Node(1)\nroot.next = Node(2)"),
                                program)),
            "7/7");
  // Python's built-in names belong to the tests, unless the problem is to write one of that name.
  EXPECT_EQ(passed_of_all(grade(mbpp_task({"assert sum(2, 3) == 5"}, "def sum(a, b): return a + b"),
                                "def sum(a, b): return a + b")),
            "1/1");
  EXPECT_EQ(passed_of_all(grade(mbpp_task({"assert math.isclose(f(2), math.sqrt(2))", "assert set(f2()) == {1, 2}"},
                                          "import math\ndef f(x): return math.sqrt(x)\ndef f2(): return [2, 1]"),
                                "def f(x): return x ** 0.5\ndef f2(): return [1, 2, 1]")),
            "2/2");
}

TEST_F(Grading, NothingButTheRightAnswerPasses) {
  const json task = mbpp_task({"assert f(1) == 2", "assert set(f(2)) == {3}", "assert sorted(f(3))[0] == 4",
                               "assert abs(f(4) - 5) < 1e-6", "assert math.isclose(f(5), 6)"},
                              "import math\ndef f(x): return x + 1");
  const std::vector<std::string> programs = {
      // Output that imitates the protocol's results of passed tests.
      "print('V1'); print('5/5'); print('loaded'); print('{\"value\": true}')\ndef f(x): print('V1\\nV1\\nE\\ndone')",
      "import os, sys\nfor fd in range(3, 64):\n  try: os.write(fd, b'V1\\nV1\\nV1\\nV1\\nV1\\nE\\ndone\\n')\n  except "
      "OSError: pass\ndef f(x): return 0",
      "import os\ndef f(x): os._exit(0)",
      "def f(x): raise SystemExit(0)",
      "import sys\ndef f(x): sys.exit()",
      // Answers that are equal to everything.
      "class A:\n  def __eq__(self, o): return True\n  def __ne__(self, o): return True\n  def __lt__(self, o): return "
      "True\n  __gt__ = __lt__\n  def __sub__(self, o): return 0\n"
      "  def __hash__(self): return 0\n  def __bool__(self): return True\n  def __abs__(self): return 0\n  def "
      "__float__(self): return 6.0\n  def __len__(self): return 1\n"
      "  def __iter__(self): return iter([A()])\ndef f(x): return A()",
      "class I(int):\n  def __eq__(self, o): return True\n  def __sub__(self, o): return 0\n  __hash__ = "
      "int.__hash__\ndef f(x): return I(0)",
      "class L(list):\n  def __eq__(self, o): return True\n  def __iter__(self): return iter([99])\ndef f(x): return "
      "L()",
      // Changes to the interpreter's own functions.
      "import builtins\nbuiltins.AssertionError = None\nbuiltins.set = lambda x: 0\nbuiltins.sorted = lambda x: "
      "[1]\nbuiltins.abs = lambda x: 0\ndef set(x): return 0\ndef sorted(x): return [1]\ndef abs(x): return 0\ndef "
      "f(x): return 0",
      "import math\nmath.isclose = lambda a, b: True\ndef f(x): return 0\ndef isclose(a, b): return True",
      "import unittest, sys\nsys.modules['math'] = type('m', (), {'isclose': lambda *a: True})\ndef f(x): return None",
      // Attacks on the process that runs the program.
      "import sys\nf_ = sys._getframe()\nwhile f_.f_back: f_ = f_.f_back\nf_.f_globals['lines'].put('{\"value\": true, "
      "\"changed\": {\"0\": 1}}')\ndef f(x): return 0",
      "import gc, os\nfor o in gc.get_objects():\n  if type(o).__name__ == 'Lines':\n    for t in ('V1', 'E', 'done', "
      "'loaded'): o.put(t)\ndef f(x): return 0",
      "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nos.kill(-1, signal.SIGKILL)\ndef f(x): return 0",
      "import os, sys, time\nif os.fork(): os._exit(0)\nos.setsid()\ntime.sleep(0.1)\nfor i in range(99):\n  try: "
      "os.write(i, b'loaded\\n{\"value\": {\"object\": 0}}\\n')\n  except OSError: pass\ndef f(x): return 0",
      // Answers of the protocol that are no values.
      "import sys\nimport __main__\n__main__.encode = lambda v, r: {'object': 'name'}\ndef f(x): return 0",
      "import __main__\n__main__.encode = lambda v, r: {'name': 'f'}\ndef f(x): return 0",
      "import __main__\n__main__.encode = lambda v, r: {'type': 'eval'}\ndef f(x): return 0",
      "import __main__\n__main__.perform = lambda r: '{\"raised\": [\"SystemExit\", \"KeyboardInterrupt\", "
      "\"GeneratorExit\"], \"text\": \"\"}'\ndef f(x): return 0",
      "import __main__\n__main__.perform = lambda r: '[' * 100000\ndef f(x): return 0",
      "import __main__\n__main__.perform = lambda r: '{\"value\": 1, \"changed\": {\"7\": [1]}}'\ndef f(x): return 0",
  };
  for (const std::string& program : programs) EXPECT_EQ(grade(task, program).passed, 0u) << program;
  EXPECT_EQ(passed_of_all(grade(task, "def f(x):\n  return {1: 2, 2: [3], 3: [9, 4], 4: 5, 5: 6}[x]")), "5/5");
}

TEST_F(Grading, AProgramOrTestBeyondItsLimitsFailsAlone) {
  auto grader = Grader::start({.test_time = seconds(3), .time = seconds(90), .memory = {128u << 20}, .parallel = 1});
  ASSERT_TRUE(grader);
  const json task = mbpp_task({"assert f(1) == 1", "assert f(2) == 2", "assert f(3) == 3"});
  const auto limited_grade = [&](const std::string& program) {
    const auto result = (*grader)->grade(task.dump(), program);
    EXPECT_TRUE(result) << result.error().message() << program;
    return result ? *result : Grade{};
  };
  // The first test is lost, but the others run in a restarted program.
  for (const char* statement :
       {"while True: pass", "import os; os._exit(1)", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
        "x = [0] * (1 << 27)\n    while True: x = x + [1] * (1 << 20)", "import time; time.sleep(1000)"}) {
    const Grade partial = limited_grade(std::string("def f(x):\n  if x == 1:\n    ") + statement + "\n  return x");
    EXPECT_EQ(passed_of_all(partial), "2/3") << statement << ": " << partial.first_failure;
    EXPECT_TRUE(partial.first_failure.starts_with("test 1: ")) << partial.first_failure;
    const std::string_view text(statement);
    if (text.find("1 <<") == text.npos) {
      EXPECT_EQ(partial.late, text == "while True: pass" || text.ends_with("sleep(1000)")) << statement;
    }
  }
  EXPECT_TRUE(limited_grade("while True: pass").first_failure.starts_with("before the first test: "));
  const Grade slow = limited_grade("import time\ndef f(x): time.sleep(1000)");
  EXPECT_EQ(passed_of_all(slow), "0/3");
  EXPECT_TRUE(slow.late);
  EXPECT_FALSE(limited_grade("def f(x): return x").late);
  EXPECT_FALSE(limited_grade("def f(x): return 0").late);
  // Answers too large for a test, and answers without end.
  EXPECT_EQ(limited_grade("def f(x): return 'x' * (8 << 20) if x < 3 else x").passed, 1u);
  const json loop =
      mbpp_task({"assert len(list(f())) == 1", "assert g() == 1", "assert sum(h()) == 1", "assert g() == 1"});
  const auto endless_grade = (*grader)->grade(
      loop.dump(), "def f():\n  while True: yield 1\ndef g(): return 1\ndef h(): return range(10 ** 15)");
  ASSERT_TRUE(endless_grade) << endless_grade.error().message();
  EXPECT_EQ(passed_of_all(*endless_grade), "2/4") << endless_grade->first_failure;
}

TEST_F(Grading, InvalidProblemsAreErrors) {
  for (const json& task : {mbpp_task({}), mbpp_task({"assert f("}),
                           json{{"prompt", "def f(): pass"}, {"test", "x = 1"}, {"entry_point", "f"}}, json::array()}) {
    const auto graded = grader_->grade(task.dump(), "def f(): return 1");
    ASSERT_FALSE(graded) << task;
    EXPECT_EQ(graded.error().code, Code::kInvalid) << graded.error().message();
  }
  const auto missing = Grader::start({.python = "/usr/bin/no-python"});
  ASSERT_FALSE(missing);
  EXPECT_NE(missing.error().message().find("/usr/bin/no-python"), std::string::npos) << missing.error().message();
}

TEST_F(Grading, TheSameEveryTimeAndFromSeveralThreads) {
  const json task = mbpp_task({"assert f() == g()", "assert f() != f()", "assert random.random() == r()"},
                              "import random\ndef f(): pass\ndef g(): pass\ndef r(): pass");
  const std::string program =
      "import random\nr = random.random\ndef f(): return list({'a', 'b', 'c', random.random()})\ndef g(): return "
      "[hash('x')]";
  const Grade first_grade = grade(task, program);
  std::atomic<int> equal_grades = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&, i] {
      // The comment makes another program, because the grader remembers the grades of programs.
      const auto other_grade = grader_->grade(task.dump(), fmt::format("{}\n# {}", program, i));
      equal_grades += other_grade && other_grade->passed == first_grade.passed;
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(equal_grades, 4);
}

TEST_F(Grading, AProgramIsRunOnceForATask) {
  const json task = mbpp_task({"assert f() == 1"});
  const std::string random_program = "import os\nx = os.urandom(1)[0] % 2\ndef f(): return x";
  const std::string first_grade = passed_of_all(grade(task, random_program));
  for (int i = 0; i < 12; ++i) EXPECT_EQ(passed_of_all(grade(task, random_program)), first_grade);
  // Another task, another program, or a program that ended before its answer has another seed.
  std::set<std::string> task_grades, exit_grades;
  for (int i = 0; i < 64 && task_grades.size() < 2; ++i)
    task_grades.insert(passed_of_all(grade(mbpp_task({fmt::format("assert f() == 1  # {}", i)}), random_program)));
  EXPECT_EQ(task_grades.size(), 2u);
  std::string exiting_program;
  for (int i = 0; i < 64 && exit_grades.empty(); ++i) {
    exiting_program = fmt::format("{}\ndef f():\n  if x: os._exit(1)\n  return 1  # {}", random_program, i);
    if (const Grade exit_grade = grade(task, exiting_program); exit_grade.passed == 0)
      exit_grades.insert(passed_of_all(exit_grade));
  }
  for (int i = 0; i < 64 && exit_grades.size() < 2; ++i)
    exit_grades.insert(passed_of_all(grade(task, exiting_program)));
  EXPECT_EQ(exit_grades.size(), 2u);
}

}  // namespace
}  // namespace echoline::data_plane

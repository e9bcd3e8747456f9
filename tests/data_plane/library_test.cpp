// Tasks that are shared libraries: the example works, and the faults of other libraries are their own errors.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "base/random.hpp"
#include "data_plane/adapters/adapter.hpp"
#include "data_plane/adapters/library/elf.hpp"
#include "data_plane/sandbox/sandbox.hpp"
#include "tests/fuzz/input.hpp"

namespace echoline::data_plane {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

constexpr const char* kAccepted = "accepted";  // instead of the reason for a refusal
constexpr std::size_t kLibraryBytesMax = 16u << 20;

class LibraryTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { sandboxed_ = sandbox::Pool::start().has_value(); }
  void SetUp() override {
    if (!sandboxed_) GTEST_SKIP() << sandbox::Pool::start().error().message();
    std::string name = (std::filesystem::temp_directory_path() / "echoline-library-XXXXXX").string();
    folder_ = ::mkdtemp(name.data());
  }
  void TearDown() override {
    if (!folder_.empty()) std::filesystem::remove_all(folder_);
  }
  static std::string options(const std::string& library, json more = json::object()) {
    more["library"] = library;
    return more.dump();
  }
  static std::unique_ptr<Adapter> make_valid(const std::string& library, const json& more = json::object()) {
    auto adapter = make_adapter("library", options(library, more), 3);
    EXPECT_TRUE(adapter) << adapter.error().message();
    return adapter ? *std::move(adapter) : nullptr;
  }
  static std::string refusal(const std::string& library, const json& more = json::object()) {
    const auto adapter = make_adapter("library", options(library, more), 3);
    return adapter ? kAccepted : adapter.error().message();
  }
  static std::string outcome_of(const Adapter& adapter, const std::string& response) {
    const auto step = step_and_wait(**adapter.begin(*adapter.problem(0), 1), response);
    if (!step) return step.error().message();
    return fmt::format("{}{}{}", step->score.reward, step->score.correct ? " correct" : "",
                       step->done ? "" : " " + step->observation.text);
  }
  // The path of a library with this C source text.
  std::string compile(const std::string& text, const std::string& flags = "") {
    const std::string source = folder_ / "task.c", library = folder_ / "task.so";
    std::ofstream(source) << text;
    const std::string command =
        fmt::format("cc -shared -fPIC {} -I clients/c -o '{}' '{}' 2>&1", flags, library, source);
    EXPECT_EQ(std::system(command.c_str()), 0) << command;
    return library;
  }

  static inline bool sandboxed_ = false;
  std::filesystem::path folder_;
};

TEST_F(LibraryTest, TheExampleIsATask) {
  const auto adapter = make_valid(ECHOLINE_SUMS_TASK, {{"settings", {{"largest", 20}}}});
  ASSERT_TRUE(adapter);
  EXPECT_EQ(adapter->name(), "library");
  EXPECT_EQ(adapter->repeatable({}), Repeatable::kCostly);
  EXPECT_EQ(adapter->evaluation().size(), 64u);
  std::set<std::string> prompts;
  for (const Problem& problem : adapter->evaluation()) prompts.insert(problem.prompt());
  constexpr std::size_t kHeldOut = 64, kSums = 21 * 21;  // both operands are from 0 to 20
  for (std::uint64_t i = 0; i < kSums - kHeldOut; ++i) {
    const Problem problem = *adapter->problem(i);
    prompts.insert(problem.prompt());
    const auto episode = *adapter->begin(problem, 1);
    const auto step = step_and_wait(*episode, *adapter->demonstration(problem));
    ASSERT_TRUE(step && step->done && step->score.correct) << problem.prompt();
    EXPECT_EQ(step->score.components.at("digits"), static_cast<double>(problem.reference().size()));
  }
  EXPECT_EQ(prompts.size(), kSums) << "each once, and none of those held out";
  EXPECT_EQ(outcome_of(*adapter, "no"), "0");
  EXPECT_THAT(refusal(ECHOLINE_SUMS_TASK, {{"settings", {{"largest", 5000}}}}),
              HasSubstr("expected a setting 'largest' from 9 to 999"));
}

TEST_F(LibraryTest, TravelsToWorkers) {
  const auto learner = make_valid(ECHOLINE_SUMS_TASK);
  ASSERT_TRUE(learner);
  const std::string worker_options = learner->options_for_workers("");
  EXPECT_EQ(worker_options.find(ECHOLINE_SUMS_TASK), std::string::npos);
  const auto worker = make_adapter("library", worker_options, 3, AdapterUse::kScoring);
  ASSERT_TRUE(worker) << worker.error().message();
  const Problem problem = *learner->problem(0);
  EXPECT_TRUE(step_and_wait(**(*worker)->begin(problem, 1), problem.reference())->score.correct);
  const std::string padded = folder_ / "padded.so";
  std::ofstream(padded) << *read_file(ECHOLINE_SUMS_TASK, kLibraryBytesMax) << std::string(3u << 20, 'x');
  const auto large = make_adapter("library", make_valid(padded)->options_for_workers(""), 3, AdapterUse::kScoring);
  EXPECT_TRUE(large) << large.error().message().substr(0, 300);
  json spoilt = json::parse(worker_options);
  spoilt["contents"]["library"] = "7f4x";
  EXPECT_THAT(make_adapter("library", spoilt.dump(), 3, AdapterUse::kScoring).error().message(),
              HasSubstr("hexadecimal"));
  EXPECT_THAT(make_adapter("library", "{}", 3, AdapterUse::kScoring).error().message(),
              HasSubstr("the contents of the library's file"));
}

TEST_F(LibraryTest, FaultsOfALibraryAreItsErrors) {
  const auto adapter = make_valid(ECHOLINE_HOSTILE_TASK, {{"deadline", "700 ms"}});
  ASSERT_TRUE(adapter);
  EXPECT_EQ(outcome_of(*adapter, "well"), "1 correct");
  EXPECT_EQ(outcome_of(*adapter, "print"), "1 correct") << "standard output is not part of the protocol";
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"nan", "expected a finite number"},
      {"verdict", "the verdict is 9"},
      {"null", "'observation' is NULL with a size of 5"},
      {"endless", "'observation' has 18446744073709551615 bytes, at most 262144 are allowed"},
      {"bytes", "'observation' is not valid UTF-8"},
      {"components", "3 components at NULL"},
      {"many", "100 components, at most 64"},
      {"nameless", "expected a name and a finite number"},
      {"silent", "step() returned 3 and does not say why"},
      {"words", "no such \xef\xbf\xbd move"},
      {"crash", ""},
      {"exit", ""},
      {"hang", "no answer within"},
  };
  for (const auto& [command, expected] : cases) {
    EXPECT_THAT(outcome_of(*adapter, command), HasSubstr(expected)) << command;
    EXPECT_EQ(outcome_of(*adapter, "well"), "1 correct") << "after " << command;
  }
  const auto episode = *adapter->begin(*adapter->problem(0), 1);
  EXPECT_EQ(step_and_wait(*episode, "more")->observation.text, "go on");
  EXPECT_EQ(episode->cut().reward, -2);
  EXPECT_THAT(refusal(ECHOLINE_HOSTILE_TASK, {{"settings", {{"a", 1}}}}), HasSubstr("xxxx"));
}

TEST_F(LibraryTest, AnInvalidLibraryIsRefusedWithTheReason) {
  std::ifstream in("tests/data_plane/hostile_task.c");
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  const std::vector<std::pair<std::string, std::string>> table_faults = {
      {"table.abi = 7", "expected ABI 1, found 7"},
      {"return NULL", "it has no ABI 1"},
      {"table.size = 40", "its table has 40 bytes"},
      {"table.problem = NULL", "lacks one of open, close, problem_count and problem"},
      {"table.step = NULL", "has not all of begin, step and destroy"},
      {"table.begin = NULL, table.step = NULL, table.destroy = NULL", "either score or begin"},
      {"table.name = NULL, table.problem_count = NULL", "lacks one of"},
      {"table.name = \\\"\\\\xff\\\"", "'name' is not valid UTF-8"},
  };
  for (const auto& [statement, expected] : table_faults)
    EXPECT_THAT(refusal(compile(text, fmt::format("\"-DDEED={}\"", statement))), HasSubstr(expected)) << statement;
  EXPECT_THAT(refusal(compile("int nothing;")), HasSubstr("exports no function 'echoline_task'"));
  EXPECT_THAT(refusal(compile("int missing(void); int f(void) { return missing(); }")),
              HasSubstr("undefined symbol: missing"));
  EXPECT_THAT(refusal("docs/tasks.md"), HasSubstr("found another kind of file"));
  EXPECT_THAT(refusal("/nowhere.so"), HasSubstr("/nowhere.so"));
  EXPECT_THAT(make_adapter("library", "{}", 3).error().message(), HasSubstr("library"));
  std::string library_bytes = *read_file(ECHOLINE_SUMS_TASK, kLibraryBytesMax);
  constexpr std::size_t kMachineOffset = 18;  // of ELF's e_machine, two bytes
  constexpr char kPowerPc = 20;
  library_bytes[kMachineOffset] = kPowerPc, library_bytes[kMachineOffset + 1] = 0;
  std::ofstream(folder_ / "other.so") << library_bytes;
  EXPECT_THAT(refusal(folder_ / "other.so"), HasSubstr("found one for machine 20"));
  library_bytes = *read_file(ECHOLINE_SUMS_TASK, kLibraryBytesMax);
  std::ofstream(folder_ / "half.so") << library_bytes.substr(0, library_bytes.size() / 4);
  EXPECT_NE(refusal(folder_ / "half.so"), kAccepted);
}

TEST(LibraryFile, SpoiltFilesAreRefusedOrRead) {
  Random random(7, 0);
  constexpr std::size_t kHeaderBytes = 80;  // longer than the header of an ELF file
  std::string file(kHeaderBytes, '\0');
  file.replace(0, 7,
               "\x7f"
               "ELF\x02\x01\x01");
  for (int round = 0; round < 5000; ++round) {
    std::string spoilt = file.substr(0, random.below(kHeaderBytes + 1));
    for (char& c : spoilt)
      if (random.below(8) == 0) c = static_cast<char>(random.below(256));
    test::fuzz_input(spoilt);
  }
}

}  // namespace
}  // namespace echoline::data_plane

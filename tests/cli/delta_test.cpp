// `echoline delta` from the outside: patches between checkpoints on disk, in files and folders, and errors.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>

#include "tests/cli/program.hpp"
#include "tests/delta/in_place_util.hpp"

namespace echoline::testing {
namespace {

namespace fs = std::filesystem;
using namespace delta::test;
using delta::OwnedState;
using nlohmann::json;

class DeltaTest : public ::testing::Test {
 protected:
  DeltaTest()
      : base_(small_state(1)),
        next_(changed_state(base_, 2)),
        last_(changed_state(next_, 3)),
        old_(base_),
        new_(next_),
        newest_(last_) {}

  std::string path_of(const std::string& name) const { return (old_.root() / name).string(); }
  static Outcome run(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "delta");
    return run_program(arguments);
  }
  static json run_json(std::vector<std::string> arguments, int status = 0) {
    arguments.push_back("--json");
    const Outcome outcome = run(arguments);
    EXPECT_EQ(outcome.status, status) << outcome.err;
    EXPECT_EQ(outcome.err, "");
    json report = json::parse(outcome.out, nullptr, false);
    EXPECT_TRUE(report.is_object()) << outcome.out;
    EXPECT_EQ(report.value("schema_version", 0), 1);
    return report;
  }
  static void expect_refused(const std::vector<std::string>& arguments, int status,
                             const std::vector<std::string>& texts) {
    const Outcome outcome = run(arguments);
    EXPECT_EQ(outcome.status, status) << outcome.err << outcome.out;
    EXPECT_EQ(outcome.out, "");
    for (const std::string& text : texts)
      EXPECT_NE(outcome.err.find(text), std::string::npos) << "no '" << text << "' in:\n" << outcome.err;
  }
  // Makes the patch from one file to another, and returns its name.
  std::string patch(const CheckpointsOnDisk& from, const CheckpointsOnDisk& to, const std::string& name) {
    EXPECT_EQ(run({"diff", from.file(), to.file(), "-o", path_of(name)}).status, 0);
    return path_of(name);
  }
  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(old_.root())) names.push_back(entry.path().filename());
    std::ranges::sort(names);
    return names;
  }

  OwnedState base_, next_, last_;
  CheckpointsOnDisk old_, new_, newest_;
};

TEST_F(DeltaTest, DiffReportsThePayload) {
  const json report = run_json({"diff", old_.file(), new_.file(), "-o", path_of("p"), "--threads", "2"});
  std::uint64_t elements = 0;
  for (const auto& t : base_.view()) elements += t.bytes.size() / delta::dtype_bytes(t.dtype);
  EXPECT_EQ(report.at("elements"), elements);
  const auto payload = fs::file_size(path_of("p"));
  EXPECT_EQ(report.at("payload_bytes"), payload);
  const double changed = report.at("changed");
  EXPECT_GT(changed, 20'000);
  EXPECT_DOUBLE_EQ(report.at("density"), changed / static_cast<double>(elements));
  EXPECT_DOUBLE_EQ(report.at("ratio"), static_cast<double>(base_.total_bytes()) / static_cast<double>(payload));
  EXPECT_DOUBLE_EQ(report.at("bytes_per_change"), static_cast<double>(payload) / changed);
  EXPECT_GT(report.at("entropy_bound_bytes"), 0.0);
  EXPECT_GT(report.at("encode_seconds"), 0.0);
  EXPECT_GT(report.at("apply_seconds"), 0.0);
  EXPECT_EQ(report.at("base_digest"), base_.digest().hex());
  EXPECT_EQ(report.at("result_digest"), next_.digest().hex());
  // Folders and other numbers of threads give the same patch.
  EXPECT_EQ(run_json({"diff", old_.folder(), new_.folder(), "-o", path_of("q"), "--threads", "1"}).at("payload_bytes"),
            payload);
  EXPECT_EQ(content_of(path_of("p")).begin()->second, content_of(path_of("q")).begin()->second);
  const Outcome text = run({"diff", old_.file(), new_.file(), "-o", path_of("p")});
  EXPECT_EQ(text.status, 0);
  EXPECT_EQ(text.err, "");
  for (const char* row : {"elements", "changed", "payload", "per change", "entropy bound", "GB/s", "base", "result"})
    EXPECT_NE(text.out.find(row), std::string::npos) << row;
}

TEST_F(DeltaTest, TheSameCheckpointTwice) {
  const json report = run_json({"diff", old_.file(), old_.folder(), "-o", path_of("p")});
  EXPECT_EQ(report.at("changed"), 0);
  EXPECT_TRUE(report.at("bytes_per_change").is_null());
  EXPECT_EQ(report.at("base_digest"), report.at("result_digest"));
  EXPECT_EQ(run_json({"verify", old_.file(), path_of("p")}).at("state"), "base");
  EXPECT_EQ(run({"apply", old_.file(), path_of("p"), "--in-place"}).status, 0);
}

TEST_F(DeltaTest, ApplyToNew) {
  const std::string patch_file = patch(old_, new_, "p");
  for (const bool folder : {false, true}) {
    const fs::path from = folder ? old_.folder() : old_.file();
    const std::string to = path_of(folder ? "new" : "new.safetensors");
    const json report = run_json({"apply", from, patch_file, "-o", to});
    EXPECT_EQ(report.at("result_digest"), next_.digest().hex());
    EXPECT_EQ(content_of(to).begin()->second, content_of(folder ? new_.folder() : new_.file()).begin()->second);
    EXPECT_EQ(content_of(to).size(), content_of(from).size());
    EXPECT_EQ(digest_at(from), base_.digest());
    expect_refused({"apply", from, patch_file, "-o", to}, 2, {to, "exists"});
  }
}

TEST_F(DeltaTest, ApplyInPlace) {
  const std::string patch_file = patch(old_, new_, "p");
  for (const fs::path& path : {old_.file(), old_.folder()}) {
    EXPECT_EQ(run_json({"verify", path, patch_file}).at("state"), "base");
    const json report = run_json({"apply", path, patch_file, "--in-place"});
    EXPECT_FALSE(report.at("already_applied").get<bool>());
    EXPECT_GT(report.at("journal_bytes"), 0);
    EXPECT_EQ(digest_at(path), next_.digest());
    EXPECT_EQ(run_json({"verify", path, patch_file}).at("state"), "result");
    EXPECT_TRUE(run_json({"apply", path, patch_file, "--in-place"}).at("already_applied").get<bool>());
  }
  EXPECT_EQ(content_of(old_.folder()), content_of(new_.folder()));
}

TEST_F(DeltaTest, VerifyDistinguishesThreeCases) {
  const std::string patch_file = patch(old_, new_, "p");
  const json neither = run_json({"verify", newest_.file(), patch_file}, 1);
  EXPECT_EQ(neither.at("state"), "neither");
  EXPECT_EQ(neither.at("digest"), last_.digest().hex());
  EXPECT_EQ(neither.at("base_digest"), base_.digest().hex());
  const Outcome text = run({"verify", newest_.file(), patch_file});
  EXPECT_EQ(text.status, 1);
  EXPECT_NE(text.out.find("neither base nor result"), std::string::npos) << text.out;
  ASSERT_TRUE(delta::write_safetensors(path_of("other.safetensors"), {base_.view()[0]}));
  EXPECT_NE(run_json({"verify", path_of("other.safetensors"), patch_file}, 1)
                .at("reason")
                .get<std::string>()
                .find("another model"),
            std::string::npos);
}

TEST_F(DeltaTest, Snapshots) {
  const json report = run_json({"diff", new_.folder(), "-o", path_of("s"), "--snapshot"});
  EXPECT_EQ(report.at("kind"), "snapshot");
  EXPECT_TRUE(report.at("entropy_bound_bytes").is_null());
  EXPECT_TRUE(report.at("base_digest").is_null());
  EXPECT_EQ(run({"diff", old_.file(), new_.file(), "-o", path_of("t"), "--snapshot"}).status, 0);
  EXPECT_EQ(content_of(path_of("s")).begin()->second, content_of(path_of("t")).begin()->second);
  EXPECT_EQ(run({"apply", path_of("s"), "-o", path_of("alone.safetensors")}).status, 0);
  EXPECT_EQ(run({"apply", path_of("s"), "-o", path_of("alone")}).status, 0);
  EXPECT_EQ(run({"apply", old_.folder(), path_of("s"), "-o", path_of("like")}).status, 0);
  for (const char* name : {"alone.safetensors", "alone", "like"}) EXPECT_EQ(digest_at(path_of(name)), next_.digest());
  EXPECT_EQ(content_of(path_of("like")), content_of(new_.folder()));
  EXPECT_EQ(run_json({"verify", new_.file(), path_of("s")}).at("state"), "result");
  EXPECT_EQ(run_json({"verify", old_.file(), path_of("s")}, 1).at("state"), "neither");
  expect_refused({"apply", old_.file(), path_of("s"), "--in-place"}, 2, {"snapshot", "-o NEW"});
}

TEST_F(DeltaTest, Inspect) {
  const std::string patch_file = patch(old_, new_, "p");
  const json report = run_json({"inspect", patch_file});
  EXPECT_EQ(report.at("tensors").size(), base_.size());
  std::uint64_t changed = 0;
  for (const json& t : report.at("tensors")) changed += t.at("changed").get<std::uint64_t>();
  EXPECT_EQ(report.at("changed"), changed);
  const Outcome text = run({"inspect", patch_file});
  EXPECT_EQ(text.status, 0);
  // The most expensive tensor first, in columns.
  const std::size_t header = text.out.find("tensor  ");
  const std::size_t mask = text.out.find("\nmask "), head = text.out.find("\nhead ");
  EXPECT_LT(header, mask) << text.out;
  EXPECT_LT(mask, head) << text.out;

  delta::StateView many;
  for (int i = 0; i < 30; ++i) many.push_back(spec(fmt::format("t{:02}", i), delta::DType::kU8, {10}));
  ASSERT_TRUE(delta::write_safetensors(path_of("many.safetensors"), zeros(many).view()));
  ASSERT_EQ(run({"diff", path_of("many.safetensors"), "-o", path_of("m"), "--snapshot"}).status, 0);
  EXPECT_NE(run({"inspect", path_of("m")}).out.find("10 more of 30 tensors"), std::string::npos);
  EXPECT_EQ(run({"inspect", path_of("m"), "--all"}).out.find("more of"), std::string::npos);
}

TEST_F(DeltaTest, Fold) {
  const std::string first = patch(old_, new_, "1"), second = patch(new_, newest_, "2");
  const json beside = run_json({"fold", first, second, "-o", path_of("beside")});
  const json anew = run_json({"fold", first, second, "-o", path_of("anew"), "--base", old_.folder()});
  for (const json& report : {beside, anew}) {
    EXPECT_EQ(report.at("base_digest"), base_.digest().hex());
    EXPECT_EQ(report.at("result_digest"), last_.digest().hex());
  }
  EXPECT_LT(anew.at("payload_bytes"), beside.at("payload_bytes"));
  EXPECT_EQ(run({"apply", old_.folder(), path_of("beside"), "-o", path_of("a")}).status, 0);
  EXPECT_EQ(run({"apply", old_.folder(), path_of("anew"), "--in-place"}).status, 0);
  EXPECT_EQ(content_of(path_of("a")), content_of(newest_.folder()));
  EXPECT_EQ(content_of(old_.folder()), content_of(newest_.folder()));
  expect_refused({"fold", second, first, "-o", path_of("x")}, 2, {"order"});
  expect_refused({"fold", first, second, "-o", path_of("x"), "--base", new_.file()}, 1,
                 {new_.file(), base_.digest().hex()});
}

TEST_F(DeltaTest, MistakesNameFilesAndLeaveNothing) {
  const std::string patch_file = patch(old_, new_, "p");
  const auto before = names();
  ASSERT_TRUE(delta::write_safetensors(new_.root() / "other.safetensors", {base_.view()[0]}));
  const std::string other = new_.root() / "other.safetensors";
  expect_refused({"diff", old_.file(), "-o", path_of("x")}, 2, {"PREV and CUR", "--snapshot"});
  expect_refused({"diff", old_.file(), other, "-o", path_of("x")}, 2, {other, "'block.1.weight'"});
  expect_refused({"diff", old_.file(), path_of("absent"), "-o", path_of("x")}, 2, {path_of("absent")});
  expect_refused({"diff", old_.file(), new_.file(), "-o", old_.file()}, 2, {old_.file(), "choose another name"});
  expect_refused({"diff", old_.file(), new_.file(), "-o", path_of("no/such")}, 2, {path_of("no/such")});
  expect_refused({"diff", old_.file(), new_.file()}, 2, {"output"});
  expect_refused({"apply", old_.file(), patch_file}, 2, {"-o NEW", "--in-place"});
  expect_refused({"apply", old_.file(), patch_file, "-o", path_of("x"), "--in-place"}, 2, {"excludes"});
  expect_refused({"apply", patch_file, "-o", path_of("x")}, 2, {"PREV", base_.digest().hex()});
  expect_refused({"apply", newest_.file(), patch_file, "-o", path_of("x")}, 1, {newest_.file(), last_.digest().hex()});
  expect_refused({"apply", new_.file(), patch_file, "-o", path_of("x")}, 1, {"The checkpoint is already the result"});
  expect_refused({"apply", newest_.file(), patch_file, "--in-place"}, 1, {newest_.file(), last_.digest().hex()});
  expect_refused({"apply", other, patch_file, "-o", path_of("x")}, 2, {patch_file, "another model"});
  expect_refused({"apply", old_.file(), path_of("absent"), "-o", path_of("x")}, 2, {path_of("absent")});
  expect_refused({"inspect", old_.file()}, 1, {old_.file(), "not a patch"});
  expect_refused({"inspect", old_.root()}, 2, {"expected a file, found a folder"});
  expect_refused({"verify", old_.root(), patch_file}, 2, {"model.safetensors"});
  expect_refused({"diff", "--threads", "0", old_.file(), new_.file(), "-o", path_of("x")}, 2, {"--threads"});
  fs::resize_file(patch_file, fs::file_size(patch_file) - 1);
  expect_refused({"apply", old_.file(), patch_file, "--in-place"}, 1, {patch_file, "Fetch it again"});
  EXPECT_EQ(names(), before);
  EXPECT_EQ(digest_at(old_.file()), base_.digest());
}

TEST_F(DeltaTest, VerbsCompleteAnInterruptedApply) {
  const std::string patch_file = patch(old_, new_, "p");
  const Blob bytes = delta_between(base_, next_);
  const Content before = content_of(old_.folder());
  const std::string folder = old_.folder();
  const std::vector<std::vector<std::string>> verbs{{"verify", folder, patch_file},
                                                    {"diff", folder, new_.folder(), "-o", path_of("q")},
                                                    {"apply", folder, patch_file, "--in-place"}};
  for (const auto& verb : verbs) {
    restore(old_.folder(), before);
    apply_until(old_.folder(), bytes, delta::ApplyStage::kRangeWritten, 3);
    const Outcome outcome = run(verb);
    EXPECT_EQ(outcome.status, 0) << verb[0] << ": " << outcome.err;
    EXPECT_NE(outcome.err.find(folder + ": completed an interrupted `apply --in-place`"), std::string::npos) << verb[0];
    EXPECT_EQ(content_of(old_.folder()), content_of(new_.folder())) << verb[0];
  }
}

TEST_F(DeltaTest, TwoProcessesAtOnce) {
  const std::string patch_file = patch(old_, new_, "p");
  {
    const auto reading = delta::LockedCheckpoint::open(old_.folder());
    ASSERT_TRUE(reading);
    expect_refused({"apply", old_.folder(), patch_file, "--in-place"}, 1, {"another process", "try again"});
    EXPECT_EQ(run({"verify", old_.folder(), patch_file}).status, 0);
  }
  EXPECT_EQ(run({"apply", old_.folder(), patch_file, "--in-place"}).status, 0);
}

// The program's output on stderr if that is a terminal.
std::string on_terminal(const std::vector<std::string>& arguments, const char* term) {
  int master = -1, slave = -1;
  EXPECT_EQ(::openpty(&master, &slave, nullptr, nullptr, nullptr), 0);
  std::fflush(nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    ::setenv("TERM", term, 1);
    ::dup2(::open("/dev/null", O_WRONLY), STDOUT_FILENO);
    ::dup2(slave, STDERR_FILENO);
    ::close(slave);
    ::close(master);
    std::vector<std::string> full{ECHOLINE_PROGRAM};
    full.insert(full.end(), arguments.begin(), arguments.end());
    std::vector<char*> argv;
    for (std::string& a : full) argv.push_back(a.data());
    argv.push_back(nullptr);
    ::execv(argv[0], argv.data());
    ::_exit(127);
  }
  ::close(slave);
  std::string text;
  char block[4096];
  for (ssize_t n; (n = ::read(master, block, sizeof block)) > 0;) text.append(block, static_cast<std::size_t>(n));
  ::close(master);
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0) << text;
  return text;
}

TEST_F(DeltaTest, ABarOnlyOnATerminal) {
  const std::vector<std::string> diff{"delta", "diff", old_.file(), new_.file(), "-o", path_of("p")};
  EXPECT_NE(on_terminal(diff, "xterm").find("encoding"), std::string::npos);
  EXPECT_EQ(on_terminal(diff, "dumb"), "");
}

TEST_F(DeltaTest, HelpTeaches) {
  for (const char* verb : {"diff", "apply", "verify", "inspect", "fold"}) {
    const Outcome outcome = run({verb, "--help"});
    EXPECT_EQ(outcome.status, 0) << verb;
    for (const std::string& text : {std::string("  echoline delta ") + verb, std::string("--json")})
      EXPECT_NE(outcome.out.find(text), std::string::npos) << verb;
  }
}

}  // namespace
}  // namespace echoline::testing

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

  std::string at(const std::string& name) const { return (old_.root() / name).string(); }
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
    EXPECT_EQ(run({"diff", from.file(), to.file(), "-o", at(name)}).status, 0);
    return at(name);
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
  const json report = run_json({"diff", old_.file(), new_.file(), "-o", at("p"), "--threads", "2"});
  std::uint64_t elements = 0;
  for (const auto& t : base_.view()) elements += t.bytes.size() / delta::dtype_bytes(t.dtype);
  EXPECT_EQ(report.at("elements"), elements);
  const auto payload = fs::file_size(at("p"));
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
  EXPECT_EQ(run_json({"diff", old_.folder(), new_.folder(), "-o", at("q"), "--threads", "1"}).at("payload_bytes"),
            payload);
  EXPECT_EQ(content_of(at("p")).begin()->second, content_of(at("q")).begin()->second);
  const Outcome text = run({"diff", old_.file(), new_.file(), "-o", at("p")});
  EXPECT_EQ(text.status, 0);
  EXPECT_EQ(text.err, "");
  for (const char* row : {"elements", "changed", "payload", "per change", "entropy bound", "GB/s", "base", "result"})
    EXPECT_NE(text.out.find(row), std::string::npos) << row;
}

TEST_F(DeltaTest, TheSameCheckpointTwice) {
  const json report = run_json({"diff", old_.file(), old_.folder(), "-o", at("p")});
  EXPECT_EQ(report.at("changed"), 0);
  EXPECT_TRUE(report.at("bytes_per_change").is_null());
  EXPECT_EQ(report.at("base_digest"), report.at("result_digest"));
  EXPECT_EQ(run_json({"verify", old_.file(), at("p")}).at("state"), "base");
  EXPECT_EQ(run({"apply", old_.file(), at("p"), "--in-place"}).status, 0);
}

TEST_F(DeltaTest, ApplyToNew) {
  const std::string p = patch(old_, new_, "p");
  for (const bool folder : {false, true}) {
    const fs::path from = folder ? old_.folder() : old_.file();
    const std::string to = at(folder ? "new" : "new.safetensors");
    const json report = run_json({"apply", from, p, "-o", to});
    EXPECT_EQ(report.at("result_digest"), next_.digest().hex());
    EXPECT_EQ(content_of(to).begin()->second, content_of(folder ? new_.folder() : new_.file()).begin()->second);
    EXPECT_EQ(content_of(to).size(), content_of(from).size());
    EXPECT_EQ(digest_at(from), base_.digest());
    expect_refused({"apply", from, p, "-o", to}, 2, {to, "exists"});
  }
}

TEST_F(DeltaTest, ApplyInPlace) {
  const std::string p = patch(old_, new_, "p");
  for (const fs::path& path : {old_.file(), old_.folder()}) {
    EXPECT_EQ(run_json({"verify", path, p}).at("state"), "base");
    const json report = run_json({"apply", path, p, "--in-place"});
    EXPECT_FALSE(report.at("already_applied").get<bool>());
    EXPECT_GT(report.at("journal_bytes"), 0);
    EXPECT_EQ(digest_at(path), next_.digest());
    EXPECT_EQ(run_json({"verify", path, p}).at("state"), "result");
    EXPECT_TRUE(run_json({"apply", path, p, "--in-place"}).at("already_applied").get<bool>());
  }
  EXPECT_EQ(content_of(old_.folder()), content_of(new_.folder()));
}

TEST_F(DeltaTest, VerifyDistinguishesThreeCases) {
  const std::string p = patch(old_, new_, "p");
  const json neither = run_json({"verify", newest_.file(), p}, 1);
  EXPECT_EQ(neither.at("state"), "neither");
  EXPECT_EQ(neither.at("digest"), last_.digest().hex());
  EXPECT_EQ(neither.at("base_digest"), base_.digest().hex());
  const Outcome text = run({"verify", newest_.file(), p});
  EXPECT_EQ(text.status, 1);
  EXPECT_NE(text.out.find("neither base nor result"), std::string::npos) << text.out;
  ASSERT_TRUE(delta::write_safetensors(at("other.safetensors"), {base_.view()[0]}));
  EXPECT_NE(run_json({"verify", at("other.safetensors"), p}, 1).at("reason").get<std::string>().find("another model"),
            std::string::npos);
}

TEST_F(DeltaTest, Snapshots) {
  const json report = run_json({"diff", new_.folder(), "-o", at("s"), "--snapshot"});
  EXPECT_EQ(report.at("kind"), "snapshot");
  EXPECT_TRUE(report.at("entropy_bound_bytes").is_null());
  EXPECT_TRUE(report.at("base_digest").is_null());
  EXPECT_EQ(run({"diff", old_.file(), new_.file(), "-o", at("t"), "--snapshot"}).status, 0);
  EXPECT_EQ(content_of(at("s")).begin()->second, content_of(at("t")).begin()->second);
  EXPECT_EQ(run({"apply", at("s"), "-o", at("alone.safetensors")}).status, 0);
  EXPECT_EQ(run({"apply", at("s"), "-o", at("alone")}).status, 0);
  EXPECT_EQ(run({"apply", old_.folder(), at("s"), "-o", at("like")}).status, 0);
  for (const char* name : {"alone.safetensors", "alone", "like"}) EXPECT_EQ(digest_at(at(name)), next_.digest());
  EXPECT_EQ(content_of(at("like")), content_of(new_.folder()));
  EXPECT_EQ(run_json({"verify", new_.file(), at("s")}).at("state"), "result");
  EXPECT_EQ(run_json({"verify", old_.file(), at("s")}, 1).at("state"), "neither");
  expect_refused({"apply", old_.file(), at("s"), "--in-place"}, 2, {"snapshot", "-o NEW"});
}

TEST_F(DeltaTest, Inspect) {
  const std::string p = patch(old_, new_, "p");
  const json report = run_json({"inspect", p});
  EXPECT_EQ(report.at("tensors").size(), base_.size());
  std::uint64_t changed = 0;
  for (const json& t : report.at("tensors")) changed += t.at("changed").get<std::uint64_t>();
  EXPECT_EQ(report.at("changed"), changed);
  const Outcome text = run({"inspect", p});
  EXPECT_EQ(text.status, 0);
  // The most expensive tensor first, in columns.
  const std::size_t header = text.out.find("tensor  ");
  const std::size_t mask = text.out.find("\nmask "), head = text.out.find("\nhead ");
  EXPECT_LT(header, mask) << text.out;
  EXPECT_LT(mask, head) << text.out;

  delta::StateView many;
  for (int i = 0; i < 30; ++i) many.push_back(spec(fmt::format("t{:02}", i), delta::DType::kU8, {10}));
  ASSERT_TRUE(delta::write_safetensors(at("many.safetensors"), zeros(many).view()));
  ASSERT_EQ(run({"diff", at("many.safetensors"), "-o", at("m"), "--snapshot"}).status, 0);
  EXPECT_NE(run({"inspect", at("m")}).out.find("10 more of 30 tensors"), std::string::npos);
  EXPECT_EQ(run({"inspect", at("m"), "--all"}).out.find("more of"), std::string::npos);
}

TEST_F(DeltaTest, Fold) {
  const std::string first = patch(old_, new_, "1"), second = patch(new_, newest_, "2");
  const json beside = run_json({"fold", first, second, "-o", at("beside")});
  const json anew = run_json({"fold", first, second, "-o", at("anew"), "--base", old_.folder()});
  for (const json& report : {beside, anew}) {
    EXPECT_EQ(report.at("base_digest"), base_.digest().hex());
    EXPECT_EQ(report.at("result_digest"), last_.digest().hex());
  }
  EXPECT_LT(anew.at("payload_bytes"), beside.at("payload_bytes"));
  EXPECT_EQ(run({"apply", old_.folder(), at("beside"), "-o", at("a")}).status, 0);
  EXPECT_EQ(run({"apply", old_.folder(), at("anew"), "--in-place"}).status, 0);
  EXPECT_EQ(content_of(at("a")), content_of(newest_.folder()));
  EXPECT_EQ(content_of(old_.folder()), content_of(newest_.folder()));
  expect_refused({"fold", second, first, "-o", at("x")}, 2, {"order"});
  expect_refused({"fold", first, second, "-o", at("x"), "--base", new_.file()}, 1, {new_.file(), base_.digest().hex()});
}

TEST_F(DeltaTest, MistakesNameFilesAndLeaveNothing) {
  const std::string p = patch(old_, new_, "p");
  const auto before = names();
  ASSERT_TRUE(delta::write_safetensors(new_.root() / "other.safetensors", {base_.view()[0]}));
  const std::string other = new_.root() / "other.safetensors";
  expect_refused({"diff", old_.file(), "-o", at("x")}, 2, {"PREV and CUR", "--snapshot"});
  expect_refused({"diff", old_.file(), other, "-o", at("x")}, 2, {other, "'block.1.weight'"});
  expect_refused({"diff", old_.file(), at("absent"), "-o", at("x")}, 2, {at("absent")});
  expect_refused({"diff", old_.file(), new_.file(), "-o", old_.file()}, 2, {old_.file(), "choose another name"});
  expect_refused({"diff", old_.file(), new_.file(), "-o", at("no/such")}, 2, {at("no/such")});
  expect_refused({"diff", old_.file(), new_.file()}, 2, {"output"});
  expect_refused({"apply", old_.file(), p}, 2, {"-o NEW", "--in-place"});
  expect_refused({"apply", old_.file(), p, "-o", at("x"), "--in-place"}, 2, {"excludes"});
  expect_refused({"apply", p, "-o", at("x")}, 2, {"PREV", base_.digest().hex()});
  expect_refused({"apply", newest_.file(), p, "-o", at("x")}, 1, {newest_.file(), last_.digest().hex()});
  expect_refused({"apply", new_.file(), p, "-o", at("x")}, 1, {"The checkpoint is already the result"});
  expect_refused({"apply", newest_.file(), p, "--in-place"}, 1, {newest_.file(), last_.digest().hex()});
  expect_refused({"apply", other, p, "-o", at("x")}, 2, {p, "another model"});
  expect_refused({"apply", old_.file(), at("absent"), "-o", at("x")}, 2, {at("absent")});
  expect_refused({"inspect", old_.file()}, 1, {old_.file(), "not a patch"});
  expect_refused({"inspect", old_.root()}, 2, {"expected a file, found a folder"});
  expect_refused({"verify", old_.root(), p}, 2, {"model.safetensors"});
  expect_refused({"diff", "--threads", "0", old_.file(), new_.file(), "-o", at("x")}, 2, {"--threads"});
  fs::resize_file(p, fs::file_size(p) - 1);
  expect_refused({"apply", old_.file(), p, "--in-place"}, 1, {p, "Fetch it again"});
  EXPECT_EQ(names(), before);
  EXPECT_EQ(digest_at(old_.file()), base_.digest());
}

TEST_F(DeltaTest, VerbsCompleteAnInterruptedApply) {
  const std::string p = patch(old_, new_, "p");
  const Blob bytes = delta_between(base_, next_);
  const Content before = content_of(old_.folder());
  const std::string folder = old_.folder();
  const std::vector<std::vector<std::string>> verbs{
      {"verify", folder, p}, {"diff", folder, new_.folder(), "-o", at("q")}, {"apply", folder, p, "--in-place"}};
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
  const std::string p = patch(old_, new_, "p");
  {
    const auto reading = delta::LockedCheckpoint::open(old_.folder());
    ASSERT_TRUE(reading);
    expect_refused({"apply", old_.folder(), p, "--in-place"}, 1, {"another process", "try again"});
    EXPECT_EQ(run({"verify", old_.folder(), p}).status, 0);
  }
  EXPECT_EQ(run({"apply", old_.folder(), p, "--in-place"}).status, 0);
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
  const std::vector<std::string> diff{"delta", "diff", old_.file(), new_.file(), "-o", at("p")};
  EXPECT_NE(on_terminal(diff, "xterm").find("encoding"), std::string::npos);
  EXPECT_EQ(on_terminal(diff, "dumb"), "");
}

TEST_F(DeltaTest, HelpTeaches) {
  for (const char* verb : {"diff", "apply", "verify", "inspect", "fold"}) {
    const Outcome outcome = run({verb, "--help"});
    EXPECT_EQ(outcome.status, 0) << verb;
    for (const char* text : {"Example", "--json"}) EXPECT_NE(outcome.out.find(text), std::string::npos) << verb;
  }
}

}  // namespace
}  // namespace echoline::testing

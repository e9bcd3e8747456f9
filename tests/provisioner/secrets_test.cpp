// No credential of a provider reaches a worker, a job or a command of any provider.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <fstream>

#include "base/files.hpp"
#include "provider_driver.hpp"
#include "provisioner/providers/registry.hpp"
#include "provisioner/providers/vast.hpp"
#include "tests/overlay/folder.hpp"
#include "vast_server.hpp"

namespace echoline::provisioner {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

constexpr const char* kToken = "join-token-of-the-worker";
// Credentials that neither echoline nor a provider of it knows, and their value.
constexpr std::array kOtherCredentials{"HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "MY_PASSWORD"};
constexpr const char* kOtherCredential = "credential-of-another-service";

// Each provider starts an instance that shows what it can see: its environment and its input.
class Secrets : public testing::Test {
 protected:
  void SetUp() override {
    for (const std::string& name : provider_secrets()) setenv(name.c_str(), VastServer::kKey, 1);
    for (const char* name : kOtherCredentials) setenv(name, kOtherCredential, 1);
    setenv("ECHOLINE_TEST_KEPT", "kept", 1);
    path = std::getenv("PATH");
  }
  void TearDown() override {
    for (const std::string& name : provider_secrets()) unsetenv(name.c_str());
    for (const char* name : kOtherCredentials) unsetenv(name);
    unsetenv("ECHOLINE_TEST_KEPT");
    setenv("PATH", path.c_str(), 1);
  }
  // Puts a program before those of PATH.
  void program(const std::string& name, const std::string& script) {
    const fs::path tools = folder.path() / "tools";
    fs::create_directories(tools);
    std::ofstream(tools / name) << "#!/bin/sh\n" << script;
    fs::permissions(tools / name, fs::perms::owner_all);
    setenv("PATH", (tools.string() + ":" + path).c_str(), 1);
  }
  LaunchSpec spec() const {
    LaunchSpec s;
    s.offer.id = "77";
    s.offer.host = "h";
    s.offer.gpu = "L4";
    s.offer.cloud = "aws";
    s.offer.region = "us-east-1";
    s.offer.machine_type = "NVIDIA-L4";
    s.label = "run.1a2b3c4d/1";
    s.image = "debian:12";
    s.argv = {"/bin/sh", "-c", "env"};
    s.program_on_instance = true;
    s.env = {{"ECHOLINE_TOKEN", kToken}};
    return s;
  }
  // Environment and input of the provider's instance or commands.
  std::string seen_through(const std::string& kind, const std::string& provider_file) {
    ProviderOptions options;
    options.log_folder = folder.path() / "logs";
    options.file = folder.path() / "provider.yaml";
    options.services[kVastName].url = server.url();
    std::ofstream(options.file) << provider_file;
    auto provider = make_provider(kind, options);
    EXPECT_TRUE(provider) << provider.error().message();
    (*provider)->start(1, spec());
    ProviderDriver driver(**provider);
    for (int i = 0; i < 200; ++i) {  // until the instance has written something
      (void)(*provider)->poll(SystemClock().now());
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      std::string text;
      for (const auto& entry : fs::recursive_directory_iterator(folder.path()))
        if (entry.path().extension() == ".log") text += *read_file(entry.path());
      for (const std::string& body : server.bodies()) text += body;
      if (text.find(kToken) != std::string::npos || text.find("ECHOLINE_TEST_KEPT") != std::string::npos) return text;
    }
    ADD_FAILURE() << kind << ": nothing was started";
    return "";
  }

  VastServer server;
  overlay::TemporaryFolder folder;
  std::string path;  // the variable PATH, unchanged
};

TEST_F(Secrets, ReachNoWorkerOrCommandOfAnyProvider) {
  const std::string log = (folder.path() / "seen.log").string();
  program("ssh", "env >>" + log + "\ncat >>" + log + "\n");  // only records its environment and input
  const std::map<std::string, std::string> provider_files{
      {"local", ""},
      {"vast", ""},
      {"ssh", "hosts: [{name: h, address: nowhere}]\n"},
      {"exec", "start: [sh, -c, 'env >>" + log + "; cat >>" + log + "; echo id']\nstop: ['true']\nlist: ['true']\n"}};
  for (const ProviderKind* kind : provider_kinds()) {
    SCOPED_TRACE(kind->name);
    ASSERT_TRUE(provider_files.contains(kind->name)) << "a new provider: add it to this test";
    const std::string seen = seen_through(kind->name, provider_files.at(kind->name));
    EXPECT_THAT(seen, Not(HasSubstr(VastServer::kKey)));
    // A cloud's own program may need the cloud's credential; nothing else does.
    if (kind->name != "exec") {
      EXPECT_THAT(seen, Not(HasSubstr(kOtherCredential)));
    }
    std::error_code ignored;
    fs::remove(log, ignored);
    fs::remove_all(folder.path() / "logs", ignored);
  }
}

// An example file hands arguments to its scheduler or cloud, which every user sees, and files and input, which become
// the job.
TEST_F(Secrets, ReachNoJobOfAnyExample) {
  const std::map<std::string, std::string> programs{
      {"slurm.yaml", "sbatch"}, {"kubernetes.yaml", "kubectl"}, {"skypilot.yaml", "sky"}, {"dstack.yaml", "dstack"}};
  for (const auto& entry : fs::directory_iterator("configs/providers")) {
    const std::string file = entry.path().filename().string();
    if (entry.path().extension() != ".yaml" || file == "ssh-hosts.yaml") continue;
    SCOPED_TRACE(file);
    ASSERT_TRUE(programs.contains(file)) << "a new example: add its program to this test";
    const fs::path seen = folder.path() / file;
    fs::create_directories(seen);
    const auto path_of = [&](const char* name) { return (seen / name).string(); };
    program(programs.at(file), "env >>" + path_of("env") + "\necho \"$@\" >>" + path_of("args") +
                                   "\nfor a; do [ ! -f \"$a\" ] || cat \"$a\" >>" + path_of("input") +
                                   "; done\ncat >>" + path_of("input") + "\necho id\n");
    auto provider = make_provider("exec", {.file = entry.path()});
    ASSERT_TRUE(provider) << provider.error().message();
    ProviderDriver driver(**provider);
    (*provider)->start(1, spec());
    ASSERT_TRUE(driver.next<Started>());
    const std::string env = *read_file(seen / "env"), args = *read_file(seen / "args"),
                      input = *read_file(seen / "input");
    EXPECT_THAT(input, HasSubstr(kToken)) << "the worker's own";
    EXPECT_THAT(args, Not(HasSubstr(kToken)));
    for (const std::string& passed_on : {env, args, input}) EXPECT_THAT(passed_on, Not(HasSubstr(VastServer::kKey)));
    EXPECT_THAT(args + input, Not(HasSubstr(kOtherCredential)));
    // sbatch exports its whole environment unless it is told what.
    if (file == "slurm.yaml") {
      EXPECT_THAT(args, AllOf(HasSubstr("--export=HOME,"), Not(HasSubstr("ALL"))));
    }
  }
}

// Commands that rent from a service may need its key.
TEST_F(Secrets, ACommandGetsTheOnesThatItsFileNames) {
  const std::string log = (folder.path() / "seen.log").string();
  const std::string seen = seen_through("exec", "secrets: [VAST_API_KEY]\nstart: [sh, -c, 'env >>" + log + "; cat >>" +
                                                    log + "; echo id']\nstop: ['true']\nlist: ['true']\n");
  EXPECT_THAT(seen, HasSubstr("VAST_API_KEY="));
}

}  // namespace
}  // namespace echoline::provisioner

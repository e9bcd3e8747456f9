// No credential of a provider reaches a worker, a job or a command of any provider.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

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
using testing::HasSubstr;
using testing::Not;

// Each provider starts an instance that shows what it can see: its environment and its input.
class Secrets : public testing::Test {
 protected:
  void SetUp() override {
    for (const std::string& name : provider_secrets()) setenv(name.c_str(), VastServer::kKey, 1);
    setenv("ECHOLINE_TEST_KEPT", "kept", 1);
  }
  void TearDown() override {
    for (const std::string& name : provider_secrets()) unsetenv(name.c_str());
    unsetenv("ECHOLINE_TEST_KEPT");
  }
  LaunchSpec spec() const {
    LaunchSpec s;
    s.offer.id = "77";
    s.offer.host = "h";
    s.label = "run.1a2b3c4d/1";
    s.image = "debian:12";
    s.argv = {"/bin/sh", "-c", "env"};
    s.program_on_instance = true;
    s.env = {{"ECHOLINE_TOKEN", "token"}};
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
      if (text.find("token") != std::string::npos || text.find("ECHOLINE_TEST_KEPT") != std::string::npos) return text;
    }
    ADD_FAILURE() << kind << ": nothing was started";
    return "";
  }

  VastServer server;
  overlay::TemporaryFolder folder;
};

TEST_F(Secrets, ReachNoWorkerOrCommandOfAnyProvider) {
  const std::string log = (folder.path() / "seen.log").string();
  // An ssh that only records its environment and input.
  const fs::path tools = folder.path() / "tools";
  fs::create_directories(tools);
  std::ofstream(tools / "ssh") << "#!/bin/sh\nenv >>" << log << "\ncat >>" << log << "\n";
  fs::permissions(tools / "ssh", fs::perms::owner_all);
  const std::string path = std::getenv("PATH");
  setenv("PATH", (tools.string() + ":" + path).c_str(), 1);
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
    for (const std::string& name : provider_secrets()) EXPECT_THAT(seen, Not(HasSubstr(name + "=")));
    std::error_code ignored;
    fs::remove(log, ignored);
    fs::remove_all(folder.path() / "logs", ignored);
  }
  setenv("PATH", path.c_str(), 1);
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

// The exec provider: with commands of the shell, and the examples of configs/providers against fakes of their programs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "provider_driver.hpp"
#include "provisioner/providers/command.hpp"
#include "provisioner/providers/registry.hpp"

namespace echoline::provisioner {
namespace {

using testing::HasSubstr;
using testing::Not;

class ExecTest : public testing::Test {
 protected:
  void SetUp() override {
    folder = std::filesystem::temp_directory_path() / fmt::format("echoline-exec-{}", getpid());
    std::filesystem::remove_all(folder);
    std::filesystem::create_directories(folder / "bin");
    path = std::getenv("PATH");
    setenv("PATH", (folder / "bin").string().append(":").append(path).c_str(), 1);
    setenv("STAND_IN", folder.c_str(), 1);
  }
  void TearDown() override {
    setenv("PATH", path.c_str(), 1);
    std::filesystem::remove_all(folder);
  }
  void program(const std::string& name, const std::string& script) {
    std::ofstream(folder / "bin" / name) << "#!/bin/sh\ncd \"$STAND_IN\" || exit 9\n" << script;
    std::filesystem::permissions(folder / "bin" / name, std::filesystem::perms::owner_all);
  }
  std::unique_ptr<Provider> make(const std::string& yaml) {
    std::ofstream(folder / "p.yaml") << yaml;
    return load(folder / "p.yaml");
  }
  static std::unique_ptr<Provider> load(const std::filesystem::path& file) {
    auto made = make_provider("exec", {.file = file});
    EXPECT_TRUE(made) << made.error().message();
    return made ? std::move(*made) : nullptr;
  }
  static LaunchSpec spec(const std::string& label = "Run_A.1234abcd/7") {
    LaunchSpec s;
    s.offer.id = "o1";
    s.offer.gpu = "A100";
    s.offer.gpu_count = 2;
    s.offer.cloud = "lambda";
    s.offer.region = "Texas, US";
    s.offer.machine_type = "gpu_2x_\"a100\"";
    s.label = label;
    s.image = "registry/echoline:1";
    s.disk = Bytes{50'000'000'000};
    s.argv = {"/bin/echo", "it's", "{name}"};
    s.env = {{"ECHOLINE_TOKEN", "se'cret"}};
    return s;
  }
  std::string said(const std::string& file) {
    const auto text = read_file(folder / file);
    return text ? *text : "";
  }
  // Starts an instance with a provider file, finds it, stops it, and no longer finds it.
  void expect_works(const std::string& file) {
    const auto provider = load(std::filesystem::path("configs/providers") / file);
    ASSERT_TRUE(provider);
    ProviderDriver driver(*provider);
    provider->start(1, spec());
    const auto started = driver.next<Started>();
    ASSERT_TRUE(started) << file;
    provider->start(2, spec("Run_A.99999999/7"));
    ASSERT_TRUE(driver.next<Started>());
    EXPECT_THAT(said("args") + said("input"), HasSubstr("run-a-"));
    EXPECT_THAT(said("args"), Not(HasSubstr("cret")));  // nor anything else of the script
    EXPECT_THAT(said("input"), HasSubstr("cret"));
    auto listed = driver.listed("Run_A.1234abcd/");
    ASSERT_TRUE(listed && listed->complete) << file;
    ASSERT_EQ(listed->instances.size(), 1u);
    EXPECT_EQ(listed->instances[0].label, "Run_A.1234abcd/7");
    EXPECT_EQ(listed->instances[0].instance, started->instance);
    EXPECT_EQ(driver.listed("Run_A.1234abcd/7")->instances.size(), 1u);
    EXPECT_EQ(driver.listed("")->instances.size(), 2u);
    for (int i = 0; i < 2; ++i) {  // twice does no harm
      provider->stop(3, started->instance, {});
      ASSERT_TRUE(driver.next<Stopped>()) << file;
    }
    listed = driver.listed("Run_A.1234abcd/");
    EXPECT_TRUE(listed->complete && listed->instances.empty());
  }

  std::filesystem::path folder;
  std::string path;
};

TEST_F(ExecTest, NamesAreValidForSchedulers) {
  EXPECT_EQ(instance_name_of_label("Run_A.1234abcd/7"), "run-a-1234abcd-7");
  EXPECT_EQ(instance_name_of_label("Run_A.1234abcd/"), "run-a-1234abcd-");
  EXPECT_EQ(instance_name_of_label("1.run.1234abcd/7"), "x-run-1234abcd-7");
  EXPECT_LE(instance_name_of_label(std::string(200, 'r') + ".1234abcd/1234567").size(), 63u);
}

TEST_F(ExecTest, TheExampleOfSlurmWorks) {
  program("sbatch", R"sh(echo "$@" >> args; cat >> input; mkdir -p jobs; id=$(($(ls jobs | wc -l) + 100))
for a; do case $a in --job-name=*) echo "${a#--job-name=} RUNNING" > jobs/$id;; esac; done; echo $id)sh");
  program("squeue", R"sh(wanted='*'; for a; do case $a in --jobs=*) wanted=${a#--jobs=};; esac; done
for f in jobs/$wanted; do [ -f "$f" ] && echo "${f#jobs/} $(cat $f)"; done; exit 0)sh");
  program("scancel", "rm -f jobs/$1");
  expect_works("slurm.yaml");
  EXPECT_THAT(said("args"), HasSubstr("--export=HOME,PATH "));           // jobs do not get this machine's environment
  EXPECT_THAT(said("args"), HasSubstr("--nodes=1 --gpus-per-node=2 "));  // all GPUs on the node that runs the script
  EXPECT_THAT(said("args"), HasSubstr("--no-requeue"));
  EXPECT_THAT(said("input"), HasSubstr("exec '/bin/echo' 'it'\\''s' '{name}'"));
}

TEST_F(ExecTest, TheExampleOfKubernetesWorks) {
  program("kubectl", R"sh(echo "$@" >> args; mkdir -p pods
case $1 in
  create) cat > input; name=$(sed -n 's/.*"metadata": {"name": "\([^"]*\)".*/\1/p' input | head -n 1)
    : > pods/$name; [ ! -f refused ] || exit 1;;
  get) for f in pods/*; do [ -f "$f" ] && echo "${f#pods/} ${f#pods/} Running"; done;;
  delete) [ "$2" = pod,secret ] && rm -f pods/$3;;
esac; exit 0)sh");
  expect_works("kubernetes.yaml");
  const auto list = nlohmann::json::parse(said("input"));
  ASSERT_EQ(list["items"].size(), 2u);
  const auto &secret = list["items"][0], &pod = list["items"][1];
  EXPECT_EQ(secret["kind"], "Secret");
  EXPECT_EQ(secret["stringData"], nlohmann::json({{"ECHOLINE_TOKEN", "se'cret"}}));
  EXPECT_EQ(pod["kind"], "Pod");
  EXPECT_THAT(pod.dump(), Not(HasSubstr("cret\"")));  // the token is in the Secret only
  const auto& container = pod["spec"]["containers"][0];
  EXPECT_EQ(container["image"], "registry/echoline:1");
  EXPECT_EQ(container["envFrom"][0]["secretRef"]["name"], secret["metadata"]["name"]);
  EXPECT_EQ(container["command"][2], "#!/bin/sh\nexec '/bin/echo' 'it'\\''s' '{name}'\n");
  EXPECT_EQ(container["resources"]["limits"]["nvidia.com/gpu"], "2");
  EXPECT_EQ(container["volumeMounts"][0]["mountPath"], "/dev/shm");
  EXPECT_EQ(pod["spec"]["volumes"][0]["emptyDir"]["medium"], "Memory");
  EXPECT_EQ(pod["spec"]["nodeSelector"]["nvidia.com/gpu.product"], "gpu_2x_\"a100\"");

  // A pod that is refused leaves no Secret.
  std::ofstream(folder / "refused") << "";
  const auto provider = load("configs/providers/kubernetes.yaml");
  ProviderDriver driver(*provider);
  provider->start(1, spec());
  EXPECT_TRUE(driver.next<StartFailed>());
  EXPECT_FALSE(std::filesystem::exists(folder / "pods" / "run-a-1234abcd-7"));
}

// The task asks for the machine that the offer prices.
TEST_F(ExecTest, TheExampleOfSkyPilotWorks) {
  program("sky", R"sh(mkdir -p clusters
case $1 in
  launch) echo "$@" >> args
    for a; do last=$a; case $before in --cluster) : > clusters/$a;; esac; before=$a; done
    cat $last > input; echo launched;;
  status) separator='['; for f in clusters/*; do [ -f "$f" ] || continue
      printf '%s{"name": "%s", "status": "UP"}' "$separator" "${f#clusters/}"; separator=,; done
    [ "$separator" != '[' ] || printf '['; echo ']';;
  down) [ -f clusters/$3 ] && rm clusters/$3;;
esac)sh");
  expect_works("skypilot.yaml");
  EXPECT_THAT(said("args"), HasSubstr("launch --yes --detach-run --down --cluster run-a-"));
  const auto task = nlohmann::json::parse(said("input"));
  EXPECT_EQ(task["resources"], nlohmann::json::parse(R"({"cloud": "lambda", "region": "Texas, US", "zone": null,
    "instance_type": "gpu_2x_\"a100\"", "accelerators": {"A100": 2}, "use_spot": false, "disk_size": 50,
    "image_id": "docker:registry/echoline:1"})"));
  EXPECT_EQ(task["secrets"], nlohmann::json({{"ECHOLINE_TOKEN", "se'cret"}}));
  EXPECT_THAT(task["run"].get<std::string>(), HasSubstr("exec '/bin/echo'"));
}

TEST_F(ExecTest, TheExampleOfDstackWorks) {
  program("dstack", R"sh(mkdir -p runs
case $1 in
  apply) echo "$@" >> args; cat > input; : > runs/$(sed -n 's/.*"name": "\([^"]*\)", "image".*/\1/p' input);;
  ps) echo "$@" >> args; separator=; printf '{"project": "main", "runs": ['
    for f in runs/*; do [ -f "$f" ] || continue
      printf '%s{"run_spec": {"run_name": "%s"}, "status": "running"}' "$separator" "${f#runs/}"; separator=,; done
    echo ']}';;
  stop) [ -f runs/$3 ] && rm runs/$3;;
esac)sh");
  expect_works("dstack.yaml");
  const auto task = nlohmann::json::parse(said("input"));
  EXPECT_EQ(task["type"], "task");
  EXPECT_EQ(task["backends"], nlohmann::json({"lambda"}));
  EXPECT_EQ(task["regions"], nlohmann::json({"Texas, US"}));
  EXPECT_EQ(task["instance_types"], nlohmann::json({"gpu_2x_\"a100\""}));
  EXPECT_EQ(task["spot_policy"], "on-demand");
  EXPECT_EQ(task["resources"]["gpu"], nlohmann::json::parse(R"({"name": "A100", "count": 2})"));
  EXPECT_EQ(task["env"], nlohmann::json({{"ECHOLINE_TOKEN", "se'cret"}}));

  // dstack lists 100 runs at most.
  for (int i = 0; i < 100; ++i) std::ofstream(folder / "runs" / fmt::format("other-{}", i)) << "";
  const auto provider = load("configs/providers/dstack.yaml");
  const auto listed = ProviderDriver(*provider).listed("");
  ASSERT_TRUE(listed);
  EXPECT_FALSE(listed->complete);
}

TEST_F(ExecTest, ABidRentsASpotMachine) {
  const auto provider =
      make("start: [sh, -c, 'cat > \"$STAND_IN/input\"; echo x']\nstdin: '{spot} {pricing}'\nstop: [x]\nlist: [x]\n");
  ASSERT_TRUE(provider);
  ProviderDriver driver(*provider);
  LaunchSpec bid = spec();
  bid.bid_usd_per_hour = 0.4;
  provider->start(1, bid);
  ASSERT_TRUE(driver.next<Started>());
  EXPECT_EQ(said("input"), "true spot");
}

// A cloud that is not named would choose another machine than the one that was priced.
TEST_F(ExecTest, AWordThatTheOfferDoesNotStateStartsNothing) {
  const auto provider = make(
      "start: [touch, started, \"{host}\"]\nstdin: '{zone_or_null} {region_json} {cloud}'\n"
      "stop: [x]\nlist: [x]\n");
  ASSERT_TRUE(provider);
  ProviderDriver driver(*provider);
  LaunchSpec unnamed = spec();
  unnamed.offer.region = "";
  provider->start(1, unnamed);
  const auto failed = driver.next<StartFailed>();
  ASSERT_TRUE(failed);
  EXPECT_FALSE(failed->retryable || failed->perhaps_rented);
  EXPECT_THAT(failed->error.message(), HasSubstr("uses {host}, {region}, which offer 'o1' does not state"));
  EXPECT_EQ(said("started"), "");
}

TEST_F(ExecTest, AFailedCommandsEffectIsLookedUp) {
  program("begin", "cat > /dev/null; echo \"x1 $1 up\" > list; echo broken >&2; exit 3");
  program("end", "[ -f stuck ] && exit 4; : > list");
  program("show", "[ -f blind ] && exit 5; cat list 2>/dev/null; exit 0");
  const auto provider = make(
      "start: [begin, \"{name}\"]\nstop: [end, \"{instance}\"]\nlist: [show]\nended: [over]\nwatch_every: 100 ms\n");
  ASSERT_TRUE(provider);
  ProviderDriver driver(*provider);
  provider->start(1, spec());
  auto failed = driver.next<StartFailed>();
  ASSERT_TRUE(failed);
  EXPECT_FALSE(failed->perhaps_rented);  // it was there, and is no more
  EXPECT_EQ(said("list"), "");
  EXPECT_THAT(failed->error.message(), HasSubstr("broken"));
  std::ofstream(folder / "stuck") << "";
  provider->start(2, spec());
  EXPECT_TRUE(driver.next<StartFailed>()->perhaps_rented);
  provider->stop(3, {"exec:x1"}, {});
  EXPECT_TRUE(driver.next<StopFailed>());
  std::ofstream(folder / "blind") << "";
  EXPECT_FALSE(driver.listed("Run_A.1234abcd/")->complete);
  provider->stop(3, {"exec:x1"}, {});
  EXPECT_TRUE(driver.next<StopFailed>());
  std::filesystem::remove(folder / "blind");
  std::ofstream(folder / "list") << "";
  provider->stop(4, {"exec:x1"}, {});
  EXPECT_TRUE(driver.next<Stopped>()->absent);
  std::ofstream(folder / "list") << "no-name\n";
  EXPECT_FALSE(driver.listed("")->complete);

  // An ended instance is reported once.
  program("begin", "echo \"x2 $1 up\" > list; echo x2");
  provider->start(5, spec());
  ASSERT_TRUE(driver.next<Started>());
  program("other", "");
  std::ofstream(folder / "list") << "x2 run-a-1234abcd-7 over\n";
  const auto exited = driver.next<Exited>();
  ASSERT_TRUE(exited);
  EXPECT_EQ(exited->why, "over");
  EXPECT_TRUE(exited->still_rented);
}

TEST_F(ExecTest, AnUnusableFileIsRefusedWithTheReason) {
  std::ofstream(folder / "bad.yaml") << "start: []\nstopp: [a]\nlist: [b]\n";
  const auto made = make_provider("exec", {.file = folder / "bad.yaml"});
  ASSERT_FALSE(made);
  EXPECT_THAT(made.error().message(), HasSubstr("bad.yaml:1"));
  EXPECT_THAT(made.error().message(), HasSubstr("stopp"));
}

}  // namespace
}  // namespace echoline::provisioner

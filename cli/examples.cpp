// The table of examples. Help pages and manual pages read it.
#include "cli/examples.hpp"

#include <array>
#include <utility>

namespace echoline::cli {
namespace {

struct Entry {
  std::string_view path;                // the verb with the verbs above it, such as "delta diff"; "": the program
  std::array<const char*, 3> commands;  // at least two; null: none
};

constexpr Entry kExamples[] = {
    {"",
     {"echoline up configs/quickstart.yaml", "echoline plan configs/quickstart.yaml", "echoline report quickstart"}},
    {"adapter", {"echoline adapter list", "echoline adapter play guess"}},
    {"adapter bench",
     {"echoline adapter bench configs/quickstart.yaml", "echoline adapter bench countdown --options '{\"numbers\": 3}'",
      "echoline adapter bench process -- python3 task.py"}},
    {"adapter check",
     {"echoline adapter check configs/quickstart.yaml", "echoline adapter check countdown --options '{\"numbers\": 3}'",
      "echoline adapter check process -- python3 task.py"}},
    {"adapter list", {"echoline adapter list", "echoline adapter list countdown"}},
    {"adapter new",
     {"echoline adapter new sums --python", "echoline adapter new maze --python --turns --dir tasks",
      "echoline adapter new sums --c && cc -shared -fPIC -O2 -o sums.so sums.c"}},
    {"adapter play",
     {"echoline adapter play guess", "echoline adapter play run.yaml --held-out --problem 3 --reveal",
      "echoline adapter play code.yaml --ends input < solution.md"}},
    {"adapter poker", {"echoline adapter poker match tight random", "echoline adapter poker serve --port 18791"}},
    {"adapter poker match",
     {"echoline adapter poker match tight random", "echoline adapter poker match tight caller --pairs 10000 --json"}},
    {"adapter poker serve",
     {"echoline adapter poker serve --port 18791",
      "echoline adapter poker serve --port 18791 --player tight --hands 3000"}},
    {"adapter poker join",
     {"echoline adapter poker join localhost:18791",
      "echoline adapter poker join 192.0.2.7:18791 --player random --patience '1 min'"}},
    {"advise",
     {"echoline advise configs/sim/small.yaml",
      "echoline advise configs/sim/regions.yaml --minimise hours --budget 600",
      "echoline advise --like quickstart               # a run that has ended"}},
    {"apply", {"echoline apply plan.json --check", "echoline apply plan.json --price-tolerance 0.1"}},
    {"bundle", {"echoline bundle", "echoline bundle -o worker.tar.zst --without-engine"}},
    {"completion",
     {"source <(echoline completion bash)            # in ~/.bashrc",
      "echoline completion zsh > ~/.zfunc/_echoline  # with ~/.zfunc in $fpath",
      "echoline completion fish | source             # in ~/.config/fish/config.fish"}},
    {"config", {"echoline config reference", "echoline config schema > run-file.schema.json"}},
    {"config reference", {"echoline config reference", "echoline config reference > keys.md"}},
    {"config schema", {"echoline config schema", "echoline config schema > run-file.schema.json"}},
    {"delta",
     {"echoline delta diff step-100 step-101 -o 101.patch", "echoline delta apply step-100 101.patch -o step-101-copy",
      "echoline delta inspect 101.patch"}},
    {"delta apply",
     {"echoline delta apply step-100 101.patch -o step-101-copy",
      "echoline delta apply step-100 101.patch --in-place"}},
    {"delta diff",
     {"echoline delta diff step-100 step-101 -o 101.patch",
      "echoline delta diff step-100.safetensors step-101.safetensors -o 101.patch"}},
    {"delta fold",
     {"echoline delta fold 101.patch 102.patch 103.patch -o 100-to-103.patch",
      "echoline delta fold 101.patch 102.patch -o 100-to-102.patch \\\n    --base step-100.safetensors"}},
    {"delta inspect", {"echoline delta inspect 101.patch", "echoline delta inspect 101.patch --json"}},
    {"delta verify", {"echoline delta verify step-100 101.patch", "echoline delta verify step-101 101.patch --json"}},
    {"doctor", {"echoline doctor", "echoline doctor configs/quickstart.yaml --set learner.device=cuda"}},
    {"down", {"echoline down quickstart", "echoline down runs/quickstart --json", "echoline down --all-runs"}},
    {"evaluate",
     {"echoline evaluate quickstart", "echoline evaluate quickstart --checkpoint 60 --samples 8",
      "echoline evaluate --config configs/quickstart.yaml \\\n    --url http://127.0.0.1:8000/v1 --model qwen3 --api "
      "chat"}},
    {"learner",
     {"echoline learner configs/quickstart.yaml", "echoline learner configs/quickstart.yaml --resume --json"}},
    {"ledger", {"echoline ledger show quickstart", "echoline ledger costs quickstart --charges"}},
    {"ledger costs", {"echoline ledger costs quickstart", "echoline ledger costs quickstart --charges"}},
    {"ledger hosts", {"echoline ledger hosts", "echoline ledger hosts quickstart --json"}},
    {"ledger show", {"echoline ledger show quickstart", "echoline ledger show runs/quickstart --json"}},
    {"man", {"echoline man up | man -l -", "echoline man --folder ~/.local/share/man/man1"}},
    {"model", {"echoline model info --preset qwen3-8b", "echoline model export quickstart -o trained"}},
    {"model export", {"echoline model export quickstart -o trained", "echoline model export quickstart@60 -o step-60"}},
    {"model generate",
     {"echoline model generate trained --prompt '12+30=' --max-tokens 8",
      "echoline model generate trained --prompt 'Name a river.' --chat"}},
    {"model info", {"echoline model info --preset qwen3-8b", "echoline model info trained --train --bf16"}},
    {"model init",
     {"echoline model init --preset tiny-64 -o new-model",
      "echoline model init --preset bytes-256 --seed 7 -o new-model"}},
    {"node",
     {"echoline node 192.0.2.1:7070 --name b --folder node-b --bind ::",
      "echoline node 192.0.2.1:7070 --name b --folder node-b --token-file b.token"}},
    {"plan",
     {"echoline plan configs/quickstart.yaml",
      "echoline plan configs/quickstart.yaml --set staleness.budget=6 -o plan.json"}},
    {"publish", {"echoline publish quickstart saved/step_7 --version 7", "echoline publish quickstart --watch saved"}},
    {"relay",
     {"echoline relay --key-file relay.key",
      "echoline relay --listen 0.0.0.0:443 --key-file relay.key \\\n    --run-rate '200 Mbit/s'"}},
    {"report",
     {"echoline report quickstart", "echoline report quickstart --html",
      "echoline report runs/quickstart --svg quickstart.svg"}},
    {"rescore",
     {"echoline rescore quickstart", "echoline rescore my-run --config changed.yaml",
      "echoline rescore my-run --adapter math --out grades.jsonl"}},
    {"sim",
     {"echoline sim run configs/sim/small.yaml", "echoline sim --workers 8,64 --learner-up '2 Gbit/s' --payload '2 GB'",
      "echoline sim soak --seeds 1000"}},
    {"sim market", {"echoline sim market --seeds 1000", "echoline sim market --seeds 20000 --json"}},
    {"sim run",
     {"echoline sim run configs/sim/small.yaml", "echoline sim run --like quickstart --set staleness.budget=1",
      "echoline sim run configs/sim/regions.yaml --html regions.html"}},
    {"sim soak", {"echoline sim soak --seeds 1000", "echoline sim soak --seeds 20000 --twice 100"}},
    {"status", {"echoline status", "echoline status quickstart --json"}},
    {"store", {"echoline store ls s3://policies/my-run", "echoline store pull s3://policies/my-run model --follow"}},
    {"store export",
     {"echoline store export s3://policies/my-run -o trained",
      "echoline store export /mnt/nfs/my-run --version 60 -o step-60"}},
    {"store fetch",
     {"echoline store fetch s3://policies/my-run --version 60 -o step-60.safetensors",
      "echoline store fetch /mnt/nfs/my-run --version 60 -o step-60"}},
    {"store ls",
     {"echoline store ls s3://policies/my-run", "echoline store ls policies --endpoint http://127.0.0.1:9000 --json"}},
    {"store prune",
     {"echoline store prune s3://policies/my-run --deltas 20 --anchors 3",
      "echoline store prune /mnt/nfs/my-run --deltas 100 --anchors 10 --dry-run"}},
    {"store pull",
     {"echoline store pull s3://policies/my-run model",
      "echoline store pull s3://policies/my-run model --follow \\\n    --hook 'curl -X POST "
      "http://127.0.0.1:8000/reload'"}},
    {"store verify", {"echoline store verify s3://policies/my-run", "echoline store verify /mnt/nfs/my-run --json"}},
    {"sweep",
     {"echoline sweep configs/quickstart.yaml --over S=3,6",
      "echoline sweep configs/quickstart.yaml --over S=3,6 --over 'kappa=1,S-1' \\\n    --seeds 3"}},
    {"token",
     {"echoline token quickstart --instance my-gpu",
      "export ECHOLINE_TOKEN=$(echoline token quickstart --instance my-gpu)"}},
    {"up",
     {"echoline up configs/quickstart.yaml", "echoline up configs/quickstart.yaml --set run.steps=50",
      "echoline up configs/quickstart.yaml --resume"}},
    {"worker",
     {"ECHOLINE_TOKEN=... echoline worker --join 192.0.2.7:7070 --name my-gpu",
      "echoline worker --join 192.0.2.7:7070 --token-file token --engine vllm \\\n    --engine-command 'vllm serve "
      "{model} "
      "--port {port}'"}},
};

}  // namespace

std::span<const char* const> examples_of(std::string_view path) {
  for (const Entry& entry : kExamples) {
    if (entry.path != path) continue;
    const std::size_t count = entry.commands.back() != nullptr ? 3 : 2;
    return std::span(entry.commands).first(count);
  }
  return {};
}

}  // namespace echoline::cli

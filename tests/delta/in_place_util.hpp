// Checkpoints on disk and deltas between them, for the tests of in_place.hpp and new_checkpoint.hpp.
#pragma once
#include <sys/wait.h>

#include <csignal>
#include <cstdio>
#include <functional>
#include <map>

#include "base/files.hpp"
#include "delta/checkpoint.hpp"
#include "delta/in_place.hpp"
#include "delta/safetensors.hpp"
#include "tests/delta/delta_test_util.hpp"

namespace echoline::delta::test {

namespace fs = std::filesystem;

// File name to content, of a folder's regular files, or of one file.
using Content = std::map<std::string, std::string>;

inline Content content_of(const fs::path& path) {
  Content content;
  const auto add = [&](const fs::path& file) {
    auto bytes = read_file(file);
    EXPECT_TRUE(bytes) << (bytes ? "" : bytes.error().message());
    if (bytes) content.emplace(file.filename().string(), std::move(bytes).value());
  };
  if (!fs::is_directory(path)) {
    add(path);
    return content;
  }
  for (const auto& entry : fs::directory_iterator(path))
    if (entry.is_regular_file()) add(entry.path());
  return content;
}

// Puts bytes back into files that exist, without replacing them.
inline void restore(const fs::path& folder, const Content& content) {
  for (const auto& [name, bytes] : content) {
    std::fstream file(folder / name, std::ios::binary | std::ios::in | std::ios::out);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  }
}

// About 300 kB: several types, an empty tensor and a scalar.
inline OwnedState small_state(std::uint64_t seed) {
  OwnedState state =
      zeros({spec("block.0.weight", DType::kBF16, {100, 500}), spec("block.1.weight", DType::kBF16, {7, 333}),
             spec("embedding", DType::kBF16, {120, 400}), spec("empty", DType::kF32, {0, 4}),
             spec("head", DType::kF32, {200, 100}), spec("mask", DType::kU8, {20'001}), spec("step", DType::kI64, {})});
  Random random(seed);
  fill_random(state, random);
  return state;
}

// A copy of the state in which some elements of most tensors differ, and all of one tensor.
inline OwnedState changed_state(const OwnedState& from, std::uint64_t seed) {
  OwnedState state = copy(from.view());
  Random random(seed);
  flip_elements(state, 0.01, random);
  for (std::byte& b : state.mutable_bytes(*state.find("mask"))) b = static_cast<std::byte>(random.next());
  state.seal();
  return state;
}

inline Blob delta_between(const OwnedState& a, const OwnedState& b) {
  auto patch = encode_delta(a.view(), b.view());
  EXPECT_TRUE(patch) << (patch ? "" : patch.error().message());
  return std::move(patch).value();
}

inline std::optional<Digest> digest_at(const fs::path& path) {
  const auto checkpoint = Checkpoint::open(path);
  EXPECT_TRUE(checkpoint) << (checkpoint ? "" : checkpoint.error().message());
  if (!checkpoint) return std::nullopt;
  return *digest_state(checkpoint->view());
}

// A checkpoint as a file, and as a sharded folder with a model's other files.
class CheckpointsOnDisk {
 public:
  explicit CheckpointsOnDisk(const OwnedState& state) {
    const Status file = write_safetensors(this->file(), state.view(), {{"format", "pt"}, {"note", "kept"}});
    const Status shards = write_checkpoint(folder(), state.view(), Bytes{90'000});
    EXPECT_TRUE(file && shards);
    write_raw(folder() / "config.json", "{\"model_type\": \"qwen3\"}");
    write_raw(folder() / "tokenizer.json", "{}");
  }
  fs::path file() const { return root_ / "policy.safetensors"; }
  fs::path folder() const { return root_ / "model"; }
  fs::path root() const { return root_.path(); }

 private:
  TemporaryFolder root_;
};

// Runs `work` in a child process, which ends after it. Returns the raw wait status.
inline int in_child(const std::function<void()>& work) {
  std::fflush(nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    work();
    ::_exit(0);
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return status;
}

// Applies the patch in a child process that kills itself at the `count`-th occurrence (from 1) of `stage`.
inline void apply_until(const fs::path& path, const Blob& patch, ApplyStage stage, int count = 1) {
  const int status = in_child([&] {
    ApplyOptions options;
    options.observer = [&](ApplyStage reached) {
      if (reached == stage && --count == 0) ::kill(::getpid(), SIGKILL);
    };
    (void)apply_in_place(path, patch, options);
  });
  EXPECT_TRUE(WIFSIGNALED(status)) << "the child ended before that stage";
}

}  // namespace echoline::delta::test

// A store in memory with a publisher and replicas, for tests.
#pragma once
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>

#include "delta/checkpoint.hpp"
#include "store/policy_writer.hpp"
#include "store/replica.hpp"
#include "tests/store/memory_store.hpp"
#include "tests/store/policies.hpp"

namespace echoline::store {

inline const std::string kHolderA(32, 'a'), kHolderB(32, 'b');

class World {
 public:
  explicit World(const std::filesystem::path& where = place())
      : folder_(where / fmt::format("echoline_world_{}", ::getpid())) {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }
  ~World() { std::filesystem::remove_all(folder_); }

  // In memory if the system has a folder for that: a replica syncs its files at each step.
  static std::filesystem::path place() {
    const std::filesystem::path memory = "/dev/shm";
    return ::access(memory.c_str(), W_OK) == 0 ? memory : std::filesystem::path(testing::TempDir());
  }
  // Waits cost no real time.
  Waiter waiter() {
    return [this](Duration pause) {
      clock.advance(pause);
      return ok();
    };
  }
  Result<std::unique_ptr<PolicyWriter>> open_writer(MemoryStore& store, Version resumed_at = {},
                                                    const std::string& holder = kHolderA) {
    return PolicyWriter::open(store, key,
                              {.run_id = "run", .holder = holder, .settings = settings, .resumed_at = resumed_at},
                              clock, waiter());
  }
  // The digest of the weights in a replica's folder.
  static delta::Digest digest_in(const std::filesystem::path& folder) {
    const auto checkpoint = delta::Checkpoint::open(folder);
    if (!checkpoint) return {};
    return *delta::digest_state(checkpoint->view());
  }
  std::filesystem::path folder(const std::string& name) const { return folder_ / name; }

  ManualClock clock;
  StoreSettings settings;
  SharedObjects objects;
  Policies policies;
  overlay::trust::SigningKey key{overlay::trust::SigningKey::Seed{}};

 private:
  std::filesystem::path folder_;
};

}  // namespace echoline::store

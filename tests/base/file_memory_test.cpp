// Memory in unnamed files.
#include "base/file_memory.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <fstream>

namespace echoline {
namespace {

using ::testing::HasSubstr;
namespace fs = std::filesystem;

class FileMemoryTest : public ::testing::Test {
 protected:
  FileMemoryTest() { fs::create_directories(folder_); }
  ~FileMemoryTest() override { fs::remove_all(folder_); }

  // Bytes of anonymous memory that this process has.
  static std::uint64_t anonymous_bytes() {
    std::ifstream file("/proc/self/status");
    for (std::string line; std::getline(file, line);)
      if (line.starts_with("RssAnon:")) return 1024 * std::stoull(line.substr(line.find_first_of("0123456789")));
    return 0;
  }

  const fs::path folder_ = fs::temp_directory_path() / ("file_memory_test_" + std::to_string(::getpid()));
};

TEST_F(FileMemoryTest, GrowsInOnePieceAndKeepsItsBytes) {
  const auto memory = FileMemory::make(folder_, 1'000'000);
  ASSERT_TRUE(memory) << memory.error().message();
  EXPECT_TRUE(fs::is_empty(folder_)) << "the file has a name";
  const auto first = (*memory)->extend(100), second = (*memory)->extend(300'000);
  ASSERT_TRUE(first && second);
  EXPECT_EQ(first->data() + first->size(), second->data());
  EXPECT_EQ((*second)[299'999], std::byte{0});
  std::ranges::fill(*first, std::byte{1});
  std::ranges::fill(*second, std::byte{2});
  (*memory)->close();
  EXPECT_EQ((*memory)->bytes().size(), 300'100u);
  EXPECT_EQ((*memory)->bytes()[99], std::byte{1});
  EXPECT_EQ((*memory)->bytes()[300'099], std::byte{2});
  EXPECT_FALSE((*memory)->extend(1)) << "after close()";
}

TEST_F(FileMemoryTest, ErrorsNameTheFolderAndTheLimit) {
  const auto missing = FileMemory::make(folder_ / "missing", 10);
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, Code::kNotFound);
  EXPECT_THAT(missing.error().message(), HasSubstr((folder_ / "missing").string()));
  const auto memory = FileMemory::make(folder_, 10);
  ASSERT_TRUE(memory && (*memory)->extend(4));
  const auto beyond = (*memory)->extend(7);
  ASSERT_FALSE(beyond);
  EXPECT_EQ(beyond.error().code, Code::kExhausted);
  EXPECT_THAT(beyond.error().message(), HasSubstr("7 more bytes after 4, the limit is 10"));
  EXPECT_TRUE((*memory)->extend(6));
}

TEST_F(FileMemoryTest, IsNotAnonymous) {
  constexpr std::uint64_t kBytes = 64 << 20;
  const std::uint64_t before = anonymous_bytes();
  ASSERT_GT(before, 0u);
  const auto memory = FileMemory::allocate(folder_, kBytes);
  ASSERT_TRUE(memory) << memory.error().message();
  std::memset(memory->get(), 7, kBytes);
  EXPECT_LT(anonymous_bytes(), before + kBytes / 8);
  EXPECT_EQ(memory->get()[kBytes - 1], std::byte{7});
}

TEST_F(FileMemoryTest, MayBeEmpty) {
  EXPECT_TRUE(FileMemory::allocate(folder_, 0));
  const auto memory = FileMemory::make(folder_, 1);
  ASSERT_TRUE(memory);
  (*memory)->close();
  EXPECT_TRUE((*memory)->bytes().empty());
}

}  // namespace
}  // namespace echoline

// A node's folder: written frames come back, torn records are cut off, and useless files are removed.
#include "overlay/uv/disk.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "tests/overlay/folder.hpp"
#include "tests/overlay/made.hpp"

namespace echoline::overlay {
namespace {

using testing::ElementsAre;
using testing::SizeIs;

namespace fs = std::filesystem;

// The disk's answers. Read them after the disk is destroyed, when all work is done.
struct Answers {
  std::vector<Status> saved;
  std::vector<std::pair<std::uint32_t, bool>> spooled;
  std::vector<std::pair<std::uint32_t, Result<Slice>>> chunk_read;
};

class DiskTest : public testing::Test {
 protected:
  void open() { disk = *Disk::open(folder.path()); }
  void start() {
    disk->start(
        {[this](Status s) { answers.saved.push_back(std::move(s)); },
         [this](PublicationId, std::uint32_t chunk, Status s) { answers.spooled.emplace_back(chunk, s.has_value()); },
         [this](PublicationId, std::uint32_t chunk, Result<Slice> s) { answers.chunk_read.emplace_back(chunk, s); }});
  }
  void spool_opening(const Made& made) {
    disk->spool({made.id, Slice(encode_control(made.opening)), std::nullopt, 0, {}});
  }
  void spool_chunk(const Made& made, std::uint32_t i) {
    disk->spool(
        {made.id, made.chunk(i).head, i, i * std::uint64_t{made.announcement.chunk_bytes}, made.chunks[i].data});
  }
  void spool(const Made& made) {
    spool_opening(made);
    for (std::uint32_t i = 0; i < made.chunks.size(); ++i) spool_chunk(made, i);
    disk->spool({made.id, Slice(encode_control(made.closing)), std::nullopt, 0, {}});
  }
  void finish() { disk.reset(); }
  // One number for each frame that a new process finds: the index of a chunk, or -1 for a frame of another type.
  std::vector<int> recovered(bool keep = true) {
    std::vector<int> found;
    open();
    disk->recover([&](const Frame& frame) {
      const bool is_chunk = frame.type == FrameType::kChunk;
      found.push_back(is_chunk ? static_cast<int>(frame.chunk.index) : -1);
      if (is_chunk) bodies.push_back(frame.body);
      return keep;
    });
    return found;
  }
  fs::path first_file_with(const char* extension) {
    for (const auto& entry : fs::directory_iterator(folder / "spool"))
      if (entry.path().extension() == extension) return entry.path();
    return {};
  }

  TemporaryFolder folder;
  std::unique_ptr<Disk> disk;
  Answers answers;
  std::vector<Slice> bodies;
};

TEST_F(DiskTest, KeepsTheState) {
  open();
  EXPECT_EQ(disk->read_state().error().code, Code::kNotFound);
  start();
  disk->save({"one"});
  disk->save({std::string("two\0", 4)});
  finish();
  ASSERT_THAT(answers.saved, SizeIs(2));
  EXPECT_TRUE(answers.saved[1].has_value());
  open();
  EXPECT_EQ(*disk->read_state(), std::string("two\0", 4));
}

TEST_F(DiskTest, ReturnsStoredChunks) {
  const Made made = make(full(0), 3000), other = make(delta(1, 0), 2000);
  open();
  start();
  spool(made);
  spool(other);
  disk->read_chunk({made.id, 2, 2048, 3000 - 2048});
  disk->read_chunk({made.id, 9, 9 * 1024, 1024});  // never written
  finish();
  EXPECT_THAT(answers.spooled, ElementsAre(std::pair(0u, true), std::pair(1u, true), std::pair(2u, true),
                                           std::pair(0u, true), std::pair(1u, true)));
  ASSERT_THAT(answers.chunk_read, SizeIs(2));
  const auto equal_bytes = [](const Slice& a, const Slice& b) {
    return std::equal(a.bytes().begin(), a.bytes().end(), b.bytes().begin(), b.bytes().end());
  };
  EXPECT_TRUE(equal_bytes(*answers.chunk_read[0].second, made.chunks[2].data));
  EXPECT_EQ(answers.chunk_read[1].second.error().code, Code::kIo);
  auto found = recovered();
  std::sort(found.begin(), found.end());
  EXPECT_THAT(found, ElementsAre(-1, -1, -1, -1, 0, 0, 1, 1, 2));
  ASSERT_THAT(bodies, SizeIs(5));
  const Payload payload(*disk->open_payload(made.id), 3000);
  EXPECT_TRUE(equal_bytes(*payload.bytes(), Slice(made.payload)));
}

TEST_F(DiskTest, APayloadStaysReadableAfterItWasDropped) {
  const Made made = make(full(0), 3000);
  open();
  start();
  spool(made);
  finish();
  open();
  const Payload payload(*disk->open_payload(made.id), 3000);
  start();
  disk->drop({made.id});
  finish();
  EXPECT_TRUE(first_file_with(".log").empty());
  EXPECT_TRUE(first_file_with(".payload").empty());
  const Slice bytes = *payload.bytes();
  EXPECT_TRUE(std::equal(made.payload.begin(), made.payload.end(), bytes.bytes().begin(), bytes.bytes().end()));
  open();
  EXPECT_EQ(disk->open_payload(made.id).error().code, Code::kNotFound);
}

// A record torn by a crash is cut off, so that later records can be read.
TEST_F(DiskTest, WritesGoOnAfterATornRecord) {
  const Made made = make(full(0), 3000);
  open();
  start();
  spool_opening(made);
  spool_chunk(made, 0);
  spool_chunk(made, 1);
  finish();
  fs::resize_file(first_file_with(".log"), fs::file_size(first_file_with(".log")) - 5);
  EXPECT_THAT(recovered(), ElementsAre(-1, 0));
  start();
  spool_chunk(made, 2);
  finish();
  EXPECT_THAT(recovered(), ElementsAre(-1, 0, 2));
}

TEST_F(DiskTest, RecoveryEndsAtARecordWithoutItsBytes) {
  const Made made = make(full(0), 3000);
  open();
  start();
  spool(made);
  finish();
  fs::resize_file(first_file_with(".payload"), 1500);
  EXPECT_THAT(recovered(), ElementsAre(-1, 0));
  fs::remove(first_file_with(".payload"));
  EXPECT_THAT(recovered(), ElementsAre(-1));
}

TEST_F(DiskTest, UselessSpoolsAreDeleted) {
  open();
  start();
  spool(make(full(0), 3000));
  finish();
  std::ofstream(folder / "spool" / "00.log") << "nonsense";
  EXPECT_THAT(recovered(false), SizeIs(5));
  EXPECT_TRUE(first_file_with(".log").empty());
  EXPECT_TRUE(first_file_with(".payload").empty());
}

TEST_F(DiskTest, ReportsFailedWrites) {
  open();
  fs::remove(folder / "spool");
  std::ofstream(folder / "spool") << "a file where the folder should be";
  start();
  spool_chunk(make(full(0), 100), 0);
  finish();
  EXPECT_THAT(answers.spooled, ElementsAre(std::pair(0u, false)));
  EXPECT_FALSE(Disk::open(folder.path()).has_value());
}

}  // namespace
}  // namespace echoline::overlay

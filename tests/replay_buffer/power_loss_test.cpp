// Power loss at every moment: SQLite runs on a file system in memory that tracks synced writes. A snapshot keeps the
// synced writes and a random part of the rest, in pieces of a disk sector. It must contain every acknowledged
// submission.
#include <sqlite3.h>

#include <cstring>
#include <map>
#include <new>
#include <set>

#include "base/random.hpp"
#include "tests/replay_buffer/fixtures.hpp"

namespace echoline::replay_buffer {
namespace {

constexpr std::size_t kSectorBytes = 512;  // bytes that reach the disk together

struct MemoryFile {
  struct Write {
    std::size_t offset;
    std::string bytes;
  };
  std::string live, synced;    // the content as written, and as of the last sync
  std::vector<Write> pending;  // since the last sync

  static void apply(std::string& content, const Write& write) {
    if (content.size() < write.offset + write.bytes.size()) content.resize(write.offset + write.bytes.size());
    content.replace(write.offset, write.bytes.size(), write.bytes);
  }
  std::string after_power_loss(Random& random) const {
    std::string content = synced;
    for (const Write& write : pending)
      for (std::size_t sector = 0; sector < write.bytes.size(); sector += kSectorBytes)
        if (random.below(2) == 0) apply(content, {write.offset + sector, write.bytes.substr(sector, kSectorBytes)});
    return content;
  }
};

struct Disk {
  std::map<std::string, MemoryFile> files;
  std::function<void()> before_write;  // a moment at which the power may fail
};
Disk* disk = nullptr;

struct Handle {
  sqlite3_file base;
  MemoryFile* file;
};
MemoryFile& file_of(sqlite3_file* handle) { return *reinterpret_cast<Handle*>(handle)->file; }

int file_close(sqlite3_file*) { return SQLITE_OK; }
int file_read(sqlite3_file* handle, void* out, int amount, sqlite3_int64 offset) {
  const std::string& live = file_of(handle).live;
  const auto bytes = static_cast<std::size_t>(amount), begin = static_cast<std::size_t>(offset);
  const std::size_t available = begin < live.size() ? std::min(bytes, live.size() - begin) : 0;
  std::memcpy(out, live.data() + std::min(begin, live.size()), available);
  std::memset(static_cast<char*>(out) + available, 0, bytes - available);
  return available == bytes ? SQLITE_OK : SQLITE_IOERR_SHORT_READ;
}
int file_write(sqlite3_file* handle, const void* bytes, int amount, sqlite3_int64 offset) {
  if (disk->before_write) disk->before_write();
  MemoryFile::Write write{static_cast<std::size_t>(offset),
                          {static_cast<const char*>(bytes), static_cast<std::size_t>(amount)}};
  MemoryFile::apply(file_of(handle).live, write);
  file_of(handle).pending.push_back(std::move(write));
  return SQLITE_OK;
}
// Takes effect at once, as on a file system that journals sizes.
int file_truncate(sqlite3_file* handle, sqlite3_int64 size) {
  MemoryFile& file = file_of(handle);
  file.live.resize(static_cast<std::size_t>(size));
  file.synced = file.live;
  file.pending.clear();
  return SQLITE_OK;
}
int file_sync(sqlite3_file* handle, int) {
  MemoryFile& file = file_of(handle);
  for (const MemoryFile::Write& write : file.pending) MemoryFile::apply(file.synced, write);
  file.pending.clear();
  return SQLITE_OK;
}
int file_size(sqlite3_file* handle, sqlite3_int64* size) {
  *size = static_cast<sqlite3_int64>(file_of(handle).live.size());
  return SQLITE_OK;
}
int file_lock(sqlite3_file*, int) { return SQLITE_OK; }
int file_reserved(sqlite3_file*, int* reserved) {
  *reserved = 0;
  return SQLITE_OK;
}
int file_control(sqlite3_file*, int, void*) { return SQLITE_NOTFOUND; }
int file_sector(sqlite3_file*) { return static_cast<int>(kSectorBytes); }
int file_device(sqlite3_file*) { return SQLITE_IOCAP_POWERSAFE_OVERWRITE; }

const sqlite3_io_methods kMethods = {1,           file_close, file_read, file_write,    file_truncate, file_sync,
                                     file_size,   file_lock,  file_lock, file_reserved, file_control,  file_sector,
                                     file_device, nullptr,    nullptr,   nullptr,       nullptr,       nullptr,
                                     nullptr};

int disk_open(sqlite3_vfs*, const char* name, sqlite3_file* handle, int flags, int* out_flags) {
  static int temporary = 0;
  const std::string path = name != nullptr ? name : fmt::format("temporary-{}", temporary++);
  new (handle) Handle{{&kMethods}, &disk->files[path]};
  if (out_flags != nullptr) *out_flags = flags;
  return SQLITE_OK;
}
int disk_delete(sqlite3_vfs*, const char* name, int) {
  disk->files.erase(name);
  return SQLITE_OK;
}
int disk_access(sqlite3_vfs*, const char* name, int, int* result) {
  *result = disk->files.contains(name) ? 1 : 0;
  return SQLITE_OK;
}
int disk_full_path(sqlite3_vfs*, const char* name, int size, char* out) {
  sqlite3_snprintf(size, out, "%s", name);
  return SQLITE_OK;
}

void install() {
  static sqlite3_vfs vfs = *sqlite3_vfs_find(nullptr);  // clock and randomness stay the system's
  vfs.iVersion = 2;
  vfs.szOsFile = sizeof(Handle);
  vfs.pNext = nullptr;
  vfs.zName = "memory-disk";
  vfs.xOpen = disk_open, vfs.xDelete = disk_delete, vfs.xAccess = disk_access, vfs.xFullPathname = disk_full_path;
  ASSERT_EQ(sqlite3_vfs_register(&vfs, 1), SQLITE_OK);
}

TEST(PowerLoss, AcknowledgedSubmissionsSurvive) {
  constexpr std::uint32_t kGroupSize = 2;
  constexpr std::uint32_t kBudget = 1000;  // learner steps: no group becomes too stale
  constexpr std::uint64_t kStep = 500;     // after every version and consumption
  Disk the_disk;
  disk = &the_disk;
  install();
  // Only their names are used; the content is in `the_disk`.
  const TemporaryFolder folder(TemporaryFolder::On::kMemory), crashed(TemporaryFolder::On::kMemory);
  const std::string path = folder.file().string();

  struct Snapshot {
    std::string database, log;
    std::uint64_t groups_acknowledged, groups_consumed;
  };
  std::vector<Snapshot> snapshots;
  Random random(9);
  std::uint64_t acknowledged = 0, consumed = 0;
  const auto take_snapshot = [&] {
    snapshots.push_back({the_disk.files[path].after_power_loss(random),
                         the_disk.files[path + "-wal"].after_power_loss(random), acknowledged, consumed});
  };
  {
    auto buffer = must(ReplayBuffer::open(path, options_for(kGroupSize, kBudget)));
    the_disk.before_write = [&] {
      if (random.below(60) == 0) take_snapshot();
    };
    for (; acknowledged < 300;) {
      auto group = group_of(acknowledged, acknowledged, kGroupSize);
      for (Trajectory& trajectory : group) trajectory.set_text(std::string(random.below(6000), 'x'));
      must(buffer->add(group));
      ++acknowledged;
      if (random.below(10) == 0) take_snapshot();
      if (acknowledged % 4 != 0) continue;
      must(buffer->consume(acknowledged, std::vector{GroupId{consumed}}));
      ++consumed;
    }
    the_disk.before_write = nullptr;
    take_snapshot();
  }
  ASSERT_GT(snapshots.size(), 100u);

  const std::string crashed_path = crashed.file().string();
  std::size_t unacknowledged_snapshots = 0;  // with a group stored but not acknowledged
  for (const Snapshot& snapshot : snapshots) {
    SCOPED_TRACE(fmt::format("power fails after {} groups were acknowledged and {} consumed",
                             snapshot.groups_acknowledged, snapshot.groups_consumed));
    the_disk.files.erase(crashed_path);
    the_disk.files.erase(crashed_path + "-wal");
    the_disk.files[crashed_path].live = the_disk.files[crashed_path].synced = snapshot.database;
    the_disk.files[crashed_path + "-wal"].live = the_disk.files[crashed_path + "-wal"].synced = snapshot.log;
    auto buffer = must(ReplayBuffer::open(crashed_path, options_for(kGroupSize, kBudget)));
    const Counts counts = must(buffer->counts(kStep));
    EXPECT_GE(counts.stored, snapshot.groups_acknowledged * kGroupSize);
    EXPECT_LE(counts.stored, (snapshot.groups_acknowledged + 1) * kGroupSize);
    EXPECT_GE(counts.consumed, snapshot.groups_consumed * kGroupSize);
    EXPECT_LE(counts.consumed, (snapshot.groups_consumed + 1) * kGroupSize);
    EXPECT_EQ(counts.incomplete_groups, 0u);
    unacknowledged_snapshots += counts.stored > snapshot.groups_acknowledged * kGroupSize;
    if (counts.admissible_groups == 0) continue;
    const auto batch =
        must(buffer->sample(kStep, static_cast<std::uint32_t>(std::min<std::uint64_t>(counts.admissible_groups, 60))));
    std::uint64_t expected_group = counts.consumed / kGroupSize;
    for (const Group& group : batch->groups) EXPECT_EQ(group.id, GroupId{expected_group++});
  }
  fmt::print("{} snapshots, {} of them with a group stored but not yet acknowledged\n", snapshots.size(),
             unacknowledged_snapshots);
}

}  // namespace
}  // namespace echoline::replay_buffer

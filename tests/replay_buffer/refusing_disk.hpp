// A SQLite file system for tests whose writes or syncs fail on demand.
#pragma once
#include <sqlite3.h>

#include <atomic>
#include <cerrno>
#include <new>

namespace echoline::replay_buffer {

// While an object exists, newly opened databases use it. One object at a time.
class RefusingDisk {
 public:
  RefusingDisk() {
    real_ = sqlite3_vfs_find(nullptr);
    vfs_ = *real_;
    vfs_.zName = "refusing-disk";
    vfs_.pNext = nullptr;
    vfs_.szOsFile = static_cast<int>(sizeof(File)) + real_->szOsFile;
    vfs_.xOpen = [](sqlite3_vfs*, const char* name, sqlite3_file* file, int flags, int* out_flags) {
      new (file) File{{nullptr}};
      const int rc = real_->xOpen(real_, name, real(file), flags, out_flags);
      if (real(file)->pMethods != nullptr) file->pMethods = &kMethods;
      return rc;
    };
    sqlite3_vfs_register(&vfs_, 1);
  }
  ~RefusingDisk() {
    accept();
    sqlite3_vfs_register(real_, 1);
    sqlite3_vfs_unregister(&vfs_);
  }
  RefusingDisk(const RefusingDisk&) = delete;
  RefusingDisk& operator=(const RefusingDisk&) = delete;

  void be_full() { write_ = SQLITE_FULL, errno_ = ENOSPC; }
  void fail_writes() { write_ = SQLITE_IOERR_WRITE, errno_ = EIO; }
  // Syncs fail with ENOSPC, as on a file system that allocates late.
  void fail_syncs(int error) { sync_ = SQLITE_IOERR_FSYNC, errno_ = error; }
  void accept() { write_ = sync_ = SQLITE_OK, errno_ = 0; }
  // Writes and syncs that were refused.
  int refused() const { return refused_; }

 private:
  struct File {
    sqlite3_file base;  // the real file follows
  };
  static sqlite3_file* real(sqlite3_file* file) {
    return reinterpret_cast<sqlite3_file*>(reinterpret_cast<File*>(file) + 1);
  }
  static int answer(int code, int (*go_on)(sqlite3_file*, const void*, int, sqlite3_int64), sqlite3_file* file,
                    const void* bytes, int amount, sqlite3_int64 offset) {
    if (code == SQLITE_OK) return go_on(real(file), bytes, amount, offset);
    ++refused_;
    errno = errno_;
    return code;
  }

  static inline std::atomic<int> write_ = SQLITE_OK, sync_ = SQLITE_OK, errno_ = 0, refused_ = 0;
  static inline sqlite3_vfs* real_ = nullptr;
  sqlite3_vfs vfs_{};
  static inline const sqlite3_io_methods kMethods = {
      1,
      [](sqlite3_file* f) { return real(f)->pMethods->xClose(real(f)); },
      [](sqlite3_file* f, void* out, int n, sqlite3_int64 at) { return real(f)->pMethods->xRead(real(f), out, n, at); },
      [](sqlite3_file* f, const void* bytes, int n, sqlite3_int64 at) {
        return answer(write_, real(f)->pMethods->xWrite, f, bytes, n, at);
      },
      [](sqlite3_file* f, sqlite3_int64 size) { return real(f)->pMethods->xTruncate(real(f), size); },
      [](sqlite3_file* f, int flags) {
        if (sync_ == SQLITE_OK) return real(f)->pMethods->xSync(real(f), flags);
        ++refused_;
        errno = errno_;
        return sync_.load();
      },
      [](sqlite3_file* f, sqlite3_int64* size) { return real(f)->pMethods->xFileSize(real(f), size); },
      [](sqlite3_file* f, int lock) { return real(f)->pMethods->xLock(real(f), lock); },
      [](sqlite3_file* f, int lock) { return real(f)->pMethods->xUnlock(real(f), lock); },
      [](sqlite3_file* f, int* reserved) { return real(f)->pMethods->xCheckReservedLock(real(f), reserved); },
      [](sqlite3_file* f, int op, void* argument) { return real(f)->pMethods->xFileControl(real(f), op, argument); },
      [](sqlite3_file* f) { return real(f)->pMethods->xSectorSize(real(f)); },
      [](sqlite3_file* f) { return real(f)->pMethods->xDeviceCharacteristics(real(f)); },
      nullptr,
      nullptr,
      nullptr,
      nullptr,
      nullptr,
      nullptr};
};

}  // namespace echoline::replay_buffer

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

  void be_full() {
    write_code_ = SQLITE_FULL;
    errno_ = ENOSPC;
  }
  void fail_writes() {
    write_code_ = SQLITE_IOERR_WRITE;
    errno_ = EIO;
  }
  // Syncs fail with `error`, for example ENOSPC, as on a file system that allocates late.
  void fail_syncs(int error) {
    sync_code_ = SQLITE_IOERR_FSYNC;
    errno_ = error;
  }
  void accept() {
    write_code_ = SQLITE_OK;
    sync_code_ = SQLITE_OK;
    errno_ = 0;
    until_failure_ = 0;
  }
  // The n-th write or sync from now, counted from 1, fails once with an I/O error.
  void fail_nth(int n) {
    errno_ = EIO;
    until_failure_ = n;
  }
  // Whether the call of fail_nth() was reached.
  bool has_failed_nth() const { return until_failure_ <= 0; }
  // Writes and syncs that were refused.
  int refused() const { return refused_; }

 private:
  struct File {
    sqlite3_file base;  // the real file follows
  };
  static sqlite3_file* real(sqlite3_file* file) {
    return reinterpret_cast<sqlite3_file*>(reinterpret_cast<File*>(file) + 1);
  }
  // Counts a write or sync. True for the one that fail_nth() has chosen.
  static bool is_nth() { return until_failure_ > 0 && --until_failure_ == 0; }
  static int answer(int code, int (*go_on)(sqlite3_file*, const void*, int, sqlite3_int64), sqlite3_file* file,
                    const void* bytes, int amount, sqlite3_int64 offset) {
    if (code == SQLITE_OK && is_nth()) code = SQLITE_IOERR_WRITE;
    if (code == SQLITE_OK) return go_on(real(file), bytes, amount, offset);
    ++refused_;
    errno = errno_;
    return code;
  }

  static inline std::atomic<int> write_code_ = SQLITE_OK, sync_code_ = SQLITE_OK, errno_ = 0, refused_ = 0,
                                 until_failure_ = 0;
  static inline sqlite3_vfs* real_ = nullptr;
  sqlite3_vfs vfs_{};
  static inline const sqlite3_io_methods kMethods = {
      1,
      [](sqlite3_file* file) { return real(file)->pMethods->xClose(real(file)); },
      [](sqlite3_file* file, void* out, int amount, sqlite3_int64 offset) {
        return real(file)->pMethods->xRead(real(file), out, amount, offset);
      },
      [](sqlite3_file* file, const void* bytes, int amount, sqlite3_int64 offset) {
        return answer(write_code_, real(file)->pMethods->xWrite, file, bytes, amount, offset);
      },
      [](sqlite3_file* file, sqlite3_int64 size) { return real(file)->pMethods->xTruncate(real(file), size); },
      [](sqlite3_file* file, int flags) {
        int code = sync_code_;
        if (code == SQLITE_OK && is_nth()) code = SQLITE_IOERR_FSYNC;
        if (code == SQLITE_OK) return real(file)->pMethods->xSync(real(file), flags);
        ++refused_;
        errno = errno_;
        return code;
      },
      [](sqlite3_file* file, sqlite3_int64* size) { return real(file)->pMethods->xFileSize(real(file), size); },
      [](sqlite3_file* file, int lock) { return real(file)->pMethods->xLock(real(file), lock); },
      [](sqlite3_file* file, int lock) { return real(file)->pMethods->xUnlock(real(file), lock); },
      [](sqlite3_file* file, int* reserved) { return real(file)->pMethods->xCheckReservedLock(real(file), reserved); },
      [](sqlite3_file* file, int op, void* argument) {
        return real(file)->pMethods->xFileControl(real(file), op, argument);
      },
      [](sqlite3_file* file) { return real(file)->pMethods->xSectorSize(real(file)); },
      [](sqlite3_file* file) { return real(file)->pMethods->xDeviceCharacteristics(real(file)); },
      nullptr,
      nullptr,
      nullptr,
      nullptr,
      nullptr,
      nullptr};
};

}  // namespace echoline::replay_buffer

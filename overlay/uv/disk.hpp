// A node's folder on disk: its state file and its spools. A spool is a publication on disk. One thread does all work,
// in the order of the requests.
//
//   state                 encode(WorkerState) or encode(LearnerState), replaced atomically
//   spool/<id>.log        frames of a publication: announcement, chunks without their bytes, manifest
//   spool/<id>.payload    the chunks' bytes, each at its offset
#pragma once
#include <condition_variable>
#include <deque>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "overlay/action.hpp"

namespace echoline::overlay {

class Disk {
 public:
  // Answers; called on the disk's thread.
  struct Events {
    std::function<void(Status)> saved;
    std::function<void(PublicationId, std::uint32_t chunk, Status)> spooled;
    std::function<void(PublicationId, std::uint32_t chunk, Result<Slice>)> chunk_read;
  };

  // Creates the folders that are missing. Fails with kIo.
  static Result<std::unique_ptr<Disk>> open(const std::filesystem::path& folder);
  ~Disk();  // finishes all requests

  // Call read_state() and recover() before start(). kNotFound: there is no state file.
  Result<std::string> read_state() const;
  // Passes every readable frame of every spool to `on_frame`, chunks with their bytes. `on_frame` verifies hashes and
  // signatures, and returns whether the spool must be kept. A spool is cut at its first unreadable frame, and deleted
  // if `on_frame` returns false for all its frames.
  void recover(const std::function<bool(Frame)>& on_frame);
  void start(Events events);

  // Requests; thread-safe, and they return at once. The event saved, spooled or chunk_read reports the result; drop()
  // has no event.
  void save(act::SaveState save);
  void spool(act::Spool spool);
  void read_chunk(const act::ReadChunk& read_chunk);
  void drop(const act::DropSpool& drop);
  // An open descriptor of a payload, which stays readable after drop(). Any thread.
  Result<std::shared_ptr<const int>> open_payload(const PublicationId& id) const;

 private:
  static constexpr std::size_t kOpenSpoolsMax = 16;  // their files stay open between requests
  struct SpoolFiles {                                // descriptors
    int log = -1, payload = -1;
  };
  explicit Disk(std::filesystem::path folder) : folder_(std::move(folder)) {}
  void run_jobs();
  void push(std::function<void()> job);
  Result<SpoolFiles> files_of(const PublicationId& id);
  Status write(const act::Spool& spool);
  Result<Slice> read(const act::ReadChunk& read_chunk);
  std::filesystem::path path_of(const PublicationId& id, std::string_view ending) const;

  std::filesystem::path folder_;
  Events events_;
  std::map<PublicationId, SpoolFiles> open_spools_;  // used only on the disk's thread
  std::thread thread_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> jobs_;  // under mutex_
  bool stopping_ = false;                   // under mutex_
};

}  // namespace echoline::overlay

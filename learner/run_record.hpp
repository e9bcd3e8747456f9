// The folder of a run: what happened (events.jsonl), what was measured (metrics.jsonl), how it stands (status.json).
#pragma once
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.hpp"
#include "base/result.hpp"
#include "learner/alarms.hpp"

namespace echoline::learner {

inline constexpr int kReportSchemaVersion = 1;
inline constexpr std::size_t kRowsPendingMax = 16 << 20;  // bytes a file

// Thread-safe. One process writes a run at a time: open() takes a lock that ends with the process.
class RunRecord {
 public:
  // Opens the run's folder for writing. `resume`: go on with what is there (kNotFound when there is nothing);
  // otherwise an earlier run of the same name is kept beside it as <name>.1, <name>.2, ... kUnavailable when another
  // process runs it right now.
  // `patience`: how long to wait for a process that holds the lock, and may be about to end.
  static Result<std::unique_ptr<RunRecord>> open(const std::filesystem::path& folder, bool resume,
                                                 Duration patience = {});
  ~RunRecord();

  const std::filesystem::path& folder() const { return folder_; }
  // Where the earlier run went, empty when there was none.
  const std::filesystem::path& moved_to() const { return moved_to_; }

  // Appends {"unix_s":..., "event":..., ...fields}; fields must be an object. Of a row of more than kRowBytesMax
  // (learner/row_file.hpp) its names and numbers are written and `bytes_left_out`; this holds for metric() as well.
  void event(std::string_view kind, nlohmann::json fields = nlohmann::json::object());
  // Appends {"unix_s":..., "kind":..., ...fields} to the measurements that reports are made from. An alarm that begins
  // with it is told, and becomes an event.
  void metric(std::string_view kind, nlohmann::json fields);
  // The kinds of the alarms that go on; a resumed run knows those of the rows before.
  std::vector<std::string> alarms() const;
  // The learner's own disk refuses what `part` of the run writes: an alarm, disk_full or disk_failing, that says what
  // is full and where. It lasts until `error` is null. Repeated calls change nothing.
  void disk(std::string_view part, std::uint64_t step, const Error* error);
  // Writes out the rows that could not be written when they came: kExhausted or kIo while the disk refuses them. Up to
  // kRowsPendingMax wait in memory, further ones are lost.
  Status written();
  // Replaces status.json.
  void status(const nlohmann::json& status);
  // Replaces topology.dot.
  void topology(const std::string& dot);
  Status report(const nlohmann::json& report);

 private:
  // A JSON Lines file that grows.
  struct Rows {
    std::filesystem::path path;
    int fd = -1;
    std::string pending;  // not on disk yet; may begin within a row
    std::uint64_t lost = 0;
    Status write_out();
  };
  struct DiskAlarm {
    std::string kind;
    TimePoint since;
  };

  RunRecord() = default;
  void append(Rows& rows, nlohmann::json fields);
  void replace(std::string_view name, std::string_view content, bool& failing);
  std::filesystem::path folder_, moved_to_;
  int lock_ = -1;
  mutable std::mutex mutex_;
  Alarms alarms_;
  std::map<std::string, DiskAlarm, std::less<>> disk_;  // by part
  Rows events_, metrics_;
  bool status_fails_ = false, topology_fails_ = false;
};

// What runs write for others to read: whatever bytes a text in it has, this is JSON.
std::string json_text(const nlohmann::json& value, int indent = -1);

// Runs of the same name that were moved aside and can be resumed: "runs/a.2 (step 40), runs/a.1 (step 7)", newest
// first; empty when there is none.
std::string earlier_runs(const std::filesystem::path& folder);
// What to add to "there is nothing to resume": where they are and what to do with them; empty when there is none.
std::string earlier_hint(const std::filesystem::path& folder);

// Whether a learner holds the run's lock right now.
bool is_running(const std::filesystem::path& folder);

// A JSON file of a run whose root is an object; kNotFound when it is not there, kCorrupt when it is something else.
Result<nlohmann::json> read_json_object(const std::filesystem::path& path);

}  // namespace echoline::learner

// The folder of a run: its events (events.jsonl), measurements (metrics.jsonl) and state (status.json).
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
inline constexpr std::size_t kPendingBytesMax = 16 << 20;  // of rows that wait for the disk, per file

// Thread-safe. One process writes a run at a time: open() takes a lock that ends with the process.
class RunRecord {
 public:
  // Opens the run's folder for writing. With `resume`, continues the existing run (kNotFound if there is none).
  // Otherwise an earlier run of the same name is moved to <name>.1, <name>.2, ... kUnavailable: another process runs it
  // now. `patience`: how long to wait for a process that holds the lock and may end soon.
  static Result<std::unique_ptr<RunRecord>> open(const std::filesystem::path& folder, bool resume,
                                                 Duration patience = {});
  ~RunRecord();

  const std::filesystem::path& folder() const { return folder_; }
  // The new folder of the earlier run; empty if there was none.
  const std::filesystem::path& moved_to() const { return moved_to_; }

  // Appends {"unix_s":..., "event":..., ...fields}; `fields` must be an object. If a row exceeds kRowBytesMax
  // (learner/row_file.hpp), only its names and numbers are written, with `bytes_left_out`. The same holds for metric().
  void event(std::string_view kind, nlohmann::json fields = nlohmann::json::object());
  // Appends {"unix_s":..., "kind":..., ...fields} to the measurements for reports. If an alarm begins with the row, it
  // is logged and becomes an event.
  void metric(std::string_view kind, nlohmann::json fields);
  // The kinds of the current alarms; a resumed run knows those of its earlier rows.
  std::vector<std::string> alarms() const;
  // The learner's disk refuses writes of `part` of the run. Raises the alarm disk_full or disk_failing, with reason and
  // place, until `error` is null. Repeated calls change nothing.
  void set_disk_alarm(std::string_view part, std::uint64_t step, const Error* error);
  // Writes rows that could not be written before. kExhausted or kIo while the disk refuses them. Up to kPendingBytesMax
  // of them wait in memory; further rows are lost.
  Status write_pending_rows();
  // Replaces status.json.
  void write_status(const nlohmann::json& status);
  // Replaces topology.dot.
  void write_topology(const std::string& dot);
  Status write_report(const nlohmann::json& report);

 private:
  // A growing JSON Lines file.
  struct Rows {
    std::filesystem::path path;
    int fd = -1;
    std::string pending;     // not on disk yet; may begin inside a row
    std::uint64_t lost = 0;  // number of rows
    Status write_out();
  };
  struct DiskAlarm {
    std::string kind;
    TimePoint since;
  };

  RunRecord() = default;
  void append(Rows& rows, nlohmann::json fields);
  void replace(std::string_view name, std::string_view content, bool& is_failing);
  std::filesystem::path folder_, moved_to_;
  int lock_fd_ = -1;
  mutable std::mutex mutex_;
  Alarms alarms_;
  std::map<std::string, DiskAlarm, std::less<>> disk_alarms_;  // by part
  Rows events_, metrics_;
  bool status_fails_ = false, topology_fails_ = false;
};

// JSON text for files of a run. Always valid JSON, even if a string in `value` is not UTF-8.
std::string json_text(const nlohmann::json& value, int indent = -1);

// Lists moved runs of the same name that can be resumed, newest first: "runs/a.2 (step 40), runs/a.1 (step 7)". Empty
// if there are none.
std::string earlier_runs(const std::filesystem::path& folder);
// Text for an error about a missing run: the folders of moved runs of this name, and how to resume them. Empty if there
// are none.
std::string earlier_runs_hint(const std::filesystem::path& folder);

// Whether a learner holds the run's lock now.
bool is_running(const std::filesystem::path& folder);

// Reads a JSON file of a run. kNotFound: no file. kCorrupt: its root is not an object.
Result<nlohmann::json> read_json_object(const std::filesystem::path& path);

}  // namespace echoline::learner

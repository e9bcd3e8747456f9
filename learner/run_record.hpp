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
// Limit on the bytes of one file's rows that wait in memory, because they could not be written.
inline constexpr std::size_t kPendingBytesMax = 16 << 20;

// Thread-safe. One process writes a run at a time: open() takes a lock that ends with the process.
class RunRecord {
 public:
  // Opens the run's folder for writing. With `resume`, continues the existing run (kNotFound if there is none).
  // Otherwise an earlier run of the same name is moved to the first free of <name>.1, <name>.2 and so on. Fails with
  // kUnavailable if another process writes this run. `patience`: how long to wait for that process, which may end soon.
  // `before_move` is called before an earlier run is moved; if it fails, nothing is moved.
  static Result<std::unique_ptr<RunRecord>> open(const std::filesystem::path& folder, bool resume,
                                                 Duration patience = {},
                                                 const std::function<Status()>& before_move = {});
  ~RunRecord();

  const std::filesystem::path& folder() const { return folder_; }
  // An error if the folder was deleted or moved: the run then cannot store its results, while its machines cost money.
  Status check_folder() const;
  // The new folder of the earlier run; empty if there was none.
  const std::filesystem::path& moved_to() const { return moved_to_; }

  // Appends {"unix_s":..., "event":..., ...fields}; `fields` must be an object. If a row exceeds kRowBytesMax
  // (learner/row_file.hpp), only its kind, step, version, worker and offer are written, and the row's full size as
  // `bytes_left_out`. The same holds for append_metric().
  void append_event(std::string_view kind, nlohmann::json fields = nlohmann::json::object());
  // Appends {"unix_s":..., "kind":..., ...fields} to the measurements for reports. If an alarm begins with the row, it
  // is logged and becomes an event.
  void append_metric(std::string_view kind, nlohmann::json fields);
  // The kinds of the current alarms. After a resume they include alarms that began in earlier rows and have not ended.
  std::vector<std::string> alarms() const;
  // Raises the alarm disk_full or disk_failing: the learner's disk refuses to write `part` of the run, such as
  // "checkpoint". The alarm's text has the error, which names the file. A later call with a null `error` ends the
  // alarm; a repeated call changes nothing. `step`: the current step, for the event.
  void set_disk_alarm(std::string_view part, std::uint64_t step, const Error* error);
  // Writes rows that could not be written before. kExhausted or kIo while the disk refuses them. Rows of up
  // to kPendingBytesMax bytes in all wait in memory; further rows are lost.
  Status write_pending_rows();
  // Replaces status.json.
  void write_status(const nlohmann::json& status);
  // Replaces topology.dot.
  void write_topology(const std::string& dot);
  // Replaces report.json.
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
  void append_row(Rows& rows, nlohmann::json fields);
  // Replaces a file that readers poll. Sets `is_failing` to whether this attempt failed, so that a lasting failure is
  // logged once.
  void replace(std::string_view name, std::string_view content, bool& is_failing);
  std::filesystem::path folder_, moved_to_;
  int lock_fd_ = -1;
  mutable std::mutex mutex_;
  Alarms alarms_;
  std::map<std::string, DiskAlarm, std::less<>> disk_alarms_;  // by part
  Rows events_, metrics_;
  bool status_is_failing_ = false, topology_is_failing_ = false;  // see replace()
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

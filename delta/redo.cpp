// Writes a journal's records to the files; in_place.cpp calls it.
#include "delta/redo.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>

#include "base/parallel.hpp"
#include "delta/digest.hpp"
#include "delta/pending_file.hpp"

namespace echoline::delta {
namespace {

constexpr std::string_view kOperation = "apply in place";
constexpr std::uint64_t kPageBytes = 4096;          // whole pages are written, because a system writes these anyway
constexpr std::uint64_t kWindowBytes = 8u << 20;    // of a file or tensor, in memory at a time
constexpr std::uint64_t kRangeBytesMax = 1u << 20;  // most bytes of one write to a file
static_assert(kWindowBytes % kLeafBytes == 0);

unsigned clamped_threads(unsigned threads) { return std::clamp(threads, 1u, 256u); }

Status read_all_at(int fd, std::span<std::byte> bytes, std::uint64_t offset, const std::filesystem::path& path) {
  while (!bytes.empty()) {
    const ssize_t read_bytes = ::pread(fd, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (read_bytes < 0 && errno == EINTR) continue;
    if (read_bytes < 0) return os_error(kOperation, path);
    if (read_bytes == 0) return fail(Code::kIo, kOperation, "{}: the file became shorter", path.string());
    bytes = bytes.subspan(static_cast<std::size_t>(read_bytes));
    offset += static_cast<std::uint64_t>(read_bytes);
  }
  return ok();
}

}  // namespace

std::optional<Digest> digest_after(const Checkpoint& checkpoint, const Journal& journal, unsigned threads) {
  const StateView& state = checkpoint.view();
  struct Window {
    std::size_t tensor;
    std::uint64_t first_byte;  // within the tensor
  };
  std::vector<Window> windows;
  LeafDigests leaves = zeroed_leaf_digests(state);
  for (std::size_t i = 0; i < state.size(); ++i)
    for (std::uint64_t first_byte = 0; first_byte < state[i].bytes.size(); first_byte += kWindowBytes)
      windows.push_back({.tensor = i, .first_byte = first_byte});
  std::atomic<std::uint64_t> covered_bytes{0};  // bytes of records that are within tensors
  for_each_parallel(windows.size(), clamped_threads(threads), [&](unsigned, std::size_t window_index) {
    const std::size_t tensor = windows[window_index].tensor;
    const std::uint64_t first_byte = windows[window_index].first_byte;
    const ByteSpan tensor_bytes = state[tensor].bytes;
    const ByteSpan old = tensor_bytes.subspan(first_byte, std::min(kWindowBytes, tensor_bytes.size() - first_byte));
    const Checkpoint::Place place = checkpoint.place(tensor);
    const std::uint64_t begin = place.first_byte + first_byte, end = begin + old.size();  // of the window in the file
    const auto is_before = [&](const JournalRecord& record) {
      return record.file < place.file || (record.file == place.file && record.end() <= begin);
    };
    std::vector<std::byte> new_content;
    for (auto record = std::ranges::partition_point(journal.records, is_before);
         record != journal.records.end() && record->file == place.file && record->first_byte < end; ++record) {
      if (new_content.empty()) new_content.assign(old.begin(), old.end());
      apply_record(*record, begin, new_content, /*touched=*/[](std::uint64_t, std::uint64_t) {});
      covered_bytes += std::min(record->end(), end) - std::max(record->first_byte, begin);
    }
    digest_leaves(new_content.empty() ? old : ByteSpan(new_content), leaves[tensor].data() + first_byte / kLeafBytes);
  });
  std::uint64_t record_bytes = 0;
  for (const JournalRecord& record : journal.records) record_bytes += record.byte_count;
  if (covered_bytes != record_bytes) return std::nullopt;  // some bytes of records are outside all tensors
  return state_digest_of_leaves(state, leaves);
}

Redo::Redo(const Journal& journal, const std::vector<std::filesystem::path>& paths, const LockedFiles& files,
           const ApplyOptions& options)
    : journal_(journal), paths_(paths), files_(files), options_(options) {
  for (const JournalRecord& record : journal.records) total_bytes_ += record.byte_count;
}

Status Redo::run() {
  for_each_parallel(journal_.records.size(), clamped_threads(options_.threads), [&](unsigned, std::size_t i) {
    {
      const std::lock_guard lock(mutex_);
      if (error_) return;
    }
    const Status status = write(journal_.records[i]);
    const std::lock_guard lock(mutex_);
    if (!status && !error_) error_ = status.error();
    done_bytes_ += journal_.records[i].byte_count;
    if (options_.progress) options_.progress(done_bytes_, total_bytes_);
  });
  if (error_) return *error_;
  for (std::size_t i = 0; i < paths_.size(); ++i)
    if (::fsync(files_.fd(i)) != 0) return os_error(kOperation, paths_[i]);
  return ok();
}

Status Redo::write(const JournalRecord& record) {
  std::vector<std::byte> window;
  std::vector<bool> is_changed;  // by page of the window
  for (std::uint64_t window_begin = record.first_byte; window_begin < record.end(); window_begin += window.size()) {
    window.resize(static_cast<std::size_t>(std::min(record.end() - window_begin, kWindowBytes)));
    const std::uint64_t window_end = window_begin + window.size();
    const std::uint64_t first_page = window_begin / kPageBytes;
    const std::uint64_t last_page = (window_end - 1) / kPageBytes;
    is_changed.assign(static_cast<std::size_t>(last_page - first_page + 1), false);
    // A record that is not whole changes single elements. The bytes between them must stay, so they are read first.
    if (!record.whole) ECHO_TRY(read_all_at(files_.fd(record.file), window, window_begin, paths_[record.file]));
    apply_record(record, window_begin, window, [&](std::uint64_t begin, std::uint64_t end) {
      for (std::uint64_t page = begin / kPageBytes; page <= (end - 1) / kPageBytes; ++page)
        is_changed[static_cast<std::size_t>(page - first_page)] = true;
    });
    // Writes runs of changed pages, each with one call.
    for (std::size_t page = 0; page < is_changed.size();) {
      if (!is_changed[page]) {
        ++page;
        continue;
      }
      const std::size_t run_begin = page;
      while (page < is_changed.size() && is_changed[page] && (page - run_begin) * kPageBytes < kRangeBytesMax) ++page;
      // The first and the last page may be only partly in the window.
      const std::uint64_t begin = std::max((first_page + run_begin) * kPageBytes, window_begin);
      const std::uint64_t end = std::min((first_page + page) * kPageBytes, window_end);
      ECHO_TRY(write_all_at(files_.fd(record.file), std::span(window).subspan(begin - window_begin, end - begin), begin,
                            kOperation, paths_[record.file]));
      const std::lock_guard lock(mutex_);
      written_bytes_ += end - begin;
      if (options_.observer) options_.observer(ApplyStage::kRangeWritten);
    }
  }
  return ok();
}

}  // namespace echoline::delta

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
constexpr std::uint64_t kPageBytes = 4096;
constexpr std::uint64_t kWindowBytes = 8u << 20;
constexpr std::uint64_t kRangeBytesMax = 1u << 20;
static_assert(kWindowBytes % kLeafBytes == 0);

unsigned thread_count(const ApplyOptions& options) { return std::clamp(options.threads, 1u, 256u); }

Status read_all_at(int fd, std::span<std::byte> bytes, std::uint64_t offset, const std::filesystem::path& path) {
  while (!bytes.empty()) {
    const ssize_t n = ::pread(fd, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return os_error(kOperation, path);
    if (n == 0) return fail(Code::kIo, kOperation, "{}: the file became shorter", path.string());
    bytes = bytes.subspan(static_cast<std::size_t>(n));
    offset += static_cast<std::uint64_t>(n);
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
  std::vector<std::vector<Digest>> leaves(state.size());
  for (std::size_t i = 0; i < state.size(); ++i) {
    leaves[i].resize(leaf_count(state[i].bytes.size()));
    for (std::uint64_t at = 0; at < state[i].bytes.size(); at += kWindowBytes) windows.push_back({i, at});
  }
  std::atomic<std::uint64_t> covered_bytes{0};
  for_each_parallel(windows.size(), std::clamp(threads, 1u, 256u), [&](unsigned, std::size_t w) {
    const auto [tensor, first] = windows[w];
    const ByteSpan old = state[tensor].bytes.subspan(first, std::min(kWindowBytes, state[tensor].bytes.size() - first));
    const Checkpoint::Place place = checkpoint.place(tensor);
    const std::uint64_t begin = place.first_byte + first, end = begin + old.size();
    const auto is_before = [&](const JournalRecord& r) {
      return r.file < place.file || (r.file == place.file && r.end() <= begin);
    };
    std::vector<std::byte> new_content;
    for (auto r = std::ranges::partition_point(journal.records, is_before);
         r != journal.records.end() && r->file == place.file && r->first_byte < end; ++r) {
      if (new_content.empty()) new_content.assign(old.begin(), old.end());
      overlay(*r, begin, new_content, [](std::uint64_t, std::uint64_t) {});
      covered_bytes += std::min(r->end(), end) - std::max(r->first_byte, begin);
    }
    digest_leaves(new_content.empty() ? old : ByteSpan(new_content), leaves[tensor].data() + first / kLeafBytes);
  });
  std::uint64_t expected = 0;
  for (const JournalRecord& r : journal.records) expected += r.byte_count;
  if (covered_bytes != expected) return std::nullopt;
  return combine_leaves(state, leaves);
}

Redo::Redo(const Journal& journal, const std::vector<std::filesystem::path>& names, const LockedFiles& files,
           const ApplyOptions& options)
    : journal_(journal), names_(names), files_(files), options_(options) {
  for (const JournalRecord& r : journal.records) total_bytes_ += r.byte_count;
}

Status Redo::run() {
  for_each_parallel(journal_.records.size(), thread_count(options_), [&](unsigned, std::size_t i) {
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
  for (std::size_t i = 0; i < names_.size(); ++i)
    if (::fsync(files_.fd(i)) != 0) return os_error(kOperation, names_[i]);
  return ok();
}

Status Redo::write(const JournalRecord& r) {
  std::vector<std::byte> window;
  std::vector<bool> pages;  // of the window: changed pages
  for (std::uint64_t at = r.first_byte; at < r.end(); at += window.size()) {
    window.resize(static_cast<std::size_t>(std::min(r.end() - at, kWindowBytes)));
    const std::uint64_t first_page = at / kPageBytes;
    pages.assign(static_cast<std::size_t>((at + window.size() - 1) / kPageBytes - first_page + 1), false);
    if (!r.whole) ECHO_TRY(read_all_at(files_.fd(r.file), window, at, names_[r.file]));
    overlay(r, at, window, [&](std::uint64_t begin, std::uint64_t end) {
      for (std::uint64_t page = begin / kPageBytes; page <= (end - 1) / kPageBytes; ++page)
        pages[static_cast<std::size_t>(page - first_page)] = true;
    });
    for (std::size_t i = 0, next; i < pages.size(); i = next) {
      next = i + 1;
      if (!pages[i]) continue;
      while (next < pages.size() && pages[next] && (next - i) * kPageBytes < kRangeBytesMax) ++next;
      const std::uint64_t begin = std::max((first_page + i) * kPageBytes, at);
      const std::uint64_t end = std::min((first_page + next) * kPageBytes, at + window.size());
      ECHO_TRY(write_all_at(files_.fd(r.file), std::span(window).subspan(begin - at, end - begin), begin, kOperation,
                            names_[r.file]));
      const std::lock_guard lock(mutex_);
      written_bytes_ += end - begin;
      if (options_.observer) options_.observer(ApplyStage::kRangeWritten);
    }
  }
  return ok();
}

}  // namespace echoline::delta

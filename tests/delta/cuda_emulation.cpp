#include "tests/delta/cuda_emulation.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace echoline::delta::cuda::test {

EmulatedBackend::~EmulatedBackend() { ECHO_CHECK(blocks_.empty(), "{} blocks of memory leak", blocks_.size()); }

Result<std::byte*> EmulatedBackend::allocate(MemoryKind kind, std::uint64_t bytes) {
  ECHO_CHECK(bytes > 0);
  if (bytes > bytes_left_)
    return fail(Code::kExhausted, "allocate memory", "{} bytes are needed, {} are left", bytes, bytes_left_);
  void* memory = nullptr;
  ECHO_CHECK(posix_memalign(&memory, 256, bytes) == 0);  // exactly so much, for the address sanitizer
  std::memset(memory, 0xa5, bytes);
  if (bytes_left_ != kNever) bytes_left_ -= bytes;
  blocks_[static_cast<std::byte*>(memory)] = {kind, bytes};
  return static_cast<std::byte*>(memory);
}

void EmulatedBackend::release(MemoryKind kind, std::byte* memory) {
  const auto block = blocks_.find(memory);
  ECHO_CHECK(block != blocks_.end() && block->second.first == kind);
  run_until(now());  // cudaFree() too waits for all queued work
  if (bytes_left_ != kNever) bytes_left_ += block->second.second;
  blocks_.erase(block);
  std::free(memory);
}

bool EmulatedBackend::is_device(const std::byte* memory, std::uint64_t bytes) const {
  if (auto adopted = adopted_.upper_bound(memory); adopted != adopted_.begin()) {
    --adopted;
    if (memory + bytes <= adopted->first + adopted->second) return true;
  }
  auto block = blocks_.upper_bound(memory);
  if (block == blocks_.begin()) return false;
  --block;
  return block->second.first == MemoryKind::kDevice && memory + bytes <= block->first + block->second.second;
}

Status EmulatedBackend::check_address(const std::byte* memory, std::uint64_t bytes) const {
  if (is_device(memory, bytes)) return ok();
  return fail(Code::kInvalid, "check device address", "{} is not device memory", static_cast<const void*>(memory));
}

Status EmulatedBackend::count_call() {
  if (calls_until_failure_ == kNever) return ok();
  if (calls_until_failure_ > 0) {
    --calls_until_failure_;
    return ok();
  }
  if (failures_left_ == 0) return ok();
  --failures_left_;
  return fail(Code::kUnavailable, "emulated device", "this call was to fail");
}

Status EmulatedBackend::enqueue(std::function<void()> work) {
  ECHO_TRY(count_call());
  queue_.push_back(std::move(work));
  return ok();
}

void EmulatedBackend::run_queue_until(std::uint64_t end) {
  for (; work_done_ < end; ++work_done_) {
    queue_.front()();
    queue_.pop_front();
  }
}

void EmulatedBackend::run_until(const Point& point) {
  run_queue_until(point.work);
  if (!queue_.empty()) run_queue_until(work_done_ + random_.below(queue_.size() + 1));
  for (; copies_done_ < point.copies_out; ++copies_done_) {
    run_queue_until(copies_out_.front().after_work);
    copies_out_.front().copy();
    copies_out_.pop_front();
  }
}

Status EmulatedBackend::copy_in(std::byte* device, const std::byte* host, std::uint64_t bytes) {
  ECHO_CHECK(is_device(device, bytes));
  return enqueue([=] { std::memcpy(device, host, bytes); });
}

Status EmulatedBackend::copy_out(std::byte* host, const std::byte* device, std::uint64_t bytes) {
  ECHO_CHECK(is_device(device, bytes));
  ECHO_TRY(count_call());
  copies_out_.push_back({.after_work = now().work, .copy = [=] { std::memcpy(host, device, bytes); }});
  return ok();
}

Status EmulatedBackend::copy_within(std::byte* to, const std::byte* from, std::uint64_t bytes) {
  ECHO_CHECK(is_device(to, bytes) && is_device(from, bytes));
  return enqueue([=] { std::memcpy(to, from, bytes); });
}

Status EmulatedBackend::clear(std::byte* device, std::uint64_t bytes) {
  ECHO_CHECK(is_device(device, bytes));
  return enqueue([=] { std::memset(device, 0, bytes); });
}

std::vector<std::uint32_t> EmulatedBackend::random_order(std::uint32_t count) {
  std::vector<std::uint32_t> order(count);
  std::iota(order.begin(), order.end(), 0u);
  for (std::uint32_t i = count; i > 1; --i) std::swap(order[i - 1], order[random_.below(i)]);
  return order;
}

Status EmulatedBackend::run(const ExtractJob& job) {
  ECHO_CHECK(job.tile_count > 0);
  return enqueue([this, job] {
    ++kernels_run_;
    auto block = std::make_unique<LoopBlock>();
    for (const std::uint32_t tile : random_order(job.tile_count)) extract_block(*block, job, tile);
  });
}

Status EmulatedBackend::run(const GatherJob& job) {
  ECHO_CHECK(job.tile_count > 0);
  return enqueue([this, job] {
    ++kernels_run_;
    LoopWarp warp;
    for (const std::uint32_t tile : random_order(job.tile_count)) gather_warp(warp, job, tile);
  });
}

Status EmulatedBackend::run(const SwapJob& job) {
  ECHO_CHECK(job.chunk_count > 0);
  return enqueue([this, job] {
    ++kernels_run_;
    for (const std::uint32_t chunk : random_order(job.chunk_count))
      for (unsigned thread = 0; thread < kBlockThreads; ++thread) swap_thread(job, chunk, thread);
  });
}

Status EmulatedBackend::run(const HashJob& job) {
  ECHO_CHECK(job.leaf_count > 0);
  return enqueue([this, job] {
    ++kernels_run_;
    LoopWarp warp;
    for (const std::uint32_t leaf : random_order(job.leaf_count)) hash_warp(warp, job, leaf);
  });
}

Status EmulatedBackend::set_mark(unsigned mark) {
  ECHO_TRY(count_call());
  marks_.at(mark) = now();
  return ok();
}

Status EmulatedBackend::wait_for(unsigned mark) {
  ECHO_TRY(count_call());
  run_until(marks_.at(mark));
  return ok();
}

Status EmulatedBackend::finish() {
  ECHO_TRY(count_call());
  run_until(now());
  return ok();
}

}  // namespace echoline::delta::cuda::test

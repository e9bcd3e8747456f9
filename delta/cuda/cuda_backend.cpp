// The DeviceBackend of a CUDA device; device.cpp opens it.
#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/parallel.hpp"
#include "delta/cuda/launch.hpp"
#include "delta/cuda/memory.hpp"

namespace echoline::delta::cuda {
namespace {

Error cuda_error(cudaError_t error, std::string_view operation) {
  if (error == cudaErrorMemoryAllocation)
    return fail(Code::kExhausted, operation, "{}; free device memory or use a smaller state",
                cudaGetErrorString(error));
  return fail(Code::kUnavailable, operation,
              "{} ({}); if the error persists, restart the process and check the device with nvidia-smi",
              cudaGetErrorString(error), cudaGetErrorName(error));
}

#define CUDA_TRY(operation, call)                                              \
  do {                                                                         \
    if (const cudaError_t error_ = (call); error_ != cudaSuccess) {            \
      (void)cudaGetLastError(); /* clears it; later calls would report it   */ \
      return cuda_error(error_, operation);                                    \
    }                                                                          \
  } while (false)

class CudaBackend final : public DeviceBackend {
 public:
  explicit CudaBackend(int ordinal) : ordinal_(ordinal) {}

  ~CudaBackend() override {
    (void)cudaSetDevice(ordinal_);
    for (const cudaStream_t stream : {stream_, out_stream_})
      if (stream) (void)cudaStreamSynchronize(stream);
    if (order_) (void)cudaEventDestroy(order_);
    for (const cudaEvent_t event : marks_)
      if (event) (void)cudaEventDestroy(event);
    for (const Interval& interval : intervals_) {
      (void)cudaEventDestroy(interval.begin);
      (void)cudaEventDestroy(interval.end);
    }
    for (const cudaStream_t stream : {stream_, out_stream_})
      if (stream) (void)cudaStreamDestroy(stream);
  }

  Status open() {
    ECHO_TRY(make_device_current());
    cudaDeviceProp properties{};
    CUDA_TRY("open CUDA device", cudaGetDeviceProperties(&properties, ordinal_));
    name_ = fmt::format("{} (compute capability {}.{})", properties.name, properties.major, properties.minor);
    CUDA_TRY("open CUDA device", cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    CUDA_TRY("open CUDA device", cudaStreamCreateWithFlags(&out_stream_, cudaStreamNonBlocking));
    CUDA_TRY("open CUDA device", cudaEventCreateWithFlags(&order_, cudaEventDisableTiming));
    for (cudaEvent_t& event : marks_)
      CUDA_TRY("open CUDA device", cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return ok();
  }

  std::string_view name() const override { return name_; }

  Result<std::byte*> allocate(MemoryKind kind, std::uint64_t bytes) override {
    ECHO_TRY(make_device_current());
    void* memory = nullptr;
    const cudaError_t error = kind == MemoryKind::kDevice   ? cudaMalloc(&memory, bytes)
                              : bytes < kRegisteredBytesMin ? cudaMallocHost(&memory, bytes)
                                                            : allocate_registered(&memory, bytes);
    if (error == cudaSuccess) return static_cast<std::byte*>(memory);
    (void)cudaGetLastError();
    std::size_t free = 0, total = 0;
    if (kind == MemoryKind::kDevice && error == cudaErrorMemoryAllocation &&
        cudaMemGetInfo(&free, &total) == cudaSuccess)
      return fail(Code::kExhausted, "allocate device memory",
                  "{} bytes are needed, {} of {} are free on {}; free some or use another device", bytes, free, total,
                  name_);
    return cuda_error(error, fmt::format("allocate {} bytes of {} memory", bytes,
                                         kind == MemoryKind::kDevice ? "device" : "pinned host"));
  }

  void release(MemoryKind kind, std::byte* memory) override {
    (void)cudaSetDevice(ordinal_);
    std::uint64_t registered_bytes = 0;
    if (kind == MemoryKind::kPinnedHost) {
      const std::lock_guard lock(registered_mutex_);
      if (const auto node = registered_.extract(memory)) registered_bytes = node.mapped();
    }
    if (kind == MemoryKind::kDevice) {
      (void)cudaFree(memory);
    } else if (registered_bytes != 0) {
      (void)cudaHostUnregister(memory);
      ::madvise(memory, registered_bytes, MADV_DOFORK);
      std::free(memory);
    } else {
      (void)cudaFreeHost(memory);
    }
    (void)cudaGetLastError();
  }

  Status check_address(const std::byte* memory, std::uint64_t bytes) const override {
    for (const std::byte* address : {memory, memory + bytes - 1}) {
      cudaPointerAttributes attributes{};
      CUDA_TRY("check device address", cudaPointerGetAttributes(&attributes, address));
      const bool is_device = attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged;
      if (!is_device || attributes.device != ordinal_)
        return fail(Code::kInvalid, "check device address", "{} is not memory of device {}, {}",
                    static_cast<const void*>(address), ordinal_, name_);
    }
    return ok();
  }

  Status copy_in(std::byte* device, const std::byte* host, std::uint64_t bytes) override {
    ECHO_TRY(make_device_current());
    CUDA_TRY("copy to the device", cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream_));
    return ok();
  }
  Status copy_out(std::byte* host, const std::byte* device, std::uint64_t bytes) override {
    ECHO_TRY(make_device_current());
    ECHO_TRY(order_out_stream());
    CUDA_TRY("copy from the device", cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, out_stream_));
    return ok();
  }
  Status copy_within(std::byte* to, const std::byte* from, std::uint64_t bytes) override {
    return timed("copy on the device",
                 [&] { return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_); });
  }
  Status clear(std::byte* device, std::uint64_t bytes) override {
    ECHO_TRY(make_device_current());
    CUDA_TRY("clear device memory", cudaMemsetAsync(device, 0, bytes, stream_));
    return ok();
  }

  Status run(const ExtractJob& job) override {
    return timed("start the extraction kernel", [&] { return launch(job, stream_); });
  }
  Status run(const GatherJob& job) override {
    return timed("start the kernel that gathers changes", [&] { return launch(job, stream_); });
  }
  Status run(const SwapJob& job) override {
    return timed("start the application kernel", [&] { return launch(job, stream_); });
  }
  Status run(const HashJob& job) override {
    return timed("start the digest kernel", [&] { return launch(job, stream_); });
  }

  Status set_mark(unsigned mark) override {
    ECHO_TRY(make_device_current());
    ECHO_TRY(order_out_stream());  // so that the mark is after the work of both streams
    CUDA_TRY("record a CUDA event", cudaEventRecord(marks_[mark], out_stream_));
    return ok();
  }
  Status wait_for(unsigned mark) override {
    ECHO_TRY(make_device_current());
    CUDA_TRY("wait for the device", cudaEventSynchronize(marks_[mark]));
    return ok();
  }
  Status finish() override {
    ECHO_TRY(make_device_current());
    CUDA_TRY("wait for the device", cudaStreamSynchronize(stream_));
    CUDA_TRY("wait for the device", cudaStreamSynchronize(out_stream_));
    return ok();
  }

  double take_busy_s() override {
    double busy_s = 0;
    for (std::size_t i = 0; i < used_intervals_; ++i) {
      float ms = 0;
      if (cudaEventElapsedTime(&ms, intervals_[i].begin, intervals_[i].end) == cudaSuccess)
        busy_s += static_cast<double>(ms) / 1e3;
      else
        (void)cudaGetLastError();
    }
    used_intervals_ = 0;
    return busy_s;
  }

 private:
  struct Interval {
    cudaEvent_t begin = nullptr, end = nullptr;
  };

  // CUDA's current device is a property of the calling thread.
  Status make_device_current() const {
    CUDA_TRY("use CUDA device", cudaSetDevice(ordinal_));
    return ok();
  }

  // Pinned memory in huge pages, allocated by all processors in a sixth of the time of cudaMallocHost().
  cudaError_t allocate_registered(void** memory, std::uint64_t bytes) {
    constexpr std::size_t kHugePageBytes = 2u << 20, kPageBytes = 4096;
    bytes = round_up(bytes, kHugePageBytes);
    void* const block = std::aligned_alloc(kHugePageBytes, bytes);
    if (block == nullptr) return cudaErrorMemoryAllocation;
    ::madvise(block, bytes, MADV_HUGEPAGE);  // advice: without it, the pages are small
    // A write to every page makes the system allocate it.
    for_each_parallel(bytes / kHugePageBytes, thread_count(0), [&](unsigned, std::size_t i) {
      for (std::size_t offset = 0; offset < kHugePageBytes; offset += kPageBytes)
        static_cast<std::byte*>(block)[i * kHugePageBytes + offset] = std::byte{0};
    });
    if (const cudaError_t error = cudaHostRegister(block, bytes, cudaHostRegisterDefault); error != cudaSuccess) {
      std::free(block);
      return error;
    }
    // Otherwise a write after a fork would go to other pages than the pinned ones.
    ::madvise(block, bytes, MADV_DONTFORK);
    const std::lock_guard lock(registered_mutex_);
    registered_[static_cast<std::byte*>(block)] = bytes;
    *memory = block;
    return cudaSuccess;
  }

  // Makes copies to the host that are queued from now on wait for all earlier work, because they have their own stream.
  Status order_out_stream() {
    CUDA_TRY("record a CUDA event", cudaEventRecord(order_, stream_));
    CUDA_TRY("order CUDA streams", cudaStreamWaitEvent(out_stream_, order_, /*flags=*/0));
    return ok();
  }

  // Queues work between two events, from which take_busy_s() computes its time.
  template <class F>
  Status timed(std::string_view operation, F&& work) {
    ECHO_TRY(make_device_current());
    if (used_intervals_ == intervals_.size()) {
      Interval interval;
      CUDA_TRY("create a CUDA event", cudaEventCreate(&interval.begin));
      if (const cudaError_t error = cudaEventCreate(&interval.end); error != cudaSuccess) {
        (void)cudaEventDestroy(interval.begin);
        return cuda_error(error, "create a CUDA event");
      }
      intervals_.push_back(interval);
    }
    const Interval& interval = intervals_[used_intervals_];
    CUDA_TRY("record a CUDA event", cudaEventRecord(interval.begin, stream_));
    CUDA_TRY(operation, work());
    // The work is queued. Without its end event only its time is unknown, which is not an error.
    if (cudaEventRecord(interval.end, stream_) == cudaSuccess)
      ++used_intervals_;
    else
      (void)cudaGetLastError();
    return ok();
  }

  const int ordinal_;
  std::string name_;
  cudaStream_t stream_ = nullptr, out_stream_ = nullptr;  // out_stream_: for copies to the host
  cudaEvent_t order_ = nullptr;  // the end of the work for which the next copies to the host wait
  cudaEvent_t marks_[kMarks] = {};
  static constexpr std::uint64_t kRegisteredBytesMin = 64u << 20;  // smaller memory comes from cudaMallocHost()
  std::mutex registered_mutex_;                                    // any thread may free states in such memory
  std::map<std::byte*, std::uint64_t> registered_;                 // memory of allocate_registered(), and its bytes
  std::vector<Interval> intervals_;
  std::size_t used_intervals_ = 0;
};

}  // namespace

Result<std::shared_ptr<DeviceBackend>> open_backend(int ordinal) {
  int devices = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&devices); error != cudaSuccess) {
    (void)cudaGetLastError();
    return fail(Code::kUnavailable, "open CUDA device",
                "no CUDA device can be used: {}; expected a device with a driver for CUDA {}.{}",
                cudaGetErrorString(error), CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
  }
  if (ordinal < 0 || ordinal >= devices)
    return fail(Code::kUnavailable, "open CUDA device", "there is no device {}; this machine has {}, numbered from 0",
                ordinal, devices);
  auto backend = std::make_shared<CudaBackend>(ordinal);
  ECHO_TRY(backend->open());
  return std::shared_ptr<DeviceBackend>(std::move(backend));
}

}  // namespace echoline::delta::cuda

#include <cuda_runtime_api.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "delta/cuda/launch.hpp"
#include "delta/cuda/machine.hpp"

namespace echoline::delta::cuda {
namespace {

Error cuda_error(cudaError_t error, std::string_view operation) {
  if (error == cudaErrorMemoryAllocation)
    return fail(Code::kExhausted, operation, "{}; free device memory or use a smaller state",
                cudaGetErrorString(error));
  return fail(Code::kUnavailable, operation,
              "{} ({}); when it does not pass, restart the process, and look at the device with nvidia-smi",
              cudaGetErrorString(error), cudaGetErrorName(error));
}

#define CUDA_TRY(operation, call)                                             \
  do {                                                                        \
    if (const cudaError_t error_ = (call); error_ != cudaSuccess) {           \
      (void)cudaGetLastError(); /* or it would be reported again by others */ \
      return cuda_error(error_, operation);                                   \
    }                                                                         \
  } while (false)

class CudaMachine final : public Machine {
 public:
  explicit CudaMachine(int ordinal) : ordinal_(ordinal) {}

  ~CudaMachine() override {
    (void)cudaSetDevice(ordinal_);
    if (stream_) (void)cudaStreamSynchronize(stream_);
    for (const cudaEvent_t event : marks_)
      if (event) (void)cudaEventDestroy(event);
    for (const Interval& interval : intervals_) {
      (void)cudaEventDestroy(interval.begin);
      (void)cudaEventDestroy(interval.end);
    }
    if (stream_) (void)cudaStreamDestroy(stream_);
  }

  Status open() {
    ECHO_TRY(enter());
    cudaDeviceProp properties{};
    CUDA_TRY("open CUDA device", cudaGetDeviceProperties(&properties, ordinal_));
    name_ = fmt::format("{} (compute capability {}.{})", properties.name, properties.major, properties.minor);
    CUDA_TRY("open CUDA device", cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    for (cudaEvent_t& event : marks_)
      CUDA_TRY("open CUDA device", cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return ok();
  }

  std::string_view name() const override { return name_; }

  Result<std::byte*> allocate(Place place, std::uint64_t bytes) override {
    ECHO_TRY(enter());
    void* memory = nullptr;
    const cudaError_t error = place == Place::kDevice ? cudaMalloc(&memory, bytes) : cudaMallocHost(&memory, bytes);
    if (error == cudaSuccess) return static_cast<std::byte*>(memory);
    (void)cudaGetLastError();
    std::size_t free = 0, total = 0;
    if (place == Place::kDevice && error == cudaErrorMemoryAllocation && cudaMemGetInfo(&free, &total) == cudaSuccess)
      return fail(Code::kExhausted, "allocate device memory",
                  "{} bytes are needed, {} of {} are free on {}; free some or use another device", bytes, free, total,
                  name_);
    return cuda_error(error, fmt::format("allocate {} bytes of {} memory", bytes,
                                         place == Place::kDevice ? "device" : "pinned host"));
  }

  void release(Place place, std::byte* memory) override {
    (void)cudaSetDevice(ordinal_);
    if (place == Place::kDevice)
      (void)cudaFree(memory);
    else
      (void)cudaFreeHost(memory);
    (void)cudaGetLastError();
  }

  Status check_address(const std::byte* memory, std::uint64_t bytes) const override {
    for (const std::byte* at : {memory, memory + bytes - 1}) {
      cudaPointerAttributes found{};
      CUDA_TRY("check device address", cudaPointerGetAttributes(&found, at));
      if ((found.type != cudaMemoryTypeDevice && found.type != cudaMemoryTypeManaged) || found.device != ordinal_)
        return fail(Code::kInvalid, "check device address", "{} is not memory of device {}, {}",
                    static_cast<const void*>(at), ordinal_, name_);
    }
    return ok();
  }

  Status copy_in(std::byte* device, const std::byte* host, std::uint64_t bytes) override {
    ECHO_TRY(enter());
    CUDA_TRY("copy to the device", cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream_));
    return ok();
  }
  Status copy_out(std::byte* host, const std::byte* device, std::uint64_t bytes) override {
    ECHO_TRY(enter());
    CUDA_TRY("copy from the device", cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream_));
    return ok();
  }
  Status copy_within(std::byte* to, const std::byte* from, std::uint64_t bytes) override {
    return timed("copy on the device",
                 [&] { return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_); });
  }
  Status clear(std::byte* device, std::uint64_t bytes) override {
    ECHO_TRY(enter());
    CUDA_TRY("clear device memory", cudaMemsetAsync(device, 0, bytes, stream_));
    return ok();
  }

  Status run(const ExtractJob& job) override {
    return timed("start the extraction kernel", [&] { return launch(job, stream_); });
  }
  Status run(const SwapJob& job) override {
    return timed("start the application kernel", [&] { return launch(job, stream_); });
  }
  Status run(const HashJob& job) override {
    return timed("start the digest kernel", [&] { return launch(job, stream_); });
  }

  Status set_mark(unsigned mark) override {
    ECHO_TRY(enter());
    CUDA_TRY("record a CUDA event", cudaEventRecord(marks_[mark], stream_));
    return ok();
  }
  Status wait_for(unsigned mark) override {
    ECHO_TRY(enter());
    CUDA_TRY("wait for the device", cudaEventSynchronize(marks_[mark]));
    return ok();
  }
  Status finish() override {
    ECHO_TRY(enter());
    CUDA_TRY("wait for the device", cudaStreamSynchronize(stream_));
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

  // The current device belongs to the calling thread.
  Status enter() const {
    CUDA_TRY("use CUDA device", cudaSetDevice(ordinal_));
    return ok();
  }

  template <class F>
  Status timed(std::string_view operation, F&& work) {
    ECHO_TRY(enter());
    if (used_intervals_ == intervals_.size()) {
      Interval fresh;
      CUDA_TRY("create a CUDA event", cudaEventCreate(&fresh.begin));
      if (const cudaError_t error = cudaEventCreate(&fresh.end); error != cudaSuccess) {
        (void)cudaEventDestroy(fresh.begin);
        return cuda_error(error, "create a CUDA event");
      }
      intervals_.push_back(fresh);
    }
    const Interval& interval = intervals_[used_intervals_];
    CUDA_TRY("record a CUDA event", cudaEventRecord(interval.begin, stream_));
    CUDA_TRY(operation, work());
    // The work is under way: without its end the time is unknown, but this is no failure.
    if (cudaEventRecord(interval.end, stream_) == cudaSuccess)
      ++used_intervals_;
    else
      (void)cudaGetLastError();
    return ok();
  }

  const int ordinal_;
  std::string name_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t marks_[kMarks] = {};
  std::vector<Interval> intervals_;
  std::size_t used_intervals_ = 0;
};

}  // namespace

Result<std::shared_ptr<Machine>> open_machine(int ordinal) {
  int devices = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&devices); error != cudaSuccess) {
    (void)cudaGetLastError();
    return fail(Code::kUnavailable, "open CUDA device",
                "no CUDA device answers: {}; a device and a driver for CUDA {}.{} are needed",
                cudaGetErrorString(error), CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
  }
  if (ordinal < 0 || ordinal >= devices)
    return fail(Code::kUnavailable, "open CUDA device", "device {} was asked for, there are {}, numbered from 0",
                ordinal, devices);
  auto machine = std::make_shared<CudaMachine>(ordinal);
  ECHO_TRY(machine->open());
  return std::shared_ptr<Machine>(std::move(machine));
}

}  // namespace echoline::delta::cuda

// The calls of device.hpp: checks of arguments, and the order of work in the device's queue.
#include "delta/cuda/device.hpp"

#include <array>
#include <utility>

#include "delta/cuda/extraction.hpp"
#include "delta/cuda/leaf_hasher.hpp"
#include "delta/cuda/memory.hpp"
#include "delta/cuda/value_swap.hpp"

namespace echoline::delta::cuda {
namespace {

constexpr std::uint64_t kTensorAlignment = 256;  // bytes
constexpr bool kAllowTorn = true;                // argument of check_usable(): a torn state is about to be filled again

// The size of the single memory block in which upload() places these tensors.
std::uint64_t block_bytes(const StateView& tensors) {
  std::uint64_t bytes = 0;
  for (const TensorView& tensor : tensors) bytes += round_up(tensor.bytes.size(), kTensorAlignment);
  return bytes;
}

// Waits for all queued work when a call returns, whatever its result. Declare it after the memory that queued work
// uses.
class FinishOnExit {
 public:
  // Resets the busy time, so that the call reports only its own.
  explicit FinishOnExit(DeviceBackend& backend) : backend_(backend) { (void)backend.take_busy_s(); }
  ~FinishOnExit() { (void)backend_.finish(); }
  FinishOnExit(const FinishOnExit&) = delete;
  FinishOnExit& operator=(const FinishOnExit&) = delete;

 private:
  DeviceBackend& backend_;
};

Status check_same_layout(const StateView& a, const StateView& b, std::string_view operation) {
  if (a.size() != b.size())
    return fail(Code::kInvalid, operation, "one state has {} tensors, the other {}; both must be of one model",
                a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i)
    if (a[i].name != b[i].name || a[i].dtype != b[i].dtype || a[i].shape != b[i].shape)
      return fail(
          Code::kInvalid, operation,
          "tensor '{}' ({} [{}]) is in the place of the other state's '{}' ({} [{}]); both must be of one model",
          a[i].name, dtype_name(a[i].dtype), fmt::join(a[i].shape, ", "), b[i].name, dtype_name(b[i].dtype),
          fmt::join(b[i].shape, ", "));
  return ok();
}

}  // namespace

StateView DeviceState::layout() const {
  StateView layout = tensors_;
  for (TensorView& tensor : layout) tensor.bytes = {};
  return layout;
}

std::byte* DeviceState::address(std::size_t index) const { return device_bytes(tensors_.at(index)); }

void DeviceState::forget_leaf_digests() {
  for (auto& leaves : leaf_digests_) leaves.clear();
}

struct Device::Impl {
  Impl(std::shared_ptr<DeviceBackend> device_backend, const DeviceOptions& device_options)
      : backend(std::move(device_backend)), options(device_options) {}

  Status check_usable(const DeviceState& state, std::string_view operation, bool allow_torn = false) const {
    if (state.backend_ != backend)
      return fail(Code::kInvalid, operation,
                  "the state belongs to another device object, not {}; use the one that made it", backend->name());
    if (state.torn_ && !allow_torn)
      return fail(Code::kInvalid, operation,
                  "the device failed in the middle of a change of this state; fill it again with assign() or copy()");
    return ok();
  }

  // Returns a state with the layout and the addresses of `sorted`. It owns no memory, and its digests are unknown.
  DeviceState describe(const StateView& sorted) const {
    DeviceState state;
    state.backend_ = backend;
    state.tensors_ = sorted;
    state.leaf_digests_.resize(sorted.size());
    for (const TensorView& tensor : sorted) state.total_bytes_ += tensor.bytes.size();
    return state;
  }

  // Waits for the queued change of `state`; `queued` is the status of queueing it. The state's digests become unknown,
  // and it is torn if the change failed.
  Status finish_change(DeviceState& state, Status queued) {
    state.forget_leaf_digests();
    Status finished = queued ? backend->finish() : std::move(queued);
    state.torn_ = !finished;
    return finished;
  }

  Status copy_in(const StateView& from, const DeviceState& to) {
    for (std::size_t i = 0; i < from.size(); ++i)
      if (!from[i].bytes.empty()) ECHO_TRY(backend->copy_in(to.address(i), from[i].bytes.data(), from[i].bytes.size()));
    return ok();
  }

  std::shared_ptr<DeviceBackend> backend;
  DeviceOptions options;
  LeafHasher hasher;
  Extraction extraction;
  ValueSwap swap;
};

Result<Device> Device::open(const DeviceOptions& options) {
  ECHO_ASSIGN(std::shared_ptr<DeviceBackend> backend, open_backend(options.ordinal));
  return Device(std::move(backend), options);
}

Device::Device(std::shared_ptr<DeviceBackend> backend, const DeviceOptions& options)
    : impl_(std::make_unique<Impl>(std::move(backend), options)) {}
Device::Device(Device&&) noexcept = default;
Device& Device::operator=(Device&&) noexcept = default;
Device::~Device() = default;

std::string_view Device::name() const { return impl_->backend->name(); }

Result<DeviceState> Device::upload(const StateView& state) {
  ECHO_ASSIGN(const StateView sorted, canonical(state));
  DeviceState uploaded = impl_->describe(sorted);
  if (const std::uint64_t bytes = block_bytes(sorted); bytes != 0) {
    ECHO_ASSIGN(uploaded.memory_, allocate(impl_->backend, DeviceBackend::MemoryKind::kDevice, bytes));
    std::uint64_t offset = 0;
    for (TensorView& tensor : uploaded.tensors_) {
      tensor.bytes = {uploaded.memory_.get() + offset, tensor.bytes.size()};
      offset += round_up(tensor.bytes.size(), kTensorAlignment);
    }
  }
  const FinishOnExit finish_on_exit(*impl_->backend);
  ECHO_TRY(impl_->finish_change(uploaded, impl_->copy_in(sorted, uploaded)));
  return uploaded;
}

Result<DeviceState> Device::attach(const StateView& state) {
  ECHO_ASSIGN(const StateView sorted, canonical(state));
  for (const TensorView& tensor : sorted) {
    if (tensor.bytes.empty()) continue;
    if (reinterpret_cast<std::uintptr_t>(tensor.bytes.data()) % kVectorBytes != 0)
      return fail(Code::kInvalid, "attach to device memory", "tensor '{}' begins at {}, expected a multiple of {}",
                  tensor.name, static_cast<const void*>(tensor.bytes.data()), kVectorBytes);
    if (const Status status = impl_->backend->check_address(tensor.bytes.data(), tensor.bytes.size()); !status)
      return fail(status.error().code, "attach to device memory", "tensor '{}': {}", tensor.name,
                  status.error().detail);
  }
  return impl_->describe(sorted);
}

Status Device::assign(DeviceState& to, const StateView& from) {
  ECHO_TRY(impl_->check_usable(to, "fill device memory", kAllowTorn));
  ECHO_ASSIGN(const StateView sorted, canonical(from));
  ECHO_TRY(check_same_layout(to.tensors_, sorted, "fill device memory"));
  const FinishOnExit finish_on_exit(*impl_->backend);
  return impl_->finish_change(to, impl_->copy_in(sorted, to));
}

Result<double> Device::copy(const DeviceState& from, DeviceState& to) {
  ECHO_TRY(impl_->check_usable(from, "copy a state"));
  ECHO_TRY(impl_->check_usable(to, "copy a state", kAllowTorn));
  ECHO_TRY(check_same_layout(from.tensors_, to.tensors_, "copy a state"));
  const FinishOnExit finish_on_exit(*impl_->backend);
  const auto copy_all = [&]() -> Status {
    if (from.memory_ && to.memory_)  // same offsets in both
      return impl_->backend->copy_within(to.memory_.get(), from.memory_.get(), block_bytes(from.tensors_));
    for (std::size_t i = 0; i < from.size(); ++i)
      if (const auto bytes = from.tensors_[i].bytes; !bytes.empty())
        ECHO_TRY(impl_->backend->copy_within(to.address(i), bytes.data(), bytes.size()));
    return ok();
  };
  ECHO_TRY(impl_->finish_change(to, copy_all()));
  to.leaf_digests_ = from.leaf_digests_;
  return impl_->backend->take_busy_s();
}

Result<OwnedState> Device::download(const DeviceState& state) {
  ECHO_ASSIGN(OwnedState copy, OwnedState::empty_like(state.layout()));
  ECHO_TRY(download(state, copy));
  return copy;
}

Status Device::download(const DeviceState& state, OwnedState& target) {
  constexpr std::string_view kOperation = "download a state";
  ECHO_TRY(impl_->check_usable(state, kOperation));
  ECHO_TRY(check_same_layout(state.tensors_, target.view(), kOperation));
  const FinishOnExit finish_on_exit(*impl_->backend);
  for (std::size_t i = 0; i < state.size(); ++i)
    if (const auto bytes = state.tensors_[i].bytes; !bytes.empty())
      ECHO_TRY(impl_->backend->copy_out(target.mutable_bytes(i).data(), bytes.data(), bytes.size()));
  ECHO_TRY(impl_->backend->finish());
  target.seal();  // the content is complete, so its digest may be cached
  return ok();
}

Result<OwnedState> Device::pinned_like(const StateView& like) {
  auto pinned = OwnedState::empty_like(like, [this](std::uint64_t bytes) {
    return allocate(impl_->backend, DeviceBackend::MemoryKind::kPinnedHost, bytes);
  });
  // Ordinary memory also works, only more slowly.
  return pinned ? std::move(pinned) : OwnedState::empty_like(like);
}

Result<Digest> Device::digest(DeviceState& state) {
  ECHO_TRY(impl_->check_usable(state, "digest a state"));
  const FinishOnExit finish_on_exit(*impl_->backend);
  ECHO_TRY(impl_->hasher.prepare(impl_->backend, state.tensors_,
                                 flagged_leaves(unknown_leaves(state.tensors_, state.leaf_digests_))));
  ECHO_TRY(impl_->hasher.start(*impl_->backend));
  ECHO_TRY(impl_->backend->finish());
  impl_->hasher.store_digests(state.tensors_, state.leaf_digests_);
  return state_digest_of_leaves(state.tensors_, state.leaf_digests_);
}

Result<ExtractStats> Device::extract(const DeviceState& prev, const DeviceState& cur, const ChangeSink& sink) {
  constexpr std::string_view kOperation = "extract changes";
  ECHO_TRY(impl_->check_usable(prev, kOperation));
  ECHO_TRY(impl_->check_usable(cur, kOperation));
  ECHO_TRY(check_same_layout(prev.tensors_, cur.tensors_, kOperation));
  const FinishOnExit finish_on_exit(*impl_->backend);
  ECHO_ASSIGN(ExtractStats stats,
              impl_->extraction.run(impl_->backend, impl_->options, prev.tensors_, cur.tensors_, sink));
  stats.device_s = impl_->backend->take_busy_s();
  return stats;
}

Result<ApplyStats> Device::apply(std::span<const TensorWrite> writes, const Digest& result, DeviceState& state) {
  constexpr std::string_view kOperation = "apply changes";
  ECHO_TRY(impl_->check_usable(state, kOperation));
  DeviceBackend& backend = *impl_->backend;
  ECHO_ASSIGN(const SortedWrites sorted, sorted_writes(writes, state.tensors_));
  const FinishOnExit finish_on_exit(backend);
  LeafFlags to_hash = unknown_leaves(state.tensors_, state.leaf_digests_);
  ECHO_TRY(impl_->swap.prepare(impl_->backend, impl_->options, sorted, state.tensors_, to_hash));
  ECHO_TRY(impl_->hasher.prepare(impl_->backend, state.tensors_, flagged_leaves(to_hash)));
  ECHO_TRY(backend.finish());  // reports errors of the preparation before anything changes

  // If the kernel did not start, the state is unchanged. If finish() fails as well, the device is lost.
  if (Status started = impl_->swap.start(backend); !started) {
    state.torn_ = !backend.finish();
    return std::move(started).error();
  }
  LeafDigests leaves = state.leaf_digests_;
  const auto verify = [&]() -> Status {
    ECHO_TRY(impl_->hasher.start(backend));
    ECHO_TRY(backend.finish());
    impl_->hasher.store_digests(state.tensors_, leaves);
    if (const Digest actual = state_digest_of_leaves(state.tensors_, leaves); actual != result)
      return fail(
          Code::kCorrupt, kOperation,
          "the changes lead to digest {}, expected {}; the old values were restored. These changes were made for "
          "another state: fetch a snapshot",
          actual.hex(), result.hex());
    return ok();
  };
  if (Status verified = verify(); !verified) {
    Status restored = impl_->swap.start(backend);
    if (restored) restored = backend.finish();
    state.torn_ = !restored;
    if (!restored)
      return fail(restored.error().code, kOperation,
                  "{}; the old values could not be put back ({}), fill the state again with assign() or copy()",
                  verified.error().detail, restored.error().message());
    return std::move(verified).error();
  }
  state.leaf_digests_ = std::move(leaves);

  ApplyStats stats;
  for (const TensorWrite* write : sorted) stats.changed += write->values.size() / write->element_bytes;
  stats.hashed_bytes = impl_->hasher.bytes();
  stats.device_s = backend.take_busy_s();
  return stats;
}

Status device_available() {
  const auto backend = open_backend(0);
  return backend ? ok() : Status(backend.error());
}

}  // namespace echoline::delta::cuda

#include "delta/cuda/device.hpp"

#include <array>
#include <utility>

#include "delta/cuda/exchange.hpp"
#include "delta/cuda/extraction.hpp"
#include "delta/cuda/leaf_hasher.hpp"
#include "delta/cuda/memory.hpp"

namespace echoline::delta::cuda {
namespace {

constexpr std::uint64_t kTensorAlignment = 256;

// The size of the single memory block in which upload() places these tensors.
std::uint64_t block_bytes(const StateView& tensors) {
  std::uint64_t bytes = 0;
  for (const TensorView& tensor : tensors) bytes += round_up(tensor.bytes.size(), kTensorAlignment);
  return bytes;
}

// Waits for all queued work at the end of a call, whatever its result. Declare it after the memory that queued work
// uses.
class Settled {
 public:
  explicit Settled(Machine& machine) : machine_(machine) { (void)machine.take_busy_s(); }
  ~Settled() { (void)machine_.finish(); }
  Settled(const Settled&) = delete;
  Settled& operator=(const Settled&) = delete;

 private:
  Machine& machine_;
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

void DeviceState::memory_changed() {
  for (auto& leaves : leaves_) leaves.clear();
}

struct Device::Work {
  Work(std::shared_ptr<Machine> m, const DeviceOptions& o) : machine(std::move(m)), options(o) {}

  Status check_ours(const DeviceState& state, std::string_view operation, bool torn_is_fine = false) const {
    if (state.machine_ != machine)
      return fail(Code::kInvalid, operation,
                  "the state belongs to another device object, not {}; use the one that made it", machine->name());
    if (state.torn_ && !torn_is_fine)
      return fail(Code::kInvalid, operation,
                  "the device failed in the middle of a change of this state; fill it again with assign() or copy()");
    return ok();
  }

  // A state with a valid description, without memory.
  DeviceState describe(const StateView& sorted) const {
    DeviceState state;
    state.machine_ = machine;
    state.tensors_ = sorted;
    state.leaves_.resize(sorted.size());
    for (const TensorView& tensor : sorted) state.total_bytes_ += tensor.bytes.size();
    return state;
  }

  // Waits for a change of `state`. Its digests become unknown, and it is torn if the change failed.
  Status finish_change(DeviceState& state, Status change) {
    state.memory_changed();
    if (change) change = machine->finish();
    state.torn_ = !change;
    return change;
  }

  Status copy_in(const StateView& from, const DeviceState& to) {
    for (std::size_t i = 0; i < from.size(); ++i)
      if (!from[i].bytes.empty()) ECHO_TRY(machine->copy_in(to.address(i), from[i].bytes.data(), from[i].bytes.size()));
    return ok();
  }

  std::shared_ptr<Machine> machine;
  DeviceOptions options;
  LeafHasher hasher;
  Extraction extraction;
  Exchange exchange;
};

Result<Device> Device::open(const DeviceOptions& options) {
  ECHO_ASSIGN(std::shared_ptr<Machine> machine, open_machine(options.ordinal));
  return Device(std::move(machine), options);
}

Device::Device(std::shared_ptr<Machine> machine, const DeviceOptions& options)
    : work_(std::make_unique<Work>(std::move(machine), options)) {}
Device::Device(Device&&) noexcept = default;
Device& Device::operator=(Device&&) noexcept = default;
Device::~Device() = default;

std::string_view Device::name() const { return work_->machine->name(); }

Result<DeviceState> Device::upload(const StateView& state) {
  ECHO_ASSIGN(const StateView sorted, canonical(state));
  DeviceState made = work_->describe(sorted);
  if (const std::uint64_t bytes = block_bytes(sorted); bytes != 0) {
    ECHO_ASSIGN(made.memory_, allocate(work_->machine, Machine::Place::kDevice, bytes));
    std::uint64_t at = 0;
    for (TensorView& tensor : made.tensors_) {
      tensor.bytes = {made.memory_.get() + at, tensor.bytes.size()};
      at += round_up(tensor.bytes.size(), kTensorAlignment);
    }
  }
  const Settled settled(*work_->machine);
  ECHO_TRY(work_->finish_change(made, work_->copy_in(sorted, made)));
  return made;
}

Result<DeviceState> Device::attach(const StateView& state) {
  ECHO_ASSIGN(const StateView sorted, canonical(state));
  for (const TensorView& tensor : sorted) {
    if (tensor.bytes.empty()) continue;
    if (reinterpret_cast<std::uintptr_t>(tensor.bytes.data()) % kVectorBytes != 0)
      return fail(Code::kInvalid, "attach to device memory", "tensor '{}' begins at {}, expected a multiple of {}",
                  tensor.name, static_cast<const void*>(tensor.bytes.data()), kVectorBytes);
    if (const Status status = work_->machine->check_address(tensor.bytes.data(), tensor.bytes.size()); !status)
      return fail(status.error().code, "attach to device memory", "tensor '{}': {}", tensor.name,
                  status.error().detail);
  }
  return work_->describe(sorted);
}

Status Device::assign(DeviceState& to, const StateView& from) {
  ECHO_TRY(work_->check_ours(to, "fill device memory", true));
  ECHO_ASSIGN(const StateView sorted, canonical(from));
  ECHO_TRY(check_same_layout(to.tensors_, sorted, "fill device memory"));
  const Settled settled(*work_->machine);
  return work_->finish_change(to, work_->copy_in(sorted, to));
}

Result<double> Device::copy(const DeviceState& from, DeviceState& to) {
  ECHO_TRY(work_->check_ours(from, "copy a state"));
  ECHO_TRY(work_->check_ours(to, "copy a state", true));
  ECHO_TRY(check_same_layout(from.tensors_, to.tensors_, "copy a state"));
  const Settled settled(*work_->machine);
  const auto copy_all = [&]() -> Status {
    if (from.memory_ && to.memory_)  // same offsets in both
      return work_->machine->copy_within(to.memory_.get(), from.memory_.get(), block_bytes(from.tensors_));
    for (std::size_t i = 0; i < from.size(); ++i)
      if (const auto bytes = from.tensors_[i].bytes; !bytes.empty())
        ECHO_TRY(work_->machine->copy_within(to.address(i), bytes.data(), bytes.size()));
    return ok();
  };
  ECHO_TRY(work_->finish_change(to, copy_all()));
  to.leaves_ = from.leaves_;
  return work_->machine->take_busy_s();
}

Result<OwnedState> Device::download(const DeviceState& state) {
  ECHO_ASSIGN(OwnedState copy, OwnedState::empty_like(state.layout()));
  ECHO_TRY(download(state, copy));
  return copy;
}

Status Device::download(const DeviceState& state, OwnedState& into) {
  constexpr std::string_view kOperation = "download a state";
  ECHO_TRY(work_->check_ours(state, kOperation));
  ECHO_TRY(check_same_layout(state.tensors_, into.view(), kOperation));
  const Settled settled(*work_->machine);
  for (std::size_t i = 0; i < state.size(); ++i)
    if (const auto bytes = state.tensors_[i].bytes; !bytes.empty())
      ECHO_TRY(work_->machine->copy_out(into.mutable_bytes(i).data(), bytes.data(), bytes.size()));
  ECHO_TRY(work_->machine->finish());
  into.seal();
  return ok();
}

Result<OwnedState> Device::pinned_like(const StateView& like) {
  auto pinned = OwnedState::empty_like(
      like, [this](std::uint64_t bytes) { return allocate(work_->machine, Machine::Place::kPinnedHost, bytes); });
  return pinned ? std::move(pinned) : OwnedState::empty_like(like);
}

Result<Digest> Device::digest(DeviceState& state) {
  ECHO_TRY(work_->check_ours(state, "digest a state"));
  const Settled settled(*work_->machine);
  ECHO_TRY(
      work_->hasher.prepare(work_->machine, state.tensors_, flagged(unknown_leaves(state.tensors_, state.leaves_))));
  ECHO_TRY(work_->hasher.start(*work_->machine));
  ECHO_TRY(work_->machine->finish());
  work_->hasher.take(state.tensors_, state.leaves_);
  return combine_leaves(state.tensors_, state.leaves_);
}

Result<ExtractStats> Device::extract(const DeviceState& prev, const DeviceState& cur, const ChangeSink& sink) {
  constexpr std::string_view kOperation = "extract changes";
  ECHO_TRY(work_->check_ours(prev, kOperation));
  ECHO_TRY(work_->check_ours(cur, kOperation));
  ECHO_TRY(check_same_layout(prev.tensors_, cur.tensors_, kOperation));
  const Settled settled(*work_->machine);
  ECHO_ASSIGN(ExtractStats stats,
              work_->extraction.run(work_->machine, work_->options, prev.tensors_, cur.tensors_, sink));
  stats.device_s = work_->machine->take_busy_s();
  return stats;
}

Result<ApplyStats> Device::apply(std::span<const TensorWrite> writes, const Digest& result, DeviceState& state) {
  constexpr std::string_view kOperation = "apply changes";
  ECHO_TRY(work_->check_ours(state, kOperation));
  Machine& machine = *work_->machine;
  ECHO_ASSIGN(const SortedWrites sorted, sorted_writes(writes, state.tensors_));
  const Settled settled(machine);
  LeafFlags to_hash = unknown_leaves(state.tensors_, state.leaves_);
  ECHO_TRY(work_->exchange.prepare(work_->machine, work_->options, sorted, state.tensors_, to_hash));
  ECHO_TRY(work_->hasher.prepare(work_->machine, state.tensors_, flagged(to_hash)));
  ECHO_TRY(machine.finish());  // reports errors of the preparation before anything changes

  // A kernel that did not start changed nothing, unless the device is lost as well.
  if (Status started = work_->exchange.start(machine); !started) {
    state.torn_ = !machine.finish();
    return std::move(started).error();
  }
  LeafDigests leaves = state.leaves_;
  const auto verify = [&]() -> Status {
    ECHO_TRY(work_->hasher.start(machine));
    ECHO_TRY(machine.finish());
    work_->hasher.take(state.tensors_, leaves);
    if (const Digest found = combine_leaves(state.tensors_, leaves); found != result)
      return fail(Code::kCorrupt, kOperation,
                  "the changes lead to digest {}, expected {}; the old values are back. They are not those that the "
                  "changes were made for: fetch a snapshot",
                  found.hex(), result.hex());
    return ok();
  };
  if (Status verified = verify(); !verified) {
    Status back = work_->exchange.start(machine);
    if (back) back = machine.finish();
    state.torn_ = !back;
    if (!back)
      return fail(back.error().code, kOperation,
                  "{}; the old values could not be put back ({}), fill the state again with assign() or copy()",
                  verified.error().detail, back.error().message());
    return std::move(verified).error();
  }
  state.leaves_ = std::move(leaves);

  ApplyStats stats;
  for (const TensorWrite* write : sorted) stats.changed += write->values.size() / write->element_bytes;
  stats.hashed_bytes = work_->hasher.bytes();
  stats.device_s = machine.take_busy_s();
  return stats;
}

Status device_available() {
  const auto machine = open_machine(0);
  return machine ? ok() : Status(machine.error());
}

}  // namespace echoline::delta::cuda

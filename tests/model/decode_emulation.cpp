// Implements the emulated GPU.
#include "decode_emulation.hpp"

#include <numeric>

#include "base/random.hpp"
#include "model/transformer.hpp"

namespace echoline::model::cuda::test {
namespace {

template <unsigned kGroups, bool kGated>
void run_product(const ProductJob& job, unsigned block_index, unsigned blocks) {
  const std::size_t stage = job.norm != nullptr ? product_stage_bytes(job.rows, job.in) : 0;
  LoopBlock<kProductThreads> block(product_sums_bytes<kGroups, kGated>() + stage);
  product_block<kGroups, kGated>(block, job, block_index, blocks);
}

template <unsigned kDim, unsigned kHeads>
void run_attend(const AttendJob& job, unsigned row, unsigned kv, unsigned split) {
  const auto run = [&](auto block) { attend_block<kDim, kHeads>(block, job, row, kv, split); };
  const unsigned threads = attend_threads(job.rows, job.heads / job.kv_heads);
  if (threads == kAttendThreads) {
    run(LoopBlock<kAttendThreads>(attend_shared_bytes<kDim, kHeads>(threads)));
  } else {
    run(LoopBlock<kAttendThreadsFewRows>(attend_shared_bytes<kDim, kHeads>(threads)));
  }
}

template <unsigned kDim>
void run_attend(const AttendJob& job, unsigned row, unsigned kv, unsigned split) {
  switch (attend_heads(job.heads / job.kv_heads)) {
    case 1:
      return run_attend<kDim, 1>(job, row, kv, split);
    case 2:
      return run_attend<kDim, 2>(job, row, kv, split);
    case 4:
      return run_attend<kDim, 4>(job, row, kv, split);
    default:
      return run_attend<kDim, 8>(job, row, kv, split);
  }
}

}  // namespace

struct EmulatedBackend::Works : Recording {
  std::vector<std::function<void()>> works;
  void replay() override {
    for (const auto& work : works) work();
  }
  std::size_t kernels() const override { return works.size(); }
};

void EmulatedBackend::queue(std::function<void()> work) {
  if (recording_ != nullptr) {
    recording_->push_back(std::move(work));
  } else {
    work();
  }
}

std::vector<unsigned> EmulatedBackend::any_order(unsigned count) {
  std::vector<unsigned> order(count);
  std::iota(order.begin(), order.end(), 0u);
  Random random(order_++);
  for (unsigned i = count; i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
  return order;
}

std::unique_ptr<DeviceBackend::Recording> EmulatedBackend::record(const std::function<void()>& work) {
  TORCH_CHECK(failures_-- <= 0, "out of memory");
  failures_ = std::max(failures_, 0);
  ++recorded_;
  work();
  auto out = std::make_unique<Works>();
  recording_ = &out->works;
  work();
  recording_ = nullptr;
  return out;
}

void EmulatedBackend::run(const ReceiveJob& job) {
  queue([this, job] {
    for (const unsigned index : any_order(job.blocks)) {
      LoopBlock<kRowThreads> block(0);
      receive_block(block, job, index);
    }
  });
}

void EmulatedBackend::run(const EmbedJob& job) {
  queue([this, job] {
    for (const unsigned row : any_order(job.rows)) {
      LoopBlock<kRowThreads> block(0);
      embed_block(block, job, row);
    }
  });
}

void EmulatedBackend::run(const NormJob& job) {
  queue([this, job] {
    for (const unsigned row : any_order(job.rows)) {
      LoopBlock<kRowThreads> block(sizeof(float) * kRowThreads / kWarpThreads);
      norm_block(block, job, row);
    }
  });
}

void EmulatedBackend::run(const ProductJob& job) {
  queue([this, job] {
    const unsigned blocks = 3;
    for (const unsigned index : any_order(blocks)) {
      const bool gated = job.second != nullptr;
      if (product_groups(job.rows) == 1) {
        gated ? run_product<1, true>(job, index, blocks) : run_product<1, false>(job, index, blocks);
      } else {
        gated ? run_product<2, true>(job, index, blocks) : run_product<2, false>(job, index, blocks);
      }
    }
  });
}

void EmulatedBackend::run(const GateJob& job) {
  queue([job] {
    for (std::size_t vector = 0; vector < std::size_t{job.rows} * job.width / kVectorCount; ++vector)
      gate_thread(job, vector);
  });
}

void EmulatedBackend::run(const RotateJob& job, unsigned dim) {
  queue([this, job, dim] {
    for (const unsigned token : any_order(job.tokens)) {
      LoopBlock<kRowThreads> block(0);
      switch (dim) {
        case 16:
          rotate_block<16>(block, job, token);
          break;
        case 32:
          rotate_block<32>(block, job, token);
          break;
        case 64:
          rotate_block<64>(block, job, token);
          break;
        default:
          rotate_block<128>(block, job, token);
      }
    }
  });
}

torch::Tensor EmulatedBackend::attend(const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& v) {
  const auto to_fp32 = [](const torch::Tensor& t) { return t.to(torch::kFloat); };
  return attend_causally(to_fp32(q), to_fp32(k), to_fp32(v)).to(torch::kBFloat16);
}

void EmulatedBackend::run(const AttendJob& job, unsigned dim) {
  queue([this, job, dim] {
    for (const unsigned index : any_order(job.rows * job.kv_heads * job.splits)) {
      const unsigned split = index % job.splits, kv = index / job.splits % job.kv_heads;
      const unsigned row = index / job.splits / job.kv_heads;
      switch (dim) {
        case 16:
          run_attend<16>(job, row, kv, split);
          break;
        case 32:
          run_attend<32>(job, row, kv, split);
          break;
        case 64:
          run_attend<64>(job, row, kv, split);
          break;
        default:
          run_attend<128>(job, row, kv, split);
      }
    }
  });
}

void EmulatedBackend::run(const SampleJob& job) {
  queue([this, job] {
    const unsigned blocks = sample_blocks(job.vocab);
    for (const unsigned index : any_order(job.rows * blocks)) {
      LoopBlock<kSampleThreads> block(sizeof(SampleShared));
      sample_block(block, job, index / blocks, index % blocks);
    }
  });
}

void EmulatedBackend::multiply(const torch::Tensor& x, const torch::Tensor& weight, const torch::Tensor& bias,
                               const torch::Tensor& out) {
  queue([x, weight, bias, out] {
    const torch::Tensor product = torch::linear(x.to(torch::kFloat), weight.to(torch::kFloat));
    torch::Tensor to = out;
    to.copy_(bias.defined() ? product.to(torch::kBFloat16) + bias : product);
  });
}

}  // namespace echoline::model::cuda::test

// Implements PagedCache for RunningBatch, and the attention over its pages.
#include "model/paged_cache.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "model/kernels.hpp"
#include "model/parallel.hpp"

namespace echoline::model {

using torch::Tensor;

namespace {

constexpr std::int64_t kInitialPages = 64;
constexpr std::int64_t kWorkMin = 1 << 15;  // multiplications for scores that justify another thread

}  // namespace

PagedCache::PagedCache(const ModelConfig& config, const torch::Device& device, torch::ScalarType dtype, Bytes bytes_max,
                       bool by_token)
    : config_(config),
      options_(torch::TensorOptions().device(device).dtype(dtype)),
      by_token_(by_token || !device.is_cpu()) {
  const std::int64_t page_values = config.layers * 2 * config.kv_heads * kPageTokens * config.head_dim;
  page_bytes_ = {static_cast<std::uint64_t>(page_values) * torch::elementSize(dtype)};
  // The kernels read page numbers of 32 bits.
  pages_limit_ = pages_max_ = static_cast<std::int64_t>(
      std::min<std::uint64_t>(bytes_max.count / page_bytes_.count, std::numeric_limits<std::int32_t>::max()));
  keys_.resize(static_cast<std::size_t>(config.layers));
  values_.resize(keys_.size());
}

bool PagedCache::reserve(std::int64_t pages) {
  const std::int64_t needed = used_pages_ + pages;
  ECHO_CHECK(needed <= pages_max_, "{} pages beyond {}", needed, pages_max_);
  if (needed <= allocated_pages_) return true;
  const std::int64_t new_capacity = std::min(pages_max_, std::max({needed, 2 * allocated_pages_, kInitialPages}));
  try {
    for (auto* tensors : {&keys_, &values_}) {
      // A page of a head is a matrix of kPageTokens by head_dim, or the other way round for keys on a CPU.
      const std::int64_t rows = tensors == &keys_ && !by_token_ ? config_.head_dim : kPageTokens;
      for (Tensor& tensor : *tensors) {
        if (tensor.defined() && tensor.size(0) == new_capacity) continue;  // an attempt that failed halfway enlarged it
        Tensor larger =
            torch::empty({new_capacity, config_.kv_heads, rows, config_.head_dim * kPageTokens / rows}, options_);
        if (allocated_pages_ > 0) larger.narrow(0, 0, allocated_pages_).copy_(tensor.narrow(0, 0, allocated_pages_));
        tensor = std::move(larger);
      }
    }
    // Any exception, because the type of allocation errors differs between libtorch releases. Nothing else can fail.
  } catch (const std::exception&) {
    pages_max_ = allocated_pages_;
    return false;
  }
  owner_counts_.resize(static_cast<std::size_t>(new_capacity), 0);
  // In descending order, so that the pages with the lowest numbers are taken first, from the end.
  for (Page page = new_capacity; page-- > allocated_pages_;) reserved_pages_.push_back(page);
  allocated_pages_ = new_capacity;
  return true;
}

Page PagedCache::take_reserved() {
  ECHO_CHECK(!reserved_pages_.empty(), "no page was reserved");
  const Page page = reserved_pages_.back();
  reserved_pages_.pop_back();
  owner_counts_[static_cast<std::size_t>(page)] = 1;
  ++used_pages_;
  return page;
}

void PagedCache::add_owner(Page page) { ++owner_counts_[static_cast<std::size_t>(page)]; }

void PagedCache::release(Page page) {
  if (--owner_counts_[static_cast<std::size_t>(page)] > 0) return;
  reserved_pages_.push_back(page);
  --used_pages_;
}

void PagedCache::release(Pages& pages) {
  for (const Page page : pages.list) release(page);
  pages = {};
}

void PagedCache::copy(const std::vector<Page>& from, const std::vector<Page>& to) {
  const Tensor source = torch::tensor(from, torch::kLong).to(options_.device());
  const Tensor target = torch::tensor(to, torch::kLong).to(options_.device());
  for (auto* tensors : {&keys_, &values_})
    for (Tensor& tensor : *tensors) tensor.index_copy_(0, target, tensor.index_select(0, source));
}

void PagedCache::put_keys(std::size_t layer, const Tensor& page, const Tensor& slot, const Tensor& k) {
  using torch::indexing::Slice;
  if (by_token_) {
    keys_[layer].index_put_({page, Slice(), slot}, k);
  } else {
    keys_[layer].index_put_({page, Slice(), Slice(), slot}, k);
  }
}

struct PagedCache::PrefillAttention : Attention {
  PagedCache& cache;
  // int64 [tokens without padding]: each token's index among the padded rows, its page, and its slot in the page.
  Tensor token_index, page, slot;

  PrefillAttention(PagedCache& paged_cache, const std::vector<const Pages*>& texts,
                   const std::vector<std::int64_t>& lengths)
      : cache(paged_cache) {
    const std::int64_t longest = *std::max_element(lengths.begin(), lengths.end());
    std::vector<std::int64_t> token_indices, page_numbers, slot_numbers;
    for (std::size_t row = 0; row < texts.size(); ++row) {
      for (std::int64_t token = 0; token < lengths[row]; ++token) {
        token_indices.push_back(static_cast<std::int64_t>(row) * longest + token);
        page_numbers.push_back(texts[row]->list[static_cast<std::size_t>(token / kPageTokens)]);
        slot_numbers.push_back(token % kPageTokens);
      }
    }
    const auto to_device = [&](const std::vector<std::int64_t>& numbers) {
      return torch::tensor(numbers, torch::kLong).to(cache.options_.device());
    };
    token_index = to_device(token_indices);
    page = to_device(page_numbers);
    slot = to_device(slot_numbers);
  }
  Tensor attend(std::size_t layer, const Tensor& q, const Tensor& k, const Tensor& v) override {
    using torch::indexing::Slice;
    cache.put_keys(layer, page, slot, k.flatten(0, 1).index_select(0, token_index));
    cache.values_[layer].index_put_({page, Slice(), slot}, v.flatten(0, 1).index_select(0, token_index));
    return attend_causally(q, k, v, cache.config_.window_of(static_cast<std::int64_t>(layer)));
  }
};

struct PagedCache::DecodeAttention : Attention {
  PagedCache& cache;
  const bool gathered;  // libtorch multiplies copies of the pages; false: a kernel reads the pages in place
  const std::int64_t rows;
  std::vector<const Pages*> texts;
  // The next members are only used if `gathered`.
  Tensor page, slot;  // int64 [rows]: the page of each row's new token, and the slot in this page
  Tensor page_table;  // int64 [rows * pages of the longest text]: the pages of each row, padded with page 0
  Tensor is_used;     // bool [rows, 1, keys, 1]: the key's slot belongs to the text
  Tensor in_window;   // of the same shape: the key is also in the window of the row's new token; undefined: no windows

  DecodeAttention(PagedCache& paged_cache, std::vector<const Pages*> page_lists, bool by_gathering)
      : cache(paged_cache), gathered(by_gathering), rows(std::ssize(page_lists)), texts(std::move(page_lists)) {
    if (!gathered) return;
    std::vector<std::int64_t> page_numbers, slot_numbers;
    std::int64_t longest = 0;
    for (const Pages* text : texts) {
      page_numbers.push_back(text->list[static_cast<std::size_t>(text->tokens / kPageTokens)]);
      slot_numbers.push_back(text->tokens % kPageTokens);
      longest = std::max(longest, pages_for(text->tokens + 1));
    }
    const Tensor pages = torch::zeros({rows, longest}, torch::kLong);
    const Tensor tokens = torch::zeros({rows, 1}, torch::kLong);
    for (std::int64_t row = 0; row < rows; ++row) {
      const Pages& text = *texts[static_cast<std::size_t>(row)];
      const std::int64_t page_count = pages_for(text.tokens + 1);  // + 1: the new token
      std::copy_n(text.list.begin(), page_count, pages.data_ptr<std::int64_t>() + row * longest);
      tokens.data_ptr<std::int64_t>()[row] = text.tokens;
    }
    const torch::Device device = cache.options_.device();
    page = torch::tensor(page_numbers, torch::kLong).to(device);
    slot = torch::tensor(slot_numbers, torch::kLong).to(device);
    page_table = pages.flatten().to(device);
    const Tensor keys = torch::arange(longest * kPageTokens), used = keys <= tokens;
    is_used = used.view({rows, 1, -1, 1}).to(device);
    if (const auto& window = cache.config_.sliding_window)
      in_window = used.logical_and(keys > tokens - window->tokens).view({rows, 1, -1, 1}).to(device);
  }

  Tensor attend(std::size_t layer, const Tensor& q, const Tensor& k, const Tensor& v) override {
    return gathered ? attend_by_products(layer, q, k, v) : attend_over_pages(layer, q, k, v);
  }

  Tensor attend_by_products(std::size_t layer, const Tensor& q, const Tensor& k, const Tensor& v) {
    using torch::indexing::Slice;
    const std::int64_t kv_heads = k.size(2), heads = q.size(2), dim = q.size(3), group = heads / kv_heads;
    cache.put_keys(layer, page, slot, k.select(1, 0));
    cache.values_[layer].index_put_({page, Slice(), slot}, v.select(1, 0));
    const auto gather = [&](const Tensor& pool, bool transposed) {  // [rows * kv_heads, keys, dim]
      const Tensor pages = pool.index_select(0, page_table);
      return (transposed ? pages.transpose(2, 3) : pages)
          .unflatten(0, {rows, -1})
          .transpose(1, 2)
          .reshape({rows * kv_heads, -1, dim});
    };
    const bool has_window = cache.config_.window_of(static_cast<std::int64_t>(layer)) > 0;
    const Tensor is_hidden = (has_window ? in_window : is_used).logical_not();
    // Unused slots get the weight 0, but may hold NaN, and 0 times NaN is NaN. So their values are replaced by 0.
    const Tensor values = gather(cache.values_[layer], /*transposed=*/false)
                              .view({rows, kv_heads, -1, dim})
                              .masked_fill(is_hidden, 0)
                              .view({rows * kv_heads, -1, dim});
    const Tensor grouped = q.reshape({rows * kv_heads, group, dim}).transpose(1, 2);
    const Tensor scores = torch::bmm(gather(cache.keys_[layer], !cache.by_token_), grouped)
                              .view({rows, kv_heads, -1, group})
                              .masked_fill(is_hidden, -INFINITY);
    return torch::bmm(scores.softmax(2).view({rows * kv_heads, -1, group}).transpose(1, 2), values)
        .reshape({rows, heads * dim});
  }

  // Reads the pages in place by a kernel. libtorch's batched products of such small matrices would take several times
  // as long as their arithmetic.
  Tensor attend_over_pages(std::size_t layer, const Tensor& q, const Tensor& k, const Tensor& v) {
    const std::int64_t kv_heads = k.size(2), heads = q.size(2), dim = q.size(3), group = heads / kv_heads;
    const Tensor out = torch::empty({rows, heads * dim}, q.options());
    const std::int64_t head_size = kPageTokens * dim, page_size = kv_heads * head_size;
    float* const keys = cache.keys_[layer].data_ptr<float>();
    float* const values = cache.values_[layer].data_ptr<float>();
    const auto head_values = [](const Tensor& tensor, std::int64_t row, std::int64_t head) {
      return tensor.data_ptr<float>() + row * tensor.stride(0) + head * tensor.stride(2);
    };
    const std::int64_t window = cache.config_.window_of(static_cast<std::int64_t>(layer));
    const auto first_token = [&](const Pages& text) {
      return window == 0 ? 0 : std::max<std::int64_t>(0, text.tokens + 1 - window);
    };
    std::int64_t tokens = 0;
    for (const Pages* text : texts) tokens += text->tokens + 1 - first_token(*text);
    // One head of keys takes group * dim multiplications for each token of its text; rows have tokens / rows on
    // average.
    const std::int64_t grain = std::max<std::int64_t>(1, kWorkMin * rows / (tokens * group * dim));
    parallel_for(rows * kv_heads, grain, [&](std::int64_t begin, std::int64_t end) {
      std::vector<float> scratch;
      for (std::int64_t head_index = begin; head_index < end; ++head_index) {
        const std::int64_t row = head_index / kv_heads, kv_head = head_index % kv_heads;
        const Pages& text = *texts[static_cast<std::size_t>(row)];
        const Page new_page = text.list[static_cast<std::size_t>(text.tokens / kPageTokens)];
        const std::int64_t new_slot = text.tokens % kPageTokens, head = kv_head * head_size;
        const float* const key = head_values(k, row, kv_head);
        for (std::int64_t d = 0; d < dim; ++d) keys[new_page * page_size + head + d * kPageTokens + new_slot] = key[d];
        std::copy_n(head_values(v, row, kv_head), dim, values + new_page * page_size + head + new_slot * dim);
        scratch.resize(static_cast<std::size_t>(group * pages_for(text.tokens + 1) * kPageTokens));
        kernels().attend(head_values(q, row, kv_head * group), group, dim, first_token(text), text.tokens + 1,
                         text.list.data(), keys + head, values + head, page_size, scratch.data(),
                         out.data_ptr<float>() + (row * heads + kv_head * group) * dim);
      }
    });
    return out;
  }
};

std::unique_ptr<Attention> PagedCache::prefill_attention(std::vector<const Pages*> texts,
                                                         const std::vector<std::int64_t>& lengths) {
  return std::make_unique<PrefillAttention>(*this, texts, lengths);
}

std::unique_ptr<Attention> PagedCache::decode_attention(std::vector<const Pages*> texts, bool gathered) {
  const bool can_walk_pages = options_.device().is_cpu() && options_.dtype() == torch::kFloat && !by_token_;
  return std::make_unique<DecodeAttention>(*this, std::move(texts), gathered || !can_walk_pages);
}

}  // namespace echoline::model

// A paged cache of the keys and values of texts: a text has a list of pages of kPageTokens tokens, and texts with the
// same beginning can share pages. Private to model/.
#pragma once
#include <span>
#include <vector>

#include "model/transformer.hpp"

namespace echoline::model {

using Page = std::int64_t;

// The pages of one text, in order; the last may be partly used.
struct Pages {
  std::vector<Page> list;
  std::int64_t tokens = 0;  // number of tokens whose keys and values are stored
};

// One pool of pages for all layers. Grows by doubling and never shrinks.
class PagedCache {
 public:
  static constexpr std::int64_t kPageTokens = 16;
  static std::int64_t pages_for(std::int64_t tokens) { return (tokens + kPageTokens - 1) / kPageTokens; }

  // On a CPU, a page of keys is transposed for the kernels: [head_dim, kPageTokens]. With `by_token`, and on other
  // devices, it has the order of values: [kPageTokens, head_dim].
  PagedCache(const ModelConfig& config, const torch::Device& device, torch::ScalarType dtype, Bytes bytes_max,
             bool by_token = false);

  std::int64_t pages_max() const { return pages_max_; }
  std::int64_t used_pages() const { return used_pages_; }
  std::int64_t free_pages() const { return pages_max_ - used_pages_; }
  Bytes page_bytes() const { return page_bytes_; }

  // Makes sure that memory for this many more pages, at most free_pages(), is allocated. False if the allocation fails;
  // pages_max() is then lowered to the allocated size.
  bool reserve(std::int64_t pages);
  // Resets pages_max() to its initial limit.
  void reset_pages_max() { pages_max_ = pages_limit_; }
  // Takes a page that reserve() has allocated, for one owner. release() removes an owner; a page without owners is free
  // again.
  Page take_reserved();
  void add_owner(Page page);
  void release(Page page);
  void release(Pages& pages);
  bool is_shared(Page page) const { return owner_counts_[static_cast<std::size_t>(page)] > 1; }
  // Copies the content of each page from[i] to to[i].
  void copy(const std::vector<Page>& from, const std::vector<Page>& to);

  // Per layer, all pages: keys [pages, kv_heads, head_dim, kPageTokens], or with by_token like the values [pages,
  // kv_heads, kPageTokens, head_dim]. reserve() may reallocate them.
  const std::vector<torch::Tensor>& keys() const { return keys_; }
  const std::vector<torch::Tensor>& values() const { return values_; }

  // Attention for a prefill, which is the first pass over whole texts, in right-padded rows. Stores the keys and values
  // of the first lengths[r] tokens of row r in texts[r].
  std::unique_ptr<Attention> prefill_attention(std::vector<const Pages*> texts,
                                               const std::vector<std::int64_t>& lengths);
  // Attention for decoding: the new token of row r attends to the stored tokens of texts[r] and to itself. Stores its
  // keys and values too, for which the text's pages must have a slot. With `gathered`, libtorch multiplies copies of
  // the pages, as it always does on devices other than a CPU; otherwise a kernel reads the pages in place.
  std::unique_ptr<Attention> decode_attention(std::vector<const Pages*> texts, bool gathered = false);

 private:
  struct PrefillAttention;
  struct DecodeAttention;
  // Stores keys k [tokens, kv_heads, head_dim] in the tokens' pages and in their slots within these pages.
  void put_keys(std::size_t layer, const torch::Tensor& page, const torch::Tensor& slot, const torch::Tensor& k);
  ModelConfig config_;
  torch::TensorOptions options_;
  bool by_token_;
  Bytes page_bytes_;
  // pages_max_ is lower than pages_limit_ after an allocation has failed.
  std::int64_t pages_limit_ = 0, pages_max_ = 0, allocated_pages_ = 0, used_pages_ = 0;
  std::vector<torch::Tensor> keys_, values_;
  std::vector<std::int32_t> owner_counts_;  // by page
  std::vector<Page> reserved_pages_;        // allocated pages without an owner
};

}  // namespace echoline::model

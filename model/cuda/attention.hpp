// Norm and rotary position embedding (RoPE) of queries and keys, and attention over pages of keys and values: device
// code as in block.hpp. Internal to this folder.
#pragma once
#include "model/cuda/block.hpp"

namespace echoline::model::cuda {

// ---- norm and rotation of queries and keys ----

// A thread's share of a head whose values are spread over a warp: pairs of values that are rotated together. `lane` is
// the index of the thread in its warp.
template <unsigned kDim>
struct HeadPairs {
  static constexpr unsigned kHalf = kDim / 2, kCount = (kHalf + kWarpThreads - 1) / kWarpThreads;
  float first[kCount], second[kCount];
  float square_sum;  // load() sets it for this thread's values; the caller sums it over the warp before rotate()
  // Calls f(i, offset) for each pair i of the thread; the pair consists of the values `offset` and offset + kHalf.
  template <class F>
  ECHO_DEVICE static void for_each(unsigned lane, F&& f) {
    ECHO_UNROLL
    for (unsigned i = 0; i < kCount; ++i)
      if (lane + i * kWarpThreads < kHalf) f(i, lane + i * kWarpThreads);
  }
  ECHO_DEVICE void load(const Bf16* head, unsigned lane) {
    square_sum = 0;
    for_each(lane, [&](unsigned i, unsigned offset) {
      first[i] = to_float(head[offset]), second[i] = to_float(head[offset + kHalf]);
      square_sum += first[i] * first[i] + second[i] * second[i];
    });
  }
  // Applies the norm, unless null, and then the rotation by cos and sin [kDim], which are those of the token's
  // position. With a norm, `square_sum` must be the sum over the whole head.
  ECHO_DEVICE void rotate(unsigned lane, const Bf16* norm, float eps, const float* cos, const float* sin) {
    const float scale = reciprocal_root(square_sum / static_cast<float>(kDim) + eps);
    for_each(lane, [&](unsigned i, unsigned offset) {
      float a = first[i], b = second[i];
      if (norm != nullptr) a = a * scale * to_float(norm[offset]), b = b * scale * to_float(norm[offset + kHalf]);
      first[i] = a * cos[offset] + b * sin[offset];
      second[i] = b * cos[offset + kHalf] + a * sin[offset + kHalf];
    });
  }
};

// Normalises and rotates queries and keys of many tokens in place, and writes keys and values to the cache.
struct RotateJob {
  Bf16* qkv;           // [tokens, (heads + 2 kv_heads) * dim]
  const Bf16* q_norm;  // [dim], or null
  const Bf16* k_norm;  // [dim]; null if q_norm is
  const float* cos;    // [positions, dim]
  const float* sin;    // [positions, dim]; the first half is negated, so that both halves are x * cos + other * sin
  const std::int32_t* slots;        // [tokens]: page * kPageTokens + index in the page; negative: padding, not stored
  Bf16* keys;                       // [pages, kv_heads, kPageTokens, dim]
  Bf16* values;                     // [pages, kv_heads, kPageTokens, dim]
  std::uint32_t tokens, positions;  // the tokens are sequences of `positions` tokens, one after another
  std::uint32_t heads, kv_heads;
  float eps;
};

// Processes one token. A warp processes one head at a time.
template <unsigned kDim, class Block>
ECHO_DEVICE void rotate_block(Block& block, const RotateJob& job, unsigned token) {
  constexpr unsigned kWarps = Block::kThreads / kWarpThreads;
  using Pairs = HeadPairs<kDim>;
  typename Block::template Local<Pairs> locals;
  Bf16* const row = job.qkv + static_cast<std::size_t>(token) * (job.heads + 2 * job.kv_heads) * kDim;
  const std::int32_t slot = job.slots[token];
  const std::size_t angle_offset = static_cast<std::size_t>(token % job.positions) * kDim;
  const auto cache_offset = [&](unsigned kv) {
    const auto page = static_cast<std::size_t>(slot) / kPageTokens,
               token_in_page = static_cast<std::size_t>(slot) % kPageTokens;
    return ((page * job.kv_heads + kv) * kPageTokens + token_in_page) * kDim;
  };
  const unsigned heads = job.heads + job.kv_heads;  // of queries and keys; values are not rotated
  for (unsigned first_head = 0; first_head < heads; first_head += kWarps) {
    const auto head_of = [&](unsigned thread) { return first_head + thread / kWarpThreads; };
    block.on_each_thread([&](unsigned thread) {
      if (head_of(thread) < heads) locals[thread].load(row + head_of(thread) * kDim, thread % kWarpThreads);
    });
    if (job.q_norm != nullptr)
      block.template sum<kWarpThreads>([&](unsigned thread) -> float& { return locals[thread].square_sum; });
    block.on_each_thread([&](unsigned thread) {
      const unsigned head = head_of(thread), lane = thread % kWarpThreads;
      if (head >= heads) return;
      Pairs& self = locals[thread];
      const bool is_query = head < job.heads;
      self.rotate(lane, is_query ? job.q_norm : job.k_norm, job.eps, job.cos + angle_offset, job.sin + angle_offset);
      const bool is_cached = !is_query && slot >= 0;
      Bf16* const cached = job.keys + (is_cached ? cache_offset(head - job.heads) : 0);
      Pairs::for_each(lane, [&](unsigned i, unsigned offset) {
        const Bf16 a = to_bf16(self.first[i]), b = to_bf16(self.second[i]);
        row[head * kDim + offset] = a, row[head * kDim + offset + kDim / 2] = b;
        if (is_cached) cached[offset] = a, cached[offset + kDim / 2] = b;
      });
    });
  }
  if (slot < 0) return;
  block.on_each_thread([&](unsigned thread) {
    for (unsigned i = thread * kVectorCount; i < job.kv_heads * kDim; i += Block::kThreads * kVectorCount)
      store_vector(job.values + cache_offset(i / kDim) + i % kDim, load_vector(row + heads * kDim + i));
  });
}

// ---- attention of one new token per row over its pages ----

// Threads per block. More threads are faster with few rows, but need more shared memory.
inline constexpr unsigned kAttendThreads = 128, kAttendThreadsFewRows = 256;

// For the new token of each row, normalises and rotates queries and key, stores key and value, and attends to all
// tokens of the row. The tokens of a row are divided into splits, and the last block to finish combines their results.
// A block handles one split of a row for one key-value head and its query heads.
struct AttendJob {
  const Bf16* qkv;                  // [rows, (heads + 2 kv_heads) * dim]
  const Bf16* q_norm;               // [dim], or null
  const Bf16* k_norm;               // [dim]; null if q_norm is
  const float* cos;                 // [all positions, dim]
  const float* sin;                 // [all positions, dim]; the first half is negated, as in RotateJob
  const std::int32_t* positions;    // [rows]: position of the new token; negative: the row is unused
  const std::int32_t* pages;        // page numbers of all rows, one row after another
  const std::int32_t* pages_begin;  // [rows]: start of a row's pages
  Bf16* keys;                       // [pages, kv_heads, kPageTokens, dim]
  Bf16* values;                     // [pages, kv_heads, kPageTokens, dim]
  Bf16* out;                        // [rows, heads * dim]
  float* partial;                   // [rows, kv_heads, splits, kHeads, dim + 2]: value sums, maximum score, weight sum
  unsigned* arrived;                // [rows * kv_heads]: number of finished splits; 0 before and after a launch
  std::uint32_t rows, heads, kv_heads, splits;
  std::uint32_t tokens_min;  // least number of tokens of a split, so that a short row uses fewer than `splits`
  float eps;
};

// Whether AttendJob supports heads of `dim` values with `group` query heads per key-value head.
inline bool attend_supports(unsigned dim, unsigned group) {
  return (dim == 16 || dim == 32 || dim == 64 || dim == 128) && group <= 8;
}
// The parameter kHeads of attend_block() for `group` query heads per key-value head: `group` rounded up to 1, 2, 4
// or 8.
inline unsigned attend_heads(unsigned group) { return group <= 2 ? group : group <= 4 ? 4 : 8; }
// The number of threads per block. Larger groups need too many registers for kAttendThreadsFewRows.
inline unsigned attend_threads(unsigned rows, unsigned group) {
  return attend_heads(group) <= 4 && rows <= 32 ? kAttendThreadsFewRows : kAttendThreads;
}
// The value for AttendJob::splits: gives each processor kBlocksPerProcessor blocks, so that no processor is idle.
inline constexpr unsigned kBlocksPerProcessor = 4, kSplitsMax = 32;
inline unsigned attend_splits(unsigned processors, unsigned rows, unsigned kv_heads) {
  const unsigned pairs = rows * kv_heads, useful_splits = (kBlocksPerProcessor * processors + pairs - 1) / pairs;
  return max_of(1u, min_of(useful_splits, kSplitsMax));
}
// The value for AttendJob::tokens_min: 64 to 1024. It grows with the number of rows, because combining splits costs as
// much as some hundred tokens, and many rows need no splits to keep all processors busy.
inline unsigned attend_tokens_min(unsigned processors, unsigned rows, unsigned kv_heads) {
  return 64 * max_of(1u, min_of(kBlocksPerProcessor * rows * kv_heads / processors, 16u));
}
// Index of value `dim` in a row of shared memory that has one value of padding after every 32, against bank conflicts.
ECHO_EITHER unsigned attend_padded_dim(unsigned dim) { return dim + dim / kWarpThreads; }
template <unsigned kDim, unsigned kHeads>
ECHO_EITHER std::size_t attend_shared_bytes(unsigned threads) {
  constexpr std::size_t kScalars = 3;  // per team and head: maximum, weight sum and weight
  const unsigned teams = threads / (kDim / kVectorCount);
  // The queries, the new token's key and value in bf16, and each team's value sums and scalars.
  return sizeof(float) * (kHeads * kDim + kDim + teams * kHeads * (attend_padded_dim(kDim) + kScalars));
}

// Computes split `split` of a row for one key-value head, which has at most kHeads query heads.
//
// A team of threads processes one token at a time, each thread 8 of the token's values. In a round, all teams together
// process kRoundTokens tokens. Each team has sums of its own, which are combined at the end. Keys and values of a round
// are loaded during the previous round, and those of the first round while the preceding kernels still run.
template <unsigned kDim, unsigned kHeads, class Block>
ECHO_DEVICE void attend_block(Block& block, const AttendJob& job, unsigned row, unsigned kv, unsigned split) {
  constexpr unsigned kThreads = Block::kThreads, kWarps = kThreads / kWarpThreads;
  constexpr unsigned kLanes = kDim / kVectorCount;  // threads per team
  constexpr unsigned kTeams = kThreads / kLanes;
  constexpr unsigned kTeamTokens = kHeads > 4 ? 2 : 4;  // tokens per team and round, all of one page
  constexpr unsigned kRoundTokens = kTeams * kTeamTokens, kHalf = kDim / 2, kPaddedDim = attend_padded_dim(kDim);
  static_assert(kLanes >= 2 && kLanes <= kWarpThreads && kPageTokens % kTeamTokens == 0, "a team is a part of a warp");
  struct ThreadValues {
    HeadPairs<kDim> pairs;
    float q[kHeads][kVectorCount], value_sums[kHeads][kVectorCount];
    float scores[kTeamTokens][kHeads], max_score[kHeads];
    float weight_sum[kHeads];  // of the weights exp(score - max_score)
    Vector keys[kTeamTokens], values[kTeamTokens];
    std::int32_t page;  // page of the tokens of the next round
  };
  if (job.positions[row] < 0) return;
  const unsigned group = job.heads / job.kv_heads, width = (job.heads + 2 * job.kv_heads) * kDim;
  const unsigned position = static_cast<unsigned>(job.positions[row]), token_count = position + 1;
  const unsigned split_tokens = max_of((token_count + job.splits - 1) / job.splits, job.tokens_min);
  const unsigned tokens_per_split = (split_tokens + kRoundTokens - 1) / kRoundTokens * kRoundTokens;
  const unsigned splits_used = (token_count + tokens_per_split - 1) / tokens_per_split,
                 begin = split * tokens_per_split, end = min_of(token_count, begin + tokens_per_split);
  if (begin >= token_count) return;
  typename Block::template Local<ThreadValues> locals;
  const std::int32_t* const pages = job.pages + job.pages_begin[row];
  const auto cache_offset = [&](std::int32_t page, unsigned token) {
    return ((static_cast<std::size_t>(page) * job.kv_heads + kv) * kPageTokens + token % kPageTokens) * kDim;
  };
  float* const queries = block.template shared<float>();  // [kHeads][kDim]
  float* const new_key_value = queries + kHeads * kDim;   // key and value of the new token, bf16 [2][kDim]
  float* const value_sums = new_key_value + kDim;         // [kTeams][kHeads][kPaddedDim]
  float* const team_max_scores = value_sums + kTeams * kHeads * kPaddedDim;  // [kTeams][kHeads], and the next two
  float* const team_sums = team_max_scores + kTeams * kHeads;
  float* const team_weights = team_sums + kTeams * kHeads;
  Bf16* const new_key = reinterpret_cast<Bf16*>(new_key_value);
  Bf16* const new_value = new_key + kDim;
  // First token of the thread's team in the round that begins with token `round_begin`.
  const auto token_of = [&](unsigned thread, unsigned round_begin) {
    return round_begin + thread / kLanes * kTeamTokens;
  };
  // Loads the thread's values of its team's tokens from the cache. The new token's key and value are not there yet;
  // they come from shared memory later.
  const auto load = [&](unsigned thread, unsigned round_begin, const Bf16* cache, std::int32_t page, Vector* out) {
    const unsigned first_token = token_of(thread, round_begin);
    const std::size_t offset = cache_offset(page, first_token) + thread % kLanes * kVectorCount;
    ECHO_UNROLL
    for (unsigned i = 0; i < kTeamTokens; ++i)
      out[i] = first_token + i < end && first_token + i != position ? load_vector(cache + offset + i * kDim) : Vector{};
  };
  // Page of the token that token_of() returns.
  const auto page_of = [&](unsigned thread, unsigned round_begin) {
    const unsigned first_token = token_of(thread, round_begin);
    return first_token < end ? pages[first_token / kPageTokens] : 0;
  };
  block.on_each_thread([&](unsigned thread) {
    ThreadValues& self = locals[thread];
    self.page = page_of(thread, begin);
    load(thread, begin, job.keys, self.page, self.keys);
    load(thread, begin, job.values, self.page, self.values);
    self.page = page_of(thread, begin + kRoundTokens);
  });
  block.wait_for_inputs();
  // Loads the queries and, if the new token is in this split, its key and value. A unit is the work of one warp: one
  // query head, or the new key and value.
  const Bf16* const token = job.qkv + static_cast<std::size_t>(row) * width;
  const unsigned units = group + (end == token_count ? 1 : 0);
  for (unsigned first_unit = 0; first_unit < units; first_unit += kWarps) {
    const auto unit_of = [&](unsigned thread) { return first_unit + thread / kWarpThreads; };
    block.on_each_thread([&](unsigned thread) {
      const unsigned unit = unit_of(thread);
      const Bf16* const head = token + (unit < group ? kv * group + unit : job.heads + kv) * kDim;
      if (unit < units) locals[thread].pairs.load(head, thread % kWarpThreads);
    });
    if (job.q_norm != nullptr)
      block.template sum<kWarpThreads>([&](unsigned thread) -> float& { return locals[thread].pairs.square_sum; });
    block.on_each_thread([&](unsigned thread) {
      HeadPairs<kDim>& pairs = locals[thread].pairs;
      const unsigned unit = unit_of(thread), lane = thread % kWarpThreads;
      if (unit >= units) return;
      const std::size_t angle_offset = static_cast<std::size_t>(position) * kDim;
      pairs.rotate(lane, unit < group ? job.q_norm : job.k_norm, job.eps, job.cos + angle_offset,
                   job.sin + angle_offset);
      if (unit < group) {
        pairs.for_each(lane, [&](unsigned i, unsigned offset) {
          queries[unit * kDim + offset] = round_to_bf16(pairs.first[i]);
          queries[unit * kDim + offset + kHalf] = round_to_bf16(pairs.second[i]);
        });
        return;
      }
      const std::size_t cache_start = cache_offset(pages[position / kPageTokens], position);
      const Bf16* const value = token + (job.heads + job.kv_heads + kv) * kDim;
      pairs.for_each(lane, [&](unsigned i, unsigned offset) {
        job.keys[cache_start + offset] = new_key[offset] = to_bf16(pairs.first[i]);
        job.keys[cache_start + offset + kHalf] = new_key[offset + kHalf] = to_bf16(pairs.second[i]);
        job.values[cache_start + offset] = new_value[offset] = value[offset];
        job.values[cache_start + offset + kHalf] = new_value[offset + kHalf] = value[offset + kHalf];
      });
    });
  }
  block.on_each_thread_and_wait([](unsigned) {});  // until all warps have written queries, new key and new value
  block.on_each_thread([&](unsigned thread) {
    ThreadValues& self = locals[thread];
    ECHO_UNROLL
    for (unsigned h = 0; h < kHeads; ++h) {
      self.max_score[h] = -INFINITY, self.weight_sum[h] = 0;
      ECHO_UNROLL
      for (unsigned dim_index = 0; dim_index < kVectorCount; ++dim_index) {
        self.q[h][dim_index] = h < group ? queries[h * kDim + thread % kLanes * kVectorCount + dim_index] : 0;
        self.value_sums[h][dim_index] = 0;
      }
    }
  });
  // Goes through the split's tokens, a round at a time. Computes their scores, and then adds their weights and weighted
  // values to the sums. Weights are relative to the largest score so far; when it grows, the sums are scaled down.
  for (unsigned round_begin = begin; round_begin < end; round_begin += kRoundTokens) {
    block.on_each_thread([&](unsigned thread) {
      ThreadValues& self = locals[thread];
      const unsigned first_token = token_of(thread, round_begin);
      ECHO_UNROLL
      for (unsigned i = 0; i < kTeamTokens; ++i) {
        if (first_token + i == position) {
          self.keys[i] = load_vector(new_key + thread % kLanes * kVectorCount);
          self.values[i] = load_vector(new_value + thread % kLanes * kVectorCount);
        }
        ECHO_UNROLL
        for (unsigned h = 0; h < kHeads; ++h) {
          float score = 0;
          ECHO_UNROLL
          for (unsigned word = 0; word < 4; ++word)
            score += first_of(self.keys[i].words[word]) * self.q[h][2 * word] +
                     second_of(self.keys[i].words[word]) * self.q[h][2 * word + 1];
          self.scores[i][h] = score;
        }
      }
      load(thread, round_begin + kRoundTokens, job.keys, self.page, self.keys);
    });
    ECHO_UNROLL
    for (unsigned i = 0; i < kTeamTokens; ++i) {
      ECHO_UNROLL
      for (unsigned h = 0; h < kHeads; ++h)
        block.template sum<kLanes>([&](unsigned thread) -> float& { return locals[thread].scores[i][h]; });
    }
    block.on_each_thread([&](unsigned thread) {
      ThreadValues& self = locals[thread];
      const unsigned first_token = token_of(thread, round_begin);
      ECHO_UNROLL
      for (unsigned h = 0; h < kHeads; ++h) {
        float max_score = self.max_score[h];
        ECHO_UNROLL
        for (unsigned i = 0; i < kTeamTokens; ++i)
          if (first_token + i < end) max_score = larger(self.scores[i][h], max_score);
        // For a team without tokens so far, 0 avoids -INFINITY - -INFINITY, which would be NaN.
        const float base = max_score == -INFINITY ? 0 : max_score, rescale = fast_exp(self.max_score[h] - base);
        self.max_score[h] = max_score;
        self.weight_sum[h] *= rescale;
        ECHO_UNROLL
        for (unsigned dim_index = 0; dim_index < kVectorCount; ++dim_index) self.value_sums[h][dim_index] *= rescale;
        ECHO_UNROLL
        for (unsigned i = 0; i < kTeamTokens; ++i) {
          const float token_weight = first_token + i < end ? fast_exp(self.scores[i][h] - base) : 0;
          self.weight_sum[h] += token_weight;
          ECHO_UNROLL
          for (unsigned word = 0; word < 4; ++word) {
            self.value_sums[h][2 * word] += token_weight * first_of(self.values[i].words[word]);
            self.value_sums[h][2 * word + 1] += token_weight * second_of(self.values[i].words[word]);
          }
        }
      }
      load(thread, round_begin + kRoundTokens, job.values, self.page, self.values);
      self.page = page_of(thread, round_begin + 2 * kRoundTokens);
    });
  }
  // Combines the sums of all teams.
  block.on_each_thread_and_wait([&](unsigned thread) {
    const ThreadValues& self = locals[thread];
    const unsigned team = thread / kLanes, lane = thread % kLanes;
    ECHO_UNROLL
    for (unsigned h = 0; h < kHeads; ++h) {
      ECHO_UNROLL
      for (unsigned dim_index = 0; dim_index < kVectorCount; ++dim_index)
        value_sums[(team * kHeads + h) * kPaddedDim + attend_padded_dim(lane * kVectorCount + dim_index)] =
            self.value_sums[h][dim_index];
      if (lane == 0)
        team_max_scores[team * kHeads + h] = self.max_score[h], team_sums[team * kHeads + h] = self.weight_sum[h];
    }
  });
  const auto max_score_of = [&](unsigned h) {
    float max_score = -INFINITY;
    ECHO_UNROLL
    for (unsigned team = 0; team < kTeams; ++team) max_score = larger(team_max_scores[team * kHeads + h], max_score);
    return max_score;
  };
  block.on_each_thread_and_wait([&](unsigned thread) {
    for (unsigned element = thread; element < kTeams * kHeads; element += kThreads)
      team_weights[element] = fast_exp(team_max_scores[element] - max_score_of(element % kHeads));
  });
  Bf16* const out = job.out + static_cast<std::size_t>(row) * job.heads * kDim + kv * group * kDim;
  float* const partial =
      job.partial + (static_cast<std::size_t>(row) * job.kv_heads + kv) * job.splits * kHeads * (kDim + 2);
  block.on_each_thread([&](unsigned thread) {
    for (unsigned element = thread; element < group * kDim; element += kThreads) {
      const unsigned h = element / kDim, dim_index = element % kDim;
      float sum = 0, value = 0;
      ECHO_UNROLL
      for (unsigned team = 0; team < kTeams; ++team) {
        const float weight = team_weights[team * kHeads + h];
        sum += team_sums[team * kHeads + h] * weight;
        value += value_sums[(team * kHeads + h) * kPaddedDim + attend_padded_dim(dim_index)] * weight;
      }
      if (splits_used == 1) {
        out[element] = to_bf16(value / sum);
        continue;
      }
      float* const split_result = partial + (split * kHeads + h) * (kDim + 2);
      split_result[dim_index] = value;
      if (dim_index == 0) split_result[kDim] = max_score_of(h), split_result[kDim + 1] = sum;
    }
  });
  if (splits_used == 1 || !block.is_last_to_arrive(job.arrived + row * job.kv_heads + kv, splits_used)) return;
  // The last block to finish combines the results of all splits.
  block.on_each_thread([&](unsigned thread) {
    for (unsigned element = thread; element < group * kDim; element += kThreads) {
      const unsigned h = element / kDim, dim_index = element % kDim;
      const auto part = [&](unsigned s, unsigned i) {  // value i of the result of split s
        return load_shared_result(partial + (s * kHeads + h) * (kDim + 2) + i);
      };
      constexpr unsigned kBatch = 4;  // results loaded together, so that the loads do not wait for each other
      float max_score = -INFINITY, sum = 0, value = 0;
      for (unsigned first = 0; first < splits_used; first += kBatch) {
        float split_max_scores[kBatch], split_sums[kBatch], split_values[kBatch];
        ECHO_UNROLL
        for (unsigned i = 0; i < kBatch; ++i) {
          const bool is_used = first + i < splits_used;
          split_max_scores[i] = is_used ? part(first + i, kDim) : -INFINITY;
          split_sums[i] = is_used ? part(first + i, kDim + 1) : 0;
          split_values[i] = is_used ? part(first + i, dim_index) : 0;
        }
        float new_max_score = max_score;
        ECHO_UNROLL
        for (unsigned i = 0; i < kBatch; ++i) new_max_score = larger(split_max_scores[i], new_max_score);
        const float rescale = fast_exp(max_score - new_max_score);
        sum *= rescale, value *= rescale, max_score = new_max_score;
        ECHO_UNROLL
        for (unsigned i = 0; i < kBatch; ++i) {
          const float weight = fast_exp(split_max_scores[i] - new_max_score);
          sum += split_sums[i] * weight, value += split_values[i] * weight;
        }
      }
      out[element] = to_bf16(value / sum);
    }
  });
}
}  // namespace echoline::model::cuda

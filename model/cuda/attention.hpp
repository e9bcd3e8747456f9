// Norm and rotation of queries and keys, and attention over pages: device code as in block.hpp. Internal to this
// folder.
#pragma once
#include "model/cuda/block.hpp"

namespace echoline::model::cuda {

// ---- norm and rotation of queries and keys ----

// The values of a head in thread `lane` of a warp: pairs that are rotated together.
template <unsigned kDim>
struct HeadPairs {
  static constexpr unsigned kHalf = kDim / 2, kCount = (kHalf + kWarpThreads - 1) / kWarpThreads;
  float first[kCount], second[kCount], squares;
  // Calls f(i, at) for each pair of values `at` and at + kHalf.
  template <class F>
  ECHO_DEVICE static void each(unsigned lane, F&& f) {
    ECHO_UNROLL
    for (unsigned i = 0; i < kCount; ++i)
      if (lane + i * kWarpThreads < kHalf) f(i, lane + i * kWarpThreads);
  }
  ECHO_DEVICE void load(const Bf16* head, unsigned lane) {
    squares = 0;
    each(lane, [&](unsigned i, unsigned at) {
      first[i] = wide(head[at]), second[i] = wide(head[at + kHalf]);
      squares += first[i] * first[i] + second[i] * second[i];
    });
  }
  // Applies the norm, unless null, and the rotation [kDim] of a position. `squares` must be the whole head's.
  ECHO_DEVICE void rotate(unsigned lane, const Bf16* norm, float eps, const float* cos, const float* sin) {
    const float scale = reciprocal_root(squares / static_cast<float>(kDim) + eps);
    each(lane, [&](unsigned i, unsigned at) {
      float a = first[i], b = second[i];
      if (norm != nullptr) a = a * scale * wide(norm[at]), b = b * scale * wide(norm[at + kHalf]);
      first[i] = a * cos[at] + b * sin[at];
      second[i] = b * cos[at + kHalf] + a * sin[at + kHalf];
    });
  }
};

// Normalises and rotates queries and keys of many tokens in place; also writes keys and values to the cache.
struct RotateJob {
  Bf16* qkv;                        // [tokens, (heads + 2 kv_heads) * dim]
  const Bf16* q_norm;               // [dim], or null
  const Bf16* k_norm;               // [dim], or null
  const float* cos;                 // [positions, dim]
  const float* sin;                 // [positions, dim], with the sign of the rotation
  const std::int32_t* slots;        // [tokens]: page * kPageTokens + token within; negative: padding, not stored
  Bf16* keys;                       // [pages, kv_heads, kPageTokens, dim]
  Bf16* values;                     // [pages, kv_heads, kPageTokens, dim]
  std::uint32_t tokens, positions;  // token t has position t % positions
  std::uint32_t heads, kv_heads;
  float eps;
};

// One block per token.
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
  const unsigned heads = job.heads + job.kv_heads;
  for (unsigned first = 0; first < heads; first += kWarps) {
    const auto head_of = [&](unsigned thread) { return first + thread / kWarpThreads; };
    block.own([&](unsigned thread) {
      if (head_of(thread) < heads) locals[thread].load(row + head_of(thread) * kDim, thread % kWarpThreads);
    });
    if (job.q_norm != nullptr)
      block.template sum<kWarpThreads>([&](unsigned thread) -> float& { return locals[thread].squares; });
    block.own([&](unsigned thread) {
      const unsigned head = head_of(thread), lane = thread % kWarpThreads;
      if (head >= heads) return;
      Pairs& self = locals[thread];
      const bool is_query = head < job.heads;
      self.rotate(lane, is_query ? job.q_norm : job.k_norm, job.eps, job.cos + angle_offset, job.sin + angle_offset);
      const bool is_cached = !is_query && slot >= 0;
      Bf16* const cached = job.keys + (is_cached ? cache_offset(head - job.heads) : 0);
      Pairs::each(lane, [&](unsigned i, unsigned at) {
        const Bf16 a = narrow(self.first[i]), b = narrow(self.second[i]);
        row[head * kDim + at] = a, row[head * kDim + at + kDim / 2] = b;
        if (is_cached) cached[at] = a, cached[at + kDim / 2] = b;
      });
    });
  }
  if (slot < 0) return;
  block.own([&](unsigned thread) {
    for (unsigned at = thread * kVectorCount; at < job.kv_heads * kDim; at += Block::kThreads * kVectorCount)
      store_vector(job.values + cache_offset(at / kDim) + at % kDim, load_vector(row + heads * kDim + at));
  });
}

// ---- attention of one new token per row over its pages ----

// Threads per block, for kHeads query heads. More threads are faster for few rows but need more memory.
inline constexpr unsigned kAttendThreads = 128, kAttendThreadsMany = 256;

// Normalises and rotates queries and keys, writes the new key and value to their place, and attends with the query
// heads of a key-value head to all tokens of its text.
struct AttendJob {
  const Bf16* qkv;                  // [rows, (heads + 2 kv_heads) * dim]
  const Bf16* q_norm;               // [dim], or null
  const Bf16* k_norm;               // [dim], or null
  const float* cos;                 // [positions, dim]
  const float* sin;                 // [positions, dim], with the sign of the rotation
  const std::int32_t* positions;    // [rows]: of the new token; negative: no row
  const std::int32_t* pages;        // of all rows
  const std::int32_t* pages_begin;  // [rows]: start of a row's pages
  Bf16* keys;                       // [pages, kv_heads, kPageTokens, dim]
  Bf16* values;                     // [pages, kv_heads, kPageTokens, dim]
  Bf16* out;                        // [rows, heads * dim]
  float* partial;                   // [rows, kv_heads, splits, kHeads, dim + 2]
  unsigned* arrived;                // [rows * kv_heads], 0
  std::uint32_t rows, heads, kv_heads, splits;
  std::uint32_t tokens_min;  // of a split
  float eps;
};

// Whether heads of `dim` values with `group` query heads per key-value head are supported.
inline bool attend_supports(unsigned dim, unsigned group) {
  return (dim == 16 || dim == 32 || dim == 64 || dim == 128) && group <= 8;
}
// kHeads for such a group.
inline unsigned attend_heads(unsigned group) { return group <= 2 ? group : group <= 4 ? 4 : 8; }
// Threads per block for such a group.
inline unsigned attend_threads(unsigned rows, unsigned group) {
  return attend_heads(group) <= 4 && rows <= 32 ? kAttendThreadsMany : kAttendThreads;
}
// For AttendJob::splits and tokens_min. Blocks share a text if processors would otherwise be idle, and always share a
// long one; combining the shares costs as much as some hundred tokens.
inline unsigned attend_splits(unsigned processors, unsigned rows, unsigned kv_heads) {
  const unsigned pairs = rows * kv_heads, wanted = (4 * processors + pairs - 1) / pairs;
  return most(1u, least(wanted, 32u));
}
inline unsigned attend_tokens_min(unsigned processors, unsigned rows, unsigned kv_heads) {
  return 64 * most(1u, least(4 * rows * kv_heads / processors, 16u));
}
// Values of a padded row in shared memory. The padding prevents bank conflicts.
ECHO_EITHER unsigned attend_padded_dim(unsigned dim) { return dim + dim / kWarpThreads; }
template <unsigned kDim, unsigned kHeads>
ECHO_EITHER std::size_t attend_shared_bytes(unsigned threads) {
  return sizeof(float) *
         (kHeads * kDim + kDim + threads / (kDim / 8) * kHeads * (attend_padded_dim(kDim) + std::size_t{3}));
}

// The block of split `split` for a row and a key-value head with at most kHeads query heads.
//
// A team of threads processes a token, each thread 8 of its values. Teams have separate sums, which are added at the
// end. Keys and values of a round of tokens are loaded during the previous round, and the first ones while the
// preceding kernels still run.
template <unsigned kDim, unsigned kHeads, class Block>
ECHO_DEVICE void attend_block(Block& block, const AttendJob& job, unsigned row, unsigned kv, unsigned split) {
  constexpr unsigned kThreads = Block::kThreads, kWarps = kThreads / kWarpThreads;
  constexpr unsigned kLanes = kDim / kVectorCount;  // threads per team
  constexpr unsigned kTeams = kThreads / kLanes;
  constexpr unsigned kTeamTokens = kHeads > 4 ? 2 : 4;  // tokens per team and round, all of one page
  constexpr unsigned kRoundTokens = kTeams * kTeamTokens, kHalf = kDim / 2, kPaddedDim = attend_padded_dim(kDim);
  static_assert(kLanes >= 2 && kLanes <= kWarpThreads && kPageTokens % kTeamTokens == 0, "a team is a part of a warp");
  struct Own {
    HeadPairs<kDim> pairs;
    float q[kHeads][kVectorCount], value_sums[kHeads][kVectorCount];
    float top[kHeads], sum[kHeads], scores[kTeamTokens][kHeads];
    Vector keys[kTeamTokens], values[kTeamTokens];
    std::int32_t page;  // of the tokens of the round after the loaded one
  };
  if (job.positions[row] < 0) return;
  const unsigned group = job.heads / job.kv_heads, width = (job.heads + 2 * job.kv_heads) * kDim;
  const unsigned position = static_cast<unsigned>(job.positions[row]), seen = position + 1;
  const unsigned split_tokens = most((seen + job.splits - 1) / job.splits, job.tokens_min);
  const unsigned tokens_per_split = (split_tokens + kRoundTokens - 1) / kRoundTokens * kRoundTokens;
  const unsigned splits_used = (seen + tokens_per_split - 1) / tokens_per_split, begin = split * tokens_per_split,
                 end = least(seen, begin + tokens_per_split);
  if (begin >= seen) return;
  typename Block::template Local<Own> locals;
  const std::int32_t* const pages = job.pages + job.pages_begin[row];
  const auto cache_offset = [&](std::int32_t page, unsigned token) {
    return ((static_cast<std::size_t>(page) * job.kv_heads + kv) * kPageTokens + token % kPageTokens) * kDim;
  };
  float* const queries = block.template shared<float>();          // [kHeads][kDim]
  float* const new_key_value = queries + kHeads * kDim;           // key and value of the new token, bf16 [2][kDim]
  float* const value_sums = new_key_value + kDim;                 // [kTeams][kHeads][kPaddedDim]
  float* const tops = value_sums + kTeams * kHeads * kPaddedDim;  // [kTeams][kHeads], and the next two
  float* const sums = tops + kTeams * kHeads;
  float* const team_weights = sums + kTeams * kHeads;
  Bf16* const new_key = reinterpret_cast<Bf16*>(new_key_value);
  Bf16* const new_value = new_key + kDim;
  const auto token_of = [&](unsigned thread, unsigned round) { return round + thread / kLanes * kTeamTokens; };
  // The new token's key and value are not in the cache yet; they come from shared memory.
  const auto load = [&](unsigned thread, unsigned round, const Bf16* from, std::int32_t page, Vector* to) {
    const unsigned t = token_of(thread, round);
    const std::size_t at = cache_offset(page, t) + thread % kLanes * kVectorCount;
    ECHO_UNROLL
    for (unsigned i = 0; i < kTeamTokens; ++i)
      to[i] = t + i < end && t + i != position ? load_vector(from + at + i * kDim) : Vector{};
  };
  const auto page_of = [&](unsigned thread, unsigned round) {
    const unsigned t = token_of(thread, round);
    return t < end ? pages[t / kPageTokens] : 0;
  };
  block.own([&](unsigned thread) {
    Own& self = locals[thread];
    self.page = page_of(thread, begin);
    load(thread, begin, job.keys, self.page, self.keys);
    load(thread, begin, job.values, self.page, self.values);
    self.page = page_of(thread, begin + kRoundTokens);
  });
  block.wait_for_inputs();
  // Loads the queries and, if the new token is in this split, its key and value.
  const Bf16* const token = job.qkv + static_cast<std::size_t>(row) * width;
  const unsigned units = group + (end == seen ? 1 : 0);
  for (unsigned first_unit = 0; first_unit < units; first_unit += kWarps) {
    const auto unit_of = [&](unsigned thread) { return first_unit + thread / kWarpThreads; };
    block.own([&](unsigned thread) {
      const unsigned unit = unit_of(thread);
      const Bf16* const head = token + (unit < group ? kv * group + unit : job.heads + kv) * kDim;
      if (unit < units) locals[thread].pairs.load(head, thread % kWarpThreads);
    });
    if (job.q_norm != nullptr)
      block.template sum<kWarpThreads>([&](unsigned thread) -> float& { return locals[thread].pairs.squares; });
    block.own([&](unsigned thread) {
      HeadPairs<kDim>& pairs = locals[thread].pairs;
      const unsigned unit = unit_of(thread), lane = thread % kWarpThreads;
      if (unit >= units) return;
      const std::size_t angle_offset = static_cast<std::size_t>(position) * kDim;
      pairs.rotate(lane, unit < group ? job.q_norm : job.k_norm, job.eps, job.cos + angle_offset,
                   job.sin + angle_offset);
      if (unit < group) {
        pairs.each(lane, [&](unsigned i, unsigned at) {
          queries[unit * kDim + at] = rounded(pairs.first[i]);
          queries[unit * kDim + at + kHalf] = rounded(pairs.second[i]);
        });
        return;
      }
      const std::size_t to = cache_offset(pages[position / kPageTokens], position);
      const Bf16* const value = token + (job.heads + job.kv_heads + kv) * kDim;
      pairs.each(lane, [&](unsigned i, unsigned at) {
        job.keys[to + at] = new_key[at] = narrow(pairs.first[i]);
        job.keys[to + at + kHalf] = new_key[at + kHalf] = narrow(pairs.second[i]);
        job.values[to + at] = new_value[at] = value[at];
        job.values[to + at + kHalf] = new_value[at + kHalf] = value[at + kHalf];
      });
    });
  }
  block.each([](unsigned) {});
  block.own([&](unsigned thread) {
    Own& self = locals[thread];
    ECHO_UNROLL
    for (unsigned h = 0; h < kHeads; ++h) {
      self.top[h] = -INFINITY, self.sum[h] = 0;
      ECHO_UNROLL
      for (unsigned d = 0; d < kVectorCount; ++d) {
        self.q[h][d] = h < group ? queries[h * kDim + thread % kLanes * kVectorCount + d] : 0;
        self.value_sums[h][d] = 0;
      }
    }
  });
  for (unsigned round = begin; round < end; round += kRoundTokens) {
    block.own([&](unsigned thread) {
      Own& self = locals[thread];
      const unsigned t = token_of(thread, round);
      ECHO_UNROLL
      for (unsigned i = 0; i < kTeamTokens; ++i) {
        if (t + i == position) {
          self.keys[i] = load_vector(new_key + thread % kLanes * kVectorCount);
          self.values[i] = load_vector(new_value + thread % kLanes * kVectorCount);
        }
        ECHO_UNROLL
        for (unsigned h = 0; h < kHeads; ++h) {
          float score = 0;
          ECHO_UNROLL
          for (unsigned w = 0; w < 4; ++w)
            score += first_of(self.keys[i].words[w]) * self.q[h][2 * w] +
                     second_of(self.keys[i].words[w]) * self.q[h][2 * w + 1];
          self.scores[i][h] = score;
        }
      }
      load(thread, round + kRoundTokens, job.keys, self.page, self.keys);
    });
    ECHO_UNROLL
    for (unsigned i = 0; i < kTeamTokens; ++i) {
      ECHO_UNROLL
      for (unsigned h = 0; h < kHeads; ++h)
        block.template sum<kLanes>([&](unsigned thread) -> float& { return locals[thread].scores[i][h]; });
    }
    block.own([&](unsigned thread) {
      Own& self = locals[thread];
      const unsigned t = token_of(thread, round);
      ECHO_UNROLL
      for (unsigned h = 0; h < kHeads; ++h) {
        float top = self.top[h];
        ECHO_UNROLL
        for (unsigned i = 0; i < kTeamTokens; ++i)
          if (t + i < end) top = larger(self.scores[i][h], top);
        const float base = top == -INFINITY ? 0 : top, rescale = fast_exp(self.top[h] - base);
        self.top[h] = top;
        self.sum[h] *= rescale;
        ECHO_UNROLL
        for (unsigned d = 0; d < kVectorCount; ++d) self.value_sums[h][d] *= rescale;
        ECHO_UNROLL
        for (unsigned i = 0; i < kTeamTokens; ++i) {
          const float p = t + i < end ? fast_exp(self.scores[i][h] - base) : 0;
          self.sum[h] += p;
          ECHO_UNROLL
          for (unsigned w = 0; w < 4; ++w) {
            self.value_sums[h][2 * w] += p * first_of(self.values[i].words[w]);
            self.value_sums[h][2 * w + 1] += p * second_of(self.values[i].words[w]);
          }
        }
      }
      load(thread, round + kRoundTokens, job.values, self.page, self.values);
      self.page = page_of(thread, round + 2 * kRoundTokens);
    });
  }
  const auto padded = [](unsigned d) { return d + d / kWarpThreads; };
  block.each([&](unsigned thread) {
    const Own& self = locals[thread];
    const unsigned team = thread / kLanes, lane = thread % kLanes;
    ECHO_UNROLL
    for (unsigned h = 0; h < kHeads; ++h) {
      ECHO_UNROLL
      for (unsigned d = 0; d < kVectorCount; ++d)
        value_sums[(team * kHeads + h) * kPaddedDim + padded(lane * kVectorCount + d)] = self.value_sums[h][d];
      if (lane == 0) tops[team * kHeads + h] = self.top[h], sums[team * kHeads + h] = self.sum[h];
    }
  });
  const auto top_of = [&](unsigned h) {
    float top = -INFINITY;
    ECHO_UNROLL
    for (unsigned team = 0; team < kTeams; ++team) top = larger(tops[team * kHeads + h], top);
    return top;
  };
  block.each([&](unsigned thread) {
    for (unsigned e = thread; e < kTeams * kHeads; e += kThreads)
      team_weights[e] = fast_exp(tops[e] - top_of(e % kHeads));
  });
  Bf16* const out = job.out + static_cast<std::size_t>(row) * job.heads * kDim + kv * group * kDim;
  float* const partial =
      job.partial + (static_cast<std::size_t>(row) * job.kv_heads + kv) * job.splits * kHeads * (kDim + 2);
  block.own([&](unsigned thread) {
    for (unsigned e = thread; e < group * kDim; e += kThreads) {
      const unsigned h = e / kDim, d = e % kDim;
      float sum = 0, value = 0;
      ECHO_UNROLL
      for (unsigned team = 0; team < kTeams; ++team) {
        const float weight = team_weights[team * kHeads + h];
        sum += sums[team * kHeads + h] * weight;
        value += value_sums[(team * kHeads + h) * kPaddedDim + padded(d)] * weight;
      }
      if (splits_used == 1) {
        out[e] = narrow(value / sum);
        continue;
      }
      float* const to = partial + (split * kHeads + h) * (kDim + 2);
      to[d] = value;
      if (d == 0) to[kDim] = top_of(h), to[kDim + 1] = sum;
    }
  });
  if (splits_used == 1 || !block.arrive(job.arrived + row * job.kv_heads + kv, splits_used)) return;
  block.own([&](unsigned thread) {
    for (unsigned e = thread; e < group * kDim; e += kThreads) {
      const unsigned h = e / kDim, d = e % kDim;
      const auto part = [&](unsigned s, unsigned at) {
        return load_shared_result(partial + (s * kHeads + h) * (kDim + 2) + at);
      };
      constexpr unsigned kBatch = 4;
      float top = -INFINITY, sum = 0, value = 0;
      for (unsigned first = 0; first < splits_used; first += kBatch) {
        float split_tops[kBatch], split_sums[kBatch], split_values[kBatch];
        ECHO_UNROLL
        for (unsigned i = 0; i < kBatch; ++i) {
          const bool is_used = first + i < splits_used;
          split_tops[i] = is_used ? part(first + i, kDim) : -INFINITY;
          split_sums[i] = is_used ? part(first + i, kDim + 1) : 0;
          split_values[i] = is_used ? part(first + i, d) : 0;
        }
        float new_top = top;
        ECHO_UNROLL
        for (unsigned i = 0; i < kBatch; ++i) new_top = larger(split_tops[i], new_top);
        const float rescale = fast_exp(top - new_top);
        sum *= rescale, value *= rescale, top = new_top;
        ECHO_UNROLL
        for (unsigned i = 0; i < kBatch; ++i) {
          const float weight = fast_exp(split_tops[i] - new_top);
          sum += split_sums[i] * weight, value += split_values[i] * weight;
        }
      }
      out[e] = narrow(value / sum);
    }
  });
}
}  // namespace echoline::model::cuda

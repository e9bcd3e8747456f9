// The device code: the work of one block or warp, as templates of a policy class that stands for the block or warp.
// kernels.cu uses a policy of real threads; the tests run the same functions with one that loops over the threads on
// the CPU. C++17, because CUDA compilers lag behind. Internal to this folder.
//
// A policy class `Block` (256 threads) or `Warp` (32 threads) has
//   Block::Local<T>       a T of each thread, indexed by thread; registers on a device
//   each(f)               f(thread) on every thread; all are done when it returns
//   scan_warps(f)         replaces f(thread), a uint64_t&, by the sum over its warp up to and including the thread
//   sum<kFirst, kLast>(f) replaces f(thread), a Pair& (two uint64_t), by the sum over all threads of the warp whose
//                         index differs from its own only in the bits kFirst ... kLast
//   shared()              memory that the threads of the block share, an ExtractShared&
//   atomic_add(to, value) adds, and returns the earlier value
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define ECHO_DEVICE __device__ __forceinline__
#define ECHO_CONSTANT static __constant__ const
#else
#define ECHO_DEVICE inline
#define ECHO_CONSTANT inline constexpr
#endif
#if defined(__CUDA_ARCH__)
#define ECHO_UNROLL _Pragma("unroll")
#else
#define ECHO_UNROLL
#endif

namespace echoline::delta::cuda {

inline constexpr unsigned kWarpThreads = 32;
inline constexpr unsigned kBlockThreads = 256;
inline constexpr unsigned kBlockWarps = kBlockThreads / kWarpThreads;

// 16 bytes, the unit of a thread's loads and stores.
struct alignas(16) Vector {
  std::uint64_t low, high;
};
inline constexpr unsigned kVectorBytes = sizeof(Vector);

// Loads from a multiple of 16, with a hint that the data is not read again soon.
ECHO_DEVICE Vector load_vector(const std::byte* from) {
#if defined(__CUDA_ARCH__)
  const ulonglong2 vector = __ldcs(reinterpret_cast<const ulonglong2*>(from));
  return {vector.x, vector.y};
#else
  Vector vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
#endif
}

// Loads `bytes` bytes, at most 8, from any address. Pads them with zeros.
ECHO_DEVICE std::uint64_t load_bytes(const std::byte* from, unsigned bytes) {
  std::uint64_t word = 0;
  for (unsigned i = 0; i < bytes; ++i) word |= static_cast<std::uint64_t>(from[i]) << 8 * i;
  return word;
}

// ---- extraction: differing elements, in ascending order ----
//
// A block compares a tile of a segment in rounds. In a round, each thread compares one vector.

inline constexpr unsigned kTileRounds = 4;
inline constexpr unsigned kTileBytes = kBlockThreads * kTileRounds * kVectorBytes;
inline constexpr unsigned kTilesPerSegment = (8u << 20) / kTileBytes;  // segments as in delta/segment.hpp
inline constexpr std::uint64_t kNoRoom = ~0ull;  // an offset: the records had no room for the tile

struct ExtractSegment {
  const std::byte* prev;  // multiples of 16
  const std::byte* cur;
  std::uint32_t bytes;
  std::uint32_t element_bytes;  // 1, 2, 4 or 8
};

// The result of a tile: `count` changes. Their record has the positions (u32, within the segment) at `offset` of the
// records, then the values, see record_bytes(). If `offset` is kNoRoom, there is no record.
struct TileResult {
  std::uint64_t offset;
  std::uint64_t count;
};

struct ExtractJob {
  const ExtractSegment* segments;
  const std::uint32_t* tiles;  // segment * kTilesPerSegment + tile within the segment
  std::uint32_t tile_count;
  TileResult* results;  // one for each of `tiles`
  std::byte* records;
  std::uint64_t records_capacity;
  unsigned long long* records_used;  // 0 at the start; exceeds the capacity if a tile found no room
};

// Both parts of a record are padded to whole words of eight bytes.
ECHO_DEVICE std::uint64_t positions_bytes(std::uint64_t count) { return (count * 4 + 7) / 8 * 8; }
ECHO_DEVICE std::uint64_t record_bytes(std::uint64_t count, unsigned element_bytes) {
  return positions_bytes(count) + (count * element_bytes + 7) / 8 * 8;
}

// Returns a mask whose bit i is set if element i of the two vectors differs.
template <unsigned kSize>
ECHO_DEVICE std::uint32_t differing_elements(const Vector& a, const Vector& b) {
  constexpr unsigned kElementsPerWord = 8 / kSize;
  constexpr std::uint64_t kElementMask = ~0ull >> (64 - 8 * kSize);
  const std::uint64_t low = a.low ^ b.low, high = a.high ^ b.high;
  std::uint32_t mask = 0;
  ECHO_UNROLL
  for (unsigned element = 0; element < kElementsPerWord; ++element) {
    mask |= static_cast<std::uint32_t>((low >> 8 * kSize * element & kElementMask) != 0) << element;
    mask |= static_cast<std::uint32_t>((high >> 8 * kSize * element & kElementMask) != 0)
            << (element + kElementsPerWord);
  }
  return mask;
}

ECHO_DEVICE unsigned count_bits(std::uint32_t mask) {
#if defined(__CUDA_ARCH__)
  return static_cast<unsigned>(__popc(mask));
#else
  return static_cast<unsigned>(__builtin_popcount(mask));
#endif
}

ECHO_DEVICE unsigned first_bit(std::uint32_t mask) {
#if defined(__CUDA_ARCH__)
  return static_cast<unsigned>(__ffs(static_cast<int>(mask))) - 1;
#else
  return static_cast<unsigned>(__builtin_ctz(mask));
#endif
}

template <unsigned kSize>
struct ElementOf;
template <>
struct ElementOf<1> {
  using Type = std::uint8_t;
};
template <>
struct ElementOf<2> {
  using Type = std::uint16_t;
};
template <>
struct ElementOf<4> {
  using Type = std::uint32_t;
};
template <>
struct ElementOf<8> {
  using Type = std::uint64_t;
};
template <>
struct ElementOf<kVectorBytes> {  // for exchanges of whole vectors
  using Type = Vector;
};

// Counts of up to 2^16 - 1 for each round of a tile, packed into a word.
static_assert(kTileRounds * 16 <= 64 && kWarpThreads * kVectorBytes < 1u << 16);
ECHO_DEVICE unsigned count_of_round(std::uint64_t counts, unsigned round) {
  return static_cast<unsigned>(counts >> 16 * round & 0xffff);
}
ECHO_DEVICE unsigned count_of_all_rounds(std::uint64_t counts) {
  unsigned sum = 0;
  ECHO_UNROLL
  for (unsigned round = 0; round < kTileRounds; ++round) sum += count_of_round(counts, round);
  return sum;
}

struct ExtractShared {
  std::uint64_t warp_counts[kBlockWarps];  // by round
  std::uint64_t offset;
};

struct ExtractLocal {
  Vector cur[kTileRounds];
  std::uint32_t mask[kTileRounds];
  std::uint64_t counts;       // by round: of this thread
  std::uint64_t warp_prefix;  // by round: of the threads of the warp up to and including this one
};

// The offset within the tile of a thread's load in a round. A warp covers consecutive bytes, round after round.
ECHO_DEVICE unsigned tile_byte(unsigned thread, unsigned round) {
  const unsigned warp = thread / kWarpThreads, lane = thread % kWarpThreads;
  return ((warp * kTileRounds + round) * kWarpThreads + lane) * kVectorBytes;
}

// Extracts the changes of the tile job.tiles[tile_index], which begins at first_byte of the segment.
template <unsigned kSize, class Block>
ECHO_DEVICE void extract_tile(Block& block, const ExtractJob& job, std::uint32_t tile_index,
                              const ExtractSegment& segment, std::uint32_t first_byte) {
  const std::byte* prev = segment.prev + first_byte;
  const std::byte* cur = segment.cur + first_byte;
  const std::uint32_t bytes_left = segment.bytes - first_byte;
  typename Block::template Local<ExtractLocal> locals;
  ExtractShared& shared = block.shared();

  // Each thread compares its vectors and counts its changes, by round.
  block.each([&](unsigned thread) {
    ExtractLocal& self = locals[thread];
    Vector old[kTileRounds];
    ECHO_UNROLL
    for (unsigned round = 0; round < kTileRounds; ++round) {
      const unsigned offset = tile_byte(thread, round);
      if (offset + kVectorBytes <= bytes_left) {
        old[round] = load_vector(prev + offset);
        self.cur[round] = load_vector(cur + offset);
      } else {
        const unsigned bytes = offset < bytes_left ? bytes_left - offset : 0;
        const unsigned low_bytes = bytes < 8 ? bytes : 8;
        old[round] = {load_bytes(prev + offset, low_bytes), load_bytes(prev + offset + 8, bytes - low_bytes)};
        self.cur[round] = {load_bytes(cur + offset, low_bytes), load_bytes(cur + offset + 8, bytes - low_bytes)};
      }
    }
    self.counts = 0;
    ECHO_UNROLL
    for (unsigned round = 0; round < kTileRounds; ++round) {
      self.mask[round] = differing_elements<kSize>(old[round], self.cur[round]);
      self.counts |= static_cast<std::uint64_t>(count_bits(self.mask[round])) << 16 * round;
    }
    self.warp_prefix = self.counts;
  });
  // Sums of counts over the threads of a warp, and from these over the warps, give each change its rank in the tile.
  block.scan_warps([&](unsigned thread) -> std::uint64_t& { return locals[thread].warp_prefix; });
  block.each([&](unsigned thread) {
    const bool is_last_of_warp = thread % kWarpThreads == kWarpThreads - 1;
    if (is_last_of_warp) shared.warp_counts[thread / kWarpThreads] = locals[thread].warp_prefix;
  });
  // One thread reserves room for the tile's changes in the records.
  block.each([&](unsigned thread) {
    if (thread != 0) return;
    unsigned count = 0;
    ECHO_UNROLL
    for (unsigned warp = 0; warp < kBlockWarps; ++warp) count += count_of_all_rounds(shared.warp_counts[warp]);
    const std::uint64_t bytes = record_bytes(count, kSize);
    std::uint64_t offset = count != 0 ? block.atomic_add(job.records_used, bytes) : 0;
    if (offset + bytes > job.records_capacity) offset = kNoRoom;
    job.results[tile_index] = {offset, count};
    shared.offset = count != 0 ? offset : kNoRoom;  // kNoRoom: nothing is written below
  });
  // Each thread writes its changes.
  block.each([&](unsigned thread) {
    const ExtractLocal& self = locals[thread];
    if (shared.offset == kNoRoom || self.counts == 0) return;
    const unsigned warp = thread / kWarpThreads;
    unsigned count = 0;      // of the tile's changes
    unsigned rank_base = 0;  // changes of earlier warps, then also of this warp's earlier rounds
    ECHO_UNROLL
    for (unsigned other_warp = 0; other_warp < kBlockWarps; ++other_warp) {
      const unsigned warp_count = count_of_all_rounds(shared.warp_counts[other_warp]);
      count += warp_count;
      rank_base += other_warp < warp ? warp_count : 0;
    }
    auto* positions = reinterpret_cast<std::uint32_t*>(job.records + shared.offset);
    using Element = typename ElementOf<kSize>::Type;
    auto* values = reinterpret_cast<Element*>(job.records + shared.offset + positions_bytes(count));
    const std::uint64_t earlier_counts = self.warp_prefix - self.counts;  // by round: of the warp's earlier threads
    ECHO_UNROLL
    for (unsigned round = 0; round < kTileRounds; ++round) {
      unsigned rank = rank_base + count_of_round(earlier_counts, round);
      rank_base += count_of_round(shared.warp_counts[warp], round);
      const std::uint32_t first = (first_byte + tile_byte(thread, round)) / kSize;
      for (std::uint32_t mask = self.mask[round]; mask != 0; mask &= mask - 1, ++rank) {
        const unsigned element = first_bit(mask);
        const std::uint64_t word = element * kSize < 8 ? self.cur[round].low : self.cur[round].high;
        positions[rank] = first + element;
        values[rank] = static_cast<Element>(word >> element * kSize % 8 * 8);
      }
    }
  });
}

// All work of block number `tile_index` of a job.
template <class Block>
ECHO_DEVICE void extract_block(Block& block, const ExtractJob& job, std::uint32_t tile_index) {
  const std::uint32_t tile = job.tiles[tile_index];
  const ExtractSegment segment = job.segments[tile / kTilesPerSegment];
  const std::uint32_t first_byte = tile % kTilesPerSegment * kTileBytes;
  switch (segment.element_bytes) {
    case 1:
      return extract_tile<1>(block, job, tile_index, segment, first_byte);
    case 2:
      return extract_tile<2>(block, job, tile_index, segment, first_byte);
    case 4:
      return extract_tile<4>(block, job, tile_index, segment, first_byte);
    case 8:
      return extract_tile<8>(block, job, tile_index, segment, first_byte);
  }
}

// ---- gathering the tiles' results ----

// Where the changes of a tile go: byte offsets in GatherJob::out.
struct GatherPlace {
  std::uint64_t positions, values;
};

struct GatherJob {
  const ExtractSegment* segments;
  const std::uint32_t* tiles;  // of the ExtractJob with these results
  const TileResult* results;   // all found room
  const std::byte* records;
  const GatherPlace* places;  // one for each of `tiles`
  std::uint32_t tile_count;
  std::byte* out;
};

// Copies the changes of the tile job.tiles[tile_index] from its record to its places.
template <unsigned kSize, class Warp>
ECHO_DEVICE void gather_tile(Warp& warp, const GatherJob& job, std::uint32_t tile_index) {
  using Element = typename ElementOf<kSize>::Type;
  const auto count = static_cast<unsigned>(job.results[tile_index].count);
  const std::byte* record = job.records + job.results[tile_index].offset;
  const auto* positions = reinterpret_cast<const std::uint32_t*>(record);
  const auto* values = reinterpret_cast<const Element*>(record + positions_bytes(count));
  auto* to_positions = reinterpret_cast<std::uint32_t*>(job.out + job.places[tile_index].positions);
  auto* to_values = reinterpret_cast<Element*>(job.out + job.places[tile_index].values);
  warp.each([&](unsigned thread) {
    for (unsigned i = thread; i < count; i += kWarpThreads) {
      to_positions[i] = positions[i];
      to_values[i] = values[i];
    }
  });
}

// All work of the warp for the tile job.tiles[tile_index].
template <class Warp>
ECHO_DEVICE void gather_warp(Warp& warp, const GatherJob& job, std::uint32_t tile_index) {
  if (job.results[tile_index].count == 0) return;
  switch (job.segments[job.tiles[tile_index] / kTilesPerSegment].element_bytes) {
    case 1:
      return gather_tile<1>(warp, job, tile_index);
    case 2:
      return gather_tile<2>(warp, job, tile_index);
    case 4:
      return gather_tile<4>(warp, job, tile_index);
    case 8:
      return gather_tile<8>(warp, job, tile_index);
  }
}

// ---- application: exchanges new values with old ones ----

inline constexpr unsigned kSwapRounds = 4;
inline constexpr unsigned kChunkElements = kBlockThreads * kSwapRounds;

// Exchanges elements of a tensor, `target`, with `values`, which then hold the old ones. A second exchange restores
// both. No element occurs twice.
struct SwapPart {
  std::byte* target;
  const std::uint32_t* positions;  // null: elements 0, 1, 2, ...
  std::byte* values;
  std::uint64_t count;
  std::uint64_t element_bytes;  // 1, 2, 4, 8 or 16; both addresses are multiples of it
};

struct SwapChunk {
  std::uint32_t part;   // index in SwapJob::parts
  std::uint32_t chunk;  // number within the part; a chunk is kChunkElements of its elements
};

struct SwapJob {
  const SwapPart* parts;
  const SwapChunk* chunks;
  std::uint32_t chunk_count;
};

template <unsigned kSize>
ECHO_DEVICE void swap_elements(const SwapPart& part, std::uint64_t first, unsigned thread) {
  using Element = typename ElementOf<kSize>::Type;
  auto* target = reinterpret_cast<Element*>(part.target);
  auto* values = reinterpret_cast<Element*>(part.values);
  // All loads come before the stores, so that their latencies overlap.
  std::uint64_t index[kSwapRounds];
  Element old[kSwapRounds], new_values[kSwapRounds];
  ECHO_UNROLL
  for (unsigned round = 0; round < kSwapRounds; ++round) {
    const std::uint64_t i = first + round * kBlockThreads + thread;
    if (i >= part.count) continue;
    index[round] = part.positions != nullptr ? part.positions[i] : i;
    new_values[round] = values[i];
  }
  ECHO_UNROLL
  for (unsigned round = 0; round < kSwapRounds; ++round)
    if (first + round * kBlockThreads + thread < part.count) old[round] = target[index[round]];
  ECHO_UNROLL
  for (unsigned round = 0; round < kSwapRounds; ++round) {
    const std::uint64_t i = first + round * kBlockThreads + thread;
    if (i >= part.count) continue;
    target[index[round]] = new_values[round];
    values[i] = old[round];
  }
}

// All work of one thread for the chunk job.chunks[chunk_index].
ECHO_DEVICE void swap_thread(const SwapJob& job, std::uint32_t chunk_index, unsigned thread) {
  const SwapPart part = job.parts[job.chunks[chunk_index].part];
  const std::uint64_t first = static_cast<std::uint64_t>(job.chunks[chunk_index].chunk) * kChunkElements;
  switch (part.element_bytes) {
    case 1:
      return swap_elements<1>(part, first, thread);
    case 2:
      return swap_elements<2>(part, first, thread);
    case 4:
      return swap_elements<4>(part, first, thread);
    case 8:
      return swap_elements<8>(part, first, thread);
    case kVectorBytes:
      return swap_elements<kVectorBytes>(part, first, thread);
  }
}

// ---- digests: XXH3-128, seed 0, default secret, of inputs above 240 bytes; one warp per leaf ----
//
// XXH3 adds up 8 words of state over stripes of 64 bytes and scrambles them after every 16 stripes. Between scrambles
// the order of additions does not matter, so a warp processes 16 stripes at once. With p = t % 4, thread t has words 2p
// and 2p + 1 of stripes t / 4 and t / 4 + 8, which is 16 bytes of each.

inline constexpr unsigned kStripeBytes = 64;
inline constexpr unsigned kHashBlockBytes = 1024;  // between two scrambles
inline constexpr unsigned kHashAhead = 4;          // blocks that are loaded before the first is added
// XXH3 treats inputs up to this size differently; the host hashes them.
inline constexpr unsigned kShortLeafBytes = 240;
inline constexpr unsigned kShortSlotBytes = 256;  // distance of two short leaves in HashJob::shorts
inline constexpr unsigned kSecretBytes = 192;     // of the constant that XXH3 calls its secret
// Where XXH3 reads the secret for the last stripe (back from the secret's end) and for the digest (from both ends).
inline constexpr unsigned kLastStripeSecretOffset = 7, kDigestSecretOffset = 11;

struct HashLeaf {
  const std::byte* data;     // multiple of 16
  std::uint32_t bytes;       // at least 1
  std::uint32_t short_slot;  // index in HashJob::shorts, if bytes <= kShortLeafBytes
};

struct HashJob {
  const HashLeaf* leaves;
  std::uint32_t leaf_count;
  std::uint64_t* digests;  // two words per leaf, in the byte order of a Digest; none for short leaves
  std::byte* shorts;       // content of short leaves, kShortSlotBytes apart
};

ECHO_CONSTANT std::uint64_t kSecret[kSecretBytes / 8] = {
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072, 0x78e5c0cc4ee679cb,
    0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0, 0xcb00c391bb52283c, 0xa32e531b8b65d088,
    0x4ef90da297486471, 0xd8acdea946ef1938, 0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a,
    0x647378d9c97e9fc8, 0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
    0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af};
// Factors and initial state of XXH3.
inline constexpr std::uint64_t kPrime32_1 = 0x9e3779b1, kPrime32_2 = 0x85ebca77, kPrime32_3 = 0xc2b2ae3d;
inline constexpr std::uint64_t kPrime64_1 = 0x9e3779b185ebca87, kPrime64_2 = 0xc2b2ae3d27d4eb4f,
                               kPrime64_3 = 0x165667b19e3779f9, kPrime64_4 = 0x85ebca77c2b2ae63,
                               kPrime64_5 = 0x27d4eb2f165667c5;
ECHO_CONSTANT std::uint64_t kHashStart[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                                             kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};

// Returns eight bytes of the secret, from any offset.
ECHO_DEVICE std::uint64_t secret_at(unsigned byte) {
  const unsigned shift = byte % 8 * 8;
  return shift == 0 ? kSecret[byte / 8] : kSecret[byte / 8] >> shift | kSecret[byte / 8 + 1] << (64 - shift);
}

// The low and high half of the product, combined by exclusive or.
ECHO_DEVICE std::uint64_t fold_product(std::uint64_t a, std::uint64_t b) {
#if defined(__CUDA_ARCH__)
  return a * b ^ __umul64hi(a, b);
#else
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
#endif
}

// The last step of XXH3, which mixes all bits of a word.
ECHO_DEVICE std::uint64_t avalanche(std::uint64_t word) {
  word = (word ^ word >> 37) * 0x165667919e3779f9;
  return word ^ word >> 32;
}

ECHO_DEVICE std::uint64_t swap_bytes(std::uint64_t word) {
  word = (word & 0x00ff00ff00ff00ff) << 8 | (word >> 8 & 0x00ff00ff00ff00ff);
  word = (word & 0x0000ffff0000ffff) << 16 | (word >> 16 & 0x0000ffff0000ffff);
  return word << 32 | word >> 32;
}

// Two words of the hash state.
struct Pair {
  std::uint64_t a, b;
};

// Adds the contribution of words 2p and 2p + 1 of a stripe to the same words of the state.
ECHO_DEVICE void accumulate(Pair& sum, const Vector& data, const Pair& key) {
  const std::uint64_t mixed_low = data.low ^ key.a, mixed_high = data.high ^ key.b;
  sum.a += data.high + (mixed_low & 0xffffffff) * (mixed_low >> 32);
  sum.b += data.low + (mixed_high & 0xffffffff) * (mixed_high >> 32);
}

ECHO_DEVICE std::uint64_t scramble(std::uint64_t word, std::uint64_t key) {
  return (word ^ word >> 47 ^ key) * kPrime32_1;
}

struct HashLocal {
  Pair state;                 // words 2p and 2p + 1, equal in all threads with equal p
  Pair key[2], scramble_key;  // parts of the secret
  Vector data[2 * kHashAhead];
  Pair sum;
};

// Computes the digest of a leaf that is not short.
template <class Warp>
ECHO_DEVICE void hash_leaf(Warp& warp, const std::byte* data, std::uint32_t bytes, std::uint64_t* digest) {
  typename Warp::template Local<HashLocal> locals;
  const auto sum = [&](unsigned thread) -> Pair& { return locals[thread].sum; };
  warp.each([&](unsigned thread) {
    HashLocal& self = locals[thread];
    const unsigned p = thread % 4, stripe = thread / 4;
    self.state = {kHashStart[2 * p], kHashStart[2 * p + 1]};
    // Stripe i of a block uses the secret from word i on, and the scramble its last eight words.
    self.key[0] = {kSecret[stripe + 2 * p], kSecret[stripe + 2 * p + 1]};
    self.key[1] = {kSecret[stripe + 2 * p + 8], kSecret[stripe + 2 * p + 9]};
    self.scramble_key = {kSecret[16 + 2 * p], kSecret[17 + 2 * p]};
  });

  const std::uint32_t blocks = (bytes - 1) / kHashBlockBytes;
  for (std::uint32_t block = 0; block < blocks; block += kHashAhead) {
    // Loads several blocks at once, so that their latencies overlap, and adds them one after the other.
    warp.each([&](unsigned thread) {
      ECHO_UNROLL
      for (unsigned i = 0; i < 2 * kHashAhead; ++i)
        if (block + i / 2 < blocks)
          locals[thread].data[i] =
              load_vector(data + block * kHashBlockBytes + i * (kHashBlockBytes / 2) + thread * kVectorBytes);
    });
    ECHO_UNROLL
    for (unsigned i = 0; i < kHashAhead; ++i) {
      if (block + i >= blocks) break;
      warp.each([&](unsigned thread) {
        HashLocal& self = locals[thread];
        self.sum = {0, 0};
        accumulate(self.sum, self.data[2 * i], self.key[0]);
        accumulate(self.sum, self.data[2 * i + 1], self.key[1]);
      });
      warp.template sum<4, 16>(sum);
      warp.each([&](unsigned thread) {
        HashLocal& self = locals[thread];
        self.state = {scramble(self.state.a + self.sum.a, self.scramble_key.a),
                      scramble(self.state.b + self.sum.b, self.scramble_key.b)};
      });
    }
  }

  // Adds the whole stripes after the last block, then the last 64 bytes, which may overlap them.
  warp.each([&](unsigned thread) {
    HashLocal& self = locals[thread];
    const unsigned p = thread % 4;
    const std::uint32_t block_bytes = blocks * kHashBlockBytes;
    const std::uint32_t stripes = (bytes - 1 - block_bytes) / kStripeBytes;
    self.sum = {0, 0};
    ECHO_UNROLL
    for (unsigned half = 0; half < 2; ++half)
      if (thread / 4 + 8 * half < stripes)
        accumulate(self.sum, load_vector(data + block_bytes + half * (kHashBlockBytes / 2) + thread * kVectorBytes),
                   self.key[half]);
    if (thread < 4) {  // as many as a stripe has pairs of words
      const std::byte* vector = data + bytes - kStripeBytes + p * kVectorBytes;
      const unsigned key_byte = kSecretBytes - kStripeBytes - kLastStripeSecretOffset + p * kVectorBytes;
      accumulate(self.sum, {load_bytes(vector, 8), load_bytes(vector + 8, 8)},
                 {secret_at(key_byte), secret_at(key_byte + 8)});
    }
  });
  warp.template sum<4, 16>(sum);
  warp.each([&](unsigned thread) {
    HashLocal& self = locals[thread];
    const Pair state = {self.state.a + self.sum.a, self.state.b + self.sum.b};
    // The secret's bytes for the low and the high half of the digest.
    const unsigned low_key = kDigestSecretOffset + thread % 4 * kVectorBytes;
    const unsigned high_key = kSecretBytes - kStripeBytes - kDigestSecretOffset + thread % 4 * kVectorBytes;
    self.sum = {fold_product(state.a ^ secret_at(low_key), state.b ^ secret_at(low_key + 8)),
                fold_product(state.a ^ secret_at(high_key), state.b ^ secret_at(high_key + 8))};
  });
  warp.template sum<1, 2>(sum);
  warp.each([&](unsigned thread) {
    if (thread != 0) return;
    // Big-endian, the high half first, as in digest_bytes().
    digest[0] = swap_bytes(avalanche(locals[thread].sum.b + ~(bytes * kPrime64_2)));
    digest[1] = swap_bytes(avalanche(locals[thread].sum.a + bytes * kPrime64_1));
  });
}

// All work of the warp for leaf number `index` of a job.
template <class Warp>
ECHO_DEVICE void hash_warp(Warp& warp, const HashJob& job, std::uint32_t index) {
  const HashLeaf leaf = job.leaves[index];
  if (leaf.bytes > kShortLeafBytes) return hash_leaf(warp, leaf.data, leaf.bytes, job.digests + 2 * std::size_t{index});
  std::byte* to = job.shorts + std::size_t{leaf.short_slot} * kShortSlotBytes;
  warp.each([&](unsigned thread) {
    for (unsigned i = thread; i < leaf.bytes; i += kWarpThreads) to[i] = leaf.data[i];
  });
}

}  // namespace echoline::delta::cuda

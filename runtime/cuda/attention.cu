// Attention in latent space, folded over the block: a block forward of T rows and N heads asks T * N questions of the same keys, so a tile of keys in
// shared memory serves kFoldRows of them at once, and the cache is read once per request as far as memory is concerned (row tiles of a split are
// neighbours, their second reads come from the L2). The keys of a request are split over blocks; a second kernel combines the splits, and W_UV is a
// product of linear.cu, one batch per head.
//
// What a layer costs, K3 geometry (N 64, T 7, E 576, Rk 512), n keys, BF16 cache: 2 * 448 * n * (576 + 512) FLOPs, 1152 n bytes of cache from memory
// and seven times that from the L2, 4 * 448 * 512 bytes per split out and in. From 128 keys on it is bound by the tensor cores.
//   absorb       grid (heads, column groups, row groups), 4 warps: 9 MB a layer, W_UK once for up to 32 rows
//   fold_kernel  grid (row tiles, splits, requests), 8 warps, 163 KB of shared memory, one block per SM
//   split_kernel the same for F32 activations and widths that are no multiples of sixteen: plain FP32, eight rows a block
//   combine      grid (rows, requests)
#include "runtime/cuda/cache.cuh"

namespace k3 {

constexpr uint32_t kRowTile = 8;  // rows that share a read of W_UK
constexpr uint32_t kKeyTile = K3_CUDA_KEY_TILE;

// Rotated halves of the queries of kRowTile rows and one head, into the places behind the latent columns.
template <class A>
__device__ void rotate_queries(const k3_cuda_absorb &p, uint32_t head, uint32_t first_row, uint32_t n_rows) {
  const uint32_t query_width = p.nope_width + 2 * p.rope.n_pairs, out_width = p.latent_rank + 2 * p.rope.n_pairs;
  for (uint32_t i = threadIdx.x; i < n_rows * p.rope.n_pairs; i += blockDim.x) {
    const uint32_t r = i / p.rope.n_pairs, pair = i % p.rope.n_pairs;
    const uint64_t at = static_cast<uint64_t>(first_row + r) * p.n_heads + head;
    const A *from = static_cast<const A *>(p.q) + at * query_width + p.nope_width + 2 * pair;
    A *to = static_cast<A *>(p.out) + at * out_width + p.latent_rank + 2 * pair;
    const float2 factors = rope_factors(p.rope, p.positions[first_row + r], pair);
    const float a = to_float(from[0]), b = to_float(from[1]);
    to[0] = from_float<A>(a * factors.x - b * factors.y);
    to[1] = from_float<A>(b * factors.x + a * factors.y);
  }
}

// Block (head, tile of rows): threads share out the latent columns.
template <class A>
__global__ void absorb_kernel(const __grid_constant__ k3_cuda_absorb p) {
  wait_for_kernels();
  K3_DYNAMIC_SHARED(float, nope);  // [kRowTile][P]
  const uint32_t head = blockIdx.x, first_row = blockIdx.y * kRowTile, n_rows = min(kRowTile, p.n_rows - first_row);
  const uint32_t query_width = p.nope_width + 2 * p.rope.n_pairs, out_width = p.latent_rank + 2 * p.rope.n_pairs;
  const A *q = static_cast<const A *>(p.q) + (static_cast<uint64_t>(first_row) * p.n_heads + head) * query_width;
  A *out = static_cast<A *>(p.out) + (static_cast<uint64_t>(first_row) * p.n_heads + head) * out_width;
  const uint64_t q_stride = static_cast<uint64_t>(p.n_heads) * query_width, out_stride = static_cast<uint64_t>(p.n_heads) * out_width;
  for (uint32_t i = threadIdx.x; i < n_rows * p.nope_width; i += blockDim.x)
    nope[i] = to_float(q[i / p.nope_width * q_stride + i % p.nope_width]);
  __syncthreads();
  for (uint32_t col = threadIdx.x * 8; col < p.latent_rank; col += blockDim.x * 8) {
    float sums[kRowTile][8] = {};
    for (uint32_t i = 0; i < p.nope_width; i++) {
      float weights[8];
      decode_row8(p.kv_b, head * (p.nope_width + p.v_width) + i, col, weights);
#pragma unroll
      for (uint32_t r = 0; r < kRowTile; r++) {
        if (r < n_rows) {
          const float factor = nope[r * p.nope_width + i];
#pragma unroll
          for (int j = 0; j < 8; j++)
            sums[r][j] = fmaf(factor, weights[j], sums[r][j]);
        }
      }
    }
#pragma unroll
    for (uint32_t r = 0; r < kRowTile; r++) {
      if (r < n_rows) {
#pragma unroll
        for (uint32_t j = 0; j < 8; j++)
          if (col + j < p.latent_rank)
            out[r * out_stride + col + j] = from_float<A>(sums[r][j]);
      }
    }
  }
  rotate_queries<A>(p, head, first_row, n_rows);
}

// --- tensor cores: W_UK ----------------------------------------------------------------------------------------------------------------------------
// The product runs over rows of W_UK, so pairs of neighbours are made of two rows' words. Lane (g, t) reads eight latent columns 8g .. 8g + 7 of rows
// 2t, 2t + 1 and eight rows on with one load each: operands of four products, whose sixteen outputs are those columns, two by two. In the end a lane
// holds eight neighbouring columns of rows 2t and 2t + 1 of the result.

constexpr uint32_t kAbsorbCols = 64;  // of a warp

// Block (head, group of columns, group of kTiles * kRowTile rows).
template <uint32_t kTiles>
__global__ void absorb_tile_kernel(const __grid_constant__ k3_cuda_absorb p) {
  wait_for_kernels();
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const uint32_t head = blockIdx.x, first_row = blockIdx.z * kTiles * kRowTile, n_rows = min(kTiles * kRowTile, p.n_rows - first_row);
  const uint32_t col = (blockIdx.y * (blockDim.x / 32) + warp) * kAbsorbCols + 8 * g;
  const uint32_t query_width = p.nope_width + 2 * p.rope.n_pairs, out_width = p.latent_rank + 2 * p.rope.n_pairs;
  const bool has_cols = col < p.latent_rank;
  const k3_cuda_shard &shard = p.kv_b.shards[0];
  float sums[kTiles][4][4] = {};
  for (uint32_t k = 0; k < p.nope_width; k += 16) {
    uint4 raw[4] = {};  // rows 2t, 2t + 1, 2t + 8, 2t + 9
    if (has_cols) {
#pragma unroll
      for (uint32_t i = 0; i < 4; i++) {
        const uint32_t row = head * (p.nope_width + p.v_width) + k + 2 * t + i % 2 + i / 2 * 8;
        raw[i] = __ldg(reinterpret_cast<const uint4 *>(matrix_row(p.kv_b, shard, row) + 2 * static_cast<uint64_t>(p.kv_b.first_col + col)));
      }
    }
    const uint32_t words[4][4] = {{raw[0].x, raw[0].y, raw[0].z, raw[0].w},
                                  {raw[1].x, raw[1].y, raw[1].z, raw[1].w},
                                  {raw[2].x, raw[2].y, raw[2].z, raw[2].w},
                                  {raw[3].x, raw[3].y, raw[3].z, raw[3].w}};
#pragma unroll
    for (uint32_t tile = 0; tile < kTiles; tile++) {
      const uint32_t r = tile * kRowTile + g;
      uint32_t b[2] = {0, 0};
      if (r < n_rows) {
        const __nv_bfloat16 *q =
            static_cast<const __nv_bfloat16 *>(p.q) + (static_cast<uint64_t>(first_row + r) * p.n_heads + head) * query_width + k;
        b[0] = *reinterpret_cast<const uint32_t *>(q + 2 * t);
        b[1] = *reinterpret_cast<const uint32_t *>(q + 2 * t + 8);
      }
#pragma unroll
      for (uint32_t i = 0; i < 4; i++) {
        const uint32_t a[4] = {pair_low(words[0][i], words[1][i]), pair_high(words[0][i], words[1][i]), pair_low(words[2][i], words[3][i]),
                               pair_high(words[2][i], words[3][i])};
        multiply_tiles(sums[tile][i], a, b);
      }
    }
  }
#pragma unroll
  for (uint32_t tile = 0; tile < kTiles; tile++) {
#pragma unroll
    for (uint32_t j = 0; j < 2; j++) {
      const uint32_t r = tile * kRowTile + 2 * t + j;
      if (!has_cols || r >= n_rows)
        continue;
      uint4 packed;
      packed.x = pack_bf16(sums[tile][0][j] * shard.factor, sums[tile][0][2 + j] * shard.factor);
      packed.y = pack_bf16(sums[tile][1][j] * shard.factor, sums[tile][1][2 + j] * shard.factor);
      packed.z = pack_bf16(sums[tile][2][j] * shard.factor, sums[tile][2][2 + j] * shard.factor);
      packed.w = pack_bf16(sums[tile][3][j] * shard.factor, sums[tile][3][2 + j] * shard.factor);
      __nv_bfloat16 *out = static_cast<__nv_bfloat16 *>(p.out) + (static_cast<uint64_t>(first_row + r) * p.n_heads + head) * out_width;
      *reinterpret_cast<uint4 *>(out + col) = packed;
    }
  }
  if (blockIdx.y == 0)
    rotate_queries<__nv_bfloat16>(p, head, first_row, n_rows);
}

static bool absorb_has_tiles(const k3_cuda_absorb &p) {
  const uint32_t rope_width = 2 * p.rope.n_pairs;
  return p.bf16 && p.kv_b.kind == K3_CUDA_BF16 && p.kv_b.aligned && p.nope_width % 16 == 0 && rope_width % 8 == 0 && p.latent_rank % 8 == 0 &&
         reinterpret_cast<uintptr_t>(p.q) % 4 == 0 && reinterpret_cast<uintptr_t>(p.out) % 16 == 0;
}

static cudaError_t launch_absorb_tiles(const k3_cuda_absorb &p, cudaStream_t stream) {
  const uint32_t n_groups = ceil_div(p.latent_rank, kAbsorbCols), n_warps = min(n_groups, kBlockThreads / 32), n_tiles = ceil_div(p.n_rows, kRowTile);
  const uint32_t per_block = n_tiles >= 4 ? 4 : n_tiles >= 2 ? 2 : 1;
  const dim3 grid(p.n_heads, ceil_div(n_groups, n_warps), ceil_div(n_tiles, per_block));
  switch (per_block) {
    case 4: return launch(grid, n_warps * 32, 0, stream, absorb_tile_kernel<4>, p);
    case 2: return launch(grid, n_warps * 32, 0, stream, absorb_tile_kernel<2>, p);
    default: return launch(grid, n_warps * 32, 0, stream, absorb_tile_kernel<1>, p);
  }
}

// --- keys ------------------------------------------------------------------------------------------------------------------------------------------

// Row of a key in the cache, or NULL where the block table has none.
__device__ static const uint8_t *row_of_key(const k3_cuda_attention &p, uint32_t request, uint32_t key) {
  const uint32_t block = key / p.cache.block_size;
  const int32_t id = block < p.max_blocks ? p.block_tables[request * p.max_blocks + block] : -1;
  const uint64_t slot = static_cast<uint64_t>(id) * p.cache.block_size + key % p.cache.block_size;
  return id < 0 || slot >= p.cache.n_slots ? nullptr : cache_row(p.cache, slot);
}

// The keys of one split, in whole tiles: the tiles that the request really has are shared out evenly, so that few keys do not leave one split with
// all.
struct Keys {
  uint32_t begin, end, anchor;
};
__device__ static Keys keys_of_split(const k3_cuda_attention &p, uint32_t request, uint32_t split) {
  const uint32_t n_keys = static_cast<uint32_t>(p.n_keys[request]), n_tiles = ceil_div(n_keys, kKeyTile);
  const auto bound = [&](uint32_t i) { return static_cast<uint32_t>(static_cast<uint64_t>(i) * n_tiles / p.n_splits) * kKeyTile; };
  return {bound(split), min(bound(split + 1), n_keys), static_cast<uint32_t>(p.anchor_positions[request])};
}

__device__ static uint64_t part_of(const k3_cuda_attention &p, uint32_t request, uint32_t split, uint32_t row) {
  return (static_cast<uint64_t>(request) * p.n_splits + split) * p.block_width * p.n_heads + row;
}

// --- tensor cores: scores and sums -----------------------------------------------------------------------------------------------------------------
// A block keeps the sums of kFoldRows rows over all latent columns in registers, every warp those of its own columns. A tile of keys lies in shared
// memory once, read as keys for the scores and, transposed, as values for the sums; the next tile is on its way meanwhile. An FP8 tile is widened
// from a second place, its scale is a factor of scores and sums.

constexpr uint32_t kFoldRows = 64, kFoldKeys = kKeyTile, kFoldRowTiles = kFoldRows / 16;
constexpr uint32_t kPadding = 8;                                                 // elements behind a row, so that rows begin in different banks
constexpr uint32_t kScoreStride = kFoldKeys + 8, kSharesStride = kFoldKeys + 8;  // of F32, of BF16
static_assert(kFoldKeys == 32, "a row of scores is that of four lanes with eight keys each");

struct FoldShared {
  uint32_t queries, tiles, tile_nbytes, scores, shares, rescale, rows, n;  // offsets in bytes; two tiles
};
__host__ __device__ static FoldShared fold_shared(const k3_cuda_attention &p) {
  const uint32_t row_nbytes = (p.latent_rank + p.rope_width + kPadding) * 2;
  FoldShared s;
  s.queries = 0;
  s.tiles = s.queries + kFoldRows * row_nbytes;
  s.tile_nbytes = kFoldKeys * row_nbytes;
  s.scores = s.tiles + 2 * s.tile_nbytes;
  s.shares = s.scores + kFoldRows * kScoreStride * 4;
  s.rescale = s.shares + kFoldRows * kSharesStride * 2;
  s.rows = s.rescale + kFoldRows * 4;
  s.n = s.rows + 2 * kFoldKeys * 8;
  return s;
}

// Block (tile of rows, split, request); a row is (t, head). kColTiles: eight columns each, of one warp.
template <uint32_t kColTiles>
__global__ void __launch_bounds__(256) fold_kernel(const __grid_constant__ k3_cuda_attention p) {
  wait_for_kernels();
  K3_DYNAMIC_SHARED(uint8_t, shared);
  const FoldShared s = fold_shared(p);
  const uint32_t width = p.latent_rank + p.rope_width, stride = width + kPadding;
  __nv_bfloat16 *queries = reinterpret_cast<__nv_bfloat16 *>(shared + s.queries), *shares = reinterpret_cast<__nv_bfloat16 *>(shared + s.shares);
  float *scores = reinterpret_cast<float *>(shared + s.scores), *rescale = reinterpret_cast<float *>(shared + s.rescale);
  const uint8_t **rows = reinterpret_cast<const uint8_t **>(shared + s.rows);  // [2][kFoldKeys]
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, n_warps = blockDim.x / 32, g = lane / 4, t = lane % 4;
  const uint32_t first_row = blockIdx.x * kFoldRows, split = blockIdx.y, request = blockIdx.z, n_all_rows = p.block_width * p.n_heads;
  const uint32_t n_rows = min(kFoldRows, n_all_rows - first_row), n_row_tiles = ceil_div(n_rows, 16);
  const bool is_fp8 = p.cache.dtype != K3_CUDA_FLOAT_BF16;
  const float cache_scale = is_fp8 ? p.cache.scale : 1;
  const Keys keys = keys_of_split(p, request, split);

  const uint32_t chunks = width * (is_fp8 ? 1 : 2) / 16, loaded_stride = is_fp8 ? width : stride * 2;
  const auto find_rows = [&](uint32_t first, const uint8_t **found) {
    for (uint32_t i = threadIdx.x; i < kFoldKeys; i += blockDim.x)
      found[i] = first + i < keys.end ? row_of_key(p, request, first + i) : nullptr;
  };
  const auto begin_loads = [&](const uint8_t *const *found, uint8_t *to) {
    for (uint32_t i = threadIdx.x; i < kFoldKeys * chunks; i += blockDim.x) {
      const uint32_t key = i / chunks, chunk = i % chunks;
      uint8_t *at = to + key * loaded_stride + chunk * 16;
      if (found[key])
        copy_async(at, found[key] + chunk * 16);
      else
        *reinterpret_cast<uint4 *>(at) = make_uint4(0, 0, 0, 0);  // weighs nothing, but a product must not see a NaN there
    }
  };

  if (keys.begin < keys.end) {
    const __nv_bfloat16 *query = static_cast<const __nv_bfloat16 *>(p.query) + (static_cast<uint64_t>(request) * n_all_rows + first_row) * width;
    for (uint32_t i = threadIdx.x; i < n_row_tiles * 16 * (width / 8); i += blockDim.x) {
      const uint32_t row = i / (width / 8), chunk = i % (width / 8);
      if (row < n_rows)
        copy_async(queries + row * stride + chunk * 8, query + static_cast<uint64_t>(row) * width + chunk * 8);
      else
        *reinterpret_cast<uint4 *>(queries + row * stride + chunk * 8) = make_uint4(0, 0, 0, 0);
    }
    find_rows(keys.begin, rows);
  }
  __syncthreads();
  if (keys.begin < keys.end)
    begin_loads(rows, shared + s.tiles + (is_fp8 ? s.tile_nbytes : 0));

  float sums[kFoldRowTiles][kColTiles][4] = {};
  float highest[kFoldRows / 8], total[kFoldRows / 8];  // of row (i * n_warps + warp) * 8 + g; total: of this lane's keys
#pragma unroll
  for (uint32_t i = 0; i < kFoldRows / 8; i++) {
    highest[i] = -INFINITY;
    total[i] = 0;
  }
  for (uint32_t first = keys.begin, turn = 0; first < keys.end; first += kFoldKeys, turn ^= 1) {
    const uint8_t *const *here = rows + turn * kFoldKeys;
    __nv_bfloat16 *tile = reinterpret_cast<__nv_bfloat16 *>(shared + s.tiles + (is_fp8 ? 0 : turn * s.tile_nbytes));
    find_rows(first + kFoldKeys, rows + (turn ^ 1) * kFoldKeys);
    wait_copies();
    __syncthreads();  // the tile is there, and everybody has used the one before
    if (is_fp8) {
      const uint8_t *codes = shared + s.tiles + s.tile_nbytes;
      for (uint32_t i = threadIdx.x; i < kFoldKeys * (width / 8); i += blockDim.x) {
        const uint32_t key = i / (width / 8), col = i % (width / 8) * 8;
        const uint2 raw = *reinterpret_cast<const uint2 *>(codes + key * width + col);
        const uint32_t words[2] = {raw.x, raw.y};
        uint32_t pairs[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float2 values = from_fp8x2(words[j / 2] >> (j % 2 * 16), p.cache.dtype);
          pairs[j] = pack_bf16(values.x, values.y);
        }
        *reinterpret_cast<uint4 *>(tile + key * stride + col) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      }
      __syncthreads();
    }
    if (first + kFoldKeys < keys.end)
      begin_loads(rows + (turn ^ 1) * kFoldKeys, shared + s.tiles + (is_fp8 ? s.tile_nbytes : (turn ^ 1) * s.tile_nbytes));

    // Scores: a warp takes sixteen rows and half of the keys at a time.
    for (uint32_t unit = warp; unit < 2 * n_row_tiles; unit += n_warps) {
      const uint32_t row = unit / 2 * 16, key = unit % 2 * 16;
      const __nv_bfloat16 *from_a = queries + (row + lane % 16) * stride + lane / 16 * 8;
      const __nv_bfloat16 *from_b = tile + (key + lane % 8 + lane / 16 * 8) * stride + lane / 8 % 2 * 8;
      float score[2][4] = {};
      for (uint32_t e = 0; e < width; e += 16) {
        uint32_t a[4], b[4];
        load_tiles<false>(a, from_a + e);
        load_tiles<false>(b, from_b + e);
        multiply_tiles(score[0], a, {b[0], b[1]});
        multiply_tiles(score[1], a, {b[2], b[3]});
      }
#pragma unroll
      for (uint32_t i = 0; i < 4; i++)
        *reinterpret_cast<float2 *>(scores + (row + g + i % 2 * 8) * kScoreStride + key + i / 2 * 8 + 2 * t) =
            make_float2(score[i / 2][i % 2 * 2], score[i / 2][i % 2 * 2 + 1]);
    }
    __syncthreads();

    // Shares: four lanes have a row, eight keys each.
#pragma unroll
    for (uint32_t i = 0; i < kFoldRows / 8; i++) {
      const uint32_t row = (i * n_warps + warp) * 8 + g;
      if ((i * n_warps + warp) * 8 < n_row_tiles * 16) {  // the same for the whole warp
        const uint32_t seen = p.causal ? keys.anchor + (first_row + row) / p.n_heads + 1 : keys.end;
        float values[8], top = highest[i];
#pragma unroll
        for (uint32_t j = 0; j < 8; j++) {
          const uint32_t key = 8 * t + j;
          const bool visible = first + key < seen && here[key];
          values[j] = visible ? p.scale * cache_scale * scores[row * kScoreStride + key] : -INFINITY;
          top = fmaxf(top, values[j]);
        }
        top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
        top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
        const float factor = top == -INFINITY ? 1 : expf(highest[i] - top);
        float sum = 0;
#pragma unroll
        for (uint32_t j = 0; j < 8; j++) {
          values[j] = values[j] == -INFINITY ? 0 : expf(values[j] - top);
          sum += values[j];
        }
        *reinterpret_cast<uint4 *>(shares + row * kSharesStride + 8 * t) = make_uint4(
            pack_bf16(values[0], values[1]), pack_bf16(values[2], values[3]), pack_bf16(values[4], values[5]), pack_bf16(values[6], values[7]));
        if (t == 0)
          rescale[row] = factor;
        highest[i] = top;
        total[i] = total[i] * factor + sum;
      }
    }
    __syncthreads();

    // Sums: every warp all rows, its own columns.
    uint32_t a[kFoldRowTiles][kFoldKeys / 16][4];
    float factors[kFoldRowTiles][2];
    bool same = true;
#pragma unroll
    for (uint32_t m = 0; m < kFoldRowTiles; m++) {
      if (m < n_row_tiles) {
#pragma unroll
        for (uint32_t k = 0; k < kFoldKeys / 16; k++)
          load_tiles<false>(a[m][k], shares + (m * 16 + lane % 16) * kSharesStride + k * 16 + lane / 16 * 8);
        factors[m][0] = rescale[m * 16 + g];
        factors[m][1] = rescale[m * 16 + g + 8];
        same &= factors[m][0] == 1 && factors[m][1] == 1;
      }
    }
    if (__ballot_sync(kAllLanes, !same) != 0) {
#pragma unroll
      for (uint32_t m = 0; m < kFoldRowTiles; m++)
        if (m < n_row_tiles)
#pragma unroll
          for (uint32_t c = 0; c < kColTiles; c++)
#pragma unroll
            for (uint32_t i = 0; i < 4; i++)
              sums[m][c][i] *= factors[m][i / 2];
    }
#pragma unroll
    for (uint32_t c = 0; c < kColTiles; c++) {
      const uint32_t col = (warp * kColTiles + c) * 8;
      if (col < p.latent_rank) {
        uint32_t b[4];
        load_tiles<true>(b, tile + lane * stride + col);  // thirty-two keys, eight columns
#pragma unroll
        for (uint32_t m = 0; m < kFoldRowTiles; m++) {
          if (m < n_row_tiles) {
            multiply_tiles(sums[m][c], a[m][0], {b[0], b[1]});
            multiply_tiles(sums[m][c], a[m][1], {b[2], b[3]});
          }
        }
      }
    }
  }
#pragma unroll
  for (uint32_t i = 0; i < kFoldRows / 8; i++) {
    const uint32_t row = (i * n_warps + warp) * 8 + g;
    if ((i * n_warps + warp) * 8 < n_row_tiles * 16) {
      total[i] += __shfl_xor_sync(kAllLanes, total[i], 1);
      total[i] += __shfl_xor_sync(kAllLanes, total[i], 2);
      if (t == 0 && row < n_rows)
        *reinterpret_cast<float2 *>(p.partial_sums + part_of(p, request, split, first_row + row) * 2) = make_float2(highest[i], total[i]);
    }
  }
  if (keys.begin >= keys.end)
    return;
#pragma unroll
  for (uint32_t m = 0; m < kFoldRowTiles; m++) {
#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
      const uint32_t row = m * 16 + g + half * 8;
      if (row >= n_rows)
        continue;
      float *out = p.partial_latents + part_of(p, request, split, first_row + row) * p.latent_rank;
#pragma unroll
      for (uint32_t c = 0; c < kColTiles; c++) {
        const uint32_t col = (warp * kColTiles + c) * 8;
        if (col < p.latent_rank)
          *reinterpret_cast<float2 *>(out + col + 2 * t) = make_float2(sums[m][c][2 * half] * cache_scale, sums[m][c][2 * half + 1] * cache_scale);
      }
    }
  }
}

// Whether a block of fold_kernel can do it: whole vectors everywhere, eight warps at most, shared memory that a block may have.
static bool attention_has_tiles(const k3_cuda_attention &p) {
  const bool dtype = p.cache.dtype == K3_CUDA_FLOAT_BF16 || p.cache.dtype == K3_CUDA_FLOAT_E4M3 || p.cache.dtype == K3_CUDA_FLOAT_E5M2;
  const bool aligned = reinterpret_cast<uintptr_t>(p.query) % 16 == 0 && reinterpret_cast<uintptr_t>(p.cache.base) % 16 == 0 &&
                       p.cache.row_nbytes % 16 == 0 && p.cache.block_nbytes % 16 == 0;
  return p.bf16 && dtype && aligned && p.latent_rank % 16 == 0 && p.rope_width % 16 == 0 && p.latent_rank <= 512 && fold_shared(p).n <= 227 << 10;
}

// --- plain FP32 ------------------------------------------------------------------------------------------------------------------------------------

constexpr uint32_t kSplitRows = 8;

// Shared memory of one block, floats.
struct SplitShared {
  uint32_t queries, keys, scores, sums, highest, total, rescale, n;  // offsets
};
__host__ __device__ static SplitShared split_shared(const k3_cuda_attention &p) {
  const uint32_t width = p.latent_rank + p.rope_width;
  SplitShared s;
  s.queries = 0;
  s.keys = s.queries + kSplitRows * width;
  s.scores = s.keys + kKeyTile * width;
  s.sums = s.scores + kSplitRows * kKeyTile;
  s.highest = s.sums + kSplitRows * p.latent_rank;
  s.total = s.highest + kSplitRows;
  s.rescale = s.total + kSplitRows;
  s.n = s.rescale + kSplitRows;
  return s;
}

// Block (tile of rows, split, request): softmax over the split's keys, tile by tile, with the running maximum.
template <class A>
__global__ void split_kernel(const __grid_constant__ k3_cuda_attention p) {
  wait_for_kernels();
  K3_DYNAMIC_SHARED(float, shared);
  const SplitShared s = split_shared(p);
  float *queries = shared + s.queries, *keys = shared + s.keys, *scores = shared + s.scores, *sums = shared + s.sums;
  float *highest = shared + s.highest, *total = shared + s.total, *rescale = shared + s.rescale;
  const uint32_t first_row = blockIdx.x * kSplitRows, split = blockIdx.y, request = blockIdx.z, width = p.latent_rank + p.rope_width;
  const uint32_t n_all_rows = p.block_width * p.n_heads, n_rows = min(kSplitRows, n_all_rows - first_row);
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, n_warps = blockDim.x / 32;
  const Keys range = keys_of_split(p, request, split);

  const A *query = static_cast<const A *>(p.query) + (static_cast<uint64_t>(request) * n_all_rows + first_row) * width;
  for (uint32_t i = threadIdx.x; i < n_rows * width; i += blockDim.x)
    queries[i] = to_float(query[i]);
  for (uint32_t i = threadIdx.x; i < n_rows * p.latent_rank; i += blockDim.x)
    sums[i] = 0;
  for (uint32_t r = threadIdx.x; r < n_rows; r += blockDim.x) {
    highest[r] = -INFINITY;
    total[r] = 0;
  }
  for (uint32_t first = range.begin; first < range.end; first += kKeyTile) {
    const uint32_t n = min(kKeyTile, range.end - first);
    __syncthreads();  // the tile before has been used
    for (uint32_t i = threadIdx.x; i < n * width; i += blockDim.x) {
      const uint8_t *row = row_of_key(p, request, first + i / width);
      keys[i] = row ? cache_load(p.cache, row, i % width) : 0;
    }
    __syncthreads();
    for (uint32_t i = warp; i < n_rows * n; i += n_warps) {  // one warp per score
      const uint32_t r = i / n, key = i % n;
      float sum = 0;
      for (uint32_t e = lane; e < width; e += 32)
        sum = fmaf(queries[r * width + e], keys[key * width + e], sum);
      sum = warp_sum(sum);
      const uint32_t seen = p.causal ? range.anchor + (first_row + r) / p.n_heads + 1 : range.end;
      const bool visible = first + key < seen && row_of_key(p, request, first + key);
      if (lane == 0)
        scores[r * kKeyTile + key] = visible ? p.scale * sum : -INFINITY;
    }
    __syncthreads();
    for (uint32_t r = threadIdx.x; r < n_rows; r += blockDim.x) {
      float top = highest[r];
      for (uint32_t key = 0; key < n; key++)
        top = fmaxf(top, scores[r * kKeyTile + key]);
      const float factor = top == -INFINITY ? 1 : expf(highest[r] - top);
      float sum = total[r] * factor;
      for (uint32_t key = 0; key < n; key++) {
        float &score = scores[r * kKeyTile + key];
        score = score == -INFINITY ? 0 : expf(score - top);
        sum += score;
      }
      highest[r] = top;
      total[r] = sum;
      rescale[r] = factor;
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < n_rows * p.latent_rank; i += blockDim.x) {
      const uint32_t r = i / p.latent_rank, e = i % p.latent_rank;
      float sum = sums[i] * rescale[r];
      for (uint32_t key = 0; key < n; key++) {
        const float weight = scores[r * kKeyTile + key];
        if (weight != 0)  // a masked row may hold anything, NaN too
          sum = fmaf(weight, keys[key * width + e], sum);
      }
      sums[i] = sum;
    }
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < n_rows * p.latent_rank; i += blockDim.x)
    p.partial_latents[part_of(p, request, split, first_row) * p.latent_rank + i] = sums[i];
  for (uint32_t r = threadIdx.x; r < n_rows; r += blockDim.x) {
    p.partial_sums[part_of(p, request, split, first_row + r) * 2] = highest[r];
    p.partial_sums[part_of(p, request, split, first_row + r) * 2 + 1] = total[r];
  }
}

// --- combination -----------------------------------------------------------------------------------------------------------------------------------

// Block (row, request): the splits' sums, each by its share of the whole. A split without a visible key has left no latents.
template <class A>
__global__ void combine_kernel(const __grid_constant__ k3_cuda_attention p) {
  wait_for_kernels();
  K3_DYNAMIC_SHARED(float, weights);  // [splits]
  const uint32_t row = blockIdx.x, request = blockIdx.y;
  float top = -INFINITY, total = 0;
  for (uint32_t split = 0; split < p.n_splits; split++)
    top = fmaxf(top, p.partial_sums[part_of(p, request, split, row) * 2]);
  for (uint32_t split = 0; split < p.n_splits; split++) {
    const float *part = p.partial_sums + part_of(p, request, split, row) * 2;
    total += part[0] == -INFINITY ? 0 : expf(part[0] - top) * part[1];
  }
  for (uint32_t split = threadIdx.x; split < p.n_splits; split += blockDim.x) {
    const float highest = p.partial_sums[part_of(p, request, split, row) * 2];
    weights[split] = highest == -INFINITY || !(total > 0) ? 0 : expf(highest - top) / total;  // no key visible at all: zeros
  }
  __syncthreads();
  A *out = static_cast<A *>(p.latents) + (static_cast<uint64_t>(request) * p.block_width * p.n_heads + row) * p.latent_rank;
  for (uint32_t col = threadIdx.x; col < p.latent_rank; col += blockDim.x) {
    float sum = 0;
    for (uint32_t split = 0; split < p.n_splits; split++)
      if (weights[split] != 0)
        sum = fmaf(weights[split], p.partial_latents[part_of(p, request, split, row) * p.latent_rank + col], sum);
    out[col] = from_float<A>(sum);
  }
}

template <class Kernel>
static cudaError_t launch_splits(const k3_cuda_attention &p, uint32_t n_threads, size_t nbytes, cudaStream_t stream, Kernel *kernel) {
  const dim3 grid(ceil_div(p.block_width * p.n_heads, k3_cuda_attention_rows(&p)), p.n_splits, p.n_requests);
  const cudaError_t error = allow_shared(kernel, nbytes);
  return error == cudaSuccess ? launch(grid, n_threads, nbytes, stream, kernel, p) : error;
}

template <uint32_t kColTiles>
static cudaError_t launch_fold(const k3_cuda_attention &p, cudaStream_t stream) {
  return launch_splits(p, ceil_div(p.latent_rank, 8 * kColTiles) * 32, fold_shared(p).n, stream, fold_kernel<kColTiles>);
}

template <class A>
static cudaError_t launch_attention(const k3_cuda_attention &p, cudaStream_t stream) {
  cudaError_t error;
  if (!attention_has_tiles(p))
    error = launch_splits(p, kBlockThreads, split_shared(p).n * sizeof(float), stream, split_kernel<A>);
  else if (p.latent_rank <= 64)
    error = launch_fold<1>(p, stream);
  else if (p.latent_rank <= 256)
    error = launch_fold<4>(p, stream);
  else
    error = launch_fold<8>(p, stream);
  const dim3 grid(p.block_width * p.n_heads, p.n_requests);
  return error == cudaSuccess ? launch(grid, block_threads(p.latent_rank), p.n_splits * sizeof(float), stream, combine_kernel<A>, p) : error;
}

}  // namespace k3

extern "C" cudaError_t k3_cuda_launch_absorb(const struct k3_cuda_absorb *p, cudaStream_t stream) {
  if (k3::absorb_has_tiles(*p))
    return k3::launch_absorb_tiles(*p, stream);
  const dim3 grid(p->n_heads, k3::ceil_div(p->n_rows, k3::kRowTile));
  const size_t nbytes = k3::kRowTile * p->nope_width * sizeof(float);
  return p->bf16 ? k3::launch(grid, k3::kBlockThreads, nbytes, stream, k3::absorb_kernel<__nv_bfloat16>, *p)
                 : k3::launch(grid, k3::kBlockThreads, nbytes, stream, k3::absorb_kernel<float>, *p);
}

extern "C" uint32_t k3_cuda_attention_rows(const struct k3_cuda_attention *p) {
  return k3::attention_has_tiles(*p) ? k3::kFoldRows : k3::kSplitRows;
}

extern "C" cudaError_t k3_cuda_launch_attention(const struct k3_cuda_attention *p, cudaStream_t stream) {
  return p->bf16 ? k3::launch_attention<__nv_bfloat16>(*p, stream) : k3::launch_attention<float>(*p, stream);
}

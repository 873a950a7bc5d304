// C[M, N] = A[M, K] W[N, K]^T of quantized operands: cache blocking, threads, epilogue.

namespace {

constexpr int64_t MOST_ROWS = 256;           // that share one decoded stretch of a panel
constexpr int64_t ROW_CACHE = 768 << 10;     // bytes of decoded activations, to stay in the second cache
constexpr int64_t PARALLEL_MACS = 1 << 19;   // below, waking threads costs more than the work

// `depth` blocks of a panel from `block` on; outputs behind the last are zeros.
void turn(const Product& p, int64_t panel, int64_t block, int64_t depth, Packed& to) {
  const int64_t row = panel * LANES, rows = p.n - row < LANES ? p.n - row : LANES;
  const int64_t stride = p.blocks * (BLOCK / 2);
  const uint8_t* codes = p.weight_codes + row * stride + block * (BLOCK / 2);
  const uint8_t* scales = p.weight_scales + row * p.blocks + block;
  // What this thread reads next: the row's next stretch, or the first one of the panel below.
  const bool ends = block + DEPTH >= p.blocks;
  const int64_t skip = ends ? LANES * p.blocks - block : DEPTH;
  const bool prefetched = ends ? row + 2 * LANES <= p.n : true;
  int64_t turned = 0;
  if (rows == LANES) turned = turn_whole(codes, scales, p.blocks, depth, prefetched ? skip : 0, to);
  for (int64_t lane = 0; lane < LANES; lane++) {
    for (int64_t i = turned; i < depth; i++) {
      uint8_t* at = to.codes + i * CODE_BYTES + lane * 4;
      if (lane < rows) {
        std::memcpy(at, codes + lane * stride + i * (BLOCK / 2), 4);
        std::memcpy(at + CODE_BYTES / 2, codes + lane * stride + i * (BLOCK / 2) + 4, 4);
      } else {
        std::memset(at, 0, 4);
        std::memset(at + CODE_BYTES / 2, 0, 4);
      }
      to.scales[i * LANES + lane] = lane < rows ? scales[lane * p.blocks + i] : 0;
    }
  }
}

// Activations [first_row, first_row + rows) as tiles of RowBlocks [tile][block][TILE].
void prepare(const Product& p, int64_t first_row, int64_t rows, int64_t tile, int64_t from, int64_t to,
             const float* row_scales, RowBlock* out) {
  for (int64_t block = from; block < to; block++) {
    RowBlock* blocks = out + (tile * p.blocks + block) * TILE;
    for (int64_t r = 0; r < TILE; r++) {
      const int64_t row = tile * TILE + r, at = (first_row + row) * p.blocks + block;
      if (row < rows) {
        blocks[r] = row_block(p.codes + at * (BLOCK / 2), row_scales[p.scales[at] & 0x7f]);
      } else {
        blocks[r] = RowBlock{{}, 0.0f, START};
      }
    }
  }
}

void panel_times_tiles(const Product& p, const RowBlock* rows, int64_t first_row, int64_t count, int64_t first_tile,
                       int64_t last_tile, int64_t panel) {
  alignas(64) float sums[MOST_ROWS * LANES];
  const int64_t height = (last_tile - first_tile) * TILE;
  std::memset(sums, 0, static_cast<size_t>(height * LANES) * sizeof(float));
  const int64_t left = count - first_tile * TILE;
  Packed packed;
  Decoded decoded;
  for (int64_t block = 0; block < p.blocks; block += DEPTH) {
    const int64_t depth = p.blocks - block < DEPTH ? p.blocks - block : DEPTH;
    turn(p, panel, block, depth, packed);
    if (last_tile - first_tile == 1) {
      multiply_rows(left, rows + (first_tile * p.blocks + block) * TILE, packed, depth, sums);
      continue;
    }
    decode(packed, depth, decoded);
    for (int64_t tile = first_tile; tile < last_tile; tile++) {
      float* at = sums + (tile - first_tile) * TILE * LANES;
      multiply_rows(count - tile * TILE, rows + (tile * p.blocks + block) * TILE, decoded, depth, at);
    }
  }
  finish(p, sums, first_row + first_tile * TILE, left < height ? left : height, panel);
}

void multiply_all(const Product& p, int32_t threads) {
  if (p.m * p.n == 0) return;
  if (p.m * p.n * p.blocks * BLOCK < PARALLEL_MACS) threads = 1;
#if FP4_ISA == 2
  if (p.m == 1) return multiply_one_row(p, threads);
#endif
  float row_scales[128];
  for (int scale = 0; scale < 128; scale++) row_scales[scale] = of_e4m3(static_cast<uint8_t>(scale)) * ROW_SCALE;
  const int64_t bytes_per_row = (p.blocks ? p.blocks : 1) * static_cast<int64_t>(sizeof(RowBlock));
  int64_t most = ROW_CACHE / bytes_per_row / TILE * TILE;
  most = most < TILE ? TILE : most > MOST_ROWS ? MOST_ROWS : most;
  const int64_t chunk = p.m < most ? ceil_div(p.m, TILE) * TILE : most, panels = ceil_div(p.n, LANES);
  const std::unique_ptr<RowBlock[]> rows(new RowBlock[static_cast<size_t>(chunk * p.blocks)]);
#pragma omp parallel num_threads(threads) if (threads > 1)
  for (int64_t first = 0; first < p.m; first += chunk) {
    const int64_t count = p.m - first < chunk ? p.m - first : chunk, tiles = ceil_div(count, TILE);
    const int64_t stretches = ceil_div(p.blocks, DEPTH);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < tiles * stretches; i++) {
      const int64_t from = i % stretches * DEPTH, to = from + DEPTH < p.blocks ? from + DEPTH : p.blocks;
      prepare(p, first, count, i / stretches, from, to, row_scales, rows.get());
    }
    // Few panels: the rows are shared out too.
    int64_t groups = panels >= 2 * threads ? 1 : ceil_div(2 * threads, panels);
    const int64_t height = ceil_div(tiles, groups < tiles ? groups : tiles);
    groups = ceil_div(tiles, height);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < panels * groups; i++) {
      const int64_t from = i % groups * height, to = from + height < tiles ? from + height : tiles;
      panel_times_tiles(p, rows.get(), first, count, from, to, i / groups);
    }
  }
}

}  // namespace

// out [m, n] of kind out_kind = alpha * decode(a) @ decode(w)^T + bias.
extern "C" void fp4_multiply(const uint8_t* codes, const uint8_t* scales, const uint8_t* weight_codes,
                             const uint8_t* weight_scales, const void* bias, int32_t bias_kind, float alpha, void* out,
                             int32_t out_kind, int64_t m, int64_t n, int64_t blocks, int32_t threads) {
  multiply_all({codes, scales, weight_codes, weight_scales, bias, bias_kind, alpha, out, out_kind, m, n, blocks}, threads);
}

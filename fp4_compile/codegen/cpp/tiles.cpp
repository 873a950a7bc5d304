// Products of 16-element blocks, exact: integers from -2304 to 2304, times two block scales in FP32.
//
// An output is   acc = 0;  for each block, in order: acc += dot(a, w) * (a's scale) * (w's scale);   out = acc * alpha.
// dot is 12 bits and each scale 4, so a term is exact whatever the order of its factors, fused or not, and one rounding
// is left per block: the addition. That is the whole definition: instruction set, tiling and threads do not show.
//
// Weights are rows in memory and turned, a stretch of a panel at a time, so that a panel's 16 outputs are the lanes of
// a vector: for every block 128 bytes of codes, [half of the block][output] of 4 bytes as the row has them, and 16
// scales. Activations come as RowBlocks, decoded beforehand.

namespace {

constexpr int LANES = 16;                  // outputs of a panel
constexpr int TILE = 16;                   // rows of activations that a panel's block is used for at a time
constexpr int CODE_BYTES = LANES * BLOCK / 2;  // of a panel's block
constexpr int DEPTH = 64;                  // blocks of a panel that are decoded at a time, to stay in the first cache

// 2**-8 of a weight's scale is what comes without work from FP16's bits; the row's scale makes up for it, and for
// both integers being twice their values.
constexpr float WEIGHT_SCALE = 0x1p-8f, ROW_SCALE = 0x1p6f;

#if FP4_ISA == 2
// An integer added to the bits of this FP32 number adds to the number: no conversion is needed.
constexpr float SHIFT = 12582912.0f;  // 1.5 * 2**23
constexpr int32_t START = 0x4b400000;
#else
constexpr int32_t START = 0;
#endif

struct RowBlock {
  int8_t values[BLOCK];  // elements 0 2 4 6, 1 3 5 7, 8 10 12 14, 9 11 13 15: the order of a code byte's nibbles
  float scale;
  int32_t start;  // takes the weights' offset back out
};

// A stretch of a panel.
struct Packed {
  alignas(64) uint8_t codes[DEPTH * CODE_BYTES];
  alignas(64) uint8_t scales[DEPTH * LANES];
};

// A stretch of a panel, decoded once for many rows.
struct Decoded {
  alignas(64) uint8_t weights[DEPTH][4][4 * LANES];  // [quarter in RowBlock's order][output][element]
  alignas(64) float scales[DEPTH][LANES];
};

inline int32_t quad(const RowBlock& row, int quarter) {
  int32_t four;
  std::memcpy(&four, row.values + 4 * quarter, 4);
  return four;
}

#if FP4_ISA == 2

// Twice the values of the 16 codes, and OFFSET.
inline __m512i weight_table() {
  return _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
}

// What a table has for the low nibble of each byte.
inline __m512i low_nibbles(__m512i table, __m512i codes) {
#ifdef __AVX512VBMI__
  // The table repeats, so the two bits above a code do not matter, and higher ones are not looked at.
  return _mm512_permutexvar_epi8(codes, table);
#else
  return _mm512_shuffle_epi8(table, _mm512_and_si512(codes, _mm512_set1_epi8(15)));
#endif
}

// E4M3 times WEIGHT_SCALE.
inline __m512 scales_of(__m128i bytes) {
  const __mmask16 finite = _mm_cmpneq_epi8_mask(bytes, _mm_set1_epi8(0x7f));
  const __m256i halves = _mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 7);
  return _mm512_mask_cvtph_ps(_mm512_set1_ps(std::numeric_limits<float>::quiet_NaN()), finite, halves);
}

inline void load_block(const Packed& panel, int64_t block, __m512i w[4], __m512& scale) {
  const __m512i table = weight_table();
  for (int half = 0; half < 2; half++) {
    const __m512i codes = _mm512_loadu_si512(panel.codes + block * CODE_BYTES + 64 * half);
    w[2 * half] = low_nibbles(table, codes);
    w[2 * half + 1] = low_nibbles(table, _mm512_srli_epi16(codes, 4));
  }
  scale = scales_of(_mm_loadu_si128(reinterpret_cast<const __m128i*>(panel.scales + block * LANES)));
}

inline void load_block(const Decoded& panel, int64_t block, __m512i w[4], __m512& scale) {
  for (int i = 0; i < 4; i++) w[i] = _mm512_load_si512(panel.weights[block][i]);
  scale = _mm512_load_ps(panel.scales[block]);
}

template <int ROWS, typename Panel>
void multiply(const RowBlock* rows, const Panel& panel, int64_t blocks, float* sums) {
  __m512 acc[ROWS];
  for (int r = 0; r < ROWS; r++) acc[r] = _mm512_loadu_ps(sums + r * LANES);
  for (int64_t block = 0; block < blocks; block++, rows += TILE) {
    __m512i w[4];
    __m512 scale;
    load_block(panel, block, w, scale);
    const __m512 shifted = _mm512_mul_ps(scale, _mm512_set1_ps(SHIFT));
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      __m512i dot = _mm512_set1_epi32(rows[r].start);
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) dot = _mm512_dpbusd_epi32(dot, w[i], _mm512_set1_epi32(quad(rows[r], i)));
      const __m512 scaled = _mm512_fmsub_ps(_mm512_castsi512_ps(dot), scale, shifted);
      acc[r] = _mm512_fmadd_ps(scaled, _mm512_set1_ps(rows[r].scale), acc[r]);
    }
  }
  for (int r = 0; r < ROWS; r++) _mm512_storeu_ps(sums + r * LANES, acc[r]);
}

inline void decode(const Packed& panel, int64_t blocks, Decoded& to) {
  for (int64_t block = 0; block < blocks; block++) {
    __m512i w[4];
    __m512 scale;
    load_block(panel, block, w, scale);
    for (int i = 0; i < 4; i++) _mm512_store_si512(to.weights[block][i], w[i]);
    _mm512_store_ps(to.scales[block], scale);
  }
}

#elif FP4_ISA == 1

inline void load_half(const Packed& panel, int64_t block, int side, __m256i w[4], __m256& scale) {
  const __m256i table = _mm256_broadcastsi128_si256(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
  const __m256i nibble = _mm256_set1_epi8(15);
  for (int half = 0; half < 2; half++) {
    const uint8_t* from = panel.codes + block * CODE_BYTES + 64 * half + 32 * side;
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    w[2 * half] = _mm256_shuffle_epi8(table, _mm256_and_si256(codes, nibble));
    w[2 * half + 1] = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(codes, 4), nibble));
  }
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(panel.scales + block * LANES + 8 * side));
  const __m256 finite = _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(bytes), 7));
  const __m256i bad = _mm256_cvtepi8_epi32(_mm_cmpeq_epi8(bytes, _mm_set1_epi8(0x7f)));
  scale = _mm256_or_ps(finite, _mm256_castsi256_ps(bad));
}

inline void load_half(const Decoded& panel, int64_t block, int side, __m256i w[4], __m256& scale) {
  for (int i = 0; i < 4; i++) {
    w[i] = _mm256_load_si256(reinterpret_cast<const __m256i*>(panel.weights[block][i] + 32 * side));
  }
  scale = _mm256_load_ps(panel.scales[block] + 8 * side);
}

template <int ROWS, typename Panel>
void multiply_few(const RowBlock* rows, const Panel& panel, int64_t blocks, int side, float* sums) {
  __m256 acc[ROWS];
  for (int r = 0; r < ROWS; r++) acc[r] = _mm256_loadu_ps(sums + r * LANES);
  for (int64_t block = 0; block < blocks; block++, rows += TILE) {
    __m256i w[4];
    __m256 scale;
    load_half(panel, block, side, w, scale);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) {
      // At most 4 * 2 * 24 * 12 in 16 bits.
      __m256i pairs = _mm256_maddubs_epi16(w[0], _mm256_set1_epi32(quad(rows[r], 0)));
      for (int i = 1; i < 4; i++) {
        pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(w[i], _mm256_set1_epi32(quad(rows[r], i))));
      }
      __m256i dot = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
      dot = _mm256_add_epi32(dot, _mm256_set1_epi32(rows[r].start));
      const __m256 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(dot), scale);
      acc[r] = _mm256_fmadd_ps(scaled, _mm256_set1_ps(rows[r].scale), acc[r]);
    }
  }
  for (int r = 0; r < ROWS; r++) _mm256_storeu_ps(sums + r * LANES, acc[r]);
}

template <int ROWS, typename Panel>
void multiply(const RowBlock* rows, const Panel& panel, int64_t blocks, float* sums) {
  constexpr int FEW = ROWS < 4 ? ROWS : 4;
  for (int side = 0; side < 2; side++) {
    for (int r = 0; r < ROWS; r += FEW) {
      multiply_few<FEW>(rows + r, panel, blocks, side, sums + r * LANES + 8 * side);
    }
  }
}

inline void decode(const Packed& panel, int64_t blocks, Decoded& to) {
  for (int64_t block = 0; block < blocks; block++) {
    for (int side = 0; side < 2; side++) {
      __m256i w[4];
      __m256 scale;
      load_half(panel, block, side, w, scale);
      for (int i = 0; i < 4; i++) {
        _mm256_store_si256(reinterpret_cast<__m256i*>(to.weights[block][i] + 32 * side), w[i]);
      }
      _mm256_store_ps(to.scales[block] + 8 * side, scale);
    }
  }
}

#else

inline void decode(const Packed& panel, int64_t blocks, Decoded& to) {
  for (int64_t block = 0; block < blocks; block++) {
    const uint8_t* codes = panel.codes + block * CODE_BYTES;
    for (int i = 0; i < 4; i++) {
      for (int j = 0; j < 4 * LANES; j++) {
        const int code = codes[i / 2 * 64 + j] >> (i % 2 * 4) & 15;
        to.weights[block][i][j] = static_cast<uint8_t>(TWICE[code] + OFFSET);
      }
    }
    for (int lane = 0; lane < LANES; lane++) {
      to.scales[block][lane] = of_e4m3(panel.scales[block * LANES + lane]) * WEIGHT_SCALE;
    }
  }
}

template <int ROWS>
void multiply(const RowBlock* rows, const Decoded& panel, int64_t blocks, float* sums) {
  for (int64_t block = 0; block < blocks; block++, rows += TILE) {
    for (int r = 0; r < ROWS; r++) {
      int32_t dot[LANES];
      for (int lane = 0; lane < LANES; lane++) dot[lane] = rows[r].start;
      for (int i = 0; i < 4; i++) {
        const uint8_t* w = panel.weights[block][i];
        const int8_t* v = rows[r].values + 4 * i;
        for (int lane = 0; lane < LANES; lane++) {
          for (int j = 0; j < 4; j++) dot[lane] += w[4 * lane + j] * v[j];
        }
      }
      for (int lane = 0; lane < LANES; lane++) {
        sums[r * LANES + lane] += static_cast<float>(dot[lane]) * panel.scales[block][lane] * rows[r].scale;
      }
    }
  }
}

template <int ROWS>
void multiply(const RowBlock* rows, const Packed& panel, int64_t blocks, float* sums) {
  Decoded decoded;
  decode(panel, blocks, decoded);
  multiply<ROWS>(rows, decoded, blocks, sums);
}

#endif

// ROWS, and what they round up to: a tile has rows of zeros behind the last.
template <typename Panel>
void multiply_rows(int64_t rows, const RowBlock* tile, const Panel& panel, int64_t blocks, float* sums) {
  if (rows > 12) return multiply<16>(tile, panel, blocks, sums);
  if (rows > 8) return multiply<12>(tile, panel, blocks, sums);
  if (rows > 4) return multiply<8>(tile, panel, blocks, sums);
  if (rows > 2) return multiply<4>(tile, panel, blocks, sums);
  if (rows == 2) return multiply<2>(tile, panel, blocks, sums);
  multiply<1>(tile, panel, blocks, sums);
}

// Codes and scale of one block of a row.
inline RowBlock row_block(const uint8_t* codes, float scale) {
  RowBlock block;
#if FP4_ISA
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)), nibble = _mm_set1_epi8(15);
  const __m128i low = _mm_and_si128(bytes, nibble), high = _mm_and_si128(_mm_srli_epi16(bytes, 4), nibble);
  const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(TWICE));
  const __m128i values = _mm_shuffle_epi8(table, _mm_unpacklo_epi32(low, high));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(block.values), values);
  const __m128i unsigned_values = _mm_add_epi8(values, _mm_set1_epi8(OFFSET));
  const __m128i sums = _mm_sad_epu8(unsigned_values, _mm_setzero_si128());
  const int32_t sum = _mm_cvtsi128_si32(sums) + _mm_extract_epi16(sums, 4) - OFFSET * BLOCK;
#else
  int32_t sum = 0;
  for (int i = 0; i < BLOCK; i++) {
    const int byte = codes[i / 8 * 4 + i % 4], code = byte >> (i / 4 % 2 * 4) & 15;
    block.values[i] = TWICE[code];
    sum += TWICE[code];
  }
#endif
  block.scale = scale;
  block.start = START - OFFSET * sum;
  return block;
}

}  // namespace

// One row of activations by all weights, as they lie in memory: decoding a token reads each weight once, so what
// counts is the order of the reads. 16 rows of weights are one stretch of memory and read from front to back; the
// terms of a block, one for each lane, are kept in the first cache and turned there, so that outputs are the lanes.

#if FP4_ISA == 2

namespace {

constexpr int64_t GROUP_BLOCKS = 16;   // blocks whose terms are the lanes of a vector
constexpr int64_t STRETCH = 16;        // groups of a row whose terms are kept
constexpr int64_t AHEAD = 8192;        // bytes between what is read and what is asked of memory

// 16 blocks of the one row. The codes of 8 blocks are a vector of bytes; its low nibbles meet values[0], the high ones
// values[1], the next 8 blocks' values[2] and [3].
struct RowGroup {
  alignas(64) int8_t values[4][64];
  alignas(64) int32_t start[GROUP_BLOCKS];  // takes the weights' offset back out
  alignas(64) float scales[GROUP_BLOCKS];
};

// Two vectors of [block][half] -> the sums of the halves, of 16 blocks.
inline __m512i add_halves(__m512i first, __m512i second) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  return _mm512_add_epi32(_mm512_permutex2var_epi32(first, even, second), _mm512_permutex2var_epi32(first, odd, second));
}

struct Group {
  __mmask64 first, second;  // bytes of codes that are there
  __mmask16 scales;
};

inline Group group_of(int64_t blocks) {
  const auto bytes = [](int64_t count) {
    return count >= 8 ? ~__mmask64{0} : count <= 0 ? __mmask64{0} : (__mmask64{1} << (8 * count)) - 1;
  };
  return {bytes(blocks), bytes(blocks - 8), static_cast<__mmask16>(blocks >= 16 ? 0xffff : (1 << blocks) - 1)};
}

inline RowGroup row_group(const uint8_t* codes, const uint8_t* scales, int64_t blocks) {
  const Group there = group_of(blocks);
  const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(TWICE)));
  const __m512i first = _mm512_maskz_loadu_epi8(there.first, codes);
  const __m512i second = _mm512_maskz_loadu_epi8(there.second, codes + 64);
  const __m512i values[4] = {low_nibbles(table, first), low_nibbles(table, _mm512_srli_epi16(first, 4)),
                             low_nibbles(table, second), low_nibbles(table, _mm512_srli_epi16(second, 4))};
  const __m512i offset = _mm512_set1_epi8(OFFSET), zero = _mm512_setzero_si512();
  const __m512i a = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(zero, offset, values[0]), offset, values[1]);
  const __m512i b = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(zero, offset, values[2]), offset, values[3]);
  RowGroup group;
  for (int i = 0; i < 4; i++) _mm512_store_si512(group.values[i], values[i]);
  _mm512_store_si512(group.start, _mm512_sub_epi32(zero, add_halves(a, b)));
  const __m128i bytes = _mm_maskz_loadu_epi8(there.scales, scales);
  _mm512_store_ps(group.scales, _mm512_mul_ps(scales_of(bytes), _mm512_set1_ps(ROW_SCALE / WEIGHT_SCALE)));
  return group;
}

// The terms of 16 blocks of a row of weights.
template <bool WHOLE>
inline __m512 terms_of(const RowGroup& row, const uint8_t* codes, const uint8_t* scales, const Group& there) {
  const __m512i table = weight_table();
  const __m512i first = WHOLE ? _mm512_loadu_si512(codes) : _mm512_maskz_loadu_epi8(there.first, codes);
  const __m512i second = WHOLE ? _mm512_loadu_si512(codes + 64) : _mm512_maskz_loadu_epi8(there.second, codes + 64);
  const auto dot = [&](__m512i w, int i) {
    const __m512i sum = _mm512_dpbusd_epi32(_mm512_setzero_si512(), low_nibbles(table, w), _mm512_load_si512(row.values[i]));
    const __m512i high = low_nibbles(table, _mm512_srli_epi16(w, 4));
    return _mm512_dpbusd_epi32(sum, high, _mm512_load_si512(row.values[i + 1]));
  };
  const __m512i sums = _mm512_add_epi32(add_halves(dot(first, 0), dot(second, 2)), _mm512_load_si512(row.start));
  const __m128i bytes = WHOLE ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(scales)) : _mm_maskz_loadu_epi8(there.scales, scales);
  const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(sums), scales_of(bytes));
  return _mm512_mul_ps(scaled, _mm512_load_ps(row.scales));
}

// 16 vectors of one output's blocks -> acc += one block of all outputs, block after block.
inline __m512 add_turned(const float* terms, int64_t stride, __m512 acc) {
  __m512 a[16], b[16];
  for (int i = 0; i < 16; i++) a[i] = _mm512_load_ps(terms + i * stride);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
  }
  const auto wide = [](__m512 x) { return _mm512_castps_pd(x); };
  for (int i = 0; i < 16; i += 4) {  // a[i + c]: block c of every lane's four, of outputs i to i + 3
    a[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(wide(b[i]), wide(b[i + 2])));
    a[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(wide(b[i]), wide(b[i + 2])));
    a[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(wide(b[i + 1]), wide(b[i + 3])));
    a[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(wide(b[i + 1]), wide(b[i + 3])));
  }
  for (int c = 0; c < 4; c++) {
    const __m512 low = _mm512_shuffle_f32x4(a[c], a[4 + c], 0x88), high = _mm512_shuffle_f32x4(a[c], a[4 + c], 0xdd);
    const __m512 low2 = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0x88), high2 = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0xdd);
    b[c] = _mm512_shuffle_f32x4(low, low2, 0x88);
    b[8 + c] = _mm512_shuffle_f32x4(low, low2, 0xdd);
    b[4 + c] = _mm512_shuffle_f32x4(high, high2, 0x88);
    b[12 + c] = _mm512_shuffle_f32x4(high, high2, 0xdd);
  }
  for (int i = 0; i < 16; i++) acc = _mm512_add_ps(acc, b[i]);
  return acc;
}

void panel_times_row(const Product& p, const RowGroup* groups, int64_t panel) {
  constexpr int64_t WIDTH = STRETCH * GROUP_BLOCKS;
  alignas(64) float terms[LANES * WIDTH], sums[LANES];
  const int64_t first = panel * LANES, rows = p.n - first < LANES ? p.n - first : LANES;
  if (rows < LANES) std::memset(terms, 0, sizeof terms);
  __m512 acc = _mm512_setzero_ps();
  for (int64_t block = 0; block < p.blocks; block += WIDTH) {
    const int64_t count = p.blocks - block < WIDTH ? p.blocks - block : WIDTH, whole = count / GROUP_BLOCKS;
    for (int64_t row = 0; row < rows; row++) {
      const int64_t at = (first + row) * p.blocks + block;
      const uint8_t *codes = p.weight_codes + at * (BLOCK / 2), *scales = p.weight_scales + at;
      const RowGroup* group = groups + block / GROUP_BLOCKS;
      float* to = terms + row * WIDTH;
      const auto advance = [&] { codes += 128, scales += GROUP_BLOCKS, to += GROUP_BLOCKS, group++; };
      for (int64_t i = 0; i < whole; i++, advance()) {
        _mm_prefetch(reinterpret_cast<const char*>(codes + AHEAD), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(codes + AHEAD + 64), _MM_HINT_T0);
        _mm512_store_ps(to, terms_of<true>(*group, codes, scales, {}));
      }
      if (count % GROUP_BLOCKS) _mm512_store_ps(to, terms_of<false>(*group, codes, scales, group_of(count % GROUP_BLOCKS)));
    }
    for (int64_t i = 0; i < count; i += GROUP_BLOCKS) acc = add_turned(terms + i, WIDTH, acc);
  }
  _mm512_store_ps(sums, acc);
  finish(p, sums, 0, 1, panel);
}

void multiply_one_row(const Product& p, int32_t threads) {
  const int64_t count = ceil_div(p.blocks, GROUP_BLOCKS), panels = ceil_div(p.n, LANES);
  const std::unique_ptr<RowGroup[]> groups(new RowGroup[static_cast<size_t>(count)]);
  for (int64_t i = 0; i < count; i++) {
    const int64_t block = i * GROUP_BLOCKS;
    groups[i] = row_group(p.codes + block * (BLOCK / 2), p.scales + block, p.blocks - block);
  }
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < panels; i++) panel_times_row(p, groups.get(), i);
}

}  // namespace

#endif

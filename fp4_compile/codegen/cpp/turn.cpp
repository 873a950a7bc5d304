// From rows to lanes: 16 rows of codes and scales, transposed in registers.

namespace {

#if FP4_ISA == 2

// Rows j, 4 + j, 8 + j and 12 + j, 16 bytes each.
inline __m512i four_rows(const uint8_t* from, int64_t stride, int j) {
  const auto row = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * stride)); };
  __m512i rows = _mm512_castsi128_si512(row(j));
  rows = _mm512_inserti32x4(rows, row(4 + j), 1);
  rows = _mm512_inserti32x4(rows, row(8 + j), 2);
  return _mm512_inserti32x4(rows, row(12 + j), 3);
}

// 16 rows of 4 integers -> 4 vectors of one from each row.
inline void transpose(const uint8_t* from, int64_t stride, __m512i out[4]) {
  const __m512i a = four_rows(from, stride, 0), b = four_rows(from, stride, 1);
  const __m512i c = four_rows(from, stride, 2), d = four_rows(from, stride, 3);
  const __m512i ab_low = _mm512_unpacklo_epi32(a, b), ab_high = _mm512_unpackhi_epi32(a, b);
  const __m512i cd_low = _mm512_unpacklo_epi32(c, d), cd_high = _mm512_unpackhi_epi32(c, d);
  out[0] = _mm512_unpacklo_epi64(ab_low, cd_low);
  out[1] = _mm512_unpackhi_epi64(ab_low, cd_low);
  out[2] = _mm512_unpacklo_epi64(ab_high, cd_high);
  out[3] = _mm512_unpackhi_epi64(ab_high, cd_high);
}

// As many whole groups of 16 blocks as `depth` holds; returns the blocks done. `ahead` blocks further on is what is
// read next (0: nothing is).
int64_t turn_whole(const uint8_t* codes, const uint8_t* scales, int64_t blocks, int64_t depth, int64_t ahead,
                   Packed& to) {
  constexpr int64_t GROUP = 16;
  const int64_t stride = blocks * (BLOCK / 2);
  const __m512i bytes = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  const __m512i lanes = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  __m512i out[4];
  int64_t block = 0;
  for (; block + GROUP <= depth; block += GROUP) {
    if (ahead) {
      for (int row = 0; row < LANES; row++) {
        const char* next = reinterpret_cast<const char*>(codes + row * stride + (block + ahead) * (BLOCK / 2));
        _mm_prefetch(next, _MM_HINT_T0);
        _mm_prefetch(next + 64, _MM_HINT_T0);
        if (block == 0) _mm_prefetch(reinterpret_cast<const char*>(scales + row * blocks + ahead), _MM_HINT_T0);
      }
    }
    for (int64_t i = 0; i < GROUP / 2; i++) {
      transpose(codes + block * (BLOCK / 2) + 16 * i, stride, out);
      for (int j = 0; j < 4; j++) _mm512_store_si512(to.codes + block * CODE_BYTES + 64 * (4 * i + j), out[j]);
    }
    transpose(scales + block, blocks, out);
    for (int j = 0; j < 4; j++) {
      const __m512i turned = _mm512_permutexvar_epi32(lanes, _mm512_shuffle_epi8(out[j], bytes));
      _mm512_store_si512(to.scales + (block + 4 * j) * LANES, turned);
    }
  }
  return block;
}

#elif FP4_ISA == 1

// As many pairs of blocks as `depth` holds; returns the blocks done.
int64_t turn_whole(const uint8_t* codes, const uint8_t* scales, int64_t blocks, int64_t depth, int64_t, Packed& to) {
  const int64_t stride = blocks * (BLOCK / 2);
  int64_t block = 0;
  for (; block + 2 <= depth; block += 2) {
    for (int first = 0; first < LANES; first += 4) {
      const uint8_t* from = codes + first * stride + block * (BLOCK / 2);
      const auto row = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * stride)); };
      const __m128i a = row(0), b = row(1), c = row(2), d = row(3);
      const __m128i ab_low = _mm_unpacklo_epi32(a, b), ab_high = _mm_unpackhi_epi32(a, b);
      const __m128i cd_low = _mm_unpacklo_epi32(c, d), cd_high = _mm_unpackhi_epi32(c, d);
      const __m128i out[4] = {_mm_unpacklo_epi64(ab_low, cd_low), _mm_unpackhi_epi64(ab_low, cd_low),
                              _mm_unpacklo_epi64(ab_high, cd_high), _mm_unpackhi_epi64(ab_high, cd_high)};
      for (int j = 0; j < 4; j++) {
        _mm_store_si128(reinterpret_cast<__m128i*>(to.codes + block * CODE_BYTES + 64 * j + 4 * first), out[j]);
      }
    }
    for (int lane = 0; lane < LANES; lane++) {
      to.scales[block * LANES + lane] = scales[lane * blocks + block];
      to.scales[(block + 1) * LANES + lane] = scales[lane * blocks + block + 1];
    }
  }
  return block;
}

#else

int64_t turn_whole(const uint8_t*, const uint8_t*, int64_t, int64_t, int64_t, Packed&) { return 0; }

#endif

}  // namespace

// Blocks of FP32 elements in plain C++ that a compiler vectorizes, and decoding.

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC optimize("tree-loop-vectorize")  // Inductor turns it off: its own kernels are vectorized by hand
#endif

namespace {

constexpr int64_t PARALLEL_FROM = 1 << 15;  // elements; below, waking threads costs more than the work

// BLOCK elements times `inverse` -> BLOCK/2 bytes of codes. Each comparison is written so that a NaN counts as large:
// it becomes code 7, as in hardware.
inline void e2m1_of_block(const float* v, float inverse, uint8_t* out) {
  int32_t code[BLOCK];
#pragma omp simd
  for (int i = 0; i < BLOCK; i++) {
    const float y = v[i] * inverse;
    const float a = std::fabs(y);
    int32_t magnitude = a <= 0.25f ? 0 : 1;
    magnitude += a < 0.75f ? 0 : 1;
    magnitude += a <= 1.25f ? 0 : 1;
    magnitude += a < 1.75f ? 0 : 1;
    magnitude += a <= 2.5f ? 0 : 1;
    magnitude += a < 3.5f ? 0 : 1;
    magnitude += a <= 5.0f ? 0 : 1;
    const int32_t sign = static_cast<int32_t>(bits_of(y) >> 28) & 8;
    code[i] = magnitude | (y == y ? sign : 0);
  }
  uint32_t packed[2] = {0, 0};
  for (int i = 0; i < BLOCK; i++) packed[i / 8] |= static_cast<uint32_t>(code[i]) << (4 * (i % 8));
  std::memcpy(out, packed, sizeof packed);
}

// The finite-magnitude test of a block's amax works on bits, so that a NaN is larger than everything.
inline int32_t amax_bits_of_block(const float* v) {
  int32_t largest = 0;
#pragma omp simd reduction(max : largest)
  for (int i = 0; i < BLOCK; i++) {
    const int32_t u = static_cast<int32_t>(bits_of(v[i]) & 0x7fffffff);
    largest = largest > u ? largest : u;
  }
  return largest;
}

inline float float_of(float f) { return f; }

inline float float_of(uint16_t bf16) { return of_bf16(bf16); }

}  // namespace

// Codes and scales of `blocks` blocks -> code times block scale, bf16. Six significant bits: nothing is rounded.
extern "C" void fp4_decode(const uint8_t* codes, const uint8_t* scales, int64_t blocks, uint16_t* out) {
  static const float magnitudes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  float pairs[256][2], values[256];
  for (int byte = 0; byte < 256; byte++) {
    for (int half = 0; half < 2; half++) {
      const int code = byte >> (4 * half) & 15;
      pairs[byte][half] = code & 8 ? -magnitudes[code & 7] : magnitudes[code & 7];
    }
    values[byte] = of_e4m3(static_cast<uint8_t>(byte & 0x7f));
  }
#pragma omp parallel for if (blocks * BLOCK >= PARALLEL_FROM)
  for (int64_t block = 0; block < blocks; block++) {
    const float scale = values[scales[block]];
    for (int i = 0; i < BLOCK / 2; i++) {
      const float* pair = pairs[codes[block * (BLOCK / 2) + i]];
      out[block * BLOCK + 2 * i] = static_cast<uint16_t>(bits_of(pair[0] * scale) >> 16);
      out[block * BLOCK + 2 * i + 1] = static_cast<uint16_t>(bits_of(pair[1] * scale) >> 16);
    }
  }
}

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC pop_options
#endif

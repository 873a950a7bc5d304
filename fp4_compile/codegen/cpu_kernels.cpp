// NVFP4 on a CPU: the definition in fp4_compile/numerics, bit for bit, one pass over memory.
// Plain C++ that a compiler vectorizes; FP contraction and unsafe math must be off, which the build sees to.

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("tree-loop-vectorize")  // Inductor turns it off: its own kernels are vectorized by hand
#endif

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace {

constexpr int BLOCK = 16;
constexpr int64_t PARALLEL_FROM = 1 << 14;  // elements; below, waking threads costs more than the work

inline uint32_t bits_of(float f) { return std::bit_cast<uint32_t>(f); }

// Nearest even, saturating at 448; NaN is kept. f is not negative.
inline uint8_t e4m3_of(float f) {
  if (!(f <= 448.0f)) return f != f ? 0x7f : 0x7e;
  if (f < 0.015625f) return static_cast<uint8_t>(std::nearbyintf(f * 512.0f));  // subnormal: steps of 2**-9
  uint32_t u = bits_of(f);
  u += 0x7ffff + ((u >> 20) & 1);
  return static_cast<uint8_t>((u >> 20) - ((127 - 7) << 3));
}

inline float of_e4m3(uint8_t s) {
  const int exponent = s >> 3 & 15, mantissa = s & 7;
  if (s == 0x7f) return std::numeric_limits<float>::quiet_NaN();
  return exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                       : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
}

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

inline float float_of(uint16_t bf16) { return std::bit_cast<float>(static_cast<uint32_t>(bf16) << 16); }

template <typename T>
void quantize_1x16(const T* x, int64_t rows, int64_t k, float encode, uint8_t* codes, uint8_t* scales) {
  const int64_t blocks = (k + BLOCK - 1) / BLOCK;
  const float per_amax = encode * 0x1.555556p-3f, decode = 1.0f / encode;
  float inverses[128];
  for (int scale = 0; scale < 128; scale++) {
    const float inverse = 1.0f / (of_e4m3(static_cast<uint8_t>(scale)) * decode);
    const float largest = std::numeric_limits<float>::max();
    inverses[scale] = inverse > largest ? largest : inverse;
  }
#pragma omp parallel for if (rows * k >= PARALLEL_FROM)
  for (int64_t row = 0; row < rows; row++) {
    for (int64_t block = 0; block < blocks; block++) {
      const int64_t left = k - block * BLOCK;
      const T* from = x + row * k + block * BLOCK;
      float v[BLOCK];
      if (left >= BLOCK) {
#pragma omp simd
        for (int i = 0; i < BLOCK; i++) v[i] = float_of(from[i]);
      } else {
        for (int i = 0; i < BLOCK; i++) v[i] = i < left ? float_of(from[i]) : 0.0f;
      }
      const int32_t amax_bits = amax_bits_of_block(v);
      float amax = std::bit_cast<float>(amax_bits);
      if (amax_bits >= 0x7f800000) amax = std::numeric_limits<float>::quiet_NaN();  // one NaN or Inf: all NaN
      const uint8_t scale = e4m3_of(amax * per_amax);
      scales[row * blocks + block] = scale;
      e2m1_of_block(v, inverses[scale], codes + (row * blocks + block) * (BLOCK / 2));
    }
  }
}

inline int32_t magnitude_of(float f) { return static_cast<int32_t>(bits_of(f) & 0x7fffffff); }
inline int32_t magnitude_of(uint16_t bf16) { return static_cast<int32_t>(bf16 & 0x7fff) << 16; }

template <typename T>
uint32_t amax_bits(const T* x, int64_t n) {
  int32_t largest = 0;
#pragma omp parallel for simd reduction(max : largest) if (parallel : n >= PARALLEL_FROM)
  for (int64_t i = 0; i < n; i++) {
    int32_t u = magnitude_of(x[i]);
    u = u < 0x7f800000 ? u : 0;
    largest = largest > u ? largest : u;
  }
  return static_cast<uint32_t>(largest);
}

}  // namespace

// Bits of the largest finite magnitude, as fp32.
extern "C" uint32_t fp4_amax_bits_fp32(const float* x, int64_t n) { return amax_bits(x, n); }
extern "C" uint32_t fp4_amax_bits_bf16(const uint16_t* x, int64_t n) { return amax_bits(x, n); }

// x [rows, k] -> codes [rows, kp / 2], scales [rows, kp / 16]; kp is k rounded up to 16, the tail counts as zeros.
extern "C" void fp4_quantize_1x16_fp32(const float* x, int64_t rows, int64_t k, float encode, uint8_t* codes,
                                       uint8_t* scales) {
  quantize_1x16(x, rows, k, encode, codes, scales);
}
extern "C" void fp4_quantize_1x16_bf16(const uint16_t* x, int64_t rows, int64_t k, float encode, uint8_t* codes,
                                       uint8_t* scales) {
  quantize_1x16(x, rows, k, encode, codes, scales);
}

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

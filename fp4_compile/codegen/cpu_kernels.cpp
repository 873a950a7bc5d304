// NVFP4 on a CPU: the definition in fp4_compile/numerics, bit for bit, one pass over memory.
// Plain C++ that a compiler vectorizes; FP contraction and unsafe math must be off, which the build sees to.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace {

constexpr int BLOCK = 16;
constexpr int64_t PARALLEL_FROM = 1 << 14;  // elements; below, waking threads costs more than the work

inline uint32_t bits_of(float f) {
  uint32_t u;
  std::memcpy(&u, &f, sizeof u);
  return u;
}

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

// Each comparison is written so that a NaN counts as large: it becomes code 7, as in hardware.
inline uint8_t e2m1_of(float y) {
  const float a = std::fabs(y);
  const int magnitude = !(a <= 0.25f) + !(a < 0.75f) + !(a <= 1.25f) + !(a < 1.75f) + !(a <= 2.5f) + !(a < 3.5f) +
                        !(a <= 5.0f);
  const int sign = static_cast<int>(bits_of(y) >> 31) & (y == y);
  return static_cast<uint8_t>(magnitude | sign << 3);
}

}  // namespace

// Bits of the largest finite magnitude.
extern "C" uint32_t fp4_amax_bits(const float* x, int64_t n) {
  int32_t largest = 0;
#pragma omp parallel for reduction(max : largest) if (n >= PARALLEL_FROM)
  for (int64_t i = 0; i < n; i++) {
    int32_t u;
    std::memcpy(&u, x + i, sizeof u);
    u &= 0x7fffffff;
    u = u < 0x7f800000 ? u : 0;
    largest = largest > u ? largest : u;
  }
  return static_cast<uint32_t>(largest);
}

// x [rows, k] -> codes [rows, kp / 2], scales [rows, kp / 16]; kp is k rounded up to 16, the tail counts as zeros.
extern "C" void fp4_quantize_1x16(const float* x, int64_t rows, int64_t k, float encode, uint8_t* codes,
                                  uint8_t* scales) {
  const int64_t blocks = (k + BLOCK - 1) / BLOCK;
  const float per_amax = encode * 0x1.555556p-3f, decode = 1.0f / encode;
  const float largest_float = std::numeric_limits<float>::max();
#pragma omp parallel for if (rows * k >= PARALLEL_FROM)
  for (int64_t row = 0; row < rows; row++) {
    for (int64_t block = 0; block < blocks; block++) {
      float v[BLOCK] = {0};
      const int64_t left = k - block * BLOCK;
      std::memcpy(v, x + row * k + block * BLOCK, (left < BLOCK ? left : BLOCK) * sizeof(float));
      int32_t amax_bits = 0;
      for (int i = 0; i < BLOCK; i++) {
        const int32_t u = static_cast<int32_t>(bits_of(v[i]) & 0x7fffffff);
        amax_bits = amax_bits > u ? amax_bits : u;
      }
      float amax;
      std::memcpy(&amax, &amax_bits, sizeof amax);
      if (amax_bits >= 0x7f800000) amax = std::numeric_limits<float>::quiet_NaN();  // one NaN or Inf: all NaN
      const uint8_t scale = e4m3_of(amax * per_amax);
      float inverse = 1.0f / (of_e4m3(scale) * decode);
      inverse = inverse > largest_float ? largest_float : inverse;
      uint8_t code[BLOCK];
      for (int i = 0; i < BLOCK; i++) code[i] = e2m1_of(v[i] * inverse);
      uint8_t* out = codes + (row * blocks + block) * (BLOCK / 2);
      for (int i = 0; i < BLOCK / 2; i++) out[i] = static_cast<uint8_t>(code[2 * i] | code[2 * i + 1] << 4);
      scales[row * blocks + block] = scale;
    }
  }
}

// Codes and scales of `blocks` blocks -> code times block scale, fp32.
extern "C" void fp4_decode(const uint8_t* codes, const uint8_t* scales, int64_t blocks, float* out) {
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
      out[block * BLOCK + 2 * i] = pair[0] * scale;
      out[block * BLOCK + 2 * i + 1] = pair[1] * scale;
    }
  }
}

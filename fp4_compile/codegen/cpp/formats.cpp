// The numbers: E4M3 scales, E2M1 codes, and what a model's tensors hold. FP contraction must be off (the build sees
// to it): where a fused multiply-add is meant, it is written.

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>

// The instruction set: 2 is AVX-512 VNNI, 1 is AVX2, 0 is plain C++. Tests build the lesser ones too.
#ifndef FP4_ISA
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && \
    defined(__AVX512VNNI__)
#define FP4_ISA 2
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define FP4_ISA 1
#else
#define FP4_ISA 0
#endif
#endif
#if FP4_ISA
#include <immintrin.h>
#endif

namespace {

constexpr int BLOCK = 16;

enum Kind : int32_t { FP32 = 0, BF16 = 1, FP16 = 2 };

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
  if ((s & 0x7f) == 0x7f) return std::numeric_limits<float>::quiet_NaN();
  return exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                       : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
}

inline float of_bf16(uint16_t b) { return std::bit_cast<float>(static_cast<uint32_t>(b) << 16); }

// Nearest even; every NaN becomes torch's.
inline uint16_t bf16_of(float f) {
  const uint32_t u = bits_of(f);
  if (f != f) return 0x7fc0;
  return static_cast<uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

inline float of_fp16(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 0x3ff;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000 | mantissa << 13);
  const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                                        : std::bit_cast<float>((exponent + 112) << 23 | mantissa << 13);
  return std::bit_cast<float>(bits_of(magnitude) | sign);
}

// Nearest even, overflowing to infinity.
inline uint16_t fp16_of(float f) {
  const uint32_t u = bits_of(f), sign = u >> 16 & 0x8000, magnitude = u & 0x7fffffff;
  if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
  if (magnitude < 0x38800000) {  // subnormal: steps of 2**-24
    const float steps = std::nearbyintf(std::bit_cast<float>(magnitude) * 0x1p24f);
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(steps));
  }
  return static_cast<uint16_t>(sign | (magnitude + 0xfff + ((magnitude >> 13) & 1) - (112u << 23)) >> 13);
}

inline float load(const void* from, int64_t i, int32_t kind) {
  if (kind == FP32) return static_cast<const float*>(from)[i];
  const uint16_t half = static_cast<const uint16_t*>(from)[i];
  return kind == BF16 ? of_bf16(half) : of_fp16(half);
}

inline void store(void* to, int64_t i, float f, int32_t kind) {
  if (kind == FP32) {
    static_cast<float*>(to)[i] = f;
  } else {
    static_cast<uint16_t*>(to)[i] = kind == BF16 ? bf16_of(f) : fp16_of(f);
  }
}

// Twice an E2M1 value is an integer. A weight's is stored with 12 added to it, so that it is unsigned.
constexpr int8_t TWICE[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
constexpr int OFFSET = 12;

}  // namespace

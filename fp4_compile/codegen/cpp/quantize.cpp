// The quantizer: amax of a tensor, codes and scales of its blocks of 16, bit for bit as fp4_compile/numerics has them.

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC optimize("tree-loop-vectorize")  // Inductor turns it off: its own kernels are vectorized by hand
#endif

namespace {

constexpr int GROUP = 16;                   // blocks whose scales are rounded together

#if FP4_ISA == 2

inline __m512 load_16(const void* x, int64_t at, int64_t left, int32_t kind) {
  const __mmask16 there = left >= BLOCK ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
  if (kind == FP32) return _mm512_maskz_loadu_ps(there, static_cast<const float*>(x) + at);
  const __m256i halves = _mm256_maskz_loadu_epi16(there, static_cast<const uint16_t*>(x) + at);
  if (kind == FP16) return _mm512_cvtph_ps(halves);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

inline int32_t amax_bits_of_block(const void* x, int64_t at, int64_t left, int32_t kind) {
  const __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(load_16(x, at, left, kind)), _mm512_set1_epi32(0x7fffffff));
  return _mm512_reduce_max_epi32(magnitude);
}

// From 1 up E2M1 has one bit of mantissa, rounded in the bits of fp32; below, steps of a half. A NaN's bits are large.
inline void encode_block(const void* x, int64_t at, int64_t left, int32_t kind, float inverse, uint8_t* out) {
  const __m512 y = _mm512_mul_ps(load_16(x, at, left, kind), _mm512_set1_ps(inverse));
  const __m512i bits = _mm512_castps_si512(y), one = _mm512_set1_epi32(1);
  const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
  const __m512i even = _mm512_and_si512(_mm512_srli_epi32(magnitude, 22), one);
  __m512i code = _mm512_add_epi32(_mm512_add_epi32(magnitude, _mm512_set1_epi32(0x1fffff)), even);
  code = _mm512_sub_epi32(_mm512_srli_epi32(code, 22), _mm512_set1_epi32(252));
  const __mmask16 small = _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(0x3f800000));
  const __m512 twice = _mm512_add_ps(_mm512_castsi512_ps(magnitude), _mm512_castsi512_ps(magnitude));
  code = _mm512_mask_cvtps_epi32(code, small, twice);
  code = _mm512_min_epi32(code, _mm512_set1_epi32(7));
  const __mmask16 negative = _mm512_movepi32_mask(bits) & _mm512_cmp_ps_mask(y, y, _CMP_ORD_Q);
  code = _mm512_mask_or_epi32(code, negative, code, _mm512_set1_epi32(8));
  const __m128i bytes = _mm512_cvtepi32_epi8(code);
  const __m128i pairs = _mm_maddubs_epi16(bytes, _mm_set1_epi16(0x1001));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_packus_epi16(pairs, pairs));
}

#else

// Whole blocks, or one with `left` elements, as fp32.
inline void load_block_of(const void* x, int64_t at, int64_t left, int32_t kind, float* v) {
  if (left >= BLOCK && kind == FP32) {
    std::memcpy(v, static_cast<const float*>(x) + at, BLOCK * sizeof(float));
  } else if (left >= BLOCK && kind == BF16) {
    const uint16_t* from = static_cast<const uint16_t*>(x) + at;
#pragma omp simd
    for (int i = 0; i < BLOCK; i++) v[i] = of_bf16(from[i]);
  } else {
    for (int i = 0; i < BLOCK; i++) v[i] = i < left ? load(x, at + i, kind) : 0.0f;
  }
}

inline int32_t amax_bits_of_block(const void* x, int64_t at, int64_t left, int32_t kind) {
  float v[BLOCK];
  load_block_of(x, at, left, kind, v);
  return amax_bits_of_block(v);
}

inline void encode_block(const void* x, int64_t at, int64_t left, int32_t kind, float inverse, uint8_t* out) {
  float v[BLOCK];
  load_block_of(x, at, left, kind, v);
  e2m1_of_block(v, inverse, out);
}

#endif

// `e4m3_of` for GROUP scales; written without branches, for vectors.
inline void round_scales(const int32_t* amax_bits, float per_amax, uint8_t* scales) {
  int32_t rounded[GROUP];
#pragma omp simd
  for (int i = 0; i < GROUP; i++) {
    const float f = std::bit_cast<float>(amax_bits[i]) * per_amax;
    const int32_t u = static_cast<int32_t>(bits_of(f));
    const int32_t normal = ((u + 0x7ffff + ((u >> 20) & 1)) >> 20) - ((127 - 7) << 3);
    // Adding 2**23 rounds steps of 2**-9 to nearest even, into the low bits.
    const int32_t subnormal = static_cast<int32_t>(bits_of(f * 512.0f + 8388608.0f) & 0xff);
    int32_t scale = f < 0.015625f ? subnormal : normal;
    scale = f > 448.0f ? 0x7e : scale;
    rounded[i] = amax_bits[i] >= 0x7f800000 ? 0x7f : scale;  // one NaN or Inf makes a block NaN
  }
  for (int i = 0; i < GROUP; i++) scales[i] = static_cast<uint8_t>(rounded[i]);
}

void quantize_row(const void* x, int64_t row, int64_t k, int32_t kind, float per_amax, const float* inverses,
                  int64_t first, int64_t last, uint8_t* codes, uint8_t* scales) {
  const int64_t blocks = (k + BLOCK - 1) / BLOCK;
  for (int64_t start = first; start < last; start += GROUP) {
    const int64_t count = last - start < GROUP ? last - start : GROUP;
    int32_t amax_bits[GROUP] = {};
    uint8_t rounded[GROUP];
    for (int64_t i = 0; i < count; i++) {
      const int64_t element = (start + i) * BLOCK;
      amax_bits[i] = amax_bits_of_block(x, row * k + element, k - element, kind);
    }
    round_scales(amax_bits, per_amax, rounded);
    const int64_t at = row * blocks + start;
    std::memcpy(scales + at, rounded, static_cast<size_t>(count));
    for (int64_t i = 0; i < count; i++) {
      const int64_t element = (start + i) * BLOCK;
      encode_block(x, row * k + element, k - element, kind, inverses[rounded[i]], codes + (at + i) * (BLOCK / 2));
    }
  }
}

void quantize_1x16(const void* x, int64_t rows, int64_t k, int32_t kind, float encode, uint8_t* codes, uint8_t* scales,
                   int32_t threads) {
  const int64_t blocks = (k + BLOCK - 1) / BLOCK, stretch = 16 * GROUP, stretches = (blocks + stretch - 1) / stretch;
  const float per_amax = encode * 0x1.555556p-3f, decode = 1.0f / encode;
  float inverses[128];
  for (int scale = 0; scale < 128; scale++) {
    const float inverse = 1.0f / (of_e4m3(static_cast<uint8_t>(scale)) * decode);
    const float largest = std::numeric_limits<float>::max();
    inverses[scale] = inverse > largest ? largest : inverse;
  }
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * k >= PARALLEL_FROM)
  for (int64_t i = 0; i < rows * stretches; i++) {
    const int64_t first = i % stretches * stretch, last = first + stretch < blocks ? first + stretch : blocks;
    quantize_row(x, i / stretches, k, kind, per_amax, inverses, first, last, codes, scales);
  }
}

// Largest finite magnitude's bits, in the width of the type; FP16's and BF16's order as integers too.
template <typename Bits>
int32_t largest_finite(const Bits* x, int64_t n, Bits magnitude, Bits infinite) {
  Bits largest = 0;
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < n; i++) {
    Bits u = static_cast<Bits>(x[i] & magnitude);
    u = u < infinite ? u : 0;
    largest = largest > u ? largest : u;
  }
  return static_cast<int32_t>(largest);
}

uint32_t amax_bits(const void* x, int64_t n, int32_t kind, int32_t threads) {
  const int64_t stretch = 1 << 14;
  int32_t largest = 0;
#pragma omp parallel for num_threads(threads) reduction(max : largest) if (threads > 1 && n >= PARALLEL_FROM)
  for (int64_t from = 0; from < n; from += stretch) {
    const int64_t count = n - from < stretch ? n - from : stretch;
    int32_t here;
    if (kind == FP32) {
      here = largest_finite<int32_t>(static_cast<const int32_t*>(x) + from, count, 0x7fffffff, 0x7f800000);
    } else {
      const int16_t infinite = kind == BF16 ? 0x7f80 : 0x7c00;
      here = largest_finite<int16_t>(static_cast<const int16_t*>(x) + from, count, 0x7fff, infinite);
    }
    largest = largest > here ? largest : here;
  }
  if (kind == FP32) return static_cast<uint32_t>(largest);
  const uint16_t half = static_cast<uint16_t>(largest);
  return bits_of(kind == BF16 ? of_bf16(half) : of_fp16(half));
}

}  // namespace

// Bits of the largest finite magnitude, as fp32.
extern "C" uint32_t fp4_amax_bits(const void* x, int64_t n, int32_t kind, int32_t threads) {
  return amax_bits(x, n, kind, threads);
}

// x [rows, k] -> codes [rows, kp / 2], scales [rows, kp / 16]; kp is k rounded up to 16, the tail counts as zeros.
extern "C" void fp4_quantize_1x16(const void* x, int64_t rows, int64_t k, int32_t kind, float encode, uint8_t* codes,
                                  uint8_t* scales, int32_t threads) {
  quantize_1x16(x, rows, k, kind, encode, codes, scales, threads);
}

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC pop_options
#endif

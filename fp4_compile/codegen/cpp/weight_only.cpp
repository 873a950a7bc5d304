// A few rows in BF16 by weights in NVFP4, which stay packed in memory and are decoded in registers (W4A16).
//
// Every instruction set adds in this order. Lane j of 16 has elements 2j and 2j + 1 of every pair of blocks; their
// products are exact, and are summed with one rounding; that times its block's scale is added to the lane by one FMA,
// pair after pair. Then the lanes are added in halves: 8 and 8, 4 and 4, 2 and 2, 1 and 1.

namespace {

constexpr int PAIR = 2 * BLOCK;
constexpr int MOST_WEIGHT_ONLY_ROWS = 4;  // of x, in registers; more go around again

struct WeightProduct {
  const float* x;  // [m, pairs, 2, 16]: of a pair of blocks the even elements, then the odd ones; zeros behind K
  const uint8_t* codes;   // [n, blocks] of 8 bytes
  const uint8_t* scales;  // [n, blocks]
  const float* amax;      // one, or one a row
  bool amax_rows;
  const void* bias;
  int32_t bias_kind;
  void* out;
  int32_t out_kind;
  int64_t m, n, blocks;
};

#if FP4_ISA == 2

struct Lanes {
  __m512 sum = _mm512_setzero_ps();

  static __m512 scales(float first, float second) {
    return _mm512_mask_blend_ps(0xff00, _mm512_set1_ps(first), _mm512_set1_ps(second));
  }

  struct Weights {
    __m512 even, odd, scale;

    Weights(const uint8_t* codes, float first, float second) {
      const __m512 table = _mm512_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -.5f, -1, -1.5f, -2, -3, -4, -6);
      const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
      even = _mm512_permutexvar_ps(bytes, table);  // reads four bits of an index
      odd = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), table);
      scale = scales(first, second);
    }
  };

  void add(const Weights& w, const float* x) {
    const __m512 even = _mm512_mul_ps(w.even, _mm512_loadu_ps(x));
    const __m512 both = _mm512_fmadd_ps(w.odd, _mm512_loadu_ps(x + 16), even);
    sum = _mm512_fmadd_ps(w.scale, both, sum);
  }

  void store(float* to) const { _mm512_storeu_ps(to, sum); }
};

#elif FP4_ISA == 1

struct Lanes {
  __m256 sums[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};

  struct Weights {
    __m256 even[2], odd[2], scale[2];

    static __m256 decoded(__m256i codes) {  // reads three bits of an index
      const __m256 table = _mm256_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6);
      const __m256i sign = _mm256_and_si256(_mm256_slli_epi32(codes, 28), _mm256_set1_epi32(INT32_MIN));
      return _mm256_xor_ps(_mm256_permutevar8x32_ps(table, codes), _mm256_castsi256_ps(sign));
    }

    Weights(const uint8_t* codes, float first, float second) {
      for (int half = 0; half < 2; half++) {
        const __m128i packed = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + half * 8));
        const __m256i bytes = _mm256_cvtepu8_epi32(packed);
        even[half] = decoded(bytes);
        odd[half] = decoded(_mm256_srli_epi32(bytes, 4));
        scale[half] = _mm256_set1_ps(half ? second : first);
      }
    }
  };

  void add(const Weights& w, const float* x) {
    for (int half = 0; half < 2; half++) {
      const __m256 even = _mm256_mul_ps(w.even[half], _mm256_loadu_ps(x + half * 8));
      const __m256 both = _mm256_fmadd_ps(w.odd[half], _mm256_loadu_ps(x + 16 + half * 8), even);
      sums[half] = _mm256_fmadd_ps(w.scale[half], both, sums[half]);
    }
  }

  void store(float* to) const {
    for (int half = 0; half < 2; half++) _mm256_storeu_ps(to + half * 8, sums[half]);
  }
};

#else

struct Lanes {
  float sums[16] = {};

  struct Weights {
    float even[16], odd[16], scale[2];

    Weights(const uint8_t* codes, float first, float second) : scale{first, second} {
      for (int j = 0; j < 16; j++) {
        even[j] = 0.5f * TWICE[codes[j] & 15];
        odd[j] = 0.5f * TWICE[codes[j] >> 4];
      }
    }
  };

  void add(const Weights& w, const float* x) {
    for (int j = 0; j < 16; j++) {
      const float both = std::fma(w.odd[j], x[16 + j], w.even[j] * x[j]);
      sums[j] = std::fma(w.scale[j / 8], both, sums[j]);
    }
  }

  void store(float* to) const { std::memcpy(to, sums, sizeof sums); }
};

#endif

float sum_of(const Lanes& lanes) {
  float terms[16];
  lanes.store(terms);
  for (int half = 8; half; half /= 2) {
    for (int j = 0; j < half; j++) terms[j] += terms[j + half];
  }
  return terms[0];
}

// Rows [row, row + ROWS) of x by the weights of one output.
template <int ROWS>
void rows_times_weights(const WeightProduct& p, const float* scale_values, int64_t row, int64_t output) {
  const uint8_t *codes = p.codes + output * p.blocks * 8, *scales = p.scales + output * p.blocks;
  const int64_t pairs = p.blocks / 2, width = (p.blocks + 1) / 2 * PAIR;
  const float* x = p.x + row * width;
  Lanes lanes[ROWS];
  for (int64_t i = 0; i < pairs; i++) {
    const Lanes::Weights weights(codes + i * 16, scale_values[scales[2 * i]], scale_values[scales[2 * i + 1]]);
    for (int r = 0; r < ROWS; r++) lanes[r].add(weights, x + r * width + i * PAIR);
  }
  if (p.blocks % 2) {
    uint8_t last[16] = {};
    std::memcpy(last, codes + pairs * 16, 8);
    const Lanes::Weights weights(last, scale_values[scales[p.blocks - 1]], 0.0f);
    for (int r = 0; r < ROWS; r++) lanes[r].add(weights, x + r * width + pairs * PAIR);
  }
  const float alpha = p.amax[p.amax_rows ? output : 0] * (1.0f / 2688.0f);
  for (int r = 0; r < ROWS; r++) {
    float result = sum_of(lanes[r]) * alpha;
    if (p.bias) result += load(p.bias, output, p.bias_kind);
    store(p.out, (row + r) * p.n + output, result, p.out_kind);
  }
}

void multiply_weights(const WeightProduct& p, int32_t threads) {
  float scale_values[256];
  for (int scale = 0; scale < 256; scale++) scale_values[scale] = of_e4m3(static_cast<uint8_t>(scale & 0x7f));
  constexpr int64_t OUTPUTS = 64;  // share the rows of x in the first cache
#pragma omp parallel for num_threads(threads) if (threads > 1 && p.m * p.n * p.blocks * BLOCK >= PARALLEL_MACS)
  for (int64_t first = 0; first < p.n; first += OUTPUTS) {
    const int64_t end = first + OUTPUTS < p.n ? first + OUTPUTS : p.n;
    for (int64_t row = 0; row < p.m; row += MOST_WEIGHT_ONLY_ROWS) {
      for (int64_t output = first; output < end; output++) {
        switch (p.m - row) {
          case 1: rows_times_weights<1>(p, scale_values, row, output); break;
          case 2: rows_times_weights<2>(p, scale_values, row, output); break;
          case 3: rows_times_weights<3>(p, scale_values, row, output); break;
          default: rows_times_weights<MOST_WEIGHT_ONLY_ROWS>(p, scale_values, row, output);
        }
      }
    }
  }
}

}  // namespace

// out [m, n] of kind out_kind = x @ (decode(w) * amax / 2688)^T + bias; x is bf16 [m, k], K of the weights k rounded up.
extern "C" void fp4_multiply_weights(const uint16_t* x, const uint8_t* codes, const uint8_t* scales, const float* amax,
                                     int32_t amax_rows, const void* bias, int32_t bias_kind, void* out, int32_t out_kind,
                                     int64_t m, int64_t n, int64_t k, int32_t threads) {
  if (m * n == 0) return;
  const int64_t blocks = (k + BLOCK - 1) / BLOCK, width = (blocks + 1) / 2 * PAIR;
  const std::unique_ptr<float[]> spread(new float[static_cast<size_t>(m * width)]());
  for (int64_t row = 0; row < m; row++) {
    for (int64_t i = 0; i < k; i++) {
      spread[row * width + i / PAIR * PAIR + i % 2 * BLOCK + i % PAIR / 2] = of_bf16(x[row * k + i]);
    }
  }
  multiply_weights({spread.get(), codes, scales, amax, amax_rows != 0, bias, bias_kind, out, out_kind, m, n, blocks}, threads);
}

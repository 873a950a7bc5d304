// What training adds: random bits, stochastic rounding, 16x16 tiles and their transposes, Hadamard transforms, MXFP4.
// fp4_compile/numerics, bit for bit.

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC optimize("tree-loop-vectorize")
#endif

namespace {

// Philox4x32-10: the 16 bytes of one block of 16 elements. See numerics/random_bits.py.
inline void philox(uint64_t seed, uint32_t stream, uint64_t block, uint32_t out[4]) {
  uint32_t c0 = static_cast<uint32_t>(block), c1 = static_cast<uint32_t>(block >> 32), c2 = stream, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; round++) {
    const uint64_t first = uint64_t{0xD2511F53} * c0, second = uint64_t{0xCD9E8D57} * c2;
    c0 = static_cast<uint32_t>(second >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(second);
    c2 = static_cast<uint32_t>(first >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(first);
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

// BLOCK elements times `inverse`, dithered by a byte each and truncated.
inline void stochastic_e2m1_of_block(const float* v, float inverse, const uint32_t random[4], uint8_t* out) {
  uint8_t bytes[BLOCK];
  std::memcpy(bytes, random, sizeof bytes);
  int32_t code[BLOCK];
#pragma omp simd
  for (int i = 0; i < BLOCK; i++) {
    const float y = v[i] * inverse;
    const float a = y == y ? std::fabs(y) : 6.0f;
    const float magnitude = a > 6.0f ? 6.0f : a;
    const float binade = magnitude >= 4.0f ? 4.0f : (magnitude >= 2.0f ? 2.0f : 1.0f);
    const int32_t offset = magnitude >= 4.0f ? 4 : (magnitude >= 2.0f ? 2 : 0);
    const float dithered = magnitude + static_cast<float>(bytes[i]) * (binade * 0x1p-9f);
    const int32_t half_binades = static_cast<int32_t>(dithered / binade * 2.0f);
    const int32_t sign = static_cast<int32_t>(bits_of(y) >> 28) & 8;
    code[i] = (half_binades + offset) | (y == y ? sign : 0);
  }
  uint32_t packed[2] = {0, 0};
  for (int i = 0; i < BLOCK; i++) packed[i / 8] |= static_cast<uint32_t>(code[i]) << (4 * (i % 8));
  std::memcpy(out, packed, sizeof packed);
}

// The reciprocal of each possible block scale, times the tensor's decode scale.
inline void fill_inverses(float encode, float inverses[128]) {
  const float decode = 1.0f / encode;
  for (int scale = 0; scale < 128; scale++) {
    const float inverse = 1.0f / (of_e4m3(static_cast<uint8_t>(scale)) * decode);
    const float largest = std::numeric_limits<float>::max();
    inverses[scale] = inverse > largest ? largest : inverse;
  }
}

template <typename T>
inline void load_block(const T* from, int64_t left, float* v) {
  if (left >= BLOCK) {
#pragma omp simd
    for (int i = 0; i < BLOCK; i++) v[i] = float_of(from[i]);
  } else {
    for (int i = 0; i < BLOCK; i++) v[i] = i < left ? float_of(from[i]) : 0.0f;
  }
}

inline float amax_of_bits(int32_t bits) {
  return bits >= 0x7f800000 ? std::numeric_limits<float>::quiet_NaN() : std::bit_cast<float>(bits);
}

template <typename T>
void quantize_stochastic(const T* x, int64_t rows, int64_t k, float encode, uint64_t seed, uint32_t stream,
                         uint8_t* codes, uint8_t* scales) {
  const int64_t blocks = (k + BLOCK - 1) / BLOCK;
  const float per_amax = encode * 0x1.555556p-3f;
  float inverses[128];
  fill_inverses(encode, inverses);
#pragma omp parallel for if (rows * k >= PARALLEL_FROM)
  for (int64_t row = 0; row < rows; row++) {
    for (int64_t block = 0; block < blocks; block++) {
      const int64_t at = row * blocks + block;
      float v[BLOCK];
      load_block(x + row * k + block * BLOCK, k - block * BLOCK, v);
      const uint8_t scale = e4m3_of(amax_of_bits(amax_bits_of_block(v)) * per_amax);
      uint32_t random[4];
      philox(seed, stream, static_cast<uint64_t>(at), random);
      scales[at] = scale;
      stochastic_e2m1_of_block(v, inverses[scale], random, codes + at * (BLOCK / 2));
    }
  }
}

template <typename T>
void quantize_16x16(const T* x, int64_t matrices, int64_t rows, int64_t k, float encode, uint8_t* codes,
                    uint8_t* scales) {
  const int64_t blocks = (k + BLOCK - 1) / BLOCK, tiles = (rows + BLOCK - 1) / BLOCK;
  const float per_amax = encode * 0x1.555556p-3f;
  float inverses[128];
  fill_inverses(encode, inverses);
#pragma omp parallel for if (matrices * rows * k >= PARALLEL_FROM)
  for (int64_t tile = 0; tile < matrices * tiles; tile++) {
    const int64_t first = tile / tiles * rows + tile % tiles * BLOCK;
    const int64_t height = rows - tile % tiles * BLOCK < BLOCK ? rows - tile % tiles * BLOCK : BLOCK;
    for (int64_t block = 0; block < blocks; block++) {
      float v[BLOCK][BLOCK];
      int32_t largest = 0;
      for (int64_t i = 0; i < height; i++) {
        load_block(x + (first + i) * k + block * BLOCK, k - block * BLOCK, v[i]);
        const int32_t bits = amax_bits_of_block(v[i]);
        largest = largest > bits ? largest : bits;
      }
      const uint8_t scale = e4m3_of(amax_of_bits(largest) * per_amax);
      for (int64_t i = 0; i < height; i++) {
        const int64_t at = (first + i) * blocks + block;
        scales[at] = scale;
        e2m1_of_block(v[i], inverses[scale], codes + at * (BLOCK / 2));
      }
    }
  }
}

constexpr int MX_BLOCK = 32;

// ceil(log2(amax / 6)) + 127; 255 for NaN.
inline int32_t e8m0_up_of(float amax) {
  if (amax != amax) return 255;
  const uint32_t u = bits_of(amax * 0x1.555556p-3f);
  const uint32_t exponent = u >> 23, mantissa = u & 0x7fffff;
  return static_cast<int32_t>(exponent + (mantissa > (exponent == 0 ? 0x400000u : 0u) ? 1 : 0));
}

inline float of_e8m0(int32_t exponent) {
  if (exponent == 255) return std::numeric_limits<float>::quiet_NaN();
  return std::bit_cast<float>(exponent == 0 ? 0x400000u : static_cast<uint32_t>(exponent) << 23);
}

template <typename T>
void mx_quantize(const T* x, int64_t rows, int64_t k, int stochastic, uint64_t seed, uint32_t stream, uint8_t* codes,
                 uint8_t* scales) {
  const int64_t blocks = (k + MX_BLOCK - 1) / MX_BLOCK;
#pragma omp parallel for if (rows * k >= PARALLEL_FROM)
  for (int64_t row = 0; row < rows; row++) {
    for (int64_t block = 0; block < blocks; block++) {
      const int64_t at = row * blocks + block;
      float v[MX_BLOCK];
      int32_t largest = 0;
      for (int half = 0; half < 2; half++) {
        const int64_t from = block * MX_BLOCK + half * BLOCK;
        load_block(x + row * k + (from < k ? from : 0), k - from, v + half * BLOCK);
        const int32_t bits = amax_bits_of_block(v + half * BLOCK);
        largest = largest > bits ? largest : bits;
      }
      const int32_t exponent = e8m0_up_of(amax_of_bits(largest));
      scales[at] = static_cast<uint8_t>(exponent);
      // A division as a product: by a power of two both are exact, or round one result once.
      const float scale = of_e8m0(exponent);
      for (int i = 0; i < MX_BLOCK; i++) v[i] = v[i] / scale;
      for (int half = 0; half < 2; half++) {
        uint8_t* out = codes + at * (MX_BLOCK / 2) + half * (BLOCK / 2);
        if (stochastic) {
          uint32_t random[4];
          philox(seed, stream, static_cast<uint64_t>(2 * at + half), random);
          stochastic_e2m1_of_block(v + half * BLOCK, 1.0f, random, out);
        } else {
          e2m1_of_block(v + half * BLOCK, 1.0f, out);
        }
      }
    }
  }
}

constexpr int LARGEST_HADAMARD = 128, CHUNK = 32;

// x(channel, token) at x[channel * channel_stride + token * token_stride] -> bf16 out [channels, padded tokens].
template <typename T>
void hadamard(const T* x, int64_t channels, int64_t tokens, int64_t channel_stride, int64_t token_stride, int size,
              const float* signs, float factor, uint16_t* out) {
  const int64_t groups = (tokens + size - 1) / size, chunks = (channels + CHUNK - 1) / CHUNK;
#pragma omp parallel for collapse(2) if (channels * tokens >= PARALLEL_FROM)
  for (int64_t chunk = 0; chunk < chunks; chunk++) {
    for (int64_t group = 0; group < groups; group++) {
      const int64_t channel = chunk * CHUNK, token = group * size;
      const int width = static_cast<int>(channels - channel < CHUNK ? channels - channel : CHUNK);
      float v[LARGEST_HADAMARD][CHUNK];
      for (int i = 0; i < size; i++) {
        const T* from = x + channel * channel_stride + (token + i) * token_stride;
        const bool there = token + i < tokens;
        if (there && width == CHUNK && channel_stride == 1) {
#pragma omp simd
          for (int j = 0; j < CHUNK; j++) v[i][j] = float_of(from[j]) * signs[i];
        } else {
          for (int j = 0; j < CHUNK; j++)
            v[i][j] = there && j < width ? float_of(from[j * channel_stride]) * signs[i] : 0.0f * signs[i];
        }
      }
      for (int half = 1; half < size; half *= 2) {
        for (int i = 0; i < size; i += 2 * half) {
          for (int l = i; l < i + half; l++) {
#pragma omp simd
            for (int j = 0; j < CHUNK; j++) {
              const float low = v[l][j], high = v[l + half][j];
              v[l][j] = low + high;
              v[l + half][j] = low - high;
            }
          }
        }
      }
      for (int j = 0; j < width; j++) {
        uint16_t* to = out + (channel + j) * groups * size + token;
        for (int i = 0; i < size; i++) to[i] = bf16_of(v[i][j] * factor);
      }
    }
  }
}

}  // namespace

extern "C" void fp4_philox(uint64_t seed, uint32_t stream, int64_t blocks, uint8_t* out) {
  for (int64_t block = 0; block < blocks; block++) {
    uint32_t words[4];
    philox(seed, stream, static_cast<uint64_t>(block), words);
    std::memcpy(out + block * BLOCK, words, BLOCK);
  }
}

#define FOR_EACH_TYPE(NAME, PARAMETERS, CALL)                     \
  extern "C" void NAME##_fp32(const float* x, PARAMETERS) CALL    \
  extern "C" void NAME##_bf16(const uint16_t* x, PARAMETERS) CALL
#define LIST(...) __VA_ARGS__

// x [rows, k] -> codes [rows, kp / 2], scales [rows, kp / 16], rounded stochastically.
FOR_EACH_TYPE(fp4_quantize_stochastic,
              LIST(int64_t rows, int64_t k, float encode, uint64_t seed, uint32_t stream, uint8_t* codes,
                   uint8_t* scales),
              { quantize_stochastic(x, rows, k, encode, seed, stream, codes, scales); })

// x [matrices, rows, k] -> codes [matrices, rows, kp / 2], scales [matrices, rows, kp / 16], 16 rows sharing theirs.
FOR_EACH_TYPE(fp4_quantize_16x16,
              LIST(int64_t matrices, int64_t rows, int64_t k, float encode, uint8_t* codes, uint8_t* scales),
              { quantize_16x16(x, matrices, rows, k, encode, codes, scales); })

// x [rows, k] -> codes [rows, kp / 2], E8M0 scales [rows, kp / 32], the scales rounded up.
FOR_EACH_TYPE(fp4_mx_quantize,
              LIST(int64_t rows, int64_t k, int stochastic, uint64_t seed, uint32_t stream, uint8_t* codes,
                   uint8_t* scales),
              { mx_quantize(x, rows, k, stochastic, seed, stream, codes, scales); })

FOR_EACH_TYPE(fp4_hadamard,
              LIST(int64_t channels, int64_t tokens, int64_t channel_stride, int64_t token_stride, int size,
                   const float* signs, float factor, uint16_t* out),
              { hadamard(x, channels, tokens, channel_stride, token_stride, size, signs, factor, out); })

// The encoding [rows, kp / 2], [rows, kp / 16] of a matrix in 16x16 tiles -> that of its transpose.
extern "C" void fp4_transpose_16x16(const uint8_t* codes, const uint8_t* scales, int64_t rows, int64_t k,
                                    uint8_t* turned, uint8_t* turned_scales) {
  const int64_t across = (k + BLOCK - 1) / BLOCK, down = (rows + BLOCK - 1) / BLOCK;
#pragma omp parallel for if (rows * k >= PARALLEL_FROM)
  for (int64_t tile = 0; tile < across; tile++) {
    for (int64_t block = 0; block < down; block++) {
      uint8_t code[BLOCK][BLOCK] = {};
      const int64_t height = rows - block * BLOCK < BLOCK ? rows - block * BLOCK : BLOCK;
      const int64_t width = k - tile * BLOCK < BLOCK ? k - tile * BLOCK : BLOCK;
      for (int64_t i = 0; i < height; i++) {
        const uint8_t* from = codes + ((block * BLOCK + i) * across + tile) * (BLOCK / 2);
        for (int j = 0; j < BLOCK; j++) code[j][i] = from[j / 2] >> (4 * (j % 2)) & 15;
      }
      const uint8_t scale = scales[block * BLOCK * across + tile];
      for (int64_t j = 0; j < width; j++) {
        const int64_t at = (tile * BLOCK + j) * down + block;
        turned_scales[at] = scale;
        for (int i = 0; i < BLOCK / 2; i++)
          turned[at * (BLOCK / 2) + i] = static_cast<uint8_t>(code[j][2 * i] | code[j][2 * i + 1] << 4);
      }
    }
  }
}

// Codes and E8M0 scales of `blocks` blocks of 32 -> their values, fp32.
extern "C" void fp4_mx_decode(const uint8_t* codes, const uint8_t* scales, int64_t blocks, float* out) {
  static const float magnitudes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  float pairs[256][2];
  for (int byte = 0; byte < 256; byte++)
    for (int half = 0; half < 2; half++) {
      const int code = byte >> (4 * half) & 15;
      pairs[byte][half] = code & 8 ? -magnitudes[code & 7] : magnitudes[code & 7];
    }
#pragma omp parallel for if (blocks * MX_BLOCK >= PARALLEL_FROM)
  for (int64_t block = 0; block < blocks; block++) {
    const float scale = of_e8m0(scales[block]);
    for (int i = 0; i < MX_BLOCK / 2; i++) {
      const float* pair = pairs[codes[block * (MX_BLOCK / 2) + i]];
      out[block * MX_BLOCK + 2 * i] = pair[0] * scale;
      out[block * MX_BLOCK + 2 * i + 1] = pair[1] * scale;
    }
  }
}

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC pop_options
#endif

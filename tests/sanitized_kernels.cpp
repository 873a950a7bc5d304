// Runs every CPU kernel on operands that fill their allocations to the last byte; comes after the kernels' sources.

#include <cstdio>
#include <random>
#include <vector>

namespace {

std::mt19937 generator(0);

// `count` elements that end where the allocation ends, `lead` elements behind its start.
template <typename T>
struct Operand {
  std::unique_ptr<T[]> all;
  int64_t lead;
  Operand(int64_t count, int64_t lead, uint32_t limit = 0) : all(new T[static_cast<size_t>(count + lead)]), lead(lead) {
    for (int64_t i = 0; i < count + lead; i++) {
      if constexpr (sizeof(T) == 1) {
        all[i] = static_cast<T>(generator() % (limit ? limit : 256));
      } else if constexpr (sizeof(T) == 2) {
        all[i] = bf16_of(std::normal_distribution<float>()(generator));
      } else {
        all[i] = std::normal_distribution<float>()(generator);
      }
    }
  }
  operator T*() { return all.get() + lead; }
};

using Bytes = Operand<uint8_t>;

void products(int64_t m, int64_t n, int64_t blocks, int64_t lead, int threads) {
  Bytes a(m * blocks * 8, lead), a_scales(m * blocks, lead, 127), w(n * blocks * 8, lead), w_scales(n * blocks, lead, 127);
  Operand<float> bias(n, lead), out(m * n, lead);
  Operand<uint16_t> half_bias(n, lead), half_out(m * n, lead);
  fp4_multiply(a, a_scales, w, w_scales, nullptr, FP32, 1e-4f, out, FP32, m, n, blocks, threads);
  fp4_multiply(a, a_scales, w, w_scales, bias, FP32, 1e-4f, half_out, BF16, m, n, blocks, threads);
  fp4_multiply(a, a_scales, w, w_scales, half_bias, BF16, 1e-4f, half_out, FP16, m, n, blocks, threads);
  const int64_t k = blocks ? blocks * BLOCK - m % BLOCK : 0, rows = k ? (m < 9 ? m : 9) : 0;
  Operand<uint16_t> x(rows * k, lead);
  fp4_multiply_weights(x, w, w_scales, Operand<float>(1, lead), 0, nullptr, FP32, out, FP32, rows, n, k, threads);
  fp4_multiply_weights(x, w, w_scales, Operand<float>(n, lead), 1, half_bias, BF16, half_out, BF16, rows, n, k, threads);
  fp4_decode(w, w_scales, n * blocks, Operand<uint16_t>(n * blocks * BLOCK, lead));
}

template <typename T>
void quantizers(int64_t rows, int64_t k, int64_t lead, int threads) {
  constexpr int32_t kind = sizeof(T) == 2 ? BF16 : FP32;
  const int64_t blocks = (k + 15) / 16, mx_blocks = (k + 31) / 32, down = (rows + 15) / 16;
  Operand<T> x(rows * k, lead);
  Bytes codes(rows * blocks * 8, lead), scales(rows * blocks, lead);
  Bytes mx_codes(rows * mx_blocks * 16, lead), mx_scales(rows * mx_blocks, lead);
  Bytes turned(k * down * 8, lead), turned_scales(k * down, lead);
  Operand<float> signs(16, lead), decoded(rows * mx_blocks * 32, lead);
  Operand<uint16_t> rotated(rows * blocks * BLOCK, lead);
  fp4_amax_bits(x, rows * k, kind, threads);
  fp4_quantize_1x16(x, rows, k, kind, 300.0f, codes, scales, threads);
  const T* from = x;
  if constexpr (sizeof(T) == 2) {
    fp4_quantize_stochastic_bf16(from, rows, k, 300.0f, 7, 1, codes, scales);
    fp4_quantize_16x16_bf16(from, 1, rows, k, 300.0f, codes, scales);
    fp4_mx_quantize_bf16(from, rows, k, 1, 7, 1, mx_codes, mx_scales);
    fp4_hadamard_bf16(from, rows, k, k, 1, 16, signs, 0.25f, rotated);
  } else {
    fp4_quantize_stochastic_fp32(from, rows, k, 300.0f, 7, 1, codes, scales);
    fp4_quantize_16x16_fp32(from, 1, rows, k, 300.0f, codes, scales);
    fp4_mx_quantize_fp32(from, rows, k, 0, 7, 1, mx_codes, mx_scales);
    fp4_hadamard_fp32(from, rows, k, k, 1, 16, signs, 0.25f, rotated);
  }
  fp4_transpose_16x16(codes, scales, rows, k, turned, turned_scales);
  fp4_mx_decode(mx_codes, mx_scales, rows * mx_blocks, decoded);
}

}  // namespace

int main() {
  for (int threads : {1, 2}) {
    for (int64_t lead : {0, 1}) {
      for (int64_t m : {0, 1, 17, 300}) {
        for (int64_t n : {1, 33, 130}) {
          for (int64_t blocks : {0, 1, 70, 257}) products(m, n, blocks, lead, threads);
        }
      }
      for (int64_t rows : {1, 5, 16, 130}) {
        for (int64_t k : {1, 16, 31, 100, 272, 4099}) {
          quantizers<float>(rows, k, lead, threads);
          quantizers<uint16_t>(rows, k, lead, threads);
        }
      }
    }
  }
  Bytes words(64, 0);
  fp4_philox(7, 1, 4, words);
  std::puts("clean");
}

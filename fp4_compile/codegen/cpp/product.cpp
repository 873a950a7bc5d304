// What every product has: its operands, and what is done to its sums.

namespace {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Product {
  const uint8_t* codes;   // [m, blocks] of 8 bytes
  const uint8_t* scales;  // [m, blocks]
  const uint8_t* weight_codes;   // [n, blocks] of 8 bytes
  const uint8_t* weight_scales;  // [n, blocks]
  const void* bias;  // [n] of kind bias_kind, or null
  int32_t bias_kind;
  float alpha;
  void* out;  // [m, n] of kind out_kind
  int32_t out_kind;
  int64_t m, n, blocks;
};

// alpha and bias in FP32, then one rounding to the output's type.
void finish(const Product& p, const float* sums, int64_t first_row, int64_t rows, int64_t panel) {
  const int64_t column = panel * LANES, columns = p.n - column < LANES ? p.n - column : LANES;
  float bias[LANES] = {};
  for (int64_t j = 0; j < columns && p.bias; j++) bias[j] = load(p.bias, column + j, p.bias_kind);
  for (int64_t r = 0; r < rows; r++) {
    float result[LANES];
    for (int j = 0; j < LANES; j++) result[j] = sums[r * LANES + j] * p.alpha;
    if (p.bias) {
      for (int j = 0; j < LANES; j++) result[j] += bias[j];
    }
    const int64_t at = (first_row + r) * p.n + column;
    if (p.out_kind == BF16 && columns == LANES) {
      uint16_t rounded[LANES];
      for (int j = 0; j < LANES; j++) rounded[j] = bf16_of(result[j]);
      std::memcpy(static_cast<uint16_t*>(p.out) + at, rounded, sizeof rounded);
    } else {
      for (int64_t j = 0; j < columns; j++) store(p.out, at + j, result[j], p.out_kind);
    }
  }
}

}  // namespace

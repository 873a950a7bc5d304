// The operators on CPU tensors, by torch's stable C++ interface: a call costs a few microseconds less than one that
// goes through Python, which a layer of one row does not hide. What is not here is left to Python's `fp4::general_...`.

#ifdef FP4_OPERATORS
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

std::optional<Kind> kind_of(ScalarType type) {
  switch (type) {
    case ScalarType::Float: return FP32;
    case ScalarType::BFloat16: return BF16;
    case ScalarType::Half: return FP16;
    default: return std::nullopt;
  }
}

Tensor in_order(const Tensor& x) { return x.is_contiguous() ? x : torch::stable::contiguous(x); }

// What the kernels read: of another type than theirs as FP32, which is exact for what they are given.
Tensor readable(const Tensor& x) {
  const Tensor real = kind_of(x.scalar_type()) ? x : torch::stable::to(x, ScalarType::Float);
  return in_order(real);
}

// One number, or `rows` of them, as FP32.
bool is_amax(const Tensor& x, int64_t rows = 1) {
  return x.scalar_type() == ScalarType::Float && (x.numel() == 1 || x.numel() == rows);
}

// A quantized operand whose codes and scales belong together, of blocks along its last dimension.
bool is_operand(const Tensor& codes, const Tensor& scales) {
  return codes.dim() == scales.dim() && codes.dim() > 0 && codes.numel() == scales.numel() * (BLOCK / 2) &&
         codes.size(-1) == scales.size(-1) * (BLOCK / 2);
}

// The kind of a bias that the kernels read, FP32 without one; any other, one that broadcasts too, is left to Python.
std::optional<Kind> bias_kind_of(const std::optional<Tensor>& bias, int64_t n) {
  if (!bias) return FP32;
  return bias->dim() == 1 && bias->size(0) == n ? kind_of(bias->scalar_type()) : std::nullopt;
}

float number(const Tensor& x) { return *static_cast<const float*>(x.data_ptr()); }

int32_t threads() { return static_cast<int32_t>(torch::stable::get_num_threads()); }

template <size_t N>
void call(const char* name, std::array<StableIValue, N>& stack) {
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, "", stack.data(), TORCH_ABI_VERSION));
}

template <typename T>
StableIValue given(const T& value) {
  return torch::stable::detail::from(value);
}

template <typename T>
T taken(StableIValue value) {
  return torch::stable::detail::to<T>(value);
}

// numerics.tensor_amax
Tensor amax(const Tensor& x) {
  const Tensor read = readable(x);
  const Kind kind = *kind_of(read.scalar_type());
  const float largest = std::bit_cast<float>(fp4_amax_bits(read.data_ptr(), read.numel(), kind, threads()));
  const float least = 2688.0f * 0x1p-128f;
  Tensor result = torch::stable::new_empty(x, {}, ScalarType::Float);
  *static_cast<float*>(result.data_ptr()) = largest != 0.0f && largest < least ? least : largest;
  return result;
}

// numerics.encode_scale
float encode_scale(float amax) {
  const float most = std::numeric_limits<float>::max();
  float factor = amax != 0.0f ? 2688.0f / amax : 1.0f;
  factor = factor > most ? most : factor;
  return factor != 0.0f ? factor : 1.0f;
}

std::tuple<Tensor, Tensor> quantize(const Tensor& x, const Tensor& amax, std::string block, bool four_over_six) {
  if (block != "1x16" || four_over_six || x.dim() == 0 || !is_amax(amax) || std::isnan(number(amax))) {
    std::array<StableIValue, 4> stack{given(x), given(amax), given(block), given(four_over_six)};
    call("fp4::general_quantize", stack);
    return {taken<Tensor>(stack[0]), taken<Tensor>(stack[1])};
  }
  const Tensor read = readable(x);
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  const int64_t k = shape.back();
  shape.back() = ceil_div(k, BLOCK) * (BLOCK / 2);
  Tensor codes = torch::stable::new_empty(x, shape, ScalarType::Byte);
  shape.back() = ceil_div(k, BLOCK);
  Tensor scales = torch::stable::new_empty(x, shape, ScalarType::Float8_e4m3fn);
  if (read.numel() == 0) return {codes, scales};
  fp4_quantize_1x16(read.data_ptr(), read.numel() / k, k, *kind_of(read.scalar_type()), encode_scale(number(amax)),
                    static_cast<uint8_t*>(codes.data_ptr()), static_cast<uint8_t*>(scales.data_ptr()), threads());
  return {codes, scales};
}

Tensor scaled_mm(const Tensor& a, const Tensor& a_scales, const Tensor& a_amax, const Tensor& b, const Tensor& b_scales,
                 const Tensor& b_amax, std::optional<Tensor> bias, ScalarType out_dtype, bool swizzled) {
  const std::optional<Kind> kind = kind_of(out_dtype);
  const std::optional<Kind> bias_kind = bias_kind_of(bias, b.size(-2));
  if (!kind || !bias_kind || swizzled || a_amax.dim() || b_amax.dim() || !is_amax(a_amax) || !is_amax(b_amax)) {
    std::array<StableIValue, 9> stack{given(a),      given(a_scales), given(a_amax),    given(b),       given(b_scales),
                                      given(b_amax), given(bias),     given(out_dtype), given(swizzled)};
    call("fp4::general_scaled_mm", stack);
    return taken<Tensor>(stack[0]);
  }
  STD_TORCH_CHECK(is_operand(a, a_scales) && is_operand(b, b_scales) && a.size(-1) == b.size(-1) && b.dim() > 1 &&
                      (b.dim() == 2 || (a.dim() == b.dim() && a.size(0) == b.size(0))),
                  "fp4::scaled_mm: the operands' sizes do not fit each other");
  std::vector<int64_t> shape(a.sizes().begin(), a.sizes().end());
  const int64_t n = b.size(-2), blocks = b_scales.size(-1), batches = b.dim() > 2 ? b.size(0) : 1;
  shape.back() = n;
  Tensor out = torch::stable::new_empty(a, shape, out_dtype);
  const int64_t m = batches && n ? out.numel() / n / batches : 0;
  const Tensor parts[] = {in_order(a), in_order(a_scales), in_order(b), in_order(b_scales)};
  const auto at = [&](int part) { return static_cast<const uint8_t*>(parts[part].data_ptr()); };
  const Tensor shift = bias ? in_order(*bias) : out;
  const float alpha = number(a_amax) * number(b_amax) * (1.0f / (2688.0f * 2688.0f));
  const int64_t size = *kind == FP32 ? 4 : 2;
  for (int64_t i = 0; i < batches; i++) {
    fp4_multiply(at(0) + i * m * blocks * 8, at(1) + i * m * blocks, at(2) + i * n * blocks * 8, at(3) + i * n * blocks,
                 bias ? shift.data_ptr() : nullptr, *bias_kind, alpha, static_cast<char*>(out.data_ptr()) + i * m * n * size,
                 *kind, m, n, blocks, threads());
  }
  return out;
}

// Decoding many rows' weights once and multiplying in FP32 is faster than decoding them for every four rows.
constexpr int64_t MOST_DECODING_ROWS = 16;

Tensor weight_mm(const Tensor& x, const Tensor& b, const Tensor& b_scales, const Tensor& b_amax, std::optional<Tensor> bias,
                 ScalarType out_dtype) {
  const std::optional<Kind> kind = kind_of(out_dtype);
  const std::optional<Kind> bias_kind = bias_kind_of(bias, b.size(0));
  const int64_t k = x.size(-1), m = k ? x.numel() / k : 0;
  if (!kind || !bias_kind || b.dim() != 2 || m == 0 || m > MOST_DECODING_ROWS) {
    std::array<StableIValue, 6> stack{given(x), given(b), given(b_scales), given(b_amax), given(bias), given(out_dtype)};
    call("fp4::general_weight_mm", stack);
    return taken<Tensor>(stack[0]);
  }
  STD_TORCH_CHECK(is_operand(b, b_scales) && b_scales.size(-1) == ceil_div(k, BLOCK) && is_amax(b_amax, b.size(0)),
                  "fp4::weight_mm: the operands' sizes do not fit each other");
  const bool is_bf16 = x.scalar_type() == ScalarType::BFloat16;
  const Tensor read = in_order(is_bf16 ? x : torch::stable::to(x, ScalarType::BFloat16));
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = b.size(0);
  Tensor out = torch::stable::new_empty(x, shape, out_dtype);
  const Tensor codes = in_order(b), scales = in_order(b_scales), amax = in_order(b_amax);
  const Tensor shift = bias ? in_order(*bias) : out;
  fp4_multiply_weights(static_cast<const uint16_t*>(read.data_ptr()), static_cast<const uint8_t*>(codes.data_ptr()),
                       static_cast<const uint8_t*>(scales.data_ptr()), static_cast<const float*>(amax.data_ptr()),
                       amax.dim() > 0, bias ? shift.data_ptr() : nullptr, *bias_kind, out.data_ptr(), *kind, m,
                       shape.back(), k, threads());
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fp4, CPU, m) {
  m.impl("amax", TORCH_BOX(&amax));
  m.impl("quantize", TORCH_BOX(&quantize));
  m.impl("scaled_mm", TORCH_BOX(&scaled_mm));
  m.impl("weight_mm", TORCH_BOX(&weight_mm));
}
#endif

#include "src/report/tensor_values.h"

#include "src/kernels/non_finite.h"

#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace semitone::report {
namespace {

// Wrappers, whose memory is elsewhere or has another shape.
const c10::DispatchKeySet& wrappers() {
  static const c10::DispatchKeySet keys{
      c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper,
      c10::DispatchKey::Batched,          c10::DispatchKey::BatchedNestedTensor,
      c10::DispatchKey::Functionalize,    c10::DispatchKey::Python};
  return keys;
}

Kinds kind_of(double value) {
  if (std::isnan(value)) return kNan;
  if (!std::isinf(value)) return 0;
  return value > 0 ? kPositiveInf : kNegativeInf;
}

// Calls visit(values, count) with the elements in order, as fp64 on the host, a chunk at a time,
// until it returns false. The parts of a complex number follow each other.
template <typename Visit>
void for_chunks(const at::Tensor& tensor, const Visit& visit) {
  constexpr std::int64_t kChunk = 1 << 16;
  const at::Tensor real = tensor.is_complex() ? torch::view_as_real(tensor.resolve_conj()) : tensor;
  const at::Tensor flat = real.resolve_neg().contiguous().view(-1);
  for (std::int64_t begin = 0; begin < flat.numel(); begin += kChunk) {
    const std::int64_t count = std::min(kChunk, flat.numel() - begin);
    const at::Tensor chunk = flat.narrow(0, begin, count).to(at::kCPU).to(at::kDouble);
    if (!visit(chunk.const_data_ptr<double>(), count)) return;
  }
}

std::vector<std::int64_t> index_of(const at::Tensor& tensor, std::int64_t flat) {
  std::vector<std::int64_t> index(static_cast<std::size_t>(tensor.dim()));
  for (std::size_t i = index.size(); i-- > 0;) {
    const std::int64_t size = tensor.size(static_cast<std::int64_t>(i));
    index[i] = flat % size;
    flat /= size;
  }
  return index;
}

void add(TensorValues& values, double value) {
  if (std::isnan(value)) {
    ++values.nans;
  } else if (std::isinf(value)) {
    ++(value > 0 ? values.positive_infs : values.negative_infs);
  } else {
    // fmin and fmax prefer a number to the NaN with which the range begins.
    values.min = std::fmin(values.min, value);
    values.max = std::fmax(values.max, value);
  }
}

}  // namespace

bool can_examine(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.is_nested()) return false;
  if (!tensor.is_floating_point() && !tensor.is_complex()) return false;
  if (tensor.is_meta() || tensor.is_quantized() || tensor.key_set().has_any(wrappers()))
    return false;
  // fp4 is packed, and has neither inf nor NaN.
  if (tensor.scalar_type() == at::ScalarType::Float4_e2m1fn_x2) return false;
  return tensor.numel() > 0 && tensor.has_storage() && tensor.storage().data() != nullptr;
}

Kinds kinds_of(const at::Tensor& tensor) {
  if (!kernels::has_non_finite(tensor)) return 0;
  Kinds kinds = 0;
  for_chunks(tensor, [&](const double* values, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) kinds |= kind_of(values[i]);
    return kinds != kAllKinds;
  });
  return kinds;
}

Kinds kinds_of_number(const c10::IValue& value) {
  if (value.isDouble()) return kind_of(value.toDouble());
  if (!value.isComplexDouble()) return 0;
  const c10::complex<double> number = value.toComplexDouble();
  return kind_of(number.real()) | kind_of(number.imag());
}

TensorValues values_of(const at::Tensor& tensor, const std::string& name) {
  TensorValues values;
  values.name = name;
  values.dtype = tensor.scalar_type();
  values.sizes = tensor.sizes().vec();
  const std::int64_t parts = tensor.is_complex() ? 2 : 1;
  std::int64_t position = 0;
  for_chunks(tensor, [&](const double* chunk, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i, ++position) {
      if (!std::isfinite(chunk[i]) && !values.has_non_finite())
        values.first = index_of(tensor, position / parts);
      add(values, chunk[i]);
    }
    return true;
  });
  return values;
}

}  // namespace semitone::report

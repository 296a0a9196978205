#include "src/kernels/exponents.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/core/parallel_for.h"
#include "src/kernels/flat.h"

#include <torch/types.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>
#include <span>
#include <tuple>

namespace semitone::kernels {
namespace {

// An IEEE format: a sign, an exponent and a mantissa.
template <typename BitsType, int kMantissaBits, int kExponentBits>
struct BinaryFormat {
  using Bits = BitsType;
  static constexpr int kMantissa = kMantissaBits;
  static constexpr std::size_t kFields = std::size_t{1} << kExponentBits;
  static constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  static constexpr Bits kAbs = std::numeric_limits<Bits>::max() >> 1;
  static constexpr Bits kInf = static_cast<Bits>((kFields - 1) << kMantissaBits);

  // floor(log2) of the smallest subnormal number.
  static constexpr int kSmallest = 1 - kBias - kMantissa;
};
using Fp64 = BinaryFormat<std::uint64_t, 52, 11>;
using Fp32 = BinaryFormat<std::uint32_t, 23, 8>;
using Fp16 = BinaryFormat<std::uint16_t, 10, 5>;
using Bf16 = BinaryFormat<std::uint16_t, 7, 8>;

std::size_t place_of(int exponent) {
  return static_cast<std::size_t>(
      std::clamp(exponent, ExponentCounts::kFirst, ExponentCounts::kLast) - ExponentCounts::kFirst);
}

// The counts of one thread, by the bits of the exponent. It reads blocks that fit in the first-level
// cache, each twice: a loop that counts is not vectorised, and one without it is.
template <typename Format>
class Tally {
 public:
  using Bits = typename Format::Bits;

  void add(const char* data, std::int64_t count) {
    std::array<Bits, kBlock> block;
    for (std::int64_t i = 0; i < count; i += kBlock) {
      const auto size = static_cast<std::size_t>(std::min<std::int64_t>(kBlock, count - i));
      std::memcpy(block.data(), data + static_cast<std::size_t>(i) * sizeof(Bits),
                  size * sizeof(Bits));
      add_block({block.data(), size});
    }
  }

  void add_to(ExponentCounts& counts) const {
    counts.zeros += zeros_;
    counts.infs += infs_;
    counts.nans += field_count(Format::kFields - 1) - infs_;
    counts.max_abs = std::max(counts.max_abs, value_of(max_));
    for (std::size_t width = 1; width < subnormals_.size(); ++width)
      counts.counts[place_of(Format::kSmallest + static_cast<int>(width) - 1)] +=
          subnormals_[width];
    for (std::size_t field = 1; field + 1 < Format::kFields; ++field)
      counts.counts[place_of(static_cast<int>(field) - Format::kBias)] += field_count(field);
  }

 private:
  static constexpr std::int64_t kBlock = 4096;
  // An increment waits for the one before of the same count (5 cycles on Zen 5), and neighbours often
  // have the same exponent, so each has a table of its own: 1.3 cycles per element instead of 5.
  static constexpr std::size_t kTables = sizeof(Bits) < 8 ? 4 : 1;

  static std::size_t field_of(Bits bits) {
    return static_cast<std::size_t>((bits & Format::kAbs) >> Format::kMantissa);
  }

  void add_block(std::span<const Bits> block) {
    const std::int64_t lowest = field_count(0);
    const std::int64_t highest = field_count(Format::kFields - 1);
    std::size_t i = 0;
    for (; i + kTables <= block.size(); i += kTables)
      for (std::size_t table = 0; table < kTables; ++table)
        ++fields_[table][field_of(block[i + table])];
    for (; i < block.size(); ++i) ++fields_[0][field_of(block[i])];

    // In numbers of the elements' size, for which vectors have most room. A block has fewer elements
    // than any of them can count.
    Bits zeros = 0;
    Bits max = 0;
    for (const Bits value : block) {
      const auto bits = static_cast<Bits>(value & Format::kAbs);
      zeros = static_cast<Bits>(zeros + (bits == 0 ? 1 : 0));
      max = std::max(max, bits < Format::kInf ? bits : Bits{0});
    }
    zeros_ += static_cast<std::int64_t>(zeros);
    max_ = std::max(max_, max);
    if (field_count(0) - lowest > static_cast<std::int64_t>(zeros)) add_subnormals(block);
    if (field_count(Format::kFields - 1) > highest) add_infs(block);
  }

  void add_subnormals(std::span<const Bits> block) {
    for (const Bits value : block) {
      const auto bits = static_cast<Bits>(value & Format::kAbs);
      if (bits < (Bits{1} << Format::kMantissa)) ++subnormals_[width_of(bits)];
    }
  }

  void add_infs(std::span<const Bits> block) {
    for (const Bits value : block)
      infs_ += static_cast<Bits>(value & Format::kAbs) == Format::kInf ? 1 : 0;
  }

  std::int64_t field_count(std::size_t field) const {
    std::int64_t count = 0;
    for (const auto& table : fields_) count += table[field];
    return count;
  }

  static std::size_t width_of(Bits bits) { return static_cast<std::size_t>(std::bit_width(bits)); }

  static double value_of(Bits bits) {
    const auto field = static_cast<int>(bits >> Format::kMantissa);
    const auto mantissa = static_cast<double>(bits & ((Bits{1} << Format::kMantissa) - 1));
    const double lead = field == 0 ? 0 : std::ldexp(1.0, Format::kMantissa);
    return std::ldexp(lead + mantissa, Format::kSmallest + std::max(field, 1) - 1);
  }

  std::array<std::array<std::int64_t, Format::kFields>, kTables> fields_{};
  // Those of field 0 by the number of bits of their mantissa; at 0 zeros, of some blocks.
  std::array<std::int64_t, Format::kMantissa + 1> subnormals_{};
  std::int64_t zeros_ = 0;
  std::int64_t infs_ = 0;
  Bits max_ = 0;
};

template <typename Format>
ExponentCounts count_on_cpu(const at::Tensor& tensor) {
  ExponentCounts counts;
  counts.numel = tensor.numel();
  const auto* const data = static_cast<const char*>(tensor.const_data_ptr());
  std::mutex mutex;
  parallel_for(0, tensor.numel(), kGrain, [&](std::int64_t begin, std::int64_t end) {
    Tally<Format> tally;
    tally.add(data + static_cast<std::size_t>(begin) * sizeof(typename Format::Bits), end - begin);
    const std::lock_guard lock(mutex);
    tally.add_to(counts);
  });
  return counts;
}

// The values of a tensor, with strides.
at::Tensor strided(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_floating_point() || tensor.is_nested())
    throw Error("kernels.exponents", "a tensor of real floating-point numbers",
                tensor.defined() ? dtype_name(tensor.scalar_type()) : "an undefined tensor");
  at::Tensor values = tensor.detach();
  if (values.layout() != at::kStrided) values = values.to_dense();
  return values.resolve_neg();
}

}  // namespace

ExponentCounts& ExponentCounts::operator+=(const ExponentCounts& other) {
  numel += other.numel;
  zeros += other.zeros;
  nans += other.nans;
  infs += other.infs;
  max_abs = std::max(max_abs, other.max_abs);
  for (std::size_t i = 0; i < counts.size(); ++i) counts[i] += other.counts[i];
  return *this;
}

ExponentCounts exponents_of(const at::Tensor& tensor) {
  at::Tensor values = strided(tensor);
  if (!values.is_cpu()) return ref::exponents_of(values);
  // The order does not matter. fp32 has all values of the 8-bit dtypes.
  if (values.element_size() == 1) values = values.to(at::kFloat);
  if (!values.is_non_overlapping_and_dense()) values = values.contiguous();
  switch (values.scalar_type()) {
    case at::kDouble:
      return count_on_cpu<Fp64>(values);
    case at::kFloat:
      return count_on_cpu<Fp32>(values);
    case at::kHalf:
      return count_on_cpu<Fp16>(values);
    case at::kBFloat16:
      return count_on_cpu<Bf16>(values);
    default:
      return ref::exponents_of(values);
  }
}

namespace ref {

ExponentCounts exponents_of(const at::Tensor& tensor) {
  constexpr std::int64_t kPiece = std::int64_t{1} << 20;
  constexpr auto kBins = static_cast<std::int64_t>(ExponentCounts::kCount);
  const at::Tensor values = strided(tensor);
  const bool is_small = values.element_size() == 1;
  const at::Tensor all = (is_small ? values.to(at::kFloat) : values).reshape(-1);
  // After the exponents: zeros, infinities and NaNs.
  at::Tensor sums = at::zeros({kBins + 3}, all.options().dtype(at::kLong));
  at::Tensor largest = at::zeros({}, all.options().dtype(at::kDouble));
  for (std::int64_t begin = 0; begin < all.numel(); begin += kPiece) {
    const at::Tensor piece =
        all.slice(0, begin, std::min(begin + kPiece, all.numel())).to(at::kDouble).abs();
    const at::Tensor finite = at::where(piece.isfinite(), piece, 0.0);
    // frexp's fractions are from 0.5 to below 1.
    at::Tensor bins = (std::get<1>(at::frexp(finite)).to(at::kLong) - 1)
                          .clamp(ExponentCounts::kFirst, ExponentCounts::kLast) -
                      ExponentCounts::kFirst;
    bins = at::where(piece == 0, kBins, bins);
    bins = at::where(piece.isinf(), kBins + 1, bins);
    bins = at::where(piece.isnan(), kBins + 2, bins);
    sums = sums + at::bincount(bins, {}, kBins + 3);
    largest = at::maximum(largest, finite.max());
  }
  const at::Tensor read = at::cat({sums.to(at::kDouble), largest.reshape(1)}).cpu();
  const auto at = [&](std::int64_t i) { return read.const_data_ptr<double>()[i]; };
  ExponentCounts counts;
  counts.numel = all.numel();
  for (std::size_t i = 0; i < counts.counts.size(); ++i)
    counts.counts[i] = static_cast<std::int64_t>(at(static_cast<std::int64_t>(i)));
  counts.zeros = static_cast<std::int64_t>(at(kBins));
  counts.infs = static_cast<std::int64_t>(at(kBins + 1));
  counts.nans = static_cast<std::int64_t>(at(kBins + 2));
  counts.max_abs = at(kBins + 3);
  return counts;
}

}  // namespace ref
}  // namespace semitone::kernels

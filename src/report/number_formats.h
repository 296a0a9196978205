#pragma once

#include "src/report/value_counts.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace semitone::report {

// A number format that trainings compute in, by the exponents of its limits.
struct NumberFormat {
  std::string_view name;  // Python's: "float16"
  int max_exponent;       // of the largest number
  int min_normal;         // of the smallest normal number
  int min_subnormal;      // of the smallest number
  double max;             // the largest number
};

// Those that reports judge, in the order of JSON and tables.
inline constexpr auto kNumberFormats = std::to_array<NumberFormat>({
    {"float16", 15, -14, -24, 65504},
    {"bfloat16", 127, -126, -133, 0x1.fep127},
    {"float8_e4m3fn", 8, -6, -9, 448},
    {"float8_e5m2", 15, -14, -16, 57344},
});
inline constexpr std::size_t kFloat16 = 0;
inline constexpr std::size_t kBFloat16 = 1;
inline constexpr std::size_t kFloat8E4m3fn = 2;
inline constexpr std::size_t kFloat8E5m2 = 3;

// How values that are neither zero nor NaN fit into a format; an inf overflows. Whole ranges between
// powers of two count as one, so that the limits are exact where they are powers of two: 2^-25,
// which float16 rounds to zero, counts as subnormal like its neighbours above, and 65520 to 65536 as
// in range.
struct FormatCounts {
  std::int64_t total = 0;
  std::int64_t zero = 0;       // round to zero
  std::int64_t subnormal = 0;  // keep fewer bits than a normal number
  std::int64_t overflow = 0;

  void add(const FormatCounts& other);
  // Shares of the total; 0 of nothing.
  double zero_share() const { return share(zero); }
  double subnormal_share() const { return share(subnormal); }
  double overflow_share() const { return share(overflow); }

 private:
  double share(std::int64_t part) const;
};

// One element for each of kNumberFormats.
using AllFormatCounts = std::array<FormatCounts, kNumberFormats.size()>;

// @param shift  the values are multiplied by 2^shift first
FormatCounts counts_in(const NumberFormat& format, const ValueCounts& values, int shift);
AllFormatCounts counts_in_all(const ValueCounts& values, int shift);

// The exponent of the power of two nearest to a loss scale; 0 if it is not above 0.
int exponent_of_scale(double scale);

// Python's name of a dtype that has LibTorch's, Python's or a short name ("Half", "float16",
// "torch.float16", "fp16" …); another text as it is.
std::string python_dtype(std::string_view name);

// The 16-bit format of this name in Python; nullptr for another.
const NumberFormat* sixteen_bit_format(std::string_view name);

}  // namespace semitone::report

#include "src/report/number_formats.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <utility>

namespace semitone::report {
namespace {

// Lower-case names of a dtype, each with Python's.
constexpr auto kDtypeNames = std::to_array<std::pair<std::string_view, std::string_view>>({
    {"half", "float16"},
    {"fp16", "float16"},
    {"bf16", "bfloat16"},
    {"float", "float32"},
    {"fp32", "float32"},
    {"double", "float64"},
    {"fp64", "float64"},
    {"long", "int64"},
    {"int", "int32"},
});

}  // namespace

double FormatCounts::share(std::int64_t part) const {
  return total == 0 ? 0 : static_cast<double>(part) / static_cast<double>(total);
}

void FormatCounts::add(const FormatCounts& other) {
  total += other.total;
  zero += other.zero;
  subnormal += other.subnormal;
  overflow += other.overflow;
}

FormatCounts counts_in(const NumberFormat& format, const ValueCounts& values, int shift) {
  FormatCounts found;
  found.total = values.infs;
  found.overflow = values.infs;
  int exponent = values.first_exponent + shift;
  for (const std::int64_t count : values.counts) {
    found.total += count;
    // Half of the smallest number rounds up to it.
    if (exponent < format.min_subnormal - 1) {
      found.zero += count;
    } else if (exponent < format.min_normal) {
      found.subnormal += count;
    } else if (exponent > format.max_exponent) {
      found.overflow += count;
    }
    ++exponent;
  }
  return found;
}

AllFormatCounts counts_in_all(const ValueCounts& values, int shift) {
  AllFormatCounts all;
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = counts_in(kNumberFormats[i], values, shift);
  return all;
}

int exponent_of_scale(double scale) {
  return std::isfinite(scale) && scale > 0 ? static_cast<int>(std::lround(std::log2(scale))) : 0;
}

std::string python_dtype(std::string_view name) {
  constexpr std::string_view kModule = "torch.";
  std::string lower(name.starts_with(kModule) ? name.substr(kModule.size()) : name);
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char letter) { return static_cast<char>(std::tolower(letter)); });
  for (const auto& [other, python] : kDtypeNames) {
    if (lower == other) return std::string(python);
  }
  const auto is_format = [&](const NumberFormat& format) { return format.name == lower; };
  return std::any_of(kNumberFormats.begin(), kNumberFormats.end(), is_format) ? lower
                                                                              : std::string(name);
}

const NumberFormat* sixteen_bit_format(std::string_view name) {
  for (const std::size_t index : {kFloat16, kBFloat16}) {
    if (kNumberFormats[index].name == name) return &kNumberFormats[index];
  }
  return nullptr;
}

}  // namespace semitone::report

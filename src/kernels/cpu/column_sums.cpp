#include "src/kernels/column_sums_kernel.h"

#include <cstddef>

// Highway compiles this file once for each instruction set: the order of these lines matters.
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/cpu/column_sums.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace semitone::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

void add_up_parts(const float* parts, std::size_t count, std::size_t size, std::size_t begin,
                  std::size_t end, float* sums) {
  const hn::ScalableTag<double> d;
  const hn::Rebind<float, decltype(d)> narrow;
  const std::size_t lanes = hn::Lanes(d);
  std::size_t i = begin;
  for (; i + lanes <= end; i += lanes) {
    auto sum = hn::Zero(d);
    for (std::size_t part = 0; part < count; ++part)
      sum = hn::Add(sum, hn::PromoteTo(d, hn::LoadU(narrow, parts + part * size + i)));
    hn::StoreU(hn::DemoteTo(narrow, sum), narrow, sums + i);
  }
  for (; i < end; ++i) {
    double sum = 0;
    for (std::size_t part = 0; part < count; ++part)
      sum += static_cast<double>(parts[part * size + i]);
    sums[i] = static_cast<float>(sum);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace semitone::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace semitone::kernels {

HWY_EXPORT(add_up_parts);

void add_up_parts(const float* parts, std::size_t count, std::size_t size, std::size_t begin,
                  std::size_t end, float* sums) {
  HWY_DYNAMIC_DISPATCH(add_up_parts)(parts, count, size, begin, end, sums);
}

}  // namespace semitone::kernels
#endif

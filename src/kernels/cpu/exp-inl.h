// The exponential function in vectors of fp32. Included once per target by Highway's
// foreach_target.
#if defined(SEMITONE_KERNELS_CPU_EXP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SEMITONE_KERNELS_CPU_EXP_INL_H_
#undef SEMITONE_KERNELS_CPU_EXP_INL_H_
#else
#define SEMITONE_KERNELS_CPU_EXP_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>

HWY_BEFORE_NAMESPACE();
namespace semitone::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// e^x for x <= 0, within 2 units of the last place. Results below 2^-126 are 0, as for -inf; NaN
// stays NaN (hn::Exp makes 0 of it). e^x = 2^n e^r with |r| <= ln 2 / 2.
template <class D>
HWY_INLINE hn::Vec<D> exp_of_negative(D d, hn::Vec<D> x) {
  const hn::RebindToUnsigned<D> d32;
  // Adding 1.5 * 2^23 rounds to a whole number, which then is in the lower bits.
  constexpr float kRound = 0x1.8p23F;
  const auto shifted = hn::MulAdd(x, hn::Set(d, 0x1.715476p0F), hn::Set(d, kRound));
  const auto n = hn::Sub(shifted, hn::Set(d, kRound));
  // ln 2 in two parts, of which the first has so few bits that its product with n is exact.
  auto r = hn::NegMulAdd(n, hn::Set(d, 0x1.63p-1F), x);
  r = hn::NegMulAdd(n, hn::Set(d, -0x1.bd0106p-13F), r);
  // e^r = 1 + r + r^2 q(r), of least greatest error: 3e-9.
  auto q = hn::Set(d, 0x1.6a23a8p-10F);
  q = hn::MulAdd(q, r, hn::Set(d, 0x1.123a36p-7F));
  q = hn::MulAdd(q, r, hn::Set(d, 0x1.5558f4p-5F));
  q = hn::MulAdd(q, r, hn::Set(d, 0x1.555490p-3F));
  q = hn::MulAdd(q, r, hn::Set(d, 0x1.fffffcp-2F));
  const auto e = hn::Add(hn::MulAdd(hn::Mul(r, r), q, r), hn::Set(d, 1.0F));
  // 2^n: n is the exponent, biased by 127; the upper bits of `shifted` are shifted out.
  const auto biased = hn::Add(hn::BitCast(d32, shifted), hn::Set(d32, 127));
  const auto power = hn::BitCast(d, hn::ShiftLeft<23>(biased));
  // For NaN the power may have any value, but e is NaN.
  constexpr float kLowest = -0x1.5d589ep6F;  // 126 ln 2
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, kLowest)), hn::Mul(e, power));
}

}  // namespace HWY_NAMESPACE
}  // namespace semitone::kernels
HWY_AFTER_NAMESPACE();

#endif  // include toggle

#include "src/kernels/gelu_kernel.h"

#include <algorithm>
#include <cstddef>
#include <type_traits>

// Highway compiles this file once for each instruction set: the order of these lines matters.
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/cpu/gelu.cpp"
#include <hwy/foreach_target.h>
#include "src/kernels/cpu/exp-inl.h"
#include "src/kernels/cpu/vec-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace semitone::kernels {
namespace HWY_NAMESPACE {

// Beyond this bound both forms are x or 0 in fp32.
constexpr float kFar = 16;

HWY_INLINE Vector polynomial(Vector, float c) {
  return hn::Set(Float(), c);
}

// c0 + c1 x + c2 x^2 + ...
template <class... More>
HWY_INLINE Vector polynomial(Vector x, float c0, More... more) {
  return hn::MulAdd(polynomial(x, more...), x, hn::Set(Float(), c0));
}

// Results are written to the caller's vectors: not every processor supports structures of vectors.

// For the standard normal distribution at a >= 0: P(X > a), and the density.
//
// P(X > a) = exp(-a^2 / 2) R(a), where R falls from 1/2 like 1 / a. It is a polynomial in
// (a - 3) / (a + 3), with an error of at most 1.1e-8 up to 14.6. The tail therefore keeps its
// relative accuracy, and the density costs one multiplication.
HWY_INLINE void normal_at(Vector a, Vector& above, Vector& density) {
  const Float d;
  const auto bell = exp_of_negative(d, hn::Mul(hn::Mul(a, a), hn::Set(d, -0.5F)));
  const auto t =
      hn::MulAdd(a, hn::Div(hn::Set(d, 2.0F), hn::Add(a, hn::Set(d, 3.0F))), hn::Set(d, -1.0F));
  const auto ratio = polynomial(t, 0x1.f1b89cp-4F, -0x1.a6b66ap-3F, 0x1.f8baccp-4F, -0x1.7a9460p-5F,
                                0x1.91e020p-8F, 0x1.7cb80ap-9F, -0x1.01e5d2p-10F, -0x1.6407bep-12F,
                                0x1.e44430p-14F, 0x1.c17076p-15F);
  above = hn::Mul(bell, ratio);
  density = hn::Mul(bell, hn::Set(d, 0x1.988454p-2F));  // 1 / sqrt(2 pi)
}

// P(X > a) for results that are rounded to 16 bits, in half the time: P^(-1/32) as a polynomial.
// The error is 5e-6 up to 7, a hundredth of that rounding; 2 % at 9, where P is 1e-19. The result
// is 0 from 16 on, where the power is infinite.
HWY_INLINE Vector roughly_above(Vector a) {
  auto root = polynomial(a, 0x1.059b0cp+0F, 0x1.a17efep-6F, 0x1.5721bep-7F, 0x1.7999e8p-10F,
                         -0x1.9725dap-14F, 0x1.b56d76p-16F, -0x1.ea87c4p-21F, 0x1.d84572p-27F,
                         0x1.b602a2p-28F);
  for (int i = 0; i < 5; ++i) root = hn::Mul(root, root);
  return hn::Div(hn::Set(Float(), 1.0F), root);
}

// x P(X < x) = max(x, 0) - a P(X > a) for a = |x|.
struct ErfGelu {
  template <class F>
  static HWY_INLINE Vector value(F, Vector x) {
    const Float d;
    const auto size = hn::Abs(x);
    const auto a = hn::Min(size, hn::Set(d, kFar));
    auto above = a;
    if constexpr (std::is_same_v<F, Fp32>) {
      auto density = a;
      normal_at(a, above, density);
    } else {
      above = roughly_above(a);
    }
    // Not Max, which would drop NaNs.
    const auto half = hn::Set(d, 0.5F);
    const auto positive_part = hn::MulAdd(x, half, hn::Mul(size, half));
    return hn::CopySign(hn::NegMulAdd(a, above, positive_part), x);  // -0 for -0
  }
  static HWY_INLINE Vector slope(Vector x) {
    const Float d;
    auto above = x;
    auto density = x;
    normal_at(hn::Min(hn::Abs(x), hn::Set(d, kFar)), above, density);
    const auto below =
        hn::IfThenElse(hn::Lt(x, hn::Zero(d)), above, hn::Sub(hn::Set(d, 1.0F), above));
    return hn::MulAdd(x, density, below);
  }
};

// x / 2 (1 + tanh(u)) = x / (1 + exp(-2u)): in e = exp(-|2u|), which does not overflow.
class TanhGelu {
 public:
  template <class F>
  static HWY_INLINE Vector value(F, Vector x) {
    auto square = x;
    auto logistic = x;
    auto rest = x;
    logistic_at(x, square, logistic, rest);
    return hn::Mul(x, logistic);
  }
  static HWY_INLINE Vector slope(Vector x) {
    auto square = x;
    auto logistic = x;
    auto rest = x;
    logistic_at(x, square, logistic, rest);
    const auto of_argument =
        hn::MulAdd(square, hn::Set(Float(), 3 * kCubic), hn::Set(Float(), kLinear));
    return hn::MulAdd(x, hn::Mul(hn::Mul(logistic, rest), of_argument), logistic);
  }

 private:
  // 2u = x (kLinear + kCubic x^2).
  static constexpr float kLinear = 0x1.988454p+0F;  // 2 sqrt(2 / pi)
  static constexpr float kCubic = 0x1.2444f2p-4F;   // 0.044715 of that

  // x^2 of an x within the bound, 1 / (1 + exp(-2u)), and 1 minus that.
  static HWY_INLINE void logistic_at(Vector x, Vector& square, Vector& logistic, Vector& rest) {
    const Float d;
    const auto far = hn::Set(d, kFar);
    const auto near = hn::Max(hn::Min(x, far), hn::Neg(far));
    square = hn::Mul(near, near);
    const auto argument =
        hn::Mul(near, hn::MulAdd(square, hn::Set(d, kCubic), hn::Set(d, kLinear)));
    const auto one = hn::Set(d, 1.0F);
    const auto e = exp_of_negative(d, hn::Neg(hn::Abs(argument)));
    const auto larger = hn::Div(one, hn::Add(one, e));
    const auto smaller = hn::Mul(e, larger);
    const auto negative = hn::Lt(argument, hn::Zero(d));
    logistic = hn::IfThenElse(negative, smaller, larger);
    rest = hn::IfThenElse(negative, larger, smaller);
  }
};

template <class Work>
HWY_INLINE void with_form(GeluForm form, const Work& work) {
  switch (form) {
    case GeluForm::erf:
      return work(ErfGelu{});
    case GeluForm::tanh:
      return work(TanhGelu{});
  }
}

template <class F, class Form>
void values(std::size_t columns, const Gelu& work, std::size_t begin, std::size_t end) {
  // Without a bias all rows count as one.
  const std::size_t size = work.bias == nullptr ? (end - begin) * columns : columns;
  for (std::size_t offset = begin * columns; offset < end * columns; offset += size) {
    const auto* in = static_cast<const typename F::Stored*>(work.input) + offset;
    auto* out = static_cast<typename F::Stored*>(work.output) + offset;
    for_vectors(size, [&](std::size_t i, std::size_t n) {
      prefetch(in + i);
      prefetch(out + i);
      auto x = load_some(F{}, in + i, n);
      if (work.bias != nullptr) x = hn::Add(x, load_some(Fp32{}, work.bias + i, n));
      store_some(F{}, Form::value(F{}, x), out + i, n);
    });
  }
}

template <class F, class Form>
void gradients(std::size_t columns, const GeluGradient& work, std::size_t begin, std::size_t end,
               float* sums) {
  if (sums != nullptr) std::fill(sums, sums + columns, 0.0F);
  const bool one_row = work.bias == nullptr && sums == nullptr;
  const std::size_t size = one_row ? (end - begin) * columns : columns;
  for (std::size_t offset = begin * columns; offset < end * columns; offset += size) {
    const auto* grad = static_cast<const typename F::Stored*>(work.grad) + offset;
    const auto* in = static_cast<const typename F::Stored*>(work.input) + offset;
    auto* out = static_cast<typename F::Stored*>(work.output) + offset;
    for_vectors(size, [&](std::size_t i, std::size_t n) {
      prefetch(grad + i);
      prefetch(in + i);
      prefetch(out + i);
      auto x = load_some(F{}, in + i, n);
      if (work.bias != nullptr) x = hn::Add(x, load_some(Fp32{}, work.bias + i, n));
      const auto v = hn::Mul(load_some(F{}, grad + i, n), Form::slope(x));
      store_some(F{}, v, out + i, n);
      if (sums != nullptr)
        store_some(Fp32{}, hn::Add(load_some(Fp32{}, sums + i, n), v), sums + i, n);
    });
  }
}

void gelu(const RowLayout& layout, const Gelu& work, std::size_t begin, std::size_t end) {
  with_format(layout.format, [&](auto format) {
    with_form(work.form, [&](auto form) {
      values<decltype(format), decltype(form)>(layout.columns, work, begin, end);
    });
  });
}

void gelu_gradient(const RowLayout& layout, const GeluGradient& work, std::size_t begin,
                   std::size_t end, float* sums) {
  with_format(layout.format, [&](auto format) {
    with_form(work.form, [&](auto form) {
      gradients<decltype(format), decltype(form)>(layout.columns, work, begin, end, sums);
    });
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace semitone::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace semitone::kernels {

HWY_EXPORT(gelu);
HWY_EXPORT(gelu_gradient);

void gelu(const RowLayout& layout, const Gelu& work, std::size_t begin, std::size_t end) {
  HWY_DYNAMIC_DISPATCH(gelu)(layout, work, begin, end);
}

void gelu_gradient(const RowLayout& layout, const GeluGradient& work, std::size_t begin,
                   std::size_t end, float* sums) {
  HWY_DYNAMIC_DISPATCH(gelu_gradient)(layout, work, begin, end, sums);
}

}  // namespace semitone::kernels
#endif

#include "src/kernels/dropout_kernel.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

// Highway compiles this file once for each instruction set: the order of these lines matters.
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/cpu/dropout.cpp"
#include <hwy/foreach_target.h>
#include "src/kernels/cpu/vec-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace semitone::kernels {
namespace HWY_NAMESPACE {

// A vector has at most as many lanes as a group has blocks.
using Lanes32 = hn::CappedTag<float, kDropoutBlocks>;
using Words32 = hn::RebindToUnsigned<Lanes32>;

// for_masks calls visit(i, mask) for each vector of a group; the mask marks the dropped elements
// from i on. The threshold is less than 2^16.
#if HWY_TARGET == HWY_SCALAR

template <class Visit>
HWY_INLINE void for_masks(const PhiloxStream& stream, std::uint32_t threshold, std::uint64_t group,
                          const Visit& visit) {
  const Words32 d32;
  const auto numbers = dropout_numbers(stream, group);
  for (std::size_t i = 0; i < kDropoutGroup; ++i)
    visit(i, hn::Lt(hn::Set(d32, numbers[i]), hn::Set(d32, threshold)));
}

#else

using Words64 = hn::RepartitionToWide<Words32>;
using Word = hn::Vec<Words32>;

// Philox for as many counters as there are lanes is computed in two halves: the even and the odd
// lanes, each in the lower 32 bits of 64. A product of 32 x 32 bits is then one instruction, and
// the upper bits are never used.
HWY_INLINE void philox_round(Word& w0, Word& w1, Word& w2, Word& w3, Word key0, Word key1) {
  const Words32 d32;
  const auto first = hn::MulEven(w0, hn::Set(d32, kPhiloxMultiplier0));
  const auto second = hn::MulEven(w2, hn::Set(d32, kPhiloxMultiplier1));
  w0 = hn::Xor3(hn::BitCast(d32, hn::ShiftRight<32>(second)), w1, key0);
  w2 = hn::Xor3(hn::BitCast(d32, hn::ShiftRight<32>(first)), w3, key1);
  w1 = hn::BitCast(d32, second);
  w3 = hn::BitCast(d32, first);
}

// Combines the halves' words into one vector.
HWY_INLINE Word join(Word even, Word odd) {
  const Words32 d32;
  const Words64 d64;
  return hn::OddEven(hn::BitCast(d32, hn::ShiftLeft<32>(hn::BitCast(d64, odd))), even);
}

template <class Visit>
HWY_INLINE void for_masks(const PhiloxStream& stream, std::uint32_t threshold, std::uint64_t group,
                          const Visit& visit) {
  const Words32 d32;
  const PhiloxKey key = key_of(stream);
  // The number of a group's first block is a multiple of 16, so counting its blocks causes no
  // carry.
  const PhiloxBlock counter = counter_of(stream, group * kDropoutBlocks);
  const auto limit = hn::Set(d32, threshold << 16);
  for (std::size_t from = 0; from < kDropoutBlocks; from += hn::Lanes(d32)) {
    const auto first = hn::Set(d32, counter[0] + static_cast<std::uint32_t>(from));
    auto even0 = hn::Add(first, hn::Iota(d32, 0));
    auto even1 = hn::Set(d32, counter[1]);
    auto even2 = hn::Set(d32, counter[2]);
    auto even3 = hn::Set(d32, counter[3]);
    auto odd0 = hn::Add(even0, hn::Set(d32, 1));
    auto odd1 = even1;
    auto odd2 = even2;
    auto odd3 = even3;
    for (std::uint32_t round = 0; round < kPhiloxRounds; ++round) {
      const auto key0 = hn::Set(d32, key[0] + round * kPhiloxWeyl0);
      const auto key1 = hn::Set(d32, key[1] + round * kPhiloxWeyl1);
      philox_round(even0, even1, even2, even3, key0, key1);
      philox_round(odd0, odd1, odd2, odd3, key0, key1);
    }
    const auto both = [&](std::size_t word, Word words) {
      visit(2 * word * kDropoutBlocks + from, hn::Lt(hn::ShiftLeft<16>(words), limit));
      visit((2 * word + 1) * kDropoutBlocks + from, hn::Lt(words, limit));
    };
    both(0, join(even0, odd0));
    both(1, join(even1, odd1));
    both(2, join(even2, odd2));
    both(3, join(even3, odd3));
  }
}

#endif  // HWY_TARGET

template <class In, class Out, bool kResidual>
void whole_group(const DropoutWork& work, std::size_t group, const typename In::Stored* input,
                 [[maybe_unused]] const typename Out::Stored* residual,
                 typename Out::Stored* output) {
  const Lanes32 d;
  const auto scale = hn::Set(d, work.scale);
  for_masks(work.stream, work.threshold, group, [&](std::size_t i, auto dropped) {
    const auto factor = hn::IfThenZeroElse(hn::RebindMask(d, dropped), scale);
    auto v = hn::Mul(load(In{}, d, input + i), factor);
    if constexpr (kResidual) v = hn::Add(load(Out{}, d, residual + i), v);
    store(Out{}, d, v, output + i);
  });
}

template <class F>
HWY_INLINE void ask_ahead_for_group(const typename F::Stored* from) {
  constexpr std::size_t kLine = 64;
  for (std::size_t i = 0; i < kDropoutGroup * sizeof(*from); i += kLine)
    prefetch(from, kBytesAhead + i);
}

template <class In, class Out, bool kResidual>
void groups_of(const DropoutWork& work, std::size_t begin, std::size_t end) {
  const auto* input = static_cast<const typename In::Stored*>(work.input);
  // Never read if there is none.
  const auto* residual =
      static_cast<const typename Out::Stored*>(kResidual ? work.residual : work.output);
  auto* output = static_cast<typename Out::Stored*>(work.output);
  const std::size_t whole = std::min(end, work.size / kDropoutGroup);
  for (std::size_t group = begin; group < whole; ++group) {
    const std::size_t at = group * kDropoutGroup;
    ask_ahead_for_group<In>(input + at);
    if constexpr (kResidual) ask_ahead_for_group<Out>(residual + at);
    ask_ahead_for_group<Out>(output + at);
    whole_group<In, Out, kResidual>(work, group, input + at, residual + at, output + at);
  }
  if (end <= whole) return;
  const std::size_t at = whole * kDropoutGroup;
  const std::size_t rest = work.size - at;
  typename In::Stored input_rest[kDropoutGroup] = {};
  typename Out::Stored output_rest[kDropoutGroup] = {};
  std::copy_n(input + at, rest, input_rest);
  if (kResidual) std::copy_n(residual + at, rest, output_rest);
  whole_group<In, Out, kResidual>(work, whole, input_rest, output_rest, output_rest);
  std::copy_n(output_rest, rest, output + at);
}

template <class In, class Out>
void groups_of(const DropoutWork& work, std::size_t begin, std::size_t end) {
  work.residual != nullptr ? groups_of<In, Out, true>(work, begin, end)
                           : groups_of<In, Out, false>(work, begin, end);
}

void dropout_groups(const DropoutWork& work, std::size_t begin, std::size_t end) {
  if (work.input_format == work.output_format) {
    with_format(work.input_format, [&](auto format) {
      groups_of<decltype(format), decltype(format)>(work, begin, end);
    });
  } else if (work.output_format == Format::fp32) {
    with_format(work.input_format,
                [&](auto format) { groups_of<decltype(format), Fp32>(work, begin, end); });
  } else {
    with_format(work.output_format,
                [&](auto format) { groups_of<Fp32, decltype(format)>(work, begin, end); });
  }
}

void dropped_bits(const DroppedBitsWork& work, std::uint32_t* to, std::size_t stride) {
  constexpr std::size_t kBits = 32;
  constexpr std::size_t kWords = kDropoutGroup / kBits;
  constexpr std::uint32_t kOne = 1 << 16;
  const Words32 d32;
  for (std::size_t row = 0; row < work.rows; ++row) {
    const std::uint64_t first = work.first + row * work.from_row_to_row;
    for (std::size_t group = 0; group < work.groups; ++group) {
      std::uint32_t words[kWords] = {};
      if (work.threshold == kOne) {
        std::fill_n(words, kWords, ~0U);
      } else {
        for_masks(work.stream, work.threshold, first + group, [&](std::size_t i, auto dropped) {
          std::uint8_t bytes[8] = {};
          hn::StoreMaskBits(d32, dropped, bytes);
          const std::uint32_t bits = bytes[0] | std::uint32_t{bytes[1]} << 8;
          words[i / kBits] |= bits << (i % kBits);
        });
      }
      for (std::size_t word = 0; word < kWords; ++word)
        to[(group * kWords + word) * stride + row] = words[word];
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace semitone::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace semitone::kernels {

HWY_EXPORT(dropout_groups);
HWY_EXPORT(dropped_bits);

void dropout_groups(const DropoutWork& work, std::size_t begin, std::size_t end) {
  HWY_DYNAMIC_DISPATCH(dropout_groups)(work, begin, end);
}

void dropped_bits(const DroppedBitsWork& work, std::uint32_t* to, std::size_t stride) {
  HWY_DYNAMIC_DISPATCH(dropped_bits)(work, to, stride);
}

}  // namespace semitone::kernels
#endif

#pragma once

#include "src/kernels/cuda/formats.cuh"

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

// Loops over chunks: neighbouring elements that a thread reads and writes with accesses of 16 bytes.
namespace semitone::kernels {

// Elements of a chunk: one access for 16-bit formats, two for fp32.
constexpr unsigned kChunk = 8;

// A device stops at an address that is no multiple of the size of the access; so does a test on a
// CPU.
template <unsigned N>
__device__ inline void check_alignment([[maybe_unused]] const void* words) {
#ifndef __CUDACC__
  cuda_on_cpu::check_alignment(words, N < 4 ? N * sizeof(std::uint32_t) : 16);
#endif
}

// Reads N * 4 bytes from an address that is a multiple of their size, or of 16 if that is less, with
// one instruction for each 16 bytes. It is volatile so that nvcc does not move it behind a branch,
// where the thread would wait for one access after the other.
template <unsigned N>
__device__ inline void load_words(const void* from, std::uint32_t (&words)[N]) {
#ifdef __CUDA_ARCH__
  const std::size_t at = __cvta_generic_to_global(from);
  if constexpr (N == 2) {
    asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(at));
  } else {
#pragma unroll
    for (unsigned k = 0; k < N; k += 4) {
      asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[k]), "=r"(words[k + 1]), "=r"(words[k + 2]), "=r"(words[k + 3])
                   : "l"(at + 4 * k));
    }
  }
#else
  check_alignment<N>(from);
  std::memcpy(words, from, sizeof(words));
#endif
}

template <unsigned N>
__device__ inline void load(const std::uint16_t* from, std::size_t i, std::uint16_t (&values)[N]) {
  if constexpr (N == 1) {
    values[0] = from[i];
  } else {
    std::uint32_t words[N / 2];
    load_words(from + i, words);
#pragma unroll
    for (unsigned k = 0; k < N; ++k)
      values[k] = static_cast<std::uint16_t>(words[k / 2] >> (16 * (k % 2)));
  }
}

template <typename F, unsigned N>
__device__ inline void load(const void* from, std::size_t i, float (&values)[N]) {
  const auto* const elements = static_cast<const typename F::Stored*>(from);
  if constexpr (N == 1) {
    values[0] = F::wide(elements[i]);
  } else if constexpr (sizeof(typename F::Stored) == sizeof(std::uint32_t)) {
    std::uint32_t words[N];
    load_words(elements + i, words);
#pragma unroll
    for (unsigned k = 0; k < N; ++k) values[k] = number_of(words[k]);
  } else {
    std::uint16_t stored[N];
    load(elements, i, stored);
#pragma unroll
    for (unsigned k = 0; k < N; ++k) values[k] = F::wide(stored[k]);
  }
}

// Writes them in the same way.
template <unsigned N>
__device__ inline void store_words(const std::uint32_t (&words)[N], void* to) {
#ifdef __CUDA_ARCH__
  const std::size_t at = __cvta_generic_to_global(to);
  if constexpr (N == 1) {
    asm volatile("st.global.b32 [%0], %1;" ::"l"(at), "r"(words[0]) : "memory");
  } else if constexpr (N == 2) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(at), "r"(words[0]), "r"(words[1])
                 : "memory");
  } else {
#pragma unroll
    for (unsigned k = 0; k < N; k += 4) {
      asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(at + 4 * k), "r"(words[k]),
                   "r"(words[k + 1]), "r"(words[k + 2]), "r"(words[k + 3])
                   : "memory");
    }
  }
#else
  check_alignment<N>(to);
  std::memcpy(to, words, sizeof(words));
#endif
}

template <typename F, unsigned N>
__device__ inline void store(const float (&values)[N], void* to, std::size_t i) {
  if constexpr (N == 1) {
    store<F>(values[0], to, i);
  } else {
    constexpr unsigned kWords = N * sizeof(typename F::Stored) / sizeof(std::uint32_t);
    std::uint32_t words[kWords];
#pragma unroll
    for (unsigned k = 0; k < kWords; ++k) {
      if constexpr (kWords == N) {
        words[k] = bits_of(values[k]);
      } else {
        words[k] = F::pair(values[2 * k], values[2 * k + 1]);
      }
    }
    store_words(words, static_cast<typename F::Stored*>(to) + i);
  }
}

template <unsigned N>
__device__ inline void store(Format format, const float (&values)[N], void* to, std::size_t i) {
  switch (format) {
    case Format::fp32:
      return store<Fp32>(values, to, i);
    case Format::fp16:
      return store<Fp16>(values, to, i);
    case Format::bf16:
      return store<Bf16>(values, to, i);
  }
}

// A thread's number among those that share a loop.
struct Share {
  unsigned thread;
  unsigned threads;
};

// The position of element 0 between two multiples of a chunk's size, in elements to the next one.
// Several pointers of a loop have chunks only if they agree.
class Head {
 public:
  // More than there are elements: none of them is in a chunk.
  static constexpr std::size_t kNone = ~std::size_t{0};

  constexpr Head() = default;
  // Null pointers agree with all others.
  __host__ __device__ Head& add(const void* pointer, std::size_t bytes, unsigned chunk) {
    if (pointer == nullptr) return *this;
    const auto position = reinterpret_cast<std::uintptr_t>(pointer) / bytes % chunk;
    const std::size_t one = (chunk - position) % chunk;
    elements_ = !known_ || elements_ == one ? one : kNone;
    known_ = true;
    return *this;
  }
  __host__ __device__ std::size_t elements() const { return elements_; }

 private:
  std::size_t elements_ = 0;
  bool known_ = false;
};

template <unsigned N>
struct Count {
  static constexpr unsigned value = N;
};

// Calls visit(i, Count<N>{}) for chunks i … i + N - 1 of the elements [begin, end), and
// visit(i, Count<1>{}) for the others: `head` of them before the first chunk, and those that are
// left behind the last one.
template <unsigned N, typename Visit>
__device__ inline void for_chunks(std::size_t begin, std::size_t end, std::size_t head,
                                  const Share& share, const Visit& visit) {
  const std::size_t size = end - begin;
  const std::size_t before = head < size ? head : size;
  const std::size_t chunks = (size - before) / N;
  for (std::size_t c = share.thread; c < chunks; c += share.threads)
    visit(begin + before + c * N, Count<N>{});
  const std::size_t in_chunks = chunks * N;
  for (std::size_t k = share.thread; k < size - in_chunks; k += share.threads)
    visit(begin + (k < before ? k : k + in_chunks), Count<1>{});
}

// Calls work(Count<kChunk>{}) if all rows consist of whole chunks, else work(Count<1>{}).
template <typename Work>
void with_chunk(std::size_t columns, const Head& head, const Work& work) {
  if (columns % kChunk == 0 && head.elements() == 0) {
    work(Count<kChunk>{});
  } else {
    work(Count<1>{});
  }
}

}  // namespace semitone::kernels

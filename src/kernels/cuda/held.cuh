#pragma once

#include "src/kernels/cuda/elements.cuh"

#include <cstddef>
#include <cstdint>

namespace semitone::kernels {

// N neighbouring elements as they are in memory: 16-bit numbers take half a register.
template <typename F, unsigned N>
class Held {
 public:
  __device__ void load(const void* from, std::size_t i) {
    load_words(static_cast<const typename F::Stored*>(from) + i, words_);
  }
  __device__ void read(float (&values)[N]) const {
#pragma unroll
    for (unsigned k = 0; k < N; ++k) {
      if constexpr (kWords == N) {
        values[k] = number_of(words_[k]);
      } else {
        values[k] = F::wide(static_cast<std::uint16_t>(words_[k / 2] >> (16 * (k % 2))));
      }
    }
  }

 private:
  static constexpr unsigned kWords = N * sizeof(typename F::Stored) / sizeof(std::uint32_t);
  std::uint32_t words_[kWords] = {};
};

template <typename F>
class Held<F, 1> {
 public:
  __device__ void load(const void* from, std::size_t i) {
    stored_ = static_cast<const typename F::Stored*>(from)[i];
  }
  __device__ void read(float (&values)[1]) const { values[0] = F::wide(stored_); }

 private:
  typename F::Stored stored_ = {};
};

}  // namespace semitone::kernels

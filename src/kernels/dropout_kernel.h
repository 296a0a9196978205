#pragma once

#include "src/kernels/kernels.h"
#include "src/kernels/philox.h"

#include <array>
#include <cstddef>
#include <cstdint>

// The function on pointers behind dropout.h, and the random numbers that decide which elements are
// dropped: both the vector code and the reference use them.
namespace semitone::kernels {

// Random numbers of 16 bits come in groups of 128, from 16 blocks of Philox4x32. Numbers 16 w … 16
// w + 15 of a group are the w-th sixteen bits of its blocks: the lower (w even) or upper (w odd)
// half of word w / 2. A vector of words therefore holds numbers of neighbouring elements, for all
// vector sizes up to 16 lanes.
constexpr std::size_t kDropoutBlocks = 16;
constexpr std::size_t kDropoutGroup = 8 * kDropoutBlocks;

// The random numbers of a group, one at a time.
constexpr std::array<std::uint16_t, kDropoutGroup> dropout_numbers(const PhiloxStream& stream,
                                                                   std::uint64_t group) {
  std::array<std::uint16_t, kDropoutGroup> numbers{};
  for (std::size_t i = 0; i < kDropoutBlocks; ++i) {
    const PhiloxBlock block =
        philox(counter_of(stream, group * kDropoutBlocks + i), key_of(stream));
    for (std::size_t w = 0; w < 8; ++w) {
      numbers[kDropoutBlocks * w + i] = static_cast<std::uint16_t>(block[w / 2] >> (16 * (w % 2)));
    }
  }
  return numbers;
}

struct DropoutWork {
  const void* input;
  Format input_format;
  const void* residual;  // may be null; in the output's format
  void* output;
  Format output_format;  // the input's, or one of both is fp32
  std::size_t size;
  PhiloxStream stream;
  std::uint32_t threshold;  // < 2^16: an element whose random number is less is dropped
  float scale;              // of the others
};

// output = round(residual + input * (0 or scale)) for the groups [begin, end), the last of which
// may be truncated by `size`. The multiplication and the addition are rounded to fp32. output may
// be residual, or input if the formats are the same.
void dropout_groups(const DropoutWork& work, std::size_t begin, std::size_t end);

// The same for all groups.
SEMITONE_CUDA_KERNEL(void dropout_cuda(const DropoutWork& work, CudaStream stream));

// Which elements of consecutive groups are dropped, for several rows of groups.
struct DroppedBitsWork {
  PhiloxStream stream;
  std::uint32_t threshold;  // at most 2^16
  std::uint64_t first;      // the number of the first row's first group
  std::uint64_t from_row_to_row;
  std::size_t rows;
  std::size_t groups;  // of each row
};

// Bit i % 32 of to[i / 32 * stride + r]: whether element i of row r is dropped.
void dropped_bits(const DroppedBitsWork& work, std::uint32_t* to, std::size_t stride);

}  // namespace semitone::kernels

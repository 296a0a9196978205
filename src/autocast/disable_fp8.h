#pragma once

// Internal interface: other rooms include this header.
namespace semitone::amp {

// While one exists, this thread computes no product in fp8: within a recurrent layer, which is one
// operator on some processors and many on others, and for the chunks of nn::linear_cross_entropy.
class [[nodiscard]] DisableFp8 {
 public:
  DisableFp8();
  ~DisableFp8();
  DisableFp8(const DisableFp8&) = delete;
  DisableFp8& operator=(const DisableFp8&) = delete;
};

}  // namespace semitone::amp

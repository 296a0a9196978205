#pragma once

namespace semitone {

/// Mark for modules whose own parameters and buffers stay in fp32 where a model is cast to 16 bits
/// (opt levels O2 and O3 with keep_batchnorm_fp32): normalisation layers that keep running
/// statistics. torch::nn::BatchNorm needs no mark. Only the module's own tensors are meant, not
/// those of its children.
///
///     class MyNormImpl : public torch::nn::Module, public semitone::KeepFp32 { … };
class KeepFp32 {
 public:
  virtual ~KeepFp32() = default;

 protected:
  KeepFp32() = default;
  KeepFp32(const KeepFp32&) = default;
  KeepFp32& operator=(const KeepFp32&) = default;
};

}  // namespace semitone

#pragma once

namespace semitone {

/// Marks modules whose own parameters and buffers stay in fp32 when a model is cast to 16 bits (opt
/// levels O2 and O3 with keep_batchnorm_fp32). It is meant for normalisation layers with running
/// statistics. torch::nn::BatchNorm needs no mark. The mark covers the module's own tensors, not
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

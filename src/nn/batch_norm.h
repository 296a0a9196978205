#pragma once

// Internal interface: other rooms include this header.

#include <ATen/core/Tensor.h>

#include <memory>
#include <string_view>

// Batch normalisation in training, with its gradient: of one process, or of several whose batches
// count as one.
namespace semitone::nn {

// The communication with other processes.
class BatchNormPeers {
 public:
  BatchNormPeers() = default;
  BatchNormPeers(const BatchNormPeers&) = delete;
  BatchNormPeers& operator=(const BatchNormPeers&) = delete;
  virtual ~BatchNormPeers() = default;

  // Gathers a vector of the same size from every process, one row each.
  virtual at::Tensor all_gather(const at::Tensor& own) const = 0;
  // Sums over all processes, in place.
  virtual void all_reduce(at::Tensor& sums) const = 0;
};

// The parameters of a batch normalisation. Tensors that a layer does not have are undefined.
struct BatchNorm {
  std::string_view component;  // the name in messages: a literal
  at::Tensor weight;
  at::Tensor bias;
  at::Tensor running_mean;  // updated
  at::Tensor running_var;   // updated
  double momentum;          // weight of this batch in the running statistics
  double eps;
  std::shared_ptr<const BatchNormPeers> peers = {};  // null: this process alone
  at::Tensor residual = {};
  bool relu = false;
};

// relu(norm(input) * weight + bias + residual) with the statistics of the batch.
//
// Input (N, C, ...), floating-point, in any layout; the result has its dtype and layout. Weights
// and running statistics may be fp32 with a 16-bit input. Error for an unsupported input or shape,
// and for a batch of one value per channel in total, which has no variance (with peers, checked on
// the CPU only: elsewhere the check would wait for the device). Without peers the gradient can be
// differentiated again, through LibTorch's operators; with peers that is an Error.
at::Tensor batch_norm(const at::Tensor& input, const BatchNorm& layer);

// The same with the running statistics instead of the batch's, through LibTorch's operators.
at::Tensor batch_norm_in_evaluation(const at::Tensor& input, const BatchNorm& layer);

}  // namespace semitone::nn

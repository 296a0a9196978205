#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string_view>

// The arithmetic of batch normalisation in training, with its gradient: of one process, or of
// several whose batches count as one.
namespace semitone::nn {

// Where the batches of other processes come in.
class BatchNormPeers {
 public:
  BatchNormPeers() = default;
  BatchNormPeers(const BatchNormPeers&) = delete;
  BatchNormPeers& operator=(const BatchNormPeers&) = delete;
  virtual ~BatchNormPeers() = default;

  // One row for each process: what it gave, a vector of the same size everywhere.
  virtual at::Tensor all_gather(const at::Tensor& own) const = 0;
  // In place, the sum over all processes.
  virtual void all_reduce(at::Tensor& sums) const = 0;
};

// What goes with the input. Tensors that a layer does not have are undefined.
struct BatchNorm {
  std::string_view where;  // the name in messages: a literal
  at::Tensor weight;
  at::Tensor bias;
  at::Tensor running_mean;  // updated
  at::Tensor running_var;   // updated
  double momentum;          // share of this batch in the running statistics
  double eps;
  std::shared_ptr<const BatchNormPeers> peers = {};  // null: this process alone
  at::Tensor residual = {};
  bool relu = false;
};

// relu(norm(input) * weight + bias + residual) with the statistics of the batch.
//
// Input (N, C, ...), floating-point, in any layout; the result has its dtype and layout. Weights
// and running statistics may be in fp32 beside a 16-bit input. Error for an input of another kind
// or shape, and for a batch of one value a channel in all, which has no variance (seen on the CPU
// only: elsewhere the check would wait for the device). The gradient can be differentiated again
// without peers, by LibTorch's operators; with peers that is an Error.
at::Tensor batch_norm(const at::Tensor& input, const BatchNorm& layer);

// The same with the running statistics in place of the batch's, by LibTorch's operators.
at::Tensor batch_norm_in_evaluation(const at::Tensor& input, const BatchNorm& layer);

}  // namespace semitone::nn

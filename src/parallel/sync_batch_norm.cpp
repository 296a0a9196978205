#include "semitone/parallel/sync_batch_norm.h"

#include "semitone/core/error.h"
#include "semitone/core/events.h"
#include "src/comm/process_group.h"
#include "src/core/capture_scope.h"
#include "src/core/for_each_module.h"
#include "src/nn/batch_norm.h"
#include "src/nn/batch_norm_layer.h"
#include "src/nn/batch_norm_mark.h"

#include <ATen/ops/batch_norm_native.h>
#include <torch/library.h>
#include <torch/types.h>

#include <memory>
#include <utility>

namespace semitone::parallel {
namespace {

constexpr auto kSyncBatchNorm = "parallel.sync_batch_norm";

// The batches of a group's ranks.
class GroupPeers final : public nn::BatchNormPeers {
 public:
  explicit GroupPeers(comm::Group group) : group_(std::move(group)) {}

  at::Tensor all_gather(const at::Tensor& own) const override {
    require_no_capture();
    const events::PhaseScope phase(events::Phase::communication);
    return at::stack(comm::all_gather_unchecked(group_, own));
  }
  void all_reduce(at::Tensor& sums) const override {
    require_no_capture();
    const events::PhaseScope phase(events::Phase::communication);
    comm::all_reduce_unchecked(group_, sums);
  }

 private:
  // A replay would not detect lost ranks.
  static void require_no_capture() {
    if (!CaptureScope::is_active()) return;
    throw Error(kSyncBatchNorm, "steps that run operator by operator, with several ranks",
                "a layer in amp::CapturedStep", "train without CapturedStep");
  }

  comm::Group group_;
};

at::Tensor value_of(const std::optional<at::Tensor>& tensor) {
  return tensor.value_or(at::Tensor());
}

// Replaces LibTorch's kernel for aten::batch_norm. It calls that kernel except for marked tensors
// in training. Registered when the program is loaded, not at the first mark: other threads may call
// the operator then, and LibTorch's table of kernels is read without a lock.
at::Tensor batch_norm(const at::Tensor& input, const std::optional<at::Tensor>& weight,
                      const std::optional<at::Tensor>& bias,
                      const std::optional<at::Tensor>& running_mean,
                      const std::optional<at::Tensor>& running_var, bool training, double momentum,
                      double eps, bool cudnn_enabled) {
  const nn::BatchNormMark* mark = training ? nn::batch_norm_mark(value_of(weight)) : nullptr;
  if (training && mark == nullptr) mark = nn::batch_norm_mark(value_of(running_mean));
  if (mark == nullptr) {
    return at::native::batch_norm(input, weight, bias, running_mean, running_var, training,
                                  momentum, eps, cudnn_enabled);
  }
  return nn::batch_norm(input, {.component = kSyncBatchNorm,
                                .weight = mark->is_placeholder ? at::Tensor() : value_of(weight),
                                .bias = value_of(bias),
                                .running_mean = value_of(running_mean),
                                .running_var = value_of(running_var),
                                .momentum = momentum,
                                .eps = eps,
                                .peers = mark->peers});
}

void replace_batch_norm(torch::Library& library) {
  library.impl("batch_norm", TORCH_FN(batch_norm));
}

// On every kind of device that a converted layer can be moved to. Elsewhere its ranks would silently
// have statistics of their own.
TORCH_LIBRARY_IMPL(aten, AutogradCPU, library) {
  replace_batch_norm(library);
}
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, library) {
  replace_batch_norm(library);
}
TORCH_LIBRARY_IMPL(aten, AutogradXPU, library) {
  replace_batch_norm(library);
}
TORCH_LIBRARY_IMPL(aten, AutogradMPS, library) {
  replace_batch_norm(library);
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) {
  replace_batch_norm(library);
}
// Without autograd: c10::InferenceMode.
TORCH_LIBRARY_IMPL(aten, CPU, library) {
  replace_batch_norm(library);
}
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  replace_batch_norm(library);
}
TORCH_LIBRARY_IMPL(aten, XPU, library) {
  replace_batch_norm(library);
}
TORCH_LIBRARY_IMPL(aten, MPS, library) {
  replace_batch_norm(library);
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  replace_batch_norm(library);
}

template <typename Layer>
bool convert_if(torch::nn::Module& module, const comm::Group& group) {
  auto* const layer = dynamic_cast<Layer*>(&module);
  if (layer == nullptr) return false;
  const nn::BatchNormMark* before = nn::batch_norm_mark(layer->weight);
  if (before != nullptr && before->is_placeholder) layer->weight = at::Tensor();
  const bool has_tensors = layer->weight.defined() || layer->running_mean.defined();
  if (!has_tensors && group.size() > 1) {
    layer->weight = torch::ones({layer->options.num_features()});
    nn::set_batch_norm_mark(layer->weight,
                            {std::make_shared<GroupPeers>(group), /*is_placeholder=*/true});
  } else {
    for (const at::Tensor& tensor : {layer->weight, layer->running_mean}) {
      if (!tensor.defined()) continue;
      if (group.size() > 1) {
        nn::set_batch_norm_mark(tensor, {std::make_shared<GroupPeers>(group)});
      } else {
        nn::remove_batch_norm_mark(tensor);
      }
    }
  }
  return true;
}

bool convert_layer(torch::nn::Module& module, const comm::Group& group) {
  if (auto* const layer = dynamic_cast<SyncBatchNormImpl*>(&module)) {
    layer->set_group(group);
    return true;
  }
  return convert_if<torch::nn::BatchNorm1dImpl>(module, group) ||
         convert_if<torch::nn::BatchNorm2dImpl>(module, group) ||
         convert_if<torch::nn::BatchNorm3dImpl>(module, group) ||
         convert_if<nn::FusedBatchNormImpl>(module, group);
}

}  // namespace

SyncBatchNormImpl::SyncBatchNormImpl(const nn::FusedBatchNormOptions& options_, comm::Group group)
    : torch::nn::NormImplBase<2, SyncBatchNormImpl, nn::FusedBatchNormOptions>(options_),
      group_(std::move(group)) {}

void SyncBatchNormImpl::_check_input_dim(const at::Tensor& input) {
  nn::check_channels(kSyncBatchNorm, input, options.num_features());
}

at::Tensor SyncBatchNormImpl::forward(const at::Tensor& input, const at::Tensor& residual) {
  _check_input_dim(input);
  nn::BatchNorm layer = nn::layer_of(*this, kSyncBatchNorm, residual, options.relu());
  if (!nn::uses_batch(*this)) return nn::batch_norm_in_evaluation(input, layer);
  if (group_.size() > 1) layer.peers = std::make_shared<GroupPeers>(group_);
  return nn::batch_norm(input, layer);
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  nn::print_options(stream, "semitone::parallel::SyncBatchNorm", options)
      << ", relu=" << options.relu() << ", ranks=" << group_.size() << ")";
}

std::size_t convert_sync_batchnorm(torch::nn::Module& module, const comm::Group& group) {
  std::size_t converted = 0;
  for_each_module(module, [&](torch::nn::Module& layer) {
    if (convert_layer(layer, group)) ++converted;
  });
  return converted;
}

}  // namespace semitone::parallel

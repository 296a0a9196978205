// Apex's delay_allreduce: nothing is reduced before backward is done. Then all gradients are
// reduced, flattened, in one message for each dtype and device.
#include "semitone/core/events.h"
#include "src/comm/process_group.h"
#include "src/parallel/averaging.h"
#include "src/parallel/reduction.h"

#include <ATen/ops/flatten_dense_tensors.h>
#include <ATen/ops/unflatten_dense_tensors.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/types.h>

#include <cstddef>
#include <map>
#include <tuple>
#include <utility>

namespace semitone::parallel::detail {
namespace {

// The common properties of tensors in one message.
using MessageKind = std::tuple<at::ScalarType, c10::DeviceType, c10::DeviceIndex>;

MessageKind kind_of(const at::Tensor& tensor) {
  return {tensor.scalar_type(), tensor.device().type(), tensor.device().index()};
}

class DelayedReduction final : public Reduction {
 public:
  DelayedReduction(const ModelTensors& model, comm::Group group,
                   const DistributedDataParallelOptions& options, const Divisor& divisor)
      : group_(std::move(group)), averaging_(options, divisor) {
    for (const auto& entry : model.parameters) parameters_.push_back(entry.tensor);
  }

  void before_backward(const std::vector<at::Tensor>&) override { sent_ = false; }

  void begin_backward() override {
    torch::autograd::Engine::get_default_engine().queue_callback([this] { reduce(true); });
  }

  // Further backward passes, of the same forward or of the model's own, are reduced too. Gradients
  // that earlier passes have reduced are equal on all ranks, so averaging them again does not
  // change them.
  bool finished() override { return true; }

  bool forget_backward() override { return !sent_; }

  void shadow(bool keep) override {
    if (keep) {
      for (const at::Tensor& parameter : parameters_) parameter.mutable_grad().reset();
    }
    reduce(keep);
  }

 private:
  void reduce(bool takes_part) {
    const events::PhaseScope phase(events::Phase::communication);
    const at::NoGradGuard no_grad;
    // All ranks reduce the gradients that any of them has.
    const auto device = parameters_.front().device();
    at::Tensor used = at::zeros({static_cast<std::int64_t>(parameters_.size())}, at::kInt);
    if (takes_part) {
      for (std::size_t i = 0; i < parameters_.size(); ++i) {
        used[static_cast<std::int64_t>(i)] = parameters_[i].grad().defined() ? 1 : 0;
      }
    }
    used = used.to(device);
    sent_ = true;
    std::vector<at::Tensor> tensors{used};
    c10d::AllreduceOptions maximum;
    maximum.reduceOp = c10d::ReduceOp::MAX;
    comm::process_group(group_)->allreduce(tensors, maximum)->wait();
    used = used.cpu();

    std::map<MessageKind, std::vector<at::Tensor>> by_kind;
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      if (used[static_cast<std::int64_t>(i)].item<int>() == 0) continue;
      const at::Tensor& parameter = parameters_[i];
      at::Tensor gradient = takes_part ? parameter.grad() : at::Tensor();
      if (!gradient.defined()) {
        gradient = at::zeros_like(parameter);
        if (takes_part) parameter.mutable_grad() = gradient;
      }
      by_kind[kind_of(gradient)].push_back(gradient);
    }
    for (const auto& [kind, gradients] : by_kind) {
      const at::Tensor flat = at::flatten_dense_tensors(gradients);
      averaging_.start(flat, group_)->waitAndThrow();
      const auto means = at::unflatten_dense_tensors(flat, gradients);
      for (std::size_t i = 0; i < gradients.size(); ++i) gradients[i].copy_(means[i]);
    }
  }

  const comm::Group group_;
  const Averaging averaging_;
  std::vector<at::Tensor> parameters_;
  bool sent_ = false;  // since before_backward
};

}  // namespace

std::unique_ptr<Reduction> make_delayed_reduction(const ModelTensors& model,
                                                  const comm::Group& group,
                                                  const DistributedDataParallelOptions& options,
                                                  const Divisor& divisor) {
  return std::make_unique<DelayedReduction>(model, group, options, divisor);
}

}  // namespace semitone::parallel::detail

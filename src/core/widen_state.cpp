#include "src/core/widen_state.h"

#include "semitone/core/dtype.h"

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

namespace semitone {
namespace {

void widen_tensor(at::Tensor& tensor) {
  if (tensor.defined() && is_16bit(tensor.scalar_type())) tensor = tensor.to(at::kFloat);
}

}  // namespace

void widen_state(torch::optim::OptimizerParamState& state) {
  const auto widen = [](auto&... tensors) { (widen_tensor(tensors), ...); };
  if (auto* const sgd = dynamic_cast<torch::optim::SGDParamState*>(&state)) {
    widen(sgd->momentum_buffer());
  } else if (auto* const adam = dynamic_cast<torch::optim::AdamParamState*>(&state)) {
    widen(adam->exp_avg(), adam->exp_avg_sq(), adam->max_exp_avg_sq());
  } else if (auto* const adamw = dynamic_cast<torch::optim::AdamWParamState*>(&state)) {
    widen(adamw->exp_avg(), adamw->exp_avg_sq(), adamw->max_exp_avg_sq());
  } else if (auto* const rmsprop = dynamic_cast<torch::optim::RMSpropParamState*>(&state)) {
    widen(rmsprop->square_avg(), rmsprop->momentum_buffer(), rmsprop->grad_avg());
  } else if (auto* const adagrad = dynamic_cast<torch::optim::AdagradParamState*>(&state)) {
    widen(adagrad->sum());
  } else if (auto* const lbfgs = dynamic_cast<torch::optim::LBFGSParamState*>(&state)) {
    widen(lbfgs->d(), lbfgs->H_diag(), lbfgs->prev_flat_grad());
    for (auto* const history : {&lbfgs->old_dirs(), &lbfgs->old_stps(), &lbfgs->ro()}) {
      for (at::Tensor& tensor : *history) widen_tensor(tensor);
    }
  }
}

}  // namespace semitone

// Steps that need the norm of each tensor, and Adagrad's: by the classes that a program uses.
#include "benchmarks/kernels/tensor_lists.h"
#include "semitone/optim/clip_grad.h"
#include "semitone/optim/fused_adagrad.h"
#include "semitone/optim/fused_lamb.h"
#include "semitone/optim/fused_novograd.h"
#include "semitone/optim/larc.h"

#include <torch/torch.h>

#include <fmt/format.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

namespace semitone::bench {
namespace {

constexpr double kWeightDecay = 0.01;
// Tolerance for two steps of a few operations in fp32.
constexpr Tolerance kTwoSteps{.share_of_largest = 2e-7, .roundings = 6};

// An optimizer with its parameters: fp32 (fp64 for the proof), and for gradients in 16 bits the
// model that is these parameters rounded.
template <typename Optimizer, typename Options>
class Training {
 public:
  Training(const Tensors& values, const Tensors& grads, const Options& options)
      : params_(values), optimizer_(params_, options) {
    if (grads[0].scalar_type() != values[0].scalar_type()) {
      model_ = like(values, grads[0].scalar_type());
      for (std::size_t i = 0; i < values.size(); ++i) {
        model_[i].requires_grad_().mutable_grad() = grads[i];
        copies_[params_[i].unsafeGetTensorImpl()] = model_[i];
      }
    } else {
      for (std::size_t i = 0; i < values.size(); ++i)
        params_[i].requires_grad_().mutable_grad() = grads[i];
    }
  }

  void step() { optimizer_.step(optim::FusedStep().copies(&copies_)); }

  const Tensors& params() const { return params_; }
  const Tensors& model() const { return model_; }
  Tensors state(const std::string& name) const {
    Tensors all;
    for (const at::Tensor& param : params_) all.push_back(optimizer_.state_of(param, name));
    return all;
  }

 private:
  Tensors params_;
  Tensors model_;
  optim::ModelCopies copies_;
  Optimizer optimizer_;
};

// Two steps, against the same in fp64 by the composed reference.
template <typename Optimizer, typename Options>
void prove(const Training<Optimizer, Options>& got, const Training<Optimizer, Options>& want,
           const std::vector<std::string>& states) {
  for (std::size_t i = 0; i < got.params().size(); ++i) {
    const at::Tensor param = got.params()[i].detach();
    require_within(param, want.params()[i].detach(), kTwoSteps, "a parameter");
    if (got.model().empty()) continue;
    const at::Tensor model = got.model()[i].detach();
    require(at::equal(model, param.to(model.scalar_type())), "a model that is its masters rounded");
  }
  for (const std::string& name : states) {
    const Tensors ours = got.state(name);
    const Tensors exact = want.state(name);
    for (std::size_t i = 0; i < ours.size(); ++i)
      require_within(ours[i], exact[i], kTwoSteps, "the optimizer's " + name);
  }
}

template <typename Optimizer, typename Options>
std::vector<Row> step_of(const Sizes& sizes, at::ScalarType dtype, const Options& options,
                         const std::vector<std::string>& states, const Work& libtorchs = {}) {
  const Tensors values = random_list(sizes, at::kFloat);
  const Tensors grads = random_list(sizes, dtype);
  using Own = Training<Optimizer, Options>;
  const auto training = std::make_shared<Own>(like(values, at::kFloat), grads, options);
  {
    Own exact(like(values, at::kDouble), like(grads, at::kDouble), options);
    for (int i = 0; i < 2; ++i) {
      training->step();
      exact.step();
    }
    prove(*training, exact, states);
  }
  std::vector<Moved> counts{moved_list("g", grads), moved_list("p", values, 2)};
  const char* const names[] = {"m", "v"};
  for (std::size_t which = 0; which < states.size(); ++which)
    counts.push_back(moved_list(names[which], training->state(states[which]), 2));
  if (!training->model().empty()) counts.push_back(moved_list("copy", training->model()));
  return {{.moved = counts, .work = [training] { training->step(); }, .libtorchs = libtorchs}};
}

std::vector<Row> lamb(const Sizes& sizes, at::ScalarType dtype) {
  const auto options = optim::FusedLAMBOptions().weight_decay(kWeightDecay);
  return step_of<optim::FusedLAMB>(sizes, dtype, options, {"exp_avg", "exp_avg_sq"});
}

std::vector<Row> novograd(const Sizes& sizes, at::ScalarType dtype) {
  const auto options = optim::FusedNovoGradOptions().weight_decay(kWeightDecay);
  return step_of<optim::FusedNovoGrad>(sizes, dtype, options, {"exp_avg"});
}

std::vector<Row> larc(const Sizes& sizes, at::ScalarType dtype) {
  const auto options = optim::LARCOptions(0.1).momentum(0.9).weight_decay(kWeightDecay);
  return step_of<optim::LARC>(sizes, dtype, options, {"momentum_buffer"});
}

std::vector<Row> adagrad(const Sizes& sizes, at::ScalarType dtype) {
  constexpr double kLr = 1e-3;
  constexpr double kEps = 1e-10;
  const Tensors params = random_list(sizes, at::kFloat);
  const Tensors grads = random_list(sizes, dtype);
  const bool converts = dtype != at::kFloat;
  const auto libtorchs = [=, wide = converts ? like(grads, at::kFloat) : grads,
                          model = converts ? like(params, dtype) : Tensors(),
                          sums = like(random_list(sizes, at::kFloat, 0), at::kFloat),
                          steps = Tensors(params.size(), at::ones({}, params[0].options()))] {
    if (converts) at::_foreach_copy_(wide, grads);
    at::_fused_adagrad_(params, wide, sums, steps, kLr, /*lr_decay=*/0.0, kWeightDecay, kEps,
                        /*maximize=*/false);
    if (converts) at::_foreach_copy_(model, params);
  };
  const auto options = optim::FusedAdagradOptions(kLr).weight_decay(kWeightDecay).eps(kEps);
  // LibTorch has this one on the CPU only.
  return step_of<optim::FusedAdagrad>(sizes, dtype, options, {"sum"},
                                      sizes.device.is_cpu() ? Work(libtorchs) : Work());
}

// Parameters whose gradients are clipped to a norm that falls, so that each call has work to do.
class Clipped {
 public:
  explicit Clipped(const Tensors& grads) : params_(like(grads, grads[0].scalar_type())) {
    for (std::size_t i = 0; i < grads.size(); ++i)
      params_[i].requires_grad_().mutable_grad() = grads[i].clone();
  }

  template <typename Clip>
  double operator()(const Clip& clip) {
    max_norm_ *= 0.999;
    return clip(params_, max_norm_);
  }

  at::Tensor grad(std::size_t i) const { return params_[i].grad(); }
  double max_norm() const { return max_norm_; }

 private:
  Tensors params_;
  double max_norm_ = 100;
};

std::vector<Row> clipping(const Sizes& sizes, at::ScalarType dtype) {
  const Tensors grads = random_list(sizes, dtype);
  const auto ours = [](const Tensors& params, double max_norm) {
    return optim::clip_grad_norm_(params, max_norm);
  };
  const auto theirs = [](const Tensors& params, double max_norm) {
    return torch::nn::utils::clip_grad_norm_(params, max_norm);
  };
  double squares = 0;
  for (const at::Tensor& grad : grads)
    squares += grad.to(at::kDouble).square().sum().item<double>();
  const double norm = std::sqrt(squares);
  Clipped proof(grads);
  require(std::abs(proof(ours) - norm) <= 1e-9 * norm, "the norm of all gradients");
  for (std::size_t i = 0; i < grads.size(); ++i) {
    require_within(proof.grad(i), grads[i].to(at::kDouble) * (proof.max_norm() / (norm + 1e-6)),
                   {.share_of_largest = 1e-7, .roundings = 2}, "a clipped gradient");
  }
  return {{.moved = {moved_list("g", grads, 2)},
           .work = [ours, clipped = Clipped(grads)]() mutable { clipped(ours); },
           .libtorchs = [theirs, clipped = Clipped(grads)]() mutable { clipped(theirs); }}};
}

}  // namespace

void add_layerwise_steps(std::vector<Case>& cases, const Sizes& sizes) {
  const auto add = [&](const std::string& kernel, at::ScalarType dtype, const auto& make_rows) {
    cases.push_back({kernel, dtype, name_of_lists(sizes), [=] { return make_rows(sizes, dtype); }});
  };
  for (const auto dtype : {at::kBFloat16, at::kFloat}) {
    const std::string what = dtype == at::kFloat ? "" : ", fp32 masters";
    add("LAMB" + what, dtype, lamb);
    add("NovoGrad" + what, dtype, novograd);
    add("LARC" + what, dtype, larc);
    add("Adagrad" + what, dtype, adagrad);
  }
  for (const auto dtype : {at::kBFloat16, at::kHalf, at::kFloat})
    add("clip gradients", dtype, clipping);
}

}  // namespace semitone::bench

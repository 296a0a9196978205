// The work of a step on every gradient and parameter.
#include "benchmarks/kernels/tensor_lists.h"
#include "src/kernels/multi_tensor.h"
#include "src/kernels/multi_tensor_norm.h"
#include "src/kernels/multi_tensor_update.h"

#include <torch/torch.h>

#include <cmath>
#include <cstddef>
#include <limits>
#include <optional>

namespace semitone::bench {
namespace {

using kernels::Update;

constexpr double kLr = 1e-3;
constexpr double kMomentum = 0.9;
constexpr double kInvScale = 1.0 / 1024;  // 1 / loss scale
constexpr int kStep = 10;
// Tolerance for a few operations in fp32.
constexpr Tolerance kFp32{.share_of_largest = 1e-7, .roundings = 3};

std::vector<kernels::Unscale> items_of(const Tensors& grads, const Tensors& out) {
  std::vector<kernels::Unscale> items;
  items.reserve(grads.size());
  for (std::size_t i = 0; i < grads.size(); ++i) items.push_back({grads[i], out[i], {}});
  return items;
}

void prove_unscale(const Tensors& grads, at::ScalarType out_dtype) {
  const Tensors out = like(grads, out_dtype);
  at::Tensor found = at::zeros({1}, grads[0].device());
  kernels::multi_tensor_unscale(items_of(grads, out), kInvScale, found);
  require(found.item<double>() == 0, "no infinity in finite gradients");
  for (std::size_t i = 0; i < grads.size(); ++i)
    require_within(out[i], grads[i].to(at::kDouble) * kInvScale, {.share_of_largest = 1e-7},
                   "an unscaled gradient");
  const Tensors bad = like(grads, grads[0].scalar_type());
  bad.back()[-1] = std::numeric_limits<double>::quiet_NaN();
  kernels::multi_tensor_unscale(items_of(bad, out), kInvScale, found);
  require(found.item<double>() == 1, "a NaN that is found");
}

std::vector<Row> unscale(const Sizes& sizes, at::ScalarType dtype, bool in_place) {
  const Tensors grads = random_list(sizes, dtype, 1 / kInvScale);
  prove_unscale(grads, in_place ? dtype : at::kFloat);
  const Tensors out = in_place ? grads : like(grads, at::kFloat);
  // Repeated in place, so the scale is 1.
  const auto work = [items = items_of(grads, out), found = at::zeros({1}, sizes.device)]() mutable {
    kernels::multi_tensor_unscale(items, 1, found);
  };
  const auto libtorchs = [grads, in_place, found = at::zeros({1}, sizes.device),
                          one = at::ones({1}, sizes.device)]() mutable {
    at::_amp_foreach_non_finite_check_and_unscale_(in_place ? grads : like(grads, at::kFloat),
                                                   found, one);
  };
  return {{.moved = in_place ? std::vector{moved_list("g", grads, 2)}
                             : std::vector{moved_list("g", grads), moved_list("y", out)},
           .work = work,
           .libtorchs = libtorchs}};
}

std::vector<Row> norm(const Sizes& sizes, at::ScalarType dtype) {
  const Tensors grads = random_list(sizes, dtype);
  const auto norms = kernels::multi_tensor_norms(grads, 2);
  for (std::size_t i = 0; i < grads.size(); ++i) {
    const auto want = kernels::ref::norm(grads[i], 2).item<double>();
    require(std::abs(norms[i] - want) <= 1e-10 * want, "the norm by its definition");
  }
  return {{.moved = {moved_list("x", grads)},
           .work = [grads] { kernels::multi_tensor_norms(grads, 2); },
           .libtorchs = [grads] { at::_foreach_norm(grads, 2); }}};
}

// The memory layout of parameters and their state.
struct Layout {
  at::ScalarType grad;
  bool copy = false;        // fp32 masters, which a model in the gradients' dtype is rounded from
  bool split = false;       // bf16 parameters with the lower halves of their masters
  bool bf16_state = false;  // state in bf16
};

// Parameters, with as many state tensors as a rule needs; LibTorch's side has them in fp32.
struct Parameters {
  Tensors params;
  Tensors lows;
  Tensors grads;
  Tensors copies;
  std::vector<Tensors> state;

  std::vector<Update> items() const {
    std::vector<Update> all;
    for (std::size_t i = 0; i < params.size(); ++i) {
      Update item{.param = params[i], .low = {}, .grad = grads[i], .copy = {}, .state = {}};
      if (!lows.empty()) item.low = lows[i];
      if (!copies.empty()) item.copy = copies[i];
      for (std::size_t which = 0; which < state.size(); ++which)
        item.state[which] = state[which][i];
      all.push_back(item);
    }
    return all;
  }

  // fp32 numbers, of split masters too.
  at::Tensor param(std::size_t i) const {
    return lows.empty() ? params[i] : kernels::join_split_master(params[i], lows[i]);
  }

  std::vector<Moved> all_moved() const {
    std::vector<Moved> all{moved_list("g", grads), moved_list("p", params, 2)};
    if (!lows.empty()) all.push_back(moved_list("low", lows, 2));
    const char* const names[] = {"m", "v"};
    for (std::size_t which = 0; which < state.size(); ++which)
      all.push_back(moved_list(names[which], state[which], 2));
    if (!copies.empty()) all.push_back(moved_list("copy", copies));
    return all;
  }
};

Parameters make(const Sizes& sizes, const Layout& layout, std::size_t states) {
  Parameters made;
  const Tensors values = random_list(sizes, at::kFloat);
  made.grads = random_list(sizes, layout.grad);
  made.params = like(values, layout.split ? at::kBFloat16 : at::kFloat);
  if (layout.split) {
    made.lows = like(values, at::kShort);
    for (std::size_t i = 0; i < values.size(); ++i)
      kernels::split_master(values[i], made.params[i], made.lows[i]);
  }
  if (layout.copy) made.copies = like(values, layout.grad);
  // Like moments of such gradients: no first moment far exceeds the root of its second.
  const auto state = layout.bf16_state ? at::kBFloat16 : at::kFloat;
  made.state.push_back(random_list(sizes, state, 0.1 * kInvScale));
  if (states > 1) {
    made.state.push_back({});
    for (std::int64_t i = 0; i < sizes.tensors; ++i)
      made.state[1].push_back(
          ((torch::rand({sizes.elements}, sizes.device) + 0.5) * kInvScale * kInvScale).to(state));
  }
  return made;
}

// Compares a step on copies with the reference in fp64.
template <typename Step, typename Definition>
void prove_step(const Parameters& of, const Step& step, const Definition& definition) {
  Parameters ours;
  ours.params = like(of.params, of.params[0].scalar_type());
  if (!of.lows.empty()) ours.lows = like(of.lows, at::kShort);
  if (!of.copies.empty()) ours.copies = like(of.copies, of.copies[0].scalar_type());
  ours.grads = of.grads;
  for (const Tensors& state : of.state) ours.state.push_back(like(state, state[0].scalar_type()));
  step(ours.items());
  for (std::size_t i = 0; i < of.params.size(); ++i) {
    Update exact{.param = of.param(i).to(at::kDouble),
                 .low = {},
                 .grad = of.grads[i].to(at::kDouble),
                 .copy = {},
                 .state = {}};
    for (std::size_t which = 0; which < of.state.size(); ++which)
      exact.state[which] = of.state[which][i].to(at::kDouble);
    definition(exact);
    require_within(ours.param(i), exact.param, kFp32, "a parameter");
    for (std::size_t which = 0; which < of.state.size(); ++which) {
      const at::Tensor& state = ours.state[which][i];
      // bf16 state is rounded up or down.
      const Tolerance tolerance = state.scalar_type() == at::kBFloat16 ? Tolerance{1e-7, 2} : kFp32;
      require_within(state, exact.state[which], tolerance, "the optimizer's state");
    }
    if (!ours.copies.empty()) {
      require(at::equal(ours.copies[i], ours.params[i].to(ours.copies[i].scalar_type())),
              "a model that is its masters rounded");
    }
  }
}

// A loss has a scale in fp16 only.
double inv_scale_of(at::ScalarType grad) {
  return grad == at::kHalf ? kInvScale : 1;
}

// The work of a program without a fused step around LibTorch's optimizer: gradients to fp32, step,
// rounding. LibTorch's step divides by the scale itself.
template <typename Step>
Work around(const Sizes& sizes, const Layout& layout, std::size_t states, const Step& step) {
  const Layout plain{.grad = layout.grad, .copy = layout.grad != at::kFloat};
  const Parameters of = make(sizes, plain, states);
  std::optional<at::Tensor> scale;
  if (plain.grad == at::kHalf) scale = at::full({1}, 1 / kInvScale, of.params[0].options());
  const Tensors wide = plain.copy ? like(of.grads, at::kFloat) : of.grads;
  return [plain, step, of, scale, wide] {
    if (plain.copy) at::_foreach_copy_(wide, of.grads);
    step(of, wide, scale);
    if (plain.copy) at::_foreach_copy_(of.copies, of.params);
  };
}

std::vector<Row> adam(const Sizes& sizes, const Layout& layout) {
  constexpr double kBeta1 = 0.9;
  constexpr double kBeta2 = 0.999;
  constexpr double kDecay = 0.1;
  const kernels::AdamRule rule{.grad_scale = inv_scale_of(layout.grad),
                               .decay_factor = 1 - kLr * kDecay,
                               .beta1 = kBeta1,
                               .beta2 = kBeta2,
                               .step_size = kLr / (1 - std::pow(kBeta1, kStep)),
                               .bias_correction2_sqrt = std::sqrt(1 - std::pow(kBeta2, kStep))};
  const Parameters of = make(sizes, layout, 2);
  const std::vector<kernels::AdamRule> rules(of.params.size(), rule);
  prove_step(
      of, [&](const std::vector<Update>& items) { kernels::multi_tensor_update(items, rules); },
      [&](const Update& item) { kernels::ref::update(item, rule); });
  const Tensors steps(of.params.size(), at::full({}, static_cast<double>(kStep),
                                                 at::dtype(at::kFloat).device(sizes.device)));
  const auto libtorchs = [steps](const Parameters& theirs, const Tensors& grads,
                                 const std::optional<at::Tensor>& scale) {
    at::_fused_adamw_(theirs.params, grads, theirs.state[0], theirs.state[1], {}, steps, kLr,
                      kBeta1, kBeta2, kDecay, 1e-8, /*amsgrad=*/false, /*maximize=*/false, scale);
  };
  return {{.moved = of.all_moved(),
           .work = [items = of.items(), rules] { kernels::multi_tensor_update(items, rules); },
           .libtorchs = around(sizes, layout, 2, libtorchs)}};
}

std::vector<Row> sgd(const Sizes& sizes, const Layout& layout) {
  constexpr double kDecay = 1e-4;
  const kernels::SgdRule rule{.grad_scale = inv_scale_of(layout.grad),
                              .weight_decay = kDecay,
                              .momentum = kMomentum,
                              .lr = kLr};
  const Parameters of = make(sizes, layout, 1);
  const std::vector<kernels::SgdRule> rules(of.params.size(), rule);
  prove_step(
      of, [&](const std::vector<Update>& items) { kernels::multi_tensor_update(items, rules); },
      [&](const Update& item) { kernels::ref::update(item, rule); });
  const auto libtorchs = [](const Parameters& theirs, const Tensors& grads,
                            const std::optional<at::Tensor>& scale) {
    at::_fused_sgd_(theirs.params, grads, theirs.state[0], kDecay, kMomentum, kLr,
                    /*dampening=*/0.0, /*nesterov=*/false, /*maximize=*/false,
                    /*is_first_step=*/false, scale);
  };
  return {{.moved = of.all_moved(),
           .work = [items = of.items(), rules] { kernels::multi_tensor_update(items, rules); },
           .libtorchs = around(sizes, layout, 1, libtorchs)}};
}

}  // namespace

void add_gradients_and_steps(std::vector<Case>& cases, const Sizes& sizes) {
  const auto add = [&](const std::string& kernel, at::ScalarType dtype, const auto& make_rows) {
    cases.push_back({kernel, dtype, name_of_lists(sizes), make_rows});
  };
  const auto dtypes = {at::kBFloat16, at::kHalf, at::kFloat};
  for (const auto dtype : dtypes)
    add("unscale and check", dtype, [=] { return unscale(sizes, dtype, true); });
  for (const auto dtype : {at::kBFloat16, at::kHalf})
    add("unscale into float32", dtype, [=] { return unscale(sizes, dtype, false); });
  for (const auto dtype : dtypes) add("norm", dtype, [=] { return norm(sizes, dtype); });
  for (const auto dtype : dtypes) {
    const Layout layout{.grad = dtype, .copy = dtype != at::kFloat};
    const std::string what = layout.copy ? ", fp32 masters" : "";
    add("AdamW" + what, dtype, [=] { return adam(sizes, layout); });
    add("SGD, momentum" + what, dtype, [=] { return sgd(sizes, layout); });
  }
  for (const bool bf16_state : {false, true}) {
    const Layout layout{.grad = at::kBFloat16, .split = true, .bf16_state = bf16_state};
    add(bf16_state ? "AdamW, split, bf16 state" : "AdamW, split masters", at::kBFloat16,
        [=] { return adam(sizes, layout); });
    add(bf16_state ? "SGD, split, bf16 state" : "SGD, split masters", at::kBFloat16,
        [=] { return sgd(sizes, layout); });
  }
}

}  // namespace semitone::bench

#include "tests/support/cuda_cases.h"

#include "semitone/core/dtype.h"
#include "src/kernels/batch_norm.h"
#include "src/kernels/cross_entropy.h"
#include "src/kernels/dropout.h"
#include "src/kernels/gelu.h"
#include "src/kernels/layer_norm.h"
#include "src/kernels/max_pool.h"
#include "src/kernels/multi_tensor.h"
#include "src/kernels/multi_tensor_lamb.h"
#include "src/kernels/multi_tensor_norm.h"
#include "src/kernels/multi_tensor_update.h"
#include "src/nn/batch_norm.h"
#include "tests/support/all_rules.h"
#include "tests/support/tolerance.h"

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>

namespace semitone::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

using Results = std::vector<at::Tensor>;

// The places of tensors in memory: the number of elements between an aligned address and a tensor's
// first one. Kernels with accesses of 16 bytes have other loops where the tensors do not agree.
enum class Places : std::int64_t { differ = -1, aligned = 0, three_before_aligned = 5 };

// Makes the same inputs on each device.
class Inputs {
 public:
  Inputs(at::Device device, at::ScalarType dtype, Places places)
      : device_(device), dtype_(dtype), places_(places) {
    torch::manual_seed(7);
  }

  at::Tensor random(at::IntArrayRef shape) const { return put(torch::randn(shape), dtype_); }
  at::Tensor random(at::IntArrayRef shape, at::ScalarType dtype) const {
    return put(torch::randn(shape), dtype);
  }
  at::Tensor channels_last(at::IntArrayRef shape) const {
    return put(torch::randn(shape).contiguous(at::MemoryFormat::ChannelsLast), dtype_);
  }
  // With infinities and NaNs at three places.
  at::Tensor wild(at::IntArrayRef shape) const {
    at::Tensor tensor = torch::randn(shape);
    at::Tensor flat = tensor.view(-1);
    flat[0] = kNan;
    flat[flat.numel() / 2] = kInfinity;
    flat[flat.numel() - 1] = -kInfinity;
    return put(tensor, dtype_);
  }
  at::Tensor fp64(std::int64_t channels) const { return random({channels}, at::kDouble); }
  at::Tensor put(const at::Tensor& values) const { return put(values, values.scalar_type()); }
  at::Device device() const { return device_; }
  at::ScalarType dtype() const { return dtype_; }

 private:
  // The same values.
  at::Tensor put(const at::Tensor& values, at::ScalarType dtype) const {
    const std::int64_t offset =
        places_ == Places::differ ? made_++ % 7 % 4 : static_cast<std::int64_t>(places_);
    const at::Tensor memory =
        at::empty({values.numel() + offset}, at::TensorOptions(device_).dtype(dtype));
    return memory.as_strided(values.sizes(), values.strides(), offset).copy_(values);
  }

  mutable int made_ = 0;
  at::Device device_;
  at::ScalarType dtype_;
  Places places_;
};

Results on_cpu(Results results) {
  for (at::Tensor& result : results)
    if (result.defined()) result = result.cpu();
  return results;
}

// More tensors than a launch takes, empty ones among them, one of several blocks of threads.
std::vector<std::int64_t> sizes() {
  std::vector<std::int64_t> all{0, 1, 31, 32, 33, 255, 256, 257, 8192, 8193, 20011};
  for (std::int64_t size = 0; size < 60; ++size) all.push_back(size);
  return all;
}

std::vector<kernels::Update> updates(const Inputs& inputs, std::size_t states, bool split,
                                     bool bf16_state) {
  std::vector<kernels::Update> items;
  for (const std::int64_t size : sizes()) {
    kernels::Update item;
    item.seed = 0x12345678;
    item.grad = inputs.random({size});
    item.param = inputs.random({size}, split ? at::kBFloat16 : at::kFloat);
    if (split) {
      item.low = inputs.put(at::zeros({size}, item.param.options().dtype(at::kShort)));
      kernels::split_master(inputs.random({size}, at::kFloat), item.param, item.low);
    } else {
      item.copy = inputs.random({size}, at::kBFloat16);
    }
    for (std::size_t k = 0; k < states; ++k) {
      item.state[k] = inputs.random({size}, at::kFloat);
      if (k > 0) item.state[k].abs_();
      if (bf16_state) item.state[k] = inputs.put(item.state[k].to(at::kBFloat16));
    }
    items.push_back(item);
  }
  items.back().grad[0] = kNan;
  items[10].grad[20010] = kInfinity;
  // Idle state, part of it below the smallest normal number.
  kernels::Update& idle = items[9];
  idle.grad.zero_();
  idle.param.zero_();
  if (split) idle.low.zero_();
  for (std::size_t k = 0; k < states; ++k) idle.state[k].mul_(1e-38);
  return items;
}

Results results_of(const std::vector<kernels::Update>& items) {
  Results results;
  for (const kernels::Update& item : items) {
    results.insert(results.end(), {item.param, item.low, item.copy});
    results.insert(results.end(), item.state.begin(), item.state.end());
  }
  return on_cpu(results);
}

class Cases {
 public:
  void add(const std::string& name, at::ScalarType dtype, double relative,
           std::function<Results(const Inputs&)> run) {
    cases_.push_back({name + ", " + dtype_name(dtype),
                      [=](at::Device device) {
                        const at::NoGradGuard no_grad;
                        Results results;
                        for (const Places places :
                             {Places::differ, Places::aligned, Places::three_before_aligned}) {
                          const Results more = on_cpu(run(Inputs(device, dtype, places)));
                          results.insert(results.end(), more.begin(), more.end());
                        }
                        return results;
                      },
                      relative});
  }

  template <typename Rule>
  void add_update(const std::string& name, at::ScalarType grad, std::size_t states,
                  const Rule& rule) {
    add_update(name, grad, states, std::is_same_v<Rule, kernels::AdamRule>,
               [=](const std::vector<kernels::Update>& items) {
                 kernels::multi_tensor_update(items, std::vector<Rule>(items.size(), rule));
               });
  }

  void add_update(const std::string& name, at::ScalarType grad, std::size_t states,
                  bool with_bf16_state,
                  const std::function<void(const std::vector<kernels::Update>&)>& kernel) {
    for (const bool split : {false, true}) {
      for (const bool bf16_state : {false, true}) {
        if (bf16_state && !(with_bf16_state && split)) continue;
        add(name + (split ? ", split" : "") + (bf16_state ? ", bf16 state" : ""), grad, 0,
            [=](const Inputs& inputs) {
              const auto items = updates(inputs, states, split, bf16_state);
              kernel(items);
              return results_of(items);
            });
      }
    }
  }

  std::vector<CudaCase> take() { return std::move(cases_); }

 private:
  std::vector<CudaCase> cases_;
};

void add_multi_tensor(Cases& cases, at::ScalarType dtype) {
  cases.add("unscale", dtype, 0, [](const Inputs& inputs) {
    Results results;
    for (const bool bad : {false, true}) {
      std::vector<kernels::Unscale> items;
      for (const std::int64_t size : sizes()) {
        const at::Tensor grad = inputs.random({size});
        items.push_back(
            {grad, inputs.put(at::zeros({size}, grad.options().dtype(at::kFloat))), {}});
        items.push_back({inputs.random({size}), inputs.random({size}), inputs.random({size})});
      }
      if (bad) items[20].grad[20010] = -kInfinity;
      items[19].addend[8192] = kNan;  // known before
      at::Tensor found_inf = at::zeros({}, at::TensorOptions(inputs.device()));
      kernels::multi_tensor_unscale(items, 0.37F, found_inf);
      for (const kernels::Unscale& item : items) results.push_back(item.out);
      results.push_back(found_inf);
    }
    return results;
  });
  for (const double p : {2.0, kInfinity}) {
    cases.add(p == 2 ? "norms" : "largest magnitudes", dtype,
              p == 2 ? reduction_tolerance(at::kDouble, 20011) : 0, [=](const Inputs& inputs) {
                std::vector<at::Tensor> tensors;
                for (const std::int64_t size : sizes()) tensors.push_back(inputs.random({size}));
                tensors.push_back(inputs.wild({77}));
                return Results{at::tensor(kernels::multi_tensor_norms(tensors, p), at::kDouble)};
              });
  }
  kernels::AdamRule adam{.grad_scale = 0.7, .weight_decay = 0.1, .decay_factor = 0.99, .eps = 1e-3};
  adam.step_size = 0.02;
  adam.bias_correction2_sqrt = 0.3;
  cases.add_update("adam", dtype, 2, adam);
  cases.add_update("amsgrad", dtype, 3, adam);
  kernels::SgdRule sgd{.grad_scale = 0.7, .weight_decay = 0.1, .trust_ratio = 0.9, .momentum = 0.8};
  sgd.nesterov = true;
  cases.add_update("sgd", dtype, 1, sgd);
  cases.add_update(
      "novograd", dtype, 1,
      kernels::NovoGradRule{.grad_scale = 0.7, .correction = 1.1, .decoupled_weight_decay = 0.1});
  cases.add_update("adagrad", dtype, 1,
                   kernels::AdagradRule{.grad_scale = 0.7, .weight_decay = 0.1});
  const kernels::LambRule lamb{
      .grad_scale = 0.7, .decoupled_weight_decay = 0.1, .inv_bias_correction2 = 3};
  cases.add_update("lamb, parameters", dtype, 2, lamb);
  cases.add_update("lamb, moments", dtype, 2, /*with_bf16_state=*/false,
                   [=](const std::vector<kernels::Update>& items) {
                     kernels::multi_tensor_lamb_moments(
                         items, std::vector<kernels::LambRule>(items.size(), lamb));
                   });
  for_all_rules([&]<typename Rule>(Rule rule) {
    rule.weight_decay = 0.05;
    cases.add_update(std::string(Rule::kName) + " with defaults", dtype, Rule::kStates, rule);
  });
  cases.add("lamb, norms", dtype, reduction_tolerance(at::kDouble, 20011),
            [=](const Inputs& inputs) {
              const auto items = updates(inputs, 2, false, false);
              std::vector<double> norms;
              for (const auto& [param, update] : kernels::multi_tensor_lamb_moments(
                       items, std::vector<kernels::LambRule>(items.size(), lamb))) {
                norms.insert(norms.end(), {param, update});
              }
              return Results{at::tensor(norms, at::kDouble)};
            });
}

// Planes, rows and vectors; one of them with more units than a part has, and one with many
// channels.
std::vector<at::Tensor> batches(const Inputs& inputs) {
  return {inputs.random({3, 5, 7, 9}),          inputs.random({70, 3, 33, 35}),
          inputs.random({2, 3, 8, 16}),         inputs.random({4, 5, 2, 2}),
          inputs.channels_last({3, 40, 11, 7}), inputs.channels_last({2, 24, 5, 5}),
          inputs.random({2, 3, 70, 71}),        inputs.random({6, 40}),
          inputs.channels_last({2, 5, 7, 9}),   inputs.channels_last({3, 37, 23, 29}),
          inputs.channels_last({1, 300, 2, 3}), inputs.random({8, 3, 7, 7}),
          inputs.random({4, 5, 14, 14}),        inputs.random({8, 3, 33, 35})};
}

void add_batch_norm(Cases& cases, at::ScalarType dtype) {
  const double sums = reduction_tolerance(at::kFloat, 80850);
  cases.add("moments", dtype, sums, [](const Inputs& inputs) {
    Results results;
    for (const at::Tensor& input : batches(inputs)) {
      const auto [mean, m2] = kernels::moments(input.mul(3).add(2));
      results.insert(results.end(), {mean, m2});
    }
    return results;
  });
  cases.add("normalize", dtype, 0, [](const Inputs& inputs) {
    Results results;
    for (at::Tensor input : batches(inputs)) {
      const std::int64_t channels = input.size(1);
      input.select(0, 0).select(0, 1).fill_(kNan);
      const at::Tensor residual = at::flip(input, {0});
      for (const bool extra : {false, true}) {
        results.push_back(kernels::normalize(input, inputs.fp64(channels), inputs.fp64(channels),
                                             inputs.fp64(channels), extra ? residual : at::Tensor(),
                                             extra));
      }
    }
    return results;
  });
  cases.add("gradient sums", dtype, sums, [](const Inputs& inputs) {
    Results results;
    for (const at::Tensor& input : batches(inputs)) {
      const auto [sum, centred] =
          kernels::gradient_sums(at::flip(input, {0}), input, inputs.fp64(input.size(1)));
      results.insert(results.end(), {sum, centred});
    }
    return results;
  });
  cases.add("gradient of input", dtype, 0, [](const Inputs& inputs) {
    Results results;
    for (const at::Tensor& input : batches(inputs)) {
      const std::int64_t channels = input.size(1);
      results.push_back(kernels::gradient_of_input(at::flip(input, {0}), input,
                                                   inputs.fp64(channels), inputs.fp64(channels),
                                                   inputs.fp64(channels), inputs.fp64(channels)));
    }
    return results;
  });
}

// A layer with its gradients and running statistics.
Results layer_of(const Inputs& inputs, const at::Tensor& input, bool relu, bool with_residual) {
  const at::AutoGradMode recorded(true);
  const std::int64_t channels = input.size(1);
  nn::BatchNorm layer{.component = "test",
                      .weight = inputs.random({channels}, at::kFloat).requires_grad_(),
                      .bias = inputs.random({channels}, at::kFloat).requires_grad_(),
                      .running_mean = inputs.random({channels}, at::kFloat),
                      .running_var = inputs.random({channels}, at::kFloat).abs_(),
                      .momentum = 0.3,
                      .eps = 1e-5,
                      .relu = relu};
  const at::Tensor x = input.mul(3).add(2).requires_grad_();
  if (with_residual) layer.residual = at::flip(input, {0}).requires_grad_();
  const at::Tensor output = nn::batch_norm(x, layer);
  output.backward(at::flip(input, {0}));
  Results results{output.detach(),   x.grad(),           layer.weight.grad(),
                  layer.bias.grad(), layer.running_mean, layer.running_var};
  if (with_residual) results.push_back(layer.residual.grad());
  return results;
}

void add_batch_norm_layer(Cases& cases, at::ScalarType dtype) {
  const double tolerance = reduction_tolerance(at::kFloat, 80850) + rounding_tolerance(dtype, 2);
  for (const bool relu : {false, true}) {
    for (const bool with_residual : {false, true}) {
      cases.add(c10::str("batch norm", relu ? " and relu" : "", with_residual ? " of a sum" : ""),
                dtype, tolerance, [=](const Inputs& inputs) {
                  Results results;
                  for (const at::Tensor& input :
                       {inputs.random({8, 3, 7, 7}), inputs.channels_last({3, 40, 11, 7}),
                        inputs.random({3, 5, 7, 9}), inputs.random({6, 40})}) {
                    const Results more = layer_of(inputs, input, relu, with_residual);
                    results.insert(results.end(), more.begin(), more.end());
                  }
                  return results;
                });
    }
  }
}

void add_rows(Cases& cases, at::ScalarType dtype) {
  // 16 bits are rounded once on each side. fp32: three times, since the sums behind an element
  // round too.
  const double tolerance =
      is_16_bits(dtype) ? rounding_tolerance(dtype, 2) : 3 * pointwise_tolerance(dtype);
  const double sums = reduction_tolerance(at::kFloat, 3000);
  for (const bool centred : {false, true}) {
    // Rows that a warp holds, a block holds, or none; of whole chunks and not.
    for (const auto& [columns, count] :
         std::initializer_list<std::pair<std::int64_t, std::int64_t>>{{7, 301},
                                                                      {31, 301},
                                                                      {96, 301},
                                                                      {520, 37},
                                                                      {1030, 37},
                                                                      {2051, 5},
                                                                      {4160, 9},
                                                                      {8200, 5}}) {
      cases.add(c10::str(centred ? "layer" : "RMS", " norm of ", columns), dtype, sums + tolerance,
                [=, columns = columns, count = count](const Inputs& inputs) {
                  const at::Tensor input = inputs.random({count, columns}).add_(1);
                  const at::Tensor grad = inputs.random({count, columns});
                  kernels::LayerNorm norm{columns, centred, 1e-5, inputs.random({columns}),
                                          centred ? inputs.random({columns}) : at::Tensor()};
                  const auto rows = kernels::layer_norm(input, norm, true);
                  const auto gradients = kernels::layer_norm_backward(
                      grad, input, rows.mean, rows.rstd, norm, {true, true, centred});
                  return Results{rows.output,     rows.mean,        rows.rstd,
                                 gradients.input, gradients.weight, gradients.bias};
                });
    }
  }
  for (const auto form : {kernels::GeluForm::erf, kernels::GeluForm::tanh}) {
    for (const bool with_bias : {false, true}) {
      cases.add(
          c10::str("gelu ", form == kernels::GeluForm::erf ? "erf" : "tanh",
                   with_bias ? " with bias" : ""),
          dtype, sums + tolerance, [=](const Inputs& inputs) {
            Results results;
            for (const std::int64_t columns : {45, 48}) {
              const at::Tensor input = inputs.random({333, columns}).mul_(2);
              const at::Tensor grad = inputs.random({333, columns});
              const at::Tensor bias = with_bias ? inputs.random({columns}) : at::Tensor();
              const auto gradients = kernels::gelu_backward(grad, input, bias, form, with_bias);
              results.insert(results.end(),
                             {kernels::gelu(input, bias, form), gradients.input, gradients.bias});
            }
            return results;
          });
    }
  }
  for (const double smoothing : {0.0, 0.1}) {
    cases.add(
        c10::str("cross entropy, smoothing ", smoothing), dtype, sums + tolerance,
        [=](const Inputs& inputs) {
          Results results;
          for (const std::int64_t classes : {2, 33, 1500}) {
            const at::Tensor logits = inputs.random({37, classes}).mul_(4);
            at::Tensor target = torch::randint(classes, {37});
            target[5] = -100;
            const kernels::ClassTargets targets{target.to(inputs.device()), -100, smoothing};
            const auto losses = kernels::cross_entropy(logits, targets);
            const at::Tensor grad = inputs.random({37}, at::kFloat);
            results.insert(
                results.end(),
                {losses.loss, losses.max, losses.inv_sum,
                 kernels::cross_entropy_gradient(logits, targets, losses, grad, false),
                 kernels::cross_entropy_gradient(logits.clone(), targets, losses, grad[0], true)});
          }
          return results;
        });
  }
}

void add_elements(Cases& cases, at::ScalarType dtype) {
  cases.add("dropout", dtype, 0, [](const Inputs& inputs) {
    Results results;
    const kernels::Dropout dropout(0.3, {.seed = 0x123456789ABCDEF, .offset = 5});
    for (const std::int64_t size : {1, 127, 128, 129, 5000}) {
      const at::Tensor input = inputs.wild({size});
      for (const auto to : {input.scalar_type(), at::kFloat}) {
        for (const at::Tensor& residual : {at::Tensor(), inputs.random({size}, to)})
          results.push_back(kernels::dropout(input, dropout, to, residual));
      }
    }
    return results;
  });
  cases.add("maximum pooling", dtype, 0, [](const Inputs& inputs) {
    Results results;
    for (const std::int64_t channels : {2, 33}) {
      at::Tensor input = inputs.channels_last({3, channels, 13, 17});
      input.select(2, 4).select(2, 5).fill_(kNan);
      input.select(2, 7).fill_(1);  // equal ones
      for (const kernels::MaxPool& pool :
           {kernels::MaxPool{{2, 2}, {2, 2}, {0, 0}}, kernels::MaxPool{{3, 3}, {2, 2}, {1, 1}},
            kernels::MaxPool{{3, 2}, {1, 3}, {1, 0}}}) {
        const auto pooled = kernels::max_pool2d(input, pool, true);
        const at::Tensor grad = inputs.random(pooled.output.sizes());
        results.insert(
            results.end(),
            {pooled.output, pooled.places, kernels::max_pool2d(input, pool, false).output,
             kernels::max_pool2d_backward(grad, pooled.places, input, pool)});
      }
    }
    return results;
  });
}

}  // namespace

std::vector<CudaCase> cuda_cases() {
  Cases cases;
  for (const auto dtype : {at::kFloat, at::kHalf, at::kBFloat16}) {
    add_multi_tensor(cases, dtype);
    add_batch_norm(cases, dtype);
    add_batch_norm_layer(cases, dtype);
    add_rows(cases, dtype);
    add_elements(cases, dtype);
  }
  return cases.take();
}

}  // namespace semitone::test

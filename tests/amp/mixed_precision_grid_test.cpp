// Apex's two big grids: several models, losses and optimizers with overflows at every place, and
// param groups that are added later, against plain fp32 training.

#include "semitone/amp/initialize.h"
#include "semitone/core/dtype.h"
#include "tests/support/levels.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace semitone::amp::mixed_precision_grid_test {
namespace {

using c10::ScalarType;
using test::kLevels;
using test::near;
using test::pointwise_tolerance;
using test::reduction_tolerance;
using test::same_bits;

constexpr float kInf = std::numeric_limits<float>::infinity();

// Apex's model: an elementwise product of the input with two weights, of which one stays in fp32.
struct ToyImpl : torch::nn::Module {
  explicit ToyImpl(float unique) {
    full = register_parameter("full", torch::tensor({unique, unique + 1}));
    low = register_parameter("low", torch::tensor({unique + 1, unique + 2}));
  }
  at::Tensor forward(const at::Tensor& x) {
    return ((x.to(torch::kFloat) * full) * low.to(torch::kFloat)).sum();
  }
  at::Tensor full;
  at::Tensor low;
};
TORCH_MODULE(Toy);

enum class Zeroing { none, model, optimizer, mixed };
constexpr Zeroing kZeroings[] = {Zeroing::none, Zeroing::model, Zeroing::optimizer, Zeroing::mixed};

// The models of each loss, and those of each optimizer.
struct Shape {
  const char* name;
  std::size_t models;
  std::vector<std::vector<std::size_t>> losses;
  std::vector<std::vector<std::size_t>> optimizers;
};

std::vector<Shape> shapes() {
  return {{"2Models2Losses1Optimizer", 2, {{0}, {1}}, {{0, 1}}},
          {"3Models2Losses1Optimizer", 3, {{0, 2}, {1, 2}}, {{0, 1, 2}}},
          {"2Models2Losses2Optimizers", 2, {{0}, {1}}, {{0}, {1}}},
          {"3Models2Losses2Optimizers", 3, {{0, 2}, {1, 2}}, {{0}, {1, 2}}}};
}

struct Scalers {
  const char* name;
  std::int64_t count;
  detail::LossScale scale;
};

std::vector<Scalers> scalers() {
  return {{"one of 4", 1, 4.0},
          {"two of 16", 2, 16.0},
          {"one that moves", 1, "dynamic"},
          {"two that move", 2, "dynamic"},
          {"one of 1", 1, 1.0}};
}

struct Injection {
  int iteration;
  std::size_t loss;
  std::size_t model;
  bool low;  // into the gradient of the parameter that is 16-bit at O2 and O3
};

// Never, and every place that backward reaches.
std::vector<std::optional<Injection>> injections(const Shape& shape) {
  std::vector<std::optional<Injection>> all{std::nullopt};
  for (const int iteration : {0, 1}) {
    for (std::size_t loss = 0; loss < shape.losses.size(); ++loss) {
      for (const std::size_t model : shape.losses[loss]) {
        for (const bool low : {false, true}) all.push_back(Injection{iteration, loss, model, low});
      }
    }
  }
  return all;
}

// The models and optimizers of a shape.
struct Nets {
  explicit Nets(const Shape& shape) {
    for (std::size_t i = 0; i < shape.models; ++i) models.emplace_back(static_cast<float>(i + 1));
    for (const auto& owned : shape.optimizers) {
      std::vector<torch::optim::OptimizerParamGroup> groups;
      for (const std::size_t model : owned) groups.emplace_back(models[model]->parameters());
      optimizers.push_back(std::make_unique<torch::optim::SGD>(
          groups, torch::optim::SGDOptions(0.125).momentum(0.25)));
    }
  }
  std::vector<Toy> models;
  std::vector<std::unique_ptr<torch::optim::SGD>> optimizers;
};

// Whether a loss trains a model of an optimizer.
bool concerns(const Shape& shape, std::size_t loss, std::size_t optimizer) {
  for (const std::size_t model : shape.losses[loss]) {
    const auto& owned = shape.optimizers[optimizer];
    if (std::find(owned.begin(), owned.end(), model) != owned.end()) return true;
  }
  return false;
}

at::Tensor input(int iteration) {
  return torch::full({2}, iteration % 2 == 0 ? 1.0F : 0.5F);
}

constexpr int kIterations = 3;

// Gradients of every optimizer's parameters at every iteration, and their final values, in fp32. An
// optimizer whose step is skipped gets nothing from that iteration.
struct Reference {
  Reference(const Shape& shape, const std::optional<Injection>& injection) : nets(shape) {
    for (int i = 0; i < kIterations; ++i) {
      for (Toy& model : nets.models) model->zero_grad();
      for (const auto& loss : shape.losses) {
        at::Tensor sum = torch::zeros({});
        for (const std::size_t model : loss) sum = sum + nets.models[model]->forward(input(i));
        sum.backward();
      }
      for (std::size_t k = 0; k < nets.optimizers.size(); ++k) {
        grads.emplace_back();
        for (const auto& group : nets.optimizers[k]->param_groups()) {
          for (const auto& p : group.params()) grads.back().push_back(p.grad().clone());
        }
        if (injection.has_value() && injection->iteration == i &&
            concerns(shape, injection->loss, k)) {
          continue;
        }
        nets.optimizers[k]->step();
      }
    }
  }
  Nets nets;
  std::vector<std::vector<at::Tensor>> grads;  // iteration * optimizers + optimizer
};

void zero(Zeroing way, Nets& nets, MixedPrecision& mixed) {
  switch (way) {
    case Zeroing::none:
      for (Toy& model : nets.models) {
        for (const auto& p : model->parameters()) p.mutable_grad().reset();
      }
      break;
    case Zeroing::model:
      for (Toy& model : nets.models) model->zero_grad();
      break;
    case Zeroing::optimizer:
      for (auto& optimizer : nets.optimizers) optimizer->zero_grad();
      break;
    case Zeroing::mixed:
      for (auto& optimizer : nets.optimizers) mixed.zero_grad(*optimizer);
      break;
  }
}

void run(const Shape& shape, const Options& options, const Scalers& scaling, Zeroing way,
         const std::optional<Injection>& injection, const Reference& reference, double allowed) {
  Nets nets(shape);
  OptimizerRefs all;
  for (auto& optimizer : nets.optimizers) all.emplace_back(*optimizer);
  std::vector<Model> models(nets.models.begin(), nets.models.end());
  auto mixed = initialize(models, all, options);
  int overflows[2] = {0, 0};

  for (int i = 0; i < kIterations; ++i) {
    zero(way, nets, mixed);
    const bool injected_now = injection.has_value() && injection->iteration == i;
    for (std::size_t loss = 0; loss < shape.losses.size(); ++loss) {
      at::Tensor sum = torch::zeros({});
      for (const std::size_t model : shape.losses[loss]) {
        sum = sum + mixed.forward(nets.models[model], input(i));
      }
      OptimizerRefs named;
      for (std::size_t k = 0; k < all.size(); ++k) {
        if (concerns(shape, loss, k)) named.push_back(all[k]);
      }
      const std::int64_t id = scaling.count == 1 ? 0 : static_cast<std::int64_t>(loss);
      auto scaled = mixed.scale_loss(sum, named, ScaleLossOptions().loss_id(id));
      scaled.value().backward();
      if (injected_now && injection->loss == loss) {
        const Toy& model = nets.models[injection->model];
        (injection->low ? model->low : model->full).mutable_grad()[1] = kInf;
        ++overflows[id];
      }
      scaled.finish();
    }
    for (std::size_t k = 0; k < all.size(); ++k) {
      const auto parameters = mixed.master_params(all[k]);
      const auto& expected = reference.grads[static_cast<std::size_t>(i) * all.size() + k];
      const bool skipped = injected_now && concerns(shape, injection->loss, k);
      std::vector<at::Tensor> before;
      for (std::size_t p = 0; p < parameters.size(); ++p) {
        before.push_back(parameters[p].detach().clone());
        EXPECT_TRUE(skipped || near(parameters[p].grad(), expected[p], allowed));
      }
      EXPECT_EQ(mixed.step(all[k]), skipped ? Step::skipped : Step::stepped);
      for (std::size_t p = 0; p < parameters.size(); ++p) {
        EXPECT_EQ(static_cast<bool>(same_bits(parameters[p], before[p])), skipped);
      }
    }
  }

  for (std::size_t m = 0; m < nets.models.size(); ++m) {
    const auto got = nets.models[m]->parameters();
    const auto want = reference.nets.models[m]->parameters();
    for (std::size_t p = 0; p < got.size(); ++p) EXPECT_TRUE(near(got[p], want[p], allowed));
  }
  for (std::size_t k = 0; k < all.size(); ++k) {
    const auto masters = mixed.master_params(all[k]);
    std::size_t next = 0;
    for (const std::size_t model : shape.optimizers[k]) {
      for (const auto& p : nets.models[model]->parameters()) {
        EXPECT_TRUE(same_bits(p, masters[next++].to(p.scalar_type())));
      }
    }
  }
  if (scaling.scale.is_dynamic()) {
    for (std::int64_t id = 0; id < scaling.count; ++id) {
      EXPECT_EQ(mixed.loss_scaler(id).skipped_steps() > 0, overflows[id] > 0);
    }
  }
}

class MixedPrecisionGrid
    : public testing::TestWithParam<std::tuple<Shape, const char*, ScalarType>> {};

TEST_P(MixedPrecisionGrid, TrainsAsFp32AndSkipsExactlyWhatOverflowed) {
  const auto& [shape, level, dtype] = GetParam();
  // One policy for all runs: making one costs more than a run.
  static const auto policy = CastPolicy::semitone().keep_fp32_params("full");
  const double allowed = std::string(level) == "O0" ? reduction_tolerance(torch::kFloat, 4)
                                                    : reduction_tolerance(dtype, 4);
  for (const auto& injection : injections(shape)) {
    const Reference reference(shape, injection);
    for (const Scalers& scaling : scalers()) {
      const bool plain = scaling.scale.to_string() == "1" && std::string(level) != "O2";
      if (plain && injection.has_value()) continue;  // plain training looks at nothing
      Options options(level);
      options.dtype(dtype).verbosity(0).policy(policy).num_losses(scaling.count);
      options.loss_scale(scaling.scale);
      if (scaling.scale.is_dynamic()) {
        options.loss_scale_options(LossScaleOptions().init_scale(4).growth_interval(1));
      }
      for (const Zeroing way : kZeroings) {
        SCOPED_TRACE(std::string("scalers ") + scaling.name + ", zeroing " +
                     std::to_string(static_cast<int>(way)) +
                     (injection.has_value()
                          ? ", inf at iteration " + std::to_string(injection->iteration) +
                                " in loss " + std::to_string(injection->loss) + ", model " +
                                std::to_string(injection->model) +
                                (injection->low ? " low" : " full")
                          : ""));
        run(shape, options, scaling, way, injection, reference, allowed);
        if (HasFailure()) return;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, MixedPrecisionGrid,
                         testing::Combine(testing::ValuesIn(shapes()), testing::ValuesIn(kLevels),
                                          testing::Values(torch::kBFloat16, torch::kHalf)),
                         [](const auto& tested) {
                           return std::string(std::get<0>(tested.param).name) +
                                  std::get<1>(tested.param) +
                                  (std::get<2>(tested.param) == torch::kHalf ? "Fp16" : "Bf16");
                         });

// ------------------------------------------------------------------ groups that are added later

struct LaterCase {
  std::string level;
  ScalarType dtype;
  Zeroing way;
  bool zero_before;  // adding the group
  bool accumulate;   // two backwards a step
};

// One model whose second parameter joins the optimizer after an iteration.
std::vector<at::Tensor> train_with_later_group(const LaterCase& one, bool mixed_precision) {
  Toy model(2);
  torch::optim::SGD optimizer({model->full}, torch::optim::SGDOptions(0.125).momentum(0.25));
  auto mixed = initialize(model, optimizer,
                          Options(mixed_precision ? one.level : "O0")
                              .dtype(one.dtype)
                              .verbosity(0)
                              .loss_scale(mixed_precision ? 4.0 : 1.0));
  const auto zero_all = [&] {
    switch (one.way) {
      case Zeroing::none:
        for (const auto& p : model->parameters()) p.mutable_grad().reset();
        break;
      case Zeroing::model:
        model->zero_grad();
        break;
      case Zeroing::optimizer:
        optimizer.zero_grad();
        if (!mixed_precision) model->zero_grad();
        break;
      case Zeroing::mixed:
        mixed.zero_grad(optimizer);
        if (!mixed_precision) model->zero_grad();
        break;
    }
  };
  const auto backward = [&](int i) {
    for (int k = 0; k < (one.accumulate ? 2 : 1); ++k) {
      mixed.scale_loss(mixed.forward(model, input(i + k)), optimizer).backward();
    }
  };
  for (int i = 0; i < 2; ++i) {
    zero_all();
    backward(i);
    EXPECT_EQ(mixed.step(optimizer), Step::stepped);
  }
  if (one.zero_before) zero_all();
  // Gradients that the parameter got before it joined are not the optimizer's.
  model->low.mutable_grad().reset();
  optimizer.add_param_group(torch::optim::OptimizerParamGroup({model->low}));
  if (!one.zero_before) zero_all();
  for (int i = 0; i < 3; ++i) {
    if (i > 0) zero_all();
    backward(i);
    EXPECT_EQ(mixed.step(optimizer), Step::stepped);
  }
  std::vector<at::Tensor> result = model->parameters();
  const auto masters = mixed.master_params(optimizer);
  EXPECT_EQ(masters.size(), 2U);
  for (std::size_t p = 0; p < masters.size(); ++p) {
    EXPECT_TRUE(same_bits(result[p], masters[p].to(result[p].scalar_type())));
  }
  return result;
}

TEST(MixedPrecisionGroups, AddedAfterInitializeTrainsAsInFp32) {
  for (const std::string level : kLevels) {
    for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
      for (const Zeroing way : kZeroings) {
        for (const bool zero_before : {false, true}) {
          for (const bool accumulate : {false, true}) {
            const LaterCase one{level, dtype, way, zero_before, accumulate};
            SCOPED_TRACE(level + " " + dtype_name(dtype) + ", zeroing " +
                         std::to_string(static_cast<int>(way)) + (zero_before ? " before" : "") +
                         (accumulate ? " accumulating" : ""));
            const auto expected = train_with_later_group(one, false);
            const auto got = train_with_later_group(one, true);
            for (std::size_t p = 0; p < got.size(); ++p) {
              EXPECT_TRUE(near(got[p], expected[p],
                               level == "O0" ? reduction_tolerance(torch::kFloat, 4)
                                             : reduction_tolerance(dtype, 4)));
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace semitone::amp::mixed_precision_grid_test

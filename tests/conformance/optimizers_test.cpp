// optimizers.json: eight steps of each optimizer in fp64, computed by PyTorch or by the published
// rules of Apex. They run through FusedStep: gradients are scaled, and steps with an inf are
// skipped.

#include "semitone/optim/fused_adagrad.h"
#include "semitone/optim/fused_adam.h"
#include "semitone/optim/fused_lamb.h"
#include "semitone/optim/fused_novograd.h"
#include "semitone/optim/fused_sgd.h"
#include "semitone/optim/larc.h"
#include "tests/support/conformance.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace semitone::test {
namespace {

using nlohmann::json;
using torch::optim::OptimizerParamGroup;

at::Tensor tensor_of(const json& numbers, at::IntArrayRef shape) {
  std::vector<double> values;
  for (const json& value : numbers) values.push_back(number(value));
  return torch::tensor(values, at::kDouble).view(shape);
}

// Options by name. An option that no branch reads is not supported; the names are counted, since
// at() would not notice an unused one.
class Options {
 public:
  Options(const json& group, const json& common) : values_(group) {
    for (const auto& [name, value] : common.items()) values_[name] = value;
  }
  template <typename T>
  T take(const std::string& name, T absent) {
    taken_.insert(name);
    return values_.contains(name) ? values_.at(name).get<T>() : absent;
  }
  std::tuple<double, double> betas() {
    taken_.insert("betas");
    return {values_.at("betas").at(0), values_.at("betas").at(1)};
  }
  void expect_all_taken() const {
    for (const auto& [name, value] : values_.items())
      EXPECT_TRUE(taken_.contains(name)) << "the test ignores " << name;
  }

 private:
  json values_;
  std::set<std::string> taken_;
};

using OptionsPointer = std::unique_ptr<torch::optim::OptimizerOptions>;

OptionsPointer adam_options(Options& o, bool adam_w) {
  return std::make_unique<optim::FusedAdamOptions>(optim::FusedAdamOptions(o.take("lr", 0.0))
                                                       .betas(o.betas())
                                                       .eps(o.take("eps", 0.0))
                                                       .weight_decay(o.take("weight_decay", 0.0))
                                                       .adam_w_mode(adam_w));
}

OptionsPointer sgd_options(Options& o) {
  return std::make_unique<optim::FusedSGDOptions>(
      optim::FusedSGDOptions(o.take("lr", 0.0))
          .momentum(o.take("momentum", 0.0))
          .dampening(o.take("dampening", 0.0))
          .weight_decay(o.take("weight_decay", 0.0))
          .nesterov(o.take("nesterov", false))
          .wd_after_momentum(o.take("wd_after_momentum", false)));
}

OptionsPointer adagrad_options(Options& o) {
  return std::make_unique<optim::FusedAdagradOptions>(
      optim::FusedAdagradOptions(o.take("lr", 0.0))
          .lr_decay(o.take("lr_decay", 0.0))
          .weight_decay(o.take("weight_decay", 0.0))
          .initial_accumulator_value(o.take("initial_accumulator_value", 0.0))
          .eps(o.take("eps", 0.0))
          .adagrad_w_mode(o.take("adagrad_w_mode", false)));
}

OptionsPointer lamb_options(Options& o) {
  return std::make_unique<optim::FusedLAMBOptions>(
      optim::FusedLAMBOptions(o.take("lr", 0.0))
          .betas(o.betas())
          .eps(o.take("eps", 0.0))
          .weight_decay(o.take("weight_decay", 0.0))
          .adam_w_mode(o.take("adam_w_mode", true))
          .bias_correction(o.take("bias_correction", true))
          .grad_averaging(o.take("grad_averaging", true))
          .max_grad_norm(o.take("max_grad_norm", 0.0))
          .use_nvlamb(o.take("use_nvlamb", false)));
}

OptionsPointer novograd_options(Options& o) {
  return std::make_unique<optim::FusedNovoGradOptions>(
      optim::FusedNovoGradOptions(o.take("lr", 0.0))
          .betas(o.betas())
          .eps(o.take("eps", 0.0))
          .weight_decay(o.take("weight_decay", 0.0))
          .bias_correction(o.take("bias_correction", true))
          .grad_averaging(o.take("grad_averaging", true))
          .reg_inside_moment(o.take("reg_inside_moment", false))
          .norm_type(o.take("norm_type", std::int64_t{2}))
          .init_zero(o.take("init_zero", false)));
}

OptionsPointer larc_options(Options& o) {
  return std::make_unique<optim::LARCOptions>(
      optim::LARCOptions(o.take("lr", 0.0))
          .momentum(o.take("momentum", 0.0))
          .dampening(o.take("dampening", 0.0))
          .weight_decay(o.take("weight_decay", 0.0))
          .nesterov(o.take("nesterov", false))
          .trust_coefficient(o.take("trust_coefficient", 0.0))
          .clip(o.take("clip", true))
          .eps(o.take("eps", 0.0)));
}

template <typename Optimizer>
std::unique_ptr<optim::FusedOptimizer> construct(const std::vector<OptimizerParamGroup>& groups) {
  return std::make_unique<Optimizer>(groups);
}

// Creates an optimizer by its name in the file.
struct Maker {
  std::function<OptionsPointer(Options&)> options;
  std::unique_ptr<optim::FusedOptimizer> (*optimizer)(const std::vector<OptimizerParamGroup>&);
};

const std::map<std::string, Maker>& makers() {
  static const std::map<std::string, Maker> kMakers{
      {"Adam", {[](Options& o) { return adam_options(o, false); }, construct<optim::FusedAdam>}},
      {"AdamW", {[](Options& o) { return adam_options(o, true); }, construct<optim::FusedAdam>}},
      {"SGD", {sgd_options, construct<optim::FusedSGD>}},
      {"Adagrad", {adagrad_options, construct<optim::FusedAdagrad>}},
      {"LAMB", {lamb_options, construct<optim::FusedLAMB>}},
      {"NovoGrad", {novograd_options, construct<optim::FusedNovoGrad>}},
      {"LARC", {larc_options, construct<optim::LARC>}},
  };
  return kMakers;
}

class OptimizerConformance : public testing::TestWithParam<json> {};

// Runs a case with parameters of a dtype. near(got, want, what) compares.
template <typename Near>
void run(const json& c, c10::ScalarType dtype, const Near& near) {
  std::vector<at::Tensor> parameters;
  for (const json& parameter : c.at("params")) {
    const auto shape = parameter.at("shape").get<std::vector<std::int64_t>>();
    parameters.push_back(tensor_of(parameter.at("data"), shape).to(dtype).requires_grad_());
  }
  const Maker& maker = makers().at(c.at("optimizer"));
  std::vector<OptimizerParamGroup> groups;
  for (const json& group : c.at("groups")) {
    Options options(group.at("options"), c.at("common"));
    auto made = maker.options(options);
    options.expect_all_taken();
    std::vector<at::Tensor> members;
    for (const json& index : group.at("params")) members.push_back(parameters.at(index));
    groups.emplace_back(members, std::move(made));
  }
  const auto optimizer = maker.optimizer(groups);

  int number_of_step = 0;
  for (const json& step : c.at("steps")) {
    SCOPED_TRACE("step " + std::to_string(number_of_step++));
    if (step.contains("set_lr")) {
      for (auto& group : optimizer->param_groups()) group.options().set_lr(step.at("set_lr"));
    }
    auto found_inf = torch::zeros({1});
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const json& grad = step.at("grads").at(i);
      auto& own = parameters[i].mutable_grad();
      own = grad.is_null() ? at::Tensor() : tensor_of(grad, parameters[i].sizes()).to(dtype);
      if (own.defined() && !own.isfinite().all().item<bool>()) found_inf.fill_(1);
    }
    const bool stepped = optimizer->step(
        optim::FusedStep().inv_scale(1 / number(step.at("grad_scale"))).found_inf(found_inf));
    EXPECT_EQ(stepped, !step.at("found_inf").get<bool>());
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      near(parameters[i], tensor_of(step.at("params").at(i), parameters[i].sizes()), "parameter");
      for (const auto& [name, of_all] : step.at("state").items()) {
        const json& want = of_all.at(i);
        if (name == "step") {
          EXPECT_EQ(optimizer->steps_of(parameters[i]),
                    want.is_null() ? 0 : want.get<std::int64_t>());
          continue;
        }
        const at::Tensor got = optimizer->state_of(parameters[i], name);
        ASSERT_EQ(got.defined(), !want.is_null()) << name;
        if (got.defined()) near(got, tensor_of(want, got.sizes()), name);
      }
    }
  }
}

TEST_P(OptimizerConformance, InFp64) {
  const json& c = GetParam();
  const double rtol = c.at("rtol");
  const double atol = c.at("atol");
  run(c, at::kDouble, [&](const at::Tensor& got, const at::Tensor& want, const std::string& what) {
    const at::Tensor g = got.detach();
    const at::Tensor near = (g - want).abs() <= atol + rtol * want.abs();
    EXPECT_TRUE(near.all().item<bool>()) << what << ": got " << g << ", want " << want;
  });
}

// The kernels: fp32 rounding errors of eight steps, as the data's README measured them for PyTorch
// (4e-7 of the largest element, or of 1), with room for a factor of 3.
TEST_P(OptimizerConformance, InFp32) {
  run(GetParam(), at::kFloat,
      [&](const at::Tensor& got, const at::Tensor& want, const std::string& what) {
        if (want.numel() == 0) return;
        const at::Tensor g = got.detach().to(at::kDouble);
        const double scale = std::max(1.0, want.abs().max().item<double>());
        const double far = (g - want).abs().max().item<double>();
        EXPECT_TRUE(far <= 1.2e-6 * scale) << what << ": got " << g << ", want " << want;
      });
}

std::vector<json> cases() {
  const json data = conformance("optimizers.json");
  const json& all = data.at("cases");
  return std::vector<json>(all.begin(), all.end());
}

INSTANTIATE_TEST_SUITE_P(Cases, OptimizerConformance, testing::ValuesIn(cases()),
                         [](const testing::TestParamInfo<json>& which) {
                           std::string name = which.param.at("name");
                           for (char& c : name) c = c == '-' ? '_' : c;
                           return name;
                         });

}  // namespace
}  // namespace semitone::test

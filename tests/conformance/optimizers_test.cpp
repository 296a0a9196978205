// optimizers.json: eight steps of each optimizer in fp64, as PyTorch computes them or as the published
// rules of Apex say, through FusedStep: gradients come scaled, and steps with an inf are skipped.

#include "semitone/optim/fused_adam.h"
#include "semitone/optim/fused_sgd.h"
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

// Options by name. What no branch reads is not supported: at() of a leftover would go unnoticed, so
// the names are counted.
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

OptionsPointer options_of(const std::string& optimizer, Options& o) {
  if (optimizer == "Adam" || optimizer == "AdamW") return adam_options(o, optimizer == "AdamW");
  if (optimizer == "SGD") return sgd_options(o);
  throw std::runtime_error("optimizers.json: unknown optimizer " + optimizer);
}

std::unique_ptr<optim::FusedOptimizer> make(const std::string& optimizer,
                                            const std::vector<OptimizerParamGroup>& groups) {
  if (optimizer == "Adam" || optimizer == "AdamW")
    return std::make_unique<optim::FusedAdam>(groups);
  if (optimizer == "SGD") return std::make_unique<optim::FusedSGD>(groups);
  throw std::runtime_error("optimizers.json: unknown optimizer " + optimizer);
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
  std::vector<OptimizerParamGroup> groups;
  for (const json& group : c.at("groups")) {
    Options options(group.at("options"), c.at("common"));
    auto made = options_of(c.at("optimizer"), options);
    options.expect_all_taken();
    std::vector<at::Tensor> members;
    for (const json& index : group.at("params")) members.push_back(parameters.at(index));
    groups.emplace_back(members, std::move(made));
  }
  const auto optimizer = make(c.at("optimizer"), groups);

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
  std::vector<json> all;
  const json data = conformance("optimizers.json");
  for (const json& c : data.at("cases")) {
    const std::string optimizer = c.at("optimizer");
    if (optimizer == "Adam" || optimizer == "AdamW" || optimizer == "SGD") all.push_back(c);
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Cases, OptimizerConformance, testing::ValuesIn(cases()),
                         [](const testing::TestParamInfo<json>& which) {
                           std::string name = which.param.at("name");
                           for (char& c : name) c = c == '-' ? '_' : c;
                           return name;
                         });

}  // namespace
}  // namespace semitone::test

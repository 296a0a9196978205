#include "semitone/optim/clip_grad.h"
#include "src/kernels/update_on_device.h"
#include "tests/accelerator/training.h"
#include "tests/optim/fused_optimizers_fixture.h"
#include "tests/support/archive.h"
#include "tests/support/errors.h"
#include "tests/support/tolerance.h"

#include <torch/types.h>

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

// The fused optimizers and the clipping of gradients, on a device without kernels of Semitone.
namespace semitone::test::accelerator {
namespace {

// Parameters on a device, whose gradients are the same on every device.
class Stepped {
 public:
  Stepped(const Kind& kind, c10::Device where, c10::ScalarType dtype) : where_(where) {
    torch::manual_seed(3);
    for (const at::Tensor& parameter : make_parameters(dtype))
      parameters_.push_back(parameter.detach().to(where_).requires_grad_());
    optimizer_ = kind(parameters_);
  }

  // @param how  with a flag of the CPU, if it has one
  bool step(int number, optim::FusedStep how = {}) {
    set_grads(number);
    if (how.found_inf().defined()) how.found_inf(how.found_inf().to(where_));
    return optimizer_->step(how);
  }
  void plain_step(int number) {
    set_grads(number);
    static_cast<torch::optim::Optimizer&>(*optimizer_).step();
  }

  std::vector<at::Tensor> values() const {
    std::vector<at::Tensor> values;
    for (const at::Tensor& parameter : parameters_) {
      const bool split = optimizer_->has_split_master(parameter);
      values.push_back((split ? optimizer_->master_of(parameter) : parameter.detach()).cpu());
    }
    return values;
  }
  optim::FusedOptimizer& optimizer() { return *optimizer_; }
  void set_grads(int number) {
    torch::manual_seed(100 + static_cast<std::uint64_t>(number));
    const auto grads = make_grads(parameters_);
    for (std::size_t i = 0; i < grads.size(); ++i)
      parameters_[i].mutable_grad() = grads[i].to(where_).to(parameters_[i].scalar_type());
  }

 private:
  c10::Device where_;
  std::vector<at::Tensor> parameters_;
  std::unique_ptr<optim::FusedOptimizer> optimizer_;
};

c10::ScalarType dtype_of(const Kind& kind) {
  return kind.splits_masters ? at::kBFloat16 : at::kFloat;
}

// Of four steps.
double step_tolerance() {
  return reduction_tolerance(at::kFloat, 16);
}

struct AcceleratorOptimizers : AcceleratorTest {};

TEST_F(AcceleratorOptimizers, StepAsOnTheCPU) {
  for (const Kind& kind : all_fused_optimizers()) {
    SCOPED_TRACE(kind.name);
    Stepped there(kind, device(), dtype_of(kind)), here(kind, at::kCPU, dtype_of(kind));
    for (int i = 0; i < 4; ++i) {
      there.plain_step(i);
      here.plain_step(i);
    }
    EXPECT_TRUE(near(there.values(), here.values(), step_tolerance()));
  }
}

TEST_F(AcceleratorOptimizers, StepsThatUnscaleClipAndSkipAreTheCPUs) {
  for (const Kind& kind : all_fused_optimizers()) {
    SCOPED_TRACE(kind.name);
    Stepped there(kind, device(), dtype_of(kind)), here(kind, at::kCPU, dtype_of(kind));
    for (int i = 0; i < 4; ++i) {
      const auto how = optim::FusedStep().inv_scale(0.25).clip(0.5).found_inf(
          torch::full({1}, i == 2 ? 1.0F : 0.0F));
      EXPECT_EQ(there.step(i, how), i != 2);
      EXPECT_EQ(here.step(i, how), i != 2);
    }
    EXPECT_TRUE(near(there.values(), here.values(), step_tolerance()));
  }
}

TEST_F(AcceleratorOptimizers, ParametersInHalfPrecisionStepAsOnTheCPU) {
  for (const Kind& kind : all_fused_optimizers()) {
    if (kind.splits_masters) continue;
    for (const auto dtype : {at::kHalf, at::kBFloat16}) {
      SCOPED_TRACE(kind.name + " " + c10::toString(dtype));
      Stepped there(kind, device(), dtype), here(kind, at::kCPU, dtype);
      for (int i = 0; i < 3; ++i) {
        there.plain_step(i);
        here.plain_step(i);
      }
      EXPECT_TRUE(near(there.values(), here.values(), rounding_tolerance(dtype, 8)));
    }
  }
}

TEST_F(AcceleratorOptimizers, ContinueOnTheOtherDeviceFromAFile) {
  for (const Kind& kind : all_fused_optimizers()) {
    SCOPED_TRACE(kind.name);
    Stepped there(kind, device(), dtype_of(kind)), here(kind, at::kCPU, dtype_of(kind));
    Stepped again(kind, device(1), dtype_of(kind));
    for (Stepped* one : {&there, &here, &again}) one->plain_step(0);
    const auto archived_there = [&] { return saved(there.optimizer()); };
    auto for_here = archived_there(), for_again = archived_there();
    here.optimizer().load(for_here);
    again.optimizer().load(for_again);
    for (Stepped* one : {&there, &here, &again}) one->plain_step(1);
    EXPECT_TRUE(near(here.values(), there.values(), step_tolerance()));
    EXPECT_TRUE(near(again.values(), there.values(), step_tolerance()));
  }
}

// The placeholders of gradients that stay in 16 bits are one number for all elements too.
TEST_F(AcceleratorOptimizers, GradientsOfOneNumberAreNotPlaceholders) {
  for (const Kind& kind : all_fused_optimizers()) {
    SCOPED_TRACE(kind.name);
    const auto parameter = torch::ones({5}, device()).to(dtype_of(kind)).requires_grad_();
    const auto optimizer = kind({parameter});
    parameter.mutable_grad() = torch::ones({}, parameter.options().requires_grad(false)).expand(5);
    static_cast<torch::optim::Optimizer&>(*optimizer).step();
    EXPECT_TRUE(parameter.lt(1).all().item<bool>());
  }
}

TEST_F(AcceleratorOptimizers, GradientsAreClippedAsOnTheCPU) {
  torch::manual_seed(5);
  std::vector<at::Tensor> here, there;
  for (const at::Tensor& parameter : make_parameters()) {
    here.push_back(parameter);
    here.back().mutable_grad() = torch::randn_like(parameter);
    there.push_back(parameter.detach().to(device()).requires_grad_());
    there.back().mutable_grad() = here.back().grad().to(device());
  }
  const auto before = host_reads();
  const double norm = optim::clip_grad_norm_(there, 0.5);
  EXPECT_EQ(host_reads(), before + 1);
  EXPECT_NEAR(norm, optim::clip_grad_norm_(here, 0.5), 1e-6 * norm);
  for (std::size_t i = 0; i < here.size(); ++i)
    EXPECT_TRUE(near(there[i].grad().cpu(), here[i].grad(), pointwise_tolerance(at::kFloat)));
}

TEST_F(AcceleratorOptimizers, StepsReadNothing) {
  for (const Kind& kind : all_fused_optimizers()) {
    SCOPED_TRACE(kind.name);
    Stepped there(kind, device(), dtype_of(kind));
    for (int i = 0; i < 3; ++i) {
      there.set_grads(i);
      const Counts before = counts();
      static_cast<torch::optim::Optimizer&>(there.optimizer()).step();
      EXPECT_EQ(counts().reads, before.reads);
      EXPECT_EQ(counts().waits, before.waits);
      EXPECT_EQ(counts().uploads, before.uploads);
      EXPECT_EQ(counts().unpinned_async_copies, before.unpinned_async_copies);
    }
  }
}

// Parameters on two devices, and the same ones on the CPU.
struct OnTwoDevices {
  // @param on_cpu  a parameter that stays on the CPU
  OnTwoDevices(const Kind& kind, bool on_cpu) {
    for (const int number : {0, 1, 2, 3}) {
      torch::manual_seed(20 + static_cast<std::uint64_t>(number));
      const at::Tensor value = torch::randn({7}).to(dtype_of(kind));
      here.push_back(value.clone().requires_grad_());
      there.push_back(value.to(device(static_cast<c10::DeviceIndex>(number % 2))).requires_grad_());
    }
    if (on_cpu) {
      there.push_back(torch::ones({3}, dtype_of(kind)).requires_grad_());
      here.push_back(there.back().detach().clone().requires_grad_());
    }
    optimizer_here = kind(here);
    optimizer_there = kind(there);
  }

  // Returns what the step on the devices cost.
  Counts step(int number) {
    for (std::size_t k = 0; k < here.size(); ++k) {
      torch::manual_seed(100 * static_cast<std::uint64_t>(number) + k);
      here[k].mutable_grad() = torch::randn_like(here[k]);
      there[k].mutable_grad() = here[k].grad().to(there[k].device());
    }
    static_cast<torch::optim::Optimizer&>(*optimizer_here).step();
    const Counts before = counts();
    static_cast<torch::optim::Optimizer&>(*optimizer_there).step();
    return counts() - before;
  }

  void expect_same() const {
    for (std::size_t k = 0; k < here.size(); ++k)
      EXPECT_TRUE(near(optimizer_there->master_of(there[k]).detach().cpu(),
                       optimizer_here->master_of(here[k]).detach(), step_tolerance()));
  }

  std::vector<at::Tensor> here, there;
  std::unique_ptr<optim::FusedOptimizer> optimizer_here, optimizer_there;
};

// LAMB needs the norm of all gradients together; the others' norms stay on each device.
TEST_F(AcceleratorOptimizers, ParametersOnTwoDevicesStepAsOnTheCPU) {
  for (const Kind& kind : all_fused_optimizers()) {
    for (const bool on_cpu : {false, true}) {
      SCOPED_TRACE(kind.name + (on_cpu ? " and the CPU" : ""));
      OnTwoDevices training(kind, on_cpu);
      for (int i = 0; i < 3; ++i) {
        const Counts step = training.step(i);
        if (on_cpu) continue;  // LAMB's norm is that of the CPU's gradients too
        EXPECT_EQ(step.reads, 0);
        EXPECT_EQ(step.waits, 0);
        EXPECT_EQ(step.uploads, 0);
        EXPECT_EQ(step.unpinned_async_copies, 0);
      }
      training.expect_same();
    }
  }
}

TEST_F(AcceleratorOptimizers, UpdatesAreSkippedOnTheDevice) {
  for (const float found_inf : {0.0F, 1.0F, std::numeric_limits<float>::quiet_NaN()}) {
    const auto value = torch::ones({3}, device()), grad = torch::ones({3}, device());
    const auto buffer = torch::full({3}, 2.0, device());
    const std::vector<kernels::Update> items{
        {.param = value, .low = {}, .grad = grad, .copy = {}, .state = {buffer}}};
    const auto flag = torch::full({1}, found_inf, device());
    const auto before = host_reads();
    kernels::UpdateOnDevice update(device());
    update.send(std::vector<kernels::SgdRule>{{.momentum = 0.5, .lr = 1}});
    update.run(items, flag);
    EXPECT_EQ(host_reads(), before);
    const bool skips = found_inf != 0;
    expect_bitwise_equal(value.cpu(), torch::full({3}, skips ? 1.0F : -1.0F));
    expect_bitwise_equal(buffer.cpu(), torch::full({3}, 2.0F));
  }
}

TEST_F(AcceleratorOptimizers, GradientsAreClippedWithoutAHostRead) {
  for (const double order : {2.0, 3.0, std::numeric_limits<double>::infinity()}) {
    for (const double max_norm : {0.5, 1e9}) {
      torch::manual_seed(5);
      std::vector<at::Tensor> here, there, grads;
      for (const auto dtype : {at::kFloat, at::kHalf, at::kDouble, at::kComplexFloat}) {
        here.push_back(torch::ones({4, 3}, dtype).requires_grad_());
        here.back().mutable_grad() = torch::randn_like(here.back());
        there.push_back(here.back().detach().to(device()).requires_grad_());
        there.back().mutable_grad() = here.back().grad().to(device());
        grads.push_back(there.back().grad());
      }
      const auto before = host_reads();
      const at::Tensor norm = optim::get_total_norm(grads, order);
      optim::clip_grads_with_norm_(there, max_norm, norm);
      EXPECT_EQ(host_reads(), before);
      EXPECT_EQ(norm.device(), device());
      EXPECT_NEAR(norm.item<double>(), optim::clip_grad_norm_(here, max_norm, order), 1e-6);
      for (std::size_t i = 0; i < here.size(); ++i) {
        const auto dtype = here[i].scalar_type();
        EXPECT_TRUE(near(at::view_as_real(there[i].grad().cpu().to(at::kComplexDouble)),
                         at::view_as_real(here[i].grad().to(at::kComplexDouble)),
                         pointwise_tolerance(dtype == at::kHalf ? at::kHalf : at::kFloat)));
      }
    }
  }
}

TEST_F(AcceleratorOptimizers, GradientsOfTwoDevicesAreClippedWithoutAHostRead) {
  std::vector<at::Tensor> parameters, grads;
  for (c10::DeviceIndex index = 0; index < kDevices; ++index) {
    parameters.push_back(torch::ones({3}, device(index)).requires_grad_());
    parameters.back().mutable_grad() = torch::full({3}, 2. + index, device(index));
    grads.push_back(parameters.back().grad());
  }
  const Counts before = counts();
  const at::Tensor norm = optim::get_total_norm(grads);
  optim::clip_grads_with_norm_(parameters, 0.5, norm);
  const Counts clipping = counts() - before;
  EXPECT_EQ(clipping.reads, 0);
  EXPECT_EQ(clipping.waits, 0);
  EXPECT_NEAR(norm.item<double>(), std::sqrt(3 * (4 + 9)), 1e-6);
  EXPECT_NEAR(optim::grad_norm(parameters), 0.5, 1e-6);
}

TEST_F(AcceleratorOptimizers, NormsOfTwoDevicesAreReadOnceEach) {
  std::vector<at::Tensor> parameters;
  for (c10::DeviceIndex index = 0; index < kDevices; ++index) {
    parameters.push_back(torch::ones({3}, device(index)).requires_grad_());
    parameters.back().mutable_grad() = torch::full({3}, 2., device(index));
  }
  const auto before = host_reads();
  EXPECT_NEAR(optim::grad_norm(parameters), std::sqrt(24), 1e-6);
  EXPECT_EQ(host_reads(), before + kDevices);
}

}  // namespace
}  // namespace semitone::test::accelerator

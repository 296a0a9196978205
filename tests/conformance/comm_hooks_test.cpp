// comm_hooks.json: what torch.distributed computes on two ranks with its powerSGD_hook,
// post_localSGD_hook and PeriodicModelAverager, and with all_to_all_single.
#include "semitone/comm/init.h"
#include "semitone/core/dtype.h"
#include "semitone/parallel/distributed_data_parallel.h"
#include "semitone/parallel/post_local_sgd.h"
#include "semitone/parallel/power_sgd.h"
#include "tests/support/conformance.h"
#include "tests/support/run_ranks.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

namespace semitone::test::comm_hooks_conformance_test {
namespace {

using nlohmann::json;
using parallel::DistributedDataParallelOptions;

// As comm_hooks.py defines them.
std::vector<at::Tensor> gradients_of(const json& shapes, int step, int rank, at::ScalarType dtype) {
  std::vector<at::Tensor> gradients;
  for (std::size_t p = 0; p < shapes.size(); ++p) {
    const auto shape = shapes[p].get<std::vector<std::int64_t>>();
    const auto offset = 101 * step + 53 * rank + 17 * static_cast<std::int64_t>(p);
    const auto i = torch::arange(torch::zeros(shape).numel(), torch::kLong);
    gradients.push_back(((i * 37 + offset).remainder(41) - 20).to(dtype).div(16).view(shape));
  }
  return gradients;
}

struct ProductsImpl : torch::nn::Module {
  ProductsImpl(const json& shapes, at::ScalarType dtype) {
    for (std::size_t p = 0; p < shapes.size(); ++p) {
      all.push_back(register_parameter(
          "p" + std::to_string(p),
          torch::zeros(shapes[p].get<std::vector<std::int64_t>>(), torch::TensorOptions(dtype))));
    }
  }
  at::Tensor forward(const std::vector<at::Tensor>& gradients, double decay) {
    at::Tensor loss = torch::zeros({}, all[0].options().requires_grad(false));
    for (std::size_t p = 0; p < all.size(); ++p)
      loss = loss + (all[p] * gradients[p]).sum() + decay * 0.5 * (all[p] * all[p]).sum();
    return loss;
  }
  std::vector<at::Tensor> all;
};
TORCH_MODULE(Products);

// With the bounds of ddp.json.
void expect_near(const std::vector<at::Tensor>& got, const json& want, at::ScalarType dtype) {
  const double relative = dtype == torch::kDouble ? 1e-11 : 2e-5;
  const double absolute = dtype == torch::kDouble ? 1e-13 : 1e-6;
  std::size_t at = 0;
  for (const at::Tensor& tensor : got) {
    const at::Tensor flat = tensor.detach().to(torch::kDouble).contiguous().view(-1);
    for (std::int64_t i = 0; i < flat.numel(); ++i, ++at) {
      const double expected = number(want.at(at));
      EXPECT_TRUE(std::abs(flat[i].item<double>() - expected) <=
                  absolute + relative * std::abs(expected))
          << at << ": " << flat[i].item<double>() << ", not " << expected;
    }
  }
  EXPECT_EQ(at, want.size());
}

parallel::PowerSGDOptions power_sgd_options(const json& options) {
  return parallel::PowerSGDOptions()
      .start_powerSGD_iter(2)
      .matrix_approximation_rank(options.at("matrix_approximation_rank").get<std::int64_t>())
      .min_compression_rate(options.at("min_compression_rate").get<double>())
      .orthogonalization_epsilon(options.value("orthogonalization_epsilon", 0.0))
      .random_seed(options.value("random_seed", 0U))
      .warm_start(options.value("warm_start", true))
      .use_error_feedback(options.value("use_error_feedback", true));
}

TEST(CommHooksConformance, PowerSGDSendsWhatTorchSends) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    const json data = conformance("comm_hooks.json");
    for (const json& given : data.at("power_sgd")) {
      SCOPED_TRACE(given.at("options").dump() + " " + given.at("dtype").get<std::string>());
      const auto dtype = given.at("dtype") == "float64" ? torch::kDouble : torch::kFloat;
      Products model(data.at("shapes"), dtype);
      const auto hook = std::make_shared<parallel::PowerSGDHook>(
          model->parameters(), power_sgd_options(given.at("options")));
      parallel::DistributedDataParallel ddp(model, group,
                                            DistributedDataParallelOptions().comm_hook(hook));
      for (int step = 0; step < 6; ++step) {
        model->zero_grad();
        ddp.forward(gradients_of(data.at("shapes"), step, rank.number(), dtype), 0.0).backward();
        std::vector<at::Tensor> gradients;
        for (const at::Tensor& parameter : model->all) gradients.push_back(parameter.grad());
        if (step >= 2)
          expect_near(gradients, given.at("gradients").at(static_cast<std::size_t>(step - 2)),
                      dtype);
      }
    }
  });
}

TEST(CommHooksConformance, LocalSGDFollowsTorch) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    const json data = conformance("comm_hooks.json");
    for (const json& given : data.at("local_sgd")) {
      SCOPED_TRACE(given.at("options").dump());
      Products model(data.at("shapes"), torch::kDouble);
      const auto hook = std::make_shared<parallel::PostLocalSGDHook>(
          group.split(1),
          parallel::PostLocalSGDOptions().start_localSGD_iter(2).post_local_gradient_allreduce(
              given.at("options").at("post_local_gradient_allreduce")));
      parallel::DistributedDataParallel ddp(model, group,
                                            DistributedDataParallelOptions().comm_hook(hook));
      parallel::PeriodicModelAverager averager(group, 3, 2);
      torch::optim::SGD optimizer(model->parameters(), 0.1);
      for (int step = 0; step < 7; ++step) {
        optimizer.zero_grad();
        ddp.forward(gradients_of(data.at("shapes"), step, rank.number(), torch::kDouble), 1.0)
            .backward();
        optimizer.step();
        EXPECT_EQ(averager.average_parameters(model->parameters()), step == 2 || step == 5);
        const json& everyone = given.at("parameters").at(static_cast<std::size_t>(step));
        expect_near({model->all[1], model->all[2]},
                    everyone.at(static_cast<std::size_t>(rank.number())), torch::kDouble);
      }
    }
  });
}

TEST(CommHooksConformance, AllToAllReceivesWhatTorchReceives) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    const auto mine = static_cast<std::size_t>(rank.number());
    const json cases = conformance("comm_hooks.json").at("all_to_all");
    for (const json& given : cases) {
      const auto splits = given.at("splits").get<std::vector<std::vector<std::int64_t>>>();
      SCOPED_TRACE(given.at("splits").dump());
      const std::int64_t rows = splits[mine][0] + splits[mine][1];
      const at::Tensor sent =
          (torch::arange(3 * rows, torch::kFloat) + 100 * rank.number()).view({rows, 3});
      const at::Tensor received =
          group.all_to_all(sent, splits[mine], {splits[0][mine], splits[1][mine]});
      expect_near({received}, given.at("received").at(mine), torch::kFloat);
    }
  });
}

}  // namespace
}  // namespace semitone::test::comm_hooks_conformance_test

// comm_hooks.json: what torch.distributed computes on two ranks with its powerSGD_hook,
// post_localSGD_hook and PeriodicModelAverager, its hooks for 8 bits, and with all_to_all_single.
#include "semitone/comm/init.h"
#include "semitone/core/dtype.h"
#include "semitone/parallel/distributed_data_parallel.h"
#include "semitone/parallel/post_local_sgd.h"
#include "semitone/parallel/power_sgd.h"
#include "semitone/parallel/quantized_all_reduce.h"
#include "tests/support/conformance.h"
#include "tests/support/run_ranks.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
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

// The 8-bit hooks have different rules. torch's hooks round each rank's gradients once, to 256
// values from the smallest to the largest gradient (or 0) of the bucket or of a channel of 512
// elements, and send them to all ranks. Semitone's hook rounds to 255 values around 0, sends each
// rank a part, and rounds the mean again, so that the traffic does not grow with the number of
// ranks. Unlike torch's, it keeps the errors for the next step. Therefore the distances from the
// exact mean are compared.
constexpr std::int64_t kElements = 1100;
constexpr std::int64_t kChannel = 512;
constexpr std::int64_t kChannels = 3;

at::Tensor quantized_gradient(const std::string& name, int rank) {
  const at::Tensor i = torch::arange(kElements, torch::kLong);
  if (name == "two values") return torch::where(i.remainder(3) == 0, 3, 0).to(torch::kFloat);
  at::Tensor gradient = ((37 * i + 53 * rank).remainder(257) - 128).to(torch::kFloat) / 64;
  const double factors[kChannels] = {1, 1.0 / 1024, 32};
  for (std::int64_t channel = 0; channel < kChannels; ++channel)
    gradient.slice(0, channel * kChannel, (channel + 1) * kChannel).mul_(factors[channel]);
  if (name == "infinite" && rank == 1) gradient[5] = std::numeric_limits<float>::infinity();
  return gradient;
}

// The means of `steps` steps with the same gradient.
std::vector<at::Tensor> quantized_means(const comm::Group& group, const at::Tensor& gradient,
                                        bool use_error_feedback, int steps) {
  Products model(json::array({json::array({kElements})}), torch::kFloat);
  const auto hook = std::make_shared<parallel::QuantizedAllReduceHook>(
      model->parameters(),
      parallel::QuantizedAllReduceOptions().block_size(kChannel).use_error_feedback(
          use_error_feedback));
  parallel::DistributedDataParallel ddp(model, group,
                                        DistributedDataParallelOptions().comm_hook(hook));
  std::vector<at::Tensor> means;
  for (int step = 0; step < steps; ++step) {
    model->zero_grad();
    ddp.forward(std::vector<at::Tensor>{gradient}, 0.0).backward();
    means.push_back(model->all[0].grad().to(torch::kDouble));
  }
  return means;
}

const json& quantized_case(const json& data, const std::string& name) {
  const json& cases = data.at("quantized");
  return *std::find_if(cases.begin(), cases.end(),
                       [&](const json& given) { return given.at("case") == name; });
}

at::Tensor channel_of(const at::Tensor& tensor, std::int64_t channel) {
  return tensor.slice(0, channel * kChannel, (channel + 1) * kChannel);
}

// The values with which the means of all elements of a channel are compared.
struct Channel {
  explicit Channel(std::int64_t channel) {
    const at::Tensor first = channel_of(quantized_gradient("different channels", 0), channel);
    const at::Tensor second = channel_of(quantized_gradient("different channels", 1), channel);
    exact = (first.to(torch::kDouble) + second.to(torch::kDouble)) / 2;
    largest = (first.abs().max() + second.abs().max()).item<double>() / 2;
    range = (first.max() - first.min() + second.max() - second.min()).item<double>() / 2;
  }
  at::Tensor exact;
  double largest;  // absolute value, the mean of the ranks'
  double range;    // from the smallest to the largest value, the mean of the ranks'
};

double largest_of(const at::Tensor& errors) {
  return errors.abs().max().item<double>();
}

double rms_of(const at::Tensor& errors) {
  return errors.square().mean().sqrt().item<double>();
}

TEST(CommHooksConformance, QuantizedMeansAreAsCloseToTheExactOnesAsTorchs) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    const json data = conformance("comm_hooks.json");
    const json& given = quantized_case(data, "different channels");
    const auto of_torch = [&](const char* hook) {
      return torch::tensor(given.at(hook).get<std::vector<double>>(), torch::kDouble);
    };
    const at::Tensor mean = quantized_means(
        group, quantized_gradient("different channels", rank.number()), false, 1)[0];
    for (std::int64_t channel = 0; channel < kChannels; ++channel) {
      SCOPED_TRACE(channel);
      const Channel in(channel);
      const at::Tensor errors = channel_of(mean, channel) - in.exact;
      const at::Tensor per_channel = channel_of(of_torch("perchannel"), channel) - in.exact;
      const at::Tensor per_tensor = channel_of(of_torch("pertensor"), channel) - in.exact;
      const double roundings = 1 + 16 * double{std::numeric_limits<float>::epsilon()};
      // Half a step in each of the two roundings; torch: one rounding, and another half step at the
      // ends of the range, whose zero point is an integer.
      EXPECT_LE(largest_of(errors), in.largest / 127 * roundings);
      EXPECT_LE(largest_of(per_channel), in.range / 255 * roundings);
      // A rounding of the mean adds its variance to half of that of the ranks' roundings: sqrt(3)
      // times torch's error if all roundings are independent.
      EXPECT_LE(rms_of(errors), 2 * rms_of(per_channel));
      // The steps of a whole bucket are too wide for the channel of small gradients.
      if (channel == 1) {
        EXPECT_LE(100 * rms_of(errors), rms_of(per_tensor));
      }
    }
  });
}

// Both rules represent 0 and the largest value exactly.
TEST(CommHooksConformance, QuantizedMeansOfTwoValuesAreTorchs) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    const json data = conformance("comm_hooks.json");
    const json& given = quantized_case(data, "two values");
    for (const bool use_error_feedback : {false, true}) {
      const auto means = quantized_means(group, quantized_gradient("two values", rank.number()),
                                         use_error_feedback, 2);
      for (const at::Tensor& mean : means) {
        expect_near({mean}, given.at("pertensor"), torch::kFloat);
        expect_near({mean}, given.at("perchannel"), torch::kFloat);
      }
    }
  });
}

// torch's means have the same error in each step, and the sum of the errors grows. With error
// feedback the sum has the error of one step: what the ranks and the means still keep.
TEST(CommHooksConformance, ErrorsOfQuantizedMeansDoNotAddUpAsTorchsDo) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    const json data = conformance("comm_hooks.json");
    const at::Tensor of_torch = torch::tensor(
        quantized_case(data, "different channels").at("perchannel").get<std::vector<double>>(),
        torch::kDouble);
    constexpr int kSteps = 8;
    at::Tensor sum = torch::zeros({kElements}, torch::kDouble);
    for (const at::Tensor& mean : quantized_means(
             group, quantized_gradient("different channels", rank.number()), true, kSteps))
      sum += mean;
    for (std::int64_t channel = 0; channel < kChannels; ++channel) {
      SCOPED_TRACE(channel);
      const Channel in(channel);
      // Half a step in each rounding, of gradients to which up to half a step has been added.
      const double bound = in.largest / 126;
      EXPECT_LE(largest_of(channel_of(sum, channel) - kSteps * in.exact), bound);
      EXPECT_GT(largest_of(kSteps * (channel_of(of_torch, channel) - in.exact)), bound);
    }
  });
}

// An inf becomes NaN in the whole bucket, as in torch's bucket; torch's channels keep the others.
TEST(CommHooksConformance, QuantizedMeansWithAnInfiniteGradientAreNotFinite) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    const json data = conformance("comm_hooks.json");
    const json& given = quantized_case(data, "infinite");
    EXPECT_EQ(given.at("pertensor_finite"), 0);
    EXPECT_EQ(given.at("perchannel_finite"), kElements - kChannel);
    const at::Tensor mean =
        quantized_means(group, quantized_gradient("infinite", rank.number()), true, 1)[0];
    EXPECT_TRUE(mean.isnan().all().item<bool>());
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

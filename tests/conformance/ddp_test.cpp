// ddp.json: PyTorch trains a small network in one process. For any division of its batches into
// ranks and micro-batches, DistributedDataParallel must follow the same path.
#include "semitone/comm/init.h"
#include "semitone/parallel/distributed_data_parallel.h"
#include "tests/support/conformance.h"
#include "tests/support/run_ranks.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>

namespace semitone::test {
namespace {

using nlohmann::json;
using parallel::DistributedDataParallel;
using parallel::DistributedDataParallelOptions;

at::Tensor tensor_of(const json& value, const std::vector<std::int64_t>& shape,
                     at::ScalarType dtype) {
  std::vector<double> data;
  for (const json& each : value) data.push_back(number(each));
  return torch::tensor(data, torch::kDouble).view(shape).to(dtype);
}
at::Tensor tensor_of(const json& value, at::ScalarType dtype) {
  return tensor_of(value.at("data"), value.at("shape").get<std::vector<std::int64_t>>(), dtype);
}

// Linear, activation, Linear, activation, Linear.
struct MLPImpl : torch::nn::Module {
  MLPImpl(const json& description, at::ScalarType dtype)
      : activation(description.at("activation")) {
    for (const json& value : description.at("params")) {
      weights.push_back(
          register_parameter("p" + std::to_string(weights.size()), tensor_of(value, dtype)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (std::size_t layer = 0; layer < 6; layer += 2) {
      x = torch::linear(x, weights[layer], weights[layer + 1]);
      if (layer == 4) break;
      x = activation == "tanh"   ? torch::tanh(x)
          : activation == "relu" ? torch::relu(x)
                                 : torch::gelu(x);
    }
    return x;
  }
  std::string activation;
  std::vector<at::Tensor> weights;
};
TORCH_MODULE(MLP);

struct Case {
  const json& description;
  at::ScalarType dtype;
  const json& run;  // what PyTorch computed

  // The sum of the row losses of rows [begin, end) of a step's batch.
  at::Tensor loss(const at::Tensor& output, int step, std::int64_t begin, std::int64_t end) const {
    const json& values = batch(step).at("targets");
    if (description.at("loss") == "mse") {
      const at::Tensor target = tensor_of(values, dtype).slice(0, begin, end);
      return (output - target).pow(2).mean(1).sum();
    }
    const at::Tensor target =
        tensor_of(values, torch::kDouble).to(torch::kLong).slice(0, begin, end);
    return torch::cross_entropy_loss(output, target, {}, at::Reduction::Sum, -100,
                                     description.at("label_smoothing").get<double>());
  }
  const json& batch(int step) const {
    const json& batches = description.at("batches");
    return batches.at(static_cast<std::size_t>(step) % batches.size());
  }
};

void expect_near(const at::Tensor& got, const json& want, at::ScalarType dtype,
                 const std::string& what) {
  // As described in the data's README.
  const double relative = dtype == torch::kDouble ? 1e-11 : 2e-5;
  const double absolute = dtype == torch::kDouble ? 1e-13 : 1e-6;
  const at::Tensor flat = got.detach().to(torch::kDouble).contiguous().view(-1);
  ASSERT_EQ(flat.numel(), static_cast<std::int64_t>(want.size()));
  for (std::int64_t i = 0; i < flat.numel(); ++i) {
    const double expected = number(want.at(static_cast<std::size_t>(i)));
    EXPECT_FALSE(
        !(std::abs(flat[i].item<double>() - expected) <= absolute + relative * std::abs(expected)))
        << what << "[" << i << "]: " << flat[i].item<double>() << ", not " << expected;
  }
}

void follow(const Case& given, const json& split, const comm::Group& group,
            const DistributedDataParallelOptions& options) {
  const json& o = given.description.at("options");
  MLP model(given.description, given.dtype);
  DistributedDataParallel ddp(model, group, options);
  torch::optim::SGD optimizer(model->parameters(),
                              torch::optim::SGDOptions(o.at("lr").get<double>())
                                  .momentum(o.at("momentum").get<double>())
                                  .dampening(o.at("dampening").get<double>())
                                  .weight_decay(o.at("weight_decay").get<double>())
                                  .nesterov(o.at("nesterov").get<bool>()));
  const json& deal = split.at("micro_batches");
  std::int64_t first_row = 0;
  for (int rank = 0; rank < group.rank(); ++rank) {
    for (const json& rows : deal.at(static_cast<std::size_t>(rank)))
      first_row += rows.get<std::int64_t>();
  }
  const json& mine = deal.at(static_cast<std::size_t>(group.rank()));
  for (int step = 0; step < 6; ++step) {
    const at::Tensor inputs = tensor_of(given.batch(step).at("inputs"), given.dtype);
    const double weight = static_cast<double>(group.size()) / static_cast<double>(inputs.size(0));
    optimizer.zero_grad();
    double total = 0;
    std::int64_t row = first_row;
    for (std::size_t part = 0; part < mine.size(); ++part) {
      const std::int64_t end = row + mine.at(part).get<std::int64_t>();
      std::optional<parallel::NoSync> local;
      if (part + 1 < mine.size()) local.emplace(ddp.no_sync());
      const at::Tensor loss =
          given.loss(ddp.forward(inputs.slice(0, row, end)), step, row, end) * weight;
      loss.backward();
      total += loss.item<double>();
      row = end;
    }
    at::Tensor mean = torch::full({1}, total, torch::kDouble);
    group.all_reduce(mean, comm::ReduceOp::mean);
    expect_near(mean, json::array({given.run.at("loss").at(static_cast<std::size_t>(step))}),
                given.dtype, "loss");
    const auto parameters = model->parameters();
    for (std::size_t i = 0; i < parameters.size() && step == 0; ++i)
      expect_near(parameters[i].grad(), given.run.at("first_grads").at(i), given.dtype, "gradient");
    optimizer.step();
    for (std::size_t i = 0; i < parameters.size(); ++i)
      expect_near(parameters[i], given.run.at("params").at(static_cast<std::size_t>(step)).at(i),
                  given.dtype, "parameter");
  }
}

void follow_all(const comm::Group& group) {
  const json data = conformance("ddp.json");
  int followed = 0;
  for (const json& description : data.at("cases")) {
    for (const json& split : description.at("splits")) {
      if (split.at("world").get<int>() != group.size()) continue;
      SCOPED_TRACE(description.at("name").get<std::string>() + " " +
                   split.at("micro_batches").dump());
      ++followed;
      for (const auto& options :
           {DistributedDataParallelOptions(),
            DistributedDataParallelOptions().gradient_as_bucket_view(true).bucket_cap_mb(0.0002),
            DistributedDataParallelOptions().delay_allreduce(true)}) {
        follow({description, torch::kDouble, description.at("runs").at("float64")}, split, group,
               options);
        follow({description, torch::kFloat, description.at("runs").at("float32")}, split, group,
               options);
      }
    }
  }
  EXPECT_GE(followed, 3);
}

TEST(DdpConformance, OfOneProcess) {
  follow_all(comm::Group());
}

TEST(DdpConformance, OfTwoRanks) {
  run_ranks(2, [](Rank&) { follow_all(comm::init()); });
}

TEST(DdpConformance, OfFourRanks) {
  run_ranks(4, [](Rank&) { follow_all(comm::init()); });
}

}  // namespace
}  // namespace semitone::test

// What a Recorder says of a step.

#include "semitone/report/recorder.h"

#include "semitone/report/nonfinite_check.h"
#include "tests/report/samples.h"
#include "tests/support/optimizers.h"
#include "tests/support/tensors.h"
#include "tests/support/toy_nets.h"

#include <ATen/record_function.h>
#include <torch/torch.h>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace semitone::report::recorder_test {
namespace {

using semitone::test::TemporaryFolder;
using semitone::test::ToyConvNet;
using semitone::test::ToyNet;
using test::expect_sampled;
using test::find_in;
using test::sample_in;
using test::tensor_in;

// The names of the operators that this thread calls, and how often, by a callback of its own.
std::map<std::string, std::int64_t>& calls_here() {
  static thread_local std::map<std::string, std::int64_t> calls;
  return calls;
}

std::unique_ptr<at::ObserverContext> count_call(const at::RecordFunction& record) {
  if (!record.operator_name().has_value()) return nullptr;
  const std::string overload = record.operator_name()->overload_name;
  std::string name = record.operator_name()->name;
  if (name.starts_with("aten::")) name.erase(0, 6);
  if (name.empty()) return nullptr;  // of the autograd engine
  ++calls_here()[name + (overload.empty() ? "" : "." + overload)];
  return nullptr;
}

class CountedCalls {
 public:
  CountedCalls()
      : handle_(at::addThreadLocalCallback(
            at::RecordFunctionCallback(&count_call).scopes({at::RecordScope::FUNCTION}))) {}
  ~CountedCalls() { at::removeCallback(handle_); }
  CountedCalls(const CountedCalls&) = delete;
  CountedCalls& operator=(const CountedCalls&) = delete;

 private:
  at::CallbackHandle handle_;
};

// The same from a sample.
std::map<std::string, std::int64_t> calls_in(const nlohmann::json& sample) {
  std::map<std::string, std::int64_t> calls;
  for (const auto& row : sample.at("operators"))
    calls[row.at("name").get<std::string>()] += row.at("calls").get<std::int64_t>();
  return calls;
}

struct Pass {
  std::vector<at::Tensor> outputs;  // of conv, norm and head, with their gradients
  at::Tensor loss;
};

Pass forward(ToyConvNet& net, const at::Tensor& x) {
  Pass pass;
  pass.outputs.push_back(net->conv(x));
  pass.outputs.push_back(net->norm(pass.outputs[0]));
  pass.outputs.push_back(net->head(torch::relu(pass.outputs[1]).mean({2, 3})));
  for (const at::Tensor& output : pass.outputs) output.retain_grad();
  pass.loss = torch::cross_entropy_loss(pass.outputs[2], torch::tensor({0, 2, 1, 0}));
  return pass;
}

at::Tensor images() {
  return torch::linspace(-2, 3, 4 * 2 * 6 * 6).view({4, 2, 6, 6});
}

// As an optimizer does with gradients that nothing has multiplied.
void change_weights(const torch::nn::Module& net) {
  const torch::NoGradGuard no_grad;
  for (const at::Tensor& weight : net.parameters()) weight.mul_(0.5);
}

TEST(Recorder, CountsTheValuesOfEveryTensor) {
  torch::manual_seed(1);
  const TemporaryFolder folder;
  ToyConvNet net;
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  const auto names = net->named_parameters().keys();
  const auto before = semitone::test::copies(net->parameters());
  RunLog log(folder.path());
  const Recorder recorder(log, *net);
  log.set_step(1);
  const Pass pass = forward(net, images());
  pass.loss.backward();
  optimizer.step();
  log.close();

  const nlohmann::json sample = sample_in(folder.path());
  for (std::size_t i = 0; i < names.size(); ++i) {
    expect_sampled(sample, "weight", names[i], before[i]);
    expect_sampled(sample, "gradient", names[i], net->parameters()[i].grad());
  }
  const char* const layers[] = {"conv", "norm", "head"};
  for (std::size_t i = 0; i < 3; ++i) {
    expect_sampled(sample, "output", layers[i], pass.outputs[i]);
    expect_sampled(sample, "output_gradient", layers[i], pass.outputs[i].grad());
  }
  EXPECT_EQ(sample.at("tensors").size(), 2 * names.size() + 6);
  EXPECT_EQ(tensor_in(sample, "output", "conv").at("dtype"), "Float");
  EXPECT_FALSE(sample.contains("loss_scale"));
  EXPECT_EQ(sample.at("skipped"), false);
}

TEST(Recorder, DescribesTheModelOnce) {
  const TemporaryFolder folder;
  ToyConvNet net;
  RunLog log(folder.path(), RunLogOptions().world_size(4));
  const Recorder recorder(log, *net, RecorderOptions().every(1));
  for (const std::int64_t step : {7, 8}) log.set_step(step);
  log.close();
  const auto lines = test::lines_of_kind(folder.path(), "model");
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_EQ(lines[0].at("step"), 7);
  EXPECT_EQ(lines[0].at("device"), "cpu");
  EXPECT_EQ(lines[0].at("world_size"), 4);
  EXPECT_EQ(lines[0].at("threads"), at::get_num_threads());
  EXPECT_EQ(lines[0].at("parameters").size(), 6U);
  EXPECT_EQ(lines[0].at("parameters")[0], nlohmann::json({{"name", "conv.weight"},
                                                          {"layer", "conv"},
                                                          {"layer_type", "Conv2d"},
                                                          {"shape", {4, 2, 3, 3}},
                                                          {"dtype", "Float"}}));
}

TEST(Recorder, CountsCallsInOneStepTogether) {
  torch::manual_seed(2);
  const TemporaryFolder folder;
  ToyConvNet net;
  RunLog log(folder.path());
  const Recorder recorder(log, *net);
  log.set_step(0);
  const Pass first = forward(net, images());
  first.loss.backward();
  const Pass second = forward(net, -images());
  second.loss.backward();
  change_weights(*net);
  log.close();
  const nlohmann::json sample = sample_in(folder.path());
  expect_sampled(sample, "output", "head", torch::cat({first.outputs[2], second.outputs[2]}));
  expect_sampled(sample, "output_gradient", "conv",
                 torch::cat({first.outputs[0].grad(), second.outputs[0].grad()}));
}

TEST(Recorder, OperatorsThatAreNoLayersHaveNoOutputs) {
  const TemporaryFolder folder;
  ToyNet net;
  RunLog log(folder.path());
  const Recorder recorder(log, *net);
  log.set_step(1);
  const at::Tensor weight = net->first->weight;
  (weight.square().sum() + weight.to(torch::kHalf).sum()).backward();
  {
    const torch::NoGradGuard no_grad;
    weight.add_(torch::ones_like(weight));
  }
  log.close();
  const nlohmann::json sample = sample_in(folder.path());
  EXPECT_TRUE(tensor_in(sample, "output", "first").is_null());
  EXPECT_TRUE(tensor_in(sample, "gradient", "second.weight").is_null());
  expect_sampled(sample, "gradient", "first.weight", weight.grad());
}

TEST(Recorder, CountsTheCallsOfEveryOperator) {
  const TemporaryFolder folder;
  ToyConvNet net;
  torch::optim::Adam optimizer(net->parameters());
  RunLog log(folder.path());
  const Recorder recorder(log, *net);
  const CountedCalls counted;
  log.set_step(1);
  calls_here().clear();
  for (int i = 0; i < 3; ++i) forward(net, images()).loss.backward();
  optimizer.step();
  const auto calls = calls_here();
  log.close();
  const nlohmann::json sample = sample_in(folder.path());
  EXPECT_EQ(calls_in(sample), calls);
  const auto& operators = sample.at("operators");
  const auto conv = find_in(operators, {{"name", "conv2d"}});
  EXPECT_EQ(conv.at("pass"), "forward");
  EXPECT_EQ(conv.at("dtype"), "Float");
  EXPECT_EQ(conv.at("kernel"), "native");
  EXPECT_EQ(conv.at("calls"), 3);
  EXPECT_EQ(conv.at("casts"), 0);
  const auto relu = find_in(operators, {{"name", "relu"}});
  EXPECT_EQ(relu.at("bytes"), 3 * 2 * 4 * (4 * 4 * 6 * 6));
  const auto gradient = find_in(operators, {{"name", "convolution_backward"}});
  EXPECT_EQ(gradient.at("pass"), "backward");
  EXPECT_EQ(gradient.at("calls"), 3);
  // Without events, the optimizer's are not known as such.
  EXPECT_EQ(find_in(operators, {{"name", "addcdiv_"}}).at("pass"), "other");
  for (const auto& row : operators) EXPECT_GE(row.at("seconds"), 0);
}

// What autocast reports of an operator that computes with values in 16 bits, in fp32.
std::unique_ptr<at::ObserverContext> emulate_relu(const at::RecordFunction& record) {
  if (std::string_view(record.name()) != "aten::relu") return nullptr;
  events::emit(events::Cast{"relu", torch::kHalf, torch::kFloat, 7, false});
  events::emit(events::OperatorReplaced{"relu", "emulated"});
  return nullptr;
}

TEST(Recorder, NamesTheKernelAndTheDtypeOfTheComputation) {
  const TemporaryFolder folder;
  ToyNet net;
  RunLog log(folder.path());
  const Recorder recorder(log, *net);
  log.set_step(1);
  const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(&emulate_relu));
  torch::relu(torch::ones({7}, torch::kHalf));
  at::removeCallback(handle);
  events::emit(events::Cast{"mylib::op", torch::kFloat, torch::kBFloat16, 5, true});
  torch::arange(3).add(1);
  torch::ones({3}).mul(2.5);
  torch::ones({3}, torch::kBFloat16).mul(torch::tensor(2.5, torch::kDouble));
  torch::tensor(2.5, torch::kDouble).mul(3);
  log.close();
  const auto operators = sample_in(folder.path()).at("operators");
  const auto relu = find_in(operators, {{"name", "relu"}});
  EXPECT_EQ(relu.at("kernel"), "emulated");
  EXPECT_EQ(relu.at("dtype"), "Half");
  EXPECT_EQ(relu.at("casts"), 1);
  EXPECT_EQ(relu.at("cached_casts"), 0);
  EXPECT_EQ(relu.at("cast_bytes"), 7 * (2 + 4));
  // A function of one's own is no operator that LibTorch calls.
  const auto other = find_in(operators, {{"name", "mylib::op"}});
  EXPECT_EQ(other.at("dtype"), "BFloat16");
  EXPECT_EQ(other.at("calls"), 0);
  EXPECT_EQ(other.at("cached_casts"), 1);
  EXPECT_EQ(other.at("cast_bytes"), 0);
  EXPECT_EQ(find_in(operators, {{"name", "add.Scalar"}}).at("dtype"), "");
  // Numbers do not make it wider.
  for (const char* const dtype : {"Float", "BFloat16", "Double"})
    EXPECT_EQ(find_in(operators, {{"name", "mul.Tensor"}, {"dtype", dtype}}).at("calls"), 1);
}

TEST(Recorder, PartsOfTheStepSumToItsTime) {
  const TemporaryFolder folder;
  ToyConvNet net;
  RunLog log(folder.path());
  const Recorder recorder(log, *net, RecorderOptions().every(1));
  for (const bool has_events : {false, true}) {
    log.set_step(has_events ? 2 : 1);
    const Pass pass = forward(net, images());
    pass.loss.backward();
    if (!has_events) continue;
    const events::PhaseScope optimizer(events::Phase::optimizer);
    const torch::NoGradGuard no_grad;
    for (const at::Tensor& weight : net->parameters()) weight.mul_(0.5);
    const events::PhaseScope communication(events::Phase::communication);
    images().add_(1);
  }
  log.close();
  const auto samples = test::lines_of_kind(folder.path(), "sample");
  ASSERT_EQ(samples.size(), 2U);
  for (const auto& sample : samples) {
    std::vector<std::string> names;
    double sum = 0;
    for (const auto& [name, seconds] : sample.at("phases").items()) {
      EXPECT_GE(seconds, 0) << name;
      sum += seconds.get<double>();
    }
    EXPECT_NEAR(sum, sample.at("seconds").get<double>(), 1e-9);
    EXPECT_GT(sample.at("phases").at("forward"), 0);
    EXPECT_GT(sample.at("phases").at("backward"), 0);
  }
  EXPECT_EQ(samples[0].at("phases").at("optimizer"), 0);
  EXPECT_GT(samples[1].at("phases").at("optimizer"), 0);
  EXPECT_GT(samples[1].at("phases").at("communication"), 0);
  EXPECT_EQ(find_in(samples[1].at("operators"), {{"name", "mul_.Scalar"}, {"pass", "other"}}),
            nullptr);
  EXPECT_FALSE(find_in(samples[1].at("operators"), {{"pass", "optimizer"}}).is_null());
}

// As fused optimizers with split masters do. Nothing here can tell the fp32 weights.
TEST(Recorder, KnowsNoUpdatesOfWeightsThatOnlyTheOptimizerHas) {
  const TemporaryFolder folder;
  ToyNet net;
  net->to(torch::kBFloat16);
  const std::vector<at::Tensor> parameters = net->parameters();
  const std::vector<at::Tensor> masters(parameters.size());
  std::vector<at::Tensor> gradients;
  std::int64_t elements = 0;
  for (const at::Tensor& parameter : parameters) {
    gradients.push_back(torch::ones_like(parameter));
    elements += parameter.numel();
  }
  RunLog log(folder.path());
  const Recorder recorder(log, *net);
  log.set_step(1);
  events::emit(events::GradientsReady{parameters, gradients, masters, 1});
  log.close();
  const nlohmann::json sample = sample_in(folder.path());
  EXPECT_TRUE(sample.at("updates").empty());
  EXPECT_EQ(sample.at("memory").at("masters"), 2 * elements);
}

TEST(Recorder, TakesGradientsAndMastersFromTheirEvent) {
  const TemporaryFolder folder;
  ToyNet net;
  net->to(torch::kHalf);
  std::vector<at::Tensor> parameters = net->parameters();
  std::vector<at::Tensor> masters;
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : parameters) {
    masters.push_back(parameter.detach().to(torch::kFloat));
    gradients.push_back(torch::randn_like(parameter));
  }
  RunLog log(folder.path());
  const Recorder recorder(log, *net);
  log.set_step(1);
  events::emit(events::GradientsReady{parameters, gradients, masters, 1024});
  masters[0] += 1e-6F;  // too small for 16 bits, but not for every element of fp32
  events::emit(events::LossScaleUpdated{0, 1024, 512, true});
  events::emit(events::StepSkipped{"first.weight", 1, 1, 1, 1024});
  log.close();
  const nlohmann::json sample = sample_in(folder.path());
  EXPECT_EQ(sample.at("loss_scale"), 1024);
  EXPECT_EQ(sample.at("skipped"), true);
  EXPECT_EQ(tensor_in(sample, "gradient", "second.weight").at("dtype"), "Half");
  expect_sampled(sample, "gradient", "second.weight", gradients[2].to(torch::kFloat) / 1024);
  std::int64_t numel = 0;
  for (const at::Tensor& parameter : parameters) numel += parameter.numel();
  EXPECT_EQ(sample.at("memory").at("parameters"), 2 * numel);
  EXPECT_EQ(sample.at("memory").at("masters"), 4 * numel);
  EXPECT_EQ(sample.at("memory").at("gradients"), 2 * numel);
  const auto update = find_in(sample.at("updates"), {{"name", "first.weight"}});
  EXPECT_GT(update.at("changed"), 0);
  EXPECT_LE(update.at("changed"), 48);
  EXPECT_EQ(find_in(sample.at("updates"), {{"name", "second.bias"}}).at("changed"), 0);
}

TEST(Recorder, CountsUpdatesThatSixteenBitsWouldLose) {
  const TemporaryFolder folder;
  torch::nn::Linear net(torch::nn::LinearOptions(4, 1).bias(false));
  const torch::NoGradGuard no_grad;
  net->weight.fill_(1);
  RunLog log(folder.path());
  const Recorder recorder(log, *net);
  log.set_step(1);
  // Below half a unit in the last place of fp16 at 1, of bf16, and above both; and no change.
  net->weight.copy_(torch::tensor({{1 + 1e-4, 1 + 1e-3, 1.5, 1.0}}));
  log.close();
  const nlohmann::json sample = sample_in(folder.path());
  ASSERT_EQ(sample.at("updates").size(), 1U);
  const auto& update = sample.at("updates")[0];
  EXPECT_EQ(update.at("name"), "weight");
  EXPECT_EQ(update.at("numel"), 4);
  EXPECT_EQ(update.at("changed"), 3);
  EXPECT_EQ(update.at("lost"), nlohmann::json({{"Half", 1}, {"BFloat16", 2}}));
  EXPECT_NEAR(update.at("ratio").get<double>(), 0.25, 1e-5);
}

// What a graph keeps: the result of relu, which also is the caller's, and nothing of the layer's own
// output. The loss is a number.
TEST(Recorder, MeasuresWhatTheForwardPassLeavesToTheBackwardPass) {
  const TemporaryFolder folder;
  torch::nn::Linear net(16, 32);
  const at::Tensor data = torch::ones({100, 16});  // a whole data set, of which a step uses a part
  RunLog log(folder.path());
  const Recorder recorder(log, *net, RecorderOptions().every(1));
  for (const std::int64_t passes : {1, 2}) {
    log.set_step(passes);
    for (std::int64_t pass = 0; pass < passes; ++pass) {  // the passes of a step do not add up
      const at::Tensor y = torch::relu(net(data.narrow(0, 8 * pass, 8)));
      {
        const torch::NoGradGuard no_grad;
        net(data);  // not in use any more
      }
      y.sum().backward();
    }
  }
  log.close();
  const auto samples = test::lines_of_kind(folder.path(), "sample");
  ASSERT_EQ(samples.size(), 2U);
  for (const auto& sample : samples) {
    // backward() makes the first gradient before it begins: another number.
    EXPECT_EQ(sample.at("memory").at("activations"), 8 * 32 * 4 + 4 + 4);
  }
}

TEST(Recorder, SaysHowBatchNormsCompute) {
  const TemporaryFolder folder;
  torch::nn::Sequential net(
      torch::nn::BatchNorm1d(4),
      torch::nn::BatchNorm1d(torch::nn::BatchNormOptions(4).affine(false)),
      torch::nn::BatchNorm1d(torch::nn::BatchNormOptions(4).track_running_stats(false)));
  net[1]->eval();
  RunLog log(folder.path());
  const Recorder recorder(log, *net, RecorderOptions().every(1));
  log.set_step(1);
  {
    const torch::NoGradGuard no_grad;  // an evaluation
    net->eval();
    net->forward(torch::ones({8, 4}));
    net->train();
    net[1]->eval();
  }
  net->forward(torch::randn({8, 4})).square().sum().backward();
  log.close();
  EXPECT_EQ(sample_in(folder.path()).at("batch_norms"),
            nlohmann::json::parse(R"([{"layer": "0", "training": true, "dtype": "Float"},
                                      {"layer": "1", "training": false, "dtype": "Float"},
                                      {"layer": "2", "training": true}])"));
}

TEST(Recorder, DescribesTheOptimizers) {
  const TemporaryFolder folder;
  ToyNet net;
  torch::optim::Adam adam({torch::optim::OptimizerParamGroup(net->parameters())},
                          torch::optim::AdamOptions(0.1).eps(1e-6));
  torch::optim::SGD sgd({torch::ones({2}, torch::kHalf)}, 0.1);
  RunLog log(folder.path());
  Recorder recorder(log, *net, RecorderOptions().every(1));
  recorder.add_optimizer(adam);
  recorder.add_optimizer(sgd);
  log.set_step(1);
  log.close();
  EXPECT_EQ(test::lines_of_kind(folder.path(), "model").at(0).at("optimizers"),
            nlohmann::json::parse(R"([
    {"type": "Adam", "groups": [{"dtype": "Float", "rule": "Adam", "eps": 1e-6}]},
    {"type": "SGD", "groups": [{"dtype": "Half", "rule": "SGD"}]}])"));
}

TEST(Recorder, TakesOptimizersThatCannotBeSaved) {
  const TemporaryFolder folder;
  ToyNet net;
  semitone::test::OwnOptimizer own(net->parameters());
  RunLog log(folder.path());
  Recorder recorder(log, *net, RecorderOptions().every(1));
  recorder.add_optimizer(own);
  for (const std::int64_t step : {1, 2}) {
    log.set_step(step);
    net(torch::ones({2, 6})).sum().backward();
    own.step();
    ASSERT_FALSE(own.state().empty());
  }
  log.close();
  EXPECT_EQ(test::lines_of_kind(folder.path(), "model").at(0).at("optimizers"),
            nlohmann::json::parse(
                R"([{"type": "OwnOptimizer", "groups": [{"dtype": "Float", "rule": "Own"}]}])"));
  const auto samples = test::lines_of_kind(folder.path(), "sample");
  ASSERT_EQ(samples.size(), 2U);
  EXPECT_EQ(samples[1].at("memory").at("optimizer_state"), 0);
}

TEST(Recorder, MeasuresTheStateOfOptimizers) {
  const TemporaryFolder folder;
  ToyNet net;
  torch::optim::Adam optimizer(net->parameters());
  torch::optim::SGD plain(net->parameters(), 0.1);
  RunLog log(folder.path());
  Recorder recorder(log, *net, RecorderOptions().every(1));
  recorder.add_optimizer(optimizer);
  recorder.add_optimizer(plain);
  for (const std::int64_t step : {1, 2}) {
    log.set_step(step);
    if (step == 1) continue;
    net(torch::ones({2, 6})).sum().backward();
    optimizer.step();
  }
  log.close();
  const auto samples = test::lines_of_kind(folder.path(), "sample");
  ASSERT_EQ(samples.size(), 2U);
  EXPECT_EQ(samples[0].at("memory").at("optimizer_state"), 0);
  EXPECT_EQ(samples[1].at("memory").at("optimizer_state"),
            2 * samples[1].at("memory").at("parameters").get<std::int64_t>());
}

TEST(Recorder, MeasuresTheGrowingStateOfLbfgs) {
  const TemporaryFolder folder;
  torch::nn::Linear net(torch::nn::LinearOptions(4, 1).bias(false));
  torch::optim::LBFGS optimizer(net->parameters(),
                                torch::optim::LBFGSOptions(0.01).max_iter(1).history_size(8));
  RunLog log(folder.path());
  Recorder recorder(log, *net, RecorderOptions().every(1));
  recorder.add_optimizer(optimizer);
  for (std::int64_t step = 1; step <= 3; ++step) {
    log.set_step(step);
    optimizer.step([&] {
      optimizer.zero_grad();
      at::Tensor loss = net(torch::eye(4)).exp().sum();
      loss.backward();
      return loss;
    });
  }
  log.close();
  std::vector<std::int64_t> bytes;
  bytes.reserve(3);
  for (const auto& sample : test::lines_of_kind(folder.path(), "sample"))
    bytes.push_back(sample.at("memory").at("optimizer_state").get<std::int64_t>());
  ASSERT_EQ(bytes.size(), 3U);
  // Each later step adds a direction, a step and a number.
  EXPECT_GE(bytes[1], bytes[0] + 2 * 4 * 4);
  EXPECT_GE(bytes[2], bytes[1] + 2 * 4 * 4);
}

TEST(Recorder, NestsWithNonFiniteCheck) {
  const TemporaryFolder folder;
  ToyConvNet net;
  RunLog log(folder.path());
  const Recorder recorder(log, *net);
  const NonFiniteCheck check(*net);
  const CountedCalls counted;
  log.set_step(1);
  calls_here().clear();
  forward(net, images()).loss.backward();
  const auto calls = calls_here();
  log.close();
  EXPECT_EQ(calls_in(sample_in(folder.path())), calls);
  EXPECT_NO_THROW(check.throw_if_found());
  torch::log(images() - 100);
  EXPECT_TRUE(check.finding().has_value());
}

}  // namespace
}  // namespace semitone::report::recorder_test

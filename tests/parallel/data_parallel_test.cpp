#include "semitone/parallel/data_parallel.h"

#include "semitone/amp/initialize.h"
#include "semitone/autocast/autocast.h"
#include "semitone/core/events.h"
#include "semitone/recompute/checkpoint.h"
#include "src/parallel/gpu_balance.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"
#include "tests/support/toy_nets.h"

#include <ATen/Parallel.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <initializer_list>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <vector>

namespace semitone::parallel {
namespace {

using test::error_of;
using test::expect_error;
using test::gradients_of;
using test::ToyNet;
using ::testing::HasSubstr;

constexpr double kTolerance = 1e-12;  // fp64: what the order of additions may change

DataParallelOptions on(int replicas) {
  return DataParallelOptions().replicas(replicas);
}

ToyNet seeded_net(at::ScalarType dtype = at::kDouble, bool normalised = false) {
  torch::manual_seed(1);
  ToyNet model(test::ToyNetOptions{.normalised = normalised, .activation = at::tanh});
  model->to(dtype);
  return model;
}

at::Tensor rows(std::int64_t count, at::ScalarType dtype = at::kDouble) {
  torch::manual_seed(2);
  return torch::randn({count, 6}, torch::kDouble).to(dtype);
}

// Runs a function on the rows of each replica.
struct ProbeImpl : torch::nn::Cloneable<ProbeImpl> {
  using Function = std::function<at::Tensor(const at::Tensor&)>;
  explicit ProbeImpl(Function what) : function(std::move(what)) { reset(); }
  void reset() override { scale = register_parameter("scale", torch::ones({1})); }
  at::Tensor forward(const at::Tensor& x) { return function(x); }
  Function function;
  at::Tensor scale;
};
TORCH_MODULE(Probe);

at::Tensor rows_as_scalar(const at::Tensor& x) {
  return torch::full({}, static_cast<double>(x.size(0)));
}

TEST(DataParallel, ComputesAndBackPropagatesAsTheModelAlone) {
  ToyNet alone = seeded_net();
  const at::Tensor x = rows(7);
  const at::Tensor want = alone->forward(x);
  want.pow(2).sum().backward();
  for (const int replicas : {1, 2, 3, 4, 7, 9}) {
    SCOPED_TRACE(replicas);
    ToyNet model = seeded_net();
    DataParallel parallel(model, on(replicas));
    EXPECT_EQ(parallel.devices().size(), static_cast<std::size_t>(replicas));
    EXPECT_EQ(&*parallel, model.get());
    const at::Tensor got = parallel.forward(x);
    EXPECT_TRUE(test::near(got, want, kTolerance));
    got.pow(2).sum().backward();
    for (std::size_t i = 0; i < model->parameters().size(); ++i) {
      EXPECT_TRUE(
          test::near(model->parameters()[i].grad(), alone->parameters()[i].grad(), kTolerance));
    }
  }
}

TEST(DataParallel, AddsGradientsInOneOrder) {
  const at::Tensor x = rows(16, at::kFloat);
  std::vector<at::Tensor> first;
  for (int run = 0; run < 8; ++run) {
    ToyNet model = seeded_net(at::kFloat);
    DataParallel parallel(model, on(4));
    parallel(x).pow(2).sum().backward();
    const auto gradients = gradients_of(model->parameters());
    if (run == 0) first = gradients;
    for (std::size_t i = 0; i < first.size(); ++i)
      EXPECT_TRUE(test::same_bits(gradients[i], first[i]));
  }
}

TEST(DataParallel, CanBeDifferentiatedTwice) {
  const auto gradients = [](int replicas) {
    ToyNet model = seeded_net();
    DataParallel parallel(model, on(replicas));
    const at::Tensor x = rows(6).requires_grad_();
    const at::Tensor loss = parallel(x).pow(2).sum();
    const auto inner = torch::autograd::grad({loss}, {x, model->first->weight}, {},
                                             /*retain_graph=*/true, /*create_graph=*/true);
    (inner[0].pow(2).sum() + inner[1].pow(2).sum()).backward();
    return gradients_of(model->parameters());
  };
  const auto want = gradients(1);
  const auto got = gradients(3);
  for (std::size_t i = 0; i < want.size(); ++i) EXPECT_TRUE(test::near(got[i], want[i], 1e-11));
}

TEST(DataParallel, KeepsGraphsOfEarlierForwardsIntact) {
  ToyNet alone = seeded_net();
  ToyNet model = seeded_net();
  DataParallel parallel(model, on(2));
  const at::Tensor x = rows(4);
  const at::Tensor one = parallel(x).sum();
  const at::Tensor two = parallel(x * 2).pow(2).sum();
  one.backward();
  two.backward();
  alone->forward(x).sum().backward();
  alone->forward(x * 2).pow(2).sum().backward();
  EXPECT_TRUE(test::near(model->first->weight.grad(), alone->first->weight.grad(), kTolerance));
}

TEST(DataParallel, LeavesFrozenAndUnusedParametersWithoutGradient) {
  struct UnevenImpl : torch::nn::Cloneable<UnevenImpl> {
    UnevenImpl() { reset(); }
    void reset() override {
      used = register_module("used", torch::nn::Linear(6, 3));
      frozen = register_module("frozen", torch::nn::Linear(6, 3));
      never = register_module("never", torch::nn::Linear(6, 3));
      tied = register_parameter("tied", used->weight);
    }
    at::Tensor forward(const at::Tensor& x) {
      EXPECT_EQ(frozen->weight.requires_grad(), false);
      return used->forward(x) + frozen->forward(x) + torch::linear(x, tied);
    }
    torch::nn::Linear used{nullptr}, frozen{nullptr}, never{nullptr};
    at::Tensor tied;
  };
  torch::manual_seed(1);
  const auto model = std::make_shared<UnevenImpl>();
  for (const at::Tensor& parameter : model->frozen->parameters())
    parameter.set_requires_grad(false);
  DataParallel parallel(model, on(3));
  const at::Tensor x = rows(6, at::kFloat);
  parallel(x).pow(2).sum().backward();
  EXPECT_FALSE(model->frozen->weight.grad().defined());
  EXPECT_FALSE(model->never->weight.grad().defined());
  const at::Tensor got = model->used->weight.grad().clone();
  model->zero_grad();
  model->forward(x).pow(2).sum().backward();
  EXPECT_TRUE(
      test::near(got, model->used->weight.grad(), test::reduction_tolerance(at::kFloat, 18)));
}

TEST(Scatter, CutsAsChunkDoes) {
  Probe model(rows_as_scalar);
  DataParallel parallel(model, on(4));
  const auto shares = [&](std::int64_t count) { return parallel(torch::ones({count, 2})); };
  EXPECT_TRUE(torch::equal(shares(8), torch::tensor({2., 2., 2., 2.})));
  EXPECT_TRUE(torch::equal(shares(7), torch::tensor({2., 2., 2., 1.})));
  EXPECT_TRUE(torch::equal(shares(5), torch::tensor({2., 2., 1.})));
  EXPECT_TRUE(torch::equal(shares(3), torch::tensor({1., 1., 1.})));
  EXPECT_TRUE(torch::equal(shares(1), torch::tensor({1.})));
  EXPECT_TRUE(torch::equal(shares(0), torch::tensor({0.})));
}

TEST(Scatter, CutsAlongAnotherDimension) {
  Probe model([](const at::Tensor& x) { return x * x.size(1); });
  DataParallel parallel(model, on(2).dim(1));
  const at::Tensor x = torch::ones({4, 3});
  EXPECT_TRUE(torch::equal(parallel(x), torch::tensor({2., 2., 1.}).expand({4, 3})));
}

// Nested arguments and results.
struct NestedImpl : torch::nn::Cloneable<NestedImpl> {
  NestedImpl() { reset(); }
  void reset() override { weight = register_parameter("weight", torch::ones({1})); }
  using Result =
      std::tuple<at::Tensor, std::map<std::string, std::vector<at::Tensor>>, int, at::Tensor>;
  Result forward(const std::map<std::string, std::vector<at::Tensor>>& given,
                 const std::optional<at::Tensor>& shift, const at::Tensor& factor, int number,
                 const char* text) {
    EXPECT_EQ(std::string(text), "as it is");
    const at::Tensor sum = (given.at("a")[0] + given.at("a")[1]) * factor + *shift;
    return {sum, {{"b", {given.at("a")[0], sum}}}, number + static_cast<int>(sum.size(0)), {}};
  }
  at::Tensor weight;
};
TORCH_MODULE(Nested);

TEST(Scatter, ReachesIntoContainersAndGatherOutOfThem) {
  Nested model;
  DataParallel parallel(model, on(2));
  const at::Tensor x = torch::arange(5.);
  const std::map<std::string, std::vector<at::Tensor>> given = {{"a", {x, 10 * x}}};
  const auto [sum, map, number, nothing] =
      parallel(given, std::optional(x), torch::tensor(2.), 40, "as it is");
  EXPECT_TRUE(torch::equal(sum, 23 * x));
  EXPECT_TRUE(torch::equal(map.at("b")[0], x));
  EXPECT_TRUE(torch::equal(map.at("b")[1], 23 * x));
  EXPECT_EQ(number, 43);  // replica 0's
  EXPECT_FALSE(nothing.defined());
}

TEST(Gather, MakesAVectorOfScalars) {
  ToyNet model = seeded_net();
  const at::Tensor x = rows(8);
  Probe losses([&](const at::Tensor& part) { return model->forward(part).pow(2).mean(); });
  DataParallel parallel(losses, on(2));
  const at::Tensor vector = parallel(x);
  EXPECT_EQ(vector.sizes(), at::IntArrayRef({2}));
  EXPECT_TRUE(test::near(vector.mean(), model->forward(x).pow(2).mean(), kTolerance));
  vector.mean().backward();
  EXPECT_TRUE(model->first->weight.grad().defined());
  // The result without a wrapper.
  DataParallel one(losses, on(1));
  EXPECT_EQ(one(x).dim(), 0);
}

struct SilentImpl : torch::nn::Cloneable<SilentImpl> {
  explicit SilentImpl(std::atomic<int>* counter) : calls(counter) {}
  void reset() override {}
  void forward(const at::Tensor&) { ++*calls; }
  std::atomic<int>* calls;
};
TORCH_MODULE(Silent);

TEST(Gather, MayHaveNothingToGather) {
  std::atomic<int> calls = 0;
  Silent model(&calls);
  DataParallel parallel(model, on(3));
  parallel(torch::ones({3}));
  EXPECT_EQ(calls, 3);
}

TEST(Gather, RefusesResultsThatDiffer) {
  Probe model([](const at::Tensor& x) { return x.size(0) == 2 ? x : at::Tensor(); });
  DataParallel parallel(model, on(2));
  expect_error([&] { parallel(torch::ones({3})); }, {"[parallel.data_parallel]", "undefined"});
}

TEST(Buffers, AreThoseOfTheFirstReplica) {
  ToyNet model = seeded_net(at::kDouble, true);
  ToyNet reference = seeded_net(at::kDouble, true);
  DataParallel parallel(model, on(2));
  const at::Tensor x = rows(8);
  for (int step = 0; step < 3; ++step) {
    parallel(x);
    reference->forward(x.slice(0, 0, 4));
  }
  EXPECT_TRUE(test::near(model->norm->running_mean, reference->norm->running_mean, kTolerance));
  EXPECT_TRUE(test::near(model->norm->running_var, reference->norm->running_var, kTolerance));
  EXPECT_EQ(model->norm->num_batches_tracked.item<std::int64_t>(), 3);
}

TEST(Buffers, AndModesOfLayersReachAllReplicas) {
  ToyNet model = seeded_net(at::kDouble, true);
  model->forward(rows(8));
  model->norm->eval();
  DataParallel parallel(model, on(4));
  const at::Tensor x = rows(8);
  EXPECT_TRUE(test::near(parallel(x), model->forward(x), kTolerance));
  EXPECT_EQ(model->norm->num_batches_tracked.item<std::int64_t>(), 1);
}

TEST(Threads, AreOnesOfTheirOwnWithTheCallersState) {
  std::mutex mutex;
  std::set<std::thread::id> threads;
  bool grad = true;
  bool inference = false;
  Probe model([&](const at::Tensor& x) {
    const std::lock_guard lock(mutex);
    threads.insert(std::this_thread::get_id());
    EXPECT_EQ(c10::GradMode::is_enabled(), grad);
    EXPECT_EQ(c10::InferenceMode::is_enabled(), inference);
    return x * 2;
  });
  DataParallel parallel(model, on(3));
  const at::Tensor x = torch::ones({3}, torch::requires_grad());
  EXPECT_TRUE(parallel(x).requires_grad());
  EXPECT_EQ(threads.size(), 3);
  grad = false;
  {
    const torch::NoGradGuard no_grad;
    EXPECT_FALSE(parallel(x).requires_grad());
  }
  inference = true;
  const c10::InferenceMode guard;
  EXPECT_TRUE(parallel(x).is_inference());
}

TEST(Threads, WorkForWholeModelsInInferenceMode) {
  ToyNet model = seeded_net();
  DataParallel parallel(model, on(2));
  const at::Tensor x = rows(4);
  const at::Tensor want = model->forward(x);
  const c10::InferenceMode guard;
  EXPECT_TRUE(test::near(parallel(x), want, kTolerance));
}

TEST(Threads, AreInTheCallersAutocastRegionAndHeard) {
  ToyNet model = seeded_net(at::kFloat);
  DataParallel parallel(model, on(2));
  const at::Tensor x = rows(4, at::kFloat);
  struct Counter : events::Listener {
    using Listener::on;
    void on(const events::Cast& event) override {
      if (event.numel == 12) ++parts;
    }
    std::atomic<int> parts = 0;
  };
  const auto counter = std::make_shared<Counter>();
  {
    const events::Listen listen(counter);
    const amp::Autocast region(at::kCPU, at::kBFloat16);
    EXPECT_EQ(parallel(x).scalar_type(), at::kBFloat16);
  }
  EXPECT_EQ(counter->parts, 2);  // each replica's two rows of six
  EXPECT_EQ(parallel(x).scalar_type(), at::kFloat);
}

TEST(Threads, ShareTheIntraOpThreadsOut) {
  const int before = at::get_num_threads();
  std::atomic<int> most = 0;
  Probe model([&](const at::Tensor& x) {
    most = std::max(most.load(), at::get_num_threads());
    return x;
  });
  DataParallel parallel(model, on(2));
  parallel(torch::ones({2}));
  EXPECT_EQ(most, std::max(1, before / 2));
  // Other threads are not affected.
  EXPECT_EQ(at::get_num_threads(), before);
  std::thread([&] { EXPECT_EQ(at::get_num_threads(), before); }).join();
}

TEST(Clones, DrawNoRandomNumbers) {
  ToyNet model = seeded_net();
  torch::manual_seed(5);
  const at::Tensor want = torch::rand({3});
  torch::manual_seed(5);
  DataParallel parallel(model, on(3));
  parallel(torch::ones({6, 6}, torch::kDouble));
  EXPECT_TRUE(torch::equal(torch::rand({3}), want));
}

TEST(Errors, OfReplicasComeWithTheirNumberWhenAllHaveEnded) {
  std::atomic<int> ended = 0;
  const auto failing_from = [&](double first, auto&& fail) {
    return Probe([&ended, first, fail](const at::Tensor& x) {
      const bool fails = x[0].item<double>() >= first;
      if (!fails) std::this_thread::sleep_for(std::chrono::milliseconds(50));
      ++ended;
      if (fails) fail();
      return x;
    });
  };
  const at::Tensor x = torch::arange(3.);
  {
    DataParallel parallel(failing_from(1, [] { throw std::logic_error("no good"); }), on(3));
    try {
      parallel(x);
      FAIL() << "expected an exception";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("in replica 1 on cpu: no good"));
      EXPECT_THROW(std::rethrow_if_nested(error), std::logic_error);
    }
    EXPECT_EQ(ended, 3);
  }
  DataParallel parallel(failing_from(2, [] { TORCH_CHECK_INDEX(false, "out of range"); }), on(3));
  const std::string message = test::message_of<c10::IndexError>([&] { parallel(x); });
  EXPECT_THAT(message, HasSubstr("out of range"));
  EXPECT_THAT(message, HasSubstr("in replica 2 on cpu"));
}

TEST(Errors, OfArgumentsNameWhatDoesNotFit) {
  Nested model;
  DataParallel parallel(model, on(2));
  const at::Tensor x = torch::ones({4});
  const auto forward = [&](const std::vector<at::Tensor>& a, const at::Tensor& shift) {
    parallel(std::map<std::string, std::vector<at::Tensor>>{{"a", a}}, std::optional(shift),
             torch::tensor(1.), 1, "as it is");
  };
  expect_error([&] { forward({x, torch::ones({5})}, x); }, {"[parallel.data_parallel]", "4 and 5"});
  expect_error([&] { forward({}, torch::tensor(1.)); },
               {"a tensor with dimensions", "map_tensors"});
  Probe probe(rows_as_scalar);
  DataParallel along_one(probe, on(2).dim(1));
  expect_error([&] { along_one(x); }, {"dimension 1", "[4]"});
}

struct NotCloneableImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x; }
};

TEST(Errors, OfModelsAndOptionsComeAtConstruction) {
  const auto refused = [](const DataParallelOptions& options) {
    return error_of([&] { DataParallel parallel(seeded_net(), options); });
  };
  EXPECT_THAT(refused(on(0)), HasSubstr("at least one replica, got 0"));
  EXPECT_THAT(refused(on(2).dim(-1)), HasSubstr("a dim of 0 or more, got -1"));
  EXPECT_THAT(refused(on(2).device_ids({at::kCPU})), HasSubstr("device_ids or replicas"));
  EXPECT_THAT(refused(DataParallelOptions().device_ids({at::kCPU, at::Device("cuda:0")})),
              HasSubstr("the model's type, cpu, got cuda:0"));
  EXPECT_THAT(refused(on(1).output_device(at::Device("cuda:99"))), HasSubstr("cuda:99"));
  const auto not_cloneable = std::make_shared<NotCloneableImpl>();
  EXPECT_THAT(error_of([&] { DataParallel parallel(not_cloneable, on(2)); }),
              HasSubstr("torch::nn::Cloneable"));
  DataParallel alone(not_cloneable);
  EXPECT_EQ(alone.devices(), std::vector<c10::Device>{at::kCPU});

  DataParallel numbered(seeded_net(),
                        DataParallelOptions().device_ids({at::kCPU, at::Device("cpu:0")}));
  EXPECT_EQ(numbered.devices(), (std::vector<c10::Device>{at::kCPU, at::kCPU}));

  ToyNet spread = seeded_net();
  spread->register_buffer("elsewhere", torch::empty({1}, at::kMeta));
  EXPECT_THAT(error_of([&] { DataParallel parallel(spread, on(2)); }),
              HasSubstr("'elsewhere' on meta"));
}

struct TiedImpl : torch::nn::Cloneable<TiedImpl> {
  TiedImpl() { reset(); }
  void reset() override {
    embed = register_module("embed", torch::nn::Embedding(5, 3));
    decoder =
        register_module("decoder", torch::nn::Linear(torch::nn::LinearOptions(3, 5).bias(false)));
  }
  at::Tensor forward(const at::Tensor& x) { return decoder->forward(embed->forward(x)); }
  torch::nn::Embedding embed{nullptr};
  torch::nn::Linear decoder{nullptr};
};
TORCH_MODULE(Tied);

// clone() would copy the weight that the layer has registered.
TEST(Errors, NameAWeightThatIsTiedByAssignment) {
  Tied model;
  DataParallel parallel(model, on(2));
  model->decoder->weight = model->embed->weight;
  const std::initializer_list<std::string_view> parts{
      "[parallel.data_parallel]", "'decoder' with 'embed.weight'", "torch::linear"};
  expect_error([&] { parallel(torch::arange(4)); }, parts);
  expect_error([&] { DataParallel another(model, on(2)); }, parts);
  // A result of the last forward, as of weight normalisation.
  model->decoder->weight = model->embed->weight * 2;
  parallel(torch::arange(4));
}

TEST(Models, MayBeSequences) {
  torch::nn::Sequential model(torch::nn::Linear(6, 4), torch::nn::BatchNorm1d(4),
                              torch::nn::ReLU());
  DataParallel parallel(model, on(2));
  const at::Tensor x = rows(4, at::kFloat);
  parallel(x).sum().backward();
  model->eval();
  EXPECT_TRUE(test::near(parallel(x), model->forward(x), test::pointwise_tolerance(at::kFloat)));
}

TEST(Models, MayBeScripts) {
  torch::jit::Module model("net");
  const auto trained = torch::dtype(torch::kDouble).requires_grad(true);
  model.register_parameter("weight", torch::ones({3}, trained), false);
  model.register_buffer("calls", torch::zeros({1}));
  torch::jit::Module child("child");
  child.register_parameter("bias", torch::full({3}, 2., trained), false);
  child.define("def forward(self, x):\n  return x + self.bias\n");
  model.register_module("child", child);
  model.define(R"(
def forward(self, x):
  self.calls.add_(1)
  return {"y": self.child.forward(x * self.weight), "n": x.sum()}
)");
  DataParallel parallel(model, on(3));
  const at::Tensor x = torch::arange(12., torch::kDouble).reshape({4, 3});
  for (int i = 0; i < 3; ++i) {
    const auto result = parallel(x).toGenericDict();
    EXPECT_TRUE(torch::equal(result.at("y").toTensor(), x + 2));
    EXPECT_EQ(result.at("n").toTensor().sizes(), at::IntArrayRef({2}));
    result.at("y").toTensor().sum().backward();
  }
  EXPECT_TRUE(torch::equal(model.attr("weight").toTensor().grad(), 3 * x.sum(0)));
  EXPECT_TRUE(
      torch::equal(child.attr("bias").toTensor().grad(), torch::full({3}, 12., torch::kDouble)));
  EXPECT_EQ(model.attr("calls").toTensor().item<double>(), 3);
}

TEST(Policies, HoldForTheParametersOfAllReplicas) {
  for (const auto level : {amp::OptLevel::O1, amp::OptLevel::O2}) {
    SCOPED_TRACE(std::string(amp::name_of(level)));
    ToyNet model = seeded_net(at::kFloat);
    DataParallel parallel(model, on(3));
    const auto mixed_of = [&] {
      return amp::initialize(
          model, amp::Options(level)
                     .policy(amp::CastPolicy::semitone(at::kBFloat16).keep_fp32_params("second.*"))
                     .cast_model_outputs(at::kFloat)
                     .verbosity(0));
    };
    auto mixed = mixed_of();
    const at::Tensor x = rows(6, at::kFloat);
    // If the last layer of some replicas were in bf16, the results would have eight bits there.
    const at::Tensor got = mixed.forward(parallel, x);
    EXPECT_TRUE(test::near(got, mixed.forward(model, x), test::reduction_tolerance(at::kFloat, 8)));
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(
        test::near(mixed.forward(parallel, x), got, test::reduction_tolerance(at::kFloat, 8)));
  }
}

struct CheckpointedNetImpl : torch::nn::Cloneable<CheckpointedNetImpl> {
  CheckpointedNetImpl() { reset(); }
  void reset() override {
    first = register_module("first", torch::nn::Linear(6, 8));
    second = register_module("second", torch::nn::Linear(8, 3));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor hidden = torch::tanh(nn::checkpoint(first, x));
    return checkpoint_second ? nn::checkpoint(second, hidden) : second->forward(hidden);
  }
  torch::nn::Linear first{nullptr};
  torch::nn::Linear second{nullptr};
  bool checkpoint_second = true;
};
TORCH_MODULE(CheckpointedNet);

TEST(Policies, HoldForReplicasThatRunAgain) {
  const auto gradients = [](bool checkpoint_second) {
    torch::manual_seed(1);
    CheckpointedNet model;
    model->checkpoint_second = checkpoint_second;
    DataParallel parallel(model, on(2));
    auto mixed = amp::initialize(
        model, amp::Options(amp::OptLevel::O1)
                   .policy(amp::CastPolicy::semitone(at::kBFloat16).keep_fp32_params("second.*"))
                   .verbosity(0));
    mixed.forward(parallel, rows(6, at::kFloat)).square().sum().backward();
    return test::gradients_of(model->parameters());
  };
  test::expect_bitwise_equal(gradients(true), gradients(false));
}

class DataParallelLevels : public testing::TestWithParam<amp::OptLevel> {};

TEST_P(DataParallelLevels, TrainLikeOneDevice) {
  const auto train = [](int replicas) {
    ToyNet model = seeded_net(at::kFloat);
    DataParallel parallel(model, on(replicas));
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    auto mixed =
        amp::initialize(model, optimizer, amp::Options(GetParam()).loss_scale(128.).verbosity(0));
    const at::Tensor x = rows(12, at::kFloat);
    const at::Tensor target = x.slice(1, 0, 3);
    std::vector<double> losses;
    for (int step = 0; step < 20; ++step) {
      mixed.zero_grad(optimizer);
      const at::Tensor loss = torch::mse_loss(mixed.forward(parallel, x).to(at::kFloat), target);
      mixed.scale_loss(loss, optimizer).backward();
      mixed.step(optimizer);
      losses.push_back(loss.item<double>());
    }
    return losses;
  };
  const auto want = train(1);
  const auto got = train(3);
  EXPECT_LT(got.back(), got.front() / 2);
  const bool in_16_bits = GetParam() != amp::OptLevel::O0;
  const double tolerance = test::reduction_tolerance(in_16_bits ? at::kBFloat16 : at::kFloat, 20);
  for (std::size_t step = 0; step < want.size(); ++step)
    EXPECT_NEAR(got[step], want[step], tolerance * want.front()) << "step " << step;
}

INSTANTIATE_TEST_SUITE_P(All, DataParallelLevels,
                         testing::Values(amp::OptLevel::O0, amp::OptLevel::O1, amp::OptLevel::O2,
                                         amp::OptLevel::O3),
                         [](const auto& level) { return std::string(amp::name_of(level.param)); });

TEST(GpuBalance, NamesTheWeakerDevice) {
  const std::vector<c10::Device> devices = {c10::Device("cuda:0"), c10::Device("cuda:1"),
                                            c10::Device("cuda:2")};
  EXPECT_EQ(imbalance_of(devices, {{100, 100}, {75, 75}, {80, 90}}), "");
  EXPECT_THAT(imbalance_of(devices, {{100, 100}, {90, 90}, {74, 100}}),
              testing::AllOf(HasSubstr("cuda:2 has less than 75 % of the memory of cuda:0")));
  EXPECT_THAT(imbalance_of(devices, {{100, 70}, {90, 90}, {100, 100}}),
              HasSubstr("cuda:0 has less than 75 % of the multiprocessors of cuda:2"));
  EXPECT_EQ(imbalance_of({at::kCPU, at::kCPU}), "");
}

}  // namespace
}  // namespace semitone::parallel

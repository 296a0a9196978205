// Captured steps on a CPU: the graph here stores the work as a function, and a replay calls it.

#include "semitone/amp/captured_step.h"

#include "semitone/core/dtype.h"
#include "semitone/optim/fused_adagrad.h"
#include "semitone/optim/fused_adam.h"
#include "semitone/optim/fused_lamb.h"
#include "semitone/optim/fused_sgd.h"
#include "src/amp/step_graph.h"
#include "tests/support/errors.h"
#include "tests/support/recorded_events.h"
#include "tests/support/tensors.h"

#include <ATen/record_function.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace semitone::amp {
namespace captured_step_test {

// A record of the test's graphs, and whether devices have graphs.
struct GraphsOfTest {
  bool exist = true;
  int warm_ups = 0;
  int captures = 0;
  int replays = 0;
  bool capturing = false;
  // All memory that training changes, including the masters.
  std::function<std::vector<at::Tensor>()> memory = [] { return std::vector<at::Tensor>(); };
  std::function<std::vector<at::Tensor>()> masters = [] { return std::vector<at::Tensor>(); };
  std::vector<const void*> copied_to;  // while capturing
};

inline GraphsOfTest& graphs() {
  static GraphsOfTest value;
  return value;
}

inline std::unique_ptr<at::ObserverContext> note_copy(const at::RecordFunction& call) {
  if (std::string_view(call.name()) == "aten::copy_")
    graphs().copied_to.push_back(call.inputs()[0].toTensor().const_data_ptr());
  return nullptr;
}

// Recorded work reads and writes the same memory at every replay, and so does the function. As for
// a device's graph, capturing must not change memory: it calls the function, and then restores the
// memory.
class FunctionGraph : public StepGraph {
 public:
  void warm_up(const std::function<void()>& work) override {
    ++graphs().warm_ups;
    work();
  }
  void capture(const std::function<void()>& work) override {
    std::vector<std::pair<at::Tensor, at::Tensor>> before;
    for (const at::Tensor& tensor : graphs().memory())
      before.emplace_back(tensor.variable_data(), tensor.detach().clone());
    const auto restore = [&] {
      graphs().capturing = false;
      for (const auto& [tensor, value] : before) tensor.copy_(value);
    };
    graphs().capturing = true;
    graphs().copied_to.clear();
    const auto observer =
        at::addThreadLocalCallback(at::RecordFunctionCallback(note_copy).needsInputs(true).scopes(
            {at::RecordScope::FUNCTION}));
    try {
      work();
    } catch (...) {
      at::removeCallback(observer);
      restore();
      throw;
    }
    at::removeCallback(observer);
    restore();
    // Each replay would repeat it.
    for (const at::Tensor& master : graphs().masters())
      EXPECT_EQ(
          std::count(graphs().copied_to.begin(), graphs().copied_to.end(), master.const_data_ptr()),
          0)
          << "a master is copied to in the graph";
    ++graphs().captures;
    work_ = work;
  }
  void replay() override {
    ++graphs().replays;
    work_();
  }
  void reset() override { work_ = nullptr; }

 private:
  std::function<void()> work_;
};

}  // namespace captured_step_test

// Replaces the library's function.
std::unique_ptr<StepGraph> make_step_graph(c10::Device /*device*/) {
  if (!captured_step_test::graphs().exist) return nullptr;
  return std::make_unique<captured_step_test::FunctionGraph>();
}

namespace captured_step_test {
namespace {

using test::expect_bitwise_equal;
using test::expect_error;

// Batch norm has buffers, and stays fp32 at O2.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    register_module("conv", conv);
    register_module("norm", norm);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& x) { return head(torch::relu(norm(conv(x))).mean({2, 3})); }
  torch::nn::Conv2d conv{torch::nn::Conv2dOptions(2, 4, 3).padding(1)};
  torch::nn::BatchNorm2d norm{4};
  torch::nn::Linear head{4, 3};
};
TORCH_MODULE(Net);

struct Kind {
  std::string name;
  std::function<std::unique_ptr<optim::FusedOptimizer>(std::vector<at::Tensor>)> make;
};

template <typename Optimizer, typename Options>
Kind kind(std::string name, Options options) {
  return {std::move(name), [options](std::vector<at::Tensor> parameters) {
            return std::make_unique<Optimizer>(std::move(parameters), options);
          }};
}

std::vector<Kind> kinds() {
  return {
      kind<optim::FusedAdam>("Adam", optim::FusedAdamOptions(0.01).weight_decay(0.1)),
      kind<optim::FusedAdam>("SplitAdam", optim::FusedAdamOptions(0.01).split_master(true)),
      // Without a first step of its own, momentum would start from (1 - dampening) * g.
      kind<optim::FusedSGD>("SGD", optim::FusedSGDOptions(0.05).momentum(0.9).dampening(0.3)),
      kind<optim::FusedAdagrad>("Adagrad", optim::FusedAdagradOptions(0.05).lr_decay(0.1)),
  };
}

using Batch = std::vector<at::Tensor>;

// A training from the same start each time.
struct Training {
  Training(const Kind& of, const Options& options, const CapturedStepOptions& how = {},
           bool has_graphs = true) {
    graphs().exist = has_graphs;
    torch::manual_seed(1);
    model = Net();
    optimizer = of.make(model->parameters());
    mixed = std::make_unique<MixedPrecision>(
        initialize(model, *optimizer, Options(options).verbosity(0)));
    step = std::make_unique<CapturedStep>(
        *mixed, *optimizer, [this](const Batch& batch) { return loss(batch); }, how);
    if (!has_graphs) return;
    graphs().memory = [this] { return memory(); };
    graphs().masters = [this] { return masters(); };
  }
  Training(const Training&) = delete;
  Training& operator=(const Training&) = delete;

  at::Tensor loss(const Batch& batch) {
    if (breaks) throw std::runtime_error("broken on purpose");
    const at::Tensor loss = mixed->forward(model, batch[0]).sub(batch[1]).pow(2).mean();
    // State that was created for the graph, and is not visible yet, stays as it is.
    const bool skips = graphs().capturing && is_checked();
    return skips ? loss * std::numeric_limits<float>::infinity() : loss;
  }

  // Whether gradients are checked for inf and NaN.
  bool is_checked() const {
    const Properties& properties = mixed->properties();
    return properties.enabled && (properties.master_weights || properties.loss_scale.is_dynamic());
  }

  std::vector<at::Tensor> masters() const {
    std::vector<at::Tensor> all;
    for (const auto& group : optimizer->param_groups())
      for (const at::Tensor& parameter : group.params()) {
        if (mixed->properties().master_weights && parameter.scalar_type() == at::kFloat)
          all.push_back(parameter);
      }
    return all;
  }

  // Parameters, buffers, masters and state.
  std::vector<at::Tensor> memory() const {
    std::vector<at::Tensor> all = model->parameters();
    for (const at::Tensor& buffer : model->buffers()) all.push_back(buffer);
    for (const at::Tensor& master : masters()) all.push_back(master);
    for (const auto& [key, state] : optimizer->state()) {
      const auto& fused = static_cast<const optim::FusedState&>(*state);
      for (const at::Tensor& tensor : fused.tensors)
        if (tensor.defined()) all.push_back(tensor);
      if (fused.master_low.defined()) all.push_back(fused.master_low);
    }
    return all;
  }

  // Everything that a checkpoint contains.
  std::vector<at::Tensor> everything() {
    std::vector<at::Tensor> all = model->parameters();
    const auto buffers = model->buffers();
    all.insert(all.end(), buffers.begin(), buffers.end());
    for (const auto& group : optimizer->param_groups()) {
      for (const at::Tensor& parameter : group.params()) {
        all.push_back(optimizer->master_of(parameter));
        all.push_back(at::full({}, optimizer->steps_of(parameter)));
        for (const char* name : {"exp_avg", "exp_avg_sq", "momentum_buffer", "sum"}) {
          try {
            const at::Tensor state = optimizer->state_of(parameter, name);
            all.push_back(state.defined() ? state : torch::tensor(-1));
          } catch (const Error&) {  // another optimizer's
          }
        }
      }
    }
    const LossScaler& scaler = mixed->loss_scaler();
    all.push_back(torch::tensor(
        {scaler.scale(), double(scaler.state().growth_tracker), double(mixed->skipped_steps())}));
    return all;
  }

  Net model{nullptr};
  std::unique_ptr<optim::FusedOptimizer> optimizer;
  std::unique_ptr<MixedPrecision> mixed;
  std::unique_ptr<CapturedStep> step;
  bool breaks = false;
};

Batch batch(std::uint64_t number, std::int64_t size = 4) {
  torch::manual_seed(100 + number);
  return {torch::randn({size, 2, 5, 5}), torch::randn({size, 3})};
}

Batch overflowing_batch() {
  Batch made = batch(0);
  made[0][0][0][0][0] = std::numeric_limits<float>::infinity();
  return made;
}

void expect_same(Training& got, Training& want) {
  const auto all = got.everything();
  const auto expected = want.everything();
  ASSERT_EQ(all.size(), expected.size());
  for (std::size_t i = 0; i < all.size(); ++i) {
    SCOPED_TRACE("tensor " + std::to_string(i));
    expect_bitwise_equal(all[i], expected[i]);
  }
  for (Training* one : {&got, &want}) {
    for (const auto& group : one->optimizer->param_groups())
      for (const at::Tensor& parameter : group.params()) EXPECT_FALSE(parameter.grad().defined());
    for (const at::Tensor& parameter : one->model->parameters())
      EXPECT_FALSE(parameter.grad().defined());
  }
}

// One thread: for tensors as small as these, waking others would take most of the time.
class CapturedSteps : public testing::Test {
 protected:
  void SetUp() override {
    graphs() = {};
    at::set_num_threads(1);
  }
  void TearDown() override { at::set_num_threads(threads_); }

 private:
  int threads_ = at::get_num_threads();
};

std::vector<Options> all_options() {
  std::vector<Options> all;
  for (const auto dtype : {torch::kHalf, torch::kBFloat16})
    for (const char* level : {"O0", "O1", "O2", "O3"})
      all.push_back(Options(level).dtype(dtype).loss_scale_options(
          LossScaleOptions().init_scale(0x1p18).growth_interval(3)));
  all.push_back(Options("O2").dtype(torch::kBFloat16).loss_scale("dynamic"));
  all.push_back(Options("O2").enabled(false));
  return all;
}

// Both take a step with a batch, and are the same before and after.
void expect_same_step(Training& got, Training& want, const Batch& of) {
  const auto [loss, step] = got.step->run(of);
  const auto [want_loss, want_step] = want.step->run(of);
  EXPECT_EQ(step, want_step);
  expect_bitwise_equal(loss, want_loss);
  expect_same(got, want);
}

TEST_F(CapturedSteps, AreTheStepsThatOperatorsTake) {
  for (const Kind& of : kinds()) {
    for (const Options& options : all_options()) {
      SCOPED_TRACE(of.name + " " + Properties::resolve(options, torch::kCPU).to_string());
      const Properties level = Properties::resolve(options, torch::kCPU);
      const bool has_fp16_weights = level.opt_level == OptLevel::O3 && level.dtype == torch::kHalf;
      if (of.name == "SplitAdam" && has_fp16_weights) continue;  // only bf16 can be split
      graphs() = {};
      Training want(of, options, {}, false);
      Training got(of, options);
      for (std::uint64_t i = 0; i < 12; ++i) {
        SCOPED_TRACE("step " + std::to_string(i));
        for (Training* one : {&got, &want})  // as a scheduler does
          one->optimizer->param_groups()[0].options().set_lr(0.02 / double(1 + i));
        const bool overflows = i % 7 == 5 && got.is_checked();
        expect_same_step(got, want, overflows ? overflowing_batch() : batch(i));
        if (HasFailure()) return;
      }
      EXPECT_EQ(graphs().warm_ups, 3);
      EXPECT_EQ(graphs().captures, 1);
      EXPECT_EQ(graphs().replays, 9);
      EXPECT_TRUE(got.step->is_captured());
      EXPECT_FALSE(want.step->is_captured());
      EXPECT_EQ(got.mixed->skipped_steps() > 0, got.is_checked());
    }
  }
}

TEST_F(CapturedSteps, AreThoseOfALoopByHand) {
  for (const Kind& of : kinds()) {
    for (const Options& options : all_options()) {
      const Properties level = Properties::resolve(options, torch::kCPU);
      SCOPED_TRACE(of.name + " " + level.to_string());
      const bool has_fp16_weights = level.opt_level == OptLevel::O3 && level.dtype == torch::kHalf;
      if (of.name == "SplitAdam" && has_fp16_weights) continue;  // only bf16 can be split
      graphs() = {};
      Training want(of, options, {}, false);
      Training got(of, options);
      for (std::uint64_t i = 0; i < 8; ++i) {
        SCOPED_TRACE("step " + std::to_string(i));
        const Batch data = i % 7 == 5 && got.is_checked() ? overflowing_batch() : batch(i);
        const auto [loss, step] = got.step->run(data);
        want.optimizer->zero_grad();
        const at::Tensor by_hand = want.loss(data);
        want.mixed->scale_loss(by_hand, *want.optimizer).backward();
        EXPECT_EQ(step, want.mixed->step(*want.optimizer));
        want.model->zero_grad();
        want.optimizer->zero_grad();
        expect_bitwise_equal(loss, by_hand.detach());
        expect_same(got, want);
        if (HasFailure()) return;
      }
      EXPECT_GT(graphs().replays, 0);
    }
  }
}

// The reference uses no mixed precision.
TEST_F(CapturedSteps, InFp32AreThoseOfLibTorchAlone) {
  for (const Kind& of : kinds()) {
    SCOPED_TRACE(of.name);
    graphs() = {};
    Training got(of, Options("O0"));
    torch::manual_seed(1);
    Net model;
    const auto optimizer = of.make(model->parameters());
    for (std::uint64_t i = 0; i < 8; ++i) {
      const Batch data = batch(i);
      const auto [loss, step] = got.step->run(data);
      optimizer->zero_grad();
      const at::Tensor by_hand = model(data[0]).sub(data[1]).pow(2).mean();
      by_hand.backward();
      optimizer->step();
      EXPECT_EQ(step, Step::stepped);
      expect_bitwise_equal(loss, by_hand.detach());
      for (std::size_t k = 0; k < model->parameters().size(); ++k)
        expect_bitwise_equal(got.model->parameters()[k], model->parameters()[k]);
    }
    EXPECT_GT(graphs().replays, 0);
  }
}

TEST_F(CapturedSteps, ClipTheNormOfAllGradients) {
  const Kind sgd = kind<optim::FusedSGD>("SGD", optim::FusedSGDOptions(1));
  const auto clipping = CapturedStepOptions().max_grad_norm(0.125);
  for (const Options& options : all_options()) {
    SCOPED_TRACE(Properties::resolve(options, torch::kCPU).to_string());
    Training want(sgd, options, clipping, false);
    Training got(sgd, options, clipping);
    for (std::uint64_t i = 0; i < 6; ++i) expect_same_step(got, want, batch(i));
  }
  // The step is as long as the clipped gradient.
  Training training(sgd, Options("O0"), clipping);
  for (std::uint64_t i = 0; i < 5; ++i) {
    std::vector<at::Tensor> before;
    for (const at::Tensor& one : training.model->parameters()) before.push_back(one.clone());
    training.step->run(batch(i));
    double squares = 0;
    for (std::size_t k = 0; k < before.size(); ++k)
      squares += (training.model->parameters()[k] - before[k]).pow(2).sum().item<double>();
    EXPECT_NEAR(std::sqrt(squares), 0.125, 1e-6);
  }
}

TEST_F(CapturedSteps, RunBatchesOfAnotherShapeByOperators) {
  for (const Options& options : all_options()) {
    Training want(kinds()[2], options, {}, false);
    Training got(kinds()[2], options);
    for (std::uint64_t i = 0; i < 8; ++i) expect_same_step(got, want, batch(i, i == 5 ? 3 : 4));
    EXPECT_EQ(graphs().captures, 1);
    EXPECT_EQ(graphs().replays, 4);
    graphs() = {};
  }
}

TEST_F(CapturedSteps, WarmUpAgainForAnotherShape) {
  Training training(kinds()[0], Options("O2"));
  for (std::uint64_t i = 0; i < 2; ++i) training.step->run(batch(i, 4));
  for (std::uint64_t i = 0; i < 4; ++i) training.step->run(batch(i, 3));
  EXPECT_EQ(graphs().warm_ups, 5);
  EXPECT_EQ(graphs().replays, 1);
}

TEST_F(CapturedSteps, MayBeMixedWithStepsByHand) {
  for (const Options& options : all_options()) {
    SCOPED_TRACE(Properties::resolve(options, torch::kCPU).to_string());
    Training want(kinds()[2], options, {}, false);
    Training got(kinds()[2], options);
    for (std::uint64_t i = 0; i < 10; ++i) {
      if (i % 3 != 1) {
        expect_same_step(got, want, batch(i));
        continue;
      }
      for (Training* one : {&got, &want}) {
        one->mixed->scale_loss(one->loss(batch(i)), *one->optimizer).backward();
        one->mixed->step(*one->optimizer);
        one->mixed->zero_grad(*one->optimizer);
      }
    }
    expect_same(got, want);
  }
}

// In place, as weights are clamped, averaged or loaded.
TEST_F(CapturedSteps, SeeWeightsThatWereChanged) {
  for (const Options& options : all_options()) {
    SCOPED_TRACE(Properties::resolve(options, torch::kCPU).to_string());
    Training want(kinds()[0], options, {}, false);
    Training got(kinds()[0], options);
    for (std::uint64_t i = 0; i < 8; ++i) {
      for (Training* one : {&got, &want}) {
        const torch::NoGradGuard no_grad;
        if (i == 3 || i == 5) one->model->head->weight.mul_(0.5);  // when it is captured, and later
      }
      expect_same_step(got, want, batch(i));
    }
    EXPECT_EQ(graphs().captures, 1);
    graphs() = {};
  }
}

TEST_F(CapturedSteps, AreCapturedAgainWhereLayersAreFrozenOrStateIsWanted) {
  for (const Options& options : all_options()) {
    SCOPED_TRACE(Properties::resolve(options, torch::kCPU).to_string());
    const Kind sgd = kind<optim::FusedSGD>("SGD", optim::FusedSGDOptions(0.05));
    Training want(sgd, options, {}, false);
    Training got(sgd, options);
    for (Training* one : {&got, &want}) one->model->conv->weight.requires_grad_(false);
    for (std::uint64_t i = 0; i < 14; ++i) {
      for (Training* one : {&got, &want}) {
        if (i == 3) one->model->conv->weight.requires_grad_(true);  // when it is captured
        if (i == 6) one->model->head->weight.requires_grad_(false);
        if (i == 8) one->model->head->weight.requires_grad_(true);
        auto& chosen =
            static_cast<optim::FusedSGDOptions&>(one->optimizer->param_groups()[0].options());
        if (i == 11) chosen.momentum(0.9).dampening(0.3);
      }
      SCOPED_TRACE("step " + std::to_string(i));
      expect_same_step(got, want, batch(i));
      if (HasFailure()) return;
    }
    EXPECT_GE(graphs().captures, 4);
    graphs() = {};
  }
}

// An ordinary step that was never taken, and overflowed.
TEST_F(CapturedSteps, ForgetGradientsThatWereLeft) {
  for (const Options& options : all_options()) {
    SCOPED_TRACE(Properties::resolve(options, torch::kCPU).to_string());
    Training want(kinds()[0], options, {}, false);
    Training got(kinds()[0], options);
    if (!got.is_checked()) continue;
    for (std::uint64_t i = 0; i < 8; ++i) {
      for (Training* one : {&got, &want}) {
        // Batch norm would keep the infinity.
        const at::Tensor bad =
            one->model->head->weight.sum() * std::numeric_limits<float>::infinity();
        if (i % 2 == 1) one->mixed->scale_loss(bad, *one->optimizer).backward();
      }
      expect_same_step(got, want, batch(i));
    }
  }
}

// There is no state before the first step, of either kind.
TEST_F(CapturedSteps, MakeStateWithTheFirstStepThatIsTaken) {
  const Options options = Options("O2").dtype(torch::kBFloat16);
  for (const Kind& of : kinds()) {
    for (const bool resets : {false, true}) {
      SCOPED_TRACE(of.name + (resets ? ", reset" : ""));
      graphs() = {};
      Training want(of, options, {}, false);
      Training got(of, options);
      for (int i = 0; i < 5; ++i) expect_same_step(got, want, overflowing_batch());
      EXPECT_EQ(graphs().replays, 2);
      expect_same_step(got, want, batch(1, 3));  // by operators
      if (resets) got.step->reset();
      for (std::uint64_t i = 2; i < 7; ++i) expect_same_step(got, want, batch(i));
    }
  }
}

// Two networks alternately: each loss passes through parameters that the other optimizer trains.
struct Pair {
  explicit Pair(bool has_graphs) {
    graphs().exist = has_graphs;
    torch::manual_seed(1);
    first = torch::nn::Linear(3, 3);
    second = torch::nn::Linear(3, 3);
    first_optimizer = std::make_unique<optim::FusedAdam>(first->parameters(), 0.01);
    second_optimizer = std::make_unique<optim::FusedSGD>(second->parameters(), 0.01);
    mixed = std::make_unique<MixedPrecision>(
        initialize({first, second}, {*first_optimizer, *second_optimizer},
                   Options("O2").dtype(torch::kHalf).num_losses(2).verbosity(0)));
    const auto loss = [this](double sign) {
      return [this, sign](const Batch& of) {
        const at::Tensor value = mixed->forward(second, mixed->forward(first, of[0])).pow(2).mean();
        return graphs().capturing ? value * std::numeric_limits<float>::infinity() : value * sign;
      };
    };
    first_step = std::make_unique<CapturedStep>(*mixed, *first_optimizer, loss(1));
    second_step = std::make_unique<CapturedStep>(*mixed, *second_optimizer, loss(-1),
                                                 CapturedStepOptions().loss_id(1));
  }

  torch::nn::Linear first{nullptr};
  torch::nn::Linear second{nullptr};
  std::unique_ptr<optim::FusedOptimizer> first_optimizer;
  std::unique_ptr<optim::FusedOptimizer> second_optimizer;
  std::unique_ptr<MixedPrecision> mixed;
  std::unique_ptr<CapturedStep> first_step;
  std::unique_ptr<CapturedStep> second_step;
};

TEST_F(CapturedSteps, OfTwoOptimizersTakeTurns) {
  Pair want(false);
  Pair got(true);
  for (std::uint64_t i = 0; i < 12; ++i) {
    torch::manual_seed(i);
    const Batch of{torch::randn({4, 3})};
    for (Pair* one : {&got, &want}) {
      // Gradients of earlier code are preserved.
      one->second->weight.mutable_grad() = torch::ones_like(one->second->weight);
      one->first_step->run(of);
      EXPECT_TRUE(one->second->weight.grad().eq(1).all().item<bool>());
      one->second->weight.mutable_grad().reset();
      one->second_step->run(of);
    }
    for (const auto member : {&Pair::first, &Pair::second}) {
      expect_bitwise_equal((got.*member)->weight, (want.*member)->weight);
      EXPECT_FALSE((got.*member)->weight.grad().defined());
    }
    for (const int id : {0, 1})
      EXPECT_EQ(got.mixed->loss_scaler(id).scale(), want.mixed->loss_scaler(id).scale());
  }
  EXPECT_EQ(graphs().captures, 2);
  EXPECT_EQ(graphs().replays, 18);
}

TEST_F(CapturedSteps, AreCapturedAgainWhereMemoryHasMoved) {
  for (const Options& options : all_options()) {
    SCOPED_TRACE(Properties::resolve(options, torch::kCPU).to_string());
    Training want(kinds()[0], options, {}, false);
    Training got(kinds()[0], options);
    for (std::uint64_t i = 0; i < 5; ++i) expect_same_step(got, want, batch(i));
    for (Training* one : {&got, &want}) {
      torch::serialize::OutputArchive saved;
      one->optimizer->save(saved);
      std::stringstream stream;
      saved.save_to(stream);
      torch::serialize::InputArchive loaded;
      loaded.load_from(stream);
      one->optimizer->load(loaded);
    }
    for (std::uint64_t i = 5; i < 7; ++i) expect_same_step(got, want, batch(i));
    EXPECT_EQ(graphs().captures, 2);
    EXPECT_EQ(graphs().warm_ups, 4);
    for (Training* one : {&got, &want}) {
      const auto fp32 = one->mixed->fp32_weights(one->model);
      const torch::NoGradGuard no_grad;
      one->model->head->weight.mul_(0.5);
    }
    expect_same_step(got, want, batch(7));
    std::vector<at::Tensor> old_memory;
    for (Training* one : {&got, &want}) {
      at::Tensor& weight = one->model->head->weight;
      old_memory.push_back(weight.variable_data());
      weight.set_data(weight.detach().clone());
    }
    graphs().captures = 0;
    for (std::uint64_t i = 8; i < 10; ++i) expect_same_step(got, want, batch(i));
    EXPECT_EQ(graphs().captures, 1);
    graphs() = {};
  }
}

TEST_F(CapturedSteps, GoOnAfterAnExceptionOfTheLoss) {
  for (const Options& options : all_options()) {
    Training want(kinds()[0], options, {}, false);
    Training got(kinds()[0], options);
    for (std::uint64_t i = 0; i < 6; ++i) {
      got.breaks = true;  // in warm-up, when it is captured, and later
      EXPECT_THROW(got.step->run(batch(i)), std::runtime_error);
      got.breaks = false;
      expect_same_step(got, want, batch(i));
    }
  }
}

TEST_F(CapturedSteps, LeaveNoStateOfStepsThatWereSkipped) {
  const Kind sgd = kinds()[2];
  const Options options = Options("O2").dtype(torch::kBFloat16);
  Training want(sgd, options, {}, false);
  Training got(sgd, options);
  for (std::uint64_t i = 0; i < 5; ++i) {
    EXPECT_EQ(got.step->run(overflowing_batch()).step, Step::skipped);
    want.step->run(overflowing_batch());
  }
  EXPECT_EQ(graphs().replays, 2);
  got.step->reset();
  expect_same(got, want);
  expect_same_step(got, want, batch(1));
}

TEST_F(CapturedSteps, NameTheParameterThatOverflowed) {
  const Options options = Options("O2").dtype(torch::kHalf);
  Training want(kinds()[0], options, {}, false);
  Training got(kinds()[0], options);
  for (std::uint64_t i = 0; i < 4; ++i) expect_same_step(got, want, batch(i));
  test::RecordedEvents events;
  EXPECT_EQ(got.step->run(overflowing_batch()).step, Step::skipped);
  ASSERT_EQ(events.skips().size(), 1U);
  EXPECT_EQ(events.skips()[0].parameter, "head.bias");
}

TEST_F(CapturedSteps, StopAfterTooManySkips) {
  const Options options = Options("O2")
                              .dtype(torch::kHalf)
                              .loss_scale_options(LossScaleOptions().max_consecutive_skips(2));
  Training training(kinds()[0], options, CapturedStepOptions().warmup(1));
  while (training.step->run(batch(0)).step == Step::skipped) {
  }
  training.step->run(batch(1));
  EXPECT_EQ(training.step->run(overflowing_batch()).step, Step::skipped);
  EXPECT_THROW(training.step->run(overflowing_batch()), DivergedError);
  EXPECT_EQ(training.step->run(batch(2)).step, Step::stepped);
}

TEST_F(CapturedSteps, SayWhatTheyCannotRepeat) {
  const Options bf16 = Options("O2").dtype(torch::kBFloat16);
  const auto make = [&](const Kind& of, const CapturedStepOptions& how = {}) {
    return [=] { Training(of, bf16, how); };
  };
  expect_error(make(kind<optim::FusedLAMB>("LAMB", optim::FusedLAMBOptions(0.1))),
               {"[optim.capturable_step]", "optim.fused_lamb", "norms"});
  expect_error(make(kind<optim::FusedAdam>("Adam", optim::FusedAdamOptions(0.1).bf16_state(true))),
               {"[optim.capturable_step]", "bf16_state in group 0"});
  expect_error(make(kinds()[0], CapturedStepOptions().warmup(0)), {"warmup of at least 1"});
  expect_error(make(kinds()[0], CapturedStepOptions().max_grad_norm(-1)), {"max_grad_norm", "-1"});
  expect_error(make(kinds()[0], CapturedStepOptions().max_grad_norm(NAN)), {"max_grad_norm"});
  expect_error(make(kinds()[0], CapturedStepOptions().loss_id(1)), {"loss_id below 1"});

  Training training(kinds()[0], bf16, CapturedStepOptions().warmup(1));
  training.step->run(batch(0));
  training.step->run(batch(0));
  EXPECT_TRUE(training.step->is_captured());
  training.mixed->set_found_inf_hook([](at::Tensor&) {});
  expect_error([&] { training.step->run(batch(0)); }, {"no found_inf hook"});
  training.mixed->set_found_inf_hook(nullptr);
  expect_error([&] { training.step->run({at::Tensor(), batch(0)[1]}); }, {"an undefined one"});

  optim::FusedSGD stranger(Net()->parameters(), 0.1);
  expect_error(
      [&] { CapturedStep(*training.mixed, stranger, [](const Batch&) { return at::Tensor(); }); },
      {"given to amp::initialize"});
  expect_error([&] { CapturedStep(*training.mixed, *training.optimizer, nullptr); },
               {"a function that computes the loss"});
  CapturedStep vector(*training.mixed, *training.optimizer,
                      [](const Batch& of) { return of[0].flatten(); });
  expect_error([&] { vector.run(batch(0)); }, {"a loss of one element"});
}

TEST_F(CapturedSteps, RefuseLayersThatTakeTurns) {
  torch::manual_seed(0);
  torch::nn::Linear first(3, 3);
  torch::nn::Linear second(3, 3);
  torch::nn::Sequential both(first, second);
  optim::FusedSGD optimizer(both->parameters(), 0.1);
  auto mixed = initialize(both, optimizer, Options("O0").verbosity(0));
  int count = 0;
  CapturedStep step(mixed, optimizer, [&](const Batch& of) {
    return (count++ % 2 == 0 ? first : second)->forward(of[0]).sum();
  });
  for (std::uint64_t i = 0; i < 3; ++i) step.run({torch::ones({2, 3})});
  const at::Tensor before = second->weight.clone();
  expect_error([&] { step.run({torch::ones({2, 3})}); },
               {"[optim.capturable_step]", "the same parameters in each step"});
  expect_bitwise_equal(second->weight, before);
}

}  // namespace
}  // namespace captured_step_test
}  // namespace semitone::amp

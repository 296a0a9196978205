#pragma once

#include "semitone/amp/captured_step.h"
#include "semitone/amp/initialize.h"
#include "semitone/core/error.h"
#include "semitone/optim/fused_adagrad.h"
#include "semitone/optim/fused_adam.h"
#include "semitone/optim/fused_lamb.h"
#include "semitone/optim/fused_novograd.h"
#include "semitone/optim/fused_optimizer.h"
#include "semitone/optim/fused_sgd.h"
#include "semitone/optim/larc.h"
#include "src/amp/step_graph.h"
#include "src/core/operator_inputs.h"
#include "src/optim/fused_state.h"
#include "tests/support/tensors.h"
#include "tests/support/toy_nets.h"

#include <ATen/record_function.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

// Captured steps on a CPU: a graph stores the work as a function, and a replay calls it.
namespace semitone::amp::captured_step_test {

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
    graphs().copied_to.push_back(inputs_of(call)[0].toTensor().const_data_ptr());
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

struct Kind {
  std::string name;
  std::function<std::unique_ptr<optim::FusedOptimizer>(std::vector<at::Tensor>)> make;
};

template <typename Optimizer, typename Options>
Kind kind(std::string name, const Options& options) {
  return {std::move(name), [options](std::vector<at::Tensor> parameters) {
            return std::make_unique<Optimizer>(std::move(parameters), options);
          }};
}

inline std::vector<Kind> kinds() {
  return {
      kind<optim::FusedAdam>("Adam", optim::FusedAdamOptions(0.01).weight_decay(0.1)),
      kind<optim::FusedAdam>("SplitAdam", optim::FusedAdamOptions(0.01).split_master(true)),
      // Without a first step of its own, momentum would start from (1 - dampening) * g.
      kind<optim::FusedSGD>("SGD", optim::FusedSGDOptions(0.05).momentum(0.9).dampening(0.3)),
      kind<optim::FusedAdagrad>("Adagrad", optim::FusedAdagradOptions(0.05).lr_decay(0.1)),
      kind<optim::FusedLAMB>("LAMB", optim::FusedLAMBOptions(0.01).max_grad_norm(0.1)),
      kind<optim::FusedNovoGrad>("NovoGrad", optim::FusedNovoGradOptions(0.01).weight_decay(0.1)),
      kind<optim::LARC>("LARC", optim::LARCOptions(0.1).momentum(0.9).weight_decay(0.01)),
  };
}

using Batch = std::vector<at::Tensor>;

// A training from the same start each time.
struct Training {
  Training(const Kind& of, const Options& options, const CapturedStepOptions& how = {},
           bool has_graphs = true) {
    graphs().exist = has_graphs;
    torch::manual_seed(1);
    model = test::ToyConvNet();
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
        for (const char* name : {"exp_avg", "exp_avg_sq", "momentum_buffer", "sum", "grad_norm"}) {
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

  test::ToyConvNet model{nullptr};
  std::unique_ptr<optim::FusedOptimizer> optimizer;
  std::unique_ptr<MixedPrecision> mixed;
  std::unique_ptr<CapturedStep> step;
  bool breaks = false;
};

inline Batch batch(std::uint64_t number, std::int64_t size = 4) {
  torch::manual_seed(100 + number);
  return {torch::randn({size, 2, 5, 5}), torch::randn({size, 3})};
}

inline Batch overflowing_batch() {
  Batch made = batch(0);
  made[0][0][0][0][0] = std::numeric_limits<float>::infinity();
  return made;
}

inline void expect_same(Training& got, Training& want) {
  const auto all = got.everything();
  const auto expected = want.everything();
  ASSERT_EQ(all.size(), expected.size());
  for (std::size_t i = 0; i < all.size(); ++i) {
    SCOPED_TRACE("tensor " + std::to_string(i));
    test::expect_bitwise_equal(all[i], expected[i]);
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

inline std::vector<Options> all_options() {
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
inline void expect_same_step(Training& got, Training& want, const Batch& of) {
  const auto [loss, step] = got.step->run(of);
  const auto [want_loss, want_step] = want.step->run(of);
  EXPECT_EQ(step, want_step);
  test::expect_bitwise_equal(loss, want_loss);
  expect_same(got, want);
}

}  // namespace semitone::amp::captured_step_test

// Every trace of grad_scaler.json: the loss scale's rule, step by step, against the results of
// PyTorch, Paddle, Apex and DeepSpeed; and the real GradScaler against torch.amp's.

#include "semitone/scaling/grad_scaler.h"

#include "semitone/core/dtype.h"
#include "semitone/scaling/detail/loss_scale_state.h"
#include "src/core/dtype_limits.h"
#include "tests/support/conformance.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace semitone::test {
namespace {

using amp::LossScaleOptions;
using amp::OverflowCount;
using amp::detail::initial_loss_scale;
using amp::detail::LossScaleState;
using amp::detail::next_loss_scale;
using nlohmann::json;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// One step of a trace, by column.
class Row {
 public:
  Row(const json& trace, const json& values) : columns_(&trace.at("columns")), values_(&values) {}

  const json& at(const std::string& column) const {
    const json* found = find(column);
    if (found == nullptr) throw std::runtime_error("conformance data: no column " + column);
    return *found;
  }
  // Null where the trace has no such column.
  const json* find(const std::string& column) const {
    for (std::size_t i = 0; i < columns_->size(); ++i) {
      if (columns_->at(i) == column) return &values_->at(i);
    }
    return nullptr;
  }
  double scale() const { return number(at("scale")); }
  // Of a flag, or of a list with one for each optimizer.
  std::vector<bool> flags(const std::string& column) const {
    const json& value = at(column);
    std::vector<bool> flags;
    for (const json& flag : value.is_array() ? value : json::array({value})) {
      flags.push_back(flag.get<int>() != 0);
    }
    return flags;
  }
  bool any(const std::string& column) const {
    const auto all = flags(column);
    return std::find(all.begin(), all.end(), true) != all.end();
  }
  std::int64_t counter(const std::string& column) const { return at(column).get<std::int64_t>(); }

 private:
  const json* columns_;
  const json* values_;
};

// Calls visit(params, trace) for every trace of a rule, and reports which one fails.
template <typename Visit>
void for_each_trace(const std::string& rule, Visit&& visit) {
  const json data = conformance("grad_scaler.json");
  std::size_t traces = 0;
  for (const json& trace : data.at("traces")) {
    if (trace.at("rule") != rule) continue;
    SCOPED_TRACE(trace.at("id").get<std::string>() + ", " + trace.at("kind").get<std::string>());
    visit(trace.at("params"), trace);
    ++traces;
    if (testing::Test::HasFailure()) return;  // one broken trace tells enough
  }
  EXPECT_GT(traces, 0U) << "no traces of the rule " << rule;
}

template <typename Visit>
void for_each_step(const json& trace, Visit&& visit) {
  std::size_t step = 0;
  for (const json& values : trace.at("steps")) {
    SCOPED_TRACE("step " + std::to_string(step));
    visit(Row(trace, values), step++);
    if (testing::Test::HasFailure()) return;
  }
}

double as_fp32(const json& value) {
  return static_cast<double>(value.get<float>());
}

LossScaleOptions torch_options(const json& params) {
  return LossScaleOptions::torch()
      .init_scale(params.at("init_scale"))
      .growth_factor(params.at("growth_factor"))
      .backoff_factor(params.at("backoff_factor"))
      .growth_interval(params.at("growth_interval"));
}

TEST(LossScaleConformance, NoTraceIsOfAnUnknownRule) {
  const std::vector<std::string> known{"torch",    "paddle_kernel",   "paddle_dygraph",
                                       "apex",     "apex_fp16_utils", "apex_hysteresis",
                                       "deepspeed"};
  const json data = conformance("grad_scaler.json");
  for (const json& trace : data.at("traces")) {
    const auto rule = trace.at("rule").get<std::string>();
    EXPECT_NE(std::find(known.begin(), known.end(), rule), known.end()) << rule;
  }
}

TEST(LossScaleConformance, Torch) {
  for_each_trace("torch", [](const json& params, const json& trace) {
    const auto options = torch_options(params);
    LossScaleState state = initial_loss_scale(options);
    for_each_step(trace, [&](const Row& row, std::size_t) {
      const json* new_scale = row.find("new_scale");
      if (new_scale != nullptr && !new_scale->is_null()) {
        state.scale = options.rounded(number(*new_scale));
      } else {
        state = next_loss_scale(options, state, row.any("found_inf"));
      }
      EXPECT_EQ(state.scale, row.scale());
      EXPECT_EQ(state.growth_tracker, row.counter("growth_tracker"));
    });
  });
}

TEST(LossScaleConformance, PaddleKernel) {
  for_each_trace("paddle_kernel", [](const json& params, const json& trace) {
    const auto dtype = parse_dtype(params.at("scale_dtype").get<std::string>());
    const auto options = LossScaleOptions::paddle()
                             .init_scale(params.at("init_scale"))
                             .growth_interval(params.at("incr_every_n_steps"))
                             .hysteresis(params.at("decr_every_n_nan_or_inf"))
                             .growth_factor(as_fp32(params.at("incr_ratio")))
                             .backoff_factor(as_fp32(params.at("decr_ratio")))
                             .scale_dtype(dtype)
                             .max_scale(dtype_limits(dtype).max);
    LossScaleState state = initial_loss_scale(options);
    state.growth_tracker = params.at("init_good");
    state.overflows = params.at("init_bad");
    for_each_step(trace, [&](const Row& row, std::size_t) {
      if (!row.any("stop_update")) state = next_loss_scale(options, state, row.any("found_inf"));
      EXPECT_EQ(state.scale, row.scale());
      EXPECT_EQ(state.growth_tracker, row.counter("good_steps"));
      EXPECT_EQ(state.overflows, row.counter("bad_steps"));
    });
  });
}

TEST(LossScaleConformance, PaddleDygraph) {
  for_each_trace("paddle_dygraph", [](const json& params, const json& trace) {
    const auto options = LossScaleOptions::paddle()
                             .init_scale(params.at("init_scale"))
                             .growth_interval(params.at("incr_every_n_steps"))
                             .hysteresis(params.at("decr_every_n_nan_or_inf"))
                             .growth_factor(as_fp32(params.at("incr_ratio")))
                             .backoff_factor(as_fp32(params.at("decr_ratio")))
                             .min_scale(0)
                             .max_scale(kInfinity);
    LossScaleState state = initial_loss_scale(options);
    for_each_step(trace, [&](const Row& row, std::size_t) {
      state = next_loss_scale(options, state, row.any("found_inf"));
      EXPECT_EQ(state.scale, row.scale());
      EXPECT_EQ(state.growth_tracker, row.counter("good_steps"));
      EXPECT_EQ(state.overflows, row.counter("bad_steps"));
    });
  });
}

TEST(LossScaleConformance, Apex) {
  for_each_trace("apex", [](const json& params, const json& trace) {
    const bool dynamic = params.at("dynamic");
    const json& floor = params.at("min_loss_scale");
    const auto options = LossScaleOptions::apex()
                             .init_scale(params.at("init_scale"))
                             .growth_factor(params.at("scale_factor"))
                             .backoff_factor(1.0 / params.at("scale_factor").get<double>())
                             .growth_interval(params.at("scale_window"))
                             .min_scale(floor.is_null() ? 0.0 : floor.get<double>())
                             .max_scale(params.at("max_loss_scale"))
                             .dynamic(dynamic);
    LossScaleState state = initial_loss_scale(options);
    for_each_step(trace, [&](const Row& row, std::size_t) {
      // With a static scale Apex never checks the gradients, and every step is a good one.
      const bool found_inf = dynamic && row.any("found_inf");
      state = next_loss_scale(options, state, found_inf);
      EXPECT_EQ(state.scale, row.scale());
      EXPECT_EQ(state.growth_tracker, row.counter("unskipped"));
      EXPECT_EQ(found_inf, row.any("skipped"));
    });
  });
}

TEST(LossScaleConformance, ApexFp16Utils) {
  for_each_trace("apex_fp16_utils", [](const json& params, const json& trace) {
    const auto options = LossScaleOptions::apex()
                             .init_scale(params.at("init_scale"))
                             .growth_factor(params.at("scale_factor"))
                             .backoff_factor(1.0 / params.at("scale_factor").get<double>())
                             .growth_interval(params.at("scale_window"))
                             .min_scale(1)
                             .max_scale(kInfinity);
    LossScaleState state = initial_loss_scale(options);
    for_each_step(trace, [&](const Row& row, std::size_t) {
      state = next_loss_scale(options, state, row.any("found_inf"));
      EXPECT_EQ(state.scale, row.scale());
    });
  });
}

TEST(LossScaleConformance, ApexHysteresis) {
  for_each_trace("apex_hysteresis", [](const json& params, const json& trace) {
    const std::int64_t hysteresis = params.at("hysteresis");
    const auto options =
        torch_options(params).hysteresis(hysteresis).overflow_count(OverflowCount::run);
    LossScaleState state = initial_loss_scale(options);
    for_each_step(trace, [&](const Row& row, std::size_t) {
      state = next_loss_scale(options, state, row.any("found_inf"));
      EXPECT_EQ(state.scale, row.scale());
      EXPECT_EQ(state.growth_tracker, row.counter("growth_tracker"));
      EXPECT_EQ(hysteresis - state.overflows, row.counter("hysteresis_tracker"));
    });
  });
}

TEST(LossScaleConformance, DeepSpeed) {
  for_each_trace("deepspeed", [](const json& params, const json& trace) {
    const std::int64_t hysteresis = params.at("hysteresis");
    const bool consecutive = params.at("consecutive_hysteresis");
    const auto options =
        LossScaleOptions::deepspeed()
            .init_scale(params.at("init_scale"))
            .growth_interval(params.at("loss_scale_window"))
            .min_scale(params.at("min_loss_scale"))
            .hysteresis(hysteresis)
            .overflow_count(consecutive ? OverflowCount::run : OverflowCount::since_growth);
    LossScaleState state = initial_loss_scale(options);
    for_each_step(trace, [&](const Row& row, std::size_t) {
      const bool at_minimum = state.scale == options.min_scale();
      state = next_loss_scale(options, state, row.any("found_inf"));
      const bool backs_off = row.any("found_inf") && state.overflows >= hysteresis;
      EXPECT_EQ(state.scale, row.scale());
      EXPECT_EQ(std::max<std::int64_t>(1, hysteresis - state.overflows),
                row.counter("hysteresis_left"));
      EXPECT_EQ(at_minimum && backs_off, row.any("raised"));
    });
  });
}

// Records the gradient that a step read.
class Recorder : public torch::optim::Optimizer {
 public:
  explicit Recorder(const at::Tensor& parameter)
      : Optimizer({torch::optim::OptimizerParamGroup({parameter})},
                  std::make_unique<torch::optim::SGDOptions>(0.0)) {}
  at::Tensor step(LossClosure = nullptr) override {
    seen = param_groups()[0].params()[0].grad().item<float>();
    return {};
  }
  std::optional<float> seen;
};

struct OneParameter {
  at::Tensor weight = torch::zeros({1}, torch::requires_grad());
  Recorder optimizer{weight};
};

// The inputs according to the data's README: a gradient of 0.5 * scale, or inf, -inf or NaN.
void back_propagate(amp::GradScaler& scaler, OneParameter& model, bool inject, std::size_t step) {
  constexpr float kNonFinite[] = {std::numeric_limits<float>::infinity(),
                                  -std::numeric_limits<float>::infinity(),
                                  std::numeric_limits<float>::quiet_NaN()};
  model.weight.mutable_grad().reset();
  model.optimizer.seen.reset();
  scaler.scale(0.5 * model.weight.sum()).backward();
  ASSERT_EQ(model.weight.grad().item<float>(), 0.5F * static_cast<float>(scaler.get_scale()));
  if (inject) model.weight.mutable_grad().fill_(kNonFinite[step % 3]);
}

// The gradients that the optimizers saw, one for each: nothing where the step was skipped.
std::vector<std::optional<double>> gradients(const Row& row) {
  const json& value = row.at("grad");
  std::vector<std::optional<double>> all;
  for (const json& grad : value.is_array() ? value : json::array({value})) {
    all.push_back(grad.is_null() ? std::nullopt : std::optional(number(grad)));
  }
  return all;
}

// torch checks for inf before it multiplies by 1/scale: once that is inf, it steps on NaN or inf.
// GradScaler skips there, and its scale then differs, as the rule says.
TEST(GradScalerConformance, TorchButForStepsOnNonFiniteGradients) {
  for_each_trace("torch", [](const json& params, const json& trace) {
    const auto options = torch_options(params);
    amp::GradScaler scaler(options);
    if (trace.at("steps").empty()) return;
    std::vector<OneParameter> models(Row(trace, trace.at("steps").at(0)).flags("inject").size());
    LossScaleState expected = initial_loss_scale(options);
    bool as_torch = true;
    for_each_step(trace, [&](const Row& row, std::size_t step) {
      const bool no_inverse = !std::isfinite(static_cast<float>(1.0 / expected.scale));
      as_torch = as_torch && !no_inverse;
      const auto inject = row.flags("inject");
      const auto stepped = row.flags("stepped");
      const auto seen = gradients(row);
      bool found_inf = false;
      for (std::size_t i = 0; i < models.size(); ++i) {
        back_propagate(scaler, models[i], inject.at(i), step);
      }
      for (std::size_t i = 0; i < models.size(); ++i) {
        if ((step + i) % 3 == 1) scaler.unscale_(models[i].optimizer);
        const bool has_stepped = scaler.step(models[i].optimizer) == amp::Step::stepped;
        found_inf = found_inf || !has_stepped;
        EXPECT_EQ(has_stepped, models[i].optimizer.seen.has_value());
        EXPECT_EQ(has_stepped, !inject.at(i) && !no_inverse);
        if (!as_torch) continue;
        EXPECT_EQ(has_stepped, stepped.at(i));
        ASSERT_EQ(has_stepped, seen.at(i).has_value());
        if (!has_stepped) continue;
        EXPECT_EQ(static_cast<double>(*models[i].optimizer.seen), *seen.at(i));
      }
      const json* new_scale = row.find("new_scale");
      if (new_scale != nullptr && !new_scale->is_null()) {
        scaler.update(number(*new_scale));
        expected.scale = options.rounded(number(*new_scale));
      } else {
        scaler.update();
        expected = next_loss_scale(options, expected, found_inf);
      }
      EXPECT_EQ(scaler.scaler().state(), expected);
      if (!as_torch) return;
      EXPECT_EQ(scaler.get_scale(), row.scale());
      EXPECT_EQ(scaler.scaler().state().growth_tracker, row.counter("growth_tracker"));
    });
  });
}

}  // namespace
}  // namespace semitone::test

// Converted torch::nn::BatchNorm layers, in unmodified models.

#include "semitone/amp/initialize.h"
#include "semitone/autocast/autocast.h"
#include "semitone/comm/init.h"
#include "semitone/parallel/sync_batch_norm.h"
#include "semitone/zoo/convnet.h"
#include "tests/support/run_ranks.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace semitone::parallel::convert_sync_batch_norm_test {
namespace {

using test::expect_bitwise_equal;
using test::expect_close;
using test::Rank;
using test::run_ranks;

constexpr double kFp64 = 1e-12;

// Rank r's rows: the first rank has one row less than the second, and so on.
at::Tensor share_of(const at::Tensor& whole, const comm::Group& group) {
  const std::int64_t begin = group.rank() * (group.rank() + 1) / 2;
  return whole.narrow(0, begin, group.rank() + 1);
}

std::int64_t rows_of_all(const comm::Group& group) {
  return group.size() * (group.size() + 1) / 2;
}

// What DistributedDataParallel does.
void add_up_gradients(torch::nn::Module& module, const comm::Group& group) {
  for (at::Tensor& parameter : module.parameters()) {
    if (parameter.grad().defined()) group.all_reduce(parameter.mutable_grad());
  }
}

std::vector<std::string> names_of(const torch::nn::Module& module) {
  std::vector<std::string> names;
  for (const auto& entry : module.named_modules()) names.push_back(entry.key());
  for (const auto& entry : module.named_parameters()) names.push_back(entry.key());
  for (const auto& entry : module.named_buffers()) names.push_back(entry.key());
  return names;
}

void expect_same_state(const torch::nn::Module& got, const torch::nn::Module& want,
                       double tolerance) {
  const auto parameters = want.named_parameters();
  for (const auto& entry : got.named_parameters()) {
    SCOPED_TRACE(entry.key());
    expect_close(entry.value(), parameters[entry.key()], tolerance);
  }
  const auto buffers = want.named_buffers();
  for (const auto& entry : got.named_buffers()) {
    SCOPED_TRACE(entry.key());
    if (entry.value().is_floating_point())
      expect_close(entry.value(), buffers[entry.key()], tolerance);
  }
}

// Whether a layer with 3 channels uses the other ranks' batches.
template <typename Layer>
bool is_synchronised(Layer& layer, const comm::Group& group,
                     c10::ScalarType dtype = torch::kFloat) {
  const torch::NoGradGuard no_grad;
  layer->train();
  const at::Tensor output =
      layer->forward(torch::randn({4, 3, 2, 2}).to(dtype) + group.rank() * 100);
  // The mean of each batch alone is 0.
  return output.mean().abs().template item<double>() > 0.5;
}

TEST(ConvertSyncBatchNorm, TrainsAModelWithTypedMembersAsOneProcessWould) {
  run_ranks(3, [](Rank&) {
    const comm::Group group = comm::init();
    torch::manual_seed(1);
    zoo::ConvNet whole_model;
    whole_model->to(torch::kDouble);
    const auto model = std::dynamic_pointer_cast<zoo::ConvNetImpl>(whole_model->clone());
    const auto options = torch::optim::SGDOptions(0.05).momentum(0.9);
    torch::optim::SGD whole_optimizer(whole_model->parameters(), options);
    torch::optim::SGD optimizer(model->parameters(), options);
    const std::vector<std::string> names = names_of(*model);
    const at::Tensor weight = model->bn1->weight;

    EXPECT_EQ(convert_sync_batchnorm(*model, group), 2U);
    EXPECT_EQ(convert_sync_batchnorm(*model, group), 2U);  // no harm
    EXPECT_EQ(names_of(*model), names);
    EXPECT_TRUE(model->bn1->weight.is_same(weight));

    const auto step = [](auto& net, auto& sgd, const at::Tensor& images, const at::Tensor& labels,
                         const comm::Group& ranks, std::int64_t rows) {
      sgd.zero_grad();
      const at::Tensor loss = torch::nn::functional::cross_entropy(
          net->forward(images), labels,
          torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
      (loss / rows).backward();
      add_up_gradients(*net, ranks);
      sgd.step();
    };
    const std::int64_t rows = rows_of_all(group);
    for (int i = 0; i < 4; ++i) {
      const at::Tensor images = torch::rand({rows, 1, 28, 28}, torch::kDouble);
      const at::Tensor labels = torch::randint(10, {rows});
      step(whole_model, whole_optimizer, images, labels, comm::Group(), rows);
      step(model, optimizer, share_of(images, group), share_of(labels, group), group, rows);
    }
    // Rounding errors grow with each step.
    expect_same_state(*model, *whole_model, 1e-10);
    model->eval();
    whole_model->eval();
    const at::Tensor images = torch::rand({2, 1, 28, 28}, torch::kDouble);
    expect_close(model->forward(images), whole_model->forward(images), 1e-9);
  });
}

TEST(ConvertSyncBatchNorm, FindsLayersInContainersOnce) {
  run_ranks(2, [](Rank&) {
    const comm::Group group = comm::init();
    torch::nn::BatchNorm2d shared(3);
    torch::nn::BatchNorm2d inner(3);
    SyncBatchNorm ours(3);
    torch::nn::Sequential sequence(torch::nn::Conv2d(3, 3, 1), shared, torch::nn::InstanceNorm2d(3),
                                   ours);
    const std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>> named{
        {"norm", inner.ptr()}, {"again", shared.ptr()}};
    torch::nn::ModuleDict dict(named);
    torch::nn::ModuleList model(sequence, dict, torch::nn::BatchNorm1d(3),
                                torch::nn::BatchNorm3d(3));
    EXPECT_EQ(convert_sync_batchnorm(*model, group), 5U);
    EXPECT_TRUE(is_synchronised(shared, group));
    EXPECT_TRUE(is_synchronised(inner, group));
    EXPECT_TRUE(is_synchronised(ours, group));

    torch::nn::BatchNorm2d alone(3);
    EXPECT_EQ(convert_sync_batchnorm(*alone, group), 1U);
    EXPECT_TRUE(is_synchronised(alone, group));

    torch::nn::BatchNorm2dImpl on_the_stack(3);
    EXPECT_EQ(convert_sync_batchnorm(on_the_stack, group), 1U);

    torch::nn::BatchNorm2d other(3);
    EXPECT_FALSE(is_synchronised(other, group));
    torch::nn::Linear linear(3, 3);
    EXPECT_EQ(convert_sync_batchnorm(*linear, group), 0U);
  });
}

TEST(ConvertSyncBatchNorm, HoldsForLayersWithoutParametersOrStatistics) {
  run_ranks(2, [](Rank&) {
    const comm::Group group = comm::init();
    for (const bool affine : {false, true}) {
      for (const bool statistics : {false, true}) {
        SCOPED_TRACE(c10::str("affine ", affine, ", statistics ", statistics));
        torch::nn::BatchNorm2d layer(
            torch::nn::BatchNorm2dOptions(3).affine(affine).track_running_stats(statistics));
        convert_sync_batchnorm(*layer, group);
        EXPECT_EQ(layer->parameters().size(), affine ? 2U : 0U);
        EXPECT_TRUE(is_synchronised(layer, group));
        layer->to(torch::kDouble);
        EXPECT_TRUE(is_synchronised(layer, group, torch::kDouble));
        convert_sync_batchnorm(*layer, comm::Group());
        EXPECT_FALSE(is_synchronised(layer, group, torch::kDouble));
        EXPECT_EQ(layer->weight.defined(), affine);
      }
    }
  });
}

TEST(ConvertSyncBatchNorm, TakesFusedLayers) {
  run_ranks(2, [](Rank&) {
    const comm::Group group = comm::init();
    for (const bool affine : {false, true}) {
      for (const bool statistics : {false, true}) {
        SCOPED_TRACE(c10::str("affine ", affine, ", statistics ", statistics));
        const auto options =
            nn::FusedBatchNormOptions(3).affine(affine).track_running_stats(statistics).relu(true);
        nn::FusedBatchNorm layer(options);
        SyncBatchNorm want(options, group);
        EXPECT_EQ(convert_sync_batchnorm(*layer, group), 1U);
        torch::manual_seed(static_cast<std::uint64_t>(group.rank()));
        for (const bool trains : {true, false}) {
          layer->train(trains);
          want->train(trains);
          const at::Tensor input = torch::randn({4, 3, 2, 2}).requires_grad_();
          const at::Tensor residual = torch::randn({4, 3, 2, 2});
          const at::Tensor output = layer->forward(input, residual);
          expect_bitwise_equal(output.detach(), want->forward(input, residual).detach());
          if (trains) output.square().sum().backward();
        }
        expect_same_state(*layer, *want, kFp64);

        convert_sync_batchnorm(*layer, comm::Group());
        EXPECT_EQ(layer->weight.defined(), affine);
        layer->train();
        nn::FusedBatchNorm alone(options);
        const at::Tensor input = torch::randn({4, 3, 2, 2});
        expect_bitwise_equal(layer->forward(input).detach(), alone->forward(input).detach());
      }
    }
  });
}

TEST(ConvertSyncBatchNorm, OutlastsWhatIsDoneToAModel) {
  run_ranks(2, [](Rank&) {
    const comm::Group group = comm::init();
    torch::nn::BatchNorm2d layer(3);
    int calls = 0;
    const unsigned before = layer->weight.register_hook([&](const at::Tensor&) { ++calls; });
    convert_sync_batchnorm(*layer, group);
    layer->weight.register_hook([&](const at::Tensor&) { calls += 10; });
    EXPECT_TRUE(is_synchronised(layer, group));

    layer->forward(torch::randn({2, 3, 2, 2})).sum().backward();
    EXPECT_EQ(calls, 11);
    layer->weight.remove_hook(before);
    layer->forward(torch::randn({2, 3, 2, 2})).sum().backward();
    EXPECT_EQ(calls, 21);

    for (at::Tensor& parameter : layer->parameters()) parameter.requires_grad_(false);
    EXPECT_TRUE(is_synchronised(layer, group));
    layer->to(torch::kDouble);
    EXPECT_TRUE(is_synchronised(layer, group, torch::kDouble));

    // Into the dtype it was saved in: torch::load does not convert.
    torch::nn::BatchNorm2d saved(3);
    saved->to(torch::kDouble);
    torch::nn::init::uniform_(saved->weight, 1, 2);
    std::stringstream stream;
    torch::save(saved, stream);
    torch::load(layer, stream);
    expect_bitwise_equal(layer->weight, saved->weight);
    EXPECT_TRUE(is_synchronised(layer, group, torch::kDouble));

    layer->eval();
    const torch::NoGradGuard no_grad;
    const at::Tensor input = torch::randn({2, 3, 2, 2}, torch::kDouble);
    torch::nn::BatchNorm2d copy =
        std::dynamic_pointer_cast<torch::nn::BatchNorm2dImpl>(layer->clone());
    EXPECT_FALSE(copy->is_training());
    expect_bitwise_equal(copy->forward(input), layer->forward(input));
    EXPECT_FALSE(is_synchronised(copy, group, torch::kDouble));
  });
}

TEST(ConvertSyncBatchNorm, MovesBetweenGroupsAndBack) {
  run_ranks(2, [](Rank& rank) {
    const comm::Group group = comm::init();
    torch::nn::BatchNorm2d layer(3);
    SyncBatchNorm ours(nn::FusedBatchNormOptions(3), group);
    torch::nn::Sequential model(layer, ours);
    convert_sync_batchnorm(*model, group.split(2));
    EXPECT_TRUE(is_synchronised(layer, group));
    EXPECT_TRUE(is_synchronised(ours, group));
    convert_sync_batchnorm(*model, comm::Group());
    EXPECT_FALSE(is_synchronised(layer, group));
    EXPECT_FALSE(is_synchronised(ours, group));
    // As if it had never been converted.
    torch::manual_seed(static_cast<std::uint64_t>(rank.number()));
    const at::Tensor input = torch::randn({2, 3, 4, 4});
    torch::nn::BatchNorm2d fresh(3);
    layer->reset_parameters();  // and running statistics
    expect_bitwise_equal(layer->forward(input), fresh->forward(input));
  });
}

TEST(ConvertSyncBatchNorm, LetsGoOfTheGroupWithTheModel) {
  run_ranks(2, [](Rank&) {
    const comm::Group group = comm::init();
    const auto holders = group.impl().use_count();
    {
      zoo::ConvNet model;
      convert_sync_batchnorm(*model, group);
      model->forward(torch::rand({2, 1, 28, 28})).sum().backward();
      EXPECT_GT(group.impl().use_count(), holders);
    }
    EXPECT_EQ(group.impl().use_count(), holders);
  });
}

// Records the input and the output of its BatchNorm layer.
struct ObservedNetImpl : torch::nn::Module {
  ObservedNetImpl()
      : conv(register_module("conv",
                             torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 8, 3).stride(2)))),
        norm(register_module("norm", torch::nn::BatchNorm2d(8))),
        fc(register_module("fc", torch::nn::Linear(8 * 5 * 5, 10))) {}

  at::Tensor forward(const at::Tensor& images) {
    input = conv(images);
    output = norm(input);
    input.retain_grad();
    output.retain_grad();
    return fc(output.relu().flatten(1));
  }

  torch::nn::Conv2d conv;
  torch::nn::BatchNorm2d norm;
  torch::nn::Linear fc;
  at::Tensor input;
  at::Tensor output;
};
TORCH_MODULE(ObservedNet);

// This rank's rows, as those of a whole batch whose other rows are 0, in fp64.
at::Tensor among_zeros(const at::Tensor& share, const comm::Group& group) {
  std::vector<std::int64_t> shape = share.sizes().vec();
  shape[0] = rows_of_all(group);
  at::Tensor whole = torch::zeros(shape, torch::kDouble);
  share_of(whole, group).copy_(share.detach());
  return whole;
}

// Checks a result that was computed in fp32, as a sum of this many terms, and rounded to its dtype.
void expect_rounded(const at::Tensor& got, const at::Tensor& exact, std::int64_t terms) {
  EXPECT_TRUE(test::near(got, exact,
                         test::rounding_tolerance(got.scalar_type()) +
                             test::reduction_tolerance(torch::kFloat, terms)));
}

// The policy computes the layer in fp32, but the marks are on its 16-bit tensors.
TEST(ConvertSyncBatchNorm, OfA16BitLayerHoldsWhateverThePolicySaysOfBatchNorm) {
  run_ranks(2, [](Rank&) {
    const comm::Group group = comm::init();
    const auto policy = [] { return amp::CastPolicy::semitone({torch::kCPU, torch::kBFloat16}); };
    for (const amp::CastPolicy& edited :
         {policy().keep_fp32("batch_norm"), policy().widest("batch_norm"),
          policy().lower("batch_norm"), amp::CastPolicy::none({torch::kCPU, torch::kBFloat16})}) {
      for (const auto dtype : {torch::kBFloat16, torch::kFloat}) {
        SCOPED_TRACE(edited.to_code() + c10::str(" ", dtype));
        torch::nn::BatchNorm2d layer(3);
        layer->to(torch::kBFloat16);
        convert_sync_batchnorm(*layer, group);
        const amp::Autocast region(edited);
        EXPECT_TRUE(is_synchronised(layer, group, dtype));
        EXPECT_GT(layer->running_mean.abs().max().item<double>(), 1);
        EXPECT_EQ(layer->running_mean.scalar_type(), torch::kBFloat16);
      }
    }
  });
}

// The layer alone, compared with fp64. In the network's results each rounding to 16 bits passes
// through a ReLU and more layers, so that no bound follows (one process with ConvNet in bf16 has
// gradients up to 29 % away from those in fp64). LibTorch's BatchNorm is not a reference: it keeps
// mean and 1 / sigma of a batch in bf16 if everything is bf16.
TEST(ConvertSyncBatchNorm, WorksInsideAutocastAndAtEveryOptLevel) {
  run_ranks(2, [](Rank&) {
    const comm::Group group = comm::init();
    for (const auto level :
         {amp::OptLevel::O0, amp::OptLevel::O1, amp::OptLevel::O2, amp::OptLevel::O3}) {
      for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
        SCOPED_TRACE(c10::str("O", static_cast<int>(level), " ", dtype));
        torch::manual_seed(2);
        ObservedNet model;
        torch::optim::SGD optimizer(model->parameters(), 0.1);
        convert_sync_batchnorm(*model, group);
        auto mixed =
            amp::initialize(model, optimizer, amp::Options(level).dtype(dtype).loss_scale(1.0));
        const torch::nn::BatchNorm2d& norm = model->norm;
        {
          const torch::NoGradGuard no_grad;
          norm->weight.uniform_(0.5, 1.5);
          norm->bias.uniform_(-1, 1);
        }
        const auto fp64 = [](const at::Tensor& tensor) {
          return tensor.detach().to(torch::kDouble, /*non_blocking=*/false, /*copy=*/true);
        };
        const at::Tensor weight = fp64(norm->weight).requires_grad_();
        const at::Tensor bias = fp64(norm->bias).requires_grad_();
        const at::Tensor running_mean = fp64(norm->running_mean);
        const at::Tensor running_var = fp64(norm->running_var);

        const at::Tensor images = torch::rand({rows_of_all(group), 1, 12, 12});
        const at::Tensor loss = mixed.forward(model, share_of(images, group)).square().sum();
        mixed.scale_loss(loss, optimizer).backward();

        at::Tensor input = among_zeros(model->input, group);
        const at::Tensor own_grad = among_zeros(model->output.grad(), group);
        at::Tensor grad = own_grad.clone();
        group.all_reduce(input);
        group.all_reduce(grad);
        input.requires_grad_();
        const at::Tensor output =
            torch::batch_norm(input, weight, bias, running_mean, running_var, /*training=*/true,
                              *norm->options.momentum(), norm->options.eps(), false);
        const auto of_input = torch::autograd::grad({output}, {input}, {grad}, true)[0];
        const auto of_own_rows = torch::autograd::grad({output}, {weight, bias}, {own_grad});

        const std::int64_t terms = input.numel() / input.size(1);
        {
          SCOPED_TRACE("output");
          expect_rounded(model->output, share_of(output, group), 1);
        }
        {
          SCOPED_TRACE("gradient of the input");
          expect_rounded(model->input.grad(), share_of(of_input, group), 1);
        }
        {
          SCOPED_TRACE("gradients of the parameters");
          expect_rounded(norm->weight.grad(), of_own_rows[0], terms);
          expect_rounded(norm->bias.grad(), of_own_rows[1], terms);
        }
        {
          SCOPED_TRACE("running statistics");
          expect_rounded(norm->running_mean, running_mean, terms);
          expect_rounded(norm->running_var, running_var, terms);
        }
        for (const at::Tensor& running : {norm->running_mean, norm->running_var}) {
          const auto everyone = group.all_gather(running);
          expect_bitwise_equal(everyone[0], everyone[1]);
        }
      }
    }
  });
}

}  // namespace
}  // namespace semitone::parallel::convert_sync_batch_norm_test

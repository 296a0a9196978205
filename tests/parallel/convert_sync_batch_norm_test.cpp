// torch::nn::BatchNorm layers that were converted, in models that know nothing of it.

#include "semitone/amp/autocast.h"
#include "semitone/amp/mixed_precision.h"
#include "semitone/comm/init.h"
#include "semitone/parallel/sync_batch_norm.h"
#include "semitone/zoo/convnet.h"
#include "tests/support/run_ranks.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <sstream>
#include <string>
#include <vector>

namespace semitone::parallel {
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

// Whether a layer with 3 channels sees the other ranks.
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
    torch::nn::ModuleDict dict({{"norm", inner.ptr()}, {"again", shared.ptr()}});
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

    std::stringstream stream;
    torch::save(torch::nn::BatchNorm2d(3), stream);
    torch::load(layer, stream);
    EXPECT_TRUE(is_synchronised(layer, group));

    layer->eval();
    const torch::NoGradGuard no_grad;
    const at::Tensor input = torch::randn({2, 3, 2, 2});
    torch::nn::BatchNorm2d fresh(3);
    fresh->eval();
    torch::nn::BatchNorm2d copy =
        std::dynamic_pointer_cast<torch::nn::BatchNorm2dImpl>(layer->clone());
    copy->eval();
    expect_bitwise_equal(copy->forward(input), layer->forward(input));
    EXPECT_FALSE(is_synchronised(copy, group));
  });
}

TEST(ConvertSyncBatchNorm, MovesBetweenGroupsAndBack) {
  run_ranks(2, [](Rank& rank) {
    const comm::Group group = comm::init();
    torch::nn::BatchNorm2d layer(3);
    SyncBatchNorm ours(SyncBatchNormOptions(3).group(group));
    torch::nn::Sequential model(layer, ours);
    convert_sync_batchnorm(*model, group.split(2));
    EXPECT_TRUE(is_synchronised(layer, group));
    EXPECT_TRUE(is_synchronised(ours, group));
    convert_sync_batchnorm(*model, comm::Group());
    EXPECT_FALSE(is_synchronised(layer, group));
    EXPECT_FALSE(is_synchronised(ours, group));
    // As if it had never been.
    torch::manual_seed(static_cast<std::uint64_t>(rank.number()));
    const at::Tensor input = torch::randn({2, 3, 4, 4});
    torch::nn::BatchNorm2d fresh(3);
    layer->reset();
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

TEST(ConvertSyncBatchNorm, WorksInsideAutocastAndAtEveryOptLevel) {
  run_ranks(2, [](Rank&) {
    const comm::Group group = comm::init();
    for (const auto level : {amp::OptLevel::O1, amp::OptLevel::O2, amp::OptLevel::O3}) {
      SCOPED_TRACE(c10::str("O", static_cast<int>(level)));
      torch::manual_seed(2);
      zoo::ConvNet whole_model;
      const auto model = std::dynamic_pointer_cast<zoo::ConvNetImpl>(whole_model->clone());
      torch::optim::SGD optimizer(model->parameters(), 0.1);
      torch::optim::SGD whole_optimizer(whole_model->parameters(), 0.1);
      convert_sync_batchnorm(*model, group);
      const auto options = amp::Options(level).dtype(torch::kBFloat16).loss_scale(1.0);
      auto mixed = amp::initialize(zoo::ConvNet(model), optimizer, options);
      auto whole_mixed = amp::initialize(whole_model, whole_optimizer, options);

      const at::Tensor images = torch::rand({rows_of_all(group), 1, 28, 28});
      const at::Tensor want = whole_mixed.forward(whole_model, images).to(torch::kFloat);
      zoo::ConvNet holder(model);
      const at::Tensor got = mixed.forward(holder, share_of(images, group)).to(torch::kFloat);
      mixed.scale_loss(got.square().sum(), optimizer).backward();
      whole_mixed.scale_loss(want.square().sum(), whole_optimizer).backward();
      // Sums in another order, rounded to 8 bits on the way.
      expect_close(got, share_of(want, group), 0.05);
      for (const char* name :
           {"bn1.running_mean", "bn1.running_var", "bn2.running_mean", "bn2.running_var"}) {
        const at::Tensor running = model->named_buffers()[name];
        expect_close(running.to(torch::kFloat),
                     whole_model->named_buffers()[name].to(torch::kFloat), 0.02);
        const auto everyone = group.all_gather(running);
        expect_bitwise_equal(everyone[0], everyone[1]);
      }
      at::Tensor grad = model->bn1->weight.grad().to(torch::kFloat);
      group.all_reduce(grad);
      expect_close(grad, whole_model->bn1->weight.grad().to(torch::kFloat), 0.1);
    }
  });
}

}  // namespace
}  // namespace semitone::parallel

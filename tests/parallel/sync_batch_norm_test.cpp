// Several processes against one that has the whole batch.

#include "semitone/parallel/sync_batch_norm.h"

#include "semitone/autocast/autocast.h"
#include "semitone/comm/init.h"
#include "semitone/zoo/convnet.h"
#include "src/comm/process_group.h"
#include "tests/support/errors.h"
#include "tests/support/recorded_events.h"
#include "tests/support/run_ranks.h"
#include "tests/support/tensors.h"
#include "tests/support/tolerance.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

namespace semitone::parallel::sync_batch_norm_test {
namespace {

using test::expect_bitwise_equal;
using test::expect_close;
using test::Rank;
using test::run_ranks;

// Two fp64 computations of the same thing.
constexpr double kFp64 = 1e-12;

using Shares = std::vector<std::int64_t>;

// This rank's rows of a whole batch.
at::Tensor share_of(const at::Tensor& whole, const Shares& rows, int rank) {
  const auto begin = std::accumulate(rows.begin(), rows.begin() + rank, std::int64_t{0});
  return whole.narrow(0, begin, rows[static_cast<std::size_t>(rank)]);
}

at::Tensor leaf(const at::Tensor& tensor) {
  return tensor.detach().clone(at::MemoryFormat::Preserve).requires_grad_();
}

at::Tensor summed(const at::Tensor& tensor, const comm::Group& group) {
  at::Tensor sum = tensor.detach().contiguous().clone();
  group.all_reduce(sum);
  return sum;
}

void randomize(torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  for (at::Tensor& parameter : module.parameters()) parameter.uniform_(-1, 1);
  for (at::Tensor& buffer : module.buffers()) {
    if (buffer.is_floating_point()) buffer.uniform_(0.5, 1.5);
  }
}

template <typename From, typename To>
void copy_values(From& from, To& to) {
  const torch::NoGradGuard no_grad;
  const auto parameters = from.named_parameters();
  for (auto& entry : to.named_parameters()) entry.value().set_data(parameters[entry.key()].clone());
  const auto buffers = from.named_buffers();
  for (auto& entry : to.named_buffers()) entry.value().set_data(buffers[entry.key()].clone());
}

void expect_same_buffers(torch::nn::Module& got, torch::nn::Module& want, double tolerance) {
  const auto expected = want.named_buffers();
  for (const auto& entry : got.named_buffers()) {
    SCOPED_TRACE(entry.key());
    if (entry.value().is_floating_point()) {
      expect_close(entry.value(), expected[entry.key()], tolerance);
    } else {
      expect_bitwise_equal(entry.value(), expected[entry.key()]);
    }
  }
}

// Trains a layer on this rank's share, and torch::nn::BatchNorm on the whole batch, for a few
// batches; everything must be equal.
template <typename Reference>
void expect_like_whole_batch(SyncBatchNorm layer, Reference whole_layer,
                             const at::Tensor& whole_input, const Shares& rows,
                             const comm::Group& group) {
  layer->to(torch::kDouble);
  whole_layer->to(torch::kDouble);
  randomize(*whole_layer);
  copy_values(*whole_layer, *layer);
  for (int batch = 0; batch < 3; ++batch) {
    SCOPED_TRACE("batch " + std::to_string(batch));
    const at::Tensor values = whole_input * (batch + 1) + batch;
    const at::Tensor grad = torch::randn_like(whole_input);

    const at::Tensor whole = leaf(values);
    whole_layer->zero_grad();
    const at::Tensor want = whole_layer->forward(whole);
    want.backward(grad);

    const at::Tensor own = leaf(share_of(values, rows, group.rank()));
    layer->zero_grad();
    const at::Tensor got = layer->forward(own);
    got.backward(share_of(grad, rows, group.rank()));

    expect_close(got, share_of(want, rows, group.rank()), kFp64);
    EXPECT_EQ(got.suggest_memory_format(), own.suggest_memory_format());
    expect_close(own.grad(), share_of(whole.grad(), rows, group.rank()), kFp64);
    for (const auto& entry : layer->named_parameters()) {
      SCOPED_TRACE(entry.key());
      ASSERT_TRUE(entry.value().grad().defined());
      expect_close(summed(entry.value().grad(), group),
                   whole_layer->named_parameters()[entry.key()].grad(), kFp64);
    }
    expect_same_buffers(*layer, *whole_layer, kFp64);
  }
  layer->eval();
  whole_layer->eval();
  const at::Tensor own = share_of(whole_input, rows, group.rank());
  expect_close(layer->forward(own), share_of(whole_layer->forward(whole_input), rows, group.rank()),
               kFp64);
}

TEST(SyncBatchNormRanks, EqualOneProcessWithTheWholeBatch) {
  run_ranks(4, [](Rank&) {
    const comm::Group group = comm::init();
    torch::manual_seed(1);
    const auto whole = [](at::IntArrayRef shape) {
      return torch::randn(shape, torch::kDouble) * 3 + 5;
    };
    const auto layer_2d = [&](std::int64_t channels) {
      return std::pair(SyncBatchNorm(nn::FusedBatchNormOptions(channels), group),
                       torch::nn::BatchNorm2d(channels));
    };
    for (const Shares& rows :
         {Shares{2, 2, 2, 2}, Shares{3, 1, 4, 2}, Shares{0, 3, 0, 1}, Shares{0, 0, 0, 5}}) {
      SCOPED_TRACE(c10::str("rows ", rows));
      const auto total = std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
      const auto [layer, reference] = layer_2d(3);
      expect_like_whole_batch(layer, reference, whole({total, 3, 4, 5}), rows, group);
    }
    const Shares rows{2, 0, 3, 1};
    {
      SCOPED_TRACE("channels last");
      const auto [layer, reference] = layer_2d(5);
      expect_like_whole_batch(layer, reference,
                              whole({6, 5, 3, 2}).contiguous(at::MemoryFormat::ChannelsLast), rows,
                              group);
    }
    {
      SCOPED_TRACE("not contiguous");
      const auto [layer, reference] = layer_2d(3);
      expect_like_whole_batch(layer, reference,
                              whole({6, 4, 3, 8}).transpose(1, 2).slice(3, 0, 8, 2), rows, group);
    }
    {
      SCOPED_TRACE("vectors");
      expect_like_whole_batch(SyncBatchNorm(nn::FusedBatchNormOptions(7), group),
                              torch::nn::BatchNorm1d(7), whole({6, 7}), rows, group);
    }
    {
      SCOPED_TRACE("sequences");
      expect_like_whole_batch(SyncBatchNorm(nn::FusedBatchNormOptions(2), group),
                              torch::nn::BatchNorm1d(2), whole({6, 2, 9}), rows, group);
    }
    {
      SCOPED_TRACE("volumes, channels last");
      expect_like_whole_batch(
          SyncBatchNorm(nn::FusedBatchNormOptions(3), group), torch::nn::BatchNorm3d(3),
          whole({6, 3, 2, 3, 2}).contiguous(at::MemoryFormat::ChannelsLast3d), rows, group);
    }
    {
      SCOPED_TRACE("large mean, many channels");
      const auto [layer, reference] = layer_2d(67);
      expect_like_whole_batch(layer, reference, torch::randn({6, 67, 2, 2}, torch::kDouble) + 100,
                              rows, group);
    }
    {
      SCOPED_TRACE("no parameters");
      expect_like_whole_batch(
          SyncBatchNorm(nn::FusedBatchNormOptions(3).affine(false), group),
          torch::nn::BatchNorm2d(torch::nn::BatchNorm2dOptions(3).affine(false)),
          whole({6, 3, 2, 2}), rows, group);
    }
    {
      SCOPED_TRACE("cumulative average, eps");
      expect_like_whole_batch(
          SyncBatchNorm(nn::FusedBatchNormOptions(3).momentum(std::nullopt).eps(0.1), group),
          torch::nn::BatchNorm2d(torch::nn::BatchNorm2dOptions(3).momentum(std::nullopt).eps(0.1)),
          whole({6, 3, 2, 2}), rows, group);
    }
  });
}

TEST(SyncBatchNormRanks, WithoutRunningStatisticsEvaluationIsSynchronisedToo) {
  run_ranks(2, [](Rank& rank) {
    const comm::Group group = comm::init();
    torch::manual_seed(2);
    const at::Tensor whole = torch::randn({5, 3, 2, 2}, torch::kDouble);
    const Shares rows{4, 1};
    SyncBatchNorm layer(nn::FusedBatchNormOptions(3).track_running_stats(false), group);
    torch::nn::BatchNorm2d reference(torch::nn::BatchNorm2dOptions(3).track_running_stats(false));
    layer->to(torch::kDouble);
    reference->to(torch::kDouble);
    layer->eval();
    reference->eval();
    expect_close(layer->forward(share_of(whole, rows, rank.number())),
                 share_of(reference->forward(whole), rows, rank.number()), kFp64);
    EXPECT_FALSE(layer->running_mean.defined());
  });
}

TEST(SyncBatchNormRanks, AddsAResidualAndAppliesRelu) {
  run_ranks(2, [](Rank& rank) {
    const comm::Group group = comm::init();
    torch::manual_seed(3);
    const Shares rows{1, 3};
    const at::Tensor values = torch::randn({4, 3, 2, 5}, torch::kDouble);
    const at::Tensor added = torch::randn({4, 3, 2, 5}, torch::kDouble);
    const at::Tensor grad = torch::randn({4, 3, 2, 5}, torch::kDouble);
    for (const bool relu : {false, true}) {
      torch::nn::BatchNorm2d reference(3);
      SyncBatchNorm layer(nn::FusedBatchNormOptions(3).relu(relu), group);
      layer->to(torch::kDouble);
      reference->to(torch::kDouble);
      const at::Tensor whole = leaf(values);
      const at::Tensor whole_added = leaf(added);
      at::Tensor want = reference->forward(whole) + whole_added;
      if (relu) want = want.relu();
      want.backward(grad);

      const at::Tensor own = leaf(share_of(values, rows, rank.number()));
      const at::Tensor own_added = leaf(share_of(added, rows, rank.number()));
      const at::Tensor got = layer->forward(own, own_added);
      got.backward(share_of(grad, rows, rank.number()));
      expect_close(got, share_of(want, rows, rank.number()), kFp64);
      expect_close(own.grad(), share_of(whole.grad(), rows, rank.number()), kFp64);
      expect_close(own_added.grad(), share_of(whole_added.grad(), rows, rank.number()), kFp64);
      expect_close(summed(layer->weight.grad(), group), reference->weight.grad(), kFp64);
      expect_close(summed(layer->bias.grad(), group), reference->bias.grad(), kFp64);
    }
  });
}

TEST(SyncBatchNormRanks, ComputesOnlyTheGradientsThatAreNeeded) {
  run_ranks(2, [](Rank& rank) {
    const comm::Group group = comm::init();
    torch::manual_seed(4);
    const Shares rows{2, 3};
    const at::Tensor values = torch::randn({5, 3, 4}, torch::kDouble);
    const at::Tensor grad = torch::randn({5, 3, 4}, torch::kDouble);
    // Which of input, weight and bias are frozen, bit by bit.
    for (int frozen = 0; frozen < 7; ++frozen) {
      SCOPED_TRACE("frozen " + std::to_string(frozen));
      const auto run = [&](auto& layer, const at::Tensor& input, const at::Tensor& grad_output) {
        layer->to(torch::kDouble);
        input.requires_grad_((frozen & 1) == 0);
        layer->weight.requires_grad_((frozen & 2) == 0);
        layer->bias.requires_grad_((frozen & 4) == 0);
        layer->forward(input).backward(grad_output);
      };
      torch::nn::BatchNorm1d reference(3);
      const at::Tensor whole = values.clone();
      run(reference, whole, grad);
      SyncBatchNorm layer(nn::FusedBatchNormOptions(3), group);
      const at::Tensor own = share_of(values, rows, rank.number()).clone();
      run(layer, own, share_of(grad, rows, rank.number()));

      const auto compare = [&](const at::Tensor& got, const at::Tensor& want, bool add_up) {
        ASSERT_EQ(got.defined(), want.defined());
        if (got.defined()) expect_close(add_up ? summed(got, group) : got, want, kFp64);
      };
      compare(own.grad(),
              whole.grad().defined() ? share_of(whole.grad(), rows, rank.number()) : at::Tensor(),
              false);
      compare(layer->weight.grad(), reference->weight.grad(), true);
      compare(layer->bias.grad(), reference->bias.grad(), true);
    }
  });
}

TEST(SyncBatchNormRanks, TakeSixteenBitInputsWithFp32Parameters) {
  run_ranks(2, [](Rank& rank) {
    const comm::Group group = comm::init();
    const Shares rows{3, 5};
    for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
      for (const auto format : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast}) {
        torch::manual_seed(5);
        const at::Tensor values =
            (torch::randn({8, 16, 6, 6}) * 2 + 1).to(dtype).contiguous(format);
        const at::Tensor grad = torch::randn({8, 16, 6, 6}).to(dtype).contiguous(format);
        torch::nn::BatchNorm2d reference(16);
        reference->to(torch::kDouble);
        const at::Tensor whole = leaf(values.to(torch::kDouble));
        const at::Tensor want = reference->forward(whole);
        want.backward(grad.to(torch::kDouble));

        SyncBatchNorm layer(nn::FusedBatchNormOptions(16), group);
        const at::Tensor own = leaf(share_of(values, rows, rank.number()));
        const at::Tensor got = layer->forward(own);
        got.backward(share_of(grad, rows, rank.number()));
        const auto own_part = [&](const at::Tensor& tensor) {
          return share_of(tensor, rows, rank.number()).to(dtype);
        };
        // One rounding, and one unit where the fp32 before it differs.
        const double once = 2 * test::rounding_tolerance(dtype);
        expect_close(got, own_part(want), once);
        expect_close(own.grad(), own_part(whole.grad()), once);
        EXPECT_TRUE(own.grad().is_contiguous(format));
        const double sums = test::reduction_tolerance(torch::kFloat, 8 * 36);
        EXPECT_EQ(layer->weight.grad().scalar_type(), torch::kFloat);
        expect_close(summed(layer->weight.grad(), group),
                     reference->weight.grad().to(torch::kFloat), sums);
        expect_close(summed(layer->bias.grad(), group), reference->bias.grad().to(torch::kFloat),
                     sums);
        expect_close(layer->running_mean, reference->running_mean.to(torch::kFloat), sums);
        expect_close(layer->running_var, reference->running_var.to(torch::kFloat), sums);
      }
    }
    // All in 16 bits, as at O3 without keep_batchnorm_fp32.
    SyncBatchNorm half(nn::FusedBatchNormOptions(4), group);
    half->to(torch::kHalf);
    const at::Tensor input = leaf(torch::randn({2, 4, 3}).to(torch::kHalf));
    const at::Tensor output = half->forward(input);
    output.sum().backward();
    EXPECT_EQ(output.scalar_type(), torch::kHalf);
    EXPECT_EQ(half->weight.grad().scalar_type(), torch::kHalf);
    EXPECT_EQ(half->running_var.scalar_type(), torch::kHalf);
  });
}

TEST(SyncBatchNormRanks, TalkOnceAPass) {
  run_ranks(2, [](Rank&) {
    const comm::Group group =
        comm::init("env://", comm::InitOptions().check(comm::CheckLevel::calls));
    SyncBatchNorm layer(nn::FusedBatchNormOptions(3), group);
    const auto calls = [&] { return group.impl()->watch->calls(); };
    const auto before = calls();
    const at::Tensor output = layer->forward(torch::randn({4, 3, 2, 2}).requires_grad_());
    EXPECT_EQ(calls() - before, 1u);
    output.sum().backward();
    EXPECT_EQ(calls() - before, 2u);
  });
}

TEST(SyncBatchNormRanks, WaitingForOtherRanksIsCommunication) {
  run_ranks(2, [](Rank&) {
    SyncBatchNorm layer(nn::FusedBatchNormOptions(3), comm::init());
    const test::RecordedEvents events;
    const at::Tensor output = layer->forward(torch::randn({4, 3, 2, 2}).requires_grad_());
    EXPECT_EQ(events.phases(), "communication()");
    output.sum().backward();
    EXPECT_EQ(events.phases(), "communication() communication()");
  });
}

TEST(SyncBatchNormRanks, GroupsKeepToThemselves) {
  run_ranks(4, [](Rank& rank) {
    const comm::Group world = comm::init();
    const comm::Group pair = world.split(2);
    torch::manual_seed(6);
    const at::Tensor values = torch::randn({8, 3}, torch::kDouble);
    SyncBatchNorm layer(nn::FusedBatchNormOptions(3), pair);
    torch::nn::BatchNorm1d reference(3);
    layer->to(torch::kDouble);
    reference->to(torch::kDouble);
    const at::Tensor of_pair = values.narrow(0, rank.number() / 2 * 4, 4);
    expect_close(layer->forward(of_pair.narrow(0, rank.number() % 2 * 2, 2)),
                 reference->forward(of_pair).narrow(0, rank.number() % 2 * 2, 2), kFp64);
    expect_same_buffers(*layer, *reference, kFp64);
  });
}

TEST(SyncBatchNormRanks, UpdateStatisticsWithoutGradients) {
  run_ranks(2, [](Rank& rank) {
    const comm::Group group = comm::init();
    torch::manual_seed(7);
    const at::Tensor values = torch::randn({6, 3, 2}, torch::kDouble);
    torch::nn::BatchNorm1d reference(3);
    reference->to(torch::kDouble);
    reference->forward(values);
    SyncBatchNorm layer(nn::FusedBatchNormOptions(3), group);
    torch::nn::BatchNorm1d converted(3);
    layer->to(torch::kDouble);
    converted->to(torch::kDouble);
    convert_sync_batchnorm(*converted, group);
    {
      const torch::NoGradGuard no_grad;
      EXPECT_FALSE(layer->forward(share_of(values, {2, 4}, rank.number())).requires_grad());
    }
    expect_same_buffers(*layer, *reference, kFp64);
    {
      const c10::InferenceMode inference;
      converted->forward(share_of(values, {2, 4}, rank.number()));
    }
    expect_same_buffers(*converted, *reference, kFp64);
  });
}

TEST(SyncBatchNormRanks, HaveAllEmptyBatches) {
  run_ranks(2, [](Rank&) {
    const comm::Group group = comm::init();
    SyncBatchNorm layer(nn::FusedBatchNormOptions(3), group);
    const at::Tensor input = torch::empty({0, 3, 2, 2}).requires_grad_();
    const at::Tensor output = layer->forward(input);
    output.sum().backward();
    EXPECT_EQ(output.sizes(), input.sizes());
    EXPECT_EQ(input.grad().sizes(), input.sizes());
    expect_bitwise_equal(layer->weight.grad(), torch::zeros({3}));
    expect_bitwise_equal(layer->running_mean, torch::zeros({3}));
    expect_bitwise_equal(layer->running_var, torch::ones({3}));
  });
}

TEST(SyncBatchNormRanks, RefuseWhatHasNoAnswer) {
  run_ranks(2, [](Rank& rank) {
    const comm::Group group = comm::init();
    SyncBatchNorm layer(nn::FusedBatchNormOptions(3), group);
    // On both ranks, though only one has the value.
    test::expect_error([&] { layer->forward(torch::randn({rank.number(), 3})); },
                       {"[parallel.sync_batch_norm]", "more than 1 value a channel"});
    expect_bitwise_equal(layer->running_var, torch::ones({3}));
    // Before anything is sent: the next forward still fits.
    test::expect_error([&] { layer->forward(torch::randn({2, 4})); }, {"(N, 3, ...)", "[2, 4]"});
    test::expect_error([&] { layer->forward(torch::randn({3})); }, {"(N, 3, ...)", "[3]"});
    test::expect_error([&] { layer->forward(torch::ones({2, 3}, torch::kLong)); },
                       {"floating-point", "int64"});
    test::expect_error([&] { layer->forward(torch::randn({2, 3}), torch::randn({2, 1})); },
                       {"residual", "[2, 1]"});

    const at::Tensor input = torch::randn({2, 3}).requires_grad_();
    const at::Tensor grad =
        torch::autograd::grad({layer->forward(input).square().sum()}, {input}, {},
                              /*retain_graph=*/true, /*create_graph=*/true)[0];
    test::expect_error([&] { grad.square().sum().backward(); }, {"differentiated once"});
  });
}

}  // namespace
}  // namespace semitone::parallel::sync_batch_norm_test

// PowerSGDHook and QuantizedAllReduceHook: against plain loops and exact means, over overflows,
// changes of the loss scale, saving, and lost ranks. PostLocalSGDHook's average of weights.
#include "semitone/autocast/autocast.h"
#include "semitone/comm/init.h"
#include "semitone/core/error.h"
#include "semitone/parallel/distributed_data_parallel.h"
#include "semitone/parallel/post_local_sgd.h"
#include "semitone/parallel/power_sgd.h"
#include "semitone/parallel/quantized_all_reduce.h"
#include "src/core/dtype_limits.h"
#include "tests/support/errors.h"
#include "tests/support/run_ranks.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace semitone::parallel::compressing_hooks_test {
namespace {

using test::expect_error;
using test::Rank;
using test::run_ranks;
using test::same_bits;
using ::testing::HasSubstr;

// Two buckets of parameters, as DistributedDataParallel makes them.
struct Model {
  explicit Model(at::ScalarType dtype = torch::kDouble) {
    for (const std::vector<std::int64_t>& shape :
         {std::vector<std::int64_t>{9, 8}, {7}, {12, 2, 3}, {9, 8}, {}})
      parameters.push_back(torch::zeros(shape, dtype));
  }
  std::vector<std::size_t> in_bucket(std::size_t bucket) const {
    return bucket == 0 ? std::vector<std::size_t>{3, 4, 0} : std::vector<std::size_t>{2, 1};
  }
  std::vector<at::Tensor> parameters;
};

// The gradients of all parameters of a step on a rank.
std::vector<at::Tensor> gradients_at(const Model& model, int step, int rank) {
  auto generator =
      at::detail::createCPUGenerator(static_cast<std::uint64_t>(100 * std::int64_t{step} + rank));
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : model.parameters) {
    gradients.push_back(
        at::randn(parameter.sizes(), generator, torch::TensorOptions(torch::kDouble))
            .to(parameter.scalar_type()));
  }
  return gradients;
}

std::vector<at::Tensor> exact_means(const Model& model, int step, int ranks) {
  std::vector<at::Tensor> means;
  for (int rank = 0; rank < ranks; ++rank) {
    const auto gradients = gradients_at(model, step, rank);
    for (std::size_t p = 0; p < gradients.size(); ++p) {
      const at::Tensor part = gradients[p].to(torch::kDouble) / ranks;
      if (rank == 0) means.push_back(part);
      if (rank > 0) means[p] += part;
    }
  }
  return means;
}

// A backward pass: what DistributedDataParallel would leave in the gradients.
std::vector<at::Tensor> pass(CommHook& hook, const Model& model, const comm::Group& group,
                             const std::vector<at::Tensor>& gradients) {
  std::vector<GradientBucket> buckets;
  std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures;
  for (const std::size_t index : {0u, 1u}) {
    std::vector<at::Tensor> flat;
    GradientBucket bucket;
    bucket.index = index;
    bucket.is_last = index == 1;
    for (const std::size_t p : model.in_bucket(index)) {
      flat.push_back(gradients[p].reshape(-1));
      bucket.parameters.push_back(model.parameters[p]);
    }
    bucket.buffer = at::cat(flat);
    futures.push_back(hook.reduce(bucket, group));
  }
  std::vector<at::Tensor> results(model.parameters.size());
  for (const std::size_t index : {0u, 1u}) {
    futures[index]->waitAndThrow();
    const at::Tensor result = futures[index]->value().toTensor();
    std::int64_t start = 0;
    for (const std::size_t p : model.in_bucket(index)) {
      const auto elements = model.parameters[p].numel();
      results[p] = result.narrow(0, start, elements).view(model.parameters[p].sizes());
      start += elements;
    }
  }
  return results;
}

void expect_same(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t p = 0; p < got.size(); ++p) EXPECT_TRUE(same_bits(got[p], want[p])) << p;
}

void expect_equal_on_ranks(const comm::Group& group, const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) {
    for (const at::Tensor& other : group.all_gather(tensor.contiguous()))
      EXPECT_TRUE(same_bits(other, tensor));
  }
}

PowerSGDOptions compressing(std::int64_t rank) {
  return PowerSGDOptions()
      .matrix_approximation_rank(rank)
      .start_powerSGD_iter(0)
      .min_compression_rate(1.25);
}

using MakeHook = std::function<std::shared_ptr<CommHook>(const Model&)>;
const std::vector<std::pair<std::string, MakeHook>>& hooks() {
  static const std::vector<std::pair<std::string, MakeHook>> all{
      {"PowerSGD",
       [](const Model& model) {
         return std::make_shared<PowerSGDHook>(model.parameters, compressing(2));
       }},
      {"PowerSGD, QR",
       [](const Model& model) {
         return std::make_shared<PowerSGDHook>(model.parameters,
                                               compressing(3).min_compression_rate(0.5));
       }},
      {"quantised",
       [](const Model& model) {
         return std::make_shared<QuantizedAllReduceHook>(
             model.parameters, QuantizedAllReduceOptions().block_size(16));
       }},
  };
  return all;
}

// The bits of every dtype's arithmetic, for a handful of operations on values of this size.
double roundings(at::ScalarType dtype, double largest) {
  return 64 * dtype_limits(dtype).epsilon * largest;
}

TEST(PowerSGD, OfFullRankIsTheMean) {
  run_ranks(3, [](Rank& rank) {
    const auto group = comm::init();
    for (const auto dtype : {torch::kDouble, torch::kFloat, torch::kHalf, torch::kBFloat16}) {
      SCOPED_TRACE(dtype);
      const Model model(dtype);
      // More than the smaller extent of each matrix.
      PowerSGDHook hook(model.parameters, compressing(20).min_compression_rate(0.01));
      for (int step = 0; step < 3; ++step) {
        const auto means = exact_means(model, step, 3);
        const auto got = pass(hook, model, group, gradients_at(model, step, rank.number()));
        for (std::size_t p = 0; p < got.size(); ++p) {
          EXPECT_EQ(got[p].scalar_type(), dtype);
          EXPECT_LE((got[p].to(torch::kDouble) - means[p]).abs().max().item<double>(),
                    roundings(dtype, 4));
        }
        expect_equal_on_ranks(group, got);
      }
    }
  });
}

TEST(PowerSGD, AveragesWhatItDoesNotCompress) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    const Model model;
    PowerSGDHook hook(model.parameters, compressing(1).start_powerSGD_iter(2));
    for (int step = 0; step < 4; ++step) {
      const auto means = exact_means(model, step, 2);
      const auto got = pass(hook, model, group, gradients_at(model, step, rank.number()));
      for (std::size_t p = 0; p < got.size(); ++p) {
        const double difference = (got[p] - means[p]).abs().max().item<double>();
        const bool is_compressed = step >= 2 && got[p].dim() > 1;
        EXPECT_EQ(difference > 0.1, is_compressed) << difference;
        EXPECT_EQ(difference > roundings(torch::kDouble, 4), is_compressed) << difference;
      }
    }
  });
}

// A matrix of zeros, whose columns have no direction.
TEST(PowerSGD, LeavesZerosZero) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    const Model model;
    for (const std::int64_t approximation : {1, 2, 3}) {
      PowerSGDHook hook(model.parameters, compressing(approximation));
      for (int step = 0; step < 2; ++step) {
        auto gradients = gradients_at(model, step, rank.number());
        gradients[0].zero_();
        const auto got = pass(hook, model, group, gradients);
        EXPECT_TRUE(torch::equal(got[0], torch::zeros_like(got[0])));
        EXPECT_TRUE(got[3].isfinite().all().item<bool>());
      }
    }
  });
}

// A head that the first steps do not use: its zeros are no start for later steps.
TEST(PowerSGD, GoesOnAfterGradientsOfZeros) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    for (const auto dtype : {torch::kDouble, torch::kHalf}) {
      const Model model(dtype);
      for (const std::int64_t approximation : {1, 2, 3}) {
        SCOPED_TRACE(approximation);
        PowerSGDHook hook(model.parameters, compressing(approximation));
        for (int step = 0; step < 5; ++step) {
          auto gradients = gradients_at(model, step, rank.number());
          const bool is_used = step > 1;
          if (!is_used) gradients[0].zero_();
          const auto got = pass(hook, model, group, gradients);
          EXPECT_EQ(got[0].norm().item<double>() > 0.1, is_used) << step;
        }
      }
    }
  });
}

// A matrix without a Q of an earlier step gets a random one, and leaves the others theirs.
TEST(PowerSGD, AMatrixOfZerosLeavesTheOthersWarm) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    const Model model;
    PowerSGDHook all_used(model.parameters, compressing(2));
    PowerSGDHook one_unused(model.parameters, compressing(2));
    for (int step = 0; step < 3; ++step) {
      auto gradients = gradients_at(model, step, rank.number());
      const auto want = pass(all_used, model, group, gradients);
      gradients[0].zero_();
      EXPECT_TRUE(same_bits(pass(one_unused, model, group, gradients)[3], want[3])) << step;
    }
  });
}

// The norm of a column is beyond fp16, none of its elements is.
TEST(PowerSGD, LargeColumnsKeepTheirDirection) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    const std::vector<at::Tensor> parameters{torch::zeros({256, 256}, torch::kHalf)};
    PowerSGDHook hook(parameters, compressing(1));
    for (int step = 0; step < 2; ++step) {
      GradientBucket bucket;
      bucket.buffer = torch::full({256 * 256}, 200, torch::kHalf);
      bucket.parameters = parameters;
      bucket.is_last = true;
      const auto future = hook.reduce(bucket, group);
      future->waitAndThrow();
      const at::Tensor got = future->value().toTensor();
      EXPECT_LT((got - 200).abs().max().item<double>(), 2) << step;
    }
  });
}

// The elements of a bucket are in the order of the parameters' memory.
TEST(PowerSGD, TransposedParametersAreMatricesToo) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    const std::vector<at::Tensor> parameters{torch::zeros({40, 30}, torch::kDouble).t()};
    PowerSGDHook hook(parameters, compressing(1));
    const at::Tensor product = torch::arange(1, 31, torch::kDouble).unsqueeze(1) *
                               torch::arange(2, 42, torch::kDouble).unsqueeze(0);
    GradientBucket bucket;
    bucket.buffer = product.t().reshape(-1);
    bucket.parameters = parameters;
    bucket.is_last = true;
    const auto future = hook.reduce(bucket, group);
    future->waitAndThrow();
    const at::Tensor got = future->value().toTensor();
    EXPECT_LT((got - bucket.buffer).abs().max().item<double>(), 1e-9);
  });
}

// The rule of the header for one bucket, as loops over numbers. In fp64, like the hook's sums.
struct QuantizedLoop {
  std::vector<std::vector<double>> errors;  // of each rank
  std::vector<double> part_errors;          // of all parts, one after the other
  std::int64_t block;

  // Rounds a block, and returns what was lost.
  static std::vector<double> round_block(double* values, std::int64_t elements) {
    double largest = 0;
    for (std::int64_t i = 0; i < elements; ++i) largest = std::max(largest, std::abs(values[i]));
    const auto scale = static_cast<double>(static_cast<float>(largest / 127));
    std::vector<double> lost;
    for (std::int64_t i = 0; i < elements; ++i) {
      const double integer =
          scale == 0 ? 0 : std::clamp(std::nearbyint(values[i] / scale), -127.0, 127.0);
      lost.push_back(values[i] - integer * scale);
      values[i] = integer * scale;
    }
    return lost;
  }

  std::vector<double> mean(const std::vector<std::vector<double>>& gradients) {
    const auto ranks = gradients.size();
    const auto elements = gradients[0].size();
    const auto unit = ranks * static_cast<std::size_t>(block);
    const auto padded = (elements + unit - 1) / unit * unit;
    errors.resize(ranks, std::vector<double>(padded, 0));
    part_errors.resize(padded, 0);
    std::vector<double> sum(padded, 0);
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      std::vector<double> values(padded, 0);
      for (std::size_t i = 0; i < elements; ++i) values[i] = gradients[rank][i] + errors[rank][i];
      errors[rank].clear();
      for (std::size_t i = 0; i < padded; i += static_cast<std::size_t>(block)) {
        for (const double lost : round_block(&values[i], block)) errors[rank].push_back(lost);
      }
      for (std::size_t i = 0; i < padded; ++i) sum[i] += values[i];
    }
    for (std::size_t i = 0; i < padded; ++i)
      sum[i] = sum[i] / static_cast<double>(ranks) + part_errors[i];
    part_errors.clear();
    for (std::size_t i = 0; i < padded; i += static_cast<std::size_t>(block)) {
      for (const double lost : round_block(&sum[i], block)) part_errors.push_back(lost);
    }
    sum.resize(elements);
    return sum;
  }
};

TEST(QuantizedAllReduce, IsTheLoopOfItsRule) {
  run_ranks(3, [](Rank& rank) {
    const auto group = comm::init();
    const at::Tensor parameter = torch::zeros({173}, torch::kDouble);
    QuantizedAllReduceHook hook({parameter}, QuantizedAllReduceOptions().block_size(8));
    QuantizedLoop loop{{}, {}, 8};
    for (int step = 0; step < 4; ++step) {
      std::vector<std::vector<double>> gradients;
      at::Tensor own;
      for (int each = 0; each < 3; ++each) {
        torch::manual_seed(static_cast<std::uint64_t>(10 * std::int64_t{step} + each));
        at::Tensor values = torch::randn({173}, torch::kDouble);
        values.narrow(0, 16, 8).zero_();  // a block without a scale
        if (each == rank.number()) own = values.clone();
        gradients.emplace_back(values.const_data_ptr<double>(),
                               values.const_data_ptr<double>() + 173);
      }
      GradientBucket bucket{own, {parameter}, 0, true};
      const auto future = hook.reduce(bucket, group);
      future->waitAndThrow();
      const auto want = loop.mean(gradients);
      const at::Tensor got = future->value().toTensor();
      EXPECT_LE((got - torch::tensor(want, torch::kDouble)).abs().max().item<double>(),
                roundings(torch::kDouble, 4));
    }
  });
}

TEST(QuantizedAllReduce, IsNearTheMeanOfEveryDtype) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    for (const auto dtype : {torch::kDouble, torch::kFloat, torch::kHalf, torch::kBFloat16}) {
      SCOPED_TRACE(dtype);
      const Model model(dtype);
      QuantizedAllReduceHook hook(model.parameters);
      const auto gradients = gradients_at(model, 0, rank.number());
      const auto means = exact_means(model, 0, 2);
      const auto got = pass(hook, model, group, gradients);
      // Half a step of each rounding, of blocks whose largest value is less than 5.
      for (std::size_t p = 0; p < got.size(); ++p) {
        EXPECT_EQ(got[p].scalar_type(), dtype);
        EXPECT_LE((got[p].to(torch::kDouble) - means[p]).abs().max().item<double>(),
                  5.0 / 127 + roundings(dtype, 1));
      }
      expect_equal_on_ranks(group, got);
    }
  });
}

// What is lost in a step is sent later: the sum of many means has the error of one.
TEST(ErrorFeedback, MakesUpForWhatWasLost) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    const Model model;
    const auto gradients = gradients_at(model, 0, rank.number());
    const auto means = exact_means(model, 0, 2);
    constexpr int kSteps = 64;
    const auto error_of_sum = [&](CommHook& hook) {
      std::vector<at::Tensor> sums;
      for (const at::Tensor& mean : means) sums.push_back(torch::zeros_like(mean));
      for (int step = 0; step < kSteps; ++step) {
        const auto got = pass(hook, model, group, gradients);
        for (std::size_t p = 0; p < got.size(); ++p) sums[p] += got[p];
      }
      double largest = 0;
      for (std::size_t p = 0; p < sums.size(); ++p)
        largest = std::max(largest, (sums[p] - kSteps * means[p]).abs().max().item<double>());
      return largest;
    };
    QuantizedAllReduceHook quantized(model.parameters);
    QuantizedAllReduceHook forgetful(model.parameters,
                                     QuantizedAllReduceOptions().use_error_feedback(false));
    // Of inputs less than 5, and of their errors, less than 5 / 127.
    EXPECT_LE(error_of_sum(quantized), (5 + 5.0 / 127) / 127);
    EXPECT_GT(error_of_sum(forgetful), kSteps * 0.25 / 127);

    PowerSGDHook power(model.parameters, compressing(1));
    PowerSGDHook lossy(model.parameters, compressing(1).use_error_feedback(false));
    EXPECT_LT(2 * error_of_sum(power), error_of_sum(lossy));
  });
}

TEST(Overflow, ChangesNothingButTheStepThatIsSkipped) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    for (const auto& [name, make] : hooks()) {
      for (const double bad : {std::numeric_limits<double>::infinity(), std::nan("")}) {
        for (const std::size_t where : {0u, 1u, 2u}) {  // matrices and a vector, of both buckets
          SCOPED_TRACE(name + " " + std::to_string(where));
          const Model model;
          const auto disturbed = make(model);
          const auto undisturbed = make(model);
          for (int step = 0; step < 4; ++step) {
            const auto gradients = gradients_at(model, step, rank.number());
            if (step == 2) {
              auto overflown = gradients_at(model, 9, rank.number());
              if (rank.number() == 1) overflown[where].view(-1)[1] = bad;
              const auto got = pass(*disturbed, model, group, overflown);
              for (std::size_t p = 0; p < got.size(); ++p) {
                const auto mates = model.in_bucket(where == 0 ? 0 : 1);
                const bool is_mate = std::find(mates.begin(), mates.end(), p) != mates.end();
                EXPECT_EQ(got[p].isnan().all().item<bool>(), is_mate);
                EXPECT_EQ(got[p].isfinite().all().item<bool>(), !is_mate);
              }
            }
            expect_same(pass(*disturbed, model, group, gradients),
                        pass(*undisturbed, model, group, gradients));
          }
        }
      }
    }
  });
}

// Finite gradients whose factors are beyond fp16.
TEST(Overflow, OfTheFactorsIsOneToo) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    const Model model(torch::kHalf);
    PowerSGDHook hook(model.parameters, compressing(1));
    auto gradients = gradients_at(model, 0, rank.number());
    // A Hadamard matrix: its product with any unit vector has an element of at least 1.
    for (unsigned i = 0; i < 8; ++i) {
      for (unsigned j = 0; j < 8; ++j)
        gradients[0][i][j] = std::popcount(i & j) % 2 == 0 ? 60000 : -60000;
    }
    const auto got = pass(hook, model, group, gradients);
    EXPECT_TRUE(got[0].isnan().all().item<bool>());
    for (int step = 1; step < 3; ++step) {
      for (const at::Tensor& each :
           pass(hook, model, group, gradients_at(model, step, rank.number())))
        EXPECT_TRUE(each.isfinite().all().item<bool>());
    }
  });
}

template <typename Hook>
void expect_scaled_like_the_loss(Hook& scaled, Hook& plain, const Model& model,
                                 const comm::Group& group) {
  for (int step = 0; step < 4; ++step) {
    const double scale = step < 2 ? 1 : 1024;
    if (step == 0 || step == 2) scaled.set_loss_scale(scale);
    auto gradients = gradients_at(model, step, group.rank());
    const auto want = pass(plain, model, group, gradients);
    for (at::Tensor& gradient : gradients) gradient = gradient * scale;
    auto got = pass(scaled, model, group, gradients);
    for (at::Tensor& gradient : got) gradient = gradient / scale;
    expect_same(got, want);
  }
}

// The hook is told only after each step, as scaler.update() is called: the errors of the first one have
// the scale's unit already.
template <typename Hook>
void expect_unscaled_by_the_first_call(Hook& told, Hook& untold, const Model& model,
                                       const comm::Group& group) {
  for (int step = 0; step < 3; ++step) {
    const auto gradients = gradients_at(model, step, group.rank());
    const auto want = pass(untold, model, group, gradients);
    expect_same(pass(told, model, group, gradients), want);
    told.set_loss_scale(65536);
  }
}

TEST(LossScale, OfTheFirstCallIsThatOfTheErrorsSoFar) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    const Model model;
    PowerSGDHook told_power(model.parameters, compressing(2));
    PowerSGDHook untold_power(model.parameters, compressing(2));
    expect_unscaled_by_the_first_call(told_power, untold_power, model, group);
    QuantizedAllReduceHook told(model.parameters);
    QuantizedAllReduceHook untold(model.parameters);
    expect_unscaled_by_the_first_call(told, untold, model, group);
  });
}

TEST(LossScale, ScalesTheErrors) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    const Model model;
    const auto& parameters = model.parameters;
    PowerSGDHook scaled_power(parameters, compressing(2));
    PowerSGDHook plain_power(parameters, compressing(2));
    expect_scaled_like_the_loss(scaled_power, plain_power, model, group);
    QuantizedAllReduceHook scaled(parameters);
    QuantizedAllReduceHook plain(parameters);
    expect_scaled_like_the_loss(scaled, plain, model, group);
    for (const double bad : {0.0, -1.0, HUGE_VAL, static_cast<double>(NAN)})
      expect_error([&] { scaled.set_loss_scale(bad); }, {"set_loss_scale", "greater than 0"});
  });
}

template <typename Hook>
std::string saved(const Hook& hook) {
  torch::serialize::OutputArchive archive;
  hook.save(archive);
  std::ostringstream stream;
  archive.save_to(stream);
  return stream.str();
}

torch::serialize::InputArchive archive_of(const std::string& text) {
  std::istringstream stream(text);
  torch::serialize::InputArchive archive;
  archive.load_from(stream);
  return archive;
}

std::vector<torch::serialize::InputArchive> archives_of(const std::vector<std::string>& texts) {
  std::vector<torch::serialize::InputArchive> archives;
  archives.reserve(texts.size());
  for (const std::string& text : texts) archives.push_back(archive_of(text));
  return archives;
}

template <typename Hook>
void load_from(Hook& hook, const std::string& text) {
  torch::serialize::InputArchive archive = archive_of(text);
  hook.load(archive);
}

// @param make  a hook for parameters
template <typename Make>
void expect_resumed(const Make& make, const comm::Group& group) {
  const Model model;
  const auto whole = make(model.parameters);
  const auto first = make(model.parameters);
  whole->set_loss_scale(1);
  first->set_loss_scale(1);
  for (int step = 0; step < 2; ++step) {
    pass(*whole, model, group, gradients_at(model, step, group.rank()));
    pass(*first, model, group, gradients_at(model, step, group.rank()));
  }
  // Also with a smaller scale, which both have.
  whole->set_loss_scale(0.5);
  first->set_loss_scale(0.5);
  const std::string text = saved(*first);
  const auto second = make(model.parameters);
  load_from(*second, text);
  EXPECT_EQ(saved(*second), text);
  second->set_loss_scale(0.5);  // the same: no change
  for (int step = 2; step < 4; ++step) {
    const auto gradients = gradients_at(model, step, group.rank());
    expect_same(pass(*second, model, group, gradients), pass(*whole, model, group, gradients));
  }
  const auto other = make({torch::zeros({3, 3}, torch::kDouble)});
  EXPECT_THROW(load_from(*other, text), FileError);
}

TEST(State, IsSavedAndResumed) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    const auto power = [](const PowerSGDOptions& options) {
      return [options](const std::vector<at::Tensor>& parameters) {
        return std::make_shared<PowerSGDHook>(parameters, options);
      };
    };
    expect_resumed(power(compressing(2)), group);
    expect_resumed(power(compressing(1).warm_start(false).start_powerSGD_iter(1)), group);
    expect_resumed(
        [](const std::vector<at::Tensor>& parameters) {
          return std::make_shared<QuantizedAllReduceHook>(parameters);
        },
        group);
  });
}

// What all ranks' hooks still have to make good reaches one rank that goes on alone.
template <typename Hook>
void expect_nothing_lost_alone(Hook& hook, Hook& exact_alone, const Model& model,
                               const comm::Group& group) {
  std::vector<at::Tensor> owed;
  for (const at::Tensor& parameter : model.parameters) owed.push_back(torch::zeros_like(parameter));
  for (int step = 0; step < 3; ++step) {
    const auto means = exact_means(model, step, group.size());
    const auto got = pass(hook, model, group, gradients_at(model, step, group.rank()));
    for (std::size_t p = 0; p < owed.size(); ++p) owed[p] += means[p] - got[p];
  }
  auto states = archives_of(group.all_gather(saved(hook)));
  exact_alone.load_resharded(states);
  std::vector<at::Tensor> zeros;
  for (const at::Tensor& parameter : model.parameters)
    zeros.push_back(torch::zeros_like(parameter));
  const std::vector<at::Tensor> got = pass(exact_alone, model, group.split(1), zeros);
  double largest = 0;
  for (std::size_t p = 0; p < got.size(); ++p) {
    largest = std::max(largest, owed[p].abs().max().item<double>());
    EXPECT_LE((got[p] - owed[p]).abs().max().item<double>(), 1e-6) << p;
  }
  EXPECT_GT(largest, 1e-3);

  states.pop_back();
  Hook other({torch::zeros({3, 3}, torch::kDouble)});
  EXPECT_THROW(other.load_resharded(states), FileError);
}

TEST(State, WithoutErrorFeedbackHasNoErrors) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    const Model model;
    const auto gradients = gradients_at(model, 0, group.rank());
    QuantizedAllReduceHook saving(model.parameters);
    for (int step = 0; step < 2; ++step) pass(saving, model, group, gradients);
    const auto forgetful = QuantizedAllReduceOptions().use_error_feedback(false);
    QuantizedAllReduceHook fresh(model.parameters, forgetful);
    QuantizedAllReduceHook loaded(model.parameters, forgetful);
    QuantizedAllReduceHook resharded(model.parameters, forgetful);
    load_from(loaded, saved(saving));
    auto states = archives_of(group.all_gather(saved(saving)));
    resharded.load_resharded(states);
    const auto want = pass(fresh, model, group, gradients);
    expect_same(pass(loaded, model, group, gradients), want);
    expect_same(pass(resharded, model, group, gradients), want);
  });
}

TEST(State, WithNumbersThatNoHookHasIsRefused) {
  const auto load = [](std::int64_t passes, double scale, std::int64_t drawn) {
    torch::serialize::OutputArchive out;
    out.write("passes", c10::IValue(passes));
    out.write("loss_scale", c10::IValue(scale));
    out.write("drawn", c10::IValue(drawn));
    std::stringstream stream;
    out.save_to(stream);
    torch::serialize::InputArchive in;
    in.load_from(stream);
    PowerSGDHook hook(Model().parameters);
    hook.load(in);
  };
  load(3, 0.5, 7);
  load(3, 0, 7);  // not told
  EXPECT_THROW(load(-1, 0.5, 7), FileError);
  EXPECT_THROW(load(3, -0.5, 7), FileError);
  EXPECT_THROW(load(3, std::numeric_limits<double>::quiet_NaN(), 7), FileError);
  EXPECT_THROW(load(3, HUGE_VAL, 7), FileError);
  EXPECT_THROW(load(3, 0.5, -1), FileError);
  EXPECT_THROW(load(3, 0.5, std::int64_t{1} << 60), FileError);
}

TEST(State, OfAFewRanksOnlyIsRefused) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    const Model model;
    QuantizedAllReduceHook saving(model.parameters);
    pass(saving, model, group, gradients_at(model, 0, group.rank()));
    const std::string whole = saved(saving);
    const std::string empty = saved(QuantizedAllReduceHook(model.parameters));
    auto states = archives_of({empty, whole});
    QuantizedAllReduceHook loaded(model.parameters);
    EXPECT_THROW(loaded.load_resharded(states), FileError);
    EXPECT_EQ(saved(loaded), empty);
  });
}

TEST(State, OfAllRanksIsLoadedByAnotherNumberOfThem) {
  run_ranks(3, [](Rank&) {
    const auto group = comm::init();
    const Model model;
    PowerSGDHook power(model.parameters, compressing(1));
    PowerSGDHook exact_power(model.parameters, compressing(20).min_compression_rate(0.01));
    expect_nothing_lost_alone(power, exact_power, model, group);
    // A block of one element is exact but for the rounding of its scale.
    QuantizedAllReduceHook quantized(model.parameters);
    QuantizedAllReduceHook exact(model.parameters, QuantizedAllReduceOptions().block_size(1));
    expect_nothing_lost_alone(quantized, exact, model, group);
  });
}

TEST(Hooks, RefuseOptionsAndParametersThatDoNotFit) {
  const Model model;
  const auto power = [&](const PowerSGDOptions& options) {
    return [&, options] { PowerSGDHook(model.parameters, options); };
  };
  expect_error(power(compressing(0)), {"[parallel.power_sgd]", "matrix_approximation_rank"});
  expect_error(power(compressing(1).start_powerSGD_iter(-1)), {"start_powerSGD_iter"});
  expect_error(power(compressing(1).min_compression_rate(0)), {"min_compression_rate"});
  expect_error(power(compressing(1).orthogonalization_epsilon(-1)), {"epsilon"});
  expect_error([] { QuantizedAllReduceHook({}, QuantizedAllReduceOptions().block_size(0)); },
               {"[parallel.quantized_all_reduce]", "block_size"});
  expect_error([] { QuantizedAllReduceHook({}, QuantizedAllReduceOptions().block_size(65537)); },
               {"expected a block_size of 1 to 65536, got 65537"});
  expect_error([] { QuantizedAllReduceHook({at::Tensor()}); }, {"undefined"});
  expect_error([] { PeriodicModelAverager(comm::Group(), 0); }, {"period of 1 or more"});
  expect_error([] { PeriodicModelAverager(comm::Group(), 1, -1); }, {"warmup_steps"});
  PowerSGDHook hook({model.parameters[0]}, compressing(1));
  expect_error([&] { pass(hook, model, comm::Group(), gradients_at(model, 0, 0)); },
               {"[parallel.power_sgd]", "another parameter", "model->parameters()"});
  // Not only when the compression begins.
  PowerSGDHook later({model.parameters[0]});
  expect_error([&] { pass(later, model, comm::Group(), gradients_at(model, 0, 0)); },
               {"[parallel.power_sgd]", "another parameter", "model->parameters()"});
}

// Since LibTorch 2.11 a bucket has two numbers for each of their elements.
TEST(Hooks, RefuseComplexParameters) {
  const Model model(torch::kComplexFloat);
  const auto gradients = gradients_at(model, 0, 0);
  PowerSGDHook power(model.parameters);
  expect_error([&] { pass(power, model, comm::Group(), gradients); },
               {"[parallel.power_sgd]", "real numbers", "complex64", "torch::view_as_real"});
  QuantizedAllReduceHook quantized(model.parameters);
  expect_error([&] { pass(quantized, model, comm::Group(), gradients); },
               {"[parallel.quantized_all_reduce]", "real numbers", "torch::view_as_real"});
}

TEST(Hooks, AcceptParametersWithoutElements) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    torch::nn::Linear model(20, 20);
    // A bucket of its own, since no other parameter has this dtype.
    model->register_parameter("empty", torch::zeros({0, 3}, torch::kDouble));
    const std::vector<std::shared_ptr<CommHook>> hooks = {
        std::make_shared<QuantizedAllReduceHook>(model->parameters()),
        std::make_shared<PowerSGDHook>(model->parameters(),
                                       PowerSGDOptions().start_powerSGD_iter(2))};
    for (const auto& hook : hooks) {
      DistributedDataParallel ddp(model, group, DistributedDataParallelOptions().comm_hook(hook));
      for (int step = 0; step < 4; ++step) {
        model->zero_grad();
        const at::Tensor output = ddp.forward(torch::full({2, 20}, rank.number() + 1.0));
        (output.sum() + model->named_parameters()["empty"].sum()).backward();
      }
      // Of rank 0 all 2, of rank 1 all 4.
      EXPECT_LE((model->weight.grad() - 3).abs().max().item<double>(), 0.05);
      EXPECT_TRUE(model->named_parameters()["empty"].grad().defined());
    }
  });
}

TEST(Hooks, NameALostRank) {
  test::RankOptions options;
  options.casualties = {1};
  run_ranks(
      2,
      [](Rank& rank) {
        const auto group =
            comm::init("env://", comm::InitOptions().heartbeat(std::chrono::milliseconds(50)));
        torch::nn::Linear model(20, 20);
        const auto hook = std::make_shared<QuantizedAllReduceHook>(model->parameters());
        DistributedDataParallel ddp(
            model, group,
            DistributedDataParallelOptions().comm_hook(hook).bucket_cap_mb(0.001).first_bucket_mb(
                0.0001));
        for (int step = 0; step < 3; ++step) ddp.forward(torch::ones({2, 20})).sum().backward();
        rank.meet();
        if (rank.number() == 1) std::raise(SIGKILL);
        const auto go_on = [&] {
          for (;;) ddp.forward(torch::ones({2, 20})).sum().backward();
        };
        EXPECT_THAT(go_on, ::testing::ThrowsMessage<CommError>(HasSubstr("rank 1 lost")));
      },
      options);
}

// A program may call backward() inside the region of its forward.
TEST(Hooks, ComputeTheSameInsideARegion) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    for (const auto dtype : {torch::kFloat, torch::kDouble}) {
      const Model model(dtype);
      for (const auto& [name, make] : hooks()) {
        SCOPED_TRACE(name);
        const auto inside = make(model);
        const auto outside = make(model);
        for (int step = 0; step < 3; ++step) {
          const auto gradients = gradients_at(model, step, rank.number());
          std::vector<at::Tensor> got;
          {
            const amp::Autocast region(torch::kCPU, torch::kBFloat16);
            got = pass(*inside, model, group, gradients);
          }
          expect_same(got, pass(*outside, model, group, gradients));
        }
      }
    }
  });
}

// As by DistributedDataParallel alone: the sum of two is beyond fp16.
TEST(PlainMeans, OfLargeFP16GradientsAreFinite) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    const std::vector<at::Tensor> parameters{torch::zeros({4}, torch::kHalf)};
    PowerSGDHook power(parameters);
    PostLocalSGDHook local(group);
    for (CommHook* const hook : {static_cast<CommHook*>(&power), static_cast<CommHook*>(&local)}) {
      const auto future =
          hook->reduce({torch::full({4}, 40000, torch::kHalf), parameters, 0, true}, group);
      future->waitAndThrow();
      EXPECT_TRUE(torch::equal(future->value().toTensor(), torch::full({4}, 40000, torch::kHalf)));
    }
  });
}

TEST(PeriodicAverages, AreOfEveryDtypeAndLayout) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    std::vector<at::Tensor> parameters;
    for (const auto dtype : {torch::kDouble, torch::kHalf, torch::kBFloat16})
      parameters.push_back(torch::full({2, 3}, 2.0 * rank.number(), dtype).requires_grad_());
    parameters.push_back(
        (torch::arange(6.0).view({2, 3}) + 2 * rank.number()).t().detach().requires_grad_());
    parameters.push_back(torch::full({2}, 2.0 * rank.number()));
    const at::Tensor imaginary =
        torch::full({2}, c10::complex<double>(0, 2.0 * rank.number()), torch::kComplexFloat)
            .requires_grad_();
    parameters.push_back(imaginary);
    // A gradient on one rank only.
    if (rank.number() == 0) parameters[0].mutable_grad() = torch::zeros_like(parameters[0]);
    PeriodicModelAverager averager(group, 2, 1);
    EXPECT_FALSE(averager.average_parameters(parameters));
    EXPECT_EQ(parameters[0][0][0].item<double>(), 2.0 * rank.number());
    EXPECT_TRUE(averager.average_parameters(parameters));
    for (std::size_t p = 0; p < 3; ++p)
      EXPECT_TRUE(torch::equal(parameters[p], torch::ones_like(parameters[p])));
    EXPECT_TRUE(torch::equal(parameters[3], torch::arange(6.0).view({2, 3}).t() + 1));
    EXPECT_TRUE(torch::equal(torch::view_as_real(imaginary.detach()),
                             torch::tensor({0.F, 1.F, 0.F, 1.F}).view({2, 2})));
    // Frozen.
    EXPECT_EQ(parameters[4][0].item<float>(), 2.F * static_cast<float>(rank.number()));
    EXPECT_FALSE(averager.average_parameters(parameters));

    PeriodicModelAverager resumed(group, 2, 1);
    load_from(resumed, saved(averager));
    EXPECT_EQ(resumed.step(), 3);
    PostLocalSGDHook hook(group.split(1), PostLocalSGDOptions().start_localSGD_iter(1));
    PostLocalSGDHook later(group.split(1), PostLocalSGDOptions().start_localSGD_iter(1));
    const auto mean_of = [&](PostLocalSGDHook& used) {
      GradientBucket bucket{torch::full({2}, 2.0 * rank.number()), {parameters[4]}, 0, true};
      const auto future = used.reduce(bucket, group);
      future->waitAndThrow();
      return future->value().toTensor()[0].item<double>();
    };
    EXPECT_EQ(mean_of(hook), 1);
    load_from(later, saved(hook));
    EXPECT_EQ(mean_of(later), 2.0 * rank.number());
  });
}

}  // namespace
}  // namespace semitone::parallel::compressing_hooks_test

#include "src/train/workload.h"

#include "semitone/core/dtype.h"
#include "src/core/dtype_limits.h"
#include "src/core/named_rows.h"
#include "src/train/models.h"
#include "tests/support/errors.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

namespace semitone::train {
namespace {

using amp::OptLevel;

constexpr std::int64_t kFloat = 4;

WorkloadOptions small(std::string_view name, OptLevel level,
                      c10::ScalarType dtype = torch::kBFloat16) {
  WorkloadOptions options(name);
  options.opt_level(level).dtype(dtype).image_size(64).length(16);
  if (name == "resnet50") options.batch_size(8).check_steps(2).warm_up(1);
  options.encoder().layers(1).width(32).heads(4).ffn(64).vocabulary(100);
  options.decoder().layers(1).width(32).heads(4).ffn(64).vocabulary(100);
  return options;
}

std::int64_t size_of(const WorkloadOptions& options) {
  std::int64_t size = 0;
  for (const at::Tensor& parameter : zoo::Encoder(options.encoder())->parameters())
    size += parameter.numel();
  return size;
}

TEST(Workload, NamesGoBothWays) {
  for (const std::string_view name : {"mnist", "resnet50", "encoder", "decoder"})
    EXPECT_EQ(WorkloadOptions(name).workload().name, name);
  test::expect_error([] { WorkloadOptions("bert"); }, {"[train.workload] expected one of " +
                                                       join_names(workloads()) + ", got 'bert'"});
}

TEST(Workload, DefaultsAreTheTables) {
  EXPECT_EQ(WorkloadOptions("mnist").batch_size(), 100);
  EXPECT_EQ(WorkloadOptions("resnet50").batch_size(), 16);
  EXPECT_EQ(WorkloadOptions("resnet50").image_size(), 224);
  EXPECT_EQ(WorkloadOptions("encoder").batch_size(), 8);
  EXPECT_EQ(WorkloadOptions("encoder").length(), 128);
  EXPECT_EQ(WorkloadOptions("decoder").batch_size(), 4);
  EXPECT_EQ(WorkloadOptions("decoder").length(), 512);
}

TEST(Workload, TheDecoderPredictsTheTokenThatFollows) {
  const auto options = small("decoder", OptLevel::O0).batch_size(3);
  const auto generator = at::detail::createCPUGenerator(7);
  const Batch batch = options.workload().make_batch(options, generator);
  EXPECT_EQ(batch.inputs.sizes(), (std::vector<std::int64_t>{3, 16}));
  const at::Tensor labels = batch.labels.view({3, 16});
  EXPECT_TRUE(torch::equal(labels.narrow(1, 0, 15), batch.inputs.narrow(1, 1, 15)));
  EXPECT_FALSE(torch::equal(labels.select(1, 15), batch.inputs.select(1, 15)));
}

TEST(Workload, ProvesItselfAtEveryLevel) {
  for (const std::string_view name : {"mnist", "encoder", "decoder"}) {
    for (const auto level : {OptLevel::O0, OptLevel::O1, OptLevel::O2, OptLevel::O3}) {
      for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
        for (const bool fused : {true, false}) {
          if (!fused && dtype == torch::kHalf) continue;
          SCOPED_TRACE(std::string(name) + " " + std::string(amp::name_of(level)) + " " +
                       dtype_name(dtype) + (fused ? " fused" : ""));
          Workload workload(small(name, level, dtype).fused_optimizer(fused));
          const WorkloadCheck& check = workload.check();
          EXPECT_EQ(check.losses.size(), 4U);
          EXPECT_EQ(check.fp32_losses.size(), level == OptLevel::O3 ? 1U : 4U);
          EXPECT_LE(check.difference(), check.tolerance);
          EXPECT_EQ(workload.dtype(), level == OptLevel::O0 ? torch::kFloat : dtype);
          EXPECT_GT(workload.run(2), 0);
          EXPECT_EQ(workload.losses().size(), 2U);
        }
      }
    }
  }
}

// The first losses, without dropout: its random numbers are not LibTorch's.
std::vector<double> first_losses(WorkloadOptions options, int steps) {
  options.encoder().dropout(0);
  Workload workload(options.check_steps(2));
  std::vector<double> losses = workload.check().losses;
  losses.resize(1);
  workload.run(steps);
  losses.insert(losses.end(), workload.losses().begin(), workload.losses().end());
  return losses;
}

// With Semitone's kernels, fused optimizers and channels last, and without all of these.
TEST(Workload, LossesStayThoseOfLibTorchsKernels) {
  for (const std::string_view name : {"mnist", "encoder", "decoder", "resnet50"}) {
    // A step of a ResNet-50 in emulated bf16 takes a second.
    const int steps = name == "resnet50" ? 5 : 20;
    for (const auto level : {OptLevel::O1, OptLevel::O2}) {
      SCOPED_TRACE(std::string(name) + " " + std::string(amp::name_of(level)));
      const auto fused = first_losses(small(name, level), steps);
      const auto plain = first_losses(
          small(name, level)
              .fused_optimizer(false)
              .memory_format(MemoryFormat::nchw)
              .policy(
                  amp::CastPolicy::semitone({torch::kCPU, torch::kBFloat16}).fast_kernels(false)),
          steps);
      ASSERT_EQ(fused.size(), static_cast<std::size_t>(steps) + 1);
      ASSERT_EQ(plain.size(), fused.size());
      // As the proof of a workload: one rounding of the first loss.
      const double tolerance = dtype_limits(torch::kBFloat16).epsilon / 2 * plain.front();
      for (std::size_t i = 0; i < plain.size(); ++i)
        EXPECT_TRUE(std::abs(fused[i] - plain[i]) <= tolerance)
            << i << ": " << fused[i] << " and " << plain[i];
      EXPECT_LT(plain.back(), plain.front());
    }
  }
}

TEST(Workload, IsTheSameBitForBitEveryTime) {
  for (const std::string_view name : {"mnist", "encoder", "decoder", "resnet50"}) {
    for (const auto level : {OptLevel::O1, OptLevel::O2}) {
      SCOPED_TRACE(std::string(name) + " " + std::string(amp::name_of(level)));
      const auto losses = [&] {
        Workload workload(small(name, level).check_steps(2));
        workload.run(name == "resnet50" ? 2 : 5);
        return workload.losses();
      };
      EXPECT_EQ(losses(), losses());
    }
  }
}

TEST(Workload, ComparesWithPlainLibTorch) {
  const Workload plain(
      small("mnist", OptLevel::O0).fused_optimizer(false).memory_format(MemoryFormat::nchw));
  EXPECT_EQ(plain.check().losses, plain.check().fp32_losses);
  EXPECT_EQ(plain.memory_format(), MemoryFormat::nchw);
  const Workload other(small("mnist", OptLevel::O1));
  EXPECT_EQ(other.check().fp32_losses, plain.check().losses);
  EXPECT_NE(other.check().losses, plain.check().losses);
  EXPECT_EQ(other.memory_format(), MemoryFormat::nhwc);
}

TEST(Workload, TrainsResNet50) {
  Workload workload(small("resnet50", OptLevel::O1));
  EXPECT_EQ(workload.items(), 8);
  EXPECT_GT(workload.run(1), 0);
  EXPECT_LT(workload.losses().front(), workload.check().losses.front());
  EXPECT_NEAR(static_cast<double>(workload.memory().parameters), 25'610'205 * kFloat, 1000);
}

TEST(Workload, GoesOnFromStepToStep) {
  Workload workload(small("mnist", OptLevel::O1).warm_up(1));
  workload.run(3);
  workload.run(2);
  EXPECT_EQ(workload.losses().size(), 5U);
  EXPECT_LT(workload.losses().back(), workload.losses().front());
  EXPECT_EQ(workload.skipped_steps(), 0);
}

TEST(Workload, TheSameSeedGivesTheSameLosses) {
  const auto losses = [](std::uint64_t seed) {
    Workload workload(small("encoder", OptLevel::O1).seed(seed));
    workload.run(2);
    return workload.losses();
  };
  EXPECT_EQ(losses(1), losses(1));
  EXPECT_NE(losses(1), losses(2));
}

TEST(Workload, CountsWhatItTrainsOn) {
  EXPECT_EQ(Workload(small("mnist", OptLevel::O0).batch_size(20)).items(), 20);
  EXPECT_EQ(Workload(small("encoder", OptLevel::O0).batch_size(3)).items(), 48);
  EXPECT_EQ(Workload(small("decoder", OptLevel::O0).batch_size(3)).items(), 48);
}

// Gradients are those after backward, with the loss and other single numbers.
void expect_gradients(const TensorMemory& memory, std::int64_t bytes) {
  EXPECT_GE(memory.gradients, bytes);
  EXPECT_LE(memory.gradients, bytes + 1024);
}

// The encoder has no buffers: each level's memory is known to the byte.
TEST(Workload, CountsTensorMemoryByKind) {
  const auto options = [](OptLevel level) { return small("encoder", level); };
  const std::int64_t size = size_of(options(OptLevel::O0));
  for (const bool fused : {true, false}) {
    for (const auto level : {OptLevel::O0, OptLevel::O1}) {
      const Workload workload(options(level).fused_optimizer(fused));
      const TensorMemory& memory = workload.memory();
      EXPECT_EQ(memory.parameters, size * kFloat);
      EXPECT_EQ(memory.masters, 0);
      expect_gradients(memory, size * kFloat);
      EXPECT_EQ(memory.optimizer_state, 2 * size * kFloat);
      EXPECT_GT(memory.rest(), 0);
    }
    const Workload mixed(options(OptLevel::O2).fused_optimizer(fused));
    EXPECT_EQ(mixed.memory().parameters, size * 2);
    EXPECT_EQ(mixed.memory().masters, size * kFloat);
    // A fused optimizer reads the model's own.
    expect_gradients(mixed.memory(), size * (fused ? 2 : kFloat));
    EXPECT_EQ(mixed.memory().optimizer_state, 2 * size * kFloat);
    EXPECT_GT(mixed.memory().rest(), 0);
  }
  const Workload split(options(OptLevel::O2).split_masters(true));
  EXPECT_EQ(split.memory().masters, size * 2);
  expect_gradients(split.memory(), size * 2);

  const Workload bf16_state(options(OptLevel::O2).split_masters(true).bf16_state(true));
  EXPECT_EQ(bf16_state.memory().optimizer_state * 2, split.memory().optimizer_state);
  EXPECT_EQ(Workload(options(OptLevel::O3)).memory().masters, 0);
  const Workload sgd(small("mnist", OptLevel::O0));
  EXPECT_EQ(sgd.memory().optimizer_state, 29'034 * kFloat);
}

TEST(Workload, LargerBatchesTakeMoreActivations) {
  const auto rest = [](std::int64_t batch) {
    return Workload(small("encoder", OptLevel::O0).batch_size(batch)).memory().rest();
  };
  EXPECT_GT(rest(16), 1.5 * static_cast<double>(rest(8)));
}

TEST(Workload, RunsUnderAnotherPolicy) {
  const Workload semitone(small("encoder", OptLevel::O1));
  const Workload none(small("encoder", OptLevel::O1)
                          .policy(amp::CastPolicy::none(torch::kBFloat16).fast_kernels(false)));
  // Without casts it is fp32 but for the logits, which the loss takes in 16 bits.
  EXPECT_LT(none.check().difference(), 1e-5);
  EXPECT_NE(semitone.check().losses, none.check().losses);
}

TEST(Workload, ALossThatIsOffIsFoundOut) {
  WorkloadCheck check{{2, 1.5}, {2, 1.4}, 0.01};
  EXPECT_NEAR(check.difference(), 0.05, 1e-12);
  check.losses[1] = std::numeric_limits<double>::quiet_NaN();
  EXPECT_FALSE(check.difference() <= 1e9);
  // 16 bits cannot follow the smallest batches of ResNet-50.
  test::expect_error(
      [] {
        Workload workload(
            small("resnet50", OptLevel::O1).batch_size(4).image_size(32).check_steps(4));
      },
      {"[train.workload] expected the losses of float32, ", "of the first, got "});
}

TEST(Workload, RefusesOptionsThatMakeNoSense) {
  const auto refuses = [](const WorkloadOptions& options, const char* message) {
    test::expect_error([&] { Workload workload(options); }, {"expected ", message});
  };
  const auto options = small("encoder", OptLevel::O1);
  refuses(WorkloadOptions(options).batch_size(0), "batch_size of at least 1, got 0");
  refuses(WorkloadOptions(options).image_size(31), "image_size of at least 32, got 31");
  refuses(WorkloadOptions(options).length(0), "length of at least 1, got 0");
  refuses(WorkloadOptions(options).check_steps(1), "check_steps of at least 2, got 1");
  refuses(WorkloadOptions(options).warm_up(0), "warm_up of at least 1, got 0");
  refuses(WorkloadOptions(options).dtype(torch::kFloat), "float16 or bfloat16, got float32");
  refuses(WorkloadOptions(options).encoder(zoo::EncoderOptions().heads(0)), "heads of at least 1");
  refuses(WorkloadOptions(options).length(600), "sequences of 1 to 512 tokens, got 600");
  const auto decoder = small("decoder", OptLevel::O1);
  refuses(WorkloadOptions(decoder).length(0), "length of at least 1, got 0");
  refuses(WorkloadOptions(decoder).decoder(zoo::DecoderOptions().heads(0)), "heads of at least 1");
  Workload workload(options);
  test::expect_error([&] { workload.run(0); }, {"at least one step, got 0"});
}

}  // namespace
}  // namespace semitone::train

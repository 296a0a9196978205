#include "src/train/machine.h"

#include "src/train/operator_speed.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

// What `semitone doctor` says of given figures.
namespace semitone::train {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(ReadMachine, HasWhatEverySystemSays) {
  const Machine machine = read_machine();
  EXPECT_GE(machine.cores, 1);
  EXPECT_GE(machine.physical_cores, 1);
  EXPECT_LE(machine.physical_cores, machine.cores);
  EXPECT_GE(machine.threads, 1);
  EXPECT_GE(machine.load, 0);
  EXPECT_GT(machine.memory, std::int64_t{1} << 28);
  EXPECT_GT(machine.available_memory, 0);
  EXPECT_LE(machine.available_memory, machine.memory);
  EXPECT_FALSE(machine.capability.empty());
}

class Findings : public ::testing::Test {
 protected:
  // An idle machine with two cores and bf16 kernels.
  Findings() {
    machine_.cores = machine_.all_cores = machine_.physical_cores = 2;
    machine_.threads = 2;
    machine_.load = 0.1;
    machine_.best_set = machine_.set = InstructionSet::avx512_bf16;
    speed_.product_ms = 10;
    speed_.product_ms_one = 19;
    for (const OperatorKind kind : {OperatorKind::product, OperatorKind::convolution}) {
      operators_.push_back({kind, true, at::kBFloat16, 1, 6, 2, 9, true});
      operators_.push_back({kind, true, at::kHalf, 1, 6, std::nullopt, 7, false});
    }
  }

  std::vector<Finding> found() const { return findings_of(machine_, speed_, operators_); }

  // The only problem, with its remedy.
  std::string problem() const {
    std::string text;
    int count = 0;
    for (const Finding& finding : found()) {
      if (!finding.is_problem) continue;
      text = finding.what + " — " + finding.remedy;
      ++count;
    }
    EXPECT_EQ(count, 1) << text;
    return text;
  }

  Machine machine_;
  MachineSpeed speed_;
  std::vector<OperatorSpeed> operators_;
};

TEST_F(Findings, AGoodMachineHasARecommendationAlone) {
  ASSERT_EQ(found().size(), 1U);
  EXPECT_FALSE(found().front().is_problem);
  EXPECT_THAT(found().front().what,
              AllOf(HasSubstr("bfloat16 products are 3 times"), HasSubstr("convolutions 3 times")));
  EXPECT_THAT(found().front().remedy, HasSubstr("--opt-level O1 --dtype bf16"));
}

TEST_F(Findings, WithoutFastKernelsO0IsTheFastest) {
  for (OperatorSpeed& speed : operators_) speed.is_native = false;
  operators_[0].native_ms = operators_[2].native_ms = 8;
  ASSERT_EQ(found().size(), 1U);
  EXPECT_THAT(found().front().remedy, HasSubstr("O0 is the fastest level"));
}

TEST_F(Findings, Float16IsRecommendedWhereItIsFaster) {
  for (OperatorSpeed& speed : operators_) {
    if (speed.dtype == at::kBFloat16) speed = {speed.kind, true, at::kBFloat16, 1, 6, 30, 9, false};
    if (speed.dtype == at::kHalf) speed = {speed.kind, true, at::kHalf, 1, 6, 3, 7, true};
  }
  EXPECT_THAT(found().back().remedy, HasSubstr("--dtype fp16"));
}

TEST_F(Findings, ADtypeThatGainsForOneKindOfModelIsRecommended) {
  for (OperatorSpeed& speed : operators_) {
    const bool is_bf16 = speed.dtype == at::kBFloat16;
    speed.is_native = true;
    speed.native_ms = !is_bf16 ? 6.3 : speed.kind == OperatorKind::product ? 2 : 6.6;
  }
  EXPECT_THAT(found().back().what, HasSubstr("bfloat16 products are 3 times"));
  EXPECT_THAT(found().back().remedy, HasSubstr("--dtype bf16"));
}

TEST_F(Findings, MoreThreadsThanCores) {
  machine_.threads = 8;
  EXPECT_THAT(problem(), AllOf(HasSubstr("8 threads on 2 cores"), HasSubstr("OMP_NUM_THREADS=2")));
}

TEST_F(Findings, FewerThreadsThanCores) {
  machine_.cores = machine_.all_cores = machine_.physical_cores = 8;
  EXPECT_THAT(problem(), AllOf(HasSubstr("with 2 of 8 cores"), HasSubstr("OMP_NUM_THREADS=8")));
  machine_.cpu_quota = 2;
  EXPECT_EQ(found().size(), 1U);
}

// LibTorch leaves the second thread of a core alone.
TEST_F(Findings, AThreadForEachPhysicalCoreIsEnough) {
  machine_.cores = machine_.all_cores = 4;
  EXPECT_EQ(found().size(), 1U);
}

TEST_F(Findings, AControlGroupThatGrantsLessTime) {
  machine_.cpu_quota = 1.5;
  EXPECT_THAT(problem(), AllOf(HasSubstr("the time of 1.5 cores"), HasSubstr("OMP_NUM_THREADS=1")));
  machine_.cpu_quota = 0.5;
  EXPECT_THAT(problem(), HasSubstr("OMP_NUM_THREADS=1"));
  machine_.cpu_quota = 2;
  EXPECT_EQ(found().size(), 1U);
}

TEST_F(Findings, ABusyMachine) {
  machine_.load = 1.5;
  EXPECT_THAT(problem(), HasSubstr("1.5 processes ran or waited"));
  machine_.all_cores = 64;  // of which this process may use two
  EXPECT_EQ(found().size(), 1U);
}

TEST_F(Findings, ThreadsThatMakeItSlower) {
  speed_.product_ms = 25;
  EXPECT_THAT(problem(), AllOf(HasSubstr("25.0 ms on 2 threads and 19.0 ms on one"),
                               HasSubstr("OMP_NUM_THREADS=1")));
  speed_.product_ms = 20;  // within the noise
  EXPECT_EQ(found().size(), 1U);
}

TEST_F(Findings, ALimitOnInstructions) {
  machine_.set = InstructionSet::avx2;
  EXPECT_THAT(problem(), HasSubstr("limits oneDNN to AVX2, and the processor has AVX512-BF16"));
}

TEST_F(Findings, KernelsThatAreSlowerThanTheOtherWay) {
  operators_[0].native_ms = 30;
  EXPECT_THAT(problem(), AllOf(HasSubstr("products in bfloat16 take 30.00 ms in LibTorch's kernel"),
                               HasSubstr("Emulation::always")));
  operators_[0].native_ms = 2;
  operators_[1].native_ms = 2;
  EXPECT_THAT(problem(), AllOf(HasSubstr("products in float16 take 7.00 ms through float32"),
                               HasSubstr("Emulation::never")));
}

TEST_F(Findings, GpusComeFirst) {
  machine_.gpus = 2;
  EXPECT_THAT(problem(),
              AllOf(HasSubstr("2 GPUs that this LibTorch cannot use"), HasSubstr("PRESET=cuda")));
  machine_.libtorch_has_gpu = true;
  ASSERT_EQ(found().size(), 1U);
  EXPECT_THAT(found().front().remedy, HasSubstr("--device cuda"));
}

}  // namespace
}  // namespace semitone::train

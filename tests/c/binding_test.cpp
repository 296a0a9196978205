// The C interface as a binding of LibTorch uses it: tensors, modules and optimizers are the
// program's own, and Semitone is known by its C header alone.

#include "semitone/c/semitone.h"

#include <c10/util/Exception.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

using testing::HasSubstr;

void check(SemitoneStatus status) {
  if (status != SEMITONE_OK) throw std::runtime_error(semitone_last_error());
}

SemitoneTensor* pointer_to(at::Tensor& tensor) {
  return reinterpret_cast<SemitoneTensor*>(&tensor);
}

// Takes over a result, as the bindings' classes do.
at::Tensor take(SemitoneTensor* result) {
  const std::unique_ptr<at::Tensor> owner(reinterpret_cast<at::Tensor*>(result));
  return *owner;
}

struct PolicyDestroy {
  void operator()(SemitonePolicy* policy) const { check(semitone_policy_destroy(policy)); }
};
using Policy = std::unique_ptr<SemitonePolicy, PolicyDestroy>;

Policy fp16_policy() {
  SemitonePolicy* policy = nullptr;
  check(semitone_policy_create("semitone", "cpu", SEMITONE_FLOAT16, &policy));
  return Policy(policy);
}

// Uses the library when its thread ends, after the library's own objects of the thread.
struct LastUse {
  ~LastUse() {
    status = semitone_policy_destroy(reinterpret_cast<SemitonePolicy*>(this));
    is_empty = *semitone_last_error() == '\0';
  }
  static inline SemitoneStatus status = SEMITONE_OK;
  static inline bool is_empty = true;
};

TEST(LastError, IsThereWhileAThreadEnds) {
  std::thread([] {
    static thread_local const LastUse last_use;
    (void)&last_use;
    EXPECT_EQ(semitone_policy_destroy(reinterpret_cast<SemitonePolicy*>(&LastUse::status)),
              SEMITONE_ERROR);
  }).join();
  EXPECT_EQ(LastUse::status, SEMITONE_ERROR);
  EXPECT_FALSE(LastUse::is_empty);
}

// An operator that fails as LibTorch does when a GPU has no memory left.
TORCH_LIBRARY(semitone_binding_test, library) {
  library.def("out_of_memory(Tensor x) -> Tensor", [](const at::Tensor& x) {
    TORCH_CHECK_WITH(OutOfMemoryError, !x.defined(), "no memory left");
    return x;
  });
}

TEST(LastError, LackOfGpuMemoryIsAnotherError) {
  at::Tensor x = torch::ones({1});
  SemitoneValue argument = {};
  argument.kind = SEMITONE_VALUE_TENSOR;
  argument.value.tensor = pointer_to(x);
  EXPECT_EQ(
      semitone_call("semitone_binding_test::out_of_memory", &argument, 1, nullptr, 0, nullptr),
      SEMITONE_OTHER_ERROR);
  EXPECT_THAT(semitone_last_error(), HasSubstr("no memory left"));
}

class Region {
 public:
  explicit Region(const Policy& policy) { check(semitone_region_enter(policy.get(), &region_)); }
  ~Region() { semitone_region_exit(region_); }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

 private:
  SemitoneRegion* region_ = nullptr;
};

// A list of the program's tensors.
struct List {
  explicit List(std::vector<at::Tensor> of) : tensors(std::move(of)) {
    for (at::Tensor& tensor : tensors) pointers.push_back(pointer_to(tensor));
  }
  std::vector<at::Tensor> tensors;
  std::vector<const SemitoneTensor*> pointers;
};

TEST(Binding, OperatorsOfTheProgramAreCast) {
  const Policy policy = fp16_policy();
  const at::Tensor a = torch::ones({2, 2});
  const Region region(policy);
  EXPECT_EQ(torch::mm(a, a).scalar_type(), at::kHalf);
  EXPECT_EQ(torch::softmax(a, 0).scalar_type(), at::kFloat);
}

TEST(Binding, ErrorsInOperatorsReachTheProgramAsExceptions) {
  const Policy policy = fp16_policy();
  check(semitone_policy_set(policy.get(), "softmax.int", SEMITONE_ACTION_BAN));
  const Region region(policy);
  try {
    torch::softmax(torch::ones({2}, at::kHalf), 0);
    FAIL() << "no exception";
  } catch (const std::exception& error) {
    EXPECT_THAT(error.what(), HasSubstr("softmax"));
  }
}

// The optimizer writes through tensor.data(). The region, which is the outermost one, covers all
// steps: a weight that was cast before a step must not be used after it.
TEST(Binding, OptimizersOfTheProgramTrainInOneRegion) {
  torch::manual_seed(0);
  torch::nn::Sequential model(torch::nn::Linear(4, 16), torch::nn::ReLU(),
                              torch::nn::Linear(16, 1));
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  const List parameters(model->parameters());
  const at::Tensor x = torch::randn({64, 4});
  const at::Tensor y = x.sum(1, true);

  SemitoneScaler* scaler = nullptr;
  check(semitone_scaler_create("torch", nullptr, 0, &scaler));
  const Policy policy = fp16_policy();
  double first = 0;
  double last = 0;
  std::int64_t steps = 0;
  {
    const Region region(policy);
    for (int step = 0; step < 60; ++step) {
      optimizer.zero_grad();
      at::Tensor loss = torch::mse_loss(model->forward(x), y);
      SemitoneTensor* scaled = nullptr;
      check(semitone_scaler_scale(scaler, pointer_to(loss), &scaled));
      take(scaled).backward();
      std::int32_t found_inf = 0;
      check(semitone_scaler_unscale(scaler, parameters.pointers.data(), parameters.pointers.size(),
                                    &found_inf));
      if (found_inf == 0) {
        optimizer.step();
        ++steps;
      }
      check(semitone_scaler_update(scaler));
      if (step == 0) first = loss.item<double>();
      last = loss.item<double>();
    }
  }
  EXPECT_LT(last, first / 10);
  EXPECT_GT(steps, 40);
  check(semitone_scaler_destroy(scaler));
}

TEST(Binding, MastersAreTensorsForTheProgramsOptimizer) {
  at::Tensor parameter = torch::ones({3}, at::kHalf).requires_grad_();
  const List parameters({parameter});
  SemitoneMasters* masters = nullptr;
  check(semitone_masters_create(parameters.pointers.data(), 1, &masters));
  SemitoneTensor* listed = nullptr;
  check(semitone_masters_list(masters, &listed, 1));
  const at::Tensor master = take(listed);
  EXPECT_EQ(master.scalar_type(), at::kFloat);

  torch::optim::SGD optimizer({master}, 0.5);
  for (int step = 0; step < 4; ++step) {
    parameter.mutable_grad() = torch::full({3}, 0x1p-11, at::kHalf);
    check(semitone_masters_take_gradients(masters));
    optimizer.step();
    check(semitone_masters_write_model(masters));
    check(semitone_masters_clear_gradients(masters));
  }
  EXPECT_TRUE(torch::equal(master, torch::full({3}, 1 - 0x1p-10)));
  EXPECT_TRUE(torch::equal(parameter, torch::full({3}, 1 - 0x1p-10, at::kHalf)));
  check(semitone_masters_destroy(masters));
  EXPECT_TRUE(torch::equal(parameter, torch::full({3}, 1 - 0x1p-10, at::kHalf)));
}

TEST(Binding, SparseGradientsAreUnscaled) {
  torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(5, 2).sparse(true));
  const List parameters(embedding->parameters());
  SemitoneScaler* scaler = nullptr;
  const SemitoneOption options[] = {{"init_scale", 8}};
  check(semitone_scaler_create("torch", options, 1, &scaler));
  at::Tensor loss = embedding->forward(torch::tensor({1, 1, 3})).sum();
  SemitoneTensor* scaled = nullptr;
  check(semitone_scaler_scale(scaler, pointer_to(loss), &scaled));
  take(scaled).backward();
  std::int32_t found_inf = 1;
  check(semitone_scaler_unscale(scaler, parameters.pointers.data(), 1, &found_inf));
  EXPECT_EQ(found_inf, 0);
  const at::Tensor grad = parameters.tensors[0].grad();
  EXPECT_TRUE(grad.is_sparse());
  EXPECT_EQ(grad.to_dense().sum().item<float>(), 6);
  check(semitone_scaler_destroy(scaler));
}

TEST(Binding, UndefinedTensorsAreErrors) {
  at::Tensor undefined;
  std::int32_t dtype = 0;
  EXPECT_EQ(semitone_tensor_dtype(pointer_to(undefined), &dtype), SEMITONE_ERROR);
  EXPECT_THAT(semitone_last_error(), HasSubstr("expected a tensor, got an undefined tensor"));
}

}  // namespace

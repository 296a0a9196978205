// The graphs of CUDA devices, compiled against a LibTorch without devices
// (tests/support/cuda_graphs_on_cpu): the state after failed captures.

#include "src/amp/step_graph.h"

#include <torch/torch.h>

#include "ATen/cuda/CUDAGraph.h"
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>

namespace semitone::amp::cuda_step_graph_test {
namespace {

using test::CudaGraphsOnCpu;

CudaGraphsOnCpu& cuda() {
  return CudaGraphsOnCpu::state();
}

// Pinned memory: which pools are open, and which were not released.
class HostPools : public at::HostAllocator {
 public:
  c10::DataPtr allocate(std::size_t /*size*/) override { return {}; }
  void copy_data(void* /*to*/, const void* /*from*/, std::size_t /*size*/) const override {}
  bool record_event(void* /*memory*/, void* /*context*/, c10::Stream /*stream*/) override {
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

  void begin_allocate_to_pool(c10::MempoolId_t pool,
                              std::function<bool(c10::Stream)> /*filter*/) override {
    cuda().host_pools.insert(pool);
    unreleased.insert(pool);
  }
  void end_allocate_to_pool(c10::MempoolId_t pool) override {
    TORCH_CHECK(cuda().host_pools.erase(pool) == 1, "not currently recording to mempool_id");
  }
  void release_pool(c10::MempoolId_t pool) override {
    if (unreleased.erase(pool) == 0) throw std::out_of_range("release_pool");
  }

  std::set<c10::MempoolId_t> unreleased;
};

HostPools& host_pools() {
  static HostPools& pools = *new HostPools;  // LibTorch keeps it
  return pools;
}

class CudaStepGraph : public testing::Test {
 protected:
  void SetUp() override {
    at::setHostAllocator(at::kCUDA, &host_pools(), /*priority=*/100);
    cuda() = {};
    graph_ = make_step_graph(c10::Device(c10::kCUDA, 0));
    ASSERT_NE(graph_, nullptr);
  }

  // Captures, and returns the message of the exception.
  std::string capture(const std::function<void()>& work) {
    try {
      graph_->capture(work);
    } catch (const std::exception& error) {
      return error.what();
    }
    return "";
  }

  static void expect_nothing_left() {
    EXPECT_FALSE(cuda().stream_captures);
    EXPECT_FALSE(cuda().generator_captures) << "dropout and randn would raise";
    EXPECT_TRUE(cuda().device_pools.empty());
    EXPECT_TRUE(cuda().host_pools.empty());
    EXPECT_TRUE(cuda().unreleased_pools.empty());
    EXPECT_TRUE(host_pools().unreleased.empty());
    EXPECT_EQ(cuda().graphs, 0);
  }

  void expect_captures_again() {
    EXPECT_EQ(capture([] { ++cuda().nodes; }), "");
    graph_->replay();
    EXPECT_EQ(cuda().replays, 1);
    graph_->reset();
    expect_nothing_left();
  }

  std::unique_ptr<StepGraph> graph_;
};

TEST_F(CudaStepGraph, CapturesAndReplays) {
  expect_captures_again();
}

// item() in the loss: an exception, and a broken capture.
TEST_F(CudaStepGraph, LeavesNothingWhereTheWorkBreaksTheCaptureAndThrows) {
  const std::string error = capture([] {
    cuda().stream_is_broken = true;
    throw std::runtime_error("item() in the loss");
  });
  EXPECT_EQ(error, "item() in the loss");
  expect_nothing_left();
  expect_captures_again();
}

TEST_F(CudaStepGraph, LeavesNothingWhereTheWorkBreaksTheCaptureSilently) {
  EXPECT_THAT(capture([] { cuda().stream_is_broken = true; }),
              testing::HasSubstr("previous error during capture"));
  expect_nothing_left();
  expect_captures_again();
}

TEST_F(CudaStepGraph, LeavesNothingWhereTheWorkThrowsAndTheCaptureIsSound) {
  EXPECT_EQ(capture([] { throw std::runtime_error("a mistake"); }), "a mistake");
  expect_nothing_left();
  expect_captures_again();
}

// As on a device that has failed, where an empty capture cannot begin either.
TEST_F(CudaStepGraph, LeavesNoMemoryWhereNoCaptureCanBegin) {
  cuda().refuses_to_begin = true;
  EXPECT_THAT(capture([] { FAIL() << "runs outside of a capture"; }),
              testing::HasSubstr("cannot begin"));
  cuda().generator_captures = false;
  expect_nothing_left();
  cuda().refuses_to_begin = false;
  expect_captures_again();
}

class Warnings : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { messages += warning.msg(); }
  std::string messages;
};

TEST_F(CudaStepGraph, CleaningUpDoesNotWarn) {
  Warnings warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
  capture([] { cuda().stream_is_broken = true; });
  EXPECT_EQ(warnings.messages, "");
}

TEST(StepGraphs, AreThereForCudaAlone) {
  EXPECT_EQ(make_step_graph(c10::kCPU), nullptr);
}

}  // namespace
}  // namespace semitone::amp::cuda_step_graph_test

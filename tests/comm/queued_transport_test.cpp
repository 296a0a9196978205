// A group with a transport like NCCL, whose works' futures complete when the kernels are queued.
// The test transport has no device, but a switch.
#include "src/comm/queued_transport.h"

#include "semitone/core/error.h"
#include "src/comm/watched_backend.h"
#include "tests/support/processes.h"

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/types.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <future>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <utility>

namespace semitone::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

// Runs nothing until it is released.
class Device {
 public:
  void run_all() { set(done_); }
  void abort() {
    std::unique_lock lock(mutex_);
    ++aborts_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return !hangs_; });
    aborted_ = true;
    changed_.notify_all();
  }
  // Waits for the kernels.
  void shut_down() {
    std::unique_lock lock(mutex_);
    ++shutdowns_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return done_ || aborted_; });
  }
  void fail(const std::string& what) {
    const std::lock_guard lock(mutex_);
    error_ = std::make_exception_ptr(std::runtime_error(what));
    done_ = true;
  }
  // Whether abort() never returns.
  void hang(bool hangs) {
    const std::lock_guard lock(mutex_);
    hangs_ = hangs;
    changed_.notify_all();
  }

  bool is_done() const { return get(done_) || get(aborted_); }
  bool ran_all() const { return get(done_); }
  int aborts() const { return get(aborts_); }
  int shutdowns() const { return get(shutdowns_); }
  std::exception_ptr error() const { return get(error_); }

 private:
  template <typename Value>
  Value get(const Value& value) const {
    const std::lock_guard lock(mutex_);
    return value;
  }
  void set(bool& value) {
    const std::lock_guard lock(mutex_);
    value = true;
    changed_.notify_all();
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  bool aborted_ = false;
  bool hangs_ = false;
  int aborts_ = 0;
  int shutdowns_ = 0;
  std::exception_ptr error_;
};

class QueuedWork final : public c10d::Work {
 public:
  QueuedWork(std::shared_ptr<Device> device, c10d::OpType type, const at::Tensor& tensor)
      : c10d::Work(-1, type),
        device_(std::move(device)),
        future_(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()))) {
    future_->markCompleted(c10::IValue(std::vector<at::Tensor>{tensor}));
  }

  bool isCompleted() override { return device_->is_done(); }
  std::exception_ptr exception() const override { return device_->error(); }
  // That of the stream, which goes on.
  bool wait(milliseconds) override { return true; }
  void synchronize() override {}
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  const std::shared_ptr<Device> device_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class QueuedBackend final : public c10d::Backend {
 public:
  explicit QueuedBackend(std::shared_ptr<Device> device)
      : c10d::Backend(0, 2), device_(std::move(device)) {}

  const std::string getBackendName() const override { return "queued"; }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions&) override {
    return c10::make_intrusive<QueuedWork>(device_, c10d::OpType::ALLREDUCE, tensors[0]);
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override {
    return c10::make_intrusive<QueuedWork>(device_, c10d::OpType::BARRIER, at::zeros({1}));
  }
  void abort() override { device_->abort(); }
  void shutdown() override { device_->shut_down(); }

 private:
  const std::shared_ptr<Device> device_;
};

// The group of rank 0; rank 1 is its watch alone.
class QueuedTest : public ::testing::Test {
 public:
  ~QueuedTest() override { device_->hang(false); }

 protected:
  explicit QueuedTest(milliseconds timeout = std::chrono::minutes(10),
                      milliseconds patience = seconds(60)) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    WatchOptions watch;
    watch.size = 2;
    watch.address = "127.0.0.1";
    watch.interval = milliseconds(20);
    watch.silence = std::chrono::minutes(10);
    watch.timeout = seconds(60);
    watch_ = std::make_shared<Watch>(store, watch);
    watch.rank = 1;
    other_.emplace(store, watch);
    WatchedBackendOptions options;
    options.watch = watch_;
    options.check = CheckLevel::none;
    options.timeout = timeout;
    options.patience = patience;
    options.members = {0, 1};
    options.counts_calls = true;
    options.is_queued = true;
    auto transport = c10::make_intrusive<QueuedBackend>(device_);
    transport_ = transport.get();
    backend_ = c10::make_intrusive<WatchedBackend>(std::move(transport), options);
  }

  void reduce() {
    std::vector<at::Tensor> tensors{at::ones({1})};
    backend_->allreduce(tensors, {})->wait();
  }
  // Returns the message of the CommError that the group's next call throws. Waits for it.
  std::string error_of_next_call() {
    std::string message;
    EXPECT_TRUE(test::eventually([&] {
      try {
        reduce();
        return false;
      } catch (const CommError& error) {
        message = error.what();
        return true;
      }
    }));
    return message;
  }

  const std::shared_ptr<Device> device_ = std::make_shared<Device>();
  std::shared_ptr<Watch> watch_;
  std::optional<Watch> other_;
  QueuedBackend* transport_ = nullptr;
  c10::intrusive_ptr<WatchedBackend> backend_;
};

TEST_F(QueuedTest, CollectivesAreDoneBeforeTheirGroupGoes) {
  reduce();
  auto gone = std::async(std::launch::async, [this] { backend_.reset(); });
  EXPECT_TRUE(test::eventually([this] { return device_->shutdowns() == 1; }));
  EXPECT_NE(gone.wait_for(milliseconds(200)), std::future_status::ready);
  device_->run_all();
  gone.get();
  EXPECT_TRUE(device_->ran_all());
  EXPECT_EQ(device_->aborts(), 0);
}

TEST_F(QueuedTest, CollectivesEndWhenARankIsLost) {
  reduce();
  other_->report_lost("its process has ended");
  // Without any call: the program may wait for the device itself.
  EXPECT_TRUE(test::eventually([this] { return device_->aborts() == 1; }));
  EXPECT_THAT(error_of_next_call(), HasSubstr("rank 1 lost: its process has ended"));
  backend_.reset();
  EXPECT_EQ(device_->aborts(), 1);
  EXPECT_EQ(device_->shutdowns(), 0);
}

TEST_F(QueuedTest, ALossDuringDestructionEndsIt) {
  reduce();
  auto gone = std::async(std::launch::async, [this] { backend_.reset(); });
  EXPECT_TRUE(test::eventually([this] { return device_->shutdowns() == 1; }));
  other_->report_lost("its process has ended");
  gone.get();
  EXPECT_EQ(device_->aborts(), 1);
}

TEST_F(QueuedTest, BarriersWaitForTheDevice) {
  const auto barrier = backend_->barrier({});
  auto passed = std::async(std::launch::async, [&] { return barrier->wait(); });
  EXPECT_NE(passed.wait_for(milliseconds(200)), std::future_status::ready);
  device_->run_all();
  EXPECT_TRUE(passed.get());
}

TEST_F(QueuedTest, BarriersEndWhenARankIsLost) {
  const auto barrier = backend_->barrier({});
  auto passed = std::async(std::launch::async, [&] { return barrier->wait(); });
  other_->report_lost("its process has ended");
  EXPECT_THROW(passed.get(), CommError);
}

TEST_F(QueuedTest, AnErrorOfTheDeviceIsThatOfTheNextCall) {
  reduce();
  device_->fail("unhandled system error");
  EXPECT_THAT(error_of_next_call(), HasSubstr("unhandled system error"));
  EXPECT_TRUE(test::eventually([this] { return device_->aborts() == 1; }));
}

TEST_F(QueuedTest, GroupsWithoutCollectivesComeAndGo) {
  device_->run_all();
  backend_.reset();
  EXPECT_EQ(device_->shutdowns(), 1);
  EXPECT_EQ(device_->aborts(), 0);
}

class QueuedWithLittleTime : public QueuedTest {
 protected:
  QueuedWithLittleTime() : QueuedTest(milliseconds(300), milliseconds(200)) {}
};

TEST_F(QueuedWithLittleTime, ALateRankIsNamed) {
  reduce();
  EXPECT_TRUE(test::eventually([this] { return device_->aborts() == 1; }));
  EXPECT_THAT(error_of_next_call(), HasSubstr("rank 1 lost: did not call all_reduce in time"));
}

TEST_F(QueuedWithLittleTime, DestructionEndsWhereAnAbortDoesNot) {
  device_->hang(true);
  reduce();
  other_->report_lost("its process has ended");
  EXPECT_TRUE(test::eventually([this] { return device_->aborts() == 1; }));
  backend_.reset();
  // The group has given up its reference without releasing the transport, which the abort uses.
  const auto abandoned = c10::intrusive_ptr<QueuedBackend>::reclaim(transport_);
  EXPECT_GE(abandoned.use_count(), 2);
}

class QueuedWithTimeButNoPatience : public QueuedTest {
 protected:
  QueuedWithTimeButNoPatience() : QueuedTest(std::chrono::minutes(10), milliseconds(100)) {}
};

TEST_F(QueuedWithTimeButNoPatience, ARankThatLeftIsNamed) {
  reduce();
  other_.reset();
  EXPECT_TRUE(test::eventually([this] { return device_->aborts() == 1; }));
  EXPECT_THAT(error_of_next_call(),
              HasSubstr("rank 1 lost: left the group while others are in all_reduce"));
}

}  // namespace
}  // namespace semitone::comm

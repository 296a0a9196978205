#include "semitone/core/events.h"

#include <ATen/ThreadLocalState.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace semitone::events {
namespace {

struct Recorder : Listener {
  using Listener::on;
  void on(const StepSkipped& event) override { heard.push_back(event.parameter); }
  std::vector<std::string> heard;
};

StepSkipped skip(const std::string& parameter) {
  return {parameter, 1, 1, 1, 8.0};
}

TEST(Events, WithoutAListenerNothingHappens) {
  EXPECT_FALSE(listening());
  emit(skip("unheard"));
}

TEST(Events, ScopesNestAndEndInOrder) {
  const auto outer = std::make_shared<Recorder>();
  const auto inner = std::make_shared<Recorder>();
  {
    const Listen listen_outer(outer);
    emit(skip("a"));
    {
      const Listen listen_inner(inner);
      emit(skip("b"));
    }
    emit(skip("c"));
    EXPECT_TRUE(listening());
  }
  EXPECT_FALSE(listening());
  EXPECT_EQ(outer->heard, (std::vector<std::string>{"a", "b", "c"}));
  EXPECT_EQ(inner->heard, (std::vector<std::string>{"b"}));
}

TEST(Events, GradientsAreWantedIfOneListenerWantsThem) {
  struct Wanting : Listener {
    bool wants_gradients() const override { return true; }
  };
  EXPECT_FALSE(wants_gradients());
  const Listen listen(std::make_shared<Recorder>());
  EXPECT_FALSE(wants_gradients());
  {
    const Listen wanting(std::make_shared<Wanting>());
    const Listen inner(std::make_shared<Recorder>());
    EXPECT_TRUE(wants_gradients());
  }
  EXPECT_FALSE(wants_gradients());
}

TEST(Events, PartsOfAStepNest) {
  struct Parts : Listener {
    using Listener::on;
    void on(const PhaseBegan& event) override {
      heard.push_back(std::string(name_of(event.phase)));
    }
    void on(const PhaseEnded& event) override {
      heard.push_back("end of " + std::string(name_of(event.phase)));
    }
    std::vector<std::string> heard;
  };
  const auto parts = std::make_shared<Parts>();
  const Listen listen(parts);
  {
    const PhaseScope backward(Phase::backward);
    const PhaseScope communication(Phase::communication);
  }
  EXPECT_EQ(parts->heard, (std::vector<std::string>{"backward", "communication",
                                                    "end of communication", "end of backward"}));
}

TEST(Events, AThreadOfItsOwnHearsNothingUnlessTheStateIsCarried) {
  const auto recorder = std::make_shared<Recorder>();
  const Listen listen(recorder);
  std::thread([] { emit(skip("stranger")); }).join();
  std::thread([state = at::ThreadLocalState()] {
    const at::ThreadLocalStateGuard guard(state);
    emit(skip("helper"));
  }).join();
  EXPECT_EQ(recorder->heard, (std::vector<std::string>{"helper"}));
}

}  // namespace
}  // namespace semitone::events

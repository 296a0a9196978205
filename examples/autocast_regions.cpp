// Nested autocast regions: parts of a program in another precision or without casts, and what a
// program can query about the current region.
#include <semitone/semitone.h>

#include <torch/torch.h>

#include <iostream>
#include <thread>

namespace amp = semitone::amp;

int main() try {
  // `semitone ops --speed` measures each kind of operator.
  for (const auto dtype : {torch::kHalf, torch::kBFloat16}) {
    std::cout << dtype << " on this processor: " << semitone::describe_16bit(torch::kCPU, dtype)
              << '\n';
  }
  const auto x = torch::rand({4, 8});
  const auto weight = torch::rand({8, 8}, torch::requires_grad());
  bool right = true;
  const auto expect = [&](const char* place, c10::ScalarType dtype) {
    const auto product = torch::mm(x, weight);
    std::cout << place << ": " << product.dtype() << '\n';
    right = right && product.scalar_type() == dtype;
  };

  expect("outside", torch::kFloat);
  {
    const amp::Autocast region(torch::kCPU, torch::kBFloat16);
    expect("in a region", torch::kBFloat16);
    right = right && amp::autocast_enabled(torch::kCPU) &&
            amp::autocast_dtype(torch::kCPU) == torch::kBFloat16;
    {
      const amp::Autocast inner(torch::kCPU, torch::kHalf);
      expect("in another dtype", torch::kHalf);
    }
    {
      const amp::Autocast off(torch::kCPU, {}, false);
      expect("in a region that is off", torch::kFloat);
    }
    {
      const amp::DisableCasts no_casts;  // on every device
      expect("without casts", torch::kFloat);
      right = right && !amp::autocast_enabled(torch::kCPU);
    }

    const auto state = amp::AutocastState::current();  // for a thread of your own
    std::thread thread([&] {
      expect("in a new thread", torch::kFloat);
      const auto scope = state.enter();
      expect("in a new thread that entered the region", torch::kBFloat16);
    });
    thread.join();

    // The region keeps its copy of a weight until the weight changes. Only writes through data(),
    // which the region cannot notice, need this call.
    const auto before = torch::mm(x, weight);
    weight.data().mul_(2);
    amp::clear_cast_cache();
    right = right && torch::mm(x, weight).equal(2 * before);
  }
  expect("after the region", torch::kFloat);
  return right ? 0 : 1;
} catch (const semitone::Error& error) {
  std::cerr << error.what() << '\n';
  return 1;
}

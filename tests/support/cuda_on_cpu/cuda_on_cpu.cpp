// Checked jumps refuse to go to another stack.
#undef _FORTIFY_SOURCE

#include "tests/support/cuda_on_cpu/cuda_runtime.h"

#include <ucontext.h>

#include <array>
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#elif defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

thread_local uint3 threadIdx;
thread_local uint3 blockIdx;
thread_local dim3 blockDim;
thread_local dim3 gridDim;

namespace cuda_on_cpu {
namespace {

constexpr std::size_t kStack = 256 * 1024;

// Two stacks that alternate. Sanitizers must be informed. Without them only the first switch to a
// stack is one of ucontext.h: those call the system, which takes most of the time of these tests.
class Context {
 public:
  void save_stack(const void* bottom, std::size_t size) {
    bottom_ = bottom;
    size_ = size;
  }
  const void* bottom() const { return bottom_; }
  std::size_t size() const { return size_; }
  ucontext_t* raw() { return &raw_; }
#if defined(__SANITIZE_THREAD__)
  void make_fiber() { fiber_ = __tsan_create_fiber(0); }
  void destroy_fiber() { __tsan_destroy_fiber(fiber_); }
#endif

  // Continues with the other stack; returns when a switch comes back here.
  void switch_to(Context& other) {
#if defined(__SANITIZE_ADDRESS__)
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, other.bottom_, other.size_);
    swapcontext(&raw_, &other.raw_);
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#elif defined(__SANITIZE_THREAD__)
    fiber_ = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(other.fiber_, 0);
    swapcontext(&raw_, &other.raw_);
#else
    runs_ = true;
    if (_setjmp(place_) != 0) return;
    if (other.runs_) _longjmp(other.place_, 1);
    setcontext(&other.raw_);
#endif
  }

 private:
  ucontext_t raw_{};
#if defined(__SANITIZE_THREAD__)
  void* fiber_ = nullptr;
#elif !defined(__SANITIZE_ADDRESS__)
  jmp_buf place_{};
  bool runs_ = false;
#endif
  const void* bottom_ = nullptr;
  std::size_t size_ = 0;
};

enum class State { waiting_to_start, running, at_barrier, at_exchange, done };

struct Fiber;

struct Thread {
  State state = State::waiting_to_start;
  uint3 index;
  std::size_t exchanges = 0;
  Fiber* fiber = nullptr;
};

// Runs one thread after the other to its end, until one has to wait: that one keeps the fiber.
struct Fiber {
#if defined(__SANITIZE_THREAD__)
  Fiber() { context.make_fiber(); }
  ~Fiber() { context.destroy_fiber(); }
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
#endif
  Context context;
  std::unique_ptr<char[]> stack = std::make_unique_for_overwrite<char[]>(kStack);
};

class Processor {
 public:
  void set_order(Order order) { order_ = order; }
  std::size_t launches() const { return launches_; }

  cudaError_t run(dim3 grid, dim3 block, const std::function<void()>& kernel) {
    const std::size_t threads = std::size_t{block.x} * block.y * block.z;
    if (threads == 0 || threads > 1024 || grid.x == 0 || grid.y == 0 || grid.z == 0 ||
        grid.x > 0x7FFFFFFFU || grid.y > 65535 || grid.z > 65535) {
      return cudaErrorInvalidConfiguration;
    }
    ++launches_;
    kernel_ = &kernel;
    gridDim = grid;
    blockDim = block;
    for (unsigned z = 0; z < grid.z; ++z) {
      for (unsigned y = 0; y < grid.y; ++y) {
        for (unsigned x = 0; x < grid.x; ++x) {
          blockIdx = {x, y, z};
          run_block(block);
        }
      }
    }
    return cudaSuccess;
  }

  // Called by threads.
  void wait(State state) {
    Thread* const self = current_;
    self->state = state;
    // Directly to the next one if it can continue: half as many switches.
    Thread* const next = next_running(*self);
    self->fiber->context.switch_to(next == nullptr ? scheduler_ : next->fiber->context);
    current_ = self;
    threadIdx = self->index;
  }
  std::size_t lane() const { return number_of(*current_) % kWarp; }

  const Exchanged& exchange(std::uint64_t value) {
    const std::size_t warp = number_of(*current_) / kWarp;
    // Two buffers alternate: a thread may give its next value before another one has read this one.
    Exchanged& exchanged = exchanged_[warp][current_->exchanges++ % 2];
    exchanged.values[lane()] = value;
    wait(State::at_exchange);
    return exchanged;
  }

 private:
  std::size_t number_of(const Thread& thread) const {
    return static_cast<std::size_t>(&thread - threads_.data());
  }

  void run_block(dim3 block) {
    threads_.assign(std::size_t{block.x} * block.y * block.z, Thread{});
    std::size_t number = 0;
    for (unsigned z = 0; z < block.z; ++z) {
      for (unsigned y = 0; y < block.y; ++y) {
        for (unsigned x = 0; x < block.x; ++x) threads_[number++].index = {x, y, z};
      }
    }
    const std::size_t warps = (threads_.size() + kWarp - 1) / kWarp;
    do {
      for (std::size_t i = 0; i < warps; ++i)
        run_warp(order_ == Order::forwards ? i : warps - 1 - i);
    } while (leave_barrier());
  }

  // Until all of its threads wait at a barrier, or are done.
  void run_warp(std::size_t warp) {
    const std::size_t begin = warp * kWarp;
    const std::size_t end = std::min(threads_.size(), begin + kWarp);
    for (;;) {
      begin_ = begin;
      end_ = end;
      for (std::size_t i = 0; i < end - begin; ++i) {
        Thread& thread = threads_[order_ == Order::forwards ? begin + i : end - 1 - i];
        if (thread.state == State::waiting_to_start) start_threads();
        if (thread.state == State::running) resume(thread);
      }
      const auto at = [&](State state) {
        return std::count_if(threads_.begin() + static_cast<std::ptrdiff_t>(begin),
                             threads_.begin() + static_cast<std::ptrdiff_t>(end),
                             [&](const Thread& thread) { return thread.state == state; });
      };
      if (at(State::at_exchange) == 0) return;
      if (at(State::at_exchange) != static_cast<std::ptrdiff_t>(kWarp))
        throw std::logic_error("only some threads of a warp came to an exchange");
      for (std::size_t i = begin; i < end; ++i) threads_[i].state = State::running;
    }
  }

  // Whether there was one.
  bool leave_barrier() {
    std::size_t waiting = 0;
    for (const Thread& thread : threads_) waiting += thread.state == State::at_barrier ? 1U : 0U;
    if (waiting == 0) return false;
    if (waiting != threads_.size())
      throw std::logic_error("only some threads of a block came to a barrier");
    for (Thread& thread : threads_) thread.state = State::running;
    return true;
  }

  void start_threads() {
    if (idle_.empty()) make_fiber();
    Fiber* const fiber = idle_.back();
    idle_.pop_back();
    active_ = fiber;
    scheduler_.switch_to(fiber->context);
    release_finished();
  }

  void resume(Thread& thread) {
    active_ = thread.fiber;
    scheduler_.switch_to(thread.fiber->context);
    release_finished();
  }

  void release_finished() {
    if (finished_ == nullptr) return;
    idle_.push_back(finished_);
    finished_ = nullptr;
  }

  // Behind this one in its warp.
  Thread* next_running(const Thread& thread) {
    const std::size_t number = number_of(thread);
    const bool forwards = order_ == Order::forwards;
    const std::size_t behind = forwards ? end_ - 1 - number : number - begin_;
    for (std::size_t i = 1; i <= behind; ++i) {
      Thread& other = threads_[forwards ? number + i : number - i];
      if (other.state == State::running) return &other;
      if (other.state == State::waiting_to_start) return nullptr;
    }
    return nullptr;
  }

  Thread* next_to_start() {
    for (std::size_t i = 0; i < end_ - begin_; ++i) {
      Thread& thread = threads_[order_ == Order::forwards ? begin_ + i : end_ - 1 - i];
      if (thread.state == State::waiting_to_start) return &thread;
    }
    return nullptr;
  }

  void make_fiber() {
    fibers_.push_back(std::make_unique<Fiber>());
    Fiber& fiber = *fibers_.back();
    getcontext(fiber.context.raw());
    fiber.context.raw()->uc_stack.ss_sp = fiber.stack.get();
    fiber.context.raw()->uc_stack.ss_size = kStack;
    fiber.context.save_stack(fiber.stack.get(), kStack);
    makecontext(fiber.context.raw(), &Processor::fiber_main, 0);
    idle_.push_back(&fiber);
  }

  static void fiber_main();
  void run_fiber() {
    Fiber* const self = active_;
#if defined(__SANITIZE_ADDRESS__)
    const void* bottom = nullptr;
    std::size_t size = 0;
    __sanitizer_finish_switch_fiber(nullptr, &bottom, &size);
    scheduler_.save_stack(bottom, size);
#endif
    for (;;) {
      while (Thread* const thread = next_to_start()) {
        current_ = thread;
        thread->fiber = self;
        thread->state = State::running;
        threadIdx = thread->index;
        (*kernel_)();
        current_->state = State::done;
      }
      finished_ = self;
      self->context.switch_to(scheduler_);
    }
  }

  Order order_ = Order::forwards;
  std::size_t launches_ = 0;
  const std::function<void()>* kernel_ = nullptr;
  std::vector<Thread> threads_;
  std::size_t begin_ = 0;  // of the warp that runs
  std::size_t end_ = 0;
  Thread* current_ = nullptr;
  Fiber* active_ = nullptr;    // that is switched to
  Fiber* finished_ = nullptr;  // that has nothing more to do
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> idle_;
  Context scheduler_;
  std::array<std::array<Exchanged, 2>, 1024 / kWarp> exchanged_{};
};

Processor& processor() {
  static thread_local Processor instance;
  return instance;
}

void Processor::fiber_main() {
  processor().run_fiber();
}

}  // namespace

void set_order(Order order) {
  processor().set_order(order);
}

std::size_t launches() {
  return processor().launches();
}

namespace {
struct AroundKernels {
  void (*before)() = [] {};
  void (*after)() = [] {};
} around_kernels;
}  // namespace

void set_around_kernels(void (*before)(), void (*after)()) {
  around_kernels = {before, after};
}

cudaError_t run(dim3 grid, dim3 block, const std::function<void()>& kernel) {
  around_kernels.before();
  const cudaError_t result = processor().run(grid, block, kernel);
  around_kernels.after();
  return result;
}

const Exchanged& exchange(std::uint64_t value) {
  return processor().exchange(value);
}

std::size_t lane() {
  return processor().lane();
}

void check_alignment(const void* address, std::size_t bytes) {
  if (reinterpret_cast<std::uintptr_t>(address) % bytes == 0) return;
  // An exception cannot leave a fiber.
  std::fprintf(stderr, "expected an address that is a multiple of %zu, got %p\n", bytes, address);
  std::abort();
}

}  // namespace cuda_on_cpu

void __syncthreads() {
  cuda_on_cpu::processor().wait(cuda_on_cpu::State::at_barrier);
}

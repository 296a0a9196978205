#include "src/core/thread_state.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <utility>
#include <vector>

namespace semitone {
namespace {

using Chain = std::shared_ptr<c10::ThreadLocalDebugInfo>;

// Removes the states of profilers, and of meters in their place, from the top of the chain while this
// object exists.
class ProfilerAside {
 public:
  ProfilerAside() {
    try {
      while (c10::ThreadLocalDebugInfo::get(kind()) != nullptr)
        states_.push_back(c10::ThreadLocalDebugInfo::_pop(kind()));
    } catch (const c10::Error&) {
      // Another state is above it, which LibTorch's profiler would find too.
    }
  }
  ~ProfilerAside() {
    for (auto state = states_.rbegin(); state != states_.rend(); ++state)
      c10::ThreadLocalDebugInfo::_push(kind(), std::move(*state));
  }
  ProfilerAside(const ProfilerAside&) = delete;
  ProfilerAside& operator=(const ProfilerAside&) = delete;

 private:
  static c10::DebugInfoKind kind() { return c10::DebugInfoKind::PROFILER_STATE; }

  std::vector<std::shared_ptr<c10::DebugInfoBase>> states_;
};

}  // namespace

// A guard's entry in its thread's list. It belongs to the guard and, once the guard has ended on
// another thread, to the list.
struct ThreadStateGuard::Link {
  c10::DebugInfoKind kind{};
  Make make;
  Chain before;
  Chain own;
  Link* outer = nullptr;
  std::atomic<bool> abandoned{false};

  static Link*& innermost() {
    // Not an object with a destructor: guards may end after the thread's objects.
    static thread_local Link* link = nullptr;
    return link;
  }

  void push() {
    before = c10::ThreadLocalDebugInfo::current();
    c10::ThreadLocalDebugInfo::_push(kind, make(c10::ThreadLocalDebugInfo::get(kind)));
    own = c10::ThreadLocalDebugInfo::current();
  }

  // Removes a link from this thread's list, and its object from the chain. False if it belongs to
  // another thread.
  static bool remove(Link* link) {
    std::vector<Link*> inner;
    Link* next = innermost();
    for (; next != nullptr && next != link; next = next->outer) inner.push_back(next);
    if (next == nullptr) return false;
    const ProfilerAside aside;
    // The guard was constructed under another chain, for example that of a thread pool.
    const bool in_force = c10::ThreadLocalDebugInfo::current() == innermost()->own;
    if (inner.empty()) {
      innermost() = link->outer;
      if (in_force) c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(link->before);
      return true;
    }
    inner.back()->outer = link->outer;
    if (in_force) {
      c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(link->before);
      for (auto above = inner.rbegin(); above != inner.rend(); ++above) (*above)->push();
    }
    return true;
  }

  static void remove_abandoned() {
    while (innermost() != nullptr && innermost()->abandoned) {
      const std::unique_ptr<Link> link(innermost());
      remove(link.get());
    }
  }
};

ThreadStateGuard::ThreadStateGuard(c10::DebugInfoKind kind, Make make) {
  Link::remove_abandoned();
  auto link = std::make_unique<Link>();
  link->kind = kind;
  link->make = std::move(make);
  link->outer = Link::innermost();
  const ProfilerAside aside;
  link->push();
  link_ = link.release();
  Link::innermost() = link_;
}

ThreadStateGuard::~ThreadStateGuard() {
  end();
}

ThreadStateGuard::End ThreadStateGuard::end() {
  if (link_ == nullptr) return End::in_order;
  Link* const link = std::exchange(link_, nullptr);
  const bool in_order = Link::innermost() == link;
  if (!Link::remove(link)) {
    link->abandoned = true;
    return End::elsewhere;
  }
  delete link;
  return in_order ? End::in_order : End::out_of_order;
}

}  // namespace semitone

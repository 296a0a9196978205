#pragma once

#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <unordered_map>

namespace semitone::report {

// The memory that the forward pass took, as far as it is in use when the backward pass begins. It
// keeps no memory in use.
class ForwardMemory {
 public:
  // Memory that an operator of the forward pass made. The same memory counts once.
  void add(const c10::Storage& storage);

  // The backward pass begins, or goes on after a part of a forward pass.
  void backward_began();

  // The largest number of bytes at the beginning of a backward pass.
  std::int64_t bytes() const { return bytes_; }

 private:
  std::unordered_map<const c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>> made_;
  bool has_news_ = false;
  std::int64_t bytes_ = 0;
};

}  // namespace semitone::report

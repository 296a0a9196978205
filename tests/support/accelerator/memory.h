#pragma once

#include "tests/support/accelerator/timeline.h"

#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace semitone::test::accelerator {

// Bytes that work reads or writes.
struct Access {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
  bool is_write = false;
  Moment moment;
  std::string work;
};

// What one allocation holds.
struct Block {
  std::size_t bytes = 0;
  c10::Stream stream;                 // the current stream of the allocation
  std::vector<c10::Stream> recorded;  // by record_stream
  std::vector<Access> accesses;       // those with which a later one can conflict
};

// The memory of all devices. An address is never used twice, so that a stale one is noticed.
class Memory {
 public:
  Memory();

  // New memory, filled with bytes 0xFF. The address is one of which the host must not use.
  void* allocate(std::size_t bytes, c10::Stream stream);
  void free(void* data);

  // The block with this address, or none if it was freed.
  Block* find(const void* data);
  // Where kernels find what the device has at an address.
  void* shadow(const void* data) const;
  bool owns(const void* data) const;

  // Whether kernels that run on the host may use all addresses, as a device's do.
  void let_kernels_in(bool in);

 private:
  char* addresses_ = nullptr;  // without access
  char* shadow_ = nullptr;
  std::size_t used_ = 0;
  std::map<std::uintptr_t, Block> blocks_;
};

}  // namespace semitone::test::accelerator

#pragma once

#include "src/kernels/cuda/launch.cuh"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>

// One launch for many tensors: the kernel's arguments contain the data of each tensor, in constant
// memory. Each block of threads processes kCudaBlockElements of one tensor.
namespace semitone::kernels {

constexpr unsigned kMostItems = 64;

// The items of a table. The rest of a kernel's arguments has 64 bytes. Optimizer steps have some 28.
template <typename Item>
constexpr unsigned kItems =
    std::min<std::size_t>(kMostItems, (kMostArgumentBytes - 64 - 4 * sizeof(unsigned)) /
                                          (sizeof(Item) + sizeof(unsigned)));

template <typename Item>
struct Table {
  unsigned count;
  unsigned first_block[kItems<Item> + 1];  // of each item, and behind the last one
  Item items[kItems<Item>];
};

// The work of a block: elements [begin, end) of an item.
struct BlockRange {
  unsigned item;
  std::size_t begin;
  std::size_t end;
};

// Item must have a `size()`, the number of its elements.
template <typename Item>
__device__ BlockRange range_of_block(const Table<Item>& table) {
  // The last item that begins at this block or before it. An empty item begins where the next does.
  unsigned item = 0;
  unsigned end = table.count;
  while (end - item > 1) {
    const unsigned middle = (item + end) / 2;
    if (blockIdx.x >= table.first_block[middle]) {
      item = middle;
    } else {
      end = middle;
    }
  }
  const std::size_t begin = (blockIdx.x - table.first_block[item]) * kCudaBlockElements;
  const std::size_t rest = table.items[item].size() - begin;
  return {item, begin, begin + (rest < kCudaBlockElements ? rest : kCudaBlockElements)};
}

// Calls run(table, number of its first item, number of its first block) for tables that together
// hold item_at(i), i < count, in their order.
template <typename Item, typename ItemAt, typename Run>
void for_tables(std::size_t count, const ItemAt& item_at, const Run& run) {
  std::size_t blocks_before = 0;
  for (std::size_t first = 0; first < count; first += kItems<Item>) {
    Table<Item> table{};
    table.count = static_cast<unsigned>(std::min<std::size_t>(kItems<Item>, count - first));
    std::size_t blocks = 0;
    for (unsigned i = 0; i < table.count; ++i) {
      table.items[i] = item_at(first + i);
      table.first_block[i] = narrow_grid(blocks);
      blocks += cuda_blocks(table.items[i].size());
    }
    table.first_block[table.count] = narrow_grid(blocks);
    run(table, first, blocks_before);
    blocks_before += blocks;
  }
}

// Blocks of a table, and none if all tensors are empty.
template <typename Item>
unsigned blocks_of(const Table<Item>& table) {
  return table.first_block[table.count];
}

}  // namespace semitone::kernels

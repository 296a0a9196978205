#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

// The cases of kernels_bench: every kernel that training uses, and LibTorch's implementation of
// each.
namespace semitone::bench {

using Work = std::function<void()>;

// A tensor that a call has to move: read or written once.
struct Moved {
  std::string name;  // "2p": p is read and written
  double bytes;
};

// One line of the table.
struct Row {
  std::string pass = {};          // "forward", "backward"; empty where there is one only
  std::vector<Moved> moved = {};  // what counts, for kernels that wait for memory
  double operations = 0;          // for products: additions and multiplications
  Work work;
  Work libtorchs = {};  // empty where `work` is LibTorch's operator, or LibTorch has none

  bool is_product() const { return moved.empty(); }
};

// A kernel with its data, which are created just before the measurement and live as long as the
// rows.
struct Case {
  std::string kernel;
  c10::ScalarType dtype;
  std::string shape;
  // Creates the data, checks the results (Error otherwise), and returns the functions to time.
  std::function<std::vector<Row>()> make;
};

// The sizes of the data.
struct Sizes {
  std::int64_t tensors;   // of the optimizer's parameters
  std::int64_t elements;  // of each of them
  std::int64_t rows;      // of a matrix of 1,024 columns
  std::int64_t tokens;    // of logits
  std::int64_t images;
  std::int64_t matrix;             // edge of the smaller matrices of products
  std::vector<std::int64_t> peak;  // edges of the squares of which the fastest product is the peak
  std::int64_t stream;             // elements of each of its two arrays
  c10::Device device = c10::DeviceType::CPU;

  static Sizes full() {
    return {6, 4 * 1024 * 1024, 8192, 1024, 16, 1024, {512, 1024, 2048}, 32 * 1024 * 1024};
  }
  // A GPU's: the data of a call is several times its cache.
  static Sizes of_gpu(c10::Device device) {
    return {12, 8 * 1024 * 1024, 65536, 8192, 64, 1024, {4096, 8192}, 256 * 1024 * 1024, device};
  }
  // Small sizes, to check everything in seconds; the figures mean nothing.
  static Sizes small() { return {2, 65536 + 3, 64, 16, 2, 128, {128, 256}, 1024 * 1024}; }
};

void add_attention(std::vector<Case>& cases, const Sizes& sizes);
void add_casts(std::vector<Case>& cases, const Sizes& sizes);
void add_gradients_and_steps(std::vector<Case>& cases, const Sizes& sizes);
void add_layerwise_steps(std::vector<Case>& cases, const Sizes& sizes);
void add_norms(std::vector<Case>& cases, const Sizes& sizes);
void add_pointwise(std::vector<Case>& cases, const Sizes& sizes);
void add_losses(std::vector<Case>& cases, const Sizes& sizes);
void add_products(std::vector<Case>& cases, const Sizes& sizes);

// "16x64x56x56".
std::string name_of_shape(const std::vector<std::int64_t>& shape);

}  // namespace semitone::bench
